"""From-scratch backbones: plain `GPT2Config` models, sized as the papers size theirs."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GPT2Config, GPT2LMHeadModel


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Shape of a decoder trained from scratch (GPT-2 architecture, tied head, 4x MLP, learned positions)."""

    layers: int
    """Decoder blocks."""
    width: int = 512
    """D (LS-AR: d = 512)."""
    heads: int = 8
    """Attention heads; the paper does not say."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide by heads {self.heads}; change one")

    def build(self, *, vocabulary: int, window: int, pad_id: int) -> GPT2LMHeadModel:
        """A model with fresh weights, drawn from torch's global generator.

        Args:
            vocabulary: V.
            window: W, the number of learned positions.
            pad_id: also stands in for GPT-2's begin and end tokens, which these models never see.
        """
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
