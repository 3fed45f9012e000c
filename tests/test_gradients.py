"""Gradients: they reach every weight of a channel, and checkpointing does not change a bit of them."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from families import FAMILIES, MODES, attached, logits, settings, tiny, tokens
from sidestream import attach
from sidestream.lm import attach as attach_module

IDS, GOALS = tokens(3, 9), tokens(3, 5, seed=1)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family, mode):
    return attached(family, mode)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def two_passes(model):
    """Two forwards under different goals, then one backward: what breaks state kept in an attribute."""
    model.train()
    model.zero_grad()
    first = model(IDS, goal=GOALS).logits
    second = model(IDS.flip(1), goal=GOALS.flip(0)).logits
    (first.square().mean() + second.abs().mean()).backward()
    return gradients(model)


@pytest.mark.parametrize("history", [1, 3])
def test_gradients_reach_every_channel_weight(family, mode, history):
    model = attached(family, mode, **(dict(tracker_history=history) if mode == "dynamic" else {}))
    two_passes(model)
    for name, parameter in model.channel.named_parameters():
        if history == 1 and name.endswith(("q_proj_weight", "k_proj_weight")):
            continue  # the softmax over one key is 1: nothing for them to learn
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is not None for parameter in model.lm.parameters())
    if model.encoder is not None:
        assert all(parameter.grad is None for parameter in model.encoder.parameters())


def test_checkpointed_gradients_are_exact(model):
    plain = two_passes(model)
    model.gradient_checkpointing_enable()
    checkpointed = two_passes(model)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    model.gradient_checkpointing_disable()
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.lm.modules())


def enable_foreign(lm, **kwargs):
    method = getattr(lm, "activation_checkpointing_enable", None)
    if method is not None:
        method(activation_checkpointing_kwargs=kwargs)
    else:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_other_checkpointing_is_refused(reentrant, monkeypatch):
    model = attached("llama", "static")
    plain = two_passes(model)
    enable_foreign(model.lm, use_reentrant=reentrant)
    with pytest.raises(ValueError, match="wrong gradients"):
        two_passes(model)
    logits(model.eval(), IDS, goal=GOALS)  # no backward, no harm
    with pytest.raises(ValueError, match="use_reentrant=True"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    # What the refusal is for: one raises in the middle of a backward, the other says nothing.
    monkeypatch.setattr(attach_module, "check_checkpointing", lambda *_: None)
    if not reentrant:
        with pytest.raises(CheckpointError):
            two_passes(model)
        return
    wrong = two_passes(model)
    assert any(not torch.equal(plain[name], wrong[name]) for name in plain if name in wrong)


def test_checkpointing_with_a_cache_is_refused():
    model = attached("llama", "static").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="drops the cache"):
        model(IDS, goal=GOALS, use_cache=True)


def test_a_backward_can_run_twice(mode):
    model = attached("llama", mode)
    model.train()
    model.gradient_checkpointing_enable()
    loss = model(IDS, goal=GOALS).logits.square().mean()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert all(torch.equal(2 * grad, model.get_parameter(name).grad) for name, grad in once.items())


def test_the_encoder_stays_in_evaluation_mode():
    model = attach(tiny("gpt2"), goal=settings("static"), encoder=tiny("opt", dropout=0.5))
    model.train()
    assert model.lm.training and not model.encoder.training
    assert torch.equal(model.encode_goal(GOALS).goal, model.encode_goal(GOALS).goal)
    shared = attach(tiny("opt", dropout=0.5), goal=settings("static")).train()
    shared.lm.model.decoder.layers[0].eval()
    assert torch.equal(shared.encode_goal(GOALS).goal, shared.encode_goal(GOALS).goal)
    assert shared.lm.training and not shared.lm.model.decoder.layers[0].training
