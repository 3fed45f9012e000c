"""Sections of the report of Table 5: authority as a curve over p."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from sidestream.experiments.report.figures import MARKERS
from sidestream.experiments.results import Entry

SWEPT = ("standard", "latent_forced")
"""The arms that differ in p alone."""
LINES = {
    ("(A, A)", "goal_a"): ("aligned: success (utility)", "#7a7a7a", "-"),
    ("(A, B)", "goal_a"): ("conflict: the text's goal", "#d55e00", "-"),
    ("(A, B)", "goal_b"): ("conflict: the vector's goal", "#0072b2", "-"),
    ("(A, None)", "goal_a"): ("no vector: the text's goal", "#d55e00", "--"),
    ("(None, B)", "goal_b"): ("no text: the vector's goal", "#0072b2", "--"),
}
CAPTION = (
    "p is the share of training rows whose text of the goal was replaced by filler; p = 0 is Standard, 0.3 the paper's "
    "Latent-Forced. In a conflict the text says goal A and the vector goal B. Read the coloured lines only where the "
    "grey one is above the dotted line at 95. Bands: 95% intervals over problems; rings: the paper's values."
)


def sections(entries: Sequence[Entry], draw: Callable[[str, str, Figure, str], str]) -> list[str]:
    """HTML of what Table 5 shows besides its numbers.

    Args:
        draw: (file name, alt text, figure, caption) to HTML.
    """
    if not any(entry.arm in SWEPT for entry in entries):
        return []
    figure = draw("authority", "Whose goal is reached, over p", authority_figure(entries), CAPTION)
    return [f"<h2>Authority over p</h2>{figure}"]


def authority_figure(entries: Sequence[Entry]) -> Figure:
    """Success over p, one panel a task, one line for each of `LINES`."""
    drawn = [entry for entry in entries if entry.arm in SWEPT]
    tasks = list(dict.fromkeys(entry.where["task"] for entry in drawn))
    figure = Figure(figsize=(10.5, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axis, task in zip(axes, tasks, strict=True):
        for i, ((condition, metric), (label, color, dash)) in enumerate(LINES.items()):
            chosen = [e for e in drawn if e.where["task"] == task and e.metric == metric]
            points = sorted((e for e in chosen if e.where["condition"] == condition), key=lambda e: e.where["p"])
            at = [e.where["p"] for e in points]
            look = {"color": color, "linestyle": dash, "marker": MARKERS[i], "clip_on": False, "zorder": 3 + i}
            axis.plot(at, [100 * e.value for e in points], label=label, markersize=5, linewidth=1.7, **look)
            bands = [(e.where["p"], 100 * e.ci[0], 100 * e.ci[1]) for e in points if e.ci]
            if bands:
                x, low, high = zip(*bands, strict=True)
                axis.fill_between(x, low, high, color=color, alpha=0.13, linewidth=0)
            cited = [(e.where["p"], 100 * e.paper) for e in points if e.paper is not None]
            if cited:
                axis.scatter(
                    *zip(*cited, strict=True), s=90, facecolors="none", edgecolors=color, clip_on=False, zorder=9
                )
        axis.axhline(95, color="#999999", linestyle=":", linewidth=1.2)
        axis.set_title({"treasure": "Treasure Hunt", "blocksworld": "Blocksworld"}.get(task, task))
        axis.set_xlabel("p, share of training rows without the goal's text")
        axis.set_ylim(0, 100)
        axis.set_xlim(-0.02, max((e.where["p"] for e in drawn), default=1) + 0.02)
    axes[0].set_ylabel("percent of problems")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    return figure
