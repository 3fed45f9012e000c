"""LS-AR Table 3: Blocksworld in closed loop, under perturbations and under windows that lose the prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sidestream.channels import GoalConfig, LatentState
from sidestream.evaluation.planning import finish_episodes, run_episodes
from sidestream.evaluation.stats import mcnemar_exact, wilson
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.backbones import Backbone, parameter_count
from sidestream.lm.text import WordVocabulary
from sidestream.papers.experiment import from_json, open_run, record_call, to_json, write_whole
from sidestream.papers.results import check_results, load_results
from sidestream.papers.workers import default_jobs, run_arms
from sidestream.tasks.base import Example
from sidestream.tasks.blocksworld import Action, Problem
from sidestream.tasks.blocksworld_data import (
    END,
    TRIGGER,
    WORDS,
    BlocksworldConfig,
    data_hash,
    examples,
    standard_names,
)
from sidestream.tasks.blocksworld_loop import Episode, PlanScore, episodes, make_episode, score_rollout
from sidestream.training.loop import FINAL, LoopConfig, train
from sidestream.training.planning import PlanLM, PlanRowConfig, PlanRows, collate_plans
from sidestream.training.stages import align_goal, pooled_states

Scale = Literal["smoke", "cpu", "paper"]

TRAINED = ("baseline", "static", "dynamic", "dynamic_no_stage2")
DERIVED = {"random_film": "static", "random_film_dynamic": "dynamic"}
"""Arms that evaluate another arm's weights with Gaussian noise for the vector."""


@dataclass(frozen=True, kw_only=True)
class Table3:
    """LS-AR Table 3: goal success on Blocksworld after K perturbations, N blocks, W tokens in view."""

    table: str = "lsar.table3"
    """The name it is run under."""
    scale: Scale
    """`smoke`, `cpu` or `paper`."""
    seed: int = 0
    """Of initial weights, training problems and their order. Test episodes are the same for every seed."""
    arms: tuple[str, ...] = (*TRAINED, *DERIVED)
    """Arms, in the order of the report."""
    blocks: int = 5
    """N in training."""
    more_blocks: tuple[int, ...] = (6, 7)
    """N tested zero-shot, at K = 0."""
    perturbations: tuple[int, ...] = (0, 1, 2, 3, 4)
    """K tested at the trained N."""
    windows: tuple[int, ...] = (0, 32, 16)
    """W trained (drawn per row) and tested; 0 is everything in view."""
    names: Literal["fixed", "pool"] = "fixed"
    """Block names: always a, b, c, ... or drawn per problem."""
    goals: Literal["full", "on"] = "full"
    """Goals that fix every block, or only `on` facts as PDDL problems have them."""
    budgets: tuple[int, ...] = (1,)
    """Most forced sub-optimal actions in a training trajectory, drawn per problem."""
    train_problems: int = 100_000
    """Trajectories to train on (the paper: 100,000)."""
    test_problems: int = 500
    """Episodes a cell (the paper: 500)."""
    split: Literal["test", "valid"] = "test"
    """Split to evaluate on. Settings are chosen on `valid`."""
    positions: int = 320
    """Learned positions of E_base and, with everything in view, of the decoder: the longest rollout."""
    encoder: Backbone
    """E_base and D_base."""
    baseline: Backbone
    """The unconditioned decoder, matched in parameters."""
    goal_width: int
    """G."""
    train_encoder: bool = True
    """E_pred trains on in stage 3 (open in the paper; without it Static cannot use its vector at all here)."""
    alpha_rate: float = 30.0
    """Learning rate of alpha over that of the rest: from 0, AdamW's equal steps would leave it near 0."""
    stage1: LoopConfig
    """The language model of plans that becomes E_base and the decoder's start; the baseline takes the same steps."""
    stage2: LoopConfig
    """E_pred."""
    stage3: LoopConfig
    """Decoder, FiLM, tracker; the baseline goes on for the same steps."""

    def __post_init__(self) -> None:
        known = (*TRAINED, *DERIVED)
        unknown = [arm for arm in self.arms if arm not in known]
        if unknown:
            raise ValueError(f"unknown arm {unknown[0]!r}; use {', '.join(known)}")
        for arm in self.arms:
            if arm in DERIVED and DERIVED[arm] not in self.arms:
                raise ValueError(f"arm {arm!r} evaluates the weights of {DERIVED[arm]!r}; add that arm")


