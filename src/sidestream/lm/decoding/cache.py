"""A KV cache that carries the latent state, and the window the text channel sees.

The state rides on the cache because everything that moves a rollout moves its cache: beam search reorders it,
`num_return_sequences` repeats it, a second turn continues it. Hidden in keyword arguments or module attributes the
state would miss all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from sidestream.channels import LatentState
from sidestream.channels.rotation import Rotation
from sidestream.lm.decoding.masks import attention_for, near, own_reach, positions_of
from sidestream.lm.decoding.window import Window
from sidestream.lm.goals.pinning import COPIES, PinnedLayer, check_text
from sidestream.lm.models.blocks import CACHE_NAME, takes, text_config


class GoalWrite(NamedTuple):
    """One write of a pinned goal."""

    at: int
    """Tokens of the text seen before."""
    parts: tuple[str, ...]
    """Parts set or removed; empty for a goal in one piece."""
    rows: tuple[int, ...] | None
    """Which rows; None for all."""
    entries: tuple[int, ...]
    """Entries that each row's goal has from here on."""


class LatentCache(DynamicCache):
    """`DynamicCache` with a `LatentState` and, if asked for, a window.

    Pass it as the cache of any attached model; `generate` hands the same object back.

    Args:
        config: the model's text configuration.
        latent: the state to start from; None leaves the channel closed.
        window: None for no limit.
        pins: whether goals can be pinned on it, from the start or later.
        rotation: how the model's keys turn; needed by a pinned goal under `rolling`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        latent: LatentState | None = None,
        window: Window | None = None,
        *,
        pins: bool = False,
        rotation: Rotation | None = None,
    ) -> None:
        super().__init__(config=config)
        self.latent = latent
        self.window = window
        self.pins = pins
        self.rotation = rotation
        self.encoder: LatentCache | None = None
        """The encoder's own cache, for a dynamic channel: what makes a trigger cost the same at any position. It is
        made when the first goal is set, and reads the text from there on."""
        self.running: Any = None
        """Set by the attached model while one of its forwards writes to this cache."""
        self._config = config
        self._crossed: tuple[LatentState, Tensor] | None = None  # of the goal's keys, see `Rotation.cross`
        self._tokens: Tensor | None = None  # (B, <= W): what the window holds, where it may be read anew
        self._terms: Tensor | None = None  # (B, <= W, L, 2, D): their FiLM terms, where these differ by token
        self._mask: Tensor | None = None  # (B, columns held): 0 at padding
        self._positions: Tensor | None = None  # (B,): real tokens seen, per row
        self._seen = self._read = 0
        self._hash: Tensor | None = None  # (B,): of the tokens read, which tells a text that does not continue them
        self._continued = False
        self._before: tuple[int, int, Tensor | None] = (0, 0, None)  # of a text that is being read again
        self.writes: list[GoalWrite] = []
        """Every goal pinned on this cache, in order."""
        self._clear_layers()
        self.begin(latent)

    def _clear_layers(self) -> None:
        if self.pins:
            limit = self.window.size - 1 if self.window is not None and self.window.policy == "rolling" else None
            self.layers = [PinnedLayer(limit) for _ in range(self._config.num_hidden_layers)]
        elif self.window is not None and self.window.policy == "rolling":
            self.layers = [DynamicSlidingWindowLayer(self.window.size) for _ in range(self._config.num_hidden_layers)]
        else:
            self.layers = DynamicCache(config=self._config).layers

    # A window drops keys that a rollback would need, and a tracked vector cannot be un-moved.
    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: rolling keys back cannot undo a latent update.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a cache with a latent state cannot be cropped (assisted decoding needs it); generate without an assistant"
        )

    # `generate` of transformers marks a cache it was handed, before it computes. It would cut the text by the count of
    # tokens held and never look at what they are.
    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        if self.get_seq_length() and not self._continued:
            raise ValueError(
                f"the cache holds {self.get_seq_length()} tokens of a text, and only the attached model checks that "
                "another continues it: call model.generate(...), pipeline(model=model), or take a new cache"
            )

    @contextmanager
    def continued_by(self, input_ids: Tensor | None, mask: Tensor | None, copies: int = 1) -> Iterator[None]:
        """Context in which `generate` may go on from the text held.

        Args:
            input_ids: (B, T) the whole text so far and the new tokens, or, with a longer mask, the new tokens alone.
            mask: as `generate` is given it.
            copies: how many rows `generate` makes of each (beams, sequences to return).

        Raises:
            ValueError: these tokens do not continue what the cache holds.
        """
        held = self.get_seq_length()
        if held and input_ids is not None:
            self._check(input_ids, mask, copies, held)
        self._continued = True
        try:
            yield
        finally:
            self._continued = False

    def _check(self, input_ids: Tensor, mask: Tensor | None, copies: int, held: int) -> None:
        rows, length = input_ids.shape
        whole = "pass the whole text so far followed by the new tokens, or leave the cache out for another text"
        columns = mask.shape[1] if mask is not None and mask.dim() == 2 else length
        new_only = columns > length
        if new_only and columns != held + length:
            raise ValueError(
                f"the cache holds {held} tokens, input_ids {length} and attention_mask {columns} columns; {whole}"
            )
        if not new_only and length <= held:
            raise ValueError(f"the cache holds {held} tokens and input_ids {length}: to continue, {whole}")
        if self._hash is None or self._read != held:
            return  # it was read as embeddings: there are no ids to compare
        if len(self._hash) != rows * copies:
            many = f"{rows}" if copies == 1 else f"{rows} x {copies}"
            raise ValueError(f"the cache holds {len(self._hash)} rows of text and input_ids {many}; {whole}")
        if new_only:
            return
        begun = _hashed(input_ids[:, :held].to(self._hash.device), None).repeat_interleave(copies)
        other = (begun != self._hash).nonzero().flatten().tolist()
        if other:
            raise ValueError(
                f"the text does not continue the {held} tokens that the cache holds (row {other[0]} begins otherwise); "
                f"{whole}"
            )

    def remember(self, input_ids: Tensor | None) -> None:
        """Take note of tokens that a forward reads."""
        if input_ids is not None and input_ids.shape[1]:
            self._hash = _hashed(input_ids, self._hash)
            self._read += input_ids.shape[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far. During a forward under `reindex`, the keys held: the model sizes its masks by it."""
        if self.running is None and (self.pins or self.window is not None and self.window.policy == "reindex"):
            return self._seen
        return super().get_seq_length(layer_idx)

    def take(
        self, input_ids: Tensor, attention_mask: Tensor | None, terms: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Account for new tokens and say what the model must be fed.

        Args:
            input_ids: (B, T) new tokens.
            attention_mask: (B, anything >= T), 0 at padding; only the last T columns are read.
            terms: (B, T, L, 2, D) FiLM terms of the new tokens, where they differ by token.

        Returns:
            `input_ids`, `attention_mask` and `position_ids` for the forward, and the FiLM terms that go with them. The
            mask is (B, columns), 0 at padding, or under `rolling` (B, 1, T, columns), true where a token may look.
        """
        batch, length = input_ids.shape
        new_mask = torch.ones_like(input_ids)
        if attention_mask is not None:
            new_mask = attention_mask[:, -length:].to(input_ids.dtype)
        held = new_mask.new_zeros(batch, 0) if self._mask is None else self._mask
        before = new_mask.new_zeros(batch) if self._positions is None else self._positions
        mask = torch.cat([held, new_mask], dim=1)
        self._seen += length
        if self.window is not None and self.window.policy == "reindex":
            return self._take_anew(input_ids, mask, terms)
        positions = (before[:, None] + new_mask.cumsum(1) - 1).clamp(min=0)
        self._positions = before + new_mask.sum(1)
        self._mask, size = mask, None if self.window is None else self.window.size
        left = None
        if size is not None:
            self._mask = mask[:, -(size - 1) :].clone()  # as many columns as the layers keep
            # Tokens of each row that have left, as each new token sees it.
            seen = torch.nn.functional.pad(mask.cumsum(1), (size, 0))[:, -length - size : -size]
            left = (before - held.sum(1))[:, None] + seen
        if self.pins:
            tokens = input_ids if self._tokens is None else torch.cat([self._tokens, input_ids], dim=1)
            self._tokens = tokens if size is None else tokens[:, 1 - size :].clone()
        if self.goal is not None:
            mask, positions = self._behind_goal(mask, positions, left)
        elif size is not None:
            mask = near(mask, length, size)
        return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}, terms

    @property
    def goal(self) -> LatentState | None:
        """The state, where a goal is pinned in it."""
        return None if self.latent is None or self.latent.keys is None else self.latent

    def _behind_goal(self, mask: Tensor, positions: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mask and positions of text behind the pinned goal, whose entries are put into the layers.

        Args:
            mask: (B, columns) of the text held and of the T new tokens, 0 at padding.
            positions: (B, T) of the new tokens, counted without the goal.
            left: (B, T) tokens of each row that have left the window as each new token sees it; None for no window.
        """
        goal, length = self.goal, positions.shape[1]
        assert goal is not None and goal.entries is not None
        check_text(self._config, goal.entries.shape[1], mask)
        entries, size = goal.entries.to(mask.dtype), mask.shape[1] if left is None else self.window.size  # type: ignore[union-attr]
        positions = positions + entries.sum(dim=1, keepdim=True)
        keys, values, copies = goal.keys, goal.values, torch.zeros(length, dtype=torch.long, device=mask.device)
        assert keys is not None and values is not None
        if left is not None:
            places = left
            if length > 1:
                places, copies = torch.unique_consecutive(left, dim=1, return_inverse=True)
            moved = [self._moved(place) for place in places.unbind(1)]
            keys = torch.cat(moved, dim=-2) if len(moved) > 1 else moved[0]
            values = torch.cat([values] * len(moved), dim=-2) if len(moved) > 1 else values
            entries = entries.repeat(1, len(moved))
        for layer, key, value in zip(self.layers, keys.unbind(1), values.unbind(1), strict=True):
            layer.goal = (key, value)  # type: ignore[union-attr]
        if left is None and own_reach(self._config) is None:
            return torch.cat([entries, mask], dim=1), positions
        # Each new token sees the copy of the goal that stands where it has to for that token.
        owner = torch.arange(entries.shape[1], device=mask.device) // goal.entries.shape[1]
        sees = (owner == copies[:, None]) & entries.bool()[:, None, None]
        return torch.cat([sees, near(mask, length, size)], dim=-1), positions

    def _moved(self, place: Tensor) -> Tensor:
        """(B, L, H, M, K) the goal's keys, moved by (B,) positions."""
        goal = self.goal
        assert goal is not None and goal.keys is not None
        if not bool(place.any()):
            return goal.keys
        assert self.rotation is not None
        if self._crossed is None or self._crossed[0] is not goal:
            self._crossed = goal, self.rotation.cross(goal.keys)
        keys, crossed = goal.keys, self._crossed[1]
        if goal.keys.stride(0) == 0 and bool((place == place[0]).all()):  # one goal for all rows
            return self.rotation.turn(keys[:1], place[:1], crossed[:1]).expand_as(keys)
        return self.rotation.turn(keys, place, crossed)

    def begin(self, state: LatentState | None) -> None:
        """Start from this state, or go on from it where text has been read."""
        self.latent = state
        if state is not None and state.keys is not None:
            if not self.pins:
                raise ValueError("this cache cannot hold a pinned goal; make it with model.new_cache()")
            self._log(state.part_names, None)

    @property
    def held(self) -> Tensor | None:
        """(B, <= W) tokens of the text that can be read anew; None where no text has been read."""
        return self._tokens

    def put_goal(
        self, state: LatentState | None, parts: tuple[str, ...], rows: Sequence[int] | None
    ) -> tuple[Tensor, Tensor] | None:
        """Pin another goal and forget the keys of the text, which the caller reads again; `count_again` ends that.

        Returns:
            Ids and mask of the text to read, or None where there is none yet.
        """
        self.latent = state
        self._log(parts, rows)
        if self._tokens is None or self._mask is None:
            return None
        held = self._tokens, self._mask[:, -self._tokens.shape[1] :]
        self._before = self._seen, self._read, self._hash
        self._clear_layers()
        self._tokens = self._mask = self._positions = self._terms = None
        return held

    def count_again(self) -> None:
        """The text read again is not new text."""
        self._seen, self._read, self._hash = self._before

    def _log(self, parts: tuple[str, ...], rows: Sequence[int] | None) -> None:
        entries = None if self.latent is None else self.latent.entries
        counts = [] if entries is None else entries.sum(dim=1).tolist()
        self.writes.append(GoalWrite(self._seen, parts, None if rows is None else tuple(rows), tuple(counts)))

    def lift_goal(self) -> None:
        """Take the goal's entries out of the layers: between forwards these hold the text alone."""
        if self.pins:
            for layer in self.layers:
                layer.goal = None  # type: ignore[union-attr]

    def pieces(self, ids: Tensor) -> list[int]:
        """How many of the new tokens each forward takes under `rolling`.

        Pieces of W keep the keys at 2 W at most. Where the goal is pinned and the window moves, each token of a piece
        sees its own copy of the goal.
        """
        assert self.window is not None
        size, length = self.window.size, ids.shape[1]
        if self.goal is None:
            first, step = min(length, size), size
        else:
            assert self.goal.entries is not None
            step = max(1, min(size, COPIES // max(1, self.goal.entries.shape[1])))
            first = min(length, max(size - (0 if self._mask is None else self._mask.shape[1]), step))
        sizes = [first]
        while sum(sizes) < length:
            sizes.append(min(step, length - sum(sizes)))
        return sizes

    def _take_anew(
        self, input_ids: Tensor, mask: Tensor, terms: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """`reindex`: while the window fills, new tokens only; once it slides, all W tokens at positions 0..W-1."""
        assert self.window is not None
        size, fed = self.window.size, input_ids.shape[1]
        kept = 0 if self._tokens is None else self._tokens.shape[1]
        tokens = input_ids if self._tokens is None else torch.cat([self._tokens, input_ids], dim=1)
        if tokens.shape[1] > size:
            self._clear_layers()
            fed = size
        # Clones, because a view would hold on to the whole prompt.
        self._tokens, self._mask = tokens[:, -size:].clone(), mask[:, -size:].clone()
        if terms is None:
            self._terms = None
        else:
            # Tokens read before the channel opened have no terms of their own; zeros are the identity.
            old = terms.new_zeros(terms.shape[0], kept, *terms.shape[2:]) if self._terms is None else self._terms
            self._terms = torch.cat([old, terms], dim=1)[:, -size:].clone()
            terms = self._terms[:, -fed:]
        positions, mask = positions_of(self._mask)[:, -fed:], self._mask
        if self.goal is not None:
            mask, positions = self._behind_goal(mask, positions, None)
        return {"input_ids": self._tokens[:, -fed:], "attention_mask": mask, "position_ids": positions}, terms

    def expand_latent(self, batch: int) -> None:
        """Repeat the goals so that each of `batch` rows has one, as `generate` repeats prompts for beams.

        Raises:
            ValueError: `batch` is not a multiple of the number of goals.
        """
        if self.latent is None or self.latent.batch_size == batch:
            return
        if batch % self.latent.batch_size:
            raise ValueError(f"{self.latent.batch_size} goals for {batch} rows of text; give one goal per row")
        self.latent = self.latent.repeat_interleave(batch // self.latent.batch_size)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow beam search: keys, values, window and latent rows take the beams' order."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._map_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))
        if self.encoder is not None:
            self.encoder.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))
        if self.encoder is not None:
            self.encoder.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self._map_rows(lambda rows: rows[indices])
        if self.encoder is not None:
            self.encoder.batch_select_indices(indices)

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.latent is not None:
            self.latent = self.latent.map(function)
        for name in ("_tokens", "_terms", "_mask", "_positions", "_hash"):
            if getattr(self, name) is not None:
                setattr(self, name, function(getattr(self, name)))

    def reset(self) -> None:
        """Forget the text; the latent state stays, as the goal outlives the rollout."""
        self._clear_layers()
        self._tokens = self._terms = self._mask = self._positions = self._hash = self.encoder = None
        self._seen = self._read = 0

    def nbytes(self) -> int:
        """Bytes of memory held for the rollout: keys, values, window, latent state, the encoder's cache."""
        storages = [tensor.untyped_storage() for tensor in self._tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _tensors(self) -> Iterator[Tensor]:
        held = [getattr(layer, name, None) for layer in self.layers for name in ("keys", "values")]
        held += [self._tokens, self._terms, self._mask, self._positions, self._hash]
        if self.latent is not None:
            held += self.latent.tensors()
        yield from (tensor for tensor in held if tensor is not None)
        if self.encoder is not None:
            yield from self.encoder._tensors()


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache that a forward is given, under the name of any version of transformers."""
    cache = kwargs.get(CACHE_NAME)
    return kwargs.get("past_key_values") if cache is None else cache


def take_cache(kwargs: dict[str, Any]) -> Any:
    """The cache, under either name, taken out of the arguments."""
    old_name, cache = kwargs.pop("past_key_values", None), kwargs.pop("cache", None)
    return old_name if cache is None else cache


def feed_for(
    lm: PreTrainedModel,
    cache: LatentCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    terms: Tensor | None = None,
) -> tuple[dict[str, Any], Tensor | None]:
    """`cache.take`, in the form this model takes."""
    feed: dict[str, Any]
    feed, terms = cache.take(input_ids, attention_mask, terms)
    if feed["attention_mask"].dim() == 4:
        ahead = 0 if cache.layers[0].__dict__.get("goal") is None else cache.layers[0].goal[0].shape[-2]  # type: ignore
        feed["attention_mask"] = attention_for(text_config(lm), feed["attention_mask"], lm.dtype, ahead)
    if not takes(lm, "position_ids"):
        del feed["position_ids"]  # ALiBi: the model counts for itself
    return feed, terms


_FACTOR = 6364136223846793005  # Knuth's, of MMIX


def _hashed(ids: Tensor, before: Tensor | None) -> Tensor:
    """(B,) polynomial hash modulo 2^64 of rows of tokens, going on from that of what came before.

    A hash and not the ids: as much memory for any length of text, and rows move with the beams.
    """
    if ids.shape[1] == 1 and before is not None:  # a step of decoding: three kernels
        return before.to(ids.device) * _FACTOR + (ids[:, 0].long() + 1) * _FACTOR
    powers = torch.full((ids.shape[1],), _FACTOR, dtype=torch.long, device=ids.device).cumprod(0)
    new = ((ids.long() + 1) * powers.flip(0)).sum(1)
    return new if before is None else before.to(new.device) * powers[-1] + new
