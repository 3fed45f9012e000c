"""The concept stream's cell alone: the authors' traces, a scalar-by-scalar oracle, ablations, controls, its state."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from families import unchecked_types
from sidestream.channels import GATES, ConceptStream, LatentState, StreamConfig

GOLDEN = Path(__file__).parent / "data" / "agclr_golden"
SETS = {
    entry["weights"]: entry for entry in json.loads(gzip.decompress((GOLDEN / "forward.json.gz").read_bytes()))["sets"]
}
INITS = ("gsm8k", "prosqa", "identity")
D = 6


def golden_stream(name: str) -> ConceptStream:
    """The recorded weights, in float64."""
    arrays = np.load(GOLDEN / "stream_weights.npz")
    stream = ConceptStream(StreamConfig(width=16)).double()
    names = [key for key in arrays if key.startswith(f"{name}.")]
    stream.load_state_dict({key.partition(".")[2]: torch.from_numpy(arrays[key]).double() for key in names})
    return stream


def opened(**changes) -> ConceptStream:
    """A small stream whose gates depend on their input."""
    torch.manual_seed(1)
    stream = ConceptStream(StreamConfig(width=D, **changes)).double()
    with torch.no_grad():
        for parameter in stream.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    return stream


def hidden(passes=5, rows=3, seed=0):
    return torch.randn(passes, rows, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(stream, inputs, state=None):
    """h'_t and c_t of every pass."""
    state = stream.start(inputs[0]) if state is None else state
    gated, concepts = [], []
    for h in inputs:
        out, state = stream(h, state)
        gated.append(out)
        concepts.append(state.concept)
    return torch.stack(gated), torch.stack(concepts)


# -------------------------------------------------------------------- the cell


@pytest.mark.parametrize("name", ["init", "random"])
def test_the_authors_traces(name):
    stream, trace = golden_stream(name), SETS[name]["stream_trace"]
    h = torch.tensor([entry["h"] for entry in trace], dtype=torch.float64)[:, None]
    gated, concepts = run(stream, h)
    gates = stream.gates(h)[:, 0]  # (passes, 3, D)
    for t, entry in enumerate(trace):
        for got, key in [(gated[t, 0], "h_gated"), (concepts[t, 0], "c"), *zip(gates[t], GATES, strict=True)]:
            torch.testing.assert_close(got, torch.tensor(entry[key], dtype=torch.float64), atol=1e-7, rtol=0)
    assert (gated[1:] - run(stream, h.flip(0))[0][1:]).abs().max() > 0.1


def norm(values, weight, bias):
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    return [(v - mean) / math.sqrt(variance + 1e-5) * w + b for v, w, b in zip(values, weight, bias, strict=True)]


def by_hand(weights, h, c):
    """One pass from the published equations, a number at a time."""

    def gate(name, normed):
        rows = zip(weights[f"{name}_gate.weight"], weights[f"{name}_gate.bias"], strict=True)
        sums = [sum(a * x for a, x in zip(row, normed, strict=True)) + bias for row, bias in rows]
        return [1 / (1 + math.exp(-s)) for s in sums]

    normed = norm(h, weights["ln_h.weight"], weights["ln_h.bias"])
    r, f, w = gate("read", normed), gate("forget", normed), gate("write", normed)
    out = [(1 - f[i]) * h[i] + r[i] * c[i] for i in range(len(h))]
    mixed = [c[i] + w[i] * out[i] for i in range(len(h))]
    return out, norm(mixed, weights["ln_residual.weight"], weights["ln_residual.bias"])


def test_the_equations_number_by_number():
    stream, inputs = opened(), hidden()
    weights = {name: tensor.tolist() for name, tensor in stream.state_dict().items()}
    gated, concepts = run(stream, inputs)
    for row in range(3):
        c = [0.0] * D
        for t in range(5):
            out, c = by_hand(weights, inputs[t, row].tolist(), c)
            torch.testing.assert_close(gated[t, row].tolist(), out, atol=1e-12, rtol=0)
            torch.testing.assert_close(concepts[t, row].tolist(), c, atol=1e-12, rtol=0)
    forgetful, _ = run(stream, inputs[1:])  # c_0 = 0 one pass later
    assert (forgetful - gated[1:]).abs().max() > 0.1


@pytest.mark.parametrize("memory", ["gated", "random", "first", "mlp"])
def test_as_many_parameters_as_published(memory):
    stream = ConceptStream(StreamConfig(width=768, memory=memory))
    count = sum(p.numel() for p in stream.parameters())
    assert count == 1_774_848 == 3 * 768**2 + 7 * 768
    assert round(100 * count / (count + 124_439_808 + 3 * 768), 2) == 1.41


