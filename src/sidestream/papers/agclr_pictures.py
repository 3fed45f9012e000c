"""The pictures of AGCLR's reports: answers by arm, by stage and by intervention, and what passes keep. From files."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from sidestream.papers.names import METRICS
from sidestream.papers.pictures import MARKERS, PAPER, Look
from sidestream.papers.results import Entry

CAPTIONS = {
    "answers": "Share of problems answered right. Lines: 95% intervals over problems; they do not cover retraining.",
    "latents": "Share of problems answered right with other things fed in place of the latents, or fewer of them. "
    "Lines: 95% intervals over problems. Where a row stands beside `learned`, nothing that matters was in the latents.",
    "stages": "The weights at the end of each stage, on that stage's prompts: at stage k, k steps' worth of latents "
    "and the remaining steps in words. Bands: 95% intervals over problems. Nothing was chosen by it.",
    "passes": "Above: cosine of the last hidden state of each pass to that of the first. Below: mean values of the "
    "gates. Bands: 95% intervals of the mean over problems. A high cosine says that states are alike, not that they "
    "hold a fact.",
}
DASHES = (0, (3, 1.5))
STYLES = {"read": "-", "forget": DASHES, "write": ":"}
"""Lines of the gates, whose colour is their arm's."""


def arms_figure(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Figure:
    """Arms as bars in their order, one panel a task and metric, with intervals and the paper's values."""
    arms = list(dict.fromkeys(entry.arm for entry in entries))
    panels = list(dict.fromkeys((entry.where["task"], entry.metric) for entry in entries))
    figure, axes = _grid(len(panels), 1.1 + 0.33 * len(arms))
    for axis, panel in zip(axes, panels, strict=True):
        chosen = {entry.arm: entry for entry in entries if (entry.where["task"], entry.metric) == panel}
        for y, arm in enumerate(arms):
            if arm not in chosen:
                continue
            entry = chosen[arm]
            low, high = (100 * end for end in entry.ci or (entry.value, entry.value))
            axis.barh(y, 100 * entry.value, height=0.62, color=looks[arm].color)
            axis.plot([low, high], [y, y], color="#222222", linewidth=1.4, solid_capstyle="butt")
            axis.text(max(high, 100 * entry.value) + 2, y, f"{100 * entry.value:.1f}", va="center", fontsize=8)
            if entry.paper is not None:
                # With a white seam, as it may lie on a dark bar.
                (ring,) = axis.plot([100 * entry.paper], [y], **PAPER, color="#222222", clip_on=False, zorder=30)
                ring.set_path_effects([withStroke(linewidth=4, foreground="white")])
        axis.set_yticks(range(len(arms)), [looks[arm].name for arm in arms], fontsize=8.5)
        axis.set_xlim(0, 116)
        axis.set_xticks(range(0, 101, 20))
        axis.set_ylim(len(arms) - 0.4, -0.6)
        axis.grid(axis="y", visible=False)
        axis.set_title(f"{panel[0]}: {METRICS.get(panel[1], panel[1])}")
        axis.set_xlabel("percent of problems")
    _label_left(axes)
    if any(entry.paper is not None for entry in entries):
        handle = Line2D([], [], **PAPER, color="#222222")
        figure.legend([handle], ["the paper's value"], loc="outside lower center", fontsize=9)
    return figure


def latents_figure(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Figure:
    """What is fed for the latents as rows, arms side by side in each, one panel a task (its first metric)."""
    arms = list(dict.fromkeys(entry.arm for entry in entries))
    conditions = list(dict.fromkeys(entry.where["latents"] for entry in entries))
    tasks = list(dict.fromkeys(entry.where["task"] for entry in entries))
    figure, axes = _grid(len(tasks), 1.1 + len(conditions) * (0.16 + 0.075 * len(arms)))
    for axis, task in zip(axes, tasks, strict=True):
        here = [entry for entry in entries if entry.where["task"] == task]
        here = [entry for entry in here if entry.metric == here[0].metric]
        for entry in here:
            i = arms.index(entry.arm)
            y = conditions.index(entry.where["latents"]) + 0.7 * ((i + 0.5) / len(arms) - 0.5)
            color = looks[entry.arm].color
            if entry.ci:
                axis.plot([100 * end for end in entry.ci], [y, y], color=color, linewidth=1.2)
            axis.plot([100 * entry.value], [y], color=color, marker=MARKERS[i % len(MARKERS)], markersize=5)
        for y in range(1, len(conditions)):
            axis.axhline(y - 0.5, color="#e4e4e4", linewidth=0.8, zorder=1)
        axis.set_yticks(range(len(conditions)), conditions)
        axis.set_ylim(len(conditions) - 0.5, -0.5)
        axis.set_xlim(-2, 102)
        axis.grid(axis="y", visible=False)
        axis.set_title(f"{task}: {METRICS.get(here[0].metric, here[0].metric)}")
        axis.set_xlabel("percent of problems")
    _label_left(axes)
    _legend(figure, arms, looks)
    return figure


def stages_figure(stages: Mapping[str, Mapping[str, Any]], looks: Mapping[str, Look]) -> Figure:
    """Accuracy over the stages of the curriculum, one panel a task.

    `stages`: task -> arm -> [{"stage", "value", "ci", ...}, ...].
    """
    order = list(dict.fromkeys(arm for arms in stages.values() for arm in arms))
    figure, axes = _grid(len(stages), 3.6)
    for axis, (task, arms) in zip(axes, stages.items(), strict=True):
        for arm, points in arms.items():
            at, i = [point["stage"] for point in points], order.index(arm)
            style = {"color": looks[arm].color, "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "linewidth": 1.5}
            style["linestyle"] = DASHES if looks[arm].dashed else "-"
            axis.plot(at, [100 * point["value"] for point in points], **style, clip_on=False, zorder=3 + i)
            low, high = ([100 * point["ci"][end] for point in points] for end in (0, 1))
            axis.fill_between(at, low, high, color=looks[arm].color, alpha=0.12, linewidth=0)
        axis.set_ylim(0, 100)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_title(task)
        axis.set_xlabel("stage (0: explicit chain of thought)")
    axes[0].set_ylabel("percent of problems answered right")
    _legend(figure, order, looks)
    return figure


def passes_figure(passes: Mapping[str, Mapping[str, Any]], looks: Mapping[str, Look]) -> Figure:
    """Cosine to pass 1 above, gate means below, one column a task.

    `passes`: task -> arm -> {"n": problems, "bands": {"cosine" or "GATE_gate": [[mean, low, high] of each pass]}}.
    """
    figure = Figure(figsize=(10.5, 6.6), dpi=150, layout="constrained")
    rows = figure.subplots(2, len(passes), sharey="row", sharex="col", squeeze=False)
    lowest = 0.0
    for above, below, (task, arms) in zip(*rows, passes.items(), strict=True):
        for arm, found in arms.items():
            for name, band in found["bands"].items():
                axis = above if name == "cosine" else below
                at = range(1, len(band) + 1)
                mean, low, high = zip(*band, strict=True)
                gate = STYLES.get(name.removesuffix("_gate"), "-")
                axis.plot(at, mean, color=looks[arm].color, linestyle=gate, marker="o", markersize=4, linewidth=1.6)
                axis.fill_between(at, low, high, color=looks[arm].color, alpha=0.18, linewidth=0)
                if axis is above:
                    lowest = min(lowest, *low)
        above.set_title(task)
        above.set_ylim(lowest, 1.02)
        below.set_ylim(0, 1)
        below.set_xlabel("latent pass")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
    rows[0][0].set_ylabel("cosine to pass 1")
    rows[1][0].set_ylabel("mean value of the gate")
    arms = list(dict.fromkeys(arm for found in passes.values() for arm in found))
    handles = [Line2D([], [], color=looks[arm].color, marker="o", markersize=4) for arm in arms]
    handles += [Line2D([], [], color="#555555", linestyle=line) for line in STYLES.values()]
    labels = [*(looks[arm].name for arm in arms), *(f"{gate} gate" for gate in STYLES)]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), fontsize=9)
    return figure


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A row of at most three panels, or rows of two that long labels fit beside."""
    columns = count if count <= 3 else 2
    rows = -(-count // columns)
    figure = Figure(figsize=(10.5, height * rows + 0.5), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _label_left(axes: Sequence[Axes]) -> None:
    """Names beside the leftmost panels only."""
    for axis in axes:
        axis.label_outer()
        axis.xaxis.label.set_visible(True)
        axis.tick_params(labelbottom=True)


def _legend(figure: Figure, arms: Sequence[str], looks: Mapping[str, Look]) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=looks[arm].color,
            linestyle=DASHES if looks[arm].dashed else "-",
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
        )
        for i, arm in enumerate(arms)
    ]
    names = [looks[arm].name for arm in arms]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 3), fontsize=9)
