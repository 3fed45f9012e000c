"""Speed of latent passes: the engine against a loop written from the description of the authors' code.

The loop rebuilds its inputs as nested Python lists of vectors in every pass and takes the logits of every position; it
generates one row at a time and without a cache. Both run on the same model, in one process, turn about, and must agree
before they are timed. Beside it, what the concept stream adds to the engine's time.

    SIDESTREAM_TABLES=benchmarks sidestream run latent_passes
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from sidestream.channels import StreamConfig
from sidestream.experiments.results import Outcome
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import Table
from sidestream.lm.attach import attach
from sidestream.lm.decoding.cache import CACHE_NAME
from sidestream.lm.decoding.layout import Layout, Row, collate
from sidestream.lm.decoding.passes import PassConfig, latent_generate, latent_passes, next_token_loss
from sidestream.papers.lsar.speed import Clock, Speed, Timed, TimedWork, bare, interleaved, over, timed

LISTED = {
    "latent_passes": {
        "title": "Latent passes against a loop written from CoCoNuT's code's description; AGCLR against CoCoNuT",
        "smoke": "seconds",
        "cpu": "ten minutes on one CPU core",
        "paper": "minutes on one GPU",
    }
}


@dataclass(frozen=True, kw_only=True)
class Passes(Timed):
    """What is timed."""

    widths: tuple[int, ...] = (128, 512)
    """D of the models, one head for each 64."""
    blocks: tuple[int, ...] = (2, 4)
    """Their blocks, one number for each width."""
    vocabulary: int = 512
    """V."""
    batch: int = 32
    """Rows of a training step, and of a batch of answers."""
    question: int = 48
    """Tokens of the longest question; the shortest has half of them."""
    latents: int = 6
    """Latent slots of a row."""
    new_tokens: int = 30
    """Tokens of an answer (the paper: 30)."""
    dtypes: tuple[str, ...] = ("fp32",)
    """`fp32`, `bf16`: in which the stream is timed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(batch=1, question=2, latents=1, new_tokens=1)
        self.distinct(dtypes=("fp32", "bf16"))
        if self.scale != "smoke":
            self.at_least(repeats=5)
        if len(self.widths) != len(self.blocks) or not self.widths:
            raise ValueError(f"widths is {list(self.widths)} and blocks {list(self.blocks)}; give as many of each")


def passes(scale: Scale) -> Passes:
    """The models of each scale."""
    common: dict[str, Any] = dict(table="latent_passes", scale=scale)
    if scale == "smoke":
        return Passes(widths=(32,), blocks=(1,), batch=4, question=8, latents=2, new_tokens=4, repeats=2, **common)
    if scale == "paper":
        return Passes(widths=(768,), blocks=(12,), vocabulary=50260, **common)
    return Passes(**common)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """A model with a concept stream, random rows with latents, and the prompts of them."""

    lm: Any
    """The model without its stream, same weights."""
    model: Any
    """With it."""
    config: PassConfig
    batch: dict[str, Tensor]
    prompts: list[list[int]]

    @staticmethod
    def of(plan: Speed, dtype: str, *, rows: int, latents: int, questions: tuple[int, int], answers: tuple[int, int]):
        """Random weights, and rows of lengths in these ranges."""
        drawn, end = random.Random(plan.seed), plan.vocabulary - 1
        torch.manual_seed(plan.seed)
        lm = bare(plan, plan.large_layers, dtype)
        layout = Layout(start_id=end - 2, latent_id=end - 1, end_id=end)

        def text(low: int, high: int) -> list[int]:
            return [drawn.randrange(end - 2) for _ in range(drawn.randint(low, high))]

        asked = [text(*questions) for _ in range(rows)]
        made: list[Row] = [layout.row(question, latents, text(*answers)) for question in asked]
        batch = {n: t.to(lm.device) for n, t in collate(made, latent_id=layout.latent_id, pad_id=0).items()}
        return Latent(
            lm=lm,
            model=attach(lm, stream=StreamConfig()),
            config=PassConfig(latent_id=layout.latent_id),
            batch=batch,
            prompts=[layout.prompt(question, latents) for question in asked],
        )

    def loss(self, net: Any) -> Tensor:
        """By the engine, with the stream or without."""
        run = latent_passes(net, self.batch["input_ids"], self.config, attention_mask=self.batch["attention_mask"])
        return next_token_loss(net, run, self.batch["labels"])

    def answers(self, net: Any, new: int) -> list[list[int]]:
        """By the engine."""
        return latent_generate(net.eval(), self.prompts, self.config, max_new_tokens=new)


