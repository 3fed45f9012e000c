"""LS-AR Table 5: the text says goal A, the vector says goal B, whose goal is reached? What is run, as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sidestream.lm.models.backbones import Backbone
from sidestream.training.loop import LoopConfig
from sidestream.training.planning import PlanData

Scale = Literal["smoke", "cpu", "paper"]
Task = Literal["treasure", "blocksworld"]


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
    "baseline": Curriculum(channel="closed", tasks=("treasure", "blocksworld")),
    "standard": Curriculum(tasks=("treasure", "blocksworld")),
    "latent_forced": Curriculum(mask=None, tasks=("treasure", "blocksworld")),
    "ball": Curriculum(mask=0.3, ball=True),
    "hardened": Curriculum(mask=0.5, overrides=True),
    "dynamic": Curriculum(channel="dynamic", mask=0.3),
}
"""The first three are the paper's. `ball` and `hardened` are defences (adversarial training of the vector channel; the
text channel's attack as training noise), `dynamic` is Latent-Forced with a tracker that full stops trigger: what the
audit needs besides."""

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

METRICS = ("goal_a", "goal_b", "neither")
UTILITY = 0.95
"""Aligned success below which authority is not read."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Blocksworld in Table 5: a small number of blocks, so that a small model solves what it is told."""

    blocks: int = 4
    """N."""
    train_problems: int = 20_000
    """Shortest plans to train on."""
    test_problems: int = 300
    """Pairs of test problems with one initial state and two goals."""
    positions: int = 160
    """Learned positions: the longest rollout."""
    encoder: Backbone
    """E_base and D_base."""
    baseline: Backbone
    """The unconditioned decoder, as many blocks as both together."""
    goal_width: int
    """G."""
    predictor_hidden: int | None = None
    """Hidden width of E_pred; None means 4 x `goal_width`."""
    pool_layer: int = 1
    """Encoder layer whose states are pooled into the vector: 1 the first block's, -1 the last (the paper's)."""
    train_encoder: bool = True
    """E_pred trains on in stage 3, as in Table 3."""
    stage1: LoopConfig
    """E_base; the baseline takes the same steps."""
    stage2: LoopConfig
    """E_pred."""
    stage3: LoopConfig
    """Decoder, FiLM and E_pred; the baseline goes on for the same steps."""

    def recipe(self) -> PlanData:
        """Shortest plans, names fixed, no mistakes: authority is asked about here, not robustness."""
        # CHOICE(LS-AR, Table 5): the symbolic state is read from E_base in stage 1, and so from every arm's start.
        # Without it plans to unseen pairs of states stay at 82% (LOG.md), and authority is not read below 95.
        return PlanData(blocks=(self.blocks,), budgets=(0,), standardise=True, states=True)


