"""LS-AR Table 5's arms and models: one stage 1 and one E_pred a task, and a stage 3 for each arm and p."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sidestream.channels import GoalConfig
from sidestream.evaluation.attacks_subject import Subject, blocksworld_subject, treasure_subject
from sidestream.evaluation.attacks_text import PLACES, TASK_OVERRIDES, insert, override_text, sentence_ends
from sidestream.experiments.run import Job
from sidestream.experiments.settings import from_json
from sidestream.lm.attach import AttachedLM, attach
from sidestream.papers.lsar import Stages
from sidestream.papers.lsar.hunt import Hunted, HuntWork
from sidestream.papers.lsar.planning import Planning, PlanWork
from sidestream.tasks import treasure
from sidestream.tasks.base import Example
from sidestream.tasks.blocksworld import Problem, satisfies, state_goal, state_graph
from sidestream.tasks.blocksworld_data import GOAL, NAMES, PLAN, split_of
from sidestream.tasks.blocksworld_data import problems as blocksworld_problems
from sidestream.tasks.treasure import TreasureProblem
from sidestream.training.loop import FINAL, train
from sidestream.training.objectives import BallLM, ScoredLM
from sidestream.training.planning import MaskedPlans, PlanData, PlanLM, collate_plans

Task = Literal["treasure", "blocksworld"]
TASKS: tuple[Task, ...] = ("treasure", "blocksworld")


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """What an arm trains on in stage 3. All arms share stage 1 and, but for the baseline, stage 2."""

    channel: Literal["closed", "static", "dynamic"] = "static"
    """`closed` is the unconditioned AR baseline."""
    mask: float | None = 0.0
    """p, the share of rows whose text of the goal is replaced by filler; None: `Table5.sweep` above 0."""
    overrides: bool = False
    """Some rows state another goal among their distractors, and their answer is the vector's (`Table5.overrides`)."""
    ball: bool = False
    """Train on the worst vector in a ball around the honest one (`Table5.ball_radius`)."""
    tasks: tuple[Task, ...] = ("treasure",)
    """Tasks that have this arm."""


ARMS = {
    "baseline": Curriculum(channel="closed", tasks=TASKS),
    "standard": Curriculum(tasks=TASKS),
    "latent_forced": Curriculum(mask=None, tasks=TASKS),
    "ball": Curriculum(mask=0.3, ball=True),
    "hardened": Curriculum(mask=0.5, overrides=True),
    "dynamic": Curriculum(channel="dynamic", mask=0.3),
}
"""The first three are the paper's. `ball` and `hardened` are defences (adversarial training of the vector channel; the
text channel's attack as training noise), `dynamic` is Latent-Forced with a tracker that full stops trigger: what the
audit needs besides."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Stages):
    """Blocksworld in Table 5: a small number of blocks, so that a small model solves what it is told."""

    blocks: int = 4
    """N."""
    train_problems: int = 20_000
    """Shortest plans to train on."""
    test_problems: int = 300
    """Pairs of test problems with one initial state and two goals."""
    positions: int = 160
    """Learned positions: the longest rollout."""
    predictor_hidden: int | None = None
    """Hidden width of E_pred; None means 4 x `goal_width`."""
    pool_layer: int = 1
    """Encoder layer whose states are pooled into the vector: 1 the first block's, -1 the last (the paper's)."""
    train_encoder: bool = True
    """E_pred trains on in stage 3, as in Table 3."""

    def recipe(self) -> PlanData:
        """Shortest plans, names fixed, no mistakes: authority is asked about here, not robustness."""
        # CHOICE(LS-AR, Table 5): the symbolic state is read from E_base in stage 1, and so from every arm's start.
        # Without it plans to unseen pairs of states stay at 82% (LOG.md), and authority is not read below 95.
        return PlanData(blocks=(self.blocks,), budgets=(0,), standardise=True, states=True)


class Trained(NamedTuple):
    """One trained model of the table."""

    task: Task
    """What it is trained on."""
    arm: str
    """One of `ARMS`."""
    mask: float
    """p."""

    @property
    def curriculum(self) -> Curriculum:
        """What its stage 3 trains on."""
        return ARMS[self.arm]

    @property
    def closed(self) -> bool:
        """It has no channel."""
        return self.curriculum.channel == "closed"

    @property
    def name(self) -> str:
        """Its folder's name."""
        swept = f"-p{self.mask:g}" if self.curriculum.mask is None else ""
        return f"{self.task}-{self.arm}{swept}"


