"""From-scratch backbones: GPT-2 models sized as the papers size theirs, and rotary ones of the Llama family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Shape of a decoder trained from scratch, its head tied to the embeddings."""

    layers: int
    """Decoder blocks."""
    width: int = 512
    """D (LS-AR: d = 512)."""
    heads: int = 8
    """Attention heads; the paper does not say."""
    family: Literal["gpt2", "llama", "qwen3"] = "gpt2"
    """`gpt2`: LayerNorm, GELU, 4x MLP, learned positions (the paper's). `llama`: RMSNorm, SwiGLU of as many weights,
    rotary positions, no table to run out of; small ones learn look-ups and plans in a fraction of the steps. `qwen3`:
    the same with normalised queries and keys: fewer steps still, each a quarter dearer on a CPU (LOG.md)."""

    def __post_init__(self) -> None:
        if self.family not in ("gpt2", "llama", "qwen3"):
            raise ValueError(f"family is {self.family!r}; use 'gpt2', 'llama' or 'qwen3'")
        for name in ("layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide by heads {self.heads}; change one")

    def build(self, *, vocabulary: int, window: int, pad_id: int) -> PreTrainedModel:
        """A model with fresh weights, drawn from torch's global generator.

        Args:
            vocabulary: V.
            window: W, the number of learned positions; rotary ones have no end, and it is only noted.
            pad_id: also stands in for begin and end tokens, which these models never see.
        """
        if self.family != "gpt2":
            shape: dict[str, Any] = {
                "vocab_size": vocabulary,
                "max_position_embeddings": window,
                "hidden_size": self.width,
                # Three matrices of 8/3 D instead of two of 4 D, rounded to whole vector registers.
                "intermediate_size": max(16, self.width * 8 // 3 // 16 * 16),
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "tie_word_embeddings": True,
                "bos_token_id": pad_id,
                "eos_token_id": pad_id,
                "pad_token_id": pad_id,
            }
            if self.family == "llama":
                return LlamaForCausalLM(LlamaConfig(**shape))
            return Qwen3ForCausalLM(
                Qwen3Config(**shape, num_key_value_heads=self.heads, head_dim=self.width // self.heads)
            )
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=window,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            # CHOICE(LS-AR, B): no dropout; every epoch of the procedural tasks is drawn anew or nearly so.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=pad_id,
            eos_token_id=pad_id,
            pad_token_id=pad_id,
            # The same function as GPT-2's "gelu_new" in one fused kernel.
            activation_function="gelu_pytorch_tanh",
        )
        return GPT2LMHeadModel(config)


def parameter_count(*modules) -> int:  # noqa: ANN002
    """Number of distinct parameters over all modules; tied weights count once."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())
