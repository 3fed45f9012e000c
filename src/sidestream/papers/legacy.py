"""Tables that do not run on the kernel yet: their names and looks, and the functions that run them.

A table that moves takes its entries of `LISTED`, `TABLES` and `RUN` away from here; the last one takes the file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from markupsafe import Markup

from sidestream.experiments.report.page import Page, Section
from sidestream.experiments.results import Entry
from sidestream.experiments.table import Look, Metric, Table
from sidestream.papers import audit_pictures, planning_report
from sidestream.papers.audit import HELP, audit
from sidestream.papers.audit_run import run_audit
from sidestream.papers.authority import table5
from sidestream.papers.authority_run import run_table5
from sidestream.papers.lsar import training_flops
from sidestream.papers.planning import table3
from sidestream.papers.planning_run import run_table3

LISTED = {
    "lsar.table3": {
        "title": "Blocksworld: goals reached after K perturbations, N blocks, W tokens in view (LS-AR Table 3)",
        "smoke": "under a minute on 2 CPU cores",
        "cpu": "about two hours on 2 CPU cores",
        "paper": "hours on one GPU; weeks without",
    },
    "lsar.table5": {
        "title": "Text says goal A, vector goal B: whose is reached, over the share of masked text (LS-AR Table 5)",
        "smoke": "under a minute on 2 CPU cores",
        "cpu": "about an hour on 2 CPU cores",
        "paper": "days on one GPU",
    },
    "audit": {
        "title": "Attacks on the text and on the vector of a model with a goal channel, under every defence",
        "argument": "model",
        "smoke": "a minute on 2 CPU cores",
        "cpu": "about an hour on 2 CPU cores for the models of lsar.table5",
    },
}
HEADLINE_ATTACKS = (
    "any override",
    "token search",
    "prompt replaced",
    "PGD 0.1",
    "PGD 0.5",
    "swap",
    "unbounded",
    "both replaced",
)
"""Of an audit's attacks those that stand in its table; the report has all of them besides."""
UTILITY_COLUMN = "right answers, no attack"


def _headline(entries: Sequence[Entry]) -> list[Entry]:
    """Of an audit the attacks that a table has room for, utility in a column before them."""
    kept = []
    for entry in entries:
        attack = entry.where.get("attack")
        if entry.metric == "utility" and attack == "none":
            kept.append(replace(entry, metric="attack_success", where={**entry.where, "attack": UTILITY_COLUMN}))
        elif attack is None or (entry.metric == "attack_success" and attack in HEADLINE_ATTACKS):
            kept.append(entry)
    return kept


def _authority_sections(page: Page) -> Iterator[Section]:
    for html in audit_pictures.sections(page.folder, page.results, page.entries, page.figure):
        title, _, body = html.removeprefix("<h2>").partition("</h2>")
        yield Section(Markup(title), Markup(body))


TABLE3 = {
    "baseline": Look("AR baseline", "#7a7a7a", dashed=False),
    "static": Look("LS-AR Static", "#0072b2", dashed=False),
    "dynamic": Look("LS-AR Dynamic", "#009e73", dashed=False),
    "baseline_whole": Look("AR baseline, whole texts only", "", dashed=False),
    "dynamic_no_stage2": Look("LS-AR Dynamic, no stage 2", "#e69f00", dashed=False),
    "alpha_zero": Look("LS-AR Dynamic, alpha frozen at 0", "#56b4e9", dashed=False),
    "random_film": Look("Random FiLM (Static)", "#cc79a7", dashed=False),
    "random_film_dynamic": Look("Random FiLM (Dynamic)", "#882255", dashed=False),
    "baseline_pool": Look("AR baseline, our data", "#7a7a7a", dashed=True),
    "baseline_pool_whole": Look("AR baseline, our data, whole texts only", "", dashed=False),
    "static_pool": Look("LS-AR Static, our data", "#0072b2", dashed=True),
    "dynamic_pool": Look("LS-AR Dynamic, our data", "#009e73", dashed=True),
    "dynamic_replace": Look("+ latest update only", "", dashed=False),
    "dynamic_state": Look("LS-AR Dynamic (ours): + state read from the vector", "#d55e00", dashed=False),
}
TABLE5 = {
    "baseline": Look("AR baseline", "#7a7a7a", dashed=False),
    "standard": Look("Standard", "", dashed=False),
    "latent_forced": Look("Latent-Forced", "", dashed=False),
    "ball": Look("Latent-Forced + adversarial training in a ball", "", dashed=False),
    "hardened": Look("Latent-Forced + overrides in training", "", dashed=False),
    "dynamic": Look("Latent-Forced, Dynamic", "#009e73", dashed=False),
}
AUDIT = {
    "standard": Look("Standard", "", dashed=False),
    "ball": Look("Latent-Forced + adversarial training in a ball", "", dashed=False),
    "hardened": Look("Latent-Forced + overrides in training", "", dashed=False),
    "dynamic": Look("Latent-Forced, Dynamic", "#009e73", dashed=False),
    "model": Look("the model", "", dashed=False),
    "latent_forced-p0.3": Look("Latent-Forced, p = 0.3", "", dashed=False),
}
TABLES = [
    Table(
        name="lsar.table3",
        heading="LS-AR, Table 3: Blocksworld",
        at=table3,
        work=None,
        metrics={"success": Metric("Goal reached")},
        arms=TABLE3,
        sections=planning_report.sections,
        # A planning row is a prompt of ~28 tokens and a plan of ~35.
        flops=lambda e: training_flops(e, 64),
    ),
    Table(
        name="lsar.table5",
        heading="LS-AR, Table 5: text and vector state different goals",
        at=table5,
        work=None,
        metrics={
            "goal_a": Metric("Goal A reached"),
            "goal_b": Metric("Goal B reached"),
            "neither": Metric("Neither reached"),
            "mixed": Metric("Of these: one goal's item, the other's passcode"),
        },
        arms=TABLE5,
        sections=_authority_sections,
        plain=("condition",),
        flops=lambda e: training_flops(e, e.window),
    ),
    Table(
        name="audit",
        heading="Audit: attacks on text and vector, and what defends",
        at=audit,
        work=None,
        metrics={
            "utility": Metric("Utility: right answers, no attack"),
            "fidelity": Metric("Fidelity: right answers under attack"),
            "attack_success": Metric("Attack success: the attacker's answer"),
            "refused": Metric("Refused"),
            "accepted": Metric("Sealed goals accepted"),
            "certified": Metric("Certified: nothing that near changes the goal"),
        },
        arms=AUDIT,
        shown=_headline,
        sections=_authority_sections,
        plain=("attack",),
        about=HELP,
    ),
]
RUN = {"lsar.table3": run_table3, "lsar.table5": run_table5, "audit": run_audit}
