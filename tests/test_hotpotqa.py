import copy
import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.tasks.base import ReasoningExample, data_hash, read_jsonl, write_jsonl
from sidestream.tasks.hotpotqa import HUB, Context, exact_match, f1, load_hub, normalized, read, score

DATA = Path(__file__).parent / "data" / "hotpotqa"
DISTRACTOR, EVIDENCE, TITLED = (
    DATA / f"{name}.jsonl.gz" for name in ("distractor_dev", "evidence_train", "evidence_dev")
)
ROWS = [json.loads(line) for line in gzip.decompress(DISTRACTOR.read_bytes()).decode().splitlines()]


# Reading


def test_question_paragraphs_and_evidence() -> None:
    first = read(DISTRACTOR)[0]
    *paragraphs, question = first.question.split("\n")
    assert question == "Were Scott Derrickson and Ed Wood of the same nationality?" and first.answer == "yes"
    assert [paragraph.partition(": ")[0] for paragraph in paragraphs] == ["Scott Derrickson", "Ed Wood"]
    assert first.steps[0] == "Scott Derrickson (born July 16, 1966) is an American director, screenwriter and producer."
    assert len(first.steps) == 2


@pytest.mark.parametrize("context", get_args(Context))
def test_every_context_stands_before_the_question(context: Context) -> None:
    for example, row in zip(read(DISTRACTOR, context), ROWS, strict=True):
        *before, question = example.question.split("\n")
        titles = dict.fromkeys(row["supporting_facts"]["title"])
        assert question == row["question"].strip()
        wanted = {
            "none": 0,
            "evidence": len(example.steps),
            "supporting": len(titles),
            "all": len(row["context"]["title"]),
        }
        assert len(before) == wanted[context]
        if context in ("supporting", "all"):
            shown = " ".join(before)
            assert all(step in shown for step in example.steps) and all(f"{title}: " in shown for title in titles)
        if context == "all":
            assert [line.partition(": ")[0] for line in before] == [
                t.partition(": ")[0] for t in row["context"]["title"]
            ]


def test_steps_are_the_supporting_sentences_in_their_order() -> None:
    for example, row in zip(read(DISTRACTOR), ROWS, strict=True):
        sentences = dict(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
        facts = zip(row["supporting_facts"]["title"], row["supporting_facts"]["sent_id"], strict=True)
        assert list(example.steps) == [sentences[title][number].strip() for title, number in facts]


def test_evidence_files_are_read_without_titles() -> None:
    plain, titled = read(EVIDENCE, "none"), read(TITLED, "evidence")
    assert len(plain) == len(titled) == 24
    assert plain[0].question == 'Which Emmett\'s Mark actor also played in the HBO series "The Wire"?'
    assert plain[0].steps[1].startswith("John Doman (born January 9, 1945)")
    assert titled[0].steps[1] == "It was founded on January 25, 1755 by Mikhail Lomonosov."
    assert titled[0].question.startswith(titled[0].steps[0] + "\n" + titled[0].steps[1] + "\n")
    with pytest.raises(ValueError, match=r":1: field 'context' is missing: .* context='evidence' or 'none'"):
        read(EVIDENCE)
    with pytest.raises(ValueError, match="choose one of supporting, all, evidence, none"):
        read(EVIDENCE, "gold")  # type: ignore[arg-type]


def test_the_official_files_shape_reads_the_same(tmp_path: Path) -> None:
    records = []
    for row in ROWS:
        facts, context = row["supporting_facts"], row["context"]
        records.append(
            {
                **row,
                "supporting_facts": [list(fact) for fact in zip(facts["title"], facts["sent_id"], strict=True)],
                "context": [list(pair) for pair in zip(context["title"], context["sentences"], strict=True)],
            }
        )
    (tmp_path / "dev.json").write_text(json.dumps(records))
    assert read(tmp_path / "dev.json", "all") == read(DISTRACTOR, "all")


def test_examples_survive_a_file_and_have_a_hash(tmp_path: Path) -> None:
    examples = read(TITLED, "evidence")
    write_jsonl(examples, tmp_path / "dev.jsonl")
    assert read_jsonl(tmp_path / "dev.jsonl") == examples
    assert data_hash(examples) == data_hash(read(TITLED, "evidence")) != data_hash(examples[1:])


# The hub


def test_hub_splits_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**ROWS[n % len(ROWS)], "question": f"{n}: {ROWS[n % len(ROWS)]['question']}"} for n in range(60)]
    calls = []

    def load_dataset(*args, split):
        calls.append((*args, split))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    train, valid, test = (load_hub(split, "none") for split in ("train", "valid", "test"))
    assert calls == [(*HUB, "train"), (*HUB, "train"), (*HUB, "validation")]
    assert len(train) + len(valid) == len(test) == 60 and 3 < len(valid) < 20
    assert not {e.question for e in train} & {e.question for e in valid}
    assert load_hub("valid", "none", 2) == valid[:2] and load_hub("train", "none", 0) == []
    with pytest.raises(ValueError, match="choose one of train, valid, test"):
        load_hub("validation")  # type: ignore[arg-type]
    rows[4] = {**rows[4], "answer": None}
    with pytest.raises(ValueError, match=r"^hotpotqa/hotpot_qa validation\[4\]: field 'answer' must be text, got None"):
        load_hub("test")
    monkeypatch.setitem(
        sys.modules,
        "datasets",
        SimpleNamespace(load_dataset=lambda *_, split: (_ for _ in ()).throw(RuntimeError("no"))),
    )
    with pytest.raises(ValueError, match="RuntimeError: no: give a local file"):
        load_hub("test")


