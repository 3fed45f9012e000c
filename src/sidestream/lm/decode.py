"""Lean batched greedy decoding under a window: forced tokens first, then the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.attach import AttachedLM


@torch.no_grad()
def greedy(
    model: Any,
    forced: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    window: int,
    goal: LatentState | None = None,
    batch_size: int = 128,
) -> list[list[int]]:
    """Greedy continuations under `reindex`: every token sees the last W tokens at positions 0..W-1, and nothing else.

    Forced tokens older than W can reach no logit under this policy, so they are not run at all: a horizon of 16,384
    costs what one of W costs. `generate(window=W)` gives the same tokens.

    Args:
        model: an `AttachedLM` or a bare causal LM.
        forced: the tokens each row is given, any lengths.
        new_tokens: how many tokens to generate for every row.
        window: W.
        goal: one latent state per row; None decodes without a goal.
        batch_size: rows at a time.

    Returns:
        `new_tokens` ids per row.
    """
    rows: list[list[int]] = [list(ids[-window:]) for ids in forced]
    head: Any = (model.lm if isinstance(model, AttachedLM) else model).get_output_embeddings()
    for _ in range(new_tokens):
        for start in range(0, len(rows), batch_size):
            part = slice(start, min(start + batch_size, len(rows)))
            state = None
            if goal is not None:
                state = goal.select(torch.arange(part.start, part.stop, device=goal.device))
            states = last_states(model, [row[-window:] for row in rows[part]], goal=state)
            for row, token in zip(rows[part], head(states).argmax(dim=-1).tolist(), strict=True):
                row.append(token)
    return [row[-new_tokens:] for row in rows]


@torch.no_grad()
def last_states(model: Any, rows: Sequence[Sequence[int]], *, goal: LatentState | None = None) -> Tensor:
    """(B, D) last-layer states at each row's last token."""
    ids, mask = pad_right(rows, device=model.device)
    if isinstance(model, AttachedLM):
        hidden = model.hidden(ids, goal=goal, attention_mask=mask)
    else:
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden[torch.arange(len(rows), device=hidden.device), mask.sum(dim=1) - 1]


def pad_right(
    rows: Sequence[Sequence[int]], *, value: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(B, T) ids and their mask, shorter rows filled with `value` at the end."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([list(row) + [value] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask
