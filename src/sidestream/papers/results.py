"""Results files: their format, what several seeds say together, and the tables of README made from them.

One file is one experiment, scale and seed (`results/TABLE/SCALE-seedK.json`). Values are fractions or ratios; percent
appears only where a table is printed.
"""

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sidestream.evaluation.stats import mean_sem, wilson
from sidestream.papers.names import HEADLINE_ATTACKS, METRICS, UTILITY_COLUMN, arm_name


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

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    def need(ok: bool, field: str, expected: str, got: Any) -> None:
        if not ok:
            raise ValueError(f"{source}: {field} must be {expected}, got {reprlib.repr(got)}")

    def keys(mapping: Mapping[str, Any], names: str, prefix: str = "") -> None:
        for name in names.split():
            if name not in mapping:
                raise ValueError(f"{source}: {prefix}{name} is missing")

    need(isinstance(results, dict), "the file", "a JSON object", results)
    keys(results, "table scale seed command commit dirty versions machine wall_s data_hash settings cells")
    for name in ("table", "command", "commit", "data_hash"):
        need(isinstance(results[name], str) and results[name] != "", name, "a non-empty string", results[name])
    scale, seed, wall = results["scale"], results["seed"], results["wall_s"]
    need(scale in ("smoke", "cpu", "paper"), "scale", "smoke, cpu or paper", scale)
    need(type(seed) is int and seed >= 0, "seed", "a whole number >= 0", seed)
    need(type(results["dirty"]) is bool, "dirty", "true or false", results["dirty"])
    need(number(wall) and wall >= 0, "wall_s", "seconds >= 0", wall)
    for name in ("versions", "settings"):
        need(isinstance(results[name], dict), name, "an object", results[name])
    need(isinstance(results["machine"], str | dict), "machine", "a string or an object", results["machine"])
    notes, cells = results.get("notes", []), results["cells"]
    need(isinstance(notes, list) and all(isinstance(note, str) for note in notes), "notes", "a list of strings", notes)
    need(isinstance(cells, list) and len(cells) > 0, "cells", "a non-empty list", cells)
    seen: dict[str, int] = {}
    for index, cell in enumerate(cells):
        at = f"cells[{index}]"
        need(isinstance(cell, dict), at, "an object", cell)
        keys(cell, "arm where metric value n ci paper", prefix=f"{at}.")
        value, n, ci, paper = cell["value"], cell["n"], cell["ci"], cell["paper"]
        for name in ("arm", "metric"):
            need(isinstance(cell[name], str) and cell[name] != "", f"{at}.{name}", "a non-empty string", cell[name])
        where_ok = isinstance(cell["where"], dict) and all(number(v) or type(v) is str for v in cell["where"].values())
        need(where_ok, f"{at}.where", "an object of numbers or strings", cell["where"])
        need(number(value), f"{at}.value", "a finite number", value)
        need(type(n) is int and n > 0, f"{at}.n", "a whole number > 0", n)
        need(paper is None or number(paper), f"{at}.paper", "a number or null", paper)
        ci_ok = ci is None or (isinstance(ci, list | tuple) and len(ci) == 2 and all(map(number, ci)))
        need(
            ci_ok and (ci is None or ci[0] - 1e-6 <= value <= ci[1] + 1e-6),
            f"{at}.ci",
            f"null or [low, high] around the value {value}",
            ci,
        )
        if cell["metric"] in METRICS:
            for name, given in (("value", value), ("paper", paper)):
                need(given is None or 0 <= given <= 1, f"{at}.{name}", "a fraction in 0..1, never percent", given)
        key = json.dumps([cell["arm"], cell["metric"], cell["where"]], sort_keys=True)
        if key in seen:
            raise ValueError(f"{source}: {at} repeats arm, where and metric of cells[{seen[key]}]")
        seen[key] = index


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell over its seeds: a mean, its spread, and the paper's value, all as fractions or ratios."""

    arm: str
    where: dict[str, Any]
    metric: str
    value: float
    sem: float | None
    """Standard error over seeds; None for one seed."""
    ci: tuple[float, float] | None
    """95% interval: the file's own for one seed, Wilson over the pooled problems for several."""
    n: int
    paper: float | None


