"""Batched greedy decoding: `LeanDecoder` for speed, `greedy` for short answers to long forced texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.layout import pad_left
from sidestream.lm.decoding.lean import Ring, Stack, Tracked, TrackerMaps
from sidestream.lm.decoding.window import Window, checked_window
from sidestream.lm.models.adapters import adapter_names
from sidestream.lm.models.blocks import film_sites

_AHEAD = 16
"""Tokens that E_base's ring holds beyond its window, so that as many can be read in one piece."""


class LeanDecoder:
    """Greedy decoding with the tokens of `generate()` at the cost of the weights' way through the processor.

    It holds the decoder's weights in a layout of their own, and of the channel what decoding needs: for a static goal
    nothing, for a dynamic one the tracker, FiLM and E_base. It does not hold on to the model: encode the goals, and the
    model with its encoder can go.

    Args:
        model: an `AttachedLM` on GPT-2 or Llama, or such a model alone.
        rows: B, rows a batch will have, times W where each token encodes its window anew. Any number decodes right; the
            layout is chosen for this one.
        window: W or a `Window`, as for `generate`.

    Raises:
        ValueError: another kind of model, adapters in it, FiLM sites of the user's own, a tracker with a history, or a
            window the model cannot take.
    """

    def __init__(self, model: Any, *, rows: int = 1, window: int | Window | None = None) -> None:
        attached = model if isinstance(model, AttachedLM) else None
        lm: Any = model if attached is None else attached.lm
        if adapter_names(lm):
            raise ValueError(f"lean decoding reads the base's own weights, without {adapter_names(lm)}; use generate()")
        self.stack = Stack(lm, rows=rows)
        self.maps: TrackerMaps | None = None
        self.channel: Any = None
        reader: Any = None
        if attached is not None and attached.sites and attached.sites != film_sites(lm):
            raise ValueError(f"lean decoding modulates the MLP's input; sites {attached.sites[:1]}... need generate()")
        if attached is not None and attached.channel is not None and attached.channel.tracker is not None:
            reader = attached.encoder if attached.encoder is not None else lm
            self.channel = attached.channel
            self.maps = TrackerMaps(self.channel, rows=rows)
            # It reads what came since the last trigger in one piece: several rows, even of a single text.
            self.reader = self.stack if reader is lm else Stack(reader, rows=max(rows, 4))
            layer, depth = self.channel.config.tracker_layer, len(self.reader.blocks)
            self.depth = None if layer in (-1, depth) else layer % (depth + 1)
            self.triggers = torch.zeros(lm.config.vocab_size, dtype=torch.bool, device=lm.device)
            self.triggers[list(self.channel.config.trigger_ids)] = True
        self.window = checked_window(lm, window, reader)

    @torch.no_grad()
    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        goal: LatentState | None = None,
        stop_id: int | None = None,
    ) -> list[list[int]]:
        """Greedy continuations.

        Args:
            prompts: token ids, of any lengths.
            new_tokens: at most this many a row.
            goal: `model.encode_goal(...)`, one row per prompt or one for all; None leaves the channel closed.
            stop_id: ends a row, and is not part of it.

        Raises:
            ValueError: an empty prompt, a goal without terms, or text that outgrows the model's positions.
        """
        device = self.stack.second_weights.device
        ids, mask = pad_left(prompts, pad_id=0, device=device)
        rollout = self.start(len(prompts), capacity=ids.shape[1] + new_tokens, goal=goal, mask=mask)
        chosen = [rollout.feed(ids)]
        finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        while len(chosen) < new_tokens:
            if stop_id is not None:
                finished |= chosen[-1] == stop_id
                if bool(finished.all()):
                    break
            chosen.append(rollout.feed(chosen[-1][:, None]))
        rows = torch.stack(chosen, dim=1).tolist()
        return [row[: row.index(stop_id)] if stop_id in row else row for row in rows]

    def start(
        self, rows: int, *, capacity: int, goal: LatentState | None = None, mask: Tensor | None = None
    ) -> Rollout:
        """A batch of texts to be fed by hand.

        Args:
            rows: B.
            capacity: the most tokens a row will have; a window needs none beyond W.
            goal: as for `greedy`.
            mask: (B, T) of the first tokens, 0 at padding on the left.

        Raises:
            ValueError: as `greedy`.
        """
        return Rollout(self, rows, capacity, goal, mask)


