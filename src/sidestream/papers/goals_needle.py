"""A needle past the window, with goals pinned, in the text and not at all; and what a sentence does to each of them.

`goals.needle_pinned`: facts are given once, then pages of other text, then a question. `goals.override`: the same in a
window that holds a sentence with another goal's facts as well; whose answer is given?
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from sidestream.evaluation.attacks_text import OVERRIDES
from sidestream.evaluation.scoring import SINKS, asked_tokens, score
from sidestream.experiments.report.figures import dots_figure
from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.results import Outcome
from sidestream.experiments.run import Found, Job, Measured, Side
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import Metric, Table
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.cache import CACHE_NAME, Window
from sidestream.papers.goals import ARMS, RELATIVE, Goals, GoalsWork, arm_view
from sidestream.papers.goals import sections as bars
from sidestream.tasks.goals import GoalRecord
from sidestream.tasks.needle import FACTS, VALUES, Needle, needles

LISTED = {
    "goals.needle_pinned": {
        "title": "Facts asked for after they left the window: goal pinned, in the text, put back, or not at all",
        "smoke": "a minute on 2 CPU cores",
        "cpu": "about 5 minutes on 2 CPU cores",
    },
    "goals.override": {
        "title": "The window states another goal than the one that is pinned: whose answer is given?",
        "smoke": "a minute on 2 CPU cores",
        "cpu": "about 5 minutes on 2 CPU cores",
    },
}
NO_SENTENCE = "no sentence"


@dataclass(frozen=True, kw_only=True)
class NeedlePinned(Goals):
    """Settings of the needle table."""

    table: str = "goals.needle_pinned"
    """The name it is run under."""
    arms: tuple[str, ...] = Goals.known[:-1]
    """Arms, in the order of the report."""
    words: int
    """Words of other text between the facts and the question."""
    facts: tuple[str, ...] = tuple(FACTS)
    """Facts that a goal states; one of them is asked for."""
    filler: str | None = None
    """Text file to take the other text from, its last tenth; null for the built-in page."""
    rounds: int = 5
    """Rounds in which a stream of text is timed in each arm; 0 leaves it out."""


@dataclass(frozen=True, kw_only=True)
class Override(NeedlePinned):
    """Settings of the table of overriding sentences."""

    table: str = "goals.override"
    """The name it is run under."""
    arms: tuple[str, ...] = ("none", "text", "pinned")
    """Arms, in the order of the report."""
    sentences: tuple[str, ...] = (NO_SENTENCE, *OVERRIDES)
    """Phrasings of the sentence, which stands right before the question."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distinct(sentences=(NO_SENTENCE, *OVERRIDES))


def needle(scale: Scale) -> NeedlePinned:
    """The needle table at one of its scales."""
    if scale == "smoke":
        return NeedlePinned(scale="smoke", window=64, problems=4, words=80, rounds=1)
    return NeedlePinned(scale=scale, window=64, problems=200, words=256)


def override(scale: Scale) -> Override:
    """The table of overriding sentences at one of its scales."""
    if scale == "smoke":
        return Override(scale="smoke", window=96, problems=3, words=80, rounds=0)
    return Override(scale=scale, window=96, problems=100, words=256, rounds=0)


# ---------------------------------------------------------------- needle


