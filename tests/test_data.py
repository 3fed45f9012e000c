"""What `--data` takes, what it says when it is wrong, and which tokens end up scored."""

import gzip
import json

import pytest

from sidestream.lm.models.base import chat_template, offsets
from sidestream.tasks.goals import GoalRecord, goals_hash, read_goals, scored_text, tokens
from sidestream.tasks.needle import FACTS, VALUES, needles
from tiny_model import TEMPLATE, tokenizer

GOOD = {"goal": "be brief", "trajectory": "one two three", "answer": "three"}
CHAT = {
    "goal": "book a flight",
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Where to? "},
        {"role": "user", "content": "Oslo"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "search", "arguments": "{}"}]},
        {"role": "tool", "content": "Hi"},
        {"role": "assistant", "content": "Oslo at 9."},
    ],
}


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return str(path)


def test_reads_files_globs_lists_and_gzip(tmp_path):
    one = write(tmp_path / "a.jsonl", GOOD, "", CHAT)
    found = read_goals(one)
    assert [record.goal for record in found] == ["be brief", "book a flight"]
    assert found[0].where.endswith("a.jsonl:1") and found[1].where.endswith("a.jsonl:3")
    (tmp_path / "b.jsonl").write_bytes(gzip.compress(json.dumps([GOOD]).encode()))
    assert [r.goal for r in read_goals(str(tmp_path / "*.jsonl"))] == ["be brief", "book a flight", "be brief"]
    assert goals_hash(read_goals(one)) == goals_hash(found) != goals_hash(found[:1])


def test_the_hub_is_asked_only_where_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"owner/name: there is no such file; a hub data set is written hub:owner/name"
    ):
        read_goals("owner/name")
    with pytest.raises(ValueError, match="hub: names no data set; write hub:owner/name"):
        read_goals("hub:")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"^folder/ is a folder; .* such as 'folder/\*.jsonl'$"):
        read_goals("folder/")
    asked = []
    rows = [("owner/name test[0]", GOOD)]
    monkeypatch.setattr("sidestream.tasks.goals.hub_records", lambda *given: asked.append(given) or rows)
    assert read_goals("hub:owner/name:small", split="test")[0].goal == "be brief"
    assert asked == [("owner/name", "small", "test")]


