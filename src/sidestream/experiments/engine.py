"""Where jobs run: here, or in processes beside this one. Another engine is another class with `run`."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sidestream.experiments.run import Task


class Engine(Protocol):
    """Does tasks, each after those that it needs (by key), in any order else."""

    def run(self, tasks: Sequence[Task], *, alone: bool = False) -> None:
        """Returns when all are done, and raises what one of them raised, after the others were stopped.

        Args:
            tasks: of one run or several. What a task needs and is not among them is finished.
            alone: one at a time, in this process.
        """


class LocalEngine:
    """joblib's processes on this machine, each with one thread: small models gain little from a second.

    Args:
        jobs: tasks at a time; None for one a core on a CPU, and one in all on a GPU and at `smoke`, where a process's
            imports would cost more than its work.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs

    def run(self, tasks: Sequence[Task], *, alone: bool = False) -> None:
        """As `Engine.run` says."""
        jobs = 1 if alone else self._jobs(tasks)
        for wave in waves(tasks):
            if jobs == 1 or len(tasks) == 1:
                for task in wave:
                    task.do()
            else:
                _side_by_side(wave, jobs)

    def _jobs(self, tasks: Sequence[Task]) -> int:
        if self.jobs is not None or not tasks:
            return self.jobs or 1
        import torch

        small = tasks[0].work.settings.scale == "smoke"
        return 1 if small or torch.cuda.is_available() else min(os.cpu_count() or 1, len(tasks))


def waves(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks in groups, each needing only what the groups before it did; in a group the longest first."""
    left, made = {task.key: task for task in tasks}, []
    while left:
        ready = [task for task in left.values() if not any(key in left for key in task.needs)]
        assert ready, f"jobs need each other: {', '.join(left)}"
        made.append(ready)
        left = {key: task for key, task in left.items() if task not in ready}
    return made


def _side_by_side(wave: Sequence[Task], jobs: int) -> None:
    from joblib import Parallel, delayed, parallel_config
    from joblib.externals.loky import get_reusable_executor

    # The longest first, so that no process is left with one at the end.
    order = sorted(wave, key=lambda task: -task.job.weight)
    count = max(2, min(jobs, len(order)))  # joblib would do a single one here, with this process's threads
    try:
        with _Progress(order), parallel_config(backend="loky", n_jobs=count, inner_max_num_threads=1):
            Parallel(pre_dispatch="all")(delayed(_elsewhere)(os.getpid(), *task.address) for task in order)
    finally:
        get_reusable_executor().shutdown(wait=False, kill_workers=True)


def _elsewhere(parent: int, settings: Any, directory: Path, name: str) -> None:
    """In a process of joblib's: one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its processes
    # A killed parent stops nobody. Left alone they would train on in a directory that a resumed run writes to.
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    from sidestream.experiments.run import do_at
    from sidestream.experiments.table import load

    load(settings.table)
    gc.freeze()  # every stage's Trainer collects garbage; torch's own objects need not be looked at each time
    do_at(settings, directory, name)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class _Progress:
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
