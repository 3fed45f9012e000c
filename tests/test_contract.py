"""The contract of a channel, for both modes on six families. Each claim has a control that shows the test can fail."""

import threading
from dataclasses import replace

import pytest
import torch

from families import FAMILIES, MODES, attached, close, differ, logits, open_gate, our_hooks, settings, tiny, tokens
from sidestream import LatentCache, LatentState, Window, attach
from sidestream.channels import modulate
from sidestream.lm.decoding.cache import CACHE_NAME
from sidestream.lm.models.terms import InForce

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


# -------------------------------------------------------------------- closed, detached, open


def test_closed_and_fresh_are_the_base_bit_for_bit(family, mode):
    base = logits(tiny(family), IDS)
    model = attach(tiny(family), goal=settings(mode))
    assert torch.equal(logits(model, IDS), base)
    assert torch.equal(logits(model, IDS, goal=GOALS), base)
    assert torch.equal(logits(model, IDS, goal=GOALS, cache=model.new_cache()), base)
    open_gate(model)
    assert torch.equal(logits(model, IDS), base)
    differ(logits(model, IDS, goal=GOALS), base)
    differ(logits(model, IDS, goal=GOALS), logits(model, IDS, goal=GOALS.flip(0)))


def test_detach_leaves_no_trace(family, mode):
    lm = tiny(family)
    base, keys = logits(lm, IDS), list(lm.state_dict())
    model = attached(family, mode)
    assert list(model.lm.state_dict()) == keys
    model.generate(IDS, goal=GOALS, max_new_tokens=2)
    assert our_hooks(model.lm)
    lm = model.detach()
    assert torch.equal(logits(lm, IDS), base)
    assert our_hooks(model.detach()) == []
    with pytest.raises(ValueError, match="detached"):
        model(IDS, goal=GOALS)
    attach(lm, goal=settings(mode))  # and it can carry another channel


NORMS = {
    "gpt2": "ln_2",
    "llama": "post_attention_layernorm",
    "qwen3": "post_attention_layernorm",
    "gemma3": "pre_feedforward_layernorm",
    "opt": "final_layer_norm",
    "gpt_neox": "post_attention_layernorm",
}


def test_the_site_is_the_output_of_the_second_norm(family, mode):
    model = attached(family, mode)
    expected = logits(model, IDS, goal=GOALS)
    with torch.no_grad():
        terms = model._advance(model.encode_goal(GOALS), IDS, None)[0]
    lm = model.detach()
    for block, site in enumerate(model.sites):
        norm = lm.get_submodule(f"{site.rpartition('.')[0]}.{NORMS[family]}")
        norm.register_forward_hook(lambda module, args, out, block=block: modulate(out, terms[:, :, block]))
    assert torch.equal(logits(lm, IDS), expected)


def test_a_forward_that_fails_leaves_nothing_behind(family, model):
    base = logits(tiny(family), IDS)

    def fail(module, args):
        raise RuntimeError("halfway")

    hook = model.lm.get_submodule(model.sites[1]).register_forward_pre_hook(fail)
    for window in (None, 8):
        with pytest.raises(RuntimeError, match="halfway"):
            model(IDS, cache=model.new_cache(GOALS, window=window))
    with pytest.raises(RuntimeError, match="halfway"):
        model(IDS, goal=GOALS)
    hook.remove()
    assert torch.equal(logits(model.lm, IDS), base)


# -------------------------------------------------------------------- one code path


