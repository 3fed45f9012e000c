"""Experiments as data: JSON round trip, the run directory, and where a number came from."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import types
import typing
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PACKAGES = ("sidestream", "torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "scikit-learn")


def to_json(experiment: Any) -> dict[str, Any]:
    """A (nested) dataclass as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(experiment)))


def from_json(kind: type[T], record: Any, *, where: str = "") -> T:
    """The dataclass that `to_json` wrote, equal to the original.

    Raises:
        ValueError: an unknown field, or a value of another type; names the field.
    """
    return _read(kind, record, where)


def _read(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where or 'the experiment'} must be an object, got {value!r}")
        hints = typing.get_type_hints(kind)
        unknown = set(value) - {field.name for field in fields(kind)}
        if unknown:
            raise ValueError(f"unknown field {where + '.' if where else ''}{sorted(unknown)[0]}")
        return kind(**{name: _read(hints[name], item, f"{where}.{name}".lstrip(".")) for name, item in value.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_read(arguments[0], item, where) for item in value)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {value!r}; use one of {', '.join(map(str, arguments))}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is {value!r}; it must be of type {kind.__name__}")
    return value


def first_difference(mine: Any, theirs: Any, where: str = "") -> str | None:
    """Name and both values of the first field in which two JSON objects differ; None if they are equal."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in [*mine, *(k for k in theirs if k not in mine)]:
            found = first_difference(mine.get(name), theirs.get(name), f"{where}.{name}".lstrip("."))
            if found:
                return found
        return None
    return None if mine == theirs else f"{where} is {theirs!r} there and {mine!r} here"


def open_run(directory: Path, experiment: Any, *, resume: bool) -> None:
    """Make the run directory and write experiment.json, or check that the one there belongs to this experiment.

    Raises:
        ValueError: the directory holds another experiment, or this one already while `resume` is off.
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
        return
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty and holds no run; choose another --out")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write to {directory}: {error.strerror}; choose another --out") from error


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
    import os

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
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
