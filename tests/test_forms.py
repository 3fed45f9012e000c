"""The forms in which people have their records and files: what each is read as, and what is said of the rest."""

import json
import re
import sys

import datasets
import pytest

import sidestream
from sidestream import cli
from sidestream.commands.train import _unheard_ends
from sidestream.lm.models.base import chat_template, load_base, load_tokenizer, offsets
from sidestream.tasks.goals import read_goals, scored_text, tokens
from tiny_model import save, tokenizer

USER = {"role": "user", "content": "Weather in Zürich?"}
ASKED = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Sunny."}]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
]
CALL = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Z\\u00fcrich"}'}}]


@pytest.fixture(scope="module")
def template():
    return chat_template(tokenizer())


def one(tmp_path, row, goal_from=None):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (found,) = read_goals(str(path), goal_from=goal_from)
    return found


def roles(found):
    return [(message["role"], message["content"]) for message in found.messages]


CHAT = [("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize(
    "row, goal_from, goal, text",
    [
        ({"messages": ASKED}, "system", "Be brief.", [("user", USER["content"]), ("assistant", "Sunny.")]),
        ({"messages": [{**ASKED[0], "role": "developer"}, *ASKED[1:]]}, "system", "Be brief.", None),
        ({"goal": "other", "messages": ASKED}, "system", "Be brief.", None),
        ({"goal": "g", "conversations": SHAREGPT}, None, "g", [("system", "Be brief."), *CHAT]),
        ({"conversations": SHAREGPT}, "system", "Be brief.", CHAT),
        ({"system": "Be brief.", "conversations": SHAREGPT[1:]}, "system", "Be brief.", CHAT),
        (
            {"goal": "g", "system": "Be brief.", "conversations": SHAREGPT[1:]},
            None,
            "g",
            [("system", "Be brief."), *CHAT],
        ),
        ({"goal": "g", "conversations": [{"role": r, "content": c} for r, c in CHAT]}, None, "g", CHAT),
        ({"goal": "g", "prompt": "a", "completion": " b a"}, None, "g", "a b a"),
        ({"prompt": "a", "completion": " b a"}, "prompt", "a", " b a"),
        ({"goal": "g", "prompt": ASKED[:2], "completion": ASKED[2:]}, None, "g", None),
        ({"prompt": ASKED[:2], "completion": ASKED[2:]}, "system", "Be brief.", None),
        ({"goal": "g", "instruction": "Hi", "input": "", "output": "Hello"}, None, "g", CHAT),
        ({"instruction": "Be it", "input": "Hi", "output": "Hello"}, "instruction", "Be it", CHAT),
        (
            {"goal": "g", "instruction": "Hi", "input": "you", "output": "Hello", "history": [["Hi", "Hello"]]},
            None,
            "g",
            [*CHAT, ("user", "Hi\n\nyou"), ("assistant", "Hello")],
        ),
        ({"system": "Be brief.", "instruction": "Hi", "output": "Hello"}, "system", "Be brief.", CHAT),
        ({"persona": "a cat", "trajectory": "b c"}, "persona", "a cat", "b c"),
        ({"goal": "x", "persona": "a cat", "trajectory": "b c"}, "persona", "a cat", "b c"),
    ],
)
def test_forms_that_people_have(tmp_path, row, goal_from, goal, text):
    found = one(tmp_path, row, goal_from)
    assert found.goal == goal
    if text is not None:
        assert text == (found.trajectory if isinstance(text, str) else roles(found))
    if goal_from == "system":
        assert all(message["role"] == "user" or message["content"] != goal for message in found.messages)


def test_of_a_prompt_and_a_completion_the_completion_is_scored(tmp_path, template):
    text, spans = scored_text(one(tmp_path, {"goal": "g", "prompt": "a b", "completion": " b"}), None)
    assert (text, spans) == ("a b b", ((3, 5),))
    text, spans = scored_text(one(tmp_path, {"prompt": "a b", "completion": " b"}, "prompt"), None)
    assert (text, spans) == (" b", ((0, 2),))
    past = [*ASKED[1:], USER]
    row = {"goal": "g", "prompt": past, "completion": [{"role": "assistant", "content": "Rain."}]}
    text, spans = scored_text(one(tmp_path, row), template)
    assert [text[a:b] for a, b in spans] == ["Rain.<|im_end|>"]


@pytest.mark.parametrize(
    "row, goal_from, complaint",
    [
        ({"messages": ASKED[1:]}, "system", "has no system message to take the goal from"),
        ({"messages": [{**ASKED[0], "content": " "}, *ASKED[1:]]}, "system", "the system message is empty"),
        ({"trajectory": "x"}, "system", "has no system message .* it is plain text"),
        ({"messages": ASKED}, None, "'goal' is missing; the fields are 'messages'; .*--goal_from FIELD, .*system"),
        ({"goall": "g", "trajectory": "x"}, None, r"'goal' is missing \(is it 'goall'\?\)"),
        ({"task": "g", "trajectory": "x"}, "tusk", "'tusk' is missing; the fields are 'task', 'trajectory'"),
        ({"task": 3, "trajectory": "x"}, "task", "field 'task' must be text"),
        ({"goal": "g", "text": "x"}, None, "neither 'trajectory' nor 'messages'.* its other fields are 'text'"),
        ({"goal": "g", "anwser": "x", "trajectory": "a x"}, None, "'anwser' is not known; did you mean 'answer'"),
        ({"goal": "g", "Answer": "x", "trajectory": "a x"}, None, "'Answer' is not known; did you mean 'answer'"),
        ({"goal": "g", "mesages": ASKED}, None, "'mesages' is not known; did you mean 'messages'"),
        ({"goal": "g", "messages": [{**ASKED[2], "wieght": 0}]}, None, "message 0 .*did you mean 'weight'"),
        ({"goal": "g", "messages": [USER, {**ASKED[2], "weight": 0.5}]}, None, "message 1 .* has weight 0.5"),
        ({"goal": "g", "messages": [USER, {**ASKED[2], "weight": 0}]}, None, "assistant's whose weight is not 0"),
        (
            {"goal": "g", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            None,
            "message 0 .* has a part of type 'image_url' in its content",
        ),
        (
            {"goal": "g", "conversations": [{"from": "human"}]},
            None,
            "message 0 of field 'conversations' must have text",
        ),
        ({"goal": "g", "prompt": "a", "completion": ASKED}, None, "must both be text, or both lists of messages"),
        ({"goal": "g", "prompt": "a", "completion": "b", "answer": "a"}, None, "does not occur in 'completion'"),
        ({"messages": 3}, "system", "field 'messages' must be a list"),
        ({"system": "s", "messages": [{"role": [], "content": "x"}]}, "system", "message 0 .* has no 'role'"),
        ({"goal": "g", "conversations": [{"from": {}, "value": "x"}]}, None, "message 0 .* has no 'role'"),
        ({"goal": "g", "messages": ASKED, "tools": "none"}, None, "field 'tools' must be a list of objects"),
        ({"goal": "g", "instruction": 3, "output": "x"}, None, "'instruction' and 'input' must be text"),
        ({"goal": "g", "messages": ASKED, "answer": "Rain"}, None, "field 'answer' is in no message"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(tmp_path, row, goal_from, complaint):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{complaint}"):
        one(tmp_path, row, goal_from)


@pytest.mark.parametrize(
    "name, value",
    [("answer_id", "a"), ("message", [1]), ("answers", ["a"]), ("id", 3), ("final_answer", "a"), ("source", "a")],
)
def test_other_columns_stay_allowed(tmp_path, name, value):
    assert one(tmp_path, {"goal": "g", "trajectory": "x", name: value}).trajectory == "x"


def test_content_parts_calls_and_weights_as_openai_writes_them(tmp_path, template):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": CALL}
    told = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    row = {"goal": "g", "messages": [USER, said, told, {"role": "assistant", "content": parts}]}
    found = one(tmp_path, row)
    text, spans = scored_text(found, template)
    first, second = (text[a:b] for a, b in spans)
    assert json.loads(first.removesuffix("<|im_end|>")) == CALL and second == "Hello<|im_end|>"
    off = {**row, "messages": [USER, {**said, "weight": 0}, told, {"role": "assistant", "content": parts, "weight": 1}]}
    text, spans = scored_text(one(tmp_path, off), template)
    assert [text[a:b] for a, b in spans] == ["Hello<|im_end|>"]
    assert one(tmp_path, found.row()).messages == found.messages
    legacy = {"role": "assistant", "content": None, "function_call": CALL[0]["function"]}
    for message in (said, legacy):
        for answer in ("Zürich", '{"city": "Zürich"}', '{"city":"Z\\u00fcrich"}', "weather"):
            got = one(tmp_path, {"goal": "g", "answer": answer, "messages": [USER, message]})
            text, ((start, stop),) = scored_text(got, template)
            assert start >= text.index("assistant") and stop - start >= len("Zürich")
    with pytest.raises(ValueError, match="field 'answer' is in no message"):
        one(tmp_path, {"goal": "g", "answer": '{"city": "Zug"}', "messages": [USER, said]})


GOOD = {"goal": "Answer in French \u2028 please 🙂", "trajectory": "Q: 2+2?\nA: quatre 👩‍👩‍👧"}


@pytest.mark.parametrize(
    "name, data, places",
    [
        ("pretty.json", json.dumps(GOOD, indent=2), [""]),
        ("list.json", json.dumps([GOOD, GOOD], indent=1), ["[0]", "[1]"]),
        ("wrapped.json", json.dumps({"version": 1, "data": [GOOD, GOOD]}, indent=2), [" data[0]", " data[1]"]),
        ("line.jsonl", json.dumps({"data": [GOOD]}), [" data[0]"]),
        ("record.jsonl", json.dumps({**GOOD, "data": [{"id": 3}]}), [":1"]),
        ("bom.jsonl", "\ufeff" + json.dumps(GOOD) + "\r\n\r\n" + json.dumps(GOOD) + "\r\n", [":1", ":3"]),
    ],
)
def test_files_of_json_in_other_layouts(tmp_path, name, data, places):
    (tmp_path / name).write_bytes(data.encode())
    found = read_goals(str(tmp_path / name))
    assert [record.where for record in found] == [f"{tmp_path / name}{place}" for place in places]
    assert all((record.goal, record.trajectory) == tuple(GOOD.values()) for record in found)


@pytest.mark.parametrize(
    "data, complaint",
    [
        (
            '{"goal": "a", "trajectory": "b"}\n{"goal": "a", "trajectory": "b c", "score": NaN}',
            ":2: NaN is no JSON value",
        ),
        ('{"goal": "a", "trajectory": "b c", "score": -Infinity}', ":1: -Infinity is no JSON value"),
        ('{\n "goal": "a",\n "trajectory": "b",,\n}', ":3: not JSON"),
        ('{"goal": "a"\n{"goal": "b", "trajectory": "x"}', ":1: not JSON"),
        ('{"goal": "a", "trajectory": "b"} {"goal": "a", "trajectory": "b"}', ":1: not JSON"),
        ('{"data": []}', ":1: field 'goal' is missing"),
    ],
)
def test_files_that_are_wrong_are_refused_by_line(tmp_path, data, complaint):
    (tmp_path / "bad.jsonl").write_text(data + "\n")
    with pytest.raises(ValueError, match=f"bad.jsonl{complaint}"):
        read_goals(str(tmp_path / "bad.jsonl"))


def test_tables_are_read_by_datasets(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text('\ufeffgoal,trajectory,answer,id\n007,"NA, ""b""\nx",,3\nnull,12 a,a,4\n')
    first, second = read_goals(str(tmp_path / "a.csv"))
    assert (first.goal, first.trajectory, first.answer) == ("007", 'NA, "b"\nx', None)
    assert (second.goal, second.answer) == ("null", "a") and second.where.endswith("a.csv[1]")
    (tmp_path / "b.tsv").write_text("task\tmessages\nx\t" + json.dumps(ASKED).replace('"', '""').join('""') + "\n")
    assert roles(read_goals(str(tmp_path / "b.tsv"), goal_from="task")[0])[1:] == [
        ("user", USER["content"]),
        ("assistant", "Sunny."),
    ]
    # A table's rows have every field of every row, None where they have none.
    rows: list[dict] = [
        {"goal": "g", "answer": None, "messages": [USER, {"role": "assistant", "content": None, "tool_calls": CALL}]}
    ]
    rows.append({"goal": "h", "answer": "Sunny", "messages": [USER, {**ASKED[2], "weight": 1}]})
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    calls, plain = read_goals(str(tmp_path / "*.parquet"))
    assert calls.messages[1]["tool_calls"] == CALL and plain.answer == "Sunny" and "weight" not in plain.messages[1]
    (tmp_path / "d.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"d\.parquet: cannot be read as \.parquet"):
        read_goals(str(tmp_path / "d.parquet"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"a\.csv: \.csv files are read with .* pip install 'sidestream\[hub\]'"):
        read_goals(str(tmp_path / "a.csv"))


CITIES = ["Oslo", "Lima", "Rome", "Bern", "Cairo", "Quito"]


def test_a_model_that_is_trained_on_chats_ends_its_turns(tmp_path, capsys):
    """Wholly, on system messages as goals; the eos token is learned as the end of an answer is."""
    base, data, out = save(tmp_path / "base"), tmp_path / "chats.jsonl", tmp_path / "run"
    chats = [
        [
            {"role": "system", "content": f"The trip goes to {city}."},
            {"role": "user", "content": "Where to?"},
            {"role": "assistant", "content": f"To {city}."},
        ]
        for city in CITIES
    ]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    words, given = load_tokenizer(base), read_goals(str(data), goal_from="system")
    read = tokens(given[0], chat_template(words), offsets(words, special=False))
    ends = [i for i, scored in zip(read.ids, read.scored, strict=True) if scored]
    assert ends[-1] == words.eos_token_id and words.decode(ends).count("<|im_end|>") == 1
    cli.main(
        ["train", "--full", f"--model={base}", f"--data={data}", f"--out={out}", "--goal_from=system", "--steps=70"]
        + ["--goal_steps=50", "--batch_size=6", "--window=48", "--width=32", "--learning_rate=6e-3", "--base_rate=1.0"]
    )
    told = capsys.readouterr()
    assert "generation_config stops" not in told.err and f"--data {data} --goal_from system" in told.out
    model = sidestream.load(out)
    prompt = chat_template(words)([{"role": "user", "content": "Where to?"}], prompt=True)
    ids = words(prompt, return_tensors="pt", add_special_tokens=False)
    for city in CITIES:
        made = model.generate(**ids, goal=f"The trip goes to {city}.", max_new_tokens=20, do_sample=False)
        assert words.decode(made[0, ids["input_ids"].shape[1] :]) == f"To {city}.<|im_end|>"
    assert cli.main(["eval", f"--model={out}", f"--data={data}", "--goal_from=system", "--window=48"]) == 0


def test_train_says_where_generate_would_not_stop(tmp_path, capsys):
    base, data = save(tmp_path / "base"), tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"goal": "g", "messages": ASKED}) + "\n")
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"goal": "g", "trajectory": "one two three"}) + "\n")
    lm = load_base(base)
    words = [f"--model={base}", "--steps=1", "--goal_steps=0", "--batch_size=1", "--window=8", "--width=8"]
    for eos, file, note in ((None, data, "stops at nothing"), (5, data, "stops at .* [(]5[)]"), (5, plain, None)):
        lm.generation_config.eos_token_id = eos
        lm.generation_config.save_pretrained(base)
        name = f"run{eos}{file.stem}"
        cli.main(["train", *words, f"--data={file}", f"--out={tmp_path / name}"])
        said = " ".join(capsys.readouterr().err.split())
        wanted = r"end in '<\|im_end\|>' \(0\), and the model's generation_config {}: generate would go on"
        found = re.search(wanted.format(note), said)
        assert found if note else "generation_config" not in said
    words = load_tokenizer(base)
    words.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    words.eos_token = None
    assert "end in no token of their own" in _unheard_ends(read_goals(str(data)), lm, words)
