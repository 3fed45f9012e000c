"""Latent passes: an oracle that recomputes everything each pass, the contract, and interventions on the latents."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

import sidestream
from families import FAMILIES, close, differ, logits, open_gate, our_hooks, settings, tiny, tokens
from sidestream import AttachedLM, LatentState, attach
from sidestream.channels import StreamConfig
from sidestream.lm.decoding.cache import LatentCache
from sidestream.lm.decoding.layout import UNSCORED, Layout, Row, collate, pad_left
from sidestream.lm.decoding.passes import PassConfig, latent_generate, latent_passes, next_token_loss, replacement

START, LATENT, END, STOP = 93, 94, 95, 96  # of the tiny models
LAYOUT, CONFIG = Layout(start_id=START, latent_id=LATENT, end_id=END), PassConfig(latent_id=LATENT)


# -------------------------------------------------------------------- the oracle


def recomputed(lm: PreTrainedModel, ids, *, stream=None, sees="all", hides=None, fed=None, detach=False):
    """One row, by the description: no cache, no batch; the whole input again for every latent. Last-layer states.

    `sees` is a full matrix here, and the stream a closure over its own c: nothing is shared with the engine.
    """
    embeds = list(lm.get_input_embeddings()(torch.tensor(ids)))
    slots = [t for t, token in enumerate(ids) if token == LATENT]
    length, concept = len(ids), None
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    for query in range(length):
        before = [t for t in slots if t <= query]
        if before and sees != "all":
            start = 0 if hides is None else slots[0] - hides
            allowed[query, start : before[0] if sees == "latents" else before[-1]] = False

    def states(upto):
        feed = {"inputs_embeds": torch.stack(embeds[:upto])[None], "use_cache": False}
        if sees != "all":
            hidden = torch.zeros(upto, upto, dtype=lm.dtype)
            hidden.masked_fill_(~allowed[:upto, :upto], torch.finfo(lm.dtype).min)
            feed |= {"attention_mask": hidden[None, None], "position_ids": torch.arange(upto)[None]}
        return lm.base_model(**feed).last_hidden_state[0]

    for number, slot in enumerate(slots):
        h = states(slot)[-1]
        if detach:
            h = h.detach()
        if stream is not None:
            h, concept = stream(h, concept)
        embeds[slot] = h if fed is None else fed[number]
    return states(length)


def cell(stream):
    """The published equations on one vector, from the stream's weights."""

    def step(h, c):
        c = torch.zeros_like(h) if c is None else c
        normed = torch.nn.functional.layer_norm(h, h.shape, stream.ln_h.weight, stream.ln_h.bias)
        r, f, w = (
            torch.sigmoid(gate.weight @ normed + gate.bias)
            for gate in (stream.read_gate, stream.forget_gate, stream.write_gate)
        )
        out = (1 - f) * h + r * c
        return out, torch.nn.functional.layer_norm(
            c + w * out, h.shape, stream.ln_residual.weight, stream.ln_residual.bias
        )

    return step


def problem(length, latents, rest, seed):
    question, tail = tokens(length, seed=seed) % 90 + 2, tokens(rest, seed=seed + 1) % 90 + 2
    return LAYOUT.row(question.tolist(), latents, [*tail.tolist(), STOP])


ROWS = [problem(7, 3, 4, 10), problem(4, 0, 3, 20), problem(9, 2, 1, 30), problem(3, 3, 5, 40)]
BATCH = collate(ROWS, latent_id=LATENT, pad_id=0)
GOALS = tokens(4, 5, seed=1)


def streamed(family, goal=None, **changes):
    """A tiny model whose stream depends on its input, beside an open goal channel of mode `goal`, or none."""
    encoder = tiny("llama", seed=1, width=24) if goal == "dynamic" else None
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = None if goal is None else settings(goal)
        model = attach(tiny(family), goal=config, encoder=encoder, stream=StreamConfig(**changes))
        with torch.no_grad():
            for parameter in model.stream.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval() if goal is None else open_gate(model).eval()


