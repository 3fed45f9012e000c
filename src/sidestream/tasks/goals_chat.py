"""Whose each character of a rendered chat is: asked of the template, never looked for in the text.

A message's place is what changes when the message does: the chat is rendered with a mark in its place, and what stands
before and after the mark must be the rendering's own beginning and end. A template's `{% generation %}` blocks, where
it has them, are taken instead.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Template = Callable[..., str]
"""Messages to the text that a model was trained to see: `lm.base.chat_template`, or any function of a list of
messages."""

ASSISTANT = "assistant"
OURS = ("weight", "tool_calls")
"""Fields of a message that no template is handed as they are."""

# Written like a token, for tokenizers that do not know the marks of their template: `</s>`, `<|user|>`, `[INST]`.
_LIKE_A_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class Turn(NamedTuple):
    """One message in the rendered chat, as places of characters."""

    start: int
    """Where what the model has to write begins."""
    stop: int
    """Where the message's own text ends."""
    end: int
    """Where the mark that ends the turn ends; `stop` where there is none."""


class Chat(NamedTuple):
    """A rendered chat."""

    text: str
    turns: dict[int, Turn]
    """Number of a message to its place, in order; negative numbers for blocks of the template that are no message."""


def read_chat(
    messages: Sequence[Message], tools: Sequence[Message], template: Template, *, where: str, scored: Sequence[int]
) -> Chat:
    """Render a chat and find what the template shows of some of its messages.

    Args:
        messages: role, content and what else a template reads; `tool_calls` as the OpenAI SDK writes them.
        tools: descriptions of tools, handed to the template; may be empty.
        template: the model's.
        where: file and line, for messages.
        scored: numbers of the assistant's messages to find.

    Raises:
        ValueError: the template refuses the messages, or it cannot be told what it shows of one that is scored.
    """
    ask = _Asked(template, tools)
    try:
        said = _with_calls(messages, ask)
        text = ask(said)
    # Templates raise jinja's errors and, through them, anything.
    except Exception as error:
        raise ValueError(f"{where}: the model's chat template refuses the messages: {error}") from None
    turns = _blocks(ask, said, scored)
    if turns is None:
        turns = _at_once(ask, said, text, scored)
    if turns is None:
        found = {number: _one(ask, said, text, number, where) for number in scored}
        turns = {number: turn for number, turn in found.items() if turn is not None}
    return Chat(text, turns)


