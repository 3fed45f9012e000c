"""Attach channels to a Hugging Face causal LM by hooks, and take them off again without a trace.

One forward pass: `AttachedLM.forward` turns the goal into a state. Without a cache it computes the FiLM terms and calls
the wrapped model. With a `LatentCache`, which is also how `generate` calls, the hook `_before_forward` computes them
from the state on the cache. Either way `film_hook` applies them at each block's MLP input. A concept stream acts in
latent passes only: see `sidestream.lm.passes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sidestream.channels import ConceptStream, GoalChannel, GoalConfig, LatentState, StreamConfig
from sidestream.lm.blocks import film_sites, sized_goal, takes, text_config
from sidestream.lm.cache import CACHE_NAME, LatentCache, Window, checked_window, feed_for, positions_of
from sidestream.lm.encoding import changed, encode
from sidestream.lm.pinning import check_room, find_rotation, in_front
from sidestream.lm.reading import read
from sidestream.lm.terms import (
    InForce,
    check_checkpointing,
    checkpoints,
    disable_checkpointing,
    enable_checkpointing,
    film_hook,
    lift,
    put_in_force,
)

Goal = LatentState | Tensor | Sequence[Sequence[int]] | Sequence[str] | str | Mapping[str, Any]


class AttachedLM(nn.Module):
    """A causal LM with a goal channel, a concept stream, or both. Made by `sidestream.attach`.

    `model(...)` and `model.generate(...)` take what the wrapped model takes, and `goal=`. Without a goal the wrapped
    model's logits come out exactly.

    Attributes:
        lm: the wrapped model, hooked, otherwise untouched: its state-dict keys do not change.
        channel: the `GoalChannel`; None where only a stream is attached.
        stream: the `ConceptStream` of latent passes, or None. These two are the only new weights.
        encoder: E_base, the frozen causal LM that reads goals; None means `lm` itself with the channel closed.
        sites: one module name per block, where FiLM acts.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        channel: GoalChannel | None,
        stream: ConceptStream | None,
        sites: list[str],
        encoder: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        pinned: bool = False,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.pinned = pinned
        self._rotation: Any = None
        # Typed as present, since whoever uses goals attached one; `encode_goal` is where a missing one is told of.
        self.channel: GoalChannel = channel  # type: ignore[assignment]
        self.stream = stream
        self.encoder = encoder
        self.sites = sites
        self.tokenizer = tokenizer
        ids = () if channel is None else channel.config.trigger_ids
        triggers = torch.tensor(ids, dtype=torch.long, device=lm.device)
        self._triggers: Tensor
        self.register_buffer("_triggers", triggers, persistent=False)
        self._hooks: list[Any] = []
        for block, site in enumerate(sites):
            module = lm.get_submodule(site)
            self._hooks.append(module.register_forward_pre_hook(partial(film_hook, block), with_kwargs=True))
        self._hooks.append(lm.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        self._hooks.append(lm.register_forward_hook(_after_forward, with_kwargs=True, always_call=True))

    @property
    def config(self) -> Any:
        """The wrapped model's configuration."""
        return self.lm.config

    @property
    def device(self) -> torch.device:
        """Where the wrapped model lives."""
        return self.lm.device

    @property
    def _reader(self) -> PreTrainedModel:
        return self.encoder if self.encoder is not None else self.lm

    # ---------------------------------------------------------------- goals

    def encode_goal(self, goal: Goal, attention_mask: Tensor | None = None) -> LatentState:
        """Turn prompts into the latent state that starts a rollout.

        Args:
            goal: (B, T) token ids, lists of ids of any lengths, or text (needs a tokenizer). A `LatentState` passes. For
                a model that pins: also named parts, `{"policy": ..., "wish": ...}`, which can be changed later.
            attention_mask: (B, T), 0 at padding. Lists and text are padded and masked here.

        Returns:
            A state of B rows. A static goal's FiLM terms are projected here and never again.

        Raises:
            ValueError: a goal that is empty, of another type, or text without a tokenizer.
        """
        return encode(self, goal, attention_mask)

    def goal_hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: LatentCache | None = None,
        *,
        layer: int | None = None,
    ) -> Tensor:
        """(B, T, E) hidden states of the frozen encoder at one layer, the channel closed.

        Args:
            input_ids: (B, T) tokens.
            attention_mask: (B, T), 0 at padding.
            cache: the encoder's own cache, to go on from.
            layer: None for the channel's `pool_layer`.

        Raises:
            ValueError: the text is longer than the encoder's table of positions.
        """
        which = self.channel.config.pool_layer if layer is None else layer
        hidden = read(self._reader, which, input_ids, attention_mask, cache)
        return hidden.to(self.channel.film.projection.weight.dtype)

    def fires(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, T) true at trigger tokens, padding left out."""
        found = torch.isin(input_ids, self._triggers)
        return found if attention_mask is None else found & attention_mask[:, -input_ids.shape[1] :].bool()

    # ---------------------------------------------------------------- forward

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        goal: Goal | None = None,
        goal_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The wrapped model's forward with the channel in force.

        Positions of padded rows are counted from the mask, as `generate` does: every row gives what it gives alone.

        Args:
            input_ids: (B, T) tokens.
            goal: as for `encode_goal`, one per row or one for all; None leaves the channel closed, or continues the
                state that a `LatentCache` carries.
            goal_attention_mask: mask of goals given as token ids.
            attention_mask: (B, T) 0 at padding; with a cache (B, past + T).
            **kwargs: anything the wrapped model takes. Given a `LatentCache`, the state after these tokens is on it.
                Under a window the logits are those of the last min(T, W) tokens.

        Raises:
            ValueError: goals that do not fit the rows, a goal with a cache that cannot carry it, or gradient
                checkpointing in a form that would give wrong gradients.
        """
        old_name = kwargs.pop("past_key_values", None)
        cache = kwargs.pop("cache", None)
        cache = old_name if cache is None else cache
        if goal is not None and cache is None and kwargs.get("use_cache"):
            cache = self.new_cache()
        check_checkpointing(self.lm, cache)
        kwargs.update(self._placed(input_ids, attention_mask, cache, kwargs))
        carried = cache.latent if isinstance(cache, LatentCache) else None
        if goal is None and carried is not None and (carried.goal is not None or carried.keys is not None):
            goal = carried
        state = self._start(goal, goal_attention_mask, input_ids)
        if cache is None and state is not None and state.keys is not None:
            return self._pinned_forward(state, input_ids, attention_mask, kwargs)
        if cache is not None:
            if isinstance(cache, LatentCache):
                if state is not None and state is not carried:
                    self._begin(cache, state)
            elif state is not None:
                raise ValueError("a goal with a cache needs a LatentCache: model.new_cache(), or leave the cache out")
            return self.lm(input_ids=input_ids, **{CACHE_NAME: cache, "use_cache": True, **kwargs})
        if state is not None:
            kwargs["use_cache"] = False
        terms = None if state is None else self._advance(state, input_ids, attention_mask)[0]
        with InForce(terms):
            return self.lm(input_ids=input_ids, **kwargs)

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

    def _terms_in_front(self, state: LatentState, ids: Tensor, mask: Tensor | None, ahead: int) -> Tensor | None:
        """(B, ahead + T, L, 2, D) FiLM terms, none at the goal's own tokens."""
        if self.channel is None:
            return None
        terms = self._advance(state, ids, mask)[0].expand(ids.shape[0], ids.shape[1], -1, -1, -1)
        return torch.cat([terms.new_zeros(terms.shape[0], ahead, *terms.shape[2:]), terms], dim=1)

    def hidden(
        self,
        input_ids: Tensor,
        *,
        goal: Goal | None = None,
        terms: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) hidden states before the language-model head, the channel in force.

        For losses that need logits at few positions: apply `lm.get_output_embeddings()` to those rows only, instead of
        projecting every position onto the whole vocabulary.

        Args:
            goal: as for `forward`.
            terms: (B, N, L, 2, D) FiLM terms, in place of a goal, where the vectors come from more text than this.
        """
        check_checkpointing(self.lm, None)
        state = self._start(goal, None, input_ids)
        if state is not None and state.keys is not None:
            feed, ahead = in_front(self.lm, state, input_ids, attention_mask)
            with InForce(self._terms_in_front(state, input_ids, attention_mask, ahead)):
                return self.lm.base_model(**feed, use_cache=False).last_hidden_state[:, ahead:]
        if state is not None:
            terms = self._advance(state, input_ids, attention_mask)[0]
        placed = self._placed(input_ids, attention_mask, None, {})
        with InForce(terms):
            return self.lm.base_model(input_ids=input_ids, **placed, use_cache=False).last_hidden_state

    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        goal: Goal | None = None,
        goal_attention_mask: Tensor | None = None,
        window: int | Window | None = None,
        **kwargs: Any,
    ) -> Any:
        """The wrapped model's own `generate`: greedy, sampling, beams, batches of different goals, streamers.

        Args:
            input_ids: (B, T) prompts; to continue a cache, the whole text so far and the new tokens.
            goal: as for `encode_goal`, one per row or one for all; None generates from the base model, or continues the
                state on a `LatentCache` passed as the cache.
            goal_attention_mask: mask of goals given as token ids.
            window: W, how many last tokens the text channel sees (`new_cache` picks the policy), or a `Window`.
            **kwargs: whatever `generate` takes. With `return_dict_in_generate=True` the returned cache is the
                `LatentCache`; pass it back to continue the rollout with its state.

        Raises:
            ValueError: use_cache=False, a window for a cache that exists, goals that do not fit the rows, or a text
                shorter than what the cache holds.
        """
        old_name = kwargs.pop("past_key_values", None)
        cache = kwargs.pop("cache", None)
        cache = old_name if cache is None else cache
        if cache is not None and window is not None:
            held = getattr(cache, "window", None)
            if held is None or window not in (held, held.size):
                raise ValueError(
                    f"the cache passed back was made with window {held.size if held else None}, which stays as it is; "
                    "leave window out, or start anew without the cache"
                )
        if cache is None and (goal is not None or window is not None):
            cache = self.new_cache(window=window)
        if goal is not None:
            if not isinstance(cache, LatentCache):
                raise ValueError(f"a goal needs a LatentCache, got {type(cache).__name__}; use model.new_cache()")
            with torch.no_grad():
                self._begin(cache, self._start(goal, goal_attention_mask, input_ids))
        if isinstance(cache, LatentCache):
            if kwargs.get("use_cache") is False:
                raise ValueError("the state rides on the cache: leave use_cache on, or call model(...) in a loop")
            kwargs["use_cache"] = True  # the model's own configuration may have it off, as training scripts do
            past = cache.get_seq_length()
            if past and kwargs.get("attention_mask") is None and input_ids is not None and input_ids.shape[1] <= past:
                raise ValueError(
                    f"the cache holds {past} tokens and input_ids {input_ids.shape[1]}: to continue, pass the whole "
                    "text so far followed by the new tokens"
                )
        if cache is not None:
            kwargs[CACHE_NAME] = cache
        return self.lm.generate(input_ids, **kwargs)  # type: ignore[operator]

    def new_cache(self, goal: Goal | None = None, *, window: int | Window | None = None) -> LatentCache:
        """A cache for one batch of rollouts.

        A window given as a number takes `reindex` for models with learned positions and `rolling` for the others.

        Raises:
            ValueError: a window the model or its encoder cannot take.
        """
        reads = None if self.channel is None or self.channel.tracker is None else self._reader
        picks = isinstance(window, int)
        window = checked_window(self.lm, window, reads)
        latent = self.encode_goal(goal) if goal is not None else None
        rotation = None
        if self.pinned and window is not None and window.policy == "rolling":
            try:
                self._rotation = rotation = find_rotation(self.lm) if self._rotation is None else self._rotation
            except ValueError:
                if not picks:
                    raise
                window = Window(size=window.size, policy="reindex")
        cache = LatentCache(text_config(self.lm), window=window, pins=self.pinned, rotation=rotation)
        self._begin(cache, latent)
        return cache

    def _begin(self, cache: LatentCache, state: LatentState | None) -> None:
        """Put the state on the cache; a goal pinned while text is held is read by the text from here on."""
        if state is not None and state.entries is not None:
            check_room(self.lm, state.entries.shape[1], None if cache.window is None else cache.window.size)
        cache.begin(state)

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
        if not self.pinned or not cache.pins:
            raise ValueError("this changes a pinned goal: attach(lm, tokenizer=...) and model.new_cache()")
        if self.channel is not None and self.channel.tracker is not None:
            raise ValueError("a dynamic channel has moved with the text and cannot start over; start a new cache")

    def _put(self, cache: LatentCache, state: LatentState | None, parts: tuple[str, ...], rows: Any) -> None:
        size = None if cache.window is None else cache.window.size
        if state is not None and state.entries is not None:
            check_room(self.lm, state.entries.shape[1], size)
        held = cache.put_goal(state, parts, rows)
        if held is not None:
            ids, mask = held
            self.lm(input_ids=ids, attention_mask=mask, **{CACHE_NAME: cache}, use_cache=True, **self._last_logits(1))
            cache.count_again()

    def _start(self, goal: Goal | None, mask: Tensor | None, input_ids: Tensor | None) -> LatentState | None:
        """The state for this text, one row per row of it."""
        if goal is None:
            return None
        state = self.encode_goal(goal, mask)
        rows = state.batch_size if input_ids is None else input_ids.shape[0]
        if state.batch_size not in (1, rows):
            raise ValueError(f"{state.batch_size} goals for {rows} rows of text; give one goal per row, or one for all")
        return state if state.batch_size == rows else state.repeat_interleave(rows)

    def _placed(self, ids: Tensor | None, mask: Tensor | None, cache: Any, given: dict[str, Any]) -> dict[str, Any]:
        """The mask, and the positions that follow from it where the caller gave none."""
        if mask is None or mask.dim() != 2 or ids is None:
            return {"attention_mask": mask}
        length = ids.shape[1]
        if isinstance(cache, LatentCache) and cache.window is None and mask.shape[1] != cache.get_seq_length() + length:
            raise ValueError(
                f"attention_mask has {mask.shape[1]} columns; with a cache it must cover the {cache.get_seq_length()} "
                f"tokens in it and the {length} new ones"
            )
        if "position_ids" in given or not takes(self.lm, "position_ids"):
            return {"attention_mask": mask}
        return {"attention_mask": mask, "position_ids": positions_of(mask)[:, -length:]}

    def _advance(
        self, state: LatentState, input_ids: Tensor | None, mask: Tensor | None, cache: LatentCache | None = None
    ) -> tuple[Tensor, LatentState]:
        """FiLM terms for these tokens and the state after them; feeds the encoder's own cache when there is one."""
        if self.channel.tracker is None:
            return self.channel.advance(state)
        if input_ids is None:
            raise ValueError("a dynamic goal channel finds its triggers by token id: pass input_ids, not inputs_embeds")
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"a dynamic goal channel needs a (B, T) attention_mask; got {tuple(mask.shape)}")
        if cache is not None and cache.encoder is None:
            size = None if cache.window is None else cache.window.encoder_size
            window = None if size is None else Window(size=size, policy="rolling")
            cache.encoder = LatentCache(text_config(self._reader), window=window)
        own = None if cache is None else cache.encoder
        hidden = self.goal_hidden(input_ids, mask, own, layer=self.channel.config.tracker_layer)
        return self.channel.advance(state, hidden, self.fires(input_ids, mask))

    # ---------------------------------------------------------------- hooks on the wrapped model

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        cache = _cache_of(kwargs)
        if not isinstance(cache, LatentCache):
            return None
        ids: Any = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs.get("attention_mask")
        if cache.window is not None or cache.pins:
            if ids is None or (mask is not None and mask.dim() != 2):
                raise ValueError(
                    "a window or a pinned goal counts tokens: pass input_ids, not inputs_embeds, and a (B, T) "
                    "attention_mask"
                )
        if cache.window is not None:
            if kwargs.get("labels") is not None:
                raise ValueError("labels with a windowed cache: crop the text to the window and train on that instead")
            if cache.window.policy == "rolling":
                options = {CACHE_NAME: cache, "use_cache": True, **self._last_logits(1)}
                *heads, last = cache.pieces(ids)
                for size in heads:
                    rest = ids.shape[1] - size
                    self.lm(input_ids=ids[:, :size], attention_mask=None if mask is None else mask[:, :-rest], **options)
                    ids = ids[:, size:]
        terms = None
        if cache.latent is not None:
            cache.expand_latent(ids.shape[0] if ids is not None else kwargs["inputs_embeds"].shape[0])
            if cache.latent.goal is not None:
                terms, cache.latent = self._advance(cache.latent, ids, mask, cache)
        if cache.window is None and not cache.pins:
            cache.running = put_in_force(terms)
            return None
        assert ids is not None
        by_token = self.channel is not None and self.channel.tracker is not None
        feed, fed_terms = feed_for(self.lm, cache, ids, mask, terms if by_token else None)
        cache.running = put_in_force(fed_terms if by_token else terms)
        shown = {} if cache.window is None else self._last_logits(min(ids.shape[1], cache.window.size))
        return (), {**shown, **kwargs, **feed}

    def _last_logits(self, count: int) -> dict[str, int]:
        return {"logits_to_keep": count} if takes(self.lm, "logits_to_keep") else {}

    # ---------------------------------------------------------------- training

    def train(self, mode: bool = True) -> AttachedLM:
        """As `nn.Module.train`, but the encoder stays in evaluation mode: its dropout would make one goal many."""
        super().train(mode)
        if self.encoder is not None:
            self.encoder.eval()
        return self

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, **kwargs: Any
    ) -> None:
        """Gradient checkpointing that is exact: the recomputation sees the terms its forward saw.

        Raises:
            ValueError: reentrant checkpointing was asked for, which cannot carry a state.
        """
        enable_checkpointing(self.lm, activation_checkpointing_kwargs, **kwargs)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        """The older name of `activation_checkpointing_enable`."""
        enable_checkpointing(self.lm, gradient_checkpointing_kwargs, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Turn gradient checkpointing off."""
        disable_checkpointing(self.lm)

    # ---------------------------------------------------------------- off, save

    def detach(self) -> PreTrainedModel:
        """Remove every hook and give back the wrapped model, its logits bit-equal to before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return self.lm

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the channel's weights (safetensors) and settings (JSON): not the base model, only its fingerprint."""
        from sidestream.lm.saving import save_channel

        save_channel(self, Path(directory))


def attach(
    lm: PreTrainedModel,
    *,
    goal: GoalConfig | None = None,
    stream: StreamConfig | None = None,
    encoder: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sites: Sequence[str] | None = None,
    pinned: bool | None = None,
) -> AttachedLM:
    """Give a Hugging Face causal LM a memory beside its text: pinned goals, a goal channel, a concept stream.

    Without settings, goals are pinned: their own keys and values are kept outside the window, exact and untrained.

    Args:
        lm: any decoder. Its weights and state-dict keys stay as they are.
        goal: the goal channel's settings; widths are taken from the models.
        stream: the concept stream's settings.
        encoder: E_base, a causal LM of the same vocabulary that reads goals, frozen. None: `lm` itself, channel closed.
        tokenizer: lets goals be given as text.
        sites: one module name per block, to override the search.
        pinned: whether goals are pinned; None: where no channel and no stream is asked for. With a channel as well, a
            goal is both a vector and pinned.

    Raises:
        ValueError: no FiLM site is found, a site does not exist, the model already carries a channel, or a setting does
            not fit the models.
    """
    if not isinstance(goal, GoalConfig | None):
        raise ValueError(f"goal is {goal!r}; give the channel's settings: attach(lm, goal=GoalConfig(width=...))")
    pinned = goal is None and stream is None if pinned is None else pinned
    if not pinned and goal is None and stream is None:
        raise ValueError("nothing to attach: pin goals (pinned=True), or give settings of a channel or a stream")
    if not isinstance(stream, StreamConfig | None):
        raise ValueError(f"stream is {stream!r}; give its settings: attach(lm, stream=StreamConfig())")
    if any(isinstance(getattr(hook, "__self__", None), AttachedLM) for hook in lm._forward_pre_hooks.values()):
        raise ValueError(_TWICE)
    found: list[str] = []
    channel = concepts = None
    if goal is not None:
        found = list(sites) if sites is not None else film_sites(lm)
        channel = _goal_channel(lm, goal, found, encoder).to(device=lm.device, dtype=lm.dtype)
    elif encoder is not None or sites is not None:
        raise ValueError("encoder and sites belong to a goal channel, and goal is not given; leave them out")
    if stream is not None:
        embeddings: Any = lm.get_input_embeddings()
        concepts = ConceptStream(stream.sized(embeddings.embedding_dim)).to(device=lm.device, dtype=lm.dtype)
    if encoder is not None:
        encoder.requires_grad_(False)
        encoder.eval()
    return AttachedLM(lm, channel, concepts, found, encoder, tokenizer, pinned)


_TWICE = "this model already carries a channel; call detach() on the attached model first"


def _goal_channel(
    lm: PreTrainedModel, goal: GoalConfig, sites: list[str], encoder: PreTrainedModel | None
) -> GoalChannel:
    for site in sites:
        try:
            hooks = lm.get_submodule(site)._forward_pre_hooks.values()
        except AttributeError as error:
            raise ValueError(f"{type(lm).__name__} has no module {site!r}; see model.named_modules()") from error
        if any(getattr(hook, "func", None) is film_hook for hook in hooks):
            raise ValueError(_TWICE)
    if encoder is lm:
        raise ValueError("the encoder is the model itself, which attach would freeze; leave encoder out to share it")
    return GoalChannel(sized_goal(goal, lm, encoder if encoder is not None else lm, len(sites)))


def _cache_of(kwargs: dict[str, Any]) -> Any:
    cache = kwargs.get(CACHE_NAME)
    return kwargs.get("past_key_values") if cache is None else cache


def _after_forward(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    cache = _cache_of(kwargs)
    if isinstance(cache, LatentCache) and cache.running is not None:
        lift(cache.running)
        cache.running = None
        cache.lift_goal()
