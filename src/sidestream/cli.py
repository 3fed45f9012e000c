"""The command `sidestream`: run a table, list tables, rebuild a report. torch is imported only when something runs."""

from __future__ import annotations

import difflib
import gc
import os
import re
import shlex
import sys
import typing
import warnings
from argparse import SUPPRESS
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from sidestream.experiments.table import listed

SCALES = ("smoke", "cpu", "paper")

OUTER = {"train": "train", "eval": "evaluate", "generate": "generate", "solve": "solve", "compile-goal": "compile_goal"}
"""Command -> its module in `sidestream.commands`."""

HELP = """usage: sidestream COMMAND ...

commands:
  train         a goal channel for your model and your goals (sidestream train --model DIR --data goals.jsonl --out run)
  eval          what a goal is worth once it has left the window: in the channel, pinned, in the text
  generate      text under a goal, streamed; with --chat, a conversation (sidestream generate --model ANY --goal TEXT)
  compile-goal  a goal's keys and values as a file, loaded in place of reading its text

  run TABLE     train and evaluate one table, end with a report   (sidestream run lsar.table1 --scale cpu)
  audit MODEL   attack both channels of a trained model, under every defence, end with a report
  tables        what can be run, and what it costs
  solve FILE... plans for PDDL Blocksworld problems, by a model that lsar.table3 has trained
  report DIR    write the report of a finished run directory again
  readme        write the tables of a README from committed results files

`sidestream run TABLE --help` lists every setting of that table, `sidestream train --help` those of training.
sidestream --version tells the version.
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status. A user's mistake is one line on stderr and status 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"run": _run, "tables": _tables, "report": _report, "readme": _readme}
    commands |= {name: partial(_outer, module) for name, module in OUTER.items()}
    commands |= {name: partial(_argument, name, table.argument) for name, table in listed().items() if table.argument}
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] == "--version":
        from sidestream import __version__

        print(f"sidestream {__version__}")
        return 0
    try:
        if words[0] not in commands:
            raise ValueError(f"unknown command {words[0]!r}{_nearest(words[0], commands)}; see sidestream --help")
        return commands[words[0]](words[1:])
    except ValueError as error:
        return _complain(error)
    except OSError as error:
        return _complain(f"{error.filename or 'a file'}: {error.strerror or error}")
    except KeyboardInterrupt:
        after = "; run the same command with --resume to go on" if words[0] in ("run", "train") else ""
        print(f"\nsidestream: stopped{after}", file=sys.stderr)
        return 130


def _complain(what: object) -> int:
    print(f"sidestream: {' '.join(str(what).split())}", file=sys.stderr)
    return 2


def _nearest(word: str, known: Any) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""


def _outer(module: str, words: list[str]) -> int:
    _quiet()
    return import_module(f"sidestream.commands.{module}").run(words, _Parser, _add_fields)


# ---------------------------------------------------------------- run


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: sidestream run TABLE [--scale smoke|cpu|paper] [--FIELD VALUE ...] [--out DIR] [--resume]")
        print(f"\n{_table_lines()}\n\n`sidestream run TABLE --help` lists every field of that table.")
        return 0
    name, tables = words[0], _runnable()
    if name not in tables:
        raise ValueError(f"unknown table {name!r}{_nearest(name, tables)}; see sidestream tables")
    scale = _scale(words[1:])
    _quiet()
    from sidestream.experiments.settings import from_json
    from sidestream.experiments.table import load

    table = load(name)
    default = table.at(scale)
    parser = _parser(name, tables[name].title, default)
    settings = parser.parse_args(words[1:]).as_dict()
    out, resume, seeds = (settings.pop(extra) for extra in ("out", "resume", "seeds"))
    engine = _engine(**{extra: settings.pop(extra) for extra in ("engine", "jobs", "address", "cpus", "gpus")})
    del settings["config"]
    for field, value in (("table", name), ("scale", scale)):
        if settings[field] != value:
            raise ValueError(f"{field} is {settings[field]!r} in the settings given, and {value!r} on the command line")
    experiment = from_json(type(default), settings)
    _warn_of_cost(table, experiment)
    gc.freeze()  # every stage's Trainer collects garbage; torch's own objects need not be looked at each time
    directory = Path(out or f"runs/{name}/{scale}-seed{'s' if seeds else experiment.seed}")
    command = "sidestream run " + shlex.join(word for word in words if word != "--resume")
    return _execute(experiment, directory, seeds, engine, command=command, resume=resume)


def _engine(engine: str, jobs: int | None, address: str | None, cpus: int | None, gpus: float | None) -> Any:
    """Where jobs run."""
    if engine == "ray":
        from sidestream.experiments.cluster import RayEngine

        if jobs is not None:
            raise ValueError("--jobs is for --engine local; on a cluster say what a job takes: --cpus, --gpus")
        return RayEngine(address or "auto", cpus=1 if cpus is None else cpus, gpus=gpus)
    from sidestream.experiments.engine import LocalEngine

    for name, value in (("address", address), ("cpus", cpus), ("gpus", gpus)):
        if value is not None:
            raise ValueError(f"--{name} is for --engine ray; add that, or leave it out")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1")
    return LocalEngine(jobs)


def _argument(name: str, field: str, words: list[str]) -> int:
    """A table that is a command of its own, which takes one of its fields first."""
    if not words or words[0] in ("-h", "--help"):
        from sidestream.experiments.table import load

        print(load(name).about)
        return _run([name, "--help"])
    if words[0].startswith("-"):
        raise ValueError(f"name the {field} before any field: sidestream {name} {field.upper()} [--FIELD VALUE ...]")
    return _run([name, f"--{field}", *words])


def _execute(experiment: Any, out: Path, seeds: list[int] | None, engine: Any, **options: Any) -> int:
    from concurrent.futures.process import BrokenProcessPool

    from sidestream.experiments import run
    from sidestream.experiments.report import page
    from sidestream.training.loop import TrainingStopped

    try:
        if seeds:
            results = run.run_seeds(experiment, seeds, out, engine=engine, **options)
        else:
            results = run.run(experiment, out, engine=engine, **options)
        written = page.write_report(out)
    except OSError as error:
        return _complain(
            f"{error.filename or out}: {error.strerror or error}; finished stages are kept, run again with --resume"
        )
    except TrainingStopped as error:
        return _complain(error)
    except BrokenProcessPool:
        return _complain("a worker process died (out of memory?); go on with --resume, and --jobs 1 to need less")
    _print_table(results)
    print(f"report  {written}\nresults {out / 'results.json'}")
    return 0


def _scale(words: list[str]) -> str:
    """The scale asked for: its numbers are the defaults of every other field."""
    given, file = _peek(words, "--scale"), _peek(words, "--config")
    in_file = _read_config(file).get("scale") if file else None
    if given and in_file and given != in_file:
        raise ValueError(f"{file} holds settings of scale {in_file}, and --scale says {given}; leave one of them out")
    scale = given or in_file or "cpu"
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}{_nearest(str(scale), SCALES)}; use smoke, cpu or paper")
    return scale


def _peek(words: list[str], option: str) -> str | None:
    for index, word in enumerate(words):
        if word.startswith(option + "="):
            return word.split("=", 1)[1]
        if word == option and index + 1 < len(words):
            return words[index + 1]
    return None


def _read_config(file: str) -> dict[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not a YAML or JSON file ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: not a file of settings; `sidestream run TABLE --print_config` writes one")
    return settings


class _Parser(ArgumentParser):
    """Turns the library's complaints into one line that names the field, what it takes and what was given."""

    types: dict[str, Any]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        line = " ".join(str(message).split())
        wrong = re.search(r'Parser key "([\w.]+)": .*?(?:Got|Given) value: (.*)', line)
        if wrong and wrong[1] in self.types:
            raise ValueError(f"--{wrong[1]} must be {_words(self.types[wrong[1]])}; got {wrong[2]!r}")
        unknown = re.search(r"nrecognized arguments: --([\w.]+)|(?:Key|Option) [\"']([\w.]+)[\"'] is not", line)
        if unknown:
            name = unknown[1] or unknown[2]
            near = _nearest(f"--{name}", [f"--{known}" for known in self.types])
            raise ValueError(f"unknown field --{name}{near}; `{self.prog} --help` lists them")
        raise ValueError(f"{line}; see `{self.prog} --help`")


