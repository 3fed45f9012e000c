"""Speed and memory of decoding, side by side in one run: LS-AR's Tables 2 and 4.

Every arm decodes with `LeanDecoder`, from random weights of the paper's sizes: speed does not depend on what was
learned. Arms take turns within a round, a ratio is the median over rounds of the ratio within a round, and the first
round, which warms up, is not counted. The time of a conditioned arm includes the encoding of its goal, spread over the
tokens of the rollout. Absolute numbers mean something beside the machine's name only, which results carry.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from joblib.externals.loky import ProcessPoolExecutor
from torch import Tensor, nn

from sidestream.channels import GoalConfig
from sidestream.experiments.results import Outcome
from sidestream.experiments.run import Found, Job, Measured, Work
from sidestream.experiments.settings import Scale, Settings
from sidestream.experiments.table import Look, Table
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.decoding.cache import Window
from sidestream.lm.decoding.decode import LeanDecoder
from sidestream.lm.models.backbones import Backbone

LISTED = {
    "lsar.table2": {
        "title": "Speed and memory of Static beside the 20-layer and the 4-layer decoder (LS-AR Table 2)",
        "smoke": "seconds",
        "cpu": "an hour",
        "paper": "minutes on one GPU",
    },
    "lsar.table4": {
        "title": "Speed and memory of Dynamic beside the 10-layer and the 4-layer decoder (LS-AR Table 4)",
        "smoke": "seconds",
        "cpu": "an hour",
        "paper": "minutes on one GPU",
    },
}
NOTES = [
    "A ratio is the median of the ratios within a round; arms take turns. Goals are encoded within the time.",
    "Weights are random and of the paper's sizes. Numbers that are no ratios hold for this machine only.",
]
"""What every results file of speed says of its numbers."""

Arm = TypeVar("Arm")
T = TypeVar("T", bound="Timed")
COMMA = 3
"""The trigger token of Table 4's scripted plans."""


@dataclass(frozen=True, kw_only=True)
class Timed(Settings):
    """How something is timed."""

    repeats: int = 5
    """Rounds, at least 5 for a number to quote."""
    threads: int = 1
    """CPU threads; more than the machine has free make every number worse."""
    clock: Literal["wall", "cpu"] = "wall"
    """`wall`, or `cpu` time, which other work on the machine disturbs less: for rough looks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(repeats=1, threads=1)


@dataclass(frozen=True, kw_only=True)
class Speed(Timed):
    """What is timed, at which sizes and for how long."""

    windows: tuple[int, ...]
    """W, tokens in view."""
    batches: tuple[int, ...] = (1, 32)
    """Rows decoded at a time."""
    dtypes: tuple[str, ...] = ("fp32",)
    """`fp32`, `bf16`."""
    families: tuple[str, ...] = ("gpt2",)
    """`gpt2` (learned positions, as the paper's; past W each token encodes its window anew) or `llama` (rotary, the
    window rolls)."""
    new_tokens: int | None = None
    """Tokens timed in a round; null for all that fill the window."""
    rollout_tokens: int | None = None
    """Tokens over which the encoding of a goal is spread; null for W."""
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
        super().__post_init__()
        self.distinct(windows=None, batches=None, dtypes=("fp32", "bf16"), families=("gpt2", "llama"))
        self.at_least(goal_tokens=1, layers=1, large_layers=1)
        if min(self.windows) < 2 or min(self.batches) < 1:
            raise ValueError("a window holds at least 2 tokens and a batch at least 1 row")


TINY: dict[str, Any] = dict(vocabulary=101, width=32, heads=2, layers=1, large_layers=3)


def table2(scale: Scale) -> Speed:
    """LS-AR Table 2: Static beside the 20-layer baseline and the 4-layer unconditioned decoder."""
    common: dict[str, Any] = dict(table="lsar.table2", scale=scale)
    if scale == "smoke":
        return Speed(windows=(24, 32), batches=(1, 2), repeats=2, memory=False, **TINY, **common)
    dtypes = ("fp32", "bf16") if scale == "paper" else ("fp32",)
    # At 32 rows a token takes a second on a CPU: 16 of them, at the window's end.
    return Speed(windows=(128, 256, 500), dtypes=dtypes, new_tokens=32 if scale == "cpu" else None, **common)


def table4(scale: Scale) -> Speed:
    """LS-AR Table 4: Dynamic beside the 10-layer baseline; plans of Blocksworld's form, a comma every 3 or 4 tokens."""
    common: dict[str, Any] = dict(table="lsar.table4", scale=scale, goal_tokens=28, rollout_tokens=128)
    if scale == "smoke":
        small = dict(windows=(8, 16), batches=(1, 2), repeats=2, new_tokens=8, families=("gpt2", "llama"))
        return Speed(memory=False, **small, **TINY, **{**common, "goal_tokens": 12})
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


def timed(arm: str, metric: str, where: dict[str, Any], samples: Sequence[float], **facts: Any) -> Outcome:
    """Rounds of one thing timed."""
    return Outcome(arm=arm, metric=metric, where=where, values=samples, facts=facts)


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


def encoding_seconds(model: AttachedLM, goals: Tensor, clock: Clock) -> float:
    """Seconds in which a goal is encoded."""
    start = clock()
    with torch.no_grad():
        model.encode_goal(goals)
    return clock() - start


def decoding_seconds(decoder: LeanDecoder, text: Tensor, new: int, goal: Any, clock: Clock, scripted: bool) -> float:
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