class _Asked:
    """A template with the record's tools, and what it says of itself."""

    def __init__(self, template: Template, tools: Sequence[Message]) -> None:
        self._template = template
        self._rich = hasattr(template, "blocks")
        self._tools = [dict(tool) for tool in tools] or None
        self.marks: tuple[str, ...] = getattr(template, "marks", ())

    def __call__(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        plain = [dict(message) for message in messages]
        return self._template(plain, tools=self._tools, prompt=prompt) if self._rich else self._template(plain)

    @cached_property
    def opening(self) -> str:
        """What stands before an answer, as the template opens one, else as it writes an earlier one."""
        opened = getattr(self._template, "opening", "")
        if opened:
            return opened
        asked, mark = {"role": "user", "content": "x"}, "qzxyxzq"
        before, later = self.tried([asked]), self.tried([asked, {"role": ASSISTANT, "content": mark}, asked])
        if before is None or later is None or not later.startswith(before):
            return ""
        header = later.removeprefix(before).partition(mark)[0]
        return header if header.strip() else ""

    def tried(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """The rendering, or None where the template does not take the messages."""
        try:
            return self(messages, prompt=prompt)
        except Exception:
            return None

    def blocks(self, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
        if not self._rich:
            return None
        try:
            return self._template.blocks([dict(m) for m in messages], self._tools)  # type: ignore[attr-defined]
        except Exception:
            return None

    def mark(self, text: str, at: int) -> int | None:
        """Where the token ends that begins at `at` or behind white space there; None where none does."""
        while at < len(text) and text[at].isspace():
            at += 1
        known = next((mark for mark in self.marks if text.startswith(mark, at)), None)
        if known is not None:
            return at + len(known)
        like = _LIKE_A_TOKEN.match(text, at)
        return like.end() if like else None

    def last_mark(self, text: str, start: int, stop: int, *, like: bool = True) -> int | None:
        """Where the token begins that ends at `stop`; None where none does. `like` takes what is written like one."""
        known = next((mark for mark in self.marks if text.endswith(mark, start, stop)), None)
        if known is not None:
            return stop - len(known)
        found = [found.start() for found in _LIKE_A_TOKEN.finditer(text, start, stop) if found.end() == stop]
        return found[-1] if found and like else None


# ---- tool calls


def plain_calls(calls: Any) -> list[dict[str, Any]] | None:
    """Calls as templates read them, arguments parsed; None where they have another form."""
    made = []
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments, arguments)
        rest = {name: call[name] for name in ("id",) if call.get(name) is not None}
        made.append({**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return made or None


def _with_calls(messages: Sequence[Message], ask: _Asked) -> list[dict[str, Any]]:
    """The messages as the template is to see them: with calls where it shows calls, else with calls as text."""
    bare = [{name: value for name, value in message.items() if name not in OURS} for message in messages]
    calls = {number: message["tool_calls"] for number, message in enumerate(messages) if message.get("tool_calls")}
    if not calls:
        return bare
    parsed = {number: plain_calls(found) for number, found in calls.items()}
    for as_text, absent in ((False, ""), (False, None), (True, ""), (True, None)):
        if any(found is None for found in parsed.values()):
            break
        if _shows_calls(bare, parsed, absent, as_text, ask):
            return _called(bare, parsed, absent, as_text)
    # As text of the turn they are the same for every model.
    for number, found in calls.items():
        written = json.dumps(found, ensure_ascii=False)
        bare[number]["content"] = "\n".join(filter(None, (bare[number]["content"], written)))
    return bare


def _called(bare: list[dict[str, Any]], calls: Mapping[int, Any], absent: Any, as_text: bool) -> list[dict[str, Any]]:
    made = [dict(message) for message in bare]
    for number, found in calls.items():
        given = [
            {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
            if as_text and not isinstance(arguments := call["function"]["arguments"], str)
            else call
            for call in found
        ]
        made[number] |= {"content": made[number]["content"] or absent, "tool_calls": given}
    return made


def _shows_calls(bare: list[dict[str, Any]], calls: Mapping[int, Any], absent: Any, as_text: bool, ask: _Asked) -> bool:
    """Whether marks in place of names and arguments show, the arguments as JSON."""
    probes = {
        number: [
            {**call, "function": {"name": f"qzn{number}n{k}z", "arguments": {"qzk": f"qza{number}a{k}z"}}}
            for k, call in enumerate(found)
        ]
        for number, found in calls.items()
    }
    text = ask.tried(_called(bare, probes, absent, as_text))
    if text is None or ask.tried(_called(bare, calls, absent, as_text)) is None:
        return False
    return all(
        f"qzn{number}n{k}z" in text and f'"qza{number}a{k}z"' in text
        for number, found in calls.items()
        for k in range(len(found))
    )


# ---- places


def _sentinels(text: str, count: int) -> list[str]:
    # Small letters and figures: no template trims, escapes, parses or recases them.
    salt = 0
    while (stem := f"qzx{salt}") in text:
        salt += 1
    return [f"{stem}y{number}xzq" for number in range(count)]


def _marked(messages: Sequence[Message], marks: Mapping[int, str]) -> list[Message]:
    """The messages, some of them with a mark as their text; an answer is then that and nothing else."""
    made = []
    for number, message in enumerate(messages):
        if number in marks:
            rest = {"role": message["role"]} if message["role"] == ASSISTANT else message
            message = {**rest, "content": marks[number]}
        made.append(message)
    return made


def _around(text: str | None, marks: Sequence[str]) -> list[str] | None:
    """What stands before, between and after marks that each occur once, in order."""
    if text is None:
        return None
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        before, _, text = text.partition(mark)
        parts.append(before)
    return [*parts, text]


def _at_once(ask: _Asked, said: Sequence[Message], text: str, scored: Sequence[int]) -> dict[int, Turn] | None:
    """All turns from one more rendering, where the template writes every answer as it is, or trimmed."""
    if any(set(said[number]) - {"role", "content"} for number in scored):
        return None
    marks = _sentinels(text, len(scored))
    parts = _around(ask.tried(_marked(said, dict(zip(scored, marks, strict=True)))), marks)
    if parts is None:
        return None
    for trim in (str, str.strip):
        shown = [trim(said[number]["content"]) for number in scored]
        if "".join(x for pair in zip(parts, [*shown, ""], strict=True) for x in pair) != text:
            continue
        turns, at = {}, 0
        for number, before, content in zip(scored, parts, shown, strict=False):
            at += len(before)
            start, stop = _begin(ask, said, text, number, at), at + len(content)
            turns[number] = Turn(start, stop, _end(ask, said, text, number, stop))
            at = stop
        return turns
    return None


def _one(ask: _Asked, said: Sequence[Message], text: str, number: int, where: str) -> Turn | None:
    """One turn; None for an empty message that the template leaves out."""
    message = said[number]
    (mark,) = _sentinels(text, 1)
    around = _around(ask.tried(_marked(said, {number: mark})), [mark])
    before, after = around or (None, None)
    shows_start = before is not None and text.startswith(before)
    shows_stop = after is not None and text.endswith(after)
    start = len(before) if shows_start else None  # type: ignore[arg-type]
    stop = len(text) - len(after) if shows_stop else None  # type: ignore[arg-type]
    if start is None or stop is None or start > stop:
        # What the turn adds to the rendering of the turns before it.
        start = _added(ask, said, text, number, mark)
        if start is not None and (stop is None or stop < start):
            turn = _alone(ask, said, text, number, mark, start)
            if turn is not None:
                return turn
            stop = None
    else:
        start = _begin(ask, said, text, number, start)
    if start is not None and stop is not None:
        return Turn(start, stop, _end(ask, said, text, number, stop))
    if not (message["content"] or "").strip() and not message.get("tool_calls"):
        return None
    shown = around is not None or start is not None
    why = (
        "it rewrites the text around it, and where the message stands cannot be told"
        if shown
        else "with another text in its place the rendering is no other, or is refused"
    )
    raise ValueError(f"{where}: the chat template does not show message {number} as a turn of its own: {why}")


def _begin(ask: _Asked, said: Sequence[Message], text: str, number: int, content: int) -> int:
    """Where the model has to begin to write: before its text stands what the template adds to it, such as an empty
    thought, where the opening of an answer has no such thing."""
    if not ask.opening or text.endswith(ask.opening, 0, content):
        return content
    before = ask.tried(said[:number], prompt=True)
    whole = before is not None and text.startswith(before) and before.endswith(ask.opening)
    opened = len(before) if before is not None and whole else _opened(ask, said, text, number)
    return content if opened is None or opened > content else _skip(text, opened, content)


def _opened(ask: _Asked, said: Sequence[Message], text: str, number: int) -> int | None:
    """Where the opening of an answer ends in what the template writes between a message and the one before it: for
    templates that show the last turn otherwise than earlier ones."""
    if not number or not ask.opening:
        return None
    marks = _sentinels(text, 2)
    both = _around(ask.tried(_marked(said, {number - 1: marks[0], number: marks[1]})), marks)
    one = _around(ask.tried(_marked(said, {number - 1: marks[0]})), marks[:1])
    if both is None or one is None or ask.opening not in both[1] or not text.endswith(one[1]):
        return None
    header, behind = both[1].partition(ask.opening)[0] + ask.opening, len(text) - len(one[1])
    return behind + len(header) if text.startswith(header, behind) else None


def _skip(text: str, at: int, limit: int) -> int:
    while at < limit and text[at].isspace():
        at += 1
    return at


def _added(ask: _Asked, said: Sequence[Message], text: str, number: int, mark: str) -> int | None:
    """Where the turn begins behind the rendering of the turns before it and the header of an answer."""
    before = ask.tried(said[:number], prompt=True) if number else ""
    if before is None or not text.startswith(before):
        opened = _opened(ask, said, text, number)
        return None if opened is None else _skip(text, opened, len(text))
    if number and ask.opening and before.endswith(ask.opening):
        return _skip(text, len(before), len(text))
    # Nothing opens an answer: its header is what stands before a mark in its place, as the last turn or an earlier one.
    for later in ([], [{"role": "user", "content": "x"}]):
        around = _around(ask.tried([*said[:number], {"role": ASSISTANT, "content": mark}, *later]), [mark])
        if around is None or not around[0].startswith(before):
            continue
        header = around[0].removeprefix(before)
        if text.startswith(header, len(before)):
            return len(before) + len(header)
        if not header.strip():
            return _skip(text, len(before), len(text))
    return None


def _alone(ask: _Asked, said: Sequence[Message], text: str, number: int, mark: str, start: int) -> Turn | None:
    """A turn whose end is told by the rendering up to it: what closes an answer there, or its last mark."""
    upto = ask.tried(said[: number + 1])
    if upto is None or not text.startswith(upto) or len(upto.rstrip()) < start:
        return None
    around = _around(ask.tried([*said[:number], {"role": ASSISTANT, "content": mark}]), [mark])
    closing = around[1] if around else ""
    if closing and upto.endswith(closing) and len(upto) - len(closing) >= start:
        stop = len(upto) - len(closing)
        return Turn(start, stop, _end(ask, said, text, number, stop))
    stop = len(upto.rstrip())
    last = ask.last_mark(upto, start, stop, like=bool(closing.strip()))
    if last is not None:
        return Turn(start, last, stop)
    return Turn(start, stop, _end(ask, said, text, number, stop))


def _end(ask: _Asked, said: Sequence[Message], text: str, number: int, stop: int) -> int:
    """Where the token ends that ends a turn: the template's, or what opens the next role's turn."""
    found = ask.mark(text, stop)
    if found is not None:
        return found
    header = text[stop:]
    if number + 1 < len(said):
        # No token: a word, such as `User:`, and no more than what stands before the next message's own text.
        (mark,) = _sentinels(text, 1)
        around = _around(ask.tried(_marked(said, {number + 1: mark})), [mark])
        if around is None or not around[0].startswith(text[:stop]):
            return stop
        header = around[0][stop:]
    word = re.match(r"\s*\S+", header)
    return stop + word.end() if word else stop


# ---- the template's own word


def _blocks(ask: _Asked, said: Sequence[Message], scored: Sequence[int]) -> dict[int, Turn] | None:
    """The template's `{% generation %}` blocks as turns; None where it has none, or they are not told apart."""
    blocks = _joined(ask.blocks(said))
    if not blocks:
        return None
    text = ask(said)
    assistants = [number for number, message in enumerate(said) if message["role"] == ASSISTANT]
    marks = _sentinels(text, len(assistants))
    marked = _marked(said, dict(zip(assistants, marks, strict=True)))
    rendered, places = ask.tried(marked), _joined(ask.blocks(marked))
    if rendered is not None and places and len(places) == len(blocks) == len(assistants):
        shown = [rendered[start:stop] for start, stop in places]
        if all(mark in inside for mark, inside in zip(marks, shown, strict=True)):
            turns = {}
            for number, mark, inside, (start, end) in zip(assistants, marks, shown, blocks, strict=True):
                closing = inside.partition(mark)[2]
                stop = end - len(closing) if text.endswith(closing, start, end) else end
                if not closing.strip():
                    end = _end(ask, said, text, number, stop)
                turns[number] = Turn(start, stop, end)
            return {number: turns[number] for number in scored}
    if list(scored) != assistants:
        return None
    turns = {}
    for number, (start, end) in enumerate(blocks):
        last = ask.last_mark(text, start, start + len(text[start:end].rstrip()))
        mark, following = ask.mark(text, end), blocks[number + 1][0] if number + 1 < len(blocks) else len(text)
        closed = mark if last is None and mark is not None and mark <= following else end
        turns[-1 - number] = Turn(start, end if last is None else last, closed)
    return turns


def _joined(blocks: list[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Blocks, those without anything between them as one."""
    made: list[tuple[int, int]] = []
    for start, end in blocks or ():
        if made and made[-1][1] == start:
            made[-1] = (made[-1][0], end)
        else:
            made.append((start, end))
    return made


# ---- an answer inside a turn


def find_answer(text: str, answer: str) -> tuple[int, int] | None:
    """The last place of an answer in what a template shows: as it is, as JSON escapes it, or as an equal JSON value."""
    for written in dict.fromkeys(_writings(answer)):
        at = text.rfind(written)
        if at >= 0:
            return at, at + len(written)
    wanted = _json(answer)
    if not isinstance(wanted, dict | list):
        return None
    found = [place for place, value in _values(text) if value == wanted]
    return found[-1] if found else None


def answers(calls: Any, answer: str) -> bool:
    """Whether an answer stands in a message's calls: in a name or a text among the arguments, or equal to a value."""
    wanted = _json(answer)

    def inside(value: Any) -> bool:
        if isinstance(value, str):
            return answer in value
        if isinstance(value, dict):
            return value == wanted or any(inside(x) for pair in value.items() for x in pair)
        if isinstance(value, list):
            return value == wanted or any(inside(x) for x in value)
        return value is not None and json.dumps(value) == answer.strip()

    return inside(plain_calls(calls) or []) or find_answer(json.dumps(calls, ensure_ascii=False), answer) is not None


def _writings(answer: str) -> Iterator[str]:
    yield answer
    for ascii_only in (False, True):
        once = json.dumps(answer, ensure_ascii=ascii_only)[1:-1]
        yield once
        for again in (False, True):
            yield json.dumps(once, ensure_ascii=again)[1:-1]


def _json(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _values(text: str) -> Iterator[tuple[tuple[int, int], Any]]:
    """Objects and lists in a text, and texts that hold one, each with its place."""
    decoder = json.JSONDecoder()
    for opening in re.finditer(r'[{\["]', text):
        try:
            value, stop = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError):
            continue
        start = opening.start()
        if isinstance(value, str):
            value, start, stop = _json(value), start + 1, stop - 1
        if isinstance(value, dict | list):
            yield (start, stop), value
