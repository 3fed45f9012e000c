"""Pinned goals in every family that carries a channel: the goal's text in front, or a refusal by name."""

import pytest
import torch

from sidestream import Window, attach
from test_families import ACCEPTED, REFUSED, made
from test_pinned import GOALS, LENGTHS, MASK, PADDED, REINDEX, ROLLING, T, W, dense, feed, plain, rows

REFUSALS = {
    "GPTNeo": "has layers that see 5 tokens, whatever the mask says",
    "Mpt": "MPT counts distances over padding",
}
NOT_ROLLING = {
    **dict.fromkeys(("GPT2", "GPTBigCode", "OPT", "BioGpt"), "learned absolute positions"),
    **dict.fromkeys(("Bloom", "Mpt"), "no rotary positions"),
    "DeepseekV3": "do not turn with their positions in a way known here",
}


def two_blocks(family):
    """Two blocks, so that what the second sees of the first matters."""
    config = dict(ACCEPTED[family])
    for name in ("num_hidden_layers", "n_layer", "n_layers"):
        if name in config:
            config[name] = 2
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"] * 2
    if family == "GPTNeo":
        config |= {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    lm = made(family, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
    return lm


def text_in_front(lm, goal, text):
    """(T, V) logits; by a mask of our own only where a layer's window would hide the goal."""
    if getattr(lm.config, "sliding_window", None):
        return plain(lm, goal, text)
    with torch.no_grad():
        return lm(torch.tensor([goal + text]), use_cache=False).logits[0, len(goal) :]


def close(left, right):
    torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ACCEPTED)
def test_pinned_is_the_goals_text_in_front(family):
    model = attach(two_blocks(family))
    pieces = [T - 3, 1, 1, 1]
    if family in REFUSALS:
        with pytest.raises(ValueError, match=REFUSALS[family]):
            feed(model, model.new_cache(GOALS), pieces)
        return
    whole = feed(model, model.new_cache(GOALS), pieces)
    last = feed(model, model.new_cache(GOALS, window=REINDEX), pieces)
    for row, goal, text in rows():
        close(whole[row], text_in_front(model.lm, goal, text)[-4:])
        close(last[row, -1], text_in_front(model.lm, goal, text[-W:])[-1])
    closed = feed(model, model.new_cache(window=REINDEX), pieces)
    assert (closed[:, -1] - last[:, -1]).abs().max() > 1e-2 * closed.abs().max()  # without a goal it is another text


@pytest.mark.parametrize("family", [family for family in ACCEPTED if family not in REFUSALS])
def test_rolling_moves_the_goal_along_or_is_refused(family):
    model = attach(two_blocks(family))
    if family in NOT_ROLLING:
        with pytest.raises(ValueError, match=NOT_ROLLING[family]):
            model.new_cache(GOALS, window=ROLLING)
        assert model.new_cache(GOALS, window=W).window == Window(size=W, policy="reindex")
        return
    steps = feed(model, model.new_cache(GOALS, window=ROLLING), [T - 3, 1, 1, 1])
    for row, goal, text in rows():
        close(steps[row, -3:], dense(model.lm, goal, text, W)[-3:])


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_keeps_something_else_is_refused(family):
    with pytest.raises(ValueError, match=f"{family}|positions|keys and values"):
        attach(made(family, REFUSED[family])).encode_goal([[5, 6]])


def test_what_the_families_are_given():
    assert LENGTHS[0] == T and MASK.shape == PADDED.shape
