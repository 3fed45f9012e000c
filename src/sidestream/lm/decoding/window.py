"""The window W that the text channel sees, and how it moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from sidestream.lm.models.blocks import learned_positions, takes, text_config


@dataclass(frozen=True, kw_only=True)
class Window:
    """The text channel sees the last `size` tokens and nothing else of the text.

    Columns of the batch are counted, so padding between two turns of a row takes up room in its window.
    """

    size: int
    """W, in tokens."""
    policy: Literal["reindex", "rolling"]
    """`reindex`: drop the oldest token and encode the rest anew at positions 0..W-1. Exact for every model, needed by
    learned positions, and no text older than W can influence a logit. Costs a W-token forward per token once full.
    `rolling`: keep the keys and values of the last W tokens at their true positions, as sliding-window attention does.
    One token per step, for rotary models. A kept key was computed when older tokens were still visible, so through L
    blocks traces reach back up to L x W tokens. Float32 angles are good to 0.004 at position 100,000."""
    encoder_size: int | None = None
    """Tokens that E_base sees when a dynamic channel reads the text (always `rolling`). None: the whole text, as the
    tracker was trained; the encoder's keys and values then grow with the text, token by token."""

    def __post_init__(self) -> None:
        for name in ("size", "encoder_size"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise ValueError(f"Window.{name} is {value} tokens; it must be at least 2")
        if self.policy not in ("reindex", "rolling"):
            raise ValueError(f"window policy {self.policy!r} is unknown; use 'reindex' or 'rolling'")


def checked_window(lm: PreTrainedModel, window: int | Window | None, reader: PreTrainedModel | None) -> Window | None:
    """The window this model can take: a number gets `rolling` where positions are rotary, else `reindex`.

    Args:
        lm: the model that sees the text.
        window: as a user gives it.
        reader: the encoder of a dynamic channel, which reads the text too; None where nobody does.

    Raises:
        ValueError: a window the model or the encoder cannot take.
    """
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int | Window):
        raise ValueError(f"window is {window!r}; give a number of tokens or a sidestream.Window")
    table = learned_positions(lm)
    name = type(lm).__name__
    # ALiBi models take no positions, or say so (Falcon has both kinds).
    rotary = table is None and takes(lm, "position_ids") and not getattr(text_config(lm), "alibi", False)
    if isinstance(window, int):
        window = Window(size=window, policy="rolling" if rotary else "reindex")
    if window.policy == "rolling" and not rotary:
        kind = "learned absolute" if table is not None else "no rotary"
        raise ValueError(f"{name} has {kind} positions, which 'rolling' cannot keep; use 'reindex'")
    if table is not None and window.size > table:
        raise ValueError(f"the window is {window.size} tokens but {name} has learned positions for {table}")
    if window.encoder_size is not None and reader is None:
        raise ValueError("Window.encoder_size is set but a static goal reads no text; leave it out")
    if window.encoder_size is not None and reader is not None and learned_positions(reader) is not None:
        raise ValueError(f"Window.encoder_size needs a rotary encoder; {type(reader).__name__} has learned positions")
    return window


def chunks(input_ids: Tensor, attention_mask: Tensor | None, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Tokens in pieces of at most `size`, each with the mask up to its end."""
    for start in range(0, input_ids.shape[1], size):
        piece = input_ids[:, start : start + size]
        after = input_ids.shape[1] - start - piece.shape[1]
        yield piece, None if attention_mask is None else attention_mask[:, : attention_mask.shape[1] - after]
