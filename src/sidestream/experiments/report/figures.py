"""Figures that any table can use: lines over a condition, bars, dots, t-SNE, losses.

No pyplot: nothing global is opened, so nothing needs closing. Every figure stands on white, also in a page shown dark.
`style()` is the context to draw and save them in. What a table wants besides (a line at the window, a log axis) it adds
to the axes of the figure it got.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from sidestream.experiments.results import Entry
from sidestream.experiments.table import Look

GOAL_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
MARKERS = "osD^vPX<>*"
PAPER = {"linestyle": "none", "marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.4}
DASHES = (0, (3, 1.5))


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


class Line(NamedTuple):
    """One line of a figure."""

    label: str
    color: str
    entries: Sequence[Entry]
    dash: Any = "-"
    """matplotlib's line style."""


def arm_lines(entries: Sequence[Entry], looks: Mapping[str, Look]) -> list[Line]:
    """A line an arm, in their order."""
    return [
        Line(
            looks[arm].name,
            looks[arm].color,
            [e for e in entries if e.arm == arm],
            DASHES if looks[arm].dashed else "-",
        )
        for arm in dict.fromkeys(entry.arm for entry in entries)
    ]


def lines_figure(
    panels: Mapping[str, Sequence[Line]],
    x: str | Callable[[Entry], Any],
    *,
    xlabel: str,
    ylabel: str = "percent of problems",
    height: float = 4.0,
    columns: int = 3,
    legend: int = 4,
    bars: bool = False,
    sharey: bool = True,
) -> Figure:
    """One panel a title, values over a condition, intervals as bands and the paper's values as rings.

    Args:
        x: the condition, or what gives an entry's place.
        height: inches of a row of panels.
        columns: panels in a row, at most.
        legend: names in a row of the legend; 0 leaves it out.
        bars: intervals as bars, for points that stand side by side.
        sharey: panels have one scale.
    """
    figure, axes = grid(len(panels), height, columns=columns, sharey=sharey)
    place = (lambda entry: entry.where[x]) if isinstance(x, str) else x
    order = list(dict.fromkeys(line.label for lines in panels.values() for line in lines))
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            number = order.index(line.label)
            # Lines often coincide at 0 or 100: earlier ones are wider, so a later one on top leaves an edge to see.
            extra = 2.5 * (len(order) - 1 - number) / max(1, len(order) - 1)
            points = sorted(line.entries, key=place)
            at, factor = [place(e) for e in points], [100 if e.share else 1 for e in points]
            look: dict[str, Any] = {"color": line.color, "clip_on": False}
            axis.plot(
                at,
                [f * e.value for f, e in zip(factor, points, strict=True)],
                label=line.label,
                linestyle=line.dash,
                linewidth=1.5 + extra,
                marker=MARKERS[number % len(MARKERS)],
                markersize=4.5 + extra,
                markeredgecolor="white",
                markeredgewidth=0.6,
                zorder=3 + number,
                **look,
            )
            bands = [(place(e), f * e.ci[0], f * e.ci[1]) for f, e in zip(factor, points, strict=True) if e.ci]
            if bands:
                across, low, high = zip(*bands, strict=True)
                if bars:
                    axis.vlines(across, low, high, color=line.color, linewidth=1.1, clip_on=False)
                else:
                    axis.fill_between(across, low, high, color=line.color, alpha=0.16, linewidth=0)
            cited = [(place(e), f * e.paper) for f, e in zip(factor, points, strict=True) if e.paper is not None]
            if cited:
                axis.plot(*zip(*cited, strict=True), **PAPER, **look, zorder=30)
        if all(e.share for line in lines for e in line.entries):
            axis.set_ylim(0, 100)
        axis.set_title(title, pad=10)
        axis.set_xlabel(xlabel)
    axes[0].set_ylabel(ylabel)
    if legend:
        _legend(figure, axes, panels, legend)
    return figure


def _legend(figure: Figure, axes: Sequence[Axes], panels: Mapping[str, Sequence[Line]], columns: int) -> None:
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if any(entry.paper is not None for lines in panels.values() for line in lines for entry in line.entries):
        found["the paper's value"] = Line2D([], [], **PAPER, color="#555555")
    figure.legend(
        list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), columns), fontsize=9
    )


