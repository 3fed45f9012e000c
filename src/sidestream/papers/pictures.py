"""The pictures of a report as matplotlib figures. No pyplot: nothing global is opened, so nothing needs closing.

Every figure stands on white, also in a page shown dark. `style()` is the context to draw and save them in.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from sidestream.papers.names import CHANCE, METRICS, arm_name
from sidestream.papers.results import Entry

# One colour an architecture in every picture: Okabe and Ito's colours, the baseline grey.
COLORS = {
    "baseline": "#7a7a7a",
    "static_faithful": "#d55e00",
    "static": "#0072b2",
    "dynamic": "#009e73",
    "dynamic_no_stage2": "#e69f00",
    "alpha_zero": "#56b4e9",
    "random_film": "#cc79a7",
    "random_film_dynamic": "#882255",
    "baseline_pool": "#7a7a7a",
    "static_pool": "#0072b2",
    "dynamic_pool": "#009e73",
    "dynamic_state": "#d55e00",
    "no_cot": "#7a7a7a",
    "cot": "#333333",
    "icot": "#117733",
    "pause": "#e69f00",
    "pause_multi": "#e69f00",
    "coconut": "#0072b2",
    "coconut_sim": "#0072b2",
    "coconut_mlp": "#56b4e9",
    "agclr": "#d55e00",
    "agclr_sim": "#d55e00",
    "agclr_no_read": "#009e73",
    "agclr_no_write": "#cc79a7",
    "agclr_write2": "#cc79a7",
    "agclr_no_forget": "#882255",
    "agclr_random_gates": "#332288",
    "agclr_first": "#44aa99",
    "agclr_identity": "#a0522d",
}
OTHER_COLORS = ("#e69f00", "#56b4e9", "#882255", "#44aa99", "#332288", "#999933", "#a0522d")
DASHED = (
    "baseline_pool",
    "static_pool",
    "dynamic_pool",
    "pause_multi",
    "coconut_sim",
    "agclr_sim",
    "agclr_write2",
)
"""Arms that have another arm's architecture, hence its colour, and other data or another training."""
GOAL_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
MARKERS = "osD^vPX<>*"
PAPER = {"linestyle": "none", "marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.4}


def style() -> AbstractContextManager[None]:
    """Context with the look of all pictures."""
    look: dict[Any, Any] = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#555555",
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "axes.axisbelow": True,
        "legend.frameon": False,
        "savefig.facecolor": "white",
    }
    return matplotlib.rc_context(look)


class Look(NamedTuple):
    """How an arm appears in the pictures and tables of one report."""

    name: str
    color: str
    dashed: bool = False


def arm_looks(table: str, arms: Iterable[str]) -> dict[str, Look]:
    """Name and colour by arm, in the order given: known colours are fixed, the others take what is left in turn."""
    arms = list(dict.fromkeys(arms))
    taken = {COLORS[arm] for arm in arms if arm in COLORS}
    spare = [color for color in OTHER_COLORS if color not in taken] or list(OTHER_COLORS)
    others = [arm for arm in arms if arm not in COLORS]
    colors = COLORS | {arm: spare[i % len(spare)] for i, arm in enumerate(others)}
    return {arm: Look(arm_name(arm, table), colors[arm], arm in DASHED) for arm in arms}


def draw_curves(axis: Axes, entries: Sequence[Entry], x: str, looks: Mapping[str, Look]) -> None:
    """One line an arm over condition `x`, in percent: intervals as bands, the paper's values as rings."""
    arms = list(dict.fromkeys(entry.arm for entry in entries))
    for i, arm in enumerate(arms):
        points = sorted((e for e in entries if e.arm == arm), key=lambda e: e.where[x])
        # Arms often coincide at 0 or 100: earlier lines are wider, so that a later one on top leaves an edge to see.
        extra = 2.5 * (len(arms) - 1 - i) / max(1, len(arms) - 1)
        axis.plot(
            [e.where[x] for e in points],
            [100 * e.value for e in points],
            color=looks[arm].color,
            label=looks[arm].name,
            linewidth=1.5 + extra,
            marker=MARKERS[i % len(MARKERS)],
            markersize=5 + extra,
            markeredgecolor="white",
            markeredgewidth=0.6,
            clip_on=False,
            zorder=3 + i,
        )
        bands = [(e.where[x], 100 * e.ci[0], 100 * e.ci[1]) for e in points if e.ci]
        if bands:
            at, low, high = zip(*bands, strict=True)
            axis.fill_between(at, low, high, color=looks[arm].color, alpha=0.18, linewidth=0)
        cited = [(e.where[x], 100 * e.paper) for e in points if e.paper is not None]
        if cited:
            axis.plot(*zip(*cited, strict=True), **PAPER, color=looks[arm].color, clip_on=False, zorder=30)
    axis.set_ylim(0, 100)


