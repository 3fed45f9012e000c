"""AGCLR and CoCoNuT: arms, tasks, scales and published values, which all of its tables have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from sidestream.channels import StreamConfig
from sidestream.experiments.settings import Scale, Tested
from sidestream.experiments.table import (
    BLACK,
    BLUE,
    BROWN,
    FOREST,
    GREEN,
    GREY,
    INDIGO,
    ORANGE,
    PINK,
    RED,
    SKY,
    TEAL,
    WINE,
    Look,
    Metric,
)
from sidestream.lm.models.backbones import Backbone
from sidestream.tasks.hops import HopsConfig
from sidestream.tasks.prosqa_generator import SMALL, ProsqaConfig
from sidestream.training.curriculum import Curriculum, Text
from sidestream.training.loop import LoopConfig


@dataclass(frozen=True, kw_only=True)
class LatentArm:
    """What an arm trains."""

    text: Text = "latent"
    """What it is trained on, and so whether it has latents."""
    slots: Literal["hidden", "pause", "pause_multi"] = "hidden"
    """What its latent slots hold."""
    stream: StreamConfig | None = None
    """Its concept stream; the task says where the gates start, unless that is the arm's point."""
    step_decoder: bool = False
    """SIM-CoT's extra objective."""


_STREAM = StreamConfig()
ARMS = {
    "no_cot": LatentArm(text="no_cot"),
    "cot": LatentArm(text="cot"),
    "icot": LatentArm(text="icot"),
    # CHOICE(AGCLR, Results): "pause tokens" are copied there and close to no-CoT. Ours are CoCoNuT's: question, pause
    # tokens, answer, and no curriculum; `pause_multi` is its "pause as thought", with the curriculum.
    "pause": LatentArm(text="pause", slots="pause"),
    "pause_multi": LatentArm(slots="pause_multi"),
    "coconut": LatentArm(),
    "agclr": LatentArm(stream=_STREAM),
    "coconut_sim": LatentArm(step_decoder=True),
    "agclr_sim": LatentArm(stream=_STREAM, step_decoder=True),
    "agclr_no_read": LatentArm(stream=replace(_STREAM, knocked_out=("read",))),
    "agclr_no_write": LatentArm(stream=replace(_STREAM, knocked_out=("write",))),
    "agclr_no_forget": LatentArm(stream=replace(_STREAM, knocked_out=("forget",))),
    "agclr_random_gates": LatentArm(stream=replace(_STREAM, memory="random")),
    "agclr_first": LatentArm(stream=replace(_STREAM, memory="first")),
    "coconut_mlp": LatentArm(stream=replace(_STREAM, memory="mlp")),
    "agclr_identity": LatentArm(stream=replace(_STREAM, init="identity")),
}
DERIVED = {"agclr_write2": ("agclr", 2)}
"""Arms that evaluate another arm's weights, the write gate frozen after pass k: (arm, k)."""

TASKS = ("hops", "masked", "prosqa", "gsm8k", "hotpotqa")
METRICS = {
    "accuracy": Metric("Answer right"),
    "em": Metric("Answer, exact match"),
    "f1": Metric("Answer, F1"),
    "last": Metric("Last value of the answer"),
    "early": Metric("Early value of the answer"),
    "number": Metric("Answer right as a number"),
}
MEASURED = {"masked": ("accuracy", "last", "early"), "hotpotqa": ("em", "f1"), "gsm8k": ("accuracy", "number")}
"""What is measured of a task, first what it is judged by; `accuracy` where it is not named."""
LOOKS = {
    "no_cot": Look("No CoT", GREY),
    "cot": Look("CoT", BLACK),
    "icot": Look("iCoT", FOREST),
    "pause": Look("Pause tokens", ORANGE),
    "pause_multi": Look("Pause tokens, curriculum", ORANGE, dashed=True),
    "coconut": Look("CoCoNuT", BLUE),
    "agclr": Look("AGCLR", RED),
    "coconut_sim": Look("CoCoNuT + SIM-CoT's step decoder", BLUE, dashed=True),
    "agclr_sim": Look("AGCLR + SIM-CoT's step decoder", RED, dashed=True),
    "agclr_no_read": Look("AGCLR, no read gate", GREEN),
    "agclr_no_write": Look("AGCLR, no write gate", PINK),
    "agclr_no_forget": Look("AGCLR, no forget gate", WINE),
    "agclr_write2": Look("AGCLR, write gate frozen after pass 2 (at test)", PINK, dashed=True),
    "agclr_random_gates": Look("AGCLR, random gates", INDIGO),
    "agclr_first": Look("AGCLR, stream repeats pass 1", TEAL),
    "agclr_identity": Look("AGCLR, identity at the start", BROWN),
    "coconut_mlp": Look("CoCoNuT + MLP of the stream's size", SKY),
}


