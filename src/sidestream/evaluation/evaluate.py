"""Run a model on problems and turn scores into results cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sidestream.channels import LatentState
from sidestream.evaluation.stats import wilson
from sidestream.lm.decoding.decode import greedy
from sidestream.tasks.base import Decode
from sidestream.tasks.treasure import TreasureProblem, score


def answer_treasure(
    model: Any,
    problems: Sequence[TreasureProblem],
    *,
    window: int,
    decode: Decode,
    goals: LatentState | None = None,
) -> list[dict[str, float]]:
    """Score a model's greedy answers, the distractors forced, the text cut to its last W tokens.

    Args:
        model: an `AttachedLM` or a bare causal LM.
        goals: one latent state per problem; None evaluates without the channel.

    Returns:
        Metric name to value in [0, 1], a dict per problem.
    """
    longest = max(len(problem.answer_ids) for problem in problems)
    forced = [problem.forced_ids for problem in problems]
    generated = greedy(model, forced, new_tokens=longest, window=window, goal=goals)
    return [dict(score(problem, ids, decode).values) for problem, ids in zip(problems, generated, strict=True)]


def cells(
    arm: str,
    where: dict[str, Any],
    scores: Sequence[dict[str, float]],
    paper: Callable[[str, str, dict[str, Any]], float | None],
) -> list[dict[str, Any]]:
    """One results cell per metric, with its Wilson interval.

    `code_token` averages fractions of a problem; its interval is Wilson's at the same mean over n problems, which is
    conservative as the tokens of one code are not independent.
    """
    made = []
    n = len(scores)
    for metric in scores[0]:
        value = sum(row[metric] for row in scores) / n
        low, high = wilson(round(value * n), n)
        made.append(
            {
                "arm": arm,
                "where": where,
                "metric": metric,
                "value": value,
                "n": n,
                "ci": [min(low, value), max(high, value)],
                "paper": paper(arm, metric, where),
            }
        )
    return made
