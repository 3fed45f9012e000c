"""How E_base, the frozen encoder, reads: goals of any form, and the running text of a dynamic channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sidestream.channels import LatentState
from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache, feed_for
from sidestream.lm.decoding.masks import positions_of
from sidestream.lm.decoding.window import chunks
from sidestream.lm.models.blocks import decoder_blocks, learned_positions, takes, text_config
from sidestream.lm.models.terms import InForce
from sidestream.lm.texts.prompts import chat_ids, prompt_ids

Goal = LatentState | Tensor | Mapping[str, Any] | Sequence[Any] | str | Path
"""Text; a `Path`, the file of a compiled goal; a chat, as a list of messages; token ids as a list, a (T,) or (B, T)
tensor or what a tokenizer returns; a list of texts, chats or lists of ids, one a row; or a state."""


def goal_ids(
    goal: Any, mask: Tensor | None, tokenizer: PreTrainedTokenizerBase | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(B, T) ids and mask of goals in any form but a state.

    Args:
        goal: see `Goal`.
        mask: (B, T) or, for one goal, (T,); None takes the one that comes with the goal, or every token.
        tokenizer: for text and chats.
        device: where both go.

    Raises:
        ValueError: a goal that is empty, of another type, or text without a tokenizer.
    """
    rows = goal
    if isinstance(goal, Mapping) and "input_ids" in goal:
        rows, own = goal["input_ids"], goal.get("attention_mask")
        if not isinstance(rows, Tensor) and len({len(row) for row in rows if hasattr(row, "__len__")}) < 2:
            rows, own = torch.as_tensor(rows), None if own is None else torch.as_tensor(own)
        mask = own if mask is None and isinstance(own, Tensor) else mask
    elif isinstance(goal, str) or _all(goal, Mapping) or _all(goal, int):
        rows = [goal]
    if isinstance(rows, list | tuple):
        rows = [_row_ids(row, tokenizer) for row in rows]
        if not rows or any(isinstance(row, list | tuple) and not row for row in rows):
            raise ValueError("a goal is empty: nothing to encode")
    if isinstance(rows, list) and all(_all(row, int) for row in rows):
        width = max(len(row) for row in rows)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        rows = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    if isinstance(rows, Tensor) and not rows.numel():
        raise ValueError("a goal is empty: nothing to encode")
    if isinstance(rows, Tensor) and rows.dim() == 1:
        rows, mask = rows[None], mask[None] if mask is not None and mask.dim() == 1 else mask
    if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.dtype not in (torch.long, torch.int):
        given = f"{tuple(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(goal).__name__
        raise ValueError(
            "a goal is text, messages, lists of token ids, a (T,) or (B, T) tensor of ids, what a tokenizer returns, "
            f"or a LatentState; got {given}"
        )
    return rows.to(device), torch.ones_like(rows, device=device) if mask is None else mask.to(device)


def _all(row: Any, kind: type) -> bool:
    return isinstance(row, list | tuple) and bool(row) and all(isinstance(item, kind) for item in row)


def _row_ids(row: Any, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """One goal of a list as token ids; what is none of its forms comes back as it is."""
    if isinstance(row, str) or _all(row, Mapping):
        if tokenizer is None:
            raise ValueError("goals given as text need a tokenizer: attach(..., tokenizer=...), or pass token ids")
        return prompt_ids(tokenizer, row) if isinstance(row, str) else chat_ids(tokenizer, row)
    return row.tolist() if isinstance(row, Tensor) and row.dim() == 1 else row


def positions(lm: PreTrainedModel) -> int | None:
    """Tokens that a model was made for; None where its configuration does not say (ALiBi)."""
    return getattr(text_config(lm), "max_position_embeddings", None)


def check_goals(reader: PreTrainedModel, mask: Tensor) -> None:
    """Raises `ValueError` where a goal, read as one text, has more tokens than E_base was made for."""
    limit, longest = positions(reader), int(mask.sum(dim=1).max())
    if limit is not None and longest > limit:
        raise ValueError(
            f"a goal has {longest} tokens and E_base ({type(reader).__name__}) was made for {limit}; shorten it"
        )


def read(reader: PreTrainedModel, layer: int, ids: Tensor, mask: Tensor | None, cache: LatentCache | None) -> Tensor:
    """(B, T, E) hidden states of tokens at one layer, every channel closed, without gradients or dropout.

    Blocks above that layer do not run.

    Raises:
        ValueError: the text is longer than the reader's table of positions.
    """
    size = cache.window.size if cache is not None and cache.window is not None else ids.shape[1]
    hidden = []
    with _frozen(reader), InForce(None):
        for piece, piece_mask in chunks(ids, mask, size):
            if cache is not None:
                feed = {**feed_for(reader, cache, piece, piece_mask)[0], CACHE_NAME: cache}
            else:
                feed = {"input_ids": piece, "attention_mask": piece_mask}
                if piece_mask is not None and takes(reader, "position_ids"):
                    feed["position_ids"] = positions_of(piece_mask)
            _check_table(reader, piece, feed["attention_mask"])
            hidden.append(_up_to(reader, layer, {**feed, "use_cache": cache is not None}))
    return torch.cat(hidden, dim=1)


# A context variable: the hook may hang on a model that other threads are decoding with.
_READING: ContextVar[bool] = ContextVar("sidestream_reading", default=False)


class _Reached(Exception):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _stop(module: nn.Module, args: tuple, kwargs: dict) -> None:
    if _READING.get():
        raise _Reached(args[0] if args else kwargs["hidden_states"])


def _up_to(reader: PreTrainedModel, layer: int, feed: dict[str, Any]) -> Tensor:
    base: Any = reader.base_model
    _, blocks = decoder_blocks(reader)
    if layer in (-1, len(blocks)):
        return base(**feed, output_hidden_states=True).hidden_states[-1]  # behind the last norm
    hook = blocks[layer % (len(blocks) + 1)].register_forward_pre_hook(_stop, with_kwargs=True)
    token = _READING.set(True)
    try:
        base(**feed)
    except _Reached as reached:
        return reached.hidden
    finally:
        _READING.reset(token)
        hook.remove()
    raise AssertionError("no block ran")


def _check_table(reader: PreTrainedModel, ids: Tensor, mask: Any) -> None:
    longest = ids.shape[1] if mask is None else mask.shape[-1]
    limit = positions(reader)
    if limit is None or longest <= limit or learned_positions(reader) is None:
        return
    if mask is not None:
        longest = int(mask.sum(1).max())  # padding takes no position
    if longest > limit:
        raise ValueError(
            f"E_base ({type(reader).__name__}) has learned positions for {limit} tokens and is to read {longest}; "
            "shorten the text, or attach a rotary encoder with Window(encoder_size=...)"
        )


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