@pytest.mark.parametrize(
    "family, kind",
    [(family, mode) for family in FAMILIES for mode in MODES]
    + [(family, kind) for family in ("gpt2", "gemma3") for kind in ("history", "shared")],
)
def test_tokens_at_once_equal_single_steps(family, kind):
    changes = dict(tracker_history=3) if kind == "history" else {}
    model = attached(
        family, "static" if kind == "static" else "dynamic", own_encoder=kind in ("dynamic", "history"), **changes
    )
    whole = logits(model, IDS, goal=GOALS)
    caches = {"steps": model.new_cache(GOALS), "pieces": model.new_cache(GOALS), "at once": model.new_cache(GOALS)}
    close(logits(model, IDS, cache=caches["at once"]), whole)
    close(torch.cat([logits(model, token, cache=caches["steps"]) for token in IDS.split(1, 1)], 1), whole)
    close(torch.cat([logits(model, piece, cache=caches["pieces"]) for piece in IDS.split(4, 1)], 1), whole)
    for cache in caches.values():
        close(cache.latent.goal, caches["at once"].latent.goal)
        assert cache.get_seq_length() == IDS.shape[1]
    if kind != "static":
        moved = caches["steps"].latent
        assert moved.history_count.tolist() == [
            sum(t in settings("dynamic").trigger_ids for t in row) for row in IDS.tolist()
        ]
        differ(moved.goal, model.encode_goal(GOALS).goal)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_what_they_give_alone(model, side):
    lengths, goals = [9, 4, 6], [[7, 8, 9], [10, 11, 12, 13, 14], [3]]
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.where(mask.bool(), IDS, 0)
    together = logits(model, ids, goal=goals, attention_mask=mask)
    cached = logits(model, ids, goal=goals, attention_mask=mask, cache=model.new_cache())
    hidden = model.hidden(ids, goal=goals, attention_mask=mask)
    for row, goal in enumerate(goals):
        real = mask[row].bool()
        alone = logits(model, ids[row : row + 1, real], goal=[goal])[0]
        for got in (together, cached, model.lm.get_output_embeddings()(hidden)):
            close(got[row, real], alone)
    differ(together[0], logits(model, ids, goal=goals[1:] + goals[:1], attention_mask=mask)[0])


def test_left_padded_steps_give_what_rows_give_alone(model):
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9, [0] * 5 + [1] * 4])
    ids = torch.where(mask.bool(), IDS, 0)
    cache, steps = model.new_cache(GOALS), []
    for end in range(6, 10):
        start = 0 if end == 6 else end - 1
        steps.append(logits(model, ids[:, start:end], attention_mask=mask[:, :end], cache=cache)[:, -1])
    for row in range(3):
        alone = logits(model, ids[row : row + 1, mask[row].bool()], goal=GOALS[row : row + 1])[0, -4:]
        close(torch.stack(steps, 1)[row], alone)


def test_no_call_leaks_into_the_next(family, model):
    alone = logits(model, IDS, goal=GOALS)
    tails = model.generate(IDS, goal=GOALS, max_new_tokens=4)
    logits(model, IDS.flip(0), goal=GOALS.flip(0))
    model.generate(IDS.flip(0), goal=GOALS.flip(0), max_new_tokens=4)
    with pytest.raises(ValueError, match="2 goals for 3 rows"):
        model(IDS, goal=GOALS[:2])
    assert torch.equal(logits(model, IDS, goal=GOALS), alone)
    assert torch.equal(model.generate(IDS, goal=GOALS, max_new_tokens=4), tails)
    assert torch.equal(logits(model, IDS), logits(tiny(family), IDS))


def test_interleaved_rollouts_do_not_meet(model):
    pair = [(IDS[:1], GOALS[:1]), (IDS[1:2], GOALS[1:2])]
    caches = [model.new_cache(goal) for _, goal in pair]
    steps = [[], []]
    for t in range(9):
        for index in (0, 1):
            steps[index].append(logits(model, pair[index][0][:, t : t + 1], cache=caches[index]))
    for index, (ids, goal) in enumerate(pair):
        close(torch.cat(steps[index], 1), logits(model, ids, goal=goal))


def test_threads_do_not_meet(mode):
    model = attached("llama", mode)
    expected = [model.generate(IDS, goal=GOALS.roll(k, 0), max_new_tokens=8) for k in range(2)]
    got: list = [None, None]

    def run(k):
        got[k] = model.generate(IDS, goal=GOALS.roll(k, 0), max_new_tokens=8)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_goal_switch(model):
    """Tokens before the switch keep what the old goal made of them, tokens after it take the new one."""
    cache = model.new_cache(GOALS)
    logits(model, IDS[:, :4], cache=cache)
    switched = logits(model, IDS[:, 4:], goal=GOALS.flip(0), cache=cache)
    old = model._advance(model.encode_goal(GOALS), IDS, None)[0].expand(-1, 9, -1, -1, -1)[:, :4]
    state = model.encode_goal(GOALS.flip(0))
    if model.channel.tracker is None:
        new = state.terms.expand(-1, 5, -1, -1, -1)
    else:
        fires = torch.isin(IDS, torch.tensor(model.channel.config.trigger_ids))[:, 4:]
        new = model.channel.advance(state, model.goal_hidden(IDS)[:, 4:], fires)[0]
    with InForce(torch.cat([old, new], 1)):
        close(switched, logits(model.lm, IDS)[:, 4:])
    differ(switched, logits(model, IDS, goal=GOALS)[:, 4:])