@dataclass(frozen=True, kw_only=True)
class Table5(Hunted):
    """LS-AR Table 5: which channel a decoder follows when text and vector state different goals. Shapes and stages are
    Treasure Hunt's, whose every text is in view; `blocksworld` has those of the second task."""

    table: str = "lsar.table5"
    """The name it is run under."""
    tasks: tuple[Task, ...] = TASKS
    """Tasks; the paper names no data set."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Arms to train, each on the tasks that have it."""
    sweep: tuple[float, ...] = (0.1, 0.3, 0.5, 0.9)
    """p of `latent_forced`; the paper's is 0.30. `standard` is p = 0."""
    horizon: int
    """H, distractor tokens of the test problems. Room for three overrides among them."""
    test_problems: int = 500
    """Pairs of Treasure Hunt test problems, A and B."""
    reconstruction: float = 10.0
    """Weight of naming the goal's tokens from P0 in stage 2 (ours, see Table 1)."""
    overrides: float = 0.5
    """Share of the rows of `hardened` that state another goal among their distractors."""
    ball_radius: float = 0.2
    """Of the ball that `ball` trains in, in units of each vector's norm."""
    ball_steps: int = 1
    """Gradient steps inside it, each about as dear as a training step."""
    blocksworld: PlanSettings
    """The second task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distinct(arms=tuple(ARMS), tasks=TASKS)
        self.at_least(test_problems=2, horizon=0, ball_steps=1)
        if not all(0 < p <= 1 for p in self.sweep) or len(set(self.sweep)) < len(self.sweep):
            raise ValueError(f"sweep is {list(self.sweep)}; give shares above 0, each once (p = 0 is the arm standard)")
        if "latent_forced" in self.arms and not self.sweep:
            raise ValueError("sweep is empty, but arms has latent_forced; give at least one p")
        if not 0 <= self.overrides <= 1:
            raise ValueError(f"overrides is {self.overrides}; it is a share, 0 to 1")
        if self.ball_radius <= 0:
            raise ValueError(f"ball_radius is {self.ball_radius}; it must be above 0")
        if not any(self.trained(task) for task in self.tasks):
            raise ValueError(f"none of the arms {list(self.arms)} has one of the tasks {list(self.tasks)}; add one")

    def trained(self, task: Task) -> list[Trained]:
        """The models of a task, in the order of the report."""
        made = []
        for arm in (arm for arm in self.arms if task in ARMS[arm].tasks):
            mask = ARMS[arm].mask
            made += [Trained(task, arm, share) for share in (sorted(self.sweep) if mask is None else [mask])]
        return made


class Hunt(HuntWork[Table5]):
    """Treasure Hunt: problems, stages and models of one run directory; what is finished there is loaded."""

    @cached_property
    def tests(self) -> list[TreasureProblem]:
        """Problems A."""
        e = self.settings
        return treasure.problems(e.split, e.test_problems, [e.horizon], 0, self.vocabulary.encode)

    @cached_property
    def partners(self) -> list[TreasureProblem]:
        """Problems B."""
        return treasure.partners(self.tests)

    @cached_property
    def longest(self) -> int:
        """H up to which the prompt is in view to the end of the answer.

        Raises:
            ValueError: the tests' H is beyond it.
        """
        e = self.settings
        longest = e.window - max(len(test.forced_ids) + len(test.answer_ids) - 1 for test in self.tests) + e.horizon
        if e.horizon > longest:
            raise ValueError(
                f"horizon is {e.horizon}, and with a window of {e.window} the prompt is in view to the end of the "
                f"answer up to {longest}; authority is asked about texts in view"
            )
        return longest

    @cached_property
    def training(self) -> list[TreasureProblem]:
        """Training problems, their whole text in view: short ones more often, as in Table 1."""
        e, count = self.settings, 128
        # A code of three tokens, rarer than the tests', stands in prompt and answer.
        most = max(4, self.longest - 2)
        horizons = [round(4 * (most / 4) ** (k / (count - 1))) for k in range(count)]
        return treasure.problems("train", e.train_problems, horizons, e.seed, self.vocabulary.encode)

    def shared(self) -> list[Job]:
        """What the arms share, each job needing the one before it."""
        base, goal = "treasure-base", "treasure-goal"
        return [
            Job(name=base, work=lambda: self.base(base), stages=self.stages(base, "stage1")),
            Job(
                name=goal,
                work=lambda: self.aligned(self.attached(self.base(base), pool_layer=1)),
                needs=(base,),
                stages=self.stages(goal, "stage2"),
            ),
        ]

    def stages(self, folder: str, *stages: str) -> dict[Path, int]:
        """Stage folders and their steps."""
        return {self.directory / folder / stage: getattr(self.settings, stage).steps for stage in stages}

    def stages_of(self, trained: Trained) -> dict[Path, int]:
        """Stage folders of a model that are its own, and their steps."""
        return self.stages(trained.name, *(("stage1", "stage3") if trained.closed else ("stage3",)))

    def aligned(self, model: AttachedLM) -> Tensor:
        """Give a model the shared E_pred of stage 2; returns the pooled states of the training goals, (N, E)."""
        weight = self.settings.reconstruction
        return self.align("treasure-goal", model, "treasure", calibrate=True, reconstruction=weight)

    def load(self, trained: Trained) -> tuple[Any, list[nn.Module]]:
        """A model, trained as far as the directory lacks it, and the modules whose parameters count."""
        e, curriculum, name = self.settings, trained.curriculum, trained.name
        if trained.closed:
            bare = self.fresh(e.baseline)
            self.lm(name, "stage1", ScoredLM(bare), scored="all")
            self.lm(name, "stage3", ScoredLM(bare))
            return bare.eval(), [bare]
        base, dynamic = self.base("treasure-base"), {}
        if curriculum.channel == "dynamic":
            dynamic = {"mode": "dynamic", "trigger_ids": tuple(sorted(sentence_ends(self.vocabulary)))}
        model = self.attached(base, pool_layer=1, **dynamic)
        # Stage 3's weights hold E_pred as well.
        pooled = None if (self.directory / name / "stage3" / FINAL).exists() else self.aligned(model)
        model.channel.encoder.requires_grad_(False)
        module = BallLM(model, radius=e.ball_radius, steps=e.ball_steps) if curriculum.ball else ScoredLM(model)
        examples = partial(self.overridden, e.overrides) if curriculum.overrides else self.examples
        self.lm(name, "stage3", module, examples=examples, pooled=pooled, mask=trained.mask)
        return model.eval(), [model.lm, base, model.channel]

    def overridden(self, share: float) -> list[Example]:
        """Training examples, a share of which state another problem's goal among their distractors."""
        rng = random.Random(f"overrides {self.settings.seed}")
        ends = sentence_ends(self.vocabulary)
        made = []
        for problem in self.training:
            goal, context, answer = problem.example
            other = rng.choice(self.training)
            chosen, place = rng.choice(TASK_OVERRIDES), rng.choice(PLACES)
            if rng.random() < share and other.item != problem.item and other.code != problem.code:
                ids = self.vocabulary.encode(override_text(chosen, other))
                spare = self.longest - problem.horizon
                tail = len(problem.trigger_ids)
                if spare >= len(ids) * (3 if place == "repeated" else 1):
                    context = insert(context, ids, place, tail=tail, displace=False, sentence_ends=ends).ids
            made.append(Example(goal, context, answer))
        return made

    def attacked(self, trained: Trained, count: int, calibration: int) -> Subject:
        """A trained model with its test problems, as an audit attacks them; the arguments are `treasure_subject`'s."""
        model, window = self.load(trained)[0], self.settings.window
        return treasure_subject(model, self.vocabulary, self.tests, window=window, count=count, calibration=calibration)


