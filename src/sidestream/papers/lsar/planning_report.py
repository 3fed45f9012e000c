"""The report of LS-AR Table 3: success, a rollout in motion, where plans fail, the tracked vector. From files alone."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sidestream.experiments.report.figures import DASHES, Line, arm_lines, lines_figure
from sidestream.experiments.report.page import TEMPLATES, Page, Section
from sidestream.experiments.report.tables import conditions, pivot, span
from sidestream.experiments.results import Entry
from sidestream.tasks.blocksworld_loop import plan_outcomes
from sidestream.tasks.blocksworld_picture import plan_lines, rollout_svg, standalone


def scores_file(where: Mapping[str, Any]) -> str:
    """Name of the file, in an arm's folder, with its rollouts at a (K, N, W)."""
    return f"scores-{'-'.join(f'{name}{where[name]}' for name in ('K', 'N', 'W'))}.json"


def sections(page: Page, *, own: Collection[str]) -> Iterator[Section]:
    """Success over K and over N, a rollout in motion, where plans fail, how the vector moves, what a trigger costs.

    Args:
        own: arms trained on our data: names from a pool, K of 0 to 4, the model's own prefixes.
    """
    # The files beside the results first: a bad one is then named before anything is drawn.
    inside = page.beside("rollouts.json", lambda rollouts: _rollout(page, rollouts))
    inside += _failures(page)
    inside += page.beside("vectors.json", lambda vectors: _vectors(page, vectors["arms"]))
    inside += page.beside("trigger.json", lambda cost: _trigger(page, cost))
    fewest = min(entry.where["N"] for entry in page.entries)
    drawn = success_figure(page, own, "K", [entry for entry in page.entries if entry.where["N"] == fewest])
    caption = (
        f"Share of problems with {fewest} blocks whose goal is reached after K forced sub-optimal actions, in closed "
        "loop. W is what the text channel sees. Bars: 95% intervals; arms stand side by side to be told apart."
    )
    yield Section("Success under perturbations", page.figure("success", "Success over K", drawn, caption))
    over_n = [entry for entry in page.entries if entry.where["K"] == 0]
    if any(entry.where["N"] != fewest for entry in over_n):
        drawn, caption = success_figure(page, own, "N", over_n), "The same at K = 0, by the number of blocks N."
        yield Section("More blocks", page.figure("blocks", "Success over N", drawn, caption))
    yield from inside


def success_figure(page: Page, own: Collection[str], x: str, entries: Sequence[Entry]) -> Figure:
    """Goal success over condition `x`, K or N: a column of panels a window, a row the data an arm was trained on."""
    windows = sorted({entry.where["W"] for entry in entries}, key=lambda w: w or math.inf, reverse=True)
    arms, panels = {}, {}
    for data, ours in (("The paper's", False), ("Our", True)):
        chosen = [entry for entry in entries if (entry.arm in own) == ours]
        arms[ours] = list(dict.fromkeys(entry.arm for entry in chosen))
        for window in windows if chosen else ():
            title = f"{data} data, {conditions({'W': window})}"
            panels[title] = arm_lines([entry for entry in chosen if entry.where["W"] == window], page.looks)

    def place(entry: Entry) -> float:
        beside = arms[entry.arm in own]
        return entry.where[x] + 0.5 / len(beside) * (beside.index(entry.arm) - (len(beside) - 1) / 2)

    if x == "N":  # arms drop to 0 together, and lines would only cross
        panels = {title: [line._replace(dash="none") for line in lines] for title, lines in panels.items()}
    words = "K, perturbations forced" if x == "K" else "N, blocks"
    figure = lines_figure(panels, place, xlabel=words, bars=True, columns=len(windows), legend=3)
    for axis in figure.axes:
        axis.set_xticks(sorted({entry.where[x] for entry in entries}))
        axis.grid(axis="x", visible=False)
    return figure


WORDS = """<details><summary>The same in words</summary><div class="plans">
{%- for name, lines in plans.items() %}<div><b>{{ name }}</b><ol>
{%- for text, forced in lines %}<li{{ " class=forced" if forced }}>{{ text }}</li>{% endfor %}</ol></div>{% endfor -%}
</div></details>"""


def _rollout(page: Page, rollouts: Mapping[str, Any]) -> Section:
    svg = rollout_svg(rollouts, page.looks)
    (page.folder / "rollout.svg").write_text(standalone(svg), encoding="utf-8")
    where = conditions({name: rollouts[name] for name in ("N", "K", "W")})
    caption = (
        f"One test problem ({where}). In red the action that the simulator forced on either arm; the number on the "
        "right is the length of a shortest plan to the goal. Where nothing moves, the last frame stands."
    )
    words = TEMPLATES.from_string(WORDS).render(plans=plan_lines(rollouts, page.looks))
    return Section("One perturbed rollout", page.framed(Markup(svg), caption, narrow=True) + Markup(words))


def _vectors(page: Page, movements: Mapping[str, Any]) -> Section:
    panels: dict[str, list[Line]] = {
        "Distance to the unperturbed vector, relative to its length": [],
        "Length of the step taken at each trigger": [],
    }
    left, right = panels.values()
    for arm, movement in movements.items():
        name, color, _ = page.looks[arm]
        left.append(Line(name, color, _band(movement, "distance")))
        right.append(Line(name, color, _band(movement, "perturbed_step")))
        right.append(Line(f"{name}: unperturbed", color, _band(movement, "plain_step"), DASHES))
    words = "triggers after that of the forced action"
    figure = lines_figure(panels, "at", xlabel=words, ylabel="", columns=2, sharey=False, legend=2)
    for axis in figure.axes:
        axis.axvline(0, color="#c1121f", linestyle="--", linewidth=1.2, zorder=2)
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for arm, movement in movements.items():
        figure.axes[0].axhline(movement["between"], color=page.looks[arm].color, linestyle=":", linewidth=1.2, zorder=2)
    alphas = ", ".join(f"{page.looks[arm].name} {movement['alpha']:.3g}" for arm, movement in movements.items())
    caption = (
        f"Shortest plans of {span(movement['pairs'] for movement in movements.values())} problems, and the same with "
        "one sub-optimal action forced at a random step (red line). The texts before that action, and so the vectors, "
        "are the same. Dotted: distance between different problems. Later triggers are reached by fewer plans; bands: "
        f"95% intervals over problems. Learned alpha: {alphas}."
    )
    title = "How the vector moves after a perturbation"
    return Section(title, page.figure("vectors", title, figure, caption))


