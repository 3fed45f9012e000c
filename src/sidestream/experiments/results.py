"""From outcomes, one number a problem, to what is said of them: values, intervals, paired tests, several seeds.

One results file is one experiment, scale and seed (`results/TABLE/SCALE-seedK.json`), or several seeds together. Values
are fractions or ratios; percent appears only where a table is printed.
"""

from __future__ import annotations

import json
import reprlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidestream.evaluation.stats import (
    McNemar,
    mcnemar_exact,
    mean_and_band,
    mean_sem,
    paired_bootstrap,
    retrained,
    wilson,
)
from sidestream.experiments.table import Table, load


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One measurement: a number for each problem (or for each round of what is timed)."""

    arm: str
    """Whose."""
    metric: str
    """What of."""
    where: dict[str, Any]
    """Condition -> its value, a number or a word."""
    values: Sequence[float]
    """In the order of the problems, which is the same for all arms: paired tests rely on it."""
    beside: str = ""
    """Kept out of the results, in the file BESIDE.json for a figure."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else its cell records."""


def cell(outcome: Outcome, table: Table) -> dict[str, Any]:
    """The results cell of an outcome: value, n, 95% interval over problems, the paper's value."""
    values, n = [float(value) for value in outcome.values], len(outcome.values)
    kind = table.metric(outcome.metric).kind
    value, interval, facts = sum(values) / n, None, dict(outcome.facts)
    if kind == "share":
        # Of fractions within a problem it is Wilson's at the same mean, which is conservative.
        low, high = wilson(round(value * n), n)
        interval = [min(low, value), max(high, value)]
    elif kind == "mean" or kind == "bootstrap" and n == 1:
        value, *interval = mean_and_band(values)
    elif kind == "bootstrap":
        value, *interval = paired_bootstrap(values, [0.0] * n)
    else:
        value = statistics.median(values)
        facts = {"samples": [float(f"{sample:.6g}") for sample in values], **facts}
    return {
        "arm": outcome.arm,
        "where": outcome.where,
        "metric": outcome.metric,
        "value": value,
        "n": n,
        "ci": interval,
        "paper": table.paper(outcome.arm, outcome.metric, outcome.where),
        **facts,
    }


def compared(first: Outcome, second: Outcome) -> McNemar:
    """Two outcomes over the same problems: does one succeed more often?"""
    return mcnemar_exact([value == 1 for value in first.values], [value == 1 for value in second.values])


# ---------------------------------------------------------------- the file


def load_results(path: Path | str) -> dict[str, Any]:
    """Read one results file. Raises ValueError with one line that names the file and the first field that is wrong."""
    path = Path(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such results file; make it with `sidestream run`") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged, repeat the run") from None
    check_results(results, source=str(path))
    return results


def check_results(results: Any, *, source: str = "results") -> None:
    """Check the format of a results file; writers call it before they write.

    `source` opens the message. Raises ValueError: which field, what was expected, what was found.
    """
    from pydantic import ValidationError

    from sidestream.experiments.format import FIELDS, Results

    try:
        Results.model_validate(results)
    except ValidationError as problems:
        error = problems.errors(include_url=False)[0]
        raise ValueError(f"{source}: {_complaint(results, error, FIELDS)}") from None
    table, seen = load(results["table"]), dict[str, int]()
    for index, each in enumerate(results["cells"]):
        at, value, ci = f"cells[{index}]", each["value"], each["ci"]
        if ci and not ci[0] - 1e-6 <= value <= ci[1] + 1e-6:
            raise ValueError(f"{source}: {at}.ci must be null or [low, high] around the value {value}, got {ci}")
        for name in ("value", "paper"):
            if table.metric(each["metric"]).kind == "share" and not 0 <= (each[name] or 0) <= 1:
                raise ValueError(f"{source}: {at}.{name} must be a fraction in 0..1, never percent, got {each[name]}")
        key = _key(each)
        if key in seen:
            raise ValueError(f"{source}: {at} repeats arm, where and metric of cells[{seen[key]}]")
        seen[key] = index


