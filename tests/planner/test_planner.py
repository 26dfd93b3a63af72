"""`plan` and `echelon plan`: what fits, what ties, and what bad input gets."""

from __future__ import annotations

import dataclasses
import json

import pytest

from echelon.cli import main
from echelon.planner.layout import Job
from echelon.planner.machine import FORMAT, Figure, Link, assumed, read_machine, with_peak
from echelon.planner.model import Model, read_model
from echelon.planner.planner import plan

MODEL = Model(layers=8, width=512, heads=8, vocabulary=8192, context=512)
JOB = Job(ranks=4, ranks_per_node=4, batch=16, context=512, compute_bytes=2)
MACHINE = assumed(is_half=True)
GIB = 1 << 30


def test_what_fits_is_ordered_and_its_shares_are_whole():
    found = plan(MODEL, JOB, MACHINE, 8 * GIB)
    times = [one.step_s[1] for one in found.candidates]
    assert times == sorted(times)
    assert sum(one.wins for one in found.candidates) == pytest.approx(1.0)
    for one in found.candidates:
        low, likely, high = one.step_s
        assert low < likely < high
        assert one.memory.total <= 8 * GIB * 0.9
    meshes = [(one.layout.pp, one.layout.data, one.layout.tp) for one in found.candidates]
    assert {(1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 1, 4)} <= set(meshes)
    assert not found.candidates[0].is_tie


def test_the_same_question_has_the_same_answer():
    assert plan(MODEL, JOB, MACHINE, 8 * GIB) == plan(MODEL, JOB, MACHINE, 8 * GIB)


def test_less_memory_leaves_less_and_the_smallest_is_named():
    roomy = plan(MODEL, JOB, MACHINE, 8 * GIB)
    tight = plan(MODEL, JOB, MACHINE, 0.35 * GIB)
    assert 0 < tight.num_fitting < roomy.num_fitting == roomy.num_layouts
    assert roomy.smallest is None
    nothing = plan(MODEL, JOB, MACHINE, 0.01 * GIB)
    assert nothing.candidates == ()
    assert nothing.smallest is not None


def test_schedules_that_differ_by_nothing_measurable_are_ties():
    found = plan(MODEL, JOB, MACHINE, 8 * GIB)
    first, second = found.candidates[:2]
    assert second.step_s[1] < first.step_s[1] * 1.05
    assert second.is_tie


def test_a_layout_that_is_far_slower_is_not_a_tie():
    slow = (Link(4, False, Figure.about(1e-4, 2.0), Figure.about(1e9, 2.0)),)
    found = plan(MODEL, JOB, dataclasses.replace(MACHINE, links=slow), 8 * GIB)
    first = found.candidates[0]
    slow = [one for one in found.candidates if one.step_s[1] > 2 * first.step_s[1]]
    assert slow
    assert not any(one.is_tie or one.wins for one in slow)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="512 positions"):
        plan(MODEL, Job(ranks=4, ranks_per_node=4, batch=4, context=1024), MACHINE, GIB)
    with pytest.raises(ValueError, match="no layout of 7 ranks"):
        plan(MODEL, Job(ranks=7, ranks_per_node=7, batch=4, context=64), MACHINE, GIB)


# ---- models ----


def test_a_config_of_hugging_face_is_read(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
             "num_key_value_heads": 2, "intermediate_size": 160, "max_position_embeddings": 256,
             "head_dim": None, "tie_word_embeddings": True}
        )
    )  # fmt: skip
    expected = Model(
        layers=2, width=64, heads=4, kv_heads=2, hidden=160, vocabulary=99, context=256,
        is_gated=True, is_tied=True, learns_positions=False,
    )  # fmt: skip
    assert read_model(str(tmp_path)) == read_model(str(tmp_path / "config.json")) == expected
    (tmp_path / "config.json").write_text(
        '{"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 9}'
    )
    small = Model(layers=2, width=64, heads=4, vocabulary=9, context=32, is_tied=True)
    assert read_model(str(tmp_path)) == small


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpt5", "unknown model 'gpt5'"),
        ("layers=2,width=64", "missing model settings: heads"),
        ("layers=2,width=64,heads=4,depth=1", "unknown model setting 'depth'"),
        ("layers=2,width=x,heads=4", "width must be an integer"),
        ("layers=2,width=65,heads=4", "cannot be divided evenly"),
        ("layers=0,width=64,heads=4", "layers must be an integer >= 1, got 0"),
        ("layers=2,width=64,heads=4,kv_heads=3", "heads must be a multiple of kv_heads"),
        ("layers=2,width=64,heads=4,is_tied=maybe", "true or false"),
    ],
)
def test_models_that_cannot_be_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        read_model(text)


