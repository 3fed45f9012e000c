"""AGCLR's tables, run: every arm trained on every task, what is measured of it, and the files a report is made from."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sidestream.evaluation.latent import INTERVENTIONS, Intervention, generate_answers, mean_and_band, trace_passes
from sidestream.evaluation.stats import mcnemar_exact, wilson
from sidestream.lm.backbones import parameter_count
from sidestream.lm.passes import PassConfig
from sidestream.papers.agclr import ARMS, DERIVED, LatentExperiment, paper_value
from sidestream.papers.agclr_models import METRICS, LatentModels
from sidestream.papers.experiment import open_run, record_call, write_results, write_whole
from sidestream.papers.names import arm_name
from sidestream.papers.results import load_results
from sidestream.papers.workers import default_jobs, run_arms
from sidestream.tasks.base import data_hash
from sidestream.training.latent import LatentLM

COMPARED = (
    ("agclr", "coconut"),
    ("coconut", "pause_multi"),
    ("coconut", "cot"),
    ("coconut", "no_cot"),
    ("agclr", "cot"),
    ("coconut_sim", "coconut"),
    ("agclr_sim", "coconut_sim"),
)
"""Pairs of arms tested against each other, where a table has both; `agclr` also against each of its ablations."""

LEARNED = "learned"
"""The condition in which latents are what they were trained to be."""


def run_latent(
    experiment: LatentExperiment, directory: Path, *, command: str, resume: bool = False, jobs: int | None = None
) -> dict[str, Any]:
    """Train and evaluate every arm on every task into `directory`; returns what it writes to results.json.

    Args:
        command: how to run this again, for the report.
        resume: go on with a run that was stopped.
        jobs: arms side by side; None for one a core, or one in all on a GPU.

    Raises:
        ValueError: the directory holds another run, or settings or data do not fit.
    """
    models = LatentModels(experiment, directory)
    open_run(directory, experiment, resume=resume)
    if (directory / "results.json").exists():
        return load_results(directory / "results.json")
    origin = _origin(models, command)
    started = time.monotonic()
    trained = [arm for arm in experiment.arms if arm in ARMS]
    work = [f"{task}/{arm}" for task in experiment.tasks for arm in trained]
    jobs = default_jobs(len(work), experiment.scale) if jobs is None else jobs
    if jobs == 1:
        for item in work:
            _evaluate(models, *item.split("/"))
    else:
        shared = {
            task: models.folders(task)
            for task in experiment.tasks
            if any(models.shared_calls(task, arm) for arm in trained)
        }
        run_arms(partial(_share, experiment, directory), list(shared), jobs=jobs, folders=shared)
        folders = {item: models.folders(*item.split("/")) for item in work}
        run_arms(partial(_worker, experiment, directory), work, jobs=jobs, folders=folders)
    records = {item: json.loads((directory / item / "arm.json").read_text(encoding="utf-8")) for item in work}
    found = {name: parts for record in records.values() for name, parts in record["found"].items()}
    for kind in ("stages", "passes"):
        side = {
            task: {arm: found[f"{task}/{arm}"][kind] for arm in experiment.arms if found[f"{task}/{arm}"].get(kind)}
            for task in experiment.tasks
        }
        if any(side.values()):
            write_whole(directory / f"{kind}.json", json.dumps(side))
    return write_results(
        experiment,
        directory,
        origin,
        started,
        parameters={item: record["parameters"] for item, record in records.items()},
        notes=_notes(experiment, directory),
        cells=[
            cell for task in experiment.tasks for arm in experiment.arms for cell in found[f"{task}/{arm}"]["cells"]
        ],
    )


def _origin(models: LatentModels, command: str) -> dict[str, Any]:
    """Where the numbers come from: this run's calls, and those that trained arms in a folder shared with others."""
    e, everything, shared = models.experiment, [], []
    for task in e.tasks:
        folder = models.open_task(task)
        training = models.examples(task, "train")
        everything += [*training, *models.examples(task, e.split)]
        if e.models:
            shared.append(record_call(folder, command, data_hash(training)))
    origin = record_call(models.directory, command, data_hash(everything))
    return {**origin, "dirty": origin["dirty"] or any(call["dirty"] for call in shared)}


def _share(experiment: LatentExperiment, directory: Path, task: str) -> None:
    LatentModels(experiment, directory, show=False).share(task)


