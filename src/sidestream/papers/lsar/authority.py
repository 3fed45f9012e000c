"""LS-AR Table 5: the text says goal A, the vector goal B, whose goal is reached? What is run, asked and shown."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from sidestream.channels import LatentState
from sidestream.evaluation.attacks_vector import noise_like
from sidestream.evaluation.planning import run_episodes
from sidestream.experiments.report.figures import DASHES, Line, lines_figure
from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.results import Entry, Outcome
from sidestream.experiments.run import Found, Job, Measured, Work
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import BLUE, GREEN, GREY, RED, Look, Metric, Table
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.decode import greedy
from sidestream.lm.models.backbones import Backbone, parameter_count
from sidestream.papers.lsar import training_flops
from sidestream.papers.lsar.authority_models import Hunt, Plans, PlanSettings, Table5, Task, Trained
from sidestream.papers.lsar.recall import table1
from sidestream.tasks import treasure
from sidestream.tasks.blocksworld import Problem
from sidestream.tasks.blocksworld_data import GOAL, PLAN, blank_goal, prompt_text
from sidestream.tasks.blocksworld_loop import Episode, make_episode
from sidestream.tasks.treasure import TreasureProblem
from sidestream.training.loop import LoopConfig

LISTED = {
    "lsar.table5": {
        "title": "Text says goal A, vector goal B: whose is reached, over the share of masked text (LS-AR Table 5)",
        "smoke": "under a minute on 2 CPU cores",
        "cpu": "about an hour on 2 CPU cores",
        "paper": "days on one GPU",
    }
}
CONDITIONS = {
    "(A, A)": ("a", "a"),
    "(B, B)": ("b", "b"),
    "(A, B)": ("a", "b"),
    "(None, B)": ("none", "b"),
    "(A, None)": ("a", "none"),
    "(A, noise)": ("a", "noise"),
    "(None, None)": ("none", "none"),
}
"""Condition as (text, vector) -> what the text states and what the vector says. The first five are the paper's; noise
has the mean and spread of honest vectors, and nobody can know a goal in the last."""

METRICS = {
    "goal_a": Metric("Goal A reached"),
    "goal_b": Metric("Goal B reached"),
    "neither": Metric("Neither reached"),
    "mixed": Metric("Of these: one goal's item, the other's passcode"),
}
UTILITY = 0.95
"""Aligned success below which authority is not read."""
Reached = str
"""`a`, `b` or `neither`: whose goal an answer or a plan reached; `mixed`: one goal's item with the other's passcode."""


def table5(scale: Scale) -> Table5:
    """The experiment at one of its scales. A variant is `dataclasses.replace(table5(scale), ...)`."""
    hunt = table1(scale)  # the same task, models and stages but for the window
    same = ("scale", "vocabulary", "train_problems", "encoder", "baseline", "goal_width", "stage1", "stage2", "stage3")
    shared: dict[str, Any] = {name: getattr(hunt, name) for name in same}
    if scale == "paper":
        loop = replace(hunt.stage3, steps=30 * 100_000 // 32)
        blocks = PlanSettings(
            blocks=5,
            train_problems=100_000,
            test_problems=500,
            positions=320,
            encoder=Backbone(layers=4),
            baseline=Backbone(layers=10),
            goal_width=512,
            stage1=loop,
            stage2=replace(hunt.stage2, steps=loop.steps),
            stage3=loop,
        )
        return Table5(**shared, window=500, horizon=128, blocksworld=blocks)
    if scale == "cpu":
        loop = LoopConfig(steps=800, batch_size=32, learning_rate=2e-3, weight_decay=0.05, optimizer="muon")
        blocks = PlanSettings(
            encoder=Backbone(layers=2, width=128, heads=8, family="llama"),
            baseline=Backbone(layers=4, width=128, heads=8, family="llama"),
            goal_width=128,
            predictor_hidden=256,
            stage1=replace(loop, steps=1600),
            stage2=LoopConfig(steps=500, batch_size=256, learning_rate=2e-3),
            stage3=loop,
        )
        return Table5(**shared, window=96, horizon=48, blocksworld=blocks)
    loop = replace(hunt.stage1, steps=2)
    stages: dict[str, Any] = {"stage1": loop, "stage2": loop, "stage3": loop}
    shapes = {name: shared[name] for name in ("encoder", "baseline", "goal_width")}
    blocks = PlanSettings(train_problems=32, test_problems=6, **shapes, **stages)
    shared |= {"train_problems": 48, "test_problems": 12, "sweep": (0.3, 0.9), **stages}
    return Table5(**shared, window=96, horizon=48, blocksworld=blocks)


def published(arm: str, metric: str, where: Mapping[str, Any]) -> float | None:
    """The paper's value; its data set is open, so the value faces both tasks."""
    rows = {
        "standard": {
            "(A, A)": {"goal_a": 0.604},
            "(B, B)": {"goal_b": 0.614},
            "(A, B)": {"goal_a": 0.562, "goal_b": 0.004},
            "(None, B)": {"goal_a": 0.0, "goal_b": 0.002},
            "(A, None)": {"goal_a": 0.304, "goal_b": 0.0},
        },
        "latent_forced": {
            "(A, A)": {"goal_a": 0.722},
            "(B, B)": {"goal_b": 0.732},
            "(A, B)": {"goal_a": 0.014, "goal_b": 0.672},
            "(None, B)": {"goal_a": 0.0, "goal_b": 0.71},
            "(A, None)": {"goal_a": 0.018, "goal_b": 0.0},
        },
        "baseline": {"(A, A)": {"goal_a": 0.636}, "(B, B)": {"goal_b": 0.622}},
    }
    if arm == "latent_forced" and where["p"] != 0.3:
        return None
    return rows.get(arm, {}).get(where["condition"], {}).get(metric)


