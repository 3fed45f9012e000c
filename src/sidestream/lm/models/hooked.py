"""The side of an `AttachedLM` that acts inside the wrapped model: its hooks, and what they feed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from sidestream.channels import LatentState
from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache, cache_in, feed_for
from sidestream.lm.decoding.masks import positions_of
from sidestream.lm.decoding.window import Window
from sidestream.lm.models.blocks import takes, text_config
from sidestream.lm.models.terms import FilmHooks, lift, put_in_force


class Hooked(nn.Module):
    """Hooks on the wrapped model: FiLM at its sites, and around a forward what the cache has to say."""

    lm: PreTrainedModel
    channel: Any
    _film: FilmHooks

    # The attached model's own.
    _reader: Any
    goal_hidden: Any
    fires: Any
    _check_table: Any

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

    def _seat(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._film.seat()

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        cache = cache_in(kwargs)
        if not isinstance(cache, LatentCache):
            return None
        ids: Any = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs.get("attention_mask")
        if (cache.window is not None or cache.pins) and (ids is None or (mask is not None and mask.dim() != 2)):
            raise ValueError(
                "a window or a pinned goal counts tokens: pass input_ids (no inputs_embeds) and a (B, T) attention_mask"
            )
        if cache.window is not None:
            if kwargs.get("labels") is not None:
                raise ValueError("labels with a windowed cache: crop the text to the window and train on that instead")
            if cache.window.policy == "rolling":
                options = {CACHE_NAME: cache, "use_cache": True, **self._last_logits(1)}
                *heads, last = cache.pieces(ids)
                for size in heads:
                    rest = ids.shape[1] - size
                    self.lm(
                        input_ids=ids[:, :size], attention_mask=None if mask is None else mask[:, :-rest], **options
                    )
                    ids = ids[:, size:]
        terms = None
        cache.remember(ids)
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
        self._check_table(cache, feed)
        cache.running = put_in_force(fed_terms if by_token else terms)
        shown = {} if cache.window is None else self._last_logits(min(ids.shape[1], cache.window.size))
        return (), {**shown, **kwargs, **feed}

    def _last_logits(self, count: int) -> dict[str, int]:
        return {"logits_to_keep": count} if takes(self.lm, "logits_to_keep") else {}


def after_forward(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    cache = cache_in(kwargs)
    if isinstance(cache, LatentCache) and cache.running is not None:
        lift(cache.running)
        cache.running = None
        cache.lift_goal()
