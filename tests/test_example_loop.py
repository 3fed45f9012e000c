"""examples/loop.py: runs as a user runs it, and needs nothing of our training code."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "loop.py"


def run(capfd, **options) -> dict[str, int]:
    """Counts by the words that stand before them."""
    spec = importlib.util.spec_from_file_location("example_loop", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(**options)
    said = capfd.readouterr().out
    assert f"n = {options['test_problems']}" in said and "chance 8.3%" in said
    return {name: int(count) for name, count in re.findall(r"(open|closed|loaded):? +(\d+)", said)}


def test_imports_nothing_of_training_or_papers():
    names = [
        name
        for node in ast.walk(ast.parse(SCRIPT.read_text(encoding="utf-8")))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
        )
        if name and name.startswith("sidestream")
    ]
    assert "sidestream" in names
    assert not [name for name in names if re.match(r"sidestream\.(training|papers|evaluation|cli)", name)]


def test_runs_to_its_end(capfd):
    counts = run(capfd, steps=4, test_problems=12)
    assert counts.keys() == {"open", "closed", "loaded"} and counts["loaded"] == counts["open"]


@pytest.mark.slow
def test_recalls_items_past_the_window(capfd):
    counts = run(capfd, steps=400, test_problems=240)
    assert counts["open"] >= 0.95 * 240 and counts["loaded"] == counts["open"]
    assert counts["closed"] <= 0.2 * 240
