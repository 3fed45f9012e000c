"""Blocksworld in PDDL: read problems and domains of the four-operator world, write plans.

Names are case-insensitive and come out in lower case. Operators and predicates may be spelled with or without hyphen
(`pick-up` as in PlanBench and IPC-2000, or `pickup`), and the hand is empty or the arm. A file may hold a problem, a
domain or both, in UTF-8 or UTF-16, gzipped, with comments in Latin-1. What says nothing about a state or a plan's
length is passed over: types, requirements, costs, what is to be minimised. Every complaint is one line of the form
`file: what is wrong`.
"""

# The reader is our own because the libraries take less. `pddl` 0.5 refuses upper case, sections in another order, and
# names such as `1` or `?a`; unified-planning 1.3 needs the domain, in the problem's spelling and with its types, wants
# one order too, and takes 35 ms a problem. Neither takes a byte-order mark. The tests have the latter for a judge.

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
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

_PREDICATE = {"armempty": "handempty", "emptyarm": "handempty", "emptyhand": "handempty"}
"""Another name of a predicate, without hyphens -> ours."""

_BLOCK = ("block", "isblock", "object")
"""What a file may call every block, as a fact."""

_LOGIC = ("and", "or", "not", "imply", "forall", "exists", "when", "=", "<", ">", "<=", ">=", "preference")
"""What makes more than a fact of an expression."""

_PASSED_OVER = ("requirements", "length")
"""Sections that say nothing about the problem itself."""

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
        domain: if given, the problem must name this domain. A domain in the same file is checked in any case.

    Raises:
        ValueError: malformed PDDL, an unknown predicate or object, an initial state that is contradictory or
            incomplete, a goal that is impossible or more than a conjunction of facts.
        OSError: the file cannot be read.
    """
    definitions = _parse(path)
    sections = _sections(_definition(definitions, "problem", path), path)
    for section in ("domain", "objects", "init", "goal"):
        if section not in sections:
            raise ValueError(f"{path}: no (:{section} ...)")
    for known in filter(None, (domain, _included(definitions, path))):
        if sections["domain"] != [known.name]:
            raise ValueError(f"{path}: is for domain {_show(sections['domain'])}, not for {known.name}")
    names = _untyped(sections["objects"], path, ":objects")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{path}: object {repeated[0]!r} declared twice")
    if not names:
        raise ValueError(f"{path}: no objects")
    if len(sections["goal"]) != 1:
        raise ValueError(f"{path}: :goal must be one fact or (and ...), got {_show(sections['goal'])}")
    said = [_fact(expression, names, path, ":init") for expression in _init(sections["init"])]
    denied = {_fact(expression, names, path, ":init") for expression in _init(sections["init"], denied=True)}
    goal = {_fact(expression, names, path, ":goal") for expression in _conjuncts(sections["goal"])}
    for kind in sorted({fact.predicate for fact in (*said, *goal)} & set(_BLOCK)):
        for x, name in enumerate(names):
            if Fact(kind, (x,)) not in said:
                raise ValueError(f"{path}: impossible :init: ({kind} {name}) is missing, and others are there")
    for fact in said:
        if fact in denied:
            text = " ".join([fact.predicate, *(names[x] for x in fact.blocks)])
            raise ValueError(f"{path}: impossible :init: ({text}) is both stated and denied")
    init, goal = ([fact for fact in facts if fact.predicate not in _BLOCK] for facts in (said, goal))
    try:
        state = state_from_facts(init, names)
    except ValueError as error:
        raise ValueError(f"{path}: impossible :init: {error}") from None
    try:
        check_facts(goal, names)
    except ValueError as error:
        raise ValueError(f"{path}: impossible :goal: {error}") from None
    return Problem(names=tuple(names), init=state, goal=frozenset(goal))


def read_domain(path: str | Path) -> Domain:
    """The domain in a PDDL file.

    Raises:
        ValueError: malformed PDDL, or not exactly the operators of Blocksworld with the usual preconditions and
            effects. Costs of actions are passed over.
        OSError: the file cannot be read.
    """
    return _domain(_definition(_parse(path), "domain", path), path)


def included_domain(path: str | Path) -> Domain | None:
    """The domain in a problem's own file, where there is one. Raises as `read_domain` does."""
    return _included(_parse(path), path)


