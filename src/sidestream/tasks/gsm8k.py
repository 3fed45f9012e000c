"""GSM8K (arXiv 2110.14168): grade-school word problems; the steps are the equations, `<<48/2=24>>`.

Four formats are read. Official JSONL: `question`, and `answer` with annotations in `<<...>>` and a last line `#### 72`.
Text of iCoT (arXiv 2405.14838), also GSM8k-Aug's: `question||<<48/2=24>> <<48+24=72>> #### 72`, one problem a line.
CoCoNuT's JSON (arXiv 2412.06769): `question`, `steps`, `answer`. GSM8k-Aug's table (arXiv 2502.21074): `question`,
`cot`, `answer`. In the last two a step is an equation, or words, as GSM8k-Aug-NL has them.
"""

import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

from sidestream.tasks.base import (
    ReasoningExample,
    Score,
    Split,
    field,
    hash_split,
    hub_records,
    is_table,
    json_records,
    read_output,
    read_text,
    same_answer,
    table_records,
    text_lines,
    texts,
)

HUB = ("openai/gsm8k", "main")
"""Name and configuration on the Hugging Face hub."""

VALID_SHARE = 1 / 15
"""The share of the official training problems that `hold_out` keeps for validation: about 500 of 7,473."""

_EQUATION = re.compile(r"<<[^<>]*>>")
_NUMBER = re.compile(r"(?P<sign>[-+−]?)[$€£¥]?(?P<digits>(\d{1,3}(,\d{3})+|\d+)(\.\d*)?|\.\d+)\.?")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z<$(\d])")


def read(path: str | Path) -> list[ReasoningExample]:
    """The problems of a file, plain or gzipped: JSON lines if its first character is `{` (or `[`, a JSON list of the
    same records), rows of a `.parquet` or `.csv`, else the iCoT text.

    Raises ValueError: file and line of the first malformed problem, and what is wrong with it.
    """
    if is_table(path):
        return [_record(record, where) for where, record in table_records(path)]
    if read_text(path).lstrip()[:1] in ("{", "["):
        return [_record(record, where) for where, record in json_records(path)]
    return [_icot(line, where) for where, line in text_lines(path)]


def load_hub(split: Split, n: int | None = None) -> list[ReasoningExample]:
    """The first `n` problems (all where None) of the hub's `openai/gsm8k`; needs the package `datasets`.

    `test` is the official one; `train` and `valid` are the two parts of the official training set that `hold_out`
    makes. Raises ValueError: unknown split, or the data set cannot be had.
    """
    if split not in ("train", "valid", "test"):
        raise ValueError(f"split is {split!r}: choose one of train, valid, test")
    found = [
        _official(record, where) for where, record in hub_records(*HUB, split="test" if split == "test" else "train")
    ]
    if split != "test":
        found = hold_out(found)[split == "valid"]
    return found[:n]


def hold_out(examples: Iterable[ReasoningExample]) -> tuple[list[ReasoningExample], list[ReasoningExample]]:
    """The examples as (train, valid): a hash of the question decides, whatever the order and the rest."""
    train: list[ReasoningExample] = []
    valid: list[ReasoningExample] = []
    for example in examples:
        (valid if hash_split(example.question, VALID_SHARE, 0) == "valid" else train).append(example)
    return train, valid


def without(examples: Iterable[ReasoningExample], held: Iterable[ReasoningExample]) -> list[ReasoningExample]:
    """The examples whose question is in none of `held`. iCoT's validation file is part of the official training set."""
    questions = {example.question.strip() for example in held}
    return [example for example in examples if example.question.strip() not in questions]


def score(example: ReasoningExample, text: str) -> Score:
    """Scores the text generated after the question.

    `accuracy`: 1 if what follows the last `#` is the gold answer, commas left out (CoCoNuT's metric: as text, so `18.0`
    is not `18`). `number`: 1 if it is the gold number, however written: `18.0`, `$18`, `18.`. `steps`: 1 if the lines
    before it are the gold steps.
    """
    steps, answer = read_output(text)
    gold = tuple(step for step in example.steps if step)
    strict = same_answer(answer, example.answer)
    said = number(answer)
    near = strict or said is not None and said == number(example.answer)
    return Score({"accuracy": float(strict), "number": float(near), "steps": float(steps == gold)}, answer)


def number(text: str) -> Decimal | None:
    """The value of a text that is one number, with a currency's sign, commas between thousands and a full stop behind
    it or not; None for any other."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["sign"] in ("-", "−") else value


def _record(record: dict[str, object], where: str) -> ReasoningExample:
    if "steps" not in record and "cot" not in record:
        return _official(record, where)
    question = field(record, "question", str, where)
    given = record.get("answer")
    if isinstance(given, int | float) and not isinstance(given, bool):
        record = {**record, "answer": str(given)}
    final = field(record, "answer", str, where).rpartition("####")[2].strip()
    if not final or "\n" in final:
        raise ValueError(f"{where}: field 'answer' must be one line, got {final!r:.40}")
    if "steps" in record:
        steps = tuple(" ".join(step.split()) for step in texts(record, "steps", where))
    else:
        steps = _split(field(record, "cot", str, where) if record["cot"] != "" else "")
    return ReasoningExample(question, steps or ("",), final)


def _split(explanation: str) -> tuple[str, ...]:
    """The steps of a chain of thought in one text: equations where there is nothing else, or lines, or sentences."""
    if not _EQUATION.sub("", explanation).strip():
        return tuple(_EQUATION.findall(explanation))
    lines = explanation.split("\n") if "\n" in explanation.strip() else _SENTENCE.split(explanation)
    return tuple(line.strip() for line in lines if line.strip())


def _official(record: dict[str, object], where: str) -> ReasoningExample:
    question, answer = field(record, "question", str, where), field(record, "answer", str, where)
    explanation, mark, final = answer.rpartition("####")
    if not mark:
        raise ValueError(f"{where}: field 'answer' has no line `#### <answer>`")
    return _example(question, explanation, final, f"{where}: field 'answer'")


def _icot(line: str, where: str) -> ReasoningExample:
    question, bars, rest = line.partition("||")
    explanation, mark, final = rest.rpartition("####")
    if not bars or not mark:
        raise ValueError(f"{where}: has no `{'####' if bars else '||'}`; a line is `question||<<a+b=c>> #### answer`")
    if not question.strip():
        raise ValueError(f"{where}: the question before `||` is empty")
    if _EQUATION.sub("", explanation).strip():
        raise ValueError(f"{where}: the steps between `||` and `####` must be equations in << and >>")
    return _example(question, explanation, final, where)


def _example(question: str, explanation: str, final: str, where: str) -> ReasoningExample:
    equations = _EQUATION.findall(explanation)
    if len(equations) != explanation.count("<<") or len(equations) != explanation.count(">>"):
        raise ValueError(f"{where}: an equation opens with << and does not close with >>, or the reverse")
    final = final.strip()
    if not final or "\n" in final:
        raise ValueError(f"{where}: one line with the answer must follow ####, got {final!r:.40}")
    # A problem without equations has one empty step, as CoCoNuT's converter gives it.
    return ReasoningExample(question, tuple(equations) or ("",), final)
