"""Blocksworld in closed loop: the model emits an action, the simulator executes it, perturbs it, and scores the plan.

Everything is a pure function of an `Episode` and a `Rollout`, so a batch is a list of rollouts:

    rollouts = [start(episode) for episode in batch]
    while not all(rollout.done for rollout in rollouts):
        for each row that is not done:
            action = forced_action(episode, rollout)
            if action is not None:
                feed `action_text(action, names) + " ,"` to the model; rollout = perturb(episode, rollout, action)
            else:
                let the model emit words up to the comma or `end`; rollout = emit(episode, rollout, words)
    scores = [score_rollout(episode, rollout) for ...]
"""

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from sidestream.tasks.base import Split
from sidestream.tasks.blocksworld import (
    Action,
    Problem,
    State,
    distance_to,
    optimal_length,
    ranked_actions,
    satisfies,
    try_apply,
    why_illegal,
)
from sidestream.tasks.blocksworld_data import END, TRIGGER, BlocksworldConfig, parse_action, problems, prompt_text

Failure = Literal["illegal", "malformed", "stopped_early", "step_limit"]
OUTCOMES = ("solved", *get_args(Failure))
"""What becomes of a plan."""


# CHOICE(LS-AR, Tasks): where and how K perturbations enter an evaluation is open; see Episode.
@dataclass(frozen=True, kw_only=True)
class Episode:
    """One problem for the closed loop, with everything that must be the same for every arm.

    The protocol. The model emits an action and the simulator executes it, until the goal holds, an action is illegal
    or no action at all, the model says `end`, or `step_limit` actions have been executed. At a step of `perturb_at`
    the model is not asked: the simulator executes a legal action that does not begin a shortest plan from the current
    state, drawn uniformly, and its words and comma enter the context as if the model had emitted them. Where every
    legal action is optimal the perturbation waits for the next step that has another. A rollout ends with success
    only when all its perturbations have been spent, so it has had exactly K of them.

    The steps are K different ones of [0, optimal length), the steps at which no player can have reached the goal;
    of [0, K) for a shorter problem (a forced action leaves the goal no nearer, so it is out of reach there too). The
    draw depends on `seed` and the step alone: arms in the same state at the same step are pushed the same way.
    """

    problem: Problem
    """What to solve."""
    optimal_length: int
    """Number of actions in a shortest plan, without perturbations."""
    perturb_at: tuple[int, ...]
    """Steps, ascending, at which a sub-optimal action is forced; K of them."""
    step_limit: int
    """Most actions executed, forced ones included: twice optimal length + 2 K, which a player that undoes each
    perturbation and is otherwise optimal needs."""
    seed: int
    """Seeds the choice of the forced actions."""

    @property
    def prompt(self) -> str:
        """`init ... goal ... plan`."""
        return prompt_text(self.problem)

    def row(self) -> dict[str, object]:
        """The episode as one line of JSONL."""
        return {
            "blocks": len(self.problem.names),
            "goal": self.prompt,
            "optimal_length": self.optimal_length,
            "perturb_at": list(self.perturb_at),
            "step_limit": self.step_limit,
            "seed": self.seed,
        }


def make_episode(problem: Problem, *, perturbations: int, seed: int) -> Episode:
    """The closed loop of one problem with K = `perturbations`; see `Episode` for the protocol."""
    length = optimal_length(problem.init, problem.goal)
    steps = random.Random(f"steps {seed}").sample(range(max(length, perturbations)), perturbations)
    return Episode(
        problem=problem,
        optimal_length=length,
        perturb_at=tuple(sorted(steps)),
        step_limit=2 * (length + 2 * perturbations),
        seed=seed,
    )


def episodes(config: BlocksworldConfig, split: Split, num_episodes: int, *, perturbations: int) -> list[Episode]:
    """`num_episodes` closed-loop problems; the same problems for every K, so that K can be compared in pairs."""
    drawn = zip(problems(config, split), range(num_episodes), strict=False)
    return [make_episode(problem, perturbations=perturbations, seed=seed) for problem, seed in drawn]


class Rollout(NamedTuple):
    """How far an episode has come."""

    state: State
    """The simulator's state."""
    actions: tuple[Action, ...] = ()
    """Executed so far, forced ones included."""
    forced: tuple[int, ...] = ()
    """Steps whose action was forced."""
    excess: int = 0
    """Steps the model's own actions have wasted: 0 for an optimal one, 2 for one and its undoing."""
    failure: Failure | None = None
    """Why it failed, if it has."""
    reason: str = ""
    """The failure in words."""
    done: bool = False
    """Failed, or at the goal with every perturbation spent."""


def start(episode: Episode) -> Rollout:
    """The rollout before its first step."""
    return _settled(episode, Rollout(episode.problem.init))


def forced_action(episode: Episode, rollout: Rollout) -> Action | None:
    """The action the simulator forces at this step, or None where the model is to act."""
    step = len(rollout.actions)
    due = sum(at <= step for at in episode.perturb_at)
    if rollout.done or due <= len(rollout.forced):
        return None
    suboptimal = ranked_actions(rollout.state, episode.problem.goal)[1]
    return random.Random(f"forced {episode.seed} {step}").choice(suboptimal) if suboptimal else None


