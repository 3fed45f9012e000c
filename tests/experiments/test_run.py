"""The kernel by a toy table in a folder of its own: it runs, resumes, reports, shows up, and several seeds merge."""

import json
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest

import sidestream.papers
from sidestream import cli
from sidestream.evaluation.stats import retrained, wilson
from sidestream.experiments import engine
from sidestream.experiments import run as kernel
from sidestream.experiments import table as tables
from sidestream.experiments.engine import LocalEngine, in_order
from sidestream.experiments.report.tables import markdown_table
from sidestream.experiments.results import load_results
from sidestream.experiments.run import Job, Task, Work, run, run_seeds
from sidestream.experiments.settings import Settings

TOYS = Path(__file__).parent / "tables"
WORDS = ["run", "toy.coin", "--scale", "smoke"]


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """The folder of toys joins the package of tables, here and in processes that start from here."""
    monkeypatch.setenv("SIDESTREAM_TABLES", str(TOYS))
    monkeypatch.setattr(sidestream.papers, "__path__", [*sidestream.papers.__path__, str(TOYS)])
    tables.load.cache_clear()
    yield
    tables.load.cache_clear()


def coin(table="toy.coin", **changes):
    return replace(tables.load(table).at("smoke"), table=table, **changes)


def value(results, arm):
    return next(cell for cell in results["cells"] if cell["arm"] == arm)


# ---------------------------------------------------------------- one file is enough


def test_a_table_is_there_by_existing(capfd, monkeypatch):
    assert cli.main(["tables"]) == 0
    assert "toy.coin  Which way a coin falls (a test)\n    --scale smoke  no time at all" in capfd.readouterr().out
    monkeypatch.setattr(sidestream.papers, "__path__", sidestream.papers.__path__[:-1])
    assert cli.main(["tables"]) == 0
    assert "toy.coin" not in capfd.readouterr().out
    assert cli.main(WORDS) == 2


def test_listing_imports_nothing():
    code = "import sys; from sidestream import cli; cli.main(['tables']); "
    code += "print(sorted({'torch', 'numpy', 'pydantic', 'sidestream.papers.toy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "toy.coin" in done.stdout and done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TITLE = 'x'\nLISTED = {'a': {'title': TITLE}}", "LISTED must be a literal"),
        ("LISTED = {'toy.coin': {'title': 'again'}}", "the table toy.coin is in sidestream.papers.toy already"),
    ],
)
def test_a_file_that_lists_badly_is_named(text, said, tmp_path, monkeypatch):
    (tmp_path / "worse.py").write_text(text)
    monkeypatch.setattr(sidestream.papers, "__path__", [*sidestream.papers.__path__, str(tmp_path)])
    with pytest.raises(ValueError, match=rf"worse\.py: {said}"):
        tables.listed()


def test_its_command_has_its_fields(capfd):
    with pytest.raises(SystemExit):
        cli.main([*WORDS, "--help"])
    out = " ".join(capfd.readouterr().out.split())
    assert "--throws THROWS Throws to learn from. (type: int, default: 40)" in out
    assert "--seed SEED Of initial weights" in out, "a field of the kernel's own settings is explained there"
    assert cli.main([*WORDS, "--arms", "[edge]"]) == 2
    assert "arms names the unknown 'edge'; use fixed, learned" in capfd.readouterr().err


# ---------------------------------------------------------------- running


