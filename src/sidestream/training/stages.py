"""The three stages of LS-AR, each a function of models and rows: what trains, on what, with which loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from sidestream.channels import GoalEncoder, mean_pool
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.decode import pad_right
from sidestream.tasks.base import Example
from sidestream.training.batches import RowConfig, Rows, collate
from sidestream.training.loop import LoopConfig, train
from sidestream.training.objectives import UNSCORED, GoalAlignment, GoalReconstruction, ScoredLM


def train_lm(
    model: PreTrainedModel | AttachedLM,
    examples: Sequence[Example],
    rows: RowConfig,
    loop: LoopConfig,
    directory: Path,
    *,
    seed: int,
    filler: Sequence[int],
    pooled: Tensor | None = None,
    label: str = "",
    resume: bool = False,
    tags: dict[str, Any] | None = None,
) -> None:
    """Stage 1 (a bare model) or stage 3 (an attached one): next-token prediction on windowed text.

    A finished stage leaves its weights in `directory`; with `resume` they are loaded and nothing trains. Which weights
    train is decided by `requires_grad`.
    """
    data = Rows(examples, rows, batch_size=loop.batch_size, steps=loop.steps, seed=seed, filler=filler, pooled=pooled)
    train(ScoredLM(model), data, loop, directory, seed=seed, collate=collate, label=label, resume=resume, tags=tags)


def align_goal(
    encoder: GoalEncoder,
    pooled: Tensor,
    trajectory: Tensor,
    goal_ids: Sequence[Sequence[int]],
    vocabulary: int,
    loop: LoopConfig,
    directory: Path,
    *,
    seed: int,
    reconstruction_weight: float,
    label: str = "",
    resume: bool = False,
    tags: dict[str, Any] | None = None,
) -> None:
    """Stage 2: E_pred learns to predict the trajectory's vector from the goal's, the encoder frozen.

    Args:
        pooled, trajectory: (N, E) pooled encoder states of goals and of true trajectories.
        goal_ids: the goals' tokens, for the reconstruction term.
        vocabulary: V, for the reconstruction term.
        reconstruction_weight: 0 leaves VICReg alone, as the paper has it.
    """
    targets, _ = pad_right(goal_ids, value=UNSCORED)
    reconstruction = None
    if reconstruction_weight:
        reconstruction = GoalReconstruction(encoder.width, vocabulary)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(len(pooled), (loop.steps * loop.batch_size,), generator=generator)
    data = _Vectors(pooled, trajectory, targets, order)
    train(
        GoalAlignment(encoder, reconstruction, reconstruction_weight),
        data,
        loop,
        directory,
        seed=seed,
        collate=_as_is,
        label=label,
        resume=resume,
        tags=tags,
    )


@torch.no_grad()
def pooled_states(model: AttachedLM, texts: Sequence[Sequence[int]], batch_size: int = 256) -> Tensor:
    """(N, E) mean-pooled frozen encoder states of token lists, at the channel's `pool_layer`.

    The encoder never changes after stage 1, so every goal is read once and not once per step.
    """
    parts = []
    for start in range(0, len(texts), batch_size):
        ids, mask = pad_right(texts[start : start + batch_size], device=model.device)
        parts.append(mean_pool(model.goal_hidden(ids, mask), mask.bool()).cpu())
    return torch.cat(parts)


class _Vectors(Dataset):
    def __init__(self, pooled: Tensor, trajectory: Tensor, goal_ids: Tensor, order: Tensor) -> None:
        self.tensors = {"pooled": pooled, "trajectory": trajectory, "goal_ids": goal_ids}
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        # A batch in one gather: row by row, the loader would cost as much as the step.
        which = self.order[indices]
        return {name: tensor[which] for name, tensor in self.tensors.items()}


def _as_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch
