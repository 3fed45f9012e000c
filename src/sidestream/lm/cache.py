"""Where `sidestream.lm.decoding.cache` stood in earlier versions, kept so that scripts still run."""

from sidestream.lm.decoding.cache import LatentCache
from sidestream.lm.decoding.window import Window
from sidestream.lm.models.blocks import CACHE_NAME

__all__ = ["CACHE_NAME", "LatentCache", "Window"]
