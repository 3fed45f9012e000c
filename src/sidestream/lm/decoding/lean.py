"""Lean greedy decoding: the tokens of `generate()`, without what `generate()` does around each of them.

A token costs one pass over the weights and a dozen tensor operations a block, all over buffers made once:

- keys and values are written in place into rings that never grow, move or are concatenated;
- FiLM costs nothing: a goal's terms are folded into the weight and bias of each block's second norm, once per goal or
  trigger, or into one multiply-add where rows have different goals;
- the head is applied to the last position of a call, and only if a token is asked for;
- E_base of a dynamic channel reads in one piece what came since the last trigger, when the next one arrives;
- each matrix lies in memory in the direction that a CPU streams fastest.

Written out for the backbones this project trains, GPT-2 and Llama, because that is what makes it lean. Any other model
decodes through `AttachedLM.generate`, which stays the reference: tests hold both to the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel
from transformers.activations import NewGELUActivation

from sidestream.channels import GoalChannel, LatentState


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x A + b; A as (in, out), whatever its order in memory."""

    matrix: Tensor
    bias: Tensor | None

    def __call__(self, hidden: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""
        if self._turned(hidden):
            product = self.matrix.t() @ hidden.t()
            return (product if self.bias is None else product.add_(self.bias[:, None])).t().contiguous()
        if self.bias is None:
            return hidden @ self.matrix
        return torch.addmm(self.bias, hidden, self.matrix)

    def add_to(self, residual: Tensor, hidden: Tensor) -> Tensor:
        """residual + y, in place."""
        if self._turned(hidden):
            return residual.add_(self(hidden))
        residual.addmm_(hidden, self.matrix)
        return residual if self.bias is None else residual.add_(self.bias)

    def _turned(self, hidden: Tensor) -> bool:
        # For a handful of rows the CPU's product of (out, in) with (in, rows) takes half the time of its mirror image.
        few = 2 <= len(hidden) <= 5
        return few and hidden.device.type == "cpu" and hidden.dtype == torch.float32 and self.matrix.t().is_contiguous()


def packed(matrix: Tensor, bias: Tensor | None, *, rows: int) -> Linear:
    """A linear map laid out for `rows` rows at a time; a view where it lies that way already.

    For one row the CPU's matrix-vector kernels stream along the longer side at the full bandwidth of memory and along
    the shorter one at half of it. For several rows it is a matrix product, which packs (out, in) best. In bfloat16 the
    CPU's kernels know (out, in) only: the other order takes them ten times as long.
    """
    matrix = matrix.detach()
    streams_out = rows == 1 and matrix.shape[1] > matrix.shape[0] and matrix.dtype == torch.float32
    laid_out = matrix.contiguous() if streams_out else matrix.t().contiguous().t()
    return Linear(laid_out, None if bias is None else bias.detach())


@dataclass(frozen=True, eq=False)
class Block:
    """One decoder block."""

    qkv: Linear
    out: Linear
    up: Linear
    """GPT-2: the MLP's first map. Llama: gate and up side by side."""
    down: Linear
    first_norm: tuple[Tensor, Tensor | None]
    second_norm: tuple[Tensor, Tensor | None]
    scaling: float
    """Of attention scores."""


class Stack:
    """Weights of one GPT-2 or Llama, laid out for decoding. Does not hold on to the model.

    Args:
        lm: the model.
        rows: B, rows that will be decoded at a time.

    Raises:
        ValueError: another kind of model.
    """

    def __init__(self, lm: PreTrainedModel, *, rows: int) -> None:
        config: Any = lm.config
        self.rows = rows
        self.rotary: Any = None
        self.places: Tensor | None = None
        if type(lm) is GPT2LMHeadModel and not config.add_cross_attention:
            base: Any = lm.transformer
            self.blocks = [_gpt2_block(block, rows) for block in base.h]
            self.places = base.wpe.weight.detach()
            act, norm, tokens = base.h[0].mlp.act, base.ln_f, base.wte
            self.gated, self.eps = False, config.layer_norm_epsilon
            self.heads = self.key_heads = config.n_head
            self.head_width = config.n_embd // config.n_head
        elif type(lm) is LlamaForCausalLM:
            base = lm.model
            self.blocks = [_llama_block(block, rows) for block in base.layers]
            self.rotary = base.rotary_emb
            act, norm, tokens = base.layers[0].mlp.act_fn, base.norm, base.embed_tokens
            self.gated, self.eps = True, config.rms_norm_eps
            self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
            self.head_width = base.layers[0].self_attn.head_dim
        else:
            raise ValueError(
                f"lean decoding knows GPT-2 and Llama, not {type(lm).__name__}; use generate(), which takes any decoder"
            )
        # The same function in one kernel.
        self.act: Callable[[Tensor], Tensor] = nn.GELU(approximate="tanh") if type(act) is NewGELUActivation else act
        self.last_norm = (norm.weight.detach(), norm.bias.detach() if self.places is not None else None)
        head: Any = lm.get_output_embeddings()
        self.head = packed(head.weight.t(), head.bias, rows=rows)
        # One table for both ends where they are tied, in the head's layout: memory holds it once.
        tied = head.weight is tokens.weight
        self.tokens = self.head.matrix.t() if tied else tokens.weight.detach()
        self.second_weights = torch.stack([block.second_norm[0] for block in self.blocks])  # (L, D)
        biases = [block.second_norm[1] for block in self.blocks]
        self.second_biases = torch.stack([b for b in biases if b is not None]) if biases[0] is not None else None

    def fold(self, terms: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, N, L, 2, D) FiLM terms in the second norms: weight and bias, (B, N, D), or (D,) if B = N = 1."""
        gamma, beta = terms.to(self.second_weights.dtype).unbind(dim=3)  # (B, N, L, D)
        scale = 1 + gamma
        weights = self.second_weights * scale
        biases = beta if self.second_biases is None else torch.addcmul(beta, self.second_biases, scale)
        if terms.shape[:2] == (1, 1):
            weights, biases = weights[0, 0], biases[0, 0]
        return list(zip(weights.unbind(-2), biases.unbind(-2), strict=True))

    def run(
        self,
        ids: Tensor,
        ring: Ring,
        film: list[tuple[Tensor, Tensor]] | None = None,
        *,
        depth: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """(B, D) hidden states at the last of these tokens, the tokens added to the ring.

        Args:
            ids: (B, T).
            ring: keys and values of the text before.
            film: second norms with a goal folded in (`fold`); None leaves the channel closed.
            depth: blocks to run; None for all, and the last norm.
            wanted: (M,) the rows whose states are asked for; None for all of them. Not with a goal.
        """
        batch, length = ids.shape
        hidden = self.tokens[ids.flatten()]  # (B * T, D)
        positions = ring.positions(length)  # (B or 1, T)
        rotation = near = None
        if self.places is not None:
            hidden = (hidden.view(batch, length, -1) + self.places[positions]).flatten(0, 1)
        else:
            rotation = self._rotation(hidden, positions)
            left = ring.left(length)
            # The goal stands still and the query moves back: the same distance as with the goal moved along.
            near = None if left is None else self._rotation(hidden, positions - left)
        spans, held, mask = ring.place(length)
        blocks = self.blocks if depth is None else self.blocks[:depth]
        for number, block in enumerate(blocks):
            normed = self._norm(hidden, block.first_norm)
            qkv = block.qkv(normed).view(batch, length, -1, self.head_width)
            query, key, value = qkv.split((self.heads, self.key_heads, self.key_heads), dim=2)
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # (B, H, T, D / H)
            back = None if near is None else _rotate(query, near)
            if rotation is not None:
                query, key = _rotate(query, rotation), _rotate(key, rotation)
            keys, values = ring.keys[number], ring.values[number]
            for begin, end, slot in spans:
                keys[:, :, slot : slot + end - begin] = key[:, :, begin:end]
                values[:, :, slot : slot + end - begin] = value[:, :, begin:end]
            second: Any = block.second_norm if film is None else film[number]
            seen = mask
            if number == len(blocks) - 1 and length > 1:
                # What follows is needed at the last token alone.
                query, hidden = query[:, :, -1:], hidden.view(batch, length, -1)[:, -1]
                back = None if back is None else back[:, :, -1:]
                seen, length = None if mask is None else mask[..., -1:, :], 1
                second = tuple(part if part is None or part.dim() == 1 else part[:, -1:] for part in second)
            if back is None:
                found = F.scaled_dot_product_attention(
                    query,
                    keys[:, :, :held],
                    values[:, :, :held],
                    attn_mask=seen,
                    scale=block.scaling,
                    enable_gqa=self.heads != self.key_heads,
                )
            else:
                found = _two_parts(query, back, keys[:, :, :held], values[:, :, :held], ring.ahead, seen, block.scaling)
            found = found.transpose(1, 2).reshape(batch * length, -1)
            if number == len(blocks) - 1 and wanted is not None:
                found, hidden = found[wanted], hidden[wanted]
            hidden = block.out.add_to(hidden, found)
            inner = block.up(self._norm(hidden, second, batch))
            if self.gated:
                gate, inner = inner.chunk(2, dim=-1)
                inner = self.act(gate) * inner
            else:
                inner = self.act(inner)
            hidden = block.down.add_to(hidden, inner)
        if not blocks:
            hidden = hidden.view(batch, length, -1)[:, -1]
            hidden = hidden if wanted is None else hidden[wanted]
        return hidden if depth is not None else self._norm(hidden, self.last_norm)

    def _norm(self, hidden: Tensor, affine: Any, batch: int = 1) -> Tensor:
        weight, bias = affine
        shape = hidden.shape[-1:]
        if self.gated:
            if bias is None:
                return F.rms_norm(hidden, shape, weight, self.eps)
            normed = F.rms_norm(hidden, shape, None, self.eps)
        else:
            if weight.dim() == 1:
                return F.layer_norm(hidden, shape, weight, bias, self.eps)
            normed = F.layer_norm(hidden, shape, None, None, self.eps)
        assert bias is not None
        if weight.dim() == 1:
            return torch.addcmul(bias, normed, weight)
        return torch.addcmul(bias, normed.view(batch, -1, *shape), weight).view(hidden.shape)

    def _rotation(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(like, positions)
        # The half that is negated carries its sign here, once a call instead of once a block and tensor.
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def _two_parts(
    query: Tensor, back: Tensor, keys: Tensor, values: Tensor, ahead: int, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention to a goal's entries, the first `ahead`, by one query and to the text by another, in one softmax."""
    groups = query.shape[1] // keys.shape[1]
    turned = keys.transpose(-1, -2)[:, :, None]  # (B, H, 1, D / H, columns)
    parts = [part.unflatten(1, (-1, groups)) for part in (back, query)]
    scores = torch.cat([parts[0] @ turned[..., :ahead], parts[1] @ turned[..., ahead:]], dim=-1) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    return (scores.softmax(dim=-1) @ values[:, :, None]).flatten(1, 2)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def _gpt2_block(block: Any, rows: int) -> Block:
    def linear(conv: Any) -> Linear:
        return packed(conv.weight, conv.bias, rows=rows)

    def norm(layer: Any) -> tuple[Tensor, Tensor]:
        return layer.weight.detach(), layer.bias.detach()

    return Block(
        qkv=linear(block.attn.c_attn),
        out=linear(block.attn.c_proj),
        up=linear(block.mlp.c_fc),
        down=linear(block.mlp.c_proj),
        first_norm=norm(block.ln_1),
        second_norm=norm(block.ln_2),
        scaling=block.attn.scaling,
    )


def _llama_block(block: Any, rows: int) -> Block:
    def side_by_side(*layers: Any) -> Linear:
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return packed(torch.cat([layer.weight for layer in layers]).t(), bias, rows=rows)

    attention, mlp = block.self_attn, block.mlp
    return Block(
        qkv=side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
        out=side_by_side(attention.o_proj),
        up=side_by_side(mlp.gate_proj, mlp.up_proj),
        down=side_by_side(mlp.down_proj),
        first_norm=(block.input_layernorm.weight.detach(), None),
        second_norm=(block.post_attention_layernorm.weight.detach(), None),
        scaling=attention.scaling,
    )


class Ring:
    """Keys and values in fixed buffers: column c of the text lies in slot c modulo the capacity, behind a goal's.

    Args:
        stack: whose keys and values.
        rows: B.
        capacity: slots for text.
        size: W, columns a token sees, itself included; None for all, and then the text must fit the capacity.
        padding: (B,) columns at the head of each row that are padding; None for none.
        goal: a state with a pinned goal of B rows, whose entries lie in the first slots.
    """

    def __init__(
        self,
        stack: Stack,
        *,
        rows: int,
        capacity: int,
        size: int | None = None,
        padding: Tensor | None = None,
        goal: LatentState | None = None,
    ) -> None:
        device, dtype = stack.second_weights.device, stack.second_weights.dtype
        self.goal = goal if goal is not None and goal.keys is not None else None
        self.ahead = 0
        self.entries: Tensor | None = None  # (B, M), where rows have goals of different lengths
        self.counts: Tensor | int = 0
        if self.goal is not None:
            assert self.goal.entries is not None
            self.ahead = self.goal.entries.shape[1]
            self.counts = self.goal.entries.sum(dim=1, keepdim=True)
            self.entries = None if bool(self.goal.entries.all()) else self.goal.entries.bool()
        shape = (len(stack.blocks), rows, stack.key_heads, self.ahead + capacity, stack.head_width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        if self.goal is not None:
            assert self.goal.keys is not None and self.goal.values is not None
            self.keys[:, :, :, : self.ahead] = self.goal.keys.transpose(0, 1)
            self.values[:, :, :, : self.ahead] = self.goal.values.transpose(0, 1)
        self.capacity, self.size, self.padding = capacity, size, padding
        self.seen = 0

    def positions(self, count: int) -> Tensor:
        """(B or 1, count) positions of the next tokens, padding not counted."""
        columns = torch.arange(self.seen, self.seen + count, device=self.keys.device)
        own = columns[None] if self.padding is None else (columns - self.padding[:, None]).clamp(min=0)
        return own + self.counts

    def left(self, count: int) -> Tensor | None:
        """(B or 1, count) tokens that have left the window of each of the next tokens, where a goal has to know."""
        if self.goal is None or self.size is None or self.seen + count <= self.size:
            return None
        columns = torch.arange(self.seen, self.seen + count, device=self.keys.device) - self.size + 1
        return (columns[None] if self.padding is None else columns - self.padding[:, None]).clamp(min=0)

    def place(self, count: int) -> tuple[list[tuple[int, int, int]], int, Tensor | None]:
        """Make room for the next tokens.

        Returns:
            Spans (first token, end, slot) to write, the slots in use, and (B or 1, 1, count, slots), true where a
            token may look; None where every token sees every slot in use.
        """
        assert self.size is None or count <= self.capacity - self.size + 1 or self.seen + count <= self.capacity
        assert self.size is not None or self.seen + count <= self.capacity
        spans, begin = [], 0
        while begin < count:
            slot = (self.seen + begin) % self.capacity
            end = min(count, begin + self.capacity - slot)
            spans.append((begin, end, self.ahead + slot))
            begin = end
        first, self.seen = self.seen, self.seen + count
        held = min(self.seen, self.capacity)
        size = held if self.size is None else self.size
        loose = held > size  # more columns are held than a token may see
        if count == 1 and self.padding is None and self.entries is None and not loose:
            return spans, self.ahead + held, None
        last = self.seen - 1
        columns = last - (last - torch.arange(held, device=self.keys.device)) % self.capacity  # what each slot holds
        queries = torch.arange(first, self.seen, device=self.keys.device)[:, None]
        mask = columns <= queries
        if loose:
            mask &= columns > queries - size
        seen = mask[None, None]
        if self.padding is not None:
            # A padding query sees nothing else; without itself its softmax would be NaN.
            visible = (columns >= self.padding[:, None])[:, None, None]
            seen = (seen & visible) | (columns == queries)
        if self.ahead:
            ahead = torch.ones(1, self.ahead, dtype=torch.bool, device=seen.device)
            ahead = (ahead if self.entries is None else self.entries)[:, None, None].expand(-1, 1, count, -1)
            rows = max(len(ahead), len(seen))
            seen = torch.cat([ahead.expand(rows, -1, -1, -1), seen.expand(rows, -1, -1, -1)], dim=-1)
        return spans, self.ahead + held, seen

    def tightened(self, stack: Stack) -> Ring:
        """The same text in a ring of exactly W slots, where single tokens need no mask."""
        assert self.size is not None
        rows, size = self.keys.shape[1], self.size
        tight = Ring(stack, rows=rows, capacity=size, size=size, padding=self.padding, goal=self.goal)
        columns = torch.arange(max(0, self.seen - size), self.seen, device=self.keys.device)
        slots, old = self.ahead + columns % size, self.ahead + columns % self.capacity
        tight.keys[:, :, :, slots] = self.keys[:, :, :, old]
        tight.values[:, :, :, slots] = self.values[:, :, :, old]
        tight.seen = self.seen
        return tight

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


class Tracked:
    """The vectors of a dynamic channel and the FiLM terms they give, moved on at triggers (`GoalTracker`, S = 1).

    Raises:
        ValueError: a tracker that attends to more than one trigger state.
    """

    def __init__(self, channel: GoalChannel, state: LatentState, maps: TrackerMaps) -> None:
        assert channel.tracker is not None and state.goal is not None
        self.maps = maps
        self.alpha, self.replaces = channel.tracker.alpha.detach(), channel.tracker.replaces
        self.goal = state.goal
        self.in_force = torch.zeros_like(self.goal)
        if self.replaces and state.history is not None and state.history_count is not None:
            self.in_force = channel.tracker._in_force(state.history, state.history_count)
        self.terms = maps.film(self.goal)

    def move(self, states: Tensor, rows: Tensor | None) -> None:
        """Take the update of `states` (M, E) at these rows, or at all of them."""
        attended = self.maps.out(self.maps.value(states))
        update = attended + self.maps.second(F.gelu(self.maps.first(attended)))
        if rows is None:
            self.goal = self.goal + self.alpha * (update - self.in_force)
            self.terms = self.maps.film(self.goal)
            self.in_force = update if self.replaces else self.in_force
            return
        moved = self.goal[rows] + self.alpha * (update - self.in_force[rows])
        # Not in place: terms handed out before hold for the tokens before.
        self.goal = self.goal.index_copy(0, rows, moved)
        self.terms = self.terms.index_copy(0, rows, self.maps.film(moved))
        if self.replaces:
            self.in_force = self.in_force.index_copy(0, rows, update)


class TrackerMaps:
    """The linear maps between a trigger state and FiLM terms, laid out for decoding."""

    def __init__(self, channel: GoalChannel, *, rows: int) -> None:
        tracker = channel.tracker
        assert tracker is not None
        if tracker.history != 1:
            raise ValueError(f"lean decoding takes tracker_history 1, not {tracker.history}; use generate()")
        attention: Any = tracker.attention
        bias = attention.in_proj_bias.chunk(3)[2]
        weight = attention.v_proj_weight if attention.in_proj_weight is None else attention.in_proj_weight.chunk(3)[2]
        self.value = packed(weight.t(), bias, rows=rows)
        first: Any
        second: Any
        first, _, second = tracker.mlp
        self.out, self.first, self.second, self.film = (
            packed(layer.weight.t(), layer.bias, rows=rows)
            for layer in (attention.out_proj, first, second, channel.film.projection)
        )