def _complaint(results: Any, error: Any, known: Mapping[str, Any]) -> str:
    """The library's complaint in words of the format; of a value inside a field the field is named."""
    where = list(error["loc"])
    while where and where[-1] not in known and not (len(where) == 2 and where[0] == "cells"):
        where.pop()
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
    if error["type"] == "missing":
        return f"{name} is missing"
    given = results
    for part in where:
        given = given[part]
    if not where:
        return f"the file must be a JSON object, got {reprlib.repr(given)}"
    if isinstance(where[-1], int):
        return f"{name} must be an object, got {reprlib.repr(given)}"
    return f"{name} must be {known[where[-1]].description}, got {reprlib.repr(given)}"


def _key(each: Mapping[str, Any]) -> str:
    return json.dumps([each["arm"], each["metric"], each["where"]], sort_keys=True)


# ---------------------------------------------------------------- seeds


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell over its seeds: a mean, its spread, and the paper's value, all as fractions or ratios."""

    arm: str
    where: dict[str, Any]
    metric: str
    value: float
    spread: float | None
    """Standard error over seeds, or in a results file of several seeds their deviation; None for one seed."""
    ci: tuple[float, float] | None
    """95% interval: the file's own for one file, Wilson over the pooled problems for several."""
    n: int
    paper: float | None
    share: bool
    """Printed in percent."""


def merge_seeds(results: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Cells of several seeds of one experiment, in the first file's order.

    The pooled interval treats the seeds' problems as independent draws; it stays None where a seed gives no interval
    or its value is no count over n. Raises ValueError when the seeds do not hold the same cells.
    """
    table, entries = load(results[0]["table"]), []
    for same in _side_by_side(results):
        values, n, each = [c["value"] for c in same], sum(c["n"] for c in same), same[0]
        ci, counts = each["ci"], [c["value"] * c["n"] for c in same]
        mean, spread = values[0], each.get("deviation")
        if len(same) > 1:
            whole = all(c["ci"] and abs(k - round(k)) < 0.05 for c, k in zip(same, counts, strict=True))
            ci = wilson(sum(map(round, counts)), n) if whole else None
            mean, spread = mean_sem(values)
        entries.append(
            Entry(
                arm=each["arm"],
                where=each["where"],
                metric=each["metric"],
                value=mean,
                spread=spread,
                ci=ci and (ci[0], ci[1]),
                n=n,
                paper=each["paper"],
                share=table.metric(each["metric"]).kind == "share",
            )
        )
    return entries


def over_seeds(results: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """The results file of several seeds: each cell's mean, deviation and values, and an interval that covers
    retraining (`evaluation.stats.retrained`)."""
    first, table = results[0], load(results[0]["table"])
    cells = []
    for same in _side_by_side(results):
        values, share = [c["value"] for c in same], table.metric(same[0]["metric"]).kind == "share"
        low, high = retrained(values, [c["ci"] for c in same if c["ci"]], share=share)
        kept = {name: same[0][name] for name in ("arm", "where", "metric", "paper")}
        cells.append(
            {**kept, "value": statistics.fmean(values), "n": sum(c["n"] for c in same), "ci": [low, high]}
            | {"deviation": statistics.stdev(values), "seeds": values}
        )
    settings = {name: value for name, value in first["settings"].items() if name != "seed"}
    commits = {result["commit"] for result in results}
    merged = {
        **{name: first[name] for name in ("table", "scale", "seed", "commit", "versions", "machine", "data_hash")},
        "seeds": [result["seed"] for result in results],
        "command": command,
        "dirty": any(result["dirty"] for result in results) or len(commits) > 1,
        "wall_s": round(sum(result["wall_s"] for result in results), 1),
        "settings": settings,
        "notes": list(dict.fromkeys(note for result in results for note in result.get("notes", []))),
        "cells": cells,
    }
    check_results(merged)
    return merged


def _side_by_side(results: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    tables = [{_key(each): each for each in result["cells"]} for result in results]
    for result, table in zip(results, tables, strict=True):
        if table.keys() != tables[0].keys():
            raise ValueError(f"seeds {results[0]['seed']} and {result['seed']} hold different cells: rerun one")
    return [[table[key] for table in tables] for key in tables[0]]
