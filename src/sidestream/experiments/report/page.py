"""One self-contained HTML page from a run directory, with its pictures as PNGs beside it. Reads files only.

`results.json`, every `metrics.jsonl` below the directory, `tsne.json` where there is one, and what the table's own
sections ask for. Numbers, t-SNE, loss curves and provenance come with any results file; a table that wants more gives
`Table.sections`, a generator of `Section`s that is handed the `Page`.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from sidestream.experiments.report import figures
from sidestream.experiments.report.tables import conditions, parts, pivot, reading
from sidestream.experiments.results import Entry, load_results, merge_seeds
from sidestream.experiments.settings import flat
from sidestream.experiments.table import Look, Table, load

Made = TypeVar("Made")
TEMPLATES = Environment(
    loader=PackageLoader("sidestream.experiments.report", "."), autoescape=True, undefined=StrictUndefined
)
TEMPLATES.filters["json"] = json.dumps


class Section(NamedTuple):
    """A heading of the page and what stands under it."""

    title: str
    body: Markup


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a table's sections are made from."""

    folder: Path
    """The run directory."""
    results: Mapping[str, Any]
    """Its results file."""
    table: Table
    entries: list[Entry]
    """The results' cells."""
    looks: Mapping[str, Look]
    """Arm -> name and colour."""

    def figure(self, name: str, alt: str, figure: Figure, caption: str, *, narrow: bool = False) -> Markup:
        """Save the PNG beside the page and embed the same bytes."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        (self.folder / f"{name}.png").write_bytes(buffer.getvalue())
        data = base64.b64encode(buffer.getvalue()).decode()
        image = Markup('<img alt="{}" src="data:image/png;base64,{}">').format(alt, data)
        return self.framed(image, caption, narrow=narrow)

    def framed(self, drawn: Markup, caption: str, *, narrow: bool = False) -> Markup:
        """A picture with its caption."""
        kind = Markup(" class=narrow") if narrow else ""
        return Markup("<figure{}>{}<figcaption>{}</figcaption></figure>").format(kind, drawn, caption)

    def ladder(self, entries: Sequence[Entry]) -> Markup:
        """Arms as rows in their order, of entries that share one condition; beside each value the change from the row
        above."""
        arms, metrics = (list(dict.fromkeys(getattr(e, name) for e in entries)) for name in ("arm", "metric"))
        cells = {(entry.arm, entry.metric): entry for entry in entries}
        titles = {metric: self.table.metric(metric).title for metric in metrics}
        draw: Any = TEMPLATES.get_template("macros.html").module
        return draw.ladder(arms, metrics, titles, cells, self.looks, parts)

    def beside(self, name: str, use: Callable[[Any], Made]) -> list[Made]:
        """What `use` makes of the JSON file `name` beside the results; nothing where there is none.

        Raises:
            ValueError: the file is not what `use` expects, in one line.
        """
        path = self.folder / name
        if not path.exists():
            return []
        try:
            return [use(json.loads(path.read_text(encoding="utf-8")))]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            said = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else error
            raise ValueError(f"{path}: cannot be drawn ({said}); delete it or repeat the run") from None

    def entries_beside(self, name: str) -> list[Entry]:
        """The cells of outcomes that were kept beside the results (`Outcome.beside`); none where there are none."""

        def read(found: Any) -> list[Entry]:
            # Runs from before outcomes were kept have another file of that name: their report comes without its figure.
            return merge_seeds([{**self.results, "cells": found.get("cells", [])}])

        return [entry for entries in self.beside(f"{name}.json", read) for entry in entries]


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` and its PNGs into a run directory; returns the page's path.

    Raises ValueError in one line where `results.json` is missing or malformed, or `tsne.json` does not fit.
    """
    run_dir = Path(run_dir)
    results = load_results(run_dir / "results.json")
    table, entries = load(results["table"]), merge_seeds([results])
    losses, unreadable = _read_losses(run_dir)
    tsne = _read_tsne(run_dir / "tsne.json")
    logged = sorted(arm for curves in losses.values() for arm in curves)
    looks = table.looks([entry.arm for entry in entries] + logged + list(tsne.get("arms", [])))
    page = Page(folder=run_dir, results=results, table=table, entries=entries, looks=looks)
    with figures.style():
        sections = list(table.sections(page))
        if tsne:
            sections.append(_tsne_section(page, tsne))
        if losses:
            torn = f" Left out: {unreadable} lines of the logs that could not be read." if unreadable else ""
            caption = (
                "Faint: every logged value; strong: running mean. Stages have objectives of their own, so losses "
                f"compare within a panel only.{torn}"
            )
            drawn = page.figure("loss", "Training loss", figures.loss_figure(losses, looks), caption)
            sections.append(Section("Training loss", drawn))
    path = run_dir / "report.html"
    path.write_text(_html(page, sections), encoding="utf-8")
    return path