@pytest.mark.parametrize("init, values", [("gsm8k", (0.43, 0.27, 0.18)), ("prosqa", (0.43, 0.18, 0.43))])
def test_gates_start_where_the_paper_says(init, values):
    gates = ConceptStream(StreamConfig(width=D, init=init)).double().gates(hidden())
    for index, value in enumerate(values):
        assert gates[..., index, :].std() < 1e-7  # zero weights: no input matters yet
        assert round(gates[..., index, :].mean().item(), 2) == value
    given = ConceptStream(StreamConfig(width=D, biases=(0.0, -1.5, 2.0)))
    assert [given.read_gate.bias[0].item(), given.forget_gate.bias[0].item(), given.write_gate.bias[0].item()] == [
        0,
        -1.5,
        2,
    ]


def test_identity_starts_as_the_identity_and_learns():
    stream, inputs = ConceptStream(StreamConfig(width=D, init="identity")).double(), hidden()
    gated, concepts = run(stream, inputs)
    assert torch.equal(gated, inputs) and concepts.abs().max() > 0.1
    assert (run(ConceptStream(StreamConfig(width=D)).double(), inputs)[0] - inputs).abs().max() > 0.1
    optimizer = torch.optim.Adam(stream.parameters(), lr=0.1)
    before = {name: p.clone() for name, p in stream.named_parameters()}
    for _ in range(4):
        optimizer.zero_grad()
        run(stream, inputs)[0].square().sum().backward()
        optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in stream.named_parameters())


def test_shut_gates_are_the_identity_to_the_bit():
    stream, inputs = opened(), hidden()
    with torch.no_grad():
        for linear in (stream.read_gate, stream.forget_gate):
            linear.bias.fill_(-math.inf)
    assert torch.equal(run(stream, inputs)[0], inputs)


# -------------------------------------------------------------------- ablations and controls


@pytest.mark.parametrize("gate", GATES)
def test_a_knocked_out_gate_stays_shut(gate):
    stream, inputs = opened(knocked_out=(gate,)), hidden()
    values = stream.gates(inputs).unbind(dim=-2)
    for name, value in zip(GATES, values, strict=True):
        assert (value < 1e-4).all() if name == gate else value.std() > 0.01
    linear = getattr(stream, f"{gate}_gate")
    assert (linear.bias == -10).all() and not any(p.requires_grad for p in linear.parameters())
    optimizer = torch.optim.AdamW(stream.parameters(), lr=0.1, weight_decay=0.1)
    run(stream, inputs)[0].square().sum().backward()
    optimizer.step()
    assert (linear.bias == -10).all() and (linear.weight == 0).all()


def test_what_knocking_out_leaves_of_the_memory():
    """How far pass 1 reaches into later passes. At bias -10 a shut write gate still writes: the LayerNorm on c makes
    0.00005 of pass 1 whole again."""
    inputs = hidden()
    other = torch.cat([inputs[:1] + 1.7 * hidden(1, seed=9), inputs[1:]])

    def reach(stream):
        return (run(stream, inputs)[0] - run(stream, other)[0])[1:].abs().amax(dim=(1, 2))  # (passes 2 to 5)

    assert reach(opened()).min() > 0.05
    assert reach(opened(knocked_out=("read",))).max() < 1e-3
    leaking = reach(ConceptStream(StreamConfig(width=D, knocked_out=("write",))).double())
    assert leaking[0] < 0.05 and leaking[-1] > 0.3
    assert reach(opened(knocked_out=("write",), knock_out_bias=-math.inf)).max() == 0


def test_writing_stops_after_pass_k():
    stream, inputs = opened(), hidden()
    free = run(stream, inputs)[1]
    stream.config = replace(stream.config, write_until=2)
    frozen = run(stream, inputs)[1]
    assert torch.equal(frozen[:2], free[:2]) and (frozen[2:] - free[2:]).abs().max() > 0.1
    for t in (2, 3, 4):
        torch.testing.assert_close(frozen[t], stream.ln_residual(frozen[t - 1]))
    gates = stream.gates(inputs[:, 0], torch.arange(5))
    assert (gates[:2, 2] > 0).all() and (gates[2:, 2] == 0).all() and (gates[:, :2] > 0).all()
    with pytest.raises(ValueError, match="number of passes before"):
        stream.gates(inputs)


def test_random_gates_depend_on_the_input_and_do_not_learn():
    torch.manual_seed(0)
    stream = ConceptStream(StreamConfig(width=64, memory="random"))
    h = torch.randn(200, 64)
    logits = stream.gates(h).logit()
    assert torch.allclose(logits.std(dim=(0, 2)), torch.ones(3), atol=0.1)
    assert torch.allclose(logits.mean(dim=(0, 2)), torch.tensor([-0.28, -1.0, -1.5]), atol=0.1)
    learned = {name for name, p in stream.named_parameters() if p.requires_grad}
    assert learned == {"ln_h.weight", "ln_h.bias", "ln_residual.weight", "ln_residual.bias"}


def test_first_only_repeats_pass_one():
    stream, inputs = opened(memory="first"), hidden()
    concepts = run(stream, inputs)[1]
    assert torch.equal(concepts[0], run(opened(), inputs)[1][0])
    assert all(torch.equal(concepts[t], concepts[0]) for t in range(1, 5))


