"""The gated concept stream (AGCLR): a residual memory across latent passes, with its ablations and controls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sidestream.channels.state import LatentState

Gate = Literal["read", "forget", "write"]
GATES: tuple[Gate, ...] = ("read", "forget", "write")
"""The order of the gates wherever they stand side by side."""

# sigmoid: 0.43 / 0.27 / 0.18, and 0.43 / 0.18 / 0.43.
_BIASES = {"gsm8k": (-0.28, -1.0, -1.5), "prosqa": (-0.28, -1.5, -0.28)}


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Settings of a concept stream, its ablations and its controls."""

    init: Literal["gsm8k", "prosqa", "identity"] = "gsm8k"
    """Biases of the read, forget and write gates at the start. `gsm8k` gives them the values 0.43 / 0.27 / 0.18 (also
    HotpotQA's), `prosqa` 0.43 / 0.18 / 0.43: either way h' = (1 - f) h differs from h, so the model does not start as
    CoCoNuT. `identity` (ours) has gsm8k's biases and a learned factor on the stream's effect that starts at 0: the
    model starts as CoCoNuT exactly."""
    biases: tuple[float, float, float] | None = None
    """(read, forget, write), in place of those of `init`."""
    knocked_out: tuple[Gate, ...] = ()
    """Gates closed for good, bias and weights frozen (the paper's ablations; the model is trained that way)."""
    knock_out_bias: float = -10.0
    """Bias of a knocked-out gate. The paper's -10 leaves a value of 0.00005, which for the write gate is not nothing:
    the LayerNorm on c blows what pass 1 wrote up to full size by pass 3. `-math.inf` shuts a gate exactly."""
    write_until: int | None = None
    """k: the write gate is 0 after pass k. The paper sets it on a trained model: give the module another config."""
    memory: Literal["gated", "random", "first", "mlp"] = "gated"
    """`gated` is the paper's. The rest are controls. `random`: gate weights drawn at random (logits of deviation 1) and
    frozen. `first`: c holds what pass 1 wrote. `mlp`: no memory; the same number of parameters as a residual MLP."""
    width: int | None = None
    """D, width of the model's embeddings. Filled in when the stream is attached."""

    def __post_init__(self) -> None:
        if self.init not in ("gsm8k", "prosqa", "identity"):
            raise ValueError(f"StreamConfig.init is {self.init!r}; use 'gsm8k', 'prosqa' or 'identity'")
        if self.memory not in ("gated", "random", "first", "mlp"):
            raise ValueError(f"StreamConfig.memory is {self.memory!r}; use 'gated', 'random', 'first' or 'mlp'")
        if self.biases is not None and len(self.biases) != 3:
            raise ValueError(f"StreamConfig.biases are {self.biases}; give three: (read, forget, write)")
        if not set(self.knocked_out) <= set(GATES):
            raise ValueError(f"StreamConfig.knocked_out is {self.knocked_out}; the gates are {', '.join(GATES)}")
        if self.write_until is not None and self.write_until < 0:
            raise ValueError(f"StreamConfig.write_until is {self.write_until}; it counts passes, 0 or more")
        if not self.knock_out_bias < 0:
            raise ValueError(
                f"StreamConfig.knock_out_bias is {self.knock_out_bias}; it must be negative to shut a gate"
            )
        if self.memory == "mlp" and (self.knocked_out or self.biases or self.write_until is not None):
            raise ValueError("StreamConfig.memory is 'mlp', which has no gates: leave knocked_out, biases, write_until")
        if self.width is not None and self.width < 1:
            raise ValueError(f"StreamConfig.width is {self.width}; it must be at least 1")

    def sized(self, width: int) -> StreamConfig:
        """The same settings with the model's width filled in."""
        return replace(self, width=width)