def _worker(experiment: LatentExperiment, directory: Path, item: str) -> None:
    _evaluate(LatentModels(experiment, directory, show=False), *item.split("/"))


def _evaluate(models: LatentModels, task: str, arm: str) -> None:
    """Train one arm on one task, measure it and the arms derived from it, write arm.json."""
    e, directory = models.experiment, models.directory
    path = directory / task / arm / "arm.json"
    if path.exists():
        return
    module = models.load(task, arm)
    if models.trained != directory:
        for folder, _ in [*models.folders(task), *models.folders(task, arm)]:
            here = directory / folder.relative_to(models.trained)
            here.mkdir(parents=True, exist_ok=True)
            if (folder / "metrics.jsonl").exists():
                shutil.copy(folder / "metrics.jsonl", here)
    found = {}
    for name in (arm, *(name for name, (source, _) in DERIVED.items() if source == arm and name in e.arms)):
        with _derived(module, name):
            if e.table == "agclr.retention":
                found[f"{task}/{name}"] = _passes(models, task, name, module)
            else:
                found[f"{task}/{name}"] = {"cells": _answers(models, task, arm, name, module)}
    if e.table in ("agclr.table1", "agclr.prosqa", "agclr.ablations") and ARMS[arm].text == "latent":
        found[f"{task}/{arm}"]["stages"] = _stages(models, task, arm, module)
    write_whole(path, json.dumps({"found": found, "parameters": parameter_count(module.model)}))


@contextmanager
def _derived(module: LatentLM, name: str) -> Iterator[None]:
    """The arm's module as a derived arm, the switch of its stream set for the time being."""
    if name not in DERIVED:
        yield
        return
    stream = module.model.stream
    before = stream.config
    stream.config = replace(before, write_until=DERIVED[name][1])
    try:
        yield
    finally:
        stream.config = before


def _answers(models: LatentModels, task: str, arm: str, name: str, module: LatentLM) -> list[dict[str, Any]]:
    """Cells of the answers, in every condition that the table asks for; each problem's score is kept beside them."""
    e = models.experiment
    prompts, scores = models.prompts(task, arm), {}
    for condition, config, intervention in _conditions(e, task, module.pass_config):
        said = generate_answers(
            module.model,
            prompts,
            config,
            max_new_tokens=e.new_tokens,
            stop_id=models.form(task).stop_id,
            intervention=intervention,
            seed=e.seed,
        )
        scores[condition] = models.scores(task, said)
    write_whole(models.directory / task / name / "scores.json", json.dumps(scores))
    controls = e.table == "agclr.controls"
    return [
        _cell(name, {"task": task, **({"latents": condition} if controls else {})}, metric, values)
        for condition, metrics in scores.items()
        for metric, values in metrics.items()
    ]


def _conditions(
    e: LatentExperiment, task: str, config: PassConfig
) -> list[tuple[str, PassConfig, Intervention | None]]:
    """What the latents of a table's answers are: name, passes, what is fed instead."""
    found: list[tuple[str, PassConfig, Intervention | None]] = [(LEARNED, config, None)]
    if e.table == "agclr.controls":
        most = e.training(task).curriculum.most_latents
        for kind in INTERVENTIONS:
            if kind != "permuted" or most > 1:
                found.append((kind, config, kind))
        # CHOICE(AGCLR, controls): with no latent at all nothing hides the question of the masked task.
        found += [(f"depth {depth}", replace(config, depth=depth), None) for depth in range(most)]
    return found


def _stages(models: LatentModels, task: str, arm: str, module: LatentLM) -> list[dict[str, Any]]:
    """Accuracy after each stage, on that stage's prompts. Looked at, and not used to choose anything."""
    metric, found = METRICS.get(task, ("accuracy",))[0], []
    for stage, trained in models.at_stages(task, arm, module):
        said = generate_answers(
            trained.model,
            models.prompts(task, arm, stage),
            trained.pass_config,
            max_new_tokens=models.experiment.new_tokens,
            stop_id=models.form(task).stop_id,
        )
        cell = _cell(arm, {"task": task}, metric, models.scores(task, said)[metric])
        found.append({"stage": stage, **{key: cell[key] for key in ("metric", "value", "n", "ci")}})
    return found