def passes(model, rows=ROWS, *, config=CONFIG, **kwargs):
    batch = collate(rows, latent_id=LATENT, pad_id=0)
    return latent_passes(model, batch["input_ids"], config, attention_mask=batch["attention_mask"], **kwargs), batch


def rows_of(out):
    """Last-layer states of each row, padding taken out."""
    return [states[mask.bool()] for states, mask in zip(out.hidden, out.mask, strict=True)]


def mean_loss(lm, states_of_rows, rows=ROWS):
    head, losses = lm.get_output_embeddings(), []
    for states, row in zip(states_of_rows, rows, strict=True):
        for t in range(1, len(row.ids)):
            if row.labels[t] != UNSCORED:
                losses.append(-head(states[t - 1]).log_softmax(-1)[row.labels[t]])
    return sum(losses) / len(losses)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["coconut", "agclr"])
def model(request, family):
    return streamed(family) if request.param else tiny(family)


def parts(model):
    return (model.lm, cell(model.stream)) if isinstance(model, AttachedLM) else (model, None)


def test_values_and_gradients_are_the_oracles(model):
    model.double()
    lm, stream = parts(model)
    out, batch = passes(model)
    loss = next_token_loss(model, out, batch["labels"])
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = [recomputed(lm, row.ids, stream=stream) for row in ROWS]
    for got, states in zip(rows_of(out), expected, strict=True):
        torch.testing.assert_close(got, states, atol=1e-8, rtol=1e-8)
    slow = mean_loss(lm, expected)
    torch.testing.assert_close(loss, slow, atol=1e-8, rtol=1e-8)
    slow.backward()
    assert all(p.grad is not None for p in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-7, rtol=1e-6)


def test_what_the_oracle_would_notice(family, monkeypatch):
    """Keys and values cut off from autograd, latents cut off, a latent that is not fed: each is far from right."""
    model = streamed(family).double()

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    out, batch = passes(model)
    right = gradient(next_token_loss(model, out, batch["labels"]))
    cut = mean_loss(model.lm, [recomputed(model.lm, r.ids, stream=cell(model.stream), detach=True) for r in ROWS])
    assert (gradient(cut) - right).norm() > 1e-2 * right.norm()
    inner = LatentCache.update

    def cut_off(self, k, *rest, **kw):
        held = inner(self, k, *rest, **kw)
        return held if k.shape[2] > 1 else tuple(t.detach() for t in held)

    monkeypatch.setattr(LatentCache, "update", cut_off)
    out, _ = passes(model)
    assert (gradient(next_token_loss(model, out, batch["labels"])) - right).norm() > 1e-2 * right.norm()
    monkeypatch.undo()
    for other in (CONFIG, replace(CONFIG, slots="pause")):
        lm_only, _ = passes(model.lm, config=other)
        differ(lm_only.hidden[0, -1], out.hidden[0, -1])


@pytest.mark.parametrize(("sees", "hides"), [("latents", None), ("last", None), ("last", 2)])
def test_hidden_text_is_hidden(family, sees, hides):
    model = streamed(family)
    lm, stream = parts(model)
    out, _ = passes(model, config=replace(CONFIG, sees=sees, hides=hides))
    whole, _ = passes(model)
    if lm.config.model_type != "gemma3_text":  # whose layers take a matrix each
        lm.set_attn_implementation("eager")
        for got, row in zip(rows_of(out), ROWS, strict=True):
            close(got, recomputed(lm, row.ids, stream=stream, sees=sees, hides=hides), 1e-4)
    # With the latents fixed, nothing of the question is left; without hiding, it is.
    fixed = replacement("zero", whole)
    other = []
    for r in ROWS:
        first = r.ids.index(LATENT) if LATENT in r.ids else 0
        part = range(0 if hides is None else first - hides, r.ids.index(START) if first else 0)
        other.append(Row([5 if t in part else x for t, x in enumerate(r.ids)], r.labels))
    for config, hidden in [(replace(CONFIG, sees=sees, hides=hides), True), (CONFIG, False)]:
        ends = [rows_of(passes(model, rows, config=config, replace=fixed)[0]) for rows in (ROWS, other)]
        for row, mine, theirs in zip(ROWS, *ends, strict=True):
            if LATENT in row.ids:
                first = row.ids.index(LATENT)
                (close if hidden else differ)(mine[first:], theirs[first:])
    with torch.no_grad():
        close(rows_of(out)[1], rows_of(whole)[1])  # a row without latents sees all it has


