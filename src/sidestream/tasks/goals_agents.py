"""Real agent runs as goal records: WebShop sessions of ReAct, tau-bench conversations, ALFWorld episodes.

Each run's goal is taken out of its own text, so that a trajectory can be told from its actions only. Runs of one goal
stay in one split.
"""

from collections.abc import Sequence
from pathlib import Path

from sidestream.tasks.base import Split, field, hash_split, json_records
from sidestream.tasks.goals import GoalRecord

GAP = "..."
"""What stands where a text repeated its goal."""


def webshop(path: str | Path) -> list[GoalRecord]:
    """Sessions of `{"goal", "steps": [{"action", "observation"}, ...]}`.

    Raises:
        ValueError: file, line and field of a record that is not so.
    """
    made = []
    for where, record in json_records(path):
        goal = field(record, "goal", str, where).strip()
        steps = field(record, "steps", list, where)
        lines = []
        for step in steps:
            if not isinstance(step, dict) or not {"action", "observation"} <= step.keys():
                raise ValueError(f"{where}: each of 'steps' needs 'action' and 'observation'")
            lines += [f"> {step['action']}", str(step["observation"])]
        text = "\n".join(lines).replace(goal, GAP)
        made.append(GoalRecord(where, goal, text, (), None))
    return made


def tau_bench(path: str | Path) -> list[GoalRecord]:
    """Conversations of `{"goal", "messages"}`, as text: the agent sees what the customer says, never the goal itself.

    Raises:
        ValueError: file, line and field of a record that is not so.
    """
    made = []
    for where, record in json_records(path):
        lines = []
        for message in field(record, "messages", list, where):
            calls = message.get("tool_calls") or []
            said = [message.get("content") or "", *(f"{call['name']}({call['arguments']})" for call in calls)]
            lines.append(f"{message['role']}: " + "\n".join(filter(None, said)))
        made.append(GoalRecord(where, field(record, "goal", str, where), "\n".join(lines), (), None))
    return made


def alfworld(path: str | Path) -> list[GoalRecord]:
    """Episodes of `{"goal", "text"}`.

    Raises:
        ValueError: file, line and field of a record that is not so.
    """
    made = []
    for where, record in json_records(path):
        goal = field(record, "goal", str, where).strip()
        made.append(GoalRecord(where, goal, field(record, "text", str, where).replace(goal, GAP), (), None))
    return made


def part(records: Sequence[GoalRecord], split: Split, *, test: float = 0.3) -> list[GoalRecord]:
    """The records whose goals belong to a split; `test` is the share of goals kept for the test."""
    return [record for record in records if hash_split(record.goal, 0.0, test) == split]
