"""Planning: recipes of trajectories, and rows of them: windowed text for the decoder, the whole text for the encoder
that the tracker reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from sidestream.channels import LatentState, mean_pool
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.decode import pad_right
from sidestream.lm.decoding.tracked import cropped
from sidestream.tasks.base import Encode
from sidestream.tasks.blocksworld import HELD, OPERATORS, TABLE, trace
from sidestream.tasks.blocksworld_data import NAMES, TRIGGER, BlocksworldConfig, PlanExample, blank_goal
from sidestream.tasks.blocksworld_loop import Episode, episodes
from sidestream.training.batches import plan
from sidestream.training.objectives import UNSCORED, token_losses
from sidestream.training.stages import align_goal, pooled_states

PLACES = len(NAMES) + 2
"""What a block can stand on: another name, the table, the hand. Enough classes for operators and `end`, too."""
FACTS = 2 * len(NAMES) + 3
"""Questions about a state: each name's support now and in the goal, and the next action's operator and blocks."""


@dataclass(frozen=True, kw_only=True)
class PlanData:
    """A recipe for training trajectories."""

    blocks: tuple[int, ...] = (5,)
    """N, drawn uniformly for each problem."""
    names: Literal["fixed", "pool"] = "fixed"
    """Block names: always a, b, c, ... or drawn per problem, so that the names of larger problems are trained too."""
    pool: int = 26
    """Names in the pool."""
    goals: Literal["full", "on"] = "full"
    """Goals that fix every block, or only `on` facts as PDDL problems have them."""
    budgets: tuple[int, ...] = (1,)
    """Most forced sub-optimal actions in a trajectory, drawn per problem."""
    # CHOICE(LS-AR, Tasks): "with probability 0.3" is read as a share of the trajectories. At 0.3 a step hardly any plan
    # of 13 actions is free of mistakes, and K = 1 is what is trained; the paper's 96 / 71 / 6 say K = 0 is.
    perturb_per: Literal["step", "trajectory"] = "trajectory"
    """What a forced action's probability of 0.3 counts for: each step, or once for the whole budget."""
    own_prefixes: int = 0
    """How many further trajectories E_base begins itself (perturbed as in the test, `budgets` of them) and a shortest
    plan ends. They join in stage 3."""
    mistakes_scored: bool = True
    """Put the loss on sub-optimal actions too, as the paper's next-token loss does."""
    standardise: bool = False
    """Standardise E_pred's input over the training prompts, whose pooled states differ by little."""
    states: bool = False
    """In stage 1 linear heads must read the symbolic state from the last layer at every trigger, for E_base and for the
    baseline alike."""
    longer: float = 1.0
    """Factor on the steps of stages 1 and 3."""

    def task(self, seed: int, blocks: tuple[int, ...] = ()) -> BlocksworldConfig:
        """The problems and trajectories that this asks for, or those of other numbers of blocks."""
        drawn = {name: getattr(self, name) for name in ("names", "pool", "goals", "budgets", "perturb_per")}
        return BlocksworldConfig(blocks=blocks or self.blocks, seed=seed, **drawn)

    def to_begin(self, seed: int) -> list[Episode]:
        """What E_base is to begin, as `own_prefixes` says: problems of another seed than the generated ones."""
        each = -(-self.own_prefixes // len(self.budgets))
        config = self.task(seed + 1_000_003)
        return [one for budget in self.budgets for one in episodes(config, "train", each, perturbations=budget)]


class PlanText(NamedTuple):
    """A training trajectory as token ids."""

    example: PlanExample
    """What it was made from."""
    goal_ids: tuple[int, ...]
    """The prompt."""
    target_ids: tuple[int, ...]
    """The trajectory."""

    @staticmethod
    def of(example: PlanExample, encode: Encode) -> PlanText:
        """Prompt and trajectory encoded apart; `encode` must be word-level."""
        return PlanText(example, tuple(encode(example.prompt)), tuple(encode(example.trajectory)))


@dataclass(frozen=True, kw_only=True)
class PlanRowConfig:
    """How a trajectory becomes a row."""

    windows: tuple[int, ...] = (0,)
    """W to train at, drawn per row; 0 is everything in view. One model then serves every window it was trained at."""
    prompt_scored: bool = False
    """Put the loss on the prompt's tokens too (stage 1, a language model of the domain)."""
    mistakes_scored: bool = True
    """Put the loss on sub-optimal actions too, forced or a model's own: the paper's next-token loss makes no
    difference. Off, a row teaches how to go on after a mistake, and not to make it."""
    states: bool = False
    """Give the symbolic state at the end of the prompt and at each trigger, for `PlanLM(state_weight=...)`."""


class PlanRows(Dataset):
    """A fixed number of rows, each a function of (seed, index).

    Args:
        texts: prompts and trajectories.
        config: windows and loss positions.
        batch_size, steps: rows are planned for exactly this many.
        seed: of order, windows and crops.
    """

    def __init__(
        self, texts: Sequence[PlanText], config: PlanRowConfig, *, batch_size: int, steps: int, seed: int
    ) -> None:
        self.texts = texts
        self.config = config
        self.seed = seed
        lengths = [len(text.goal_ids) + len(text.target_ids) for text in texts]
        self.order = plan(lengths, batch_size=batch_size, steps=steps, seed=seed)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = self.texts[self.order[index]]
        return plan_row(text, self.config, random.Random(f"plan row {self.seed} {index}"))


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


def plan_row(text: PlanText, config: PlanRowConfig, rng: random.Random) -> dict[str, Any]:
    """Full text, the crop the decoder sees, its labels (the token after each), and where the crop begins."""
    goal = len(text.goal_ids)
    ids = [*text.goal_ids, *text.target_ids]
    labels = [
        token if config.prompt_scored or place >= goal else UNSCORED for place, token in enumerate(ids[1:], start=1)
    ]
    example = text.example
    ends = [goal + end for end in _action_ends(example)]
    if not config.mistakes_scored:
        for step in example.suboptimal:
            first = ends[step - 1] if step else goal
            labels[first - 1 : ends[step] - 1] = [UNSCORED] * (ends[step] - first)
    window = rng.choice(config.windows)
    first, last = 0, len(ids) - 1
    if window and last > window:
        # Any stretch of W tokens that predicts some of the plan; its early positions see less than W, which the model
        # meets at test time too, at the start of a rollout.
        last = rng.randint(max(window, goal), len(ids) - 1)
        first = last - window
    row = {"full": ids, "goal": goal, "first": first, "ids": ids[first:last], "labels": labels[first:last]}
    if config.states:
        # Places of the end of the prompt and of every trigger, and where each block is there.
        row["places"] = [goal - 1, *(end - 1 for end in ends)]
        row["states"] = symbolic_states(example)
    return row


def _action_ends(example: PlanExample) -> list[int]:
    """Tokens up to and with the trigger of each action, counted from the start of the trajectory."""
    ends, length = [], 0
    for action in example.actions:
        length += 1 + len(action.blocks) + len(TRIGGER.split())
        ends.append(length)
    return ends


def symbolic_states(example: PlanExample) -> list[list[int]]:
    """For each state of the trajectory `FACTS` class numbers, `UNSCORED` where there is no answer.

    For each name of the vocabulary what its block stands on (a name's number, or one more for the table, two for the
    hand), the same in the goal, and of the next action operator (one more for `end`) and blocks. A mistake has no
    answer.
    """
    problem = example.problem
    slots = [NAMES.index(name) for name in problem.names]
    special = {TABLE: len(NAMES), HELD: len(NAMES) + 1}
    goal = [UNSCORED] * len(NAMES)
    for predicate, blocks in problem.goal:
        if predicate in ("on", "ontable"):
            goal[slots[blocks[0]]] = slots[blocks[1]] if predicate == "on" else special[TABLE]
    rows = []
    for step, state in enumerate(trace(problem.init, example.actions)):
        now = [UNSCORED] * len(NAMES)
        for block, below in enumerate(state):
            now[slots[block]] = slots[below] if below >= 0 else special[below]
        following = [len(OPERATORS), UNSCORED, UNSCORED]
        if step in example.suboptimal:
            following = [UNSCORED] * 3
        elif step < len(example.actions):
            name, blocks = example.actions[step]
            following = [list(OPERATORS).index(name), *(slots[x] for x in blocks), UNSCORED][:3]
        rows.append(now + goal + following)
    return rows


def collate_plans(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Right-padded batch."""
    ids, mask = pad_right([row["ids"] for row in rows])
    full, full_mask = pad_right([row["full"] for row in rows])
    labels, _ = pad_right([row["labels"] for row in rows], value=UNSCORED)
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "full_ids": full,
        "full_mask": full_mask,
        "first": torch.tensor([row["first"] for row in rows]),
        "goal_length": torch.tensor([row["goal"] for row in rows]),
    }
    if "places" in rows[0]:
        # Flat, as rows have different numbers of triggers: (row, place) of each state.
        batch["state_rows"] = torch.tensor([i for i, row in enumerate(rows) for _ in row["places"]])
        batch["state_places"] = torch.tensor([place for row in rows for place in row["places"]])
        batch["states"] = torch.tensor([state for row in rows for state in row["states"]])
    return batch


class PlanLM(nn.Module):
    """Stage 3 of planning: next-token loss on windowed plans, the vector read from the whole text so far.

    Args:
        model: an attached model, static or dynamic.
        steered: False trains the bare decoder, the channel closed (the AR baseline).
        state_weight: of an extra loss, ours: at the end of the prompt and at every trigger, linear heads must read what
            each block stands on now and in the goal, and the next action. They read the vector; or the last hidden
            state of a bare decoder, whose rows must then be whole texts.
    """

    def __init__(self, model: AttachedLM, *, steered: bool = True, state_weight: float = 0.0) -> None:
        super().__init__()
        if state_weight and steered and model.channel.tracker is None:
            raise ValueError("state_weight needs a dynamic channel: a static vector cannot know the state at a trigger")
        self.model = model
        self.steered = steered
        self.state_weight = state_weight
        width = model.channel.config.width if steered else model.channel.config.model_width
        assert width is not None
        self.reader = nn.Linear(width, FACTS * PLACES) if state_weight else None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        full_ids: Tensor,
        full_mask: Tensor,
        first: Tensor,
        goal_length: Tensor,
        state_rows: Tensor | None = None,
        state_places: Tensor | None = None,
        states: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Mean cross-entropy at labelled positions.

        Args:
            input_ids, attention_mask, labels: (B, W) the crop.
            full_ids, full_mask: (B, T) prompt and trajectory.
            first: (B,) where each crop begins in its full text.
            goal_length: (B,) tokens of each prompt.
            state_rows, state_places: (M,) row and place in the full text of each symbolic state.
            states: (M, FACTS) `symbolic_states`.
        """
        terms = vectors = None
        if self.steered:
            vectors = plan_vectors(self.model, full_ids, full_mask, goal_length)
            terms = vectors
            if vectors.shape[1] > 1:
                terms = cropped(vectors, first, input_ids.shape[1])
            terms = self.model.channel.film.terms(terms)
        hidden = self.model.hidden(input_ids, terms=terms, attention_mask=attention_mask)
        loss = token_losses(self.model.lm, hidden, labels)
        if self.reader is None:
            return {"loss": loss}
        assert state_rows is not None and state_places is not None and states is not None
        assert self.steered or not first.any(), "a crop's own states do not stand where the text's do"
        source = hidden if vectors is None else vectors
        read = self.reader(source[state_rows, state_places]).unflatten(-1, (FACTS, PLACES))
        known = states != UNSCORED
        state_loss = F.cross_entropy(read[known].float(), states[known])
        return {"loss": loss + self.state_weight * state_loss, "state_loss": state_loss}


def align_plans(
    model: AttachedLM, texts: Sequence[PlanText], vocabulary: int, *, standardise: bool, **stage: Any
) -> None:
    """Stage 2 of planning: E_pred learns to predict the trajectory's vector from the prompt's.

    Args:
        texts: of them the first 20,000.
        vocabulary: V.
        standardise: E_pred's input, over the prompts.
        stage: how it is trained and where, as `align_goal` has it.
    """
    goals = [list(text.goal_ids) for text in texts[:20_000]]
    pooled = pooled_states(model, goals)
    if standardise:
        model.channel.encoder.calibrate(pooled)
    # CHOICE(LS-AR, 3.1): the trajectory is encoded by itself, as the goal is.
    trajectory = pooled_states(model, [list(text.target_ids) for text in texts[:20_000]])
    align_goal(model.channel.encoder, pooled, trajectory, goals, vocabulary, reconstruction_weight=0.0, **stage)


def plan_vectors(model: AttachedLM, full_ids: Tensor, full_mask: Tensor, goal_length: Tensor) -> Tensor:
    """(B, 1, G) static or (B, T, G) tracked vectors of whole texts, in one pass of the frozen encoder.

    Pooling the prompt's part of the full text's states equals encoding the prompt alone, as the encoder is causal.
    """
    channel = model.channel
    in_goal = torch.arange(full_ids.shape[1], device=full_ids.device)[None] < goal_length[:, None]
    hidden = model.goal_hidden(full_ids, full_mask)
    pooled = mean_pool(hidden, in_goal)
    goal = channel.encoder.predict(pooled)
    if channel.tracker is None:
        return goal.unsqueeze(1)
    state = LatentState(goal=goal)
    if channel.config.tracker_layer != channel.config.pool_layer:
        hidden = model.goal_hidden(full_ids, full_mask, layer=channel.config.tracker_layer)
    vectors, _ = channel.tracker.sequence(state, hidden, model.fires(full_ids, full_mask))
    return vectors
