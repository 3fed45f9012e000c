"""The models of LS-AR Table 3: their data, their stages, and what a finished run of them can solve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sidestream.channels import GoalConfig
from sidestream.evaluation.planning import finish_episodes
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.texts.text import WordVocabulary
from sidestream.papers.experiment import from_json, write_whole
from sidestream.papers.planning import ARMS, Table3
from sidestream.tasks.blocksworld import Action, Problem, satisfies, trace
from sidestream.tasks.blocksworld_data import (
    TRIGGER,
    WORDS,
    BlocksworldConfig,
    PlanExample,
    examples,
    on_table,
    plan_text,
    relabel,
    standard_names,
)
from sidestream.tasks.blocksworld_loop import Episode, PlanScore, episodes, make_episode, score_plan, score_rollout
from sidestream.training.loop import FINAL, train
from sidestream.training.planning import PlanLM, PlanRowConfig, PlanRows, PlanText, collate_plans
from sidestream.training.stages import align_goal, pooled_states


class PlanModels:
    """Models and stages of one run directory; what is finished there is loaded.

    Args:
        show: progress bars.
    """

    def __init__(self, experiment: Table3, directory: Path, *, show: bool = True) -> None:
        self.experiment = experiment
        self.directory = directory
        self.show = show
        self.vocabulary = WordVocabulary(WORDS)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.encoded = cache(self._encoded)

    def task(self, data: str, blocks: tuple[int, ...] = ()) -> BlocksworldConfig:
        """The task as one of the two recipes trains it, or with other numbers of blocks."""
        recipe = self.experiment.recipe(data)
        return BlocksworldConfig(
            blocks=blocks or recipe.blocks,
            names=recipe.names,
            pool=recipe.pool,
            goals=recipe.goals,
            budgets=recipe.budgets,
            perturb_per=recipe.perturb_per,
            seed=self.experiment.seed,
        )

    @cached_property
    def training(self) -> list[PlanExample]:
        """Training trajectories of the first arm's recipe: what the run's data hash is of."""
        return self.trajectories(ARMS[self.experiment.arms[0]].data)

    def trajectories(self, data: str) -> list[PlanExample]:
        """Generated training trajectories of a recipe."""
        count = self.experiment.train_problems
        return list(islice(examples(self.task(data), "train", count), count))

    def own_prefixes(self, data: str) -> list[PlanExample]:
        """Trajectories that E_base began, with its mistakes, and a shortest plan ended (none unless asked for).

        E_base plays them once, so all arms of a recipe train on the same rows.
        """
        recipe = self.experiment.recipe(data)
        if not recipe.own_prefixes:
            return []
        each = -(-recipe.own_prefixes // len(recipe.budgets))
        # Problems of another seed than the generated ones.
        config = replace(self.task(data), seed=self.experiment.seed + 1_000_003)
        played: list[Episode] = []
        for budget in recipe.budgets:
            played += episodes(config, "train", each, perturbations=budget)
        path = self.directory / f"base_{data}" / "own_prefixes.json"
        if not path.exists():
            ends = finish_episodes(self._closed(self.base(data)).eval(), played, self.vocabulary, window=0)
            write_whole(path, json.dumps([end.actions for end in ends]))
        prefixes = [[Action(n, tuple(x)) for n, x in row] for row in json.loads(path.read_text(encoding="utf-8"))]
        return [relabel(episode.problem, prefix) for episode, prefix in zip(played, prefixes, strict=True)]

    def _encoded(self, data: str, *, own: bool) -> list[PlanText]:
        rows = [*self.trajectories(data), *(self.own_prefixes(data) if own else [])]
        return [PlanText.of(example, self.vocabulary.encode) for example in rows]

    def folders(self, arm: str) -> list[tuple[Path, int]]:
        """Stage folders of an arm and their steps, for the progress display."""
        e, spec = self.experiment, ARMS[arm]
        stages = {"stage3": e.loop("stage3", spec.data)}
        if spec.channel != "closed" and spec.stage2:
            stages = {"stage2": e.stage2, **stages}
        return [(self.directory / arm / name, loop.steps) for name, loop in stages.items()]

    def shared(self, data: str) -> list[tuple[Path, int]]:
        """Stage folders that a recipe's arms share, and their steps: E_base, and stage 1 of the baselines if any."""
        arms = [arm for arm in self.experiment.arms if arm in ARMS and ARMS[arm].data == data]
        kinds = ("base", "bare") if any(ARMS[arm].channel == "closed" for arm in arms) else ("base",)
        steps = self.experiment.loop("stage1", data).steps
        return [(self.directory / f"{kind}_{data}" / "stage1", steps) for kind in kinds]

    def load(self, arm: str) -> tuple[AttachedLM, list[Any]]:
        """An arm's model, trained as far as the directory lacks it, and the modules whose parameters count."""
        return self.baseline(arm) if ARMS[arm].channel == "closed" else self.steered(arm)

    def base(self, data: str) -> Any:
        """E_base of a recipe: a language model of whole problems, frozen."""
        model = self._closed(self._fresh(self.experiment.encoder))
        module = PlanLM(model, steered=False, state_weight=self._weight(data))
        self._train(f"base_{data}", "stage1", module, self._rows(data, stage=1), data)
        return model.detach().eval().requires_grad_(False)

    def baseline(self, arm: str) -> tuple[AttachedLM, list[Any]]:
        """The unconditioned decoder, its channel closed throughout."""
        spec = ARMS[arm]
        model = self.bare(spec.data)
        module, rows = PlanLM(model, steered=False), self._rows(spec.data, stage=3)
        if spec.whole:
            module = PlanLM(model, steered=False, state_weight=self._weight(spec.data))
            rows = replace(rows, windows=(0,), states=self.experiment.recipe(spec.data).states)
        self._train(arm, "stage3", module, rows, spec.data)
        return model.eval(), [model.lm]

    def bare(self, data: str) -> AttachedLM:
        """Stage 1 of a recipe's baselines."""
        model = self._closed(self._fresh(self.experiment.baseline))
        module = PlanLM(model, steered=False, state_weight=self._weight(data))
        self._train(f"bare_{data}", "stage1", module, self._rows(data, stage=1), data)
        return model

    def steered(self, arm: str) -> tuple[AttachedLM, list[Any]]:
        """LS-AR: E_pred aligned (unless the arm is without stage 2), then decoder, FiLM and tracker."""
        e, spec = self.experiment, ARMS[arm]
        base = self.base(spec.data)
        decoder = self.copy(base)
        model = self.attach(decoder, base, dynamic=spec.channel == "dynamic", update=spec.update)
        # Stage 3's weights hold E_pred as well; stage 2 is needed only on the way to them.
        if spec.stage2 and not (self.directory / arm / "stage3" / FINAL).exists():
            self._align(arm, model)
        model.channel.encoder.requires_grad_(e.train_encoder)
        module = PlanLM(model, state_weight=e.state_weight if spec.states else 0.0).to(self.device)
        rows = replace(self._rows(spec.data, stage=3), states=spec.states)
        self._train(arm, "stage3", module, rows, spec.data, {"alpha": e.alpha_rate})
        return model.eval(), [decoder, base, model.channel]

    def copy(self, lm: Any) -> Any:
        """A trainable decoder with the weights of E_base, or of another decoder of its shape."""
        decoder = self._fresh(self.experiment.encoder)
        decoder.load_state_dict(lm.state_dict())
        return decoder

    def attach(
        self, decoder: Any, base: Any, *, dynamic: bool, update: Literal["add", "replace"] = "add"
    ) -> AttachedLM:
        """A fresh channel on `decoder`; encoder and FiLM start the same, static or dynamic."""
        torch.manual_seed(self.experiment.seed)
        triggers = tuple(self.vocabulary.encode(TRIGGER)) if dynamic else ()
        config = GoalConfig(
            mode="dynamic" if dynamic else "static",
            width=self.experiment.goal_width,
            encoder_hidden=self.experiment.predictor_hidden,
            trigger_ids=triggers,
            tracker_update=update,
        )
        return attach(decoder, goal=config, encoder=base)

    def _align(self, arm: str, model: AttachedLM) -> None:
        data = ARMS[arm].data
        some = self.encoded(data, own=False)[:20_000]
        goals = [list(text.goal_ids) for text in some]
        pooled = pooled_states(model, goals)
        if self.experiment.recipe(data).standardise:
            model.channel.encoder.calibrate(pooled)
        # CHOICE(LS-AR, 3.1): the trajectory is encoded by itself, as the goal is.
        trajectory: Tensor = pooled_states(model, [list(text.target_ids) for text in some])
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

    def _weight(self, data: str) -> float:
        return self.experiment.state_weight if self.experiment.recipe(data).states else 0.0

    def _rows(self, data: str, *, stage: int) -> PlanRowConfig:
        e, recipe = self.experiment, self.experiment.recipe(data)
        if stage == 1:
            return PlanRowConfig(
                prompt_scored=e.prompt_scored, mistakes_scored=recipe.mistakes_scored, states=recipe.states
            )
        return PlanRowConfig(windows=e.windows, mistakes_scored=recipe.mistakes_scored)

    def _closed(self, lm: Any) -> AttachedLM:
        return attach(lm, goal=GoalConfig(width=8))

    def _fresh(self, shape: Any) -> Any:
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
        config: PlanRowConfig,
        data: str,
        rates: dict[str, float] | None = None,
    ) -> None:
        seed, loop = self.experiment.seed, self.experiment.loop(stage, data)
        # Stages see different orders; E_base plays its own prefixes after stage 1.
        later = stage == "stage3"

        def rows() -> PlanRows:
            texts = self.encoded(data, own=later)
            return PlanRows(texts, config, batch_size=loop.batch_size, steps=loop.steps, seed=seed + later)

        train(
            module,
            rows,
            loop,
            self.directory / arm / stage,
            seed=seed,
            collate=collate_plans,
            label=f"{arm} {stage[:-1]} {stage[-1]}" if self.show else "",
            resume=True,
            tags={"arm": arm, "stage": stage[-1]},
            rates=rates,
        )