@dataclass(frozen=True, kw_only=True)
class LatentTask:
    """How a task is trained, the same for every arm."""

    problems: int
    """Training problems (at most, where they come from a file or a hub)."""
    curriculum: Curriculum
    """Stages and latents."""
    loop: LoopConfig
    """How it is optimised; its steps are those of all stages together."""
    later_rate: float = 1.0
    """Learning rate after stage 0 over that of stage 0 (`loop`): where a model starts from scratch, stage 0 is its
    pretraining, and at its rate the answers-only arms lose the look-up they had learnt."""
    sees: Literal["all", "latents", "last"] = "all"
    """What the first latent and everything after it can attend to (`PassConfig.sees`)."""
    hides: int | None = None
    """How many tokens before the first latent that hides from it; null for all (`PassConfig.hides`)."""
    gates: Literal["gsm8k", "prosqa"] = "gsm8k"
    """Where the gates of a stream start (`StreamConfig.init`)."""


@dataclass(frozen=True, kw_only=True)
class LatentSettings(Tested):
    """Settings of a table of AGCLR: every arm trained on every task. An arm is the same training in every table, so
    tables can share trained arms (`models`)."""

    tasks: tuple[str, ...]
    """Tasks, in the order of the report."""
    hops: LatentTask | None = None
    """Training on `hops`, a task of ours: each step is one lookup."""
    masked: LatentTask | None = None
    """Training on `hops` where later passes and the answer cannot see the query: where a walk is, and where it began,
    travels through the latents or not at all."""
    prosqa: LatentTask | None = None
    """Training on ProsQA: of two concepts, which follows from a list of statements."""
    gsm8k: LatentTask | None = None
    """Training on GSM8K."""
    hotpotqa: LatentTask | None = None
    """Training on HotpotQA."""
    hops_data: HopsConfig = HopsConfig()
    """Problems of `hops`."""
    masked_data: HopsConfig = HopsConfig(hops=(4,), variant="retain")
    """Problems of `masked`."""
    prosqa_data: ProsqaConfig = ProsqaConfig()
    """Problems of `prosqa`, where no file has them."""
    files: str | None = None
    """Folder with `TASK_train`, `TASK_valid` and `TASK_test` (.json, .jsonl or .txt, plain or gzipped; for gsm8k also
    .parquet and .csv): read in place of generator or hub for each task that has them there."""
    base: str | None = None
    """A pretrained model, by its name on the hub or its folder; null trains `backbone` from scratch."""
    backbone: Backbone
    """The model of every arm, where there is no `base`."""
    positions: int = 512
    """Learned positions of a GPT-2 backbone; others have no end."""
    markers: bool = False
    """Put start and end marks around the latents, as the authors do. Small models learn faster without."""
    step_layers: int = 1
    """Blocks of SIM-CoT's step decoder."""
    step_weight: float = 1.0
    """Weight of its loss."""
    gain_rate: float = 30.0
    """Learning rate of the gain of `agclr_identity` over that of the rest: from 0, equal steps would leave it there."""
    traced: int = 100
    """Problems over which the passes of `agclr.retention` are compared (the paper: 100)."""
    new_tokens: int = 30
    """Most tokens generated (the paper: 30)."""
    models: str | None = None
    """Folder for trained arms, to be shared by tables with the same training settings; null: the run's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distinct(tasks=TASKS, arms=(*ARMS, *DERIVED))
        self.at_least(step_layers=1, traced=2, new_tokens=1)
        for task in self.tasks:
            self.training(task)
        for arm in self.arms:
            if arm in DERIVED and DERIVED[arm][0] not in self.arms:
                raise ValueError(f"arm {arm!r} evaluates the weights of {DERIVED[arm][0]!r}; add that arm")

    def latents_only(self) -> None:
        """Refuse arms that have no latents of their own.

        Raises:
            ValueError: there is one.
        """
        for arm in self.arms:
            if arm in DERIVED or ARMS[arm].text != "latent":
                raise ValueError(f"{self.table} looks at latents in stages, which arm {arm!r} has not; leave it out")

    def training(self, task: str) -> LatentTask:
        """How a task is trained.

        Raises:
            ValueError: this scale does not train it.
        """
        found: LatentTask | None = getattr(self, task)
        if found is None:
            there = ", ".join(name for name in TASKS if getattr(self, name) is not None)
            raise ValueError(f"task {task!r} has no settings at scale {self.scale}, which has {there}")
        return found


def at_scale(table: str, scale: Scale, arms: tuple[str, ...], *, masked: bool = False) -> LatentSettings:
    """A table's settings.

    Args:
        masked: the table has the task `masked`, below paper scale: where the question is hidden the stream must earn
            its keep.
    """
    makers = {"smoke": _smoke, "cpu": _cpu, "paper": _paper}
    if scale not in makers:
        raise ValueError(f"scale is {scale!r}; use smoke, cpu or paper")
    found = makers[scale](table, arms)
    if scale == "paper":
        return found
    # A small model takes an hour of ProsQA: at `cpu` it has its own table.
    tasks = ("hops", *(("masked",) if masked else ()), *(("prosqa",) if scale == "smoke" else ()))
    return replace(found, tasks=tasks)


def _paper(table: str, arms: tuple[str, ...]) -> LatentSettings:
    def task(epochs: int, problems: int, warmup: float, curriculum: Curriculum, gates: Any) -> LatentTask:
        # CHOICE(AGCLR, Training): warm-up is 100 steps there, a share of each stage here; and the rate then falls to 0
        # in each stage, where the paper says nothing of a decay.
        loop = LoopConfig(
            steps=epochs * problems // 128,
            batch_size=128,
            learning_rate=1e-4,
            warmup=warmup,
            precision="bf16",
            save_every=500,
        )
        return LatentTask(problems=problems, curriculum=curriculum, loop=loop, gates=gates)

    thrice = Curriculum(latents_per_step=2, max_stage=3, pad_to_max=True, first_length=3, stage_length=3, last_length=6)
    # The paper's 20 epochs: two are left for stage 6.
    prosqa = Curriculum(latents_per_step=1, max_stage=6, first_length=3, stage_length=3, last_length=2)
    return LatentSettings(
        table=table,
        scale="paper",
        tasks=("gsm8k", "hotpotqa", "prosqa"),
        arms=arms,
        gsm8k=task(15, 385_620, 0.01, thrice, "gsm8k"),
        hotpotqa=task(15, 15_000, 0.25, thrice, "gsm8k"),
        prosqa=task(20, 17_886, 0.25, prosqa, "prosqa"),
        base="openai-community/gpt2",
        backbone=Backbone(layers=12, width=768, heads=12),
        markers=True,
        step_layers=2,
        # CHOICE(AGCLR, Training): 30 there, which cuts off the chains of thought of GSM8K and HotpotQA.
        new_tokens=128,
    )


def _cpu(table: str, arms: tuple[str, ...]) -> LatentSettings:
    # CHOICE(AGCLR, Training): rotary positions, normalised queries and keys and Muon at this scale, for every arm
    # (LOG.md). Stage 0 has 2,100 steps: the look-up is learnt all at once, in some seeds after 1,000.
    loop = LoopConfig(steps=3000, batch_size=64, learning_rate=1e-3, optimizer="muon")
    two = Curriculum(max_stage=2, mix="proportional", first_length=7, last_length=2)
    hops = LatentTask(problems=60_000, curriculum=two, loop=loop)
    return LatentSettings(
        table=table,
        scale="cpu",
        tasks=("hops", "masked", "prosqa"),
        arms=arms,
        hops=hops,
        # Three latents, so that a stream has more than one pass to carry the early value over.
        masked=replace(hops, curriculum=replace(two, max_stage=3), sees="last", hides=2),
        prosqa=LatentTask(
            problems=30_000,
            # Stage 0 has 6,000 steps, the stages after it 1,000, 1,000 and 2,000.
            curriculum=replace(two, max_stage=3, first_length=12, stage_length=2, last_length=4),
            loop=replace(loop, steps=10_000),
            gates="prosqa",
        ),
        # `;` after each pair: without it a look-up finds the next pair's key as easily as the value.
        hops_data=HopsConfig(symbols=8, hops=(1, 2, 3)),
        masked_data=HopsConfig(symbols=8, hops=(4,), variant="retain"),
        # Three steps and no fewer: with two a model this small answers 9 of 10 without any (LOG.md).
        prosqa_data=replace(SMALL, hops=(3,)),
        backbone=Backbone(layers=2, width=64, heads=4, family="qwen3"),
        new_tokens=8,
    )


def _smoke(table: str, arms: tuple[str, ...]) -> LatentSettings:
    loop = LoopConfig(steps=4, batch_size=8, learning_rate=2e-3, log_every=1, optimizer="muon")
    two = LatentTask(problems=32, curriculum=Curriculum(max_stage=1, latents_per_step=2), loop=loop)
    return LatentSettings(
        table=table,
        scale="smoke",
        tasks=("hops", "masked", "prosqa"),
        arms=arms,
        hops=two,
        masked=replace(two, sees="last", hides=2),
        prosqa=replace(two, gates="prosqa"),
        hops_data=HopsConfig(symbols=6, hops=(2,), pair_ends=False),
        masked_data=HopsConfig(symbols=6, hops=(2,), variant="retain", pair_ends=False),
        prosqa_data=replace(SMALL, nodes=6, hops=(2,)),
        backbone=Backbone(layers=1, width=32, heads=2, family="llama"),
        test_problems=12,
        traced=12,
        new_tokens=8,
    )


_PAPER = {
    "cot": {"gsm8k": 0.406, "hotpotqa": (0.110, 0.155), "prosqa": 0.550},
    "no_cot": {"gsm8k": 0.165, "hotpotqa": (0.040, 0.076), "prosqa": 0.767},
    "icot": {"gsm8k": 0.300, "hotpotqa": (0.066, 0.094), "prosqa": 0.982},
    "pause": {"gsm8k": 0.164, "hotpotqa": (0.106, 0.146), "prosqa": 0.759},
    "coconut": {"gsm8k": 0.314, "hotpotqa": (0.104, 0.152), "prosqa": 0.920},
    "agclr": {"gsm8k": 0.340, "hotpotqa": (0.140, 0.194), "prosqa": 0.960},
    "agclr_no_write": {"hotpotqa": (0.088, 0.171)},
    "agclr_no_read": {"hotpotqa": (0.094, 0.178)},
    "agclr_no_forget": {"hotpotqa": (0.084, 0.189)},
    "agclr_write2": {"hotpotqa": (0.132, None)},
}


def published(arm: str, metric: str, where: dict[str, Any]) -> float | None:
    """The paper's value for a cell: GPT-2's, on the full data sets, at whatever scale ours is made."""
    if metric == "cosine":
        # The paper does not say on which data set; both of its curricula for GPT-2 end at 6 latents.
        return {"coconut": 0.126, "agclr": 0.22}.get(arm) if where["pass"] == 6 else None
    if where.get("latents", "learned") != "learned" or "stage" in where:
        return None
    found = _PAPER.get(arm, {}).get(where["task"])
    if isinstance(found, tuple):
        em, f1 = found
        return {"em": em, "f1": f1}.get(metric)
    return found if metric == "accuracy" else None


ROW_TOKENS = {"hops": 25, "masked": 20, "prosqa": 250, "gsm8k": 110, "hotpotqa": 350}
"""Tokens of a row, for a guess at the cost."""


def training_flops(e: LatentSettings) -> float:
    """A rough guess: 6 FLOP a weight of the blocks and token."""
    arms = sum(arm in ARMS for arm in e.arms)
    rows = sum(e.training(t).loop.steps * e.training(t).loop.batch_size * ROW_TOKENS[t] for t in e.tasks)
    return 6.0 * 12 * e.backbone.width**2 * e.backbone.layers * rows * arms
