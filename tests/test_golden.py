"""What the authors' own code of CoCoNuT and AGCLR gave: token layouts, batches, logits, losses, gradients, answers."""

import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sidestream import attach
from sidestream.channels import StreamConfig
from sidestream.lm.decoding.layout import UNSCORED, Layout, Row, collate, stage_counts
from sidestream.lm.decoding.passes import PassConfig, latent_generate, latent_passes, next_token_loss
from sidestream.lm.texts.text import Vocabulary

DATA = Path(__file__).parent / "data"


def read(name):
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


# -------------------------------------------------------------------- tokens


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


# -------------------------------------------------------------------- numbers


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
