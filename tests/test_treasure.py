import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.lm.texts.text import Vocabulary
from sidestream.tasks.treasure import (
    CODES,
    ITEMS,
    SENTENCES,
    SPLIT_PLACES,
    TRIGGER,
    TreasureProblem,
    data_hash,
    load_haystack,
    problems,
    read_jsonl,
    score,
    score_text,
    vocabulary_texts,
    write_jsonl,
)

EXCERPT = Path(__file__).parent / "data" / "filler_text" / "excerpt.txt"
BPE = Vocabulary()
encode = cache(BPE.encode)
decode = BPE.decode
WORD_IDS: dict[str, int] = {}


def encode_words(text: str) -> list[int]:
    return [WORD_IDS.setdefault(word, len(WORD_IDS)) for word in re.findall(r"\w+|[^\w\s]", text)]


def sentences_of(text: str, known: Sequence[str]) -> tuple[list[str], str]:
    """The known sentences that a text ends with, newest first, and what is left before them."""
    found = []
    while match := [sentence for sentence in known if text.endswith(" " + sentence)]:
        found.append(max(match, key=len))
        text = text[: -len(found[-1]) - 1]
    return found, text


# Items, sentences and text


def test_items_are_twelve_and_cannot_be_taken_for_each_other() -> None:
    assert len(ITEMS) == 12 and CODES[0] == 1000 and CODES[-1] == 9999
    words = [word for item in ITEMS for word in item.split()]
    assert len(set(words)) == len(words)
    assert not [(a, b) for a in ITEMS for b in ITEMS if a != b and a in b]
    assert all(len(BPE.encode(" " + word)) == 1 for word in words)


def test_bank_sentences_give_nothing_away() -> None:
    words = {word for item in ITEMS for word in item.split()} | {"passcode", "item"}
    assert len(set(SENTENCES)) == len(SENTENCES) >= 60
    for sentence in SENTENCES:
        assert not any(map(str.isdigit, sentence))
        assert not words & set(re.findall(r"\w+", sentence.lower()))


def test_a_problem_reads_as_meant() -> None:
    (problem,) = problems("test", 1, [40], 3, encode)
    assert problem.goal == f"The passcode {problem.code} guards the {problem.item}. Remember both."
    assert problem.answer == f" {problem.code} {problem.item}."
    assert decode(problem.goal_ids) == problem.goal
    assert decode(problem.trigger_ids) == problem.trigger == TRIGGER
    assert decode(problem.answer_ids) == problem.answer
    assert str(problem.code) not in TRIGGER and problem.item not in TRIGGER
    assert problem.forced_ids == problem.goal_ids + problem.distractor_ids + problem.trigger_ids
    assert sum(problem.example, ()) == problem.forced_ids + problem.answer_ids
    assert problem.example.target_ids == problem.answer_ids


def test_spans_name_the_answers_code_and_item() -> None:
    lengths = Counter()
    for problem in problems("valid", 600, [0], 0, encode):
        code_ids, item_ids = problem.answer_ids[problem.code_span], problem.answer_ids[problem.item_span]
        assert decode(code_ids) == f" {problem.code}" and decode(item_ids) == f" {problem.item}"
        assert decode(problem.answer_ids[problem.item_span.stop :]) == "."
        # The same tokens stand in the prompt, the code always at the same place.
        start = len(BPE.encode("The passcode"))
        assert problem.goal_ids[start : start + len(code_ids)] == code_ids
        lengths[len(code_ids)] += 1
    assert set(lengths) == {1, 2, 3}


# Distractors


@settings(max_examples=60, deadline=None)
@given(horizon=st.integers(0, 600), seed=st.integers(0, 10**6))
def test_distractors_are_h_tokens_of_whole_sentences_without_repeat(horizon: int, seed: int) -> None:
    for problem in problems("test", 2, [horizon], seed, encode):
        assert problem.horizon == len(problem.distractor_ids) == horizon
        found, rest = sentences_of(problem.distractors(decode), SENTENCES)
        assert all(newer != older for newer, older in zip(found, found[1:], strict=False))
        # Only the oldest is cut, and it is none that follows.
        assert not rest or any((" " + sentence).endswith(rest) for sentence in SENTENCES if sentence not in found[-1:])


