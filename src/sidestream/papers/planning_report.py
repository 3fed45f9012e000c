"""Sections of the report of Table 3."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.report.tables import conditions, pivot, span
from sidestream.experiments.results import Entry
from sidestream.experiments.table import Look
from sidestream.papers import planning_pictures


def sections(page: Page) -> Iterator[Section]:
    """Blocksworld: success over K and over N, a rollout in motion, where plans fail, how the vector moves."""
    entries, looks = page.entries, page.looks
    # The files beside the results first: a bad one is then named before anything is drawn.
    inside = page.beside("rollouts.json", lambda rollouts: _rollout(page, rollouts))
    failures = _failures_html(page, entries, looks)
    inside += [Section("Where plans fail", Markup(failures))] if failures else []
    inside += page.beside("vectors.json", lambda vectors: _vectors(page, vectors["arms"]))
    inside += page.beside("trigger.json", lambda cost: _trigger(page, cost))
    fewest = min(entry.where["N"] for entry in entries)
    over_k = [entry for entry in entries if entry.where["N"] == fewest]
    over_n = [entry for entry in entries if entry.where["K"] == 0]
    caption = (
        f"Share of problems with {fewest} blocks whose goal is reached after K forced sub-optimal actions, in closed "
        "loop. W is what the text channel sees. Bars: 95% intervals; arms stand side by side to be told apart."
    )
    drawn = planning_pictures.success_figure(over_k, looks, "K")
    yield Section("Success under perturbations", page.figure("success", "Success over K", drawn, caption))
    if any(entry.where["N"] != fewest for entry in over_n):
        caption = "The same without perturbations (K = 0), by the number of blocks N."
        drawn = planning_pictures.success_figure(over_n, looks, "N")
        yield Section("More blocks", page.figure("blocks", "Success over N", drawn, caption))
    yield from inside


def _rollout(page: Page, rollouts: Mapping[str, Any]) -> Section:
    looks = page.looks
    svg = planning_pictures.rollout_svg(rollouts, looks)
    (page.folder / "rollout.svg").write_text(planning_pictures.standalone(svg), encoding="utf-8")
    where = conditions({name: rollouts[name] for name in ("N", "K", "W")})
    caption = (
        f"One test problem ({where}). In red the action that the simulator forced on either arm; the number on the "
        "right is the length of a shortest plan to the goal. Where nothing moves, the last frame stands."
    )
    plans = []
    for name, lines in planning_pictures.plan_lines(rollouts, looks).items():
        steps = "".join(f"<li{' class=forced' * forced}>{escape(text)}</li>" for text, forced in lines)
        plans.append(f"<div><b>{escape(name)}</b><ol>{steps}</ol></div>")
    words = f'<details><summary>The same in words</summary><div class="plans">{"".join(plans)}</div></details>'
    return Section("One perturbed rollout", page.framed(Markup(svg), caption, narrow=True) + Markup(words))


def _vectors(page: Page, movements: Mapping[str, Any]) -> Section:
    looks = page.looks
    drawn = planning_pictures.movement_figure(movements, looks)
    pairs = span(movement["pairs"] for movement in movements.values())
    alphas = ", ".join(f"{looks[arm].name} {movement['alpha']:.3g}" for arm, movement in movements.items())
    caption = (
        f"Shortest plans of {pairs} problems, and the same with one sub-optimal action forced at a random step. The "
        "texts before that action, and so the vectors, are the same. Later triggers are reached by fewer plans; bands: "
        f"95% intervals over problems. Learned alpha: {alphas}."
    )
    figure = page.figure("vectors", "How the tracked vector moves after a perturbation", drawn, caption)
    return Section("How the vector moves after a perturbation", figure)


def _trigger(page: Page, cost: Mapping[str, Any]) -> Section:
    drawn = planning_pictures.trigger_figure(cost)
    caption = (
        f"From a trigger token to the FiLM terms of the new vector, the decoder's own step left out; medians of "
        f"{cost['repeats']} interleaved rounds. Vectors of the two ways to read the whole text differ by "
        f"{cost['difference']:.1g} of their length at most."
    )
    alt = "Cost of a trigger over its place in the text"
    return Section("What a trigger costs", page.figure("trigger", alt, drawn, caption, narrow=True))


OUTCOMES = {
    "solved": ("solved", "var(--good)"),
    "illegal": ("illegal action", "#d55e00"),
    "malformed": ("no action at all", "#882255"),
    "stopped_early": ("end before the goal", "#e69f00"),
    "step_limit": ("step limit", "#56b4e9"),
}
"""What becomes of a plan: its words and its colour. The kinds of failure are those of `PlanScore`."""


def _failures_html(page: Page, entries: Sequence[Entry], looks: Mapping[str, Look]) -> str:
    """One row an arm and window, one column a (K, N); empty where no arm has its scores beside it."""
    table = pivot(entries, page.table)
    titles = map(table.title, table.columns)
    heads = "".join(f"<th>{escape(head)}<small>{escape(under)}</small></th>" for head, under in titles)
    lines = []
    for (_, arm, rest), row in table.rows.items():
        cells = [_failure_cell(page, row[column]) if column in row else "" for column in table.columns]
        if any(cells):
            label = f"<th>{_arm_html(looks[arm])}<small>{escape(rest)}</small></th>"
            lines.append(f"<tr>{label}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    if not lines:
        return ""
    legend = "".join(f'<i style="background:{color}"></i>{words}' for words, color in OUTCOMES.values())
    note = (
        "Bars: shares of all problems. Below: mean actions beyond the optimal length where solved, in brackets "
        "the model's own waste among them; the share of each kind among failures in percent, in the order of the "
        "legend; the median step (from 1) of the first illegal action."
    )
    return (
        f'<p class="legend">{legend}</p><div class="wide"><table><thead><tr><th></th>{heads}</tr></thead>'
        f'{"".join(lines)}</table></div><p class="soft">{note}</p>'
    )


def _failure_cell(page: Page, entry: Entry) -> str:
    """A bar and three numbers from the scores of one cell; empty where there are none."""
    tag = "-".join(f"{name}{entry.where[name]}" for name in ("K", "N", "W"))
    found = page.beside(f"{entry.arm}/scores-{tag}.json", plan_outcomes)
    if not found:
        return ""
    shares, over, excess, first_illegal = (found[0][name] for name in ("shares", "over", "excess", "first_illegal"))
    bar = "".join(
        f'<i style="width:{100 * share:.1f}%;background:{OUTCOMES[kind][1]}"></i>' for kind, share in shares.items()
    )
    failed = [share for kind, share in shares.items() if kind != "solved"]
    said = [] if over is None else [f"+{over:.1f} ({excess:.1f})"]
    said += [" / ".join(f"{100 * share / sum(failed):.0f}" for share in failed)] if sum(failed) else []
    said += [] if first_illegal is None else [f"illegal at {first_illegal + 1:g}"]
    return f'<span class="bar">{bar}</span>{"".join(f"<small>{text}</small>" for text in said)}'


def plan_outcomes(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of a cell's plans, from `PlanScore` rows.

    Returns:
        `shares`, outcome -> share of all plans; `over` and `excess`, means among solved plans; `first_illegal`, the
        median step (from 0) of illegal failures. The last three are None where there is nothing to average.

    Raises:
        ValueError: no scores, or a failure of unknown kind.
    """
    counts = Counter("solved" if score["success"] else score["failure"] for score in scores)
    unknown = [kind for kind in counts if kind not in OUTCOMES]
    if unknown or not scores:
        raise ValueError(f"unknown failure {unknown[0]!r}" if unknown else "no scores")
    solved = [score for score in scores if score["success"]]
    illegal = [score["failed_at"] for score in scores if score["failure"] == "illegal"]
    return {
        "shares": {kind: counts[kind] / len(scores) for kind in OUTCOMES},
        "over": statistics.mean(score["over"] for score in solved) if solved else None,
        "excess": statistics.mean(score["excess"] for score in solved) if solved else None,
        "first_illegal": statistics.median(illegal) if illegal else None,
    }


def _arm_html(look: Look) -> str:
    fill = f"border:2px solid {look.color}" if look.dashed else f"background:{look.color}"
    return f'<span class="swatch" style="{fill}"></span>{escape(look.name)}'
