import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.tasks.base import ReasoningExample, data_hash, hash_split, read_jsonl, write_jsonl
from sidestream.tasks.gsm8k import HUB, hold_out, load_hub, read, score, without

DATA = Path(__file__).parent / "data" / "gsm8k"
TRAIN, TEST = read(DATA / "train.jsonl.gz"), read(DATA / "test.jsonl")
ICOT_TEST, ICOT_VALID = read(DATA / "icot_test.txt"), read(DATA / "icot_valid.txt")
RECORD = json.loads((DATA / "test.jsonl").read_text().split("\n")[0])
LINE = (DATA / "icot_test.txt").read_text().split("\n")[0]


def test_both_formats_give_the_same_problems() -> None:
    assert len(TEST) == 31 and TEST == ICOT_TEST
    assert len(TRAIN) == 36 and len(ICOT_VALID) == 12
    assert TEST[0].steps == ("<<16-3-4=9>>", "<<9*2=18>>") and TEST[0].answer == "18"
    assert TEST[30].answer == "2,125"
    # No equation: one empty step, as CoCoNuT's converter writes it.
    assert TEST[24].steps == ("",)


def test_plain_equations_are_right_to_one_percent() -> None:
    checked = 0
    for example in [*TRAIN, *TEST]:
        for step in filter(None, example.steps):
            left, _, right = step.strip("<>").replace(",", "").rpartition("=")
            if set(left) <= set("0123456789.+-*/()"):
                assert float(right) == pytest.approx(eval(left, {}), rel=0.01)
                checked += 1
    assert checked > 100


def test_gold_scores_one_and_a_wrong_answer_zero() -> None:
    for example in [*TRAIN, *TEST, *ICOT_VALID]:
        steps = "\n".join(example.steps)
        assert score(example, f"{steps}\n### {example.answer}").values == {"accuracy": 1, "number": 1, "steps": 1}
        assert score(example, f"{steps}\n### {example.answer}1").values == {"accuracy": 0, "number": 0, "steps": 1}
        assert score(example, f"<<1+1=2>>\n### {example.answer}").values == {"accuracy": 1, "number": 1, "steps": 0}


@pytest.mark.parametrize(
    "text, right",
    [
        ("### 2125", True),
        ("### 2,125", True),
        ("#### 2,125 \n", True),
        ("### 7\n### 2125", True),
        ("2125", True),
        ("### 2125\n### 7", False),
        ("### 2125.0", False),
        ("### $2125", False),
        ("### 21255", False),
        ("### 2125 blocks", False),
        ("2125 ###", False),
        ("", False),
    ],
)
def test_the_answer_is_what_follows_the_last_mark_without_commas(text: str, right: bool) -> None:
    assert score(TEST[30], text).values["accuracy"] == right


@given(st.integers(-(10**9), 10**9))
def test_commas_never_decide(number: int) -> None:
    example = ReasoningExample("?", ("",), f"{number:,}")
    assert score(example, f"### {number}").values["accuracy"] == 1
    assert score(example, f"### {number + 1:,}").values["accuracy"] == 0


@pytest.mark.parametrize(
    "gold, said, right",
    [
        ("2", "2.0", True),
        ("1000", "$1,000", True),
        ("1,000", "1000.00", True),
        ("1000", "1000.", True),
        ("-3", "−$3", True),
        ("0.5", ".50", True),
        ("1000", "1,00,0.0", False),
        ("1000", "1000 blocks", False),
        ("1000", "1,000.1", False),
        ("3", "-3", False),
        ("2", "٢.0", True),
        ("3", "$", False),
        ("3", "", False),
        ("1/2", "1/2", True),
    ],
)
def test_a_number_is_what_it_is_beside_the_papers_strict_score(gold: str, said: str, right: bool) -> None:
    found = score(ReasoningExample("?", ("",), gold), f"### {said}").values
    assert found["number"] == right
    assert found["accuracy"] == (said.replace(",", "") == gold.replace(",", ""))


