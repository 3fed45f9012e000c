"""Run directories, one writer at a time, the record of calls; settings as JSON."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.experiments import provenance
from sidestream.experiments.provenance import open_run, record_call, write_whole
from sidestream.experiments.settings import first_difference, from_json, to_json
from sidestream.papers.lsar import recall

SMOKE = recall.table1("smoke")


@pytest.fixture(autouse=True)
def clean_commit(monkeypatch):
    """A clean checkout at a fixed commit, whatever the tree of the one who runs the tests looks like."""
    monkeypatch.setattr(provenance, "_git_state", lambda folder: ("a" * 40, False))


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_json_gives_back_an_equal_experiment(scale):
    experiment = recall.table1(scale)
    record = json.loads(json.dumps(to_json(experiment)))
    assert from_json(recall.Recall, record) == experiment
    record["stage3"]["steps"] += 1
    assert from_json(recall.Recall, record) != experiment


def test_every_field_survives():
    """Not the defaults: a field that came back as its default would go unnoticed otherwise."""
    changed = dataclasses.replace(
        SMOKE,
        seed=7,
        arms=("static",),
        horizons=(5,),
        haystack="book.txt",
        vocabulary="bpe",
        stage2=dataclasses.replace(SMOKE.stage2, learning_rate=1e-05, clip=2.5, precision="bf16", warmup=0.0),
    )
    assert from_json(recall.Recall, json.loads(json.dumps(to_json(changed)))) == changed


def set_field(record: dict, dotted: str, value: object) -> None:
    *parents, name = dotted.split(".")
    for parent in parents:
        record = record[parent]
    record[name] = value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("windw", 3, "unknown field windw"),
        ("stage3.stps", 3, "unknown field stage3.stps"),
        ("window", "48", "window is '48'; it must be of type int"),
        ("window", 48.0, "window is 48.0; it must be of type int"),
        ("window", True, "window is True; it must be of type int"),
        ("stage1.learning_rate", "fast", "stage1.learning_rate is 'fast'; it must be of type float"),
        ("stage1.gradient_checkpointing", 1, "stage1.gradient_checkpointing is 1; it must be of type bool"),
        ("haystack", 5, "haystack is 5; it must be of type str"),
        ("arms", "static", "arms is 'static'; it must be a list"),
        ("horizons", [12, "x"], "horizons is 'x'; it must be of type int"),
        ("vocabulary", "words", "vocabulary is 'words'; use one of bpe, subset"),
        ("encoder", 4, "encoder must be an object, got 4"),
        ("stage2.steps", 0, "stage2.steps is 0; it must be at least 1"),
        ("encoder.layers", 0, "encoder.layers is 0; it must be at least 1"),
    ],
)
def test_one_wrong_field_is_named(field, value, message):
    record = to_json(SMOKE)
    set_field(record, field, value)
    with pytest.raises(ValueError) as error:
        from_json(recall.Recall, record)
    assert str(error.value) == message


def test_missing_field_and_wrong_kind_are_named():
    record = to_json(SMOKE)
    del record["stage1"]["steps"]
    with pytest.raises(ValueError, match=r"^field stage1\.steps is missing$"):
        from_json(recall.Recall, record)
    with pytest.raises(ValueError, match="the experiment must be an object"):
        from_json(recall.Recall, [1])


def test_whole_numbers_serve_as_fractions():
    record = to_json(SMOKE)
    record["stage1"]["clip"] = 2
    clip = from_json(recall.Recall, record).stage1.clip
    assert clip == 2.0 and type(clip) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ()}, "arms is"),
        ({"arms": ("static", "static")}, "each once"),
        ({"arms": ("nope",)}, "unknown 'nope'"),
        ({"horizons": ()}, "horizons is"),
        ({"horizons": (12, 12)}, "each once"),
        ({"seed": -1}, "seed is -1"),
        ({"window": 0}, "window is 0"),
        ({"goal_width": 0}, "goal_width is 0"),
        ({"test_problems": 0}, "test_problems is 0"),
        ({"train_problems": 7}, "train_problems is 7; one batch alone takes 8"),
        ({"stage2": dataclasses.replace(SMOKE.stage2, batch_size=1)}, "stage2.batch_size is 1"),
        ({"stage2": dataclasses.replace(SMOKE.stage2, gradient_checkpointing=True)}, "no blocks to recompute"),
    ],
)
def test_settings_that_would_fail_half_way_are_refused_at_once(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMOKE, **change)


def test_first_difference():
    mine = {"a": 1, "b": {"c": [1, 2], "d": 3}, "e": 4}
    assert first_difference(mine, json.loads(json.dumps(mine))) is None
    assert first_difference(mine, {**mine, "b": {"c": [1, 3], "d": 3}}) == "b.c is [1, 3] there and [1, 2] here"
    assert first_difference(mine, {"a": 1, "b": mine["b"]}) == "e is None there and 4 here"
    assert first_difference({"a": 1}, {"a": 1, "x": {"y": 2}}) == "x is {'y': 2} there and None here"
    assert first_difference({"a": {"b": 1}}, {"a": 5}) == "a is 5 there and {'b': 1} here"


# ---------------------------------------------------------------- the run directory


def test_new_run_is_written_and_resumed(tmp_path):
    directory = tmp_path / "deep" / "run"
    open_run(directory, SMOKE, resume=True)  # `--resume` from the start is no mistake
    record = json.loads((directory / "experiment.json").read_text(encoding="utf-8"))
    assert from_json(recall.Recall, record) == SMOKE
    open_run(directory, SMOKE, resume=True)
    with pytest.raises(ValueError, match="already holds this run; add --resume"):
        open_run(directory, SMOKE, resume=False)


def test_a_run_is_one_process_at_a_time(tmp_path):
    """Two would write over each other; the first one's end, here by a kill, frees it."""
    # Without torch, which takes seconds to import: any dataclass is an experiment.
    code = """
import dataclasses, pathlib, sys
from sidestream.experiments.provenance import open_run
open_run(pathlib.Path(sys.argv[1]), dataclasses.make_dataclass("Any", [("steps", int)])(4), resume=True)
print("open", flush=True)
input()
"""
    run = dataclasses.make_dataclass("Any", [("steps", int)])(4)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], **pipes) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ValueError, match="another process is at work in .*run; wait for it, or"):
            open_run(tmp_path / "run", run, resume=True)
        other.kill()
    open_run(tmp_path / "run", run, resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_another_run_is_not_touched(tmp_path, resume):
    open_run(tmp_path / "run", SMOKE, resume=False)
    before = (tmp_path / "run" / "experiment.json").read_bytes()
    other = dataclasses.replace(SMOKE, stage3=dataclasses.replace(SMOKE.stage3, steps=9))
    with pytest.raises(ValueError, match=r"holds another run: stage3\.steps is 4 there and 9 here; choose another"):
        open_run(tmp_path / "run", other, resume=resume)
    assert (tmp_path / "run" / "experiment.json").read_bytes() == before


def test_what_is_not_a_run_is_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("my thesis", encoding="utf-8")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        open_run(tmp_path, SMOKE, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_damaged_experiment_file(tmp_path):
    open_run(tmp_path, SMOKE, resume=False)
    path = tmp_path / "experiment.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"experiment\.json is damaged .*delete"):
        open_run(tmp_path, SMOKE, resume=True)


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="cannot write to .*; choose another --out"):
            open_run(directory, SMOKE, resume=False)


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:1])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError):
            write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "new" and os.listdir(tmp_path) == ["a.json"]


