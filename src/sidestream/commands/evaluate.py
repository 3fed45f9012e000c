"""`sidestream eval`: what a goal is worth past the window, pinned, in a trained channel, or in the text."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from sidestream.commands.options import GOAL_FROM, Options, command_parser, parsed
from sidestream.experiments.provenance import provenance, write_whole
from sidestream.tasks.goals import goals_hash, read_goals, tokens

USAGE = "sidestream eval --model ANY --data FILE.jsonl [--window W] [--limit N] [--arms '[pinned,closed,...]']"
ABOUT = """Predict the scored tokens of every record from the last W tokens before them: with the goal in the channel of
a trained run, or pinned by a base model, without it, with another record's, and with the goal's text at the head of the
window or put back every N tokens, which costs its tokens. The relative score is an arm's share of what the goal's text
at the head is worth: 0% is no goal, 100% is the text. Writes eval.json, for a run into its folder and its card."""
RUN = ["channel", "closed", "swapped", "in_text"]
BASE = ["pinned", "closed", "swapped", "in_text", "reinserted", "sinks"]


def run(words: list[str], parser_class: Any, add_fields: Any) -> int:
    """Evaluate a saved channel. Returns the exit status."""
    options: Options = {
        "model": (str | None, None, "a base model, or what `sidestream train` wrote"),
        "base": (str | None, None, "the base model of a run, where it is no longer where the run says"),
        "data": (str | None, None, "file, glob or hub:owner/name[:config]"),
        "split": (str, "test", "which split of a hub data set"),
        "goal_from": (str | None, None, GOAL_FROM),
        "window": (int | None, None, "W, the tokens in view; null: as in training, 256 for a base model"),
        "limit": (int | None, None, "only the first N records"),
        "batch_size": (int, 16, "rows at a time"),
        "arms": (
            list[str] | None,
            None,
            "channel, pinned, closed, swapped, swapped_pinned, in_text, reinserted, sinks; null: "
            f"[{','.join(RUN)}] for a run, [{','.join(BASE)}] for a base model",
        ),
        "every": (int | None, None, "N, tokens of the text between two goals of the arm reinserted; null: W"),
        "out": (str | None, None, "file for the results; without it eval.json in the run's folder, or here"),
    }
    parser = command_parser(parser_class, USAGE, ABOUT, options)
    given = parsed(parser, words, "model", "data")
    for name in ("window", "limit", "batch_size", "every"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ValueError(f"--{name} is {getattr(given, name)}; it must be at least 1")
    records = read_goals(given.data, split=given.split, goal_from=given.goal_from)[: given.limit]

    from sidestream.commands.generate import load_run
    from sidestream.evaluation.goals import ARMS, goal_cells, goal_outcomes
    from sidestream.lm.models.base import chat_template, offsets
    from sidestream.lm.saving.card import CARD, EVALUATION, write_card
    from sidestream.lm.saving.channel import CONFIG_FILE
    from sidestream.lm.texts.prompts import opening, prompt_ids

    started = time.monotonic()
    pins = {"pinned", "swapped_pinned"} & set(given.arms or [])
    model, settings = load_run(given.model, given.base, pinned=True if pins else None)
    tokenizer: Any = model.tokenizer
    window = given.window or settings.get("window", 256)
    template = chat_template(tokenizer)
    plain, chat = offsets(tokenizer, special=True), offsets(tokenizer, special=False)
    texts = [tokens(record, template, plain if record.trajectory is not None else chat) for record in records]
    arms: list[Any] = list(given.arms or (BASE if model.channel is None else RUN))
    if len({record.goal for record in records}) < 2 and {"swapped", "swapped_pinned"} & set(arms):
        arms = [arm for arm in arms if arm not in ("swapped", "swapped_pinned")]
        print("all records have one goal: there is no other to swap it for", file=sys.stderr)
    outcomes = goal_outcomes(
        model,
        texts,
        [prompt_ids(tokenizer, record.goal) for record in records],
        window=window,
        heads=[prompt_ids(tokenizer, record.goal + "\n") for record in records],
        opening=opening(tokenizer),
        arms=arms,
        every=given.every,
        batch_size=given.batch_size,
    )
    exact = all(record.answer is not None for record in records)
    cells = goal_cells(outcomes, {"W": window}, exact=exact)
    digest = goals_hash(records)
    found = {
        **provenance("sidestream eval " + shlex.join(words)),
        "model": given.model,
        "data": given.data,
        "data_hash": digest,
        "wall_s": round(time.monotonic() - started, 1),
        "cells": cells,
    }
    folder = Path(given.model)
    run_folder = (folder / CONFIG_FILE).is_file()  # a hub id is no folder, and a base model's stays as it is
    out = Path(given.out or (folder / EVALUATION if run_folder else EVALUATION))
    write_whole(out, json.dumps(found, indent=1) + "\n")
    if not given.out and (folder / CARD).exists():
        write_card(folder)
    _print(cells, {str(arm): about for arm, about in ARMS.items()}, len(records), window)
    if {"closed", "in_text"} <= set(arms) and not any(cell["metric"].startswith("relative") for cell in cells):
        print("no relative scores: at the head of the window the goals' text is worth nothing here", file=sys.stderr)
    print(f"results {out}")
    return 0


def _print(cells: list[dict[str, Any]], arms: dict[str, str], n: int, window: int) -> None:
    from rich.console import Console
    from rich.table import Table

    by = {(cell["arm"], cell["metric"]): cell for cell in cells}
    exact = any(cell["metric"] == "accuracy" for cell in cells)
    table = Table(title=f"n = {n}, W = {window}", title_justify="left")
    table.add_column("goal")
    if exact:
        table.add_column("answers right", justify="right")
    table.add_column("loss a token", justify="right")
    table.add_column("slots for the goal", justify="right")
    relative = [name for name in ("relative", "relative_accuracy") if any(name == metric for _, metric in by)]
    for name in relative:
        table.add_column("relative score" + (", answers" if name == "relative_accuracy" else ""), justify="right")
    for arm in dict.fromkeys(cell["arm"] for cell in cells):
        row = [arms[arm]]
        if exact:
            cell = by[arm, "accuracy"]
            row.append(f"{cell['value']:.1%} [{cell['ci'][0]:.1%}, {cell['ci'][1]:.1%}]")
        cell = by[arm, "loss"]
        row.append(f"{cell['value']:.3f} [{cell['ci'][0]:.3f}, {cell['ci'][1]:.3f}]")
        row.append(f"{by[arm, 'goal_tokens']['value']:.0f}")
        row += [f"{by[arm, name]['value']:.0%}" for name in relative]
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
