"""LS-AR Table 3, run: every arm trained and played in closed loop, and the files its report is made from."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.evaluation.planning import finish_episodes
from sidestream.evaluation.stats import mcnemar_exact, wilson
from sidestream.evaluation.tracking import movement_pairs, trigger_cost, vector_movement
from sidestream.experiments.results import load_results
from sidestream.lm.attach import AttachedLM
from sidestream.lm.models.backbones import parameter_count
from sidestream.papers.experiment import open_run, record_call, write_results, write_whole
from sidestream.papers.names import arm_name
from sidestream.papers.planning import ARMS, DERIVED, Table3, paper_table3
from sidestream.papers.planning_models import PlanModels
from sidestream.papers.workers import default_jobs, run_arms
from sidestream.tasks.blocksworld_data import END, data_hash
from sidestream.tasks.blocksworld_loop import Episode, episodes, score_rollout

COMPARED = {
    "faithful": ("dynamic", "static", "baseline", "baseline_whole"),
    "ours": ("dynamic_state", "static_pool", "baseline_pool", "baseline_pool_whole"),
}
"""Arms of each recipe that are tested against each other, the first against the others."""


def run_table3(
    experiment: Table3, directory: Path, *, command: str, resume: bool = False, jobs: int | None = None
) -> dict[str, Any]:
    """Train and evaluate every arm into `directory`; returns what it writes to results.json.

    Args: as for `run_table1`.
    """
    open_run(directory, experiment, resume=resume)
    if (directory / "results.json").exists():
        return load_results(directory / "results.json")
    models = PlanModels(experiment, directory)
    origin = record_call(directory, command, data_hash(models.training))
    started = time.monotonic()
    trained = [arm for arm in experiment.arms if arm in ARMS]
    jobs = default_jobs(len(trained), experiment.scale) if jobs is None else jobs
    recipes = list(dict.fromkeys(ARMS[arm].data for arm in trained))
    if jobs == 1:
        for recipe in recipes:
            _prepare(models, recipe)
        for arm in trained:
            _evaluate(models, arm)
    else:
        bases = {recipe: models.shared(recipe) for recipe in recipes}
        run_arms(partial(_prepare_worker, experiment, directory), recipes, jobs=jobs, folders=bases)
        folders = {arm: models.folders(arm) for arm in trained}
        run_arms(partial(_worker, experiment, directory), trained, jobs=jobs, folders=folders)
    records = {arm: json.loads((directory / arm / "arm.json").read_text(encoding="utf-8")) for arm in trained}
    found = {arm: cells for record in records.values() for arm, cells in record["cells"].items()}
    _pick_rollouts(models)
    _track(models, trained)
    return write_results(
        experiment,
        directory,
        origin,
        started,
        parameters={arm: record["parameters"] for arm, record in records.items()},
        notes=_notes(experiment, directory),
        cells=[cell for arm in experiment.arms for cell in found[arm]],
    )


def _prepare(models: PlanModels, recipe: str) -> None:
    """What the arms of a recipe share: E_base, its own prefixes, and stage 1 of the baselines."""
    models.base(recipe)
    models.own_prefixes(recipe)
    if len(models.shared(recipe)) > 1:
        models.bare(recipe)


def _prepare_worker(experiment: Table3, directory: Path, recipe: str) -> None:
    _prepare(PlanModels(experiment, directory, show=False), recipe)


def _worker(experiment: Table3, directory: Path, arm: str) -> None:
    _evaluate(PlanModels(experiment, directory, show=False), arm)


def _evaluate(models: PlanModels, arm: str) -> None:
    """Train one arm, play it and the arms derived from it, write arm.json."""
    directory, experiment = models.directory, models.experiment
    path = directory / arm / "arm.json"
    if path.exists():
        return
    model, modules = models.load(arm)
    derived = [name for name, source in DERIVED.items() if source == arm and name in experiment.arms]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (arm, *derived)}
    for where, tests in _tests(models, ARMS[arm].data):
        for name in found:
            player, goals = _player(models, arm, name, model, tests)
            for window in experiment.windows:
                place = {**where, "W": window}
                ends = finish_episodes(player, tests, models.vocabulary, window=window, goals=goals)
                rows = [
                    {**score_rollout(test, end)._asdict(), "actions": end.actions, "forced": end.forced}
                    for test, end in zip(tests, ends, strict=True)
                ]
                write_whole(directory / name / f"scores-{_tag(place)}.json", json.dumps(rows))
                found[name].append(_cell(name, place, [row["success"] for row in rows]))
    write_whole(path, json.dumps({"cells": found, "parameters": parameter_count(*modules)}))


def _player(
    models: PlanModels, arm: str, name: str, model: AttachedLM, tests: Sequence[Episode]
) -> tuple[AttachedLM, LatentState | None]:
    """The model that plays as `name`, and the vectors it starts from."""
    if ARMS[arm].channel == "closed":
        return model, None
    prompts = [models.vocabulary.encode(test.prompt) for test in tests]
    if name == "alpha_zero":
        # The static arm's weights in a dynamic channel, whose fresh tracker has alpha = 0.
        player = models.attach(models.copy(model.lm), model.encoder, dynamic=True).eval()
        player.channel.encoder.load_state_dict(model.channel.encoder.state_dict())
        player.channel.film.load_state_dict(model.channel.film.state_dict())
        return player, player.encode_goal(prompts)
    honest = model.encode_goal(prompts)
    if name == arm:
        return model, honest
    assert honest.goal is not None
    return model, model.encode_goal(LatentState(goal=noise_like(honest.goal, models.experiment.seed)))


def _tests(models: PlanModels, recipe: str) -> list[tuple[dict[str, int], list[Episode]]]:
    """Every (K, N) and its episodes; the same problems for every K, window and seed, and for all arms of a recipe."""
    e = models.experiment
    wanted = [(k, e.blocks) for k in e.perturbations] + [(0, n) for n in e.more_blocks]
    return [
        (
            {"K": k, "N": n},
            episodes(
                replace(models.task(recipe, (n,)), seed=0, goals="full"), e.split, e.test_problems, perturbations=k
            ),
        )
        for k, n in wanted
    ]


def noise_like(goal: Tensor, seed: int) -> Tensor:
    """Gaussian noise with the mean and deviation of these vectors, per dimension: Random FiLM."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(goal.shape, generator=generator).to(goal)
    return goal.mean(dim=0) + goal.std(dim=0) * noise


