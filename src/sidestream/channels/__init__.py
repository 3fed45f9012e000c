"""Channels: a latent state beside the token stream. torch only; works in any hand-written loop."""

from sidestream.channels.film import FiLM, modulate
from sidestream.channels.goal import GoalChannel, GoalConfig, GoalEncoder, GoalTracker, mean_pool
from sidestream.channels.state import LatentState
from sidestream.channels.stream import GATES, ConceptStream, StreamConfig

__all__ = [
    "GATES",
    "ConceptStream",
    "FiLM",
    "GoalChannel",
    "GoalConfig",
    "GoalEncoder",
    "GoalTracker",
    "LatentState",
    "StreamConfig",
    "mean_pool",
    "modulate",
]
