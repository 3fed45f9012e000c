"""Hops, a task of our own: follow a shuffled function table, so that every step is one lookup and nothing is searched.

    c f ; a c ; f b ; ... 3 a       question: pairs `x f(x)`, the number of applications k, the start
    c / f                           steps: f(x), f(f(x)), all but the last
    b                               answer, variant `last`: f^k(x)
    b c                             answer, variant `retain`: f^k(x) and f(x)

In `retain` the second word is an early value. While the question is visible one lookup gives it back; where later
passes and the answer cannot see the query, or the whole question, it can only have travelled through the latents.

Why k lookups are needed: the walk from the start never meets a symbol twice, so the answer is not the start and no walk
of another length ends there by a short cycle; with `permutation` the way back along the table is never the shorter one,
every symbol is a key once and a value once, so counting says nothing, and pairs stand in random order.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from typing import Literal

from sidestream.tasks.base import ReasoningExample, Score, Split, hash_split, read_words, shuffled

SYMBOLS = (*ascii_lowercase, *ascii_uppercase)
"""What tables are made of: the first `symbols` of these 52, each one token in GPT-2's BPE too (after a space)."""

NUMBERS = tuple(str(k) for k in range(1, 27))
"""The words for k."""

PAIR_END = ";"
"""The mark after each pair. No mark stands between the start and what follows the question."""

WORDS = (PAIR_END, *NUMBERS, *SYMBOLS)
"""Every word of the domain, one token each. `words` gives those of one configuration."""

VALID_SHARE = TEST_SHARE = 0.1
"""The share of all tables that each of these splits owns."""

MOST_MISSES = 20_000
"""Draws in a row without a new problem before a split is given up."""