@dataclass(frozen=True, kw_only=True)
class Table5:
    """LS-AR Table 5: which channel a decoder follows when text and vector state different goals."""

    table: str = "lsar.table5"
    """The name it is run under."""
    scale: Scale
    """`smoke`, `cpu` or `paper`."""
    seed: int = 0
    """Of initial weights, training problems and their order. Test problems are the same for every seed."""
    tasks: tuple[Task, ...] = ("treasure", "blocksworld")
    """Tasks; the paper names no data set."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Arms to train, each on the tasks that have it."""
    sweep: tuple[float, ...] = (0.1, 0.3, 0.5, 0.9)
    """p of `latent_forced`; the paper's is 0.30. `standard` is p = 0."""
    window: int
    """W of Treasure Hunt: prompt, distractors, question and answer are all in view."""
    horizon: int
    """H, distractor tokens of the test problems. Room for three overrides among them."""
    train_problems: int
    """Treasure Hunt problems to train on."""
    test_problems: int = 500
    """Pairs of Treasure Hunt test problems, A and B."""
    split: Literal["test", "valid"] = "test"
    """Split to evaluate on. Settings are chosen on `valid`."""
    vocabulary: Literal["bpe", "subset"] = "bpe"
    """GPT-2's 50,257 tokens, or the same tokens cut down to those the task can have."""
    encoder: Backbone
    """E_base and, with the same shape, D_base, of Treasure Hunt."""
    baseline: Backbone
    """The unconditioned decoder of Treasure Hunt."""
    goal_width: int
    """G."""
    reconstruction: float = 10.0
    """Weight of naming the goal's tokens from P0 in stage 2 (ours, see Table 1)."""
    overrides: float = 0.5
    """Share of the rows of `hardened` that state another goal among their distractors."""
    ball_radius: float = 0.2
    """Of the ball that `ball` trains in, in units of each vector's norm."""
    ball_steps: int = 1
    """Gradient steps inside it, each about as dear as a training step."""
    stage1: LoopConfig
    """E_base; the baseline takes the same steps."""
    stage2: LoopConfig
    """E_pred: once for all arms of a task."""
    stage3: LoopConfig
    """Decoder and FiLM; the baseline goes on for the same steps."""
    blocksworld: PlanSettings
    """The second task."""

    def __post_init__(self) -> None:
        for name, known in (("arms", tuple(ARMS)), ("tasks", ("treasure", "blocksworld"))):
            values = getattr(self, name)
            unknown = [value for value in values if value not in known]
            if unknown:
                raise ValueError(f"{name} names the unknown {unknown[0]!r}; use {', '.join(known)}")
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}; give at least one, each once")
        if not all(0 < p <= 1 for p in self.sweep) or len(set(self.sweep)) < len(self.sweep):
            raise ValueError(f"sweep is {list(self.sweep)}; give shares above 0, each once (p = 0 is the arm standard)")
        if "latent_forced" in self.arms and not self.sweep:
            raise ValueError("sweep is empty, but arms has latent_forced; give at least one p")
        for name, least in (("seed", 0), ("test_problems", 2), ("horizon", 0), ("ball_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 <= self.overrides <= 1:
            raise ValueError(f"overrides is {self.overrides}; it is a share, 0 to 1")
        if self.ball_radius <= 0:
            raise ValueError(f"ball_radius is {self.ball_radius}; it must be above 0")
        if self.train_problems < max(self.stage1.batch_size, self.stage3.batch_size):
            raise ValueError(f"train_problems is {self.train_problems}, less than a batch; use more")
        if not any(self.trained(task) for task in self.tasks):
            raise ValueError(f"none of the arms {list(self.arms)} has one of the tasks {list(self.tasks)}; add one")

    def trained(self, task: Task) -> list[Trained]:
        """The models of a task, in the order of the report."""
        made = []
        for arm in self.arms:
            curriculum = ARMS[arm]
            if task not in curriculum.tasks:
                continue
            shares = sorted(self.sweep) if curriculum.mask is None else [curriculum.mask]
            made += [Trained(task=task, arm=arm, mask=share) for share in shares]
        return made


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One trained model of the table."""

    task: Task
    """What it is trained on."""
    arm: str
    """One of `ARMS`."""
    mask: float
    """p."""
    curriculum: Curriculum = field(init=False, repr=False, compare=False)
    """What its stage 3 trains on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "curriculum", ARMS[self.arm])

    @property
    def name(self) -> str:
        """Its folder's name."""
        swept = f"-p{self.mask:g}" if self.curriculum.mask is None else ""
        return f"{self.task}-{self.arm}{swept}"


def table5(scale: Scale) -> Table5:
    """The experiment at one of its scales. A variant is `dataclasses.replace(table5(scale), ...)`."""
    if scale == "paper":
        loop = LoopConfig(steps=30 * 50_000 // 32, batch_size=32, learning_rate=1e-4, precision="bf16", save_every=2000)
        plans = replace(loop, steps=30 * 100_000 // 32)
        stage2 = replace(loop, learning_rate=2e-4, precision="fp32")
        return Table5(
            scale="paper",
            window=500,
            horizon=128,
            train_problems=50_000,
            encoder=Backbone(layers=4),
            baseline=Backbone(layers=20),
            goal_width=512,
            stage1=loop,
            stage2=stage2,
            stage3=loop,
            blocksworld=PlanSettings(
                blocks=5,
                train_problems=100_000,
                test_problems=500,
                positions=320,
                encoder=Backbone(layers=4),
                baseline=Backbone(layers=10),
                goal_width=512,
                stage1=plans,
                stage2=replace(stage2, steps=plans.steps),
                stage3=plans,
            ),
        )
    if scale == "cpu":
        loop = LoopConfig(steps=300, batch_size=32, learning_rate=2e-3)
        plans = LoopConfig(steps=800, batch_size=32, learning_rate=2e-3, weight_decay=0.05, optimizer="muon")
        return Table5(
            scale="cpu",
            window=96,
            horizon=48,
            train_problems=40_000,
            vocabulary="subset",
            encoder=Backbone(layers=2, width=96, heads=4),
            baseline=Backbone(layers=4, width=96, heads=4),
            goal_width=96,
            stage1=loop,
            stage2=replace(loop, steps=1500, batch_size=256),
            stage3=replace(loop, steps=1600),
            blocksworld=PlanSettings(
                encoder=Backbone(layers=2, width=128, heads=8, family="llama"),
                baseline=Backbone(layers=4, width=128, heads=8, family="llama"),
                goal_width=128,
                predictor_hidden=256,
                stage1=replace(plans, steps=1600),
                stage2=LoopConfig(steps=500, batch_size=256, learning_rate=2e-3),
                stage3=plans,
            ),
        )
    if scale == "smoke":
        loop = LoopConfig(steps=2, batch_size=8, learning_rate=1e-3, log_every=1)
        return Table5(
            scale="smoke",
            sweep=(0.3, 0.9),
            window=96,
            horizon=48,
            train_problems=48,
            test_problems=12,
            vocabulary="subset",
            encoder=Backbone(layers=1, width=32, heads=2),
            baseline=Backbone(layers=2, width=32, heads=2),
            goal_width=32,
            stage1=loop,
            stage2=loop,
            stage3=loop,
            blocksworld=PlanSettings(
                train_problems=32,
                test_problems=6,
                encoder=Backbone(layers=1, width=32, heads=2),
                baseline=Backbone(layers=2, width=32, heads=2),
                goal_width=32,
                stage1=loop,
                stage2=loop,
                stage3=loop,
            ),
        )
    raise ValueError(f"scale is {scale!r}; use smoke, cpu or paper")


def paper_table5(arm: str, mask: float, condition: str, metric: str) -> float | None:
    """The paper's value; its data set is open, so the value faces both tasks."""
    rows = {
        "standard": {
            "(A, A)": (0.604, None),
            "(B, B)": (None, 0.614),
            "(A, B)": (0.562, 0.004),
            "(None, B)": (0.0, 0.002),
            "(A, None)": (0.304, 0.0),
        },
        "latent_forced": {
            "(A, A)": (0.722, None),
            "(B, B)": (None, 0.732),
            "(A, B)": (0.014, 0.672),
            "(None, B)": (0.0, 0.71),
            "(A, None)": (0.018, 0.0),
        },
        "baseline": {"(A, A)": (0.636, None), "(B, B)": (None, 0.622)},
    }
    if metric not in METRICS[:2] or (arm == "latent_forced" and mask != 0.3):
        return None
    pair: tuple[Any, Any] = rows.get(arm, {}).get(condition, (None, None))
    return pair[METRICS.index(metric)]
