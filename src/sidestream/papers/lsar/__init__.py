"""LS-AR's tables, a file each, and the settings that those which train its models have in common."""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.experiments.settings import Tested
from sidestream.lm.models.backbones import Backbone
from sidestream.training.loop import LoopConfig


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The models of LS-AR's three stages on one task, and of the baseline beside them."""

    encoder: Backbone
    """E_base and, with the same shape, D_base."""
    baseline: Backbone
    """The unconditioned decoder, at `paper` scale matched in parameters."""
    goal_width: int
    """G, width of the goal vector."""
    stage1: LoopConfig
    """The language model that becomes E_base and the decoder's start. The baseline takes the same steps."""
    stage2: LoopConfig
    """E_pred."""
    stage3: LoopConfig
    """Decoder and FiLM (and tracker). The baseline goes on for the same steps."""

    def __post_init__(self) -> None:
        if self.goal_width < 1:
            raise ValueError(f"goal_width is {self.goal_width}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Steered(Stages, Tested):
    """Settings of a table that trains LS-AR's three stages, and a baseline beside them."""

    def __post_init__(self) -> None:
        Tested.__post_init__(self)
        Stages.__post_init__(self)


def training_flops(e: Steered, tokens: int, *, faithful: tuple[str, ...] = ()) -> float:
    """A rough guess: 6 FLOP a weight and token.

    Args:
        tokens: of a row.
        faithful: arms that score every position in stage 3, for which GPT-2's vocabulary counts.
    """

    def flops(model: Backbone, loop: LoopConfig, *, head: bool) -> float:
        parameters = 12 * model.width**2 * model.layers + 50257 * model.width * head
        return 6.0 * parameters * loop.steps * loop.batch_size * tokens

    conditioned = [arm for arm in e.arms if not arm.startswith(("baseline", "random_film", "alpha_zero"))]
    total = sum(flops(e.encoder, e.stage3, head=arm in faithful) for arm in conditioned)
    total += flops(e.encoder, e.stage1, head=True) if conditioned else 0.0
    bare = sum(arm.startswith("baseline") for arm in e.arms)
    return total + bare * (flops(e.baseline, e.stage1, head=True) + flops(e.baseline, e.stage3, head=False))
