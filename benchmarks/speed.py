"""The speed table, a row at a time: LS-AR's Tables 2 and 4, flat costs, `generate()`, bandwidth, training.

    SIDESTREAM_TABLES=benchmarks sidestream run speed --rows '[flat_token,flat_trigger]' --repeats 10

Every row is a ratio of what ran side by side in one process, turn about, its value the median over rounds. `smoke`
takes small models and few tokens; else sizes are the papers'. The stream's row is in `latent_passes`.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sidestream.experiments.results import Outcome
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import Table
from sidestream.lm.decoding.cache import Window
from sidestream.lm.decoding.decode import LeanDecoder, Rollout
from sidestream.papers.lsar.speed import (
    COMMA,
    TINY,
    Clock,
    Speed,
    Timed,
    TimedWork,
    bare,
    conditioned,
    decoding,
    device_of,
    dtype_of,
    interleaved,
    memory,
    over,
    published,
    table2,
    table4,
    texts,
    timed,
)
from sidestream.tasks.base import Example
from sidestream.training import batches
from sidestream.training.loop import LoopConfig
from sidestream.training.objectives import GoalAlignment, ScoredLM
from sidestream.training.stages import align_goal, train_lm

LISTED = {
    "speed": {
        "title": "Every ratio of speed and memory, each of what ran side by side in one process",
        "smoke": "a minute",
        "cpu": "hours; a row alone (--rows '[flat_token]') a few minutes",
        "paper": "half an hour on one GPU",
    },
}
Outcomes = list[Outcome]


def static_over_small(plan: Speed, *, batch: int, dtype: str) -> Outcomes:
    """Table 2's tokens a second."""
    return decoding(plan, dynamic=False, batch=batch, dtype=dtype)


def dynamic_over_large(plan: Speed, *, batch: int, dtype: str) -> Outcomes:
    """Table 4's, with both kinds of positions."""
    common: dict[str, Any] = dict(dynamic=True, batch=batch, dtype=dtype)
    return [one for family in plan.families for one in decoding(plan, **common, family=family)]


def memory_over_large(plan: Speed, *, batch: int, dtype: str) -> Outcomes:
    """Table 2's peak memory."""
    common: dict[str, Any] = dict(dynamic=False, batch=batch, dtype=dtype)
    return [one for size in plan.windows for one in memory(plan, **common, size=size)]


def flat_token(plan: Speed, *, batch: int, dtype: str) -> Outcomes:
    """A token's time at 100,000 tokens over its time at 1,000, the window on (rotary, Static)."""
    model = conditioned(plan, dtype, dynamic=False, family="llama")
    size = plan.windows[0]
    decoder, clock, new = LeanDecoder(model, rows=batch, window=size), Clock(plan.clock), plan.new_tokens or 16
    early, late = 1_000, 100_000 if plan.scale != "smoke" else 2_000
    text = texts(plan, batch, 512)
    goal = model.encode_goal(text[:, : plan.goal_tokens])

    def read(length: int) -> Rollout:
        rollout = decoder.start(batch, capacity=late + new * (plan.repeats + 2), goal=goal)
        for start in range(0, length, 512):
            rollout.force(text[:, : min(512, length - start)])
        rollout.force(text[:, :1])
        return rollout

    def tokens(rollout: Rollout) -> float:
        start = clock()
        for column in text[:, :new].split(1, dim=1):
            rollout.feed(column)
        return clock() - start

    seconds = interleaved({str(at): partial(tokens, read(at)) for at in (early, late)}, plan.repeats)
    where = {"run": f"{dtype}, batch {batch}"}
    return [timed("static", "flat_token", where, over(seconds[str(late)], seconds[str(early)]), W=size)]


