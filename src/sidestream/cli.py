"""The command `sidestream`: run a table, list tables, rebuild a report. torch is imported only when something runs."""

from __future__ import annotations

import difflib
import shlex
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

TABLES = {
    "lsar.table1": "Treasure Hunt: item and passcode recalled over distractors, the prompt outside the window (LS-AR Table 1, Fig. 4)",
}
COSTS = {
    "lsar.table1": {
        "smoke": "under a minute on 2 CPU cores",
        "cpu": "about 12 minutes on 2 CPU cores",
        "paper": "hours on one GPU; weeks without",
    },
}
SCALES = ("smoke", "cpu", "paper")

HELP = """usage: sidestream COMMAND ...

commands:
  run TABLE     train and evaluate one table, end with a report   (sidestream run lsar.table1 --scale cpu)
  tables        what can be run, and what it costs
  report DIR    write the report of a finished run directory again
  readme        write the tables of a README from committed results files

`sidestream run TABLE --help` lists every setting of that table. sidestream --version tells the version.
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status. A user's mistake is one line on stderr and status 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"run": _run, "tables": _tables, "report": _report, "readme": _readme}
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] == "--version":
        from sidestream import __version__

        print(f"sidestream {__version__}")
        return 0
    try:
        if words[0] not in commands:
            _fail(f"unknown command {words[0]!r}{_nearest(words[0], commands)}; see sidestream --help")
        return commands[words[0]](words[1:])
    except _Mistake as error:
        print(f"sidestream: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"sidestream: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nsidestream: stopped; run the same command with --resume to go on", file=sys.stderr)
        return 130


class _Mistake(Exception):
    pass


def _fail(message: str) -> NoReturn:
    raise _Mistake(message)


def _nearest(word: str, known: Any) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""


# ---------------------------------------------------------------- run


@dataclass(frozen=True)
class _Plan:
    out: str
    resume: bool


class _Parser(ArgumentParser):
    """Turns a parser's complaint into one line, with the nearest field's name."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        line = " ".join(str(message).split())
        for word in line.replace(",", " ").split():
            name = word.strip("'\"").split("=")[0]
            if name.startswith("--") and "nrecognized" in line:
                options = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
                _fail(f"unknown field {name}{_nearest(name, options)}; see sidestream run TABLE --help")
        _fail(line)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: sidestream run TABLE [--scale smoke|cpu|paper] [--seed K] [--out DIR] [--resume] [--FIELD VALUE ...]")
        print("\n" + _table_lines())
        return 0
    name = words[0]
    if name not in TABLES:
        _fail(f"unknown table {name!r}{_nearest(name, TABLES)}; see sidestream tables")
    scale = _peek(words[1:], "--scale") or "smoke"
    if scale not in SCALES:
        _fail(f"unknown scale {scale!r}{_nearest(scale, SCALES)}; use smoke, cpu or paper")
    _quiet()
    from sidestream.papers import lsar

    experiment = lsar.table1(scale)  # type: ignore[arg-type]
    parser = _Parser(prog=f"sidestream run {name}", description=TABLES[name], default_env=False)
    parser.add_argument("--config", action="config", help="read settings from a YAML or JSON file")
    parser.add_class_arguments(type(experiment), fail_untyped=False, skip={"table"})
    parser.add_argument("--out", type=str | None, default=None, help="run directory (default: runs/TABLE/SCALE-seedK)")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    parser.set_defaults({k: v for k, v in _nested(experiment).items() if k != "table"})
    parsed = parser.parse_args(words[1:])
    settings = parsed.clone()
    for extra in ("out", "resume", "config"):
        settings.pop(extra, None)
    experiment = _build(type(experiment), settings)
    out = Path(parsed.out or f"runs/{name}/{scale}-seed{experiment.seed}")
    _warn_of_cost(experiment)
    command = "sidestream run " + shlex.join(word for word in words if word != "--resume")
    return _execute(lsar.run_table1, experiment, out, command=command, resume=parsed.resume)


