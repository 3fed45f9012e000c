"""Latent passes, timed side by side: the engine against a loop written from the description of the authors' code.

The loop rebuilds its inputs as nested Python lists of vectors in every pass and takes the logits of every position; it
generates one row at a time and without a cache. Both run on the same model, in one process, turn about, and must agree
before they are timed. Prints medians and, last, the ratios; `--out` writes results in the project's format, with every
round.

    python benchmarks/latent_passes.py [--device cuda] [--sizes 128x2 768x12x50260] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from sidestream import attach
from sidestream.channels import StreamConfig
from sidestream.experiments.provenance import provenance, write_whole
from sidestream.experiments.results import cell, check_results
from sidestream.lm.decoding.cache import CACHE_NAME
from sidestream.lm.decoding.layout import Layout, Row, collate
from sidestream.lm.decoding.passes import PassConfig, latent_generate, latent_passes, next_token_loss
from sidestream.papers.lsar import speed


def described_forward(lm: Any, stream: Any, batch: dict[str, Tensor], latent_id: int) -> tuple[Tensor, Tensor]:
    """(B, T, V) logits and (B, T, D) inputs; slots in shared columns, keys and values kept from pass to pass."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    slots = [[t for t, token in enumerate(row) if token == latent_id] for row in ids.tolist()]
    count = max(map(len, slots))
    embeds, cache, logits = lm.get_input_embeddings()(ids), DynamicCache(config=lm.config), []
    states = [stream.start(embeds[b : b + 1, 0]) for b in range(len(ids))] if stream is not None else []
    start, end = 0, min((row[0] for row in slots if row), default=ids.shape[1])
    for number in range(count + 1):
        feed = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], CACHE_NAME: cache}
        out = lm(inputs_embeds=embeds[:, start:end], use_cache=True, output_hidden_states=True, **feed)
        logits.append(out.logits)
        if number == count:
            break
        vectors = [[embeds[b, t] for t in range(ids.shape[1])] for b in range(len(ids))]
        for b, row in enumerate(slots):
            if len(row) > number:
                hidden = out.hidden_states[-1][b, row[number] - 1 - start][None]
                if stream is not None:
                    hidden, states[b] = stream(hidden, states[b])
                vectors[b][row[number]] = hidden[0]
        embeds = torch.stack([torch.stack(row) for row in vectors])
        start, end = end, end + 1 if number + 1 < count else ids.shape[1]
    return torch.cat(logits, dim=1), embeds


def described_loss(lm: Any, stream: Any, batch: dict[str, Tensor], latent_id: int) -> Tensor:
    """Cross-entropy over every position, ignored ones included."""
    logits, _ = described_forward(lm, stream, batch, latent_id)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@torch.no_grad()