def flat_trigger(plan: Speed, *, batch: int, dtype: str) -> Outcomes:
    """A trigger's time at token 5,000 over its time at token 50: with a window on E_base, and with none, where E_base
    attends to the whole text."""
    model = conditioned(plan, dtype, dynamic=True, family="llama")
    size, clock, cells = plan.windows[0], Clock(plan.clock), []
    late = 5_000 if plan.scale != "smoke" else 300
    text = texts(replace(plan, goal_tokens=28), batch, 2048)
    goal = model.encode_goal(text[:, :28])
    plain = text[:, :28]
    comma = torch.full((batch, 1), COMMA, device=text.device)

    def read(decoder: LeanDecoder, length: int) -> Rollout:
        rollout = decoder.start(batch, capacity=late + 64 * (plan.repeats + 2), goal=goal)
        for start in range(0, length, 28):  # every action of E_base's piece by piece, as when decoding
            rollout.force(plain[:, : min(27, length - start)])
            rollout.force(comma)
        return rollout

    def triggers(rollout: Rollout) -> float:
        taken = 0.0
        for _ in range(4):
            rollout.force(plain[:, :3])
            start = clock()
            rollout.feed(comma)
            taken += clock() - start
        return taken

    for arm, limit in (("dynamic", size), ("dynamic, E_base reads all", None)):
        decoder = LeanDecoder(model, rows=batch, window=Window(size=size, policy="rolling", encoder_size=limit))
        seconds = interleaved({str(at): partial(triggers, read(decoder, at)) for at in (50, late)}, plan.repeats)
        where = {"run": f"{dtype}, batch {batch}"}
        cells.append(timed(arm, "flat_trigger", where, over(seconds[str(late)], seconds["50"]), encoder_size=limit))
    return cells


def decode_over_generate(plan: Speed, *, batch: int, dtype: str) -> Outcomes:
    """Tokens a second of lean decoding over the model's own `generate()`, and over the bound of memory bandwidth.

    The bound is what the weights and, on average, the keys and values that a token reads take at the bandwidth measured
    in the same rounds: the fastest of three ways to read a quarter of a gigabyte.
    """
    torch.manual_seed(plan.seed)
    lm, clock, new = bare(plan, plan.layers, dtype), Clock(plan.clock), plan.new_tokens or 64
    lm.generation_config.eos_token_id = None  # every row to its full length
    decoder = LeanDecoder(lm, rows=batch)
    prompt = texts(plan, batch, plan.goal_tokens)
    found: dict[str, Any] = {}

    def lean() -> float:
        start = clock()
        found["lean"] = decoder.greedy(prompt.tolist(), new_tokens=new)
        return (clock() - start) / new

    def generate() -> float:
        start = clock()
        mask = torch.ones_like(prompt)
        out = lm.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        found["generate"] = out[:, prompt.shape[1] :].tolist()
        return (clock() - start) / new

    def step() -> float:
        rollout = decoder.start(batch, capacity=prompt.shape[1] + new)
        token = rollout.feed(prompt)[:, None]
        start = clock()
        for _ in range(new):
            token = rollout.feed(token)[:, None]
        return (clock() - start) / new

    large = torch.rand(2**16, 1024, device=device_of())
    vectors = torch.rand(1024, device=device_of()), torch.rand(2**16, device=device_of())

    def bandwidth() -> float:
        taken = []
        for reads in (large.sum, lambda: large @ vectors[0], lambda: vectors[1] @ large):
            start = clock()
            reads()
            taken.append(clock() - start)
        return min(taken)

    functions: dict[str, Callable[[], float]] = {"lean": lean, "generate": generate, "step": step, "read": bandwidth}
    with torch.no_grad():
        seconds = interleaved(functions, plan.repeats)
    first = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(*found.values(), strict=True)]
    same = sum(first) / (batch * new)
    if dtype == "fp32" and same < 1:
        raise ValueError(f"lean decoding and generate() agree on {same:.1%} of the tokens: not the same method")
    weights = sum(p.numel() for p in lm.parameters()) - plan.vocabulary * plan.width * (not _tied(lm))
    seen = prompt.shape[1] + new / 2
    held = 2 * plan.layers * plan.width * seen * batch
    size = (weights + held) * torch.empty(0, dtype=dtype_of(dtype)).element_size()
    rates = [large.nbytes / one for one in seconds["read"]]
    fractions = [size / taken / rate for taken, rate in zip(seconds["step"], rates, strict=True)]
    where = {"run": f"{dtype}, batch {batch}"}
    return [
        timed("lean", "decode_over_generate", where, over(seconds["generate"], seconds["lean"]), same_tokens=same),
        timed("lean", "bandwidth_fraction", where, fractions, bytes_a_token=size, bandwidth=rates),
        timed("lean", "tokens_per_s", where, [batch / one for one in seconds["lean"]]),
        timed("generate()", "tokens_per_s", where, [batch / one for one in seconds["generate"]]),
    ]


