"""The command: what it says, what it refuses, and whole runs at smoke scale."""

import json
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from sidestream import cli
from sidestream.experiments import run as kernel
from sidestream.experiments.provenance import open_run
from sidestream.experiments.report import page
from sidestream.experiments.results import check_results
from sidestream.experiments.settings import to_json
from sidestream.experiments.table import listed
from sidestream.papers.lsar import recall
from sidestream.training.loop import TrainingStopped

SMOKE = ["run", "lsar.table1", "--scale", "smoke"]
NEUTRAL = "A ship came in at dawn. The cook sang a song! Was the harbour empty? Nobody knew. Rain fell on the roof."


class Stop(BaseException):
    """Stands in for a kill."""


@pytest.fixture
def asked(monkeypatch) -> list[tuple[recall.Recall, Path, dict]]:
    """What a run would have been started with; nothing runs."""
    calls = []

    def run(experiment, out, **options):
        calls.append((experiment, out, options))
        raise Stop

    monkeypatch.setattr(kernel, "run", run)
    return calls


def started(asked: list, *words: str) -> recall.Recall:
    """The experiment that these words would run."""
    with pytest.raises(Stop):
        cli.main(["run", "lsar.table1", *words])
    return asked[-1][0]


def refused(capfd, *words: str) -> str:
    """The one line on stderr, exit status 2, nothing on stdout."""
    assert cli.main(list(words)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1 and err.startswith("sidestream: "), (out, err)
    assert "Traceback" not in err and "<class" not in err
    return err.removeprefix("sidestream: ").rstrip("\n")


# ---------------------------------------------------------------- help and lists


def test_help_needs_neither_torch_nor_time():
    code = (
        "import sys, time; from sidestream import cli; status = cli.main(['--help']); "
        "heavy = {'torch', 'transformers', 'sklearn', 'matplotlib', 'numpy'} & set(sys.modules); "
        "print(status, sorted(heavy), time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *said, last = done.stdout.splitlines()
    status, heavy, seconds = last.split(" ", 1)[0], last[2:-1].rsplit(" ", 1)[0], float(last.rsplit(" ", 1)[1])
    assert (status, heavy, done.stderr) == ("0", "[]", "") and seconds < 0.5
    assert any("run TABLE" in line for line in said)


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["tables"], ["tables", "-h"], ["run"], ["report", "-h"]])
def test_help_and_tables(words, capfd):
    assert cli.main(words) == 0
    out, err = capfd.readouterr()
    assert err == "" and ("lsar.table1" in out or "report DIR" in out)


def test_tables_lists_every_scale_with_its_cost(capfd):
    cli.main(["tables"])
    out = capfd.readouterr().out
    for scale in cli.SCALES:
        assert f"--scale {scale}" in out and listed()["lsar.table1"].costs[scale] in out


def test_version(capfd):
    assert cli.main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("sidestream 0.")


def test_help_of_a_table_explains_every_field(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "lsar.table1", "--help"])
    out, err = capfd.readouterr()
    assert (end.value.code, err) == (0, "")
    text = " ".join(out.split())
    assert "W, tokens the text channel sees. (type: int, default: 48)" in text
    assert "stage2: E_pred" in text and "Decoder blocks." in text and "Decoupled decay, at each" in text
    parser = cli._parser("lsar.table1", "title", recall.table1("cpu"))
    for action in parser._actions:
        if action.dest != "table":
            assert action.help and action.option_strings[0] in out, f"{action.dest} is not explained"
    assert "--table" not in out and "required" not in out
    assert max(map(len, out.splitlines())) <= 110


# ---------------------------------------------------------------- words into an experiment


def test_default_scale_is_cpu(asked):
    assert started(asked) == recall.table1("cpu")
    assert asked[-1][1] == Path("runs/lsar.table1/cpu-seed0")
    engine = asked[-1][2].pop("engine")
    assert engine.jobs is None and asked[-1][2] == {"command": "sidestream run lsar.table1", "resume": False}


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_scale_alone_gives_the_experiment_of_that_name(asked, scale):
    assert started(asked, "--scale", scale) == recall.table1(scale)


def test_fields_override(asked):
    words = ["--scale", "smoke", "--seed", "3", "--stage3.steps", "2", "--encoder.layers", "2", "--window", "40"]
    words += ["--arms", "[baseline,static]", "--horizons", "[5, 70]", "--haystack", "some file.txt", "--resume"]
    words += ["--stage2.learning_rate", "1e-5", "--stage1.gradient_checkpointing", "true", "--jobs", "2"]
    experiment = started(asked, *words)
    wanted = to_json(recall.table1("smoke"))
    wanted.update(seed=3, window=40, arms=["baseline", "static"], horizons=[5, 70], haystack="some file.txt")
    wanted["stage3"]["steps"] = wanted["encoder"]["layers"] = 2
    wanted["stage2"]["learning_rate"] = 1e-5
    wanted["stage1"]["gradient_checkpointing"] = True
    assert to_json(experiment) == wanted
    _, out, options = asked[-1]
    assert out == Path("runs/lsar.table1/smoke-seed3")
    assert (options["resume"], options["engine"].jobs) == (True, 2)
    assert "--resume" not in options["command"] and "'some file.txt'" in options["command"]


