"""A pinned goal: the logits of its text in front of the window, by any road, without any training."""

import pytest
import torch

from families import FAMILIES, ROTARY, close, differ, logits, open_gate, settings, tiny, tokens
from sidestream import Window, attach
from sidestream.lm.decoding.cache import CACHE_NAME
from sidestream.lm.decoding.decode import LeanDecoder

W, T = 7, 20
GOALS = [tokens(5, seed=3).tolist(), tokens(3, seed=4).tolist()]
IDS = tokens(2, T, seed=5)
LENGTHS = (T, T - 6)
MASK = torch.tensor([[0] * (T - n) + [1] * n for n in LENGTHS])
PADDED = torch.where(MASK.bool(), IDS, 0)
REINDEX, ROLLING = Window(size=W, policy="reindex"), Window(size=W, policy="rolling")
RECORD = dict(output_logits=True, return_dict_in_generate=True)


def plain(lm, goal, text):
    """(T, V) logits of a text behind the goal's text, the goal visible to layers with windows of their own too."""
    return dense(lm, goal, text, len(text) + 1)


def dense(lm, goal, text, size):
    """(T, V) logits of one forward over goal and text: every token sees the goal and the last `size` tokens.

    The goal stands right before the oldest token seen. So that the model itself computes the goal's keys where they
    stand, the goal is put in once for every place; each token of the text sees one of these copies.
    """
    n, length, config = len(goal), len(text), lm.config
    places = list(range(max(0, length - size) + 1))
    ids = torch.tensor([goal * len(places) + list(text)])
    at = [place + i for place in places for i in range(n)] + [n + i for i in range(length)]
    total = ids.shape[1]
    column, own = torch.arange(total), getattr(config, "sliding_window", None) or total

    def mask(reach):
        seen = torch.zeros(total, total, dtype=torch.bool)
        for place in places:
            part = slice(place * n, place * n + n)
            near = (column[:n, None] >= column[:n]) & (column[:n, None] - column[:n] < reach)
            seen[part, part] = near
        for token in range(length):
            place = max(0, token - size + 1)
            row = len(places) * n + token
            seen[row, place * n : place * n + n] = True
            first = max(0, token - min(size, reach) + 1)
            seen[row, len(places) * n + first : row + 1] = True
        return torch.zeros(1, 1, total, total).masked_fill(~seen, torch.finfo(torch.float32).min)

    kinds = getattr(config, "layer_types", None)
    attention = mask(total if kinds else own)
    if "sliding_attention" in (kinds or []):
        attention = {"full_attention": mask(total), "sliding_attention": mask(own)}
    with torch.no_grad():
        out = lm(ids, attention_mask=attention, position_ids=torch.tensor([at]), use_cache=False)
    return out.logits[0, len(places) * n :]


def feed(model, cache, pieces, ids=PADDED, mask=MASK):
    """(B, steps, V) logits of the last token of each piece."""
    out, start = [], 0
    with torch.no_grad():
        for piece in pieces:
            end = start + piece
            out.append(model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache).logits[:, -1])
            start = end
    return torch.stack(out, 1)


def rows():
    return [(row, GOALS[row], PADDED[row, T - LENGTHS[row] :].tolist()) for row in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_left_is_the_goals_text_in_front(family):
    model = attach(tiny(family))
    out = logits(model, PADDED, attention_mask=MASK, goal=GOALS)
    for row, goal, text in rows():
        close(out[row, T - len(text) :], plain(model.lm, goal, text), 1e-4)
    steps = feed(model, model.new_cache(GOALS), [9] + [1] * (T - 9))
    close(steps[:, -6:], out[:, -6:], 1e-4)
    differ(out, logits(model, PADDED, attention_mask=MASK))
    assert torch.equal(logits(model, IDS), logits(tiny(family), IDS))  # closed is the base


@pytest.mark.parametrize("family", FAMILIES)
def test_reindex_is_the_goal_and_the_last_tokens(family):
    model = attach(tiny(family))
    pieces = [11] + [1] * (T - 11)
    steps = feed(model, model.new_cache(GOALS, window=REINDEX), pieces)
    for row, goal, text in rows():
        for step in range(len(pieces)):
            end = len(text) - len(pieces) + 1 + step
            close(steps[row, step], plain(model.lm, goal, text[max(0, end - W) : end])[-1], 1e-4)


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("pieces", [[T], [11] + [1] * (T - 11), [3, 8, 2, 7], [1] * T], ids=str)
def test_rolling_is_one_dense_forward(family, pieces):
    model = attach(tiny(family))
    steps = feed(model, model.new_cache(GOALS, window=ROLLING), pieces)
    for row, goal, text in rows():
        oracle = dense(model.lm, goal, text, W)
        ends = torch.tensor(pieces).cumsum(0) - (T - len(text)) - 1
        for step, end in enumerate(ends.tolist()):
            if end >= 0:
                close(steps[row, step], oracle[end], 1e-4)
    differ(oracle[-1], plain(model.lm, goal, text)[-1])  # the window hides something


GENERATE = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)


