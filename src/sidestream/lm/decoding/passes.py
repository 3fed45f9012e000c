"""CoCoNuT latent passes: the hidden state before a latent slot becomes that slot's input embedding.

One call, top to bottom: the columns of a batch are cut wherever some row has a latent slot. Each piece runs once, over
the keys and values of the pieces before it; the first column of a piece takes the hidden state that the piece before
ended with, through the concept stream where one is attached. n latents so take n + 1 forwards that together see every
column once, and autograd runs back through all of them. Rows may have their slots in any columns; rows whose slots
share columns share passes (see `sidestream.lm.decoding.layout`). Decoding is the same call with one more token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache
from sidestream.lm.decoding.layout import UNSCORED, pad_left
from sidestream.lm.decoding.masks import positions_of
from sidestream.lm.goals.reading import Goal
from sidestream.lm.models.blocks import takes, text_config
from sidestream.lm.models.terms import InForce, check_checkpointing

Replace = Callable[[Tensor, Tensor], Tensor]
"""An intervention: (B, D) embeddings about to be fed and (B,) which latent of its row each is, counted from 0, to the
(B, D) embeddings fed instead. Rows without a slot in the column are there too, and what they get is ignored."""


@dataclass(frozen=True, kw_only=True)
class PassConfig:
    """How latent slots are filled, and what is visible behind them."""

    latent_id: int
    """The token that marks a latent slot."""
    slots: Literal["hidden", "pause", "pause_multi"] = "hidden"
    """`hidden` is CoCoNuT. `pause` leaves the token's own learned embedding in every slot and takes one forward.
    `pause_multi` does so pass by pass: attention being causal, the same numbers at the cost of latents. Pause tokens
    use no concept stream."""
    sees: Literal["all", "latents", "last"] = "all"
    """What a row's first slot and everything after it can attend to. `all`: the whole text. `latents`: nothing before
    the first slot, so that the question travels through the latents only. `last`: nothing before the latest slot, so
    that it travels through that slot's embedding (hidden state and concept stream) only."""
    hides: int | None = None
    """What `sees` hides of the text before the first slot: its last so many tokens, or with None all of it. A question
    that ends in a query can so keep its table in view."""
    depth: int | None = None
    """Use the first `depth` slots of each row and take the others out, as if they had not been written. With 0 a row
    is a row without latents."""

    def __post_init__(self) -> None:
        if self.slots not in ("hidden", "pause", "pause_multi"):
            raise ValueError(f"PassConfig.slots is {self.slots!r}; use 'hidden', 'pause' or 'pause_multi'")
        if self.sees not in ("all", "latents", "last"):
            raise ValueError(f"PassConfig.sees is {self.sees!r}; use 'all', 'latents' or 'last'")
        if self.slots == "pause" and self.sees != "all":
            raise ValueError("PassConfig.slots 'pause' is one forward and cannot hide text; use 'pause_multi'")
        if self.hides is not None and (self.sees == "all" or self.hides < 1):
            raise ValueError(f"PassConfig.hides is {self.hides}; it counts tokens, 1 or more, that `sees` is to hide")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"PassConfig.depth is {self.depth}; it counts latents, 0 or more")


@dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """What a run of latent passes leaves. K is the largest number of latents among the rows of this call."""

    hidden: Tensor
    """(B, T, D) last-layer states of the tokens of this call, slots included: `lm.get_output_embeddings()` gives their
    logits."""
    states: Tensor
    """(B, K, D) h_t: the hidden state at the end of pass t, before the stream. `stream.gates(states)` are its gates."""
    latents: Tensor
    """(B, K, D) the embedding fed into slot t: h_t, or h'_t behind a stream, or what replaced it."""
    present: Tensor
    """(B, K) true where the row has a t-th latent; elsewhere `states` and `latents` are 0."""
    cache: LatentCache
    """Keys and values of every column, and the latent state (goal, concept stream) after the last one."""
    mask: Tensor
    """(B, columns) 1 at real tokens, of this call and those before it."""
    slots: Tensor
    """(B, columns) true at latent slots."""


