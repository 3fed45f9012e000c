"""Blocksworld in PDDL: read problems and domains of the four-operator world, write plans.

Names are case-insensitive and come out in lower case. Operators and predicates may be spelled with or without hyphen
(`pick-up` as in PlanBench and IPC-2000, or `pickup`). Every complaint is one line of the form `file: what is wrong`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from sidestream.tasks.blocksworld import (
    OPERATORS,
    PREDICATES,
    Action,
    Fact,
    Problem,
    check_facts,
    state_from_facts,
)

Expression = str | list["Expression"]

SPELLING = {"pickup": "pick-up", "putdown": "put-down", "stack": "stack", "unstack": "unstack"}
"""Our operator -> its name in the domains of PlanBench and IPC-2000."""

# Operator -> (preconditions, effects). Arguments are parameter numbers; a leading "not" marks a deleted fact.
_SEMANTICS: dict[str, tuple[set[tuple], set[tuple]]] = {
    "pickup": (
        {("clear", 0), ("ontable", 0), ("handempty",)},
        {("holding", 0), ("not", "clear", 0), ("not", "ontable", 0), ("not", "handempty")},
    ),
    "putdown": (
        {("holding", 0)},
        {("clear", 0), ("ontable", 0), ("handempty",), ("not", "holding", 0)},
    ),
    "stack": (
        {("holding", 0), ("clear", 1)},
        {("on", 0, 1), ("clear", 0), ("handempty",), ("not", "holding", 0), ("not", "clear", 1)},
    ),
    "unstack": (
        {("on", 0, 1), ("clear", 0), ("handempty",)},
        {("holding", 0), ("clear", 1), ("not", "on", 0, 1), ("not", "clear", 0), ("not", "handempty")},
    ),
}


class Domain(NamedTuple):
    """A PDDL domain that has been checked to be this world."""

    name: str
    """As in `(define (domain NAME)`, in lower case."""
    spelling: Mapping[str, str]
    """Our operator -> the domain's name for it, in lower case."""


def read_problem(path: str | Path, domain: Domain | None = None) -> Problem:
    """The Blocksworld problem in a PDDL file; blocks are numbered in the order of `:objects`.

    Args:
        domain: if given, the problem must name this domain.

    Raises:
        ValueError: malformed PDDL, an unknown predicate or object, an initial state that is contradictory or
            incomplete, a goal that is impossible or more than a conjunction of facts.
        OSError: the file cannot be read.
    """
    sections = _sections(path, "problem", ("domain", "requirements", "objects", "init", "goal"))
    for section in ("domain", "objects", "init", "goal"):
        if section not in sections:
            raise ValueError(f"{path}: no (:{section} ...)")
    if domain is not None and sections["domain"] != [domain.name]:
        raise ValueError(f"{path}: is for domain {_show(sections['domain'])}, not for {domain.name}")
    names = _untyped(sections["objects"], path, ":objects")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{path}: object {repeated[0]!r} declared twice")
    if not names:
        raise ValueError(f"{path}: no objects")
    conjunction = sections["goal"]
    if len(conjunction) != 1:
        raise ValueError(f"{path}: :goal must be one fact or (and ...), got {_show(conjunction)}")
    if isinstance(conjunction[0], list) and conjunction[0][:1] == ["and"]:
        conjunction = conjunction[0][1:]
    init = [_fact(expression, names, path, ":init") for expression in sections["init"]]
    goal = frozenset(_fact(expression, names, path, ":goal") for expression in conjunction)
    try:
        state = state_from_facts(init, names)
    except ValueError as error:
        raise ValueError(f"{path}: impossible :init: {error}") from None
    try:
        check_facts(goal, names)
    except ValueError as error:
        raise ValueError(f"{path}: impossible :goal: {error}") from None
    return Problem(names=tuple(names), init=state, goal=goal)


def read_domain(path: str | Path) -> Domain:
    """The domain in a PDDL file.

    Raises:
        ValueError: malformed PDDL, or not exactly the operators of Blocksworld with the usual preconditions and
            effects.
        OSError: the file cannot be read.
    """
    text = _parse(path)
    name = _header(text, "domain", path)
    spelling: dict[str, str] = {}
    for section in text[2:]:
        if not isinstance(section, list) or section[:1] != [":action"]:
            continue
        if len(section) < 2 or not isinstance(section[1], str):
            raise ValueError(f"{path}: an :action without a name")
        operator = _plain(section[1])
        if operator not in OPERATORS or operator in spelling:
            raise ValueError(f"{path}: unexpected operator {section[1]!r}; Blocksworld has {', '.join(OPERATORS)}")
        if _operator(section, path) != _SEMANTICS[operator]:
            raise ValueError(f"{path}: operator {section[1]!r} does not do what it does in Blocksworld")
        spelling[operator] = section[1]
    missing = [operator for operator in OPERATORS if operator not in spelling]
    if missing:
        raise ValueError(f"{path}: no operator {missing[0]}")
    return Domain(name, spelling)