# -------------------------------------------------------------------- the contract


@pytest.fixture(
    params=[(family, None) for family in FAMILIES]
    + [(family, "dynamic") for family in ("gpt2", "qwen3", "opt")]
    + [(family, "static") for family in ("llama", "gemma3", "gpt_neox")],
    ids=lambda pair: f"{pair[0]}-{pair[1] or 'alone'}",
)
def both(request):
    """The stream alone and beside a goal channel of either mode."""
    return streamed(*request.param)


def base_of(model):
    """The untouched model under it."""
    return tiny(next(name for name in FAMILIES if name == model.config.model_type.removesuffix("_text")))


def goals_for(model, rows=slice(None)):
    return None if model.channel is None else GOALS[rows]


def test_closed_and_fresh_are_coconut_bit_for_bit(both):
    base, _ = passes(base_of(both))
    goal = None if both.channel is None else settings(both.channel.config.mode)
    fresh = attach(base_of(both), goal=goal, stream=StreamConfig(init="identity")).eval()
    out, _ = passes(fresh, goal=goals_for(fresh))
    assert torch.equal(out.hidden, base.hidden) and out.cache.latent.concept.abs().max() > 0.1
    ids = BATCH["input_ids"]
    assert torch.equal(logits(fresh, ids), logits(base_of(both), ids))  # no passes, no stream
    opened, _ = passes(both, goal=goals_for(both))
    differ(opened.hidden, base.hidden)
    with torch.no_grad():
        both.stream.read_gate.bias.fill_(-torch.inf)
        both.stream.forget_gate.bias.fill_(-torch.inf)
    assert torch.equal(passes(both)[0].hidden, base.hidden)


def test_detach_leaves_no_trace(both):
    base, keys = logits(base_of(both), BATCH["input_ids"]), list(base_of(both).state_dict())
    assert list(both.lm.state_dict()) == keys
    passes(both, goal=goals_for(both))
    with pytest.raises(ValueError, match="already carries"):
        attach(both.lm, stream=StreamConfig())
    lm = both.detach()
    assert torch.equal(logits(lm, BATCH["input_ids"]), base) and our_hooks(lm) == []
    attach(lm, stream=StreamConfig())


def test_batches_are_free(both):
    together, _ = passes(both, goal=goals_for(both))
    for index, row in enumerate(ROWS):
        alone, _ = passes(both, [row], goal=goals_for(both, slice(index, index + 1)))
        close(rows_of(together)[index], alone.hidden[0], 2e-5)
        count = row.ids.count(LATENT)
        assert together.present[index].sum() == count
        for got, own in [(together.states, alone.states), (together.latents, alone.latents)]:
            close(got[index, :count], own[0], 2e-5)
            assert not got[index, count:].any()
        close(together.cache.latent.concept[index], alone.cache.latent.concept[0], 2e-5)
        assert together.cache.latent.passes[index] == count
    if both.channel is not None:
        differ(rows_of(together)[0], passes(both, ROWS[:1], goal=GOALS[1:2])[0].hidden[0])


def test_slots_need_not_share_columns(both):
    """Padded left, as generation pads, slots of different rows stand apart: more passes, the same numbers."""
    ids, mask = pad_left([row.ids for row in ROWS], pad_id=0)
    out = latent_passes(both, ids, CONFIG, attention_mask=mask, goal=goals_for(both))
    aligned, _ = passes(both, goal=goals_for(both))
    for mine, theirs in zip(rows_of(out), rows_of(aligned), strict=True):
        close(mine, theirs, 2e-5)
    close(out.latents, aligned.latents, 2e-5)


