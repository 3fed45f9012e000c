"""What a table is, and which tables there are.

A table lives in one file of `papers/`, whatever its folder, and is there by existing: nothing else names it. The file
has

    LISTED = {"my.table": {"title": "one line", "smoke": "what it costs", "cpu": "...", "paper": "..."}}
    TABLES = [Table(name="my.table", heading="...", at=my_table, work=MyWork, metrics=..., arms=...)]

`LISTED` is a literal, because `sidestream tables` reads it without importing the file (and torch with it). `at` makes
the settings at a scale, `work` (a subclass of `experiments.run.Work`) does what is done, `metrics` and `arms` say how
numbers and arms are named and drawn, `paper` the published values, `sections` the figures.

Folders named in the environment variable SIDESTREAM_TABLES are searched as well: a table of your own needs no fork.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

# One colour an architecture in every picture: Okabe and Ito's colours, the baseline grey.
GREY, BLACK, BLUE, RED, GREEN = "#7a7a7a", "#333333", "#0072b2", "#d55e00", "#009e73"
ORANGE, SKY, PINK, WINE, TEAL, INDIGO = "#e69f00", "#56b4e9", "#cc79a7", "#882255", "#44aa99", "#332288"
BROWN, FOREST, OLIVE = "#a0522d", "#117733", "#999933"
SPARE = (ORANGE, SKY, WINE, TEAL, INDIGO, OLIVE, BROWN)
"""For arms that no table gives a colour."""


class Look(NamedTuple):
    """How an arm appears in tables and pictures."""

    name: str
    color: str = ""
    """Empty: one that is left."""
    dashed: bool = False
    """It has another arm's architecture, hence its colour, and other data or another training."""


class Metric(NamedTuple):
    """How a metric is called and what its numbers are."""

    title: str
    kind: Literal["share", "mean", "bootstrap", "median"] = "share"
    """`share`: in 0..1 for each problem, printed in percent, Wilson's interval. `mean`: any number, the mean's interval
    by the normal approximation. `bootstrap`: the same, by resampling problems. `median`: of rounds of one run, without
    an interval."""
    chance: float | None = None
    """What guessing gives."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One experiment by name."""

    name: str
    """What `sidestream run` calls it, and its results."""
    heading: str
    """The report's."""
    at: Callable[[Any], Any]
    """Scale -> the table's settings, a dataclass that begins as `Settings` does."""
    work: Any
    """The class that does it, of settings and directory (`experiments.run.Work`)."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metric -> name and kind."""
    unnamed: Literal["mean", "median"] = "mean"
    """The kind of a metric that is not named there, and keeps its own name."""
    arms: Mapping[str, Look] = field(default_factory=dict)
    """Arm -> name and look. One that is not named here keeps its own words."""
    paper: Callable[[str, str, dict[str, Any]], float | None] = lambda arm, metric, where: None
    """The paper's value for (arm, metric, where), or None."""
    lead: Callable[[Sequence[Any], Mapping[str, Look]], Iterable[str]] = lambda entries, looks: ()
    """Entries and looks -> the lines that a report opens with."""
    shown: Callable[[Sequence[Any]], Sequence[Any]] = lambda entries: entries
    """Entries -> those that stand in the main table."""
    sections: Callable[[Any], Iterator[Any]] = lambda page: iter(())
    """`report.page.Page` -> its own `Section`s."""
    plain: tuple[str, ...] = ()
    """Conditions whose values are read without the condition's name."""
    about: str = ""
    """Stands above the help of its command."""
    flops: Callable[[Any], float] = lambda settings: 0.0
    """Settings -> a rough guess at the cost of training, for a warning at paper scale without a GPU."""
    alone: bool = False
    """One job at a time, in this process: what runs beside it would disturb what is timed."""

    def metric(self, name: str) -> Metric:
        """How a metric is called, and what its numbers are."""
        return self.metrics.get(name) or Metric(name, self.unnamed)

    def arm(self, name: str) -> str:
        """What an arm is called."""
        return self.arms[name].name if name in self.arms else name.replace("_", " ")

    def looks(self, arms: Iterable[str]) -> dict[str, Look]:
        """Name and colour by arm, in the order given: known colours are fixed, the others take what is left in turn."""
        names = list(dict.fromkeys(arms))
        taken = {self.arms[arm].color for arm in names if arm in self.arms}
        spare = [color for color in SPARE if color not in taken] or list(SPARE)
        found, others = {}, 0
        for arm in names:
            look = self.arms.get(arm, Look(self.arm(arm)))
            if not look.color:
                look, others = look._replace(color=spare[others % len(spare)]), others + 1
            found[arm] = look
        return found


class Listed(NamedTuple):
    """What is known of a table without importing it."""

    module: str
    title: str
    costs: dict[str, str]
    """Scale -> what a run costs, in words."""
    argument: str = ""
    """The table is a command of its own, which takes this field first (`sidestream audit MODEL`)."""


def listed() -> dict[str, Listed]:
    """Every table by name, as `LISTED` in the files of `papers/` has it.

    Raises:
        ValueError: two files have a table of the same name.
    """
    package, found = import_module("sidestream.papers"), {}
    for folder in package.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "LISTED = " not in text:
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join([package.__name__, *(part for part in parts if part != "__init__")])
            for name, about in _literal(text, path).items():
                if name in found:
                    raise ValueError(
                        f"{path}: the table {name} is in {found[name].module} already; choose another name"
                    )
                rest = {key: value for key, value in about.items() if key not in ("title", "argument")}
                found[name] = Listed(module, about["title"], rest, about.get("argument", ""))
    return dict(sorted(found.items()))


def _literal(text: str, path: Path) -> dict[str, Any]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "LISTED":
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                raise ValueError(f"{path}: LISTED must be a literal, as it is read without running the file") from None
    return {}


@cache
def load(name: str) -> Table:
    """A table by name; imports its file. Results of a name that no file has are read by a table that knows nothing."""
    known = listed().get(name)
    if known is None:
        return Table(name=name, heading=name, at=_unknown, work=None)
    return next(table for table in import_module(known.module).TABLES if table.name == name)


def _unknown(scale: str) -> Any:
    raise ValueError(f"there is no such table at scale {scale}; see sidestream tables")