def table3(scale: Scale) -> Table3:
    """The experiment at one of its scales."""
    if scale == "paper":
        loop = LoopConfig(
            steps=30 * 100_000 // 32, batch_size=32, learning_rate=1e-4, precision="bf16", save_every=2000
        )
        return Table3(
            scale="paper",
            encoder=Backbone(layers=4),
            baseline=Backbone(layers=10),
            goal_width=512,
            stage1=loop,
            stage2=replace(loop, learning_rate=2e-4, precision="fp32"),
            stage3=loop,
        )
    if scale == "cpu":
        loop = LoopConfig(steps=1000, batch_size=64, learning_rate=2e-3)
        return Table3(
            scale="cpu",
            encoder=Backbone(layers=2, width=128, heads=4),
            baseline=Backbone(layers=4, width=128, heads=4),
            goal_width=128,
            stage1=loop,
            stage2=replace(loop, steps=1000, batch_size=256),
            stage3=replace(loop, steps=3000),
        )
    if scale == "smoke":
        loop = LoopConfig(steps=4, batch_size=8, learning_rate=1e-3, log_every=1)
        return Table3(
            scale="smoke",
            blocks=4,
            more_blocks=(5,),
            perturbations=(0, 1),
            train_problems=64,
            test_problems=12,
            positions=160,
            encoder=Backbone(layers=1, width=32, heads=2),
            baseline=Backbone(layers=2, width=32, heads=2),
            goal_width=32,
            stage1=loop,
            stage2=loop,
            stage3=loop,
        )
    raise ValueError(f"scale is {scale!r}; use smoke, cpu or paper")


def paper_table3(arm: str, where: dict[str, Any]) -> float | None:
    """The paper's value: its Table 3 does not say which window it was made at, so it stands at W = 0 only."""
    if where["W"] != 0:
        return None
    key = f"K{where['K']}" if where["N"] == 5 else f"N{where['N']}"
    rows = {
        "baseline": {"K0": 0.96, "K1": 0.71, "K2": 0.06, "N6": 0.0},
        "static": {"K0": 0.95, "K1": 0.66, "K2": 0.05, "N6": 0.0},
        "dynamic": {"K0": 0.98, "K1": 0.89, "K2": 0.07, "N6": 0.0},
        "random_film": {"K0": 0.0},
    }
    return rows.get(arm, {}).get(key)


def run_table3(
    experiment: Table3, directory: Path, *, command: str, resume: bool = False, jobs: int | None = None
) -> dict[str, Any]:
    """Train and evaluate every arm into `directory`; returns what it writes to results.json.

    Args: as for `run_table1`.
    """
    open_run(directory, experiment, resume=resume)
    if (directory / "results.json").exists():
        return load_results(directory / "results.json")
    run = _Run(experiment, directory)
    origin = record_call(directory, command, data_hash(run.training))
    started = time.monotonic()
    trained = [arm for arm in experiment.arms if arm in TRAINED]
    jobs = default_jobs(len(trained), experiment.scale) if jobs is None else jobs
    run.base()
    if jobs == 1:
        for arm in trained:
            run.arm(arm)
    else:
        run_arms(
            partial(_worker, experiment, directory), trained, jobs=jobs, folders={a: run.folders(a) for a in trained}
        )
    records = {arm: json.loads((directory / arm / "arm.json").read_text(encoding="utf-8")) for arm in trained}
    found = {arm: cells for record in records.values() for arm, cells in record["cells"].items()}
    results = {
        "table": experiment.table,
        "scale": experiment.scale,
        "seed": experiment.seed,
        **origin,
        "wall_s": round(time.monotonic() - started, 1),
        "settings": to_json(experiment),
        "parameters": {arm: record["parameters"] for arm, record in records.items()},
        "notes": _notes(experiment, directory),
        "cells": [cell for arm in experiment.arms for cell in found[arm]],
    }
    check_results(results)
    write_whole(directory / "results.json", json.dumps(results, indent=1) + "\n")
    return results


def _worker(experiment: Table3, directory: Path, arm: str) -> None:
    _Run(experiment, directory, show=False).arm(arm)