def _tsne_section(page: Page, tsne: Mapping[str, Any]) -> Section:
    facts = {**next(iter(tsne["arms"].values())), **tsne}
    where = ", ".join(f"{name} = {facts[name]:.3g}" for name in ("H", "W", "perplexity") if name in facts)
    caption = (
        f"Decoder states where the item is to be named, the passcode before it forced ({where}); a mark is a problem, "
        "colour and shape its item. Only neighbourhoods mean something: axes and distances between clusters do not. "
        "The silhouette is 1 for tight clusters by goal and about 0 or below for a mixture."
    )
    drawn = page.figure("tsne", "Decoder states by goal", figures.tsne_figure(tsne["arms"], page.looks), caption)
    return Section("Decoder states by goal, t-SNE (Fig. 4b)", drawn)


def _read_losses(run_dir: Path) -> tuple[dict[str, dict[str, dict[int, float]]], int]:
    """stage -> arm -> step -> loss from every metrics.jsonl, and how many lines could not be read.

    A killed run leaves a torn line and, resumed, logs some steps again: the torn line is counted, the last value wins.
    """
    losses: dict[str, dict[str, dict[int, float]]] = {}
    unreadable = 0
    for path in sorted(run_dir.rglob("metrics.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                if line.get("loss") is not None:
                    curve = losses.setdefault(str(line["stage"]), {}).setdefault(str(line["arm"]), {})
                    curve[int(line["step"])] = float(line["loss"])
            except (ValueError, KeyError, TypeError, AttributeError):
                unreadable += 1
    return {stage: losses[stage] for stage in sorted(losses)}, unreadable


def _read_tsne(path: Path) -> dict[str, Any]:
    """The file with its arms checked; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        tsne = json.loads(path.read_text(encoding="utf-8"))
        for arm, states in tsne["arms"].items():
            if np.asarray(states["xy"], dtype=float).shape != (len(states["label"]), 2):
                raise ValueError(f"arm {arm} needs one [x, y] for each of its {len(states['label'])} labels")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a t-SNE file ({error}); delete it or repeat the run") from None
    return tsne


def _html(page: Page, sections: list[Section]) -> str:
    results, table = page.results, pivot(page.entries, page.table)
    minutes, seconds = divmod(round(results["wall_s"]), 60)
    doubts = ["the working tree had uncommitted changes"] if results["dirty"] else []
    doubts += ["a smoke run shows that the code runs, not what it achieves"] if results["scale"] == "smoke" else []
    window = table.fixed.get("W")
    past = [c for c in table.columns if table.column == "H" and window and c > window]
    several = results.get("seeds", [])
    wall = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    run: dict[str, Any] = {
        "commit": results["commit"] + (" (with uncommitted changes)" if results["dirty"] else ""),
        "scale": results["scale"],
        "seeds" if several else "seed": several or results["seed"],
        "wall time": wall,
        "data hash": results["data_hash"],
    }
    machine = results["machine"]
    return TEMPLATES.get_template("page.html").render(
        heading=page.table.heading,
        results={"notes": [], **results},
        seeds=f"{len(several)} seeds ({', '.join(map(str, several))})" if several else f"one seed ({results['seed']})",
        wall=wall,
        doubts=doubts,
        lead=list(page.table.lead(page.entries, page.looks)),
        table=table,
        title_of=lambda metric: page.table.metric(metric).title,
        looks=page.looks,
        parts=parts,
        edge=lambda column: Markup(' class="edge"') if past and column == past[0] else "",
        edge_note="The vertical line stands before the first H beyond W." if table.column == "H" and window else "",
        fixed=conditions(table.fixed),
        reading=reading(table, several or [results["seed"]], merged=bool(several)),
        sections=sections,
        run=run | (flat(machine) if isinstance(machine, dict) else {"machine": machine}),
        settings=flat(results["settings"]),
    )
