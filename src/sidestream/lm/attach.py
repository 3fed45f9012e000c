"""Attach channels to a Hugging Face causal LM by hooks, and take them off again without a trace.

One forward pass: `AttachedLM.forward` turns the goal into a state. Without a cache it computes the FiLM terms and calls
the wrapped model. With a `LatentCache`, which is also how `generate` calls, the hook `_before_forward` computes them
from the state on the cache. Either way `film_hook` applies them at each block's MLP input. A concept stream acts in
latent passes only: see `sidestream.lm.decoding.passes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sidestream.channels import ConceptStream, GoalChannel, GoalConfig, LatentState, StreamConfig
from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache, take_cache
from sidestream.lm.decoding.generating import arranged, check_tokenizer, generate
from sidestream.lm.decoding.window import Window, checked_window
from sidestream.lm.goals.encoding import encode
from sidestream.lm.goals.pinning import in_front
from sidestream.lm.goals.pins import Pins
from sidestream.lm.goals.reading import Goal, read
from sidestream.lm.models.adapters import innermost, mixed_rows
from sidestream.lm.models.as_model import AsModel
from sidestream.lm.models.blocks import bare, check_family, device_of, film_sites, sized_goal, text_config
from sidestream.lm.models.hooked import Hooked, after_forward
from sidestream.lm.models.terms import FilmHooks, Hook, InForce, check_checkpointing, film_hook
from sidestream.lm.models.trainer import TrainerModel, check_trains
from sidestream.lm.saving.channel import fill, read_saved


class AttachedLM(AsModel, Hooked, Pins, TrainerModel):
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
        given: Any = None,
        pinned: bool = False,
    ) -> None:
        super().__init__()
        self.lm = lm
        self._given = (lm if given is None else given,)  # a `PeftModel` of `lm`, perhaps; in a tuple, so no submodule
        self.pinned = pinned
        # Typed as present, since whoever uses goals attached one; `encode_goal` is where a missing one is told of.
        self.channel: GoalChannel = channel  # type: ignore[assignment]
        self.stream = stream
        self.encoder = encoder
        self.sites = sites
        self.tokenizer = tokenizer
        ids = () if channel is None else channel.config.trigger_ids
        triggers = torch.tensor(ids, dtype=torch.long, device=device_of(lm))
        self._triggers: Tensor
        self.register_buffer("_triggers", triggers, persistent=False)
        self._film = FilmHooks(self, lm, sites)
        self._hooks: list[Any] = [self._film]
        for module, function in ((lm.base_model, AttachedLM._seat), (lm, AttachedLM._before_forward)):
            self._hooks.append(module.register_forward_pre_hook(Hook(self, function, self), with_kwargs=True))
        self._hooks.append(lm.register_forward_hook(after_forward, with_kwargs=True, always_call=True))

    @property
    def device(self) -> torch.device:
        """Where the wrapped model computes."""
        return self._triggers.device if self.lm.device.type == "meta" else self.lm.device

    @property
    def _reader(self) -> PreTrainedModel:
        return self.encoder if self.encoder is not None else self.lm

    # ---------------------------------------------------------------- goals

    def encode_goal(self, goal: Goal, attention_mask: Tensor | None = None) -> LatentState:
        """Turn prompts into the latent state that starts a rollout.

        Args:
            goal: (B, T) token ids, lists of ids of any lengths, or text (needs a tokenizer). A `LatentState` passes.
                A `pathlib.Path` is the file of a compiled goal.
                For a model that pins: also named parts, `{"policy": ..., "wish": ...}`, which can be changed later.
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
        attention_mask: Tensor | None = None,
        *,
        goal: Goal | None = None,
        goal_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The wrapped model's forward with the channel in force.

        Positions of padded rows are counted from the mask, as `generate` does: every row gives what it gives alone.

        Args:
            input_ids: (B, T) tokens.
            attention_mask: (B, T) 0 at padding; with a cache (B, past + T).
            labels: (B, T) tokens for the wrapped model's loss, -100 where nothing is scored.
            goal: as for `encode_goal`, one per row or one for all; None continues the state that a `LatentCache`
                carries, else takes `default_goal`, and without that leaves the channel closed.
            goal_attention_mask: mask of goals given as token ids.
            **kwargs: anything the wrapped model takes. Given a `LatentCache`, the state after these tokens is on it.
                Under a window the logits are those of the last min(T, W) tokens.

        Raises:
            ValueError: goals that do not fit the rows, a goal with a cache that cannot carry it, gradient checkpointing
                in a form that would give wrong gradients, or labels in training where nothing would train.
        """
        if names := kwargs.pop("adapter_names", None):
            with mixed_rows(self.outer, names):
                given = {"goal": goal, "goal_attention_mask": goal_attention_mask, "labels": labels, **kwargs}
                return self.forward(input_ids, attention_mask, **given)
        cache = take_cache(kwargs)
        goal = self._goal_for(goal, cache)
        if labels is not None:
            check_trains(self, goal)
            kwargs["labels"] = labels
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
        return self.body(input_ids, goal=goal, terms=terms, attention_mask=attention_mask).last_hidden_state

    def body(
        self,
        input_ids: Tensor,
        *,
        goal: Goal | None = None,
        terms: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """What the wrapped model gives below its head, the channel in force; arguments as for `hidden`."""
        check_checkpointing(self.lm, None)
        state = self._start(goal, None, input_ids)
        if state is not None and state.keys is not None:
            if not torch.is_grad_enabled():
                return self._behind_entries(state, input_ids, attention_mask, kwargs)
            feed, ahead = in_front(self.lm, state, input_ids, attention_mask)
            with InForce(self._terms_in_front(state, input_ids, attention_mask, ahead)):
                found = self.lm.base_model(**{**kwargs, **feed, "use_cache": False})
            found.last_hidden_state = found.last_hidden_state[:, ahead:]
            return found
        if state is not None:
            terms = self._advance(state, input_ids, attention_mask)[0]
        kwargs.update(self._placed(input_ids, attention_mask, None, kwargs), use_cache=False)
        with InForce(terms):
            return self.lm.base_model(input_ids=input_ids, **kwargs)

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | GenerationConfig | None = None,
        *,
        goal: Goal | None = None,
        goal_attention_mask: Tensor | None = None,
        window: int | Window | None = None,
        **kwargs: Any,
    ) -> Any:
        """The wrapped model's own `generate`: greedy, sampling, beams, batches of different goals, streamers.

        Args:
            input_ids: (B, T) prompts; to continue a cache, the whole text so far and the new tokens.
            attention_mask: (B, T), 0 at padding. A `GenerationConfig`, which transformers has in this place, will do.
            goal: as for `encode_goal`, one per row or one for all; None continues the state on a `LatentCache` passed
                as the cache, else takes `default_goal`, and without that generates from the base model.
            goal_attention_mask: mask of goals given as token ids.
            window: W, how many last tokens the text channel sees (`new_cache` picks the policy), or a `Window`.
            **kwargs: whatever `generate` takes. With `return_dict_in_generate=True` the returned cache is the
                `LatentCache`; pass it back to continue the rollout with its state.

        Raises:
            ValueError: use_cache=False, another kind of cache, assisted decoding, a window for a cache that exists,
                goals that do not fit the rows, tokens without an embedding, or a text that does not continue what the
                cache holds.
        """
        if names := kwargs.pop("adapter_names", None):
            if goal is not None:
                with mixed_rows(self.outer, names):
                    goal = self.encode_goal(goal, goal_attention_mask)
            with mixed_rows(self.outer, names, kwargs.get("num_beams")):
                return self.generate(input_ids, attention_mask, goal=goal, window=window, **kwargs)
        prompt, options = arranged(input_ids, attention_mask, kwargs)
        return generate(self, prompt, goal, goal_attention_mask, window, options)

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
        window, rotation = self._turning(window, picks=picks)
        cache = LatentCache(text_config(self.lm), window=window, pins=self.pinned, rotation=rotation)
        self._begin(cache, latent)
        return cache

    def _start(self, goal: Goal | None, mask: Tensor | None, input_ids: Tensor | None) -> LatentState | None:
        """The state for this text, one row per row of it."""
        if goal is None:
            return None
        state = self.encode_goal(goal, mask)
        rows = state.batch_size if input_ids is None else input_ids.shape[0]
        if state.batch_size not in (1, rows):
            raise ValueError(f"{state.batch_size} goals for {rows} rows of text; give one goal per row, or one for all")
        return state if state.batch_size == rows else state.repeat_interleave(rows)

    # ---------------------------------------------------------------- training

    def train(self, mode: bool = True) -> AttachedLM:
        """As `nn.Module.train`, but the encoder stays in evaluation mode: its dropout would make one goal many."""
        super().train(mode)
        if self.encoder is not None:
            self.encoder.eval()
        return self

    # ---------------------------------------------------------------- off, load

    @classmethod
    def from_pretrained(cls, directory: str | Path, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """`sidestream.load`, by the name that others call it."""
        return load(directory, *args, **kwargs)

    def detach(self) -> Any:
        """Remove every hook and give back what was attached to, its logits bit-equal to before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return self.outer


