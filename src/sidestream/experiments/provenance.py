"""Where a number comes from: the run directory, one writer at a time, the record of calls, commit and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sidestream.experiments.settings import first_difference, to_json

try:
    import fcntl
except ImportError:  # Windows: two processes in one run are not found out there
    fcntl = None

PACKAGES = ("sidestream", "torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "scikit-learn")


def open_run(directory: Path, experiment: Any, *, resume: bool) -> None:
    """Make the run directory and write experiment.json, or check that the one there belongs to this experiment.

    Raises:
        ValueError: the directory holds another experiment, this one already while `resume` is off, or something else;
            another process is at work in it; or it cannot be written.
    """
    record = to_json(experiment)
    path = directory / "experiment.json"
    if path.exists():
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); choose another --out, or delete {directory}") from error
        difference = first_difference(record, there)
        if difference:
            raise ValueError(f"{directory} holds another run: {difference}; choose another --out")
        if not resume:
            raise ValueError(f"{directory} already holds this run; add --resume to go on, or choose another --out")
    else:
        try:
            if directory.exists() and any(name.name != f"{path.name}.partial" for name in directory.iterdir()):
                raise ValueError(f"{directory} is not empty and holds no run; choose another --out")
            write_whole(path, json.dumps(record, indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"cannot write to {directory}: {error.strerror}; choose another --out") from error
    _hold(path)


_HELD: dict[tuple[int, int], int] = {}
"""Device and inode of each experiment.json that this process holds, and its descriptor."""


def _hold(path: Path) -> None:
    """Keep a run to this process until it ends, however it ends.

    Raises:
        ValueError: another process has it.
    """
    if fcntl is None:
        return
    found = path.stat()
    if (found.st_dev, found.st_ino) in _HELD:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(
            f"another process is at work in {path.parent}; wait for it, or choose another --out"
        ) from error
    except OSError:  # a file system without locks
        os.close(descriptor)
        return
    _HELD[found.st_dev, found.st_ino] = descriptor


def record_call(directory: Path, command: str, data_hash: str) -> dict[str, Any]:
    """Add this call to the run's calls.json and say where the numbers of all its calls together come from.

    Returns:
        Command, commit, versions, machine and data hash of this call, for results.json; `calls`, how many there were;
        and `dirty`, true if any of them was, or if they were made at more than one commit.

    Raises:
        ValueError: the data are not those of the first call.
    """
    path = directory / "calls.json"
    calls = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    calls.append({**provenance(command), "data_hash": data_hash})
    first, last = calls[0], calls[-1]
    if last["data_hash"] != first["data_hash"]:
        raise ValueError(
            f"the data are not those that {directory} began with (another text in the haystack file, or another "
            "version of this program); choose another --out"
        )
    if last["commit"] != first["commit"]:
        print(f"{directory} began at commit {first['commit'][:10]}, this is {last['commit'][:10]}", file=sys.stderr)
    write_whole(path, json.dumps(calls, indent=1) + "\n")
    dirty = any(call["dirty"] for call in calls) or len({call["commit"] for call in calls}) > 1
    return {**last, "dirty": dirty, "calls": len(calls)}


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either there in full or not at all."""
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def provenance(command: str) -> dict[str, Any]:
    """Commit, dirty flag, versions and machine of this process. Outside a git checkout everything counts as dirty."""
    commit, dirty = _git_state(Path(__file__).resolve().parent)
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command": command,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Processor, cores and threads in use, accelerator."""
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    found = {"cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def _git_state(folder: Path) -> tuple[str, bool]:
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", ".")  # installed into a folder of somebody else's checkout is not ours
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