def _tag(place: dict[str, int]) -> str:
    return "-".join(f"{key}{value}" for key, value in place.items())


def _scores(directory: Path, arm: str, place: dict[str, int]) -> list[dict[str, Any]]:
    """An arm's rollouts in a cell; none where it has not played."""
    path = directory / arm / f"scores-{_tag(place)}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _cell(arm: str, where: dict[str, int], successes: Sequence[bool]) -> dict[str, Any]:
    count, n = sum(successes), len(successes)
    low, high = wilson(count, n)
    value = count / n
    paper = paper_table3(arm, where)
    return {"arm": arm, "where": where, "metric": "success", "value": value, "n": n, "ci": [low, high], "paper": paper}


def _pick_rollouts(models: PlanModels) -> None:
    """rollouts.json: one perturbed problem that the baseline fails and the Dynamic arm solves, at the smallest W."""
    e = models.experiment
    k, window = min(1, max(e.perturbations)), min(filter(None, e.windows), default=0)
    place = {"K": k, "N": e.blocks, "W": window}
    for recipe, (ours, _, theirs, _) in reversed(COMPARED.items()):
        good, bad = _scores(models.directory, ours, place), _scores(models.directory, theirs, place)
        which = [i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a["success"] and not b["success"]]
        if not which:
            continue
        # The one whose baseline gets furthest before it fails: there is something to see.
        pick = max(which, key=lambda i: (len(bad[i]["actions"]), -len(good[i]["actions"])))
        tests = next(tests for where, tests in _tests(models, recipe) if where == {"K": k, "N": e.blocks})
        problem = tests[pick].problem
        record = {
            **place,
            "names": problem.names,
            "init": problem.init,
            "goal": sorted([fact.predicate, fact.blocks] for fact in problem.goal),
            "arms": {
                arm: {key: rows[pick][key] for key in ("actions", "forced", "success", "failure", "reason")}
                for arm, rows in ((theirs, bad), (ours, good))
            },
        }
        write_whole(models.directory / "rollouts.json", json.dumps(record))
        return


def _track(models: PlanModels, trained: Sequence[str]) -> None:
    """vectors.json and trigger.json: how the tracked vectors move, and what a trigger costs."""
    e = models.experiment
    cost, moved = {}, {}
    for arm in (arm for arm in trained if ARMS[arm].channel == "dynamic"):
        model, _ = models.load(arm)
        config = replace(models.task(ARMS[arm].data, (e.blocks,)), seed=0, goals="full")
        plain, perturbed = movement_pairs(config, e.split, min(100, e.test_problems))
        moved[arm] = vector_movement(model, plain, perturbed, models.vocabulary)
        cost = cost or trigger_cost(model, models.vocabulary, places=e.trigger_places, encoder_size=e.encoder_window)
    if moved:
        write_whole(models.directory / "vectors.json", json.dumps({"arms": moved}))
        write_whole(models.directory / "trigger.json", json.dumps(cost))


def _notes(experiment: Table3, directory: Path) -> list[str]:
    notes = [
        "Closed loop: the model emits an action, the simulator executes it; K sub-optimal actions are forced at random "
        f"steps, the same for every arm. An illegal action, `{END}` before the goal or too many steps is a failure.",
        "One model an arm serves every window: the window of a training row is drawn from those tested. "
        "Arms `whole texts only` train with everything in view.",
        "The paper does not say at which window its table was made; its values stand at W = 0 (everything in view).",
        "Arms `, our data` train and are tested on names drawn from a pool; compare them with each other only.",
    ]
    for first, *others in COMPARED.values():
        for window in experiment.windows:
            for other in others:
                notes += _paired(experiment, directory, first, other, window)
    return notes


def _paired(experiment: Table3, directory: Path, arm: str, other: str, window: int) -> list[str]:
    place = {"K": 1, "N": experiment.blocks, "W": window}
    mine, theirs = ([row["success"] for row in _scores(directory, name, place)] for name in (arm, other))
    if not mine or not theirs:
        return []
    test = mcnemar_exact(mine, theirs)
    first, second = (arm_name(name, experiment.table) for name in (arm, other))
    return [
        f"K = 1, W = {window or 'all'}: {first} alone solves {test.only_a}, {second} alone {test.only_b} of "
        f"{len(mine)} (exact McNemar p = {test.p_value:.2g})."
    ]
