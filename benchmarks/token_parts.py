"""Where a token's time goes: the parts of a Dynamic token, of a Static rollout and of the baselines beside them.

    python benchmarks/token_parts.py [--cpu] [--repeats 15] [--out results/token_parts/cpu-seed0.json]

Sizes are those of Tables 2 and 4, batch 1, fp32; Table 4 with rotary positions and a rolling window. Parts take turns;
the value is the median in milliseconds. `sum of the parts` puts Table 4's together for a trigger every 3.5 tokens, `a
token, as decoded` is what a scripted rollout really took: the two agree if nothing is left out. `bound` is what the
bytes of the weights need at the bandwidth measured in the same rounds.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

PERIOD = 3.5
"""Tokens from one trigger to the next: actions of 3 and 4 tokens take turns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu time, on a machine that is busy")
    parser.add_argument("--cpu", action="store_true", help="not on the GPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    import torch

    from sidestream.experiments.provenance import provenance, write_whole
    from sidestream.experiments.results import cell as cell_of
    from sidestream.experiments.run import results_of
    from sidestream.lm.decoding.cache import Window
    from sidestream.lm.decoding.decode import LeanDecoder
    from sidestream.papers.lsar import speed

    torch.set_num_threads(args.threads)
    started = time.monotonic()
    clock = speed.Clock(args.clock)

    def timed(function):
        start = clock()
        function()
        return clock() - start

    def token(rollout, ids):
        """One more token, forgotten again: every round finds the same ring."""
        ring = rollout.ring
        seen = ring.seen
        rollout._static(ids)
        ring.seen = seen

    def reading(rollout, ids):
        decoder, ring = rollout.decoder, rollout.read
        seen = ring.seen
        decoder.reader.run(ids, ring, depth=decoder.depth)
        ring.seen = seen

    cells = []
    with torch.no_grad():
        # Table 4: small vocabulary, an update at every comma.
        plan = speed.table4("cpu")
        torch.manual_seed(plan.seed)
        model = speed.conditioned(plan, "fp32", dynamic=True, family="llama")
        large = speed.bare(plan, plan.large_layers, "fp32", family="llama")
        window = Window(size=32, policy="rolling")
        text = speed.texts(plan, 1, plan.goal_tokens + 56)
        goal = model.encode_goal(text[:, : plan.goal_tokens])
        decoders = {name: LeanDecoder(lm, window=window) for name, lm in (("dynamic", model), ("large", large))}
        decoders["small"] = decoders["dynamic"]  # with its channel closed
        rollouts = {}
        for name, decoder in decoders.items():
            rollouts[name] = decoder.start(1, capacity=512, goal=goal if name == "dynamic" else None)
            rollouts[name].force(text)
            rollouts[name].force(text[:, :1])  # from here on the ring holds W tokens and no mask is needed
        own = rollouts["dynamic"]
        states = torch.randn(1, plan.width, device=text.device)
        parts = {
            ("large", "a token, 10 blocks"): partial(token, rollouts["large"], text[:, :1]),
            ("small", "a token, 4 blocks"): partial(token, rollouts["small"], text[:, :1]),
            ("dynamic", "D_base: a token, 4 blocks"): partial(token, own, text[:, :1]),
            ("dynamic", "tracker and FiLM projection"): partial(own.tracked.move, states, None),
            ("dynamic", "FiLM folded into the norms"): lambda: own.stack.fold(own._terms()),
        }
        for count in range(1, 6):
            parts["dynamic", f"E_base: {count} tokens in one piece"] = partial(reading, own, text[:, :count])
        functions: dict[Any, Any] = {key: partial(timed, function) for key, function in parts.items()}
        whole = "a token, as decoded"
        for name, decoder in decoders.items():
            state = goal if name == "dynamic" else None
            functions[name, whole] = partial(speed._decoding, decoder, text, 56, state, clock, True)
        matrices = torch.rand(2**15, 1024, device=text.device)  # 134 MB: no cache holds it
        functions["bound", "read"] = partial(timed, matrices.sum)
        seconds = speed.interleaved(functions, args.repeats)
        rate = matrices.nbytes / statistics.median(seconds.pop(("bound", "read")))

        def add(table, arm, part, samples):
            found = speed.timed(f"{arm}: {part}", "ms", {"table": table}, [1e3 * one for one in samples])
            cells.append(cell_of(found, speed.TABLES[0]))

        for (arm, part), samples in seconds.items():
            add("4", arm, part, samples)
        spent = {part: samples for (arm, part), samples in seconds.items() if arm == "dynamic"}
        once = ("tracker and FiLM projection", "FiLM folded into the norms")
        trigger = [sum(parts) for parts in zip(*(spent[part] for part in once), strict=True)]
        read = [(a + b) / 2 for a, b in zip(*(spent[f"E_base: {n} tokens in one piece"] for n in (3, 4)), strict=True)]
        every = zip(spent["D_base: a token, 4 blocks"], read, trigger, strict=True)
        add("4", "dynamic", "sum of the parts", [d + (r + t) / PERIOD for d, r, t in every])
        size = sum(p.numel() for p in model.lm.model.layers.parameters()) * 4
        add("4", "bound", "weights of 4 blocks at the bandwidth measured", [size / rate])

        # Table 2: GPT-2's vocabulary; a goal is encoded once.
        plan = speed.table2("cpu")
        torch.manual_seed(plan.seed)
        model = speed.conditioned(plan, "fp32", dynamic=False)
        large = speed.bare(plan, plan.large_layers, "fp32")
        text = speed.texts(plan, 1, 128)
        goals = text[:, : plan.goal_tokens]
        goal = model.encode_goal(goals)
        decoders = {name: LeanDecoder(lm, window=128) for name, lm in (("static", model), ("large", large))}
        decoders["small"] = decoders["static"]
        functions = {("static", "goal of 13 tokens encoded"): partial(speed._encoding, model, goals, clock)}
        for name, decoder in decoders.items():
            state = goal if name == "static" else None
            functions[name, whole] = partial(speed._decoding, decoder, text, 24, state, clock, False)
        seconds = speed.interleaved(functions, args.repeats)
        for (arm, part), samples in seconds.items():
            add("2", arm, part, samples)

    origin = {**provenance(shlex.join(["python", *sys.argv])), "data_hash": "random weights and text of seed 0"}
    results = results_of(
        replace(plan, table="token_parts"), origin, started, notes=[(__doc__ or "").split("\n\n")[2]], cells=cells
    )
    for one in cells:
        print(f"Table {one['where']['table']}  {one['arm']:<50} {one['value']:8.2f} ms")
    if args.out is not None:
        write_whole(args.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
