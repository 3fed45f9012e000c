"""What every task shares: how text becomes ids, what a model sees and must say, what a score is, how files are read."""

import csv
import gzip
import hashlib
import io
import json
import random
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

Split = Literal["train", "valid", "test"]


class Example(NamedTuple):
    """One problem as token ids. The model reads `goal_ids + context_ids` and must continue with `target_ids`."""

    goal_ids: tuple[int, ...]
    """The prompt: what the goal vector encodes, and what the window evicts first."""
    context_ids: tuple[int, ...]
    """Tokens forced between the goal and the target; never scored. May be empty."""
    target_ids: tuple[int, ...]
    """The tokens to generate: the scored positions."""


class Score(NamedTuple):
    """What a scorer says about one output."""

    values: Mapping[str, float]
    """Metric name to a value in [0, 1]."""
    extracted: str
    """What the scorer read from the output, for people who look at single cases."""


@dataclass(frozen=True, slots=True)
class ReasoningExample:
    """One problem with its chain of thought, as text without any layout: no newline at the ends, no answer marker."""

    question: str
    """All that the model is given."""
    steps: tuple[str, ...]
    """The chain of thought, one reasoning step each: what CoCoNuT's curriculum replaces by latents. May be empty."""
    answer: str
    """The final answer, without `###`."""

    def row(self) -> dict[str, object]:
        """One line of JSONL; `read_jsonl` reads it."""
        return {"question": self.question, "steps": list(self.steps), "answer": self.answer}


def read_output(text: str) -> tuple[tuple[str, ...], str]:
    """The steps and the answer in the text that a model generated after a question, as CoCoNuT's evaluation reads it:
    the lines before the first `#`, and what follows the last `#`.

    Without a `#`, no steps and the whole text.
    """
    # CHOICE(AGCLR, Training): the published code finds no answer where `#` is missing; ours may force the marker as
    # part of the prompt, and then the generated text is the answer alone.
    if "#" not in text:
        return (), text.strip()
    lines = text[: text.index("#")].split("\n")
    return tuple(line.strip() for line in lines if line.strip()), text[text.rindex("#") + 1 :].strip()


def read_words(text: str, answer_words: int = 1) -> tuple[tuple[str, ...], str]:
    """`read_output` for tasks whose steps are single words: what stands before the first `#` is split at white space,
    and without a `#` the last `answer_words` words are the answer."""
    if "#" in text:
        return tuple(text[: text.index("#")].split()), " ".join(text[text.rindex("#") + 1 :].split())
    said = text.split()
    cut = max(0, len(said) - answer_words)
    return tuple(said[:cut]), " ".join(said[cut:])


def same_answer(said: str, gold: str) -> bool:
    """Whether two answers are equal as CoCoNuT's evaluation compares them: without commas and outer white space."""
    return said.replace(",", "").strip() == gold.replace(",", "").strip()


# ---- chance


def shuffled(values: Iterable[T], rng: random.Random) -> list[T]:
    """The values in random order, the same in every Python version (only `random()` is promised to be)."""
    values = list(values)
    keys = [rng.random() for _ in values]
    return [values[index] for index in sorted(range(len(values)), key=keys.__getitem__)]


def hash_split(key: str, valid: float, test: float) -> Split:
    """The split that owns `key`: a hash decides, the same on every machine. `valid` and `test` are their shares."""
    place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    return "test" if place < test else "valid" if place < test + valid else "train"


# ---- files


class HasRow(Protocol):
    """Anything that can be written as one line of JSONL."""

    def row(self) -> dict[str, object]: ...


def write_jsonl(items: Iterable[HasRow], path: str | Path) -> None:
    """Writes one line of JSON an item."""
    with open(path, "wb") as file:
        file.writelines(_lines(items))


def data_hash(items: Iterable[HasRow]) -> str:
    """SHA-256, in hex, of the text that `write_jsonl` writes."""
    digest = hashlib.sha256()
    for line in _lines(items):
        digest.update(line)
    return digest.hexdigest()


def _lines(items: Iterable[HasRow]) -> Iterator[bytes]:
    for item in items:
        yield (json.dumps(item.row()) + "\n").encode()


def read_jsonl(path: str | Path) -> list[ReasoningExample]:
    """The examples of a file of `question`, `steps`, `answer`: JSON lines, or one JSON list. Other fields are ignored.

    Raises ValueError: file and line (or index) of the first record that is not so, and its field.
    """
    return [
        ReasoningExample(
            field(record, "question", str, where), texts(record, "steps", where), field(record, "answer", str, where)
        )
        for where, record in json_records(path)
    ]


