"""What the parsers of the commands have in common."""

from __future__ import annotations

import re
from typing import Any

from sidestream.tasks.base import is_text

Options = dict[str, tuple[Any, Any, str]]
"""Name -> type, default, help. `str | None` is text that may be left out."""

GOAL_FROM = "the field that holds the goal, or system: the system message, which leaves the text; null: goal"


def command_parser(parser_class: Any, usage: str, about: str, options: Options) -> Any:
    """A parser of `--name value` words; `usage` begins with the command."""
    prog = " ".join(usage.split()[:2])
    parser = parser_class(prog=prog, usage=usage, description=about, default_env=False, allow_abbrev=False)
    parser.types, parser.texts = {}, []
    for name, (kind, default, said) in options.items():
        # Of a union the library reads the word as YAML, where `null`, `~` and `# one` are no text.
        parser.types[name] = str if kind == (str | None) else kind
        parser.texts += [name] if parser.types[name] is str else []
        parser.add_argument(f"--{name}", type=parser.types[name], default=default, help=said)
    return parser


DASHES = "--\0"
"""Stands for a text that is `--`: argparse drops that word wherever it is, and no word from a shell holds a NUL."""


def parsed(parser: Any, words: list[str], *needed: str) -> Any:
    """The options given, text as it was typed; a `ValueError` for a word that is wrong or a needed option that is
    missing."""
    given = parser.parse_args(_joined(parser, words))
    for name, value in given.items():
        if value == DASHES:
            given[name] = "--"
    for name in needed:
        if given[name] is None:
            raise ValueError(f"--{name} is missing; see `{parser.prog} --help`")
    for name in parser.texts:
        if given[name] is not None and not given[name].strip():
            raise ValueError(f"--{name} is empty; leave it out or give it a text; see `{parser.prog} --help`")
    for name, value in given.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_text(text):
                raise ValueError(f"--{name} is not UTF-8 text: {ascii(text)}")
    return given


def _joined(parser: Any, words: list[str]) -> list[str]:
    """The words, where text that begins with a dash is joined to its option: argparse would take it for another. A
    switch without a value is true."""
    made: list[str] = []
    for word in words:
        last = made[-1] if made else ""
        if word.startswith("-") and last.startswith("--") and parser.types.get(last[2:]) is str:
            if word.partition("=")[0] in parser._option_string_actions:
                raise ValueError(f"{last} has no text: {word} follows it; where that is the text, write {last}={word}")
            word = f"{made.pop()}={word}"
        elif last.startswith("--") and parser.types.get(last[2:]) is bool and word.startswith("-"):
            made[-1] = f"{last}=true"
        made.append(word[:-2] + DASHES if re.fullmatch(r"--[\w.]+=--", word) else word)
    if made and made[-1].startswith("--") and parser.types.get(made[-1][2:]) is bool:
        made[-1] += "=true"
    return made
