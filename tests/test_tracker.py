"""The goal channel against slow, loop-only versions written from the paper's formulas."""

import math

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.channels import (
    FiLM,
    GoalChannel,
    GoalConfig,
    GoalEncoder,
    GoalTracker,
    LatentState,
    mean_pool,
    modulate,
)

G, E, D, L, HEADS = 12, 10, 6, 3, 2


def configure(**changes) -> GoalConfig:
    defaults = dict(mode="dynamic", width=G, trigger_ids=(1,), tracker_heads=HEADS, tracker_hidden=8)
    sizes = dict(encoder_width=E, model_width=D, num_blocks=L, encoder_hidden=9)
    return GoalConfig(**{**defaults, **sizes, **changes})  # type: ignore[arg-type]


def tracker(history: int, *, alpha: float = 0.7, **changes) -> GoalTracker:
    torch.manual_seed(history)
    module = GoalTracker(configure(tracker_history=history, **changes)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
        module.alpha.fill_(alpha)
    return module


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------- the oracle: lists and loops


def matvec(weight, vector, bias=None):
    out = [sum(w * x for w, x in zip(row, vector, strict=True)) for row in weight]
    return out if bias is None else [a + b for a, b in zip(out, bias, strict=True)]


def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def mha(module, query, keys):
    """Multi-head attention of one query over a list of keys, which are also the values."""
    attention = module.attention
    if attention.in_proj_weight is None:
        weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    else:
        weights = list(attention.in_proj_weight.chunk(3))
    (wq, wk, wv), (bq, bk, bv) = [w.tolist() for w in weights], [b.tolist() for b in attention.in_proj_bias.chunk(3)]
    q, size, mixed = matvec(wq, query, bq), G // HEADS, []
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        scores = [
            sum(a * b for a, b in zip(q[part], matvec(wk, key, bk)[part], strict=True)) / math.sqrt(size)
            for key in keys
        ]
        exps = [math.exp(score - max(scores)) for score in scores]
        values = [matvec(wv, key, bv)[part] for key in keys]
        mixed += [sum(e * v[i] for e, v in zip(exps, values, strict=True)) / sum(exps) for i in range(size)]
    return matvec(attention.out_proj.weight.tolist(), mixed, attention.out_proj.bias.tolist())


def mlp(sequential, vector):
    layers = [layer for layer in sequential if isinstance(layer, torch.nn.Linear)]
    for layer in layers:
        vector = matvec(layer.weight.tolist(), vector, layer.bias.tolist())
        if layer is not layers[-1]:
            vector = [gelu(x) for x in vector]
    return vector


def oracle(module, goal, hidden, fires):
    """P_t at every position, one row at a time, one token at a time."""
    out = []
    for row in range(len(fires)):
        vector, seen, path = goal[row].tolist(), [], []
        for t, fire in enumerate(fires[row].tolist()):
            if fire:
                seen = (seen + [hidden[row, t].tolist()])[-module.history :]
                a = mha(module, vector, seen)
                update = [x + y for x, y in zip(a, mlp(module.mlp, a), strict=True)]
                if module.replaces:
                    vector = goal[row].tolist()
                vector = [p + module.alpha.item() * u for p, u in zip(vector, update, strict=True)]
            path.append(vector)
        out.append(path)
    return torch.tensor(out, dtype=torch.float64)


def steps(module, state, hidden, fires):
    path = []
    for t in range(hidden.shape[1]):
        state = module.step(state, hidden[:, t], fires[:, t])
        path.append(state.goal)
    return torch.stack(path, 1), state


# Rows with no trigger, one, several in a row, and all of them.
FIRES = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1]]).bool()


@pytest.mark.parametrize(("history", "update"), [(1, "add"), (3, "add"), (1, "replace")])
@pytest.mark.parametrize("encoder_width", [E, G])  # torch keeps the projections apart, or in one matrix
def test_sequence_steps_and_oracle_agree(history, update, encoder_width):
    module = tracker(history, encoder_width=encoder_width, tracker_update=update)
    goal, hidden = numbers(4, G), numbers(4, 6, encoder_width, seed=1)
    expected = oracle(module, goal, hidden, FIRES)
    together, last = module.sequence(LatentState(goal=goal), hidden, FIRES)
    one_by_one, last_step = steps(module, LatentState(goal=goal), hidden, FIRES)
    torch.testing.assert_close(together, expected)
    torch.testing.assert_close(one_by_one, expected)
    torch.testing.assert_close(last.goal, expected[:, -1])
    torch.testing.assert_close(last.history, last_step.history)
    assert last.history_count.tolist() == last_step.history_count.tolist() == [0, 1, 4, 6]
    assert torch.equal(together[0], goal[:1].expand(6, -1))  # no trigger, no change, to the bit
    assert (together[3, 1:] - together[3, :-1]).abs().amax(1).min() > 1e-2
    assert torch.equal(goal, numbers(4, G))  # a state is a value


