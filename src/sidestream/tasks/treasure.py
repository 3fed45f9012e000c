"""Treasure Hunt (LS-AR, Tasks): remember a passcode and an item behind H tokens of distractor sentences.

    The passcode 4821 guards the golden key. Remember both.     goal, the prompt
     A cat slept on the warm roof. ... The bus was late again.   distractors, exactly H tokens
     Name the passcode and the item:                             trigger
     4821 golden key.                                            answer

Every part but the goal begins with the space that belongs to its first word, so that the ids of the parts, put
together, are the ids of the whole text (checked once per call for the tokenizer given).
"""

import gzip
import hashlib
import json
import random
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from sidestream.tasks.base import Decode, Encode, Example, Score, Split

T = TypeVar("T")

ITEMS = (
    "golden key",
    "silver compass",
    "ruby ring",
    "crystal lantern",
    "copper coin",
    "velvet cloak",
    "bronze bell",
    "marble statue",
    "leather journal",
    "wooden mask",
    "pearl necklace",
    "iron crown",
)
"""The 12 semantic items. No word occurs in two of them, and each word is one token of GPT-2's BPE."""

CODES = range(1000, 10000)
"""The passcodes."""

SPLIT_PLACES: dict[Split, range] = {"train": range(0, 8400), "valid": range(8400, 8700), "test": range(8700, 9000)}
"""The places each split takes in an item's fixed order of the 9,000 codes (`_pool`), so every item has as many pairs as
any other: 100,800 pairs for train, 3,600 for valid, 3,600 for test."""

TRIGGER = " Name the passcode and the item:"

SENTENCES = (
    "A cat slept on the warm roof.",
    "The bus was late again this morning.",
    "Rain fell softly over the quiet harbour.",
    "Two children raced their bicycles down the hill.",
    "Someone had left a window open in the kitchen.",
    "The old clock in the hall stopped at noon.",
    "Fresh bread cooled on a rack beside the oven.",
    "A flock of geese crossed the grey sky.",
    "My neighbour is learning to play the violin.",
    "The river rises every spring when the snow melts.",
    "They painted the fence green over the weekend.",
    "Nobody could remember who had planted the apple tree.",
    "The train to the coast runs twice a day.",
    "She folded the letter and put it in a drawer.",
    "Wind turbines turned slowly along the ridge.",
    "The library closes early on Fridays.",
    "Our guide spoke four languages, all of them quickly.",
    "A thin fog covered the fields until breakfast.",
    "The soup needed salt, pepper and a little patience.",
    "Fishermen mended their nets in the shade.",
    "He missed the last ferry and slept at the station.",
    "The market was full of oranges and loud voices.",
    "Bees prefer the lavender near the garden wall.",
    "An empty bottle rolled across the deck.",
    "The lecture was long, but the questions were good.",
    "Snow had blocked the mountain road for a week.",
    "Her brother repairs radios in a tiny workshop.",
    "The museum opened a new wing for maps.",
    "Several students waited outside the office.",
    "The tea had gone cold before anyone drank it.",
    "A storm knocked out the lights in the village.",
    "The carpenter measured the shelf once more.",
    "Ducks followed the boat in a crooked line.",
    "The choir practised in an unheated room.",
    "Moss grows on the north side of the barn.",
    "The chess game ended in a tired draw.",
    "Trucks rumbled past the house all night.",
    "A baker waved from the other side of the street.",
    "The hikers stopped to count their sandwiches.",
    "Autumn leaves clogged the gutter above the porch.",
    "The radio played a song about the sea.",
    "Water dripped from the ceiling into a bucket.",
    "The farmer sold his second tractor in June.",
    "Everyone laughed when the curtain fell too soon.",
    "The dentist's waiting room smelled of mint.",
    "Sand blew over the path to the beach.",
    "The new bridge is narrower than the old one.",
    "Pigeons gathered under the arches at dusk.",
    "The printer ran out of paper in the middle of the report.",
    "A small dog barked at its own reflection.",
    "The satellite passes over the island before dawn.",
    "We watched the tide come in from the pier.",
    "The gardener pruned the roses without gloves.",
    "Thunder woke the campers long after midnight.",
    "The bill for the repairs came as a surprise.",
    "Spiders had taken over the attic.",
    "The team lost on Saturday and won on Sunday.",
    "Potatoes keep best in a dark, dry cellar.",
    "The actor forgot his line and bowed instead.",
    "Dust settled on the piano while the family was away.",
    "Is there any milk left for the pancakes?",
    "What a strange colour the lake has today!",
)
"""The built-in distractor sentences: no digits, none names an item."""

# Longer than this, a "sentence" is a list, a table or text without full stops; its lines serve better.
_LONGEST_SENTENCE = 400

