"""Treasure Hunt in LS-AR's three stages: settings, problems and models that more than one table trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from sidestream.channels import GoalConfig
from sidestream.experiments.run import Work
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.models.backbones import Backbone
from sidestream.lm.texts.text import Vocabulary
from sidestream.papers.lsar import Steered
from sidestream.tasks import treasure
from sidestream.tasks.base import Example
from sidestream.training.batches import RowConfig, Rows, collate
from sidestream.training.loop import LoopConfig, train
from sidestream.training.objectives import ScoredLM
from sidestream.training.stages import align_goal, pooled_states

H = TypeVar("H", bound="Hunted")


@dataclass(frozen=True, kw_only=True)
class Hunted(Steered):
    """Settings of a table that trains on Treasure Hunt."""

    window: int
    """W, tokens the text channel sees."""
    train_problems: int
    """Treasure Hunt problems to train on (the paper: 50,000)."""
    vocabulary: Literal["bpe", "subset"] = "bpe"
    """GPT-2's 50,257 tokens, or the same tokens cut down to those the task can have."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(window=1)
        most = max(self.stage1.batch_size, self.stage3.batch_size)
        if self.train_problems < most:
            raise ValueError(f"train_problems is {self.train_problems}; one batch alone takes {most}")


class HuntWork(Work[H], Generic[H]):
    """Problems, models and stages of one run directory; what is finished there is loaded."""

    sentences: Sequence[str] | None = None
    """Distractors other than the built-in ones."""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Of all problems."""
        if self.settings.vocabulary == "subset":
            return Vocabulary.subset(treasure.vocabulary_texts(self.sentences))
        return Vocabulary()

    @cached_property
    def training(self) -> list[treasure.TreasureProblem]:
        """Training problems, which every arm has."""
        raise NotImplementedError

    @cached_property
    def filler(self) -> list[int]:
        """Distractors, which stand in for a blank prompt."""
        return [token for problem in self.training[:200] for token in problem.distractor_ids]

    def examples(self) -> list[Example]:
        """The training problems as they are."""
        return [problem.example for problem in self.training]

    def fresh(self, shape: Backbone) -> Any:
        """An untrained LM on the device."""
        torch.manual_seed(self.settings.seed)
        model: Any = shape.build(
            vocabulary=self.vocabulary.size, window=self.settings.window, pad_id=self.vocabulary.pad_id
        )
        return model.to(self.device)

    def base(self, folder: str) -> Any:
        """E_base after stage 1, frozen; shared by every LS-AR arm."""
        model = self.fresh(self.settings.encoder)
        self.lm(folder, "stage1", ScoredLM(model), scored="all")
        return model.requires_grad_(False)

    def attached(self, base: Any, **channel: Any) -> AttachedLM:
        """A decoder that starts as its base (LS-AR, 3.3), with a fresh channel."""
        decoder = self.fresh(self.settings.encoder)
        decoder.load_state_dict(base.state_dict())
        torch.manual_seed(self.settings.seed)
        return attach(decoder, goal=GoalConfig(width=self.settings.goal_width, **channel), encoder=base)

    def align(self, folder: str, model: AttachedLM, label: str, *, calibrate: bool, reconstruction: float) -> Tensor:
        """Stage 2: E_pred; returns the pooled states of the training goals, (N, E)."""
        e, goals = self.settings, [problem.goal_ids for problem in self.training]
        pooled = pooled_states(model, goals)
        # CHOICE(LS-AR, 3.1): the "true trajectory" is the answer; distractors carry nothing about the goal.
        trajectory = pooled_states(model, [problem.answer_ids for problem in self.training])
        encoder = model.channel.encoder
        if calibrate:
            encoder.calibrate(pooled)
        align_goal(
            encoder,
            pooled,
            trajectory,
            goals,
            self.vocabulary.size,
            e.stage2,
            self.directory / folder / "stage2",
            seed=e.seed,
            reconstruction_weight=reconstruction,
            label=self.label(f"{label} stage 2"),
            resume=True,
            tags={"arm": folder, "stage": "2"},
        )
        encoder.to(self.device)
        return pooled

    def lm(
        self,
        folder: str,
        stage: str,
        module: nn.Module,
        *,
        examples: Callable[[], Sequence[Example]] | None = None,
        scored: Literal["answer", "all"] = "answer",
        pooled: Tensor | None = None,
        mask: float = 0.0,
    ) -> None:
        """Train stage 1 or 3; where it is finished it is loaded, for which no data are made.

        Args:
            examples: what to train on, if not `self.examples`.
            mask: p, the share of rows whose prompt is replaced by filler.
        """
        e, rows = self.settings, RowConfig(window=self.settings.window, scored=scored, mask_prompt=mask)
        loop: LoopConfig = getattr(e, stage)
        size: dict[str, int] = {"batch_size": loop.batch_size, "steps": loop.steps, "seed": e.seed}
        train(
            module,
            lambda: Rows((examples or self.examples)(), rows, **size, filler=self.filler, pooled=pooled),
            loop,
            self.directory / folder / stage,
            seed=e.seed,
            collate=collate,
            label=self.label(f"{folder} {stage[:-1]} {stage[-1]}"),
            resume=True,
            tags={"arm": folder, "stage": stage[-1]},
        )