def _parser(name: str, title: str, experiment: Any) -> _Parser:
    """Every field of the experiment as an option, nested ones with a dot, its values as the defaults."""
    parser = _Parser(
        prog=f"sidestream run {name}",
        usage=f"sidestream run {name} [--scale smoke|cpu|paper] [--FIELD VALUE ...] [--out DIR] [--resume]",
        description=f"{title}. Defaults shown are those of scale {experiment.scale}; lists are written '[a,b]'.",
        default_env=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", action="config", help="read fields from a YAML or JSON file (a run's experiment.json)"
    )
    parser.add_argument("--out", type=str | None, default=None, help="run directory; null: runs/TABLE/SCALE-seedK")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    parser.add_argument("--jobs", type=int | None, default=None, help="arms trained side by side; null: one a CPU core")
    places = typing.Literal["local", "ray"]
    parser.add_argument("--engine", type=places, default="local", help="processes here, or the machines of a cluster")
    parser.add_argument(
        "--address", type=str | None, default=None, help="HOST:PORT of the Ray cluster; null: this one's"
    )
    parser.add_argument("--cpus", type=int | None, default=None, help="cores of a job there; null: 1")
    about = "GPUs of a job there, or a share of one; null: 1 where there are any"
    parser.add_argument("--gpus", type=float | None, default=None, help=about)
    about = "several seeds, each a run of its own in DIR/seedK, and their means and intervals together"
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help=about)
    parser.types = {"out": str | None, "jobs": int | None, "seeds": int, "engine": places}
    parser.types |= {"address": str | None, "cpus": int | None, "gpus": float | None}
    _add_fields(parser, experiment, "", "fields")
    return parser


