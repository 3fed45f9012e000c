"""What `AttachedLM.generate` is given: checked, and put into the form that the wrapped model's `generate` takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache, take_cache
from sidestream.lm.decoding.window import Window

_GUESSING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def arranged(input_ids: Any, second: Any, options: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """The prompt, and every other argument by its name.

    Args:
        input_ids: the first argument; None where it is among the options as `inputs`.
        second: the second one, given by position: an attention mask, or what transformers has there, a
            `GenerationConfig`.
        options: the arguments given by name.

    Raises:
        ValueError: something is given twice, or the second argument is neither.
    """
    options = dict(options)
    if options.get("inputs") is not None:
        if input_ids is not None:
            raise ValueError("inputs and input_ids are the same prompt: give one of them")
        input_ids = options["inputs"]
    options.pop("inputs", None)
    if isinstance(second, GenerationConfig):
        if options.get("generation_config") is not None:
            raise ValueError("generation_config is given twice")
        options["generation_config"] = second
    elif second is None or isinstance(second, Tensor):
        options["attention_mask"] = second
    else:
        raise ValueError(
            f"the second argument is {type(second).__name__}; give a (B, T) attention_mask or a GenerationConfig"
        )
    return input_ids, options


def generate(
    model: Any,
    input_ids: Tensor | None,
    goal: Any,
    goal_attention_mask: Tensor | None,
    window: int | Window | None,
    options: dict[str, Any],
) -> Any:
    """What `AttachedLM.generate` does with its arguments in order.

    Args:
        model: the attached model.
        input_ids, goal, goal_attention_mask, window: as for `AttachedLM.generate`.
        options: everything else, by name.

    Raises:
        ValueError: as `AttachedLM.generate`, before anything runs.
    """
    check_ids(model.lm, input_ids)
    cache = take_cache(options)
    check_window(cache, window)
    goal = model._goal_for(goal, cache)
    if goal is None and window is None and not isinstance(cache, LatentCache):
        return model.lm.generate(input_ids, **options, **({} if cache is None else {CACHE_NAME: cache}))
    if cache is not None and not isinstance(cache, LatentCache):
        raise ValueError(f"a goal needs a LatentCache, got {type(cache).__name__}; use model.new_cache()")
    options = check_options(model.lm, options)
    cache = model.new_cache(window=window) if cache is None else cache
    with cache.continued_by(input_ids, options.get("attention_mask"), copies(model.lm, options)):
        if goal is not None:
            with torch.no_grad():
                model._begin(cache, model._start(goal, goal_attention_mask, input_ids))
        return model.lm.generate(input_ids, **options, **{CACHE_NAME: cache})


def effective(lm: PreTrainedModel, options: dict[str, Any], name: str) -> Any:
    """The value that `generate` will use: the call's own, its `generation_config`'s, or the model's."""
    configs = (options.get("generation_config"), lm.generation_config)
    places = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in places if value is not None), None)


def check_options(lm: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
    """The options without what a `LatentCache` does anyway.

    Args:
        lm: the wrapped model.
        options: what `generate` is given, by name.

    Raises:
        ValueError: an option that cannot be had with a latent state; says why and what to do.
    """
    if options.get("use_cache") is False:
        raise ValueError("the state rides on the cache: leave use_cache on, or call model(...) in a loop")
    for name in _GUESSING:
        if effective(lm, options, name) not in (None, False):
            raise ValueError(
                f"{name} guesses tokens and takes the wrong ones back, and a cache with a latent state cannot be "
                "cropped; leave it out (the tokens are the same)"
            )
    kind = effective(lm, options, "cache_implementation")
    if kind not in (None, "dynamic", "hybrid"):  # the last is what older checkpoints have; transformers disregards it
        raise ValueError(
            f"cache_implementation={kind!r} makes another cache, and a goal or a window rides on a LatentCache, which "
            "grows with the text; leave it out of the call and set model.generation_config.cache_implementation = None "
            "(the tokens are the same)"
        )
    return {**options, "use_cache": True, **({} if kind is None else {"cache_implementation": None})}


def check_window(cache: Any, window: int | Window | None) -> None:
    """Raises `ValueError` where a window is asked for and the cache was made with another."""
    held = getattr(cache, "window", None)
    if cache is not None and window is not None and (held is None or window not in (held, held.size)):
        raise ValueError(
            f"the cache passed back was made with window {held.size if held else None}, which stays as it is; "
            "leave window out, or start anew without the cache"
        )


def check_ids(lm: PreTrainedModel, input_ids: Tensor | None) -> None:
    """Raises `ValueError` where a prompt has a token that the model has no embedding for."""
    if input_ids is None or not input_ids.numel():
        return
    rows, low, high = embeddings(lm), int(input_ids.min()), int(input_ids.max())
    if rows is not None and not 0 <= low <= high < rows:
        raise ValueError(
            f"the prompt has token ids {low} to {high} and {type(lm).__name__} has embeddings for 0 to {rows - 1}; "
            "is this tokenizer the model's own?"
        )


def embeddings(lm: nn.Module) -> int | None:
    """How many tokens a model has embeddings for."""
    weight = getattr(lm.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    return None if weight is None else weight.shape[0]


def copies(lm: PreTrainedModel, options: dict[str, Any]) -> int:
    """How many rows `generate` makes of each row of the prompt."""
    return max(effective(lm, options, name) or 1 for name in ("num_beams", "num_return_sequences"))


def carries_goal(cache: Any) -> bool:
    """Whether a cache brings a goal's state with it."""
    latent = cache.latent if isinstance(cache, LatentCache) else None
    return latent is not None and (latent.goal is not None or latent.keys is not None)


def check_tokenizer(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises `ValueError` where a tokenizer has more tokens than the model has embeddings for."""
    rows = embeddings(lm) if isinstance(tokenizer, PreTrainedTokenizerBase) else None
    if tokenizer is not None and rows is not None and len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and {type(lm).__name__} embeddings for {rows}: they do not "
            f"fit; take the model's own tokenizer, or lm.resize_token_embeddings({len(tokenizer)}) first"
        )
