"""AGCLR's main table, the same on ProsQA, and its ablations: answers of every method, and accuracy stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from matplotlib.ticker import MaxNLocator

from sidestream.experiments.report.figures import arm_lines, bars_figure, lines_figure
from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.results import Entry, Outcome
from sidestream.experiments.run import Found, Side
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import Table
from sidestream.papers.agclr.settings import (
    ARMS,
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
    "agclr.table1": {
        "title": "Latent reasoning: accuracy of every method, CoT to CoCoNuT and AGCLR (AGCLR's main table)",
        "smoke": "a minute or two on 2 CPU cores",
        "cpu": "one to ten minutes an arm and task on one CPU core",
        "paper": "days on one GPU",
    },
    "agclr.prosqa": {
        "title": "The same methods on ProsQA alone, where the latents may search (AGCLR)",
        "smoke": "a minute or two on 2 CPU cores",
        "cpu": "one to ten minutes an arm and task on one CPU core",
        "paper": "days on one GPU",
    },
    "agclr.ablations": {
        "title": "The concept stream without a gate, with random ones, or something else in its place (AGCLR)",
        "smoke": "a minute or two on 2 CPU cores",
        "cpu": "one to ten minutes an arm and task on one CPU core; arms of agclr.table1 are reused (--models)",
        "paper": "days on one GPU",
    },
}
METHODS = ("no_cot", "cot", "icot", "pause", "pause_multi", "coconut", "agclr", "coconut_sim", "agclr_sim")
GATES = ("agclr_no_read", "agclr_no_write", "agclr_no_forget", "agclr_write2", "agclr_random_gates", "agclr_first")
ABLATIONS = ("agclr", *GATES, "coconut_mlp", "agclr_identity", "coconut")
COMPARED = (
    ("agclr", "coconut"),
    ("coconut", "pause_multi"),
    ("coconut", "cot"),
    ("coconut", "no_cot"),
    ("agclr", "cot"),
    ("coconut_sim", "coconut"),
    ("agclr_sim", "coconut_sim"),
)
"""Pairs of arms tested against each other, where a table has both."""


def table1(scale: Scale) -> LatentSettings:
    """Every method."""
    return at_scale("agclr.table1", scale, METHODS)


def prosqa(scale: Scale) -> LatentSettings:
    """Every method where the latents may search: ProsQA alone."""
    return replace(at_scale("agclr.prosqa", scale, METHODS), tasks=("prosqa",))


def ablations(scale: Scale) -> LatentSettings:
    """The stream without parts of it, and other things in its place."""
    return at_scale("agclr.ablations", scale, ABLATIONS, masked=True)


class MethodsWork(LatentWork):
    """Answers, and how they came to be."""

    def measure(self, task: str, arm: str, module: LatentLM) -> list[Outcome]:
        """Answers in the last stage and, of arms with latents, after each stage on that stage's prompts, which is
        looked at and not used to choose anything."""
        where = {"task": task}
        found = self.answers(task, arm, module)
        outcomes = [Outcome(arm=arm, metric=metric, where=where, values=values) for metric, values in found.items()]
        if arm in ARMS and ARMS[arm].text == "latent":
            metric = MEASURED.get(task, ("accuracy",))[0]
            for stage, trained in self.at_stages(task, arm, module):
                values = self.answers(task, arm, trained, stage=stage)[metric]
                place = {**where, "stage": stage}
                outcomes.append(Outcome(arm=arm, metric=metric, where=place, values=values, beside="stages"))
        return outcomes

    def notes(self, found: Found) -> list[str]:
        """How the numbers were made, and a paired test for each pair; ablations are tested against `agclr` too."""
        return [*common_notes(self.settings), *paired_notes(self.settings, found)]


def paired_notes(e: LatentSettings, found: Found, **where: str) -> list[str]:
    """A paired test for each of `COMPARED`, and of `agclr` against each of its ablations, on every task.

    Args:
        where: further conditions of the outcomes compared.
    """
    pairs = [pair for pair in COMPARED if set(pair) <= set(e.arms)]
    if "agclr" in e.arms and e.table not in ("agclr.table1", "agclr.prosqa"):
        pairs += [("agclr", arm) for arm in e.arms if arm != "agclr" and ("agclr", arm) not in pairs]
    notes = []
    for task in e.tasks:
        place, metric = {"task": task, **where}, MEASURED.get(task, ("accuracy",))[0]
        for first, second in pairs:
            notes += found.paired(metric, Side(first, place), Side(second, place), where=f"{task}, seed {e.seed}")
    return notes


def sections(page: Page) -> Iterator[Section]:
    """Answers by arm, and accuracy by stage."""
    caption = "Share of problems answered right. Lines: 95% intervals over problems; they do not cover retraining."
    figure = bars_figure(by_task(page.entries), page.looks)
    yield Section("Answers", page.figure("answers", "Answers", figure, caption))
    stages = page.entries_beside("stages")
    if stages:
        panels = {title: arm_lines(entries, page.looks) for title, entries in by_task(stages).items()}
        figure = lines_figure(panels, "stage", xlabel="stage (0: explicit chain of thought)", height=3.6, legend=3)
        for axis in figure.axes:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        caption = (
            "The weights at the end of each stage, on that stage's prompts: at stage k, k steps' worth of latents and "
            "the remaining steps in words. Bands: 95% intervals over problems. Nothing was chosen by it."
        )
        yield Section("Accuracy by stage", page.figure("stages", "Accuracy by stage", figure, caption))


def by_task(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Entries of each task and metric, by both in words."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(f"{entry.where['task']}: {METRICS[entry.metric].title}", []).append(entry)
    return found


_table = partial(
    Table, work=MethodsWork, metrics=METRICS, arms=LOOKS, paper=published, sections=sections, flops=training_flops
)
TABLES = [
    _table(name="agclr.table1", heading="AGCLR: latent reasoning, every method", at=table1),
    _table(name="agclr.prosqa", heading="AGCLR: every method on ProsQA", at=prosqa),
    _table(name="agclr.ablations", heading="AGCLR: the concept stream without parts of it", at=ablations),
]