@dataclass(frozen=True, kw_only=True)
class HopsConfig:
    """Which problems to draw."""

    symbols: int = 10
    """Symbols, and so pairs in the table: from twice the largest number of hops to 52."""
    hops: tuple[int, ...] = (3,)
    """k, the number of applications; drawn uniformly for each problem where several are given."""
    variant: Literal["last", "retain"] = "last"
    """`last`: the answer is f^k(x). `retain`: f^k(x) and f(x), so every k is at least 2."""
    table: Literal["permutation", "function"] = "permutation"
    """`permutation`: one cycle through all symbols, uniformly among all such. A guess that looks nothing up is right
    with 1 / (symbols - 1). `function`: any function, uniformly among those whose walk from the start meets k + 1
    different symbols; values repeat, so frequent ones are better guesses, and f(x) cannot be found back from f^k(x)."""
    last_step: bool = False
    """Whether f^k(x) is a step too, before the answer: k steps instead of k - 1. For models whose answer cannot see the
    table, so that the last lookup must be done before."""
    pair_ends: bool = True
    """Whether `;` follows each pair. Without it only its place tells a key from a value."""
    seed: int = 0
    """Same seed, same problems."""

    def __post_init__(self) -> None:
        if not self.hops or min(self.hops) < (2 if self.variant == "retain" else 1):
            raise ValueError(f"hops is {self.hops}: give numbers from 1 up, for the variant retain from 2 up")
        if not 2 * max(self.hops) <= self.symbols <= len(SYMBOLS) or self.symbols < 3:
            raise ValueError(
                f"symbols is {self.symbols} for up to {max(self.hops)} hops: choose from {max(3, 2 * max(self.hops))} "
                f"to {len(SYMBOLS)}, so that the way back along the table is no shorter"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class HopsProblem:
    """One problem."""

    pairs: tuple[tuple[str, str], ...]
    """(x, f(x)) in the order shown, each symbol a key once."""
    start: str
    """x."""
    hops: int
    """k."""
    variant: Literal["last", "retain"]
    """What the answer is."""
    last_step: bool = False
    """Whether the answer's f^k(x) is a step too."""
    pair_ends: bool = True
    """Whether `;` follows each pair."""

    @property
    def walk(self) -> tuple[str, ...]:
        """x, f(x), ..., f^k(x)."""
        table, walk = dict(self.pairs), [self.start]
        for _ in range(self.hops):
            walk.append(table[walk[-1]])
        return tuple(walk)

    @property
    def table_text(self) -> str:
        """The pairs: the part of the question that a masked model may keep."""
        end = f" {PAIR_END}" if self.pair_ends else ""
        return " ".join(f"{key} {value}{end}" for key, value in self.pairs)

    @property
    def query_text(self) -> str:
        """k and the start, the last two words of the question."""
        return f"{self.hops} {self.start}"

    @property
    def example(self) -> ReasoningExample:
        """The problem in the terms that the reasoning tasks share."""
        walk = self.walk
        answer = walk[-1] if self.variant == "last" else f"{walk[-1]} {walk[1]}"
        steps = walk[1:] if self.last_step else walk[1:-1]
        return ReasoningExample(f"{self.table_text} {self.query_text}", steps, answer)

    def row(self) -> dict[str, object]:
        """The problem as one line of JSONL; `tasks.base.read_jsonl` reads the text back."""
        return {
            **self.example.row(),
            "pairs": [list(pair) for pair in self.pairs],
            "start": self.start,
            "hops": self.hops,
            "variant": self.variant,
        }


def words(config: HopsConfig) -> tuple[str, ...]:
    """The words that problems of this configuration are made of, one token each."""
    ends = (PAIR_END,) if config.pair_ends else ()
    return (*ends, *(NUMBERS[k - 1] for k in sorted(set(config.hops))), *SYMBOLS[: config.symbols])


def split_of(problem: HopsProblem) -> Split:
    """The split that owns the problem: a hash of its table decides, whatever the order of pairs, start, k and seed."""
    return hash_split(" ".join(key + value for key, value in sorted(problem.pairs)), VALID_SHARE, TEST_SHARE)


def problems(config: HopsConfig, split: Split) -> Iterator[HopsProblem]:
    """Endless random problems of one split, the same for the same arguments on every machine.

    No table is in two splits. `train` may repeat a problem; `valid` and `test` never repeat table, start and k.
    Raises ValueError: unknown split, or no further problem (few symbols).
    """
    if split not in ("train", "valid", "test"):
        raise ValueError(f"split is {split!r}: choose one of train, valid, test")
    rng = random.Random(f"hops {config.seed} {split}")
    symbols = SYMBOLS[: config.symbols]
    seen: set[tuple[object, ...]] = set()
    misses = 0
    while True:
        if misses > MOST_MISSES:
            raise ValueError(
                f"the {split} split of {config.symbols} symbols and {config.hops} hops ends after {len(seen)} "
                "problems: ask for fewer, or for more symbols"
            )
        misses += 1
        hops = config.hops[int(rng.random() * len(config.hops))]
        start = symbols[int(rng.random() * len(symbols))]
        if config.table == "permutation":
            cycle = shuffled(symbols, rng)
            values = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        else:
            values = {symbol: symbols[int(rng.random() * len(symbols))] for symbol in symbols}
        problem = HopsProblem(
            pairs=tuple((key, values[key]) for key in shuffled(symbols, rng)),
            start=start,
            hops=hops,
            variant=config.variant,
            last_step=config.last_step,
            pair_ends=config.pair_ends,
        )
        if len(set(problem.walk)) <= hops or split_of(problem) != split:
            continue
        if split != "train":
            key = (tuple(sorted(problem.pairs)), start, hops)
            if key in seen:
                continue
            seen.add(key)
        misses = 0
        yield problem


def score(example: ReasoningExample, text: str) -> Score:
    """Scores the text generated after the question: the words before the first `#` are steps, those after the last the
    answer; without a `#` the answer is the last word, in `retain` the last two.

    `accuracy`: 1 if the answer is the gold one. `last`, and in `retain` `early`: 1 if its first and its second word
    are. `steps`: 1 if the steps are the gold ones.
    """
    gold = example.answer.split()
    steps, answer = read_words(text, len(gold))
    said = answer.split()
    values = {"accuracy": float(said == gold), "steps": float(steps == example.steps)}
    for name, place in zip(("last", "early"), range(len(gold)), strict=False):
        values[name] = float(said[place : place + 1] == gold[place : place + 1])
    return Score(values, answer)