# ---------------------------------------------------------------- calls


def test_first_call(tmp_path):
    origin = record_call(tmp_path, "sidestream run x", "hash")
    assert (origin["command"], origin["commit"], origin["dirty"]) == ("sidestream run x", "a" * 40, False)
    assert (origin["data_hash"], origin["calls"]) == ("hash", 1)
    assert {"python", "torch", "transformers"} <= origin["versions"].keys()
    assert origin["machine"]["cores"] == os.cpu_count()


def test_calls_are_counted_and_one_dirty_one_stays(tmp_path, monkeypatch, capfd):
    states = iter([("a" * 40, True), ("a" * 40, False)])
    monkeypatch.setattr(provenance, "_git_state", lambda folder: next(states))
    assert record_call(tmp_path, "c", "hash")["dirty"]
    second = record_call(tmp_path, "c", "hash")
    assert second["dirty"] and second["calls"] == 2, "clean now, but a part of the numbers is from a dirty tree"
    assert capfd.readouterr().err == ""


def test_two_commits_in_one_run_count_as_dirty(tmp_path, monkeypatch, capfd):
    assert not record_call(tmp_path, "c", "hash")["dirty"]
    assert not record_call(tmp_path, "c", "hash")["dirty"]
    monkeypatch.setattr(provenance, "_git_state", lambda folder: ("b" * 40, False))
    assert record_call(tmp_path, "c", "hash")["dirty"]
    assert capfd.readouterr().err.splitlines() == [f"{tmp_path} began at commit aaaaaaaaaa, this is bbbbbbbbbb"]


def test_other_data_are_refused(tmp_path):
    record_call(tmp_path, "c", "hash")
    with pytest.raises(ValueError, match="the data are not those"):
        record_call(tmp_path, "c", "other")
    assert record_call(tmp_path, "c", "hash")["calls"] == 2, "the refused call is not on the record"


def test_commit_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert provenance._git_state(tmp_path) == ("unknown", True)

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], capture_output=True, check=True, text=True
        ).stdout

    ours, installed = tmp_path / "ours", tmp_path / "site-packages"
    for folder in (ours, installed):
        folder.mkdir()
        (folder / "code.py").write_text("1", encoding="utf-8")
    git("init")
    (tmp_path / ".gitignore").write_text("site-packages", encoding="utf-8")
    git("add", "ours", ".gitignore")
    git("commit", "-m", "first")
    assert provenance._git_state(ours) == (git("rev-parse", "HEAD").strip(), False)
    assert provenance._git_state(installed) == ("unknown", True), "a package in somebody else's checkout"
    (ours / "code.py").write_text("2", encoding="utf-8")
    assert provenance._git_state(ours) == (git("rev-parse", "HEAD").strip(), True)
