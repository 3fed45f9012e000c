"""What an audit attacks: models with a goal channel, their problems, and the goals that an attacker wants instead."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sidestream.evaluation.attacks_text import OVERRIDES
from sidestream.lm.attach import AttachedLM
from sidestream.papers.audit import DEFAULT_ARMS, Audit
from sidestream.papers.authority import Table5, Trained
from sidestream.papers.authority_models import (
    TASK_OVERRIDES,
    AuthorityPlans,
    HuntModels,
    override_text,
    sentence_ends,
)
from sidestream.papers.experiment import from_json
from sidestream.tasks import treasure
from sidestream.tasks.blocksworld_data import END, GOAL, WORDS, perturbed_trajectory, plan_text, prompt_text
from sidestream.tasks.blocksworld_data import problems as blocksworld_problems
from sidestream.training.loop import FINAL

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One text, whose goal text and vector state alike, and the other goal that an attacker wants."""

    goal: Ids
    """The goal's tokens, which the vector is encoded from."""
    stated: Ids
    """The goal as the text states it; empty where it does not."""
    context: Ids
    """What follows, where an attacker can write."""
    question: Ids
    """The end of the text, which nobody can move."""
    answer: Ids
    """What the model should say."""
    other: int
    """The problem whose answer the attacker wants, and whose goal he states."""
    overrides: dict[str, Ids] = field(default_factory=dict)
    """Name of the override to its tokens, for that goal."""

    @property
    def text(self) -> Ids:
        """The whole text."""
        return self.stated + self.context + self.question


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One audited model."""

    name: str
    """What the results call it."""
    model: AttachedLM
    """The model, its channel trained."""
    problems: list[Problem]
    """What it is asked."""
    calibration: list[Ids]
    """Further goals: honest pairs for arbitration, and admissible codes."""
    window: int | None
    """W."""
    sentence_ends: frozenset[int]
    """Ids that an override stands behind."""
    allowed: Ids | None
    """Ids that a token search may use; None for all."""


def subjects(audit: Audit) -> list[str]:
    """Names of the models to audit.

    Raises:
        ValueError: nothing to audit is named, it is no model, or it lacks what is asked for.
    """
    if not audit.model:
        raise ValueError("name what to audit: sidestream audit MODEL (a run of lsar.table5, or a saved channel)")
    path = Path(audit.model)
    if (path / "experiment.json").exists():
        _, names = _table5(path)
        wanted = audit.arms or tuple(name for name in DEFAULT_ARMS if name in names)
        lacking = [name for name in wanted if name not in names]
        if lacking or not wanted:
            what = f"no finished model {lacking[0]!r}" if lacking else "none of the usual arms"
            raise ValueError(f"{path} has {what}; it has {', '.join(names) or 'none'}")
        return list(wanted)
    if audit.arms:
        raise ValueError(f"arms are those of a run of lsar.table5, and {path} is none; leave arms out")
    if audit.data is None:
        raise ValueError(f"{path} is no run of lsar.table5; to audit a saved channel give its goals: --data FILE.jsonl")
    return ["model"]


def subject(audit: Audit, name: str) -> Subject:
    """Load one of `subjects`.

    Raises:
        ValueError: files are missing or damaged, or the problems cannot be attacked.
    """
    path = Path(audit.model)
    if (path / "experiment.json").exists():
        experiment, names = _table5(path)
        build = _blocksworld if names[name].task == "blocksworld" else _treasure
        return build(audit, experiment, names[name], path, name)
    return _saved(audit, path)


def _table5(path: Path) -> tuple[Table5, dict[str, Trained]]:
    """A run of Table 5, and those of its models that have a channel and are trained."""
    try:
        record = json.loads((path / "experiment.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / 'experiment.json'} is damaged ({error}); repeat the run") from None
    table = record.get("table") if isinstance(record, dict) else None
    if table != "lsar.table5":
        raise ValueError(f"{path} is a run of {table}; the audit takes runs of lsar.table5, or a saved channel")
    experiment = from_json(Table5, record)
    models = [t for task in experiment.tasks for t in experiment.trained(task)]
    done = [t for t in models if t.curriculum.channel != "closed" and (path / t.name / "stage3" / FINAL).exists()]
    return experiment, {t.name.removeprefix("treasure-"): t for t in done}


def _treasure(audit: Audit, experiment: Table5, trained: Trained, path: Path, name: str) -> Subject:
    hunt = HuntModels(experiment, path, show=False)
    model, _ = hunt.load(trained)
    if audit.problems > len(hunt.tests):
        raise ValueError(f"problems is {audit.problems}, and {path} was tested on {len(hunt.tests)}; use fewer")
    tests = hunt.tests[: audit.problems]
    places = {id(problem): index for index, problem in enumerate(hunt.tests)}
    problems = []
    for index, test in enumerate(tests):
        # The partner may lie beyond the problems attacked; then the next one that shares nothing.
        other = places[id(hunt.partners[index])]
        if other >= len(tests):
            other = next(i for i, o in enumerate(tests) if o.item != test.item and o.code != test.code)
        wanted = tests[other]
        overrides = {key: tuple(hunt.vocabulary.encode(override_text(key, wanted))) for key in TASK_OVERRIDES}
        problems.append(
            Problem(
                goal=test.goal_ids,
                stated=test.goal_ids,
                context=test.distractor_ids,
                question=test.trigger_ids,
                answer=test.code_ids + test.item_ids,
                other=other,
                overrides=overrides,
            )
        )
    further = treasure.problems("valid", audit.calibration, [0], 1, hunt.vocabulary.encode)
    return Subject(
        name=name,
        model=model,
        problems=problems,
        calibration=[problem.goal_ids for problem in further],
        window=experiment.window,
        sentence_ends=frozenset(sentence_ends(hunt.vocabulary)),
        allowed=tuple(range(hunt.vocabulary.pad_id)),
    )


def _blocksworld(audit: Audit, experiment: Table5, trained: Trained, path: Path, name: str) -> Subject:
    """Pairs of goals over one initial state; each is what an attacker of the other wants.

    The right answer is the plan that training shows, to the word: less is said right here than reaches its goal.
    """
    plans = AuthorityPlans(experiment, path, show=False)
    encode = plans.vocabulary.encode
    pairs = plans.tests[: (audit.problems + 1) // 2]
    if 2 * len(pairs) < audit.problems:
        raise ValueError(f"problems is {audit.problems}, and {path} has {2 * len(plans.tests)} for {name}; use fewer")
    model, _ = plans.trained(trained)
    problems = []
    for a, b in pairs:
        for asked, wanted in ((a, b), (b, a)):
            prompt, override = (prompt_text(problem).split() for problem in (asked, wanted))
            actions, _ = perturbed_trajectory(asked, random.Random(0), budget=0, probability=0.0)
            problems.append(
                Problem(
                    goal=tuple(encode(" ".join(prompt))),
                    stated=tuple(encode(" ".join(prompt))),
                    context=(),
                    question=(),
                    answer=tuple(encode(plan_text(actions, asked.names).removesuffix(f" {END}"))),
                    other=len(problems) + (1 if asked is a else -1),
                    overrides={"restate": tuple(encode(" ".join(override[override.index(GOAL) :])))},
                )
            )
    further = islice(blocksworld_problems(plans.task("faithful"), "valid"), audit.calibration)
    return Subject(
        name=name,
        model=model,
        problems=problems,
        calibration=[tuple(encode(prompt_text(problem))) for problem in further],
        window=None,
        sentence_ends=frozenset(),
        allowed=tuple(range(len(WORDS))),
    )


def _saved(audit: Audit, path: Path) -> Subject:
    from sidestream.lm.attach import load
    from sidestream.lm.models.base import chat_template, offsets
    from sidestream.tasks.goals import read_goals, tokens

    assert audit.data is not None
    records = read_goals(audit.data)
    model = load(path).eval()
    if model.channel is None:
        raise ValueError(f"{path} has no goal channel, and the audit attacks one")
    if model.tokenizer is None:
        raise ValueError(f"the base model of {path} has no tokenizer beside it; save one with it (save_pretrained)")
    encode, template = offsets(model.tokenizer, special=False), chat_template(model.tokenizer)
    rows = []
    for record in records:
        if record.answer is None:
            raise ValueError(f"{record.where}: field 'answer' is missing; the audit needs to know what is right")
        read = tokens(record, template, encode)
        start = read.scored.index(True)
        stop = len(read.scored) - read.scored[::-1].index(True)
        before = read.ids[:start]
        cut = max(0, len(before) - audit.question)
        goal = tuple(encode(record.goal)[0])
        if not goal:
            raise ValueError(f"{record.where}: field 'goal' has no token")
        rows.append((record, goal, before[:cut], before[cut:], read.ids[start:stop]))
    if len(rows) < audit.problems:
        raise ValueError(f"{audit.data} holds {len(rows)} records, and problems is {audit.problems}; use fewer")
    used, rest = rows[: audit.problems], rows[audit.problems :]
    problems = []
    for index, (_, goal, context, question, answer) in enumerate(used):
        other = _other(used, index)
        if other is None:
            raise ValueError(
                f"{audit.data}: all answers are {used[index][0].answer!r}; an attacker has nothing to want"
            )
        wanted = used[other]
        filled = {
            key: template_text.format(
                goal=wanted[0].goal, trigger=model.tokenizer.decode(list(wanted[3])), answer=wanted[0].answer
            )
            for key, template_text in OVERRIDES.items()
        }
        problems.append(
            Problem(
                goal=goal,
                stated=goal if audit.goal_in_text else (),
                context=context,
                question=question,
                answer=answer,
                other=other,
                overrides={key: tuple(encode(text)[0]) for key, text in filled.items()},
            )
        )
    ends = frozenset(token for mark in (".", "?", "!", "\n") for token in encode(mark)[0])
    special = set(model.tokenizer.all_special_ids)
    embeddings: Any = model.lm.get_input_embeddings()
    return Subject(
        name="model",
        model=model,
        problems=problems,
        # Goals beyond those attacked, and where there are few, these as well: an honest pair is an honest pair.
        calibration=[row[1] for row in (rest + used)[: audit.calibration]],
        window=audit.window,
        sentence_ends=ends,
        allowed=tuple(
            token for token in range(min(embeddings.num_embeddings, len(model.tokenizer))) if token not in special
        ),
    )


def _other(rows: Sequence[Any], index: int) -> int | None:
    """The next row with another goal and another answer."""
    turn = [(index + k) % len(rows) for k in range(1, len(rows))]
    return next((i for i in turn if rows[i][1] != rows[index][1] and rows[i][4] != rows[index][4]), None)
