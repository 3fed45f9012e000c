"""Where `sidestream.papers.lsar.planning` stood in earlier versions, kept so that scripts still run."""

from sidestream.papers.lsar.planning import Planning as Table3
from sidestream.papers.lsar.planning import table3

__all__ = ["Table3", "table3"]