def test_coconuts_json_and_steps_in_words_are_read_too(tmp_path: Path) -> None:
    write_jsonl(TEST, tmp_path / "lines.jsonl")
    assert read(tmp_path / "lines.jsonl") == TEST
    (tmp_path / "list.json").write_text(json.dumps([example.row() for example in TEST], indent=1))
    assert read(tmp_path / "list.json") == TEST
    words = "Ann has 3.5 kg.\nShe eats 1 kg, so 3.5 - 1 = <<3.5-1=2.5>>2.5 kg are left."
    rows = [
        {"question": "How many?", "steps": ["Ann has 3.5 kg.", "She eats\n1 kg."], "answer": "2.5"},
        {"question": "How many?", "steps": [], "answer": 2},
        {"question": "How many?", "cot": words, "answer": "2.5"},
        {"question": "How many?", "cot": words.replace("\n", " "), "answer": "#### 2.5"},
        {"question": "How many?", "cot": "<<16-3-4=9>> <<9*2=18>>", "answer": "18"},
        {"question": "How many?", "cot": "", "answer": "18"},
    ]
    (tmp_path / "words.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = read(tmp_path / "words.jsonl")
    assert found[0].steps == ("Ann has 3.5 kg.", "She eats 1 kg.") and found[0].answer == "2.5"
    assert found[1] == ReasoningExample("How many?", ("",), "2")
    assert found[2].steps == found[3].steps == tuple(words.split("\n")) and found[3].answer == "2.5"
    assert found[4].steps == TEST[0].steps and found[5].steps == ("",)
    assert score(found[0], "Ann has 3.5 kg.\nShe eats 1 kg.\n### 2.50").values == {
        "accuracy": 0,
        "number": 1,
        "steps": 1,
    }
    for bad, said in (
        ({"question": "?", "steps": "x", "answer": "1"}, "field 'steps' must be a list"),
        ({"question": "?", "steps": ["x"]}, "field 'answer' is missing"),
        ({"question": "?", "steps": [1], "answer": "1"}, "list of texts"),
        ({"question": "?", "cot": "x", "answer": "1\n2"}, "field 'answer' must be one line"),
    ):
        (tmp_path / "bad.jsonl").write_text(f"{official()}\n{json.dumps(bad)}\n")
        with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{said}"):
            read(tmp_path / "bad.jsonl")


def test_held_out_questions_do_not_depend_on_order_and_do_not_train() -> None:
    train, valid = hold_out(TRAIN * 2)
    backwards = hold_out(TRAIN[::-1])
    assert set(valid) == set(backwards[1]) and set(train) == set(backwards[0])
    assert valid and len(train) + len(valid) == 72
    assert not {e.question for e in train} & {e.question for e in valid}
    many = [hash_split(f"question {n}", 1 / 15, 0) for n in range(3000)]
    assert 150 < many.count("valid") < 250 and "test" not in many


def test_icots_validation_questions_can_be_left_out() -> None:
    left = without(TRAIN, ICOT_VALID)
    assert len(left) == 24 and not {e.question for e in left} & {e.question for e in ICOT_VALID}
    assert without(TRAIN, TEST) == TRAIN


def test_examples_survive_a_file_and_have_a_hash(tmp_path: Path) -> None:
    write_jsonl(TEST, tmp_path / "test.jsonl")
    assert read_jsonl(tmp_path / "test.jsonl") == TEST
    assert data_hash(TEST) == data_hash(list(TEST)) != data_hash(TEST[::-1])


# The hub


def fake_datasets(monkeypatch: pytest.MonkeyPatch, answer) -> list[tuple]:
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((*args, kwargs))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_hub_splits_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.loads(line) for line in (DATA / "test.jsonl").read_text().splitlines()]
    calls = fake_datasets(monkeypatch, rows)
    train, valid, test = (load_hub(split) for split in ("train", "valid", "test"))
    assert [call[-1]["split"] for call in calls] == ["train", "train", "test"]
    assert calls[0][:2] == HUB == ("openai/gsm8k", "main")
    assert test == TEST and (train, valid) == hold_out(TEST) and load_hub("test", 3) == TEST[:3]


def test_what_the_hub_cannot_give_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="choose one of train, valid, test"):
        load_hub("validation")  # type: ignore[arg-type]
    fake_datasets(monkeypatch, ConnectionError("offline"))
    with pytest.raises(ValueError, match="openai/gsm8k .*ConnectionError: offline: give a local file"):
        load_hub("test")
    fake_datasets(monkeypatch, [RECORD, {"question": "How many?"}])
    with pytest.raises(ValueError, match=r"^openai/gsm8k test\[1\]: field 'answer' is missing$"):
        load_hub("test")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        load_hub("test")


# Malformed files


def official(**fields: object) -> str:
    return json.dumps({name: value for name, value in {**RECORD, **fields}.items() if value is not None})


@pytest.mark.parametrize(
    "line, complaint",
    [
        (official(question=None), "field 'question' is missing"),
        (official(question="  "), "field 'question' is empty"),
        (official(answer=18), "field 'answer' must be text, got 18"),
        (official(answer="She has <<16-3-4=9>>9 left."), "field 'answer' has no line `#### <answer>`"),
        (official(answer="<<16-3-4=9>>9\n####"), "one line with the answer must follow ####"),
        (official(answer="<<16-3-4=9>>9\n#### 9\nThat is all"), "one line with the answer must follow ####"),
        (official(answer="<<16-3-4=9\n#### 9"), "an equation opens with << and does not close"),
        (official(answer="16-3-4=9>>\n#### 9"), "an equation opens with << and does not close"),
        ("{" + official(), "not JSON"),
        ("[1]", "is not an object"),
    ],
)
def test_a_malformed_official_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{official()}\n\n{line}\n{official()}\n")
    with pytest.raises(ValueError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and complaint in message and "\n" not in message


@pytest.mark.parametrize(
    "line, complaint",
    [
        (LINE.replace("||", "|"), "has no `||`"),
        (LINE.replace("####", "##"), "has no `####`"),
        ("||" + LINE.partition("||")[2], "the question before `||` is empty"),
        (LINE.replace("<<9*2", "and <<9*2"), "must be equations in << and >>"),
        (LINE.replace("9*2=18>>", "9*2=18>"), "must be equations in << and >>"),
        (LINE.rpartition(" ")[0], "one line with the answer must follow ####, got ''"),
        (official(), "has no `||`"),
    ],
)
def test_a_malformed_icot_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(f"{LINE}\n{line}\n{LINE}\n")
    with pytest.raises(ValueError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ") and complaint in message and "\n" not in message
