"""`sidestream eval`: what a trained channel is worth past the window."""

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

USAGE = "sidestream eval --model DIR --data FILE.jsonl [--window W] [--limit N]"
ABOUT = """Predict the scored tokens of every record from the last W tokens before them, with the goal in the channel,
without it, with another record's, and with the goal's text put back at the head of the window, which costs its tokens.
Writes eval.json into the model's folder and the table into its card."""


def run(words: list[str], parser_class: Any, add_fields: Any) -> int:
    """Evaluate a saved channel. Returns the exit status."""
    options: Options = {
        "model": (str | None, None, "what `sidestream train` wrote"),
        "base": (str | None, None, "the base model, where it is no longer where the file says"),
        "data": (str | None, None, "file, glob or hub:owner/name[:config]"),
        "split": (str, "test", "which split of a hub data set"),
        "goal_from": (str | None, None, GOAL_FROM),
        "window": (int | None, None, "W, the tokens in view; null: as in training"),
        "limit": (int | None, None, "only the first N records"),
        "batch_size": (int, 16, "rows at a time"),
        "arms": (list[str], ["channel", "closed", "swapped", "in_text"], "channel, closed, swapped, in_text, sinks"),
        "out": (str | None, None, "file for the results; without it eval.json in the model's folder"),
    }
    parser = command_parser(parser_class, USAGE, ABOUT, options)
    given = parsed(parser, words, "model", "data")
    for name in ("window", "limit", "batch_size"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ValueError(f"--{name} is {getattr(given, name)}; it must be at least 1")
    records = read_goals(given.data, split=given.split, goal_from=given.goal_from)[: given.limit]

    from sidestream.commands.generate import load_run
    from sidestream.evaluation.goals import ARMS, goal_cells, goal_outcomes
    from sidestream.lm.models.base import chat_template, offsets
    from sidestream.lm.saving.card import CARD, EVALUATION, write_card
    from sidestream.lm.texts.prompts import opening, prompt_ids

    started = time.monotonic()
    model, settings = load_run(given.model, given.base)
    tokenizer: Any = model.tokenizer
    window = given.window or settings.get("window", 256)
    template = chat_template(tokenizer)
    plain, chat = offsets(tokenizer, special=True), offsets(tokenizer, special=False)
    texts = [tokens(record, template, plain if record.trajectory is not None else chat) for record in records]
    arms = list(given.arms)
    if len({record.goal for record in records}) < 2 and "swapped" in arms:
        arms.remove("swapped")
        print("all records have one goal: there is no other to swap it for", file=sys.stderr)
    outcomes = goal_outcomes(
        model,
        texts,
        [prompt_ids(tokenizer, record.goal) for record in records],
        window=window,
        heads=[prompt_ids(tokenizer, record.goal + "\n") for record in records],
        opening=opening(tokenizer),
        arms=arms,
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
    out = Path(given.out or (folder / EVALUATION if folder.is_dir() else EVALUATION))  # a hub id is no folder
    write_whole(out, json.dumps(found, indent=1) + "\n")
    if not given.out and (folder / CARD).exists():
        write_card(folder)
    _print(cells, {str(arm): about for arm, about in ARMS.items()}, len(records), window)
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
    for arm in dict.fromkeys(cell["arm"] for cell in cells):
        row = [arms[arm]]
        if exact:
            cell = by[arm, "accuracy"]
            row.append(f"{cell['value']:.1%} [{cell['ci'][0]:.1%}, {cell['ci'][1]:.1%}]")
        cell = by[arm, "loss"]
        row.append(f"{cell['value']:.3f} [{cell['ci'][0]:.3f}, {cell['ci'][1]:.3f}]")
        row.append(f"{by[arm, 'goal_tokens']['value']:.0f}")
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