class _Run:
    """Models and stages of one run directory; what is finished there is loaded."""

    def __init__(self, experiment: Table3, directory: Path, *, show: bool = True) -> None:
        self.experiment = experiment
        self.directory = directory
        self.show = show
        self.vocabulary = WordVocabulary(WORDS)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def config(self, blocks: int) -> BlocksworldConfig:
        """The task with this many blocks."""
        e = self.experiment
        return BlocksworldConfig(blocks=(blocks,), names=e.names, goals=e.goals, budgets=e.budgets, seed=e.seed)

    @cached_property
    def training(self) -> list[Any]:
        """Training trajectories."""
        config = self.config(self.experiment.blocks)
        return list(islice(examples(config, "train", self.experiment.train_problems), self.experiment.train_problems))

    @cached_property
    def encoded(self) -> list[Example]:
        """The same as token ids."""
        return [example.encoded(self.vocabulary.encode) for example in self.training]

    def tests(self) -> list[tuple[dict[str, int], list[Episode]]]:
        """Every (K, N) and its episodes; the same problems for every K, arm, window and seed."""
        e = self.experiment
        wanted = [(k, e.blocks) for k in e.perturbations] + [(0, n) for n in e.more_blocks]
        return [
            (
                {"K": k, "N": n},
                episodes(replace(self.config(n), seed=0), e.split, e.test_problems, perturbations=k),
            )
            for k, n in wanted
        ]

    def arm(self, arm: str) -> None:
        """Train one arm, evaluate it and the arms derived from it, write arm.json."""
        path = self.directory / arm / "arm.json"
        if path.exists():
            return
        model, modules = self.baseline() if arm == "baseline" else self.steered(arm)
        derived = [name for name, source in DERIVED.items() if source == arm and name in self.experiment.arms]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in (arm, *derived)}
        for where, tests in self.tests():
            prompts = [self.vocabulary.encode(episode.prompt) for episode in tests]
            honest = None if arm == "baseline" else model.encode_goal(prompts)
            for name in found:
                goals = honest
                if name in derived:
                    assert honest is not None
                    goals = model.encode_goal(LatentState(goal=noise_like(honest.goal, self.experiment.seed)))
                for window in self.experiment.windows:
                    scores = run_episodes(model, tests, self.vocabulary, window=window, goals=goals)
                    place = {**where, "W": window}
                    tag = "-".join(f"{key}{value}" for key, value in place.items())
                    rows = [score._asdict() for score in scores]
                    write_whole(self.directory / name / f"scores-{tag}.json", json.dumps(rows))
                    found[name].append(_cell(name, place, [row["success"] for row in rows]))
        write_whole(path, json.dumps({"cells": found, "parameters": parameter_count(*modules)}))

    def folders(self, arm: str) -> list[tuple[Path, int]]:
        """Stage folders and steps, for the progress display."""
        e = self.experiment
        stages = {"stage1": e.stage1, "stage3": e.stage3} if arm == "baseline" else {"stage3": e.stage3}
        if arm in ("static", "dynamic"):
            stages = {"stage2": e.stage2, **stages}
        return [(self.directory / arm / name, loop.steps) for name, loop in stages.items()]

    def base(self) -> Any:
        """E_base: a language model of whole problems, frozen."""
        lm = self._fresh(self.experiment.encoder)
        model = self._closed(lm)
        self._train(
            "base", "stage1", PlanLM(model, steered=False), self.experiment.stage1, PlanRowConfig(prompt_scored=True)
        )
        return model.detach().requires_grad_(False)

    def baseline(self) -> tuple[AttachedLM, list[Any]]:
        """The unconditioned decoder, its channel closed throughout."""
        e = self.experiment
        model = self._closed(self._fresh(e.baseline))
        module = PlanLM(model, steered=False)
        self._train("baseline", "stage1", module, e.stage1, PlanRowConfig(prompt_scored=True))
        self._train("baseline", "stage3", module, e.stage3, PlanRowConfig(windows=e.windows))
        return model.eval(), [model.lm]

    def steered(self, arm: str) -> tuple[AttachedLM, list[Any]]:
        """LS-AR: E_pred aligned (unless the arm is without stage 2), then decoder, FiLM and tracker."""
        e = self.experiment
        base = self.base()
        decoder = self._fresh(e.encoder)
        decoder.load_state_dict(base.state_dict())
        torch.manual_seed(e.seed)
        dynamic = arm != "static"
        triggers = tuple(self.vocabulary.encode(TRIGGER)) if dynamic else ()
        config = GoalConfig(mode="dynamic" if dynamic else "static", width=e.goal_width, trigger_ids=triggers)
        model = attach(decoder, goal=config, encoder=base)
        # Stage 3's weights hold E_pred as well; stage 2 is needed only on the way to them.
        if arm != "dynamic_no_stage2" and not (self.directory / arm / "stage3" / FINAL).exists():
            self._align(arm, model)
        model.channel.encoder.requires_grad_(e.train_encoder)
        module = PlanLM(model).to(self.device)
        self._train(arm, "stage3", module, e.stage3, PlanRowConfig(windows=e.windows), {"alpha": e.alpha_rate})
        return model.eval(), [decoder, base, model.channel]

    def _align(self, arm: str, model: AttachedLM) -> None:
        some = self.encoded[:20_000]
        goals = [list(example.goal_ids) for example in some]
        pooled = pooled_states(model, goals)
        # CHOICE(LS-AR, 3.1): the trajectory is encoded by itself, as the goal is.
        trajectory: Tensor = pooled_states(model, [list(example.target_ids) for example in some])
        align_goal(
            model.channel.encoder,
            pooled,
            trajectory,
            goals,
            self.vocabulary.size,
            self.experiment.stage2,
            self.directory / arm / "stage2",
            seed=self.experiment.seed,
            reconstruction_weight=0.0,
            label=f"{arm} stage 2" if self.show else "",
            resume=True,
            tags={"arm": arm, "stage": "2"},
        )

    def _closed(self, lm: Any) -> AttachedLM:
        return attach(lm, goal=GoalConfig(width=8))

    def _fresh(self, shape: Backbone) -> Any:
        torch.manual_seed(self.experiment.seed)
        model: Any = shape.build(
            vocabulary=self.vocabulary.size, window=self.experiment.positions, pad_id=self.vocabulary.pad_id
        )
        return model.to(self.device)

    def _train(
        self,
        arm: str,
        stage: str,
        module: PlanLM,
        loop: LoopConfig,
        config: PlanRowConfig,
        rates: dict[str, float] | None = None,
    ) -> None:
        seed = self.experiment.seed
        train(
            module,
            lambda: PlanRows(self.encoded, config, batch_size=loop.batch_size, steps=loop.steps, seed=seed),
            loop,
            self.directory / arm / stage,
            seed=seed,
            collate=collate_plans,
            label=f"{arm} {stage[:-1]} {stage[-1]}" if self.show else "",
            resume=True,
            tags={"arm": arm, "stage": stage[-1]},
            rates=rates,
        )


