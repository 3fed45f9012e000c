"""Goals and trajectories from a file of the user's: JSONL, a glob of files, or a hub data set, checked before any use.

A record is `{"goal": text, "trajectory": text}` or `{"goal": text, "messages": [{"role": ..., "content": ...}, ...]}`,
with an optional `"answer"`: a span of the trajectory (of an assistant's message) to score in place of everything. The
goal is what the channel holds; it is in the text only where the trajectory itself repeats it.
"""

import glob
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sidestream.tasks.base import field, hub_records, is_text, json_records

HUB = "hub:"
Template = Callable[[list[dict[str, str]]], str]
"""Messages to the text that a model was trained to see: a tokenizer's `apply_chat_template`."""


@dataclass(frozen=True, slots=True)
class GoalRecord:
    """One goal and what followed it."""

    where: str
    """File and line, for messages."""
    goal: str
    """The text that the channel encodes."""
    trajectory: str | None
    """Plain text; None in a record of messages."""
    messages: tuple[dict[str, str], ...]
    """Role and content of every turn; empty in a record of plain text."""
    answer: str | None
    """The span to score; None scores the whole trajectory, or every message of the assistant's."""

    def row(self) -> dict[str, object]:
        """One line of JSONL."""
        text = {"trajectory": self.trajectory} if self.trajectory is not None else {"messages": list(self.messages)}
        return {"goal": self.goal, **text, **({} if self.answer is None else {"answer": self.answer})}


Offsets = Callable[[str], tuple[list[int], list[tuple[int, int]]]]
"""Text to token ids and to the characters that each of them covers."""


class Tokens(NamedTuple):
    """A trajectory as token ids."""

    ids: tuple[int, ...]
    scored: tuple[bool, ...]
    """Whether each token is one of those to predict. The first never is."""


class Scored(NamedTuple):
    """A trajectory as text, and which characters of it are scored."""

    text: str
    spans: tuple[tuple[int, int], ...]


def read_goals(source: str, *, split: str = "train") -> list[GoalRecord]:
    """Every record of a file (`.jsonl`, `.json`, gzipped too), of all files that a glob matches, or of the hub's
    `hub:owner/name` or `hub:owner/name:config`.

    Args:
        source: where to read.
        split: which split of a hub data set.

    Raises:
        ValueError: no such file, or records that are wrong. The whole source is read first; the message names file,
            line and field of the first wrong record and the lines of the others.
    """
    if source.startswith(HUB):
        name, _, config = source.removeprefix(HUB).partition(":")
        if not name:
            raise ValueError(f"{source} names no data set; write {HUB}owner/name or {HUB}owner/name:config")
        found = list(hub_records(name, config or "default", split))
    else:
        paths = [source] if Path(source).is_file() else sorted(p for p in glob.glob(source) if Path(p).is_file())
        if not paths and Path(source).is_dir():
            raise ValueError(
                f"{source} is a folder; give a file in it, or a glob such as '{source.rstrip('/')}/*.jsonl'"
            )
        if not paths:
            hint = f"; a hub data set is written {HUB}{source}" if source.count("/") == 1 else ""
            raise ValueError(f"{source}: there is no such file{hint}")
        found = [entry for path in paths for entry in json_records(path)]
    records, wrong = [], []
    for where, record in found:
        try:
            records.append(_record(record, where))
        except ValueError as error:
            wrong.append((where, error))
    if wrong:
        rest = ", ".join(where for where, _ in wrong[1:6]) + (", ..." if len(wrong) > 6 else "")
        more = f"; {len(wrong) - 1} more of {len(found)} records are wrong: {rest}" if len(wrong) > 1 else ""
        raise ValueError(f"{wrong[0][1]}{more}")
    if not records:
        raise ValueError(f"{source}: holds no records")
    return records


def goals_hash(records: Sequence[GoalRecord]) -> str:
    """SHA-256, in hex, of the records: equal for equal content, wherever it was read from."""
    digest = hashlib.sha256()
    for record in records:
        digest.update((json.dumps(record.row(), sort_keys=True) + "\n").encode())
    return digest.hexdigest()