def published(arm: str, metric: str, where: dict[str, Any]) -> float | None:
    """The paper's ratio at the same W."""
    return _PAPER.get(metric, {}).get(where.get("W", 0))


def decoding(plan: Speed, *, dynamic: bool, batch: int, dtype: str, family: str = "gpt2") -> list[Outcome]:
    """Tokens a second of LS-AR, the small and the large decoder at every W, and the ratios."""
    torch.manual_seed(plan.seed)
    own = "dynamic" if dynamic else "static"
    model = conditioned(plan, dtype, dynamic=dynamic, family=family)
    large = bare(plan, plan.large_layers, dtype, family=family)
    clock, found = Clock(plan.clock), []
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
            name: partial(decoding_seconds, decoder, text, new, state if name == own else None, clock, dynamic)
            for name, decoder in decoders.items()
        }
        seconds = interleaved({"encoding": partial(encoding_seconds, model, goals, clock), **functions}, plan.repeats)
        spread = plan.rollout_tokens or size
        whole = [a + b / spread for a, b in zip(seconds[own], seconds.pop("encoding"), strict=True)]
        seconds[own] = whole
        where: dict[str, Any] = {"W": size, "batch": batch, "dtype": dtype}
        if dynamic:
            where["positions"] = "rotary" if family == "llama" else "learned"
        for other in ("small", "large"):
            found.append(timed(own, f"{own}_over_{other}", where, over(seconds[other], whole)))
        for name, taken in seconds.items():
            found.append(timed(name, "tokens_per_s", where, [batch / one for one in taken]))
        del decoders
    return found


def memory(plan: Speed, *, dynamic: bool, batch: int, dtype: str, size: int) -> list[Outcome]:
    """Peak memory while decoding, over what the process held before it built a model; every arm and repeat in a process
    of its own, which has let go of the encoder and of the loaded model by then."""
    own = "dynamic" if dynamic else "static"
    held: dict[str, list[float]] = {own: [], "small": [], "large": []}
    # Freed weights are to go back to the system, not into malloc's pool.
    environment = {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": str(plan.threads)}
    for _ in range(plan.repeats):
        for arm, samples in held.items():
            with ProcessPoolExecutor(max_workers=1, env=environment) as process:
                samples.append(process.submit(_peak, plan, arm, batch, dtype, size).result())
    where: dict[str, Any] = {"W": size, "batch": batch, "dtype": dtype}
    if dynamic:
        where["positions"] = "learned"
    ratio = timed(own, "memory_over_large", where, over(held[own], held["large"]))
    return [ratio, *(timed(arm, "memory_mb", where, [one / 1e6 for one in taken]) for arm, taken in held.items())]


def _peak(plan: Speed, arm: str, batch: int, dtype: str, size: int) -> float:
    """In the fresh process: bytes."""
    torch.set_num_threads(plan.threads)
    # Libraries take memory at first use, whatever the arm.
    tiny = replace(plan, vocabulary=64, width=32, heads=2, layers=1, large_layers=1)
    _last_tokens(*_loaded(tiny, arm, batch, dtype, size))
    gc.collect()
    before = 0 if torch.cuda.is_available() else _rss("VmRSS")
    decoder, goal, text = _loaded(plan, arm, batch, dtype, size)
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    _last_tokens(decoder, goal, text)
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _rss("VmHWM") - before


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


class TimedWork(Work[T]):
    """One piece after the other: what runs side by side disturbs what is timed."""

    def pieces(self) -> dict[str, Callable[[], list[Outcome]]]:
        """Job -> what it measures."""
        raise NotImplementedError

    def data_hash(self) -> str:
        """There is no data but this."""
        return f"random weights and text of seed {self.settings.seed}"

    def jobs(self) -> list[Job]:
        """Every piece, with the threads asked for."""

        def work(measure: Callable[[], list[Outcome]]) -> Measured:
            torch.set_num_threads(self.settings.threads)
            return Measured(outcomes=measure())

        return [Job(name=name, work=partial(work, measure)) for name, measure in self.pieces().items()]

    def notes(self, found: Found) -> list[str]:
        """What a ratio is."""
        return NOTES


class SpeedWork(TimedWork[Speed]):
    """Every batch, type and family after the other."""

    def pieces(self) -> dict[str, Callable[[], list[Outcome]]]:
        """Decoding, and memory beside it."""
        e, found = self.settings, {}
        for dtype, batch in ((dtype, batch) for dtype in e.dtypes for batch in e.batches):
            common: dict[str, Any] = dict(dynamic=e.table == "lsar.table4", batch=batch, dtype=dtype)
            for family in e.families:
                found[f"{dtype}-{batch}-{family}"] = partial(decoding, e, **common, family=family)
            for size in e.windows if e.memory else ():
                found[f"{dtype}-{batch}-memory-{size}"] = partial(memory, e, **common, size=size)
        return found


def _table(name: str, heading: str, at: Any, own: Look, large: str) -> Table:
    arms = {own.name.split()[-1].lower(): own, "large": Look(large), "small": Look("unconditioned decoder, 4 blocks")}
    return Table(
        name=name, heading=heading, at=at, work=SpeedWork, unnamed="median", arms=arms, paper=published, alone=True
    )


TABLES = [
    _table("lsar.table2", "LS-AR, Table 2: speed of Static", table2, Look("LS-AR Static"), "AR baseline, 20 blocks"),
    _table("lsar.table4", "LS-AR, Table 4: speed of Dynamic", table4, Look("LS-AR Dynamic"), "AR baseline, 10 blocks"),
]
