"""Jobs on many machines: each is a task of Ray's, which begins when those that it needs are done and a machine is free.

All machines have this package and see the run directory under one path, on storage that they share: there a job that
was on a lost machine goes on, on another one, from its last checkpoint. Start the command on a machine of the cluster.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sidestream.experiments.engine import Progress, in_order
from sidestream.experiments.provenance import provenance

if TYPE_CHECKING:
    from sidestream.experiments.run import Task

LOSSES = 10
"""Machines, or worker processes, that may be lost under one job before the run is given up."""
SAME = ("sidestream", "torch", "transformers")
"""Packages whose version must be the same on every machine."""


class RayEngine:
    """A Ray cluster.

    Args:
        address: HOST:PORT of its head; `auto` finds the one that this machine belongs to.
        cpus: cores, and threads, of a job.
        gpus: GPUs of a job, or a share of one (0.25: four jobs a GPU); None for one where the cluster has any.

    Raises:
        ValueError: `cpus` or `gpus` is out of range.
    """

    def __init__(self, address: str = "auto", *, cpus: int = 1, gpus: float | None = None) -> None:
        if cpus < 1 or (gpus or 0) < 0:
            raise ValueError(f"cpus is {cpus} and gpus {gpus}; a job takes at least 1 core and no less than 0 GPUs")
        self.address, self.cpus, self.gpus = address, cpus, gpus

    def run(self, tasks: Sequence[Task], *, alone: bool = False) -> None:
        """As `Engine.run` says.

        Raises:
            ValueError: the cluster cannot be reached or has no machine for a job; a machine does not see the run
                directory, or has other versions; a job was lost again and again.
        """
        if not tasks:
            return
        if alone:
            table = tasks[0].work.settings.table
            raise ValueError(f"{table} times one job at a time on one machine; run it there with --engine local")
        ray = _connected(self.address)
        folders = {task.work.directory.resolve() for task in tasks}
        mark = f".shared-{uuid4().hex}"
        try:
            for folder in folders:
                (folder / mark).touch()
            self._run(ray, tasks, mark)
        finally:
            ray.shutdown()
            for folder in folders:
                (folder / mark).unlink(missing_ok=True)

    def _run(self, ray: Any, tasks: Sequence[Task], mark: str) -> None:
        job = ray.remote(max_retries=LOSSES, **self._resources(ray))(_on_a_machine)
        here = {"folder": os.getcwd(), "mark": mark, "threads": self.cpus, "versions": _versions()}
        refs: dict[str, Any] = {}
        left: dict[Any, str] = {}
        for task in in_order(sorted(tasks, key=lambda task: -task.job.weight)):
            settings, directory, name = task.address
            needs = [refs[key] for key in task.needs if key in refs]
            address = (settings, directory.resolve(), name)
            refs[task.key] = job.options(name=f"sidestream {name}").remote(address, here, *needs)
            left[refs[task.key]] = name
        try:
            with Progress(tasks):
                while left:
                    (done,), _ = ray.wait(list(left), num_returns=1)
                    _result(ray, done, left.pop(done))
        finally:
            # What an error or Ctrl-C leaves is stopped at once, and gone before this ends.
            for ref in left:
                ray.cancel(ref, force=True)
            if left:
                ray.wait(list(left), num_returns=len(left), timeout=30)

    def _resources(self, ray: Any) -> dict[str, float]:
        gpus = self.gpus if self.gpus is not None else float(ray.cluster_resources().get("GPU", 0) >= 1)
        wanted = {"CPU": self.cpus, "GPU": gpus}
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(has.get(kind, 0) >= count for kind, count in wanted.items()) for has in machines):
            raise ValueError(
                f"no machine of the cluster at {self.address} has {self.cpus} cores and {gpus:g} GPUs for a job; ask "
                "for less with --cpus and --gpus"
            )
        return {"num_cpus": self.cpus, "num_gpus": gpus}


def _connected(address: str) -> Any:
    if importlib.util.find_spec("ray") is None:
        raise ValueError("--engine ray needs Ray, which is not installed; pip install 'sidestream[ray]'")
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray itself would try for a minute
        import ray

        tables = {"env_vars": {name: os.environ[name] for name in ("SIDESTREAM_TABLES",) if name in os.environ}}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=tables)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"no Ray cluster is reached at {address} ({said}); start one with `ray start --head`, and give --address "
            "HOST:PORT on a machine that belongs to it"
        ) from None
    return ray


def _versions() -> dict[str, str]:
    found = provenance("")
    return {"commit": found["commit"], **{name: found["versions"].get(name, "none") for name in SAME}}


def _on_a_machine(address: tuple[Any, Path, str], there: dict[str, Any], *_: None) -> None:
    """In a worker of Ray's: one job. Jobs that it needs have ended before, as Ray waits for every argument.

    Args:
        there: the command's own folder, versions, and mark in the run directory; and how many threads to take.
    """
    settings, directory, name = address
    machine = socket.gethostname()
    if not (directory / there["mark"]).exists() or not Path(there["folder"]).is_dir():
        raise ValueError(
            f"{machine} does not see {directory} and {there['folder']} as they are where the command was given; give "
            "it in a folder, and an --out, on storage that all machines share"
        )
    for package, version in _versions().items():
        if version != (theirs := there["versions"][package]):
            raise ValueError(f"{machine} has {package} {version}, the command {theirs}; install the same everywhere")
    import torch

    from sidestream.experiments.run import do_at

    os.chdir(there["folder"])  # settings may name files from here
    torch.set_num_threads(there["threads"])
    do_at(settings, directory, name)


def _result(ray: Any, ref: Any, name: str) -> None:
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ValueError(
            f"job {name} was lost {LOSSES + 1} times, the last time by {type(error).__name__} (out of memory?); go on "
            "with --resume"
        ) from None
