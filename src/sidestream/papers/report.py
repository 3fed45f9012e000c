"""One self-contained HTML page from a run directory, with its pictures as PNGs beside it.

Reads files only: `results.json` (format: `results.py`), every `metrics.jsonl` below the directory, and `tsne.json`
where one is there. A table that wants pictures of its own gets one function like `_table1_sections`; the table of
numbers, t-SNE, loss curves and provenance come with any results file.
"""

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sidestream.papers import pictures
from sidestream.papers.results import (
    METRICS,
    Entry,
    Pivot,
    arm_name,
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

TABLES = {"lsar.table1": "LS-AR, Table 1: Treasure Hunt", "lsar.table3": "LS-AR, Table 3: Blocksworld"}
PAPER_ARMS = ("baseline", "static_faithful", "static")
CSS = """
:root { color-scheme: light dark; --bg: #fbfbf9; --ink: #1d2125; --soft: #5c6670; --line: #d9dcdf; --card: #fff;
  --warn: #8a4b00; --warn-bg: #fff4e0; --mark: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181b; --ink: #e4e6e8; --soft: #9aa4ae; --line: #343a40;
  --card: #1c2024; --warn: #ffc46b; --warn-bg: #33270f; --mark: #6bb8ea; } }
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
  font-size: .72rem; } td small.paper { color: var(--mark); }
.edge { border-left: 2px solid var(--mark); }
figure { margin: 0 0 1.2rem; } figure img { display: block; width: 100%; height: auto; background: #fff; padding: .5rem;
  border: 1px solid var(--line); border-radius: 6px; } figcaption { margin: .5rem 0 0; max-width: 48rem; }
pre { overflow-x: auto; padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; } code, pre { font: .88rem/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; }
table.facts th, table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; padding: .25rem .8rem;
  font-size: .9rem; } table.facts th { color: var(--soft); width: 16rem; }
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
    colors = pictures.arm_colors([entry.arm for entry in entries] + logged)
    sections = []
    with pictures.style():
        if results["table"] == "lsar.table1":
            sections += _table1_sections(run_dir, entries, colors)
        if results["table"] == "lsar.table3":
            sections += _table3_sections(run_dir, entries, colors)
        if tsne:
            where = ", ".join(f"{name} = {tsne[name]:.3g}" for name in ("H", "W", "perplexity") if name in tsne)
            caption = (
                f"Decoder states where the item is to be named, the passcode before it forced ({where}); a mark is a "
                "problem, colour and shape its item. Only neighbourhoods mean something: axes and distances between "
                "clusters do not. The silhouette is 1 for tight clusters by goal and about 0 or below for a mixture."
            )
            figure = _figure(run_dir, "tsne", "Decoder states by goal", pictures.tsne_figure(tsne["arms"]), caption)
            sections.append(f"<h2>Decoder states by goal, t-SNE (Fig. 4b)</h2>{figure}")
        if losses:
            torn = f" Left out: {unreadable} lines of the logs that could not be read." if unreadable else ""
            caption = (
                "Faint: every logged value; strong: running mean. Stages have objectives of their own, so losses "
                f"compare within a panel only.{torn}"
            )
            figure = _figure(run_dir, "loss", "Training loss", pictures.loss_figure(losses, colors), caption)
            sections.append(f"<h2>Training loss</h2>{figure}")
    page = run_dir / "report.html"
    page.write_text(_page(results, pivot(entries), colors, sections), encoding="utf-8")
    return page


def _table1_sections(folder: Path, entries: Sequence[Entry], colors: Mapping[str, str]) -> list[str]:
    """Treasure Hunt: recall over the distance H and, with arms beyond the paper's, what each change bought."""
    drawn = [e for e in entries if {"H", "W"} <= e.where.keys() and e.metric in ("item_exact", "code_exact")]
    if not drawn:
        return []
    caption = (
        "Share of problems answered after H tokens. Right of the dashed line the prompt has left the window W and only "
        "a channel beside the text can still carry it. Bands: 95% intervals."
    )
    figure = _figure(folder, "recall", "Recall over H, by arm", pictures.recall_figure(drawn, colors), caption)
    sections = [f"<h2>Recall over distance (Fig. 4a)</h2>{figure}"]
    place = past_window(drawn)
    if place and any(entry.arm not in PAPER_ARMS for entry in drawn):
        here = [e for e in drawn if (e.where["H"], e.where["W"]) == place]
        caption = (
            f"All arms at H = {place[0]} ({place[0] / place[1]:.3g} W), the prompt out of view. Lines: 95% intervals."
        )
        figure = _figure(folder, "ablation", "Arms compared", pictures.ladder_figure(here, colors), caption)
        sections.append(f"<h2>What bought what</h2>{figure}{_ladder_html(here, colors)}")
    return sections


def _table3_sections(folder: Path, entries: Sequence[Entry], colors: Mapping[str, str]) -> list[str]:
    """Blocksworld: success over perturbations at the trained number of blocks, a panel a window."""
    trained = min(entry.where["N"] for entry in entries)
    drawn = [entry for entry in entries if entry.where["N"] == trained]
    caption = (
        f"Share of problems with {trained} blocks whose goal is reached after K forced sub-optimal actions, in closed "
        "loop. W is what the text channel sees. Bands: 95% intervals."
    )
    figure = _figure(folder, "success", "Success over K, by arm", pictures.success_figure(drawn, colors), caption)
    return [f"<h2>Success under perturbations</h2>{figure}"]


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


def _headline(entries: Sequence[Entry]) -> str:
    """What is left once the prompt has left the window, in a few lines; empty for tables without H and W."""
    drawn = [e for e in entries if e.metric in ("item_exact", "code_exact")]
    place = past_window(drawn)
    if place is None:
        return ""
    here = [e for e in drawn if (e.where["H"], e.where["W"]) == place and e.arm in PAPER_ARMS]
    lines = [f"At H = {place[0]} ({place[0] / place[1]:.3g} W) the prompt is out of view. In percent:"]
    for metric in dict.fromkeys(e.metric for e in here):
        said = ", ".join(f"{arm_name(e.arm)} {parts(e)[0]}" for e in here if e.metric == metric)
        lines.append(f"{METRICS[metric]}: {said}")
    return f'<p class="lead">{"<br>".join(map(escape, lines))}</p>'


def _arm_html(arm: str, colors: Mapping[str, str]) -> str:
    return f'<span class="swatch" style="background:{colors[arm]}"></span>{escape(arm_name(arm))}'


def _table_html(table: Pivot, colors: Mapping[str, str]) -> str:
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
        cells = f"<th>{_arm_html(arm, colors)}<small>{escape(rest)}</small></th>"
        for column in table.columns:
            content = "–"
            if column in row:
                ours, interval, paper = parts(row[column])
                content = f'<b>{ours}</b><small>{interval}</small><small class="paper">{paper}</small>'
            cells += f"<td{kind[column]}>{content}</td>"
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _ladder_html(entries: Sequence[Entry], colors: Mapping[str, str]) -> str:
    """Arms as rows in their order; beside each value the change from the row above."""
    arms, metrics = ({getattr(e, name): None for e in entries} for name in ("arm", "metric"))
    cell = {(e.arm, e.metric): e for e in entries}
    lines = [f"<tr><th></th>{''.join(f'<th>{escape(METRICS[m])}</th><th>change</th>' for m in metrics)}</tr>"]
    above = ""
    for arm in arms:
        cells = f"<th>{_arm_html(arm, colors)}</th>"
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


def _page(results: Mapping[str, Any], table: Pivot, colors: Mapping[str, str], sections: Iterable[str]) -> str:
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
{_headline(entries)}
{f"<h2>Read with care</h2><ul>{notes}</ul>" if notes else ""}
<h2>Paper and ours{escape(f" ({conditions(table.fixed)})" if table.fixed else "")}</h2>
{_table_html(table, colors)}
<p class="soft">{reading(table, [seed])} In blue, where there is one, the paper's value.{edge}</p>
{"".join(sections)}
<h2>Repeat this run</h2><pre>{escape(results["command"])}</pre>
{_facts(run)}
<h2>Settings</h2>{_facts(flat(results["settings"]))}
<h2>Versions</h2>{_facts(results["versions"])}
</body></html>
"""