@pytest.mark.parametrize("window", [None, REINDEX, ROLLING], ids=["whole", "reindex", "rolling"])
def test_generate_is_the_oracle_chosen_greedily(window):
    model = attach(tiny("llama"))
    out = model.generate(PADDED, attention_mask=MASK, goal=GOALS, window=window, **RECORD, **GENERATE)
    for row, goal, text in rows():
        text = text + out.sequences[row, T:].tolist()
        for step in range(8):
            seen = text[: len(text) - 8 + step]
            if window is REINDEX:
                expected = plain(model.lm, goal, seen[-W:])[-1]
            else:
                expected = dense(model.lm, goal, seen, len(seen) if window is None else W)[-1]
            close(out.logits[step][row], expected, 1e-4)


def test_beams_samples_and_a_second_turn():
    model = attach(tiny("llama"))
    kw = dict(window=ROLLING, goal=GOALS, attention_mask=MASK, **GENERATE)
    beams = model.generate(PADDED, num_beams=3, num_return_sequences=2, **kw, **RECORD)
    assert beams.sequences.shape == (4, T + 8)
    both = model.generate(
        PADDED.repeat_interleave(2, 0),
        **{**kw, "goal": [GOALS[0], GOALS[0], GOALS[1], GOALS[1]], "attention_mask": MASK.repeat_interleave(2, 0)},
    )
    assert torch.equal(both[::2], model.generate(PADDED, **kw))
    for row, goal, text in rows():  # each beam's score is that of its text under its own goal
        said = beams.sequences[2 * row, T:].tolist()
        scores = dense(model.lm, goal, text + said, W).log_softmax(-1)[len(text) - 1 : -1]
        total = scores[range(8), said].sum() / 8
        close(beams.sequences_scores[2 * row] if "sequences_scores" in beams else total, total, 1e-3)
    first = model.generate(PADDED, **kw, return_dict_in_generate=True)
    more = torch.cat([first.sequences, tokens(2, 3, seed=9)], 1)
    mask = torch.cat([MASK, torch.ones(2, 11, dtype=torch.long)], 1)
    turn = model.generate(more, attention_mask=mask, **{CACHE_NAME: first[CACHE_NAME]}, **RECORD, **GENERATE)
    for row, goal, text in rows():
        text = text + more[row, T:].tolist()
        close(turn.logits[0][row], dense(model.lm, goal, text, W)[-1], 1e-4)


@pytest.mark.parametrize("window", [None, REINDEX, ROLLING], ids=["whole", "reindex", "rolling"])
def test_parts_are_added_replaced_and_removed_on_a_live_cache(window):
    model = attach(tiny("llama"))
    policy, wish, note = ([5, 6, 7, 8], [9, 10, 11], [12, 13])
    cache = model.new_cache([{"policy": policy, "wish": wish}, {"policy": note, "wish": wish}], window=window)
    feed(model, cache, [T])
    kept = T if window is None else W if window is REINDEX else W - 1  # the last token's keys are all that rolling lost

    def expect(goals, extra):
        new = tokens(2, 2, seed=extra)
        mask = torch.cat([MASK, torch.ones(2, extra + 1, dtype=torch.long)], 1)[:, : cache.get_seq_length() + 2]
        with torch.no_grad():
            out = model(new, attention_mask=mask, cache=cache).logits[:, -1]
        for row, _, text in rows():
            seen[row] = (seen.get(row) or text[-kept:]) + new[row].tolist()
            if window is not None:
                seen[row] = seen[row][-W:]
            if window is not ROLLING:
                close(out[row], plain(model.lm, goals[row], seen[row])[-1], 1e-4)
        return out

    seen = {}
    model.update_goal(cache, {"note": note})
    expect([policy + wish + note, note + wish + note], 2)
    model.update_goal(cache, {"policy": None}, rows=[1])
    expect([policy + wish + note, wish + note], 4)
    model.update_goal(cache, {"wish": [20, 21, 22, 23, 24]}, rows=[0])
    out = expect([policy + [20, 21, 22, 23, 24] + note, wish + note], 6)
    assert [write.parts for write in cache.writes] == [("policy", "wish"), ("note",), ("policy",), ("wish",)]
    assert [write.at for write in cache.writes] == [0, T, T + 2, T + 4]
    assert torch.isfinite(out).all()
    with pytest.raises(ValueError, match="no part 'nothing' to remove; it has"):
        model.update_goal(cache, {"nothing": None})


