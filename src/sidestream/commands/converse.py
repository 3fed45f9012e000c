"""The conversation of `sidestream generate --chat`: a line of the user's, an answer as it comes, and so on."""

from __future__ import annotations

import sys
from typing import Any

HELP = """/goal TEXT   another goal from here on; /goal alone takes it away
/window W    the model sees the last W tokens; /window alone: all of them
/help        this
/quit        leave (so do Ctrl-D and Ctrl-C; while an answer comes, Ctrl-C stops the answer)"""


def converse(chat: Any, policy: Any, sampling: dict[str, Any]) -> int:
    """Talk until the input ends. What goes wrong is one line, and the conversation goes on.

    Answers go to stdout, everything else to stderr.

    Args:
        chat: a `sidestream.lm.texts.conversation.Chat`.
        policy: of windows that the user asks for.
        sampling: options of `generate`.
    """
    from sidestream.lm.models.base import text_streamer

    _tell(f"{_standing(chat)}; /help says what can be typed")
    while True:
        try:
            line = _line()
        except KeyboardInterrupt:
            line = None
        if line is None or line.split()[:1] == ["/quit"]:
            return 0
        if not line:
            continue
        try:
            if line.startswith("/"):
                _tell(_ordered(chat, policy, line))
            else:
                chat.say(line, streamer=text_streamer(chat.tokenizer), **sampling)
                _tell(_standing(chat))
        except KeyboardInterrupt:
            print()
            _tell("stopped; the model forgets this turn")
        except Exception as error:
            print(f"sidestream: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)


def _ordered(chat: Any, policy: Any, line: str) -> str:
    """What a line that begins with `/` does, in words."""
    from sidestream.lm.decoding.cache import Window

    order, _, rest = line.partition(" ")
    rest = rest.strip()
    if order == "/help":
        return HELP
    if order == "/goal":
        chat.set_goal(rest or None)
        return _standing(chat)
    if order == "/window":
        if rest and not rest.isdecimal():
            raise ValueError(f"/window takes a number of tokens, got {rest!r}")
        chat.set_window(Window(size=int(rest), policy=policy) if rest else None)
        return _standing(chat)
    raise ValueError(f"unknown order {order!r}; /help says what can be typed")


def _standing(chat: Any) -> str:
    window = chat.cache.window
    gone = "no window" if window is None else f"{chat.gone} have left the window of {window.size}"
    goal = f"{chat.goal_tokens} pinned" if chat.model.pinned else "the goal is in the channel"
    if not chat.model.pinned and chat.cache.latent is None:
        goal = "no goal"
    return f"{chat.tokens} tokens, {gone}, {goal}"


def _tell(text: str) -> None:
    sys.stdout.flush()
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr)


def _line() -> str | None:
    """What the user types next, without white space around it; None where the input has ended."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - lines can be edited and found again

        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None