def _points(at: Sequence[float], values: Sequence[float], low: Sequence[float] = (), high: Sequence[float] = ()) -> Any:
    """A line's entries: bare numbers at their places, with intervals where there are any."""
    bands = list(zip(low, high, strict=True)) or [None] * len(at)
    bare: dict[str, Any] = dict(arm="", metric="", spread=None, n=1, paper=None, share=False)
    return [Entry(where={"at": x}, value=y, ci=band, **bare) for x, y, band in zip(at, values, bands, strict=True)]


def _band(movement: Mapping[str, Any], name: str) -> Any:
    return _points(movement["offset"], *(movement[name][part] for part in ("mean", "low", "high")))


def _trigger(page: Page, cost: Mapping[str, Any]) -> Section:
    ways = {
        "reread": ("whole text read again (the paper's way)", "#7a7a7a"),
        "cached": ("keys and values of the whole text kept (ours)", "#009e73"),
        "bounded": (f"those of the last {cost['encoder_size']} tokens kept (ours)", "#0072b2"),
    }
    lines = []
    for way, (label, color) in ways.items():
        if cost.get(way) is not None:
            took = [1000 * seconds for seconds in cost[way]]
            said = f"{label}: {', '.join(f'{value:.3g}' for value in took)} ms"
            lines.append(Line(said, color, _points(cost["places"], took)))
    words = "tokens of text up to the trigger (log scale)"
    figure = lines_figure({"": lines}, "at", xlabel=words, ylabel="milliseconds (log scale)", legend=1)
    figure.set_size_inches(7.2, 4.2)
    axis = figure.axes[0]
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(cost["places"], [f"{place:,}" for place in cost["places"]])
    axis.minorticks_off()
    axis.margins(x=0.1, y=0.12)
    caption = (
        f"From a trigger token to the FiLM terms of the new vector, the decoder's own step left out; medians of "
        f"{cost['repeats']} interleaved rounds. Vectors of the two ways to read the whole text differ by "
        f"{cost['difference']:.1g} of their length at most."
    )
    alt = "Cost of a trigger over its place in the text"
    return Section("What a trigger costs", page.figure("trigger", alt, figure, caption, narrow=True))


OUTCOMES = {
    "solved": ("solved", "var(--good)"),
    "illegal": ("illegal action", "#d55e00"),
    "malformed": ("no action at all", "#882255"),
    "stopped_early": ("end before the goal", "#e69f00"),
    "step_limit": ("step limit", "#56b4e9"),
}
"""What becomes of a plan: its words and its colour. The kinds of failure are those of `PlanScore`."""
FAILURES = """{% from "macros.html" import swatch -%}
<p class="legend">{% for words, color in outcomes.values() -%}
<i style="background:{{ color }}"></i>{{ words }}{% endfor %}</p>
<div class="wide"><table><thead><tr><th></th>
{%- for head, under in heads %}<th>{{ head }}<small>{{ under }}</small></th>{% endfor %}</tr></thead>
{%- for look, rest, cells in rows %}<tr><th>{{ swatch(look) }}<small>{{ rest }}</small></th>
{%- for cell in cells %}<td>{% for found in cell %}<span class="bar">
{%- for kind, share in found.shares.items() -%}
<i style="width:{{ "%.1f" | format(100 * share) }}%;background:{{ outcomes[kind][1] }}"></i>
{%- endfor %}</span>
{%- if found.over is not none %}<small>{{ "+%.1f (%.1f)" | format(found.over, found.excess) }}</small>{% endif %}
{%- if found.shares.solved < 1 %}<small>{% for kind, share in found.shares.items() if kind != "solved" -%}
{{ "%.0f" | format(100 * share / (1 - found.shares.solved)) }}{{ " / " if not loop.last }}{% endfor %}</small>
{%- endif %}
{%- if found.first_illegal is not none %}<small>illegal at {{ "%g" | format(found.first_illegal + 1) }}</small>
{%- endif %}{% endfor %}</td>{% endfor %}</tr>
{%- endfor %}</table></div><p class="soft">Bars: shares of all problems. Below: mean actions beyond the optimal length
where solved, in brackets the model's own waste among them; the share of each kind among failures in percent, in the
order of the legend; the median step (from 1) of the first illegal action.</p>"""


def _failures(page: Page) -> list[Section]:
    """One row an arm and window, one column a (K, N); none where no arm has its scores beside it."""
    table, rows = pivot(page.entries, page.table), []
    for (_, arm, rest), row in table.rows.items():
        cells = [
            page.beside(f"{arm}/{scores_file(row[column].where)}", plan_outcomes) if column in row else []
            for column in table.columns
        ]
        if any(cells):
            rows.append((page.looks[arm], rest, cells))
    heads = [table.title(column) for column in table.columns]
    drawn = TEMPLATES.from_string(FAILURES).render(outcomes=OUTCOMES, heads=heads, rows=rows)
    return [Section("Where plans fail", Markup(drawn))] if rows else []
