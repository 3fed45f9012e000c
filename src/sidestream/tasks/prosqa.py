"""ProsQA (CoCoNuT, arXiv 2412.06769): which of two concepts follows from a shuffled list of is-a statements?

    Every lempus is a yerpus. Bob is a lempus. ... Is Bob a yerpus or zumpus?       question
    Bob is a lempus. / Every lempus is a yerpus.                                    steps, a shortest path
    Bob is a yerpus.                                                                answer

Nodes without parents are entities, whose statements go without "Every". The short wording, for word-level
vocabularies, is one word a name: `lempus yerpus ; Bob lempus ; ? yerpus zumpus Bob`, steps `lempus`, `yerpus`, answer
`yerpus`. This file reads and scores; `prosqa_generator` makes more.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sidestream.tasks.base import (
    ReasoningExample,
    Score,
    field,
    json_records,
    read_output,
    read_words,
    same_answer,
    texts,
)

EDGE_END, ASK = ";", "?"
"""The marks of the short wording: after each statement, and between the statements and what is asked."""

_STATEMENT = re.compile(r"(?:Every )?(\w+) is a (\w+)\.")
_QUERY = re.compile(r"(.*) Is (\w+) a (\w+) or (\w+)\?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProsqaProblem:
    """One problem, with the fields of an official record."""

    question: str
    """The statements, one an edge, and the question."""
    steps: tuple[str, ...]
    """A shortest path from root to target."""
    answer: str
    """That the root is a target."""
    idx_to_symbol: tuple[str, ...]
    """The name of each node."""
    edges: tuple[tuple[int, int], ...]
    """(parent, child), parent < child, sorted by child."""
    root: int
    """0 or 1: the node asked about."""
    target: int
    """A farthest leaf of the root's own side."""
    neg_target: int
    """A leaf of the other root's side: the wrong option."""

    @property
    def example(self) -> ReasoningExample:
        """The problem in the terms that the reasoning tasks share."""
        return ReasoningExample(self.question, self.steps, self.answer)

    def row(self) -> dict[str, object]:
        """The problem as an official record, or as one line of JSONL; `read` reads both."""
        return {
            "question": self.question,
            "steps": list(self.steps),
            "answer": self.answer,
            "idx_to_symbol": list(self.idx_to_symbol),
            "edges": [list(edge) for edge in self.edges],
            "root": self.root,
            "target": self.target,
            "neg_target": self.neg_target,
        }


# ---- files


def read(path: str | Path) -> list[ProsqaProblem]:
    """The problems of an official file (a JSON list), or of JSON lines with the same fields; plain or gzipped.

    Raises ValueError: file, index or line, and field of the first record that is malformed or contradicts itself.
    """
    return [_problem(record, where) for where, record in json_records(path)]


def _problem(record: dict[str, Any], where: str) -> ProsqaProblem:
    names = texts(record, "idx_to_symbol", where)
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: field 'idx_to_symbol' names two nodes alike")
    edges = []
    for edge in field(record, "edges", list, where):
        pair = isinstance(edge, list) and len(edge) == 2 and all(type(node) is int for node in edge)
        if not pair or not 0 <= edge[0] < edge[1] < len(names):
            raise ValueError(
                f"{where}: field 'edges' must hold pairs [parent, child] of node numbers, parent < child < {len(names)}"
                f", got {edge!r}"
            )
        edges.append((edge[0], edge[1]))
    asked = {}
    for name in ("root", "target", "neg_target"):
        asked[name] = field(record, name, int, where)
        if not 0 <= asked[name] < len(names):
            raise ValueError(f"{where}: field {name!r} must be a node number from 0 to {len(names) - 1}")
    problem = ProsqaProblem(
        question=field(record, "question", str, where),
        steps=texts(record, "steps", where),
        answer=field(record, "answer", str, where),
        idx_to_symbol=names,
        edges=tuple(edges),
        **asked,
    )
    root, target, wrong = (names[asked[name]] for name in ("root", "target", "neg_target"))
    short = is_short(problem.question)
    try:
        said = _parsed(problem.question)
    except ValueError as error:
        raise ValueError(f"{where}: field 'question' {error}") from None
    concepts = {child for _, child in edges}
    stated = [statement_text(names[parent], names[child], parent not in concepts, short) for parent, child in edges]
    if sorted(text for text, _, _ in said.statements) != sorted(stated):
        raise ValueError(f"{where}: field 'question' does not state each of the edges, once")
    if said.root != root or sorted(said.options) != sorted((target, wrong)):
        raise ValueError(f"{where}: field 'question' does not ask whether {root} is a {target} or {wrong}")
    if problem.answer != answer_text(root, target, short):
        raise ValueError(f"{where}: field 'answer' does not name the target, {target}")
    if not is_path(problem.example, problem.steps):
        raise ValueError(f"{where}: field 'steps' is no path along the edges from {root} to {target}")
    return problem


