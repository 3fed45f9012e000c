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
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sidestream.channels import GoalConfig


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
            return limit
    return None
