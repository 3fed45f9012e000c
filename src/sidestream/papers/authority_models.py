"""The models of LS-AR Table 5: one stage 1 and one E_pred a task, and a stage 3 for each arm and p."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sidestream.channels import GoalConfig, LatentState
from sidestream.channels.ball import worst_vectors
from sidestream.evaluation.attacks_text import OVERRIDES, PLACES, insert
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.texts.text import Vocabulary
from sidestream.papers.authority import Table5, Trained
from sidestream.papers.lsar.planning import Planning, PlanWork
from sidestream.tasks import treasure
from sidestream.tasks.base import Example
from sidestream.tasks.blocksworld import Problem, satisfies, state_goal, state_graph
from sidestream.tasks.blocksworld_data import GOAL, NAMES, PLAN, split_of
from sidestream.tasks.treasure import TreasureProblem
from sidestream.training.batches import RowConfig, Rows, collate
from sidestream.training.loop import FINAL, train
from sidestream.training.objectives import UNSCORED, ScoredLM
from sidestream.training.planning import PlanLM, PlanRowConfig, PlanRows, collate_plans
from sidestream.training.stages import align_goal, pooled_states, train_lm

TASK_OVERRIDES = ("restate", "answered")
"""Those of `OVERRIDES` whose words Treasure Hunt's own vocabulary has."""


