"""Sections of an audit's report: every attack under every defence, success over radius, authority over p."""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sidestream.experiments.report.figures import MARKERS
from sidestream.experiments.report.tables import number_text
from sidestream.experiments.results import Entry, merge_seeds
from sidestream.experiments.table import Look, load
from sidestream.papers import authority_pictures
from sidestream.papers.authority_pictures import CAPTION, authority_figure

DEFENCES = {
    "none": "no defence",
    "codes": "finite goal codes",
    "arbitration": "arbitration",
    "signed": "signed goals",
}
EXPLAINED = {
    "none": "nothing is attacked: right answers, and how often the attacker's comes by chance",
    "override": "a sentence that states the attacker's goal: among the distractors, or before the goal's text (head)",
    "any": "the attacker tries every override above",
    "prompt": "the text's own goal replaced by the attacker's",
    "token": "greedy coordinate gradient (GCG) from an override's words, fewer problems",
    "random": "control: random directions of that norm, the best of as many tries as PGD has steps",
    "interpolation": "that share of the way to the attacker's goal",
    "swap": "the vector of the attacker's goal",
    "PGD": "projected gradient descent in a ball of that radius",
    "unbounded": "Adam on the vector, as far as it likes",
    "both": "text and vector of the attacker's goal: a change of goal, which no defence here is meant to stop",
}
Draw = Callable[[str, str, Figure, str], str]


def sections(folder: Path, results: Mapping[str, Any], entries: Sequence[Entry], draw: Draw) -> list[str]:
    """HTML of what an audit, or a run of Table 5, shows besides its headline numbers.

    Args:
        folder: holds `authority.json` where the audited models are those of a run of Table 5.
        draw: (file name, alt text, figure, caption) to HTML.
    """
    if results["table"] == "lsar.table5":
        return authority_pictures.sections(entries, draw)
    looks = load("audit").looks([entry.arm for entry in entries])
    made = []
    over = [entry for entry in entries if _radius(entry) is not None and entry.metric == "attack_success"]
    if over:
        caption = (
            "Share of problems on which the vector attack gets the attacker's whole answer. Solid: PGD that knows the "
            "defence; dashed: random directions of the same norm. Bands: 95% intervals."
        )
        figure = draw("radius", "Attack success over radius", radius_figure(over, looks), caption)
        made.append(f"<h2>Attacks on the vector, over their radius</h2>{figure}")
    path = folder / "authority.json"
    if path.exists():
        cells = json.loads(path.read_text(encoding="utf-8"))
        figure = draw("authority", "Whose goal is reached, over p", authority_figure(_entries(cells)), CAPTION)
        made.append(f"<h2>Authority over p</h2>{figure}")
    for arm, look in looks.items():
        made.append(f"<h2>Every attack on {escape(look.name)}</h2>{attack_table(entries, arm, results['costs'][arm])}")
    return made


def _entries(cells: Sequence[Mapping[str, Any]]) -> list[Entry]:
    return merge_seeds([{"table": "lsar.table5", "seed": 0, "cells": cells}])


def _radius(entry: Entry) -> float | None:
    """The radius of PGD and of its control; None for other attacks."""
    kind, _, radius = entry.where["attack"].partition(" ")
    try:
        return float(radius) if kind in ("PGD", "random") else None
    except ValueError:
        return None


