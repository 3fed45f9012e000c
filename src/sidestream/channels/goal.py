"""The goal channel (LS-AR): a static vector P0 predicted from the prompt, a tracked vector P_t, and FiLM for both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sidestream.channels.film import FiLM
from sidestream.channels.state import LatentState


@dataclass(frozen=True, kw_only=True)
class GoalConfig:
    """Settings of a goal channel. Widths that belong to a model are filled in when the channel is attached."""

    mode: Literal["static", "dynamic"] = "static"
    """`static` holds P0 for the whole rollout; `dynamic` adds the tracker that updates it at trigger tokens."""
    width: int = 512
    """G, width of the goal vector (the paper's d = 512)."""
    pool_layer: int = -1
    """Encoder layer whose hidden states are pooled into the vector: 0 the embeddings, 1 the first block's output, -1
    the last (the paper's). Last-layer states of a causal LM predict the next token and have let go of the current one,
    so exact strings survive better from an early layer."""
    encoder_hidden: int | None = None
    """Hidden width of E_pred; None means 4 x `width`."""
    trigger_ids: tuple[int, ...] = ()
    """Token ids at which the tracker updates the vector (Blocksworld: the comma). Dynamic mode only."""
    tracker_layer: int = -1
    """Encoder layer whose state at a trigger is s_i: -1 the last (the paper's), which sums up the text so far."""
    tracker_heads: int = 8
    """Attention heads of the tracker; `width` must divide by it."""
    tracker_history: int = 1
    """S, how many trigger states the tracker attends to. 1 is the paper's single key."""
    tracker_update: Literal["add", "replace"] = "add"
    """`add` moves the vector on by each trigger's update, the paper's: P_t is P0 plus a sum over all triggers. With
    `replace` (ours) each trigger's update takes the place of the one before, so P_t is P0 plus the latest: s_i sums up
    the whole text already, and a sum over states has to cancel what is out of date. Needs `tracker_history` 1."""
    tracker_hidden: int | None = None
    """Hidden width of the tracker's MLP; None means 4 x `width`."""
    encoder_width: int | None = None
    """E, width of the encoder's hidden states. Filled in on attach."""
    model_width: int | None = None
    """D, width of the decoder. Filled in on attach."""
    num_blocks: int | None = None
    """L, number of decoder blocks. Filled in on attach."""

    def __post_init__(self) -> None:
        if self.mode not in ("static", "dynamic"):
            raise ValueError(f"GoalConfig.mode is {self.mode!r}; use 'static' or 'dynamic'")
        for name in ("width", "tracker_heads", "tracker_history"):
            if getattr(self, name) < 1:
                raise ValueError(f"GoalConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.mode == "dynamic" and self.width % self.tracker_heads:
            raise ValueError(
                f"GoalConfig.width {self.width} does not divide by tracker_heads {self.tracker_heads}; change one"
            )
        if self.tracker_update not in ("add", "replace"):
            raise ValueError(f"GoalConfig.tracker_update is {self.tracker_update!r}; use 'add' or 'replace'")
        if self.tracker_update == "replace" and self.tracker_history != 1:
            raise ValueError(f"GoalConfig.tracker_update 'replace' needs tracker_history 1, got {self.tracker_history}")
        if self.mode == "static" and self.trigger_ids:
            raise ValueError("GoalConfig.trigger_ids are set but mode is 'static', which never updates; use 'dynamic'")
        if self.mode == "dynamic" and not self.trigger_ids:
            raise ValueError("GoalConfig.mode is 'dynamic' but trigger_ids is empty: the vector would never change")

    def sized(self, *, encoder_width: int, model_width: int, num_blocks: int) -> GoalConfig:
        """The same settings with the model's widths filled in."""
        return replace(self, encoder_width=encoder_width, model_width=model_width, num_blocks=num_blocks)


class GoalEncoder(nn.Module):
    r"""P0 from the encoder's hidden states of the prompt.

    .. math:: P_0 = E_{pred}(\mathrm{MeanPool}(E_{base}(g)))

    `E_pred` is a 3-layer MLP with GELU (LS-AR, section 3.1). `E_base` is a causal LM and lives outside: this module
    takes its hidden states, so it works with any model, or with none.
    """

    def __init__(self, config: GoalConfig) -> None:
        super().__init__()
        assert config.encoder_width is not None
        # CHOICE(LS-AR, 3.1): hidden width 4 x d; the paper names three layers and no widths.
        hidden = config.encoder_hidden or 4 * config.width
        self.width = config.width
        self.predictor = nn.Sequential(
            nn.Linear(config.encoder_width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, config.width),
        )
        self.pooled_mean: Tensor
        self.pooled_scale: Tensor
        self.register_buffer("pooled_mean", torch.zeros(config.encoder_width))
        self.register_buffer("pooled_scale", torch.ones(config.encoder_width))

    def forward(self, hidden: Float[Tensor, "B T E"], mask: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B G"]:
        """Pool the states where `mask` is true (everywhere without one) and predict P0."""
        return self.predict(mean_pool(hidden, mask))

    def predict(self, pooled: Float[Tensor, "B E"]) -> Float[Tensor, "B G"]:
        """P0 of states that are pooled already."""
        return self.predictor((pooled - self.pooled_mean) / self.pooled_scale)

    @torch.no_grad()
    def calibrate(self, pooled: Float[Tensor, "B E"]) -> None:
        """Standardise E_pred's input by the mean and deviation of these pooled states (the training goals').

        Ours, not the paper's. Prompts of one template differ in a few tokens, so their means differ by a few hundredths
        around a large common vector, and an MLP at its initial scale barely sees the difference.

        Raises:
            ValueError: fewer than two goals have no deviation.
        """
        # CHOICE(LS-AR, 3.1): not in the paper; the faithful arm leaves mean 0 and scale 1.
        if len(pooled) < 2:
            raise ValueError(f"calibrate needs the pooled states of at least 2 goals, got {len(pooled)}")
        self.pooled_mean.copy_(pooled.mean(dim=0))
        self.pooled_scale.copy_(pooled.std(dim=0).clamp(min=1e-6))


def mean_pool(hidden: Float[Tensor, "B T E"], mask: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B E"]:
    """Mean over the tokens of each row, padding left out.

    Raises:
        ValueError: a row has no token at all.
    """
    if mask is None:
        return hidden.mean(dim=1)
    counts = mask.sum(dim=1, keepdim=True)
    if bool((counts == 0).any()):
        raise ValueError(f"row {int((counts == 0).nonzero()[0, 0])} of the goal batch is empty: nothing to encode")
    return (hidden * mask.unsqueeze(-1).to(hidden.dtype)).sum(dim=1) / counts.to(hidden.dtype)


class GoalTracker(nn.Module):
    r"""P_t: the vector moves at trigger tokens only.

    .. math::
        a_i &= \mathrm{MHA}(q = P_{i-1},\ k = v = s_{i-S+1}, \dots, s_i) \\
        P_i &= P_{i-1} + \alpha\,(a_i + \mathrm{MLP}(a_i))

    `s_i` is the encoder's hidden state at the i-th trigger; `alpha` is a learned scalar that starts at 0, so a fresh
    tracker is the identity (LS-AR, section 3.2, Figure 2 and appendix A).

    With S = 1, the paper's case, the softmax over one key is 1 and the update does not depend on the query: a whole
    sequence is one cumulative sum over its triggers. With S > 1 each update needs the vector before it; the updates of
    a sequence are then taken one trigger (not one token) after the other, all rows at once. For the same reason the
    query and key projections get no gradient with S = 1; the paper keeps them, and so do we.

    With `tracker_update="replace"` (ours) the update before is taken back: P_i = P_0 + alpha (a_i + MLP(a_i)).
    """

    def __init__(self, config: GoalConfig) -> None:
        super().__init__()
        assert config.encoder_width is not None
        width = config.width
        self.history = config.tracker_history
        self.replaces = config.tracker_update == "replace"
        self.attention = nn.MultiheadAttention(
            width, config.tracker_heads, kdim=config.encoder_width, vdim=config.encoder_width, batch_first=True
        )
        # CHOICE(LS-AR, 3.2): "residual + MLP" is read as a + MLP(a) on the attention output, not on P + a: only then is
        # the single-key update independent of the query, which is what makes a sequence parallel.
        hidden = config.tracker_hidden or 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.alpha = nn.Parameter(torch.zeros(()))

    def step(self, state: LatentState, trigger_state: Float[Tensor, "B E"], fires: Bool[Tensor, " B"]) -> LatentState:
        """One token: rows where `fires` take an update, the others keep their vector and history."""
        history, count = self._history(state, trigger_state)
        before = self._in_force(history, count) if self.replaces else 0.0
        shifted = torch.cat([history[:, 1:], trigger_state.unsqueeze(1)], dim=1)  # (B, S, E)
        history = torch.where(fires[:, None, None], shifted, history)
        count = count + fires.to(count.dtype)
        held = _goal_of(state)
        update = self._update(held, history, count) - before
        goal = torch.where(fires[:, None], held + self.alpha * update, held)
        return replace(state, goal=goal, history=history, history_count=count)

    def sequence(
        self, state: LatentState, hidden: Float[Tensor, "B T E"], fires: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T G"], LatentState]:
        """T tokens at once: the vector in force at every position (a trigger's own position has the new one), and the
        state after the last token. Equal to T calls of `step`."""
        batch, length, _ = hidden.shape
        if self.history == 1:
            if length == 1:
                update = self._value_update(hidden) * fires.unsqueeze(-1)  # (B, 1, G)
            else:
                # Few tokens are triggers; to find them costs a GPU one synchronisation, so decoding does without.
                some = self._value_update(hidden[fires])  # (triggers, G)
                update = some.new_zeros(*fires.shape, some.shape[-1]).index_put((fires,), some)
            total = fires.sum(dim=1)
            newest = torch.where(fires, torch.arange(length, device=fires.device), -1)  # (B, T)
            history, count = self._history(state, hidden[:, 0])
            if self.replaces:
                before = self._in_force(history, count).unsqueeze(1)  # (B, 1, G)
                at = newest.cummax(dim=1).values.unsqueeze(-1)  # (B, T, 1): the latest trigger so far
                latest = update.gather(1, at.clamp(min=0).expand_as(update))
                steps = torch.where(at >= 0, latest - before, torch.zeros_like(latest))
            else:
                steps = update.cumsum(dim=1)  # (B, T, G)
            vectors = _goal_of(state).unsqueeze(1) + self.alpha * steps
            last = newest.amax(dim=1)
            kept = hidden[torch.arange(batch, device=hidden.device), last.clamp(min=0)].unsqueeze(1)
            history = torch.where((total > 0)[:, None, None], kept, history)
            count = count + total.to(count.dtype)
            return vectors, replace(state, goal=vectors[:, -1], history=history, history_count=count)
        # Compact each row's triggers to the left so that the loop runs over triggers, not over tokens.
        most = int(fires.sum(dim=1).max())
        order = torch.argsort((~fires).to(torch.int8), dim=1, stable=True)[:, :most]  # (B, most)
        vectors = [_goal_of(state)]
        for column in range(most):
            position = order[:, column]
            rows = torch.arange(batch, device=hidden.device)
            state = self.step(state, hidden[rows, position], fires[rows, position])
            vectors.append(_goal_of(state))
        which = fires.cumsum(dim=1)  # (B, T): how many updates each position has seen
        stacked = torch.stack(vectors, dim=1)  # (B, most + 1, G)
        gathered = stacked.gather(1, which.unsqueeze(-1).expand(-1, -1, stacked.shape[-1]))
        return gathered, state

    def _history(self, state: LatentState, like: Float[Tensor, "B E"]) -> tuple[Tensor, Tensor]:
        if state.history is not None and state.history_count is not None:
            return state.history, state.history_count
        history = like.new_zeros(like.shape[0], self.history, like.shape[-1])
        return history, torch.zeros(like.shape[0], dtype=torch.long, device=like.device)

    def _update(
        self, goal: Float[Tensor, "B G"], history: Float[Tensor, "B S E"], count: Tensor
    ) -> Float[Tensor, "B G"]:
        slots = torch.arange(self.history, device=history.device)
        empty = slots[None, :] < (self.history - count[:, None])  # (B, S): not yet written
        # A row that has seen no trigger would be all masked, hence NaN; its result is thrown away by the caller.
        empty = empty & (count > 0)[:, None]
        attended, _ = self.attention(goal.unsqueeze(1), history, history, key_padding_mask=empty, need_weights=False)
        attended = attended.squeeze(1)
        return attended + self.mlp(attended)

    def _in_force(self, history: Float[Tensor, "B 1 E"], count: Tensor) -> Float[Tensor, "B G"]:
        """The update that the vector holds under `replace`; 0 before the first trigger."""
        return self._value_update(history[:, -1]) * (count > 0).unsqueeze(-1)

    def _value_update(self, hidden: Float[Tensor, "... E"]) -> Float[Tensor, "... G"]:
        """The update with each position as its own single key: softmax of one is 1, so values and output projection."""
        attention = self.attention
        bias = attention.in_proj_bias.chunk(3)[2]
        weight = attention.v_proj_weight if attention.in_proj_weight is None else attention.in_proj_weight.chunk(3)[2]
        attended = attention.out_proj(nn.functional.linear(hidden, weight, bias))
        return attended + self.mlp(attended)


class GoalChannel(nn.Module):
    """Encoder, tracker and FiLM of one decoder, as functions of a `LatentState`.

    Works in a hand-written loop: `encode` the goal once, `advance` over tokens, and give block l's MLP input and
    `terms[:, :, l]` to `sidestream.channels.modulate`.
    """

    def __init__(self, config: GoalConfig) -> None:
        super().__init__()
        if config.encoder_width is None or config.model_width is None or config.num_blocks is None:
            raise ValueError(
                "GoalConfig lacks encoder_width, model_width or num_blocks; fill them with config.sized(...)"
            )
        self.config = config
        self.encoder = GoalEncoder(config)
        self.tracker = GoalTracker(config) if config.mode == "dynamic" else None
        self.film = FiLM(config.width, config.model_width, config.num_blocks)

    def encode(self, hidden: Float[Tensor, "B T E"], mask: Bool[Tensor, "B T"] | None = None) -> LatentState:
        """The state at the start of a rollout: P0 of the prompt's hidden states at `config.pool_layer`."""
        return LatentState(goal=self.encoder(hidden, mask))

    def fold(self, state: LatentState) -> LatentState:
        """Project a static vector's FiLM terms once, to be used for every token that follows."""
        if state.terms is not None:
            return state
        return state.folded(self.film.terms(_goal_of(state).unsqueeze(1)))

    def advance(
        self,
        state: LatentState,
        hidden: Float[Tensor, "B T E"] | None = None,
        fires: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B N L 2 D"], LatentState]:
        """FiLM terms for the next T tokens and the state after them.

        A static channel ignores the tokens (N = 1). A dynamic one needs the encoder's hidden states of the tokens and
        the mask of its triggers (N = T).
        """
        if self.tracker is None:
            state = self.fold(state)
            assert state.terms is not None
            return state.terms, state
        if hidden is None or fires is None:
            raise ValueError(
                "a dynamic goal channel needs the encoder's hidden states and the trigger mask of the tokens"
            )
        vectors, state = self.tracker.sequence(state, hidden, fires)
        return self.film.terms(vectors), state


def _goal_of(state: LatentState) -> Tensor:
    if state.goal is None:
        raise ValueError("the latent state carries no goal: begin with GoalChannel.encode")
    return state.goal