class Rollout:
    """Texts being decoded, one ring of keys and values beside them."""

    def __init__(
        self, decoder: LeanDecoder, rows: int, capacity: int, goal: LatentState | None, mask: Tensor | None
    ) -> None:
        self.decoder, self.stack = decoder, decoder.stack
        if goal is not None and goal.batch_size not in (1, rows):
            raise ValueError(f"{goal.batch_size} goals for {rows} rows of text; give one goal per row, or one for all")
        dynamic = goal is not None and decoder.maps is not None and goal.goal is not None
        pinned = None if goal is None or goal.keys is None else goal
        if pinned is not None and pinned.batch_size != rows:
            pinned = pinned.repeat_interleave(rows)
        padding = None if mask is None or bool(mask.all()) else (mask == 0).sum(dim=1)
        window = decoder.window
        self.slides = window is not None and window.policy == "reindex" and capacity > window.size
        size = None if window is None or window.policy == "reindex" else window.size
        places = self.stack.places
        longest = min(capacity, window.size) if self.slides and window is not None else capacity
        ahead = 0 if pinned is None or pinned.entries is None else pinned.entries.shape[1]
        if places is not None and ahead + longest > len(places):
            raise ValueError(
                f"{ahead + capacity} tokens outgrow the model's {len(places)} learned positions; give a window"
            )
        # Twice the window while a prompt is read, in pieces of W; exactly W from the first single token on.
        self.ring = _ring(self.stack, rows, longest, size, padding, ahead=size or 0, goal=pinned)
        # Where a sliding window has to be encoded anew: its tokens (B, <= W), and their terms where these differ.
        self.text: Tensor | None = None
        self.terms: Tensor | None = None
        self.film: Any = None
        self.tracked: Tracked | None = None
        if goal is None or goal.goal is None:
            return
        if dynamic:
            assert decoder.maps is not None
            full = goal if goal.batch_size == rows else goal.repeat_interleave(rows)
            self.tracked = Tracked(decoder.channel, full, decoder.maps)
            limit = None if window is None else window.encoder_size
            table = decoder.reader.places
            if table is not None and capacity > len(table):
                raise ValueError(f"{capacity} tokens outgrow E_base's {len(table)} learned positions; shorten the text")
            self.read = _ring(decoder.reader, rows, capacity, limit, padding, ahead=_AHEAD)
            self.unread: list[Tensor] = []
            self.padding, self.fed = padding, 0
            self.film = self.stack.fold(self._terms())
        elif goal.terms is None:
            raise ValueError("the goal has no FiLM terms yet: pass model.encode_goal(goal)")
        else:
            self.film = self.stack.fold(goal.terms)

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """(B,) the greedy choice after these (B, T) tokens, which join the text."""
        hidden = self._static(ids) if self.tracked is None else self._dynamic(ids)
        return self.stack.head(hidden).argmax(dim=-1)

    @torch.no_grad()
    def force(self, ids: Tensor) -> None:
        """As `feed`, but nothing is chosen: the head is not applied."""
        self._static(ids) if self.tracked is None else self._dynamic(ids)

    def _static(self, ids: Tensor) -> Tensor:
        if self.slides:
            return self._anew(ids)
        ring = self.ring
        if ring.size is not None and ids.shape[1] == 1 and ring.seen >= ring.capacity > ring.size:
            self.ring = ring = ring.tightened(self.stack)
        return _run(self.stack, ids, ring, film=self.film)

    def _anew(self, ids: Tensor, terms: Tensor | None = None) -> Tensor:
        """`reindex`: the window is encoded again once it slides. `terms` are those of the new tokens, for dynamic."""
        ring, size = self.ring, self.decoder.window.size  # type: ignore[union-attr]
        self.text = ids if self.text is None else torch.cat([self.text, ids], dim=1)
        dropped = self.text.shape[1] - size
        if terms is not None:
            self.terms = (terms if self.terms is None else torch.cat([self.terms, terms], dim=1))[:, -size:]
            self.film = self.stack.fold(self.terms if dropped > 0 else terms)
        if dropped <= 0:
            return self.stack.run(ids, ring, self.film)
        self.text, ring.seen = self.text[:, dropped:], 0
        if ring.padding is not None:
            ring.padding = (ring.padding - dropped).clamp(min=0)
        return self.stack.run(self.text, ring, self.film)

    def _dynamic(self, ids: Tensor) -> Tensor:
        assert self.tracked is not None
        fires = self.decoder.triggers[ids]  # (B, T)
        if self.padding is not None:
            columns = torch.arange(self.fed, self.fed + ids.shape[1], device=ids.device)
            fires = fires & (columns >= self.padding[:, None])
        self.fed += ids.shape[1]
        at = fires.any(dim=0).nonzero().flatten().tolist()
        hidden: Any = None
        terms = []
        for start, end in pairwise(sorted({0, *at, ids.shape[1]})):
            if start in at:
                self._trigger(ids[:, start : start + 1], fires[:, start])
                self.unread.append(ids[:, start + 1 : end])
            else:
                self.unread.append(ids[:, start:end])
            if self.slides:
                terms.append(self._terms().expand(-1, end - start, -1, -1, -1))
            else:
                hidden = self._static(ids[:, start:end])
        return self._anew(ids, torch.cat(terms, dim=1)) if self.slides else hidden

    def _trigger(self, ids: Tensor, fires: Tensor) -> None:
        """E_base reads on up to the trigger, and the rows that have one there move."""
        assert self.tracked is not None
        decoder, unread = self.decoder, torch.cat([*self.unread, ids], dim=1)
        self.unread = []
        rows = None if len(fires) == 1 else fires.nonzero().flatten()
        self.tracked.move(_run(decoder.reader, unread, self.read, depth=decoder.depth, wanted=rows), rows)
        if not self.slides:
            self.film = self.stack.fold(self._terms())

    def _terms(self) -> Tensor:
        """(B, 1, L, 2, D) of the vectors in force."""
        assert self.tracked is not None
        return self.tracked.terms.unflatten(-1, (1, len(self.stack.blocks), 2, -1))

    def nbytes(self) -> int:
        """Bytes of keys and values held for the rollout."""
        return self.ring.nbytes() + (0 if self.tracked is None else self.read.nbytes())


