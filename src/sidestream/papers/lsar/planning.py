"""LS-AR Table 3: Blocksworld in closed loop, under perturbations and under windows that lose the prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from sidestream.channels import GoalConfig, LatentState
from sidestream.evaluation.attacks_vector import noise_like
from sidestream.evaluation.planning import finish_episodes
from sidestream.evaluation.tracking import movement_pairs, trigger_cost, vector_movement
from sidestream.experiments.provenance import write_whole
from sidestream.experiments.results import Outcome
from sidestream.experiments.run import Found, Job, Measured, Side, Work, once
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, WINE, Look, Metric, Table
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.models.backbones import Backbone, parameter_count
from sidestream.lm.texts.text import WordVocabulary
from sidestream.papers.lsar import Steered, training_flops
from sidestream.papers.lsar.planning_report import scores_file, sections
from sidestream.tasks.blocksworld import Action
from sidestream.tasks.blocksworld_data import TRIGGER, WORDS, BlocksworldConfig, data_hash, examples, relabel
from sidestream.tasks.blocksworld_loop import Episode, episodes, score_rollout
from sidestream.tasks.blocksworld_picture import rollouts_record
from sidestream.training.loop import FINAL, LoopConfig, train
from sidestream.training.planning import PlanData, PlanLM, PlanRowConfig, PlanRows, PlanText, align_plans, collate_plans

LISTED = {
    "lsar.table3": {
        "title": "Blocksworld: goals reached after K perturbations, N blocks, W tokens in view (LS-AR Table 3)",
        "smoke": "under a minute on 2 CPU cores",
        "cpu": "about two hours on 2 CPU cores",
        "paper": "hours on one GPU; weeks without",
    }
}

# ---------------------------------------------------------------- what is run, as data


@dataclass(frozen=True, kw_only=True)
class PlanArm:
    """What an arm of Table 3 trains."""

    channel: Literal["closed", "static", "dynamic"]
    """`closed` is the unconditioned AR baseline."""
    data: Literal["faithful", "ours"] = "faithful"
    """Recipe of its training trajectories, the same for every arm of a kind."""
    stage2: bool = True
    """E_pred is aligned before it trains on."""
    whole: bool = False
    """Of the baseline: stage 3 goes on with whole texts as stage 1 does, so that it does not suffer from rows which ask
    for what a window has lost."""
    update: Literal["add", "replace"] = "add"
    """Of the tracker: the paper's, or ours."""
    states: bool = False
    """Linear heads must read the symbolic state from the vector at every trigger (`Planning.state_weight`)."""


ARMS = {
    "baseline": PlanArm(channel="closed"),
    "baseline_whole": PlanArm(channel="closed", whole=True),
    "static": PlanArm(channel="static"),
    "dynamic": PlanArm(channel="dynamic"),
    "dynamic_no_stage2": PlanArm(channel="dynamic", stage2=False),
    "baseline_pool": PlanArm(channel="closed", data="ours"),
    "baseline_pool_whole": PlanArm(channel="closed", data="ours", whole=True),
    "static_pool": PlanArm(channel="static", data="ours"),
    "dynamic_pool": PlanArm(channel="dynamic", data="ours"),
    "dynamic_replace": PlanArm(channel="dynamic", data="ours", update="replace"),
    "dynamic_state": PlanArm(channel="dynamic", data="ours", update="replace", states=True),
}
DERIVED = {"random_film": "static", "random_film_dynamic": "dynamic", "alpha_zero": "static"}
"""Arms that evaluate another arm's weights: with Gaussian noise for the vector, or through a tracker whose alpha is 0.
With alpha frozen at 0 every gradient of training is the static channel's (a test holds it), so that arm needs none."""


OURS = PlanData(
    blocks=(4, 5, 5),
    names="pool",
    pool=10,
    budgets=(0, 1, 2, 3, 4),
    perturb_per="step",
    own_prefixes=5_000,
    mistakes_scored=False,
    standardise=True,
    states=True,
)
COMPARED = {
    "faithful": ("dynamic", "static", "baseline", "baseline_whole"),
    "ours": ("dynamic_state", "static_pool", "baseline_pool", "baseline_pool_whole"),
}
"""Arms of each recipe that are tested against each other, the first against the others."""


@dataclass(frozen=True, kw_only=True)
class Planning(Steered):
    """Settings of LS-AR Table 3: goal success on Blocksworld after K perturbations, N blocks, W tokens in view."""

    table: str = "lsar.table3"
    """The name it is run under."""
    arms: tuple[str, ...] = (*ARMS, *DERIVED)
    """Arms, in the order of the report."""
    blocks: int = 5
    """N of the perturbed tests."""
    more_blocks: tuple[int, ...] = (6, 7)
    """N tested zero-shot, at K = 0."""
    perturbations: tuple[int, ...] = (0, 1, 2, 3, 4)
    """K tested at N = `blocks`."""
    windows: tuple[int, ...] = (0, 32, 16)
    """W trained (drawn per row) and tested; 0 is everything in view."""
    faithful: PlanData = PlanData()
    """Trajectories of the paper's arms."""
    ours: PlanData = OURS
    """Trajectories of the arms that `ARMS` gives `data="ours"`."""
    train_problems: int = 100_000
    """Trajectories to train on (the paper: 100,000)."""
    positions: int = 320
    """Learned positions of E_base and, with everything in view, of the decoder: the longest rollout."""
    predictor_hidden: int | None = None
    """Hidden width of E_pred; None means 4 x `goal_width`."""
    train_encoder: bool = True
    """E_pred trains on in stage 3 (open in the paper; without it Static cannot use its vector at all here)."""
    alpha_rate: float = 30.0
    """Learning rate of alpha over that of the rest: from 0, AdamW's equal steps would leave it near 0."""
    trigger_places: tuple[int, ...] = (50, 500, 5000)
    """Places of a long rollout at which the cost of a trigger is measured."""
    encoder_window: int | None = None
    """Tokens E_base keeps in that measurement (`Window(encoder_size=...)`); None for all. More than any rollout has."""
    prompt_scored: bool = True
    """Stage 1 is a language model of the whole text; off, of the plan given the prompt, which is random."""
    state_weight: float = 0.3
    """Weight of the symbolic-state loss where an arm or a recipe has one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distinct(arms=(*ARMS, *DERIVED), windows=None, perturbations=None)
        self.at_least(train_problems=1)
        for arm in self.arms:
            if arm in DERIVED and DERIVED[arm] not in self.arms:
                raise ValueError(f"arm {arm!r} evaluates the weights of {DERIVED[arm]!r}; add that arm")

    def recipe(self, data: str) -> PlanData:
        """The recipe of `faithful` or `ours`."""
        return self.faithful if data == "faithful" else self.ours

    def loop(self, stage: str, data: str) -> LoopConfig:
        """How a recipe's arms are trained in a stage."""
        loop: LoopConfig = getattr(self, stage)
        return loop if stage == "stage2" else replace(loop, steps=round(loop.steps * self.recipe(data).longer))


def table3(scale: Scale) -> Planning:
    """The experiment at one of its scales."""
    rest: dict[str, Any] = {}
    if scale == "paper":
        epoch = 100_000 // 32
        loop = LoopConfig(steps=30 * epoch, batch_size=32, learning_rate=1e-4, precision="bf16", save_every=2000)
        aligned = replace(loop, learning_rate=2e-4, precision="fp32")
        encoder, baseline, width = Backbone(layers=4), Backbone(layers=10), 512
    elif scale == "cpu":
        # CHOICE(LS-AR, B.3.3): rotary positions, heads of 16 and Muon at this scale; with learned positions and AdamW
        # the same model needs several times the half hour an arm has (LOG.md). Every arm has the same.
        loop = LoopConfig(steps=2000, batch_size=32, learning_rate=2e-3, weight_decay=0.05, optimizer="muon")
        aligned = LoopConfig(steps=1000, batch_size=256, learning_rate=2e-3)
        encoder, width = Backbone(layers=2, width=128, heads=8, family="llama"), 128
        baseline = replace(encoder, layers=4)
        # The steps between `dynamic` and `dynamic_state`, and stage 2 left out, cost another 20 minutes each.
        dear = ("dynamic_no_stage2", "dynamic_pool", "dynamic_replace")
        arms = tuple(arm for arm in (*ARMS, *DERIVED) if arm not in dear)
        rest = dict(arms=arms, predictor_hidden=256, encoder_window=256, prompt_scored=False)
    elif scale == "smoke":
        loop = aligned = LoopConfig(steps=4, batch_size=8, learning_rate=1e-3, log_every=1)
        encoder, baseline, width = Backbone(layers=1, width=32, heads=2), Backbone(layers=2, width=32, heads=2), 32
        asked = dict(blocks=4, more_blocks=(5,), perturbations=(0, 1), train_problems=64, test_problems=12)
        ours = replace(OURS, blocks=(4,), budgets=(0, 1), own_prefixes=48)
        rest = dict(faithful=PlanData(blocks=(4,)), ours=ours, positions=160, trigger_places=(50, 150), **asked)
    else:
        raise ValueError(f"scale is {scale!r}; use smoke, cpu or paper")
    rest |= dict(stage1=loop, stage2=aligned, stage3=loop)
    return Planning(scale=scale, encoder=encoder, baseline=baseline, goal_width=width, **rest)