def perturb(episode: Episode, rollout: Rollout, action: Action) -> Rollout:
    """The rollout after the simulator has executed `action` from `forced_action`."""
    assert action == forced_action(episode, rollout)
    state = try_apply(rollout.state, action)
    assert state is not None
    step = len(rollout.actions)
    after = rollout._replace(state=state, actions=(*rollout.actions, action), forced=(*rollout.forced, step))
    return _settled(episode, after)


def emit(episode: Episode, rollout: Rollout, words: Sequence[str]) -> Rollout:
    """The rollout after the model's turn.

    Args:
        words: what the model emitted up to, without, the comma; or `["end"]`. Anything that is not an action is a
            failure, not an error.
    """
    assert not rollout.done and forced_action(episode, rollout) is None
    if list(words) == [END]:
        return rollout._replace(failure="stopped_early", reason="end before the goal", done=True)
    return _settled(episode, _execute(episode.problem, rollout, words))


def _execute(problem: Problem, rollout: Rollout, words: Sequence[str]) -> Rollout:
    action = parse_action(words, problem.names)
    if action is None:
        return rollout._replace(failure="malformed", reason=f"not an action: {' '.join(words)!r}", done=True)
    state = try_apply(rollout.state, action)
    if state is None:
        reason = why_illegal(rollout.state, action, problem.names)
        return rollout._replace(failure="illegal", reason=reason, done=True)
    distance = distance_to(problem.goal, len(state))
    wasted = distance(state) - distance(rollout.state) + 1
    return rollout._replace(state=state, actions=(*rollout.actions, action), excess=rollout.excess + wasted)


def _settled(episode: Episode, rollout: Rollout) -> Rollout:
    if rollout.done:
        return rollout
    # CHOICE(LS-AR, Tasks): reaching the goal is success, whether or not the model would have said `end`.
    if satisfies(rollout.state, episode.problem.goal) and len(rollout.forced) == len(episode.perturb_at):
        return rollout._replace(done=True)
    if len(rollout.actions) >= episode.step_limit:
        reason = f"goal not reached in {episode.step_limit} steps"
        return rollout._replace(failure="step_limit", reason=reason, done=True)
    return rollout


class PlanScore(NamedTuple):
    """What became of a plan."""

    success: bool
    """The goal holds at the end."""
    steps: int
    """Actions executed, forced ones included."""
    over: int
    """`steps` minus the optimal length; meaningful on success."""
    excess: int
    """Steps wasted by the model's own actions; unlike `over`, independent of perturbations."""
    failure: Failure | None
    """None on success."""
    failed_at: int | None
    """Step (from 0) of the failure; with `illegal` or `malformed` that of the first such action."""
    left: int
    """Length of a shortest plan from the last state to the goal."""
    reason: str
    """The failure in words."""


def score_rollout(episode: Episode, rollout: Rollout) -> PlanScore:
    """The score of a finished rollout."""
    assert rollout.done
    return _score(episode.problem, rollout, episode.optimal_length)


def score_plan(problem: Problem, words: Sequence[str]) -> PlanScore:
    """The score of a whole plan, `pickup a , ... , end`, run open loop.

    As for a plan validator the goal must hold after the last action. Words after `end` do not count; a missing `end`
    or last comma is forgiven.
    """
    turns: list[list[str]] = [[]]
    for word in words:
        if word == END:
            break
        if word == TRIGGER:
            turns.append([])
        else:
            turns[-1].append(word)
    if not turns[-1]:
        turns.pop()
    rollout = Rollout(problem.init)
    for turn in turns:
        rollout = _execute(problem, rollout, turn)
        if rollout.failure:
            break
    if not rollout.failure and not satisfies(rollout.state, problem.goal):
        rollout = rollout._replace(failure="stopped_early", reason="goal not reached by the last action")
    return _score(problem, rollout, optimal_length(problem.init, problem.goal))


def plan_outcomes(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of many plans, from `PlanScore` rows.

    Returns:
        `shares`, outcome -> share of all plans; `over` and `excess`, means among solved plans; `first_illegal`, the
        median step (from 0) of illegal failures. The last three are None where there is nothing to average.

    Raises:
        ValueError: no scores, or a failure of unknown kind.
    """
    counts = Counter("solved" if score["success"] else score["failure"] for score in scores)
    unknown = [kind for kind in counts if kind not in OUTCOMES]
    if unknown or not scores:
        raise ValueError(f"unknown failure {unknown[0]!r}" if unknown else "no scores")
    solved = [score for score in scores if score["success"]]
    illegal = [score["failed_at"] for score in scores if score["failure"] == "illegal"]
    return {
        "shares": {kind: counts[kind] / len(scores) for kind in OUTCOMES},
        "over": statistics.mean(score["over"] for score in solved) if solved else None,
        "excess": statistics.mean(score["excess"] for score in solved) if solved else None,
        "first_illegal": statistics.median(illegal) if illegal else None,
    }


def _score(problem: Problem, rollout: Rollout, optimal: int) -> PlanScore:
    failed = rollout.failure is not None
    steps = len(rollout.actions)
    return PlanScore(
        success=not failed,
        steps=steps,
        over=steps - optimal,
        excess=rollout.excess,
        failure=rollout.failure,
        failed_at=steps if failed else None,
        left=optimal_length(rollout.state, problem.goal),
        reason=rollout.reason,
    )
