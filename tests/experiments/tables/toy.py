"""A whole table: which way does a coin fall? Two arms start from one shared training; a problem is a throw."""

from dataclasses import dataclass
from random import Random
from statistics import mean

from sidestream.experiments.report.figures import bars_figure
from sidestream.experiments.report.page import Section
from sidestream.experiments.results import Outcome
from sidestream.experiments.run import Job, Measured, Side, Work, once
from sidestream.experiments.settings import Tested
from sidestream.experiments.table import BLUE, GREY, Look, Metric, Table

LISTED = {"toy.coin": {"title": "Which way a coin falls (a test)", "smoke": "no time at all", "cpu": "a blink"}}


@dataclass(frozen=True, kw_only=True)
class Coin(Tested):
    throws: int = 40
    """Throws to learn from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distinct(arms=("fixed", "learned"))


class CoinWork(Work[Coin]):
    def throws(self, split: str, count: int) -> list[int]:
        rng = Random(f"{split} {self.settings.seed if split == 'train' else 0}")
        return [int(rng.random() < 0.7) for _ in range(count)]

    def data_hash(self) -> str:
        return str(self.throws("train", self.settings.throws))

    def jobs(self) -> list[Job]:
        arms = [Job(name=a, work=lambda a=a: self.arm(a), needs=("base",)) for a in self.settings.arms]
        return [Job(name="base", work=self.base), *arms]

    def base(self) -> float:
        return once(self.directory / "base" / "weights.json", lambda: mean(self.throws("train", self.settings.throws)))

    def arm(self, arm: str) -> Measured:
        share = self.base()
        side = round(share) if arm == "learned" else 0
        right = [side == throw for throw in self.throws(self.settings.split, self.settings.test_problems)]
        return Measured(outcomes=[Outcome(arm=arm, metric="right", where={}, values=right)], facts={"parameters": 1})

    def notes(self, found) -> list[str]:
        return found.paired("right", Side("learned", {}), Side("fixed", {}), where="all throws")


def sections(page):
    drawn = bars_figure({"Guessed right": page.entries}, page.looks)
    yield Section("Guesses", page.figure("guesses", "Guesses", drawn, "Share of throws guessed."))


TABLES = [
    Table(
        name="toy.coin",
        heading="A coin",
        at=lambda scale: Coin(table="toy.coin", scale=scale, arms=("fixed", "learned"), test_problems=50),
        work=CoinWork,
        metrics={"right": Metric("Guessed right", chance=0.5)},
        arms={"fixed": Look("Always tails", GREY), "learned": Look("What it saw", BLUE)},
        paper=lambda arm, metric, where: 0.7 if arm == "learned" else None,
        sections=sections,
    )
]
