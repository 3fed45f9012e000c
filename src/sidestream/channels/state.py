"""The value that rides beside the token stream, and the letters used for shapes.

Shape letters, everywhere in this project:

| letter | meaning | letter | meaning |
|---|---|---|---|
| B | batch rows | K | latent steps |
| T | tokens | V | vocabulary |
| D | width of the decoder | L | decoder blocks |
| G | width of the goal vector | N | positions that carry an own vector: 1 or T |
| S | goal slots, or tracker history | E | width of the encoder's hidden states |

The channel contract: a channel is a function of (hidden, state) that returns (hidden, state). It keeps nothing between
calls, so one channel serves any number of interleaved rollouts, and T tokens at once equal T single steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentState:
    """The latent state of a batch of rollouts. A value: methods return new states and change nothing in place.

    Every tensor has the batch first, so that beam search can reorder rows without knowing what they mean.
    """

    goal: Float[Tensor, "B G"]
    """The goal vector in force: P0 of a static goal, the latest P_t of a tracked one."""
    history: Float[Tensor, "B S E"] | None = None
    """The tracker's last S trigger states s_i, oldest first; None for a static goal."""
    history_count: Int[Tensor, " B"] | None = None
    """How many trigger states each row has seen (the valid ones are the last min(count, S) of `history`)."""
    terms: Float[Tensor, "B 1 L 2 D"] | None = field(default=None, init=False)
    """FiLM terms of a static `goal`, projected once; None until a channel folds them. Not an argument, so that
    `dataclasses.replace(state, goal=...)` drops the terms of the old goal."""

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self.goal.shape[0]

    def select(self, rows: Int[Tensor, " M"]) -> LatentState:
        """Rows by index, in that order (beam reordering, dropping finished rows)."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def repeat_interleave(self, repeats: int) -> LatentState:
        """Each row `repeats` times in a row (beams, several samples a prompt)."""
        return self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def to(self, *args, **kwargs) -> LatentState:
        """Move as `Tensor.to` does; counts move to the device and keep their dtype."""
        device = self.goal.to(*args, **kwargs).device
        return self.map(lambda t: t.to(*args, **kwargs) if t.is_floating_point() else t.to(device))

    def detach(self) -> LatentState:
        """The same values without their history in autograd."""
        return self.map(Tensor.detach)

    def folded(self, terms: Float[Tensor, "B 1 L 2 D"]) -> LatentState:
        """The state with the FiLM terms of its goal."""
        state = replace(self)
        object.__setattr__(state, "terms", terms)
        return state

    @staticmethod
    def cat(states: list[LatentState]) -> LatentState:
        """Rows of several states as one batch.

        Raises:
            ValueError: some states carry a part that others lack.
        """
        parts = {}
        for part in fields(LatentState):
            values = [getattr(state, part.name) for state in states]
            missing = [value is None for value in values]
            if any(missing) and not all(missing):
                raise ValueError(f"cannot join states: only some of them carry {part.name!r}")
            parts[part.name] = None if all(missing) else torch.cat(values)
        return _build(parts)

    def map(self, function: Callable[[Tensor], Tensor]) -> LatentState:
        """The state with `function` applied to each of its tensors."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return _build({name: None if value is None else function(value) for name, value in values.items()})


def _build(parts: dict[str, Any]) -> LatentState:
    terms = parts.pop("terms")
    state = LatentState(**parts)
    return state if terms is None else state.folded(terms)
