"""Looking into states: what the decoder holds where the answer is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sidestream.channels import LatentState
from sidestream.lm.decoding.decode import last_states
from sidestream.tasks.treasure import TreasureProblem


def treasure_states(
    model: Any, problems: Sequence[TreasureProblem], *, window: int, goals: LatentState | None = None
) -> np.ndarray:
    """(N, D) last-layer states from which the item's first token is predicted, the passcode before it forced.

    At the trigger itself the next token is the passcode's, and states there are arranged by passcode, not by item.
    """
    # CHOICE(LS-AR, Figure 4b): which states are drawn is open.
    rows = [(problem.forced_ids + problem.code_ids)[-window:] for problem in problems]
    return last_states(model, rows, goal=goals).float().cpu().numpy()


def project(states: np.ndarray, labels: Sequence[str], *, seed: int, perplexity: float = 20.0) -> dict[str, Any]:
    """t-SNE of the states, with the silhouette of the labels in the original space (1 tight clusters, <= 0 mixed)."""
    # Seconds to import, and wanted once in a run.
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    perplexity = min(perplexity, (len(states) - 1) / 3)
    xy = TSNE(perplexity=perplexity, random_state=seed, init="pca").fit_transform(states)
    silhouette = float(silhouette_score(states, list(labels))) if 1 < len(set(labels)) < len(labels) else 0.0
    return {
        "xy": [[round(float(v), 3) for v in row] for row in xy],
        "label": list(labels),
        "silhouette": silhouette,
        "perplexity": perplexity,
    }