def read_text(path: str | Path) -> str:
    """A UTF-8 text file, plain or gzipped. ValueError: missing, unreadable, broken, or not UTF-8."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: broken gzip file ({error})") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def text_lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not blank, each after its place: `train.jsonl:12`, counted from 1."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.rstrip("\r")


WRAPPERS = ("data", "rows", "records", "examples", "instances", "items")
"""Names under which an object that is a whole file holds its records."""

_RECORD = {
    "goal",
    "question",
    "trajectory",
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "output",
}


def json_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, each after its place: `train.jsonl:12`, a line counted from 1, or `valid.json[3]`, counted
    from 0, in a JSON list, which may be the `data` of an object. ValueError: not JSON, or not objects."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        found = [(f"{path}[{index}]", record) for index, record in enumerate(_parsed(text, str(path), whole=True))]
    else:
        found = _objects(text, path)
    for where, record in found:
        if not isinstance(record, dict):
            raise ValueError(f"{where}: {_shown(record)} is not an object with named fields")
        yield where, record


def _objects(text: str, path: str | Path) -> list[tuple[str, Any]]:
    """JSON lines, or one object over many lines."""
    lines = list(text_lines(path))
    if len(lines) > 1 and lines[0][1].strip().startswith("{"):
        try:
            _parsed(lines[0][1], lines[0][0])
        except ValueError as error:
            # The first line is no record: then the whole is one, or the line is what is wrong.
            begun = lines[0][1].rstrip().endswith(("{", "[", ","))
            try:
                found = [(str(path), _parsed(text, str(path), whole=True))]
            except ValueError as whole:
                raise whole if begun else error from None
        else:
            found = [(where, _parsed(line, where)) for where, line in lines]
    else:
        found = [(where, _parsed(line, where)) for where, line in lines]
    if len(found) == 1 and isinstance(found[0][1], dict) and not _RECORD & set(found[0][1]):
        for name in WRAPPERS:
            inside = found[0][1].get(name)
            if isinstance(inside, list) and inside and all(isinstance(record, dict) for record in inside):
                return [(f"{path} {name}[{index}]", record) for index, record in enumerate(inside)]
    return found


TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def is_table(path: str | Path) -> bool:
    """Whether a file's name says that it is one of `table_records`."""
    return Path(str(path).removesuffix(".gz")).suffix.lower() in TABLES


def table_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a `.csv`, `.tsv` or `.parquet` file, each after its place, `train.csv[3]`, counted from 0; cells of
    CSV are text, and an empty one is no field. Needs the package `datasets`.

    Raises ValueError: no such file, the package is missing, or the file cannot be read.
    """
    suffix = Path(str(path).removesuffix(".gz")).suffix.lower()
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{path}: {suffix} files are read with the package datasets: pip install 'sidestream[hub]'"
        ) from None
    options: dict[str, Any] = {}
    if TABLES[suffix] == "csv":
        apart = "\t" if suffix == ".tsv" else ","
        names = next(csv.reader(io.StringIO(read_text(path)), delimiter=apart), [])
        # Every cell as it is written: `007` and `NA` are text.
        text = datasets.Features({name: datasets.Value("string") for name in names})
        options = {"features": text, "keep_default_na": False, "sep": apart, "encoding": "utf-8-sig"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = datasets.load_dataset(
                TABLES[suffix],
                data_files=str(path),
                split="train",
                cache_dir=folder,
                keep_in_memory=True,
                **options,
            )
        # The library wraps what pandas and pyarrow raise in errors of its own.
        except Exception as error:
            cause = error.__cause__ or error
            said = " ".join(str(cause).split())[:200]
            raise ValueError(f"{path}: cannot be read as {suffix} ({type(cause).__name__}: {said})") from None
        found = [dict(row) for row in rows]
    for index, row in enumerate(found):
        filled = {name: value for name, value in row.items() if value != ""} if TABLES[suffix] == "csv" else row
        yield f"{path}[{index}]", filled


def _parsed(text: str, where: str, *, whole: bool = False) -> Any:
    """JSON, or a `ValueError` in one line whatever is wrong with it; `whole` says that the text is a file's, of many
    lines."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"field {twice!r} is given twice")
        return made

    def finite(name: str) -> None:
        raise ValueError(f"{name} is no JSON value")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=finite)
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno}" if whole else where
        raise ValueError(f"{place}: not JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply to be read") from None
    except ValueError as error:  # a field given twice, NaN, or a number of thousands of digits
        raise ValueError(f"{where}: {str(error).partition(';')[0]}") from None


def hub_records(name: str, config: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Hugging Face hub data set, each after its place, `name split[3]`; needs the package `datasets`.

    Raises ValueError: the package is missing, or the data set cannot be had.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{name} is read with the package datasets: pip install datasets, or give a file") from None
    try:
        rows = datasets.load_dataset(name, config, split=split)
    # RuntimeError: this release of the library refuses the way that the data set is stored.
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the hub's {name} ({config}, {split}) cannot be had, {type(error).__name__}: {error}: give a local file"
        ) from None
    for index, row in enumerate(rows):
        yield f"{name} {split}[{index}]", dict(row)


# ---- fields of a record

_KINDS: dict[type, str] = {str: "text", int: "a whole number", list: "a list", dict: "an object"}


def field(record: Mapping[str, Any], name: str, kind: type[T], where: str) -> T:
    """The record's field. ValueError, after `where`: it is missing, of another kind, or empty text."""
    if name not in record:
        raise ValueError(f"{where}: field {name!r} is missing")
    value = record[name]
    if type(value) is not kind:
        raise ValueError(f"{where}: field {name!r} must be {_KINDS[kind]}, got {_shown(value)}")
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"{where}: field {name!r} is empty")
    if isinstance(value, str) and not is_text(value):
        raise ValueError(f"{where}: field {name!r} holds half a character (a lone surrogate), which no tokenizer takes")
    return value


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON's `\\ud800` and bytes of a shell that are not UTF-8 cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def texts(record: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """The record's list of texts. ValueError, after `where`: it is missing or something else."""
    values = field(record, name, list, where)
    for value in values:
        if type(value) is not str or not is_text(value):
            raise ValueError(f"{where}: field {name!r} must be a list of texts, got {_shown(value)} in it")
    return tuple(values)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