def merge_seeds(results: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Cells of several seeds of one experiment, in the first file's order.

    The pooled interval treats the seeds' problems as independent draws; it stays None where a seed gives no interval
    or its value is no count over n. Raises ValueError when the seeds do not hold the same cells.
    """

    def by_key(result: Mapping[str, Any]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
        return {(c["arm"], c["metric"], json.dumps(c["where"], sort_keys=True)): c for c in result["cells"]}

    tables = [by_key(result) for result in results]
    entries = []
    for key, cell in tables[0].items():
        for result, table in zip(results, tables, strict=True):
            if key not in table or len(table) != len(tables[0]):
                raise ValueError(f"seeds {results[0]['seed']} and {result['seed']} hold different cells: rerun one")
        same = [table[key] for table in tables]
        values, n = [c["value"] for c in same], sum(c["n"] for c in same)
        ci, counts = cell["ci"], [c["value"] * c["n"] for c in same]
        if len(same) > 1:
            whole = all(c["ci"] and abs(k - round(k)) < 0.05 for c, k in zip(same, counts, strict=True))
            ci = wilson(sum(map(round, counts)), n) if whole else None
        mean, spread = mean_sem(values) if len(same) > 1 else (values[0], None)
        entries.append(
            Entry(
                arm=cell["arm"],
                where=cell["where"],
                metric=cell["metric"],
                value=mean,
                sem=spread,
                ci=ci and (ci[0], ci[1]),
                n=n,
                paper=cell["paper"],
            )
        )
    return entries


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """Cells as rows (metric, arm, other conditions) over the values of one condition, or of two where one of them
    leaves its usual value at a single value of the other only (every K at N = 5, each further N at K = 0)."""

    column: str
    columns: list[Any]
    """Values of `column`; for two conditions the headings themselves."""
    under: dict[Any, str]
    """What stands under a heading of two conditions: the other one."""
    fixed: dict[str, Any]
    """Conditions that every cell shares."""
    rows: dict[tuple[str, str, str], dict[Any, Entry]]
    """(metric, arm, other conditions in words) -> value of `column` -> entry."""

    def title(self, value: Any) -> tuple[str, str]:
        """Column heading and what stands under it: H is read against the window W, and names speak for themselves."""
        if value in self.under:
            return value, self.under[value]
        if self.column in ("attack", "condition"):
            return value, ""
        window = self.fixed.get("W", 0)
        ratio = f"{value / window:.3g} W" if self.column == "H" and window else ""
        return f"{self.column} = {value}", ratio


def pivot(entries: Sequence[Entry]) -> Pivot:
    """Put the condition with the most values in the columns, the rest into the rows. Of an audit's attacks those of
    `HEADLINE_ATTACKS`."""
    entries = _headline(entries)
    values: dict[str, dict[Any, None]] = {}
    for entry in entries:
        for name, value in entry.where.items():
            values.setdefault(name, {})[value] = None
    column = max(values, key=lambda name: len(values[name]), default="")
    fixed = {
        name: next(iter(seen))
        for name, seen in values.items()
        if name != column and len(seen) == 1 and all(name in entry.where for entry in entries)
    }
    second, usual = _second_condition(
        entries, column, [name for name in values if name != column and name not in fixed]
    )
    heads: dict[Any, str] = {}
    rows: dict[tuple[str, str, str], dict[Any, Entry]] = {}
    for metric in dict.fromkeys(entry.metric for entry in entries):
        for entry in (e for e in entries if e.metric == metric):
            rest = {k: v for k, v in entry.where.items() if k not in (column, second) and k not in fixed}
            place = entry.where.get(column)
            if second:
                first_head, second_head = (conditions({name: entry.where[name]}) for name in (column, second))
                place, under = (first_head, second_head) if entry.where[second] == usual else (second_head, first_head)
                heads[place] = under
            rows.setdefault((metric, entry.arm, conditions(rest)), {})[place] = entry

    def in_order(condition: str) -> list[Any]:
        seen = list(values.get(condition, {None: None}))
        return sorted(seen) if all(isinstance(value, int | float) for value in seen) else seen

    columns = in_order(column)
    if second:
        columns = [conditions({column: value}) for value in columns]
        columns += [conditions({second: value}) for value in in_order(second) if value != usual]
        column = f"{column} and {second}"
    return Pivot(column=column, columns=columns, under=heads, fixed=fixed, rows=rows)


def _headline(entries: Sequence[Entry]) -> list[Entry]:
    """Of an audit the attacks that a table has room for, utility in a column before them; all other entries as they
    are."""
    kept = []
    for entry in entries:
        attack = entry.where.get("attack")
        if entry.metric == "utility" and attack == "none":
            kept.append(replace(entry, metric="attack_success", where={**entry.where, "attack": UTILITY_COLUMN}))
        elif attack is None or (entry.metric == "attack_success" and attack in HEADLINE_ATTACKS):
            kept.append(entry)
    return kept


def _second_condition(entries: Sequence[Entry], column: str, others: Sequence[str]) -> tuple[str, Any]:
    """A condition that fits into the columns beside `column`, and its usual value; "" where none does."""
    for name in others:
        if not all({name, column} <= entry.where.keys() for entry in entries):
            continue
        met: dict[Any, set[Any]] = {}
        for entry in entries:
            met.setdefault(entry.where[name], set()).add(entry.where[column])
        usual = max(met, key=lambda value: len(met[value]))
        unusual = [places for value, places in met.items() if value != usual]
        if len(met[usual]) > 1 and all(len(places) == 1 and places == unusual[0] for places in unusual):
            return name, usual
    return "", None


def past_window(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """(H, W) nearest to H = 2 W among those with H > W where every arm has every metric; None where there is none."""
    held: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for entry in entries:
        held.setdefault((entry.where.get("H", 0), entry.where.get("W", 0)), set()).add((entry.arm, entry.metric))
    whole = {(entry.arm, entry.metric) for entry in entries}
    places = [(h, w) for (h, w), cells in held.items() if h > w > 0 and cells == whole]
    return min(places, key=lambda place: abs(math.log2(place[0] / (2 * place[1]))), default=None)


def conditions(where: Mapping[str, Any]) -> str:
    """Conditions in words; W = 0 stands for a window that holds everything."""
    return ", ".join("everything in view" if (k, v) == ("W", 0) else f"{k} = {v}" for k, v in where.items())


def number_text(value: float, metric: str) -> str:
    """Percent with one decimal for fractions, four digits for ratios; no unit."""
    return f"{100 * value:.1f}" if metric in METRICS else f"{value:.4g}"


def parts(entry: Entry) -> tuple[str, str, str]:
    """Value, interval and paper's value in words; empty where there is none."""
    ours = number_text(entry.value, entry.metric)
    if entry.sem is not None:
        ours += f" ± {number_text(entry.sem, entry.metric)}"
    interval = f"[{', '.join(number_text(end, entry.metric) for end in entry.ci)}]" if entry.ci else ""
    paper = f"paper {number_text(entry.paper, entry.metric)}" if entry.paper is not None else ""
    return ours, interval, paper


def span(numbers: Iterable[int]) -> str:
    """One number where all agree, else the lowest and the highest."""
    low, high = min(seen := list(numbers)), max(seen)
    return f"{low}" if low == high else f"{low} to {high}"


def reading(table: Pivot, seeds: Sequence[int]) -> str:
    """How to read the numbers: unit, spread, interval."""
    if not any(entry.ci or entry.sem for row in table.rows.values() for entry in row.values()):
        return "Medians over the rounds of one run, in which arms take turns."
    shares = {metric in METRICS for metric, _, _ in table.rows}
    unit = "" if shares == {False} else "Percent; " if shares == {True} else "Shares in percent; "
    if len(seeds) > 1:
        return (
            f"{unit}mean ± SEM over {len(seeds)} seeds; brackets: 95% Wilson interval over the problems of all seeds."
        )
    return f"{unit}brackets: 95% interval over the problems of one seed (it does not cover retraining)."


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested objects as one level of dotted names, for comparison and for printing."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    prefix = f"{name}." if name else ""
    return {key: leaf for part, inner in value.items() for key, leaf in flat(inner, f"{prefix}{part}").items()}


def markdown_table(results_files: Sequence[Path | str], names: Sequence[str] = ()) -> str:
    """README's table from results files of one table and scale, one file a seed; nothing else is read.

    With `names` of metrics, arms or both, only their rows. Raises ValueError for a missing or malformed file, a dirty
    or smoke run, a seed given twice, a name of neither, and files of other tables, scales, settings or cells.
    """
    if not results_files:
        raise ValueError("no results files given: a README table needs at least one")
    results = [load_results(path) for path in results_files]
    first = results[0]
    for path, result in zip(results_files, results, strict=True):
        if result["dirty"]:
            raise ValueError(f"{path}: from a dirty working tree; commit, rerun, then quote")
        if result["scale"] == "smoke":
            raise ValueError(f"{path}: a smoke run shows that the code runs, its numbers are not for quoting")
        for name in ("table", "scale", "settings"):
            ours, theirs = (
                {k: v for k, v in flat(r[name]).items() if k.split(".")[-1] not in ("seed", "models")}
                for r in (first, result)
            )
            if ours != theirs:
                raise ValueError(f"{path}: {name} differs from {results_files[0]}: seeds of one experiment only")
    seeds = [result["seed"] for result in results]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds {seeds}: one seed is given twice")
    table = pivot(merge_seeds(results))
    heads = [f"{head}<br>({ratio})" if ratio else head for head, ratio in map(table.title, table.columns)]
    lines = [f"| metric | arm | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads)]
    metrics, arms = ({key[place] for key in table.rows} & set(names) for place in (0, 1))
    if unknown := set(names) - metrics - arms:
        raise ValueError(f"{results_files[0]}: has neither a metric nor an arm {', '.join(sorted(unknown))}")
    last = ""
    for (metric, arm, rest), row in table.rows.items():
        if (metrics and metric not in metrics) or (arms and arm not in arms):
            continue
        cells = ["<br>".join(filter(None, parts(row[c]))) if c in row else "–" for c in table.columns]
        name = METRICS.get(metric, metric) if metric != last else ""
        who = ", ".join(filter(None, (arm_name(arm, first["table"]), rest)))
        lines.append(f"| {name} | {who} | {' | '.join(cells)} |")
        last = metric
    commits = ", ".join(f"`{commit[:10]}`" for commit in dict.fromkeys(result["commit"] for result in results))
    n = span(entry.n for row in table.rows.values() for entry in row.values())
    facts = [
        f"Scale `{first['scale']}`",
        conditions(table.fixed),
        f"n = {n} a cell",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
        f"commit {commits}",
    ]
    commands = "; ".join(f"`{command}`" for command in dict.fromkeys(result["command"] for result in results))
    lines += ["", f"{reading(table, seeds)} {', '.join(filter(None, facts))}. Repeat: {commands}."]
    return "\n".join(lines)


def update_readme(readme_path: Path | str, results_root: Path | str) -> bool:
    """Rewrite README's tables: what stands between `<!-- results:TABLE:SCALE -->` (or, for the rows of
    some metrics, arms or both, `<!-- results:TABLE:SCALE:NAME,NAME -->`) and `<!-- /results -->`.

    The numbers come from `RESULTS_ROOT/TABLE/SCALE-seed*.json` alone. Returns whether the file changed; a second call
    changes nothing. Raises ValueError, and leaves the file as it is, for a README without blocks, a block that does not
    end, missing or misfiled results, and all that `markdown_table` refuses.
    """
    readme = Path(readme_path)
    text = readme.read_text(encoding="utf-8")
    opening = r"<!-- results:([\w.-]+):(\w+)((?::[\w,]+)?) -->"
    block = re.compile(opening + r"\n(?:(?!<!-- results:).)*?<!-- /results -->", re.DOTALL)
    if not re.search(opening, text):
        raise ValueError(f"{readme}: no block <!-- results:TABLE:SCALE --> to fill")
    if len(block.findall(text)) != len(re.findall(opening, text)):
        raise ValueError(f"{readme}: a results block does not end; close it with <!-- /results -->")

    def fill(match: re.Match[str]) -> str:
        table, scale, chosen = match.groups()
        folder = Path(results_root) / table
        files = sorted(folder.glob(f"{scale}-seed*.json"), key=lambda path: (len(path.name), path.name))
        if not files:
            raise ValueError(f"{folder}: no {scale}-seed*.json; run `sidestream run {table} --scale {scale}`")
        for path in files:
            result = load_results(path)
            if (result["table"], result["scale"], f"{scale}-seed{result['seed']}.json") != (table, scale, path.name):
                raise ValueError(f"{path}: holds {result['table']} {result['scale']} seed {result['seed']}: misfiled")
        shown = markdown_table(files, [name for name in chosen[1:].split(",") if name])
        return f"<!-- results:{table}:{scale}{chosen} -->\n{shown}\n<!-- /results -->"

    filled = block.sub(fill, text)
    if filled != text:
        readme.write_text(filled, encoding="utf-8")
    return filled != text