# What may stand around the code: no sign or decimal point before it, no unit after it.
_OPENING, _CLOSING = "\"'“‘([{*_`#", "\"'”’)]}*_`.,:;!?"
_WORD_BEFORE, _WORD_AFTER = r"(?<!\w)(?<!\w['’-])", r"(?!['’-]?\w)"
_ITEM = re.compile(_WORD_BEFORE + "(?:" + "|".join(ITEMS) + ")" + _WORD_AFTER)
_ITEM_ANY_CASE = re.compile("|".join(ITEMS), re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TreasureProblem:
    """One problem: its two secrets and the token ids of its parts."""

    item: str
    """One of `ITEMS`."""
    code: int
    """The passcode, 1000 to 9999."""
    goal_ids: tuple[int, ...]
    """The prompt, which names code and item. The code stands at the same position in every problem."""
    distractor_ids: tuple[int, ...]
    """H tokens between prompt and trigger."""
    trigger_ids: tuple[int, ...]
    """The local trigger, which asks for code and item without naming them."""
    code_ids: tuple[int, ...]
    """The answer's code: the same tokens as in the prompt."""
    item_ids: tuple[int, ...]
    """The answer's item: the same tokens as in the prompt."""
    end_ids: tuple[int, ...]
    """The answer's full stop, to be trained on but not scored."""

    def __post_init__(self) -> None:
        if self.item not in ITEMS:
            raise ValueError(f"item is {self.item!r}: it must be one of {', '.join(ITEMS)}")
        if self.code not in CODES:
            raise ValueError(f"code is {self.code!r}: it must be a whole number from {CODES[0]} to {CODES[-1]}")

    @property
    def horizon(self) -> int:
        """H: the number of distractor tokens."""
        return len(self.distractor_ids)

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """What the model must generate after `forced_ids`."""
        return self.code_ids + self.item_ids + self.end_ids

    @property
    def code_span(self) -> slice:
        """Where the code's sub-word tokens are in `answer_ids`."""
        return slice(0, len(self.code_ids))

    @property
    def item_span(self) -> slice:
        """Where the item's tokens are in `answer_ids`; the full stop after it is not one of them."""
        return slice(len(self.code_ids), len(self.code_ids) + len(self.item_ids))

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """Prefix forcing: everything up to the answer, fed to the model whatever it would have said."""
        return self.goal_ids + self.distractor_ids + self.trigger_ids

    @property
    def example(self) -> Example:
        """The problem in the terms that all tasks share."""
        return Example(self.goal_ids, self.distractor_ids + self.trigger_ids, self.answer_ids)

    @property
    def goal(self) -> str:
        """The prompt's text."""
        return "".join(_goal_parts(self.item, self.code))

    @property
    def trigger(self) -> str:
        """The trigger's text."""
        return TRIGGER

    @property
    def answer(self) -> str:
        """The answer's text."""
        return "".join(_answer_parts(self.item, self.code))

    def distractors(self, decode: Decode) -> str:
        """The distractors' text. It may begin inside a word, where the oldest sentence was cut."""
        return decode(self.distractor_ids)


def problems(
    split: Split,
    n: int,
    horizons: Sequence[int],
    seed: int,
    encode: Encode,
    sentences: Sequence[str] | None = None,
) -> list[TreasureProblem]:
    """`n` problems of a split, the same for the same arguments on every machine.

    `horizons`: H of each problem, in tokens. All values are used equally often, in random order: `[1024]` for one H,
    `[64, 128, 256]` for a mix, `range(32, 257)` for every H from 32 to 256. Items are used equally often as well.
    Pairs of item and code never repeat, splits share none, and they depend on `split` and `seed` only: the problems of
    one seed at two horizons ask for the same things, and a smaller `n` gives the first ones of a larger `n`.
    `sentences`: the distractors, at least two; the built-in `SENTENCES` where None. See `load_haystack`.

    Raises ValueError: unknown split, `n` beyond the split's size, no or a negative horizon, unusable sentences, or a
    tokenizer whose tokens join words.
    """
    if split not in SPLIT_PLACES:
        raise ValueError(f"split is {split!r}: choose one of {', '.join(SPLIT_PLACES)}")
    size = len(ITEMS) * len(SPLIT_PLACES[split])
    if not 0 <= n <= size:
        raise ValueError(f"{n} problems asked of {split!r}, which holds {size}: ask for 0 to {size}")
    if not horizons or min(horizons) < 0:
        raise ValueError(f"horizons is {horizons!r}: give at least one number of distractor tokens, none below 0")
    spaced = [" " + sentence for sentence in _checked(SENTENCES if sentences is None else sentences)]

    @cache
    def ids(text: str) -> tuple[int, ...]:
        return tuple(encode(text))

    _check_tokenizer(encode, ids, spaced[0])
    # Two streams, so that the number of distractors drawn does not change which pairs come next.
    pair_rng, distractor_rng = random.Random(f"pairs {split} {seed}"), random.Random(f"distractors {split} {seed}")
    codes = [iter(_shuffled(_pool(split, index), pair_rng)) for index in range(len(ITEMS))]
    items, depths = _deal(range(len(ITEMS)), pair_rng), _deal(horizons, distractor_rng)

    drawn = []
    for _ in range(n):
        index = next(items)
        item, code = ITEMS[index], next(codes[index])
        code_ids, item_ids, end_ids = map(ids, _answer_parts(item, code))
        drawn.append(
            TreasureProblem(
                item=item,
                code=code,
                goal_ids=_joined(map(ids, _goal_parts(item, code))),
                distractor_ids=_distractors(next(depths), spaced, ids, distractor_rng),
                trigger_ids=ids(TRIGGER),
                code_ids=code_ids,
                item_ids=item_ids,
                end_ids=end_ids,
            )
        )
    return drawn


def partners(problems: Sequence[TreasureProblem]) -> list[TreasureProblem]:
    """For each problem A another one, B, of another item and code; every problem is dealt out about as often.

    Raises:
        ValueError: a problem has no such other.
    """
    found = []
    for index, problem in enumerate(problems):
        turn = [problems[(index + k) % len(problems)] for k in range(1, len(problems))]
        other = next((o for o in turn if o.item != problem.item and o.code != problem.code), None)
        if other is None:
            raise ValueError(f"{len(problems)} test problems hold no other goal for one of them; use more")
        found.append(other)
    return found


def vocabulary_texts(sentences: Sequence[str] | None = None) -> list[str]:
    """Texts that hold every token any problem over these sentences can have: all codes, items and sentences."""
    texts = [f" {code}" for code in CODES]
    for item in ITEMS:
        texts += _goal_parts(item, CODES[0]) + _answer_parts(item, CODES[0])
    return [*texts, TRIGGER, *(" " + sentence for sentence in (SENTENCES if sentences is None else sentences))]


def load_haystack(path: str | Path) -> list[str]:
    """The sentences of a UTF-8 text file, plain or gzipped, for use as distractors.

    Blank lines end a paragraph, and `.`, `!`, `?` end a sentence; what has no such end for 400 characters is taken line
    by line. White space is collapsed; repeated sentences, sentences without a letter and those that name an item are
    dropped. Raises ValueError: the file is missing, unreadable, empty, not UTF-8, or has fewer than two sentences left.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"haystack {path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"haystack {path}: not UTF-8 text (byte {error.start}): convert it, for example with iconv"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"haystack {path}: broken gzip file ({error})") from None
    except OSError as error:
        raise ValueError(f"haystack {path}: cannot be read ({error.strerror or error})") from None
    if not text.strip():
        raise ValueError(f"haystack {path}: the file is empty; give one with at least two sentences")

    usable = dict.fromkeys(
        sentence
        for sentence in _split_sentences(text)
        if any(map(str.isalpha, sentence)) and not _ITEM_ANY_CASE.search(sentence)
    )
    if len(usable) < 2:
        raise ValueError(
            f"haystack {path}: {len(usable)} usable sentence(s); at least two different ones are needed that have "
            "letters and name none of the task's items"
        )
    return list(usable)


def score(problem: TreasureProblem, generated: Sequence[int], decode: Decode) -> Score:
    """Scores generated token ids, what follows `forced_ids`.

    `item_exact`: 1 if the first item named is the problem's. `code_exact`: 1 if the first word with a digit is the code
    and nothing else. `code_token` (LS-AR's): the fraction of the code's sub-word tokens that stand at their position.
    Text after the answer does not count.
    """
    text = decode(generated)
    number = next((word for word in text.split() if any(map(str.isdigit, word))), "")
    number = number.lstrip(_OPENING).rstrip(_CLOSING)
    item = _ITEM.search(text)
    named = item.group() if item else ""
    # Positions that were never generated are wrong: zip stops at the shorter one, the division does not.
    right = sum(given == gold for given, gold in zip(generated, problem.code_ids, strict=False))
    values = {
        "item_exact": float(named == problem.item),
        "code_exact": float(number == str(problem.code)),
        "code_token": right / len(problem.code_ids),
    }
    return Score(values, f"{number or '?'} {named or '?'}")


def score_text(problem: TreasureProblem, text: str, encode: Encode, decode: Decode) -> Score:
    """`score` for generated text. Leading white space does not count, as tokens would begin elsewhere for it."""
    return score(problem, encode(" " + text.lstrip()), decode)


def write_jsonl(problems: Iterable[TreasureProblem], path: str | Path, decode: Decode) -> None:
    """One problem a line: texts for people and other tools, token ids for `read_jsonl`."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for problem in problems:
            texts = {
                "goal": problem.goal,
                "distractors": problem.distractors(decode),
                "trigger": problem.trigger,
                "answer": problem.answer,
            }
            record = {"item": problem.item, "code": problem.code, "horizon": problem.horizon, **texts, **_ids(problem)}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_jsonl(path: str | Path) -> list[TreasureProblem]:
    """What `write_jsonl` wrote, equal to the problems given to it. ValueError names the first line that is not so."""
    read = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            ids = {name: tuple(map(_token_id, record[name])) for name in _ID_FIELDS}
            problem = TreasureProblem(item=record["item"], code=record["code"], **ids)
            if record["horizon"] != problem.horizon:
                raise ValueError(f"horizon is {record['horizon']!r}, but there are {problem.horizon} distractor tokens")
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: no field {error}; was it written by write_jsonl?") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not a Treasure Hunt problem ({error})") from None
        read.append(problem)
    return read


def data_hash(problems: Iterable[TreasureProblem]) -> str:
    """sha256, in hex, over the problems' content and order; the same on every machine."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(json.dumps({"item": problem.item, "code": problem.code, **_ids(problem)}).encode() + b"\n")
    return digest.hexdigest()


_ID_FIELDS = ("goal_ids", "distractor_ids", "trigger_ids", "code_ids", "item_ids", "end_ids")


def _ids(problem: TreasureProblem) -> dict[str, Sequence[int]]:
    return {name: getattr(problem, name) for name in _ID_FIELDS}


def _token_id(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a token id")
    return value


def _goal_parts(item: str, code: int) -> tuple[str, ...]:
    return "The passcode", f" {code}", " guards the", f" {item}", ". Remember both."


def _answer_parts(item: str, code: int) -> tuple[str, str, str]:
    return f" {code}", f" {item}", "."


def _joined(parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(parts))


def _distractors(
    horizon: int, sentences: Sequence[str], ids: Callable[[str], tuple[int, ...]], rng: random.Random
) -> tuple[int, ...]:
    newest_first, total, last, others = [], 0, -1, len(sentences) - 1
    while total < horizon:
        # One of the others, each as likely: no immediate repeat.
        choice = int(rng.random() * (others if last >= 0 else others + 1))
        last = choice + (0 <= last <= choice)
        piece = ids(sentences[last])
        newest_first.append(piece)
        total += len(piece)
    # CHOICE(LS-AR, B): "joined up to a token length H" is read as exactly H; the oldest sentence is cut at a token
    # boundary, so that "is the goal still in the window?" has one answer per H and W for all problems.
    return _joined(reversed(newest_first))[total - horizon :]


def _checked(sentences: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(sentences))
    if len(distinct) < 2:
        raise ValueError(f"{len(distinct)} different sentence(s) given: distractors without repeats need two or more")
    for sentence in distinct:
        if not sentence or sentence != " ".join(sentence.split()):
            raise ValueError(f"sentence {sentence!r}: give words with single spaces between them and none at the ends")
        if _ITEM_ANY_CASE.search(sentence):
            raise ValueError(f"sentence {sentence!r} names an item: drop it (load_haystack does)")
    return distinct


def _check_tokenizer(encode: Encode, ids: Callable[[str], tuple[int, ...]], sentence: str) -> None:
    item, code = ITEMS[0], CODES[0]
    parts = [*_goal_parts(item, code), sentence, TRIGGER, *_answer_parts(item, code)]
    if tuple(encode("".join(parts))) != _joined(map(ids, parts)):
        raise ValueError(
            "this tokenizer encodes a text otherwise than its words one by one: use one whose tokens end at word "
            "boundaries (as GPT-2's) and encode without special tokens"
        )


def _shuffled(values: Sequence[T], rng: random.Random) -> list[T]:
    # Random.shuffle may differ between Python versions; random() may not.
    keys = [rng.random() for _ in values]
    return [values[index] for index in sorted(range(len(values)), key=keys.__getitem__)]


def _deal(values: Sequence[T], rng: random.Random) -> Iterator[T]:
    while True:
        yield from _shuffled(values, rng)


@cache
def _pool(split: Split, item_index: int) -> tuple[int, ...]:
    order = _shuffled(CODES, random.Random(f"codes of item {item_index}"))
    places = SPLIT_PLACES[split]
    return tuple(order[places.start : places.stop])


def _split_sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n").replace("\r", "\n")):
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+|(?<=[。！？])\s*", paragraph):
            whole = " ".join(sentence.split())
            if len(whole) <= _LONGEST_SENTENCE:
                yield whole
                continue
            for line in sentence.splitlines():
                yield from textwrap.wrap(" ".join(line.split()), _LONGEST_SENTENCE, break_on_hyphens=False)
