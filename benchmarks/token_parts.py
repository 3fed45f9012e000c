"""Where a token's time goes: the parts of a Dynamic token, of a Static rollout and of the baselines beside them.

SIDESTREAM_TABLES=benchmarks sidestream run token_parts --repeats 25
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sidestream.experiments.results import Outcome
from sidestream.experiments.run import Found
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import Table
from sidestream.lm.decoding.cache import Window
from sidestream.lm.decoding.decode import LeanDecoder
from sidestream.papers.lsar.speed import (
    Clock,
    Timed,
    TimedWork,
    bare,
    conditioned,
    decoding_seconds,
    encoding_seconds,
    interleaved,
    table2,
    table4,
    texts,
    timed,
)

LISTED = {
    "token_parts": {
        "title": "Where a token's time goes: the parts of a Dynamic token, of a Static rollout and of their baselines",
        "smoke": "seconds",
        "cpu": "two minutes",
        "paper": "a minute on one GPU",
    }
}
PERIOD = 3.5
"""Tokens from one trigger to the next: actions of 3 and 4 tokens take turns."""
WHOLE = "a token, as decoded"


class PartsWork(TimedWork[Timed]):
    """A token's parts in Table 4 and in Table 2, batch 1, fp32."""

    def pieces(self) -> dict[str, Callable[[], list[Outcome]]]:
        """Table 4 with rotary positions and a rolling window; Table 2, where a goal is encoded once."""
        return {"dynamic": torch.no_grad()(self.dynamic), "static": torch.no_grad()(self.static)}

    def outcomes(self, table: str, seconds: dict[tuple[str, str], list[float]]) -> list[Outcome]:
        """(arm, part) -> seconds, in milliseconds."""
        found = seconds.items()
        return [timed(f"{arm}: {part}", "ms", {"table": table}, [1e3 * s for s in each]) for (arm, part), each in found]

    def dynamic(self) -> list[Outcome]:
        """Table 4: small vocabulary, an update at every comma."""
        e, clock = self.settings, Clock(self.settings.clock)
        plan = table4(e.scale)
        torch.manual_seed(e.seed)
        model = conditioned(plan, "fp32", dynamic=True, family="llama")
        large = bare(plan, plan.large_layers, "fp32", family="llama")
        new, window = (56, 32) if e.scale != "smoke" else (8, 8)
        text = texts(plan, 1, plan.goal_tokens + new)
        goal = model.encode_goal(text[:, : plan.goal_tokens])
        rolling = Window(size=window, policy="rolling")
        decoders = {name: LeanDecoder(lm, window=rolling) for name, lm in (("dynamic", model), ("large", large))}
        decoders["small"] = decoders["dynamic"]  # with its channel closed
        rollouts = {}
        for name, decoder in decoders.items():
            rollouts[name] = decoder.start(1, capacity=512, goal=goal if name == "dynamic" else None)
            rollouts[name].force(text)
            rollouts[name].force(text[:, :1])  # from here on the ring holds W tokens and no mask is needed
        own = rollouts["dynamic"]
        states = torch.randn(1, plan.width, device=text.device)

        def clocked(function: Callable[[], object], ring: Any = None) -> float:
            """What a token leaves in the ring is forgotten again: every round finds the same."""
            seen = ring.seen if ring else 0
            start = clock()
            function()
            taken = clock() - start
            if ring:
                ring.seen = seen
            return taken

        def token(name: str) -> Callable[[], float]:
            return partial(clocked, partial(rollouts[name]._static, text[:, :1]), rollouts[name].ring)

        matrices = torch.rand(2**15, 1024, device=text.device)  # 134 MB: no cache holds it
        functions: dict[tuple[str, str], Callable[[], float]] = {
            ("large", f"a token, {plan.large_layers} blocks"): token("large"),
            ("small", f"a token, {plan.layers} blocks"): token("small"),
            ("dynamic", f"D_base: a token, {plan.layers} blocks"): token("dynamic"),
            ("dynamic", "tracker and FiLM projection"): partial(clocked, lambda: own.tracked.move(states, None)),
            ("dynamic", "FiLM folded into the norms"): partial(clocked, lambda: own.stack.fold(own._terms())),
        }
        for count in range(1, 6):
            read = partial(own.decoder.reader.run, text[:, :count], own.read, depth=own.decoder.depth)
            functions["dynamic", f"E_base: {count} tokens in one piece"] = partial(clocked, read, own.read)
        for name, decoder in decoders.items():
            state = goal if name == "dynamic" else None
            functions[name, WHOLE] = partial(decoding_seconds, decoder, text, new, state, clock, True)
        functions["bound", "read"] = partial(clocked, matrices.sum)
        seconds = interleaved(functions, e.repeats)
        rate = matrices.nbytes / statistics.median(seconds.pop(("bound", "read")))
        spent = {part: each for (arm, part), each in seconds.items() if arm == "dynamic"}
        pieces = [spent[f"E_base: {count} tokens in one piece"] for count in (3, 4)]
        once = [spent[part] for part in ("tracker and FiLM projection", "FiLM folded into the norms")]
        rounds = zip(spent[f"D_base: a token, {plan.layers} blocks"], *pieces, *once, strict=True)
        seconds["dynamic", "sum of the parts"] = [d + ((a + b) / 2 + (m + f)) / PERIOD for d, a, b, m, f in rounds]
        size = sum(p.numel() for p in model.lm.model.layers.parameters()) * 4
        seconds["bound", f"weights of {plan.layers} blocks at the bandwidth measured"] = [size / rate]
        return self.outcomes("4", seconds)

    def static(self) -> list[Outcome]:
        """Table 2: GPT-2's vocabulary; a goal is encoded once."""
        e, clock = self.settings, Clock(self.settings.clock)
        plan = table2(e.scale)
        torch.manual_seed(e.seed)
        model = conditioned(plan, "fp32", dynamic=False)
        large = bare(plan, plan.large_layers, "fp32")
        new, window = (24, 128) if e.scale != "smoke" else (4, 24)
        text = texts(plan, 1, window)
        goals = text[:, : plan.goal_tokens]
        goal = model.encode_goal(goals)
        decoders = {name: LeanDecoder(lm, window=window) for name, lm in (("static", model), ("large", large))}
        decoders["small"] = decoders["static"]
        encoding = partial(encoding_seconds, model, goals, clock)
        functions: dict[Any, Any] = {("static", f"goal of {plan.goal_tokens} tokens encoded"): encoding}
        for name, decoder in decoders.items():
            state = goal if name == "static" else None
            functions[name, WHOLE] = partial(decoding_seconds, decoder, text, new, state, clock, False)
        return self.outcomes("2", interleaved(functions, e.repeats))

    def notes(self, found: Found) -> list[str]:
        """How to read the parts."""
        return [
            "Sizes are those of Tables 2 and 4, batch 1, fp32; Table 4 with rotary positions and a rolling window. "
            "Parts take turns; the value is the median in milliseconds. `sum of the parts` puts Table 4's together "
            f"for a trigger every {PERIOD} tokens, `{WHOLE}` is what a scripted rollout really took: the two agree if "
            "nothing is left out. `bound` is what the bytes of the weights need at the bandwidth measured in the same "
            "rounds."
        ]


def token_parts(scale: Scale) -> Timed:
    """A token's parts."""
    return Timed(table="token_parts", scale=scale, repeats=2 if scale == "smoke" else 15)


TABLES = [
    Table(
        name="token_parts",
        heading="Where a token's time goes",
        at=token_parts,
        work=PartsWork,
        unnamed="median",
        alone=True,
    )
]
