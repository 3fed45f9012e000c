"""Finite goal codes, the worst vector in a ball, arbitration between text and vector."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans

from families import attached, close, logits, tokens, unchecked_types
from sidestream.channels import LatentState
from sidestream.channels.ball import ball_step, into_ball, on_sphere, worst_vectors
from sidestream.channels.codes import GoalCodes
from sidestream.lm.goals.arbitration import Arbiter, disagreement


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- codes


def test_snapping_gives_the_nearest_code_to_the_bit():
    codes = GoalCodes(normal(40, 16))
    vectors = normal(30, 16, seed=1)
    by_hand = [int((codes.codes - vector).square().sum(dim=1).argmin()) for vector in vectors]
    assert codes.nearest(vectors).tolist() == by_hand
    assert torch.equal(codes(vectors), codes.codes[by_hand])
    assert torch.equal(codes(codes.codes), codes.codes)


def test_the_gradient_passes_straight_through():
    codes = GoalCodes(normal(5, 4))
    vectors = normal(3, 4, seed=1).requires_grad_()
    codes(vectors).pow(2).sum().backward()
    close(vectors.grad, 2 * codes(vectors).detach())  # the gradient at the code, not at the vector
    with torch.no_grad():
        assert not torch.allclose(vectors.grad, 2 * vectors)


def test_no_perturbation_below_the_margin_changes_a_code():
    codes = GoalCodes(normal(12, 3))
    vectors = normal(50, 3, seed=1)
    margin, own = codes.margin(vectors), codes.nearest(vectors)
    assert (margin > 0).all()
    direction = F.normalize(normal(200, 50, 3, seed=2), dim=2)
    for k in range(len(direction)):
        moved = vectors + 0.999 * margin.unsqueeze(1) * direction[k]
        assert torch.equal(codes.nearest(moved), own)
    # The control: a hair further, straight at the nearest face, every code changes.
    changed = torch.zeros(50, dtype=torch.bool)
    for code in codes.codes:
        towards = F.normalize(code - codes.codes[own], dim=1)
        changed |= codes.nearest(vectors + 1.001 * margin.unsqueeze(1) * towards) != own
    assert changed.all()


def test_margin_of_codes_themselves_and_of_copies():
    codes = GoalCodes(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]))
    assert codes.margin(codes.codes).tolist() == pytest.approx([2.5, 2.5, 2.5])
    assert GoalCodes(torch.ones(1, 2)).margin(torch.zeros(1, 2)).tolist() == [torch.inf]


def test_a_snapped_state_steers_as_its_code():
    model, ids = attached("llama", "static"), tokens(3, 7)
    honest = model.encode_goal(tokens(3, 4, seed=1))
    codes = GoalCodes(honest.goal)
    push = 0.5 * codes.margin(honest.goal).unsqueeze(1) * F.normalize(normal(3, 16), dim=1)
    pushed = model.encode_goal(LatentState(goal=honest.goal + push))
    assert pushed.terms is not None and codes.snap(pushed).terms is None  # terms of the old vector must not stay
    clean = logits(model, ids, goal=honest)
    assert torch.equal(logits(model, ids, goal=codes.snap(pushed)), clean)
    assert not torch.allclose(logits(model, ids, goal=pushed), clean)


def test_codes_by_k_means_and_their_way_to_disk():
    groups = normal(4, 1, 6) * 5
    vectors = (groups + 0.1 * normal(4, 20, 6, seed=1)).flatten(0, 1)
    centres = KMeans(4, n_init=3, random_state=0).fit(vectors.numpy()).cluster_centers_
    codes = GoalCodes(torch.from_numpy(centres))
    assert len({tuple(part.tolist()) for part in codes.nearest(vectors).view(4, 20)}) == 4
    assert all(len(set(part.tolist())) == 1 for part in codes.nearest(vectors).view(4, 20))
    other = GoalCodes(torch.zeros(4, 6))
    other.load_state_dict(codes.state_dict())
    assert torch.equal(other(vectors), codes(vectors))


def test_what_is_no_code():
    for bad, words in ((torch.ones(3), "M, G"), (torch.ones(0, 3), "M >= 1"), (torch.full((1, 2), torch.nan), "NaN")):
        with pytest.raises(ValueError, match=words):
            GoalCodes(bad)
    with pytest.raises(ValueError, match="3 wide, the codes 2"):
        GoalCodes(torch.ones(1, 2)).nearest(torch.ones(1, 3))
    with pytest.raises(ValueError, match="no goal"):
        GoalCodes(torch.ones(1, 2)).snap(LatentState(concept=torch.ones(1, 2)))


# ---------------------------------------------------------------- the worst vector in a ball


def test_balls():
    centre = normal(20, 8)
    norms = centre.norm(dim=1)
    edge = on_sphere(centre, radius=0.3, generator=torch.Generator().manual_seed(0))
    close((edge - centre).norm(dim=1), 0.3 * norms)
    assert ((edge - centre).norm(dim=1) <= 0.3 * norms).all()
    assert torch.equal(into_ball(edge, centre, radius=0.31), edge)  # what lies inside stays
    back = into_ball(edge, centre, radius=0.1)
    close(back, centre + (edge - centre) / 3)
    still = ball_step(centre, torch.zeros_like(centre), centre, radius=0.1, size=0.1)
    assert torch.equal(still, centre)  # a closed channel has no gradient, and no NaN either


def test_the_worst_vector_of_a_linear_loss_is_known():
    weight, vectors = normal(8), normal(6, 8, seed=1)
    worst = worst_vectors(lambda v: v @ weight, vectors, radius=0.2, steps=3)
    close(worst, vectors + 0.2 * vectors.norm(dim=1, keepdim=True) * weight / weight.norm(), 1e-4)


def test_the_worst_vector_in_a_model():
    model = attached("llama", "static")
    ids, labels = tokens(4, 6), tokens(4, seed=2)
    vectors = model.encode_goal(tokens(4, 3, seed=1)).goal

    def losses(goal):
        out = model(ids, goal=LatentState(goal=goal)).logits[:, -1]
        return F.cross_entropy(out, labels, reduction="none")

    worst = worst_vectors(losses, vectors, radius=0.3, steps=4)
    assert all(parameter.grad is None for parameter in model.parameters()) and not worst.requires_grad
    assert ((worst - vectors).norm(dim=1) <= 0.3 * vectors.norm(dim=1)).all()
    with torch.no_grad():
        clean, attacked = losses(vectors), losses(worst)
        generator = torch.Generator().manual_seed(0)
        noise = [losses(on_sphere(vectors, radius=0.3, generator=generator)) for _ in range(4)]
    assert (attacked > clean).all()
    assert attacked.mean() > torch.stack(noise).amax(dim=0).mean()
    assert torch.equal(worst_vectors(losses, vectors, radius=0.0), vectors)
    drawn = [
        worst_vectors(losses, vectors, radius=0.3, steps=1, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_training_on_the_worst_vectors_defends():
    """Lower loss under attack than after plain training, paid for with a higher one without."""
    labels = torch.arange(400) % 2
    vectors = torch.stack([2.0 * labels - 1 + 0.35 * normal(400), normal(400, seed=1)], dim=1)
    found = {}
    for radius in (0.0, 0.9):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)

        def losses(goal, model=model):
            return F.cross_entropy(model(goal), labels, reduction="none")

        for _ in range(100):
            optimiser.zero_grad()
            losses(worst_vectors(losses, vectors, radius=radius, steps=2)).mean().backward()
            optimiser.step()
        worst = worst_vectors(losses, vectors, radius=0.9, steps=4)
        found[radius] = [losses(v).mean().item() for v in (vectors, worst)]
    assert found[0.0][0] < 0.1 < found[0.9][0]
    assert found[0.9][1] < 1.0 < 1.3 < found[0.0][1]


def test_worst_vectors_names_mistakes():
    with pytest.raises(ValueError, match="radius is -1"):
        worst_vectors(lambda v: v.sum(dim=1), torch.ones(2, 3), radius=-1.0)
    with pytest.raises(ValueError, match="one number a row"):
        worst_vectors(lambda v: v.sum(), torch.ones(2, 3), radius=1.0)


# ---------------------------------------------------------------- arbitration


def test_the_threshold_keeps_its_rate():
    """Over many calibrations, new honest pairs are refused as often as stated; far ones always."""
    refused = []
    for seed in range(300):
        draws = normal(59, seed=seed).abs()
        arbiter = Arbiter.calibrated(draws[:-20], false_refusals=0.1)
        assert arbiter.threshold in draws[:-20].double().tolist() and arbiter.pairs == 39
        refused.append((draws[-20:] > arbiter.threshold).float().mean())
    assert torch.stack(refused).mean() == pytest.approx(0.1, abs=0.02)


def test_too_few_pairs_are_told():
    for rate, need in ((0.01, 99), (0.1, 9), (0.5, 1)):
        with pytest.raises(ValueError, match=f"at least {need}"):
            Arbiter.calibrated(torch.ones(need - 1), false_refusals=rate)
        assert Arbiter.calibrated(torch.arange(1.0, need + 1), false_refusals=rate).threshold == need
    for bad in (0.0, 1.0):
        with pytest.raises(ValueError, match="rate"):
            Arbiter.calibrated(torch.ones(9), false_refusals=bad)
    with pytest.raises(ValueError, match="finite"):
        Arbiter.calibrated(torch.tensor([1.0, torch.nan]), false_refusals=0.5)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_disagreeing_channels_are_refused(mode):
    model = attached("llama", mode)
    goals = tokens(20, 8, seed=1).tolist()
    # The text says the goal and something besides, so that even honest pairs are some way apart.
    texts = [goal + extra for goal, extra in zip(goals, tokens(20, 1, seed=2).tolist(), strict=True)]
    state = model.encode_goal(goals)
    honest = disagreement(model, texts, state)
    arbiter = Arbiter.calibrated(honest, false_refusals=0.1)
    aligned = arbiter.judge(model, texts, state)
    crossed = arbiter.judge(model, texts, state.select(torch.arange(20).roll(1)))
    same = arbiter.judge(model, goals, state)
    assert sum(verdict.accepted for verdict in aligned) == 19 and all(verdict.accepted for verdict in same)
    assert sum(verdict.accepted for verdict in crossed) <= 2
    assert [v.disagreement for v in aligned] == pytest.approx(honest.tolist())
    refused = next(verdict for verdict in crossed if not verdict.accepted)
    assert "refused" in refused.reason and "\n" not in refused.reason and "refused" not in same[0].reason


def test_rounding_is_no_disagreement_and_nan_is():
    model, goals = attached("llama", "static"), tokens(12, 5, seed=1).tolist()
    state = model.encode_goal(goals)
    arbiter = Arbiter.calibrated(disagreement(model, goals, state), false_refusals=0.1)
    assert arbiter.threshold == 1e-3
    longer = [*goals[:3], tokens(30).tolist()]  # another padding, another kernel
    verdicts = arbiter.judge(model, longer, model.encode_goal([*goals[:3], goals[3]]))
    assert [verdict.accepted for verdict in verdicts] == [True, True, True, False]
    broken = LatentState(goal=state.goal.index_fill(0, torch.tensor([1]), torch.nan))
    assert [v.accepted for v in arbiter.judge(model, goals[:3], broken.select(torch.arange(3)))] == [True, False, True]


def test_the_penalty_is_nothing_exactly_where_the_verdict_accepts():
    model, goals = attached("llama", "static"), tokens(4, 5, seed=1).tolist()
    read = model.encode_goal(goals).goal
    arbiter = Arbiter(threshold=0.2, false_refusals=0.05, pairs=100)
    penalty = arbiter.penalty(model, weight=2.0, stated=lambda text: text[:5])
    texts = [goal + [50, 51] for goal in goals]
    for radius, accepted in ((0.1, True), (0.3, False)):
        vectors = on_sphere(read, radius=radius, generator=torch.Generator().manual_seed(0)).requires_grad_()
        paid = penalty(texts, vectors)
        verdicts = arbiter.judge(model, goals, LatentState(goal=vectors.detach()))
        assert [v.accepted for v in verdicts] == [accepted] * 4 == (paid <= 0).tolist()
        close(paid.detach(), torch.full((4,), 2 * max(0.0, radius / 0.2 - 1)), 1e-4)
        (gradient,) = torch.autograd.grad(paid.sum(), vectors)
        assert bool(gradient.any()) is not accepted
    # An attacker who knows it stays in the ball around the text's vector.
    inside = into_ball(normal(4, 16) * 9, read, radius=arbiter.threshold)
    assert all(v.accepted for v in arbiter.judge(model, goals, LatentState(goal=inside)))


def test_arbitration_needs_a_pair_per_row():
    model = attached("llama", "static")
    state = model.encode_goal(tokens(2, 3))
    with pytest.raises(ValueError, match="3 texts and 2 goal vectors"):
        disagreement(model, tokens(3, 3), state)
    with pytest.raises(ValueError, match="closed"), unchecked_types():
        Arbiter(threshold=1.0, false_refusals=0.1, pairs=9).penalty(model)([[3]], None)