class BallLM(ScoredLM):
    """Stage 3 on the worst vector of a ball around each row's own: adversarial training of the vector channel.

    Args:
        model: an attached model whose texts are wholly in view.
        radius: of the L2 ball, in units of each vector's norm.
        steps: gradient steps inside it.
    """

    def __init__(self, model: AttachedLM, *, radius: float, steps: int) -> None:
        super().__init__(model)
        self.radius = radius
        self.steps = steps

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, pooled: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As `ScoredLM`, and every row weighs the same."""
        assert pooled is not None
        scored = labels != UNSCORED
        rows = scored.nonzero()[:, 0]
        head: Any = self.model.lm.get_output_embeddings()

        def losses(vectors: Tensor) -> Tensor:
            hidden = self.model.hidden(input_ids, goal=LatentState(goal=vectors), attention_mask=attention_mask)
            each = F.cross_entropy(head(hidden[scored]).float(), labels[scored], reduction="none")
            return each.new_zeros(len(labels)).index_add(0, rows, each) / scored.sum(dim=1)

        goal = self.model.channel.encoder.predict(pooled)
        worst = worst_vectors(losses, goal, radius=self.radius, steps=self.steps)
        return {"loss": losses(goal + (worst - goal.detach())).mean()}


class HuntModels:
    """Treasure Hunt: problems, stages and models of one run directory; what is finished there is loaded.

    Raises:
        ValueError: prompt, distractors, question and answer do not fit into the window.
    """

    def __init__(self, experiment: Table5, directory: Path, *, show: bool = True) -> None:
        self.experiment = experiment
        self.directory = directory
        self.show = show
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.vocabulary = Vocabulary()
        if experiment.vocabulary == "subset":
            self.vocabulary = Vocabulary.subset(treasure.vocabulary_texts())
        e, encode = experiment, self.vocabulary.encode
        self.tests = treasure.problems(e.split, e.test_problems, [e.horizon], 0, encode)
        around = max(len(test.forced_ids) + len(test.answer_ids) - 1 for test in self.tests) - e.horizon
        self.longest = e.window - around
        if e.horizon > self.longest:
            raise ValueError(
                f"horizon is {e.horizon}, and with a window of {e.window} the prompt is in view to the end of the "
                f"answer up to {self.longest}; authority is asked about texts in view"
            )
        self.partners = partners(self.tests)

    @cached_property
    def training(self) -> list[TreasureProblem]:
        """Training problems, their whole text in view: short ones more often, as in Table 1."""
        e, count = self.experiment, 128
        # A code of three tokens, rarer than the tests', stands in prompt and answer.
        most = max(4, self.longest - 2)
        horizons = [round(4 * (most / 4) ** (k / (count - 1))) for k in range(count)]
        return treasure.problems("train", e.train_problems, horizons, e.seed, self.vocabulary.encode)

    @cached_property
    def filler(self) -> list[int]:
        """Distractors, which stand in for a blank prompt."""
        return [token for problem in self.training[:200] for token in problem.distractor_ids]

    def load(self, trained: Trained) -> tuple[Any, list[nn.Module]]:
        """A model, trained as far as the directory lacks it, and the modules whose parameters count."""
        e, curriculum = self.experiment, trained.curriculum
        if curriculum.channel == "closed":
            model = self._fresh(e.baseline)
            self._lm(trained.name, "stage1", model, self.examples, scored="all")
            self._lm(trained.name, "stage3", model, self.examples)
            return model.eval(), [model]
        base = self.base()
        model = self._attached(base, dynamic=curriculum.channel == "dynamic")
        model.channel.encoder.requires_grad_(False)
        examples = partial(self.overridden, e.overrides) if curriculum.overrides else self.examples
        self._lm(trained.name, "stage3", model, examples, steered=True, mask=trained.mask, ball=curriculum.ball)
        return model.eval(), [model.lm, base, model.channel]

    def base(self) -> Any:
        """E_base after stage 1, frozen; shared by every arm."""
        model = self._fresh(self.experiment.encoder)
        self._lm("treasure-base", "stage1", model, self.examples, scored="all")
        return model.requires_grad_(False)

    def examples(self) -> list[Example]:
        """The training problems as they are."""
        return [problem.example for problem in self.training]

    def aligned(self, model: AttachedLM) -> Tensor:
        """Give a model the shared E_pred of stage 2; returns the pooled states of the training goals, (N, E)."""
        e, encoder = self.experiment, model.channel.encoder
        goals = [problem.goal_ids for problem in self.training]
        pooled = pooled_states(model, goals)
        encoder.calibrate(pooled)
        # CHOICE(LS-AR, 3.1): the "true trajectory" is the answer, as in Table 1.
        align_goal(
            encoder,
            pooled,
            pooled_states(model, [problem.answer_ids for problem in self.training]),
            goals,
            self.vocabulary.size,
            e.stage2,
            self.directory / "treasure-goal" / "stage2",
            seed=e.seed,
            reconstruction_weight=e.reconstruction,
            label="treasure stage 2" if self.show else "",
            resume=True,
            tags={"arm": "treasure-goal", "stage": "2"},
        )
        return pooled

    def prepare(self) -> None:
        """What the arms share."""
        self.aligned(self._attached(self.base(), dynamic=False))

    def overridden(self, share: float) -> list[Example]:
        """Training examples, a share of which state another problem's goal among their distractors."""
        rng = random.Random(f"overrides {self.experiment.seed}")
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

    def _attached(self, base: Any, *, dynamic: bool) -> AttachedLM:
        decoder = self._fresh(self.experiment.encoder)
        decoder.load_state_dict(base.state_dict())  # "starts as its base" (LS-AR, 3.3)
        torch.manual_seed(self.experiment.seed)
        width = self.experiment.goal_width
        config = GoalConfig(width=width, pool_layer=1)
        if dynamic:
            triggers = tuple(sorted(sentence_ends(self.vocabulary)))
            config = GoalConfig(width=width, pool_layer=1, mode="dynamic", trigger_ids=triggers)
        return attach(decoder, goal=config, encoder=base)

    def _fresh(self, shape: Any) -> Any:
        torch.manual_seed(self.experiment.seed)
        window, pad = self.experiment.window, self.vocabulary.pad_id
        return shape.build(vocabulary=self.vocabulary.size, window=window, pad_id=pad).to(self.device)

    def _lm(
        self,
        folder: str,
        stage: str,
        model: Any,
        examples: Callable[[], Sequence[Example]],
        *,
        scored: Any = "answer",
        steered: bool = False,
        mask: float = 0.0,
        ball: bool = False,
    ) -> None:
        """Train one stage; where it is finished, load it, for which no data are made."""
        e = self.experiment
        loop = e.stage1 if stage == "stage1" else e.stage3
        path = self.directory / folder / stage
        common: dict[str, Any] = {
            "seed": e.seed,
            "label": f"{folder} {stage[:-1]} {stage[-1]}" if self.show else "",
            "resume": True,
            "tags": {"arm": folder, "stage": stage[-1]},
        }
        if (path / FINAL).exists():
            train(ScoredLM(model), list, loop, path, **common)  # type: ignore[arg-type]
            return
        pooled = self.aligned(model) if steered else None
        if steered:
            model.channel.encoder.to(self.device).requires_grad_(False)
        rows = RowConfig(window=e.window, scored=scored, mask_prompt=mask)
        if not ball:
            train_lm(model, examples(), rows, loop, path, filler=self.filler, pooled=pooled, **common)
            return
        size: dict[str, int] = {"batch_size": loop.batch_size, "steps": loop.steps, "seed": e.seed}
        data = Rows(examples(), rows, **size, filler=self.filler, pooled=pooled)
        module = BallLM(model, radius=e.ball_radius, steps=e.ball_steps)
        train(module, data, loop, path, collate=collate, **common)


