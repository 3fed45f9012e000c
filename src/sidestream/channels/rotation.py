"""Moving keys that carry a rotary position to another position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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

    def turn(
        self,
        keys: Float[Tensor, "B L H M K"],
        by: Int[Tensor, " B"],
        crossed: Float[Tensor, "B L H M K"] | None = None,
    ) -> Float[Tensor, "B L H M K"]:
        """Keys moved by so many positions, each row by its own number: keys cos + crossed sin.

        Args:
            keys: as they stand.
            by: positions.
            crossed: `self.cross(keys)`, for whoever turns the same keys again and again.
        """
        angles = by.double()[:, None, None] * self.frequencies.to(by.device)  # (B, L, F)
        wide = [self._wide(part, keys.shape[-1], rest) for part, rest in ((angles.cos(), 1.0), (angles.sin(), 0.0))]
        cos, sin = (part.to(keys.dtype)[:, :, None, None] for part in wide)
        return torch.addcmul(keys * cos, self.cross(keys) if crossed is None else crossed, sin)

    def cross(self, keys: Float[Tensor, "B L H M K"]) -> Float[Tensor, "B L H M K"]:
        """Keys a quarter turn on, in each pair; 0 in dimensions that do not turn."""
        width = 2 * self.frequencies.shape[1]
        inside = keys[..., self.start : self.start + width]
        if self.interleaved:
            left, right = inside.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([-right, left], dim=-1).flatten(-2)
        else:
            left, right = inside.chunk(2, dim=-1)
            turned = torch.cat([-right, left], dim=-1)
        return F.pad(turned, (self.start, keys.shape[-1] - self.start - width))

    def _wide(self, pairs: Tensor, size: int, rest: float) -> Tensor:
        """(B, L, F) values of pairs as (B, L, K) values of dimensions, `rest` where nothing turns."""
        both = pairs.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([pairs, pairs], dim=-1)
        return F.pad(both, (self.start, size - self.start - both.shape[-1]), value=rest)
