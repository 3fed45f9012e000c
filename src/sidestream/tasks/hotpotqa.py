"""HotpotQA (arXiv 1809.09600): a question whose answer takes facts of two Wikipedia paragraphs.

The model reads paragraphs and question; the steps are the supporting sentences; exact match and F1 are the official
ones. Records with a `context` are read in the hub's shape and in the official files'; records with `evidence` (gold
sentences alone, perhaps each as `title | sentence`) are read too.
"""

import re
import string
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from sidestream.tasks.base import (
    ReasoningExample,
    Score,
    Split,
    field,
    hash_split,
    hub_records,
    json_records,
    texts,
)

HUB = ("hotpotqa/hotpot_qa", "distractor")
"""Name and configuration on the Hugging Face hub."""

VALID_SHARE = 1 / 6
"""The share of the official training questions kept for validation: 3 of 18, as AGCLR's 15k train and 3k valid."""

Context = Literal["supporting", "all", "evidence", "none"]
"""What stands before the question: the paragraphs that hold supporting facts, all paragraphs, the supporting sentences
alone, or nothing."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = ("yes", "no", "noanswer")


def read(path: str | Path, context: Context = "supporting") -> list[ReasoningExample]:
    """The problems of a JSON list or of JSON lines, plain or gzipped.

    Raises ValueError: file and line (or index) of the first malformed record, and its field; or a record that has
    `evidence` only where paragraphs are asked for.
    """
    make = _maker(context)
    return [make(record, where) for where, record in json_records(path)]


def load_hub(split: Split, context: Context = "supporting", n: int | None = None) -> list[ReasoningExample]:
    """The first `n` problems (all where None) of the hub's distractor setting; needs the package `datasets`.

    `test` is the official validation set, whose answers are public; a hash of the question parts the official training
    set into `train` and `valid`. Raises ValueError: unknown split or context, or the data set cannot be had.
    """
    if split not in ("train", "valid", "test"):
        raise ValueError(f"split is {split!r}: choose one of train, valid, test")
    make, found = _maker(context), []
    for where, record in hub_records(*HUB, split="validation" if split == "test" else "train"):
        if n is not None and len(found) >= n:
            break
        question = field(record, "question", str, where)
        if split == "test" or hash_split(question.strip(), VALID_SHARE, 0) == split:
            found.append(make(record, where))
    return found


def _maker(context: Context) -> Callable[[dict[str, Any], str], ReasoningExample]:
    if context not in get_args(Context):
        raise ValueError(f"context is {context!r}: choose one of {', '.join(get_args(Context))}")

    def make(record: dict[str, Any], where: str) -> ReasoningExample:
        question, answer = field(record, "question", str, where).strip(), field(record, "answer", str, where).strip()
        if "context" in record:
            paragraphs, steps = _paragraphs(record, context == "supporting", where)
        elif context in ("supporting", "all"):
            raise ValueError(f"{where}: field 'context' is missing: read this file with context='evidence' or 'none'")
        else:
            paragraphs, steps = [], _evidence(record, where)
        # CHOICE(AGCLR, Training): "context paragraphs + question" leaves order and layout open. Ours: a line a
        # paragraph, `Title: text`, in the record's order, and the question last.
        before = {"none": [], "evidence": list(steps)}.get(context, paragraphs)
        return ReasoningExample("\n".join([*before, question]), steps, answer)

    return make


def _evidence(record: dict[str, Any], where: str) -> tuple[str, ...]:
    sentences = texts(record, "evidence", where)
    if all(" | " in sentence for sentence in sentences):
        sentences = tuple(sentence.partition(" | ")[2] for sentence in sentences)
    sentences = tuple(" ".join(sentence.split()) for sentence in sentences)
    if not all(sentences) or not sentences:
        raise ValueError(f"{where}: field 'evidence' must hold at least one sentence, none empty")
    return sentences


def _paragraphs(record: dict[str, Any], supporting: bool, where: str) -> tuple[list[str], tuple[str, ...]]:
    """The paragraphs, each with its title and on one line, and the supporting sentences in the order of the facts."""
    paragraphs = _pairs(record, "context", "sentences", where)
    sentences: dict[str, list[str]] = {}
    for title, found in paragraphs:
        if not isinstance(found, list) or not all(isinstance(sentence, str) for sentence in found):
            raise ValueError(f"{where}: field 'context': the sentences of {title!r} are no list of texts")
        sentences.setdefault(title, found)
    steps: list[str] = []
    titles: set[str] = set()
    for title, number in _pairs(record, "supporting_facts", "sent_id", where):
        if title not in sentences:
            raise ValueError(f"{where}: field 'supporting_facts' names {title!r}, which is no paragraph of the context")
        if type(number) is not int or number < 0:
            raise ValueError(f"{where}: field 'supporting_facts' has {number!r} for a sentence of {title!r}")
        # A fact that points behind its paragraph's end says nothing; the others are enough.
        if number < len(sentences[title]):
            step = " ".join(sentences[title][number].split())
            titles.add(title)
            if step and step not in steps:
                steps.append(step)
    if not steps:
        raise ValueError(f"{where}: field 'supporting_facts' points at no sentence of the context")
    shown = [
        " ".join(f"{title}: {''.join(found)}".split())
        for title, found in paragraphs
        if title in titles or not supporting
    ]
    return shown, tuple(steps)


def _pairs(record: dict[str, Any], name: str, second: str, where: str) -> list[tuple[str, Any]]:
    """A field that is `{"title": [...], second: [...]}` on the hub and `[[title, ...], ...]` in the official files."""
    value = record[name] if name in record else field(record, name, dict, where)
    pairs: list[Any] = []
    if isinstance(value, dict):
        titles, seconds = field(value, "title", list, f"{where}: field {name!r}"), value.get(second)
        if not isinstance(seconds, list) or len(seconds) != len(titles):
            raise ValueError(f"{where}: field {name!r} must have as many entries in {second!r} as in 'title'")
        pairs = list(zip(titles, seconds, strict=True))
    elif isinstance(value, list):
        pairs = value
    else:
        field(record, name, dict, where)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(f"{where}: field {name!r} must hold pairs of a title and its {second}, got {pair!r:.60}")
    return [(pair[0], pair[1]) for pair in pairs]


# ---- scores


def normalized(answer: str) -> str:
    """The official normalisation: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(said: str, gold: str) -> float:
    """1 if both are equal after `normalized`."""
    return float(normalized(said) == normalized(gold))


def f1(said: str, gold: str) -> float:
    """The official F1 of the words that both have, after `normalized`. `yes`, `no` and `noanswer` earn nothing in part:
    where either is one of them, 0 unless they are equal."""
    said, gold = normalized(said), normalized(gold)
    if said != gold and (said in _CLOSED or gold in _CLOSED):
        return 0.0
    shared = (Counter(said.split()) & Counter(gold.split())).total()
    return 2 * shared / (len(said.split()) + len(gold.split())) if shared else 0.0


def score(example: ReasoningExample, text: str) -> Score:
    """Scores the text generated after the question: `em` and `f1` of what follows the first `###`, or of the whole text
    where there is none (answers may hold a `#`, so the last one is no mark here)."""
    answer = text.partition("###")[2] if "###" in text else text
    answer = answer.strip()
    return Score({"em": exact_match(answer, example.answer), "f1": f1(answer, example.answer)}, answer)
