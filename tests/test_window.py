"""The window W: what each policy lets the model see, checked at every step against a forward that has no window."""

import gc
from types import SimpleNamespace

import pytest
import torch

from families import FAMILIES, MODES, ROTARY, attached, open_gate, settings, tiny, tokens
from sidestream import Window, attach
from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache
from sidestream.lm.decoding.masks import attention_for
from sidestream.lm.models.terms import InForce

W = 7
IDS, GOALS = tokens(3, 24), tokens(3, 5, seed=1)
LENGTHS = (24, 15, 20)  # real tokens of each row, in the tests with left padding
MASK = torch.tensor([[0] * (24 - n) + [1] * n for n in LENGTHS])
RECORD = dict(output_logits=True, return_dict_in_generate=True)
REINDEX, ROLLING = Window(size=W, policy="reindex"), Window(size=W, policy="rolling")


def close(left, right, tolerance=2e-5):
    torch.testing.assert_close(left, right, atol=tolerance, rtol=tolerance)


def terms_of(model, ids, goal):
    """(1, T, L, 2, D) FiLM terms of one row's whole text; its tracker has seen everything."""
    return model._advance(model.encode_goal(goal), ids, None)[0].expand(-1, ids.shape[1], -1, -1, -1)


def fresh(model, ids, goal, ends):
    """(len(ends), V) logits after the token before each end, when the W tokens up to there are all there is."""
    with torch.no_grad():
        terms, out = terms_of(model, ids, goal), []
        for end in ends:
            with InForce(terms[:, max(0, end - W) : end]):
                out.append(model.lm(ids[:, max(0, end - W) : end]).logits[0, -1])
    return torch.stack(out)


def slide(model, ids, goal, size=W):
    """(1, T, V) logits of one forward over the whole text under an explicit sliding mask; no cache, no window."""
    length, config = ids.shape[1], model.lm.config
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]

    def mask(reach):
        seen = (distance >= 0) & (distance < reach)
        return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)

    attention = mask(size)
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        attention = {"full_attention": mask(size), "sliding_attention": mask(min(size, config.sliding_window))}
    with torch.no_grad(), InForce(terms_of(model, ids, goal)):
        return model.lm(ids, attention_mask=attention).logits


def feed(model, cache, pieces, mask=None, ids=IDS, **kwargs):
    """Logits after each piece."""
    out, start = [], 0
    with torch.no_grad():
        for piece in pieces:
            end = start + piece
            part = None if mask is None else mask[:, :end]
            out.append(model(ids[:, start:end], attention_mask=part, cache=cache, **kwargs).logits)
            start, kwargs = end, {}
    return out


def rows(mask=MASK, end=24):
    """Each row's real tokens among the first `end` columns."""
    return [(row, IDS[row : row + 1, :end][:, mask[row, :end].bool()], GOALS[row : row + 1]) for row in range(3)]


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


# -------------------------------------------------------------------- reindex


@pytest.mark.parametrize("family", FAMILIES)
def test_reindex_is_a_fresh_forward_of_the_last_tokens(family, mode):
    model = attached(family, mode)
    cache = model.new_cache(GOALS, window=REINDEX)
    pieces = [11] + [1] * 13
    ids = torch.where(MASK.bool(), IDS, 0)
    outs = feed(model, cache, pieces, MASK, ids)
    assert [out.shape[1] for out in outs] == [min(piece, W) for piece in pieces]
    for row, text, goal in rows():
        ends = range(text.shape[1] - 13, text.shape[1] + 1)
        close(torch.stack([out[row, -1] for out in outs]), fresh(model, text, goal, ends))
    assert cache.get_seq_length() == 24
    whole = model(IDS[:1], goal=GOALS[:1]).logits[:, -1]
    assert (outs[-1][0, -1:] - whole).abs().max() > 1e-2  # the window hides something