def latent_passes(
    model: Any,
    input_ids: Tensor,
    config: PassConfig,
    *,
    attention_mask: Tensor | None = None,
    goal: Goal | None = None,
    replace: Replace | None = None,
    past: Passes | None = None,
) -> Passes:
    """Run a batch with latent slots through a causal LM, with gradients unless they are switched off around it.

    Args:
        model: any Hugging Face causal LM, or an `AttachedLM` with a goal channel, a concept stream or both.
        input_ids: (B, T) tokens; `config.latent_id` marks the slots. Any number a row, 0 included.
        config: what fills the slots.
        attention_mask: (B, T), 0 at padding, on either side.
        goal: as for `AttachedLM.encode_goal`, one per row or one for all.
        replace: an intervention on the latents (`replacement` makes the usual ones).
        past: what came before these tokens. The text goes on in its cache, so it cannot go on twice.

    Raises:
        ValueError: a slot without a token before it, an intervention or goal without effect, a model whose hidden
            states are not as wide as its embeddings, or gradient checkpointing, which drops the keys passes reuse.
    """
    attached = model if isinstance(model, AttachedLM) else None
    lm: Any = model if attached is None else attached.lm
    stream = attached.stream if attached is not None and config.slots == "hidden" else None
    if goal is not None and (attached is None or past is not None):
        why = "the text goes on with the goal it has" if attached is not None else "the model carries no channel"
        raise ValueError(f"a goal was given, but {why}")
    if replace is not None and config.slots == "pause":
        raise ValueError("an intervention on the latents needs passes; use slots='hidden' or 'pause_multi'")

    mask, slots = _columns(input_ids, attention_mask, config, past)  # (B, columns)
    before, columns = mask.shape[1] - input_ids.shape[1], mask.shape[1]
    embeds = lm.get_input_embeddings()(input_ids)  # (B, T, D)
    positions = positions_of(mask)
    which = slots.cumsum(dim=1) - 1
    if past is not None:
        cache, ended = past.cache, past.hidden[:, -1]
    else:
        state = None if attached is None else attached._start(goal, None, input_ids)
        state = state if stream is None else stream.start(embeds[:, 0], state)
        cache, ended = LatentCache(text_config(lm), latent=state), embeds[:, 0]
    check_checkpointing(lm, cache)

    cuts = [] if config.slots == "pause" else (slots[:, before:].any(dim=0).nonzero().flatten() + before).tolist()
    pieces, fed_at = [], []
    for start, end in pairwise(sorted({before, *cuts, columns})):
        embed = embeds[:, start - before : end - before]
        if start in cuts:
            here = slots[:, start]  # (B,)
            fed = embed[:, 0]
            if config.slots == "hidden":
                fed = _as_wide(lm, ended, embeds)
            if stream is not None:
                assert cache.latent is not None
                fed, cache.latent = stream(ended, cache.latent, here)
            if replace is not None:
                fed = replace(fed, which[:, start])
            fed_at.append((here, ended, fed))
            embed = torch.cat([torch.where(here[:, None], fed, embed[:, 0])[:, None], embed[:, 1:]], dim=1)
        terms = None
        if attached is not None and cache.latent is not None and cache.latent.goal is not None:
            ids = input_ids[:, start - before : end - before]
            terms, cache.latent = attached._advance(cache.latent, ids, mask[:, :end], cache)
        visible = _visible(mask[:, :end], slots[:, : start + 1], config)
        feed = {"inputs_embeds": embed, "attention_mask": visible, CACHE_NAME: cache, "use_cache": True}
        if takes(lm.base_model, "position_ids"):
            feed["position_ids"] = positions[:, start:end]
        with InForce(terms):
            pieces.append(lm.base_model(**feed).last_hidden_state)
        ended = pieces[-1][:, -1]  # (B, D)

    states, latents, present = _by_row(fed_at, embeds)
    hidden = torch.cat(pieces, dim=1)
    return Passes(hidden=hidden, states=states, latents=latents, present=present, cache=cache, mask=mask, slots=slots)