def _ring(
    stack: Stack,
    rows: int,
    capacity: int,
    size: int | None,
    padding: Tensor | None,
    *,
    ahead: int,
    goal: LatentState | None = None,
) -> Ring:
    if size is None or capacity <= size:
        return Ring(stack, rows=rows, capacity=capacity, padding=padding, goal=goal)
    return Ring(stack, rows=rows, capacity=min(capacity, size + ahead), size=size, padding=padding, goal=goal)


def _run(stack: Stack, ids: Tensor, ring: Ring, **options: Any) -> Tensor:
    """`stack.run` in pieces that the ring can take."""
    hidden: Any = None
    while ids.shape[1]:
        # An empty ring fills to the brim; a full one may lose only what no later token sees.
        free = ring.capacity - ring.seen
        most = ids.shape[1] if ring.size is None else max(free, ring.capacity - ring.size + 1)
        hidden = stack.run(ids[:, :most], ring, **options)
        ids = ids[:, most:]
    return hidden


@torch.no_grad()
def greedy(
    model: Any,
    forced: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    window: int,
    goal: LatentState | None = None,
    batch_size: int = 128,
) -> list[list[int]]:
    """Greedy continuations under `reindex`: every token sees the last W tokens at positions 0..W-1, and nothing else.

    Forced tokens older than W can reach no logit under this policy, so they are not run at all: a horizon of 16,384
    costs what one of W costs. `generate(window=W)` gives the same tokens.

    Args:
        model: an `AttachedLM` or a bare causal LM.
        forced: the tokens each row is given, any lengths.
        new_tokens: how many tokens to generate for every row.
        window: W.
        goal: one latent state per row; None decodes without a goal.
        batch_size: rows at a time.

    Returns:
        `new_tokens` ids per row.
    """
    # Rows of like length share a batch, so that little of it is padding.
    order = sorted(range(len(forced)), key=lambda row: min(len(forced[row]), window))
    rows: list[list[int]] = [list(forced[row][-window:]) for row in order]
    head: Any = (model.lm if isinstance(model, AttachedLM) else model).get_output_embeddings()
    for _ in range(new_tokens):
        for start in range(0, len(rows), batch_size):
            part = slice(start, min(start + batch_size, len(rows)))
            state = None
            if goal is not None:
                state = goal.select(torch.tensor(order[part], device=goal.device))
            states = last_states(model, [row[-window:] for row in rows[part]], goal=state)
            for row, token in zip(rows[part], head(states).argmax(dim=-1).tolist(), strict=True):
                row.append(token)
    found = dict(zip(order, rows, strict=True))
    return [found[row][-new_tokens:] for row in range(len(rows))]


@torch.no_grad()
def last_states(model: Any, rows: Sequence[Sequence[int]], *, goal: LatentState | None = None) -> Tensor:
    """(B, D) last-layer states at each row's last token."""
    ids, mask = pad_right(rows, device=model.device)
    if isinstance(model, AttachedLM):
        hidden = model.hidden(ids, goal=goal, attention_mask=mask)
    else:
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden[torch.arange(len(rows), device=hidden.device), mask.sum(dim=1) - 1]


def pad_right(
    rows: Sequence[Sequence[int]], *, value: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(B, T) ids and their mask, shorter rows filled with `value` at the end."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([list(row) + [value] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask
