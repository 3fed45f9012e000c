"""A pinned goal: the logits of its text in front of the window, by any road, without any training."""

import pytest
import torch

from families import FAMILIES, ROTARY, VOCABULARY, close, differ, logits, open_gate, settings, tiny, tokens
from sidestream import Window, attach
from sidestream.lm.cache import CACHE_NAME, _attention_for

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

    attention = mask(total)
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        attention = {"full_attention": attention, "sliding_attention": mask(own)}
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
