"""A text that goes on is never closed, whatever the tokenizer appends, and special tokens stand once, at the front."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

import sidestream
from families import close, open_gate
from sidestream import GoalConfig, attach, cli
from sidestream.evaluation.goals import _row
from sidestream.lm.attach import AttachedLM
from sidestream.lm.models.base import offsets
from sidestream.lm.texts.prompts import chat_ids, opening, prompt_ids
from sidestream.tasks.goals import GoalRecord, Tokens
from sidestream.tasks.goals import tokens as record_tokens
from tiny_model import llama, tokenizer, write_goals

ENDS = {"none": "$A", "bos": "<s> $A", "eos": "$A </s>", "both": "<s> $A </s>", "many": "<s> <s> $A </s> </s>"}


def with_ends(kind):
    """A tokenizer that puts these around every text."""
    made = tokenizer()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    made.pad_token = "</s>"
    pairs = [(name, made.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    made._tokenizer.post_processor = processors.TemplateProcessing(single=ENDS[kind], special_tokens=pairs)
    return made


MADE = {kind: with_ends(kind) for kind in ENDS}
BOS, EOS = MADE["both"].bos_token_id, MADE["both"].eos_token_id
FRONT = {"none": [], "bos": [BOS], "eos": [], "both": [BOS], "many": [BOS, BOS]}


@pytest.mark.parametrize("kind", ENDS)
@given(text=st.text(max_size=12))
def test_a_prompt_is_opened_once_and_never_closed(kind, text):
    words = MADE[kind]
    bare = words(text, add_special_tokens=False)["input_ids"]
    assert prompt_ids(words, text) == FRONT[kind] + bare
    if kind in ("none", "bos"):
        assert prompt_ids(words, text) == words(text)["input_ids"], "an ordinary tokenizer's ids changed"
    ids, places = offsets(words, special=True)(text)
    assert ids == FRONT[kind] + bare and len(places) == len(ids)


def test_the_check_is_about_something():
    assert MADE["both"]("Hi")["input_ids"][-1] == EOS
    assert [opening(MADE[kind]) for kind in ENDS] == list(FRONT.values())


def test_what_the_text_brings_itself_is_not_put_there_again():
    words = MADE["both"]
    assert words("<s>Hi")["input_ids"][:2] == [BOS, BOS]
    assert prompt_ids(words, "<s>Hi") == prompt_ids(words, "Hi")
    assert prompt_ids(words, "Hi</s>") == [*prompt_ids(words, "Hi"), EOS], "the user's own end is the user's"
    words.chat_template = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    try:
        assert chat_ids(words, [{"role": "user", "content": "Hi"}]) == prompt_ids(words, "Hi")
    finally:
        words.chat_template = None


def test_goals_are_read_as_they_are_trained_on():
    open_, closed = MADE["bos"], MADE["both"]
    model = open_gate(attach(llama(len(closed)), goal=GoalConfig(width=16), tokenizer=closed))
    ids = open_("go to Oslo")["input_ids"]
    close(model.encode_goal("go to Oslo").goal, model.encode_goal([ids]).goal)
    assert not torch.allclose(
        model.encode_goal([closed("go to Oslo")["input_ids"]]).goal, model.encode_goal([ids]).goal
    )


def test_nothing_stands_between_goal_and_text_in_a_window():
    """The arm that puts the goal's text at the head of the window: begin token, goal, text."""
    words = MADE["both"]
    record = GoalRecord("1", "go to Oslo", "Where? To Oslo", (), None)
    text = record_tokens(record, None, offsets(words, special=True))
    head = prompt_ids(words, record.goal + "\n")
    row = _row(text, head, 64, "in_text", opening=opening(words))
    assert row.ids == head + list(text.ids[1:-1])
    assert row.ids.count(BOS) == 1 and EOS not in row.ids
    alone = _row(text, [], 64, "channel", opening=opening(words))
    assert alone.ids == list(text.ids[:-1])
    assert [w for w, s in zip(row.wanted, row.scored, strict=True) if s] == [
        w for w, s in zip(alone.wanted, alone.scored, strict=True) if s
    ], "the arms score other tokens"
    # A text that begins otherwise, and a window that does not reach back to the beginning, lose nothing.
    bare = Tokens((7, 8, 9, 10), (False, True, True, True))
    assert _row(bare, [5], 64, "in_text", opening=[BOS]).ids == [5, 7, 8, 9]
    assert _row(text, head, 8, "in_text", opening=[BOS]).ids == head[:4] + list(text.ids[-5:-1])


@pytest.mark.parametrize("kind", ["eos", "both"])
def test_the_commands_never_close_a_prompt(kind, tmp_path, monkeypatch, capsys):
    words = with_ends(kind)
    llama(len(words)).save_pretrained(tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    data = write_goals(tmp_path / "goals.jsonl", 6)
    seen = []
    inner = AttachedLM.generate
    monkeypatch.setattr(
        AttachedLM, "generate", lambda self, ids, **more: (seen.append(ids), inner(self, ids, **more))[1]
    )
    quick = ["--steps=1", "--goal_steps=1", "--batch_size=2", "--window=32", "--width=8"]
    run = str(tmp_path / "run")
    assert cli.main(["train", "--model", str(tmp_path / "base"), "--data", str(data), "--out", run, *quick]) == 0
    assert cli.main(["eval", "--model", run, "--data", str(data)]) == 0
    told = ["generate", "--model", run, "--goal", "go to Oslo", "--prompt", "Where? To", "--max_new_tokens", "2"]
    assert cli.main(told) == 0 and cli.main([*told, "--chat", "true"]) == 0
    assert seen[0].tolist() == [FRONT[kind] + words("Where? To", add_special_tokens=False)["input_ids"]]
    assert seen[1][0, -1] != EOS and BOS not in seen[1]


def test_more_tokens_than_embeddings_are_told_at_once(tmp_path, capsys):
    words = tokenizer()
    lm = llama(len(words) - 2)
    with pytest.raises(
        ValueError, match=r"the tokenizer has 400 tokens and LlamaForCausalLM embeddings for 398: they do"
    ):
        attach(lm, goal=GoalConfig(width=16), tokenizer=words)
    assert not lm._forward_pre_hooks
    lm.save_pretrained(tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    data = write_goals(tmp_path / "goals.jsonl", 4)
    out = tmp_path / "run"
    assert cli.main(["train", "--model", str(tmp_path / "base"), "--data", str(data), "--out", str(out)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert "400 tokens" in error[-1] and "398" in error[-1] and not out.exists()
    lm.resize_token_embeddings(len(words))
    assert sidestream.attach(lm, goal=GoalConfig(width=16), tokenizer=words).tokenizer is words
