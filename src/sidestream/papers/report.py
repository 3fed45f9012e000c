"""One self-contained HTML page from a run directory, with its pictures as PNGs beside it.

Reads files only: `results.json` (format: `results.py`), every `metrics.jsonl` below the directory, and where they are
there `tsne.json`, Table 3's `rollouts.json`, `vectors.json`, `trigger.json` and `ARM/scores-*.json`, AGCLR's
`stages.json` and `passes.json`, and an audit's `authority.json`. A table that wants pictures of its own gets one
function like `_table1_sections`; numbers, t-SNE, loss curves and provenance come with any results file.
"""

import base64
import io
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure

from sidestream.papers import agclr_pictures, audit_pictures, pictures, planning_pictures
from sidestream.papers.names import METRICS
from sidestream.papers.pictures import Look
from sidestream.papers.results import (
    Entry,
    Pivot,
    check_results,
    conditions,
    flat,
    load_results,
    markdown_table,
    merge_seeds,
    parts,
    past_window,
    pivot,
    reading,
    span,
    update_readme,
)

__all__ = ["check_results", "load_results", "markdown_table", "update_readme", "write_report"]

TABLES = {
    "lsar.table1": "LS-AR, Table 1: Treasure Hunt",
    "lsar.table3": "LS-AR, Table 3: Blocksworld",
    "lsar.table5": "LS-AR, Table 5: text and vector state different goals",
    "audit": "Audit: attacks on text and vector, and what defends",
    "agclr.table1": "AGCLR: latent reasoning, every method",
    "agclr.prosqa": "AGCLR: every method on ProsQA",
    "agclr.ablations": "AGCLR: the concept stream without parts of it",
    "agclr.retention": "AGCLR: what later passes keep",
    "agclr.controls": "AGCLR: latents replaced, and facts that travel through them only",
}
PAPER_ARMS = ("baseline", "static_faithful", "static")
CSS = """
:root { color-scheme: light dark; --bg: #fbfbf9; --ink: #1d2125; --soft: #5c6670; --line: #d9dcdf; --card: #fff;
  --warn: #8a4b00; --warn-bg: #fff4e0; --mark: #0072b2; --good: #c9dccb; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181b; --ink: #e4e6e8; --soft: #9aa4ae; --line: #343a40;
  --card: #1c2024; --warn: #ffc46b; --warn-bg: #33270f; --mark: #6bb8ea; --good: #41584a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 84rem; background: var(--bg); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .7rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
p, li { max-width: 48rem; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
.lead { font-size: 1.05rem; } .swatch { display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  margin-right: .5em; }
.warn { color: var(--warn); background: var(--warn-bg); border-left: 4px solid var(--warn); padding: .6rem 1rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; background: var(--card); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide > table { width: 100%; }
th, td { padding: .4rem .5rem; font-size: .92rem; text-align: right; vertical-align: top; white-space: nowrap;
  border-top: 1px solid var(--line); font-weight: 400; line-height: 1.3; }
thead th { border-top: 0; vertical-align: bottom; font-weight: 600; } tbody tr > th { text-align: left; }
tr.metric th { text-align: left; font-weight: 600; padding-top: .9rem; }
.wide tr > :first-child { position: sticky; left: 0; background: var(--card); }
td b { font-weight: 600; } td small, th small { display: block; color: var(--soft); font-weight: 400;
  font-size: .72rem; } td small.paper { color: var(--mark); } .edge { border-left: 2px solid var(--mark); }
figure { margin: 0 0 1.2rem; } figure.narrow > * { max-width: 46rem; }
figure img, figure > svg { display: block; width: 100%; height: auto; background: #fff; padding: .5rem;
  border: 1px solid var(--line); border-radius: 6px; } figcaption { margin: .5rem 0 0; max-width: 48rem; }
pre { overflow-x: auto; padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; } code, pre { font: .88rem/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; }
table.facts th, table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; padding: .25rem .8rem;
  font-size: .9rem; } table.facts th { color: var(--soft); width: 16rem; }
.bar { display: flex; height: .6rem; width: 6.2rem; margin: .25rem 0 .2rem auto; }
.bar i, .legend i { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.legend i { display: inline-block; width: .8em; height: .8em; margin: 0 .4em 0 1.2em; }
.plans { display: flex; gap: 3rem; flex-wrap: wrap; } li.forced { color: #c1121f; font-weight: 600; }
details summary { cursor: pointer; margin: .8rem 0 .4rem; font-weight: 600; }
"""


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` and its PNGs into a run directory; returns the page's path.

    Raises ValueError in one line where `results.json` is missing or malformed, or `tsne.json` does not fit.
    """
    run_dir = Path(run_dir)
    results = load_results(run_dir / "results.json")
    losses, unreadable = _read_losses(run_dir)
    tsne = _read_tsne(run_dir / "tsne.json")
    entries = merge_seeds([results])
    logged = sorted(arm for curves in losses.values() for arm in curves)
    looks = pictures.arm_looks(results["table"], [entry.arm for entry in entries] + logged + list(tsne.get("arms", [])))
    sections = []
    with pictures.style():
        if results["table"] == "lsar.table1":
            sections += _table1_sections(run_dir, entries, looks)
        if results["table"] == "lsar.table3":
            sections += _table3_sections(run_dir, entries, looks)
        if results["table"] in ("lsar.table5", "audit"):
            sections += audit_pictures.sections(run_dir, results, entries, lambda *drawn: _figure(run_dir, *drawn))
        if results["table"].startswith("agclr."):
            sections += _agclr_sections(run_dir, entries, looks)
        if tsne:
            where = ", ".join(f"{name} = {tsne[name]:.3g}" for name in ("H", "W", "perplexity") if name in tsne)
            caption = (
                f"Decoder states where the item is to be named, the passcode before it forced ({where}); a mark is a "
                "problem, colour and shape its item. Only neighbourhoods mean something: axes and distances between "
                "clusters do not. The silhouette is 1 for tight clusters by goal and about 0 or below for a mixture."
            )
            figure = _figure(
                run_dir, "tsne", "Decoder states by goal", pictures.tsne_figure(tsne["arms"], looks), caption
            )
            sections.append(f"<h2>Decoder states by goal, t-SNE (Fig. 4b)</h2>{figure}")
        if losses:
            torn = f" Left out: {unreadable} lines of the logs that could not be read." if unreadable else ""
            caption = (
                "Faint: every logged value; strong: running mean. Stages have objectives of their own, so losses "
                f"compare within a panel only.{torn}"
            )
            figure = _figure(run_dir, "loss", "Training loss", pictures.loss_figure(losses, looks), caption)
            sections.append(f"<h2>Training loss</h2>{figure}")
    page = run_dir / "report.html"
    page.write_text(_page(results, pivot(entries), looks, sections), encoding="utf-8")
    return page


def _table1_sections(folder: Path, entries: Sequence[Entry], looks: Mapping[str, Look]) -> list[str]:
    """Treasure Hunt: recall over the distance H and, with arms beyond the paper's, what each change bought."""
    drawn = [e for e in entries if {"H", "W"} <= e.where.keys() and e.metric in ("item_exact", "code_exact")]
    if not drawn:
        return []
    caption = (
        "Share of problems answered after H tokens. Right of the dashed line the prompt has left the window W and only "
        "a channel beside the text can still carry it. Bands: 95% intervals."
    )
    figure = _figure(folder, "recall", "Recall over H, by arm", pictures.recall_figure(drawn, looks), caption)
    sections = [f"<h2>Recall over distance (Fig. 4a)</h2>{figure}"]
    place = past_window(drawn)
    if place and any(entry.arm not in PAPER_ARMS for entry in drawn):
        here = [e for e in drawn if (e.where["H"], e.where["W"]) == place]
        caption = (
            f"All arms at H = {place[0]} ({place[0] / place[1]:.3g} W), the prompt out of view. Lines: 95% intervals."
        )
        figure = _figure(folder, "ablation", "Arms compared", pictures.ladder_figure(here, looks), caption)
        sections.append(f"<h2>What bought what</h2>{figure}{_ladder_html(here, looks)}")
    return sections


def _table3_sections(folder: Path, entries: Sequence[Entry], looks: Mapping[str, Look]) -> list[str]:
    """Blocksworld: success over K and over N, a rollout in motion, where plans fail, how the vector moves."""
    # The files beside the results first: a bad one is then named before anything is drawn.
    inside = _read_side_file(folder / "rollouts.json", lambda rollouts: _rollout_html(folder, rollouts, looks))
    failures = _failures_html(folder, entries, looks)
    inside += [f"<h2>Where plans fail</h2>{failures}"] if failures else []
    inside += _read_side_file(folder / "vectors.json", lambda vectors: _vectors_html(folder, vectors["arms"], looks))
    inside += _read_side_file(folder / "trigger.json", lambda cost: _trigger_html(folder, cost))
    fewest = min(entry.where["N"] for entry in entries)
    over_k = [entry for entry in entries if entry.where["N"] == fewest]
    over_n = [entry for entry in entries if entry.where["K"] == 0]
    caption = (
        f"Share of problems with {fewest} blocks whose goal is reached after K forced sub-optimal actions, in closed "
        "loop. W is what the text channel sees. Bars: 95% intervals; arms stand side by side to be told apart."
    )
    drawn = planning_pictures.success_figure(over_k, looks, "K")
    sections = [f"<h2>Success under perturbations</h2>{_figure(folder, 'success', 'Success over K', drawn, caption)}"]
    if any(entry.where["N"] != fewest for entry in over_n):
        caption = "The same without perturbations (K = 0), by the number of blocks N."
        drawn = planning_pictures.success_figure(over_n, looks, "N")
        figure = _figure(folder, "blocks", "Success over N", drawn, caption)
        sections.append(f"<h2>More blocks</h2>{figure}")
    return sections + inside


def _agclr_sections(folder: Path, entries: Sequence[Entry], looks: Mapping[str, Look]) -> list[str]:
    """Latent reasoning: answers by arm or by what the latents were replaced with, by stage, and what passes keep."""

    def section(title: str, name: str, figure: Figure) -> str:
        return f"<h2>{title}</h2>{_figure(folder, name, title, figure, agclr_pictures.CAPTIONS[name])}"

    sections = []
    if any("latents" in entry.where for entry in entries):
        figure = agclr_pictures.latents_figure(entries, looks)
        sections.append(section("Answers when the latents are replaced at test", "latents", figure))
    elif all("pass" not in entry.where for entry in entries):
        sections.append(section("Answers", "answers", agclr_pictures.arms_figure(entries, looks)))
    draw = {
        "stages": ("Accuracy by stage", agclr_pictures.stages_figure),
        "passes": ("What later passes keep", agclr_pictures.passes_figure),
    }
    for name, (title, make) in draw.items():
        for figure in _read_side_file(folder / f"{name}.json", lambda found, make=make: make(found, looks)):
            sections.append(section(title, name, figure))
    return sections


def _rollout_html(folder: Path, rollouts: Mapping[str, Any], looks: Mapping[str, Look]) -> str:
    svg = planning_pictures.rollout_svg(rollouts, looks)
    (folder / "rollout.svg").write_text(planning_pictures.standalone(svg), encoding="utf-8")
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
    figure = f'<figure class="narrow">{svg}<figcaption>{escape(caption)}</figcaption></figure>'
    return f"<h2>One perturbed rollout</h2>{figure}{words}"


def _vectors_html(folder: Path, movements: Mapping[str, Any], looks: Mapping[str, Look]) -> str:
    drawn = planning_pictures.movement_figure(movements, looks)
    pairs = span(movement["pairs"] for movement in movements.values())
    alphas = ", ".join(f"{looks[arm].name} {movement['alpha']:.3g}" for arm, movement in movements.items())
    caption = (
        f"Shortest plans of {pairs} problems, and the same with one sub-optimal action forced at a random step. The "
        "texts before that action, and so the vectors, are the same. Later triggers are reached by fewer plans; bands: "
        f"95% intervals over problems. Learned alpha: {alphas}."
    )
    figure = _figure(folder, "vectors", "How the tracked vector moves after a perturbation", drawn, caption)
    return f"<h2>How the vector moves after a perturbation</h2>{figure}"


def _trigger_html(folder: Path, cost: Mapping[str, Any]) -> str:
    drawn = planning_pictures.trigger_figure(cost)
    caption = (
        f"From a trigger token to the FiLM terms of the new vector, the decoder's own step left out; medians of "
        f"{cost['repeats']} interleaved rounds. Vectors of the two ways to read the whole text differ by "
        f"{cost['difference']:.1g} of their length at most."
    )
    figure = _figure(folder, "trigger", "Cost of a trigger over its place in the text", drawn, caption)
    return f"<h2>What a trigger costs</h2>{figure.replace('<figure>', '<figure class=narrow>')}"


OUTCOMES = {
    "solved": ("solved", "var(--good)"),
    "illegal": ("illegal action", "#d55e00"),
    "malformed": ("no action at all", "#882255"),
    "stopped_early": ("end before the goal", "#e69f00"),
    "step_limit": ("step limit", "#56b4e9"),
}
"""What becomes of a plan: its words and its colour. The kinds of failure are those of `PlanScore`."""


def _failures_html(folder: Path, entries: Sequence[Entry], looks: Mapping[str, Look]) -> str:
    """One row an arm and window, one column a (K, N); empty where no arm has its scores beside it."""
    table = pivot(entries)
    titles = map(table.title, table.columns)
    heads = "".join(f"<th>{escape(head)}<small>{escape(under)}</small></th>" for head, under in titles)
    lines = []
    for (_, arm, rest), row in table.rows.items():
        cells = [_failure_cell(folder, row[column]) if column in row else "" for column in table.columns]
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


def _failure_cell(folder: Path, entry: Entry) -> str:
    """A bar and three numbers from the scores of one cell; empty where there are none."""
    tag = "-".join(f"{name}{entry.where[name]}" for name in ("K", "N", "W"))
    found = _read_side_file(folder / entry.arm / f"scores-{tag}.json", plan_outcomes)
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


# --- reading ---


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


Made = TypeVar("Made")


def _read_side_file(path: Path, use: Callable[[Any], Made]) -> list[Made]:
    """What `use` makes of a JSON file beside the results; nothing where there is none.

    Raises ValueError in one line where the file is not what `use` expects.
    """
    if not path.exists():
        return []
    try:
        return [use(json.loads(path.read_text(encoding="utf-8")))]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        said = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else error
        raise ValueError(f"{path}: cannot be drawn ({said}); delete it or repeat the run") from None


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


# --- the page ---


def _figure(folder: Path, name: str, alt: str, figure: Figure, caption: str) -> str:
    """Save the PNG beside the page and embed the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    (folder / f"{name}.png").write_bytes(buffer.getvalue())
    data = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _headline(entries: Sequence[Entry], looks: Mapping[str, Look]) -> str:
    """What is left once the prompt has left the window, in a few lines; empty for tables without H and W."""
    drawn = [e for e in entries if e.metric in ("item_exact", "code_exact")]
    place = past_window(drawn)
    if place is None:
        return ""
    here = [e for e in drawn if (e.where["H"], e.where["W"]) == place and e.arm in PAPER_ARMS]
    lines = [f"At H = {place[0]} ({place[0] / place[1]:.3g} W) the prompt is out of view. In percent:"]
    for metric in dict.fromkeys(e.metric for e in here):
        said = ", ".join(f"{looks[e.arm].name} {parts(e)[0]}" for e in here if e.metric == metric)
        lines.append(f"{METRICS[metric]}: {said}")
    return f'<p class="lead">{"<br>".join(map(escape, lines))}</p>'


def _arm_html(look: Look) -> str:
    fill = f"border:2px solid {look.color}" if look.dashed else f"background:{look.color}"
    return f'<span class="swatch" style="{fill}"></span>{escape(look.name)}'


def _table_html(table: Pivot, looks: Mapping[str, Look]) -> str:
    window = table.fixed.get("W")
    past = [c for c in table.columns if table.column == "H" and window and c > window]
    kind = {column: ' class="edge"' if past and column == past[0] else "" for column in table.columns}
    heads = [
        f"<th{kind[c]}>{escape(head)}<small>{ratio}</small></th>" for c in kind for head, ratio in [table.title(c)]
    ]
    lines, last = [f"<thead><tr><th></th>{''.join(heads)}</tr></thead>"], ""
    for (metric, arm, rest), row in table.rows.items():
        if metric != last:
            n = span(e.n for (other, _, _), cells in table.rows.items() if other == metric for e in cells.values())
            name = f"{escape(METRICS.get(metric, metric))}<small>n = {n} a cell</small>"
            lines.append(f'<tr class="metric"><th>{name}</th><td colspan="{len(kind)}"></td></tr>')
            last = metric
        cells = f"<th>{_arm_html(looks[arm])}<small>{escape(rest)}</small></th>"
        for column in table.columns:
            content = "–"
            if column in row:
                ours, interval, paper = parts(row[column])
                content = f'<b>{ours}</b><small>{interval}</small><small class="paper">{paper}</small>'
            cells += f"<td{kind[column]}>{content}</td>"
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _ladder_html(entries: Sequence[Entry], looks: Mapping[str, Look]) -> str:
    """Arms as rows in their order; beside each value the change from the row above."""
    arms, metrics = ({getattr(e, name): None for e in entries} for name in ("arm", "metric"))
    cell = {(e.arm, e.metric): e for e in entries}
    lines = [f"<tr><th></th>{''.join(f'<th>{escape(METRICS[m])}</th><th>change</th>' for m in metrics)}</tr>"]
    above = ""
    for arm in arms:
        cells = f"<th>{_arm_html(looks[arm])}</th>"
        for metric in metrics:
            ours, interval, _ = parts(cell[arm, metric])
            change = f"{100 * (cell[arm, metric].value - cell[above, metric].value):+.1f}" if above else ""
            cells += f"<td><b>{ours}</b><small>{interval}</small></td><td>{change}</td>"
        lines.append(f"<tr>{cells}</tr>")
        above = arm
    table = f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"
    return f'<div class="wide">{table}</div><p class="soft">Change: from the row above, in percentage points.</p>'


def _facts(facts: Mapping[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in texts.items())
    return f'<div class="wide"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _page(results: Mapping[str, Any], table: Pivot, looks: Mapping[str, Look], sections: Iterable[str]) -> str:
    name: str = results["table"]
    title = TABLES.get(name, name)
    scale, seed, commit, machine = (results[name] for name in ("scale", "seed", "commit", "machine"))
    minutes, seconds = divmod(round(results["wall_s"]), 60)
    wall = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    doubts = ["the working tree had uncommitted changes"] if results["dirty"] else []
    doubts += ["a smoke run shows that the code runs, not what it achieves"] if scale == "smoke" else []
    warning = f'<p class="warn">For looking, not for quoting: {"; ".join(doubts)}.</p>' if doubts else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in results.get("notes", []))
    edge = (
        " The vertical line stands before the first H beyond W." if table.column == "H" and "W" in table.fixed else ""
    )
    run = {
        "commit": commit + (" (with uncommitted changes)" if results["dirty"] else ""),
        "scale": scale,
        "seed": seed,
        "wall time": wall,
        "data hash": results["data_hash"],
    }
    run |= flat(machine) if isinstance(machine, dict) else {"machine": machine}
    entries = [entry for row in table.rows.values() for entry in row.values()]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} ({scale}, seed {seed})</title><style>{CSS}</style></head><body>
<h1>{escape(title)}</h1>
<p class="soft">Scale {scale}, one seed ({seed}), commit <code>{escape(commit[:10])}</code>, {wall}</p>
{warning}
{_headline(entries, looks)}
{f"<h2>Read with care</h2><ul>{notes}</ul>" if notes else ""}
<h2>Paper and ours{escape(f" ({conditions(table.fixed)})" if table.fixed else "")}</h2>
{_table_html(table, looks)}
<p class="soft">{reading(table, [seed])} In blue, where there is one, the paper's value.{edge}</p>
{"".join(sections)}
<h2>Repeat this run</h2><pre>{escape(results["command"])}</pre>
{_facts(run)}
<h2>Settings</h2>{_facts(flat(results["settings"]))}
<h2>Versions</h2>{_facts(results["versions"])}
</body></html>
"""
