"""sidestream: a latent state beside the token stream of a causal language model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestream.channels import GoalChannel, GoalConfig, LatentState
    from sidestream.lm.attach import AttachedLM, attach, load
    from sidestream.lm.decoding.cache import LatentCache, Window

__all__ = ["AttachedLM", "GoalChannel", "GoalConfig", "LatentCache", "LatentState", "Window", "attach", "load"]
__version__ = "0.1.0"

_HOMES = {
    "AttachedLM": "sidestream.lm.attach",
    "GoalChannel": "sidestream.channels",
    "GoalConfig": "sidestream.channels",
    "LatentCache": "sidestream.lm.decoding.cache",
    "LatentState": "sidestream.channels",
    "Window": "sidestream.lm.decoding.cache",
    "attach": "sidestream.lm.attach",
    "load": "sidestream.lm.attach",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `sidestream --help` must not wait seconds for torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