def test_the_repeat_check_can_fail() -> None:
    twice, rest = sentences_of("roof." + f" {SENTENCES[1]}" * 2, SENTENCES)
    assert twice == [SENTENCES[1]] * 2 and rest == "roof."


def test_two_sentences_take_turns() -> None:
    (problem,) = problems("train", 1, [400], 0, encode, SENTENCES[:2])
    found, _ = sentences_of(problem.distractors(decode), SENTENCES)
    assert len(found) > 40 and found[::2] == [found[0]] * len(found[::2]) and found[0] != found[1]


def test_every_sentence_is_used_about_equally_often() -> None:
    counts = Counter()
    for problem in problems("train", 100, [500], 0, encode):
        counts.update(sentences_of(problem.distractors(decode), SENTENCES)[0])
    mean = counts.total() / len(SENTENCES)
    assert set(counts) == set(SENTENCES)
    assert min(counts.values()) > 0.5 * mean and max(counts.values()) < 1.6 * mean


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 30), seed=st.integers(0, 10**6))
def test_uncut_ids_are_the_whole_texts_ids(n: int, seed: int) -> None:
    ten = [sentence for sentence in SENTENCES if len(encode(" " + sentence)) == 10]
    assert len(ten) > 5
    (problem,) = problems("test", 1, [10 * n], seed, encode, ten)
    text = problem.goal + problem.distractors(decode) + problem.trigger + problem.answer
    assert sentences_of(problem.distractors(decode), ten)[1] == ""
    assert BPE.encode(text) == list(problem.forced_ids + problem.answer_ids)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(min_size=1).map(lambda text: " ".join(text.split())).filter(bool), min_size=2, max_size=4))
def test_joining_any_sentences_joins_their_ids(sentences: list[str]) -> None:
    parts = ["The passcode", *(" " + sentence for sentence in sentences), TRIGGER]
    assert BPE.encode("".join(parts)) == [token for part in parts for token in BPE.encode(part)]


# Splits and order


def test_splits_share_no_pair_and_miss_none() -> None:
    pairs = []
    for split, places in SPLIT_PLACES.items():
        whole = problems(split, len(ITEMS) * len(places), [0], 7, encode_words)
        assert set(Counter(problem.item for problem in whole).values()) == {len(places)}
        pairs.append({(problem.item, problem.code) for problem in whole})
    assert list(map(len, pairs)) == [100_800, 3_600, 3_600]
    assert len(set.union(*pairs)) == 108_000


def test_the_seed_orders_a_split_and_does_not_choose_it() -> None:
    pairs = [[(p.item, p.code) for p in problems("test", 3600, [0], seed, encode_words)] for seed in (7, 8)]
    assert set(pairs[0]) == set(pairs[1])
    assert not set(pairs[0][:50]) >= set(pairs[1][:50])


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 300), seed=st.integers(0, 10**6))
def test_items_and_horizons_are_balanced_and_pairs_depend_on_the_seed_only(n: int, seed: int) -> None:
    long, short = problems("test", 300, [64, 9, 30], seed, encode_words), problems("test", n, [64, 9, 30], seed, encode)
    pairs = [(problem.item, problem.code) for problem in short]
    for values in (Counter(item for item, _ in pairs), Counter(problem.horizon for problem in short)):
        assert max(values.values()) - min(values.values()) <= (1 if n >= 12 else n)
    assert len(set(pairs)) == n
    assert pairs == [(problem.item, problem.code) for problem in long[:n]]
    assert pairs == [(problem.item, problem.code) for problem in problems("test", n, [7], seed, encode)]


def test_a_range_of_horizons_is_used_from_end_to_end() -> None:
    horizons = [problem.horizon for problem in problems("train", 300, range(20, 50), 0, encode)]
    assert Counter(horizons) == dict.fromkeys(range(20, 50), 10)
    assert horizons[:30] != sorted(horizons[:30])


