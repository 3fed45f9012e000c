"""LS-AR Table 5, run: every arm trained, and asked what it does when text and vector state different goals."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sidestream.channels import LatentState
from sidestream.evaluation.attacks_vector import noise_like
from sidestream.evaluation.planning import run_episodes
from sidestream.evaluation.stats import wilson
from sidestream.experiments.results import load_results
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.decode import greedy
from sidestream.lm.models.backbones import parameter_count
from sidestream.papers.authority import CONDITIONS, METRICS, UTILITY, Table5, Trained, paper_table5
from sidestream.papers.authority_models import AuthorityPlans, HuntModels, blank_goal
from sidestream.papers.experiment import open_run, record_call, write_results, write_whole
from sidestream.papers.names import arm_name
from sidestream.papers.workers import default_jobs, run_arms
from sidestream.tasks import treasure
from sidestream.tasks.blocksworld import Problem
from sidestream.tasks.blocksworld_data import GOAL, PLAN, prompt_text
from sidestream.tasks.blocksworld_loop import Episode, make_episode
from sidestream.tasks.treasure import TreasureProblem

Outcome = str
"""`a`, `b` or `neither`: whose goal an answer or a plan reached; `mixed`: one goal's item with the other's passcode."""


def run_table5(
    experiment: Table5, directory: Path, *, command: str, resume: bool = False, jobs: int | None = None
) -> dict[str, Any]:
    """Train and evaluate every arm into `directory`; returns what it writes to results.json.

    Args: as for `run_table1`.
    """
    run = _Run(experiment, directory)
    digest = treasure.data_hash(run.hunt.tests)
    if "blocksworld" in experiment.tasks:
        run.plans.tests  # noqa: B018 - too few pairs are told before anything is trained
    open_run(directory, experiment, resume=resume)
    if (directory / "results.json").exists():
        return load_results(directory / "results.json")
    origin = record_call(directory, command, digest)
    started = time.monotonic()
    models = [trained for task in experiment.tasks for trained in experiment.trained(task)]
    run.prepare()
    jobs = default_jobs(len(models), experiment.scale) if jobs is None else jobs
    if jobs == 1:
        for trained in models:
            run.evaluate(trained)
    else:
        # The longest first, so that no worker is left with one at the end.
        order = sorted(models, key=lambda trained: (trained.arm != "ball", trained.arm != "baseline"))
        folders = {trained.name: run.folders(trained) for trained in models}
        run_arms(partial(_worker, experiment, directory), [t.name for t in order], jobs=jobs, folders=folders)
    records = {trained.name: json.loads(run.record(trained).read_text(encoding="utf-8")) for trained in models}
    cells = [cell for record in records.values() for cell in record["cells"]]
    return write_results(
        experiment,
        directory,
        origin,
        started,
        parameters={name: record["parameters"] for name, record in records.items()},
        notes=_notes(experiment, cells),
        cells=cells,
    )


def _worker(experiment: Table5, directory: Path, name: str) -> None:
    trained = next(t for task in experiment.tasks for t in experiment.trained(task) if t.name == name)
    _Run(experiment, directory, show=False).evaluate(trained)


class _Run:
    def __init__(self, experiment: Table5, directory: Path, *, show: bool = True) -> None:
        self.experiment = experiment
        self.directory = directory
        self.hunt = HuntModels(experiment, directory, show=show)
        self.plans = AuthorityPlans(experiment, directory, show=show)

    def prepare(self) -> None:
        """Stages 1 and 2, which arms share and workers must not train at once."""
        for task, models in (("treasure", self.hunt), ("blocksworld", self.plans)):
            steered = [t for t in self.experiment.trained(task) if t.curriculum.channel != "closed"]  # type: ignore[arg-type]
            if task in self.experiment.tasks and steered:
                models.prepare()

    def record(self, trained: Trained) -> Path:
        return self.directory / trained.name / "arm.json"

    def folders(self, trained: Trained) -> list[tuple[Path, int]]:
        """Stage folders of a model and their steps, for the progress display."""
        source: Any = self.experiment if trained.task == "treasure" else self.experiment.blocksworld
        folder = self.directory / trained.name
        if trained.curriculum.channel != "closed":
            return [(folder / "stage3", source.stage3.steps)]
        if trained.task == "blocksworld":
            folder = self.plans.directory / "baseline"
        return [(folder / "stage1", source.stage1.steps), (folder / "stage3", source.stage3.steps)]

    def evaluate(self, trained: Trained) -> None:
        """Train one model and put it under every condition; everything it did is in its folder."""
        if self.record(trained).exists():
            return
        closed = trained.curriculum.channel == "closed"
        if trained.task == "treasure":
            model, modules = self.hunt.load(trained)
            ask: Callable[..., list[Outcome]] = partial(ask_treasure, model, self.hunt, closed=closed)
        else:
            model, modules = self.plans.trained(trained)
            ask = partial(ask_plans, model, self.plans, closed=closed)
        found: dict[str, list[Outcome]] = {}
        for condition, (text, vector) in CONDITIONS.items():
            # What a vector says makes no difference to a decoder without one.
            if not closed or text == vector:
                found[condition] = ask(text, vector)
        cells = [cell for condition, outcomes in found.items() for cell in _cells(trained, condition, outcomes)]
        folder = self.directory / trained.name
        write_whole(folder / "outcomes.json", json.dumps(found))
        write_whole(folder / "arm.json", json.dumps({"cells": cells, "parameters": parameter_count(*modules)}))


def ask_treasure(model: Any, hunt: HuntModels, text: str, vector: str, *, closed: bool) -> list[Outcome]:
    """Whose passcode and item a model names, for each pair of test problems.

    Args:
        text: `a` or `b`, the goal that the text states, or `none`: distractors in its place, as in training.
        vector: `a`, `b`, `noise`, or `none`: the channel is closed.
        closed: the model has no channel.
    """
    pairs = list(zip(hunt.tests, hunt.partners, strict=True))
    # CHOICE(LS-AR, Table 5): a blank vector is a closed channel, the decoder as it is without FiLM.
    state = (
        None if closed or vector == "none" else _vectors(model, vector, [(a.goal_ids, b.goal_ids) for a, b in pairs])
    )
    filler, rng = hunt.filler, random.Random("blank text")
    forced = []
    for a, b in pairs:
        goal = b.goal_ids if text == "b" else a.goal_ids
        if text == "none":
            start = rng.randrange(len(filler) - len(goal))
            goal = tuple(filler[start : start + len(goal)])
        forced.append(goal + a.distractor_ids + a.trigger_ids)
    longest = max(len(problem.answer_ids) for pair in pairs for problem in pair)
    said = greedy(model, forced, new_tokens=longest, window=hunt.experiment.window, goal=state)
    return [_named(pair, ids, hunt.vocabulary.decode) for pair, ids in zip(pairs, said, strict=True)]


def _named(pair: tuple[TreasureProblem, TreasureProblem], said: Sequence[int], decode: Any) -> Outcome:
    a, b = (treasure.score(problem, said, decode).values for problem in pair)
    for values, outcome in ((a, "a"), (b, "b")):
        if values["item_exact"] == values["code_exact"] == 1:
            return outcome
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


def ask_plans(model: AttachedLM, plans: AuthorityPlans, text: str, vector: str, *, closed: bool) -> list[Outcome]:
    """Whose goal a model's plan comes to, `a`, `b` or `neither`, for each pair of test problems.

    Args: as for `ask_treasure`; a blank text keeps the initial state.
    """
    encode, pairs = plans.vocabulary.encode, plans.tests
    prompts = [(prompt_text(a), prompt_text(b)) for a, b in pairs]
    state = None
    if not closed and vector != "none":
        state = _vectors(model, vector, [(encode(a), encode(b)) for a, b in prompts])
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
    made = make_episode(problem, perturbations=0, seed=0)
    return Asked(
        problem=problem,
        optimal_length=made.optimal_length,
        perturb_at=made.perturb_at,
        step_limit=made.step_limit,
        seed=made.seed,
        text=text,
    )


def _last(a: int | None, b: int | None) -> Outcome:
    # CHOICE(LS-AR, Table 5): a state on the way to one goal may be the other. Of both, the later one was meant.
    if a is None and b is None:
        return "neither"
    return "a" if b is None or (a is not None and a > b) else "b"


@torch.no_grad()
def _vectors(model: AttachedLM, vector: str, goals: Sequence[tuple[Sequence[int], Sequence[int]]]) -> LatentState:
    state = model.encode_goal([list(b if vector == "b" else a) for a, b in goals])
    if vector != "noise":
        return state
    assert state.goal is not None
    return model.encode_goal(LatentState(goal=noise_like(state.goal, 0)))


def _cells(trained: Trained, condition: str, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    made, n = [], len(outcomes)
    counts = {metric: outcomes.count(metric.removeprefix("goal_")) for metric in METRICS}
    if trained.task == "treasure":
        # Of those that are neither's; where authority is split, it may be split by the parts of a goal.
        counts["mixed"] = outcomes.count("mixed")
        counts["neither"] += counts["mixed"]
    for metric, count in counts.items():
        made.append(
            {
                "arm": trained.arm,
                "where": {"task": trained.task, "p": trained.mask, "condition": condition},
                "metric": metric,
                "value": count / n,
                "n": n,
                "ci": list(wilson(count, n)),
                "paper": paper_table5(trained.arm, trained.mask, condition, metric),
            }
        )
    return made


def _notes(experiment: Table5, cells: Sequence[dict[str, Any]]) -> list[str]:
    notes = [
        "Conditions are (what the text states, what the vector says). An answer is A's or B's if item and passcode "
        "are; a plan is A's or B's if it reaches that goal, of both the later. Blank text: the goal replaced by "
        "filler, as in training; blank vector: the channel closed. Every text is wholly in view.",
        "Arms of a task share stage 1 and E_pred; only stage 3 differs. p = 0 is Standard.",
        "The paper names no data set: its values stand beside both tasks and compare directions, not levels.",
    ]
    weak = []
    for cell in cells:
        where = cell["where"]
        if cell["metric"] == "goal_a" and where["condition"] == "(A, A)" and cell["value"] < UTILITY:
            name = arm_name(cell["arm"], experiment.table)
            weak.append(f"{name} p = {where['p']:g} on {where['task']} ({100 * cell['value']:.1f}%)")
    if weak:
        notes.append(
            f"Utility first: aligned success is below {100 * UTILITY:.0f}% for {', '.join(weak)}. Whose goal such a "
            "model follows is not to be read from this table."
        )
    return notes