def turns(
    functions: dict[str, tuple[Any, Callable[[], Tensor], Callable[[], Any]]], plan: Timed
) -> dict[str, dict[str, list[float]]]:
    """Seconds of a training step and of answers, arms in turn.

    Args:
        functions: arm -> its module, its loss, its answers.
    """
    clock = Clock(plan.clock)
    optimizers = {
        arm: torch.optim.AdamW(net.parameters(), lr=0.0, fused=True) for arm, (net, _, _) in functions.items()
    }

    def step(arm: str) -> float:
        net, loss, _ = functions[arm]
        net.train()
        start = clock()
        optimizers[arm].zero_grad()
        loss().backward()
        optimizers[arm].step()
        return clock() - start

    def answer(arm: str) -> float:
        net, _, answers = functions[arm]
        net.eval()
        start = clock()
        answers()
        return clock() - start

    found = {}
    for what, function in (("training step", step), ("answers", answer)):
        found[what] = interleaved({arm: partial(function, arm) for arm in functions}, plan.repeats)
        torch.cuda.empty_cache()
    return found


def stream_over_coconut(e: Passes, dtype: str, batch: int = 8) -> list[Outcome]:
    """AGCLR's time over CoCoNuT's, a training step and a batch of answers: the same passes with and without stream, at
    GPT-2's size."""
    plan = _plan(e, 32, 1, 64) if e.scale == "smoke" else _plan(e, 768, 12, 50260)
    made = Latent.of(plan, dtype, rows=batch, latents=6, questions=(32, 48), answers=(12, 12))
    arms = {"agclr": made.model, "coconut": made.lm}
    functions: dict[str, Any] = {
        arm: (net, partial(made.loss, net), partial(made.answers, net, 20)) for arm, net in arms.items()
    }
    found = []
    for what, seconds in turns(functions, e).items():
        ratios, name = over(seconds["agclr"], seconds["coconut"]), what.replace("answers", "generation")
        where = {"run": f"{dtype}, batch {batch}"}
        found.append(timed(f"agclr, {name}", "stream_over_coconut", where, ratios, seconds=seconds))
    return found


