"""From goals as people give them to the latent state: the vector of a channel, pinned entries, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.goals.goalfile import load_goal
from sidestream.lm.goals.pinning import read_entries
from sidestream.lm.goals.reading import check_goals, goal_ids
from sidestream.lm.models.blocks import text_config


def encode(model: Any, goal: Any, attention_mask: Tensor | None) -> LatentState:
    """What `AttachedLM.encode_goal` does.

    Raises:
        ValueError: a goal that is empty, of another type, of another model, or text without a tokenizer.
    """
    if not model._hooks:
        raise ValueError("the channel was detached from this model; attach it again to use goals")
    if model.channel is None and not model.pinned:
        raise ValueError("this model has a concept stream and no goal channel; attach(lm, goal=..., stream=...)")
    if isinstance(goal, Path):
        goal = load_goal(model, goal)
    if isinstance(goal, LatentState):
        state = _checked(model, goal)
    else:
        state = _encoded(model, goal, attention_mask)
    channel: Any = model.channel
    if channel is None or channel.tracker is not None or state.goal is None:
        return state
    return channel.fold(state)


def _encoded(model: Any, goal: Any, attention_mask: Tensor | None) -> LatentState:
    parts: Tensor | None = None
    names: tuple[str, ...] = ()
    if is_parts(goal):
        if not model.pinned:
            raise ValueError("a goal of several parts is pinned; attach(lm, tokenizer=...) pins, a vector is one goal")
        rows = [goal] if isinstance(goal, Mapping) else list(goal)
        ids, mask, parts, names = _joined(model, rows)
    else:
        ids, mask = goal_ids(goal, attention_mask, model.tokenizer, model.device)
    vocabulary = text_config(model._reader).vocab_size
    if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
        raise ValueError(
            f"a goal has token ids {int(ids.min())} to {int(ids.max())}; E_base knows 0 to {vocabulary - 1}"
        )
    check_goals(model._reader, mask)
    state = None
    if model.channel is not None:
        state = model.channel.encode(model.goal_hidden(ids, mask), mask.bool())
    if not model.pinned:
        assert state is not None
        return state
    entries = read_entries(model.lm, ids, mask, parts, names)
    return entries if state is None else state.with_entries(entries)


def _checked(model: Any, state: LatentState) -> LatentState:
    """The state, its entries in the model's precision, which may have changed since they were read."""
    if state.goal is None and state.keys is None:
        raise ValueError("the latent state given as a goal carries a concept stream only")
    if state.keys is not None and not model.pinned:
        raise ValueError("the goal given is pinned, and this model holds vectors; attach(lm, ..., pinned=True)")
    if state.goal is not None and model.channel is None:
        raise ValueError("the goal given is a vector, and this model has no channel for it; attach(lm, goal=...)")
    if state.goal is not None and state.goal.shape[-1] != model.channel.config.width:
        raise ValueError(f"the state's goals are {state.goal.shape[-1]} wide, the channel {model.channel.config.width}")
    if state.keys is None or state.values is None:
        return state
    depth = text_config(model.lm).num_hidden_layers
    if state.keys.shape[1] != depth:
        raise ValueError(f"the pinned goal has entries for {state.keys.shape[1]} blocks, the model {depth}")
    if (state.keys.dtype, state.keys.device) == (model.lm.dtype, model.device):
        return state
    keys, values = (part.to(model.device, model.lm.dtype) for part in (state.keys, state.values))
    return replace(state, keys=keys, values=values)


def is_parts(goal: Any) -> bool:
    """Whether this is a goal in named parts, or a list of such, one per row."""
    rows = [goal] if isinstance(goal, Mapping) else goal
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        return False
    return all(isinstance(row, Mapping) and "input_ids" not in row and "role" not in row for row in rows)


def _joined(model: Any, rows: list[Mapping[str, Any]]) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
    """(B, T) ids, mask and part of each token, of goals in named parts: their texts, a line each, one after another."""
    names = tuple(dict.fromkeys(str(name) for row in rows for name in row))
    all_ids: list[list[int]] = []
    all_parts: list[list[int]] = []
    for row in rows:
        ids: list[int] = []
        parts: list[int] = []
        for name, part in row.items():
            if isinstance(part, str):
                if not part.strip():
                    raise ValueError(f"part {name!r} of the goal is empty; leave it out, or remove it with None")
                part = part if part[-1].isspace() else part + "\n"
            found, _ = goal_ids([part], None, model.tokenizer, model.device)
            new = found[0].tolist()
            start = model.tokenizer.bos_token_id if model.tokenizer is not None else None
            if ids and start is not None and new[0] == start:
                new = new[1:]  # the text begins once
            ids += new
            parts += [names.index(str(name))] * len(new)
        all_ids.append(ids)
        all_parts.append(parts)
    if not all(all_ids):
        raise ValueError("a goal is empty: nothing to encode")
    width = max(map(len, all_ids))

    def padded(lists: list[list[int]]) -> Tensor:
        return torch.tensor([[0] * (width - len(row)) + row for row in lists], device=model.device)

    return padded(all_ids), padded([[1] * len(row) for row in all_ids]), padded(all_parts), names


def changed(model: Any, state: LatentState | None, parts: Mapping[str, Any], rows: Sequence[int] | None) -> LatentState:
    """A pinned state with parts added, replaced, or, where the value is None, removed.

    Args:
        model: the attached model.
        state: what is pinned now; None for nothing.
        parts: by name, in the order in which new ones are put behind the others.
        rows: which rows; None for all.

    Raises:
        ValueError: a goal without parts, a part to remove that no row has, or rows that do not exist.
    """
    batch = 1 if state is None else state.batch_size
    chosen = range(batch) if rows is None else rows
    if not all(0 <= row < batch for row in chosen):
        raise ValueError(f"rows {list(chosen)} of a batch of {batch}")
    goals = [dict() for _ in range(batch)] if state is None or state.keys is None else parts_of(state)
    for name, part in parts.items():
        if part is None and not any(name in goals[row] for row in chosen):
            known = sorted({known for row in goals for known in row})
            raise ValueError(f"the goal has no part {name!r} to remove; it has {known}")
        for row in chosen:
            goals[row].pop(name, None) if part is None else goals[row].update({name: part})
    if not all(goals):
        raise ValueError("the last part of a goal cannot be removed; model.set_goal(cache, None) takes it away")
    return _encoded(model, goals, None)


def parts_of(state: LatentState) -> list[dict[str, Any]]:
    """The token ids of every part of every row's pinned goal.

    Raises:
        ValueError: a goal in one piece, or one whose tokens are not known.
    """
    if state.entry_parts is None or state.entry_ids is None or state.entries is None:
        raise ValueError(
            "this goal is in one piece; give it as parts from the start: goal={'policy': ..., 'wish': ...}"
        )
    found = []
    for ids, mask, parts in zip(state.entry_ids, state.entries.bool(), state.entry_parts, strict=True):
        row: dict[str, Any] = {}
        for token, part in zip(ids[mask].tolist(), parts[mask].tolist(), strict=True):
            row.setdefault(state.part_names[part], []).append(token)
        found.append(row)
    return found
