"""Settings as data: what every table has, JSON round trip, and the difference of two records."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Scale = Literal["smoke", "cpu", "paper"]
KINDS = {"int": "int", "float": "float", "string": "str", "bool": "bool"}
"""Beginning of the library's name for an error -> the type it asked for."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the settings of every table begin with. A table's own class adds its fields and checks them."""

    table: str
    """The name it is run under."""
    scale: Scale
    """`smoke`, `cpu` or `paper`."""
    seed: int = 0
    """Of initial weights, training problems and their order. Test problems are the same for every seed."""

    def __post_init__(self) -> None:
        self.at_least(seed=0)

    def at_least(self, **bounds: int) -> None:
        """Refuse a field below its bound.

        Raises:
            ValueError: names the field.
        """
        for name, least in bounds.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    def distinct(self, **known: Any) -> None:
        """Refuse a list that is empty, names something twice or, where `known` is not None, something unknown.

        Raises:
            ValueError: names the field.
        """
        for name, names in known.items():
            values = getattr(self, name)
            unknown = [value for value in values if names is not None and value not in names]
            if unknown and names is not None:
                raise ValueError(f"{name} names the unknown {unknown[0]!r}; use {', '.join(names)}")
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}; give at least one, each once")


@dataclass(frozen=True, kw_only=True)
class Tested(Settings):
    """Settings of a table that trains arms and asks them problems of a split."""

    arms: tuple[str, ...]
    """Arms, in the order of the report."""
    split: Literal["test", "valid"] = "test"
    """Split to evaluate on. Settings are chosen on `valid`; no split chooses weights: the last ones are evaluated."""
    test_problems: int = 500
    """Problems evaluated in each cell (the papers: 500)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(test_problems=1)


def to_json(settings: Any) -> dict[str, Any]:
    """A (nested) dataclass as plain JSON values."""
    return json.loads(json.dumps(asdict(settings)))


def from_json(kind: type[T], record: Any) -> T:
    """The dataclass that `to_json` wrote, equal to the original.

    Raises:
        ValueError: a field that is unknown, missing, of another type or out of range; names the field.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        # As JSON, for there a list is a tuple and a whole number serves as a fraction; all else is strict.
        return TypeAdapter(kind).validate_json(json.dumps(record), strict=True, extra="forbid")
    except ValidationError as problems:
        found = problems.errors(include_url=False)
    # A misspelt field is also a missing one; its own name says more.
    first = next((one for one in found if one["type"] == "unexpected_keyword_argument"), found[0])
    raise ValueError(_in_words(first))


def _in_words(error: Any) -> str:
    where, given = ".".join(part for part in error["loc"] if isinstance(part, str)), error["input"]
    kind = error["type"].split("_")[0]
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown field {where}"
    if kind == "missing":
        return f"field {where} is missing"
    if kind == "value":
        return f"{where}.{error['ctx']['error']}".lstrip(".")
    if kind == "literal":
        return f"{where} is {given!r}; use one of {error['ctx']['expected'].replace(' or ', ', ').replace(chr(39), '')}"
    if kind == "dataclass":
        return f"{where or 'the experiment'} must be an object, got {given!r}"
    if kind == "tuple":
        return f"{where} is {given!r}; it must be a list"
    return f"{where} is {given!r}; it must be of type {KINDS.get(kind, kind)}"


def first_difference(mine: Any, theirs: Any, where: str = "") -> str | None:
    """Name and both values of the first field in which two JSON objects differ; None if they are equal."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in [*mine, *(k for k in theirs if k not in mine)]:
            found = first_difference(mine.get(name), theirs.get(name), f"{where}.{name}".lstrip("."))
            if found:
                return found
        return None
    return None if mine == theirs else f"{where} is {theirs!r} there and {mine!r} here"


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested objects as one level of dotted names, for comparison and for printing."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    prefix = f"{name}." if name else ""
    return {key: leaf for part, inner in value.items() for key, leaf in flat(inner, f"{prefix}{part}").items()}
