"""AGCLR's controls: latents replaced or taken out at test, and a task whose facts travel through latents only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sidestream.evaluation.latent import INTERVENTIONS
from sidestream.experiments.report.figures import dots_figure
from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.results import Outcome
from sidestream.experiments.run import Found, Side
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import Table
from sidestream.lm.decoding.passes import PassConfig
from sidestream.papers.agclr.methods import by_task, paired_notes
from sidestream.papers.agclr.settings import (
    LOOKS,
    MEASURED,
    METRICS,
    LatentSettings,
    at_scale,
    published,
    training_flops,
)
from sidestream.papers.agclr.work import LatentWork, common_notes
from sidestream.training.latent import LatentLM

LISTED = {
    "agclr.controls": {
        "title": "Latents replaced or taken out at test; a task whose facts travel through latents only (ours)",
        "smoke": "a minute or two on 2 CPU cores",
        "cpu": "one to ten minutes an arm and task on one CPU core",
        "paper": "days on one GPU",
    }
}
LEARNED = "learned"
"""The condition in which latents are what they were trained to be."""


def controls(scale: Scale) -> LatentSettings:
    """Latents replaced or taken out at test, and a task whose facts travel through the latents only."""
    arms = ("pause_multi", "coconut", "coconut_mlp", "agclr", "agclr_first")
    return at_scale("agclr.controls", scale, arms, masked=True)


class ControlsWork(LatentWork):
    """Answers under every condition of the latents."""

    def check(self) -> None:
        """Arms without latents have no place here."""
        self.settings.latents_only()

    def measure(self, task: str, arm: str, module: LatentLM) -> list[Outcome]:
        """Answers, with the latents as learned, with other things for them, and with the first few of them only."""
        outcomes = []
        for condition, changed in self.conditions(task, module.pass_config).items():
            where = {"task": task, "latents": condition}
            found = self.answers(task, arm, module, seed=self.settings.seed, **changed)
            outcomes += [Outcome(arm=arm, metric=metric, where=where, values=of) for metric, of in found.items()]
        return outcomes

    def conditions(self, task: str, config: PassConfig) -> dict[str, dict[str, Any]]:
        """Name of a condition -> what it changes about generating answers."""
        most = self.settings.training(task).curriculum.most_latents
        kinds = [kind for kind in INTERVENTIONS if kind != "permuted" or most > 1]
        # CHOICE(AGCLR, controls): with no latent at all nothing hides the question of the masked task.
        depths = {f"depth {depth}": {"config": replace(config, depth=depth)} for depth in range(most)}
        return {LEARNED: {}, **{kind: {"intervention": kind} for kind in kinds}, **depths}

    def notes(self, found: Found) -> list[str]:
        """How the numbers were made, paired tests between arms, and of each arm against noise for its latents."""
        e = self.settings
        notes = [
            *common_notes(e),
            "Latents at test: `zero`, `noise` (Gaussian, each of the length of what it replaces), `mean` over "
            "problems, `first` of the row in every slot, `other` problem's, `permuted`, or only the first `depth` of "
            "them, where a model that has seen earlier stages writes the other steps in words. In `masked`, `depth 0` "
            "shows the question again.",
            *paired_notes(e, found, latents=LEARNED),
        ]
        for task in e.tasks:
            metric = MEASURED.get(task, ("accuracy",))[0]
            places = [{"task": task, "latents": condition} for condition in (LEARNED, "noise")]
            for arm in e.arms:
                noise = Side(arm, places[1], f"{LOOKS[arm].name} with noise for latents")
                notes += found.paired(metric, Side(arm, places[0]), noise, where=f"{task}, seed {e.seed}")
        return notes


def sections(page: Page) -> Iterator[Section]:
    """Answers by what the latents were replaced with."""
    title = "Answers when the latents are replaced at test"
    first = {
        task: next(e.metric for e in page.entries if e.where["task"] == task)
        for task in page.results["settings"]["tasks"]
    }
    judged = [entry for entry in page.entries if entry.metric == first[entry.where["task"]]]
    caption = (
        "Share of problems answered right with other things fed in place of the latents, or fewer of them. Lines: 95% "
        "intervals over problems. Where a row stands beside `learned`, nothing that matters was in the latents."
    )
    yield Section(title, page.figure("latents", title, dots_figure(by_task(judged), page.looks, "latents"), caption))


TABLES = [
    Table(
        name="agclr.controls",
        heading="AGCLR: latents replaced, and facts that travel through them only",
        at=controls,
        work=ControlsWork,
        metrics=METRICS,
        arms=LOOKS,
        paper=published,
        sections=sections,
        flops=training_flops,
    )
]
