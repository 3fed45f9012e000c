"""The fast paths against the slow ones they stand for, and what each does how often. Nothing here is timed."""

from dataclasses import replace

import pytest
import torch

from families import FAMILIES, TRIGGERS, attached, close, differ, open_gate, settings, tiny, tokens, unchecked_types
from sidestream import Window, attach
from sidestream.experiments.results import cell
from sidestream.experiments.run import run
from sidestream.experiments.settings import from_json, to_json
from sidestream.lm.decoding.decode import LeanDecoder, greedy
from sidestream.lm.decoding.lean import Linear, packed
from sidestream.lm.models.blocks import decoder_blocks
from sidestream.papers.lsar.speed import TABLES, Speed, interleaved, over, table2, table4, timed

IDS, GOALS = tokens(3, 12), tokens(3, 5, seed=1)
PAD = (3, 0, 5)
REINDEX, ROLLING = Window(size=9, policy="reindex"), Window(size=7, policy="rolling")


def recorded(monkeypatch, owner, name):
    """Calls of a function, as (arguments, result)."""
    calls, inner = [], getattr(owner, name)

    def record(*args, **kwargs):
        result = inner(*args, **kwargs)
        calls.append(((*args, *kwargs.values()), result))
        return result

    monkeypatch.setattr(owner, name, record)
    return calls