@pytest.mark.parametrize("family", FAMILIES)
def test_reindex_through_generate(family, mode):
    model = attached(family, mode)
    prompt, mask = torch.where(MASK.bool(), IDS, 0)[:, :20], MASK[:, :20]
    out = model.generate(prompt, attention_mask=mask, goal=GOALS, window=REINDEX, max_new_tokens=6, **RECORD)
    for row in range(3):
        text = out.sequences[row : row + 1, int((mask[row] == 0).sum()) :]
        ends = range(text.shape[1] - 6, text.shape[1])
        close(torch.stack(out.logits, 1)[row], fresh(model, text, GOALS[row : row + 1], ends))
    cache = getattr(out, CACHE_NAME)
    more = torch.cat([out.sequences, tokens(3, 2, seed=4)], 1)
    mask = torch.cat([mask, torch.ones(3, 8, dtype=torch.long)], 1)
    turn = model.generate(more, attention_mask=mask, cache=cache, max_new_tokens=2, **RECORD)
    for row in range(3):
        text = turn.sequences[row : row + 1, int((mask[row] == 0).sum()) :]
        ends = range(text.shape[1] - 2, text.shape[1])
        close(torch.stack(turn.logits, 1)[row], fresh(model, text, GOALS[row : row + 1], ends))


@pytest.mark.parametrize("family", FAMILIES)
def test_evicted_text_cannot_reach_a_logit(family):
    model = attached(family, "static")
    for pieces in ([24], [20] + [1] * 4, [5, 19]):
        kept = feed(model, model.new_cache(GOALS, window=REINDEX), pieces)[-1][:, -1]
        other = IDS.clone()
        other[:, : 24 - W] = tokens(3, 24 - W, seed=8)
        assert torch.equal(feed(model, model.new_cache(GOALS, window=REINDEX), pieces, ids=other)[-1][:, -1], kept)
        other[:, 24 - W] = (other[:, 24 - W] + 1) % 90 + 2
        assert not torch.equal(feed(model, model.new_cache(GOALS, window=REINDEX), pieces, ids=other)[-1][:, -1], kept)


def test_a_channel_opened_late():
    """Tokens read while the channel was closed stay closed when the window encodes them anew."""
    model = attached("llama", "dynamic")
    cache = model.new_cache(window=REINDEX)
    feed(model, cache, [5])
    with torch.no_grad():
        got = torch.cat([model(IDS[:, 5:6], goal=GOALS, cache=cache).logits, model(IDS[:, 6:9], cache=cache).logits], 1)
    state = model.encode_goal(GOALS)
    terms = model._advance(state, IDS[:, 5:9], None)[0]
    terms = torch.cat([terms.new_zeros(3, 3, *terms.shape[2:]), terms], 1)
    with torch.no_grad(), InForce(terms):
        close(got[:, -1], model.lm(IDS[:, 2:9]).logits[:, -1])


# -------------------------------------------------------------------- rolling


PIECES = ([24], [1] * 24, [9, 1, 1, 13], [3, 4] + [1] * 17)


@pytest.mark.parametrize("family", ROTARY)
def test_rolling_is_sliding_window_attention(family, mode):
    model = attached(family, mode)
    expected = torch.cat([slide(model, IDS[row : row + 1], GOALS[row : row + 1]) for row in range(3)])
    for pieces in PIECES:
        outs = feed(model, model.new_cache(GOALS, window=ROLLING), pieces)
        end = 0
        for piece, out in zip(pieces, outs, strict=True):
            end += piece
            close(out, expected[:, end - out.shape[1] : end])
    whole = model(IDS, goal=GOALS).logits[:, -1]
    assert (expected[:, -1] - whole).abs().amax(1).min() > 1e-2
    last = torch.cat([fresh(model, IDS[row : row + 1], GOALS[row : row + 1], [24]) for row in range(3)])
    # Two blocks: a kept key has looked further back than W.
    assert (expected[:, -1] - last).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("family", ROTARY)
def test_rolling_rows_of_different_lengths(family, mode):
    model = attached(family, mode)
    ids = torch.where(MASK.bool(), IDS, 0)
    for pieces in ([24], [9] + [1] * 15):
        outs = feed(model, model.new_cache(GOALS, window=ROLLING), pieces, MASK, ids)
        for row, text, goal in rows():
            expected = slide(model, text, goal)
            close(outs[-1][row, -1], expected[0, -1])
            if len(pieces) > 1:
                close(torch.stack([out[row, -1] for out in outs[-10:]]), expected[0, -10:])