def _plan(e: Passes, width: int, blocks: int, vocabulary: int) -> Speed:
    sizes: dict[str, Any] = dict(width=width, heads=max(1, width // 64), large_layers=blocks, vocabulary=vocabulary)
    return Speed(table=e.table, scale=e.scale, seed=e.seed, windows=(2,), **sizes)


def engine_over_loop(e: Passes, width: int, blocks: int) -> list[Outcome]:
    """Both ratios of one model size, and the milliseconds they are made of.

    Raises:
        ValueError: engine and loop do not agree.
    """
    plan = _plan(e, width, blocks, e.vocabulary)
    questions = (e.question // 2, e.question)
    made = Latent.of(plan, "fp32", rows=e.batch, latents=e.latents, questions=questions, answers=(4, 16))
    model, lm, latent, new = made.model, made.lm, made.config.latent_id, e.new_tokens
    loop_loss = partial(described_loss, lm, model.stream, made.batch, latent)
    loop_answers = partial(described_generate, lm, model.stream, made.prompts, latent, new)
    torch.testing.assert_close(made.loss(model), loop_loss(), atol=1e-4, rtol=1e-4)
    agree = sum(a == b for a, b in zip(made.answers(model, new), loop_answers(), strict=True))
    # A greedy tie may break the other way in float32; a wrong engine would differ in most rows.
    if agree < 0.9 * e.batch:
        raise ValueError(f"engine and loop agree on {agree} of {e.batch} answers: not the same method")
    arms = {
        "engine": (model, partial(made.loss, model), partial(made.answers, model, new)),
        "loop": (model, loop_loss, loop_answers),
    }
    where, found = {"model": f"{blocks} blocks of {width}, {e.vocabulary:,} tokens"}, []
    for what, seconds in turns(arms, e).items():
        name = what.replace("answers", "evaluation")
        found.append(timed(name, "engine_over_loop", where, over(seconds["loop"], seconds["engine"])))
        found += [timed(f"{name}, {arm}", "ms", where, [1e3 * one for one in seconds[arm]]) for arm in seconds]
    return found


def described_forward(lm: Any, stream: Any, batch: dict[str, Tensor], latent_id: int) -> tuple[Tensor, Tensor]:
    """(B, T, V) logits and (B, T, D) inputs; slots in shared columns, keys and values kept from pass to pass."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    slots = [[t for t, token in enumerate(row) if token == latent_id] for row in ids.tolist()]
    count = max(map(len, slots))
    embeds, cache, logits = lm.get_input_embeddings()(ids), DynamicCache(config=lm.config), []
    states = [stream.start(embeds[b : b + 1, 0]) for b in range(len(ids))]
    start, end = 0, min((row[0] for row in slots if row), default=ids.shape[1])
    for number in range(count + 1):
        feed = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], CACHE_NAME: cache}
        out = lm(inputs_embeds=embeds[:, start:end], use_cache=True, output_hidden_states=True, **feed)
        logits.append(out.logits)
        if number == count:
            break
        vectors = [[embeds[b, t] for t in range(ids.shape[1])] for b in range(len(ids))]
        for b, row in enumerate(slots):
            if len(row) > number:
                hidden = out.hidden_states[-1][b, row[number] - 1 - start][None]
                hidden, states[b] = stream(hidden, states[b])
                vectors[b][row[number]] = hidden[0]
        embeds = torch.stack([torch.stack(row) for row in vectors])
        start, end = end, end + 1 if number + 1 < count else ids.shape[1]
    return torch.cat(logits, dim=1), embeds


def described_loss(lm: Any, stream: Any, batch: dict[str, Tensor], latent_id: int) -> Tensor:
    """Cross-entropy over every position, ignored ones included."""
    logits, _ = described_forward(lm, stream, batch, latent_id)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@torch.no_grad()
def described_generate(lm: Any, stream: Any, prompts: list[list[int]], latent_id: int, new: int) -> list[list[int]]:
    """One row after the other; the whole sequence again for every token."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=lm.device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        logits, embeds = described_forward(lm, stream, batch, latent_id)
        row = [int(logits[0, -1].argmax())]
        while len(row) < new:
            token = torch.tensor([[row[-1]]], device=lm.device)
            embeds = torch.cat([embeds, lm.get_input_embeddings()(token)], dim=1)
            row.append(int(lm(inputs_embeds=embeds, use_cache=False).logits[0, -1].argmax()))
        rows.append(row)
    return rows


class PassesWork(TimedWork[Passes]):
    """One model size after the other."""

    def pieces(self) -> dict[str, Callable[[], list[Outcome]]]:
        """A piece each."""
        e = self.settings
        sizes = zip(e.widths, e.blocks, strict=True)
        found = {f"{width}x{blocks}": partial(engine_over_loop, e, width, blocks) for width, blocks in sizes}
        return found | {f"stream-{dtype}": partial(stream_over_coconut, e, dtype) for dtype in e.dtypes}


TABLES = [
    Table(
        name="latent_passes",
        heading="Latent passes: the engine against the loop of the description",
        at=passes,
        work=PassesWork,
        unnamed="median",
        alone=True,
    )
]
