"""A tracked vector over a text that is longer than what the decoder sees of it."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.attach import AttachedLM


def tracked_terms(
    model: AttachedLM, state: LatentState, full_ids: Tensor, full_mask: Tensor, first: Tensor, length: int
) -> Tensor:
    """(B, length, L, 2, D) FiLM terms of a crop of each text, its tracker having read the text from the first token on.

    The terms that `generate` has in force when its window stands where the crop does.

    Args:
        model: with a dynamic channel.
        state: B goals, or one; nothing tracked yet.
        full_ids, full_mask: (B, T) the texts up to the end of their crops, padded on the right.
        first: (B,) where each crop begins.
        length: of the longest crop. What lies behind the end of a shorter one is padding.
    """
    channel = model.channel
    assert channel.tracker is not None
    hidden = model.goal_hidden(full_ids, full_mask, layer=channel.config.tracker_layer)
    vectors, _ = channel.tracker.sequence(state, hidden, model.fires(full_ids, full_mask))
    return channel.film.terms(cropped(vectors, first, length))


def cropped(vectors: Tensor, first: Tensor, length: int) -> Tensor:
    """(B, length, G) of (B, T, G), from place `first` (B,) of each row on; behind the end the last place stands."""
    places = first[:, None] + torch.arange(length, device=first.device)
    places = places.clamp(max=vectors.shape[1] - 1).unsqueeze(-1)
    return vectors.gather(1, places.expand(-1, -1, vectors.shape[-1]))