def test_printed_config_gives_the_same_experiment(asked, capfd, tmp_path):
    words = ["--scale", "smoke", "--stage3.steps", "7", "--stage3.learning_rate", "1e-5", "--arms", "[static]"]
    experiment = started(asked, *words)
    with pytest.raises(SystemExit):
        cli.main(["run", "lsar.table1", *words, "--print_config"])
    printed = capfd.readouterr().out
    file = tmp_path / "settings.yaml"
    file.write_text(printed, encoding="utf-8")
    assert started(asked, "--config", str(file)) == experiment != recall.table1("smoke")
    assert started(asked, "--config", str(file), "--window", "50").window == 50
    assert yaml.safe_load(printed)["scale"] == "smoke"


def test_a_runs_own_file_is_a_config(asked, tmp_path):
    file = tmp_path / "experiment.json"
    record = to_json(recall.table1("smoke"))
    record["stage1"]["learning_rate"] = 1e-05
    file.write_text(json.dumps(record), encoding="utf-8")
    assert to_json(started(asked, "--config", str(file))) == record
    part = tmp_path / "part.yaml"
    part.write_text("scale: smoke\nstage2:\n  steps: 9\n", encoding="utf-8")
    experiment = started(asked, "--config", str(part))
    assert (experiment.stage2.steps, experiment.window) == (9, recall.table1("smoke").window)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["rnu"], ["unknown command 'rnu'", "'run'"]),
        (["run", "lsr.table1"], ["unknown table 'lsr.table1'", "'lsar.table1'", "sidestream tables"]),
        (["run", "lsar.table1", "--scale", "smok"], ["unknown scale 'smok'", "'smoke'", "smoke, cpu or paper"]),
        ([*SMOKE, "--windw", "5"], ["unknown field --windw", "'--window'"]),
        ([*SMOKE, "--stage3.stps", "5"], ["unknown field --stage3.stps", "'--stage3.steps'"]),
        ([*SMOKE, "--win", "5"], ["unknown field --win", "'--window'"]),
        ([*SMOKE, "more"], ["more", "--help"]),
        ([*SMOKE, "--window"], ["--window", "expected one argument"]),
        ([*SMOKE, "--window", "abc"], ["--window must be a whole number; got 'abc'"]),
        ([*SMOKE, "--stage3.steps", "1.5"], ["--stage3.steps must be a whole number; got '1.5'"]),
        ([*SMOKE, "--stage3.learning_rate", "fast"], ["--stage3.learning_rate must be a number; got 'fast'"]),
        ([*SMOKE, "--arms", "static"], ["--arms must be a list", "'[a,b]'"]),
        ([*SMOKE, "--horizons", "[1,x]"], ["--horizons must be a list, each a whole number", "'x'"]),
        ([*SMOKE, "--vocabulary", "words"], ["--vocabulary must be one of bpe, subset; got 'words'"]),
        ([*SMOKE, "--stage1.precision", "fp16"], ["--stage1.precision must be one of fp32, bf16"]),
        ([*SMOKE, "--stage1.gradient_checkpointing", "maybe"], ["true or false", "'maybe'"]),
        ([*SMOKE, "--arms", "[nope]"], ["unknown 'nope'", "baseline, static_faithful"]),
        ([*SMOKE, "--stage3.steps", "0"], ["stage3.steps is 0; it must be at least 1"]),
        ([*SMOKE, "--stage3.learning_rate", "-1"], ["stage3.learning_rate is -1.0"]),
        ([*SMOKE, "--seed", "-1"], ["seed is -1"]),
        ([*SMOKE, "--encoder.heads", "7"], ["encoder.width 32 does not divide by heads 7"]),
        ([*SMOKE, "--jobs", "0"], ["jobs is 0"]),
        ([*SMOKE, "--table", "lsar.table3"], ["table is 'lsar.table3'"]),
        ([*SMOKE, "--config", "nowhere.yaml"], ["nowhere.yaml: No such file"]),
        (["tables", "all"], ["tables takes no arguments"]),
        (["report", "nowhere"], ["nowhere/results.json: no such results file"]),
        (["readme", "nowhere.md"], ["nowhere.md: No such file"]),
    ],
)
def test_mistake_is_one_line(words, parts, capfd, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(capfd, *words)
    assert all(part in line for part in parts), line
    assert not asked and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"window: [", "not a YAML or JSON file"),
        (b"\xff\xfe", "not a YAML or JSON file"),
        (b"- 1\n", "not a file of settings"),
        (b"scale: smoke\nwindw: 3\n", "unknown field --windw, did you mean '--window'?"),
        (b"scale: smoke\nstage3: {stps: 3}\n", "unknown field --stage3.stps, did you mean '--stage3.steps'?"),
        (b"scale: smoke\nwindow: wide\n", "--window must be a whole number; got 'wide'"),
        (b"scale: smoke\ntable: lsar.table3\n", "table is 'lsar.table3'"),
        (b"scale: huge\n", "unknown scale 'huge'"),
    ],
)
def test_mistakes_in_a_config_file(content, part, capfd, asked, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    assert part in refused(capfd, "run", "lsar.table1", "--config", str(file))
    assert not asked


def test_a_config_of_another_scale(capfd, asked, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("scale: cpu\n", encoding="utf-8")
    assert "leave one of them out" in refused(capfd, *SMOKE, "--config", str(file))
    assert started(asked, "--config", str(file)) == recall.table1("cpu")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--window", "5"], "the window is 5 tokens, but trigger and answer alone take"),
        (["--horizons", "[-1]"], "horizons is [-1]"),
        (["--test_problems", "100000"], "100000 problems asked"),
        (["--train_problems", "1"], "train_problems is 1"),
        (["--haystack", "missing.txt"], "haystack missing.txt: there is no such file"),
        (["--haystack", "empty.txt"], "haystack empty.txt: the file is empty"),
        (["--haystack", "latin.txt"], "haystack latin.txt: not UTF-8"),
        (["--haystack", "folder"], "haystack folder: cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(words, part, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n", encoding="utf-8")
    Path("latin.txt").write_bytes("Das Café schließt früh. Die Tür bleibt zu.".encode("latin-1"))
    Path("folder").mkdir()
    assert part in refused(capfd, *SMOKE, *words, "--out", "run")
    assert not Path("run").exists()


def test_run_directories_that_are_taken(capfd, tmp_path):
    run = tmp_path / "run"
    open_run(run, recall.table1("smoke"), resume=False)
    assert "add --resume" in refused(capfd, *SMOKE, "--out", str(run))
    assert "seed is 0 there and 1 here" in refused(capfd, *SMOKE, "--seed", "1", "--resume", "--out", str(run))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("", encoding="utf-8")
    assert "is not empty and holds no run" in refused(capfd, *SMOKE, "--out", str(tmp_path / "other"))
    assert [path.name for path in run.iterdir()] == ["experiment.json"]


def test_paper_scale_without_a_gpu_warns_and_goes_on(asked, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert started(asked, "--scale", "paper") == recall.table1("paper")
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "no GPU" in err
    hours = float(err.split("about ")[1].split(" hours")[0].replace(",", ""))
    assert 1000 < hours < 10_000
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    started(asked, "--scale", "paper")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    started(asked, "--scale", "cpu")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (OSError(28, "No space left on device"), ["No space left on device", "--resume"]),
        (PermissionError(13, "Permission denied", "/a/file"), ["/a/file: Permission denied", "--resume"]),
        (TrainingStopped("the loss is\nnan at step 3"), ["the loss is nan at step 3"]),
        (BrokenProcessPool("x"), ["out of memory", "--jobs 1"]),
    ],
)
def test_trouble_on_the_way_is_one_line(error, parts, capfd, monkeypatch, tmp_path):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(kernel, "run", run)
    line = refused(capfd, *SMOKE, "--out", str(tmp_path / "run"))
    assert all(part in line for part in parts), line


def test_our_own_errors_are_not_hidden(monkeypatch, tmp_path):
    def run(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(kernel, "run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main([*SMOKE, "--out", str(tmp_path / "run")])


def test_interrupt_says_how_to_go_on(capfd, monkeypatch, tmp_path):
    def run(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel, "run", run)
    assert cli.main([*SMOKE, "--out", str(tmp_path / "run")]) == 130
    assert "--resume" in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"table": "lsar.table1"}'])
def test_report_on_damaged_results(content, capfd, tmp_path):
    (tmp_path / "results.json").write_bytes(content)
    assert "results.json" in refused(capfd, "report", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


# ---------------------------------------------------------------- whole runs


def results_of(directory: Path) -> dict:
    return json.loads((directory / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Every arm at smoke scale, in this process."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert cli.main([*SMOKE, "--out", str(directory), "--jobs", "1"]) == 0
    return directory


def test_smoke_run_has_every_cell_and_a_report(whole):
    results = results_of(whole)
    check_results(results)
    experiment = recall.table1("smoke")
    found = {(cell["arm"], cell["where"]["H"], cell["where"]["W"], cell["metric"]) for cell in results["cells"]}
    metrics = ("item_exact", "code_exact", "code_token")
    assert found == {
        (arm, horizon, experiment.window, metric)
        for arm in ("baseline", *recall.STATIC_ARMS)
        for horizon in experiment.horizons
        for metric in metrics
    }
    assert all(cell["n"] == experiment.test_problems for cell in results["cells"])
    assert results["settings"] == to_json(experiment) and results["scale"] == "smoke" and results["calls"] == 1
    assert results["command"].startswith("sidestream run lsar.table1 --scale smoke")
    assert (whole / "report.html").stat().st_size > 10_000
    for picture in ("recall.png", "tsne.png", "loss.png", "ablation.png"):
        assert (whole / picture).read_bytes().startswith(b"\x89PNG")
    for stage in ("baseline/stage1", "baseline/stage3", "base/stage1", "static/stage2", "static/stage3"):
        assert (whole / stage / "metrics.jsonl").stat().st_size > 0
        assert not list((whole / stage).glob("checkpoint-*")), "a finished stage needs no checkpoints"


def test_finished_run_is_read_again_and_nothing_is_trained(whole, capfd, monkeypatch):
    monkeypatch.setattr(recall.RecallWork, "jobs", lambda self: pytest.fail("it trains again"))
    monkeypatch.setattr(page, "write_report", lambda directory: directory / "report.html")
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert cli.main([*SMOKE, "--out", str(whole), "--resume"]) == 0
    assert "LS-AR Static (faithful)" in capfd.readouterr().out
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}


def test_report_can_be_written_again(whole, capfd):
    (whole / "report.html").unlink()
    assert cli.main(["report", str(whole)]) == 0
    assert capfd.readouterr().out.strip() == str(whole / "report.html") and (whole / "report.html").exists()


def cells(directory: Path) -> dict[tuple, float]:
    return {(c["arm"], c["metric"], c["where"]["H"]): c["value"] for c in results_of(directory)["cells"]}


def same_weights(mine: Path, theirs: Path) -> bool:
    """Whether the last stages of both arms ended with the same bits."""
    for arm in ("baseline", "static"):
        ours, others = (load_file(run / arm / "stage3" / "final" / "model.safetensors") for run in (mine, theirs))
        if ours.keys() != others.keys() or not all(torch.equal(ours[name], others[name]) for name in ours):
            return False
    return True


def test_run_stopped_in_the_middle_ends_with_the_same_cells(whole, tmp_path, capfd, monkeypatch):
    """Stopped after the second arm's training, before its evaluation. One command serves both times."""
    monkeypatch.setattr(page, "write_report", lambda directory: directory / "report.html")
    words = [*SMOKE, "--arms", "[baseline,static]", "--out", str(tmp_path / "run"), "--jobs", "1", "--resume"]
    answer, evaluated = recall.answer_treasure, []

    def stop_at_fifth(*args, **kwargs):
        evaluated.append(1)
        if len(evaluated) == 5:
            raise Stop
        return answer(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(recall, "answer_treasure", stop_at_fifth)
        with pytest.raises(Stop):
            cli.main(words)
    capfd.readouterr()
    assert cli.main(words) == 0
    assert capfd.readouterr().err == ""
    reference = {key: value for key, value in cells(whole).items() if key[0] in ("baseline", "static")}
    assert cells(tmp_path / "run") == reference
    results = results_of(tmp_path / "run")
    assert results["calls"] == 2 and any("resumed" in note for note in results["notes"])
    assert not any("resumed" in note for note in results_of(whole)["notes"])
    assert same_weights(tmp_path / "run", whole)


def test_haystack_that_changed_is_refused_on_resume(tmp_path, capfd, monkeypatch):
    haystack = tmp_path / "book.txt"
    haystack.write_text(NEUTRAL, encoding="utf-8")
    words = [*SMOKE, "--haystack", str(haystack), "--out", str(tmp_path / "run"), "--jobs", "1"]
    monkeypatch.setattr(recall.RecallWork, "base", lambda self, *_: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        cli.main(words)
    problems = (tmp_path / "run" / "test-H12.jsonl").read_text(encoding="utf-8")
    assert "harbour" in problems and "violin" not in problems, "distractors are from the file"
    haystack.write_text(NEUTRAL.replace("cook", "captain"), encoding="utf-8")
    capfd.readouterr()
    assert "the data are not those" in refused(capfd, *words, "--resume")