def _included(definitions: list[Expression], path: str | Path) -> Domain | None:
    if any(_kind(definition) == "domain" for definition in definitions):
        return _domain(_definition(definitions, "domain", path), path)
    return None


def _domain(text: list[Expression], path: str | Path) -> Domain:
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


def _text(path: str | Path) -> tuple[str, bool]:
    """The file's text, and whether it is Unicode for certain: bytes that are not are read as Latin-1."""
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: broken gzip file ({error})") from None
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    for encoding in ("utf-16",) if wide else ("utf-8-sig", "latin-1"):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if "\0" not in text and (encoding == "utf-8-sig" or "define" in text.lower()):
            return text, encoding != "latin-1"
    raise ValueError(f"{path}: not a text file")


def _parse(path: str | Path) -> list[Expression]:
    """The expressions of a PDDL file as nested lists, in lower case, without comments."""
    text, unicode = _text(path)
    # (line of the opening parenthesis, items so far)
    open_lists: list[tuple[int, list[Expression]]] = [(0, [])]
    # Not splitlines: what it takes for a line's end besides may stand in a comment.
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        for token in re.findall(r"[()]|[^\s()]+", line.partition(";")[0].lower()):
            if not unicode and not token.isascii():
                raise ValueError(f"{path}: line {number}: {token!r} is not UTF-8, which only a comment need not be")
            if token == "(":
                open_lists.append((number, []))
                if len(open_lists) > 50:
                    raise ValueError(f"{path}: line {number}: nested too deeply for a problem or a domain")
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
    return open_lists[0][1]


def _kind(definition: Expression) -> Expression | None:
    """`problem` or `domain`, or whatever stands in its place."""
    head = definition[1] if isinstance(definition, list) and len(definition) > 1 else None
    return head[0] if isinstance(head, list) and head else None


def _definition(definitions: list[Expression], kind: str, path: str | Path) -> list[Expression]:
    """The one definition of this kind; another stands beside it at most as the one domain of a problem."""
    kinds = [_kind(definition) for definition in definitions]
    if len(definitions) > 1 and sorted(map(str, kinds)) != ["domain", "problem"]:
        raise ValueError(
            f"{path}: expected one (define ...), or a domain and a problem, found {len(definitions)} expressions: "
            f"{_show(definitions)}; give each a file"
        )
    if not definitions:
        raise ValueError(f"{path}: expected one (define ...), found 0 expressions")
    found = definitions[kinds.index(kind) if kind in kinds else 0]
    assert isinstance(found, list)  # a bare word outside of parentheses is refused by `_parse`
    _header(found, kind, path)
    return found


def _header(text: list[Expression], kind: str, path: str | Path) -> str:
    if len(text) < 2 or text[0] != "define" or not isinstance(text[1], list) or len(text[1]) != 2:
        raise ValueError(f"{path}: must start with (define ({kind} NAME) ...")
    found, name = text[1]
    if found != kind or not isinstance(name, str):
        raise ValueError(f"{path}: expected a {kind}, got {_show(text[1])}")
    return name


def _sections(text: list[Expression], path: str | Path) -> dict[str, list[Expression]]:
    sections: dict[str, list[Expression]] = {}
    for section in text[2:]:
        head = section[0] if isinstance(section, list) and section else section
        name = head.removeprefix(":") if isinstance(head, str) and isinstance(section, list) else ""
        # A shortest plan is looked for, so whatever is to be small, this is the nearest to it.
        known = ("domain", "objects", "init", "goal", *_PASSED_OVER)
        small = name == "metric" and section[1:2] == ["minimize"]
        if name not in known and not small and section not in ([":constraints"], [":constraints", ["and"]]):
            raise ValueError(f"{path}: unsupported section {_show(section)}")
        if name in sections:
            raise ValueError(f"{path}: two sections {head}")
        sections[name] = list(section[1:])
    return sections


