# make train: the main job, from nothing.   make test: every test that needs no special hardware.
# make demo-kill: train, lose a rank, and compare the bits.   All make the environment first if it is
# missing; `make setup` does only that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2
WORKERS ?= 4
ARGS ?=
EXTRAS ?= torch,dev

.PHONY: setup train demo-kill test check style types texts docs docs-serve bench-docs pictures check-native wheels test-pythons clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@rm -rf echelon.egg-info # a stale one, found first here, would hide the entry points
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@# pip would compile on one core. Some files of torch are for newer versions of Python.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@ $(if $(findstring xccl,$(EXTRAS)),$@-xccl)

train: setup
	$(BIN)/echelon run --nproc-per-node $(NPROC) examples/train_gpt.py $(ARGS)

# Trains twice, the second time with a rank that is killed in the middle, and compares the bits.
demo-kill: setup
	$(BIN)/echelon run --nproc-per-node 4 --on-loss shrink examples/resilient.py --hash-file build/demo/undisturbed
	$(BIN)/echelon run --nproc-per-node 4 --on-loss shrink examples/resilient.py --hash-file build/demo/killed --kill 2
	@echo "undisturbed  $$(cat build/demo/undisturbed)"
	@echo "killed       $$(cat build/demo/killed)"
	@cmp build/demo/undisturbed build/demo/killed && echo "the same bits"

# oneCCL is large, so only the tests fetch it, and only where there is a wheel of it.
$(VENV)/.ready-xccl: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[xccl]'
	@touch $@

# Most tests wait for processes, so four files at a time (WORKERS) keep two cores busy; the tests of a
# file stay in order.
# They start thousands of interpreters. Where PYTHONDONTWRITEBYTECODE is set, each would compile the
# package again, which is almost half of the processor time of a start without torch.
test: setup $(VENV)/.ready-xccl
	$(BIN)/python -m compileall -q echelon tests examples benchmarks
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not gpu and not slow' $(ARGS)

check: style types texts

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

texts: setup
	$(BIN)/python tools/english.py
	$(BIN)/python -m tools.docs.check

# The site's packages, apart from those of the tests: CI needs none of them.
$(VENV)/.ready-docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The documentation as a site in build/site. A warning is an error, and so is a resource from elsewhere.
docs: $(VENV)/.ready-docs
	$(BIN)/python -m tools.docs.check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m tools.docs.offline build/site

docs-serve: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# The tables of docs/benchmarks, from the kept results in benchmarks/results.
bench-docs: setup
	$(BIN)/python -m tools.docs.bench

# The pictures of a verdict in README and docs, from the incident that the repository keeps.
pictures: setup
	$(BIN)/python -m tools.docs.pictures

# The C core under ThreadSanitizer, and on ARM64 under qemu. Needs a C compiler; not part of CI.
check-native:
	tests/native/check.sh

# An sdist, one wheel per CPython found and a pure one, in dist/; then each is tried without torch.
wheels: setup
	$(BIN)/python tools/wheels.py build
	$(BIN)/python tools/wheels.py try

# The tests that need no torch, on each CPython found. Not part of CI: the installs take minutes.
test-pythons: setup
	$(BIN)/python tools/wheels.py try-pythons

clean:
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .ruff_cache
