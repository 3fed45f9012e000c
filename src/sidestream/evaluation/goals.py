"""Does a goal outlive its text? Answers and losses past the window, with the channel and with what it competes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.evaluation.stats import paired_bootstrap, wilson
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.decode import pad_right
from sidestream.lm.decoding.tracked import tracked_terms
from sidestream.lm.models.base import pooled_goals
from sidestream.tasks.goals import Tokens

Arm = Literal["channel", "pinned", "closed", "swapped", "swapped_pinned", "in_text", "reinserted", "sinks"]
ARMS: dict[Arm, str] = {
    "channel": "goal in the channel",
    "pinned": "goal pinned outside the window",
    "closed": "no goal",
    "swapped": "another record's goal (in the channel, if there is one)",
    "swapped_pinned": "another record's goal, pinned",
    "in_text": "goal at the head of the window (costs its tokens)",
    "reinserted": "goal put back into the text every N tokens (costs its tokens)",
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
    shared_loss: float
    """`loss` over those scored tokens of the record that every arm asked for scores."""
    shared_tokens: int
    """How many these are."""


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
    every: int | None = None,
    batch_size: int = 16,
) -> dict[Arm, list[Outcome]]:
    """Predict the scored tokens in the last window of every trajectory, each arm on the same records.

    A window is exact here: its tokens are computed anew at positions 0 to W-1, so nothing older reaches a logit.

    Args:
        model: with a channel, or one that pins, or both.
        texts: trajectories; the tokens to predict are the last ones scored.
        goal_ids: the goals, one per trajectory.
        window: W, the tokens that a prediction may see.
        heads: the goals as they stand at the head of a text, where that is not `goal_ids` alone (a line break, say).
        opening: the tokens that texts begin with (a begin token, say). A head has them, so that the text behind it does
            not have them again.
        arms: keys of `ARMS`; `swapped` takes the next record whose goal is another.
        every: N, tokens of the text between two goals of the arm `reinserted`; None for W.
        batch_size: rows at a time.

    Raises:
        ValueError: another number of goals than texts, an arm that is unknown or that this model does not have,
            `swapped` where all goals are one, or a goal that leaves no room for the window.
    """
    if len(texts) != len(goal_ids):
        raise ValueError(f"{len(goal_ids)} goals for {len(texts)} trajectories; give one each")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise ValueError(f"unknown arm {unknown[0]!r}; use one of {', '.join(ARMS)}")
    heads = goal_ids if heads is None else heads
    pinned = [arm for arm in arms if _pins(model, arm)]
    if pinned and not model.pinned:
        raise ValueError(f"arm {pinned[0]!r} pins goals, and this model does not; attach(lm, ..., pinned=True)")
    if "channel" in arms and model.channel is None:
        raise ValueError("arm 'channel' needs a goal channel, and this model has none; use 'pinned'")
    vectors = {"channel", "swapped"}.intersection(arms).difference(pinned)
    pooled = pooled_goals(model, goal_ids).to(model.device) if vectors else None
    found: dict[Arm, list[Outcome]] = {}
    others = _other_goals(goal_ids) if {"swapped", "swapped_pinned"} & set(arms) else []
    by_arm: dict[Arm, list[_Row]] = {
        arm: [
            _row(text, head, window, "pinned" if arm in pinned else arm, opening=opening, every=every or window)
            for text, head in zip(texts, heads, strict=True)
        ]
        for arm in arms
    }
    shared = [set.intersection(*(row.places for row in rows)) for rows in zip(*by_arm.values(), strict=True)]
    for arm, rows in by_arm.items():
        # Rows of like length share a batch: little padding.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row].ids))
        outcomes: list[Outcome | None] = [None] * len(rows)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            who = [others[row] for row in part] if arm in ("swapped", "swapped_pinned") else part
            state = None
            if arm in pinned:
                state = model.encode_goal([list(heads[row]) for row in who])
                state = replace(state, goal=None) if state.goal is not None else state
            elif arm in ("channel", "swapped"):
                assert pooled is not None
                state = LatentState(goal=model.channel.encoder.predict(pooled[who]))
            predicted = _predict(model, [rows[row] for row in part], state, [shared[row] for row in part])
            for row, outcome in zip(part, predicted, strict=True):
                outcomes[row] = outcome
        found[arm] = [outcome for outcome in outcomes if outcome is not None]
    return found


def _pins(model: AttachedLM, arm: Arm) -> bool:
    return arm in ("pinned", "swapped_pinned") or arm == "swapped" and model.channel is None


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
    targets: list[int]
    """The place in the text of the token after each place, -1 where that is the goal's."""

    @property
    def places(self) -> set[int]:
        """Places in the text that are scored."""
        return {place for place, scored in zip(self.targets, self.scored, strict=True) if scored}


