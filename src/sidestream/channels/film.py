"""FiLM: one latent vector scales and shifts the normalised hidden state of every decoder block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class FiLM(nn.Module):
    r"""Feature-wise linear modulation of every block from one vector.

    .. math::
        \tilde h_l = \mathrm{LN}_2(h_l) \odot (1 + \gamma_l) + \beta_l, \qquad
        (\gamma_l, \beta_l) = W_l P + b_l

    Source: LS-AR, section 3.3 and Figure 3 (FiLM: Perez et al., 2018). Weights and biases start at zero, so a fresh
    FiLM is the identity. All blocks share one matrix product: `W` stacks the blocks' `W_l`.

    Args:
        goal_width: G, width of the vector.
        model_width: D, width of the decoder.
        num_blocks: L, number of decoder blocks.
    """

    def __init__(self, goal_width: int, model_width: int, num_blocks: int) -> None:
        super().__init__()
        self.model_width = model_width
        self.num_blocks = num_blocks
        self.projection = nn.Linear(goal_width, num_blocks * 2 * model_width)
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def terms(self, vector: Float[Tensor, "B N G"]) -> Float[Tensor, "B N L 2 D"]:
        """Project vectors to the (gamma, beta) of every block; `terms[:, :, l]` are block l's.

        N is 1 for a vector that holds for the whole rollout (projected once per goal, never per token) or T for one
        vector per position.
        """
        return self.projection(vector).unflatten(-1, (self.num_blocks, 2, self.model_width))


def modulate(hidden: Float[Tensor, "... D"], terms: Float[Tensor, "B N 2 D"]) -> Float[Tensor, "... D"]:
    """Apply one block's terms: `hidden * (1 + gamma) + beta`.

    Args:
        hidden: (B, T, D), or (B*T, D) where a model flattens its tokens before the MLP (OPT, mixture of experts).
        terms: (B, N, 2, D) with N = 1 or N = T.

    Raises:
        ValueError: the batch or the number of positions of `hidden` does not fit `terms`.
    """
    gamma, beta = terms.unbind(dim=2)
    batch, positions, width = gamma.shape
    shape = hidden.shape
    if hidden.dim() == 2 and hidden.shape[0] % batch == 0:
        hidden = hidden.view(batch, -1, width)
    if hidden.dim() != 3 or hidden.shape[0] != batch or positions not in (1, hidden.shape[1]):
        raise ValueError(
            f"the latent state holds {batch} rows x {positions} positions and the hidden states are "
            f"{tuple(shape)}; give one goal per row (LatentState.repeat_interleave)"
        )
    # addcmul keeps it to one fused multiply-add after (1 + gamma); autocast may hand us a narrower hidden dtype.
    return torch.addcmul(beta.to(hidden.dtype), hidden, 1 + gamma.to(hidden.dtype)).view(shape)
