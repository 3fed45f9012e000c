"""Pinned goals as files: the entries of one goal, read once, with what they belong to, in safetensors.

The file says which base model and tokenizer it was compiled with and refuses others; a digest over all of it finds
damage; a tag made with a key (`sidestream.lm.goals.signing`) finds what somebody changed on purpose.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sidestream.channels import LatentState
from sidestream.lm.models.fingerprint import fingerprint

Precision = Literal["float32", "bfloat16", "int8"]
"""How keys and values are stored; `int8`: with one float32 scale for each entry of each head."""
_FORMAT = 1
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def save_goal(
    model: Any, state: LatentState, path: str | Path, *, precision: Precision = "float32", key: Any = None
) -> None:
    """Write a pinned goal of one row.

    Args:
        model: the attached model that read it.
        state: of `model.encode_goal(...)`.
        path: the file, ending in `.safetensors`.
        precision: of keys and values.
        key: signs the file (`sidestream.lm.goals.signing.load_key`); whoever loads it with that key knows who wrote it.

    Raises:
        ValueError: nothing pinned, several rows, an unknown precision, or a file that cannot be written.
    """
    if state.keys is None or state.values is None or state.entries is None or state.batch_size != 1:
        raise ValueError("a goal file holds one pinned goal: encode_goal of one goal, by a model that pins")
    check_precision(precision)
    tensors: dict[str, Tensor] = {}
    for name in ("keys", "values"):
        found = getattr(state, name)[0].detach().cpu()
        if precision == "int8":
            scale = found.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
            tensors[name], tensors[f"{name}_scale"] = (found.float() / scale).round().to(torch.int8), scale
        else:
            tensors[name] = found.to(_TYPES[precision])
    for name in ("entries", "entry_ids", "entry_parts"):
        if getattr(state, name) is not None:
            tensors[name] = getattr(state, name)[0].detach().cpu().to(torch.int32)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    about = {
        "format": _FORMAT,
        "base": {"class": type(model.lm).__name__, "name_or_path": Path(model.lm.config.name_or_path or "").name},
        "fingerprint": fingerprint(model.lm),
        "tokenizer": None if model.tokenizer is None else tokenizer_hash(model.tokenizer),
        "precision": precision,
        "parts": list(state.part_names),
        "sha256": _digest(tensors),
        "key": None if key is None else key.key_id.hex(),
    }
    tag = "" if key is None else key.tag(_message(about)).hex()
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={"goal": json.dumps(about, sort_keys=True), "tag": tag})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def check_precision(precision: str) -> None:
    """Raises `ValueError` where there is no such precision."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; use {', '.join(get_args(Precision))}")


def load_goal(model: Any, path: str | Path, *, key: Any = None) -> LatentState:
    """The state of a compiled goal, one row, ready for `generate(goal=...)`.

    Args:
        model: an attached model that pins, on the base that the goal was compiled with.
        path: what `save_goal` wrote.
        key: the key that the file must be signed with; None takes unsigned and signed files alike.

    Raises:
        ValueError: no such file, a damaged or altered one, another base, another tokenizer, or a missing or wrong
            signature.
    """
    path = Path(path)
    about, tag, tensors = _read(path)
    if _digest(tensors) != about["sha256"]:
        raise ValueError(f"{path} is damaged or was altered: its entries are not those it was written with")
    if key is not None:
        if not tag:
            raise ValueError(f"{path} is not signed, and a key was given to check it with")
        if about["key"] != key.key_id.hex() or not key.matches(_message(about), bytes.fromhex(tag)):
            raise ValueError(f"{path} was signed with another key than {key!r}, or altered since")
    base = about["base"]
    if about["fingerprint"] != fingerprint(model.lm):
        raise ValueError(
            f"{path} was compiled for another base: {base['class']} {base['name_or_path']!r} with other weights than "
            f"this {type(model.lm).__name__}; compile it again for this one"
        )
    if model.tokenizer is not None and about["tokenizer"] not in (None, tokenizer_hash(model.tokenizer)):
        raise ValueError(f"{path} was compiled with another tokenizer; compile it again with this one")
    found: dict[str, Tensor] = {}
    for name in ("keys", "values"):
        values = tensors[name]
        if about["precision"] == "int8":
            values = values.float() * tensors[f"{name}_scale"]
        found[name] = values.to(model.device, model.lm.dtype)[None]
    for name in ("entries", "entry_ids", "entry_parts"):
        if name in tensors:
            found[name] = tensors[name].to(model.device, torch.long)[None]
    return LatentState(**found, part_names=tuple(about["parts"]))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the vocabulary: what makes the same text the same tokens, as far as it can be told cheaply."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(words.encode()).hexdigest()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _message(about: dict[str, Any]) -> bytes:
    return b"sidestream goal file\0" + json.dumps(about, sort_keys=True).encode()


def _read(path: Path) -> tuple[dict[str, Any], str, dict[str, Tensor]]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such goal file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(metadata["goal"])
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']!r}; this version reads {_FORMAT}")
        known = {"base", "fingerprint", "tokenizer", "precision", "parts", "sha256", "key"} <= about.keys()
        whole = {"keys", "values", "entries"} <= tensors.keys() and {"class", "name_or_path"} <= about["base"].keys()
        if not known or not whole:
            raise ValueError("parts of it are missing")
        bytes.fromhex(metadata["tag"])
        return about, metadata["tag"], tensors
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no goal file of `sidestream compile-goal`: {error}") from None
