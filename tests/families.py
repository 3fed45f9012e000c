"""Tiny random models of the six supported families, and channels on them whose gate is open."""

import copy
from contextlib import contextmanager

import jaxtyping
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sidestream import AttachedLM, GoalConfig, attach

FAMILIES = ("gpt2", "llama", "qwen3", "gemma3", "opt", "gpt_neox")
ROTARY = ("llama", "qwen3", "gemma3", "gpt_neox")
MODES = ("static", "dynamic")
VOCABULARY = 97
TRIGGERS = tuple(range(5, 35))  # a third of the vocabulary, so that random text has some
POSITIONS = 64  # of the learned tables


def tiny(family: str, *, seed: int = 0, layers: int = 2, width: int = 32, **changes) -> PreTrainedModel:
    """A random model in float32 and eval mode. Weights are wide, so that attention and FiLM matter in the logits."""
    known = (family, seed, layers, width, repr(sorted(changes.items())))
    if known not in _MADE:
        _MADE[known] = _made(family, seed, layers, width, changes)
    return copy.deepcopy(_MADE[known])


_MADE: dict[tuple, PreTrainedModel] = {}
"""A copy takes half the time of a new one, and the tests ask for a thousand."""


def _made(family: str, seed: int, layers: int, width: int, changes: dict) -> PreTrainedModel:
    common = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=None, pad_token_id=0, **changes)
    shared = dict(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        **common,
    )
    gated = dict(intermediate_size=2 * width, num_key_value_heads=2, initializer_range=0.2)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "gpt2":
            config = GPT2Config(
                n_embd=width,
                n_layer=layers,
                n_head=4,
                n_positions=POSITIONS,
                initializer_range=0.2,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
                **common,
            )
            model = GPT2LMHeadModel(config)
        elif family == "llama":
            model = LlamaForCausalLM(LlamaConfig(**shared, **gated))
        elif family == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **shared, **gated))
        elif family == "gemma3":
            kinds = ["sliding_attention", "full_attention"][-layers:]
            sliding = dict(sliding_window=6, layer_types=kinds, head_dim=8)
            model = Gemma3ForCausalLM(Gemma3TextConfig(**{**sliding, **shared, **gated}))
        elif family == "opt":
            config = OPTConfig(ffn_dim=2 * width, word_embed_proj_dim=width, init_std=0.2, **{"dropout": 0.0, **shared})
            model = OPTForCausalLM(config)
        elif family == "gpt_neox":
            config = GPTNeoXConfig(intermediate_size=2 * width, initializer_range=0.2, **shared)
            model = GPTNeoXForCausalLM(config)
        else:
            raise AssertionError(family)
    return model.eval()


def settings(mode: str, **changes) -> GoalConfig:
    """A small goal channel of this mode."""
    dynamic = dict(trigger_ids=TRIGGERS, tracker_heads=2) if mode == "dynamic" else {}
    return GoalConfig(**{"mode": mode, "width": 16, "encoder_hidden": 24, **dynamic, **changes})


def open_gate(model: AttachedLM, *, alpha: float = 0.5, scale: float = 0.3, seed: int = 7) -> AttachedLM:
    """Random FiLM weights and a tracker that moves: the channel shows in every logit."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.channel.film.parameters():
            parameter.normal_(std=scale, generator=generator)
        if model.channel.tracker is not None:
            model.channel.tracker.alpha.fill_(alpha)
    return model


def attached(family: str, mode: str, *, own_encoder: bool | None = None, **changes) -> AttachedLM:
    """An open channel on a tiny model. The encoder is the model itself for static, a narrower Llama for dynamic."""
    own = mode == "dynamic" if own_encoder is None else own_encoder
    encoder = tiny("llama", seed=1, width=24) if own else None
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = attach(tiny(family), goal=settings(mode, **changes), encoder=encoder)
    return open_gate(model)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids that are neither padding nor begin."""
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, ids, **kwargs):
    """Of a forward without gradients."""
    with torch.no_grad():
        return model(ids, **kwargs).logits


def close(left, right, tolerance=1e-5):
    """Equal up to float32 rounding."""
    torch.testing.assert_close(left, right, atol=tolerance, rtol=tolerance)


def differ(left, right, least=1e-2):
    """The control: apart by far more than rounding."""
    assert (left - right).abs().max() > least


def our_hooks(lm):
    """transformers hangs hooks of its own on a model, to collect hidden states."""
    hooks = [h for m in lm.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    return [hook for hook in hooks if getattr(hook, "func", hook).__module__.startswith("sidestream")]


@contextmanager
def unchecked_types():
    """As in production: our own error, not the one of the tests' type checker."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