def finished(directory: Path, arm: str) -> PlanModels:
    """The models of a run directory that holds this arm's weights.

    Raises:
        ValueError: the directory holds no run of Table 3, or not this arm.
    """
    path = directory / "experiment.json"
    if not path.exists():
        raise ValueError(f"{directory} holds no run of lsar.table3; train one with `sidestream run lsar.table3`")
    experiment = from_json(Table3, json.loads(path.read_text(encoding="utf-8")))
    if arm not in ARMS or not (directory / arm / "stage3" / FINAL).exists():
        there = [name for name in ARMS if (directory / name / "stage3" / FINAL).exists()]
        raise ValueError(f"{directory} holds no finished arm {arm!r}; it has {', '.join(there) or 'none'}")
    return PlanModels(experiment, directory, show=False)


def solve(
    directory: Path, problems: Sequence[Problem], *, arm: str, window: int = 0, tries: int = 1
) -> list[tuple[PlanScore, tuple[Action, ...]]]:
    """Plans of a finished run's model for problems from elsewhere, in closed loop without perturbations.

    Args:
        directory: a run of `lsar.table3`.
        problems: blocks are renamed to the vocabulary's names; actions hold block numbers, so they fit the originals.
            A model trained on full goals is asked to put on the table what a goal puts nowhere.
        arm: whose weights.
        window: W; 0 for everything in view.
        tries: rollouts a problem. The first is greedy; further ones are drawn at temperature 1 from the words that
            spell legal actions, and the shortest plan that reaches the goal is kept.

    Raises:
        ValueError: the directory holds no finished run of that arm, or a problem has more blocks than there are names.
    """
    models = finished(directory, arm)
    model, _ = models.load(arm)
    full = models.task(ARMS[arm].data).goals == "full"
    asked = [standard_names(problem) for problem in problems]
    tests = [make_episode(on_table(problem) if full else problem, perturbations=0, seed=0) for problem in asked]
    best: list[tuple[PlanScore, tuple[Action, ...]] | None] = [None] * len(tests)
    for attempt in range(tries):
        goals = None
        if ARMS[arm].channel != "closed":
            goals = model.encode_goal([models.vocabulary.encode(test.prompt) for test in tests])
        draw = torch.Generator().manual_seed(attempt) if attempt else None
        ends = finish_episodes(model, tests, models.vocabulary, window=window, goals=goals, draw=draw)
        for place, (problem, test, end) in enumerate(zip(asked, tests, ends, strict=True)):
            states = trace(problem.init, end.actions)
            # What was asked may hold before the full goal does, or before a mistake.
            steps = next((i for i, state in enumerate(states) if satisfies(state, problem.goal)), None)
            actions = end.actions[:steps]
            score = score_rollout(test, end)
            if steps is not None:
                score = score_plan(problem, plan_text(actions, problem.names).split())
            held = best[place]
            if held is None or (score.success and (not held[0].success or score.steps < held[0].steps)):
                best[place] = (score, actions)
    return [found for found in best if found is not None]