def test_gradients_and_checkpointing_are_those_of_the_text():
    lm = tiny("llama")
    model = attach(lm, goal=settings("static"), pinned=True)
    open_gate(model)
    labels = torch.where(MASK.roll(1, dims=1).bool() & MASK.bool(), PADDED, -100)  # a token behind padding has no past

    def gradients(**kwargs):
        model.zero_grad()
        loss = model(PADDED, attention_mask=MASK, goal=GOALS, labels=labels, **kwargs).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.train()
    loss, plainly = gradients()
    model.gradient_checkpointing_enable()
    again, checkpointed = gradients()
    close(loss, again)
    assert len(plainly) == len(checkpointed) > len(list(lm.parameters()))
    for left, right in zip(plainly, checkpointed, strict=True):
        close(left, right, 1e-4)
    states = model.hidden(PADDED, goal=GOALS, attention_mask=MASK)
    close(lm.get_output_embeddings()(states), model(PADDED, attention_mask=MASK, goal=GOALS).logits, 1e-4)


def test_a_vector_and_a_pinned_goal_at_once():
    model = open_gate(attach(tiny("qwen3"), goal=settings("static"), pinned=True))
    both = logits(model, IDS, goal=GOALS)
    state = model.encode_goal(GOALS)
    differ(both, logits(attach(tiny("qwen3")), IDS, goal=GOALS))
    steps = feed(model, model.new_cache(state, window=ROLLING), [T - 1, 1], IDS, torch.ones_like(IDS))
    assert torch.isfinite(steps).all()
    with torch.no_grad():
        cache = model.new_cache(GOALS)
        piecewise = torch.cat([model(IDS[:, :8], cache=cache).logits, model(IDS[:, 8:], cache=cache).logits], 1)
    close(piecewise, both, 1e-4)


@pytest.mark.parametrize(
    "goal, message",
    [
        ([[]], "a goal is empty"),
        ({}, "a goal is"),
        ({"policy": []}, "a goal is empty"),
        (tokens(1, 60).tolist(), "a pinned goal of 60 tokens and a window of 7 need more than the 64 positions"),
    ],
    ids=["empty", "no parts", "empty part", "long"],
)
def test_a_goal_that_cannot_be_pinned_says_so(goal, message):
    model = attach(tiny("llama"))
    with pytest.raises(ValueError, match=message):
        model.generate(IDS, goal=goal, window=W, **GENERATE)


@pytest.mark.parametrize(
    "family, window", [("llama", None), ("llama", REINDEX), ("llama", ROLLING), ("gpt2", None), ("gpt2", REINDEX)]
)
@pytest.mark.parametrize("vector", [False, True], ids=["pinned", "with a vector"])
def test_lean_decoding_chooses_what_generate_chooses(family, window, vector):
    model = attach(tiny(family), goal=settings("static") if vector else None, pinned=True)
    if vector:
        open_gate(model)
    kw = dict(attention_mask=MASK, goal=GOALS, window=window, pad_token_id=0, do_sample=False, eos_token_id=None)
    expected = model.generate(PADDED, max_new_tokens=14, **kw)[:, T:].tolist()
    decoder = LeanDecoder(model, rows=2, window=window)
    prompts = [text for _, _, text in rows()]
    assert decoder.greedy(prompts, new_tokens=14, goal=model.encode_goal(GOALS)) == expected
    one = decoder.greedy(prompts, new_tokens=14, goal=model.encode_goal(GOALS[:1]))
    assert one[0] == expected[0] and one[1] != expected[1]