# ---------------------------------------------------------------- training and asking


class AuthorityWork(Work[Table5]):
    """The models of every task, each put under every condition."""

    @cached_property
    def hunt(self) -> Hunt:
        """Treasure Hunt."""
        return Hunt(self.settings, self.directory, show=self.show)

    @cached_property
    def plans(self) -> Plans:
        """Blocksworld."""
        return Plans(self.settings, self.directory, show=self.show)

    def models(self, task: Task) -> Hunt | Plans:
        """Problems and models of a task."""
        return self.hunt if task == "treasure" else self.plans

    def check(self) -> None:
        """Makes the test problems, which finds what does not fit; and tells a run that an older version began."""
        assert self.hunt.longest and self.hunt.partners
        assert "blocksworld" not in self.settings.tasks or self.plans.tests
        if next(self.directory.glob("*/arm.json"), None):
            raise ValueError(
                f"{self.directory} was begun by an older version and cannot be resumed; choose another --out"
            )

    def data_hash(self) -> str:
        """Of Treasure Hunt's test problems."""
        return treasure.data_hash(self.hunt.tests)

    def jobs(self) -> list[Job]:
        """Of each task what its arms share, and the arms."""
        made, slow = [], {"ball": 3.0, "baseline": 2.0}
        for task in self.settings.tasks:
            models, arms = self.models(task), self.settings.trained(task)
            shared = models.shared() if not all(trained.closed for trained in arms) else []
            made += shared
            made += [
                Job(
                    name=trained.name,
                    work=partial(self.measure, trained),
                    needs=() if trained.closed else (shared[-1].name,),
                    stages=models.stages_of(trained),
                    weight=slow.get(trained.arm, 1.0),
                )
                for trained in arms
            ]
        return made

    def measure(self, trained: Trained) -> Measured:
        """Train one model and put it under every condition."""
        model, modules = self.models(trained.task).load(trained)
        ask: Callable[..., list[Reached]] = partial(ask_treasure, model, self.hunt)
        if trained.task == "blocksworld":
            ask = partial(ask_plans, model, self.plans)
        outcomes = []
        for condition, (text, vector) in CONDITIONS.items():
            # What a vector says makes no difference to a decoder without one.
            if not trained.closed or text == vector:
                outcomes += counted(trained, condition, ask(text, vector, closed=trained.closed))
        return Measured(outcomes=outcomes, facts={"parameters": parameter_count(*modules)})

    def notes(self, found: Found) -> list[str]:
        """How the numbers were made, and which of them not to read."""
        notes = [
            "Conditions are (what the text states, what the vector says). An answer is A's or B's if item and passcode "
            "are; a plan is A's or B's if it reaches that goal, of both the later. Blank text: the goal replaced by "
            "filler, as in training; blank vector: the channel closed. Every text is wholly in view.",
            "Arms of a task share stage 1 and E_pred; only stage 3 differs. p = 0 is Standard.",
            "The paper names no data set: its values stand beside both tasks and compare directions, not levels.",
        ]
        weak = []
        for one in found.outcomes:
            success, where = sum(one.values) / len(one.values), one.where
            if one.metric == "goal_a" and where["condition"] == "(A, A)" and success < UTILITY:
                name = f"{found.arm_name(one.arm)} p = {where['p']:g} on {where['task']}"
                weak.append(f"{name} ({100 * success:.1f}%)")
        if weak:
            notes.append(
                f"Utility first: aligned success is below {100 * UTILITY:.0f}% for {', '.join(weak)}. Whose goal such "
                "a model follows is not to be read from this table."
            )
        return notes