@pytest.mark.parametrize("content", ["[]", "{}", "nonsense", '{"n_embd": 64}'])
def test_a_file_that_is_no_models_config_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="not a model's config"):
        read_model(str(path))


# ---- machines ----

FIGURE = {"likely": 2.0, "low": 1.0, "high": 3.0}
LINK = {"size": 2, "is_across": False, "latency_s": FIGURE, "bytes_per_s": FIGURE}


def test_measured_links_replace_what_was_assumed(tmp_path):
    path = tmp_path / "links.json"
    path.write_text(
        json.dumps({"echelon_links": FORMAT, "links": [LINK], "overlap": FIGURE | {"high": 2.0}})
    )
    found = read_machine(path, MACHINE)
    assert [link.size for link in found.links] == [2]
    assert found.overlap.high == 2.0
    assert found.flops_per_s == MACHINE.flops_per_s
    assert found.origins["links"] == f"measured: {path}"
    assert "H100" in found.origins["processors"]
    assert with_peak(found, 2.0).flops_per_s.likely == 0.9e12


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"echelon_links": 99}', '{"echelon_links": 1, "links": []}',
        json.dumps({"echelon_links": 1, "links": [LINK | {"size": 0}]}),
        json.dumps({"echelon_links": 1, "links": [LINK | {"latency_s": 3}]}),
        json.dumps({"echelon_links": 1, "links": [LINK | {"bytes_per_s": FIGURE | {"low": 0}}]}),
        json.dumps({"echelon_links": 1, "links": [LINK | {"bytes_per_s": FIGURE | {"low": 9}}]}),
    ],
)  # fmt: skip
def test_a_file_that_describes_no_links_is_refused(tmp_path, content):
    path = tmp_path / "links.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not a file of measured links"):
        read_machine(path, MACHINE)


# ---- the command ----

COMMAND = ["plan", "--model", "gpt2", "--ranks", "4", "--memory", "16"]


def test_the_command_says_what_fits_and_how_sure_it_is(capsys):
    assert main([*COMMAND, "--batch", "16", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "layouts fit" in text
    assert "how sure" in text
    assert "memory, GiB: weights" in text
    assert "assumed" in text


def test_the_command_says_how_sure_it_is_of_memory(capsys):
    assert main([*COMMAND, "--batch", "16"]) == 0
    on_device = capsys.readouterr().out
    assert "memory: of tensors; what the allocator loses was not measured" in on_device
    assert ", heap" not in on_device
    assert main([*COMMAND, "--batch", "16", "--device", "cpu"]) == 0
    on_host = capsys.readouterr().out
    assert "memory: within 10% of the jobs measured" in on_host
    assert ", heap" in on_host


def test_the_commands_json_has_every_figure(capsys):
    assert main([*COMMAND, "--batch", "16", "--json", "--peak-tflops", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["candidates"][0]
    parts = dict(first["memory_bytes"])
    assert parts.pop("total") == pytest.approx(sum(parts.values()))
    assert first["step_s"]["low"] < first["step_s"]["likely"] < first["step_s"]["high"]
    assert found["origins"]["processors"].startswith("stated")


def test_where_nothing_fits_the_smallest_is_shown(capsys):
    assert main(["plan", "--model", "llama-8b", "--ranks", "2", "--memory", "8"]) == 1
    text = capsys.readouterr().out
    assert "0 of" in text
    assert "the smallest is" in text


@pytest.mark.parametrize(
    "more",
    [
        ["--ranks", "0"], ["--memory", "0"], ["--memory", "nan"], ["--batch", "-1"],
        ["--ranks-per-node", "3"], ["--links", "/nowhere"], ["--peak-tflops", "0"],
        ["--model", "nothing"], ["--device", "tpu"], ["--context", "99999"],
    ],
)  # fmt: skip
def test_bad_usage_is_exit_code_2(more, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, *more])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