def next_token_loss(model: Any, passes: Passes, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens whose label is not `UNSCORED`; the head is applied to no other position.

    Args:
        model: what the passes ran on.
        passes: of the batch.
        labels: (B, T), not shifted: a token's label is the token.

    Raises:
        ValueError: no token is scored.
    """
    scored = labels[:, 1:] != UNSCORED  # (B, T - 1)
    targets = labels[:, 1:][scored]
    if not len(targets):
        raise ValueError("no token of the batch is scored: every label after the first column is -100")
    logits = _head(model)(passes.hidden[:, :-1][scored])  # (scored, V)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


@torch.no_grad()
def latent_generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: PassConfig,
    *,
    max_new_tokens: int,
    stop_id: int | None = None,
    goal: Goal | None = None,
    replace: Replace | None = None,
) -> list[list[int]]:
    """Greedy continuations of prompts with latent slots, all rows at once over one cache.

    A row gives what it gives alone. Tokens it generates are text: a generated `latent_id` is no slot.

    Args:
        model: as for `latent_passes`; put it in evaluation mode.
        prompts: token ids, of any lengths and numbers of latents (`Layout.prompt` makes them).
        config: what fills the slots.
        max_new_tokens: at most this many a row.
        stop_id: ends a row, and is not part of it.
        goal: one per row, or one for all.
        replace: an intervention on the latents.

    Raises:
        ValueError: as `latent_passes`, and fewer than one new token.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
    ids, mask = pad_left(prompts, pad_id=0, device=model.device)
    passes = latent_passes(model, ids, config, attention_mask=mask, goal=goal, replace=replace)
    text = changed(config, latent_id=-1)
    head, tokens = _head(model), []
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=ids.device)
    while True:
        tokens.append(head(passes.hidden[:, -1]).argmax(dim=-1))  # (B,)
        if stop_id is not None:
            finished = finished | (tokens[-1] == stop_id)
        if len(tokens) == max_new_tokens or bool(finished.all()):
            break
        passes = latent_passes(model, tokens[-1][:, None], text, past=passes)
    rows = torch.stack(tokens, dim=1).tolist()
    return [row[: row.index(stop_id)] if stop_id in row else row for row in rows]


def replacement(
    kind: Literal["zero", "noise", "mean", "first", "other", "permuted"],
    clean: Passes,
    generator: torch.Generator | None = None,
) -> Replace:
    """What to feed in place of the latents of a clean run over the same batch.

    Args:
        kind: `zero`; `noise`, Gaussian, of the length of the latent it replaces; `mean`, over the batch, of the same
            pass; `first`, the row's first latent in every slot; `other`, the latents of the row before; `permuted`, the
            row's own in another order, none in its place.
        clean: the run without intervention.
        generator: of `noise` and `permuted`.

    Raises:
        ValueError: an unknown kind, too few rows or latents for it, or, for `mean`, `other` and `permuted`, rows with
            different numbers of latents.
    """
    latents = clean.latents.detach()  # (B, K, D)
    batch, count, width = latents.shape
    if kind in ("mean", "other", "permuted") and not bool(clean.present.all()):
        raise ValueError(f"the rows have different numbers of latents, which {kind!r} cannot exchange; batch like ones")
    if kind == "other" and batch < 2 or kind == "permuted" and count < 2:
        raise ValueError(f"{kind!r} needs 2 rows or 2 latents to exchange; got {batch} rows of {count} latents")
    if kind == "zero":
        table = torch.zeros_like(latents)
    elif kind == "noise":
        noise = torch.randn(latents.shape, generator=generator, dtype=torch.float32).to(latents)
        table = noise * (latents.norm(dim=-1, keepdim=True) / width**0.5)
    elif kind == "mean":
        table = latents.mean(dim=0, keepdim=True).expand_as(latents)
    elif kind == "first":
        table = latents[:, :1].expand_as(latents)
    elif kind == "other":
        table = latents.roll(1, dims=0)
    elif kind == "permuted":
        order = torch.stack([torch.randperm(count, generator=generator) for _ in range(batch)]).to(latents.device)
        table = torch.empty_like(latents)  # one cycle through all slots, so that none keeps its own
        rows = torch.arange(batch, device=latents.device)[:, None]
        table[rows, order] = latents[rows, order.roll(1, dims=1)]
    else:
        raise ValueError(f"replacement {kind!r} is unknown; use zero, noise, mean, first, other or permuted")

    def replace(fed: Tensor, which: Tensor) -> Tensor:
        return table[torch.arange(batch, device=table.device), which.clamp(0, count - 1)].to(fed.dtype)

    return replace


