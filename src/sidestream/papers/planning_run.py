"""Where Table 3 was run from in earlier versions, kept so that scripts still run."""

from pathlib import Path
from typing import Any

from sidestream.experiments.engine import LocalEngine
from sidestream.experiments.run import run
from sidestream.papers.lsar.planning import Planning

__all__ = ["run_table3"]


def run_table3(
    experiment: Planning, directory: Path, *, command: str, resume: bool = False, jobs: int | None = None
) -> dict[str, Any]:
    """`sidestream.experiments.run.run` under its earlier name; Args: as there, `jobs` trainings at a time."""
    return run(experiment, directory, command=command, resume=resume, engine=LocalEngine(jobs))