@pytest.mark.parametrize("family", ROTARY)
def test_rolling_one_block_is_the_last_tokens_alone(family):
    """With one block a key depends on its own token only, and rotary positions are relative: no mask needed."""
    model = open_gate(attach(tiny(family, layers=1), goal=settings("static")))
    outs = feed(model, model.new_cache(GOALS, window=ROLLING), [10] + [1] * 14)
    for step, out in enumerate(outs):
        with torch.no_grad():
            close(out[:, -1], model(IDS[:, : 10 + step][:, -W:], goal=GOALS).logits[:, -1])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rolling_in_either_attention(attention):
    for family in ("llama", "gemma3"):
        model = open_gate(attach(tiny(family, attn_implementation=attention), goal=settings("static")))
        got = feed(model, model.new_cache(GOALS, window=ROLLING), [20, 1, 3])[-1]
        close(got[:1], slide(model, IDS[:1], GOALS[:1])[:, -3:])


@pytest.mark.parametrize("family", ROTARY)
def test_rolling_through_generate_and_a_second_turn(family, mode):
    model = attached(family, mode)
    first = model.generate(IDS[:, :12], goal=GOALS, window=ROLLING, max_new_tokens=5, **RECORD)
    prompt = torch.cat([first.sequences, tokens(3, 9, seed=4)], 1)
    ones = torch.ones_like(prompt)
    second = model.generate(prompt, attention_mask=ones, cache=getattr(first, CACHE_NAME), max_new_tokens=4, **RECORD)
    for row in range(3):
        expected = slide(model, second.sequences[row : row + 1], GOALS[row : row + 1])[0]
        close(torch.stack(first.logits, 1)[row], expected[11:16])
        close(torch.stack(second.logits, 1)[row], expected[25:29])


# -------------------------------------------------------------------- both


@pytest.mark.parametrize("policy", ["reindex", "rolling"])
def test_a_window_longer_than_the_text_changes_nothing(policy, mode):
    model = attached("gemma3", mode)
    window = Window(size=40, policy=policy)
    close(feed(model, model.new_cache(GOALS, window=window), [24])[0], model(IDS, goal=GOALS).logits)
    close(feed(model, model.new_cache(window=window), [20, 4])[1], model(IDS).logits[:, -4:])


def windowed_beams(model, window, new_tokens=8):
    """Beam scores less the score of replaying each winner alone, token by token, under the same window."""
    search = dict(max_new_tokens=new_tokens, num_beams=5, length_penalty=0.0, output_scores=True)
    out = model.generate(IDS[:, :10], goal=GOALS, window=window, **search, **RECORD)
    steps = feed(model, model.new_cache(GOALS, window=window), [10] + [1] * (new_tokens - 1), ids=out.sequences)
    logits = torch.stack([step[:, -1] for step in steps], 1).log_softmax(-1)
    return out.sequences_scores - logits.gather(-1, out.sequences[:, 10:, None]).sum((1, 2))


@pytest.mark.parametrize("window", [REINDEX, ROLLING, Window(size=W, policy="rolling", encoder_size=5)])
def test_beams_reorder_the_window(window, monkeypatch):
    model = open_gate(attached("llama", "dynamic"), alpha=8.0, scale=0.5)
    close(windowed_beams(model, window), torch.zeros(3), 1e-4)
    monkeypatch.setattr(LatentCache, "_map_rows", lambda self, function: None)
    assert windowed_beams(model, window).abs().max() > 0.1


def test_beams_reorder_the_terms_of_the_window(monkeypatch):
    model = open_gate(attached("llama", "dynamic"), alpha=1.0, scale=0.5)
    close(windowed_beams(model, REINDEX, 12), torch.zeros(3), 1e-4)
    inner = LatentCache._map_rows

    def all_but_terms(self, function):
        terms, self._terms = self._terms, None
        inner(self, function)
        self._terms = terms

    monkeypatch.setattr(LatentCache, "_map_rows", all_but_terms)
    assert windowed_beams(model, REINDEX, 12).abs().max() > 1e-2