def _passes(models: LatentModels, task: str, arm: str, module: LatentLM) -> dict[str, Any]:
    """Cells and curves of what each pass has in common with the first, and of the gates."""
    trace = trace_passes(module.model, models.prompts(task, arm)[: models.experiment.traced], module.pass_config)
    curves = {"cosine": trace.cosine, **{f"{gate}_gate": values for gate, values in trace.gates.items()}}
    cells, bands = [], {}
    for metric, passes in curves.items():
        bands[metric] = [mean_and_band(values) for values in passes]
        for number, (values, (mean, low, high)) in enumerate(zip(passes, bands[metric], strict=True), start=1):
            where = {"task": task, "pass": number}
            paper = paper_value(arm, where, metric)
            cells.append(
                {"arm": arm, "where": where, "metric": metric, "value": mean, "n": len(values), "ci": [low, high]}
                | {"paper": paper}
            )
    return {"cells": cells, "passes": {"n": len(trace.cosine[0]), "bands": bands}}


def _cell(arm: str, where: dict[str, Any], metric: str, values: Sequence[float]) -> dict[str, Any]:
    n, value = len(values), sum(values) / len(values)
    if set(values) <= {0.0, 1.0}:
        low, high = wilson(round(sum(values)), n)
    else:
        _, low, high = mean_and_band(values)
    paper = paper_value(arm, where, metric)
    return {"arm": arm, "where": where, "metric": metric, "value": value, "n": n, "ci": [low, high], "paper": paper}


def _notes(e: LatentExperiment, directory: Path) -> list[str]:
    notes = [
        f"One seed ({e.seed}). No split chose anything: the weights after the last step are evaluated, on the "
        f"{e.split} split, whose problems are the same for every arm and seed.",
        "Every arm of a task trains for the same number of steps, in the same order of problems.",
    ]
    if e.base is None and "prosqa" in e.tasks:
        notes.append(
            "The paper's values are GPT-2's on the full data sets; `prosqa` here has up to "
            f"{e.prosqa_data.nodes} nodes and a small model from scratch."
        )
    if "masked" in e.tasks:
        masked = e.training("masked")
        hidden = "the latest latent" if masked.sees == "last" else "the first latent"
        seen = "nothing" if masked.hides is None else f"the question without its last {masked.hides} words, the query"
        notes.append(
            f"`masked`: of what stands before {hidden}, later passes and the answer see {seen}; the answer needs "
            "f^k(x) and f(x)."
        )
    if e.table == "agclr.controls":
        notes.append(
            "Latents at test: `zero`, `noise` (Gaussian, each of the length of what it replaces), `mean` over "
            "problems, `first` of the row in every slot, `other` problem's, `permuted`, or only the first `depth` of "
            "them, where a model that has seen earlier stages writes the other steps in words. In `masked`, `depth 0` "
            "shows the question again."
        )
    if e.table == "agclr.retention":
        return [*notes, "Bands: 95% intervals of the mean over problems."]
    pairs = [pair for pair in COMPARED if set(pair) <= set(e.arms)]
    if "agclr" in e.arms and e.table not in ("agclr.table1", "agclr.prosqa"):
        pairs += [("agclr", arm) for arm in e.arms if arm != "agclr" and ("agclr", arm) not in pairs]
    for task in e.tasks:
        for first, second in pairs:
            notes.append(_paired(e, directory, task, (first, LEARNED), (second, LEARNED)))
        if e.table == "agclr.controls":
            notes += [_paired(e, directory, task, (arm, LEARNED), (arm, "noise")) for arm in e.arms]
    return notes


def _paired(e: LatentExperiment, directory: Path, task: str, mine: tuple[str, str], theirs: tuple[str, str]) -> str:
    """One paired test in words."""
    metric = METRICS.get(task, ("accuracy",))[0]
    samples, names = [], []
    for arm, condition in (mine, theirs):
        scores = json.loads((directory / task / arm / "scores.json").read_text(encoding="utf-8"))
        samples.append(scores[condition][metric])
        names.append(arm_name(arm, e.table) + ("" if condition == LEARNED else f" with {condition} for latents"))
    test = mcnemar_exact(*samples)
    return (
        f"{task}, seed {e.seed}: {names[0]} alone is right on {test.only_a}, {names[1]} alone on {test.only_b} of "
        f"{len(samples[0])} (exact McNemar p = {test.p_value:.2g})."
    )