@cache
def _docs(kind: type) -> dict[str, str]:
    """Field -> its docstring, in one line. Finding them means reading the class's source."""
    from docstring_parser import parse_from_object

    return {
        entry.arg_name: " ".join((entry.description or "").split())
        for part in reversed(kind.__mro__[:-1])  # a field's words stand where it is written
        for entry in parse_from_object(part).params
    }


def _add_fields(parser: _Parser, values: Any, prefix: str, title: str) -> None:
    from sidestream.experiments.settings import to_json

    hints, docs = typing.get_type_hints(type(values)), _docs(type(values))
    plain = to_json(values)
    group = parser.add_argument_group(title)
    for name in (field.name for field in fields(values)):
        if is_dataclass(getattr(values, name)):
            about = f"{prefix}{name}: {docs[name].rstrip('.')}"
            _add_fields(parser, getattr(values, name), f"{prefix}{name}.", about)
            continue
        if any(map(is_dataclass, typing.get_args(hints[name]))):  # settings this scale has not, null in a file
            group.add_argument(f"--{prefix}{name}", type=str | None, default=None, help=SUPPRESS)
            continue
        if prefix + name == "table":  # said already, but a run's experiment.json has it
            group.add_argument("--table", type=str, default=plain[name], help=SUPPRESS)
            continue
        parser.types[prefix + name] = hints[name]
        about = docs[name].replace("`", "")
        group.add_argument(f"--{prefix}{name}", type=hints[name], default=plain[name], help=about)


def _words(kind: Any) -> str:
    """A field's type in words."""
    inner = [argument for argument in typing.get_args(kind) if argument not in (type(None), ...)]
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, inner))
    if typing.get_origin(kind) is tuple:
        return f"a list, each {_words(inner[0])}, written '[a,b]'"
    if inner:
        return f"{_words(inner[0])} or null"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[kind]


def _warn_of_cost(table: Any, experiment: Any) -> None:
    import torch

    if experiment.scale == "paper" and not torch.cuda.is_available() and table.flops(experiment):
        hours = f"{table.flops(experiment) / 1e11 / 3600:,.0f} hours"  # at the 100 GFLOP/s of a good pair of cores
        print(
            f"sidestream: warning: no GPU here; the paper scale would take about {hours} on this CPU (--scale cpu "
            "takes minutes)",
            file=sys.stderr,
        )


def _quiet() -> None:
    """What libraries say on import and at every step is not for the user of this command."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")


def _print_table(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from sidestream.experiments.report.tables import conditions, number_text, pivot
    from sidestream.experiments.results import merge_seeds
    from sidestream.experiments.table import load

    names = load(results["table"])
    cells = pivot(merge_seeds([results]), names)
    unit = "percent" if all(names.metric(metric).kind == "share" for metric, _, _ in cells.rows) else ""
    facts = ", ".join(filter(None, (unit, conditions(cells.fixed), f"by {cells.column}")))
    title = f"{results['table']} {results['scale']}: {facts}"
    table = Table(title=title, title_justify="left", padding=(0, 0), pad_edge=False)
    for head in ("metric", "arm", *(cells.title(column)[0] for column in cells.columns)):
        table.add_column(head, justify="left" if head in ("arm", "metric") else "right", no_wrap=True, min_width=5)
    last = ""
    for (metric, arm, rest), row in cells.rows.items():
        found = (row.get(column) for column in cells.columns)
        values = (number_text(entry.value, share=entry.share) if entry else "-" for entry in found)
        who = ", ".join(filter(None, (names.arm(arm), rest)))
        table.add_row(names.metric(metric).title if metric != last else "", who, *values)
        last = metric
    Console(width=None if sys.stdout.isatty() else 200).print(table)  # a pipe has no 80 columns to fit


# ---------------------------------------------------------------- tables, report, readme


def _runnable() -> dict[str, Any]:
    return {name: table for name, table in listed().items() if table.title}


def _table_lines() -> str:
    lines = []
    for name, table in _runnable().items():
        lines.append(f"{name}  {table.title}")
        lines += [f"    --scale {scale:<6} {cost}" for scale, cost in table.costs.items()]
    return "\n".join(lines)


def _tables(words: list[str]) -> int:
    if words and words[0] not in ("-h", "--help"):
        raise ValueError(f"tables takes no arguments, got {words[0]!r}")
    print(_table_lines())
    return 0


def _report(words: list[str]) -> int:
    if len(words) != 1 or words[0] in ("-h", "--help"):
        print("usage: sidestream report DIR        DIR is a run directory with results.json")
        return 0 if words and words[0] in ("-h", "--help") else 2
    from sidestream.experiments.report import page

    print(page.write_report(Path(words[0])))
    return 0


def _readme(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print("usage: sidestream readme [README.md [RESULTS_DIR]]")
        return 0
    from sidestream.experiments.report.tables import update_readme

    path, root = [*words, *["README.md", "results"][len(words) :]][:2]
    print("rewritten" if update_readme(path, root) else "already up to date")
    return 0
