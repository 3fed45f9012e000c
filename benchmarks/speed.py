"""The speed table: one row after the other, each a ratio of what ran side by side in this process, turn about.

    python benchmarks/speed.py ROW [ROW ...] | all [--short] [--batch 1 32] [--windows 500] [--dtype bf16] [--out FILE]

Every row prints its samples and, last, its ratio, the median over rounds. `--short` takes small models or few tokens,
under a minute a row; without it sizes are the papers'. On a machine with a GPU it runs there; `--cpu` keeps it off.
`--out` writes results in the project's format, with every sample; a file that exists is added to.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROWS = {
    "static_over_small": "LS-AR Static / 4-layer unconditioned decoder, tokens a second",
    "static_over_large": "LS-AR Static / 20-layer baseline, tokens a second",
    "memory_over_large": "LS-AR Static / 20-layer baseline, peak memory while decoding",
    "dynamic_over_large": "LS-AR Dynamic / 10-layer baseline, tokens a second",
    "flat_token": "a token's time at 100,000 tokens / at 1,000, window on",
    "flat_trigger": "a trigger's time at token 5,000 / at token 50",
    "stream_over_coconut": "AGCLR / CoCoNuT, time of a training step and of answers",
    "decode_over_generate": "lean decoding / generate() of transformers, same model, greedy, tokens a second",
    "bandwidth_fraction": "the bound of memory bandwidth / time of a token, batch 1",
    "training_over_bare_loop": "tokens a second of each LS-AR stage / a bare loop of the same model",
}
BATCHES = {"static_over_small": (1, 32), "memory_over_large": (1, 32), "dynamic_over_large": (1, 32)}
BATCHES |= {"stream_over_coconut": (8,), "training_over_bare_loop": (4,)}
TWINS = {"static_over_large": "static_over_small", "bandwidth_fraction": "decode_over_generate"}
"""Rows that one measurement gives together."""


def plan_for(row: str, *, short: bool) -> Any:
    """Sizes and lengths of a row."""
    from sidestream.papers.lsar.speed import Speed, table2, table4

    common: dict[str, Any] = dict(table="speed", scale="cpu", batches=BATCHES.get(row, (1,)))
    if row == "dynamic_over_large":
        plan = replace(table4("cpu"), **common)
        return replace(plan, windows=(32,), batches=(1,), families=("gpt2",), new_tokens=16) if short else plan
    if row in ("static_over_small", "memory_over_large"):
        plan = replace(table2("cpu"), **common)
        if short and row == "memory_over_large":
            return replace(plan, windows=(500,), batches=(1,), repeats=2)
        return replace(plan, windows=(128,), batches=(1,), new_tokens=16) if short else plan
    small: dict[str, Any] = dict(vocabulary=2048, width=128, heads=2, layers=2) if short else {}
    if row == "flat_token":
        return Speed(windows=(128,), new_tokens=16 if short else 64, **small, **common)
    if row == "flat_trigger":
        return Speed(windows=(128,), **{"vocabulary": 100, **small}, **common)
    if row == "stream_over_coconut":
        sizes: dict[str, Any] = dict(vocabulary=50260, width=768, heads=12, large_layers=12)
        small = dict(vocabulary=2048, width=256, heads=4, large_layers=4) if short else sizes
        return Speed(windows=(128,), **small, **common)
    if row == "training_over_bare_loop":
        batch = dict(batches=(16,)) if short else {}
        return Speed(windows=(128,), new_tokens=8 if short else 3, **small, **{**common, **batch})
    assert row == "decode_over_generate", row
    return Speed(windows=(128,), new_tokens=24 if short else 64, **common)


def measured(row: str, plan: Any, batch: int, dtype: str) -> list[dict[str, Any]]:
    """Cells of one row; where they differ in W or positions, the arm's name says so."""
    from sidestream.experiments.results import cell as cell_of
    from sidestream.papers.lsar import speed, speed_rows

    common: dict[str, Any] = dict(batch=batch, dtype=dtype)
    if row in ("static_over_small", "dynamic_over_large"):
        common["dynamic"] = row == "dynamic_over_large"
        found = [one for family in plan.families for one in speed.decoding(plan, **common, family=family)]
    elif row == "memory_over_large":
        found = [one for size in plan.windows for one in speed.memory(plan, **common, dynamic=False, size=size)]
    else:
        found = getattr(speed_rows, "training" if row == "training_over_bare_loop" else row)(plan, **common)
    cells = [cell_of(outcome, speed.TABLES[0]) for outcome in found]
    for cell in cells:
        where = cell["where"]
        if "W" in where:
            cell["arm"] = ", ".join([cell["arm"], f"W = {where['W']}", *filter(None, [where.get("positions")])])
            cell["where"] = {"run": f"{dtype}, batch {batch}"}
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", choices=[*ROWS, "all"], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--short", action="store_true", help="under a minute a row")
    parser.add_argument("--batch", type=int, nargs="+", help="rows at a time, in place of the row's own")
    parser.add_argument("--windows", type=int, nargs="+", help="W, in place of the row's own")
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--repeats", type=int, help="rounds; at least 5 for a number to quote")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu time, on a machine that is busy")
    parser.add_argument("--cpu", action="store_true", help="not on the GPU")
    parser.add_argument("--out", type=Path, help="results file; added to where it exists")
    args = parser.parse_args()
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    import torch

    from sidestream.experiments.provenance import provenance, write_whole
    from sidestream.experiments.results import check_results, load_results
    from sidestream.experiments.run import results_of
    from sidestream.papers.lsar.speed import NOTES

    torch.set_num_threads(args.threads)
    started = time.monotonic()
    command = shlex.join(["python", *sys.argv])
    origin = {**provenance(command), "data_hash": "random weights and text of seed 0"}
    asked = list(ROWS) if "all" in args.rows else args.rows
    cells: list[dict[str, Any]] = []
    plans = {}
    for row in dict.fromkeys(TWINS.get(row, row) for row in asked):
        plan = plan_for(row, short=args.short)
        changes: dict[str, Any] = dict(threads=args.threads, clock=args.clock, repeats=args.repeats or plan.repeats)
        if "fp32" not in args.dtype:
            changes["table"] = "speed_bf16"
        plan = replace(plan, windows=tuple(args.windows or plan.windows), **changes)
        plans[row] = plan
        for dtype in args.dtype:
            for batch in args.batch or plan.batches:
                print(f"{row}: {dtype}, batch {batch}, {torch.get_num_threads()} threads", flush=True)
                found = measured(row, plan, batch, dtype)
                for one in found:
                    samples = " ".join(f"{sample:.4g}" for sample in one["samples"])
                    print(f"  {one['metric']:<24} {one['arm']:<40} {one['value']:10.4g}   of {samples}", flush=True)
                cells += found
    settings = {row: {k: v for k, v in vars(plan).items() if k != "table"} for row, plan in plans.items()}
    results = results_of(plan, origin, started, notes=NOTES, cells=cells)
    results["settings"] = json.loads(json.dumps(settings))
    if args.out is not None:
        if args.out.exists():
            before = load_results(args.out)
            if before["commit"] != results["commit"]:
                raise SystemExit(f"{args.out} was measured at commit {before['commit'][:10]}; choose another --out")
            new = {(one["metric"], one["where"].get("run")) for one in cells}
            kept = [one for one in before["cells"] if (one["metric"], one["where"].get("run")) not in new]
            results["cells"] = kept + cells
            results["settings"] = {**before["settings"], **results["settings"]}
            results["dirty"] = results["dirty"] or before["dirty"]
            results["wall_s"] = round(results["wall_s"] + before["wall_s"], 1)
            results["command"] = f"{before['command']}; {results['command']}"
            check_results(results)
        write_whole(args.out, json.dumps(results, indent=1) + "\n")
    for row in asked:
        for run in dict.fromkeys(one["where"]["run"] for one in cells if one["metric"] == row):
            same = [one for one in cells if one["metric"] == row and one["where"]["run"] == run]
            for one in same:
                print(f"{row} {one['arm']} ({run}): {statistics.median(one['samples']):.3f}   {ROWS[row]}")


if __name__ == "__main__":
    main()