class NeedleWork(GoalsWork):
    """The needle table."""

    settings: NeedlePinned
    relative_of = "accuracy"

    @cached_property
    def records(self) -> list[GoalRecord]:
        """Problems of the test split."""
        return [GoalRecord(f"needle {k}", o.goal, o.trajectory, (), o.answer) for k, o in enumerate(self.needles)]

    @cached_property
    def needles(self) -> list[Needle]:
        """The same with what was asked."""
        e = self.settings
        return needles("test", e.problems, seed=e.seed, words=(e.words, e.words), facts=e.facts, filler=e.filler)

    @cached_property
    def where(self) -> dict[str, Any]:
        """W and the distance."""
        return {"W": self.settings.window, "words": self.settings.words}

    def jobs(self) -> list[Job]:
        """The arms, and the timing of them together."""
        return super().jobs() + ([Job(name="speed", work=self.speed)] if self.settings.rounds else [])

    def arm(self, arm: str) -> Measured:
        """Answers right and loss a token; tokens of the window and tokens read that the goal costs."""
        e, model = self.settings, self.model(arm)
        texts, heads = self.texts(model)
        states, views = self.states(arm, heads), []
        for row, (text, head) in enumerate(zip(texts, heads, strict=True)):
            asked = asked_tokens(text, e.window, len(head))
            views.append(arm_view(arm, text, head, e.window, asked, every=e.every, goal=row if states else None))
        if arm == "another":
            others = other_goals([record.goal for record in self.records])
            views = [view._replace(goal=others[row]) for row, view in enumerate(views)]
        scores = score(model, views, states)
        read = []
        for text, head in zip(texts, heads, strict=True):
            times = {"none": 0, "channel": 0, "reinserted": 1 + (len(text.ids) - 1) // (e.every or e.window)}
            read.append(min(SINKS, len(head)) if arm == "sinks" else len(head) * times.get(arm, 1))
        return Measured(
            outcomes=[
                self.outcome(arm, "accuracy", [float(one.right) for one in scores]),
                self.outcome(arm, "loss", [one.loss / one.tokens for one in scores]),
                self.outcome(arm, "goal_tokens", [view.spent for view in views]),
                self.outcome(arm, "tokens_spent", read),
            ]
        )

    @torch.no_grad()
    def speed(self) -> Measured:
        """Tokens of a text a second, read one at a time, arms in turns. Goals put back are read too and do not
        count."""
        window, model = self.settings.window, self.pinning
        texts, heads = self.texts(model)
        arms = [arm for arm in ("none", "text", "reinserted", "pinned") if arm in self.settings.arms]
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(self.settings.rounds + 1):
            row = turn % len(texts)
            for arm in arms[:: 1 if turn % 2 else -1]:
                rate = streamed(model, arm, texts[row].ids, heads[row], window)
                if turn:  # the first warms up
                    found[arm].append(rate)
        return Measured(outcomes=[self.outcome(arm, "tokens_per_s", rates) for arm, rates in found.items()])

    def notes(self, found: Found) -> list[str]:
        """What is measured, and paired tests."""
        made = [
            "The window is computed anew for each prediction, at positions 0 to W-1: nothing older reaches a logit.",
            "Relative: (M - none) / (goal in front of the full window - none), of answers right.",
            f"Tokens a second: text read one token at a time, median of {self.settings.rounds} rounds in turns. A goal "
            "at the window's head is held there as entries, and the window has so many tokens less.",
        ]
        for other in ("text", "text_free", "reinserted", "none"):
            made += found.paired("accuracy", Side("pinned", self.where), Side(other, self.where), where="Answers")
        return made + self.differences(found, "loss", "Nats a token")


def other_goals(goals: Sequence[str]) -> list[int]:
    """For each record the next one that has another goal.

    Raises:
        ValueError: there is one goal only.
    """
    count = len(goals)
    if len(set(goals)) < 2:
        raise ValueError("the arm 'another' needs two different goals, and there is one; leave it out of --arms")
    return [
        next(k % count for k in range(row + 1, row + count) if goals[k % count] != goals[row]) for row in range(count)
    ]


def streamed(model: AttachedLM, arm: str, text: Sequence[int], head: Sequence[int], window: int) -> float:
    """Tokens of text a second, W of them behind a full window, each seeing the last W."""
    ids = (list(text) * (2 * window // len(text) + 1))[: 2 * window]
    held = window - len(head) if arm == "text" else window
    goal = [list(head)] if arm in ("text", "pinned") else None
    cache = model.new_cache(goal, window=Window(size=max(2, held), policy="rolling"))
    model(torch.tensor([ids[:window]], device=model.device), **{CACHE_NAME: cache})
    begun = time.perf_counter()
    for at in range(window, 2 * window):
        again = list(head) if arm == "reinserted" and at % window == 0 else []
        model(torch.tensor([[*again, ids[at]]], device=model.device), **{CACHE_NAME: cache})
    return window / (time.perf_counter() - begun)


# ---------------------------------------------------------------- overriding sentences


class OverrideWork(NeedleWork):
    """The table of overriding sentences."""

    settings: Override

    def jobs(self) -> list[Job]:
        """The arms."""
        return [Job(name=arm, work=partial(self.arm, arm)) for arm in self.settings.arms]

    def asked(self, sentence: str) -> list[tuple[GoalRecord, GoalRecord]]:
        """Every problem with the sentence in its text: answered as its goal says, and as the sentence does."""
        made = []
        for one, other, value in rivals(self.needles):
            other_text, question = one.trajectory.rsplit("\nQuestion:", 1)
            question = "\nQuestion:" + question.removesuffix(one.answer)
            said = ""
            if sentence != NO_SENTENCE:
                said = OVERRIDES[sentence].format(goal=other, trigger=question, answer=value)
            both = (
                GoalRecord(sentence, one.goal, other_text + said + question + answer, (), answer)
                for answer in (one.answer, value)
            )
            made.append((next(both), next(both)))
        return made

    def arm(self, arm: str) -> Measured:
        """Whose answer is the model's own."""
        e, model, made = self.settings, self.model(arm), list[Outcome]()
        heads = self.texts(model)[1]
        states = self.states(arm, heads)
        for sentence in e.sentences:
            views = []
            for answers in zip(*self.asked(sentence), strict=True):
                texts, _ = self.texts(model, answers)
                views.append(
                    [
                        arm_view(
                            arm,
                            text,
                            head,
                            e.window,
                            asked_tokens(text, e.window, len(head)),
                            goal=row if states else None,
                        )
                        for row, (text, head) in enumerate(zip(texts, heads, strict=True))
                    ]
                )
            goal = [one.right for one in score(model, views[0], states)]
            rival = [one.right for one in score(model, views[1], states)]
            shares = {
                "goal": goal,
                "sentence": rival,
                "neither": [not (a or b) for a, b in zip(goal, rival, strict=True)],
            }
            where = {"W": e.window, "sentence": sentence}
            made += [Outcome(arm=arm, metric=m, where=where, values=[float(v) for v in of]) for m, of in shares.items()]
        return Measured(outcomes=made)

    def notes(self, found: Found) -> list[str]:
        """What is measured, and paired tests."""
        made = [
            "The sentence states all facts of another goal, with another value of the one asked for, and stands right "
            "before the question. Answers are the model's likeliest tokens. Without a sentence, its share is chance.",
        ]
        for sentence in self.settings.sentences:
            where = {"W": self.settings.window, "sentence": sentence}
            sides = Side("pinned", where), Side("text", where)
            made += found.paired("goal", *sides, where=f"Answers of the goal, {sentence}")
        return made


def rivals(problems: Sequence[Needle]) -> Iterator[tuple[Needle, str, str]]:
    """For every problem another one's goal, the next in which the fact asked for has another value, and that value.

    Raises:
        ValueError: there is none.
    """
    for row, one in enumerate(problems):
        for other in (*problems[row + 1 :], *problems[:row]):
            value = next(v for v in VALUES[one.fact].split() if FACTS[one.fact][0].format(v) in other.goal)
            if value != one.answer:
                yield one, other.goal, value
                break
        else:
            raise ValueError("all problems have one answer: ask for more problems")


def sections(page: Page) -> Iterator[Section]:
    """Whose answer, by sentence."""
    titles = {page.table.metric(m).title: m for m in dict.fromkeys(e.metric for e in page.entries)}
    panels = {title: [e for e in page.entries if e.metric == metric] for title, metric in titles.items()}
    figure = dots_figure(panels, page.looks, "sentence")
    yield Section(
        "Whose answer", page.figure("sentences", "Whose answer, by sentence", figure, "Lines: 95% intervals.")
    )


NEEDLE_METRICS = {
    "accuracy": Metric("Answer right"),
    "loss": Metric("Nats a token of the answer", "bootstrap"),
    "goal_tokens": Metric("Window's tokens spent on the goal", "mean"),
    "tokens_spent": Metric("Tokens read for the goal", "mean"),
    "tokens_per_s": Metric("Tokens a second", "median"),
    "relative": RELATIVE,
}
TABLES = [
    Table(
        name="goals.needle_pinned",
        heading="A needle past the window: goals kept beside it",
        at=needle,
        work=NeedleWork,
        metrics=NEEDLE_METRICS,
        arms=ARMS,
        sections=bars,
        alone=True,
    ),
    Table(
        name="goals.override",
        heading="A sentence in the window states another goal",
        at=override,
        work=OverrideWork,
        metrics={
            "goal": Metric("Answer of the goal"),
            "sentence": Metric("Answer of the sentence"),
            "neither": Metric("Another answer"),
        },
        arms=ARMS,
        sections=sections,
        plain=("sentence",),
        alone=True,
    ),
]