def test_one_goal_serves_all_rows(model):
    close(logits(model, IDS, goal=GOALS[:1]), logits(model, IDS, goal=GOALS[:1].expand(3, -1)))


def test_a_replaced_vector_acts():
    """`dataclasses.replace` on a folded state must not keep the old vector's terms."""
    model = attached("llama", "static")
    state = model.encode_goal(GOALS)
    noise = replace(state, goal=torch.randn(3, 16, generator=torch.Generator().manual_seed(0)))
    differ(logits(model, IDS, goal=noise), logits(model, IDS, goal=state))
    assert torch.equal(logits(model, IDS, goal=replace(noise, goal=state.goal)), logits(model, IDS, goal=state))


# -------------------------------------------------------------------- generate


def greedy_loop(model, ids, goal, count):
    for _ in range(count):
        ids = torch.cat([ids, logits(model, ids, goal=goal)[:, -1:].argmax(-1)], 1)
    return ids


def replay(model, sequences, goal, start):
    """Log-probability of what follows `start` tokens, by one uncached forward over the whole sequence."""
    scores = logits(model, sequences, goal=goal)[:, start - 1 : -1].log_softmax(-1)
    return scores.gather(-1, sequences[:, start:, None]).sum((1, 2))


def test_generate_greedy_equals_a_loop(model, caplog):
    got = model.generate(IDS, goal=GOALS, max_new_tokens=6, do_sample=False)
    assert not caplog.records  # transformers warns through its logger
    assert torch.equal(got, greedy_loop(model, IDS, GOALS, 6))
    assert not torch.equal(got, model.generate(IDS, max_new_tokens=6, do_sample=False))


def test_generate_pads_left(model):
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [0] * 2 + [1] * 7])
    ids = torch.where(mask.bool(), IDS, 0)
    got = model.generate(ids, attention_mask=mask, goal=GOALS, max_new_tokens=5)
    for row in range(3):
        alone = greedy_loop(model, ids[row : row + 1, mask[row].bool()], GOALS[row : row + 1], 5)
        assert torch.equal(got[row, 9:], alone[0, -5:])


def test_generate_samples_several_a_row(model):
    def sample():
        torch.manual_seed(5)
        return model.generate(
            IDS,
            goal=GOALS,
            max_new_tokens=5,
            do_sample=True,
            num_return_sequences=2,
            output_logits=True,
            return_dict_in_generate=True,
        )

    out = sample()
    expected = logits(model, out.sequences, goal=GOALS.repeat_interleave(2, 0))[:, 8:-1]
    close(torch.stack(out.logits, 1), expected)
    assert torch.equal(out.sequences, sample().sequences)
    assert not torch.equal(out.sequences[0], out.sequences[1])


def beams(model):
    out = model.generate(
        IDS,
        goal=GOALS,
        max_new_tokens=8,
        num_beams=4,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return out.sequences_scores - replay(model, out.sequences, GOALS, IDS.shape[1])


def test_beam_search_reorders_the_state(family, monkeypatch):
    """The winner's score is the sum along its path only if its state followed that path through every reordering."""
    model = open_gate(attached(family, "dynamic"), alpha=8.0, scale=0.5)
    close(beams(model), torch.zeros(3), 1e-4)
    monkeypatch.setattr(LatentCache, "_map_rows", lambda self, function: None)
    assert beams(model).abs().max() > 0.1


def test_beam_search_reorders_the_encoder_cache(monkeypatch):
    model = open_gate(attached("llama", "dynamic"), alpha=8.0, scale=0.5)
    inner = LatentCache.reorder_cache

    def without_encoder(self, rows):
        encoder, self.encoder = self.encoder, None
        inner(self, rows)
        self.encoder = encoder

    monkeypatch.setattr(LatentCache, "reorder_cache", without_encoder)
    assert beams(model).abs().max() > 0.1


def test_second_turn_goes_on(model):
    first = model.generate(IDS, goal=GOALS, max_new_tokens=4, return_dict_in_generate=True)
    cache = getattr(first, CACHE_NAME)
    assert isinstance(cache, LatentCache)
    prompt = torch.cat([first.sequences, tokens(3, 3, seed=9)], 1)
    # The mask is given because a random model may well have generated the padding id.
    second = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, cache=cache)
    assert torch.equal(second, greedy_loop(model, prompt, GOALS, 4))
    assert not torch.equal(second, model.generate(prompt, max_new_tokens=4))
    with pytest.raises(ValueError, match="whole text so far"):
        model.generate(IDS[:, :3], cache=cache)