def published(arm: str, metric: str, where: dict[str, Any]) -> float | None:
    """The paper's value: its Table 3 does not say which window it was made at, so it stands at W = 0 only."""
    key = f"K{where['K']}" if where["N"] == 5 else f"N{where['N']}"
    rows = {
        "baseline": {"K0": 0.96, "K1": 0.71, "K2": 0.06, "N6": 0.0},
        "static": {"K0": 0.95, "K1": 0.66, "K2": 0.05, "N6": 0.0},
        "dynamic": {"K0": 0.98, "K1": 0.89, "K2": 0.07, "N6": 0.0},
        "random_film": {"K0": 0.0},
    }
    return None if where["W"] else rows.get(arm, {}).get(key)


# ---------------------------------------------------------------- training and measuring

CLOSED = GoalConfig(width=8)
"""Of a bare decoder, whose channel is never opened."""


class PlanWork(Work[Planning]):
    """Trajectories, models and rollouts of one run."""

    def __init__(self, settings: Planning, directory: Path, *, show: bool = True) -> None:
        super().__init__(settings, directory, show=show)
        self.vocabulary = WordVocabulary(WORDS)
        self.trajectories, self.encoded = cache(self._trajectories), cache(self._encoded)
        self.episodes = cache(self._episodes)

    def check(self) -> None:
        """Numbers of blocks that no problem can have."""
        for arm in self.settings.arms:
            self.task(arm_of(arm).data, (self.settings.blocks, *self.settings.more_blocks))

    def data_hash(self) -> str:
        """Of the training trajectories of the first arm's recipe."""
        return data_hash(self.trajectories(arm_of(self.settings.arms[0]).data))

    def jobs(self) -> list[Job]:
        """What arms share, a recipe's E_base with its own prefixes and stage 1 of its baselines; then the arms."""
        e, made = self.settings, []

        def add(name: str, work: Any, data: str, needs: tuple[str, ...], *stages: str) -> None:
            folders = {self.directory / name / stage: e.loop(stage, data).steps for stage in stages}
            made.append(Job(name=name, work=work, needs=needs, stages=folders))

        specs = {arm: arm_of(arm) for arm in e.arms}
        kinds = {arm: ("base", "bare") if spec.channel == "closed" else ("base",) for arm, spec in specs.items()}
        for kind, data in dict.fromkeys((kind, specs[arm].data) for arm in e.arms for kind in kinds[arm]):
            work = self.prepare if kind == "base" else self.bare
            add(f"{kind}_{data}", partial(work, data), data, (), "stage1")
        for arm, spec in specs.items():
            needs = tuple(f"{kind}_{spec.data}" for kind in kinds[arm])
            stages = ("stage2", "stage3") if spec.stage2 and spec.channel != "closed" else ("stage3",)
            if arm in DERIVED:
                needs, stages = (DERIVED[arm],), ()
            add(arm, partial(self.arm, arm), spec.data, needs, *stages)
        return made

    def task(self, data: str, blocks: tuple[int, ...] = ()) -> BlocksworldConfig:
        """The task as one of the two recipes trains it, or with other numbers of blocks."""
        return self.settings.recipe(data).task(self.settings.seed, blocks)

    def _trajectories(self, data: str) -> list[Any]:
        count = self.settings.train_problems
        return list(islice(examples(self.task(data), "train", count), count))

    def own_prefixes(self, data: str) -> list[Any]:
        """Trajectories that E_base began, with its mistakes, and a shortest plan ended (none unless asked for).

        E_base plays them once, so all arms of a recipe train on the same rows.
        """
        played = self.settings.recipe(data).to_begin(self.settings.seed)

        def play() -> list[Any]:
            ends = finish_episodes(attach(self.base(data), goal=CLOSED).eval(), played, self.vocabulary, window=0)
            return [end.actions for end in ends]

        rows = once(self.directory / f"base_{data}" / "own_prefixes.json", play) if played else []
        prefixes = [[Action(name, tuple(blocks)) for name, blocks in row] for row in rows]
        return [relabel(episode.problem, prefix) for episode, prefix in zip(played, prefixes, strict=True)]

    def _encoded(self, data: str, *, own: bool) -> list[PlanText]:
        rows = [*self.trajectories(data), *(self.own_prefixes(data) if own else [])]
        return [PlanText.of(example, self.vocabulary.encode) for example in rows]

    def tested(self, data: str, blocks: int) -> BlocksworldConfig:
        """The task as it is tested: the same problems for every K, window and seed, and for all arms of a recipe."""
        return replace(self.task(data, (blocks,)), seed=0, goals="full")

    def _episodes(self, data: str) -> dict[tuple[int, int], list[Episode]]:
        """(K, N) -> its episodes."""
        e = self.settings
        wanted = [(k, e.blocks) for k in e.perturbations] + [(0, n) for n in e.more_blocks]
        config = partial(self.tested, data)
        return {(k, n): episodes(config(n), e.split, e.test_problems, perturbations=k) for k, n in wanted}

    def prepare(self, data: str) -> None:
        """E_base of a recipe, and its own prefixes."""
        self.base(data)
        self.own_prefixes(data)

    def base(self, data: str) -> Any:
        """E_base of a recipe: a language model of whole problems, frozen."""
        return self._first(f"base_{data}", self.settings.encoder, data).detach().eval().requires_grad_(False)

    def bare(self, data: str) -> AttachedLM:
        """Stage 1 of a recipe's baselines."""
        return self._first(f"bare_{data}", self.settings.baseline, data)

    def _first(self, folder: str, shape: Backbone, data: str) -> AttachedLM:
        model, states = attach(self._fresh(shape), goal=CLOSED), self.settings.recipe(data).states
        module = PlanLM(model, steered=False, state_weight=self.settings.state_weight * states)
        self._train(folder, "stage1", module, data, prompt_scored=self.settings.prompt_scored, states=states)
        return model

    def load(self, arm: str) -> tuple[AttachedLM, list[Any]]:
        """An arm's model, trained as far as the directory lacks it, and the modules whose parameters count."""
        return self.baseline(arm) if ARMS[arm].channel == "closed" else self.steered(arm)

    def baseline(self, arm: str) -> tuple[AttachedLM, list[Any]]:
        """The unconditioned decoder, its channel closed throughout."""
        e, spec = self.settings, ARMS[arm]
        states = spec.whole and e.recipe(spec.data).states
        model = self.bare(spec.data)
        module = PlanLM(model, steered=False, state_weight=e.state_weight * states)
        self._train(arm, "stage3", module, spec.data, windows=(0,) if spec.whole else e.windows, states=states)
        return model.eval(), [model.lm]

    def steered(self, arm: str) -> tuple[AttachedLM, list[Any]]:
        """LS-AR: E_pred aligned (unless the arm is without stage 2), then decoder, FiLM and tracker."""
        e, spec = self.settings, ARMS[arm]
        decoder = self.copy(base := self.base(spec.data))
        model = self.attach(decoder, base, dynamic=spec.channel == "dynamic", update=spec.update)
        # Stage 3's weights hold E_pred as well; stage 2 is needed only on the way to them.
        if spec.stage2 and not (self.directory / arm / "stage3" / FINAL).exists():
            self.align(arm, model)
        model.channel.encoder.requires_grad_(e.train_encoder)
        module = PlanLM(model, state_weight=e.state_weight * spec.states).to(self.device)
        self._train(arm, "stage3", module, spec.data, {"alpha": e.alpha_rate}, windows=e.windows, states=spec.states)
        return model.eval(), [decoder, base, model.channel]

    def copy(self, lm: Any) -> Any:
        """A trainable decoder with the weights of E_base, or of another decoder of its shape."""
        decoder = self._fresh(self.settings.encoder)
        decoder.load_state_dict(lm.state_dict())
        return decoder

    def attach(
        self, decoder: Any, base: Any, *, dynamic: bool, update: Literal["add", "replace"] = "add"
    ) -> AttachedLM:
        """A fresh channel on `decoder`; encoder and FiLM start the same, static or dynamic."""
        torch.manual_seed(self.settings.seed)
        config = GoalConfig(
            mode="dynamic" if dynamic else "static",
            width=self.settings.goal_width,
            encoder_hidden=self.settings.predictor_hidden,
            trigger_ids=tuple(self.vocabulary.encode(TRIGGER)) if dynamic else (),
            tracker_update=update,
        )
        return attach(decoder, goal=config, encoder=base)

    def align(self, arm: str, model: AttachedLM) -> None:
        """Stage 2."""
        data, stage = ARMS[arm].data, self._stage(arm, "stage2")
        texts, standardise = self.encoded(data, own=False), self.settings.recipe(data).standardise
        align_plans(model, texts, self.vocabulary.size, standardise=standardise, loop=self.settings.stage2, **stage)

    def _fresh(self, shape: Backbone) -> Any:
        torch.manual_seed(self.settings.seed)
        words, window = self.vocabulary, self.settings.positions
        return shape.build(vocabulary=words.size, window=window, pad_id=words.pad_id).to(self.device)

    def _train(self, arm: str, stage: str, module: PlanLM, data: str, rates: Any = None, **rows: Any) -> None:
        """`rows`: fields of `PlanRowConfig`."""
        seed, loop = self.settings.seed, self.settings.loop(stage, data)
        config = PlanRowConfig(mistakes_scored=self.settings.recipe(data).mistakes_scored, **rows)
        # Stages see different orders; E_base plays its own prefixes after stage 1.
        later = stage == "stage3"

        def made() -> PlanRows:
            texts = self.encoded(data, own=later)
            return PlanRows(texts, config, batch_size=loop.batch_size, steps=loop.steps, seed=seed + later)

        train(module, made, loop, collate=collate_plans, rates=rates, **self._stage(arm, stage))

    def _stage(self, arm: str, stage: str) -> dict[str, Any]:
        """Where a stage is, and what its training is told."""
        label, tags = self.label(f"{arm} stage {stage[-1]}"), {"arm": arm, "stage": stage[-1]}
        path, seed = self.directory / arm / stage, self.settings.seed
        return {"directory": path, "seed": seed, "label": label, "tags": tags, "resume": True}

    def arm(self, arm: str) -> Measured:
        """Train an arm, or take the one that it is derived from, and play it; its rollouts are kept beside."""
        e, source, outcomes = self.settings, DERIVED.get(arm, arm), []
        model, modules = self.load(source)
        for (k, n), tests in self.episodes(ARMS[source].data).items():
            player, goals = self.player(arm, model, tests)
            for window in e.windows:
                where = {"K": k, "N": n, "W": window}
                ends = finish_episodes(player, tests, self.vocabulary, window=window, goals=goals)
                scores = [score_rollout(test, end)._asdict() for test, end in zip(tests, ends, strict=True)]
                played = [{"actions": end.actions, "forced": end.forced} for end in ends]
                rows = [{**score, **plan} for score, plan in zip(scores, played, strict=True)]
                write_whole(self.directory / arm / scores_file(where), json.dumps(rows))
                reached = [float(score["success"]) for score in scores]
                outcomes.append(Outcome(arm=arm, metric="success", where=where, values=reached))
        if arm in DERIVED:
            return Measured(outcomes=outcomes)
        drawn = {}
        if ARMS[arm].channel == "dynamic":
            config = self.tested(ARMS[arm].data, e.blocks)
            pairs = movement_pairs(config, e.split, min(100, e.test_problems))
            drawn = {"vectors": vector_movement(model, *pairs, self.vocabulary)}
        return Measured(outcomes=outcomes, facts={"parameters": parameter_count(*modules)}, drawn=drawn)

    def player(self, arm: str, model: AttachedLM, tests: list[Episode]) -> tuple[AttachedLM, LatentState | None]:
        """The model that plays as `arm`, made from the one with its weights, and the vectors it starts from."""
        if arm_of(arm).channel == "closed":
            return model, None
        if arm == "alpha_zero":
            # The static arm's weights in a dynamic channel, whose fresh tracker has alpha = 0.
            player = self.attach(self.copy(model.lm), model.encoder, dynamic=True).eval()
            player.channel.encoder.load_state_dict(model.channel.encoder.state_dict())
            player.channel.film.load_state_dict(model.channel.film.state_dict())
            model = player
        goals = model.encode_goal([self.vocabulary.encode(test.prompt) for test in tests])
        if arm.startswith("random_film"):
            assert goals.goal is not None
            goals = model.encode_goal(LatentState(goal=noise_like(goals.goal, self.settings.seed)))
        return model, goals

    def finish(self, found: Found) -> None:
        """rollouts.json, and trigger.json: what a trigger costs, timed when nothing else runs."""
        e = self.settings
        self.pick_rollouts()
        tracked = [arm for arm in e.arms if arm in ARMS and ARMS[arm].channel == "dynamic"]
        if tracked:
            model, _ = self.load(tracked[0])
            cost = trigger_cost(model, self.vocabulary, places=e.trigger_places, encoder_size=e.encoder_window)
            write_whole(self.directory / "trigger.json", json.dumps(cost))

    def pick_rollouts(self) -> None:
        """rollouts.json: a perturbed problem that the baseline fails and the Dynamic arm solves, at the smallest W."""
        e = self.settings
        place = {"K": min(1, max(e.perturbations)), "N": e.blocks, "W": min(filter(None, e.windows), default=0)}
        for data, (ours, _, theirs, _) in reversed(COMPARED.items()):
            paths = [self.directory / arm / scores_file(place) for arm in (ours, theirs)]
            good, bad = ([] if not path.exists() else json.loads(path.read_text(encoding="utf-8")) for path in paths)
            which = [i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a["success"] and not b["success"]]
            if which:
                # The one whose baseline gets furthest before it fails: there is something to see.
                pick = max(which, key=lambda i: (len(bad[i]["actions"]), -len(good[i]["actions"])))
                problem = self.episodes(data)[place["K"], e.blocks][pick].problem
                record = rollouts_record(problem, {theirs: bad[pick], ours: good[pick]}, place)
                write_whole(self.directory / "rollouts.json", json.dumps(record))
                return

    def notes(self, found: Found) -> list[str]:
        """How the numbers were made, and paired tests at K = 1."""
        notes = [
            "Closed loop: the model emits an action, the simulator executes it; K sub-optimal actions are forced at "
            "random steps, the same for every arm. An illegal action, `end` too early or too many steps is a failure.",
            "One model an arm serves every window: the window of a training row is drawn from those tested. "
            "Arms `whole texts only` train with everything in view.",
            "The paper does not say at which window its table was made; its values stand at W = 0, everything in view.",
            "Arms `, our data` train and are tested on names drawn from a pool; compare them with each other only.",
        ]
        for first, *others in COMPARED.values():
            for window in self.settings.windows:
                place = {"K": 1, "N": self.settings.blocks, "W": window}
                for other in others:
                    sides = Side(first, place), Side(other, place)
                    notes += found.paired("success", *sides, where=f"K = 1, W = {window or 'all'}")
        return notes