def test_tokens_at_once_equal_single_steps(both):
    ids, mask, goal = BATCH["input_ids"], BATCH["attention_mask"], goals_for(both)
    whole = latent_passes(both, ids, CONFIG, attention_mask=mask, goal=goal)
    for size in (1, 4) if both.channel is None else (4,):
        past, hidden = None, []
        for start in range(0, ids.shape[1], size):
            columns = slice(start, start + size)
            given = goal if past is None else None
            past = latent_passes(both, ids[:, columns], CONFIG, attention_mask=mask[:, columns], goal=given, past=past)
            hidden.append(past.hidden)
        real = mask.bool()
        close(torch.cat(hidden, 1)[real], whole.hidden[real], 2e-5)
        for mine, theirs in zip(past.cache.latent.tensors(), whole.cache.latent.tensors(), strict=True):
            close(mine, theirs, 2e-5)


def test_round_trip(both, tmp_path):
    both.save_pretrained(tmp_path)
    loaded = sidestream.load(tmp_path, base_of(both), encoder=both.encoder).eval()
    assert loaded.stream.config == both.stream.config
    got, expected = (passes(m, goal=goals_for(m))[0].hidden for m in (loaded, both))
    assert torch.equal(got, expected)
    with torch.no_grad():
        loaded.stream.read_gate.bias.add_(0.5)
    differ(passes(loaded, goal=goals_for(both))[0].hidden, expected)


def test_greedy_rows_give_what_they_give_alone(both):
    prompts = [row.ids[: row.ids.index(END) + 1] for row in ROWS]
    goal = goals_for(both)
    got = latent_generate(both, prompts, CONFIG, max_new_tokens=6, goal=goal)
    for index, prompt in list(enumerate(prompts))[:2]:
        text, expected = list(prompt), []
        for _ in range(4):
            ids = torch.tensor([text])
            own = None if goal is None else goal[index : index + 1]
            with torch.no_grad():
                hidden = latent_passes(both, ids, CONFIG, goal=own).hidden
            expected.append(int(both.lm.get_output_embeddings()(hidden[0, -1]).argmax()))
            if expected[-1] == LATENT:
                break
            text.append(expected[-1])
        assert got[index][: len(expected)] == expected
    stopped = latent_generate(both, prompts, CONFIG, max_new_tokens=6, goal=goal, stop_id=got[0][2])
    assert stopped == [row[: row.index(got[0][2])] if got[0][2] in row else row for row in got]
    assert latent_generate(both.lm, prompts, replace(CONFIG, slots="pause"), max_new_tokens=6) != got


# -------------------------------------------------------------------- interventions


@pytest.fixture(params=["llama", "gpt2"])
def plain(request):
    return streamed(request.param)


LIKE = [problem(7, 3, 4, 10), problem(4, 3, 3, 20), problem(9, 3, 1, 30)]


@pytest.mark.parametrize("kind", ["zero", "noise", "mean", "first", "other", "permuted"])
def test_latents_can_be_replaced(plain, kind):
    clean, _ = passes(plain, LIKE)
    generator = torch.Generator().manual_seed(4)
    out, batch = passes(plain, LIKE, replace=replacement(kind, clean, generator))
    assert out.present.all() and out.latents.shape == (3, 3, 32)
    same = {
        "zero": lambda: torch.zeros_like(clean.latents),
        "mean": lambda: clean.latents.mean(0, keepdim=True).expand(3, -1, -1),
        "first": lambda: clean.latents[:, :1].expand(-1, 3, -1),
        "other": lambda: clean.latents[[2, 0, 1]],
    }
    if kind in same:
        torch.testing.assert_close(out.latents, same[kind]())
    elif kind == "noise":
        assert torch.cosine_similarity(out.latents, clean.latents, dim=-1).abs().max() < 0.8
        ratio = out.latents.norm(dim=-1) / clean.latents.norm(dim=-1)
        assert ratio.min() > 0.5 and ratio.max() < 1.6
    else:
        distance = torch.cdist(out.latents, clean.latents)  # (rows, slot fed, slot of the clean run)
        assert (distance.amin(dim=1) < 1e-5).all() and (distance.diagonal(dim1=1, dim2=2) > 1e-2).all()
    for fed, row, states in zip(out.latents, LIKE, rows_of(out), strict=True):
        close(states, recomputed(plain.lm, row.ids, fed=list(fed)), 2e-5)
    differ(out.hidden[:, -6:], clean.hidden[:, -6:])
    prompts = [row.ids[: row.ids.index(END) + 1] for row in LIKE]
    again = replacement(kind, clean, torch.Generator().manual_seed(4))
    first = latent_generate(plain, prompts, CONFIG, max_new_tokens=1, replace=again)
    ends = torch.stack([states[row.ids.index(END)] for states, row in zip(rows_of(out), LIKE, strict=True)])
    assert [row[0] for row in first] == plain.lm.get_output_embeddings()(ends).argmax(-1).tolist()


