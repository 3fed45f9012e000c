"""How a problem with latent slots becomes tokens, and how rows of different lengths become a batch.

    question  <start> <latent> ... <latent> <end>  remaining steps  answer

Source: CoCoNuT, method section; the details are those of the authors' recorded layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

UNSCORED = -100
"""Label of tokens that carry no loss."""


class Row(NamedTuple):
    """One training row."""

    ids: list[int]
    labels: list[int]
    """The token itself where it is scored, `UNSCORED` elsewhere. Not shifted."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The three special tokens and where they stand."""

    start_id: int
    """`<|start-latent|>`."""
    latent_id: int
    """`<|latent|>`, one per latent slot."""
    end_id: int
    """`<|end-latent|>`."""
    markers: bool = True
    """False leaves start and end out (plain no-CoT)."""

    def prompt(self, question: Sequence[int], latents: int) -> list[int]:
        """The question and its latent slots: what generation starts from."""
        slots = [self.latent_id] * latents
        return [*question, self.start_id, *slots, self.end_id] if self.markers else [*question, *slots]

    def row(self, question: Sequence[int], latents: int, rest: Sequence[int]) -> Row:
        """A training row; the loss is on `rest` (remaining steps, answer, end of text) alone."""
        prompt = self.prompt(question, latents)
        return Row([*prompt, *rest], [UNSCORED] * len(prompt) + list(rest))


def stage_counts(
    stage: int,
    steps: int,
    *,
    latents_per_step: int,
    max_stage: int,
    pad_to_max: bool,
    prompt: bool = False,
) -> tuple[int, int]:
    """How many leading steps a stage drops, and how many latents stand in their place.

    Up to `max_stage`, stage k drops k steps for k * c latents, in training also where a problem has fewer than k steps.
    A later stage drops every step. There, and in prompts, a problem gets as many latents as it has steps, at most
    `max_stage` steps' worth; with `pad_to_max`, as the stage has.

    Args:
        stage: k; 0 is explicit chain of thought.
        steps: of the problem.
        latents_per_step: c.
        max_stage: the last stage that adds latents.
        pad_to_max: give short problems as many latents as long ones.
        prompt: for generation.
    """
    latents = min(stage, max_stage)
    if not pad_to_max and (prompt or stage > max_stage):
        latents = min(latents, steps)
    return (steps if stage > max_stage else min(stage, steps)), latents * latents_per_step


def collate(rows: Sequence[Row], *, latent_id: int, pad_id: int) -> dict[str, Tensor]:
    """A training batch: `input_ids`, `labels`, `attention_mask`, each (B, T).

    Rows are padded on the left until their first latents stand in one column, so that one pass serves all rows, then on
    the right. A row without latents is padded on the right only.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    first = [row.ids.index(latent_id) if latent_id in row.ids else None for row in rows]
    column = max((at for at in first if at is not None), default=0)
    left = [0 if at is None else column - at for at in first]
    width = max(pad + len(row.ids) for pad, row in zip(left, rows, strict=True))
    right = [width - pad - len(row.ids) for pad, row in zip(left, rows, strict=True)]

    def padded(values: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([[fill] * a + v + [fill] * b for a, v, b in zip(left, values, right, strict=True)])

    return {
        "input_ids": padded([row.ids for row in rows], pad_id),
        "labels": padded([row.labels for row in rows], UNSCORED),
        "attention_mask": padded([[1] * len(row.ids) for row in rows], 0),
    }


def pad_left(
    rows: Sequence[Sequence[int]], *, pad_id: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(B, T) ids and mask of prompts that end in one column, as generation needs them.

    Raises:
        ValueError: there are no rows, or an empty one.
    """
    if not rows or not all(len(row) for row in rows):
        raise ValueError("generation needs at least one prompt, and no empty one")
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
