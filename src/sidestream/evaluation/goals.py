"""Does a goal outlive its text? Answers and losses past the window, with the channel and with what it competes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.evaluation.stats import paired_bootstrap, wilson
from sidestream.lm.attach import AttachedLM
from sidestream.lm.base import pooled_goals
from sidestream.lm.decode import pad_right
from sidestream.lm.tracked import tracked_terms
from sidestream.tasks.goals import Tokens

Arm = Literal["channel", "closed", "swapped", "in_text", "sinks"]
ARMS: dict[Arm, str] = {
    "channel": "goal in the channel",
    "closed": "no goal (channel closed)",
    "swapped": "another record's goal in the channel",
    "in_text": "goal at the head of the window (costs its tokens)",
    "sinks": "first 4 tokens kept (attention sinks)",
}
SINKS = 4


class Outcome(NamedTuple):
    """One record in one arm."""

    loss: float
    """Cross-entropy summed over the scored tokens in the window, in nats."""
    tokens: int
    """How many they are."""
    right: int
    """How many of them were the likeliest."""
    goal_tokens: int
    """Slots of the window that hold the goal's own text."""


@torch.no_grad()
def goal_outcomes(
    model: AttachedLM,
    texts: Sequence[Tokens],
    goal_ids: Sequence[Sequence[int]],
    *,
    window: int,
    heads: Sequence[Sequence[int]] | None = None,
    opening: Sequence[int] = (),
    arms: Sequence[Arm] = ("channel", "closed", "swapped", "in_text"),
    batch_size: int = 16,
) -> dict[Arm, list[Outcome]]:
    """Predict the scored tokens in the last window of every trajectory, each arm on the same records.

    A window is exact here: its tokens are computed anew at positions 0 to W-1, so nothing older reaches a logit.

    Args:
        model: base model with a channel.
        texts: trajectories; the tokens to predict are the last ones scored.
        goal_ids: the goals, one per trajectory.
        window: W, the tokens that a prediction may see.
        heads: the goals as they stand at the head of a text, where that is not `goal_ids` alone (a line break, say).
        opening: the tokens that texts begin with (a begin token, say). A head has them, so that the text behind it does
            not have them again.
        arms: keys of `ARMS`; `swapped` takes the next record whose goal is another.
        batch_size: rows at a time.

    Raises:
        ValueError: another number of goals than texts, an unknown arm, or `swapped` where all goals are one.
    """
    if len(texts) != len(goal_ids):
        raise ValueError(f"{len(goal_ids)} goals for {len(texts)} trajectories; give one each")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise ValueError(f"unknown arm {unknown[0]!r}; use one of {', '.join(ARMS)}")
    pooled = pooled_goals(model, goal_ids).to(model.device)
    found: dict[Arm, list[Outcome]] = {}
    others = _other_goals(goal_ids) if "swapped" in arms else []
    for arm in arms:
        rows = [
            _row(text, head, window, arm, opening=opening) for text, head in zip(texts, heads or goal_ids, strict=True)
        ]
        # Rows of like length share a batch: little padding.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row].ids))
        outcomes: list[Outcome | None] = [None] * len(rows)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            state = None
            if arm in ("channel", "swapped"):
                who = part if arm == "channel" else [others[row] for row in part]
                state = LatentState(goal=model.channel.encoder.predict(pooled[who]))
            for row, outcome in zip(part, _predict(model, [rows[row] for row in part], state), strict=True):
                outcomes[row] = outcome
        found[arm] = [outcome for outcome in outcomes if outcome is not None]
    return found


def _other_goals(goal_ids: Sequence[Sequence[int]]) -> list[int]:
    """For each record the next one that has another goal."""
    goals, count = [tuple(goal) for goal in goal_ids], len(goal_ids)
    if len(set(goals)) < 2:
        raise ValueError("the arm 'swapped' needs two different goals, and there is one; leave it out of --arms")
    return [
        next(k % count for k in range(row + 1, row + count) if goals[k % count] != goals[row]) for row in range(count)
    ]


