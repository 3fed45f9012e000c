"""CoCoNuT's curriculum: which step of training sees which stage, and the row that a problem becomes there.

A training of N optimiser steps is one sequence of N x batch rows. Row i is a function of (seed, i) alone, whatever the
calls that the sequence is cut into, so a resumed run sees what an undisturbed one does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sidestream.lm.decoding.layout import UNSCORED, Layout, Row, stage_counts
from sidestream.lm.decoding.layout import collate as collate_rows
from sidestream.training.batches import plan

Text = Literal["latent", "pause", "cot", "no_cot", "icot"]
"""What is trained on. `latent`: the curriculum. `pause`: its last stage from the first step on. `cot` and `no_cot`: all
steps and none, without latents. `icot`: steps are removed token by token, without latents."""

SMOOTHING = 4.0
"""lambda of iCoT: a row loses o more tokens than the schedule says with a chance in proportion to exp(-lambda o)."""


class Problem(NamedTuple):
    """A reasoning problem as token ids."""

    question: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...]
    """With the end-of-text token."""


class Call(NamedTuple):
    """One stretch of the training that keeps its optimiser and its schedule."""

    name: str
    """Its folder."""
    stage: int
    """The stage it belongs to; of a call over all stages, the last."""
    first: int
    """Its first optimiser step in the whole training."""
    steps: int
    ends_stage: bool
    """Whether its weights are those of a finished stage."""


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Stages 0 to `max_stage`, and one more with `drop_all`: stage k has the first k steps replaced by k c latents."""

    latents_per_step: int = 1
    """c."""
    max_stage: int = 3
    """The last stage that adds latents."""
    drop_all: bool = False
    """Add a stage that drops every step, however many a problem has, and keeps the latents of `max_stage`."""
    pad_to_max: bool = True
    """Where a stage has more latents than a problem has steps for, the problem gets them all the same."""
    uniform_prob: float = 0.0
    """Chance that a row is of a stage drawn from 0 to its problem's number of steps, as the published code draws it."""
    mix: Literal["none", "proportional"] = "none"
    """`proportional`: in stage k a row is of stage i <= k with a chance in proportion to i + 1."""
    reset: Literal["stage", "epoch", "never"] = "stage"
    """When optimiser and learning-rate schedule start anew."""
    first_length: float = 1.0
    """Length of stage 0, in any unit: the steps of the training are shared out in proportion to the lengths."""
    stage_length: float = 1.0
    """Length of each stage between the first and the last."""
    last_length: float = 1.0
    """Length of the last stage."""

    def __post_init__(self) -> None:
        for name in ("latents_per_step", "max_stage"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.uniform_prob <= 1:
            raise ValueError(f"uniform_prob is {self.uniform_prob}; it is a probability, 0 to 1")
        if self.mix not in ("none", "proportional"):
            raise ValueError(f"mix is {self.mix!r}; use 'none' or 'proportional'")
        if self.reset not in ("stage", "epoch", "never"):
            raise ValueError(f"reset is {self.reset!r}; use 'stage', 'epoch' or 'never'")
        for name in ("first_length", "stage_length", "last_length"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number above 0")

    @property
    def last_stage(self) -> int:
        """The number of the last stage."""
        return self.max_stage + self.drop_all

    @property
    def most_latents(self) -> int:
        """K, the latents of the last stage."""
        return self.max_stage * self.latents_per_step

    def ends(self, steps: int) -> list[int]:
        """The optimiser step after each stage's last, for a training of so many steps.

        Raises:
            ValueError: a stage would get no step.
        """
        lengths = [self.first_length, *[self.stage_length] * (self.last_stage - 1), self.last_length]
        ends = [round(steps * sum(lengths[: stage + 1]) / sum(lengths)) for stage in range(len(lengths))]
        if any(start >= end for start, end in zip([0, *ends], ends, strict=False)):
            raise ValueError(f"{steps} steps do not give each of {len(lengths)} stages one; train longer")
        return ends

    def stage_at(self, step: int, steps: int) -> int:
        """The stage of an optimiser step, counted from 0."""
        return next(stage for stage, end in enumerate(self.ends(steps)) if step < end)

    def calls(self, steps: int, epoch_steps: int) -> list[Call]:
        """The training cut where the optimiser is reset.

        Args:
            steps: of the whole training.
            epoch_steps: once through the problems; matters for `reset="epoch"` only. Epochs start anew with stages.
        """
        ends = self.ends(steps)
        if self.reset == "never":
            return [Call("all", self.last_stage, 0, steps, True)]
        calls = []
        for stage, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            length = end - start if self.reset == "stage" else max(1, epoch_steps)
            for number, first in enumerate(range(start, end, length)):
                name = f"stage{stage}" if self.reset == "stage" else f"stage{stage}-epoch{number}"
                last = min(end, first + length)
                calls.append(Call(name, stage, first, last - first, last == end))
        return calls

    def drawn_stage(self, stage: int, steps: int, rng: random.Random) -> int:
        """The stage of one row of a stage, its problem having so many steps."""
        if self.uniform_prob and rng.random() < self.uniform_prob:
            return rng.randint(0, steps)
        if self.mix == "none":
            return stage
        return rng.choices(range(stage + 1), weights=range(1, stage + 2))[0]

    def counts(self, stage: int, steps: int, *, prompt: bool = False) -> tuple[int, int]:
        """How many leading steps a stage drops from a problem, and how many latents it puts there."""
        return stage_counts(
            stage,
            steps,
            latents_per_step=self.latents_per_step,
            max_stage=self.max_stage,
            pad_to_max=self.pad_to_max,
            prompt=prompt,
        )

    def removed(self, step: int, steps: int, longest: int) -> int:
        """Tokens that iCoT has removed by this optimiser step: none in stage 0, all `longest` in the last stage, and
        in between as many more each step.

        Between the stages of CoCoNuT, so that arms train equally long on all steps, on some and on none.
        """
        ends = self.ends(steps)
        start, end = ends[0], ends[-2]
        if step < start:
            return 0
        # CHOICE(AGCLR, Training): iCoT is copied there. Deng et al. (2024) remove 8 tokens an epoch at once.
        return longest if step >= end else math.ceil(longest * (step + 1 - start) / (end - start))


class LatentRow(NamedTuple):
    """A row, and what SIM-CoT's decoder must say of it."""

    row: Row
    spoken: tuple[tuple[int, tuple[int, ...]], ...]
    """(number of the first of a step's latents, the step's ids), for each step that latents stand for."""


def latent_row(problem: Problem, stage: int, curriculum: Curriculum, layout: Layout) -> LatentRow:
    """The row of a stage."""
    dropped, latents = curriculum.counts(stage, len(problem.steps))
    rest = [token for step in problem.steps[dropped:] for token in step]
    row = layout.row(problem.question, latents, [*rest, *problem.answer])
    each = curriculum.latents_per_step
    return LatentRow(row, tuple((each * i, step) for i, step in enumerate(problem.steps[: latents // each])))


def plain_row(problem: Problem, removed: int, layout: Layout) -> LatentRow:
    """A row without latents that has lost its first tokens of reasoning. It has no marks either."""
    thought = [token for step in problem.steps for token in step][removed:]
    labels = [UNSCORED] * len(problem.question)
    return LatentRow(Row([*problem.question, *thought, *problem.answer], [*labels, *thought, *problem.answer]), ())


def prompt(problem: Problem, text: Text, stage: int, curriculum: Curriculum, layout: Layout) -> list[int]:
    """What generation starts from."""
    if text not in ("latent", "pause"):
        return list(problem.question)
    return layout.prompt(problem.question, curriculum.counts(stage, len(problem.steps), prompt=True)[1])


class CurriculumRows(Dataset):
    """The rows of one call.

    Args:
        problems: what to learn.
        text: the method.
        curriculum, layout: how a problem becomes a row.
        batch_size, steps: of the whole training.
        call: the stretch wanted.
        seed: of order, stages and smoothing.

    Raises:
        ValueError: less than a batch of problems.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        text: Text,
        curriculum: Curriculum,
        layout: Layout,
        *,
        batch_size: int,
        steps: int,
        call: Call,
        seed: int,
    ) -> None:
        self.problems = problems
        self.text = text
        self.curriculum = curriculum
        self.layout = layout
        self.batch_size = batch_size
        self.steps = steps
        self.call = call
        self.seed = seed
        thoughts = [sum(map(len, problem.steps)) for problem in problems]
        self.longest = max(thoughts)
        # Questions of one length first of all: their latents then share a column without padding.
        lengths = [1000 * len(problem.question) + thought for problem, thought in zip(problems, thoughts, strict=True)]
        self.order = plan(lengths, batch_size=batch_size, steps=steps, seed=seed)

    def __len__(self) -> int:
        return self.call.steps * self.batch_size

    def __getitem__(self, index: int) -> LatentRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = self.call.first * self.batch_size + index
        problem, step = self.problems[self.order[place]], place // self.batch_size
        rng = random.Random(f"latent row {self.seed} {place}")
        if self.text in ("cot", "no_cot"):
            return plain_row(problem, 0 if self.text == "cot" else self.longest, self.layout)
        if self.text == "icot":
            removed = self.curriculum.removed(step, self.steps, self.longest)
            return plain_row(problem, removed + (_smoothing(rng) if removed else 0), self.layout)
        stage = self.curriculum.last_stage
        if self.text == "latent":
            scheduled = self.curriculum.stage_at(step, self.steps)
            stage = self.curriculum.drawn_stage(scheduled, len(problem.steps), rng)
        return latent_row(problem, stage, self.curriculum, self.layout)


def _smoothing(rng: random.Random) -> int:
    return int(rng.expovariate(SMOOTHING))


def collator(layout: Layout, *, pad_id: int, stop_id: int, spoken: bool) -> Callable[[Sequence[LatentRow]], dict]:
    """What makes batches of rows; with `spoken` also those of the step decoder, which ends each step with `stop_id`."""
    return partial(_collate, latent_id=layout.latent_id, pad_id=pad_id, stop_id=stop_id, spoken=spoken)


def _collate(
    rows: Sequence[LatentRow], *, latent_id: int, pad_id: int, stop_id: int, spoken: bool
) -> dict[str, Tensor]:
    batch = collate_rows([row.row for row in rows], latent_id=latent_id, pad_id=pad_id)
    said = [(number, first, [*ids, stop_id]) for number, row in enumerate(rows) for first, ids in row.spoken]
    if spoken and said:
        width = max(len(ids) for _, _, ids in said)
        batch["step_rows"] = torch.tensor([number for number, _, _ in said])
        batch["step_firsts"] = torch.tensor([first for _, first, _ in said])
        batch["step_ids"] = torch.tensor([ids + [pad_id] * (width - len(ids)) for _, _, ids in said])
        batch["step_labels"] = torch.tensor([ids + [UNSCORED] * (width - len(ids)) for _, _, ids in said])
    return batch
