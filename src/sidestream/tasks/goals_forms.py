"""One record of a goals file in any of the forms that people have, checked: to `GoalRecord`.

A text is a `trajectory`, or a chat: `messages`, ShareGPT's `conversations`, `prompt` and `completion` (as text or as
messages; the completion is scored), or Alpaca's `instruction`, `input` and `output`.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidestream.tasks.base import field, is_text
from sidestream.tasks.goals_chat import ASSISTANT, answers

SYSTEM = "system"
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bard": ASSISTANT,
    "bing": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "function_response": "tool",
    "observation": "tool",
}
"""ShareGPT's names of roles."""
_TEXTS = {"trajectory": str, "messages": list}
_OPTIONAL = {"answer": str, "tools": list}
_MESSAGE_FIELDS = {"role": str, "content": str, "tool_calls": list, "function_call": dict, "weight": int}
# What templates read beside role, content and calls.
_KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class GoalRecord:
    """One goal and what followed it."""

    where: str
    """File and line, for messages."""
    goal: str
    """The text that the channel encodes."""
    trajectory: str | None
    """Plain text; None in a record of messages."""
    messages: tuple[dict[str, Any], ...]
    """Role and content of every turn, with calls of tools as they were given and `weight` 0 where a turn of the
    assistant's is not scored; empty in a record of plain text."""
    answer: str | None
    """The span to score; None scores the whole trajectory, or every message of the assistant's and its end."""
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of tools, for the chat template."""

    def row(self) -> dict[str, object]:
        """One line of JSONL."""
        text = {"trajectory": self.trajectory} if self.trajectory is not None else {"messages": list(self.messages)}
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {"goal": self.goal, **text, **({} if self.answer is None else {"answer": self.answer}), **tools}


def goal_record(record: Mapping[str, Any], where: str, goal_from: str | None = None) -> GoalRecord:
    """A record, checked.

    Args:
        record: the fields.
        where: file and line, for messages.
        goal_from: the field that holds the goal, or `system` for the first system message; it leaves the text. None:
            `goal`.

    Raises:
        ValueError: after `where`, the first thing that is wrong.
    """
    record = {name: value for name, value in record.items() if value is not None or name in ("goal", goal_from)}
    goal, rest = _goal(record, where, goal_from)
    has = [name for name in ("trajectory", "messages") if name in rest]
    if len(has) == 2:
        raise ValueError(f"{where}: has both 'trajectory' and 'messages'; give one of them")
    misspelt(rest, _OPTIONAL if has else {**_OPTIONAL, **_TEXTS}, where)
    answer = field(rest, "answer", str, where) if "answer" in rest else None
    if has == ["trajectory"]:
        return _plain(where, goal, field(rest, "trajectory", str, where), answer)
    if not has and isinstance(rest.get("prompt", ""), str) and isinstance(rest.get("completion"), str):
        # As one text, and the completion is what stands last in it.
        prompt, completion = rest.get("prompt", ""), field(rest, "completion", str, where)
        if not is_text(prompt):
            raise ValueError(f"{where}: field 'prompt' holds half a character (a lone surrogate)")
        if answer is not None and answer not in completion:
            raise ValueError(f"{where}: field 'answer' does not occur in 'completion': {answer[:60]!r}")
        return _plain(where, goal, prompt + completion, answer or (completion if prompt else None))
    messages, name = _messages(rest, where)
    if goal is None:
        first = next((k for k, message in enumerate(messages) if message["role"] in (SYSTEM, "developer")), None)
        if first is None:
            raise ValueError(f"{where}: has no system message to take the goal from (--goal_from system)")
        goal = messages.pop(first)["content"]
        if not goal.strip():
            raise ValueError(f"{where}: the system message is empty, and the goal is taken from it")
    said = [message for message in messages if message["role"] == ASSISTANT and message.get("weight", 1)]
    if not any(message["content"].strip() or message.get("tool_calls") for message in said):
        off = " whose weight is not 0" if any(message["role"] == ASSISTANT for message in messages) else ""
        raise ValueError(f"{where}: field {name!r} has no text of the assistant's{off}: nothing to score")
    if answer is not None and not any(
        answer in message["content"].strip() or answers(message.get("tool_calls"), answer) for message in said
    ):
        raise ValueError(f"{where}: field 'answer' is in no message of the assistant's: {answer[:60]!r}")
    return GoalRecord(where, goal, None, tuple(messages), answer, _tools(rest, where))


def misspelt(given: Mapping[str, Any], known: Mapping[str, type], where: str) -> None:
    """A ValueError for a field that is no known one and differs from one, which is absent, in a letter or two."""
    for name, value in given.items():
        if name in known or not isinstance(name, str):
            continue
        lower = name.lower().strip()
        near = difflib.get_close_matches(lower, [k for k in known if k not in given], n=1, cutoff=0.8)
        # `answer_id` is a name of its own.
        longer = near and lower != near[0] and near[0] in lower.replace("-", "_").split("_")
        if near and not longer and isinstance(value, known[near[0]]):
            raise ValueError(f"{where}: field {name!r} is not known; did you mean {near[0]!r}? Else rename it")


# ---- the goal


def _goal(record: dict[str, Any], where: str, goal_from: str | None) -> tuple[Any, dict[str, Any]]:
    """The goal, None where a system message is to give it, and the fields that are left for the text."""
    name = goal_from or "goal"
    if name == SYSTEM and not _system_field(record):
        return None, {key: value for key, value in record.items() if key != "goal"}
    if name not in record:
        near = difflib.get_close_matches(name, list(record), n=1, cutoff=0.8)
        hint = f" (is it {near[0]!r}?)" if near else ""
        fields = ", ".join(map(repr, record)) or "none"
        how = "" if goal_from else "; name the one that holds the goal with --goal_from FIELD, or the system message"
        how += "" if goal_from else " with --goal_from system"
        raise ValueError(f"{where}: field {name!r} is missing{hint}; the fields are {fields}{how}")
    return field(record, name, str, where), {key: value for key, value in record.items() if key not in (name, "goal")}


def _system_field(record: Mapping[str, Any]) -> bool:
    """Whether `system` is a field of the record's, and no message is."""
    turns = next((record[name] for name in ("messages", "conversations", "prompt") if name in record), None)
    given = turns if isinstance(turns, list) else []
    roles = [turn.get("role", turn.get("from")) for turn in given if isinstance(turn, dict)]
    return isinstance(record.get(SYSTEM), str) and SYSTEM not in roles and "developer" not in roles