def _tied(lm: Any) -> bool:
    return lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def training_over_bare_loop(plan: Speed, *, batch: int, dtype: str) -> Outcomes:
    """Tokens a second of each stage, data and Trainer included, over a bare loop of the same model on ready batches.

    Stage 3's bare loop is the unconditioned decoder with the same loss: what the channel costs is in the ratio.
    """
    drawn, clock = random.Random(plan.seed), Clock("wall")  # a stage's own log counts wall time
    torch.manual_seed(plan.seed)
    size = plan.windows[0]

    def ids(length: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(4, plan.vocabulary) for _ in range(length))

    examples = [Example(ids(plan.goal_tokens), ids(size - plan.goal_tokens - 8), ids(9)) for _ in range(8 * batch)]
    rows, steps = batches.RowConfig(window=size, scored="all"), plan.new_tokens or 8
    settings: dict[str, Any] = dict(log_every=steps, save_every=10**6, precision=dtype)
    loop = LoopConfig(steps=2 * steps, batch_size=batch, learning_rate=1e-4, **settings)
    model = conditioned(plan, "fp32", dynamic=False)
    lm = bare(plan, plan.layers, "fp32")
    pooled = torch.randn(len(examples), plan.width, device=lm.device).cpu()
    encoder = model.channel.encoder
    goals = [example.goal_ids for example in examples]
    data = batches.Rows(examples, rows, batch_size=batch, steps=steps + 1, seed=0)
    ready = [
        {k: v.to(lm.device) for k, v in batches.collate([data[i] for i in range(s * batch, (s + 1) * batch)]).items()}
        for s in range(steps + 1)
    ]
    vectors = {"pooled": pooled[:batch], "trajectory": pooled[:batch], "goal_ids": torch.zeros(batch, 1)}
    vectors = {name: tensor.to(lm.device) for name, tensor in vectors.items()}
    aligned = GoalAlignment(encoder, None, 0.0).to(lm.device)

    def staged(train: Callable[[Path], None]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder) / "stage")
            lines = (Path(folder) / "stage" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        first, last = (json.loads(line)["seconds"] for line in lines[:2])
        return (last - first) / steps

    def bare_loop(module: Any, batched: list[dict[str, Tensor]]) -> float:
        module.train()
        weights = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        start = 0.0
        for number, one in enumerate(batched):
            if number == 1:
                start = clock()
            optimizer.zero_grad()
            with torch.autocast(device_of(), dtype=torch.bfloat16, enabled=dtype == "bf16"):
                loss = module(**one)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        return (clock() - start) / (len(batched) - 1)

    options: dict[str, Any] = dict(seed=0, filler=())
    stages: dict[str, tuple[Callable[[Path], None], Callable[[], float]]] = {
        "stage 1": (
            lambda folder: train_lm(lm, examples, rows, loop, folder, **options),
            lambda: bare_loop(ScoredLM(lm), ready),
        ),
        "stage 2": (
            lambda folder: align_goal(
                encoder, pooled, pooled, goals, plan.vocabulary, loop, folder, seed=0, reconstruction_weight=0.0
            ),
            lambda: bare_loop(aligned, [vectors] * (steps + 1)),
        ),
        "stage 3": (
            lambda folder: train_lm(model, examples, rows, loop, folder, pooled=pooled, **options),
            lambda: bare_loop(ScoredLM(lm), ready),
        ),
    }
    cells = []
    for name, (train, loop_bare) in stages.items():
        seconds = interleaved({"ours": partial(staged, train), "bare": loop_bare}, plan.repeats)
        where = {"run": f"{dtype}, batch {batch}"}
        cells.append(
            timed(name, "training_over_bare_loop", where, over(seconds["bare"], seconds["ours"]), seconds=seconds)
        )
    return cells


# ---------------------------------------------------------------- the tables


def _one_window(scale: Scale) -> Speed:
    small: dict[str, Any] = dict(windows=(24,), new_tokens=8, **TINY) if scale == "smoke" else dict(windows=(128,))
    return Speed(table="speed", scale=scale, **small)


class Part(NamedTuple):
    """A row of the speed table."""

    about: str
    measure: Callable[..., Outcomes]
    """Plan, batch and type -> outcomes."""
    base: Callable[[Scale], Speed] = _one_window
    """Sizes and lengths at a scale."""
    changes: dict[str, Any] = {}
    """What is other than there, beyond `smoke`."""
    batches: tuple[int, ...] = (1,)
    """Rows decoded, or trained on, at a time."""


ROWS = {
    "static_over_small": Part(
        "Static / small and large decoder, tokens a second", static_over_small, table2, {}, (1, 32)
    ),
    "memory_over_large": Part("Static / large decoder, peak memory", memory_over_large, table2, {}, (1, 32)),
    "dynamic_over_large": Part("Dynamic / large decoder, tokens a second", dynamic_over_large, table4, {}, (1, 32)),
    "flat_token": Part("a token at 100,000 tokens / at 1,000, window on", flat_token, changes={"new_tokens": 64}),
    "flat_trigger": Part("a trigger at token 5,000 / at token 50", flat_trigger, changes={"vocabulary": 100}),
    "decode_over_generate": Part(
        "lean decoding / generate(), and bandwidth's bound / a token", decode_over_generate, changes={"new_tokens": 64}
    ),
    "training_over_bare_loop": Part(
        "each LS-AR stage / a bare loop of the same model, tokens a second",
        training_over_bare_loop,
        changes={"new_tokens": 3},
        batches=(4,),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Rows(Timed):
    """Settings of the speed table."""

    rows: tuple[str, ...] = tuple(ROWS)
    """Rows to measure."""
    dtypes: tuple[str, ...] = ("fp32",)
    """`fp32`, `bf16`."""
    batches: tuple[int, ...] | None = None
    """Rows decoded at a time; null for those of each row of the table."""
    windows: tuple[int, ...] | None = None
    """W; null for those of each row of the table."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distinct(rows=tuple(ROWS), dtypes=("fp32", "bf16"))

    def plan(self, row: str) -> Speed:
        """Sizes and lengths of a row."""
        part = ROWS[row]
        plan = replace(part.base(self.scale), **({} if self.scale == "smoke" else part.changes))
        mine: dict[str, Any] = {name: getattr(self, name) for name in ("seed", "repeats", "threads", "clock", "dtypes")}
        batches = self.batches or (part.batches if self.scale != "smoke" else part.batches[:1])
        return replace(plan, **mine, batches=batches, windows=self.windows or plan.windows)


class RowsWork(TimedWork[Rows]):
    """One row after the other."""

    def pieces(self) -> dict[str, Callable[[], Outcomes]]:
        """Of each row, type and batch."""
        found = {}
        for row, plan in ((row, self.settings.plan(row)) for row in self.settings.rows):
            for dtype, batch in ((dtype, batch) for dtype in plan.dtypes for batch in plan.batches):
                found[f"{row}-{dtype}-{batch}"] = partial(self._row, row, plan, batch, dtype)
        return found

    def _row(self, row: str, plan: Speed, batch: int, dtype: str) -> Outcomes:
        """Where outcomes of a row differ in W or positions, the arm's name says so."""
        found = []
        for one in ROWS[row].measure(plan, batch=batch, dtype=dtype):
            if "W" in one.where:
                arm = ", ".join([one.arm, f"W = {one.where['W']}", *filter(None, [one.where.get("positions")])])
                facts = {**one.facts, "paper": published(one.arm, one.metric, one.where)}
                one = replace(one, arm=arm, where={"run": f"{dtype}, batch {batch}"}, facts=facts)
            found.append(one)
        return found


def speed(scale: Scale) -> Rows:
    """Every row."""
    return Rows(table="speed", scale=scale, repeats=2 if scale == "smoke" else 5)


TABLES = [
    Table(
        name="speed",
        heading="Speed, row by row",
        at=speed,
        work=RowsWork,
        unnamed="median",
        alone=True,
        about="\n".join(f"{name:<24} {part.about}" for name, part in ROWS.items()),
    )
]
