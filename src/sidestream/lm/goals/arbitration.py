"""Arbitration between the two channels: does the goal that the text states agree with the goal of the vector?

The text is read by the same encoder that makes vectors, so that both are points of one space:

    d = |P - P(text)| / |P(text)|

and a pair is refused if d exceeds a threshold calibrated on honest pairs. What is given as the text decides what is
guarded: the prompt alone says little about what was inserted behind it, the whole text averages over distractors too,
and needs honest pairs that do the same. An attacker who writes the text as well as the vector can make them agree:
arbitration guards one channel by the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.attach import AttachedLM
from sidestream.lm.goals.reading import Goal

# What rounding alone may put between two encodings of one prompt (batches of other widths, narrower dtypes).
_ROUNDING = 1e-3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What arbitration says about one row."""

    accepted: bool
    """Whether the two channels agree, within the threshold."""
    disagreement: float
    """Their distance, in units of the norm of the text's vector."""
    threshold: float
    """The largest distance accepted."""

    @property
    def reason(self) -> str:
        """One line for a report or a log."""
        says = "agree" if self.accepted else "disagree: refused"
        sign = "<=" if self.accepted else "not <="  # NaN is refused as well
        return f"text and vector {says} (distance {self.disagreement:.3g} {sign} {self.threshold:.3g})"


@dataclass(frozen=True, kw_only=True)
class Arbiter:
    """Refuses rows whose text and vector state different goals. Made by `Arbiter.calibrated`."""

    threshold: float
    """The largest distance accepted, in units of the norm of the text's vector."""
    false_refusals: float
    """The share of honest pairs that may be refused."""
    pairs: int
    """How many honest pairs it was calibrated on."""

    @staticmethod
    def calibrated(honest: Tensor, *, false_refusals: float = 0.01) -> Arbiter:
        """Set the threshold so that a new honest pair is refused with at most the stated probability.

        It is the k-th smallest of n honest distances, k = ceil((n + 1)(1 - rate)): the split conformal quantile, which
        holds for any distribution as long as new pairs come as the calibration pairs did (Vovk et al., 2005). No lower
        than 0.001, which rounding alone may reach.

        Args:
            honest: (n,) `disagreement` of honest pairs, of texts as they will be judged.
            false_refusals: the rate, above 0 and below 1.

        Raises:
            ValueError: a rate outside (0, 1), distances that are not finite, or too few pairs for the rate.
        """
        if not 0 < false_refusals < 1:
            raise ValueError(f"false_refusals is {false_refusals}; it is a rate, above 0 and below 1")
        if honest.dim() != 1 or not bool(honest.isfinite().all()):
            raise ValueError(f"honest distances are a flat tensor of finite numbers, got {tuple(honest.shape)}")
        count = len(honest)
        # Away from the float error of (n + 1)(1 - rate), which would ask for one pair more.
        rank = math.ceil((count + 1) * (1 - false_refusals) - 1e-9)
        if rank > count or not count:
            need = math.ceil(1 / false_refusals - 1e-9) - 1
            raise ValueError(
                f"{count} honest pairs cannot show a rate of {false_refusals}: give at least {need}, or a higher rate"
            )
        threshold = float(honest.double().sort().values[max(rank, 1) - 1])
        return Arbiter(threshold=max(threshold, _ROUNDING), false_refusals=false_refusals, pairs=count)

    def judge(self, model: AttachedLM, texts: Goal, goal: LatentState) -> list[Verdict]:
        """A verdict for each row, before anything is generated. A distance that is not a number is refused.

        Args:
            texts: what states the goal in each row's text, in any form that `encode_goal` takes.
            goal: the vectors that are to be in force.

        Raises:
            ValueError: different numbers of rows.
        """
        return [
            Verdict(accepted=distance <= self.threshold, disagreement=distance, threshold=self.threshold)
            for distance in disagreement(model, texts, goal).tolist()
        ]

    def penalty(
        self,
        model: AttachedLM,
        *,
        weight: float = 10.0,
        stated: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> Callable[[Sequence[Sequence[int]], Tensor | None], Tensor]:
        """What an attack that knows this arbiter must avoid: `weight` x how far the distance is above the threshold, as
        a share of it; 0 where the row passes. Differentiable in the vectors.

        Args:
            stated: takes from a text the part that `judge` is given; None for all of it.
        """

        def paid(texts: Sequence[Sequence[int]], vectors: Tensor | None) -> Tensor:
            if vectors is None:
                raise ValueError("arbitration compares text and vector, and the channel is closed; give vectors")
            parts = [list(text if stated is None else stated(text)) for text in texts]
            return weight * torch.relu(_distance(_read(model, parts), vectors) / self.threshold - 1)

        return paid


@torch.no_grad()
def disagreement(model: AttachedLM, texts: Goal, goal: LatentState) -> Tensor:
    """(B,) distance between the goal read from each text and the goal of the vector, in units of the former's norm.

    Raises:
        ValueError: different numbers of rows, or a state without a goal.
    """
    read = _read(model, texts)
    if goal.goal is None:
        raise ValueError("the latent state carries no goal to compare with the text")
    if goal.goal.shape != read.shape:
        raise ValueError(f"{len(read)} texts and {len(goal.goal)} goal vectors; give one of each per row")
    return _distance(read, goal.goal)


@torch.no_grad()
def _read(model: AttachedLM, texts: Goal) -> Tensor:
    goal = model.encode_goal(texts).goal
    assert goal is not None
    return goal


def _distance(read: Tensor, vectors: Tensor) -> Tensor:
    return (vectors.float() - read.float()).norm(dim=1) / read.float().norm(dim=1)
