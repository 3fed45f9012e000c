"""How likely is a text under a goal? Whole batches of windows and goals scored at once, each goal read once.

A `View` is one forward: what is in the window, what is asked, which goal is pinned. `view_of` makes it for an arm, so
that every arm and every goal is asked the same tokens of the text. `score` runs many of them: the same view once, rows
of like length together, a pinned goal's entries put before the window, the language-model head at asked tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.decode import pad_right
from sidestream.tasks.goals import Tokens

Arm = Literal["none", "sinks", "text", "text_free", "reinserted", "pinned"]
SINKS = 4
"""First tokens that `sinks` keeps."""
BATCH_TOKENS = 3072
"""Tokens of a forward, pinned ones among them: more makes no matrix product faster on a CPU."""
_LOGITS = 1024
"""Rows of logits held at a time."""


class View(NamedTuple):
    """What one forward sees and is asked."""

    ids: tuple[int, ...]
    """The window."""
    wanted: tuple[int, ...]
    """The token after each place of it."""
    scored: tuple[bool, ...]
    """Whether it is asked for."""
    goal: int | None = None
    """Which goal is in force beside the window."""
    spent: int = 0
    """Places of the window that hold the goal's text."""


class Score(NamedTuple):
    """How the asked tokens of a view did."""

    loss: float
    """Cross-entropy summed over them, in nats."""
    tokens: int
    """How many they are."""
    said: tuple[int, ...]
    """The likeliest token at each."""
    right: bool
    """Whether all of them were the likeliest."""


def asked_tokens(text: Tokens, window: int, longest: int) -> frozenset[int]:
    """Which tokens of a text every arm is asked: the scored ones that `text`, whose window has the least room, sees
    with at least one token before them.

    Args:
        text: the trajectory; its last scored token is the last one asked.
        window: W.
        longest: tokens of the longest goal offered for it.
    """
    last = _last(text)
    room = window - min(longest, window // 2)
    return frozenset(at for at in range(max(1, last - room + 1), last + 1) if text.scored[at])


def view_of(
    arm: Arm,
    text: Tokens,
    head: Sequence[int],
    window: int,
    asked: frozenset[int],
    *,
    room: int | None = None,
    every: int | None = None,
    goal: int | None = None,
) -> View:
    """The last window of a text in one arm.

    Args:
        arm: `none`, the window alone; `sinks`, the first 4 tokens of goal and text kept in it; `text`, the goal at its
            head, which costs its tokens (no more than half the window); `text_free`, the goal in front of a full
            window, which so is longer; `reinserted`, the goal's text put before the first and every `every`-th token of
            the text; `pinned`, the window alone, the goal in force beside it.
        text: the trajectory.
        head: the goal as it stands before a text.
        window: W.
        asked: `asked_tokens` of it.
        room: tokens of text in the window of `text`; None for all that its goal leaves.
        every: of `reinserted`; None for W.
        goal: index of the goal in force.
    """
    last, kept = _last(text), list(head)[: window // 2]
    front, size = [], window
    if arm == "sinks":
        front = [*head, *text.ids][:SINKS]
        size = window - len(front)
    elif arm == "text":
        front, size = kept, (window - len(kept) if room is None else room)
    elif arm == "text_free":
        front = list(head)
    spent = len(front)
    if arm == "reinserted":
        step, places = every or window, list[tuple[int, int | None]]()
        for at in range(max(0, last - window - step), last + 1):
            if at % step == 0:
                places += [(token, None) for token in kept]
            places.append((text.ids[at], at))
        places = places[-window - 1 :]
        spent = sum(at is None for _, at in places[:-1])
    else:
        start = max(0, last - size)
        places = [(token, None) for token in front] + [(text.ids[at], at) for at in range(start, last + 1)]
    return View(
        ids=tuple(token for token, _ in places[:-1]),
        wanted=tuple(token for token, _ in places[1:]),
        scored=tuple(at in asked for _, at in places[1:]),
        goal=goal,
        spent=0 if arm == "sinks" else spent,
    )


def _last(text: Tokens) -> int:
    return max(at for at, scored in enumerate(text.scored) if scored)


@torch.no_grad()
def read_goals(model: AttachedLM, goals: Sequence[Sequence[int]], *, batch_tokens: int = 2048) -> list[LatentState]:
    """A state of one row for every goal. A goal that comes again is read once; goals of one length are read together,
    so that nothing is padding.

    Args:
        model: encodes them as it was attached: pinned, to vectors, or both.
        goals: token ids.
        batch_tokens: of one forward.
    """
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for goal in dict.fromkeys(map(tuple, goals)):
        by_length.setdefault(len(goal), []).append(goal)
    found: dict[tuple[int, ...], LatentState] = {}
    for length, group in by_length.items():
        step = max(1, batch_tokens // length)
        for start in range(0, len(group), step):
            part = group[start : start + step]
            state = model.encode_goal([list(goal) for goal in part])
            for row, goal in enumerate(part):
                found[goal] = state.select(torch.tensor([row]))
    return [found[tuple(goal)] for goal in goals]


@torch.no_grad()
def score(model: AttachedLM, views: Sequence[View], states: Sequence[LatentState] = ()) -> list[Score]:
    """The scores of views, in their order.

    Args:
        model: base model, with whatever holds the goals.
        views: of any lengths, each with at least one token asked.
        states: the goals that views name.
    """
    found: dict[View, Score] = {}
    for part in _batches(list(dict.fromkeys(views)), states):
        ids, mask = pad_right([view.ids for view in part], device=model.device)
        wanted, _ = pad_right([view.wanted for view in part], device=model.device)
        places, _ = pad_right([view.scored for view in part], device=model.device)
        chosen = [states[view.goal] for view in part if view.goal is not None]
        goal = LatentState.cat(chosen) if chosen else None
        hidden, places = model.hidden(ids, goal=goal, attention_mask=mask), places.bool()
        losses, said = _asked(model, hidden[places], wanted[places])
        counts = places.sum(dim=1).tolist()
        rows = zip(part, losses.split(counts), said.split(counts), wanted[places].split(counts), strict=True)
        for view, loss, tokens, right in rows:
            found[view] = Score(
                loss=float(loss.double().sum()),
                tokens=len(tokens),
                said=tuple(tokens.tolist()),
                right=bool((tokens == right).all()),
            )
    return [found[view] for view in views]


def _batches(views: list[View], states: Sequence[LatentState]) -> Iterator[list[View]]:
    """Views of like length together, those without a goal apart."""

    def size(view: View) -> tuple[bool, int, int]:
        entries = None if view.goal is None else states[view.goal].entries
        return view.goal is None, 0 if entries is None else entries.shape[1], len(view.ids)

    part: list[View] = []
    for view in sorted(views, key=size):
        full = (len(part) + 1) * sum(size(view)[1:]) > BATCH_TOKENS
        if part and (full or (part[0].goal is None) != (view.goal is None)):
            yield part
            part = []
        part.append(view)
    if part:
        yield part


def _asked(model: AttachedLM, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(rows,) losses and likeliest tokens."""
    head: Any = model.lm.get_output_embeddings()
    losses, said = [], []
    for rows, tokens in zip(hidden.split(_LOGITS), wanted.split(_LOGITS), strict=True):
        logits = head(rows).float()
        losses.append(F.cross_entropy(logits, tokens, reduction="none"))
        said.append(logits.argmax(dim=-1))
    return torch.cat(losses), torch.cat(said)