def test_batch_rows_can_be_kept_and_repeated(model):
    cache = model.new_cache(GOALS)
    logits(model, IDS[:, :5], cache=cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([2, 2, 0, 0])
    close(logits(model, IDS[rows, 5:], cache=cache), logits(model, IDS, goal=GOALS)[rows, 5:])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.encoder is None
    if model.channel.tracker is None:
        close(logits(model, IDS[rows], cache=cache), logits(model, IDS, goal=GOALS)[rows])


def test_a_cache_comes_back_from_forward(model):
    out = model(IDS[:, :5], goal=GOALS, use_cache=True)
    assert isinstance(getattr(out, CACHE_NAME), LatentCache)
    got = model(IDS[:, 5:7], cache=getattr(out, CACHE_NAME)).logits
    last = model(IDS[:, 7:], past_key_values=getattr(out, CACHE_NAME)).logits  # the name before transformers 5.24
    close(torch.cat([got, last], 1), logits(model, IDS, goal=GOALS)[:, 5:])


def test_a_configuration_without_cache_still_generates(mode):
    model = attached("llama", mode)
    model.config.use_cache = model.lm.generation_config.use_cache = False
    assert torch.equal(model.generate(IDS, goal=GOALS, max_new_tokens=4), greedy_loop(model, IDS, GOALS, 4))


def test_film_is_projected_once_per_goal(mode):
    model = attached("llama", mode)
    calls = []
    model.channel.film.projection.register_forward_hook(lambda *_: calls.append(1))
    model.generate(IDS, goal=GOALS, max_new_tokens=20)
    # 20 new tokens take 20 forwards; a dynamic vector is projected in each.
    assert len(calls) == (1 if mode == "static" else 20)
    calls.clear()
    state = LatentState(goal=model.encode_goal(GOALS).goal)  # made by hand, not folded
    model.generate(IDS, goal=state, max_new_tokens=20)
    assert len(calls) == (2 if mode == "static" else 20)


# -------------------------------------------------------------------- what else goes in


def test_narrow_weights_and_autocast(mode):
    exact = attached("llama", mode)
    expected = logits(exact, IDS, goal=GOALS)
    narrow = attach(tiny("llama").bfloat16(), goal=settings(mode), encoder=exact.encoder)
    narrow.channel.load_state_dict(exact.channel.state_dict())
    assert narrow.channel.film.projection.weight.dtype == torch.bfloat16
    close(logits(narrow, IDS, goal=GOALS).float(), expected, 0.2)
    narrow.channel.float()  # a channel trained in float32 on a base in bfloat16
    close(logits(narrow, IDS, goal=GOALS).float(), expected, 0.2)
    assert logits(narrow, IDS, goal=GOALS, cache=narrow.new_cache(window=6)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        close(logits(exact, IDS, goal=GOALS).float(), expected, 0.2)
        for window in (Window(size=20, policy="rolling"), Window(size=20, policy="reindex")):
            close(logits(exact, IDS, goal=GOALS, cache=exact.new_cache(window=window)).float(), expected, 0.2)


def test_goals_are_pooled_at_one_layer_and_triggers_read_at_another(family):
    model = attached(family, "dynamic", own_encoder=False, pool_layer=1, tracker_layer=2)
    with torch.no_grad():
        layers = model.lm.base_model(GOALS, output_hidden_states=True).hidden_states
        close(model.encode_goal(GOALS).goal, model.channel.encoder(layers[1]))
        differ(model.channel.encoder(layers[1]), model.channel.encoder(layers[2]), 1e-3)
        text = model.lm.base_model(IDS, output_hidden_states=True).hidden_states[2]
        expected, _ = model.channel.advance(model.encode_goal(GOALS), text, model.fires(IDS))
        close(model._advance(model.encode_goal(GOALS), IDS, None)[0], expected)
    close(logits(model, IDS, goal=GOALS, cache=model.new_cache()), logits(model, IDS, goal=GOALS))


def test_terms_can_be_given(mode):
    model = attached("llama", mode)
    with torch.no_grad():
        terms = model._advance(model.encode_goal(GOALS), IDS, None)[0]
        assert torch.equal(model.hidden(IDS, terms=terms), model.hidden(IDS, goal=GOALS))
        differ(model.hidden(IDS), model.hidden(IDS, goal=GOALS))


def test_embeddings_work_where_no_token_is_read():
    model = attached("llama", "static")
    embedded = model.lm.get_input_embeddings()(IDS)
    close(logits(model, None, inputs_embeds=embedded, goal=GOALS), logits(model, IDS, goal=GOALS))
