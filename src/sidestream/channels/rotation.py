"""Moving keys that carry a rotary position to another position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Rotation:
    """R(p), the rotation that rotary position p applies to keys: R(p) R(q) = R(p + q) (RoFormer, arXiv:2104.09864).

    Pairs of dimensions turn by p times a frequency; a key computed at position q is `turn`ed by p to stand at p + q.
    """

    frequencies: Float[Tensor, "L F"]
    """Radians a position, for each pair, in each block (float64); zeros in a block without positions."""
    start: int
    """The first of the 2 F dimensions that turn; the others carry no position."""
    interleaved: bool
    """Whether neighbours are pairs (GPT-J), or dimension i and i + F (Llama)."""

    def turn(self, keys: Float[Tensor, "B L H M K"], by: Int[Tensor, " B"]) -> Float[Tensor, "B L H M K"]:
        """Keys moved by so many positions, each row by its own number."""
        angles = by.double()[:, None, None] * self.frequencies.to(by.device)  # (B, L, F)
        cos = angles.cos().to(keys.dtype)[:, :, None, None]
        sin = angles.sin().to(keys.dtype)[:, :, None, None]
        width = 2 * self.frequencies.shape[1]
        before, inside, after = keys.split([self.start, width, keys.shape[-1] - self.start - width], dim=-1)
        if self.interleaved:
            left, right = inside.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([left * cos - right * sin, right * cos + left * sin], dim=-1).flatten(-2)
        else:
            left, right = inside.chunk(2, dim=-1)
            turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        if width == keys.shape[-1]:
            return turned
        return torch.cat([before, turned, after], dim=-1)