def test_the_same_arguments_give_the_same_problems_anywhere() -> None:
    drawn = problems("test", 25, [64, 200], 5, BPE.encode)
    assert drawn == problems("test", 25, [64, 200], 5, BPE.encode)
    assert data_hash(drawn) == "20349e55d6ed06892ed30cc7bc1be841c0937a4299b59ded4bcb618df9d5555e"
    for other in (problems("test", 25, [64, 200], 6, encode), drawn[::-1], drawn[:-1]):
        assert data_hash(other) != data_hash(drawn)
    moved = replace(drawn[0], trigger_ids=(*drawn[0].trigger_ids, 13))
    assert data_hash([moved, *drawn[1:]]) != data_hash(drawn)


def test_sentences_are_encoded_once() -> None:
    seen = Counter()

    def counting(text: str) -> list[int]:
        seen[text] += 1
        return BPE.encode(text)

    problems("train", 50, [300], 0, counting)
    repeated = {text for text, times in seen.items() if times > 1}
    assert not repeated and len(seen) > len(SENTENCES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "dev"}, "train, valid, test"),
        ({"n": 3601}, "holds 3600"),
        ({"n": -1}, "0 to 3600"),
        ({"horizons": []}, "at least one"),
        ({"horizons": [64, -1]}, "below 0"),
        ({"sentences": []}, "two or more"),
        ({"sentences": ["One only.", "One only."]}, "1 different"),
        ({"sentences": ["Fine.", "My Golden Key is lost."]}, "names an item"),
        ({"sentences": ["Fine.", ""]}, "sentence ''"),
        ({"sentences": ["Fine.", "Two  spaces."]}, "single spaces"),
        ({"encode": lambda text: [50256, *BPE.encode(text)]}, "special tokens"),
        ({"encode": lambda text: list(text.encode())[::2]}, "word boundaries"),
    ],
)
def test_unusable_arguments_are_named(change: dict, message: str) -> None:
    arguments = {"split": "test", "n": 3, "horizons": [20], "seed": 0, "encode": encode}
    assert len(problems(**arguments)) == 3
    with pytest.raises(ValueError, match=message):
        problems(**(arguments | change))


@pytest.mark.parametrize("secrets", [{"item": "golden keys"}, {"code": 999}, {"code": 10000}, {"code": "4821"}])
def test_a_problem_has_a_known_item_and_code(secrets: dict) -> None:
    (problem,) = problems("test", 1, [0], 0, encode)
    with pytest.raises(ValueError, match="must be"):
        replace(problem, **secrets)


# Vocabulary


def test_the_subset_encodes_every_problem() -> None:
    subset = Vocabulary.subset(vocabulary_texts())
    assert subset.size < 2000
    for small, large in zip(
        problems("test", 200, [90], 1, subset.encode), problems("test", 200, [90], 1, encode), strict=True
    ):
        assert subset.decode(small.forced_ids + small.answer_ids) == decode(large.forced_ids + large.answer_ids)
    assert all(subset.decode(subset.encode(f" {code}")) == f" {code}" for code in CODES)
    with pytest.raises(ValueError, match="not among"):
        subset.encode(" Gonzalo")
    assert subset.size < Vocabulary.subset(vocabulary_texts(load_haystack(EXCERPT))).size


# Scores


@cache
def golden_4821() -> TreasureProblem:
    (problem,) = problems("test", 1, [20], 0, encode)
    code_ids, item_ids = tuple(encode(" 4821")), tuple(encode(" golden key"))
    return replace(problem, item="golden key", code=4821, code_ids=code_ids, item_ids=item_ids)