def arm_of(arm: str) -> PlanArm:
    """What an arm, or the one that it is derived from, trains."""
    return ARMS[DERIVED.get(arm, arm)]


TABLES = [
    Table(
        name="lsar.table3",
        heading="LS-AR, Table 3: Blocksworld",
        at=table3,
        work=PlanWork,
        metrics={"success": Metric("Goal reached")},
        arms={
            "baseline": Look("AR baseline", GREY),
            "static": Look("LS-AR Static", BLUE),
            "dynamic": Look("LS-AR Dynamic", GREEN),
            "baseline_whole": Look("AR baseline, whole texts only"),
            "dynamic_no_stage2": Look("LS-AR Dynamic, no stage 2", ORANGE),
            "alpha_zero": Look("LS-AR Dynamic, alpha frozen at 0", SKY),
            "random_film": Look("Random FiLM (Static)", PINK),
            "random_film_dynamic": Look("Random FiLM (Dynamic)", WINE),
            "baseline_pool": Look("AR baseline, our data", GREY, dashed=True),
            "baseline_pool_whole": Look("AR baseline, our data, whole texts only"),
            "static_pool": Look("LS-AR Static, our data", BLUE, dashed=True),
            "dynamic_pool": Look("LS-AR Dynamic, our data", GREEN, dashed=True),
            "dynamic_replace": Look("+ latest update only"),
            "dynamic_state": Look("LS-AR Dynamic (ours): + state read from the vector", RED),
        },
        paper=published,
        sections=partial(sections, own={arm for arm, spec in ARMS.items() if spec.data == "ours"}),
        # A planning row is a prompt of ~28 tokens and a plan of ~35.
        flops=lambda e: training_flops(e, 64),
    )
]