def radius_figure(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Figure:
    """Success over radius, one panel a defence, a line a model and attack."""
    defences = [name for name in DEFENCES if any(entry.where["defence"] == name for entry in entries)]
    figure = Figure(figsize=(10.5, 3.9), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(defences), sharey=True, squeeze=False)[0]
    for axis, defence in zip(axes, defences, strict=True):
        for i, arm in enumerate(looks):
            for kind, dash in (("PGD", "-"), ("random", ":")):
                points = sorted(
                    (_radius(e), 100 * e.value, *(100 * end for end in e.ci or (e.value, e.value)))
                    for e in entries
                    if e.arm == arm and e.where["defence"] == defence and e.where["attack"].startswith(kind)
                )
                if not points:
                    continue
                x, y, low, high = zip(*points, strict=True)
                style = {"color": looks[arm].color, "linestyle": dash, "marker": MARKERS[i % len(MARKERS)]}
                axis.plot(x, y, markersize=4, linewidth=1.6, clip_on=False, zorder=3 + i, **style)
                if kind == "PGD":
                    axis.fill_between(x, low, high, color=looks[arm].color, alpha=0.12, linewidth=0)
        axis.set_xscale("log")
        radii = sorted({radius for entry in entries if (radius := _radius(entry)) is not None})
        axis.set_xticks(radii, [f"{radius:g}" for radius in radii])
        axis.minorticks_off()
        axis.set_title(DEFENCES[defence])
        axis.set_xlabel("radius / norm of the vector")
        axis.set_ylim(0, 100)
    axes[0].set_ylabel("attack success, percent")
    handles = [
        Line2D([], [], color=look.color, marker=MARKERS[i % len(MARKERS)], markersize=4)
        for i, look in enumerate(looks.values())
    ]
    handles.append(Line2D([], [], color="#555555", linestyle=":"))
    names = [*(look.name for look in looks.values()), "random directions"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def attack_table(entries: Sequence[Entry], arm: str, costs: Mapping[str, Any]) -> str:
    """One model: attacks as rows, defences as columns; success and interval, what was kept and refused; the cost."""
    cell: dict[tuple[str, str, str], Entry] = {
        (e.where["attack"], e.where["defence"], e.metric): e for e in entries if e.arm == arm
    }
    heads = "".join(f"<th>{name}<small>attack success<br>kept / refused</small></th>" for name in DEFENCES.values())
    lines = [f"<thead><tr><th></th>{heads}<th>cost of a problem<small>without defence</small></th></tr></thead>"]
    for attack in dict.fromkeys(name for name, _, _ in cell):
        explained = next((words for key, words in EXPLAINED.items() if attack.split(" ")[0].rstrip(",") == key), "")
        if attack.endswith("out of view"):
            explained = "only the tracker sees the prompt and what is inserted; the decoder sees the end of the text"
        n = next(e.n for (name, _, _), e in cell.items() if name == attack)
        row = f'<th title="{escape(explained)}">{escape(attack)}<small>n = {n}</small></th>'
        for defence in DEFENCES:
            row += f"<td>{_cell_html(cell, attack, defence)}</td>"
        spent = costs.get(attack, {}).get("none")
        row += "<td></td>" if spent is None else f"<td>{_cost_html(spent)}</td>"
        lines.append(f"<tr>{row}</tr>")
    explained = "".join(f"<li><b>{escape(name)}</b>: {escape(words)}</li>" for name, words in EXPLAINED.items())
    legend = f"<details><summary>What the attacks are</summary><ul>{explained}</ul></details>"
    return f'<div class="wide"><table>{"".join(lines)}</table></div>{legend}'


def _cell_html(cell: Mapping[tuple[str, str, str], Entry], attack: str, defence: str) -> str:
    shown = [cell.get((attack, defence, metric)) for metric in ("attack_success", "accepted", "certified")]
    main = next((entry for entry in shown if entry is not None), None)
    if main is None:
        return ""
    interval = f"[{', '.join(number_text(end, share=main.share) for end in main.ci)}]" if main.ci else ""
    words = {"accepted": " accepted", "certified": " certified"}.get(main.metric, "")
    kept = cell.get((attack, defence, "fidelity")) or cell.get((attack, defence, "utility"))
    refused = cell.get((attack, defence, "refused"))
    rest = ""
    if kept is not None and refused is not None:
        both = " / ".join(number_text(entry.value, share=True) for entry in (kept, refused))
        rest = f"<small>{both}</small>"
    return f"<b>{number_text(main.value, share=main.share)}</b>{words}<small>{interval}</small>{rest}"


def _cost_html(spent: Mapping[str, float]) -> str:
    parts = [f"{spent['forwards']:,.0f} forward"]
    if spent["backwards"]:
        parts.append(f"{spent['backwards']:,.0f} backward")
    steps = f"<small>{spent['steps']:g} steps</small>" if spent["steps"] else ""
    return f"{', '.join(parts)}{steps}"