def _row(
    text: Tokens,
    goal: Sequence[int],
    window: int,
    arm: Arm,
    opening: Sequence[int] = (),
    every: int = 0,
) -> _Row:
    last = max(at for at, scored in enumerate(text.scored) if scored)
    front = len(opening) if tuple(text.ids[: len(opening)]) == tuple(opening) else 0
    if arm == "reinserted":
        return _reinserted(text, goal, window, every, last, front, len(opening))
    head: list[int] = []
    if arm == "in_text":
        head = list(goal)[: max(0, window // 2)]
    elif arm == "sinks":
        head = (list(goal) + list(text.ids[front:]))[: min(SINKS, window // 2)]
    # Behind a pinned goal the text does not begin again.
    behind = bool(head) or arm == "pinned" and front < last
    start = max(front if behind else 0, last - window + len(head))
    ids = head + list(text.ids[start:last])
    wanted = head[1:] + list(text.ids[start : last + 1]) if head else list(text.ids[start + 1 : last + 1])
    # Behind its opening alone the first token of the text is scored, so behind opening and goal as well.
    begins = bool(head) and 0 < start == front and text.scored[start]
    scored = [False] * (len(head) - 1) + [begins] * bool(head) + list(text.scored[start + 1 : last + 1])
    targets = [-1] * (len(head) - 1) + list(range(start + (not head), last + 1))
    return _Row(ids, wanted, scored, len(head), list(text.ids[:last]), targets)


def _reinserted(text: Tokens, goal: Sequence[int], window: int, every: int, last: int, front: int, opened: int) -> _Row:
    """The last W tokens of a text into which the goal is put before every N of its tokens."""
    stream: list[tuple[int, int]] = []  # tokens and their places in the text, -1 for the goal's
    for at in range(front, last + 1):
        if (at - front) % every == 0:
            stream += [(token, -1) for token in (goal if at == front else goal[opened:])]
        stream.append((text.ids[at], at))
    seen = stream[:-1][-window:]
    following = stream[len(stream) - len(seen) :]
    scored = [place >= 0 and text.scored[place] for _, place in following]
    return _Row(
        [token for token, _ in seen],
        [token for token, _ in following],
        scored,
        sum(place < 0 for _, place in seen),
        list(text.ids[:last]),
        [place for _, place in following],
    )


def _predict(
    model: AttachedLM, rows: Sequence[_Row], state: LatentState | None, shared: Sequence[set[int]] | None = None
) -> list[Outcome]:
    """`shared`: of each row, the places in its text that every arm scores; None: all that it scores itself."""
    ids, mask = pad_right([row.ids for row in rows], device=model.device)
    wanted, _ = pad_right([row.wanted for row in rows], device=model.device)
    scored, _ = pad_right([[int(s) for s in row.scored] for row in rows], device=model.device)
    everywhere = [row.places for row in rows] if shared is None else shared
    common = [[int(place in known) for place in row.targets] for row, known in zip(rows, everywhere, strict=True)]
    goal: dict[str, Any] = {"goal": state}
    if state is not None and state.goal is not None and model.channel.tracker is not None:
        full, full_mask = pad_right([row.full for row in rows], device=model.device)
        first = torch.tensor([len(row.full) - len(row.ids) for row in rows], device=model.device)
        goal = {"terms": tracked_terms(model, state, full, full_mask, first, ids.shape[1])}
    hidden = model.hidden(ids, **goal, attention_mask=mask)
    places = scored.bool()
    head: Any = model.lm.get_output_embeddings()
    logits: Tensor = head(hidden[places]).float()
    losses = F.cross_entropy(logits, wanted[places], reduction="none")
    right = logits.argmax(dim=-1) == wanted[places]
    which, common = places.nonzero()[:, 0], pad_right(common, device=model.device)[0].bool()[places]
    return [
        Outcome(
            loss=float(losses[which == row].sum()),
            tokens=int((which == row).sum()),
            right=int(right[which == row].sum()),
            goal_tokens=rows[row].goal_tokens,
            shared_loss=float(losses[(which == row) & common].sum()),
            shared_tokens=int(((which == row) & common).sum()),
        )
        for row in range(len(rows))
    ]


def goal_cells(outcomes: dict[Arm, list[Outcome]], where: dict[str, Any], *, exact: bool) -> list[dict[str, Any]]:
    """Results cells: loss a token with its bootstrap interval, tokens right, and, for records with an answer, answers
    right as a whole with Wilson's interval. Where there are the arms `closed` and `in_text`, also what share of the
    text's worth an arm has: (M - none) / (text - none), of losses on the tokens that every arm predicts and of answers
    right. It is left out where the text is worth nothing.

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
    if "closed" not in outcomes or "in_text" not in outcomes:
        return cells
    for metric, worth in (("relative", _gain), ("relative_accuracy", _whole)):
        if metric == "relative_accuracy" and not exact:
            continue
        none, text = worth(outcomes["closed"]), worth(outcomes["in_text"])
        for arm, found in outcomes.items() if text > none else ():
            cells.append(_cell(arm, where, metric, (worth(found) - none) / (text - none), len(found), None))
    return cells


def _gain(found: Sequence[Outcome]) -> float:
    """Log-likelihood a token, over the tokens that every arm predicts."""
    return -sum(o.shared_loss for o in found) / max(1, sum(o.shared_tokens for o in found))


def _whole(found: Sequence[Outcome]) -> float:
    return sum(o.right == o.tokens for o in found) / len(found)


def _cell(
    arm: str, where: dict[str, Any], metric: str, value: float, n: int, interval: list[float] | None
) -> dict[str, Any]:
    return {"arm": arm, "where": where, "metric": metric, "value": value, "n": n, "ci": interval, "paper": None}
