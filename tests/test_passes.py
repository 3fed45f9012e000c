"""Latent passes: the authors' recorded outputs, an oracle that recomputes everything each pass, and the contract."""

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import sidestream
from families import FAMILIES, close, differ, logits, open_gate, our_hooks, settings, tiny, tokens
from sidestream import LatentState, attach
from sidestream.channels import StreamConfig
from sidestream.lm.cache import LatentCache
from sidestream.lm.layout import UNSCORED, Layout, Row, collate, pad_left, stage_counts
from sidestream.lm.passes import PassConfig, latent_generate, latent_passes, next_token_loss, replacement
from sidestream.lm.text import Vocabulary

DATA = Path(__file__).parent / "data"
START, LATENT, END, STOP = 93, 94, 95, 96  # of the tiny models
LAYOUT, CONFIG = Layout(start_id=START, latent_id=LATENT, end_id=END), PassConfig(latent_id=LATENT)


def read(name):
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


# -------------------------------------------------------------------- golden: tokens


@cache
def layouts():
    return read("coconut_golden/layouts.json.gz")


ENCODE = cache(Vocabulary().encode)


def encoded(sample):
    """Question, steps and answer as ids, in the authors' text form."""
    steps = [ENCODE(step + "\n") for step in sample["steps"]]
    return ENCODE(sample["question"] + "\n"), steps, [*ENCODE("### " + sample["answer"]), layouts()["eos_id"]]


def golden_row(sample, case, *, prompt=False):
    question, steps, answer = encoded(sample)
    skipped, latents = len(steps), 0
    if not case["no_cot"]:
        skipped, latents = stage_counts(
            case["stage"],
            len(steps),
            latents_per_step=case["c_thought"],
            max_stage=case["max_latent_stage"],
            pad_to_max=case["pad_latent_to_max"],
            prompt=prompt,
        )
    ids = {name: layouts()[name] for name in ("start_id", "latent_id", "end_id")}
    layout = Layout(**ids, markers=not case["no_special_marker"])
    if prompt:
        return layout.prompt(question, latents)
    return layout.row(question, latents, [*sum(steps[skipped:], []), *answer])


def test_token_layouts():
    cases = layouts()["cases"]
    assert len(cases) == 87
    for case in cases:
        for recorded in case["rows"]:
            sample = layouts()["samples"][case["data"]][recorded["idx"]]
            row, count = golden_row(sample, case), recorded["n_question"]
            assert row.ids[count:] == recorded["train_tail"] and row.labels[count:] == recorded["label_tail"]
            assert set(row.labels[:count]) == {UNSCORED}
            assert golden_row(sample, case, prompt=True)[count:] == recorded["eval_tail"]


def test_collated_batches():
    mixed = 0
    for batch in layouts()["batches"]:
        case = {**batch, "max_latent_stage": 3, "no_cot": False, "no_special_marker": False}
        samples = [layouts()["samples"]["short"][index] for index in batch["idx"]]
        stages = [batch["stage"]] * 3 + [batch["mixed_last_row_stage"]]
        rows = [golden_row(s, {**case, "stage": stage}) for s, stage in zip(samples, stages, strict=True)]
        made = collate(rows, latent_id=layouts()["latent_id"], pad_id=layouts()["pad_id"])
        for name, tensor in made.items():
            assert tensor.tolist() == batch[name], name
        positions = (made["attention_mask"].cumsum(1) - 1).clamp(min=0) * made["attention_mask"]
        assert positions.tolist() == batch["position_ids"]
        mixed += len({row.ids.count(layouts()["latent_id"]) for row in rows}) > 1
    assert mixed == 1


# -------------------------------------------------------------------- golden: numbers


@cache
def forward_golden(name):
    return read(f"{name}/forward.json.gz")


def golden_lm() -> GPT2LMHeadModel:
    golden = forward_golden("coconut_golden")
    names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    lm = GPT2LMHeadModel(GPT2Config(**{name: golden["config"][name] for name in names}, **none)).double().eval()
    arrays = np.load(DATA / "coconut_golden" / "tiny_gpt2.npz")
    weights = {name: torch.from_numpy(arrays[name]).double() for name in arrays}
    missing, unexpected = lm.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    lm.tie_weights()
    return lm


def golden_model(weights: str | None):
    """CoCoNuT's bare model, or with one of the two recorded sets of stream weights."""
    lm = golden_lm()
    if weights is None:
        return lm
    model = attach(lm, stream=StreamConfig())
    arrays = np.load(DATA / "agclr_golden" / "stream_weights.npz")
    own = {key.partition(".")[2]: torch.from_numpy(arrays[key]).double() for key in arrays if key.startswith(weights)}
    assert model.stream is not None
    model.stream.load_state_dict(own)
    return model.eval()


def golden_cases(weights: str | None):
    """(features, batch, recorded outputs, generate) of each case."""
    base = forward_golden("coconut_golden")["cases"]
    if weights is None:
        return [(c["features"], c["batch"], c, c.get("generate")) for c in base]
    recorded = next(s for s in forward_golden("agclr_golden")["sets"] if s["weights"] == weights)["cases"]
    pairs = [(base[c["case"]], c) for c in recorded]
    return [
        (b["features"], b["batch"], c, "generate" in c and {**b["generate"], "output": c["generate"]}) for b, c in pairs
    ]


def golden_config():
    return PassConfig(latent_id=forward_golden("coconut_golden")["special"]["latent"])


