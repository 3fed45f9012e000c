"""Who sees whom: masks over the text held, and positions counted from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig


def positions_of(mask: Tensor) -> Tensor:
    """(B, columns) positions, counted over the real tokens of each row."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def attention_for(
    config: PretrainedConfig, allowed: Tensor, dtype: torch.dtype, ahead: int = 0, *, reads: bool = False
) -> Any:
    """A (B, 1, T, columns) mask in the form a model takes: one per kind of layer where its layers differ.

    The first `ahead` columns are a pinned goal's, which layers with a window of their own see too. With `reads`, the
    first `ahead` queries are the goal's own, read as any text is.

    Raises:
        ValueError: an attention implementation or a kind of layer that takes no such mask.
    """
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            "a rolling window, or a goal beside layers with their own, needs attention 'sdpa' or 'eager', the model "
            f"has {config._attn_implementation!r}; load it with attn_implementation='sdpa' or use 'reindex'"
        )
    own = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention" if own is None else "sliding_attention"]
    masks = {}
    for kind in set(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"the model has layers of kind {kind!r}, which 'rolling' cannot mask; use 'reindex'")
        mask = allowed
        if kind == "sliding_attention" and own is not None:
            reached = near(torch.ones_like(allowed[:, 0, 0]), allowed.shape[2], own)
            reached[:, :, ahead if reads else 0 :, :ahead] = True
            mask = allowed & reached
        if config._attn_implementation == "eager":
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        masks[kind] = mask
    return masks if len(masks) > 1 else masks[kinds[0]]


def near(mask: Tensor, length: int, size: int) -> Tensor:
    """(B, 1, T, columns): each of the last T columns sees the real tokens among the `size` columns up to itself."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    queries = columns[-length:, None]
    reached = (columns <= queries) & (columns > queries - size)
    # A padding query sees nothing; let it see itself, so that its softmax is not NaN.
    return (reached & mask.bool()[:, None, None]) | (columns == queries)


def own_reach(config: PretrainedConfig) -> int | None:
    """The window that some of the model's own layers have; None where every layer sees the whole text."""
    kinds = getattr(config, "layer_types", None)
    reach = getattr(config, "sliding_window", None)
    if reach is None or kinds is not None and "sliding_attention" not in kinds:
        return None
    return None if getattr(config, "use_sliding_window", True) is False and kinds is None else reach