def test_a_replacing_update_goes_on_from_a_state_and_forgets_the_one_before():
    goal, hidden = numbers(4, G), numbers(4, 6, E, seed=1)
    module, adding = tracker(1, tracker_update="replace"), tracker(1)
    whole, _ = module.sequence(LatentState(goal=goal), hidden, FIRES)
    first, state = module.sequence(LatentState(goal=goal), hidden[:, :3], FIRES[:, :3])
    second, _ = module.sequence(state, hidden[:, 3:], FIRES[:, 3:])
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    alone, _ = module.sequence(LatentState(goal=goal[3:]), hidden[3:, 5:], FIRES[3:, 5:])
    torch.testing.assert_close(whole[3:, 5], alone[:, 0])
    summed, _ = adding.sequence(LatentState(goal=goal), hidden, FIRES)
    torch.testing.assert_close(whole[:2], summed[:2])  # up to one trigger the two agree
    assert (whole[3, 5] - summed[3, 5]).abs().max() > 1e-2
    with pytest.raises(ValueError, match="'replace' needs tracker_history 1, got 2"):
        configure(tracker_update="replace", tracker_history=2)


def test_a_longer_history_matters():
    goal, hidden = numbers(4, G), numbers(4, 6, E, seed=1)
    long, short = tracker(3), tracker(3)
    short.history = 1
    (a, _), (b, _) = (m.sequence(LatentState(goal=goal), hidden, FIRES) for m in (long, short))
    torch.testing.assert_close(a[2, 0], b[2, 0])
    assert (a[2, 1:] - b[2, 1:]).abs().amax(1).min() > 1e-3


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda rows: st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=rows, max_size=rows)
    ),
    st.sampled_from([1, 2, 3]),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
)
def test_any_triggers_in_any_pieces(rows, history, cuts):
    """T at once equals T steps and any split between, whatever fires."""
    module, fires = tracker(history), torch.tensor(rows)
    goal, hidden = numbers(len(rows), G), numbers(len(rows), 7, E, seed=1)
    expected, final = steps(module, LatentState(goal=goal), hidden, fires)
    edges = sorted({0, 7, *cuts})
    state, path = LatentState(goal=goal), []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        vectors, state = module.sequence(state, hidden[:, start:end], fires[:, start:end])
        path.append(vectors)
    torch.testing.assert_close(torch.cat(path, 1), expected)
    torch.testing.assert_close(state.goal, final.goal)
    for row, count in enumerate(fires.sum(1).tolist()):
        alone, _ = module.sequence(LatentState(goal=goal[row : row + 1]), hidden[row : row + 1], fires[row : row + 1])
        torch.testing.assert_close(alone[0], expected[row])
        assert (count > 0) == bool((final.goal[row] != goal[row]).any())


@pytest.mark.parametrize("history", [1, 3])
def test_alpha_starts_at_zero_and_is_the_identity(history):
    goal, hidden = numbers(4, G), numbers(4, 6, E, seed=1)
    assert GoalTracker(configure(tracker_history=history)).alpha.item() == 0
    module = tracker(history, alpha=0.0)
    vectors, state = module.sequence(LatentState(goal=goal), hidden, FIRES)
    assert torch.equal(vectors, goal[:, None].expand(-1, 6, -1)) and torch.equal(state.goal, goal)
    module.alpha.data.fill_(0.7)
    assert not torch.equal(module.sequence(LatentState(goal=goal), hidden, FIRES)[1].goal, goal)


def test_film_is_the_formula():
    torch.manual_seed(0)
    film, vector, hidden = FiLM(G, D, L).double(), numbers(2, 3, G), numbers(2, 3, D, seed=1)
    assert torch.equal(film.terms(vector), torch.zeros(2, 3, L, 2, D, dtype=torch.float64))
    assert torch.equal(modulate(hidden, film.terms(vector)[:, :, 1]), hidden)
    torch.nn.init.normal_(film.projection.weight)
    torch.nn.init.normal_(film.projection.bias)
    weight, bias = film.projection.weight.tolist(), film.projection.bias.tolist()
    for block in range(L):
        got = modulate(hidden, film.terms(vector)[:, :, block])
        for row in range(2):
            for t in range(3):
                flat = matvec(weight, vector[row, t].tolist(), bias)[block * 2 * D : (block + 1) * 2 * D]
                gamma, beta, h = flat[:D], flat[D:], hidden[row, t].tolist()
                expected = [x * (1 + g) + b for x, g, b in zip(h, gamma, beta, strict=True)]
                torch.testing.assert_close(got[row, t].tolist(), expected)