def test_gold_scores_one_and_another_problems_gold_does_not() -> None:
    drawn = problems("test", 300, [0], 0, encode)
    for problem, other in zip(drawn, drawn[1:] + drawn[:1], strict=True):
        gold = score(problem, problem.answer_ids, decode)
        assert set(gold.values.values()) == {1.0} and gold.extracted == f"{problem.code} {problem.item}"
        wrong = score(problem, other.answer_ids, decode).values
        assert wrong["code_exact"] == (problem.code == other.code)
        assert wrong["item_exact"] == (problem.item == other.item)
        assert score_text(problem, problem.answer, BPE.encode, decode) == gold


def test_each_corrupted_token_costs() -> None:
    problem = golden_4821()
    assert len(problem.code_ids) == 2
    for position in range(len(problem.answer_ids) - 1):
        ids = list(problem.answer_ids)
        ids[position] = encode(" the")[0]
        values = score(problem, ids, decode).values
        in_code = position in range(*problem.code_span.indices(len(ids)))
        assert values == {
            "item_exact": float(in_code),
            "code_exact": float(not in_code),
            "code_token": 0.5 if in_code else 1.0,
        }


@pytest.mark.parametrize("length", range(6))
def test_answers_cut_short_score_what_is_there(length: int) -> None:
    problem = golden_4821()
    values = score(problem, problem.answer_ids[:length], decode).values
    assert values["code_token"] == min(length, 2) / 2
    assert values["code_exact"] == (length >= 2) and values["item_exact"] == (length >= 4)


@pytest.mark.parametrize(
    ("text", "item_exact", "code_exact"),
    [
        (" 4821 golden key.", 1, 1),
        ("4821 golden key", 1, 1),
        ("\n  4821 golden key.\nThe next day 1234 iron crown.", 1, 1),
        ("The passcode is 4821, the item is the golden key.", 1, 1),
        ("(4821) 'golden key'", 1, 1),
        ('**4821** "golden key"!', 1, 1),
        ("golden key: 4821.", 1, 1),
        (" 48210 golden key.", 1, 0),
        (" 14821 golden key.", 1, 0),
        (" 482 golden key.", 1, 0),
        (" 4822 golden key.", 1, 0),
        (" 48 21 golden key.", 1, 0),
        (" 4 821 golden key.", 1, 0),
        (" 4,821 golden key.", 1, 0),
        (" 4821.5 golden key.", 1, 0),
        (" .4821 golden key.", 1, 0),
        (" -4821 golden key.", 1, 0),
        (" 04821 golden key.", 1, 0),
        (" 4821st golden key.", 1, 0),
        (" x4821 golden key.", 1, 0),
        (" 4821-4822 golden key.", 1, 0),
        (" 4821² golden key.", 1, 0),
        (" ٤٨٢١ golden key.", 1, 0),
        (" 1234 4821 golden key.", 1, 0),
        (" four thousand golden key.", 1, 0),
        (" 4821 iron crown.", 0, 1),
        (" 4821 iron crown. No, golden key.", 0, 1),
        (" 4821 golden keys.", 0, 1),
        (" 4821 golden keyhole.", 0, 1),
        (" 4821 golden key-ring.", 0, 1),
        (" 4821 golden key's.", 0, 1),
        (" 4821 ungolden key.", 0, 1),
        (" 4821 non-golden key.", 0, 1),
        (" 4821 golden  key.", 0, 1),
        (" 4821 golden.", 0, 1),
        (" 4821 key golden.", 0, 1),
        (" 4821 golden\ufffd key.", 0, 1),
        (" 4821golden key.", 0, 0),
        ("", 0, 0),
        (" \n\t", 0, 0),
    ],
)
def test_nasty_answers(text: str, item_exact: int, code_exact: int) -> None:
    values = score_text(golden_4821(), text, BPE.encode, decode).values
    assert (values["item_exact"], values["code_exact"]) == (item_exact, code_exact)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50256), max_size=8))
def test_any_output_has_a_score_between_zero_and_one(ids: list[int]) -> None:
    given_score = score(golden_4821(), ids, decode)
    assert set(given_score.values) == {"item_exact", "code_exact", "code_token"}
    assert all(0 <= value <= 1 for value in given_score.values.values())
    if given_score.values["code_exact"]:
        assert "4821" in decode(ids)


