"""The side of an `AttachedLM` that holds pinned goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sidestream.channels import LatentState
from sidestream.channels.rotation import Rotation
from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache, feed_for
from sidestream.lm.decoding.window import Window
from sidestream.lm.goals.encoding import changed
from sidestream.lm.goals.pinning import check_room, find_rotation, in_front
from sidestream.lm.goals.reading import Goal
from sidestream.lm.models.blocks import learned_positions, text_config
from sidestream.lm.models.terms import InForce, checkpoints, lift, put_in_force

_MOVED = "a dynamic channel has moved with the text and cannot start over; start a new cache"


class Pins(nn.Module):
    """Pinned goals of a model: changed between turns, put on caches, and in force in a forward without one."""

    lm: PreTrainedModel
    channel: Any
    pinned: bool
    """Whether goals given to this model are pinned."""
    _rotation: Rotation | None = None

    # The attached model's own.
    encode_goal: Any
    new_cache: Any
    _start: Any
    _advance: Any
    _last_logits: Any

    def update_goal(self, cache: LatentCache, parts: Mapping[str, Any], *, rows: Sequence[int] | None = None) -> None:
        """Add, replace or remove parts of the goal pinned on a live cache, between two turns.

        The text that the cache holds is read anew behind the new goal, so what follows is what it would be had these
        parts stood there from the start (under `rolling`: with the window's tokens as the text's beginning).

        Args:
            cache: of a rollout of this model.
            parts: text or token ids by name; None removes that part.
            rows: which rows of the batch; None for all.

        Raises:
            ValueError: a cache without parts, a part that is not there, or a dynamic channel beside the pinned goal.
        """
        self._check_pins(cache)
        with torch.no_grad():
            self._put(cache, self.encode_goal(changed(self, cache.latent, parts, rows)), tuple(parts), rows)

    def set_goal(self, cache: LatentCache, goal: Goal | None) -> None:
        """Pin another goal on a live cache, or none; the text that the cache holds is read anew behind it.

        Raises:
            ValueError: as `update_goal`.
        """
        self._check_pins(cache)
        with torch.no_grad():
            state = None if goal is None else self._start(goal, None, cache.held)
            self._put(cache, state, () if state is None else state.part_names, None)

    def _check_pins(self, cache: LatentCache) -> None:
        if cache.running is not None:
            raise ValueError("a forward is writing to this cache; change its goal between two forwards")
        if not self.pinned or not cache.pins:
            raise ValueError("this changes a pinned goal: attach(lm, tokenizer=...) and model.new_cache()")
        if self.channel is not None and self.channel.tracker is not None:
            raise ValueError(_MOVED)

    def _put(self, cache: LatentCache, state: LatentState | None, parts: tuple[str, ...], rows: Any) -> None:
        size = None if cache.window is None else cache.window.size
        if state is not None and state.entries is not None:
            check_room(self.lm, state.entries.shape[1], size)
        held = cache.put_goal(state, parts, rows)
        if held is not None:
            ids, mask = held
            self.lm(input_ids=ids, attention_mask=mask, **{CACHE_NAME: cache}, use_cache=True, **self._last_logits(1))
            cache.count_again()

    def _begin(self, cache: LatentCache, state: LatentState | None) -> None:
        """Put the state on the cache; behind a goal pinned anew, the text that it holds is read again."""
        if state is not None and state.entries is not None:
            check_room(self.lm, state.entries.shape[1], None if cache.window is None else cache.window.size)
        if cache.held is None or _same_entries(cache.goal, state):
            cache.begin(state)
            return
        if self.channel is not None and self.channel.tracker is not None:
            raise ValueError(_MOVED)
        self._put(cache, state, () if state is None else state.part_names, None)

    def _check_table(self, cache: LatentCache, feed: dict[str, Any]) -> None:
        """Raises `ValueError` where goal and text have outgrown a table of learned positions."""
        table = self._table
        if table is None or cache.window is not None or feed["attention_mask"].shape[-1] <= table:
            return
        if int(feed["position_ids"].max()) >= table:  # padding takes none
            raise ValueError(
                f"goal and text need more than the {table} learned positions of {type(self.lm).__name__}; give a window"
            )

    @cached_property
    def _table(self) -> int | None:
        return learned_positions(self.lm)

    def _turning(self, window: Window | None, *, picks: bool) -> tuple[Window | None, Rotation | None]:
        """The window, and how the model's keys turn where a pinned goal has to move along with it.

        Args:
            window: as checked.
            picks: the policy was ours to pick: `reindex` where the keys do not turn in a way known here.
        """
        if not self.pinned or window is None or window.policy != "rolling":
            return window, None
        try:
            self._rotation = find_rotation(self.lm) if self._rotation is None else self._rotation
        except ValueError:
            if not picks:
                raise
            return Window(size=window.size, policy="reindex"), None
        return window, self._rotation

    def _pinned_forward(
        self, state: LatentState, ids: Tensor | None, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Any:
        """A forward without a cache of the caller's, the goal pinned."""
        if ids is None:
            raise ValueError("a pinned goal counts tokens: pass input_ids, not inputs_embeds")
        check_room(self.lm, state.entries.shape[1], ids.shape[1])  # type: ignore[union-attr]
        if not checkpoints(self.lm):
            cache = self.new_cache(state)
            output = self.lm(input_ids=ids, **{**kwargs, "attention_mask": mask, CACHE_NAME: cache, "use_cache": True})
            if hasattr(output, CACHE_NAME):
                output[CACHE_NAME] = None
            return output
        # Checkpointing drops caches, and with one the goal: it is read again, in front of the text.
        feed, ahead = in_front(self.lm, state, ids, mask)
        labels = kwargs.pop("labels", None)
        with InForce(self._terms_in_front(state, ids, mask, ahead)):
            output = self.lm(**{**kwargs, **feed, "use_cache": False})
        output.logits = output.logits[:, -ids.shape[1] :].contiguous()
        if labels is not None:
            output.loss = self.lm.loss_function(output.logits, labels, vocab_size=text_config(self.lm).vocab_size)
        return output

    def _behind_entries(self, state: LatentState, ids: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Any:
        """What the wrapped model gives below its head, the goal's entries put before the text, not read again."""
        check_room(self.lm, state.entries.shape[1], ids.shape[1])  # type: ignore[union-attr]
        cache = self.new_cache(state)
        terms = None if state.goal is None else self._advance(state, ids, mask)[0]
        feed, _ = feed_for(self.lm, cache, ids, mask)
        cache.running = put_in_force(terms)
        try:
            return self.lm.base_model(**{**kwargs, **feed, CACHE_NAME: cache, "use_cache": True})
        finally:
            lift(cache.running)
            cache.running = None
            cache.lift_goal()

    def _terms_in_front(self, state: LatentState, ids: Tensor, mask: Tensor | None, ahead: int) -> Tensor | None:
        """(B, ahead + T, L, 2, D) FiLM terms, none at the goal's own tokens."""
        if self.channel is None or state.goal is None:
            return None
        terms = self._advance(state, ids, mask)[0].expand(ids.shape[0], ids.shape[1], -1, -1, -1)
        return torch.cat([terms.new_zeros(terms.shape[0], ahead, *terms.shape[2:]), terms], dim=1)


def _same_entries(held: LatentState | None, given: LatentState | None) -> bool:
    """Whether a goal given is read from the tokens of the one pinned already, or neither is pinned."""
    if held is None or given is None or given.keys is None:
        return held is None and (given is None or given.keys is None)
    if held is given or held.entry_ids is None or given.entry_ids is None:
        return held is given
    if held.batch_size % given.batch_size or held.part_names != given.part_names:
        return False
    given = given.repeat_interleave(held.batch_size // given.batch_size)
    pairs = [(getattr(held, name), getattr(given, name)) for name in ("entries", "entry_ids", "entry_parts")]
    return all(a is b or a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
