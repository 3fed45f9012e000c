"""Where a Hugging Face decoder keeps its blocks, and where FiLM acts in each: the input of the MLP, found by role.

FiLM belongs after attention, before the MLP, on the output of the block's second norm (LS-AR, Figure 3). That point is
the MLP's input. Finding it by the MLP's role, not by the norm's name, matters: `post_attention_layernorm` is the right
norm in Llama and the wrong one in Gemma 2/3, OLMo 2 and EXAONE 4, and Phi, GPT-J and Falcon have no such norm at all.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.pytorch_utils import Conv1D

from sidestream.channels import GoalConfig

# transformers 5.24 renamed the keyword and the output field `past_key_values` to `cache`.
_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters  # pyright: ignore
CACHE_NAME = "cache" if "cache" in _ARGUMENTS else "past_key_values"


def text_config(lm: nn.Module) -> PretrainedConfig:
    """The configuration of the model's text decoder (multimodal configurations nest it)."""
    return lm.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


def takes(lm: nn.Module, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in _arguments(type(lm))


@cache
def _arguments(model: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def device_of(lm: PreTrainedModel) -> torch.device:
    """Where the model computes, which for weights that accelerate keeps elsewhere is not where they lie."""
    if lm.device.type != "meta":
        return lm.device
    for module in lm.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            if getattr(part, "execution_device", None) is not None:
                return torch.empty(0, device=part.execution_device).device
    return lm.device


def decoder_blocks(lm: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder's blocks: the shallowest list as long as the configuration says.

    Raises:
        ValueError: the model has no such list.
    """
    depth = getattr(text_config(lm), "num_hidden_layers", None) if hasattr(lm, "config") else None
    found = [
        (name.count("."), name, module)
        for name, module in lm.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not found:
        count = "" if depth is None else f"{depth} "
        raise ValueError(
            f"{type(lm).__name__} has no list of {count}decoder blocks to attach to; name the modules that take the "
            "FiLM terms with attach(..., sites=[...])"
        )
    _, name, blocks = min(found, key=lambda entry: entry[:2])
    return name, blocks


def bare(module: nn.Module) -> nn.Module:
    """The base's own layer inside the adapters that wrap it; a layer without any is itself."""
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.base_layer  # type: ignore[assignment]
    return module


def film_sites(lm: nn.Module) -> list[str]:
    """One module name per block whose input FiLM modulates, in block order.

    A block's MLP is its child of that name (`mlp`, `ffn`, `feed_forward`, a mixture of experts), or the first of bare
    linear layers (OPT's `fc1`).

    Raises:
        ValueError: a block has no such child or several; names the model class and the way out.
    """
    prefix, blocks = decoder_blocks(lm)
    sites = []
    for index, block in enumerate(blocks):
        children = {name: child for name, child in block.named_children() if _has_matrices(child)}
        found = [name for name in children if any(word in name.lower() for word in _MLP_NAMES)]
        found = found or [name for name, child in children.items() if isinstance(bare(child), nn.Linear | Conv1D)][:1]
        if len(found) != 1:
            raise ValueError(
                f"no FiLM site in block {index} of {type(lm).__name__}: {type(block).__name__} has "
                f"{' and '.join(found) or 'no MLP'}; name one module per block with attach(..., sites=[...])"
            )
        sites.append(f"{prefix}.{index}.{found[0]}")
    return sites


_MLP_NAMES = ("mlp", "ffn", "feed_forward", "feedforward", "moe")


def _has_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters())


def sized_goal(goal: GoalConfig, lm: nn.Module, reader: nn.Module, num_blocks: int) -> GoalConfig:
    """The goal channel's settings with the widths of the decoder and of the encoder that reads goals.

    Raises:
        ValueError: a layer the encoder does not have, or a trigger outside the vocabulary.
    """
    config = goal.sized(
        encoder_width=text_config(reader).hidden_size, model_width=text_config(lm).hidden_size, num_blocks=num_blocks
    )
    depth, vocabulary = text_config(reader).num_hidden_layers, text_config(lm).vocab_size
    for name in ("pool_layer", "tracker_layer"):
        if not -depth - 1 <= getattr(config, name) <= depth:
            raise ValueError(
                f"GoalConfig.{name} is {getattr(config, name)}; the encoder has layers 0..{depth} (or -1 for the last)"
            )
    if not all(0 <= token < vocabulary for token in config.trigger_ids):
        raise ValueError(f"GoalConfig.trigger_ids {config.trigger_ids} are not all in the vocabulary of {vocabulary}")
    return config


def learned_positions(lm: nn.Module) -> int | None:
    """Length of the table of learned absolute positions, or None for rotary, ALiBi and other relative schemes."""
    config = text_config(lm)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    assert isinstance(lm, PreTrainedModel)
    tokens = lm.get_input_embeddings()
    for name, module in lm.named_modules():
        position_like = name.endswith("wpe") or "position" in name.rsplit(".", 1)[-1]
        if isinstance(module, nn.Embedding) and module is not tokens and position_like:
            return limit or module.num_embeddings
    return None


_KEYS_AND_VALUES = ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer")
_NOT_THEMSELVES = ("cpmant", "dory", "moshi", "prophetnet", "xlm")
"""Model types whose own forwards on a growing cache give other logits than their forward on the whole text, or fail."""


def check_family(lm: PreTrainedModel) -> None:
    """Refuse a model whose forwards on a cache of keys and values are not those on the whole text, row by row.

    Raises:
        ValueError: says what the model does instead.
    """
    base: Any = lm
    base = base.get_base_model() if hasattr(lm, "get_base_model") else lm  # PEFT's wrapper
    config, why = text_config(base), None
    if not (takes(base, "cache") or takes(base, "past_key_values")):
        why = "its forward takes no cache"
    elif getattr(base, "_is_stateful", False) or not base._supports_default_dynamic_cache():
        why = "it keeps a recurrent state or a cache of its own kind"
    elif config.model_type in _NOT_THEMSELVES:
        why = "its own steps on a cache do not give what its forward on the whole text gives"
    elif getattr(config, "altup_num_inputs", None) is not None:
        why = "its blocks pass several streams of states on, of which none is the one to steer"
    elif learned_positions(base) is not None and not takes(base, "position_ids"):
        why = "it counts positions by column, so that a padded row would not give what it gives alone"
    else:
        kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers} - set(_KEYS_AND_VALUES)
        why = f"its layers keep {' and '.join(sorted(kinds))}" if kinds else None
    if why is not None:
        raise ValueError(
            f"{type(base).__name__} cannot carry a channel, which rides on a cache of keys and values: {why}"
        )