def _plain(where: str, goal: Any, text: str, answer: str | None) -> GoalRecord:
    if goal is None:
        raise ValueError(f"{where}: has no system message to take the goal from (--goal_from system): it is plain text")
    if answer is not None and (answer not in text or text.startswith(answer) and text.count(answer) == 1):
        how = "does not occur in" if answer not in text else "has nothing before it in"
        raise ValueError(f"{where}: field 'answer' {how} 'trajectory': {answer[:60]!r}")
    return GoalRecord(where, goal, text, (), answer)


# ---- messages


def _messages(record: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], str]:
    """Every message, and the name of the field that they are from."""
    if "messages" in record:
        return _list(record, "messages", where), "messages"
    opening = [{"role": SYSTEM, "content": record[SYSTEM]}] if isinstance(record.get(SYSTEM), str) else []
    if "conversations" in record:
        turns = _list(record, "conversations", where)
        return [*([] if any(turn["role"] == SYSTEM for turn in turns) else opening), *turns], "conversations"
    if "completion" in record:
        if isinstance(record.get("prompt", []), str) or isinstance(record["completion"], str):
            raise ValueError(f"{where}: fields 'prompt' and 'completion' must both be text, or both lists of messages")
        before = _list(record, "prompt", where) if "prompt" in record else []
        off = [{**turn, "weight": 0} if turn["role"] == ASSISTANT else turn for turn in before]
        return [*off, *_list(record, "completion", where)], "completion"
    if "output" in record and ("instruction" in record or "input" in record):
        asked = [record[name] for name in ("instruction", "input") if record.get(name) not in (None, "")]
        past = record.get("history") or []
        if not all(isinstance(text, str) and is_text(text) for text in asked):
            raise ValueError(f"{where}: fields 'instruction' and 'input' must be text")
        if not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair) for pair in past
        ):
            raise ValueError(f"{where}: field 'history' must be a list of pairs of texts, question and answer")
        roles = ("user", ASSISTANT)
        turns = [{"role": role, "content": text} for pair in past for role, text in zip(roles, pair, strict=True)]
        if asked:
            turns.append({"role": "user", "content": "\n\n".join(asked)})
        return [*opening, *turns, {"role": ASSISTANT, "content": field(record, "output", str, where)}], "output"
    raise ValueError(
        f"{where}: has neither 'trajectory' nor 'messages'; give one of them (or 'conversations', 'prompt' and "
        f"'completion', 'instruction' and 'output'); its other fields are {', '.join(map(repr, record)) or 'none'}"
    )


def _list(record: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    record = {**record, name: _parsed(record[name])}
    return [
        _message(message, f"{where}: message {number} of field {name!r}")
        for number, message in enumerate(field(record, name, list, where))
    ]


def _parsed(value: Any) -> Any:
    """A list that a column of text holds as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            pass
    return value


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object with 'role' and 'content'")
    message = _without_none(message)
    if "from" in message and "role" not in message:  # ShareGPT
        role, content = message["from"], message.get("value")
        role = _ROLES.get(role, role) if isinstance(role, str) else None
    else:
        role, content = message.get("role"), message.get("content")
        misspelt(message, _MESSAGE_FIELDS, where)
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has no 'role'")
    calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else None)
    if calls is not None and not (isinstance(calls, list) and is_text(json.dumps(calls, ensure_ascii=False))):
        raise ValueError(f"{where} must have a list of calls, of whole characters, as 'tool_calls'")
    if isinstance(content, list):
        content = _joined(content, where)
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not is_text(content):
        raise ValueError(f"{where} must have text as 'content'")
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"{where} has weight {weight!r}; it must be 0 (not scored) or 1")
    kept = {name: message[name] for name in _KEPT if isinstance(message.get(name), str)}
    more = {**({"tool_calls": calls} if calls else {}), **({} if weight else {"weight": 0})}
    return {"role": role, "content": content, **kept, **more}


def _joined(parts: Sequence[Any], where: str) -> str:
    """The text of OpenAI's content parts."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part of type {kind!r} in its content; only parts of text can be read")
        texts.append(part["text"])
    return "".join(texts)


def _without_none(value: Any) -> Any:
    """Tables write every field of every row, None where a row has none."""
    if isinstance(value, dict):
        return {name: _without_none(x) for name, x in value.items() if x is not None}
    if isinstance(value, list):
        return [_without_none(x) for x in value]
    return value


def _tools(record: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    tools = _parsed(record.get("tools") or [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: field 'tools' must be a list of objects, each of which describes a tool")
    return tuple(_without_none(tools))