class Plans:
    """Blocksworld: Table 3's data and stages with the goal's text blanked in some rows of stage 3."""

    def __init__(self, settings: Table5, directory: Path, *, show: bool = True) -> None:
        self.settings = settings
        self.own = settings.blocksworld
        self.directory = directory
        same = {name: value for name, value in vars(self.own).items() if name != "pool_layer"}
        table3 = Planning(
            scale=settings.scale,
            seed=settings.seed,
            split=settings.split,
            arms=("baseline", "static"),
            more_blocks=(),
            perturbations=(0,),
            windows=(0,),
            faithful=self.own.recipe(),
            prompt_scored=False,
            **same,
        )
        self.models = PlanWork(table3, directory / "blocksworld", show=show)
        self.vocabulary = self.models.vocabulary

    @cached_property
    def tests(self) -> list[tuple[Problem, Problem]]:
        """Pairs of problems of the split that share their initial state and differ in their goal.

        Raises:
            ValueError: the split holds fewer.
        """
        states, split, count = state_graph(self.own.blocks).hand_empty, self.settings.split, self.own.test_problems
        pairs = []
        for init in states:
            asked = [Problem(names=NAMES[: self.own.blocks], init=init, goal=state_goal(state)) for state in states]
            own = [p for p in asked if not satisfies(init, p.goal) and split_of(p, "fixed") == split]
            pairs += [(a, b) for a in own for b in own if a is not b]
        random.Random("authority").shuffle(pairs)
        if len(pairs) < count:
            raise ValueError(
                f"blocksworld.test_problems is {count}, and N = {self.own.blocks} has {len(pairs)} pairs of {split} "
                "problems; use fewer, or more blocks"
            )
        return pairs[:count]

    def shared(self) -> list[Job]:
        """What the arms share, each job needing the one before it."""
        base, goal = "blocksworld/base_faithful", "blocksworld/static"
        return [
            Job(
                name=base,
                work=lambda: self.models.base("faithful"),
                stages={self.directory / base / "stage1": self.own.stage1.steps},
            ),
            Job(
                name=goal,
                work=lambda: self.models.align("static", self.attached(self.models.base("faithful"))),
                needs=(base,),
                stages={self.directory / goal / "stage2": self.own.stage2.steps},
            ),
        ]

    def stages_of(self, trained: Trained) -> dict[Path, int]:
        """Stage folders of a model that are its own, and their steps."""
        own, models = self.own, self.models.directory
        if trained.closed:
            return {
                models / "bare_faithful" / "stage1": own.stage1.steps,
                models / "baseline" / "stage3": own.stage3.steps,
            }
        return {self.directory / trained.name / "stage3": own.stage3.steps}

    def attached(self, base: Any) -> AttachedLM:
        """A decoder that starts as E_base, with a fresh static channel that pools where `PlanSettings` says."""
        decoder = self.models.copy(base)
        torch.manual_seed(self.settings.seed)
        own = self.own
        goal = GoalConfig(width=own.goal_width, pool_layer=own.pool_layer, encoder_hidden=own.predictor_hidden)
        return attach(decoder, goal=goal, encoder=base)

    def load(self, trained: Trained) -> tuple[AttachedLM, list[Any]]:
        """A model, trained as far as the directory lacks it, and the modules whose parameters count."""
        if trained.closed:
            return self.models.baseline("baseline")
        base, path = self.models.base("faithful"), self.directory / trained.name / "stage3"
        model = self.attached(base)
        if not (path / FINAL).exists():
            self.models.align("static", model)
        model.channel.encoder.requires_grad_(self.own.train_encoder)
        loop, seed = self.own.stage3, self.settings.seed

        def rows() -> MaskedPlans:
            marks, texts = self.vocabulary.encode(f"{GOAL} {PLAN}"), self.models.encoded("faithful", own=False)
            size: dict[str, int] = {"batch_size": loop.batch_size, "steps": loop.steps, "seed": seed + 1}
            return MaskedPlans(texts, mask=trained.mask, marks=marks, **size)

        train(
            PlanLM(model).to(self.models.device),
            rows,
            loop,
            path,
            seed=seed,
            collate=collate_plans,
            label=f"{trained.name} stage 3" if self.models.show else "",
            resume=True,
            tags={"arm": trained.name, "stage": "3"},
        )
        return model.eval(), [model.lm, base, model.channel]

    def attacked(self, trained: Trained, count: int, calibration: int) -> Subject:
        """A trained model with its pairs, as an audit attacks them; the arguments are `blocksworld_subject`'s."""
        further = islice(blocksworld_problems(self.models.task("faithful"), "valid"), calibration)
        return blocksworld_subject(self.load(trained)[0], self.vocabulary, self.tests, list(further), count=count)


def finished(path: Path) -> tuple[Table5, dict[str, Trained]]:
    """A run of Table 5, and those of its models that have a channel and are trained."""
    try:
        record = json.loads((path / "experiment.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / 'experiment.json'} is damaged ({error}); repeat the run") from None
    table = record.get("table") if isinstance(record, dict) else None
    if table != "lsar.table5":
        raise ValueError(f"{path} is a run of {table}; the audit takes runs of lsar.table5, or a saved channel")
    table5 = from_json(Table5, record)
    models = [trained for task in table5.tasks for trained in table5.trained(task)]
    done = [t for t in models if not t.closed and (path / t.name / "stage3" / FINAL).exists()]
    return table5, {t.name.removeprefix("treasure-"): t for t in done}