# ---- text


def is_short(question: str) -> bool:
    """Whether a question is in the short wording."""
    return not question.endswith("?")


def statement_text(parent: str, child: str, entity: bool, short: bool) -> str:
    """An edge as text. `entity`: the parent is one."""
    if short:
        return f"{parent} {child} {EDGE_END}"
    return f"{'' if entity else 'Every '}{parent} is a {child}."


def query_text(root: str, one: str, other: str, short: bool) -> str:
    """What is asked. The short wording ends with the root, so that nothing stands between it and the first step."""
    return f"{ASK} {one} {other} {root}" if short else f"Is {root} a {one} or {other}?"


def answer_text(root: str, target: str, short: bool) -> str:
    """The answer."""
    return target if short else f"{root} is a {target}."


class _Question(NamedTuple):
    statements: tuple[tuple[str, str, str], ...]  # text, parent, child
    root: str
    options: tuple[str, str]


def _parsed(question: str) -> _Question:
    if is_short(question):
        before, mark, query = question.partition(f" {ASK} ")
        pairs = [pair.split() for pair in before.removesuffix(EDGE_END).split(EDGE_END)]
        asked = query.split()
        if not mark or len(asked) != 3 or any(len(pair) != 2 for pair in pairs):
            raise ValueError("does not end in `Is <root> a <concept> or <concept>?`")
        statements = ((statement_text(parent, child, False, short=True), parent, child) for parent, child in pairs)
        return _Question(tuple(statements), asked[2], (asked[0], asked[1]))
    match = _QUERY.fullmatch(question)
    if match is None:
        raise ValueError("does not end in `Is <root> a <concept> or <concept>?`")
    before, root, one, other = match.groups()
    if _STATEMENT.sub("", before).strip():
        raise ValueError("has something else than `Every <concept> is a <concept>.` among its statements")
    statements = ((found[0], found[1], found[2]) for found in _STATEMENT.finditer(before))
    return _Question(tuple(statements), root, (one, other))


# ---- scores


def is_path(example: ReasoningExample, steps: Sequence[str]) -> bool:
    """Whether the steps lead from the question's root to the answer's concept, each by a statement of the question.

    Any such path counts, also one that is not a shortest.
    """
    question, short = _parsed(example.question), is_short(example.question)
    node = question.root
    for step in steps:
        onward = {child for text, parent, child in question.statements if parent == node and step in (text, child)}
        onward = {child for child in onward if (step == child) == short}
        if not onward:
            return False
        (node,) = onward
    return bool(steps) and example.answer == answer_text(question.root, node, short)


def score(example: ReasoningExample, text: str) -> Score:
    """Scores the text generated after the question.

    `accuracy`: 1 if the answer (after the last `#`; see `read_output`) is the gold sentence, as CoCoNuT counts it.
    `path`: 1 if the lines before it are a path by `is_path`. In the short wording steps and answer are single words,
    and without a `#` the last word is the answer.
    """
    if is_short(example.question):
        steps, answer = read_words(text)
    else:
        steps, answer = read_output(text)
    values = {"accuracy": float(same_answer(answer, example.answer)), "path": float(is_path(example, steps))}
    return Score(values, answer)
