"""The value that rides beside the token stream, and the letters used for shapes.

Shape letters, everywhere in this project:

| letter | meaning | letter | meaning |
|---|---|---|---|
| B | batch rows | K | latent steps |
| T | tokens | V | vocabulary |
| D | width of the decoder | L | decoder blocks |
| G | width of the goal vector | N | positions that carry an own vector: 1 or T |
| S | goal slots, or tracker history | E | width of the encoder's hidden states |
| M | entries of a pinned goal | H | heads of keys and values, in entries |

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

    goal: Float[Tensor, "B G"] | None = None
    """The goal vector in force: P0 of a static goal, the latest P_t of a tracked one; None without a goal channel."""
    history: Float[Tensor, "B S E"] | None = None
    """The tracker's last S trigger states s_i, oldest first; None for a static goal."""
    history_count: Int[Tensor, " B"] | None = None
    """How many trigger states each row has seen (the valid ones are the last min(count, S) of `history`)."""
    concept: Float[Tensor, "B D"] | None = None
    """The concept stream c_t; None without a stream."""
    passes: Int[Tensor, " B"] | None = None
    """How many latent passes each row's stream has seen."""
    keys: Float[Tensor, "B L H M K"] | None = None
    """Keys of a pinned goal in every block, as computed at positions 0..M-1; None where no goal is pinned."""
    values: Float[Tensor, "B L H M J"] | None = None
    """Its values."""
    entries: Int[Tensor, "B M"] | None = None
    """1 at an entry, 0 at padding, which is on the left."""
    entry_ids: Int[Tensor, "B M"] | None = None
    """The tokens that the entries were read from, 0 at padding; None for entries that no text gives."""
    entry_parts: Int[Tensor, "B M"] | None = None
    """Which part of the goal an entry belongs to, an index of `part_names`; None for a goal in one piece."""
    part_names: tuple = ()
    """Names of the parts of a pinned goal, in order: strings."""
    terms: Float[Tensor, "B 1 L 2 D"] | None = field(default=None, init=False)
    """FiLM terms of a static `goal`, projected once; None until a channel folds them. Not an argument, so that
    `dataclasses.replace(state, goal=...)` drops the terms of the old goal."""

    def __post_init__(self) -> None:
        if self.goal is None and self.concept is None and self.keys is None:
            raise ValueError("a LatentState holds nothing: give it a goal, a concept, or entries")
        rows = {name: tensor.shape[0] for name, tensor in self._parts().items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"the parts of a LatentState have different numbers of rows: {rows}")

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self.tensors()[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.tensors()[0].device

    def tensors(self) -> list[Tensor]:
        """Every tensor the state carries."""
        return list(self._parts().values())

    def select(self, rows: Int[Tensor, " M"]) -> LatentState:
        """Rows by index, in that order (beam reordering, dropping finished rows)."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def repeat_interleave(self, repeats: int) -> LatentState:
        """Each row `repeats` times in a row (beams, several samples a prompt)."""
        if self.batch_size == 1:  # one goal for all rows is held once
            return self.map(lambda tensor: tensor.expand(repeats, *tensor.shape[1:]))
        return self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def to(self, *args, **kwargs) -> LatentState:
        """Move as `Tensor.to` does; counts move to the device and keep their dtype."""
        # A floating-point part decides: `to(torch.bfloat16)` names a dtype and no device.
        device = next(t for t in self.tensors() if t.is_floating_point()).to(*args, **kwargs).device
        return self.map(lambda t: t.to(*args, **kwargs) if t.is_floating_point() else t.to(device))

    def detach(self) -> LatentState:
        """The same values without their history in autograd."""
        return self.map(Tensor.detach)

    def folded(self, terms: Float[Tensor, "B 1 L 2 D"]) -> LatentState:
        """The state with the FiLM terms of its goal."""
        state = replace(self)
        object.__setattr__(state, "terms", terms)
        return state

    def with_stream(self, concept: Float[Tensor, "B D"], passes: Int[Tensor, " B"]) -> LatentState:
        """The state with another concept stream; a goal on it, folded or not, stays."""
        state = replace(self, concept=concept, passes=passes)
        return state if self.terms is None else state.folded(self.terms)

    @staticmethod
    def cat(states: list[LatentState]) -> LatentState:
        """Rows of several states as one batch.

        Raises:
            ValueError: some states carry a part that others lack.
        """
        parts = {}
        names = states[0].part_names
        if any(state.part_names != names for state in states):
            raise ValueError(f"cannot join states: parts {[list(state.part_names) for state in states]} of their goals")
        longest = max(0 if state.entries is None else state.entries.shape[1] for state in states)
        states = [state._padded(longest) for state in states]
        for part in fields(LatentState):
            if part.name == "part_names":
                continue
            values = [getattr(state, part.name) for state in states]
            missing = [value is None for value in values]
            if any(missing) and not all(missing):
                raise ValueError(f"cannot join states: only some of them carry {part.name!r}")
            parts[part.name] = None if all(missing) else torch.cat(values)
        return _build(parts, names)

    def _padded(self, count: int) -> LatentState:
        """The state with entries padded on the left to this many."""
        if self.entries is None or self.entries.shape[1] == count:
            return self
        missing = count - self.entries.shape[1]
        parts = self._parts()
        for name in ("keys", "values"):
            parts[name] = torch.nn.functional.pad(parts[name], (0, 0, missing, 0))
        for name in ("entries", "entry_ids", "entry_parts"):
            if name in parts:
                parts[name] = torch.nn.functional.pad(parts[name], (missing, 0))
        return _build(parts, self.part_names)

    def without_entries(self) -> LatentState | None:
        """The state with no goal pinned; None where nothing is left."""
        kept = {name: value for name, value in self._parts().items() if name not in _ENTRIES}
        return _build(kept, ()) if kept else None

    def with_entries(self, other: LatentState) -> LatentState:
        """The state with the pinned goal of another of as many rows."""
        kept = {name: value for name, value in self._parts().items() if name not in _ENTRIES}
        pinned = {name: value for name, value in other._parts().items() if name in _ENTRIES}
        return _build({**kept, **pinned}, other.part_names)

    def map(self, function: Callable[[Tensor], Tensor]) -> LatentState:
        """The state with `function` applied to each of its tensors."""
        return _build({name: function(value) for name, value in self._parts().items()}, self.part_names)

    def _parts(self) -> dict[str, Tensor]:
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "part_names"}
        return {name: value for name, value in values.items() if value is not None}


_ENTRIES = ("keys", "values", "entries", "entry_ids", "entry_parts")


def _build(parts: dict[str, Any], names: tuple[str, ...]) -> LatentState:
    terms = parts.pop("terms", None)
    state = LatentState(**parts, part_names=names)
    return state if terms is None else state.folded(terms)
