"""Tables that do not run on the kernel yet: their names and looks, and the functions that run them.

A table that moves takes its entries of `LISTED`, `TABLES` and `RUN` away from here; the last one takes the file.
"""

from functools import partial

from sidestream.experiments.table import Look, Metric, Table
from sidestream.papers import planning_report
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
    "goals.needle": {"title": ""},
    "goals.webshop": {"title": ""},
    "goals.tau": {"title": ""},
    "goals.webshop_vector": {"title": ""},
    "goals.tau_vector": {"title": ""},
}
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
NEEDLE = {
    "closed": Look("no goal", "", dashed=False),
    "sinks": Look("first 4 tokens kept (attention sinks)", "", dashed=False),
    "in_text": Look("goal's text put back every W tokens", "", dashed=False),
    "swapped": Look("another record's goal in the channel", "", dashed=False),
    "channel": Look("goal in the channel", "", dashed=False),
}
GOALS = {
    "channel": Look("goal in the channel", "", dashed=False),
    "in_text": Look("goal's text in the window", "", dashed=False),
    "vector": Look("nearest vector", "", dashed=False),
    "words": Look("shared words (TF-IDF)", "", dashed=False),
}
_goals = partial(
    Table, at=table3, work=None, metrics={"accuracy": Metric("Answer right"), "top1": Metric("Right goal ranked first")}
)
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
    _goals(name="goals.needle", heading="goals.needle", arms=NEEDLE),
    *(
        _goals(name=f"goals.{kind}", heading=f"goals.{kind}", arms=GOALS)
        for kind in ("webshop", "tau", "webshop_vector", "tau_vector")
    ),
]
RUN = {"lsar.table3": run_table3}
