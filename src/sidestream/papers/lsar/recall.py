"""LS-AR Table 1 and Figure 4: Treasure Hunt, recall of item and passcode over the distance to the goal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.ticker import NullLocator

from sidestream.channels import LatentState
from sidestream.evaluation.evaluate import answer_treasure
from sidestream.evaluation.probes import project, treasure_states
from sidestream.experiments.report.figures import arm_lines, bars_figure, lines_figure
from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.report.tables import conditions, parts
from sidestream.experiments.results import Entry, Outcome
from sidestream.experiments.run import Found, Job, Measured, rows
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import BLUE, GREY, RED, Look, Metric, Table
from sidestream.lm.attach import AttachedLM
from sidestream.lm.models.backbones import Backbone, parameter_count
from sidestream.papers.lsar import training_flops
from sidestream.papers.lsar.hunt import Hunted, HuntWork
from sidestream.tasks import treasure
from sidestream.training.loop import LoopConfig
from sidestream.training.objectives import ScoredLM

LISTED = {
    "lsar.table1": {
        "title": "Treasure Hunt: item and passcode recalled after the prompt left the window (LS-AR Table 1, Fig. 4)",
        "smoke": "under a minute on 2 CPU cores",
        "cpu": "about 11 minutes on 2 CPU cores",
        "paper": "hours on one GPU; weeks without",
    }
}

# ---------------------------------------------------------------- what is run, as data


@dataclass(frozen=True, kw_only=True)
class StaticArm:
    """What one LS-AR (Static) arm does; every difference between the paper and us is a field here."""

    scored: Literal["answer", "all"] = "all"
    """Stage 3 loss: on every token (the paper's next-token prediction) or on the answer alone."""
    pool_layer: int = -1
    """Encoder layer whose states are pooled: -1 the last (the paper's), 1 the first block's output."""
    calibrate: bool = False
    """Standardise E_pred's input over the training goals."""
    reconstruction: float = 0.0
    """Weight of naming the goal's tokens from P0 in stage 2; 0 is the paper's VICReg alone."""
    train_encoder: bool = False
    """E_pred trains on in stage 3; the paper's list for that stage does not name it."""
    mask_prompt: float = 0.0
    """p of stage 3b: rows whose text prompt is replaced by filler. 0 is Standard."""


STATIC_ARMS = {
    "static_faithful": StaticArm(),
    "static_scored": StaticArm(scored="answer"),
    "static_pooling": StaticArm(scored="answer", pool_layer=1, calibrate=True),
    "static": StaticArm(scored="answer", pool_layer=1, calibrate=True, reconstruction=10.0),
}
"""Each arm adds a change to the one before it, a ladder from the paper's method to ours: the loss of stage 3; pooling
(where, and on what scale: neither does it alone); the objective of stage 2."""


@dataclass(frozen=True, kw_only=True)
class Recall(Hunted):
    """Settings of LS-AR Table 1."""

    table: str = "lsar.table1"
    """The name it is run under."""
    arms: tuple[str, ...] = ("baseline", *STATIC_ARMS)
    """Arms to train. `static_faithful` is the paper's method, `static` ours; those between add one change each."""
    horizons: tuple[int, ...]
    """H, distractor tokens between goal and question, one test set each."""
    haystack: str | None = None
    """Text file to take distractor sentences from; None for the built-in bank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distinct(arms=("baseline", *STATIC_ARMS), horizons=None)
        if self.stage2.batch_size < 2:
            raise ValueError(f"stage2.batch_size is {self.stage2.batch_size}; a variance over rows needs two or more")
        if self.stage2.gradient_checkpointing:
            raise ValueError("stage2.gradient_checkpointing is on, but E_pred has no blocks to recompute; turn it off")


def table1(scale: Scale) -> Recall:
    """The experiment at one of its scales. A variant is `dataclasses.replace(table1(scale), ...)`."""
    if scale == "paper":
        # CHOICE(LS-AR, B.3.3): batch 32 in every stage (the paper names it for stage 2); 30 epochs of 50,000 problems.
        steps = 30 * 50_000 // 32
        loop = LoopConfig(steps=steps, batch_size=32, learning_rate=1e-4, precision="bf16", save_every=2000)
        return Recall(
            scale="paper",
            window=500,
            horizons=(64, 128, 256, 480, 512, 1024, 2048, 4096, 8192, 16384),
            train_problems=50_000,
            encoder=Backbone(layers=4),
            baseline=Backbone(layers=20),
            goal_width=512,
            stage1=loop,
            stage2=replace(loop, learning_rate=2e-4, precision="fp32"),
            stage3=loop,
        )
    if scale == "cpu":
        window = 48
        loop = LoopConfig(steps=300, batch_size=32, learning_rate=2e-3)
        return Recall(
            scale="cpu",
            window=window,
            # The paper's H / W of 0.13, 0.26, 0.5, then the cut prompt, 1.02, 1.25, 2.05 and far beyond.
            horizons=(6, 12, 24, 36, 49, 60, 96, 768),
            train_problems=40_000,
            vocabulary="subset",
            encoder=Backbone(layers=2, width=96, heads=4),
            baseline=Backbone(layers=4, width=96, heads=4),
            goal_width=96,
            stage1=loop,
            stage2=replace(loop, steps=1500, batch_size=256),
            stage3=replace(loop, steps=1600),
        )
    if scale == "smoke":
        loop = LoopConfig(steps=4, batch_size=8, learning_rate=1e-3, log_every=1)
        return Recall(
            scale="smoke",
            window=48,
            horizons=(12, 36, 60, 96),
            train_problems=64,
            test_problems=24,
            vocabulary="subset",
            encoder=Backbone(layers=1, width=32, heads=2),
            baseline=Backbone(layers=2, width=32, heads=2),
            goal_width=32,
            stage1=loop,
            stage2=loop,
            stage3=loop,
        )
    raise ValueError(f"scale is {scale!r}; use smoke, cpu or paper")


def published(arm: str, metric: str, where: dict[str, Any]) -> float | None:
    """The paper's value for a cell of the same H / W (its H = 128 and 1024 at W = 500), mean of 5 seeds; None where it
    has none. Both LS-AR arms face the paper's one."""
    ratio = where["H"] / where["W"]
    columns = [k for k, paper in enumerate((128 / 500, 1024 / 500)) if math.isclose(ratio, paper, rel_tol=0.05)]
    rows = {
        ("baseline", "item_exact"): (1.0, 0.0),
        ("baseline", "code_token"): (0.398, 0.0),
        ("static", "item_exact"): (1.0, 1.0),
        ("static", "code_token"): (0.928, 0.844),
    }
    row = rows.get(("static" if arm in ("static", "static_faithful") else arm, metric))
    return row[columns[0]] if row and columns else None


# ---------------------------------------------------------------- training and measuring


class RecallWork(HuntWork[Recall]):
    """Problems, models and stages of one run."""

    @cached_property
    def sentences(self) -> list[str] | None:
        """Distractors from the user's file."""
        return treasure.load_haystack(self.settings.haystack) if self.settings.haystack else None

    @cached_property
    def tests(self) -> dict[int, list[treasure.TreasureProblem]]:
        """H -> test problems."""
        e, encode = self.settings, self.vocabulary.encode
        return {h: treasure.problems(e.split, e.test_problems, [h], 0, encode, self.sentences) for h in e.horizons}

    @cached_property
    def training(self) -> list[treasure.TreasureProblem]:
        """Training problems."""
        e, probe = self.settings, next(iter(self.tests.values()))[0]
        horizons = training_horizons(e.window, probe)
        return treasure.problems("train", e.train_problems, horizons, e.seed, self.vocabulary.encode, self.sentences)

    def check(self) -> None:
        """Makes all problems, which finds a file or a window that does not fit."""
        check_window(self.settings.window, next(iter(self.tests.values()))[0])
        assert self.training

    def data_hash(self) -> str:
        """Of training and test problems."""
        return treasure.data_hash([*self.training, *(p for problems in self.tests.values() for p in problems)])

    def origin(self, command: str) -> dict[str, Any]:
        """As always; and the first test set is written down, to be looked at."""
        found, first = super().origin(command), self.settings.horizons[0]
        path = self.directory / f"{self.settings.split}-H{first}.jsonl"
        treasure.write_jsonl(self.tests[first], path, self.vocabulary.decode)
        return found

    def jobs(self) -> list[Job]:
        """E_base, which every LS-AR arm starts from, and the arms."""
        e, made = self.settings, []
        if any(arm != "baseline" for arm in e.arms):
            made.append(Job(name="base", work=lambda: self.base("base"), stages=self._stages("base", "stage1")))
        for arm in e.arms:
            steered = arm != "baseline"
            made.append(
                Job(
                    name=arm,
                    work=lambda arm=arm: self.arm(arm),
                    needs=("base",) if steered else (),
                    stages=self._stages(arm, "stage2" if steered else "stage1", "stage3"),
                    weight=1.0 if steered else 2.0,
                )
            )
        return made

    def _stages(self, folder: str, *stages: str) -> dict[Path, int]:
        return {self.directory / folder / stage: getattr(self.settings, stage).steps for stage in stages}

    def arm(self, arm: str) -> Measured:
        """Train and measure one arm."""
        model, modules = self.baseline() if arm == "baseline" else self.static(arm, STATIC_ARMS[arm])
        window, outcomes = self.settings.window, []
        for horizon, problems in self.tests.items():
            goals, decode = self.goals(model, problems), self.vocabulary.decode
            scores = rows(answer_treasure(model, problems, window=window, decode=decode, goals=goals))
            where = {"H": horizon, "W": window}
            outcomes += [Outcome(arm=arm, metric=metric, where=where, values=of) for metric, of in scores.items()]
        drawn = {"tsne": self.tsne(model)} if arm in PAPER_ARMS else {}
        return Measured(outcomes=outcomes, facts={"parameters": parameter_count(*modules)}, drawn=drawn)

    def tsne(self, model: Any) -> dict[str, Any]:
        """Figure 4b: 100 problems at the H nearest 2 W."""
        window = self.settings.window
        horizon = min(self.tests, key=lambda h: abs(h - 2 * window))
        problems = self.tests[horizon][:100]
        states = treasure_states(model, problems, window=window, goals=self.goals(model, problems))
        drawn = project(states, [problem.item for problem in problems], seed=self.settings.seed)
        return {**drawn, "H": horizon, "W": window}

    def baseline(self) -> tuple[Any, list[Any]]:
        """The unconditioned decoder: language modelling, then the answers, for as many steps as LS-AR has."""
        model = self.fresh(self.settings.baseline)
        self.lm("baseline", "stage1", ScoredLM(model), scored="all")
        self.lm("baseline", "stage3", ScoredLM(model))
        return model.eval(), [model]

    def static(self, arm: str, spec: StaticArm) -> tuple[AttachedLM, list[Any]]:
        """LS-AR (Static): shared stage 1, then E_pred, then decoder and FiLM."""
        base = self.base("base")
        model = self.attached(base, pool_layer=spec.pool_layer)
        pooled = self.align(arm, model, arm, calibrate=spec.calibrate, reconstruction=spec.reconstruction)
        model.channel.encoder.requires_grad_(spec.train_encoder)
        self.lm(arm, "stage3", ScoredLM(model), scored=spec.scored, pooled=pooled, mask=spec.mask_prompt)
        return model.eval(), [model.lm, base, model.channel]

    def goals(self, model: Any, problems: Sequence[treasure.TreasureProblem]) -> LatentState | None:
        """Latent states of the problems' prompts; None for a model without a channel."""
        if not isinstance(model, AttachedLM):
            return None
        with torch.no_grad():
            return model.encode_goal([problem.goal_ids for problem in problems])

    def notes(self, found: Found) -> list[str]:
        """How the numbers were made."""
        notes = [
            "Chance is 8.3% for the item (1 of 12) and about 0.01% for a whole code.",
            "The window is a recomputation of the last W tokens at positions 0 to W-1: nothing older reaches a logit.",
            "Every arm trains on the same problems and takes the same steps; the baseline takes stage 1 and stage 3.",
        ]
        if found.calls > 1:
            notes.append(
                f"The run was stopped and resumed: {found.calls} calls. The wall time is that of the last one."
            )
        if self.settings.scale == "cpu":
            notes.append(
                "Scaled down from the paper (W 500 to 48, d 512 to 96, BPE cut to the task's tokens); H / W is kept, "
                "and paper values stand at cells of the same H / W. They compare shapes, not levels."
            )
        return notes


def check_window(window: int, problem: treasure.TreasureProblem) -> None:
    """Refuse a window that cannot hold the question and its answer.

    Raises:
        ValueError: W is smaller than trigger and answer together.
    """
    need = len(problem.trigger_ids) + len(problem.answer_ids)
    if window < need:
        raise ValueError(f"the window is {window} tokens, but trigger and answer alone take {need}; make it larger")


def training_horizons(window: int, problem: treasure.TreasureProblem) -> list[int]:
    """The H of training problems: half with the whole prompt in view (short ones more often), a quarter around the cut
    prompt, a quarter beyond the window. Every arm, the baseline too, trains on this mixture."""
    around = len(problem.trigger_ids) + len(problem.answer_ids)
    goal = len(problem.goal_ids)
    whole = max(1, window - around - goal)
    cut = range(max(1, whole - 1), max(2, window - around + 4))
    beyond = range(max(2, window - around), 2 * window)
    count = 64
    short = [round(math.exp(math.log(whole) * k / (2 * count - 1))) for k in range(2 * count)]
    return short + _spread(cut, count) + _spread(beyond, count)


def _spread(values: range, count: int) -> list[int]:
    return [values[len(values) * k // count] for k in range(count)]


# ---------------------------------------------------------------- the report

PAPER_ARMS = ("baseline", "static_faithful", "static")
"""The paper's arms and our best one: those of the opening lines and of Figure 4b."""


def past_window(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """(H, W) nearest to H = 2 W among those with H > W where every arm has every metric; None where there is none."""
    held: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for entry in entries:
        held.setdefault((entry.where.get("H", 0), entry.where.get("W", 0)), set()).add((entry.arm, entry.metric))
    whole = {(entry.arm, entry.metric) for entry in entries}
    places = [(h, w) for (h, w), cells in held.items() if h > w > 0 and cells == whole]
    return min(places, key=lambda place: abs(math.log2(place[0] / (2 * place[1]))), default=None)


def lead(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Iterator[str]:
    """What is left once the prompt has left the window, in a few lines."""
    drawn = [e for e in entries if e.metric in ("item_exact", "code_exact")]
    place = past_window(drawn)
    if place is None:
        return
    here = [e for e in drawn if (e.where["H"], e.where["W"]) == place and e.arm in PAPER_ARMS]
    yield f"At H = {place[0]} ({place[0] / place[1]:.3g} W) the prompt is out of view. In percent:"
    for metric in dict.fromkeys(e.metric for e in here):
        said = ", ".join(f"{looks[e.arm].name} {parts(e)[0]}" for e in here if e.metric == metric)
        yield f"{METRICS[metric].title}: {said}"


def sections(page: Page) -> Iterator[Section]:
    """Recall over the distance H and, with arms beyond the paper's, what each change bought."""
    drawn = [e for e in page.entries if {"H", "W"} <= e.where.keys() and e.metric in ("item_exact", "code_exact")]
    if not drawn:
        return
    caption = (
        "Share of problems answered after H tokens. Right of the dashed line the prompt has left the window W and only "
        "a channel beside the text can still carry it. Bands: 95% intervals."
    )
    figure = page.figure("recall", "Recall over H, by arm", recall_figure(drawn, page.looks), caption)
    yield Section("Recall over distance (Fig. 4a)", figure)
    place = past_window(drawn)
    if place and any(entry.arm not in PAPER_ARMS for entry in drawn):
        here = [e for e in drawn if (e.where["H"], e.where["W"]) == place]
        metrics = list(dict.fromkeys(entry.metric for entry in here))
        where = conditions(here[0].where)
        panels = {f"{METRICS[m].title} ({where})": [e for e in here if e.metric == m] for m in metrics}
        caption = (
            f"All arms at H = {place[0]} ({place[0] / place[1]:.3g} W), the prompt out of view. Lines: 95% intervals."
        )
        figure = page.figure("ablation", "Arms compared", bars_figure(panels, page.looks), caption)
        yield Section("What bought what", figure + page.ladder(here))


def recall_figure(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Any:
    """Recall over the distance H, one panel a metric, the window W and chance marked."""
    by_metric = {m: [e for e in entries if e.metric == m] for m in dict.fromkeys(e.metric for e in entries)}
    panels = {METRICS[metric].title: arm_lines(chosen, looks) for metric, chosen in by_metric.items()}
    figure = lines_figure(panels, "H", xlabel="H, tokens between prompt and question (log scale)")
    windows = sorted({entry.where["W"] for entry in entries})
    ticks = list(windows)
    for value in sorted({entry.where["H"] for entry in entries}):
        if all(abs(math.log2(value / tick)) > 0.6 for tick in ticks):
            ticks.append(value)
    for axis, metric in zip(figure.axes, by_metric, strict=False):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        for window in windows:
            axis.axvline(window, color="#333333", linestyle="--", linewidth=1.2, zorder=2)
            # Left of the line: where recall falls, it falls on the right.
            place = {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right", "va": "center", "rotation": 90}
            axis.annotate(f"window W = {window}", (window, 50), **place, fontsize=9, color="#333333")
        if METRICS[metric].chance is not None:
            chance = 100 * (METRICS[metric].chance or 0.0)
            axis.axhline(chance, color="#999999", linestyle=":", linewidth=1.2, zorder=2)
            place = {"xycoords": ("axes fraction", "data"), "xytext": (4, 3), "textcoords": "offset points"}
            axis.annotate(f"chance {chance:.1f}", (0, chance), **place, fontsize=8, color="#666666")
    return figure


METRICS = {
    "item_exact": Metric("Item, exact match", chance=1 / 12),
    "code_exact": Metric("Passcode, whole code"),
    "code_token": Metric("Passcode, by sub-word token"),
}
TABLES = [
    Table(
        name="lsar.table1",
        heading="LS-AR, Table 1: Treasure Hunt",
        at=table1,
        work=RecallWork,
        metrics=METRICS,
        arms={
            "baseline": Look("AR baseline", GREY),
            "static_faithful": Look("LS-AR Static (faithful)", RED),
            "static_scored": Look("+ loss on the answer only"),
            "static_pooling": Look("+ first-block pooling, standardised"),
            "static": Look("LS-AR Static (ours)", BLUE),
        },
        paper=published,
        lead=lead,
        sections=sections,
        flops=lambda e: training_flops(e, e.window, faithful=("static_faithful",)),
    )
]
