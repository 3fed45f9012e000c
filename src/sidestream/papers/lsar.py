"""LS-AR's tables. One function builds an experiment at a scale, one runs it into a directory."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sidestream.channels import GoalConfig, LatentState
from sidestream.evaluation.evaluate import answer_treasure, cells
from sidestream.evaluation.probes import project, treasure_states
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.backbones import Backbone, parameter_count
from sidestream.lm.text import Vocabulary
from sidestream.papers.experiment import open_run, record_call, write_results, write_whole
from sidestream.papers.results import load_results
from sidestream.papers.workers import default_jobs, run_arms
from sidestream.tasks import treasure
from sidestream.training.batches import RowConfig
from sidestream.training.loop import LoopConfig
from sidestream.training.stages import align_goal, pooled_states, train_lm

Scale = Literal["smoke", "cpu", "paper"]


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
class Table1:
    """LS-AR Table 1 and Figure 4: Treasure Hunt, recall of item and passcode over the distance H."""

    table: str = "lsar.table1"
    """The name it is run under."""
    scale: Scale
    """`smoke`, `cpu` or `paper`."""
    seed: int = 0
    """Of initial weights, training problems and their order. Test problems are the same for every seed."""
    arms: tuple[str, ...] = ("baseline", *STATIC_ARMS)
    """Arms to train. `static_faithful` is the paper's method, `static` ours; those between add one change each."""
    window: int
    """W, tokens the text channel sees."""
    horizons: tuple[int, ...]
    """H, distractor tokens between goal and question, one test set each."""
    train_problems: int
    """Problems to train on (the paper: 50,000)."""
    test_problems: int = 500
    """Problems for each H (the paper: 500)."""
    split: Literal["test", "valid"] = "test"
    """Split to evaluate on. Settings are chosen on `valid`."""
    haystack: str | None = None
    """Text file to take distractor sentences from; None for the built-in bank."""
    vocabulary: Literal["bpe", "subset"] = "bpe"
    """GPT-2's 50,257 tokens, or the same tokens cut down to those the task can have."""
    encoder: Backbone
    """E_base and, with the same shape, D_base."""
    baseline: Backbone
    """The unconditioned decoder. At `paper` scale it matches LS-AR in parameters (89M and 85M)."""
    goal_width: int
    """G, width of the goal vector."""
    stage1: LoopConfig
    """The language model that becomes E_base and the decoder's start. The baseline takes the same steps."""
    stage2: LoopConfig
    """E_pred."""
    stage3: LoopConfig
    """Decoder and FiLM. The baseline goes on for the same steps."""

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm != "baseline" and arm not in STATIC_ARMS]
        if unknown:
            raise ValueError(f"arms names the unknown {unknown[0]!r}; use {', '.join(['baseline', *STATIC_ARMS])}")
        for name in ("arms", "horizons"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}; give at least one, each once")
        for name, least in (("seed", 0), ("window", 1), ("test_problems", 1), ("goal_width", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        most = max(self.stage1.batch_size, self.stage3.batch_size)
        if self.train_problems < most:
            raise ValueError(f"train_problems is {self.train_problems}; one batch alone takes {most}")
        if self.stage2.batch_size < 2:
            raise ValueError(f"stage2.batch_size is {self.stage2.batch_size}; a variance over rows needs two or more")
        if self.stage2.gradient_checkpointing:
            raise ValueError("stage2.gradient_checkpointing is on, but E_pred has no blocks to recompute; turn it off")


def table1(scale: Scale) -> Table1:
    """The experiment at one of its scales. A variant is `dataclasses.replace(table1(scale), ...)`."""
    if scale == "paper":
        # CHOICE(LS-AR, B.3.3): batch 32 in every stage (the paper names it for stage 2); 30 epochs of 50,000 problems.
        steps = 30 * 50_000 // 32
        loop = LoopConfig(steps=steps, batch_size=32, learning_rate=1e-4, precision="bf16", save_every=2000)
        return Table1(
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
        return Table1(
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
        return Table1(
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


def paper_table1(arm: str, metric: str, where: dict[str, Any]) -> float | None:
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


@dataclass(frozen=True)
class _Table1Data:
    vocabulary: Vocabulary
    tests: dict[int, list[treasure.TreasureProblem]]
    training: list[treasure.TreasureProblem]


def _table1_data(experiment: Table1) -> _Table1Data:
    sentences = treasure.load_haystack(experiment.haystack) if experiment.haystack else None
    vocabulary = Vocabulary()
    if experiment.vocabulary == "subset":
        vocabulary = Vocabulary.subset(treasure.vocabulary_texts(sentences))
    tests = {
        horizon: treasure.problems(
            experiment.split, experiment.test_problems, [horizon], 0, vocabulary.encode, sentences
        )
        for horizon in experiment.horizons
    }
    probe = next(iter(tests.values()))[0]
    check_window(experiment.window, probe)
    training = treasure.problems(
        "train",
        experiment.train_problems,
        training_horizons(experiment.window, probe),
        experiment.seed,
        vocabulary.encode,
        sentences,
    )
    return _Table1Data(vocabulary, tests, training)


def run_table1(
    experiment: Table1, directory: Path, *, command: str, resume: bool = False, jobs: int | None = None
) -> dict[str, Any]:
    """Train and evaluate every arm into `directory`; returns what it writes to results.json.

    Args:
        command: the command line, for the record.
        resume: go on with a run that was stopped; finished stages and arms are kept, a finished run is read again.
        jobs: arms trained side by side, one thread each; None takes the cores on a CPU and 1 on a GPU.

    Raises:
        ValueError: the settings or files given do not fit together; nothing is trained then.
    """
    data = _table1_data(experiment)
    open_run(directory, experiment, resume=resume)
    if (directory / "results.json").exists():
        return load_results(directory / "results.json")
    problems = [*data.training, *(problem for problems in data.tests.values() for problem in problems)]
    origin = record_call(directory, command, treasure.data_hash(problems))
    started = time.monotonic()
    first = experiment.horizons[0]
    treasure.write_jsonl(data.tests[first], directory / f"{experiment.split}-H{first}.jsonl", data.vocabulary.decode)
    jobs = default_jobs(len(experiment.arms), experiment.scale) if jobs is None else jobs
    run = _Table1Run(experiment, directory, data)
    if any(arm != "baseline" for arm in experiment.arms):
        run.base()
    if jobs == 1:
        for arm in experiment.arms:
            run.arm(arm)
    else:
        work = partial(_table1_worker, experiment, directory)
        folders = {arm: run.folders(arm) for arm in experiment.arms}
        # The longest first, so that no worker is left with it at the end.
        order = sorted(experiment.arms, key=lambda arm: arm != "baseline")
        run_arms(work, order, jobs=jobs, folders=folders)
    arms = {arm: json.loads((directory / arm / "arm.json").read_text(encoding="utf-8")) for arm in experiment.arms}
    states = {arm: record["tsne"] for arm, record in arms.items() if record["tsne"]}
    if states:
        facts = {name: next(iter(states.values()))[name] for name in ("H", "W", "perplexity")}
        (directory / "tsne.json").write_text(json.dumps({**facts, "arms": states}), encoding="utf-8")
    return write_results(
        experiment,
        directory,
        origin,
        started,
        parameters={arm: record["parameters"] for arm, record in arms.items()},
        notes=_notes(experiment, origin["calls"]),
        cells=[cell for record in arms.values() for cell in record["cells"]],
    )


def _table1_worker(experiment: Table1, directory: Path, arm: str) -> None:
    _Table1Run(experiment, directory, _table1_data(experiment), show=False).arm(arm)


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


class _Table1Run:
    """Models and stages of one run directory. What is finished there is loaded, not trained again: `open_run` has made
    sure that it belongs to this experiment."""

    def __init__(self, experiment: Table1, directory: Path, data: _Table1Data, *, show: bool = True) -> None:
        self.experiment = experiment
        self.directory = directory
        self.data = data
        self.examples = [problem.example for problem in data.training]
        self.show = show
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.filler = [token for problem in data.training[:200] for token in problem.distractor_ids]

    def arm(self, arm: str) -> None:
        """Train and evaluate one arm; everything it found is in its folder's arm.json."""
        path = self.directory / arm / "arm.json"
        if path.exists():
            return
        model, modules = self.baseline() if arm == "baseline" else self.static(arm, STATIC_ARMS[arm])
        window = self.experiment.window
        found = []
        for horizon, problems in self.data.tests.items():
            scores = answer_treasure(
                model, problems, window=window, decode=self.data.vocabulary.decode, goals=self.goals(model, problems)
            )
            (self.directory / arm / f"scores-H{horizon}.json").write_text(json.dumps(scores), encoding="utf-8")
            found += cells(arm, {"H": horizon, "W": window}, scores, paper_table1)
        record = {"cells": found, "parameters": parameter_count(*modules), "tsne": None}
        if arm in ("baseline", "static_faithful", "static"):
            record["tsne"] = self.tsne(model)
        write_whole(path, json.dumps(record))

    def tsne(self, model: Any) -> dict[str, Any]:
        """Figure 4b: 100 problems at the H nearest 2 W."""
        window = self.experiment.window
        horizon = min(self.data.tests, key=lambda h: abs(h - 2 * window))
        problems = self.data.tests[horizon][:100]
        states = treasure_states(model, problems, window=window, goals=self.goals(model, problems))
        drawn = project(states, [problem.item for problem in problems], seed=self.experiment.seed)
        return {**drawn, "H": horizon, "W": window}

    def folders(self, arm: str) -> list[tuple[Path, int]]:
        """The stage folders of an arm and their steps, for the progress display."""
        experiment = self.experiment
        if arm == "baseline":
            stages = [("stage1", experiment.stage1), ("stage3", experiment.stage3)]
        else:
            stages = [("stage2", experiment.stage2), ("stage3", experiment.stage3)]
        return [(self.directory / arm / name, loop.steps) for name, loop in stages]

    def base(self) -> Any:
        """E_base after stage 1, frozen; shared by every LS-AR arm."""
        model = self._fresh(self.experiment.encoder)
        self._lm("base", "stage1", model, self.experiment.stage1, scored="all")
        return model.requires_grad_(False)

    def baseline(self) -> tuple[Any, list[Any]]:
        """The unconditioned decoder: language modelling, then the answers, for as many steps as LS-AR has."""
        model = self._fresh(self.experiment.baseline)
        self._lm("baseline", "stage1", model, self.experiment.stage1, scored="all")
        self._lm("baseline", "stage3", model, self.experiment.stage3, scored="answer")
        return model.eval(), [model]

    def static(self, arm: str, settings: StaticArm) -> tuple[AttachedLM, list[Any]]:
        """LS-AR (Static): shared stage 1, then E_pred, then decoder and FiLM."""
        experiment = self.experiment
        base = self.base()
        decoder = self._fresh(experiment.encoder)
        decoder.load_state_dict(base.state_dict())  # "starts as its base" (LS-AR, 3.3)
        torch.manual_seed(experiment.seed)
        config = GoalConfig(width=experiment.goal_width, pool_layer=settings.pool_layer)
        model = attach(decoder, goal=config, encoder=base)
        pooled = pooled_states(model, [example.goal_ids for example in self.examples])
        # CHOICE(LS-AR, 3.1): the "true trajectory" is the answer; distractors carry nothing about the goal.
        trajectory = pooled_states(model, [example.target_ids for example in self.examples])
        encoder = model.channel.encoder
        if settings.calibrate:
            encoder.calibrate(pooled)
        align_goal(
            encoder,
            pooled,
            trajectory,
            [example.goal_ids for example in self.examples],
            self.data.vocabulary.size,
            experiment.stage2,
            self.directory / arm / "stage2",
            seed=experiment.seed,
            reconstruction_weight=settings.reconstruction,
            label=f"{arm} stage 2" if self.show else "",
            resume=True,
            tags={"arm": arm, "stage": "2"},
        )
        encoder.to(self.device)
        encoder.requires_grad_(settings.train_encoder)
        self._lm(
            arm, "stage3", model, experiment.stage3, settings.scored, pooled=pooled, mask_prompt=settings.mask_prompt
        )
        return model.eval(), [decoder, base, model.channel]

    def goals(self, model: Any, problems: Sequence[treasure.TreasureProblem]) -> LatentState | None:
        """Latent states of the problems' prompts; None for a model without a channel."""
        if not isinstance(model, AttachedLM):
            return None
        with torch.no_grad():
            return model.encode_goal([problem.goal_ids for problem in problems])

    def _fresh(self, shape: Backbone) -> Any:
        torch.manual_seed(self.experiment.seed)
        model = shape.build(
            vocabulary=self.data.vocabulary.size, window=self.experiment.window, pad_id=self.data.vocabulary.pad_id
        )
        return model.to(self.device)  # type: ignore[arg-type]

    def _lm(
        self,
        arm: str,
        stage: str,
        model: Any,
        loop: LoopConfig,
        scored: Literal["answer", "all"],
        *,
        pooled: Tensor | None = None,
        mask_prompt: float = 0.0,
    ) -> None:
        train_lm(
            model,
            self.examples,
            RowConfig(window=self.experiment.window, scored=scored, mask_prompt=mask_prompt),
            loop,
            self.directory / arm / stage,
            seed=self.experiment.seed,
            filler=self.filler,
            pooled=pooled,
            label=f"{arm} {stage[:-1]} {stage[-1]}" if self.show else "",
            resume=True,
            tags={"arm": arm, "stage": stage[-1]},
        )


def _notes(experiment: Table1, calls: int) -> list[str]:
    notes = [
        "Chance is 8.3% for the item (1 of 12) and about 0.01% for a whole code.",
        "The window is a recomputation of the last W tokens at positions 0 to W-1: nothing older can reach a logit.",
        "Every arm trains on the same problems and takes the same steps; the baseline takes stage 1 and stage 3.",
    ]
    if calls > 1:
        notes.append(f"The run was stopped and resumed: {calls} calls. The wall time is that of the last one.")
    if experiment.scale == "cpu":
        notes.append(
            "Scaled down from the paper (W 500 to 48, d 512 to 96, BPE cut to the task's tokens); H / W is kept, and "
            "paper values stand at cells of the same H / W. They compare shapes, not levels."
        )
    return notes
