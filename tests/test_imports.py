"""Who may import whom, and what starting a command may cost."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import echelon

_PACKAGE = Path(echelon.__file__).parent
_HEAVY = ("torch", "grpc", "uvloop", "asyncio", "rich")
_ROOMS = ("host", "store", "recorder", "dist", "launcher", "analysis", "tokens", "train", "planner")

# room -> modules of echelon that it may import besides its own and echelon.errors
_ALLOWED = {
    "host": ("echelon.host",),
    "store": ("echelon.store", "echelon.host", "echelon.recorder.span"),  # waits are recorded
    "recorder": ("echelon.recorder", "echelon.host"),
    "dist": ("echelon.dist", "echelon.store", "echelon.recorder", "echelon.host"),
    "launcher": (
        "echelon.launcher",
        "echelon.store",
        "echelon.recorder",
        "echelon.analysis",
        "echelon.host",
    ),
    "analysis": ("echelon.analysis", "echelon.recorder.format", "echelon.recorder.read"),
    "tokens": ("echelon.tokens", "echelon.recorder"),
    "planner": ("echelon.planner", "echelon.dist"),
    "train": ("echelon.train", "echelon.dist", "echelon.recorder", "echelon.tokens"),
}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _is_below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


@pytest.mark.parametrize("room", _ROOMS)
def test_rooms_import_only_what_the_architecture_allows(room):
    files = list((_PACKAGE / room).rglob("*.py"))
    assert files
    allowed = (*_ALLOWED[room], "echelon.errors", "echelon.__version__")
    for path in files:
        for name in _imports(path):
            if not _is_below(name, "echelon") or name == "echelon":
                continue
            parts_of_allowed = any(_is_below(module, name) for module in allowed)
            assert parts_of_allowed or any(_is_below(name, module) for module in allowed), (
                f"{path.relative_to(_PACKAGE)} imports {name}"
            )


# folder of the store -> folders of the store that it may import besides itself
_STORE_FOLDERS = {
    "wire": (),
    "state": (),
    "server": ("wire", "state"),
    "client": ("wire", "server"),
}


@pytest.mark.parametrize("folder", _STORE_FOLDERS)
def test_the_stores_folders_import_only_those_below(folder):
    files = list((_PACKAGE / "store" / folder).glob("*.py"))
    assert len(files) > 1
    refused = set(_STORE_FOLDERS) - {folder, *_STORE_FOLDERS[folder]}
    for path in files:
        above = [
            name
            for name in _imports(path)
            if any(_is_below(name, f"echelon.store.{other}") for other in refused)
        ]
        assert not above, f"{path.relative_to(_PACKAGE)} imports {above}"


@pytest.mark.parametrize("room", [room for room in _ROOMS if room not in ("dist", "train")])
def test_only_dist_and_train_import_torch(room):
    for path in (_PACKAGE / room).rglob("*.py"):
        assert not any(_is_below(name, "torch") for name in _imports(path)), path


def test_nothing_loads_dtensors_only_to_recognize_them():
    """Loading them takes a rank's start more than a second of processor time."""
    for path in _PACKAGE.rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not line.startswith(
                ("from torch.distributed.tensor", "import torch.distributed.tensor")
            ), path


def _loaded_after(code: str) -> set[str]:
    probe = f"import sys, json\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
    probe += f"print(json.dumps([m for m in {_HEAVY!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=600
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import echelon",
        "import echelon.dist",
        "import echelon.recorder",
        "import echelon.store",
        "import echelon.tokens",
        "import echelon.train.schedules",
        "import echelon.train.figures",
        "from echelon.cli import main; main(['run', '--help'])",
        "from echelon.cli import main; main(['--version'])",
        "from echelon.cli import main; main(['plan', '--help'])",
        "import echelon.planner.planner, echelon.dist.pipeline.simulation.simulator",
        "from echelon.analysis.cli import main; main(['--help'])",
    ],
)
def test_starting_loads_nothing_heavy(code):
    assert _loaded_after(code) == set()


def _rooms_after(code: str) -> list[str]:
    probe = "import sys, importlib; " + code
    probe += f"; print([r for r in {_ROOMS!r} if 'echelon.' + r in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=600
    )
    return list(ast.literal_eval(done.stdout))


def test_a_room_is_loaded_by_its_first_use():
    assert _rooms_after("import echelon") == []
    assert _rooms_after("import echelon; echelon.store.TCPStore") == ["host", "store"]
    assert "dist" in _rooms_after("import echelon; echelon.dist.init")
    assert set(_ROOMS) - {"host"} <= set(dir(echelon))
    with pytest.raises(AttributeError, match="no attribute 'kitchen'"):
        echelon.kitchen  # noqa: B018


@pytest.mark.parametrize(
    "command", [["-m", "echelon", "--version"], ["-m", "echelon.analysis", "--version"]]
)
def test_every_command_tells_its_version(command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip().endswith(echelon.__version__)


def test_an_unknown_command_is_one_line_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "lunch"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")


def test_no_public_name_hides_a_module():
    hidden = []
    for path in _PACKAGE.rglob("__init__.py"):
        package = ".".join(("echelon", *path.parent.relative_to(_PACKAGE).parts))
        modules = {one.stem for one in path.parent.glob("*.py")}
        modules |= {one.parent.name for one in path.parent.glob("*/__init__.py")}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                names = {one.asname or one.name for one in node.names}
                hidden += [f"{package}.{name}" for name in sorted(names & modules)]
    assert hidden == []