def solve(
    directory: Path, problems: Sequence[Problem], *, arm: str = "dynamic", window: int = 0
) -> list[tuple[PlanScore, tuple[Action, ...]]]:
    """Plans of a finished run's model for problems from elsewhere, in closed loop without perturbations.

    Args:
        directory: a run of `lsar.table3`.
        problems: blocks are renamed to the vocabulary's names; actions hold block numbers, so they fit the originals.
        arm: whose weights.
        window: W; 0 for everything in view.

    Raises:
        ValueError: the directory holds no finished run of that arm, or a problem has more blocks than there are names.
    """
    path = directory / "experiment.json"
    if not path.exists():
        raise ValueError(f"{directory} holds no run of lsar.table3; train one with `sidestream run lsar.table3`")
    experiment = from_json(Table3, json.loads(path.read_text(encoding="utf-8")))
    if arm not in TRAINED or not (directory / arm / "stage3" / FINAL).exists():
        there = [name for name in TRAINED if (directory / name / "stage3" / FINAL).exists()]
        raise ValueError(f"{directory} holds no finished arm {arm!r}; it has {', '.join(there) or 'none'}")
    run = _Run(experiment, directory, show=False)
    model, _ = run.baseline() if arm == "baseline" else run.steered(arm)
    tests = [make_episode(standard_names(problem), perturbations=0, seed=0) for problem in problems]
    prompts = [run.vocabulary.encode(test.prompt) for test in tests]
    goals = None if arm == "baseline" else model.encode_goal(prompts)
    rollouts = finish_episodes(model, tests, run.vocabulary, window=window, goals=goals)
    return [(score_rollout(test, end), end.actions) for test, end in zip(tests, rollouts, strict=True)]


def noise_like(goal: Tensor, seed: int) -> Tensor:
    """Gaussian noise with the mean and deviation of these vectors, per dimension: Random FiLM."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(goal.shape, generator=generator).to(goal)
    return goal.mean(dim=0) + goal.std(dim=0) * noise


def _cell(arm: str, where: dict[str, int], successes: Sequence[bool]) -> dict[str, Any]:
    count, n = sum(successes), len(successes)
    low, high = wilson(count, n)
    value = count / n
    paper = paper_table3(arm, where)
    return {"arm": arm, "where": where, "metric": "success", "value": value, "n": n, "ci": [low, high], "paper": paper}


def _notes(experiment: Table3, directory: Path) -> list[str]:
    notes = [
        "Closed loop: the model emits an action, the simulator executes it; K sub-optimal actions are forced at random "
        f"steps, the same for every arm. An illegal action, `{END}` before the goal or too many steps is a failure.",
        "One model an arm serves every window: the window of a training row is drawn from those tested.",
        "The paper does not say at which window its table was made; its values stand at W = 0 (everything in view).",
    ]
    for window in experiment.windows:
        for other in ("baseline", "static"):
            notes += _paired(directory, experiment, "dynamic", other, window)
    return notes


def _paired(directory: Path, experiment: Table3, arm: str, other: str, window: int) -> list[str]:
    where = f"scores-K1-N{experiment.blocks}-W{window}.json"
    paths = [directory / name / where for name in (arm, other)]
    if not all(path.exists() for path in paths):
        return []
    mine, theirs = ([row["success"] for row in json.loads(path.read_text(encoding="utf-8"))] for path in paths)
    test = mcnemar_exact(mine, theirs)
    return [
        f"K = 1, W = {window or 'all'}: {arm} alone solves {test.only_a}, {other} alone {test.only_b} of {len(mine)} "
        f"(exact McNemar p = {test.p_value:.2g})."
    ]
