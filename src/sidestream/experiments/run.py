"""A run of a table: its jobs, what is kept of them on disk, and the results that come of it.

A job is a training, or several, and what is measured of it. It has a name and needs: the jobs whose weights it starts
from. One rule holds for all of them: a job whose `NAME/outcomes.json` is there is finished. One that was stopped is
done again, and finds the stages it had finished (`training.loop.train` with `resume`) in the run directory:

    DIR/experiment.json          the settings
    DIR/calls.json               every command that worked here, at which commit
    DIR/NAME/STAGE/...           metrics.jsonl, checkpoints, `final` weights
    DIR/NAME/outcomes.json       what the job measured: one number a problem
    DIR/BESIDE.json              data of figures
    DIR/results.json             cells, made from all outcomes: the run is finished
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from sidestream.experiments.engine import Engine, LocalEngine
from sidestream.experiments.provenance import open_run, record_call, write_whole
from sidestream.experiments.results import Outcome, cell, check_results, compared, load_results, over_seeds
from sidestream.experiments.settings import Settings, to_json
from sidestream.experiments.table import load

S = TypeVar("S", bound=Settings)
OUTCOMES = "outcomes.json"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a job gives back; all of it JSON."""

    outcomes: Sequence[Outcome] = ()
    """One number a problem."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Name -> what the results file records of this job under that name (`parameters`)."""
    drawn: Mapping[str, Any] = field(default_factory=dict)
    """File, without `.json` -> what a figure is drawn from."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One piece of a table's work."""

    name: str
    """Its folder in the run directory."""
    work: Callable[[], Any]
    """Does it and gives back what it `Measured`, or anything else where there is nothing to measure. The jobs it needs
    may have been done by another process: everything passes through files."""
    needs: tuple[str, ...] = ()
    """Names of the jobs that must have finished."""
    stages: Mapping[Path, int] = field(default_factory=dict)
    """Stage folder -> its steps, for the progress display."""
    weight: float = 1.0
    """How long it takes beside the others: of jobs that could begin, the longest do."""


class Work(Generic[S]):
    """One run of a table: its settings, its directory and what is made in it. A table's file has a subclass.

    Args:
        show: progress bars.
    """

    def __init__(self, settings: S, directory: Path, *, show: bool = True) -> None:
        self.settings = settings
        self.directory = directory
        self.show = show

    @cached_property
    def device(self) -> Any:
        """The GPU where there is one."""
        import torch

        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def label(self, text: str) -> str:
        """What stands at a training's progress bar; nothing where there is none."""
        return text if self.show else ""

    def check(self) -> None:
        """Called before anything is written.

        Raises:
            ValueError: settings or files do not fit together.
        """

    def data_hash(self) -> str:
        """Of the problems: a run that is resumed must have the same."""
        raise NotImplementedError

    def jobs(self) -> list[Job]:
        """Everything there is to do, in the order of the report. Cheap: work is done by the jobs."""
        raise NotImplementedError

    def origin(self, command: str) -> dict[str, Any]:
        """Where the numbers come from: command, commit, versions, machine, data."""
        return record_call(self.directory, command, self.data_hash())

    def notes(self, found: Found) -> list[str]:
        """What a reader of the numbers should know."""
        return []

    def finish(self, found: Found) -> None:
        """Files for figures that need the outcomes of several jobs."""


class Side(NamedTuple):
    """One side of a paired test."""

    arm: str
    where: dict[str, Any]
    """The conditions of its outcome, all of them."""
    name: str = ""
    """In words; empty for the arm's name."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What all jobs of a run gave."""

    outcomes: list[Outcome]
    """In the order of the report."""
    facts: dict[str, dict[str, Any]]
    """Name of the fact -> job -> value."""
    calls: int
    """How many commands worked on the run."""
    arm_name: Callable[[str], str]
    """What the table calls an arm."""

    def outcome(self, arm: str, metric: str, **where: Any) -> Outcome | None:
        """The outcome of an arm under exactly these conditions."""
        of_arm = (one for one in self.outcomes if (one.arm, one.metric, one.beside) == (arm, metric, ""))
        return next((one for one in of_arm if one.where == where), None)

    def paired(self, metric: str, first: Side, second: Side, *, where: str) -> list[str]:
        """The note of one paired test; none where a side was not measured.

        Args:
            where: what both sides share, in words.
        """
        sides = [(side, self.outcome(side.arm, metric, **side.where)) for side in (first, second)]
        (one, mine), (other, theirs) = ((side.name or self.arm_name(side.arm), outcome) for side, outcome in sides)
        if mine is None or theirs is None:
            return []
        test = compared(mine, theirs)
        return [
            f"{where}: {one} alone is right on {test.only_a}, {other} alone on {test.only_b} of "
            f"{len(mine.values)} (exact McNemar p = {test.p_value:.2g})."
        ]


@dataclass(frozen=True, eq=False)
class Task:
    """A job of a run, as an engine gets it: to be done here, or by its address in another process or on another
    machine."""

    work: Work
    job: Job

    @property
    def key(self) -> str:
        """Its name among the tasks of several runs."""
        return f"{self.work.directory}/{self.job.name}"

    @property
    def needs(self) -> list[str]:
        """Keys of the tasks that must have finished."""
        return [f"{self.work.directory}/{name}" for name in self.job.needs]

    @property
    def address(self) -> tuple[Any, Path, str]:
        """What `do_at` needs: settings, run directory and name, which can be sent anywhere."""
        return self.work.settings, self.work.directory, self.job.name

    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return (self.work.directory / self.job.name / OUTCOMES).exists()

    def do(self) -> None:
        """Do it, and keep what it gave."""
        if self.finished():
            return
        got = self.job.work()
        got = got if isinstance(got, Measured) else Measured()
        record = {"outcomes": [asdict(one) for one in got.outcomes], "facts": got.facts, "drawn": got.drawn}
        write_whole(self.work.directory / self.job.name / OUTCOMES, json.dumps(record))