def partners(problems: Sequence[TreasureProblem]) -> list[TreasureProblem]:
    """For each problem A another one, B, of another item and code; every problem is dealt out about as often.

    Raises:
        ValueError: a problem has no such other.
    """
    found = []
    for index, problem in enumerate(problems):
        turn = [problems[(index + k) % len(problems)] for k in range(1, len(problems))]
        other = next((o for o in turn if o.item != problem.item and o.code != problem.code), None)
        if other is None:
            raise ValueError(f"{len(problems)} test problems hold no other goal for one of them; use more")
        found.append(other)
    return found


def override_text(template: str, problem: TreasureProblem) -> str:
    """One of `OVERRIDES`, filled in for the goal that the attacker wants."""
    return OVERRIDES[template].format(goal=problem.goal, trigger=problem.trigger, answer=problem.answer)


def sentence_ends(vocabulary: Vocabulary) -> set[int]:
    """Ids of full stop, question and exclamation mark."""
    return {token for mark in ".?!" for token in vocabulary.encode(mark)}


class AuthorityPlans(PlanWork):
    """Blocksworld of Table 5: Table 3's stages with the goal's text blanked in some rows of stage 3."""

    def __init__(self, experiment: Table5, directory: Path, *, show: bool = True) -> None:
        plans = experiment.blocksworld
        settings = Planning(
            scale=experiment.scale,
            seed=experiment.seed,
            arms=("baseline", "static"),
            blocks=plans.blocks,
            more_blocks=(),
            perturbations=(0,),
            windows=(0,),
            faithful=plans.recipe(),
            train_problems=plans.train_problems,
            test_problems=plans.test_problems,
            split=experiment.split,
            positions=plans.positions,
            encoder=plans.encoder,
            baseline=plans.baseline,
            goal_width=plans.goal_width,
            predictor_hidden=plans.predictor_hidden,
            train_encoder=plans.train_encoder,
            prompt_scored=False,
            stage1=plans.stage1,
            stage2=plans.stage2,
            stage3=plans.stage3,
        )
        super().__init__(settings, directory / "blocksworld", show=show)
        self.plans = plans

    @cached_property
    def tests(self) -> list[tuple[Problem, Problem]]:
        """Pairs of problems of the split that share their initial state and differ in their goal.

        Raises:
            ValueError: the split holds fewer.
        """
        states = state_graph(self.plans.blocks).hand_empty
        names = NAMES[: self.plans.blocks]
        pairs = []
        for init in states:
            asked = [Problem(names=names, init=init, goal=state_goal(state)) for state in states]
            split = self.settings.split
            own = [p for p in asked if not satisfies(init, p.goal) and split_of(p, "fixed") == split]
            pairs += [(a, b) for a in own for b in own if a is not b]
        random.Random("authority").shuffle(pairs)
        if len(pairs) < self.plans.test_problems:
            raise ValueError(
                f"blocksworld.test_problems is {self.plans.test_problems}, and N = {self.plans.blocks} has "
                f"{len(pairs)} pairs of {self.settings.split} problems; use fewer, or more blocks"
            )
        return pairs[: self.plans.test_problems]

    def prepare(self) -> None:
        """What the arms share."""
        self.align("static", self.attach(self.copy(self.base("faithful")), self.base("faithful"), dynamic=False))

    def trained(self, trained: Trained) -> tuple[AttachedLM, list[Any]]:
        """A model, trained as far as the directory lacks it, and the modules whose parameters count."""
        if trained.curriculum.channel == "closed":
            return self.baseline("baseline")
        base = self.base("faithful")
        decoder = self.copy(base)
        model = self.attach(decoder, base, dynamic=False)
        path = self.directory.parent / trained.name / "stage3"
        if not (path / FINAL).exists():
            self.align("static", model)
        model.channel.encoder.requires_grad_(self.plans.train_encoder)
        module, loop, seed = PlanLM(model).to(self.device), self.plans.stage3, self.settings.seed

        def rows() -> MaskedPlans:
            marks = tuple(self.vocabulary.encode(f"{GOAL} {PLAN}"))
            texts = self.encoded("faithful", own=False)
            return MaskedPlans(
                texts, mask=trained.mask, marks=marks, batch_size=loop.batch_size, steps=loop.steps, seed=seed + 1
            )

        train(
            module,
            rows,
            loop,
            path,
            seed=seed,
            collate=collate_plans,
            label=f"{trained.name} stage 3" if self.show else "",
            resume=True,
            tags={"arm": trained.name, "stage": "3"},
        )
        return model.eval(), [decoder, base, model.channel]

    def attach(self, decoder: Any, base: Any, *, dynamic: bool, update: Any = "add") -> AttachedLM:
        """A fresh static channel that pools where `PlanSettings.pool_layer` says."""
        assert not dynamic
        torch.manual_seed(self.settings.seed)
        settings = {"pool_layer": self.plans.pool_layer, "encoder_hidden": self.plans.predictor_hidden}
        return attach(decoder, goal=GoalConfig(width=self.plans.goal_width, **settings), encoder=base)


class MaskedPlans(PlanRows):
    """Rows of whole plans whose prompt, for the decoder, has its goal blanked with probability `mask`.

    Args:
        marks: ids of the words before and behind the goal's facts.
    """

    def __init__(self, texts: Any, *, mask: float, marks: Sequence[int], **size: int) -> None:
        super().__init__(texts, PlanRowConfig(), **size)
        self.mask = mask
        self.marks = marks

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        if random.Random(f"mask {self.seed} {index}").random() < self.mask:
            row["ids"] = blank_goal(row["ids"], *self.marks)
        return row


def blank_goal(tokens: Sequence[Any], goal: Any, plan: Any) -> list[Any]:
    """A Blocksworld prompt, as words or ids, with the mark `goal` in place of every word of the goal.

    The initial state stays: the vector's goal is asked about, and where the blocks are is not part of it. The length of
    the blank still says how many blocks the goal puts on the table.
    """
    # CHOICE(LS-AR, B.3.3): the filler is open. In Treasure Hunt the whole prompt is the goal; here its half is.
    start, stop = tokens.index(goal), tokens.index(plan)
    return [*tokens[:start], *[goal] * (stop - start), *tokens[stop:]]