def described_generate(lm: Any, stream: Any, prompts: list[list[int]], latent_id: int, new: int) -> list[list[int]]:
    """One row after the other; the whole sequence again for every token."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=lm.device)
        logits, embeds = described_forward(
            lm, stream, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, latent_id
        )
        row = [int(logits[0, -1].argmax())]
        while len(row) < new:
            token = torch.tensor([[row[-1]]], device=lm.device)
            embeds = torch.cat([embeds, lm.get_input_embeddings()(token)], dim=1)
            row.append(int(lm(inputs_embeds=embeds, use_cache=False).logits[0, -1].argmax()))
        rows.append(row)
    return rows


def timed(functions: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each in every round, taken turn about. They have run before, to be compared."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measured(args: argparse.Namespace, width: int, layers: int, vocabulary: int) -> list[dict[str, Any]]:
    """Cells of one model size: both ratios, and the milliseconds they are made of."""
    torch.manual_seed(0)
    drawn = random.Random(0)
    heads = max(1, width // 64)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    sizes = {"vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": heads}
    lm = GPT2LMHeadModel(GPT2Config(**sizes, **none)).to(args.device)
    model = attach(lm, stream=StreamConfig())
    start_id, latent_id, end_id = range(vocabulary - 3, vocabulary)
    layout, config = Layout(start_id=start_id, latent_id=latent_id, end_id=end_id), PassConfig(latent_id=latent_id)

    def text(length: int) -> list[int]:
        return [drawn.randrange(vocabulary - 3) for _ in range(length)]

    questions = [text(drawn.randint(args.question // 2, args.question)) for _ in range(args.batch)]
    rows: list[Row] = [layout.row(question, args.latents, text(drawn.randint(4, 16))) for question in questions]
    batch = {n: t.to(args.device) for n, t in collate(rows, latent_id=latent_id, pad_id=0).items()}
    prompts = [layout.prompt(question, args.latents) for question in questions]

    def engine_loss() -> Tensor:
        passes = latent_passes(model, batch["input_ids"], config, attention_mask=batch["attention_mask"])
        return next_token_loss(model, passes, batch["labels"])

    def step(loss: Callable[[], Tensor]) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

        def run() -> None:
            model.train()
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        return run

    def engine_answers() -> list[list[int]]:
        return latent_generate(model, prompts, config, max_new_tokens=args.new_tokens)

    def described_answers() -> list[list[int]]:
        return described_generate(lm, model.stream, prompts, latent_id, args.new_tokens)

    torch.testing.assert_close(engine_loss(), described_loss(lm, model.stream, batch, latent_id), atol=1e-4, rtol=1e-4)
    agree = sum(a == b for a, b in zip(engine_answers(), described_answers(), strict=True))
    # A greedy tie may break the other way in float32; a wrong engine would differ in most rows.
    if agree < 0.9 * len(prompts):
        raise SystemExit(f"engine and loop agree on {agree} of {len(prompts)} answers: not the same method")

    described_step = step(lambda: described_loss(lm, model.stream, batch, latent_id))
    training = timed({"engine": step(engine_loss), "loop": described_step}, args.repeats, args.device)
    model.eval()
    evaluation = timed({"engine": engine_answers, "loop": described_answers}, args.repeats, args.device)
    where = {"model": f"{layers} blocks of {width}, {vocabulary:,} tokens"}
    found = []
    for what, times in (("training step", training), ("evaluation", evaluation)):
        ratios = speed.over(times["loop"], times["engine"])
        found.append(speed.timed(what, "engine_over_loop", where, ratios))
        found += [speed.timed(f"{what}, {name}", "ms", where, [1e3 * one for one in times[name]]) for name in times]
    return [cell(outcome, speed.TABLES[0]) for outcome in found]


def size(text: str) -> tuple[int, int, int]:
    """Width, layers and vocabulary of `128x2` or `128x2x512`; argparse makes a line of a ValueError."""
    width, layers, *vocabulary = map(int, text.split("x"))
    (tokens,) = vocabulary or [512]
    return width, layers, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    metavar, sizes = "WIDTHxLAYERS[xVOCABULARY]", "128x2, say; of 512 tokens where none are given"
    parser.add_argument("--sizes", nargs="+", type=size, default=[(128, 2, 512)], metavar=metavar, help=sizes)
    parser.add_argument("--batch", type=int, default=32, help="rows of a training step and of an evaluation batch")
    parser.add_argument("--question", type=int, default=48, help="tokens of the longest question")
    parser.add_argument("--latents", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=30, help="an answer; the paper generates 30")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="results file to write")
    args = parser.parse_args()
    if args.repeats < 5:
        parser.error("a median of fewer than 5 repeats says little; give --repeats 5 or more")
    torch.set_num_threads(args.threads)
    started = time.monotonic()
    origin = {**provenance(shlex.join(["python", *sys.argv])), "data_hash": "random weights and text of seed 0"}
    cells: list[dict[str, Any]] = []
    for width, layers, vocabulary in args.sizes:
        cells += measured(args, width, layers, vocabulary)
    for one in cells:
        samples = " ".join(f"{sample:.4g}" for sample in one["samples"])
        print(f"{one['where']['model']:<32} {one['arm']:<24} {one['value']:10.4g} {one['metric']}   of {samples}")
    for one in (one for one in cells if one["metric"] == "engine_over_loop"):
        print(f"{one['where']['model']}, {one['arm']}: the engine is {one['value']:.1f}x as fast")
    if args.out is not None:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        wall = round(time.monotonic() - started, 1)
        results = {"table": "latent_passes", "scale": "cpu", "seed": 0, **origin, "wall_s": wall, "settings": settings}
        results |= {"notes": [], "cells": cells}
        check_results(results)
        write_whole(args.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
