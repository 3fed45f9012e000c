"""Muon for weight matrices, AdamW for everything else: what the `cpu` scale trains planners with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.AdamW):
    r"""AdamW whose groups with `matrix_rate` take orthogonalised momentum instead.

    .. math:: W \leftarrow (1 - \eta\lambda) W - \eta \sqrt{\max(1, m / n)}\, \mathrm{NS}_5(G + \mu (M - G))

    with `W` of m x n, `M` the momentum buffer, `eta` the learning rate times `matrix_rate`, `lambda` the weight decay
    and `NS_5` five Newton-Schulz iterations (Jordan et al., "Muon", 2024). torch has a `torch.optim.Muon` with the same
    rule; it works in bfloat16, which a CPU without such instructions runs ten times slower than float32, and it takes
    no other parameters, so a trainer would need two optimisers.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every group."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if "matrix_rate" not in group]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if "matrix_rate" in group:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for weight in group["params"]:
            if weight.grad is not None:
                shapes.setdefault(weight.shape, []).append(weight)
        for shape, weights in shapes.items():
            steps = []
            for weight in weights:
                state, gradient = self.state[weight], weight.grad
                assert gradient is not None
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                    # Unused here; AdamW looks for it wherever a state is loaded again.
                    state["step"] = torch.zeros(())
                state["momentum"].lerp_(gradient, 1 - MOMENTUM)
                steps.append(gradient.lerp(state["momentum"], MOMENTUM))
            # The schedule scales `lr`; `matrix_rate` is the factor between the two kinds of group.
            rate = group["lr"] * group["matrix_rate"]
            updates = orthogonalized(torch.stack(steps)) * max(1.0, shape[0] / shape[1]) ** 0.5
            for weight, update in zip(weights, updates, strict=True):
                weight.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate)


def orthogonalized(matrices: Tensor) -> Tensor:
    """(n, a, b) matrices with all singular values brought near 1 (0.7 to 1.2) by Newton-Schulz iterations."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.transpose(1, 2)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.transpose(1, 2)


def muon_groups(module: nn.Module, *, weight_decay: float, matrix_rate: float) -> list[dict[str, Any]]:
    """Trainable parameters as groups for `Muon`: weight matrices, other decayed tensors, and those without decay.

    Embeddings and heads are tables, not maps, and stay with AdamW.
    """
    tables = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    matrices, decayed, rest = [], [], []
    for name, weight in _trainable(module):
        table = id(weight) in tables or name.endswith("lm_head.weight")
        (matrices if weight.ndim == 2 and not table else decayed if weight.ndim == 2 else rest).append(weight)
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "matrix_rate": matrix_rate},
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _trainable(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, weight) for name, weight in module.named_parameters() if weight.requires_grad)
