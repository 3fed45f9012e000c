"""`sidestream solve`: PDDL problems in, plans out."""

from __future__ import annotations

import json
import os.path
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidestream.commands.options import Options, command_parser, parsed
from sidestream.tasks.blocksworld import Action, Problem
from sidestream.tasks.blocksworld_loop import PlanScore
from sidestream.tasks.pddl import SPELLING, included_domain, read_domain, read_problem, write_plan

if TYPE_CHECKING:
    from sidestream.papers.lsar.planning import PlanWork

USAGE = "sidestream solve FILE... [--run DIR] [--arm ARM] [--tries N] [--out DIR] [--domain FILE]"
ABOUT = """Plans for PDDL Blocksworld problems (4 operators), each written beside its problem as FILE.soln. With --out
all go into one folder; where two problems have one file name, that folder has the folders of the problems too. A plan
of an earlier call is replaced, and no other file."""


def run(words: list[str], parser_class: Any, add_fields: Any) -> int:
    """Solve, write the plans. Returns the exit status: 0 where every problem is solved."""
    options: Options = {
        "run": (str, "runs/lsar.table3/cpu-seed0", "a finished run of lsar.table3"),
        "arm": (str, "dynamic_state", "whose weights (an arm of that run)"),
        "window": (int, 0, "W, the tokens in view; 0 for everything"),
        "tries": (int, 16, "rollouts a problem: one greedy, the rest drawn; the shortest plan is kept"),
        "out": (str | None, None, "folder for the .soln files"),
        "domain": (
            str | None,
            None,
            "domain file: its spelling of the operators is used (pick-up); without it that of a domain in the "
            "problem's own file",
        ),
    }
    parser = command_parser(parser_class, USAGE, ABOUT, options)
    parser.add_argument("problems", nargs="+", type=str, help="PDDL problem files")
    given = parsed(parser, words)
    if given.tries < 1:
        raise ValueError(f"tries is {given.tries}; it must be at least 1")
    paths = _distinct([Path(name) for name in given.problems])
    domain = read_domain(given.domain) if given.domain is not None else None
    problems = [read_problem(path, domain) for path in paths]
    domains = [domain or included_domain(path) for path in paths]
    targets = plan_files(paths, given.out)

    solved = 0
    results = solve(Path(given.run), problems, arm=given.arm, window=given.window, tries=given.tries)
    for path, problem, known, target, (score, actions) in zip(paths, problems, domains, targets, results, strict=True):
        if not score.success:
            print(f"{path}: no plan ({score.failure} at step {score.failed_at}: {score.reason})")
            continue
        solved += 1
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_plan(target, problem, actions, known.spelling if known else SPELLING)
        except OSError as error:
            raise ValueError(f"{target}: {error.strerror}; choose a folder with --out") from None
        print(f"{path}: {score.steps} steps, {score.over} over the shortest -> {target}")
    print(f"{solved} of {len(paths)} solved")
    return 0 if solved == len(paths) else 1


def solve(
    directory: Path, problems: Sequence[Problem], *, arm: str, window: int = 0, tries: int = 1
) -> list[tuple[PlanScore, tuple[Action, ...]]]:
    """Plans of an arm of a finished run (`evaluation.planning.best_plans`).

    Raises:
        ValueError: the directory holds no finished run of that arm, or a problem has more blocks than there are names.
    """
    from sidestream.evaluation.planning import best_plans
    from sidestream.papers.lsar.planning import ARMS

    work = finished(directory, arm)
    model, _ = work.load(arm)
    steered, full = ARMS[arm].channel != "closed", work.settings.recipe(ARMS[arm].data).goals == "full"
    return best_plans(model, problems, work.vocabulary, steered=steered, full=full, window=window, tries=tries)


def finished(directory: Path, arm: str) -> PlanWork:
    """A run directory that holds this arm's weights.

    Raises:
        ValueError: the directory holds no run of Table 3, or not this arm.
    """
    from sidestream.experiments.settings import from_json
    from sidestream.papers.lsar.planning import ARMS, Planning, PlanWork
    from sidestream.training.loop import FINAL

    path = directory / "experiment.json"
    if not path.exists():
        raise ValueError(f"{directory} holds no run of lsar.table3; train one with `sidestream run lsar.table3`")
    settings = from_json(Planning, json.loads(path.read_text(encoding="utf-8")))
    there = [name for name in ARMS if (directory / name / "stage3" / FINAL).exists()]
    if arm not in there:
        raise ValueError(f"{directory} holds no finished arm {arm!r}; it has {', '.join(there) or 'none'}")
    return PlanWork(settings, directory, show=False)


def plan_files(paths: Sequence[Path], out: str | None) -> list[Path]:
    """Where the plan of each problem goes.

    Args:
        paths: problem files, none twice.
        out: a folder for all plans, or None: each beside its problem. Where file names repeat, the folders of the
            problems, from the one that holds them all, are found again in `out`.

    Raises:
        ValueError: two plans would have one file, or a file is there that is no plan of ours.
    """
    targets = [path.with_suffix(".soln") for path in paths]
    if out is not None:
        # Two files whose names differ in case alone are one on some disks.
        if len({target.name.casefold() for target in targets}) < len(targets):
            absolute = [os.path.abspath(target) for target in targets]
            shared = os.path.commonpath([os.path.dirname(name) for name in absolute])
            targets = [Path(out, os.path.relpath(name, shared)) for name in absolute]
        else:
            targets = [Path(out, target.name) for target in targets]
    owners: dict[Path, Path] = {}
    for path, target in zip(paths, targets, strict=True):
        other = owners.setdefault(target.resolve(), path)
        if other is not path:
            raise ValueError(f"{other} and {path} would both have their plan in {target}; rename one of them")
        if os.path.lexists(target) and not _is_plan(target):
            raise ValueError(
                f"{target} is there and is no plan of `sidestream solve`; move it, or choose another --out"
            )
    return targets


def _distinct(paths: list[Path]) -> list[Path]:
    """The files without those named again, by whatever way; a link elsewhere has a plan of its own."""
    seen: dict[Path, Path] = {}
    for path in paths:
        if (first := seen.setdefault(path.parent.resolve() / path.name, path)) is not path:
            print(f"note: {path} is {first} again", file=sys.stderr)
    return list(seen.values())


def _is_plan(path: Path) -> bool:
    """Whether a file, and no link to one elsewhere, has the form of `write_plan`'s."""
    if path.is_symlink() or not path.is_file():
        return False
    text = path.read_bytes().decode("utf-8", errors="replace")
    return re.fullmatch(r"(\([^()\n]+\)\r?\n)*; cost = \d+ \(unit cost\)\s*", text) is not None