class _Row(NamedTuple):
    ids: list[int]
    """What a prediction sees."""
    wanted: list[int]
    """The token after each place."""
    scored: list[bool]
    """Whether it is scored."""
    goal_tokens: int
    """The goal's share of the window."""
    full: list[int]
    """The text from its beginning, for a tracker to read."""


def _row(
    text: Tokens,
    goal: Sequence[int],
    window: int,
    arm: Arm,
    opening: Sequence[int] = (),
) -> _Row:
    last = max(at for at, scored in enumerate(text.scored) if scored)
    front = len(opening) if tuple(text.ids[: len(opening)]) == tuple(opening) else 0
    head: list[int] = []
    if arm == "in_text":
        head = list(goal)[: max(0, window // 2)]
    elif arm == "sinks":
        head = (list(goal) + list(text.ids[front:]))[: min(SINKS, window // 2)]
    start = max(front if head else 0, last - window + len(head))
    ids = head + list(text.ids[start:last])
    wanted = head[1:] + list(text.ids[start : last + 1]) if head else list(text.ids[start + 1 : last + 1])
    # Behind its opening alone the first token of the text is scored, so behind opening and goal as well.
    begins = bool(head) and 0 < start == front and text.scored[start]
    scored = [False] * (len(head) - 1) + [begins] * bool(head) + list(text.scored[start + 1 : last + 1])
    return _Row(ids, wanted, scored, len(head), list(text.ids[:last]))


def _predict(model: AttachedLM, rows: Sequence[_Row], state: LatentState | None) -> list[Outcome]:
    ids, mask = pad_right([row.ids for row in rows], device=model.device)
    wanted, _ = pad_right([row.wanted for row in rows], device=model.device)
    scored, _ = pad_right([[int(s) for s in row.scored] for row in rows], device=model.device)
    goal: dict[str, Any] = {"goal": state}
    if state is not None and model.channel.tracker is not None:
        full, full_mask = pad_right([row.full for row in rows], device=model.device)
        first = torch.tensor([len(row.full) - len(row.ids) for row in rows], device=model.device)
        goal = {"terms": tracked_terms(model, state, full, full_mask, first, ids.shape[1])}
    hidden = model.hidden(ids, **goal, attention_mask=mask)
    places = scored.bool()
    head: Any = model.lm.get_output_embeddings()
    logits: Tensor = head(hidden[places]).float()
    losses = F.cross_entropy(logits, wanted[places], reduction="none")
    right = logits.argmax(dim=-1) == wanted[places]
    which = places.nonzero()[:, 0]
    return [
        Outcome(
            loss=float(losses[which == row].sum()),
            tokens=int((which == row).sum()),
            right=int(right[which == row].sum()),
            goal_tokens=rows[row].goal_tokens,
        )
        for row in range(len(rows))
    ]


def goal_cells(outcomes: dict[Arm, list[Outcome]], where: dict[str, Any], *, exact: bool) -> list[dict[str, Any]]:
    """Results cells: loss a token with its bootstrap interval, tokens right, and, for records with an answer, answers
    right as a whole with Wilson's interval.

    Args:
        outcomes: of `goal_outcomes`.
        where: the conditions, such as W.
        exact: the records have answers, to be right as a whole.
    """
    cells = []
    for arm, found in outcomes.items():
        n = len(found)
        losses = [outcome.loss / outcome.tokens for outcome in found]
        mean = sum(losses) / n
        interval = [mean, mean]
        if n > 1:
            drawn = paired_bootstrap(losses, [0.0] * n, resamples=2000)
            interval = [drawn.low, drawn.high]
        cells.append(_cell(arm, where, "loss", mean, n, interval))
        if exact:
            whole = sum(outcome.right == outcome.tokens for outcome in found)
            cells.append(_cell(arm, where, "accuracy", whole / n, n, list(wilson(whole, n))))
        cells.append(_cell(arm, where, "goal_tokens", sum(o.goal_tokens for o in found) / n, n, None))
    return cells


def _cell(
    arm: str, where: dict[str, Any], metric: str, value: float, n: int, interval: list[float] | None
) -> dict[str, Any]:
    return {"arm": arm, "where": where, "metric": metric, "value": value, "n": n, "ci": interval, "paper": None}