class ConceptStream(nn.Module):
    r"""Read, write and forget, once per latent pass t, on the last-layer hidden state h_t of that pass.

    .. math::
        \hat h_t &= \mathrm{LayerNorm}(h_t) \\
        r_t, f_t, w_t &= \sigma(W_r \hat h_t + b_r),\ \sigma(W_f \hat h_t + b_f),\ \sigma(W_w \hat h_t + b_w) \\
        h'_t &= (1 - f_t) \odot h_t + r_t \odot c_{t-1} \\
        c_t &= \mathrm{LayerNorm}(c_{t-1} + w_t \odot h'_t)

    Source: AGCLR, method section. c_0 = 0; h'_t is the input embedding of the next latent slot. Three D x D linears
    with bias and two LayerNorms, 3 D^2 + 7 D weights: 1,774,848 at GPT-2's D = 768. Gate weights start at zero.

    `config.write_until` may be changed on a trained stream: `stream.config = replace(stream.config, write_until=2)`.

    Raises:
        ValueError: the config lacks a width.
    """

    def __init__(self, config: StreamConfig) -> None:
        super().__init__()
        if config.width is None:
            raise ValueError("StreamConfig.width is missing; fill it with config.sized(...)")
        self.config = config
        width = config.width
        self.ln_h = nn.LayerNorm(width)
        self.ln_residual = nn.LayerNorm(width)
        self.read_gate = nn.Linear(width, width)
        self.forget_gate = nn.Linear(width, width)
        self.write_gate = nn.Linear(width, width)
        # CHOICE(AGCLR, method): not in the paper. The goal tracker's alpha, for the same reason: biases that make r and
        # f exactly 0 would also make their gradients 0.
        scaled = config.init == "identity" and config.memory != "mlp"
        self.gain = nn.Parameter(torch.zeros(())) if scaled else None
        if config.memory == "mlp":
            nn.init.zeros_(self.write_gate.weight)  # its last layer: the control starts as CoCoNuT
            nn.init.zeros_(self.write_gate.bias)
            return
        biases = config.biases or _BIASES["gsm8k" if config.init == "identity" else config.init]
        for name, linear, bias in zip(GATES, self._linears(), biases, strict=True):
            # CHOICE(AGCLR, controls): random gates keep the biases of `init`: their means start as the paper's.
            nn.init.normal_(linear.weight, std=width**-0.5 if config.memory == "random" else 0.0)
            nn.init.constant_(linear.bias, bias)
            if name in config.knocked_out:
                # CHOICE(AGCLR, ablations): "bias -10, frozen" says nothing of the weights; they stay zero and are
                # frozen too, as weights that learn would open the gate again.
                nn.init.zeros_(linear.weight)
                nn.init.constant_(linear.bias, config.knock_out_bias)
            if name in config.knocked_out or config.memory == "random":
                linear.requires_grad_(False)

    def start(self, hidden: Float[Tensor, "B D"], state: LatentState | None = None) -> LatentState:
        """c_0 = 0 for as many rows as `hidden` has, beside what `state` carries already."""
        concept = torch.zeros_like(hidden)
        passes = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        return LatentState(concept=concept, passes=passes) if state is None else state.with_stream(concept, passes)

    def forward(
        self, hidden: Float[Tensor, "B D"], state: LatentState, active: Bool[Tensor, " B"] | None = None
    ) -> tuple[Float[Tensor, "B D"], LatentState]:
        """One latent pass: h'_t and the state with c_t.

        Args:
            hidden: h_t of each row.
            state: what `start` gave, or the pass before; a goal on it passes through.
            active: rows that make a pass now; the others keep their state. None: all of them.

        Raises:
            ValueError: the state holds no concept stream.
        """
        if state.concept is None or state.passes is None:
            raise ValueError("the latent state carries no concept stream: begin with ConceptStream.start")
        if self.config.memory == "mlp":
            # The gates' own matrices in a row, so that the count is the same to the last weight.
            inner = self.forget_gate(self.ln_residual(nn.functional.gelu(self.read_gate(self.ln_h(hidden)))))
            effect, concept = self.write_gate(nn.functional.gelu(inner)), state.concept
        else:
            read, forget, write = self.gates(hidden, state.passes).unbind(dim=-2)
            effect = read * state.concept - forget * hidden  # so that h' = h + effect
        gated = hidden + (effect if self.gain is None else self.gain * effect)
        if self.config.memory != "mlp":
            concept = self.ln_residual(state.concept + write * gated)
        if self.config.memory == "first":
            # CHOICE(AGCLR, controls): c_1 as it is, not normalised again each pass.
            concept = torch.where((state.passes == 0)[:, None], concept, state.concept)
        passes = state.passes + 1
        if active is not None:
            concept = torch.where(active[:, None], concept, state.concept)
            passes = torch.where(active, passes, state.passes)
        return gated, state.with_stream(concept, passes)

    def gates(
        self, hidden: Float[Tensor, "*rows D"], passes: Int[Tensor, "*rows"] | None = None
    ) -> Float[Tensor, "*rows 3 D"]:
        """Values of the read, forget and write gates. They depend on h_t alone, so those of a finished run are the
        gates of its recorded hidden states.

        Args:
            hidden: h_t.
            passes: how many passes came before each; needed for `write_until` only.

        Raises:
            ValueError: a stream without gates, or `write_until` without `passes`.
        """
        if self.config.memory == "mlp":
            raise ValueError("StreamConfig.memory is 'mlp', which has no gates")
        normed = self.ln_h(hidden)
        values = torch.stack([torch.sigmoid(linear(normed)) for linear in self._linears()], dim=-2)
        if self.config.write_until is None:
            return values
        if passes is None:
            raise ValueError("StreamConfig.write_until is set: the gates need the number of passes before each state")
        # CHOICE(AGCLR, ablations): "write gate frozen" is w = 0 in the equation, so c is still normalised each pass.
        open_ = torch.ones_like(values)
        open_[..., GATES.index("write"), :] = (passes < self.config.write_until).to(values.dtype)[..., None]
        return values * open_

    def _linears(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.read_gate, self.forget_gate, self.write_gate