def test_the_mlp_has_no_memory():
    inputs, fresh = hidden(), ConceptStream(StreamConfig(width=D, memory="mlp", init="identity")).double()
    assert torch.equal(run(fresh, inputs)[0], inputs)  # and still it can learn
    stream = opened(memory="mlp")
    gated, concepts = run(stream, inputs)
    assert torch.equal(gated[1:], run(stream, inputs[1:])[0]) and (concepts == 0).all()
    assert (gated - inputs).abs().max() > 0.1
    gated.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in stream.parameters())
    with pytest.raises(ValueError, match="no gates"):
        stream.gates(inputs)


# -------------------------------------------------------------------- the state


@pytest.mark.parametrize("memory", ["gated", "first", "mlp"])
def test_rows_are_alone_and_idle_rows_keep_their_state(memory):
    stream, inputs = opened(memory=memory, **({"write_until": 2} if memory == "gated" else {})), hidden()
    together = run(stream, inputs)
    for row in range(3):
        alone = run(stream, inputs[:, row : row + 1])
        for got, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(got[:, row : row + 1], expected)
    # Row 1 sits out passes 0 and 3: it must get what it gets from the other three alone.
    state, outs = stream.start(inputs[0]), []
    for t in range(5):
        active = torch.tensor([True, t not in (0, 3), True])
        out, state = stream(inputs[t], state, active)
        outs.append(out)
    late = run(stream, inputs[[1, 2, 4], 1:2])
    torch.testing.assert_close(torch.stack([outs[t][1] for t in (1, 2, 4)]), late[0][:, 0])
    torch.testing.assert_close(state.concept[1], late[1][-1, 0])
    assert state.passes.tolist() == [5, 3, 5]


def test_a_call_changes_nothing_it_was_given():
    stream, inputs = opened(), hidden()
    state = stream.start(inputs[0])
    stream(inputs[0], state)
    assert (state.concept == 0).all() and state.passes.tolist() == [0, 0, 0]


def states():
    goal, concept, passes = torch.randn(3, 4), torch.randn(3, D), torch.tensor([1, 2, 3])
    both = LatentState(goal=goal, concept=concept, passes=passes).folded(torch.randn(3, 1, 2, 2, 4))
    return {"goal": LatentState(goal=goal), "stream": LatentState(concept=concept, passes=passes), "both": both}


@pytest.mark.parametrize("kind", ["goal", "stream", "both"])
def test_states_of_either_channel_move_by_rows(kind):
    state = states()[kind]
    assert state.batch_size == 3 and len(state.tensors()) == {"goal": 1, "stream": 2, "both": 4}[kind]
    for moved, rows in [
        (state.select(torch.tensor([2, 0])), [2, 0]),
        (state.repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (LatentState.cat([state, state.select(torch.tensor([1]))]), [0, 1, 2, 1]),
        (state.to(torch.float64).to(torch.float32), [0, 1, 2]),
        (state.detach(), [0, 1, 2]),
    ]:
        for got, whole in zip(moved.tensors(), state.tensors(), strict=True):
            assert torch.equal(got, whole[rows])
    assert state.to(torch.float64).tensors()[0].dtype == torch.float64
    narrow = state.to(torch.bfloat16)
    assert narrow.passes is None or narrow.passes.dtype == torch.long


def test_a_stream_is_carried_beside_a_goal():
    state = states()["both"]
    stream = ConceptStream(StreamConfig(width=D))
    moved = stream(torch.randn(3, D), stream.start(torch.zeros(3, D), state))[1]
    assert torch.equal(moved.goal, state.goal) and torch.equal(moved.terms, state.terms)
    assert not torch.equal(moved.concept, state.concept)
    assert replace(state, goal=torch.zeros(3, 4)).terms is None  # another goal: its terms are not the old one's
    with pytest.raises(ValueError, match="only some of them carry 'concept'"):
        LatentState.cat([state, states()["goal"]])


@pytest.mark.parametrize(
    "make, complaint",
    [
        (lambda: LatentState(), "holds nothing"),
        (lambda: LatentState(goal=torch.zeros(2, 3), concept=torch.zeros(3, D)), "different numbers of rows"),
        (lambda: ConceptStream(StreamConfig()), "width is missing"),
        (lambda: StreamConfig(init="zero"), "init is 'zero'"),
        (lambda: StreamConfig(memory="none"), "memory is 'none'"),
        (lambda: StreamConfig(knocked_out=("reed",)), "the gates are read, forget, write"),
        (lambda: StreamConfig(biases=(0.0, 1.0)), "give three"),
        (lambda: StreamConfig(knock_out_bias=math.nan), "must be negative"),
        (lambda: StreamConfig(write_until=-1), "counts passes"),
        (lambda: StreamConfig(width=0), "at least 1"),
        (lambda: StreamConfig(memory="mlp", knocked_out=("read",)), "has no gates"),
        (lambda: opened()(torch.zeros(3, D), states()["goal"]), "no concept stream"),
    ],
)
def test_mistakes_are_named(make, complaint):
    with unchecked_types(), pytest.raises(ValueError, match=complaint):
        make()