def do_at(settings: Any, directory: Path, name: str) -> None:
    """Do one job of a run in this process, which holds nothing else of it."""
    work = load(settings.table).work(settings, directory, show=False)
    gc.freeze()  # every stage's Trainer collects garbage; torch's own objects need not be looked at each time
    Task(work, next(job for job in work.jobs() if job.name == name)).do()


def run(
    settings: Any, directory: Path | str, *, command: str = "python", resume: bool = False, engine: Engine | None = None
) -> dict[str, Any]:
    """Do everything that a table asks for into `directory`; returns what it writes to results.json.

    Args:
        command: the command line, for the record.
        resume: go on with a run that was stopped; what is finished is kept, a finished run is read again.
        engine: where jobs run; None: `LocalEngine()`.

    Raises:
        ValueError: the settings or files given do not fit together, or the directory holds another run.
    """
    return next(_run([settings], [Path(directory)], command, resume, engine))


def run_seeds(
    settings: Any,
    seeds: Sequence[int],
    directory: Path | str,
    *,
    command: str = "python",
    resume: bool = False,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """The same with several seeds, each a run in `directory/seedK`; returns what it writes to results.json: means,
    deviations and intervals over all of them. More seeds can be added later.

    Raises:
        ValueError: as `run`; or fewer than two seeds, or one twice.
    """
    directory = Path(directory)
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds are {list(seeds)}; give two or more, each once (one alone is --seed)")
    each = [replace(settings, seed=seed) for seed in seeds]
    done = list(_run(each, [directory / f"seed{seed}" for seed in seeds], command, resume, engine))
    merged = over_seeds(done, command)
    write_whole(directory / "results.json", json.dumps(merged, indent=1) + "\n")
    return merged


def _run(
    settings: Sequence[Any], directories: Sequence[Path], command: str, resume: bool, engine: Engine | None
) -> Iterator[dict[str, Any]]:
    table, started = load(settings[0].table), time.monotonic()
    works = [table.work(each, directory) for each, directory in zip(settings, directories, strict=True)]
    for work in works:
        if not (work.directory / "results.json").exists():
            work.check()
    origins = {}
    for work in works:
        open_run(work.directory, work.settings, resume=resume)
        if not (work.directory / "results.json").exists():
            origins[work.directory] = work.origin(command)
    tasks = [Task(work, job) for work in works if work.directory in origins for job in work.jobs()]
    (engine or LocalEngine()).run([task for task in tasks if not task.finished()], alone=table.alone)
    for work in works:
        if work.directory in origins:
            _finish(work, origins[work.directory], started)
        yield load_results(work.directory / "results.json")


def _finish(work: Work, origin: dict[str, Any], started: float) -> None:
    """results.json and the files of figures, from the outcomes of all jobs."""
    table, jobs = load(work.settings.table), work.jobs()
    paths = {job.name: work.directory / job.name / OUTCOMES for job in jobs}
    records = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    everything = [Outcome(**one) for record in records.values() for one in record["outcomes"]]
    drawn, facts = _by_kind(records, "drawn"), _by_kind(records, "facts")
    beside: dict[str, Any] = {kind: {"arms": by_job} for kind, by_job in drawn.items()}
    for one in everything:
        if one.beside:
            beside.setdefault(one.beside, {}).setdefault("cells", []).append(cell(one, table))
    for kind, data in beside.items():
        write_whole(work.directory / f"{kind}.json", json.dumps(data))
    outcomes = [one for one in everything if not one.beside]
    found = Found(outcomes=outcomes, facts=facts, calls=origin.get("calls", 1), arm_name=table.arm)
    work.finish(found)
    cells = [cell(one, table) for one in outcomes]
    results = results_of(work.settings, origin, started, **facts, notes=work.notes(found), cells=cells)
    write_whole(work.directory / "results.json", json.dumps(results, indent=1) + "\n")


def _by_kind(records: Mapping[str, Any], part: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        for kind, value in record[part].items():
            found.setdefault(kind, {})[name] = value
    return found


def results_of(settings: Any, origin: Mapping[str, Any], started: float, **rest: Any) -> dict[str, Any]:
    """What a results file holds, checked.

    Args:
        origin: of `record_call`, or `provenance` with a data hash.
        started: `time.monotonic()` when the call began.
        rest: cells, notes and what else a table records, in the order of the file.

    Raises:
        ValueError: it is no results file (`results.check_results`).
    """
    results = {
        "table": settings.table,
        "scale": settings.scale,
        "seed": settings.seed,
        **origin,
        "wall_s": round(time.monotonic() - started, 1),
        "settings": to_json(settings),
        **rest,
    }
    check_results(results)
    return results


def once(path: Path, make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON: made once, and read from `path` ever after."""
    if not path.exists():
        write_whole(path, json.dumps(make()))
    return json.loads(path.read_text(encoding="utf-8"))


def rows(outcomes: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Scores of problems, each metric -> value, as metric -> one value a problem."""
    scored = list(outcomes)
    return {metric: [score[metric] for score in scored] for metric in scored[0]}
