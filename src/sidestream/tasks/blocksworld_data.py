"""Blocksworld as text: the vocabulary, random problems in disjoint splits, and training trajectories.

A problem reads, one word a token,

    init on a b ontable b ontable c goal on b c ontable c ontable a plan unstack a b , putdown a , ... , end

The prompt ends with `plan` and holds no comma; every action is closed by one, the last too, so a comma always means
"this action has been executed" and is the trigger of LS-AR's tracker. Facts stand in block order and only say where
each block is, which implies the rest.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal, Protocol

from sidestream.tasks.base import Encode, Example, Split
from sidestream.tasks.blocksworld import (
    GRAPH_BLOCKS,
    OPERATORS,
    PREDICATES,
    Action,
    Fact,
    Goal,
    Problem,
    canonical_form,
    distance_to,
    optimal_length,
    optimal_plan,
    ranked_actions,
    satisfies,
    state_facts,
    state_goal,
    state_graph,
    trace,
    try_apply,
)

# CHOICE(LS-AR, Tasks): the text form is open. Each action, the last too, is closed by the trigger; the prompt has none.
INIT, GOAL, PLAN, END, TRIGGER = "init", "goal", "plan", "end", ","
NAMES = tuple(ascii_lowercase)
"""Names a block can have in text: the first N with `names="fixed"`, any N with `names="pool"`."""

WORDS = (INIT, GOAL, PLAN, END, TRIGGER, *PREDICATES, *OPERATORS, *NAMES)
"""Every word of the domain, one token each (the paper's vocabulary has 100 entries)."""


@dataclass(frozen=True, kw_only=True)
class BlocksworldConfig:
    """What problems and trajectories to draw."""

    blocks: tuple[int, ...] = (5,)
    """N, 2 to 7; drawn uniformly for each problem where several are given."""
    names: Literal["fixed", "pool"] = "fixed"
    """`fixed`: a, b, ... (the paper's reading). `pool`: N of `pool` names, in random order, for each problem, so
    the names of a larger N are trained too."""
    pool: int = len(NAMES)
    """How many of `NAMES` are in the pool."""
    goals: Literal["full", "on"] = "full"
    """`full`: where every block stands. `on`: only the `on` facts of a random state, as in PDDL benchmarks."""
    budgets: tuple[int, ...] = (1,)
    """K of a training trajectory, the most sub-optimal actions forced into it; drawn uniformly where several."""
    perturb_probability: float = 0.3
    """Chance of a forced sub-optimal action: at each step of a training trajectory with budget left, or once."""
    perturb_per: Literal["step", "trajectory"] = "step"
    """`trajectory`: a share `perturb_probability` of the trajectories holds its whole budget, at steps drawn as in the
    closed loop; the others are shortest plans."""
    seed: int = 0
    """Same seed, same data."""

    def __post_init__(self) -> None:
        if not self.blocks or not all(2 <= n <= GRAPH_BLOCKS for n in self.blocks):
            raise ValueError(f"blocks must be numbers from 2 to {GRAPH_BLOCKS}, got {self.blocks}")
        if not max(self.blocks) <= self.pool <= len(NAMES):
            raise ValueError(f"pool is {self.pool}; it must be from N = {max(self.blocks)} to {len(NAMES)}")
        if not self.budgets or min(self.budgets) < 0:
            raise ValueError(f"budgets must be numbers from 0 up, got {self.budgets}")
        if not 0 <= self.perturb_probability <= 1:
            raise ValueError(f"perturb_probability must be from 0 to 1, got {self.perturb_probability}")


# ---- text


def prompt_text(problem: Problem) -> str:
    """`init ... goal ... plan`, words separated by single spaces.

    Raises:
        ValueError: a block's name is not a word of the domain (`standard_names` gives it one).
    """
    strange = [name for name in problem.names if name not in NAMES]
    if strange:
        raise ValueError(f"block name {strange[0]!r} is not in the vocabulary a..z; rename with standard_names")
    placed = [fact for fact in state_facts(problem.init) if fact.predicate in ("on", "ontable", "holding")]
    goal = sorted(problem.goal, key=lambda fact: (fact.blocks, fact.predicate))
    return " ".join([INIT, *_fact_words(placed, problem), GOAL, *_fact_words(goal, problem), PLAN])


def blank_goal(tokens: Sequence[Any], goal: Any, plan: Any) -> list[Any]:
    """A Blocksworld prompt, as words or ids, with the mark `goal` in place of every word of the goal.

    The initial state stays: the vector's goal is asked about, and where the blocks are is not part of it. The length of
    the blank still says how many blocks the goal puts on the table.
    """
    # CHOICE(LS-AR, B.3.3): the filler is open. In Treasure Hunt the whole prompt is the goal; here its half is.
    start, stop = tokens.index(goal), tokens.index(plan)
    return [*tokens[:start], *[goal] * (stop - start), *tokens[stop:]]


def _fact_words(facts: Iterable[Fact], problem: Problem) -> list[str]:
    return [word for fact in facts for word in (fact.predicate, *(problem.names[x] for x in fact.blocks))]


def action_text(action: Action, names: Sequence[str]) -> str:
    """E.g. `stack a b`, without the comma."""
    return " ".join([action.name, *(names[x] for x in action.blocks)])


def plan_text(actions: Iterable[Action], names: Sequence[str]) -> str:
    """`pickup a , stack a b , end`."""
    return "".join(f"{action_text(action, names)} {TRIGGER} " for action in actions) + END


def parse_action(words: Sequence[str], names: Sequence[str]) -> Action | None:
    """The action that `words` (without the comma) spell, or None: no operator, a wrong number of blocks, a name that
    no block of the problem has."""
    if not words or len(words) != 1 + OPERATORS.get(words[0], -1) or not all(name in names for name in words[1:]):
        return None
    return Action(words[0], tuple(names.index(name) for name in words[1:]))


def standard_names(problem: Problem) -> Problem:
    """The same problem with its blocks called a, b, ... in order; actions carry over, as they hold block numbers."""
    if len(problem.names) > len(NAMES):
        raise ValueError(f"the vocabulary names at most {len(NAMES)} blocks, the problem has {len(problem.names)}")
    return replace(problem, names=NAMES[: len(problem.names)])


def on_table(problem: Problem) -> Problem:
    """The same problem with a full goal: blocks that the goal puts on nothing are to stand on the table.

    A plan for it solves the original, but may be longer than need be. Goals that hold a block stay as they are.
    """
    placed = {fact.blocks[0] for fact in problem.goal if fact.predicate in ("on", "ontable", "holding")}
    if any(fact.predicate == "holding" for fact in problem.goal):
        return problem
    rest = {Fact("ontable", (x,)) for x in range(len(problem.names)) if x not in placed}
    return replace(problem, goal=frozenset(f for f in problem.goal if f.predicate in ("on", "ontable")) | rest)


# ---- training data


@dataclass(frozen=True, kw_only=True)
class PlanExample:
    """A problem and a legal trajectory from its initial state to its goal."""

    problem: Problem
    """What to solve."""
    actions: tuple[Action, ...]
    """The trajectory."""
    suboptimal: tuple[int, ...]
    """Steps (from 0) whose action does not begin a shortest plan: forced, or a model's own mistake."""
    optimal_length: int
    """Number of actions in a shortest plan from the initial state."""
    split: Split
    """Where the problem belongs."""

    @property
    def prompt(self) -> str:
        """`init ... goal ... plan`."""
        return prompt_text(self.problem)

    @property
    def trajectory(self) -> str:
        """`pickup a , ... , end`."""
        return plan_text(self.actions, self.problem.names)

    def encoded(self, encode: Encode) -> Example:
        """The example as token ids; prompt and trajectory are encoded apart, so `encode` must be word-level."""
        return Example(tuple(encode(self.prompt)), (), tuple(encode(self.trajectory)))

    def row(self) -> dict[str, object]:
        """The example as one line of JSONL; `goal` and `trajectory` are the text a goal channel trains on."""
        return {
            "split": self.split,
            "blocks": len(self.problem.names),
            "goal": self.prompt,
            "trajectory": self.trajectory,
            "suboptimal": list(self.suboptimal),
            "optimal_length": self.optimal_length,
        }


def split_of(problem: Problem, names: Literal["fixed", "pool"]) -> Split:
    """The split that owns `problem`: a hash decides, 90 % train, 5 % valid, 5 % test, whatever the seed.

    With `fixed` names the hash is of the pair (init, goal): the same problem with blocks renamed may be in another
    split. With `pool` names that would be a leak, so the hash is of the pair up to renaming blocks: 2,104 classes
    with N=5 and full goals.
    """
    # CHOICE(LS-AR, Tasks): how train and eval are kept apart is open.
    if names == "pool":
        key = canonical_form(problem.goal, len(problem.init), problem.init)[0]
    else:
        key = (problem.init, sorted(tuple(fact) for fact in problem.goal))
    place = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") % 100
    return "test" if place < 5 else "valid" if place < 10 else "train"


def problems(config: BlocksworldConfig, split: Split) -> Iterator[Problem]:
    """Endless random problems of one split: init uniform over hand-empty states, goal from another such draw, init
    not satisfying it. `train` may repeat a problem; `valid` and `test` never do.

    Raises:
        ValueError: `valid` or `test` holds no further problem (few blocks).
    """
    rng = random.Random(f"blocksworld {config.seed} {split}")
    seen: set[Problem] = set()
    misses = 0
    while True:
        states = state_graph(rng.choice(config.blocks)).hand_empty
        init, goal = rng.choice(states), state_goal(rng.choice(states))
        blocks = len(init)
        if config.goals == "on":
            goal = _on_facts(goal)
        names = NAMES[:blocks] if config.names == "fixed" else tuple(rng.sample(NAMES[: config.pool], blocks))
        problem = Problem(names=names, init=init, goal=goal)
        if satisfies(init, goal) or split_of(problem, config.names) != split or problem in seen:
            misses += 1
            # A split owns at least 5 % of the pairs, so this many misses in a row mean that none is left.
            if misses > 20_000:
                raise ValueError(f"{split} split of N={config.blocks} ends after {len(seen)} problems: ask for fewer")
            continue
        misses = 0
        if split != "train":
            seen.add(problem)
        yield problem


def _on_facts(goal: Goal) -> Goal:
    return frozenset(fact for fact in goal if fact.predicate == "on")


def examples(config: BlocksworldConfig, split: Split, num_examples: int) -> Iterator[PlanExample]:
    """Random problems of one split, each with a trajectory of up to K forced sub-optimal actions."""
    # A generator of its own, so that the problems do not depend on the perturbations.
    rng = random.Random(f"blocksworld trajectories {config.seed} {split}")
    for problem, _ in zip(problems(config, split), range(num_examples), strict=False):
        actions, suboptimal = perturbed_trajectory(
            problem,
            rng,
            budget=rng.choice(config.budgets),
            probability=config.perturb_probability,
            per=config.perturb_per,
        )
        yield PlanExample(
            problem=problem,
            actions=actions,
            suboptimal=suboptimal,
            optimal_length=optimal_length(problem.init, problem.goal),
            split=split,
        )


def perturbed_trajectory(
    problem: Problem,
    rng: random.Random,
    *,
    budget: int,
    probability: float,
    per: Literal["step", "trajectory"] = "step",
) -> tuple[tuple[Action, ...], tuple[int, ...]]:
    """LS-AR's training trajectory: a shortest plan in which up to `budget` actions are replaced by legal non-optimal
    ones drawn uniformly, each followed by a shortest plan from where it led.

    Args:
        probability: of a forced action at every step before the goal while the budget lasts; with `per="trajectory"`,
            of the whole budget, at different steps of [0, optimal length) (where every action is optimal it waits).

    Returns:
        The actions, and the steps at which one was forced.
    """
    # CHOICE(LS-AR, Tasks): of several optimal actions the first in legal order; the paper's search order is open.
    state, goal = problem.init, problem.goal
    actions: list[Action] = []
    forced: list[int] = []
    distance = distance_to(goal, len(state))
    planned: list[int] = []
    if per == "trajectory" and rng.random() < probability:
        planned = sorted(rng.sample(range(distance(state)), min(budget, distance(state))))
    while distance(state):
        optimal, suboptimal = ranked_actions(state, goal)
        action = optimal[0]
        if per == "trajectory":
            push = bool(suboptimal) and sum(at <= len(actions) for at in planned) > len(forced)
        else:
            push = len(forced) < budget and bool(suboptimal) and rng.random() < probability
        if push:
            action = rng.choice(suboptimal)
            forced.append(len(actions))
        actions.append(action)
        after = try_apply(state, action)
        assert after is not None
        state = after
    return tuple(actions), tuple(forced)


def relabel(problem: Problem, prefix: Sequence[Action], split: Split = "train") -> PlanExample:
    """A training example from a model's own actions: the prefix, up to the goal if it reaches it, then a shortest
    plan from where it led.

    Raises:
        ValueError: the prefix holds an illegal action.
    """
    distance = distance_to(problem.goal, len(problem.init))
    left = [distance(state) for state in trace(problem.init, prefix, problem.names)]
    steps = left.index(0) if 0 in left else len(prefix)
    state = trace(problem.init, prefix[:steps])[-1]
    return PlanExample(
        problem=problem,
        actions=(*prefix[:steps], *optimal_plan(state, problem.goal)),
        suboptimal=tuple(step for step in range(steps) if left[step + 1] >= left[step]),
        optimal_length=left[0],
        split=split,
    )


# ---- files


class HasRow(Protocol):
    """Anything that can be written as one line of JSONL."""

    def row(self) -> dict[str, object]: ...


def data_hash(items: Iterable[HasRow]) -> str:
    """SHA-256, in hex, of the JSONL text that `write_jsonl` writes."""
    digest = hashlib.sha256()
    for line in _lines(items):
        digest.update(line)
    return digest.hexdigest()


def write_jsonl(items: Iterable[HasRow], path: str | Path) -> None:
    """Write one line of JSON for each example or episode."""
    with open(path, "wb") as file:
        file.writelines(_lines(items))


def _lines(items: Iterable[HasRow]) -> Iterator[bytes]:
    for item in items:
        yield (json.dumps(item.row()) + "\n").encode()