def _conjuncts(expressions: Iterable[Expression]) -> Iterator[Expression]:
    """The expressions, and those within `(and ...)` at any depth in its place."""
    for expression in expressions:
        if isinstance(expression, list) and expression[:1] == ["and"]:
            yield from _conjuncts(expression[1:])
        else:
            yield expression


def _init(expressions: list[Expression], *, denied: bool = False) -> Iterator[Expression]:
    """What an initial state states, or what it denies, which is what it could leave out; numbers, such as a cost
    so far, are neither."""
    for expression in _conjuncts(expressions):
        negated = isinstance(expression, list) and len(expression) == 2 and expression[0] == "not"
        number = isinstance(expression, list) and len(expression) == 3 and expression[0] == "="
        if number and isinstance(expression[1], list) and _is_number(expression[2]):
            continue
        if negated == denied:
            yield expression[1] if negated else expression


def _is_number(expression: Expression) -> bool:
    return isinstance(expression, str) and re.fullmatch(r"-?\d+(\.\d*)?|-?\.\d+", expression) is not None


def _untyped(items: list[Expression], path: str | Path, where: str) -> list[str]:
    """The names of `a b - block c - block`."""
    names: list[str] = []
    skip = False
    for item in items:
        if skip and isinstance(item, list) and item[:1] == ["either"]:
            skip = False
            continue
        if not isinstance(item, str):
            raise ValueError(f"{path}: {where} must be names, got {_show(item)}")
        if not skip and item != "-":
            names.append(item)
        skip = item == "-"
    return names


def _plain(word: str) -> str:
    return word.replace("-", "").replace("_", "")


def _predicate(word: str) -> str:
    return _PREDICATE.get(_plain(word), _plain(word))


def _fact(expression: Expression, names: list[str], path: str | Path, where: str) -> Fact:
    if not isinstance(expression, list) or not expression or not isinstance(expression[0], str):
        raise ValueError(f"{path}: {where}: expected a fact, got {_show(expression)}")
    predicate, blocks = _predicate(expression[0]), expression[1:]
    if predicate in _LOGIC:
        raise ValueError(f"{path}: {where}: only plain facts are supported, got {_show(expression)}")
    takes = 1 if predicate in _BLOCK else PREDICATES.get(predicate)
    if takes is None:
        raise ValueError(
            f"{path}: {where}: unknown predicate {expression[0]!r} in {_show(expression)}; "
            f"Blocksworld has {', '.join(PREDICATES)}"
        )
    if len(blocks) != takes:
        raise ValueError(f"{path}: {where}: {predicate} takes {takes} blocks, got {_show(expression)}")
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
        found: set[tuple] = set()
        for item in _conjuncts([expression]):
            if isinstance(item, list) and item[:2] == ["increase", ["total-cost"]] and len(item) == 3:
                continue
            negated = isinstance(item, list) and len(item) == 2 and item[0] == "not"
            atom = item[1] if negated else item
            if not isinstance(atom, list) or not atom or not all(map(_is_word, atom)):
                return None
            arguments = [names.index(x) if x in names else -1 for x in map(str, atom[1:])]
            found.add((*(["not"] if negated else []), _predicate(str(atom[0])), *arguments))
        return found

    preconditions, effects = literals(fields[":precondition"]), literals(fields[":effect"])
    if preconditions is not None:  # of two blocks, one in hand or on the other, these say nothing new
        preconditions -= {("not", "=", 0, 1), ("not", "=", 1, 0)}
    return None if preconditions is None or effects is None else (preconditions, effects)


def _is_word(expression: Expression) -> bool:
    return isinstance(expression, str)


def _show(expression: Expression) -> str:
    if isinstance(expression, str):
        return repr(expression)
    text = " ".join(item if isinstance(item, str) else _show(item) for item in expression)
    return f"({text if len(text) < 60 else text[:57] + '...'})"