def near(got, expected):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights", [None, "init", "random"])
def test_logits_loss_gradients_and_generation_of_the_authors_code(weights):
    model, config, generated = golden_model(weights), golden_config(), 0
    lm = model if weights is None else model.lm
    cases = golden_cases(weights)
    assert len(cases) == 14
    for features, batch, recorded, generate in cases:
        made = collate([Row(f["input_ids"], f["labels"]) for f in features], latent_id=config.latent_id, pad_id=0)
        for name, tensor in made.items():
            assert tensor.tolist() == batch[name]
        model.zero_grad()
        out = latent_passes(model, made["input_ids"], config, attention_mask=made["attention_mask"])
        real = made["attention_mask"].bool()
        near(lm.get_output_embeddings()(out.hidden)[real], torch.tensor(recorded["logits"])[real])
        slots = (made["input_ids"] == config.latent_id) & real
        near(out.latents[out.present], torch.tensor(recorded["inputs_embeds"], dtype=torch.float64)[slots])
        loss = next_token_loss(model, out, made["labels"])
        near(loss.double(), recorded["loss"])
        loss.backward()
        stream = {} if weights is None else dict(model.stream.named_parameters(prefix="gated_concept_stream"))
        named = {**dict(lm.named_parameters(prefix="base_causallm" if stream else "")), **stream}
        assert set(recorded["grad_norms"]) == set(named)
        for name, norm in recorded["grad_norms"].items():
            gradient = named[name].grad
            if norm is None:
                assert gradient is None or not gradient.any()
            else:
                near(gradient.norm(), norm)
        if generate:
            count, prompt = generate["max_new_tokens"], generate["prompt"]
            got = latent_generate(model, [prompt], config, max_new_tokens=count)
            assert prompt + got[0] == generate["output"]
            generated += 1
    assert generated > 3


def test_golden_prompts_in_one_batch():
    for weights in (None, "init", "random"):
        model = golden_model(weights)
        cases = [generate for *_, generate in golden_cases(weights) if generate]
        prompts = [case["prompt"] for case in cases]
        assert len({len(prompt) for prompt in prompts}) > 1 and len({p.count(60) for p in prompts}) > 2
        got = latent_generate(model, prompts, golden_config(), max_new_tokens=cases[0]["max_new_tokens"])
        assert [p + row for p, row in zip(prompts, got, strict=True)] == [case["output"] for case in cases]


# -------------------------------------------------------------------- the oracle


def recomputed(lm: PreTrainedModel, ids, *, stream=None, sees="all", fed=None, detach=False):
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
            allowed[query, : before[0] if sees == "latents" else before[-1]] = False

    def states(upto):
        if sees == "all":
            feed = {}
        else:
            block = torch.zeros(upto, upto, dtype=lm.dtype).masked_fill(~allowed[:upto, :upto], torch.finfo(lm.dtype).min)
            feed = {"attention_mask": block[None, None], "position_ids": torch.arange(upto)[None]}
        return lm.base_model(inputs_embeds=torch.stack(embeds[:upto])[None], use_cache=False, **feed).last_hidden_state[0]

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
        return out, torch.nn.functional.layer_norm(c + w * out, h.shape, stream.ln_residual.weight, stream.ln_residual.bias)

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
    return (model, None) if isinstance(model, PreTrainedModel) else (model.lm, cell(model.stream))


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
    monkeypatch.setattr(
        LatentCache, "update", lambda self, k, v, *rest, **kw: inner(self, k, v, *rest, **kw) if k.shape[2] > 1 else
        tuple(t.detach() for t in inner(self, k, v, *rest, **kw))
    )
    out, _ = passes(model)
    assert (gradient(next_token_loss(model, out, batch["labels"])) - right).norm() > 1e-2 * right.norm()
    monkeypatch.undo()
    for other in (CONFIG, replace(CONFIG, slots="pause")):
        lm_only, _ = passes(model.lm, config=other)
        differ(lm_only.hidden[0, -1], out.hidden[0, -1])


@pytest.mark.parametrize("sees", ["latents", "last"])
def test_hidden_text_is_hidden(model, sees):
    lm, stream = parts(model)
    out, _ = passes(model, config=replace(CONFIG, sees=sees))
    whole, _ = passes(model)
    if lm.config.model_type != "gemma3_text":  # whose layers take a matrix each
        lm.set_attn_implementation("eager")
        for got, row in zip(rows_of(out), ROWS, strict=True):
            close(got, recomputed(lm, row.ids, stream=stream, sees=sees), 1e-4)
    # With the latents fixed, nothing of the question is left; without hiding, it is.
    fixed = replacement("zero", whole)
    other = [Row([5 if t < r.ids.index(START) else x for t, x in enumerate(r.ids)], r.labels) for r in ROWS]
    for config, hidden in [(replace(CONFIG, sees=sees), True), (CONFIG, False)]:
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
    + [(family, "dynamic") for family in FAMILIES]
    + [(family, "static") for family in ("gpt2", "gemma3")],
    ids=lambda pair: f"{pair[0]}-{pair[1] or 'alone'}",
)
def both(request):
    """The stream alone and beside a goal channel of either mode."""
    return streamed(*request.param)


def base_of(model):
    """The untouched model under it."""
    return next(tiny(family) for family in FAMILIES if type(tiny(family)) is type(model.lm))


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
    for size in (1, 4):
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