def recall_figure(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Figure:
    """Recall over the distance H, one panel a metric, the window W marked (LS-AR, Fig. 4a)."""
    metrics = list(dict.fromkeys(entry.metric for entry in entries))
    figure = Figure(figsize=(10.5, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        chosen = [entry for entry in entries if entry.metric == metric]
        draw_curves(axis, chosen, "H", looks)
        axis.set_title(METRICS[metric], pad=10)
        axis.set_xlabel("H, tokens between prompt and question (log scale)")
        axis.set_xscale("log", base=2)
        windows = sorted({entry.where["W"] for entry in chosen})
        ticks = list(windows)
        for value in sorted({entry.where["H"] for entry in chosen}):
            if all(abs(math.log2(value / tick)) > 0.6 for tick in ticks):
                ticks.append(value)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        for window in windows:
            axis.axvline(window, color="#333333", linestyle="--", linewidth=1.2, zorder=2)
            # Left of the line: where recall falls, it falls on the right.
            place = {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right", "va": "center", "rotation": 90}
            axis.annotate(f"window W = {window}", (window, 50), **place, fontsize=9, color="#333333")
        if metric in CHANCE:
            chance = 100 * CHANCE[metric]
            axis.axhline(chance, color="#999999", linestyle=":", linewidth=1.2, zorder=2)
            place = {"xycoords": ("axes fraction", "data"), "xytext": (4, 3), "textcoords": "offset points"}
            axis.annotate(f"chance {chance:.1f}", (0, chance), **place, fontsize=8, color="#666666")
    axes[0].set_ylabel("percent of problems")
    handles, labels = axes[0].get_legend_handles_labels()
    if any(entry.paper is not None for entry in entries):
        handles, labels = [*handles, Line2D([], [], **PAPER, color="#555555")], [*labels, "the paper's value"]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
    return figure


def ladder_figure(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Figure:
    """Arms as bars in the order of the entries, one panel a metric, with intervals. All entries share one condition."""
    arms = list(dict.fromkeys(entry.arm for entry in entries))
    metrics = list(dict.fromkeys(entry.metric for entry in entries))
    cell = {(entry.arm, entry.metric): entry for entry in entries}
    figure = Figure(figsize=(10.5, 1.2 + 0.4 * len(arms)), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        for y, arm in enumerate(arms):
            entry = cell[arm, metric]
            low, high = (100 * end for end in entry.ci or (entry.value, entry.value))
            axis.barh(y, 100 * entry.value, height=0.62, color=looks[arm].color)
            axis.plot([low, high], [y, y], color="#222222", linewidth=1.4, solid_capstyle="butt")
            axis.text(max(high, 100 * entry.value) + 1.5, y, f"{100 * entry.value:.1f}", va="center", fontsize=9)
        axis.set_yticks(range(len(arms)), [looks[arm].name for arm in arms])
        axis.set_xticks(range(0, 101, 20))
        axis.set_xlim(0, 113)
        axis.grid(axis="y", visible=False)
        where = ", ".join(f"{name} = {value}" for name, value in entries[0].where.items())
        axis.set_title(f"{METRICS[metric]} ({where})")
        axis.set_xlabel("percent of problems")
    axes[0].invert_yaxis()
    return figure


def tsne_figure(states: Mapping[str, Any], looks: Mapping[str, Look]) -> Figure:
    """Decoder states in two dimensions, one panel an arm, one colour and shape a goal (LS-AR, Fig. 4b).

    `states`: arm -> {"xy": [[x, y], ...], "label": [goal, ...], "silhouette": score or absent}.
    """
    goals = sorted({label for arm in states.values() for label in arm["label"]})
    # Nobody tells a dozen colours apart, some people not six: neighbours in the legend differ in shape as well.
    marks = {goal: (GOAL_COLORS[i % 7], MARKERS[i % 5]) for i, goal in enumerate(goals)}
    figure, axes = _panels(len(states), height=4.4)
    for axis, (arm, points) in zip(axes, states.items(), strict=True):
        xy, labels = np.asarray(points["xy"], dtype=float), np.asarray(points["label"])
        for goal, (color, marker) in marks.items():
            mine = xy[labels == goal]
            axis.scatter(mine[:, 0], mine[:, 1], s=38, color=color, marker=marker, linewidth=0.4, edgecolor="white")
        score = points.get("silhouette")
        axis.set_title(looks[arm].name + ("" if score is None else f"\nsilhouette {score:.2f}, n = {len(xy)}"))
        axis.set(xticks=[], yticks=[])
        axis.spines[["top", "right"]].set_visible(True)
    if len(goals) <= 24:
        handles = [Line2D([], [], linestyle="none", marker=m, color=c, label=goal) for goal, (c, m) in marks.items()]
        figure.legend(handles=handles, loc="outside right center", title="goal", fontsize=9)
    return figure


def loss_figure(losses: Mapping[str, Mapping[str, Mapping[int, float]]], looks: Mapping[str, Look]) -> Figure:
    """One panel a stage, one line an arm: every logged value faint, a running mean strong.

    `losses`: stage -> arm -> step -> loss.
    """
    figure, axes = _panels(len(losses), height=3.1)
    lines: dict[str, Line2D] = {}
    for axis, (stage, curves) in zip(axes, losses.items(), strict=True):
        for arm in sorted(curves, key=list(looks).index):
            steps = np.array(sorted(curves[arm]))
            values = np.array([curves[arm][step] for step in steps])
            width = max(1, len(values) // 15)
            mean = np.convolve(values, np.ones(width) / width, mode="valid")
            middle = steps[(width - 1) // 2 :][: len(mean)]
            axis.plot(steps, values, color=looks[arm].color, linewidth=0.8, alpha=0.25)
            dash = (0, (3, 1.5)) if looks[arm].dashed else "-"
            dot = "o" if len(mean) == 1 else ""
            (line,) = axis.plot(middle, mean, color=looks[arm].color, linewidth=1.6, linestyle=dash, marker=dot)
            lines.setdefault(looks[arm].name, line)
        seen = np.array([loss for curve in curves.values() for loss in curve.values()])
        seen = seen[np.isfinite(seen)]
        if seen.size and 0 < seen.min() < seen.max() / 20:
            axis.set_yscale("log")
        axis.set_title(f"Stage {stage}" if stage[:1].isdigit() else stage)
        axis.set_xlabel("step")
    axes[0].set_ylabel("loss")
    # Three columns hold the longest names of a table with many arms.
    columns = len(lines) if len(lines) <= 4 else 3
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns, fontsize=9)
    return figure


def _panels(count: int, *, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, at most three in a row, each `height` inches high."""
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(10.5, height * rows + 0.4), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]