def write_plan(
    path: str | Path, problem: Problem, actions: Iterable[Action], spelling: Mapping[str, str] = SPELLING
) -> None:
    """Write a plan as IPC validators read it: one `(operator block ...)` a line, then the cost as a comment.

    Args:
        path: by custom with the ending `.soln`.
        problem: names the blocks.
        actions: written as they are; whether they solve the problem is `score_plan`'s to say.
        spelling: `read_domain(...).spelling`; by default that of PlanBench and IPC-2000.
    """
    lines = [f"({' '.join([spelling[name], *(problem.names[x] for x in blocks)])})" for name, blocks in actions]
    lines.append(f"; cost = {len(lines)} (unit cost)")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parse(path: str | Path) -> list[Expression]:
    """The one expression of a PDDL file as nested lists, in lower case, without comments."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    # (line of the opening parenthesis, items so far)
    open_lists: list[tuple[int, list[Expression]]] = [(0, [])]
    for number, line in enumerate(text.splitlines(), start=1):
        for token in re.findall(r"[()]|[^\s()]+", line.partition(";")[0].lower()):
            if token == "(":
                open_lists.append((number, []))
            elif token == ")":
                if len(open_lists) == 1:
                    raise ValueError(f"{path}: line {number}: ')' without '('")
                _, items = open_lists.pop()
                open_lists[-1][1].append(items)
            elif len(open_lists) == 1:
                raise ValueError(f"{path}: line {number}: {token!r} outside of (define ...)")
            else:
                open_lists[-1][1].append(token)
    if len(open_lists) > 1:
        raise ValueError(f"{path}: '(' of line {open_lists[-1][0]} is never closed")
    top = open_lists[0][1]
    if len(top) != 1 or not isinstance(top[0], list):
        raise ValueError(f"{path}: expected one (define ...), found {len(top)} expressions")
    return top[0]


def _header(text: list[Expression], kind: str, path: str | Path) -> str:
    if len(text) < 2 or text[0] != "define" or not isinstance(text[1], list) or len(text[1]) != 2:
        raise ValueError(f"{path}: must start with (define ({kind} NAME) ...")
    found, name = text[1]
    if found != kind or not isinstance(name, str):
        raise ValueError(f"{path}: expected a {kind}, got {_show(text[1])}")
    return name


def _sections(path: str | Path, kind: str, known: tuple[str, ...]) -> dict[str, list[Expression]]:
    text = _parse(path)
    _header(text, kind, path)
    sections: dict[str, list[Expression]] = {}
    for section in text[2:]:
        head = section[0] if isinstance(section, list) and section else section
        if not isinstance(head, str) or not isinstance(section, list) or head.removeprefix(":") not in known:
            raise ValueError(f"{path}: unsupported section {_show(section)}")
        if head.removeprefix(":") in sections:
            raise ValueError(f"{path}: two sections {head}")
        sections[head.removeprefix(":")] = section[1:]
    return sections


def _untyped(items: list[Expression], path: str | Path, where: str) -> list[str]:
    """The names of `a b - block c - block`."""
    names: list[str] = []
    skip = False
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{path}: {where} must be names, got {_show(item)}")
        if not skip and item != "-":
            names.append(item)
        skip = item == "-"
    return names


def _plain(word: str) -> str:
    return word.replace("-", "").replace("_", "")


def _fact(expression: Expression, names: list[str], path: str | Path, where: str) -> Fact:
    if not isinstance(expression, list) or not expression or not isinstance(expression[0], str):
        raise ValueError(f"{path}: {where}: expected a fact, got {_show(expression)}")
    predicate, blocks = _plain(expression[0]), expression[1:]
    if predicate in ("and", "or", "not", "imply", "forall", "exists", "when", "="):
        raise ValueError(f"{path}: {where}: only plain facts are supported, got {_show(expression)}")
    if predicate not in PREDICATES:
        raise ValueError(
            f"{path}: {where}: unknown predicate {expression[0]!r} in {_show(expression)}; "
            f"Blocksworld has {', '.join(PREDICATES)}"
        )
    if len(blocks) != PREDICATES[predicate]:
        raise ValueError(f"{path}: {where}: {predicate} takes {PREDICATES[predicate]} blocks, got {_show(expression)}")
    numbers = []
    for block in blocks:
        if not isinstance(block, str) or block not in names:
            raise ValueError(f"{path}: {where}: undeclared object {_show(block)} in {_show(expression)}")
        numbers.append(names.index(block))
    return Fact(predicate, tuple(numbers))


def _operator(section: list[Expression], path: str | Path) -> tuple[set[tuple], set[tuple]] | None:
    """Preconditions and effects of an :action in the form of `_SEMANTICS`; None where they do not fit that form."""
    fields = dict(zip(section[2::2], section[3::2], strict=False)) if all(map(_is_word, section[2::2])) else {}
    parameters = fields.get(":parameters", [])
    if set(fields) != {":parameters", ":precondition", ":effect"} or not isinstance(parameters, list):
        raise ValueError(f"{path}: operator {section[1]!r} needs :parameters, :precondition and :effect, no others")
    names = _untyped(parameters, path, ":parameters")

    def literals(expression: Expression) -> set[tuple] | None:
        items = expression[1:] if expression[:1] == ["and"] else [expression]
        found: set[tuple] = set()
        for item in items:
            negated = isinstance(item, list) and len(item) == 2 and item[0] == "not"
            atom = item[1] if negated else item
            if not isinstance(atom, list) or not atom or not all(map(_is_word, atom)):
                return None
            arguments = [names.index(x) if x in names else -1 for x in map(str, atom[1:])]
            found.add((*(["not"] if negated else []), _plain(str(atom[0])), *arguments))
        return found

    preconditions, effects = literals(fields[":precondition"]), literals(fields[":effect"])
    return None if preconditions is None or effects is None else (preconditions, effects)


def _is_word(expression: Expression) -> bool:
    return isinstance(expression, str)


def _show(expression: Expression) -> str:
    if isinstance(expression, str):
        return repr(expression)
    text = " ".join(item if isinstance(item, str) else _show(item) for item in expression)
    return f"({text if len(text) < 60 else text[:57] + '...'})"
