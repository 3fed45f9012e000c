"""Where jobs run: here, or in processes beside this one; on other machines: `cluster.py`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sidestream.experiments.run import Task

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables that say how many threads a process computes with."""


class Engine(Protocol):
    """Does tasks, each after those that it needs (by key), in any order else."""

    def run(self, tasks: Sequence[Task], *, alone: bool = False) -> None:
        """Returns when all are done, and raises what one of them raised, after the others were stopped.

        Args:
            tasks: of one run or several. What a task needs and is not among them is finished.
            alone: one at a time, in this process.
        """


class LocalEngine:
    """Processes on this machine (loky's, as joblib has them), each with one thread: small models gain little from a
    second.

    Args:
        jobs: tasks at a time; None for one a core on a CPU, and one in all on a GPU and at `smoke`, where a process's
            imports would cost more than its work.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs

    def run(self, tasks: Sequence[Task], *, alone: bool = False) -> None:
        """As `Engine.run` says."""
        if alone or len(tasks) < 2 or self._jobs(tasks) == 1:
            for task in in_order(tasks):
                task.do()
        else:
            _side_by_side(tasks, min(self._jobs(tasks), len(tasks)))

    def _jobs(self, tasks: Sequence[Task]) -> int:
        if self.jobs is not None:
            return self.jobs
        import torch

        small = tasks[0].work.settings.scale == "smoke"
        return 1 if small or torch.cuda.is_available() else os.cpu_count() or 1


def in_order(tasks: Sequence[Task]) -> list[Task]:
    """Tasks, each after those that it needs."""
    return list(graph_of(tasks).static_order())


def graph_of(tasks: Sequence[Task]) -> TopologicalSorter[Task]:
    """The standard library's sorter, over the tasks that are there: what else one needs is finished."""
    there = {task.key: task for task in tasks}
    return TopologicalSorter({task: [there[key] for key in task.needs if key in there] for task in tasks})


def _side_by_side(tasks: Sequence[Task], jobs: int) -> None:
    """Each task begins as soon as what it needs is done and a process is free; the longest first, so that no process is
    left with one at the end."""
    from joblib.externals.loky import ProcessPoolExecutor

    graph = graph_of(tasks)
    graph.prepare()
    ready: list[Task] = []
    running: dict[Future[None], Task] = {}
    executor = ProcessPoolExecutor(max_workers=jobs, env=dict.fromkeys(THREADS, "1"))
    try:
        with Progress(tasks):
            while graph.is_active():
                ready = sorted([*ready, *graph.get_ready()], key=lambda task: -task.job.weight)
                while ready and len(running) < jobs:
                    task = ready.pop(0)
                    running[executor.submit(_elsewhere, os.getpid(), *task.address)] = task
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    graph.done(running.pop(future))
    finally:
        executor.shutdown(wait=False, kill_workers=True)


def _elsewhere(parent: int, settings: Any, directory: Path, name: str) -> None:
    """In a process of loky's: one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its processes
    # A killed parent stops nobody. Left alone they would train on in a directory that a resumed run writes to.
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    from sidestream.experiments.run import do_at

    do_at(settings, directory, name)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class Progress:
    """A bar a task, from the last step in its stages' metrics.jsonl."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description:<22}"), BarColumn(bar_width=24), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, *times, refresh_per_second=2) as bars:
            shown = {}
            over = False
            while not over:
                over = self.over.wait(1.0)
                for task in self.tasks:
                    done = sum(_steps_done(folder) for folder in task.job.stages)
                    if task.key not in shown and (done or task.finished()):
                        shown[task.key] = bars.add_task(task.job.name, total=sum(task.job.stages.values()) or None)
                    if task.key in shown:
                        bars.update(shown[task.key], completed=done)


def _steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (ValueError, KeyError):
        return 0