@pytest.mark.parametrize("policy", ["reindex", "rolling"])
def test_rows_of_a_window_can_be_kept_and_repeated(policy, mode):
    model = attached("llama", mode)
    window = Window(size=W, policy=policy)
    cache, plain = (model.new_cache(GOALS, window=window) for _ in range(2))
    feed(model, cache, [12])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    index = torch.tensor([2, 2, 0, 0])
    with torch.no_grad():
        got = [model(IDS[index, t : t + 1], cache=cache).logits for t in range(12, 15)]
    close(torch.cat(got, 1)[:, :, :], torch.cat(feed(model, plain, [12, 1, 1, 1])[1:], 1)[index])
    cache.reset()
    assert cache.get_seq_length() == 0


# -------------------------------------------------------------------- the encoder of a dynamic channel


def test_the_encoder_reads_one_token_a_step():
    """A trigger costs the same at any position: the encoder never reads the prefix again."""
    model, read = attached("llama", "dynamic"), []
    model.encoder.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(IDS, goal=GOALS, window=ROLLING, max_new_tokens=20)
    assert read == [5, 7, 7, 7, 3] + [1] * 19  # the goal, the prompt in pieces of W, the new tokens


@pytest.mark.parametrize("policy", ["reindex", "rolling"])
def test_the_encoder_can_have_a_window(policy):
    model = attached("llama", "dynamic")
    window = Window(size=W, policy=policy, encoder_size=5)
    caches = [model.new_cache(GOALS, window=window) for _ in range(3)]
    ends = [
        feed(model, cache, pieces)[-1][:, -1] for cache, pieces in zip(caches, ([24], [1] * 24, [9, 8, 7]), strict=True)
    ]
    close(ends[0], ends[1])
    close(ends[0], ends[2])
    # E_base alone under an explicit sliding mask, the tracker over its states.
    near = torch.arange(24)[:, None] - torch.arange(24)[None]
    mask = torch.zeros(1, 1, 24, 24).masked_fill((near < 0) | (near >= 5), torch.finfo(torch.float32).min)
    with torch.no_grad():
        states = model.encoder.base_model(IDS, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
        fires = torch.isin(IDS, torch.tensor(model.channel.config.trigger_ids))
        _, expected = model.channel.advance(model.encode_goal(GOALS), states, fires)
    close(caches[1].latent.goal, expected.goal)
    unlimited = model.new_cache(GOALS, window=Window(size=W, policy=policy))
    assert (feed(model, unlimited, [24])[-1][:, -1] - ends[0]).abs().max() > 1e-3


# -------------------------------------------------------------------- memory


def living_bytes():
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    "kind, policy, total",
    [("static", "reindex", 100_000), ("static", "rolling", 100_000)]
    + [("dynamic", "reindex", 10_000), ("dynamic", "rolling", 10_000)],
)
def test_memory_is_flat_from_w_tokens_on(kind, policy, total):
    size, piece = 256, 2048
    small = dict(layers=1, width=16)
    encoder = tiny("llama", seed=1, **small) if kind == "dynamic" else None
    window = Window(size=size, policy=policy, encoder_size=size if encoder is not None else None)
    model = open_gate(attach(tiny("llama", **small), goal=settings(kind, width=4), encoder=encoder), alpha=0.01)
    text = tokens(1, total + 2, seed=2)
    cache = model.new_cache(GOALS[:1], window=window)
    seen, marks = 0, []

    def go(count):
        nonlocal seen
        with torch.no_grad():
            out = model(text[:, seen : seen + count], cache=cache, logits_to_keep=1)
        seen += count
        return out.logits[:, -1].clone()

    for mark in (size, total):
        while seen < mark:
            go(min(piece, mark - seen))
        go(1)  # what is held after a single step, as in decoding
        marks.append((cache.nbytes(), living_bytes()))
    assert cache.get_seq_length() == seen == total + 1
    assert marks[0][0] == marks[1][0]
    assert abs(marks[1][1] - marks[0][1]) < 4096  # all tensors of the process, not only those we know of