@pytest.mark.parametrize(
    "bad, complaint",
    [
        ({"trajectory": "x"}, "field 'goal' is missing"),
        ({"goal": " ", "trajectory": "x"}, "field 'goal' is empty"),
        ({"goal": "g"}, "neither 'trajectory' nor 'messages'"),
        ({**GOOD, "messages": CHAT["messages"]}, "both 'trajectory' and 'messages'"),
        ({**GOOD, "trajectory": ["x"]}, "field 'trajectory' must be text"),
        ({**GOOD, "answer": "four"}, "field 'answer' does not occur in 'trajectory'"),
        ({**GOOD, "answer": "one"}, "field 'answer' has nothing before it in 'trajectory'"),
        ({"goal": "g", "messages": []}, "no text of the assistant's"),
        ({"goal": "g", "messages": ["Hi"]}, "message 0 of field 'messages' must be an object"),
        ({"goal": "g", "messages": [{"content": "Hi"}]}, "message 0 of field 'messages' has no 'role'"),
        ({"goal": "g", "messages": [{"role": "user", "content": 3}]}, "message 0 .* must have text as 'content'"),
        ({**CHAT, "answer": "Hi"}, "field 'answer' is in no message of the assistant's"),
        ("{", "not JSON"),
        ('{"goal": "a", "goal": "b", "trajectory": "x"}', "field 'goal' is given twice"),
        ('{"goal": "a\\ud800", "trajectory": "x"}', "field 'goal' holds half a character"),
        ({"goal": "g", "messages": [{"role": "user", "content": "a\ud800"}]}, "must have text as 'content'"),
        ('{"goal": 1' + "0" * 5000 + ', "trajectory": "x"}', "Exceeds the limit"),
        ('{"goal": ' + "[" * 100_000, "nested too deeply"),
        ("[1, 2]", "is not an object"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, bad, complaint):
    path = write(tmp_path / "bad.jsonl", GOOD, bad)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{complaint}"):
        read_goals(path)


def test_the_whole_file_is_checked(tmp_path):
    path = write(tmp_path / "bad.jsonl", GOOD, {"goal": "g"}, GOOD, {"trajectory": "x"})
    with pytest.raises(ValueError, match=r"bad.jsonl:2: has neither .*; 1 more of 4 records are wrong: .*bad.jsonl:4$"):
        read_goals(path)
    with pytest.raises(ValueError, match="holds no records"):
        read_goals(write(tmp_path / "empty.jsonl", ""))


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def spans(record, words):
    text, found = scored_text(record, chat_template(words))
    return [text[a:b] for a, b in found], text


def test_messages_go_through_the_chat_template_and_the_assistant_is_scored(tmp_path, words):
    record = read_goals(write(tmp_path / "chat.jsonl", CHAT))[0]
    said, text = spans(record, words)
    end = "<|im_end|>"
    assert said == [f"Where to?{end}", f'[{{"name": "search", "arguments": "{{}}"}}]{end}', f"Oslo at 9.{end}"]
    assert text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWhere to?")
    answered = read_goals(write(tmp_path / "chat.jsonl", {**CHAT, "answer": "Oslo"}))[0]
    text, found = scored_text(answered, chat_template(words))
    # The user says Oslo too, before; the span is the assistant's.
    assert [text[a:b] for a, b in found] == ["Oslo"] and text[found[0][1] :].startswith(" at 9.")
    with pytest.raises(ValueError, match=r"chat.jsonl:1: has 'messages', but the model has no chat template"):
        scored_text(record, None)
    with pytest.raises(ValueError, match="chat.jsonl:1: the chat template does not show message 1"):
        scored_text(record, lambda messages: "nothing of that")

    def refuses(messages):
        raise RuntimeError("roles must alternate")

    with pytest.raises(ValueError, match="chat.jsonl:1: the model's chat template refuses .* roles must alternate"):
        scored_text(record, refuses)
    assert words.chat_template == TEMPLATE


def test_exactly_the_tokens_of_the_span_are_scored(words):
    encode = offsets(words, special=True)
    record = GoalRecord("here", "g", "The trip goes to Lima, then the trip goes to Oslo", (), "Oslo")
    ids, scored = tokens(record, None, encode)
    assert words.decode([i for i, s in zip(ids, scored, strict=True) if s]).strip() == "Oslo"
    whole = tokens(GoalRecord("here", "g", "Oslo and Lima", (), None), None, encode)
    assert whole.scored == (False, *[True] * (len(whole.ids) - 1))
    with pytest.raises(ValueError, match="here: no token to score"):
        tokens(GoalRecord("here", "g", "a", (), None), None, encode)


def test_needles_ask_for_a_fact_of_the_goal_and_splits_share_no_goal():
    train, test = needles("train", 300, seed=1), needles("test", 100, seed=2)
    for item in train[:50]:
        assert item.answer in item.goal and item.trajectory.endswith(f" {item.answer}")
        before = item.trajectory.removesuffix(item.answer)
        assert item.answer not in before.split("Question:")[1]
        assert item.answer in VALUES[item.fact].split()
    facts = [frozenset(item.goal.split(". ")) for item in train]
    assert not {frozenset(g.rstrip(".").split(". ")) for g in (i.goal for i in test)} & {
        frozenset(g.rstrip(".").split(". ")) for g in (i.goal for i in train)
    }
    assert len(set(facts)) > 250 and {item.fact for item in train} == set(FACTS)
    assert needles("train", 5, seed=1) == train[:5] != needles("train", 5, seed=2)
    longest = needles("train", 20, words=(50, 50), facts=["city"])
    assert all(len(i.trajectory.split("\nQuestion")[0].split()) == 50 and i.fact == "city" for i in longest)


def test_the_test_takes_its_other_text_from_a_part_of_the_file_that_training_never_shows(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(str(k) for k in range(1000)))
    shown = {
        split: {
            int(w)
            for i in needles(split, 300, words=(20, 30), filler=path)
            for w in i.trajectory.split("\n")[0].split()
        }
        for split in ("train", "test")
    }
    assert max(shown["train"]) < 900 <= min(shown["test"]) and len(shown["train"]) > 800


def test_needles_say_what_they_cannot_make(tmp_path):
    with pytest.raises(ValueError, match="choose among name, city"):
        needles("train", 1, facts=["weight"])
    (tmp_path / "short.txt").write_text("three words only")
    with pytest.raises(ValueError, match="has 2 words for train, and 9 are asked for"):
        needles("train", 1, words=(9, 9), filler=tmp_path / "short.txt")
    with pytest.raises(ValueError, match="both begin at 1"):
        needles("train", 0)