def _execute(run: Any, experiment: Any, out: Path, *, command: str, resume: bool) -> int:
    from sidestream.papers.report import write_report
    from sidestream.training.loop import TrainingStopped

    try:
        results = run(experiment, out, command=command, resume=resume)
    except TrainingStopped as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or out}: {error.strerror}; finished stages are kept, run again with --resume")
    page = write_report(out)
    _print_table(results)
    print(f"report  {page}\nresults {out / 'results.json'}")
    return 0


def _build(kind: type, settings: Namespace) -> Any:
    from sidestream.papers.experiment import from_json

    return from_json(kind, _plain(settings.as_dict()))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _nested(experiment: Any) -> dict[str, Any]:
    from sidestream.papers.experiment import to_json

    return to_json(experiment)


def _peek(words: list[str], option: str) -> str | None:
    for index, word in enumerate(words):
        if word.startswith(option + "="):
            return word.split("=", 1)[1]
        if word == option and index + 1 < len(words):
            return words[index + 1]
    return None


def _warn_of_cost(experiment: Any) -> None:
    import torch

    if experiment.scale == "paper" and not torch.cuda.is_available():
        # 6 FLOP a parameter and token, without the embeddings; 100 GFLOP/s is a good 2-core CPU.
        hours = 0.0
        blocks = 12 * experiment.encoder.width**2
        for loop, layers in (
            (experiment.stage1, experiment.encoder.layers + experiment.baseline.layers),
            (experiment.stage3, experiment.encoder.layers * (len(experiment.arms) - 1) + experiment.baseline.layers),
        ):
            hours += 6 * blocks * layers * loop.steps * loop.batch_size * experiment.window / 1e11 / 3600
        print(
            f"sidestream: warning: no GPU here; the paper scale would take about {hours:,.0f} hours on this CPU "
            "(--scale cpu takes minutes)",
            file=sys.stderr,
        )


def _quiet() -> None:
    import os

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")


def _print_table(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    metrics = list(dict.fromkeys(cell["metric"] for cell in results["cells"]))
    columns = list(dict.fromkeys(cell["where"]["H"] for cell in results["cells"]))
    window = results["cells"][0]["where"]["W"]
    table = Table(title=f"{results['table']} {results['scale']}: percent, by H (W = {window})")
    for head in ("arm", "metric", *map(str, columns)):
        table.add_column(head, justify="left" if head in ("arm", "metric") else "right")
    values = {(c["arm"], c["metric"], c["where"]["H"]): c["value"] for c in results["cells"]}
    for arm in dict.fromkeys(cell["arm"] for cell in results["cells"]):
        for metric in metrics:
            table.add_row(arm, metric, *(f"{100 * values[arm, metric, column]:.1f}" for column in columns))
    Console().print(table)


# ---------------------------------------------------------------- tables, report, readme


def _table_lines() -> str:
    lines = []
    for name, title in TABLES.items():
        lines.append(f"{name}  {title}")
        lines += [f"    --scale {scale:<6} {cost}" for scale, cost in COSTS[name].items()]
    return "\n".join(lines)


def _tables(words: list[str]) -> int:
    if words and words[0] not in ("-h", "--help"):
        _fail(f"tables takes no arguments, got {words[0]!r}")
    print(_table_lines())
    return 0


def _report(words: list[str]) -> int:
    if len(words) != 1 or words[0] in ("-h", "--help"):
        print("usage: sidestream report DIR        DIR is a run directory with results.json")
        return 0 if words and words[0] in ("-h", "--help") else 2
    from sidestream.papers.report import write_report

    print(write_report(Path(words[0])))
    return 0


def _readme(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print("usage: sidestream readme [README.md [RESULTS_DIR]]")
        return 0
    from sidestream.papers.results import update_readme

    path, root = [*words, *["README.md", "results"][len(words) :]][:2]
    print("rewritten" if update_readme(path, root) else "already up to date")
    return 0