def test_an_unlimited_encoder_grows_and_says_so():
    model = attached("llama", "dynamic")
    cache = model.new_cache(GOALS, window=ROLLING)
    feed(model, cache, [12])
    before = cache.nbytes()
    with torch.no_grad():
        for start in range(0, 24, 12):
            model(IDS[:, start : start + 12], cache=cache)
    # 24 tokens more: keys and values of 2 blocks x 2 heads x 6 dims x 3 rows in float32, and the mask.
    assert cache.nbytes() - before == 24 * 3 * (2 * 2 * 2 * 6 * 4 + 8)


# -------------------------------------------------------------------- refusals


def test_what_a_window_refuses():
    gpt2, llama, dynamic = attached("gpt2", "static"), attached("llama", "static"), attached("llama", "dynamic")
    opt = open_gate(attach(tiny("llama"), goal=settings("dynamic"), encoder=tiny("opt")))
    bloom_like = SimpleNamespace(layer_types=["chunked_attention"], _attn_implementation="sdpa")
    flash = SimpleNamespace(layer_types=None, _attn_implementation="flash_attention_2")
    allowed = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    for call, message in [
        (lambda: gpt2.new_cache(window=ROLLING), "GPT2LMHeadModel has learned absolute positions"),
        (lambda: attached("opt", "static").generate(IDS, window=ROLLING), "OPTForCausalLM has learned absolute"),
        (lambda: gpt2.new_cache(window=65), "the window is 65 tokens but GPT2LMHeadModel has learned positions for 64"),
        (lambda: gpt2.new_cache(window=1), "at least 2"),
        (lambda: Window(size=1, policy="rolling"), "at least 2"),
        (lambda: Window(size=8, policy="rolling", encoder_size=1), "encoder_size is 1"),
        (lambda: Window(size=8, policy="cyclic"), "use 'reindex' or 'rolling'"),  # type: ignore[arg-type]
        (
            lambda: llama.new_cache(window=Window(size=8, policy="rolling", encoder_size=4)),
            "a static goal reads no text",
        ),
        (lambda: opt.new_cache(window=Window(size=8, policy="rolling", encoder_size=4)), "needs a rotary encoder"),
        (
            lambda: feed(opt, opt.new_cache(GOALS, window=8), [40, 40], ids=tokens(3, 80)),
            "for 64 tokens and is to read 72",
        ),
        (lambda: llama.generate(IDS, goal=GOALS, cache=llama.new_cache(), window=8), "was made with window None"),
        (lambda: feed(llama, llama.new_cache(GOALS, window=8), [24], labels=IDS), "crop the text"),
        (lambda: llama(inputs_embeds=torch.rand(3, 2, 32), cache=llama.new_cache(GOALS, window=8)), "counts tokens"),
        (lambda: dynamic(inputs_embeds=torch.rand(3, 2, 32), cache=dynamic.new_cache(GOALS)), "pass input_ids"),
        (lambda: attention_for(bloom_like, allowed, torch.float32), "'chunked_attention'"),  # type: ignore[arg-type]
        (lambda: attention_for(flash, allowed, torch.float32), "'sdpa' or 'eager'"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert gpt2.new_cache(window=8).window == Window(size=8, policy="reindex")
    assert llama.new_cache(window=8).window == Window(size=8, policy="rolling")
    # A refusal in the middle of a forward leaves the model as it was.
    close(model_logits(llama), slide(llama, IDS[:1], GOALS[:1], size=99))


def model_logits(model):
    with torch.no_grad():
        return model(IDS[:1], goal=GOALS[:1]).logits


def test_a_model_whose_layers_all_slide():
    """Mistral's kind: one `sliding_window` in the configuration, no list of layer types."""
    model = attached("llama", "static")
    allowed = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    config = SimpleNamespace(_attn_implementation="sdpa", sliding_window=4)
    expected = torch.zeros(3, 9, dtype=torch.bool)
    for query in range(3):
        expected[query, 6 + query - 3 : 6 + query + 1] = True
    assert torch.equal(attention_for(config, allowed, model.lm.dtype)[0, 0], expected)  # type: ignore[arg-type]