def test_one_pass_alone_can_be_replaced(plain):
    """Passes after the replaced one answer to it, passes before do not."""

    def at_pass_two(fed, which):
        return torch.where((which == 1)[:, None], torch.ones_like(fed), fed)

    clean, out = passes(plain)[0], passes(plain, replace=at_pass_two)[0]
    assert torch.equal(out.states[:, :2], clean.states[:, :2]) and torch.equal(out.latents[:, 0], clean.latents[:, 0])
    assert (out.latents[[0, 2, 3], 1] == 1).all()
    differ(out.states[0, 2], clean.states[0, 2])
    assert torch.equal(rows_of(out)[1], rows_of(clean)[1])


def test_gates_of_a_run_come_from_its_states(plain):
    clean, _ = passes(plain)
    gates = plain.stream.gates(clean.states)  # (B, K, 3, D)
    read, forget, _ = gates[:, 0].unbind(dim=1)
    close((1 - forget[0]) * clean.states[0, 0], clean.latents[0, 0])  # c_0 = 0
    assert read.std() > 0.01


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 9])
def test_depth_is_a_prompt_with_fewer_latents(plain, depth):
    out, _ = passes(plain, config=replace(CONFIG, depth=depth))
    for states, row in zip(rows_of(out), ROWS, strict=True):
        slots, ids = [t for t, token in enumerate(row.ids) if token == LATENT], row.ids
        close(
            states,
            passes(plain, [Row([x for t, x in enumerate(ids) if t not in slots[depth:]], [])])[0].hidden[0],
            2e-5,
        )
    assert out.present.sum(1).tolist() == [min(depth, row.ids.count(LATENT)) for row in ROWS]


def test_pause_tokens_are_the_tokens_own_embedding(plain):
    once, _ = passes(plain, config=replace(CONFIG, slots="pause"))
    many, batch = passes(plain, config=replace(CONFIG, slots="pause_multi"))
    real = batch["attention_mask"].bool()
    close(once.hidden[real], many.hidden[real])
    pause = [plain.lm.get_input_embeddings().weight[LATENT]] * 3
    close(once.hidden[real], torch.cat([recomputed(plain.lm, row.ids, fed=pause) for row in ROWS]), 2e-5)
    assert once.present.shape[1] == 0 and many.present.sum() == 8
    differ(once.hidden[real], passes(plain)[0].hidden[real])
    next_token_loss(plain, once, batch["labels"]).backward()
    assert plain.lm.get_input_embeddings().weight.grad[LATENT].abs().sum() > 0


def test_a_generated_latent_token_is_text():
    model = streamed("llama")
    with torch.no_grad():
        model.lm.lm_head.weight.zero_()
        model.lm.lm_head.weight[LATENT] = 0.0
    model.lm.lm_head.register_forward_hook(
        lambda module, args, out: out + 9 * torch.nn.functional.one_hot(torch.tensor(LATENT), 97)
    )
    prompt = LAYOUT.prompt([5, 6, 7], 2)
    assert latent_generate(model, [prompt], CONFIG, max_new_tokens=3) == [[LATENT] * 3]
    assert latent_generate(model, [prompt], CONFIG, max_new_tokens=3, stop_id=LATENT) == [[]]


