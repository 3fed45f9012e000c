"""AGCLR's memory retention: what later latent passes have in common with the first, and how far the gates open."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.ticker import MaxNLocator

from sidestream.evaluation.latent import trace_passes
from sidestream.experiments.report.figures import DASHES, Line, lines_figure
from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.results import Outcome
from sidestream.experiments.run import Found
from sidestream.experiments.settings import Scale
from sidestream.experiments.table import Table
from sidestream.papers.agclr.settings import LOOKS, LatentSettings, at_scale, published, training_flops
from sidestream.papers.agclr.work import LatentWork, common_notes
from sidestream.training.latent import LatentLM

LISTED = {
    "agclr.retention": {
        "title": "What later latent passes have in common with the first, and how far the gates open (AGCLR)",
        "smoke": "a minute or two on 2 CPU cores",
        "cpu": "one to ten minutes an arm and task on one CPU core",
        "paper": "days on one GPU",
    }
}
STYLES = {"cosine": "-", "read_gate": "-", "forget_gate": DASHES, "write_gate": ":"}
"""Lines of the metrics, whose colour is their arm's."""


def retention(scale: Scale) -> LatentSettings:
    """What the hidden states of later passes have in common with the first, and how far the gates open."""
    return at_scale("agclr.retention", scale, ("coconut", "agclr"))


class RetentionWork(LatentWork):
    """Cosines and gates of every pass."""

    def check(self) -> None:
        """Arms without latents have no place here."""
        self.settings.latents_only()

    def measure(self, task: str, arm: str, module: LatentLM) -> list[Outcome]:
        """Of each pass: the cosine of its state to that of the first, and the gates' mean values."""
        trace = trace_passes(module.model, self.prompts(task, arm)[: self.settings.traced], module.pass_config)
        curves = {"cosine": trace.cosine, **{f"{gate}_gate": passes for gate, passes in trace.gates.items()}}
        return [
            Outcome(arm=arm, metric=metric, where={"task": task, "pass": number}, values=values)
            for metric, passes in curves.items()
            for number, values in enumerate(passes, start=1)
        ]

    def notes(self, found: Found) -> list[str]:
        """How the numbers were made."""
        return [*common_notes(self.settings), "Bands: 95% intervals of the mean over problems."]


def sections(page: Page) -> Iterator[Section]:
    """Cosine to pass 1 above, gate means below, one column a task."""
    tasks, panels = list(dict.fromkeys(entry.where["task"] for entry in page.entries)), {}
    for title, gates in (("{}", False), ("{}: gates", True)):
        for task in tasks:
            lines: dict[tuple[str, str], Line] = {}
            for entry in page.entries:
                if entry.where["task"] == task and (entry.metric != "cosine") == gates:
                    look, gate = page.looks[entry.arm], entry.metric.replace("_", " ")
                    line = Line(f"{look.name}, {gate}" if gates else look.name, look.color, [], STYLES[entry.metric])
                    lines.setdefault((entry.arm, entry.metric), line).entries.append(entry)  # type: ignore[attr-defined]
            panels[title.format(task)] = list(lines.values())
    figure = lines_figure(
        panels, "pass", xlabel="latent pass", ylabel="cosine to pass 1", columns=len(tasks), height=3.3
    )
    figure.axes[len(tasks)].set_ylabel("mean value of the gate")
    for axis in figure.axes:
        axis.set_ylim(min(0.0, axis.get_ylim()[0]), 1.02)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = (
        "Above: cosine of the last hidden state of each pass to that of the first. Below: mean values of the gates. "
        "Bands: 95% intervals of the mean over problems. A high cosine says that states are alike, not that they hold "
        "a fact."
    )
    title = "What later passes keep"
    yield Section(title, page.figure("passes", title, figure, caption))


TABLES = [
    Table(
        name="agclr.retention",
        heading="AGCLR: what later passes keep",
        at=retention,
        work=RetentionWork,
        arms=LOOKS,
        paper=published,
        sections=sections,
        flops=training_flops,
    )
]
