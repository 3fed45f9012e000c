"""Arms side by side: one process and one thread an arm, because small models gain little from a second thread."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def run_arms(
    work: Callable[[str], None],
    arms: Sequence[str],
    *,
    jobs: int,
    folders: Mapping[str, Sequence[tuple[Path, int]]],
) -> None:
    """Call `work(arm)` for every arm, `jobs` at a time, and show how far each is.

    Args:
        work: picklable; does everything through files. A ValueError or RuntimeError in it ends the run.
        folders: per arm, the stage folders whose metrics.jsonl tells the progress, with the steps each takes.
    """
    context = multiprocessing.get_context("spawn")
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, refresh_per_second=2)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool, bars as progress:
        futures: dict[str, Future] = {arm: pool.submit(work, arm) for arm in arms}
        tasks = {}
        try:
            while True:
                for arm, future in futures.items():
                    if arm not in tasks and (future.running() or future.done()):
                        tasks[arm] = progress.add_task(arm, total=sum(steps for _, steps in folders[arm]))
                    if arm in tasks:
                        progress.update(tasks[arm], completed=sum(_steps_done(path) for path, _ in folders[arm]))
                    if future.done():
                        future.result()  # raises what the worker raised
                if all(future.done() for future in futures.values()):
                    return
                time.sleep(1.0)
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def default_jobs(arms: int, scale: str) -> int:
    """One a core on a CPU; one in all on a GPU, and at `smoke`, where a worker's imports would cost more than its work.

    With more than one job this process goes down to one thread too: beside a busy process, two threads are slower.
    """
    import torch

    jobs = 1 if torch.cuda.is_available() or scale == "smoke" else min(os.cpu_count() or 1, arms)
    if jobs > 1:
        torch.set_num_threads(1)
    return jobs


def _one_thread() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    # A killed parent stops nobody. Left alone they would train on in a directory that a resumed run writes to.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (ValueError, KeyError):
        return 0
