"""The tables of benchmarks/ run, agree with what they are timed against, and are found where they are asked for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sidestream.papers
from sidestream.experiments import table as tables
from sidestream.experiments.run import run
from sidestream.papers.lsar.speed import memory, table2

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def there(monkeypatch):
    """As with SIDESTREAM_TABLES=benchmarks."""
    monkeypatch.setattr(sidestream.papers, "__path__", [*sidestream.papers.__path__, str(FOLDER)])
    tables.load.cache_clear()
    yield
    tables.load.cache_clear()


def measured(name, folder, rows=None, windows=None):
    settings = tables.load(name).at("smoke")
    settings = replace(settings, rows=rows, windows=windows) if rows else settings
    results = run(settings, folder / "run", command="tests")
    assert all(cell["n"] == len(cell["samples"]) and cell["value"] > 0 for cell in results["cells"])
    return {(cell["arm"], cell["metric"]) for cell in results["cells"]}


ROWS = {
    "static_over_small": {("static, W = 16", "static_over_small"), ("static, W = 16", "static_over_large")},
    "dynamic_over_large": {("dynamic, W = 16, learned", "dynamic_over_large")},
    "flat_token": {("static", "flat_token")},
    "flat_trigger": {("dynamic", "flat_trigger"), ("dynamic, E_base reads all", "flat_trigger")},
    "decode_over_generate": {("lean", "decode_over_generate"), ("lean", "bandwidth_fraction")},
    "training_over_bare_loop": {(f"stage {stage}", "training_over_bare_loop") for stage in (1, 2, 3)},
}


@pytest.mark.parametrize("rows", [("static_over_small",), pytest.param(tuple(ROWS), marks=pytest.mark.slow)])
def test_rows_of_the_speed_table(rows, tmp_path):
    windows = None if "training_over_bare_loop" in rows else (16,)
    found = {(arm.replace("W = 24", "W = 16"), name) for arm, name in measured("speed", tmp_path, rows, windows)}
    assert found >= set().union(*(ROWS[row] for row in rows))


@pytest.mark.slow
def test_memory_grows_with_the_model():
    plan = replace(table2("smoke"), vocabulary=20_000, width=256, heads=4, large_layers=8, repeats=1)
    found = memory(plan, dynamic=False, batch=1, dtype="fp32", size=24)
    held = {one.arm: one.values[0] for one in found if one.metric == "memory_mb"}
    assert 10 < held["small"] < held["large"] < 200
    assert found[0].values[0] == pytest.approx(held["static"] / held["large"])


def test_parts_of_a_token(tmp_path):
    found = {arm for arm, _ in measured("token_parts", tmp_path)}
    assert found >= {"dynamic: sum of the parts", "dynamic: a token, as decoded", "static: goal of 13 tokens encoded"}
    assert len(found) == 17 and "bound: weights of 1 blocks at the bandwidth measured" in found


def test_latent_passes_are_the_described_ones(tmp_path, monkeypatch):
    found = measured("latent_passes", tmp_path)
    assert found >= {("training step", "engine_over_loop"), ("evaluation, loop", "ms")}
    assert ("agclr, generation", "stream_over_coconut") in found
    from sidestream.papers import latent_passes  # type: ignore[attr-defined]

    wrong = latent_passes.described_loss
    monkeypatch.setattr(latent_passes, "described_loss", lambda *all: wrong(*all) + 0.1)
    with pytest.raises(AssertionError, match="not close"):
        latent_passes.engine_over_loop(latent_passes.passes("smoke"), 32, 1)
    assert torch.is_grad_enabled()


def test_a_quotable_median_takes_five_rounds():
    with pytest.raises(ValueError, match="repeats is 4; it must be at least 5"):
        replace(tables.load("latent_passes").at("cpu"), repeats=4)
