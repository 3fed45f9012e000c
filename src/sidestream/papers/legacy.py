"""Tables that do not run on the kernel yet: their names and looks, and the functions that run them.

A table that moves takes its entries of `LISTED`, `TABLES` and `RUN` away from here; the last one takes the file.
"""

from functools import partial

from sidestream.experiments.table import Look, Metric, Table
from sidestream.papers.lsar.planning import table3

LISTED = {
    "goals.needle": {"title": ""},
    "goals.webshop": {"title": ""},
    "goals.tau": {"title": ""},
    "goals.webshop_vector": {"title": ""},
    "goals.tau_vector": {"title": ""},
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
    _goals(name="goals.needle", heading="goals.needle", arms=NEEDLE),
    *(
        _goals(name=f"goals.{kind}", heading=f"goals.{kind}", arms=GOALS)
        for kind in ("webshop", "tau", "webshop_vector", "tau_vector")
    ),
]
RUN = {}