def test_modulate_takes_flat_tokens_and_one_vector_for_all():
    terms, hidden = numbers(2, 3, 2, D), numbers(2, 3, D, seed=1)
    torch.testing.assert_close(modulate(hidden.view(6, D), terms), modulate(hidden, terms).view(6, D))
    torch.testing.assert_close(modulate(hidden, terms[:, :1]), modulate(hidden, terms[:, :1].expand(-1, 3, -1, -1)))
    for wrong in (numbers(3, 3, 2, D), numbers(2, 2, 2, D)):
        with pytest.raises(ValueError, match="one goal per row"):
            modulate(hidden, wrong)
    with pytest.raises(ValueError, match="one goal per row"):
        modulate(hidden.view(6, D)[:5], terms)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5).filter(any), min_size=1, max_size=4))
def test_mean_pool_leaves_padding_out(rows):
    mask, hidden = torch.tensor(rows), numbers(len(rows), 5, E)
    got = mean_pool(torch.where(mask[..., None], hidden, 1e6), mask)
    for row, keep in enumerate(rows):
        kept = [hidden[row, t].tolist() for t in range(5) if keep[t]]
        torch.testing.assert_close(got[row].tolist(), [sum(column) / len(kept) for column in zip(*kept, strict=True)])
    torch.testing.assert_close(mean_pool(hidden), mean_pool(hidden, torch.ones_like(mask)))


def test_mean_pool_refuses_an_empty_row():
    with pytest.raises(ValueError, match="row 1 of the goal batch is empty"):
        mean_pool(numbers(2, 2, E), torch.tensor([[True, False], [False, False]]))


def test_encoder_is_a_three_layer_mlp_of_the_mean():
    torch.manual_seed(0)
    encoder, hidden = GoalEncoder(configure()).double(), numbers(1, 4, E)
    mean = [sum(column) / 4 for column in zip(*hidden[0].tolist(), strict=True)]
    assert sum(isinstance(layer, torch.nn.Linear) for layer in encoder.predictor) == 3
    torch.testing.assert_close(encoder(hidden)[0].tolist(), mlp(encoder.predictor, mean))


def test_a_channel_works_in_a_hand_written_loop():
    torch.manual_seed(0)
    channel = GoalChannel(configure(tracker_history=2)).double()
    torch.nn.init.normal_(channel.film.projection.weight)
    channel.tracker.alpha.data.fill_(0.5)
    hidden, fires = numbers(2, 5, E), torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
    state = channel.encode(numbers(2, 3, E, seed=1))
    whole, last = channel.advance(state, hidden, fires)
    pieces = []
    for t in range(5):
        terms, state = channel.advance(state, hidden[:, t : t + 1], fires[:, t : t + 1])
        pieces.append(terms)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(state.goal, last.goal)
    with pytest.raises(ValueError, match="trigger mask"):
        channel.advance(state)
    with pytest.raises(ValueError, match="config.sized"):
        GoalChannel(GoalConfig())


def test_states_move_as_rows():
    channel = GoalChannel(configure(mode="static", trigger_ids=())).double()
    torch.nn.init.normal_(channel.film.projection.weight)
    a, b = (channel.fold(channel.encode(numbers(2, 3, E, seed=seed))) for seed in (1, 2))
    joined = LatentState.cat([a, b])
    assert joined.batch_size == 4
    picked = joined.select(torch.tensor([3, 0])).repeat_interleave(2)
    for got, expected in ((picked.goal, (b.goal[1], a.goal[0])), (picked.terms, (b.terms[1], a.terms[0]))):
        assert torch.equal(got, torch.stack([expected[0], expected[0], expected[1], expected[1]]))
    with pytest.raises(ValueError, match="only some of them carry 'terms'"):
        LatentState.cat([a, LatentState(goal=b.goal)])
    moved = LatentState(goal=a.goal, history_count=torch.tensor([1, 2])).to(torch.float32)
    assert moved.goal.dtype == torch.float32 and moved.history_count.dtype == torch.long
    assert a.goal.requires_grad and not a.detach().goal.requires_grad and not a.detach().terms.requires_grad


def test_shapes_are_checked_under_pytest():
    module = tracker(1)
    with pytest.raises(jaxtyping.TypeCheckError):
        module.sequence(LatentState(goal=numbers(2, G)), numbers(2, 3, E), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(jaxtyping.TypeCheckError):
        mean_pool(numbers(2, 3))
