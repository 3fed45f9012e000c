"""Muon: singular values, equality with torch's own rule, what stays with AdamW. (Its resume: `test_loop.py`.)"""

import pytest
import torch
from torch import nn

from sidestream.lm.models.backbones import Backbone
from sidestream.training.muon import Muon, muon_groups, orthogonalized


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 24, 24)])
def test_singular_values_come_near_one_and_the_rest_stays(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    out = orthogonalized(matrices)
    assert out.shape == shape
    values = torch.linalg.svdvals(out)
    assert values.min() > 0.3 and values.max() < 1.3
    assert torch.linalg.svdvals(matrices).max() > 3, "the control: nothing like this before"
    # The same singular vectors: U^T out V is diagonal.
    for matrix, result in zip(matrices, out, strict=True):
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        core = u.T @ result @ vt.T
        assert (core - torch.diag(core.diagonal())).abs().max() < 1e-3


@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_matrices_move_as_with_torchs_muon(decay: float) -> None:
    """torch's works in bfloat16, so the directions agree to that precision. The decay goes by the matrices' rate."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(16, 48, bias=False), nn.Linear(16, 48, bias=False)
    theirs.load_state_dict(ours.state_dict())
    mine = Muon([{"params": ours.parameters(), "weight_decay": decay, "matrix_rate": 10.0}], lr=2e-3)
    reference = torch.optim.Muon(theirs.parameters(), lr=2e-2, weight_decay=decay)
    start = ours.weight.detach().clone()
    for _ in range(5):
        x = torch.randn(8, 16)
        for layer, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            (layer(x) ** 2).sum().backward()
            optimizer.step()
    moved, expected = ours.weight.detach() - start, theirs.weight.detach() - start
    assert moved.norm() > 0.1
    assert (moved - expected).norm() < 0.08 * expected.norm()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tables_and_vectors_stay_with_adamw(family: str) -> None:
    model = Backbone(layers=1, width=32, heads=2, family=family).build(vocabulary=20, window=16, pad_id=0)  # type: ignore[arg-type]
    groups = muon_groups(model, weight_decay=0.1, matrix_rate=10.0)
    matrices = {id(p) for group in groups if "matrix_rate" in group for p in group["params"]}
    tables = {id(p) for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    assert matrices and not matrices & tables
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert all(p.ndim == 2 for p in model.parameters() if id(p) in matrices)
    assert all(group["weight_decay"] == 0.0 for group in groups for p in group["params"] if p.ndim < 2)
