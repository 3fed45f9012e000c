"""What is attacked: a model with a goal channel, its problems, and for each the other goal that an attacker wants."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidestream.evaluation.attacks_text import OVERRIDES, TASK_OVERRIDES, override_text, sentence_ends
from sidestream.lm.attach import AttachedLM, load
from sidestream.lm.models.base import chat_template, offsets
from sidestream.lm.texts.text import Vocabulary, WordVocabulary
from sidestream.tasks import blocksworld, treasure
from sidestream.tasks.blocksworld_data import END, GOAL, WORDS, perturbed_trajectory, plan_text, prompt_text
from sidestream.tasks.goals import read_goals, tokens

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


def treasure_subject(
    model: AttachedLM,
    vocabulary: Vocabulary,
    tests: Sequence[treasure.TreasureProblem],
    *,
    window: int | None,
    count: int,
    calibration: int,
) -> Subject:
    """A model of Treasure Hunt.

    Args:
        tests: what it is tested on; the first `count` of them are attacked.
        window: W.
        calibration: further goals.

    Raises:
        ValueError: there are fewer tests.
    """
    if count > len(tests):
        raise ValueError(f"problems is {count}, and the model was tested on {len(tests)}; use fewer")
    encode, used = vocabulary.encode, tests[:count]
    places = {id(problem): index for index, problem in enumerate(tests)}
    problems = []
    for test, partner in zip(used, treasure.partners(tests), strict=False):
        # The partner may lie beyond the problems attacked; then the next one that shares nothing.
        other = places[id(partner)]
        if other >= count:
            other = next(i for i, o in enumerate(used) if o.item != test.item and o.code != test.code)
        problems.append(
            Problem(
                goal=test.goal_ids,
                stated=test.goal_ids,
                context=test.distractor_ids,
                question=test.trigger_ids,
                answer=test.code_ids + test.item_ids,
                other=other,
                overrides={name: tuple(encode(override_text(name, used[other]))) for name in TASK_OVERRIDES},
            )
        )
    return Subject(
        model=model,
        problems=problems,
        calibration=[problem.goal_ids for problem in treasure.problems("valid", calibration, [0], 1, encode)],
        window=window,
        sentence_ends=frozenset(sentence_ends(vocabulary)),
        allowed=tuple(range(vocabulary.pad_id)),
    )


def blocksworld_subject(
    model: AttachedLM,
    vocabulary: WordVocabulary,
    pairs: Sequence[tuple[blocksworld.Problem, blocksworld.Problem]],
    further: Sequence[blocksworld.Problem],
    *,
    count: int,
) -> Subject:
    """A model of Blocksworld: pairs of goals over one initial state, each what an attacker of the other wants.

    The right answer is the plan that training shows, to the word: less is said right here than reaches its goal.

    Args:
        pairs: what it is tested on.
        further: problems whose goals arbitration is calibrated on.
        count: problems attacked, two of a pair.

    Raises:
        ValueError: there are fewer pairs.
    """
    if 2 * len(pairs) < count:
        raise ValueError(f"problems is {count}, and the model was tested on {2 * len(pairs)}; use fewer")
    encode, problems = vocabulary.encode, []
    for a, b in pairs[: (count + 1) // 2]:
        for asked, wanted in ((a, b), (b, a)):
            prompt, override = tuple(encode(prompt_text(asked))), prompt_text(wanted).split()
            actions, _ = perturbed_trajectory(asked, random.Random(0), budget=0, probability=0.0)
            problems.append(
                Problem(
                    goal=prompt,
                    stated=prompt,
                    context=(),
                    question=(),
                    answer=tuple(encode(plan_text(actions, asked.names).removesuffix(f" {END}"))),
                    other=len(problems) + (1 if asked is a else -1),
                    overrides={"restate": tuple(encode(" ".join(override[override.index(GOAL) :])))},
                )
            )
    return Subject(
        model=model,
        problems=problems,
        calibration=[tuple(encode(prompt_text(problem))) for problem in further],
        window=None,
        sentence_ends=frozenset(),
        allowed=tuple(range(len(WORDS))),
    )


def saved_subject(
    path: Path | str,
    data: Path | str,
    *,
    problems: int,
    calibration: int,
    goal_in_text: bool = True,
    question: int = 8,
    window: int | None = None,
) -> Subject:
    """A saved channel, attacked on goals of your own.

    Args:
        path: folder of `save_pretrained` or `sidestream train`, with its tokenizer.
        data: records with goal, trajectory and answer (JSON lines), as `sidestream train` reads them.
        problems: how many of them are attacked.
        calibration: further goals, at most.
        goal_in_text: the goal's text stands before the trajectory. Off where the channel alone holds it.
        question: how many tokens before the answer no attacker can move or write behind.
        window: W; None for everything.

    Raises:
        ValueError: files are missing or damaged, or the records cannot be attacked.
    """
    records = read_goals(str(data))
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
        cut = max(0, len(before) - question)
        goal = tuple(encode(record.goal)[0])
        if not goal:
            raise ValueError(f"{record.where}: field 'goal' has no token")
        rows.append((record, goal, before[:cut], before[cut:], read.ids[start:stop]))
    if len(rows) < problems:
        raise ValueError(f"{data} holds {len(rows)} records, and problems is {problems}; use fewer")
    used, rest = rows[:problems], rows[problems:]
    asked = []
    for index, (_, goal, context, end, answer) in enumerate(used):
        other = _other(used, index)
        if other is None:
            raise ValueError(f"{data}: all answers are {used[index][0].answer!r}; an attacker has nothing to want")
        wanted = used[other]
        filled = {
            key: template_text.format(
                goal=wanted[0].goal, trigger=model.tokenizer.decode(list(wanted[3])), answer=wanted[0].answer
            )
            for key, template_text in OVERRIDES.items()
        }
        asked.append(
            Problem(
                goal=goal,
                stated=goal if goal_in_text else (),
                context=context,
                question=end,
                answer=answer,
                other=other,
                overrides={key: tuple(encode(text)[0]) for key, text in filled.items()},
            )
        )
    ends = frozenset(token for mark in (".", "?", "!", "\n") for token in encode(mark)[0])
    special = set(model.tokenizer.all_special_ids)
    embeddings: Any = model.lm.get_input_embeddings()
    return Subject(
        model=model,
        problems=asked,
        # Goals beyond those attacked, and where there are few, these as well: an honest pair is an honest pair.
        calibration=[row[1] for row in (rest + used)[:calibration]],
        window=window,
        sentence_ends=ends,
        allowed=tuple(
            token for token in range(min(embeddings.num_embeddings, len(model.tokenizer))) if token not in special
        ),
    )


def _other(rows: Sequence[Any], index: int) -> int | None:
    """The next row with another goal and another answer."""
    turn = [(index + k) % len(rows) for k in range(1, len(rows))]
    return next((i for i in turn if rows[i][1] != rows[index][1] and rows[i][4] != rows[index][4]), None)