def attach(
    lm: PreTrainedModel | Any,
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
        lm: any decoder, or a `PeftModel` of one. Its weights and state-dict keys stay as they are.
        goal: the goal channel's settings; widths are taken from the models.
        stream: the concept stream's settings.
        encoder: E_base, a causal LM of the same vocabulary that reads goals, frozen. None: `lm` itself, channel closed.
        tokenizer: lets goals be given as text.
        sites: one module name per block, to override the search.
        pinned: whether goals are pinned; None: where no channel and no stream is asked for. With a channel as well, a
            goal is both a vector and pinned.

    Raises:
        ValueError: no FiLM site is found, a site does not exist, the model already carries a channel or an adapter that
            acts outside its layers, or a setting does not fit the models; a model that keeps another thing than keys
            and values; more tokens than embeddings.
    """
    if not isinstance(goal, GoalConfig | None):
        raise ValueError(f"goal is {goal!r}; give the channel's settings: attach(lm, goal=GoalConfig(width=...))")
    pinned = goal is None and stream is None if pinned is None else pinned
    if not pinned and goal is None and stream is None:
        raise ValueError("nothing to attach: pin goals (pinned=True), or give settings of a channel or a stream")
    if not isinstance(stream, StreamConfig | None):
        raise ValueError(f"stream is {stream!r}; give its settings: attach(lm, stream=StreamConfig())")
    given, lm = lm, innermost(lm)
    if isinstance(lm, AttachedLM) or any(isinstance(hook, Hook) for hook in lm._forward_pre_hooks.values()):
        raise ValueError(_TWICE)
    found: list[str] = []
    channel = concepts = None
    if goal is not None:
        found = list(sites) if sites is not None else film_sites(lm)
        channel = _goal_channel(lm, goal, found, encoder).to(device=device_of(lm), dtype=lm.dtype)
    elif encoder is not None or sites is not None:
        raise ValueError("encoder and sites belong to a goal channel, and goal is not given; leave them out")
    if stream is not None:
        embeddings: Any = bare(lm.get_input_embeddings())
        concepts = ConceptStream(stream.sized(embeddings.embedding_dim)).to(device=device_of(lm), dtype=lm.dtype)
    for reads in (lm, encoder if channel is not None and channel.tracker is not None else None):
        if reads is not None:
            check_family(reads)
    check_tokenizer(lm, tokenizer)
    if encoder is not None:
        encoder.requires_grad_(False)
        encoder.eval()
    return AttachedLM(lm, channel, concepts, found, encoder, tokenizer, given, pinned)


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


def load(
    directory: str | Path,
    lm: PreTrainedModel | None = None,
    *,
    encoder: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    any_base: bool = False,
    pinned: bool | None = None,
) -> AttachedLM:
    """Attach a saved channel, stream or both; goals are pinned too where they were by the model that was saved.

    The base is known by its weights, in any precision; embeddings with more or fewer tokens make it no other one.

    Args:
        directory: what `save_pretrained` or `sidestream train` wrote, or the hub id of a repository that holds it.
        lm: the base model it was trained on, or a `PeftModel` of it; None loads the model named in the file, whatever
            its class.
        encoder: E_base, where the channel was trained with one of its own.
        tokenizer: lets goals be given as text; None takes the base model's, where that is loaded here and has one.
        any_base: load onto another base too, with a warning: for whoever knows that it is as good.
        pinned: whether goals are pinned; None: as the file says.

    Raises:
        ValueError: files missing or damaged, or a base model or encoder other than the one trained on.
    """
    saved = read_saved(directory, lm, encoder=encoder, tokenizer=tokenizer, any_base=any_base)
    try:
        model = attach(
            saved.lm,
            goal=saved.goal,
            stream=saved.stream,
            encoder=encoder,
            tokenizer=saved.tokenizer,
            sites=saved.sites,
            pinned=saved.pinned if pinned is None else pinned,
        )
    except ValueError as error:
        raise ValueError(f"{saved.directory} cannot be attached: {error}") from error
    fill(model, saved)
    return model
