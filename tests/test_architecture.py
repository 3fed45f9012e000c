"""Imports run one way: cli -> papers -> experiments, training, evaluation -> lm -> channels; tasks know nobody."""

import ast
import sys
from pathlib import Path

import networkx
import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sidestream"
LAYERS = {
    "channels": {"channels"},
    "tasks": {"tasks"},
    "lm": {"lm", "channels"},
    "training": {"training", "lm", "channels", "tasks"},
    "evaluation": {"evaluation", "lm", "channels", "tasks"},
    "experiments": {"experiments", "evaluation"},
    "papers": {"papers", "experiments", "evaluation", "training", "lm", "channels", "tasks"},
    "__init__": {"lm", "channels"},
}
LAYERS["commands"] = {*LAYERS["papers"], "commands", "__init__"}
LAYERS["cli"] = LAYERS["__main__"] = {*LAYERS["commands"], "cli"}
TORCH = {"torch", "jaxtyping"}
# What a layer may import from outside the standard library, where that is part of its promise.
OUTSIDE = {"channels": TORCH, "tasks": {"numpy", "datasets"}}
TRANSFORMERS = {"lm", "training"}
SIDEWAYS = {("channels.goal", "channels.stream"), ("channels.stream", "channels.goal")}
READS_FILES_ONLY = "experiments.report.page"
STDLIB = sys.stdlib_module_names


def read(root: Path) -> dict[str, set[str]]:
    """Every module, without the package's name, and the full names it imports at any depth of the file."""
    modules = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    base = ".".join(["sidestream", *parts[: len(parts) - node.level + (path.stem == "__init__")], base])
                names |= {f"{base}.{alias.name}".strip(".") for alias in node.names}
        modules[".".join(parts)] = names
    return modules


def ours(name: str, modules: dict[str, set[str]]) -> str | None:
    """The module of ours that an imported name leads to: `sidestream.lm.attach.attach` to `lm.attach`."""
    if name.split(".")[0] != "sidestream":
        return None
    name = name.removeprefix("sidestream").strip(".")
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or "__init__"


def violations(modules: dict[str, set[str]]) -> list[str]:
    found = []
    for module, names in modules.items():
        layer = module.split(".")[0]
        for name in sorted(names):
            target, package = ours(name, modules), name.split(".")[0]
            if target is None:
                outside = OUTSIDE.get(layer)
                if outside is not None and package not in STDLIB | outside:
                    found.append(f"{module} imports {package}")
                elif package == "transformers" and layer not in TRANSFORMERS:
                    found.append(f"{module} imports transformers")
            elif (
                target.split(".")[0] not in LAYERS[layer]
                or (module, target) in SIDEWAYS
                or layer == "tasks"
                and target != "tasks.base"
                and family(target) != family(module)
            ):
                found.append(f"{module} imports {target}")
    reached, queue = set(), [READS_FILES_ONLY]
    while queue:
        module = queue.pop()
        if module in reached or module not in modules:
            continue
        reached.add(module)
        queue += [target for target in (ours(name, modules) for name in modules[module]) if target]
        found += [
            f"{READS_FILES_ONLY} reaches {name} through {module}"
            for name in modules[module]
            if name.split(".")[0] in {"torch", "transformers"}
        ]
    return found


def circles(modules: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other in a ring, imports inside functions included."""
    graph = networkx.DiGraph()
    for module, names in modules.items():
        targets = {ours(name, modules) for name in names}
        graph.add_edges_from((module, target) for target in targets if target in modules and target != module)
    return [group for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def family(module: str) -> str:
    """The task a file belongs to: `tasks.blocksworld_data` to blocksworld, and so the reader of its problem files."""
    return module.removeprefix("tasks.").split("_")[0].replace("pddl", "blocksworld")


def test_imports_run_one_way():
    modules = read(SOURCE)
    assert {"channels.goal", "lm.attach", "tasks.base"} <= set(modules)
    assert violations(modules) == []


def test_no_circles():
    modules = {name: names for name, names in read(SOURCE).items() if name.split(".")[0] != "experiments"}
    assert circles(modules) == []
    planted = {"lm.attach": {"sidestream.lm.saving"}, "lm.saving": {"sidestream.lm.attach.attach"}}
    assert circles(planted) == [{"lm.attach", "lm.saving"}]


@pytest.mark.parametrize(
    "module, line, complaint",
    [
        ("channels.film", "import transformers", "channels.film imports transformers"),
        ("channels.film", "import numpy", "channels.film imports numpy"),
        ("channels.film", "from sidestream.lm.cache import Window", "channels.film imports lm.cache"),
        ("channels.goal", "from sidestream.channels import stream", "channels.goal imports channels.stream"),
        ("lm.blocks", "def f():\n    from sidestream.tasks import base", "lm.blocks imports tasks.base"),
        ("lm.blocks", "from ..training import loop", "lm.blocks imports training.loop"),
        ("tasks.treasure", "import torch", "tasks.treasure imports torch"),
        ("tasks.treasure", "from .blocksworld import bfs", "tasks.treasure imports tasks.blocksworld"),
        ("evaluation.stats", "import transformers.trainer", "evaluation.stats imports transformers"),
        ("training.loop", "from sidestream.evaluation.stats import sem", "training.loop imports evaluation.stats"),
        ("experiments.run", "from sidestream.papers import lsar", "experiments.run imports papers.lsar"),
        (
            "experiments.results",
            "import torch",
            "experiments.report.page reaches torch through experiments.results",
        ),
        ("lm.text", "import sidestream.cli", "lm.text imports cli"),
    ],
)
def test_the_check_finds_a_planted_import(tmp_path, module, line, complaint):
    skeleton = {
        "__init__": "",
        "cli": "from sidestream.papers import lsar",
        "channels.__init__": "from sidestream.channels.film import FiLM",
        "channels.film": "import torch",
        "channels.goal": "from sidestream.channels.film import FiLM",
        "channels.stream": "import math",
        "lm.__init__": "",
        "lm.blocks": "import transformers",
        "lm.cache": "from sidestream.channels import FiLM",
        "lm.text": "import tokenizers",
        "tasks.__init__": "",
        "tasks.base": "import typing",
        "tasks.treasure": "from sidestream.tasks.base import Task",
        "tasks.blocksworld": "import numpy as np",
        "tasks.blocksworld_data": "from sidestream.tasks.blocksworld import bfs",
        "training.__init__": "",
        "training.loop": "from transformers import Trainer",
        "evaluation.__init__": "",
        "evaluation.stats": "import scipy",
        "papers.__init__": "",
        "experiments.__init__": "",
        "experiments.report.__init__": "",
        "experiments.results": "import json",
        "experiments.report.page": "from sidestream.experiments.results import read",
        "experiments.run": "import json",
        "papers.lsar": "from sidestream.training import loop",
    }
    for name, text in {**skeleton, module: skeleton[module] + "\n" + line}.items():
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert violations(read(tmp_path)) == [complaint]


def test_files_are_short_and_named_for_what_they_hold():
    folders = [SOURCE.parents[1] / name for name in ("src", "tests", "examples", "benchmarks")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 10
    long = {path.name: count for path in paths if (count := len(path.read_text(encoding="utf-8").splitlines())) > 500}
    assert long == {}
    assert not {"utils.py", "common.py", "helpers.py", "misc.py"} & {path.name for path in paths}


def test_the_command_knows_no_table_by_name():
    """Nor does the kernel: a table is there by its own file."""
    from sidestream.experiments.table import listed

    for path in (SOURCE / "cli.py", *(SOURCE / "experiments").rglob("*.py")):
        strings = [
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not set(strings) & set(listed()), path