def test_it_runs_and_reports(tmp_path, capfd):
    assert cli.main([*WORDS, "--out", str(tmp_path / "run")]) == 0
    assert "What it saw" in capfd.readouterr().out
    results = load_results(tmp_path / "run" / "results.json")
    cell = value(results, "learned")
    assert (cell["metric"], cell["where"], cell["n"], cell["paper"]) == ("right", {}, 50, 0.7)
    assert cell["ci"] == pytest.approx(wilson(round(50 * cell["value"]), 50))
    assert cell["value"] == pytest.approx(1 - value(results, "fixed")["value"])
    assert results["parameters"] == {"fixed": 1, "learned": 1} and results["settings"]["throws"] == 40
    (note,) = results["notes"]
    assert note.startswith("all throws: What it saw alone is right on ") and "of 50 (exact McNemar p = " in note
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "A coin" in page and "Guesses" in page and "paper 70.0" in page
    assert (tmp_path / "run" / "guesses.png").exists()
    outcomes = json.loads((tmp_path / "run" / "learned" / "outcomes.json").read_text())["outcomes"]
    assert len(outcomes[0]["values"]) == 50 and sum(outcomes[0]["values"]) == round(50 * cell["value"])


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    work = tables.load("toy.coin").work
    arm, done = work.arm, []

    def stop_at_second(self, name):
        done.append(name)
        if len(done) == 2:
            raise KeyboardInterrupt
        return arm(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(work, "arm", stop_at_second)
        with pytest.raises(KeyboardInterrupt):
            run(coin(), tmp_path / "run")
        assert not (tmp_path / "run" / "results.json").exists()
        with pytest.raises(ValueError, match="add --resume"):
            run(coin(), tmp_path / "run")
        results = run(coin(), tmp_path / "run", resume=True)
    assert done == ["fixed", "learned", "learned"], "what is finished is not done again"
    assert results["calls"] == 2
    assert results["cells"] == run(coin(), tmp_path / "whole")["cells"]
    monkeypatch.setattr(work, "jobs", lambda self: pytest.fail("a finished run is read"))
    assert run(coin(), tmp_path / "run", resume=True) == results


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    def refuse(self):
        raise ValueError("the coin has one side")

    monkeypatch.setattr(tables.load("toy.coin").work, "check", refuse)
    with pytest.raises(ValueError, match="one side"):
        run(coin(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- seeds


def test_seeds_are_trained_and_merged(tmp_path, capfd):
    assert cli.main([*WORDS, "--seeds", "0", "1", "2", "--throws", "3", "--out", str(tmp_path / "runs")]) == 0
    merged = load_results(tmp_path / "runs" / "results.json")
    each = [load_results(tmp_path / "runs" / f"seed{seed}" / "results.json") for seed in range(3)]
    cell, values = value(merged, "learned"), [value(one, "learned")["value"] for one in each]
    assert merged["seeds"] == [0, 1, 2] and cell["seeds"] == values and cell["n"] == 150
    assert len(set(values)) > 1, "with three throws to learn from, seeds must differ for this test to mean anything"
    assert cell["value"] == pytest.approx(sum(values) / 3)
    assert cell["deviation"] == pytest.approx((sum((v - cell["value"]) ** 2 for v in values) / 2) ** 0.5)
    assert cell["ci"] == pytest.approx(retrained(values, [value(one, "learned")["ci"] for one in each], share=True))
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert "3 seeds (0, 1, 2)" in page and "interval that covers retraining" in page
    before = (tmp_path / "runs" / "seed0" / "results.json").read_bytes()
    more = [*WORDS, "--seeds", "0", "1", "2", "3", "--throws", "3", "--out", str(tmp_path / "runs"), "--resume"]
    assert cli.main(more) == 0, "seeds can be added"
    assert load_results(tmp_path / "runs" / "results.json")["seeds"] == [0, 1, 2, 3]
    assert (tmp_path / "runs" / "seed0" / "results.json").read_bytes() == before
    assert cli.main([*WORDS, "--seeds", "0", "0"]) == 2 and "each once" in capfd.readouterr().err


def test_a_merged_file_fills_a_readme_table(tmp_path):
    merged = run_seeds(coin(throws=3), [0, 1], tmp_path / "runs") | {"scale": "cpu", "dirty": False}
    file = tmp_path / "cpu-seeds.json"
    file.write_text(json.dumps(merged))
    text = markdown_table([file])
    assert "mean ± deviation over 2 seeds; brackets: 95% interval that covers retraining." in text
    assert "seeds 0, 1" in text and "What it saw" in text


# ---------------------------------------------------------------- engines


def tasks_of(**needs: tuple[str, ...]) -> list[Task]:
    work = Work(Settings(table="toy.coin", scale="cpu"), Path("run"))
    return [Task(work, Job(name=name, work=lambda: None, needs=of)) for name, of in needs.items()]


def test_jobs_wait_for_what_they_need():
    tasks = tasks_of(arm=("goal",), goal=("base",), other=(), base=(), last=("arm", "other"))
    names = [task.job.name for task in in_order(tasks)]
    assert set(names[:2]) == {"other", "base"} and names[2:] == ["goal", "arm", "last"]
    assert len(in_order(tasks_of(arm=("finished",)))) == 1


def waiting(folder: Path, name: str, needs: tuple[str, ...], until: str) -> Task:
    """A task that ends when another one's file is there, and fails where it does not come."""
    return Task(Waiting(Settings(table=until, scale="cpu"), folder), Job(name=name, work=lambda: None, needs=needs))


class Waiting(Work):
    """Stands in for a table's work in `do_at`, which finds it by `load`."""

    def jobs(self):
        return [Job(name=name, work=lambda name=name: self.wait(name)) for name in ("slow", "base", "arm")]

    def wait(self, name):
        deadline = time.monotonic() + 30
        until = self.directory / self.settings.table
        while self.settings.table and not until.exists():
            assert time.monotonic() < deadline, f"{name} waited in vain for {until.name}"
            time.sleep(0.01)


def test_a_job_begins_as_soon_as_its_own_needs_are_done(tmp_path, monkeypatch):
    """`slow` cannot end before `arm` does, which needs `base` alone: in groups of jobs, both would stand still."""
    monkeypatch.setattr(engine, "_elsewhere", waits)
    tasks = [waiting(tmp_path, "slow", (), "arm/outcomes.json"), waiting(tmp_path, "base", (), "")]
    LocalEngine(2).run([*tasks, waiting(tmp_path, "arm", ("base",), "base/outcomes.json")])
    assert all(task.finished() for task in tasks)


def waits(parent, settings, directory, name):
    """`_elsewhere`, for `Waiting`."""
    work = Waiting(settings, directory)
    Task(work, next(job for job in work.jobs() if job.name == name)).do()


def test_processes_give_the_same_cells(tmp_path):
    here = run(coin(throws=3), tmp_path / "here")
    beside = run(coin(throws=3), tmp_path / "beside", engine=LocalEngine(2))
    assert here["cells"] == beside["cells"] and here["notes"] == beside["notes"]


@pytest.mark.slow
def test_an_error_in_a_process_is_told_and_a_dead_one_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_TABLES", str(tmp_path))
    monkeypatch.setattr(sidestream.papers, "__path__", [*sidestream.papers.__path__[:-1], str(tmp_path)])
    text = (TOYS / "toy.py").read_text(encoding="utf-8").replace("toy.coin", "bad.coin")
    crash = "import os\n        if arm == 'learned':\n            os.kill(os.getpid(), 9)"
    crash += "\n        raise ValueError('no')"
    (tmp_path / "bad.py").write_text(text.replace("share = self.base()", f"{crash}\n        share = self.base()", 1))
    with pytest.raises(ValueError, match="^no$"):
        run(coin("bad.coin", arms=("fixed",)), tmp_path / "a", engine=LocalEngine(2))
    with pytest.raises(BrokenProcessPool):
        run(coin("bad.coin", arms=("learned",)), tmp_path / "b", engine=LocalEngine(2))


def test_a_job_is_done_from_its_address_alone(tmp_path):
    settings = coin(throws=3)
    run(settings, tmp_path / "whole")
    for name in ("base", "learned"):
        kernel.do_at(settings, tmp_path / "parts", name)
    same = "learned/outcomes.json"
    assert (tmp_path / "parts" / same).read_bytes() == (tmp_path / "whole" / same).read_bytes()