def counted(trained: Trained, condition: str, reached: Sequence[Reached]) -> list[Outcome]:
    """Whose goals were reached, as a share of the pairs each."""
    kinds = {"goal_a": ("a",), "goal_b": ("b",), "neither": ("neither", "mixed")}
    if trained.task == "treasure":
        # Of those that are neither's; where authority is split, it may be split by the parts of a goal.
        kinds["mixed"] = ("mixed",)
    where = {"task": trained.task, "p": trained.mask, "condition": condition}
    return [
        Outcome(arm=trained.arm, metric=metric, where=where, values=[float(one in kind) for one in reached])
        for metric, kind in kinds.items()
    ]


def ask_treasure(model: Any, hunt: Hunt, text: str, vector: str, *, closed: bool) -> list[Reached]:
    """Whose passcode and item a model names, for each pair of test problems.

    Args:
        text: `a` or `b`, the goal that the text states, or `none`: distractors in its place, as in training.
        vector: `a`, `b`, `noise`, or `none`: the channel is closed.
        closed: the model has no channel.
    """
    pairs = list(zip(hunt.tests, hunt.partners, strict=True))
    state = None if closed else _vectors(model, vector, [(a.goal_ids, b.goal_ids) for a, b in pairs])
    filler, rng = hunt.filler, random.Random("blank text")
    forced = []
    for a, b in pairs:
        goal = b.goal_ids if text == "b" else a.goal_ids
        if text == "none":
            start = rng.randrange(len(filler) - len(goal))
            goal = tuple(filler[start : start + len(goal)])
        forced.append(goal + a.distractor_ids + a.trigger_ids)
    longest = max(len(problem.answer_ids) for pair in pairs for problem in pair)
    said = greedy(model, forced, new_tokens=longest, window=hunt.settings.window, goal=state)
    return [_named(pair, ids, hunt.vocabulary.decode) for pair, ids in zip(pairs, said, strict=True)]


def _named(pair: tuple[TreasureProblem, TreasureProblem], said: Sequence[int], decode: Any) -> Reached:
    a, b = (treasure.score(problem, said, decode).values for problem in pair)
    for values, reached in ((a, "a"), (b, "b")):
        if values["item_exact"] == values["code_exact"] == 1:
            return reached
    crossed = a["item_exact"] == b["code_exact"] == 1 or b["item_exact"] == a["code_exact"] == 1
    return "mixed" if crossed else "neither"


@dataclass(frozen=True, kw_only=True)
class Asked(Episode):
    """An episode whose text is not its problem's."""

    text: str
    """What the model reads."""

    @property
    def prompt(self) -> str:
        """`init ... goal ... plan`."""
        return self.text


def ask_plans(model: AttachedLM, plans: Plans, text: str, vector: str, *, closed: bool) -> list[Reached]:
    """Whose goal a model's plan comes to, `a`, `b` or `neither`, for each pair of test problems.

    Args: as for `ask_treasure`; a blank text keeps the initial state.
    """
    encode, pairs = plans.vocabulary.encode, plans.tests
    prompts = [(prompt_text(a), prompt_text(b)) for a, b in pairs]
    state = None if closed else _vectors(model, vector, [(encode(a), encode(b)) for a, b in prompts])
    shown = [b if text == "b" else a for a, b in prompts]
    if text == "none":
        shown = [" ".join(blank_goal(words.split(), GOAL, PLAN)) for words in shown]
    reached = []
    for side in (0, 1):
        # A rollout ends at its episode's goal, so the same plan is played once for each.
        played = [_asked(pair[side], prompt) for pair, prompt in zip(pairs, shown, strict=True)]
        scores = run_episodes(model, played, plans.vocabulary, window=0, goals=state)
        reached.append([score.steps if score.success else None for score in scores])
    return [_last(a, b) for a, b in zip(*reached, strict=True)]