# Real text


def test_real_text_becomes_sentences(tmp_path: Path) -> None:
    sentences = load_haystack(EXCERPT)
    assert len(sentences) > 250 and len(set(sentences)) == len(sentences)
    assert sentences[0] == "First Citizen: Before we proceed any further, hear me speak."
    assert all(sentence == " ".join(sentence.split()) and len(sentence) <= 400 for sentence in sentences)
    zipped = tmp_path / "excerpt.txt.gz"
    zipped.write_bytes(gzip.compress(EXCERPT.read_bytes()))
    assert load_haystack(zipped) == load_haystack(str(zipped)) == sentences

    for problem in problems("test", 20, [333], 0, encode, sentences):
        found, rest = sentences_of(problem.distractors(decode), sentences)
        assert problem.horizon == 333 and found
        assert any((" " + sentence).endswith(rest) for sentence in sentences)


def test_haystack_splits_and_drops(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    lines = [f"line {number} without an end" for number in range(60)]
    paragraphs = [
        "It rained\nall day. “Why?” She left! It rained all day.",
        "* * *",
        "He lost a Golden\nKey. Then he slept.",
    ]
    text = "\n\n".join([*paragraphs, "\n".join(lines)])
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    sentences = load_haystack(path)
    assert sentences[:4] == ["It rained all day.", "“Why?”", "She left!", "Then he slept."]
    assert sentences[4:] == lines
    path.write_text("".join(f"word{number} " for number in range(1000)))
    assert all(0 < len(piece) <= 400 for piece in load_haystack(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b" \n\n ", "empty"),
        ("Ein Satz. Größe zählt.".encode("latin-1"), "not UTF-8"),
        ("One. Two.".encode("utf-16"), "not UTF-8"),
        (b"Only one sentence.", "1 usable"),
        (b"The golden key. An iron crown.", "0 usable"),
        (b"1234. 5678.", "0 usable"),
        (gzip.compress(b"One. Two. Three.", mtime=0)[:-9], "broken gzip"),
        (b"\x1f\x8bnot gzip at all", "broken gzip"),
        (gzip.compress(b"", mtime=0), "empty"),
    ],
)
def test_unusable_haystacks_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "hay.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_haystack(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_not_a_haystack(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_haystack(tmp_path)


# Files


def test_jsonl_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    drawn = problems("test", 30, [0, 50, 123], 2, encode, load_haystack(EXCERPT))
    write_jsonl(drawn, path, decode)
    assert read_jsonl(path) == drawn and data_hash(read_jsonl(path)) == data_hash(drawn)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record, problem in zip(records, drawn, strict=True):
        assert (record["item"], record["code"], record["horizon"]) == (problem.item, problem.code, problem.horizon)
        text = record["goal"] + record["distractors"] + record["trigger"] + record["answer"]
        assert text == decode(problem.forced_ids + problem.answer_ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"horizon": 21}, "20 distractor tokens"),
        ({"item": "iron sword"}, "iron sword"),
        ({"code": 123}, "123"),
        ({"goal_ids": [1, -2]}, "-2 is not a token id"),
        ({"goal_ids": [1, "2"]}, "'2' is not a token id"),
        ({"goal_ids": 3}, "not a Treasure Hunt problem"),
        ({"goal_ids": None}, "no field 'goal_ids'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "test.jsonl"
    write_jsonl(problems("test", 2, [20], 0, encode), path, decode)
    first, second = path.read_text().splitlines()
    record = {key: value for key, value in (json.loads(second) | change).items() if value is not None}
    path.write_text(f"{first}\n{json.dumps(record)}\n")
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        read_jsonl(path)
    for broken in (second[:-20], "[1, 2]", "\x00"):
        path.write_text(f"{first}\n{broken}\n")
        with pytest.raises(ValueError, match="line 2: not a Treasure Hunt problem"):
            read_jsonl(path)
    path.unlink()
    with pytest.raises(ValueError, match="no such file"):
        read_jsonl(path)
