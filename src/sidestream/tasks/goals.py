"""Goals and trajectories from a file of the user's: JSON, CSV, Parquet, a glob of files, or a hub data set, checked
before any use.

A record is `{"goal": text, "trajectory": text}` or `{"goal": text, "messages": [{"role": ..., "content": ...}, ...]}`,
with an optional `"answer"`: a span of the trajectory (of an assistant's message) to score in place of everything. The
goal is what the channel holds; it is in the text only where the trajectory itself repeats it. `goals_forms` has the
other forms of a record.
"""

import glob
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from sidestream.tasks.base import hub_records, is_table, json_records, table_records
from sidestream.tasks.goals_chat import ASSISTANT, Template, find_answer, read_chat
from sidestream.tasks.goals_forms import GoalRecord
from sidestream.tasks.goals_forms import goal_record as _record

__all__ = ["GoalRecord", "Scored", "Tokens", "goals_hash", "read_goals", "scored_text", "tokens"]

HUB = "hub:"

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


def read_goals(source: str, *, split: str = "train", goal_from: str | None = None) -> list[GoalRecord]:
    """Every record of a file (`.jsonl`, `.json`, gzipped too; `.csv`, `.tsv` and `.parquet` with the package
    `datasets`), of all files that a glob matches, or of the hub's `hub:owner/name` or `hub:owner/name:config`.

    Args:
        source: where to read.
        split: which split of a hub data set.
        goal_from: the field that holds the goal, or `system` for the system message; it leaves the text. None: `goal`.

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
        found = [entry for path in paths for entry in (table_records if is_table(path) else json_records)(path)]
    records, wrong = [], []
    for where, record in found:
        try:
            records.append(_record(record, where, goal_from))
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
    """The trajectory as the model sees it and the spans of it that are scored: one for each turn of the assistant's,
    from where the model begins to write to the end of the token that ends the turn, be it the next role's marker.

    Args:
        record: one record.
        template: the model's chat template; needed by records of messages.

    Raises:
        ValueError: messages without a template, or a template that refuses them or leaves out what is to be scored.
    """
    return _read(record, template)[0]


def tokens(record: GoalRecord, template: Template | None, offsets: Offsets) -> Tokens:
    """The trajectory of a record as a model reads it. Where a chat ends in an answer that nothing ends, the tokenizer's
    end of text follows, and is scored; so is white space before an answer that a prompt of the template's lacks.

    Raises:
        ValueError: as `scored_text`, and where no token is left to score.
    """
    (text, spans), unended = _read(record, template)
    eos = getattr(template, "eos", None)
    if unended is not None and eos:
        text += eos
        spans = (*(span for span in spans if span[0] < unended), (unended, len(text)))
    if record.messages and record.answer is None:
        opening = getattr(template, "opening", "")
        spans = tuple((_opened(text, start, opening), end) for start, end in spans)
    ids, places = offsets(text)
    scored, span = [], 0
    for begin, end in places:
        while span < len(spans) and spans[span][1] <= begin:
            span += 1
        scored.append(bool(scored) and begin < end and span < len(spans) and spans[span][0] < end)
    if not any(scored):
        raise ValueError(f"{record.where}: no token to score: the text is too short")
    return Tokens(tuple(ids), tuple(scored))


def _opened(text: str, start: int, opening: str) -> int:
    """Where the opening of an answer ends, if there is only white space between it and `start`; else `start`."""
    at = start
    while at and not text.endswith(opening, 0, at) and text[at - 1].isspace():
        at -= 1
    return at if text.endswith(opening, 0, at) else start


def _read(record: GoalRecord, template: Template | None) -> tuple[Scored, int | None]:
    """What is scored, and where the last answer of a chat begins, if nothing ends it."""
    if record.trajectory is not None:
        text = record.trajectory
        if record.answer is None:
            return Scored(text, ((0, len(text)),)), None
        start = text.rindex(record.answer)
        return Scored(text, ((start, start + len(record.answer)),)), None
    if template is None:
        raise ValueError(
            f"{record.where}: has 'messages', but the model has no chat template; give a 'trajectory', or a model that "
            "has one"
        )
    said = [k for k, message in enumerate(record.messages) if message["role"] == ASSISTANT and message.get("weight", 1)]
    text, turns = read_chat(record.messages, record.tools, template, where=record.where, scored=said)
    if record.answer is not None:
        found = [(turn.start, find_answer(text[turn.start : turn.stop], record.answer)) for turn in turns.values()]
        places = [(start + place[0], start + place[1]) for start, place in found if place is not None]
        if not places:
            raise ValueError(f"{record.where}: the chat template does not show field 'answer': {record.answer[:60]!r}")
        return Scored(text, (places[-1],)), None
    last = next(reversed(turns.values()), None)
    unended = last is not None and last.end == last.stop and not text[last.end :].strip()
    spans = tuple((turn.start, turn.end) for turn in turns.values() if turn.start < turn.end)
    return Scored(text, spans), last.start if last is not None and unended else None
