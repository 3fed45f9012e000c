"""What the stages minimise. Losses live in a module's `forward`, so a hand-written loop works as well as a trainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sidestream.channels import GoalEncoder, LatentState
from sidestream.channels.ball import worst_vectors
from sidestream.lm.attach import AttachedLM
from sidestream.lm.models.terms import disable_checkpointing, enable_checkpointing

UNSCORED = -100
"""Label of positions that carry no loss."""


def vicreg(
    prediction: Tensor, target: Tensor, *, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0
) -> Tensor:
    r"""VICReg between predicted and true vectors, both (B, G).

    .. math::
        \lambda\,\mathrm{MSE}(z, t) + \mu\,\frac1G\sum_j \max(0, 1 - \sigma(z_j))
        + \nu\,\frac1G\sum_{i\ne j} C(z)_{ij}^2

    Source: LS-AR, appendix B.3.3 (weights 25 / 25 / 1); Bardes et al., 2022.
    """
    # CHOICE(LS-AR, B.3.3): variance and covariance on the prediction only; the target comes from a frozen encoder, so
    # its terms are constants.
    spread = torch.sqrt(prediction.var(dim=0) + 1e-4)
    centred = prediction - prediction.mean(dim=0)
    cov = centred.T @ centred / (len(prediction) - 1)
    off_diagonal = cov.pow(2).sum() - cov.diagonal().pow(2).sum()
    return (
        invariance * F.mse_loss(prediction, target)
        + variance * F.relu(1 - spread).mean()
        + covariance * off_diagonal / prediction.shape[1]
    )


class GoalReconstruction(nn.Module):
    """Names the goal's tokens from its vector: one linear map that says of every token whether it is there.

    Ours, not the paper's: VICReg asks the vector to resemble the trajectory on average, which lets exact digits go.
    Used in training only.

    Args:
        goal_width: G.
        vocabulary: V.
    """

    def __init__(self, goal_width: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(goal_width, vocabulary)

    def forward(self, vector: Tensor, goal_ids: Tensor) -> Tensor:
        """Binary cross-entropy of "this token is in the goal", summed over the vocabulary and divided by the number of
        tokens present, mean over rows; `goal_ids` (B, T), `UNSCORED` at padding."""
        scores = self.head(vector)
        present = goal_ids != UNSCORED
        wanted = torch.zeros_like(scores)
        rows = torch.arange(len(goal_ids), device=scores.device).unsqueeze(1).expand_as(goal_ids)
        wanted[rows[present], goal_ids[present]] = 1.0
        loss = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none").sum(dim=1)
        return (loss / present.sum(dim=1)).mean()


class GoalAlignment(nn.Module):
    """Stage 2: train E_pred on pooled states of a frozen encoder.

    The encoder is frozen, so each goal is encoded once before training; a batch holds pooled states, not tokens.

    Args:
        encoder: holds E_pred.
        reconstruction: None leaves the paper's objective, VICReg alone.
        weight: weight of the reconstruction term.
    """

    def __init__(self, encoder: GoalEncoder, reconstruction: GoalReconstruction | None, weight: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.reconstruction = reconstruction
        self.weight = weight

    def forward(self, pooled: Tensor, trajectory: Tensor, goal_ids: Tensor) -> dict[str, Tensor]:
        """`pooled` and `trajectory` (B, E): pooled encoder states of the goal and of its true trajectory."""
        vector = self.encoder.predict(pooled)
        loss = vicreg(vector, trajectory)
        out = {"vicreg": loss.detach()}
        if self.reconstruction is not None:
            reconstruction = self.reconstruction(vector, goal_ids)
            loss = loss + self.weight * reconstruction
            out["reconstruction"] = reconstruction.detach()
        return {"loss": loss, **out}


def token_losses(lm: Any, hidden: Tensor, labels: Tensor, *, reduction: str = "mean") -> Tensor:
    """Cross-entropy of an LM's head at positions whose label is not `UNSCORED`; the head is applied to those only.

    Args:
        hidden: (B, T, E) last states of the decoder.
        labels: (B, T), the token after each position.
        reduction: as for `F.cross_entropy`; `none` gives one loss a scored position, in the order of `labels`.
    """
    head: Any = lm.get_output_embeddings()
    scored = labels != UNSCORED
    return F.cross_entropy(head(hidden[scored]).float(), labels[scored], reduction=reduction)


class ScoredLM(nn.Module):
    """Next-token loss at scored positions, with the head applied to those positions only. Stages 1 and 3.

    Args:
        model: a causal LM, with or without channels.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, pooled: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Mean cross-entropy over positions whose label is not `UNSCORED`.

        Args:
            input_ids, attention_mask: (B, T), padded on the right.
            labels: (B, T), the token after each position (already shifted), `UNSCORED` elsewhere.
            pooled: (B, E) pooled encoder states of each row's goal; None trains the bare language model.
        """
        if isinstance(self.model, AttachedLM):
            state = None
            if pooled is not None:
                state = LatentState(goal=self.model.channel.encoder.predict(pooled))
            hidden = self.model.hidden(input_ids, goal=state, attention_mask=attention_mask)
            lm = self.model.lm
        else:
            hidden = self.model.base_model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state
            lm = self.model
        return {"loss": token_losses(lm, hidden, labels)}

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the decoder's blocks in backward instead of keeping their activations; exact, with channels too."""
        enable_checkpointing(self._decoder, None)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        disable_checkpointing(self._decoder)

    @property
    def _decoder(self) -> Any:
        return self.model.lm if isinstance(self.model, AttachedLM) else self.model


class BallLM(ScoredLM):
    """Stage 3 on the worst vector of a ball around each row's own: adversarial training of the vector channel.

    Args:
        model: an attached model whose texts are wholly in view.
        radius: of the L2 ball, in units of each vector's norm.
        steps: gradient steps inside it.
    """

    def __init__(self, model: AttachedLM, *, radius: float, steps: int) -> None:
        super().__init__(model)
        self.radius = radius
        self.steps = steps

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, pooled: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As `ScoredLM`, and every row weighs the same."""
        assert pooled is not None
        scored = labels != UNSCORED
        rows = scored.nonzero()[:, 0]

        def losses(vectors: Tensor) -> Tensor:
            hidden = self.model.hidden(input_ids, goal=LatentState(goal=vectors), attention_mask=attention_mask)
            each = token_losses(self.model.lm, hidden, labels, reduction="none")
            return each.new_zeros(len(labels)).index_add(0, rows, each) / scored.sum(dim=1)

        goal = self.model.channel.encoder.predict(pooled)
        worst = worst_vectors(losses, goal, radius=self.radius, steps=self.steps)
        return {"loss": losses(goal + (worst - goal.detach())).mean()}