def padded(rows, pad):
    mask = torch.ones(rows, 12, dtype=torch.long)
    for row in range(rows if pad else 0):
        mask[row, : PAD[row]] = 0
    ids = torch.where(mask.bool(), IDS[:rows], 0)
    return ids, mask, [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def reference(model, ids, mask, goal, window, new=10):
    """Tokens and (B, new, V) logits of `generate`."""
    options = dict(max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = model.generate(ids, attention_mask=mask, goal=goal, window=window, **options)
    return out.sequences[:, 12:].tolist(), torch.stack(out.logits, 1)


@pytest.mark.parametrize(
    "family, mode, window, rows, pad",
    [
        ("gpt2", "static", None, 1, False),
        ("gpt2", "static", REINDEX, 3, True),
        ("gpt2", "dynamic", None, 3, True),
        ("gpt2", "dynamic", REINDEX, 3, True),
        ("llama", "static", ROLLING, 1, False),
        ("llama", "static", ROLLING, 3, True),
        ("llama", "dynamic", None, 1, False),
        ("llama", "dynamic", Window(size=7, policy="rolling", encoder_size=5), 3, True),
    ],
)
def test_lean_decoding_is_generate(family, mode, window, rows, pad, monkeypatch):
    model = (
        attached(family, mode, tracker_update="replace") if rows == 1 and mode == "dynamic" else attached(family, mode)
    )
    ids, mask, prompts = padded(rows, pad)
    expected, logits = reference(model, ids, mask, GOALS[:rows], window)
    decoder = LeanDecoder(model, rows=rows, window=window)
    heads = recorded(monkeypatch, decoder.stack, "head")
    assert decoder.greedy(prompts, new_tokens=10, goal=model.encode_goal(GOALS[:rows])) == expected
    close(torch.stack([result for _, result in heads], 1), logits, 2e-5)
    heads.clear()
    decoder.greedy(prompts, new_tokens=10, goal=model.encode_goal(GOALS[:rows].flip(1)))
    differ(heads[0][1], logits[:, 0])


def test_one_goal_for_all_rows_and_none():
    model = attached("gpt2", "static")
    ids, mask, prompts = padded(3, True)
    decoder = LeanDecoder(model, rows=3)
    one = model.encode_goal(GOALS[:1])
    assert decoder.greedy(prompts, new_tokens=5, goal=one) == reference(model, ids, mask, GOALS[:1], None, 5)[0]
    closed = decoder.greedy(prompts, new_tokens=5)
    assert closed == LeanDecoder(model.lm, rows=1).greedy(prompts, new_tokens=5)
    assert closed == reference(model, ids, mask, None, None, 5)[0]
    stop = closed[0][2]
    assert decoder.greedy(prompts, new_tokens=5, stop_id=stop) == [
        row[: row.index(stop)] if stop in row else row for row in closed
    ]


def test_a_channel_without_an_encoder_of_its_own_and_an_early_layer():
    model = attached("llama", "dynamic", own_encoder=False, tracker_layer=1)
    ids, mask, prompts = padded(3, False)
    got = LeanDecoder(model, rows=3).greedy(prompts, new_tokens=8, goal=model.encode_goal(GOALS))
    assert got == reference(model, ids, mask, GOALS, None, 8)[0]


def test_text_fed_in_pieces():
    """A prompt and a forced text, in any pieces: what is chosen next is the same."""
    model = attached("llama", "dynamic")
    window = Window(size=7, policy="rolling", encoder_size=5)
    goal, text, chosen = model.encode_goal(GOALS), tokens(3, 60, seed=5), []
    for pieces in ([60], [1] * 60, [20, 1, 30, 9]):
        rollout = LeanDecoder(model, rows=3, window=window).start(3, capacity=70, goal=goal)
        for piece in text[:, :-1].split([*pieces[:-1], pieces[-1] - 1] if pieces[-1] > 1 else pieces[:-1], dim=1):
            rollout.force(piece)
        chosen.append(rollout.feed(text[:, -1:]).tolist())
    assert chosen[0] == chosen[1] == chosen[2]


# -------------------------------------------------------------------- counts


def test_a_static_goal_is_projected_once_and_costs_nothing_after(monkeypatch):
    model = attached("gpt2", "static")
    projections = recorded(monkeypatch, model.channel.film, "terms")
    model.generate(IDS, goal=GOALS, max_new_tokens=6)
    assert len(projections) == 1
    state = model.encode_goal(GOALS)
    decoder = LeanDecoder(model, rows=3)
    folds = recorded(monkeypatch, decoder.stack, "fold")
    bare = LeanDecoder(model.lm, rows=3)
    products = recorded(monkeypatch, Linear, "__call__")
    decoder.greedy(IDS.tolist(), new_tokens=6, goal=state)
    conditioned = len(products)
    bare.greedy(IDS.tolist(), new_tokens=6)
    assert (len(projections), len(folds)) == (2, 1)
    assert len(products) == 2 * conditioned  # as many matrix products as the unconditioned decoder


def test_the_encoder_reads_a_piece_a_trigger_and_every_token_once(monkeypatch):
    model = attached("gpt2", "dynamic")
    decoder = LeanDecoder(model, rows=1)
    plain, trigger = TRIGGERS[-1] + 1, TRIGGERS[0]
    text = torch.tensor([[plain, plain, trigger, plain, plain, plain, trigger, plain, trigger, plain]])
    rollout = decoder.start(1, capacity=20, goal=model.encode_goal(GOALS[:1]))
    reads = recorded(monkeypatch, decoder.reader, "run")
    heads = recorded(monkeypatch, decoder.stack, "head")
    for column in text.split(1, dim=1):
        rollout.force(column)
    assert [args[0].shape[1] for args, _ in reads] == [3, 4, 2]
    assert not heads
    rollout.feed(text[:, :1])
    assert len(heads) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_encoder_runs_no_block_above_the_layer_read(family, monkeypatch):
    model = attached(family, "static")
    _, blocks = decoder_blocks(model.lm)
    ran = [recorded(monkeypatch, block, "forward") for block in blocks]
    for layer, count in ((0, 0), (1, 1), (-2, 1), (2, 2), (-1, 2)):
        for calls in ran:
            calls.clear()
        got = model.goal_hidden(GOALS, layer=layer)
        assert sum(map(len, ran)) == count
        with torch.no_grad():
            expected = model.lm.base_model(GOALS, output_hidden_states=True).hidden_states
        close(got, expected[layer])
        differ(got, expected[0 if layer else 1])


def test_answers_do_not_depend_on_the_batch_they_share():
    model = attached("gpt2", "static")
    forced = [IDS[0, :n].tolist() for n in (12, 3, 7, 5)]
    state = model.encode_goal(tokens(4, 5, seed=2))
    options = dict(new_tokens=6, window=8)
    together = greedy(model, forced, goal=state, batch_size=2, **options)
    for row, ids in enumerate(forced):
        assert greedy(model, [ids], goal=state.select(torch.tensor([row])), **options) == [together[row]]
    assert len(set(map(tuple, together))) > 1


def test_memory_of_a_rollout_is_flat():
    model = open_gate(attach(tiny("llama"), goal=settings("dynamic"), encoder=tiny("llama", seed=1, width=24)))
    window = Window(size=16, policy="rolling", encoder_size=8)
    rollout = LeanDecoder(model, window=window).start(1, capacity=100_000, goal=model.encode_goal(GOALS[:1]))
    marks = []
    for length in (40, 1, 400, 1):
        rollout.force(tokens(1, length, seed=length))
        marks.append(rollout.nbytes())
    # 2 blocks, keys and values, 2 heads: W slots of 8 in the decoder, 8 + 16 of 6 in E_base; float32.
    assert marks[1] == marks[2] == marks[3] == 2 * 2 * 2 * (16 * 8 + 24 * 6) * 4
    assert marks[0] > marks[1]


def test_a_packed_map_is_the_same_map():
    matrix, bias, hidden = torch.randn(5, 7), torch.randn(7), torch.randn(3, 5)
    for rows in (1, 3):
        linear = packed(matrix, bias, rows=rows)
        close(linear(hidden), hidden @ matrix + bias)
        close(linear.add_to(torch.ones(3, 7), hidden), 1 + hidden @ matrix + bias)
    assert packed(matrix, None, rows=1).matrix.data_ptr() == matrix.data_ptr()  # no copy where it lies right
    assert packed(matrix, None, rows=3).matrix.is_contiguous() is False
    assert packed(matrix.bfloat16(), None, rows=1).matrix.is_contiguous() is False  # the other order is slow there


# -------------------------------------------------------------------- tables


@pytest.mark.parametrize("make, own", [(table2, "static"), (table4, "dynamic")])
def test_a_table_runs_at_smoke_scale(make, own, tmp_path):
    plan = replace(make("smoke"), windows=(16,), batches=(2,), repeats=2, new_tokens=4)
    assert from_json(Speed, to_json(plan)) == plan
    results = run(plan, tmp_path / "run", command="tests")
    rows = {(cell["arm"], cell["metric"]) for cell in results["cells"]}
    ratios = {(own, f"{own}_over_small"), (own, f"{own}_over_large")}
    assert rows == ratios | {(arm, "tokens_per_s") for arm in (own, "small", "large")}
    assert len(results["cells"]) == 5 * len(plan.families)
    assert all(cell["n"] == len(cell["samples"]) == 2 and cell["value"] > 0 for cell in results["cells"])
    assert run(plan, tmp_path / "run", command="tests", resume=True) == results
    with pytest.raises(ValueError, match="already holds this run"):
        run(plan, tmp_path / "run", command="tests")


def test_a_ratio_is_taken_within_a_round():
    """The machine slows down tenfold in the second round: both arms do, and the ratio stays."""
    rounds = {"ours": iter([9.0, 1.0, 10.0, 1.0]), "theirs": iter([9.0, 2.0, 20.0, 2.2])}
    seconds = interleaved({name: lambda it=it: next(it) for name, it in rounds.items()}, 3)
    assert seconds["ours"] == [1.0, 10.0, 1.0]  # the first round is a warm-up
    turns: list[str] = []
    interleaved({name: lambda name=name: turns.append(name) or 0.0 for name in "ab"}, 3)
    assert turns == ["b", "a", "a", "b", "b", "a", "a", "b"], "there and back"
    one = cell(timed("ours", "ours_over_theirs", {}, over(seconds["theirs"], seconds["ours"])), TABLES[0])
    assert one["value"] == 2.0 and one["samples"] == [2.0, 2.0, 2.2]


def test_settings_that_make_no_sense():
    for change, message in [
        ({"windows": ()}, "windows is .*give at least one"),
        ({"dtypes": ("fp16",)}, "dtypes names the unknown 'fp16'; use fp32, bf16"),
        ({"families": ("opt",)}, "families names the unknown 'opt'"),
        ({"repeats": 0}, "repeats is 0"),
        ({"batches": (0,)}, "at least 1 row"),
    ]:
        with pytest.raises(ValueError, match=message):
            replace(table2("smoke"), **change)


# -------------------------------------------------------------------- refusals


def test_what_lean_decoding_refuses():
    static = attached("gpt2", "static")
    short = open_gate(attach(tiny("llama"), goal=settings("dynamic"), encoder=tiny("gpt2")))
    history = attached("gpt2", "dynamic", tracker_history=2)
    own = open_gate(attach(tiny("gpt2"), goal=settings("static"), sites=["transformer.h.0", "transformer.h.1"]))
    state, goal = static.encode_goal(GOALS), short.encode_goal(GOALS)
    for call, message in [
        (lambda: LeanDecoder(tiny("opt")), "knows GPT-2 and Llama, not OPTForCausalLM"),
        (lambda: LeanDecoder(own), "sites"),
        (lambda: LeanDecoder(history), "tracker_history 1, not 2"),
        (lambda: LeanDecoder(static, window=ROLLING), "learned absolute positions"),
        (lambda: LeanDecoder(static).greedy([[1, 2]], new_tokens=2, goal=state), "3 goals for 1 rows"),
        (lambda: LeanDecoder(static).greedy([[1, 2]], new_tokens=90), "outgrow the model's 64 learned positions"),
        (lambda: LeanDecoder(static).greedy([[]], new_tokens=2), "no empty one"),
        (lambda: LeanDecoder(static).greedy(IDS.tolist(), new_tokens=2, goal=replace(state)), "no FiLM terms yet"),
        (lambda: LeanDecoder(short).greedy(IDS.tolist(), new_tokens=60, goal=goal), "outgrow E_base's 64 learned"),
    ]:
        with unchecked_types(), pytest.raises(ValueError, match=message):
            call()
