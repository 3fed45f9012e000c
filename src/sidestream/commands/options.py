"""What the parsers of the commands have in common."""

from __future__ import annotations

from typing import Any

from sidestream.tasks.base import is_text

Options = dict[str, tuple[Any, Any, str]]
"""Name -> type, default, help."""

GOAL_FROM = "the field that holds the goal, or system: the system message, which leaves the text; null: goal"


def command_parser(parser_class: Any, usage: str, about: str, options: Options) -> Any:
    """A parser of `--name value` words; `usage` begins with the command."""
    prog = " ".join(usage.split()[:2])
    parser = parser_class(prog=prog, usage=usage, description=about, default_env=False, allow_abbrev=False)
    for name, (kind, default, said) in options.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=said)
    parser.types = {name: kind for name, (kind, _, _) in options.items()}
    return parser


def parsed(parser: Any, words: list[str], *needed: str) -> Any:
    """The options given; a `ValueError` for a word that is wrong or a needed option that is missing."""
    given = parser.parse_args(words)
    for name in needed:
        if given[name] is None:
            raise ValueError(f"--{name} is missing; see `{parser.prog} --help`")
        if not given[name].strip():
            raise ValueError(f"--{name} is empty; see `{parser.prog} --help`")
    for name, value in given.items():
        if isinstance(value, str) and not is_text(value):
            raise ValueError(f"--{name} is not UTF-8 text: {ascii(value)}")
    return given