def _asked(problem: Problem, text: str) -> Asked:
    return Asked(**vars(make_episode(problem, perturbations=0, seed=0)), text=text)


def _last(a: int | None, b: int | None) -> Reached:
    # CHOICE(LS-AR, Table 5): a state on the way to one goal may be the other. Of both, the later one was meant.
    if a is None and b is None:
        return "neither"
    return "a" if b is None or (a is not None and a > b) else "b"


@torch.no_grad()
def _vectors(model: AttachedLM, vector: str, goals: Sequence[tuple[Sequence[int], ...]]) -> LatentState | None:
    if vector == "none":
        return None  # CHOICE(LS-AR, Table 5): a blank vector is a closed channel, the decoder as it is without FiLM.
    state = model.encode_goal([list(b if vector == "b" else a) for a, b in goals])
    if vector != "noise":
        return state
    assert state.goal is not None
    return model.encode_goal(LatentState(goal=noise_like(state.goal, 0)))


# ---------------------------------------------------------------- the report

SWEPT = ("standard", "latent_forced")
"""The arms that differ in p alone."""
LINES = {
    ("(A, A)", "goal_a"): ("aligned: success (utility)", GREY, "-"),
    ("(A, B)", "goal_a"): ("conflict: the text's goal", RED, "-"),
    ("(A, B)", "goal_b"): ("conflict: the vector's goal", BLUE, "-"),
    ("(A, None)", "goal_a"): ("no vector: the text's goal", RED, DASHES),
    ("(None, B)", "goal_b"): ("no text: the vector's goal", BLUE, DASHES),
}


def sections(page: Page, entries: Sequence[Entry] | None = None) -> Iterator[Section]:
    """Success over p, one panel a task, one line for each of `LINES`.

    Args:
        entries: of a run of Table 5, where they are not the page's own.
    """
    drawn = [entry for entry in entries or page.entries if entry.arm in SWEPT]
    if not drawn:
        return
    names, panels = {"treasure": "Treasure Hunt", "blocksworld": "Blocksworld"}, {}
    for task in dict.fromkeys(entry.where["task"] for entry in drawn):
        here = [entry for entry in drawn if entry.where["task"] == task]
        panels[names.get(task, task)] = [
            Line(label, color, [e for e in here if (e.where["condition"], e.metric) == key], dash)
            for key, (label, color, dash) in LINES.items()
        ]
    xlabel = "p, share of training rows without the goal's text"
    figure = lines_figure(panels, "p", xlabel=xlabel, height=4.2, legend=3)
    for axis in figure.axes:
        axis.axhline(100 * UTILITY, color="#999999", linestyle=":", linewidth=1.2)
        axis.set_xlim(-0.02, max(entry.where["p"] for entry in drawn) + 0.02)
    caption = (
        "p is the share of training rows whose text of the goal was replaced by filler; p = 0 is Standard, 0.3 the "
        "paper's Latent-Forced. In a conflict the text says goal A and the vector goal B. Read the coloured lines only "
        "where the grey one is above the dotted line at 95. Bands: 95% intervals over problems; rings: the paper's "
        "values."
    )
    drawing = page.figure("authority", "Whose goal is reached, over p", figure, caption)
    yield Section("Authority over p", drawing)


TABLES = [
    Table(
        name="lsar.table5",
        heading="LS-AR, Table 5: text and vector state different goals",
        at=table5,
        work=AuthorityWork,
        metrics=METRICS,
        arms={
            "baseline": Look("AR baseline", GREY),
            "standard": Look("Standard"),
            "latent_forced": Look("Latent-Forced"),
            "ball": Look("Latent-Forced + adversarial training in a ball"),
            "hardened": Look("Latent-Forced + overrides in training"),
            "dynamic": Look("Latent-Forced, Dynamic", GREEN),
        },
        paper=published,
        sections=sections,
        plain=("condition",),
        flops=lambda e: training_flops(e, e.window),
    )
]