def test_no_call_leaks_into_the_next(plain):
    first, _ = passes(plain)
    passes(plain, LIKE)
    again, _ = passes(plain)
    assert torch.equal(first.hidden, again.hidden) and again.cache.latent.passes.tolist() == [3, 0, 2, 3]


def test_a_stream_alone_takes_no_goal():
    model = streamed("llama")
    for call in (
        lambda: model(BATCH["input_ids"], goal=GOALS),
        lambda: passes(model, goal=GOALS),
        lambda: model.new_cache(GOALS),
    ):
        with pytest.raises(ValueError, match="no goal channel"):
            call()


def test_the_cache_goes_on_in_forward(plain):
    """A run's cache is a cache: the model's own forward takes the text further."""
    (out, batch), (same, _), more = passes(plain), passes(plain), tokens(4, 2, seed=3) % 90 + 2
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    further = plain(more, attention_mask=mask, cache=out.cache).logits
    close(further, plain.lm.lm_head(latent_passes(plain, more, CONFIG, past=same).hidden))
    assert torch.equal(out.cache.latent.concept, same.cache.latent.concept)


@pytest.mark.parametrize(
    "call, complaint",
    [
        (lambda m: latent_passes(m, torch.tensor([[LATENT, 3]]), CONFIG), "row 0 has a latent slot with no token"),
        (
            lambda m: (
                passes(m, [*ROWS, Row([0, LATENT], [0, 0])])[0]
                and latent_passes(m, torch.tensor([[5, 0, LATENT]]), CONFIG, attention_mask=torch.tensor([[1, 0, 1]]))
            ),
            "no token before",
        ),
        (lambda m: latent_passes(m.lm, BATCH["input_ids"], CONFIG, goal=GOALS), "carries no channel"),
        (lambda m: latent_passes(m, BATCH["input_ids"], CONFIG, attention_mask=torch.ones(4, 2)), "must agree"),
        (lambda m: passes(m, config=replace(CONFIG, slots="pause"), replace=lambda a, b: a), "needs passes"),
        (lambda m: PassConfig(latent_id=1, slots="wait"), "slots is 'wait'"),
        (lambda m: PassConfig(latent_id=1, sees="nothing"), "sees is 'nothing'"),
        (lambda m: PassConfig(latent_id=1, slots="pause", sees="last"), "use 'pause_multi'"),
        (lambda m: PassConfig(latent_id=1, hides=2), "hides is 2"),
        (lambda m: PassConfig(latent_id=1, sees="last", hides=0), "hides is 0"),
        (lambda m: PassConfig(latent_id=1, depth=-1), "0 or more"),
        (lambda m: replacement("swap", passes(m)[0]), "'swap' is unknown"),
        (lambda m: replacement("other", passes(m)[0]), "different numbers of latents"),
        (lambda m: replacement("other", passes(m, ROWS[:1])[0]), "needs 2 rows"),
        (lambda m: next_token_loss(m, passes(m)[0], torch.full((4, 17), UNSCORED)), "no token of the batch"),
        (lambda m: latent_generate(m, [[5, 6]], CONFIG, max_new_tokens=0), "at least 1"),
        (lambda m: latent_generate(m, [[5, 6], []], CONFIG, max_new_tokens=1), "no empty one"),
        (lambda m: collate([], latent_id=1, pad_id=0), "at least one row"),
        (lambda m: attach(tiny("llama"), pinned=False), "nothing to attach"),
        (lambda m: attach(tiny("llama"), stream=3), "stream is 3"),
        (lambda m: attach(tiny("llama"), stream=StreamConfig(), sites=["model"]), "belong to a goal channel"),
        (lambda m: m.encode_goal(LatentState(concept=torch.zeros(1, 32))), "no goal channel"),
    ],
)
def test_mistakes_are_named(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call(streamed("llama"))


def test_checkpointing_is_refused():
    model = streamed("llama").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="drops the cache"):
        passes(model)
