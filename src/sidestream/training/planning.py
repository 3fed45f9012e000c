"""Planning rows: windowed text for the decoder, the whole text for the encoder that the tracker reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from sidestream.channels import LatentState, mean_pool
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decode import pad_right
from sidestream.tasks.base import Example
from sidestream.training.batches import plan
from sidestream.training.objectives import UNSCORED


@dataclass(frozen=True, kw_only=True)
class PlanRowConfig:
    """How a trajectory becomes a row."""

    windows: tuple[int, ...] = (0,)
    """W to train at, drawn per row; 0 is everything in view. One model then serves every window it was trained at."""
    prompt_scored: bool = False
    """Put the loss on the prompt's tokens too (stage 1, a language model of the domain)."""


class PlanRows(Dataset):
    """A fixed number of rows, each a function of (seed, index).

    Args:
        examples: prompts and trajectories; `context_ids` is empty.
        config: windows and loss positions.
        batch_size, steps: rows are planned for exactly this many.
        seed: of order, windows and crops.
    """

    def __init__(
        self, examples: Sequence[Example], config: PlanRowConfig, *, batch_size: int, steps: int, seed: int
    ) -> None:
        self.examples = examples
        self.config = config
        self.seed = seed
        lengths = [len(example.goal_ids) + len(example.target_ids) for example in examples]
        self.order = plan(lengths, batch_size=batch_size, steps=steps, seed=seed)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[self.order[index]]
        return plan_row(example, self.config, random.Random(f"plan row {self.seed} {index}"))


def plan_row(example: Example, config: PlanRowConfig, rng: random.Random) -> dict[str, Any]:
    """Full text, the crop the decoder sees, its labels (the token after each), and where the crop begins."""
    goal = len(example.goal_ids)
    text = [*example.goal_ids, *example.target_ids]
    labels = [
        token if config.prompt_scored or place >= goal else UNSCORED for place, token in enumerate(text[1:], start=1)
    ]
    window = rng.choice(config.windows)
    first, last = 0, len(text) - 1
    if window and last > window:
        # Any stretch of W tokens that predicts some of the plan; its early positions see less than W, which the model
        # meets at test time too, at the start of a rollout.
        last = rng.randint(max(window, goal), len(text) - 1)
        first = last - window
    return {"full": text, "goal": goal, "first": first, "ids": text[first:last], "labels": labels[first:last]}


def collate_plans(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Right-padded batch."""
    ids, mask = pad_right([row["ids"] for row in rows])
    full, full_mask = pad_right([row["full"] for row in rows])
    labels, _ = pad_right([row["labels"] for row in rows], value=UNSCORED)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "full_ids": full,
        "full_mask": full_mask,
        "first": torch.tensor([row["first"] for row in rows]),
        "goal_length": torch.tensor([row["goal"] for row in rows]),
    }


class PlanLM(nn.Module):
    """Stage 3 of planning: next-token loss on windowed plans, the vector read from the whole text so far.

    Args:
        model: an attached model, static or dynamic.
        steered: False trains the bare decoder, the channel closed (the AR baseline).
    """

    def __init__(self, model: AttachedLM, *, steered: bool = True) -> None:
        super().__init__()
        self.model = model
        self.steered = steered

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        full_ids: Tensor,
        full_mask: Tensor,
        first: Tensor,
        goal_length: Tensor,
    ) -> dict[str, Tensor]:
        """Mean cross-entropy at labelled positions.

        Args:
            input_ids, attention_mask, labels: (B, W) the crop.
            full_ids, full_mask: (B, T) prompt and trajectory.
            first: (B,) where each crop begins in its full text.
            goal_length: (B,) tokens of each prompt.
        """
        terms = None
        if self.steered:
            vectors = plan_vectors(self.model, full_ids, full_mask, goal_length)
            if vectors.shape[1] > 1:
                places = (first[:, None] + torch.arange(input_ids.shape[1], device=first.device)).clamp(
                    max=vectors.shape[1] - 1
                )
                vectors = vectors.gather(1, places.unsqueeze(-1).expand(-1, -1, vectors.shape[-1]))
            terms = self.model.channel.film.terms(vectors)
        hidden = self.model.hidden(input_ids, terms=terms, attention_mask=attention_mask)
        head: Any = self.model.lm.get_output_embeddings()
        scored = labels != UNSCORED
        return {"loss": F.cross_entropy(head(hidden[scored]).float(), labels[scored])}


def plan_vectors(model: AttachedLM, full_ids: Tensor, full_mask: Tensor, goal_length: Tensor) -> Tensor:
    """(B, 1, G) static or (B, T, G) tracked vectors of whole texts, in one pass of the frozen encoder.

    Pooling the prompt's part of the full text's states equals encoding the prompt alone, as the encoder is causal.
    """
    channel = model.channel
    in_goal = torch.arange(full_ids.shape[1], device=full_ids.device)[None] < goal_length[:, None]
    hidden = model.goal_hidden(full_ids, full_mask)
    pooled = mean_pool(hidden, in_goal)
    state = LatentState(goal=channel.encoder.predict(pooled))
    if channel.tracker is None:
        return state.goal.unsqueeze(1)
    if channel.config.tracker_layer != channel.config.pool_layer:
        hidden = model.goal_hidden(full_ids, full_mask, layer=channel.config.tracker_layer)
    vectors, _ = channel.tracker.sequence(state, hidden, model.fires(full_ids, full_mask))
    return vectors
