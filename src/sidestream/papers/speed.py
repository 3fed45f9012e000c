"""Speed and memory of decoding, side by side in one run: LS-AR's Tables 2 and 4.

Every arm decodes with `LeanDecoder`, from random weights of the paper's sizes: speed does not depend on what was
learned. Arms take turns within a round, a ratio is the median over rounds of the ratio within a round, and the first
round, which warms up, is not counted. The time of a conditioned arm includes the encoding of its goal, spread over the
tokens of the rollout. Absolute numbers mean something beside the machine's name only, which results carry.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from sidestream.channels import GoalConfig
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.backbones import Backbone
from sidestream.lm.cache import Window
from sidestream.lm.decode import LeanDecoder
from sidestream.papers.experiment import open_run, record_call, to_json, write_results
from sidestream.papers.results import load_results

NOTES = [
    "A ratio is the median of the ratios within a round; arms take turns. Goals are encoded within the time.",
    "Weights are random and of the paper's sizes. Numbers that are no ratios hold for this machine only.",
]
"""What every results file of speed says of its numbers."""

Arm = TypeVar("Arm")
COMMA = 3
"""The trigger token of Table 4's scripted plans."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What is timed, at which sizes and for how long."""

    table: str
    """The name it is run under."""
    scale: Literal["smoke", "cpu", "paper"]
    """`smoke` (tiny models), `cpu` (the paper's sizes) or `paper` (also in bfloat16; for a GPU)."""
    seed: int = 0
    """Of weights and text."""
    windows: tuple[int, ...]
    """W, tokens in view."""
    batches: tuple[int, ...] = (1, 32)
    """Rows decoded at a time."""
    dtypes: tuple[str, ...] = ("fp32",)
    """`fp32`, `bf16`."""
    families: tuple[str, ...] = ("gpt2",)
    """`gpt2` (learned positions, as the paper's; past W each token encodes its window anew) or `llama` (rotary, the
    window rolls)."""
    repeats: int = 5
    """Rounds, at least 5 for a number to quote."""
    new_tokens: int | None = None
    """Tokens timed in a round; null for all that fill the window."""
    rollout_tokens: int | None = None
    """Tokens over which the encoding of a goal is spread; null for W."""
    threads: int = 1
    """CPU threads; more than the machine has free make every number worse."""
    clock: Literal["wall", "cpu"] = "wall"
    """`wall`, or `cpu` time, which other work on the machine disturbs less: for rough looks."""
    vocabulary: int = 50257
    """V."""
    width: int = 512
    """D and G."""
    heads: int = 8
    """Attention heads."""
    layers: int = 4
    """Blocks of E_base, of D_base, and of the small unconditioned decoder."""
    large_layers: int = 20
    """Blocks of the baseline that matches LS-AR in parameters."""
    goal_tokens: int = 13
    """Tokens of a goal; the text begins with it too."""
    memory: bool = True
    """Measure peak memory while decoding as well, in processes of their own."""

    def __post_init__(self) -> None:
        for name in ("windows", "batches", "dtypes", "families"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one")
        for names, known in ((self.dtypes, ("fp32", "bf16")), (self.families, ("gpt2", "llama"))):
            wrong = [name for name in names if name not in known]
            if wrong:
                raise ValueError(f"{wrong[0]!r} is unknown; use {' or '.join(known)}")
        for name in ("repeats", "threads", "goal_tokens", "layers", "large_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.windows) < 2 or min(self.batches) < 1:
            raise ValueError("a window holds at least 2 tokens and a batch at least 1 row")


_TINY: dict[str, Any] = dict(vocabulary=101, width=32, heads=2, layers=1, large_layers=3)


def table2(scale: Literal["smoke", "cpu", "paper"]) -> Speed:
    """LS-AR Table 2: Static beside the 20-layer baseline and the 4-layer unconditioned decoder."""
    common: dict[str, Any] = dict(table="lsar.table2", scale=scale)
    if scale == "smoke":
        return Speed(windows=(24, 32), batches=(1, 2), repeats=2, memory=False, **_TINY, **common)
    dtypes = ("fp32", "bf16") if scale == "paper" else ("fp32",)
    # At 32 rows a token takes a second on a CPU: 16 of them, at the window's end.
    return Speed(windows=(128, 256, 500), dtypes=dtypes, new_tokens=32 if scale == "cpu" else None, **common)


def table4(scale: Literal["smoke", "cpu", "paper"]) -> Speed:
    """LS-AR Table 4: Dynamic beside the 10-layer baseline; plans of Blocksworld's form, a comma every 3 or 4 tokens."""
    common: dict[str, Any] = dict(table="lsar.table4", scale=scale, goal_tokens=28, rollout_tokens=128)
    if scale == "smoke":
        small = dict(windows=(8, 16), batches=(1, 2), repeats=2, new_tokens=8, families=("gpt2", "llama"))
        return Speed(memory=False, **small, **_TINY, **{**common, "goal_tokens": 12})
    return Speed(
        windows=(8, 16, 32, 64),
        dtypes=("fp32", "bf16") if scale == "paper" else ("fp32",),
        families=("gpt2", "llama"),
        new_tokens=40,
        vocabulary=100,
        large_layers=10,
        **common,
    )


# ---------------------------------------------------------------- timing


def device_of() -> str:
    """`cuda` where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Clock:
    """Seconds, the device's queue emptied first."""

    def __init__(self, kind: str) -> None:
        self.read = time.perf_counter if kind == "wall" else time.process_time

    def __call__(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.read()


def interleaved(functions: dict[Arm, Callable[[], float]], repeats: int) -> dict[Arm, list[float]]:
    """Seconds that each function says it took, taken turn about, in turned order every other round; a first round is
    thrown away."""
    seconds: dict[Arm, list[float]] = {name: [] for name in functions}
    gc.collect()
    gc.disable()
    try:
        for number in range(repeats + 1):
            # There and back: what an arm leaves behind (caches, pages, heat) is not always the same arm's burden.
            for name, function in list(functions.items())[:: 1 if number % 2 else -1]:
                taken = function()
                if number:
                    seconds[name].append(taken)
    finally:
        gc.enable()
    return seconds


def over(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios round by round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def cell(
    arm: str, metric: str, where: dict[str, Any], samples: Sequence[float], paper: float | None = None, **more: Any
) -> dict[str, Any]:
    """A results cell: the median of its samples, and all of them."""
    value = statistics.median(samples)
    named = {"arm": arm, "metric": metric, "where": where, "value": value, "n": len(samples), "ci": None}
    return {**named, "paper": paper, "samples": [float(f"{sample:.6g}") for sample in samples], **more}


def dtype_of(name: str) -> torch.dtype:
    """`fp32` or `bf16`."""
    return torch.float32 if name == "fp32" else torch.bfloat16


# ---------------------------------------------------------------- arms


def bare(plan: Speed, layers: int, dtype: str, *, family: Any = "gpt2", positions: int = 512) -> Any:
    """An unconditioned decoder with random weights."""
    shape = Backbone(layers=layers, width=plan.width, heads=plan.heads, family=family)
    lm: Any = shape.build(vocabulary=plan.vocabulary, window=max(positions, *plan.windows), pad_id=0)
    return lm.to(device=device_of(), dtype=dtype_of(dtype)).eval()


def conditioned(plan: Speed, dtype: str, *, dynamic: bool, family: str = "gpt2") -> AttachedLM:
    """LS-AR with random weights, its channel open."""
    config = GoalConfig(width=plan.width)
    if dynamic:
        config = GoalConfig(width=plan.width, mode="dynamic", trigger_ids=(COMMA,), tracker_heads=plan.heads)
    encoder, decoder = (bare(plan, plan.layers, dtype, family=family) for _ in range(2))
    model = attach(decoder, goal=config, encoder=encoder)
    with torch.no_grad():
        nn.init.normal_(model.channel.film.projection.weight, std=0.02)
        if model.channel.tracker is not None:
            model.channel.tracker.alpha.fill_(0.1)
    return model.eval()


def texts(plan: Speed, rows: int, length: int) -> Tensor:
    """(rows, length): a goal, then actions of 3 and 4 tokens, the last of each a comma."""
    drawn = random.Random(plan.seed)
    out = []
    for _ in range(rows):
        row = [drawn.randrange(COMMA + 1, plan.vocabulary) for _ in range(plan.goal_tokens)]
        while len(row) < length:
            row += [drawn.randrange(COMMA + 1, plan.vocabulary) for _ in range(drawn.choice((2, 3)))] + [COMMA]
        out.append(row[:length])
    return torch.tensor(out, device=device_of())


def _encoding(model: AttachedLM, goals: Tensor, clock: Clock) -> float:
    start = clock()
    with torch.no_grad():
        model.encode_goal(goals)
    return clock() - start


def _decoding(decoder: LeanDecoder, text: Tensor, new: int, goal: Any, clock: Clock, scripted: bool) -> float:
    """Seconds a token of the last `new` of a text: its own choices, or a script's."""
    rollout = decoder.start(len(text), capacity=text.shape[1], goal=goal)
    rollout.force(text[:, :-new])
    token, script = text[:, -new:][:, :1], text[:, -new:].split(1, dim=1)
    start = clock()
    for column in script:
        token = rollout.feed(column if scripted else token)[:, None]
    return (clock() - start) / new


# ---------------------------------------------------------------- tables


_PAPER = {
    "static_over_small": {128: 3196.66 / 6030.46, 256: 3085.42 / 5934.56, 500: 2821.27 / 5824.46},
    "static_over_large": {128: 1.3423, 256: 1.4082, 500: 1.3593},
    "memory_over_large": {128: 1 - 0.3246, 256: 1 - 0.4299, 500: 1 - 0.5281},
    "dynamic_over_large": {32: 1.3356},
}


def decoding_cells(plan: Speed, *, dynamic: bool, batch: int, dtype: str, family: str = "gpt2") -> list[dict[str, Any]]:
    """Tokens a second of LS-AR, the small and the large decoder at every W, and the ratios."""
    torch.manual_seed(plan.seed)
    own = "dynamic" if dynamic else "static"
    model = conditioned(plan, dtype, dynamic=dynamic, family=family)
    large = bare(plan, plan.large_layers, dtype, family=family)
    clock, cells = Clock(plan.clock), []
    for size in plan.windows:
        length = size if not dynamic else plan.goal_tokens + (plan.new_tokens or plan.rollout_tokens or size)
        new = min(plan.new_tokens or length, length - plan.goal_tokens)
        if batch >= 8 and plan.new_tokens:
            new = max(4, new // 4)  # several rows take a token as long as several tokens
        text = texts(plan, batch, length)
        window = Window(size=size, policy="rolling" if family == "llama" else "reindex")
        rows = batch * size if window.policy == "reindex" and length > size else batch
        decoders = {
            name: LeanDecoder(lm, rows=rows, window=window) for name, lm in {own: model, "large": large}.items()
        }
        # The unconditioned decoder is D_base with its channel closed. A second one of its shape would lie elsewhere in
        # memory, which alone makes a tenth of difference for a whole process.
        decoders["small"] = decoders[own]
        goals = text[:, : plan.goal_tokens]
        state = model.encode_goal(goals)
        functions = {
            name: partial(_decoding, decoder, text, new, state if name == own else None, clock, dynamic)
            for name, decoder in decoders.items()
        }
        seconds = interleaved({"encoding": partial(_encoding, model, goals, clock), **functions}, plan.repeats)
        spread = plan.rollout_tokens or size
        whole = [a + b / spread for a, b in zip(seconds[own], seconds.pop("encoding"), strict=True)]
        seconds[own] = whole
        where: dict[str, Any] = {"W": size, "batch": batch, "dtype": dtype}
        if dynamic:
            where["positions"] = "rotary" if family == "llama" else "learned"
        for other in ("small", "large"):
            metric = f"{own}_over_{other}"
            paper = _PAPER.get(metric, {}).get(size) if plan.scale != "smoke" else None
            cells.append(cell(own, metric, where, over(seconds[other], whole), paper))
        for name, taken in seconds.items():
            cells.append(cell(name, "tokens_per_s", where, [batch / one for one in taken]))
        del decoders
    return cells


def memory_cells(plan: Speed, *, dynamic: bool, batch: int, dtype: str, size: int) -> list[dict[str, Any]]:
    """Peak memory while decoding, over what the process held before it built a model; every arm and repeat in a process
    of its own, which has let go of the encoder and of the loaded model by then."""
    own = "dynamic" if dynamic else "static"
    held: dict[str, list[float]] = {own: [], "small": [], "large": []}
    for _ in range(plan.repeats):
        for arm, samples in held.items():
            samples.append(_in_a_process(plan, arm, batch, dtype, size))
    where: dict[str, Any] = {"W": size, "batch": batch, "dtype": dtype}
    if dynamic:
        where["positions"] = "learned"
    ratio = "memory_over_large"
    paper = _PAPER[ratio].get(size) if plan.scale != "smoke" else None
    cells = [cell(own, ratio, where, over(held[own], held["large"]), paper)]
    return cells + [cell(arm, "memory_mb", where, [one / 1e6 for one in samples]) for arm, samples in held.items()]


def _in_a_process(plan: Speed, arm: str, batch: int, dtype: str, size: int) -> float:
    code = "from sidestream.papers.speed import measure_memory; measure_memory()"
    asked = json.dumps({"plan": to_json(plan), "arm": arm, "batch": batch, "dtype": dtype, "size": size})
    # Freed weights are to go back to the system, not into malloc's pool.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": str(plan.threads)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=asked, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise ValueError(f"the process that measures memory failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.split()[-1])


def measure_memory() -> None:
    """In the fresh process: read what to measure from stdin, print the bytes."""
    asked = json.loads(sys.stdin.read())
    from sidestream.papers.experiment import from_json

    plan, arm, batch, size = from_json(Speed, asked["plan"]), asked["arm"], asked["batch"], asked["size"]
    torch.set_num_threads(plan.threads)
    # Libraries take memory at first use, whatever the arm.
    tiny = replace(plan, vocabulary=64, width=32, heads=2, layers=1, large_layers=1)
    _last_tokens(*_loaded(tiny, arm, batch, asked["dtype"], size))
    gc.collect()
    before = 0 if torch.cuda.is_available() else _rss("VmRSS")
    decoder, goal, text = _loaded(plan, arm, batch, asked["dtype"], size)
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    _last_tokens(decoder, goal, text)
    print(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _rss("VmHWM") - before)


def _last_tokens(decoder: LeanDecoder, goal: Any, text: Tensor) -> None:
    """Read a text and decode its last 8 tokens, the count of the peak begun before them."""
    rollout = decoder.start(len(text), capacity=text.shape[1], goal=goal)
    rollout.force(text[:, :-8])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for column in text[:, -8:].split(1, dim=1):
        rollout.feed(column)


def _loaded(plan: Speed, arm: str, batch: int, dtype: str, size: int) -> tuple[LeanDecoder, Any, Tensor]:
    """Decoder, goal and text; the models they came from end with this call."""
    torch.manual_seed(plan.seed)
    dynamic = arm == "dynamic" or plan.table == "lsar.table4"
    text = texts(plan, batch, plan.goal_tokens + 40 if dynamic else size)
    window = Window(size=size, policy="reindex")
    if arm not in ("static", "dynamic"):
        model: Any = bare(plan, plan.layers if arm == "small" else plan.large_layers, dtype)
        return LeanDecoder(model, rows=batch, window=window), None, text
    model = conditioned(plan, dtype, dynamic=dynamic)
    with torch.no_grad():
        goal = model.encode_goal(text[:, : plan.goal_tokens])
    return LeanDecoder(model, rows=batch, window=window), goal, text


def _rss(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError("memory is measured by Linux's /proc; run this on Linux or a GPU, or leave it out with --memory")


def run_speed(
    experiment: Speed, directory: Path, *, command: str, resume: bool = False, jobs: int | None = None
) -> dict[str, Any]:
    """Measure every cell of the table into `directory`; returns what it writes to results.json.

    `jobs` is not used: what runs side by side disturbs what is timed.
    """
    open_run(directory, experiment, resume=resume)
    if (directory / "results.json").exists():
        return load_results(directory / "results.json")
    torch.set_num_threads(experiment.threads)
    origin = record_call(directory, command, f"random weights and text of seed {experiment.seed}")
    started, dynamic, cells = time.monotonic(), experiment.table == "lsar.table4", []
    for dtype in experiment.dtypes:
        for batch in experiment.batches:
            for family in experiment.families:
                cells += decoding_cells(experiment, dynamic=dynamic, batch=batch, dtype=dtype, family=family)
            if experiment.memory:
                for size in experiment.windows:
                    cells += memory_cells(experiment, dynamic=dynamic, batch=batch, dtype=dtype, size=size)
    return write_results(experiment, directory, origin, started, notes=NOTES, cells=cells)