def _head(model: Any) -> Any:
    return (model.lm if isinstance(model, AttachedLM) else model).get_output_embeddings()


def _columns(
    input_ids: Tensor, attention_mask: Tensor | None, config: PassConfig, past: Passes | None
) -> tuple[Tensor, Tensor]:
    """(B, columns) mask and slots of the text so far and the new tokens, slots beyond `depth` masked out."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.dtype)
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}; they must agree")
    slots = (input_ids == config.latent_id) & mask.bool()
    if past is not None:
        mask, slots = torch.cat([past.mask, mask], dim=1), torch.cat([past.slots, slots], dim=1)
    if config.depth is not None:
        dropped = slots & (slots.cumsum(dim=1) > config.depth)
        mask, slots = mask.masked_fill(dropped, 0), slots & ~dropped
    headless = slots[:, 0] | (slots[:, 1:] & ~mask[:, :-1].bool()).any(dim=1)
    if bool(headless.any()):
        raise ValueError(f"row {int(headless.nonzero()[0])} has a latent slot with no token before it to take it from")
    return mask, slots


def _visible(mask: Tensor, slots: Tensor, config: PassConfig) -> Tensor:
    """`mask` (B, end) without what a piece that starts at the last column of `slots` (B, start + 1) must not see."""
    if config.sees == "all":
        return mask
    columns = torch.arange(mask.shape[1], device=mask.device)
    # Column 0 is never a slot, so 0 stands for none yet: such a row sees everything.
    first = slots.to(torch.uint8).argmax(dim=1)[:, None]  # (B, 1)
    oldest = first
    if config.sees == "last":
        oldest = torch.where(slots, columns[: slots.shape[1]], 0).amax(dim=1, keepdim=True)
    seen = columns >= oldest
    if config.hides is not None:
        seen = seen | (columns < first - config.hides)
    return mask * seen


def _as_wide(lm: Any, hidden: Tensor, embeds: Tensor) -> Tensor:
    if hidden.shape[-1] != embeds.shape[-1]:
        raise ValueError(
            f"{type(lm).__name__} has hidden states of width {hidden.shape[-1]} and embeddings of width "
            f"{embeds.shape[-1]}; a latent slot takes one for the other"
        )
    return hidden


def _by_row(fed_at: list[tuple[Tensor, Tensor, Tensor]], embeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States and latents as (B, K, D), each row's own in order from 0, and (B, K) where there are any."""
    if not fed_at:
        empty = embeds[:, :0]
        return empty, empty, torch.zeros(empty.shape[:2], dtype=torch.bool, device=embeds.device)
    here, ended, fed = (torch.stack(part, dim=1) for part in zip(*fed_at, strict=True))  # (B, cuts, ...)
    counts = here.sum(dim=1)
    order = torch.argsort((~here).to(torch.int8), dim=1, stable=True)[:, : int(counts.max())]  # (B, K)
    present = torch.arange(order.shape[1], device=here.device) < counts[:, None]
    rows = torch.arange(len(order), device=here.device)[:, None]
    return (
        torch.where(present[..., None], ended[rows, order], 0),
        torch.where(present[..., None], fed[rows, order], 0),
        present,
    )