def scored_text(record: GoalRecord, template: Template | None) -> Scored:
    """The trajectory as the model sees it and the spans of it that are scored.

    Args:
        record: one record.
        template: the model's chat template; needed by records of messages.

    Raises:
        ValueError: messages without a template, or a template that refuses them or leaves out what is to be scored.
    """
    if record.trajectory is not None:
        text = record.trajectory
        if record.answer is None:
            return Scored(text, ((0, len(text)),))
        return Scored(text, (_last(text, record.answer),))
    if template is None:
        raise ValueError(
            f"{record.where}: has 'messages', but the model has no chat template; give a 'trajectory', or a model that "
            "has one"
        )
    try:
        text = template([dict(message) for message in record.messages])
    # Templates raise jinja's errors and, through them, anything.
    except Exception as error:
        raise ValueError(f"{record.where}: the model's chat template refuses the messages: {error}") from None
    spans, at = [], 0
    for number, message in enumerate(record.messages):
        content = message["content"].strip()
        start = text.find(content, at) if content else at
        if start < 0:
            if message["role"] != "assistant":
                continue  # a template may leave out or rewrite what is not scored
            raise ValueError(f"{record.where}: the chat template does not show message {number} as it is written")
        if message["role"] == "assistant" and content:
            spans.append((start, start + len(content)))
        at = start + len(content)
    if record.answer is not None:
        start, end = next((a, b) for a, b in reversed(spans) if record.answer in text[a:b])
        first, last = _last(text[start:end], record.answer)
        spans = [(start + first, start + last)]
    return Scored(text, tuple(spans))


def tokens(record: GoalRecord, template: Template | None, offsets: Offsets) -> Tokens:
    """The trajectory of a record as a model reads it.

    Raises:
        ValueError: as `scored_text`, and where no token is left to score.
    """
    text, spans = scored_text(record, template)
    ids, places = offsets(text)
    scored, span = [], 0
    for begin, end in places:
        while span < len(spans) and spans[span][1] <= begin:
            span += 1
        scored.append(bool(scored) and begin < end and span < len(spans) and spans[span][0] < end)
    if not any(scored):
        raise ValueError(f"{record.where}: no token to score: the text is too short")
    return Tokens(tuple(ids), tuple(scored))


def _last(text: str, answer: str) -> tuple[int, int]:
    start = text.rindex(answer)
    return start, start + len(answer)


def _record(record: dict[str, Any], where: str) -> GoalRecord:
    goal = field(record, "goal", str, where)
    has = [name for name in ("trajectory", "messages") if record.get(name) is not None]
    if len(has) != 1:
        given = "both 'trajectory' and 'messages'" if has else "neither 'trajectory' nor 'messages'"
        raise ValueError(f"{where}: has {given}; give one of them")
    answer = None if record.get("answer") is None else field(record, "answer", str, where)
    if has == ["trajectory"]:
        text = field(record, "trajectory", str, where)
        if answer is not None and (answer not in text or text.startswith(answer) and text.count(answer) == 1):
            how = "does not occur in" if answer not in text else "has nothing before it in"
            raise ValueError(f"{where}: field 'answer' {how} 'trajectory': {answer[:60]!r}")
        return GoalRecord(where, goal, text, (), answer)
    messages = tuple(
        _message(message, f"{where}: message {number} of field 'messages'")
        for number, message in enumerate(field(record, "messages", list, where))
    )
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    if not any(text.strip() for text in said):
        raise ValueError(f"{where}: field 'messages' has no text of the assistant's: nothing to score")
    if answer is not None and not any(answer in text.strip() for text in said):
        raise ValueError(f"{where}: field 'answer' is in no message of the assistant's: {answer[:60]!r}")
    return GoalRecord(where, goal, None, messages, answer)


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object with 'role' and 'content'")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has no 'role'")
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not is_text(content):
        raise ValueError(f"{where} must have text as 'content'")
    if calls:
        # Few templates show calls, and each in its own way: as text of the turn they are the same for every model.
        content = "\n".join(filter(None, (content, json.dumps(calls))))
    return {"role": role, "content": content}
