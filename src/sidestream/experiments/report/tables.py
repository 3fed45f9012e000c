"""Numbers as tables: which condition goes into the columns, how a number is written, README's blocks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestream.experiments.results import Entry, load_results, merge_seeds
from sidestream.experiments.settings import flat
from sidestream.experiments.table import Table, load


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
    plain: bool = False
    """Values of `column` speak for themselves."""

    def title(self, value: Any) -> tuple[str, str]:
        """Column heading and what stands under it: H is read against the window W, and names speak for themselves."""
        if value in self.under:
            return value, self.under[value]
        if self.plain:
            return value, ""
        window = self.fixed.get("W", 0)
        ratio = f"{value / window:.3g} W" if self.column == "H" and window else ""
        return f"{self.column} = {value}", ratio

    def by_metric(self) -> dict[str, dict[tuple[str, str], dict[Any, Entry]]]:
        """The rows of each metric, by arm and other conditions."""
        found: dict[str, dict[tuple[str, str], dict[Any, Entry]]] = {}
        for (metric, arm, rest), row in self.rows.items():
            found.setdefault(metric, {})[arm, rest] = row
        return found

    def count(self, metric: str) -> str:
        """n of a metric's cells."""
        return span(entry.n for (of, _, _), row in self.rows.items() if of == metric for entry in row.values())


def pivot(entries: Sequence[Entry], table: Table) -> Pivot:
    """Put the condition with the most values in the columns, the rest into the rows; of what the table shows."""
    entries = table.shown(entries)
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
    return Pivot(column=column, columns=columns, under=heads, fixed=fixed, rows=rows, plain=column in table.plain)


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


def conditions(where: Mapping[str, Any]) -> str:
    """Conditions in words; W = 0 stands for a window that holds everything."""
    return ", ".join("everything in view" if (k, v) == ("W", 0) else f"{k} = {v}" for k, v in where.items())


def number_text(value: float, *, share: bool) -> str:
    """Percent with one decimal for fractions, four digits for ratios; no unit."""
    return f"{100 * value:.1f}" if share else f"{value:.4g}"


def parts(entry: Entry) -> tuple[str, str, str]:
    """Value, interval and paper's value in words; empty where there is none."""

    def text(number: float) -> str:
        return number_text(number, share=entry.share)

    ours = text(entry.value) + ("" if entry.spread is None else f" ± {text(entry.spread)}")
    interval = f"[{', '.join(map(text, entry.ci))}]" if entry.ci else ""
    return ours, interval, "" if entry.paper is None else f"paper {text(entry.paper)}"


def span(numbers: Iterable[int]) -> str:
    """One number where all agree, else the lowest and the highest."""
    low, high = min(seen := list(numbers)), max(seen)
    return f"{low}" if low == high else f"{low} to {high}"


def reading(table: Pivot, seeds: Sequence[int], *, merged: bool = False) -> str:
    """How to read the numbers: unit, spread, interval. `merged`: they come from a results file of several seeds."""
    entries = [entry for row in table.rows.values() for entry in row.values()]
    if not any(entry.ci or entry.spread for entry in entries):
        return "Medians over the rounds of one run, in which arms take turns."
    shares = {entry.share for entry in entries}
    unit = "" if shares == {False} else "Percent; " if shares == {True} else "Shares in percent; "
    if merged:
        return f"{unit}mean ± deviation over {len(seeds)} seeds; brackets: 95% interval that covers retraining."
    if len(seeds) > 1:
        return (
            f"{unit}mean ± SEM over {len(seeds)} seeds; brackets: 95% Wilson interval over the problems of all seeds."
        )
    return f"{unit}brackets: 95% interval over the problems of one seed (it does not cover retraining)."


def markdown_table(results_files: Sequence[Path | str], names: Sequence[str] = ()) -> str:
    """README's table from results files of one table and scale, one file a seed or one of all; nothing else is read.

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
    seeds = [seed for result in results for seed in result.get("seeds", [result["seed"]])]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds {seeds}: one seed is given twice")
    names_of = load(first["table"])
    table = pivot(merge_seeds(results), names_of)
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
        name = names_of.metric(metric).title if metric != last else ""
        who = ", ".join(filter(None, (names_of.arm(arm), rest)))
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
    lines += [
        "",
        f"{reading(table, seeds, merged='seeds' in first)} {', '.join(filter(None, facts))}. Repeat: {commands}.",
    ]
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
        files = sorted(folder.glob(f"{scale}-seed[0-9]*.json"), key=lambda path: (len(path.name), path.name))
        files = list(folder.glob(f"{scale}-seeds.json")) or files
        if not files:
            raise ValueError(f"{folder}: no {scale}-seed*.json; run `sidestream run {table} --scale {scale}`")
        for path in files:
            result = load_results(path)
            own = f"{scale}-seed{'s' if 'seeds' in result else result['seed']}.json"
            if (result["table"], result["scale"], own) != (table, scale, path.name):
                raise ValueError(f"{path}: holds {result['table']} {result['scale']} seed {result['seed']}: misfiled")
        shown = markdown_table(files, [name for name in chosen[1:].split(",") if name])
        return f"<!-- results:{table}:{scale}{chosen} -->\n{shown}\n<!-- /results -->"

    filled = block.sub(fill, text)
    if filled != text:
        readme.write_text(filled, encoding="utf-8")
    return filled != text
