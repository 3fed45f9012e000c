"""Checkpoints: folders of safetensors and JSON that appear whole or not at all, and from which nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says at which step, why, and what is safe."""


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Have `fill` write files into a folder, add their checksums, and move the folder to `path` in one step.

    Killed at any moment, or out of space, `path` is complete, or what it was before, or gone where it was being
    replaced. Power loss may tear files whose move was already recorded; the checksums tell.
    """
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        fill(partial)
        digests = {file.name: _digest(file) for file in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps(digests), encoding="utf-8")
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def damage(path: Path) -> str | None:
    """Why a folder is not what `write_folder` wrote; None if it is."""
    try:
        for name, digest in json.loads((path / MANIFEST).read_text(encoding="utf-8")).items():
            if _digest(path / name) != digest:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def checkpoints(directory: Path) -> dict[int, Path]:
    """The checkpoints of a directory by step, newest first, damaged ones too."""
    found = {int(match[1]): path for path in directory.glob("*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def newest_checkpoint(directory: Path) -> tuple[int, Path | None]:
    """Step and folder of the newest intact checkpoint; (0, None) if there is no checkpoint at all.

    Damaged ones that are newer are named on stderr.

    Raises:
        TrainingStopped: there are checkpoints and all are damaged.
    """
    problems = []
    for step, path in checkpoints(directory).items():
        problem = damage(path)
        if problem is None:
            for line in problems:
                print(f"{line}; going on from step {step}", file=sys.stderr)
            return step, path
        problems.append(f"checkpoint {path} is damaged ({problem})")
    if problems:
        raise TrainingStopped(f"{problems[0]}, and no older one is intact; delete {directory} to train this stage anew")
    return 0, None


def save_optimizer(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """Write the state of both: tensors to safetensors, numbers to JSON, whose floats come back bit by bit."""
    state = optimizer.state_dict()
    tensors, numbers = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous()
            else:
                numbers[f"{index}.{name}"] = value
    save_file(tensors, folder / "optimizer.safetensors")
    kept = {k: v for k, v in scheduler.state_dict().items() if isinstance(v, int | float | list)}
    record = {"groups": state["param_groups"], "numbers": numbers, "scheduler": kept}
    (folder / "optimizer.json").write_text(json.dumps(record), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """Restore what `save_optimizer` wrote."""
    record = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**load_file(folder / "optimizer.safetensors"), **record["numbers"]}.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    # JSON has no tuples.
    groups = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in record["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    scheduler.load_state_dict(record["scheduler"])


def save_generators(folder: Path) -> None:
    """Write the states of the global generators: python, numpy, torch, every CUDA device."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    tensors = {"torch": torch.random.get_rng_state(), "numpy": torch.from_numpy(np.array(keys, dtype=np.int64))}
    if torch.cuda.is_available():
        tensors.update({f"cuda.{i}": state for i, state in enumerate(torch.cuda.random.get_rng_state_all())})
    save_file(tensors, folder / "generators.safetensors")
    record = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(numpy_gauss)],
    }
    (folder / "generators.json").write_text(json.dumps(record), encoding="utf-8")


def load_generators(folder: Path) -> None:
    """Restore what `save_generators` wrote. CUDA devices that are not here are left out."""
    tensors = load_file(folder / "generators.safetensors")
    record = json.loads((folder / "generators.json").read_text(encoding="utf-8"))
    version, words, gauss = record["python"]
    random.setstate((version, tuple(words), gauss))
    name, position, has_gauss, numpy_gauss = record["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, numpy_gauss))
    torch.random.set_rng_state(tensors["torch"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
