"""What tells one base model from another: sampled weights, compared within the precision they are held in.

A file holds for each weight of the base its shape and a few of its values in float32. The same base may come back in
float16 or bfloat16, with more or fewer rows of embeddings, or with its weights offloaded; every one of those gives the
same values up to rounding. A weight that has been trained does not: float32 against float32 must agree to the bit, and
a rounded weight must be the nearest there is to the other, at the distances that rounding leaves.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sidestream.lm.models.adapters import base_weights
from sidestream.lm.models.blocks import bare

_LOGGER = logging.getLogger(__name__)
_HASHED = 256
_NEW = 128
"""Tokens at the end of a vocabulary that may be other ones, where an eighth of it is less; never more than half."""
_BUDGET, _LEAST, _MOST = 16384, 16, 256
"""Values in a file over all weights, and the fewest and most of one weight."""
_DOUBLE_ROUNDING, _TINY = 2.0**-10, 2.0**-24
"""float16's step, by which a bfloat16 made from float16 may be off the nearest; and float16's smallest number."""
_ENOUGH, _SPREAD, _USUAL = 64, 0.35, 1e-4
"""Values that tell rounding from training, the mean distance that does, and the least size of a value looked at."""


def fingerprint(model: nn.Module) -> str:
    """sha256 over names, shapes and evenly spaced values of all weights: cheap on any size, moved by any training.

    What seals of goals hold, and files of earlier versions. Values are rounded to bfloat16, so that a base trained in
    float32 is known again when it is served in bfloat16. Adapters in a model are not part of its base.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(base_weights(model).items()):
        flat = _at_hand(model, name, tensor).detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _HASHED)].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def sampled(lm: nn.Module) -> dict[str, dict[str, Any]]:
    """The weights of a base as a file holds them: by name the shape, whether its rows are tokens, and values.

    Raises:
        ValueError: weights on the meta device that nothing fills in.
    """
    weights, tokens = base_weights(lm), _by_token(lm)
    count = min(_MOST, max(_LEAST, _BUDGET // max(1, len(weights))))
    found = {}
    for name, tensor in weights.items():
        shape, rows = tuple(tensor.shape), name in tokens
        values = _values(_at_hand(lm, name, tensor), _places(shape, rows, min(count, tensor.numel())))
        coded = base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
        found[name] = {"shape": list(shape), "tokens": rows, "values": coded}
    return found


def difference(kept: dict[str, dict[str, Any]], lm: nn.Module) -> str | None:
    """The first weight in which a base is not the one that `sampled` was taken of; None where it is the same.

    Embeddings are compared in the rows that both have: a padded or extended vocabulary is the same base. So is one
    whose last tokens have other rows, as tokens added by each script anew have; the log says so.
    """
    weights, steps = base_weights(lm), []
    only = sorted(set(kept) ^ set(weights))
    if only:
        return f"{only[0]} is in one of them only"
    for name, about in kept.items():
        tensor, shape, rows = weights[name], tuple(about["shape"]), about["tokens"] is True
        if tuple(tensor.shape)[rows:] != shape[rows:]:
            return f"{name} is {tuple(tensor.shape)}, not {shape}"
        was = np.frombuffer(base64.b64decode(about["values"]), dtype="<f4")
        places = _places(shape, rows, len(was))
        shared = places < tensor.numel()  # rows come first: what lies behind them is in rows that this one has not
        now = _values(_at_hand(lm, name, tensor), places[shared])
        apart = _rounding(was[shared], now)
        if apart is None and rows:
            tokens = min(tensor.shape[0], shape[0])
            first = max(tokens // 2, tokens - max(tokens // 8, _NEW))
            old = places[shared] < first * (tensor.numel() // tensor.shape[0])
            apart = _rounding(was[shared][old], now[old])
            if apart is not None:
                _LOGGER.warning("%s differs in its last tokens: new ones, which the channel was not trained with", name)
        if apart is None:
            return f"{name} has other values"
        if len(shape) > 1:  # norms lie near 1, so near a 16-bit number
            steps.append(apart)
    # What rounding leaves is spread evenly over the half step, 0.5 on average; a little training lies near 0.
    every = np.concatenate([np.empty(0), *steps])
    if len(every) >= _ENOUGH and float(every.mean()) < _SPREAD:
        return "values have moved by less than rounding moves them"
    return None


def _by_token(lm: nn.Module) -> set[str]:
    """Names of the weights with one row per token of the vocabulary: those of embeddings and head."""
    ends: list[Any] = []
    for get in ("get_input_embeddings", "get_output_embeddings"):
        if hasattr(lm, get) and getattr(lm, get)() is not None:
            ends.append(getattr(lm, get)())
    rows = {id(tensor) for end in ends for tensor in bare(end).state_dict(keep_vars=True).values()}
    return {name for name, tensor in base_weights(lm, keep_vars=True).items() if id(tensor) in rows}


def _places(shape: tuple[int, ...], rows: bool, count: int) -> np.ndarray:
    """`count` places in the flattened weight, spread evenly. In embeddings, over rows, at a column of its own each."""
    size = int(np.prod(shape, dtype=np.int64)) if shape else 1
    at = np.arange(count, dtype=np.int64)
    if not rows or not size:
        return at * size // max(1, count)
    width = size // shape[0]
    return (at * shape[0] // count) * width + (at * 7919) % width


def _values(tensor: Tensor, places: np.ndarray) -> np.ndarray:
    flat = tensor.detach().reshape(-1)
    return flat[torch.from_numpy(places).to(flat.device)].to("cpu", torch.float32).numpy()


def _rounding(left: np.ndarray, right: np.ndarray) -> np.ndarray | None:
    """How two samples of one weight are apart, in half steps of the coarser precision; None where it is not one weight.

    They are equal, or one of them holds 16-bit numbers only, each the nearest there is to its partner.
    """
    if np.array_equal(left, right, equal_nan=True):
        return np.empty(0)
    for rounded, other in ((left, right), (right, left)):
        for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
            exact, true = torch.from_numpy(np.array(rounded)), torch.from_numpy(np.array(other))
            if not torch.equal(exact.to(dtype).float(), exact):
                continue
            apart = (exact - true).abs()
            slack = _TINY + (_DOUBLE_ROUNDING * true.abs() if dtype == torch.bfloat16 else 0.0)
            if bool((apart <= (true.to(dtype).float() - true).abs() + slack).all()):
                usual = true.abs() > _USUAL
                half_steps = np.ldexp(1.0, np.frexp(true[usual].numpy())[1] - bits - 1)
                return apart[usual].numpy() / half_steps
    return None


def _at_hand(lm: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The weight itself, where accelerate keeps it on the CPU or a disk and leaves an empty one in its place.

    Raises:
        ValueError: nothing keeps it.
    """
    if tensor.device.type != "meta":
        return tensor
    path, _, key = name.rpartition(".")
    module = lm
    for part in path.split(".") if path else []:
        module = bare(getattr(module, part))
    hook: Any = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        if getattr(part, "weights_map", None) is not None:
            return part.weights_map[key]
    raise ValueError(f"{type(lm).__name__}: {name} is on the meta device, without values; load the weights first")
