"""Finite goal codes: the vectors that a channel will take."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sidestream.channels.state import LatentState


class GoalCodes(nn.Module):
    r"""A finite set of admissible goal vectors; any other is replaced by its nearest.

    .. math:: \mathrm{snap}(P) = c_i, \qquad i = \arg\min_j \lVert P - c_j \rVert_2

    The codes are the vectors of the training goals, or fewer, such as the centres of
    `sklearn.cluster.KMeans(...).fit(vectors)`. A perturbation then either changes nothing or swaps one admissible goal
    for another: `margin` says how long the shortest one of the second kind is, for certain.

    Called on vectors, the value is the code to the last bit and the gradient is that of the identity (straight-through:
    Bengio et al., 2013), so that an attack that knows of the codes can climb through them; see
    `sidestream.evaluation.attacks_vector`, which also has one that needs no gradient.

    A dynamic channel's vector leaves the codes with its first update: there, snap the vector it starts from.

    Args:
        codes: (M, G). A saved and loaded `state_dict` brings them back.

    Raises:
        ValueError: no codes, or some that are not finite.
    """

    def __init__(self, codes: Tensor) -> None:
        super().__init__()
        if codes.dim() != 2 or not len(codes):
            raise ValueError(f"codes are a (M, G) tensor of M >= 1 vectors, got {tuple(codes.shape)}")
        if not bool(codes.isfinite().all()):
            raise ValueError("some codes hold NaN or infinity; give finite vectors")
        self.codes: Tensor
        self.register_buffer("codes", codes.detach().clone())

    def nearest(self, vectors: Float[Tensor, "B G"]) -> Int[Tensor, " B"]:
        """Which code each vector stands for. The first of several as near."""
        return self._distances(vectors).argmin(dim=1)

    def forward(self, vectors: Float[Tensor, "B G"]) -> Float[Tensor, "B G"]:
        """The nearest code of each, with the gradient of the identity."""
        codes = self.codes[self.nearest(vectors)].to(vectors.dtype)
        return codes + (vectors - vectors.detach())  # adds an exact zero

    def snap(self, state: LatentState) -> LatentState:
        """The state with its goal vector replaced by the nearest code; FiLM terms of the old one are dropped.

        Raises:
            ValueError: the state carries no goal.
        """
        if state.goal is None:
            raise ValueError("the latent state carries no goal to snap")
        return replace(state, goal=self(state.goal).detach())

    def margin(self, vectors: Float[Tensor, "B G"]) -> Float[Tensor, " B"]:
        r"""Length of the shortest perturbation that changes a vector's code: a certificate, whatever the attack.

        .. math:: \min_{j \ne i} \frac{\lVert P - c_j\rVert^2 - \lVert P - c_i\rVert^2}{2\,\lVert c_i - c_j\rVert}

        the distance to the nearest face of the Voronoi cell; infinite for a single code.
        """
        distances = self._distances(vectors)
        own = distances.argmin(dim=1)
        apart = self._distances(self.codes[own].to(vectors.dtype))  # (B, M)
        nearest = distances.gather(1, own.unsqueeze(1))
        ahead = (distances - nearest) * (distances + nearest)  # a difference of squares, with less rounding
        faces = ahead / (2 * apart.clamp(min=torch.finfo(apart.dtype).tiny))
        return faces.masked_fill(apart == 0, torch.inf).amin(dim=1).clamp(min=0)

    def _distances(self, vectors: Tensor) -> Tensor:
        if vectors.shape[-1] != self.codes.shape[1]:
            raise ValueError(f"the vectors are {vectors.shape[-1]} wide, the codes {self.codes.shape[1]}")
        # The faster mode goes through a matrix product, whose rounding an attacker could hide behind.
        vectors, codes = vectors.detach().float(), self.codes.to(vectors.device).float()
        return torch.cdist(vectors, codes, compute_mode="donot_use_mm_for_euclid_dist")
