"""What the tables of `legacy.py` take from the kernel."""

import json
from pathlib import Path
from typing import Any

from sidestream.experiments.provenance import open_run, record_call, write_whole
from sidestream.experiments.run import results_of
from sidestream.experiments.settings import from_json, to_json

__all__ = ["from_json", "open_run", "record_call", "results_of", "to_json", "write_results", "write_whole"]


def write_results(
    experiment: Any, directory: Path, origin: dict[str, Any], started: float, **rest: Any
) -> dict[str, Any]:
    """`results_of` as the run directory's results.json, which ends the run."""
    results = results_of(experiment, origin, started, **rest)
    write_whole(directory / "results.json", json.dumps(results, indent=1) + "\n")
    return results