# Malformed records


def changed(**fields: object) -> dict:
    record = copy.deepcopy(ROWS[1])
    for name, value in fields.items():
        if isinstance(value, dict) and name in ("context", "supporting_facts"):
            record[name].update(value)
        else:
            record[name] = value
    return {name: value for name, value in record.items() if value is not None}


@pytest.mark.parametrize(
    "record, complaint",
    [
        (changed(question=None), "field 'question' is missing"),
        (changed(answer=""), "field 'answer' is empty"),
        (changed(answer=["Chief"]), "field 'answer' must be text, got ['Chief']"),
        (changed(context="text"), "field 'context' must be an object, got 'text'"),
        (changed(context={"title": ["one"]}), "as many entries in 'sentences' as in 'title'"),
        (changed(context={"title": "one"}), "field 'context': field 'title' must be a list"),
        (
            changed(context={"sentences": [["a"]] * 9 + ["b"]}),
            "field 'context': the sentences of 'Charles Craft' are no",
        ),
        (changed(context=[["title"]]), "field 'context' must hold pairs"),
        (changed(supporting_facts=None), "field 'supporting_facts' is missing"),
        (changed(supporting_facts={"title": ["Nobody"] * 3}), "names 'Nobody', which is no paragraph"),
        (changed(supporting_facts={"sent_id": [0, 0, "1"]}), "has '1' for a sentence of 'Shirley Temple'"),
        (changed(supporting_facts={"sent_id": [0, 0, -1]}), "has -1 for a sentence"),
        (changed(supporting_facts={"sent_id": [90, 91, 92]}), "points at no sentence"),
        (changed(supporting_facts=[]), "points at no sentence"),
        ([], "is not an object"),
    ],
)
def test_a_malformed_record_is_named_by_file_place_and_field(tmp_path: Path, record: object, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(map(json.dumps, [ROWS[0], record])))
    with pytest.raises(ValueError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ") and complaint in message and "\n" not in message
    path.write_text(json.dumps([ROWS[0], record]))
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}[1]: ")


@pytest.mark.parametrize("evidence", [[], [""], ["Title | "], "one", [3]])
def test_malformed_evidence_is_named(tmp_path: Path, evidence: object) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"question": "Who?", "answer": "me", "evidence": evidence}))
    with pytest.raises(ValueError, match=":1: field 'evidence' must"):
        read(path, "none")


def test_one_fact_behind_its_paragraphs_end_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(json.dumps(changed(supporting_facts={"sent_id": [0, 0, 99]})))
    assert read(path)[0].steps == read(DISTRACTOR)[1].steps[:2]


# Scores


@pytest.mark.parametrize(
    "said, gold, em, expected",
    [
        ("The Beatles!", "beatles", 1, 1),
        ("  an  Apple ", "apple", 1, 1),
        ("U.S.", "us", 1, 1),
        ("Greenwich Village", "Greenwich Village, New York City", 0, 2 * 1 * 0.4 / 1.4),
        ("New York", "York New", 0, 1),
        ("a b b", "b", 0, 2 * 0.5 / 1.5),
        ("Paris", "London", 0, 0),
        ("yes", "yes", 1, 1),
        ("Yes.", "yes", 1, 1),
        ("yes it is", "yes", 0, 0),
        ("no", "no man", 0, 0),
        ("noanswer", "no answer", 0, 0),
        ("no", "yes", 0, 0),
        ("", "yes", 0, 0),
        ("", "Paris", 0, 0),
        ("the", "a", 1, 0),
        ("theatre", "atre", 0, 0),
    ],
)
def test_em_and_f1_are_the_official_ones(said: str, gold: str, em: float, expected: float) -> None:
    assert exact_match(said, gold) == em
    assert f1(said, gold) == pytest.approx(expected) == f1(gold, said)


TEXTS = st.text(alphabet="abthe yn.,'o", max_size=12)


@given(TEXTS, TEXTS)
def test_f1_is_a_symmetric_share_that_exact_match_fills(said: str, gold: str) -> None:
    assert 0 <= f1(said, gold) == f1(gold, said) <= 1
    assert normalized(normalized(said)) == normalized(said) or "a" in said or "the" in said
    if exact_match(said, gold) and normalized(gold):
        assert f1(said, gold) == 1


def test_gold_scores_one_and_a_wrong_answer_less() -> None:
    for example in [*read(DISTRACTOR), *read(TITLED, "none")]:
        steps = "\n".join(example.steps)
        assert score(example, f"{steps}\n### {example.answer}").values == {"em": 1, "f1": 1}
        assert score(example, example.answer).values == {"em": 1, "f1": 1}
        assert score(example, f"{steps}\n### qqq").values == score(example, "").values == {"em": 0, "f1": 0}
        assert score(example, f"{example.answer}\n### qqq").values == {"em": 0, "f1": 0}


def test_an_answer_may_hold_the_mark() -> None:
    example = ReasoningExample("Which language?", ("It is C#.",), "C# and F#")
    assert score(example, "It is C#.\n### C# and F#").values == {"em": 1, "f1": 1}
    assert score(example, "### C# and F#").extracted == "C# and F#"