def bars_figure(panels: Mapping[str, Sequence[Entry]], looks: Mapping[str, Look]) -> Figure:
    """Arms as bars in their order, one panel a title, with intervals and the paper's values, in percent."""
    arms = list(dict.fromkeys(entry.arm for entries in panels.values() for entry in entries))
    figure, axes = grid(len(panels), 1.1 + 0.36 * len(arms), columns=3 if len(panels) <= 3 else 2)
    for axis, (title, entries) in zip(axes, panels.items(), strict=True):
        for entry in entries:
            y = arms.index(entry.arm)
            low, high = (100 * end for end in entry.ci or (entry.value, entry.value))
            axis.barh(y, 100 * entry.value, height=0.62, color=looks[entry.arm].color)
            axis.plot([low, high], [y, y], color="#222222", linewidth=1.4, solid_capstyle="butt")
            axis.text(max(high, 100 * entry.value) + 2, y, f"{100 * entry.value:.1f}", va="center", fontsize=8.5)
            if entry.paper is not None:
                # With a white seam, as it may lie on a dark bar.
                (ring,) = axis.plot([100 * entry.paper], [y], **PAPER, color="#222222", clip_on=False, zorder=30)
                ring.set_path_effects([withStroke(linewidth=4, foreground="white")])
        axis.set_yticks(range(len(arms)), [looks[arm].name for arm in arms], fontsize=8.5)
        axis.set_xlim(0, 116)
        axis.set_xticks(range(0, 101, 20))
        axis.set_ylim(len(arms) - 0.4, -0.6)
        axis.grid(axis="y", visible=False)
        axis.set_title(title)
        axis.set_xlabel("percent of problems")
    _label_left(axes)
    if any(entry.paper is not None for entries in panels.values() for entry in entries):
        handle = Line2D([], [], **PAPER, color="#222222")
        figure.legend([handle], ["the paper's value"], loc="outside lower center", fontsize=9)
    return figure


def dots_figure(panels: Mapping[str, Sequence[Entry]], looks: Mapping[str, Look], row: str) -> Figure:
    """A condition's values as rows, arms side by side in each, one panel a title, with intervals, in percent."""
    arms = list(dict.fromkeys(entry.arm for entries in panels.values() for entry in entries))
    rows = list(dict.fromkeys(entry.where[row] for entries in panels.values() for entry in entries))
    figure, axes = grid(len(panels), 1.1 + len(rows) * (0.16 + 0.075 * len(arms)), columns=3 if len(panels) <= 3 else 2)
    for axis, (title, entries) in zip(axes, panels.items(), strict=True):
        for entry in entries:
            number, look = arms.index(entry.arm), looks[entry.arm]
            y = rows.index(entry.where[row]) + 0.7 * ((number + 0.5) / len(arms) - 0.5)
            low, high = (100 * end for end in entry.ci or (entry.value, entry.value))
            axis.plot([low, high], [y, y], color=look.color, linewidth=1.2)
            marker = MARKERS[number % len(MARKERS)]
            name = look.name if entry.where[row] == rows[0] else None
            axis.plot([100 * entry.value], [y], color=look.color, marker=marker, markersize=5, label=name)
        for y in range(1, len(rows)):
            axis.axhline(y - 0.5, color="#e4e4e4", linewidth=0.8, zorder=1)
        axis.set_yticks(range(len(rows)), rows)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlim(-2, 102)
        axis.grid(axis="y", visible=False)
        axis.set_title(title)
        axis.set_xlabel("percent of problems")
    _label_left(axes)
    _legend(figure, axes, {}, 3)
    return figure


def _label_left(axes: Sequence[Axes]) -> None:
    """Names beside the leftmost panels only."""
    for axis in axes:
        axis.label_outer()
        axis.xaxis.label.set_visible(True)
        axis.tick_params(labelbottom=True)


def tsne_figure(states: Mapping[str, Any], looks: Mapping[str, Look]) -> Figure:
    """Decoder states in two dimensions, one panel an arm, one colour and shape a goal (LS-AR, Fig. 4b).

    `states`: arm -> {"xy": [[x, y], ...], "label": [goal, ...], "silhouette": score or absent}.
    """
    goals = sorted({label for arm in states.values() for label in arm["label"]})
    # Nobody tells a dozen colours apart, some people not six: neighbours in the legend differ in shape as well.
    marks = {goal: (GOAL_COLORS[i % 7], MARKERS[i % 5]) for i, goal in enumerate(goals)}
    figure, axes = grid(len(states), 4.4, sharey=False)
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
    figure, axes = grid(len(losses), 3.1, sharey=False)
    lines: dict[str, Line2D] = {}
    for axis, (stage, curves) in zip(axes, losses.items(), strict=True):
        for arm in sorted(curves, key=list(looks).index):
            steps = np.array(sorted(curves[arm]))
            values = np.array([curves[arm][step] for step in steps])
            width = max(1, len(values) // 15)
            mean = np.convolve(values, np.ones(width) / width, mode="valid")
            middle = steps[(width - 1) // 2 :][: len(mean)]
            axis.plot(steps, values, color=looks[arm].color, linewidth=0.8, alpha=0.25)
            dash = DASHES if looks[arm].dashed else "-"
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


def grid(count: int, height: float, *, columns: int = 3, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, at most `columns` in a row, each `height` inches high."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(10.5, height * rows + 0.4), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]
