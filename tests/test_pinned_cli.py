"""The commands that need no training: a goal pinned by a base model, compiled, talked to, and measured."""

import io
import json

import pytest
import torch

import sidestream
from sidestream import GoalConfig, Window, attach, cli
from sidestream.commands.generate import plain_text
from sidestream.evaluation.goals import Outcome, goal_cells, goal_outcomes
from sidestream.lm.models.base import load_base, load_tokenizer
from sidestream.lm.texts.conversation import Chat
from sidestream.lm.texts.prompts import prompt_ids
from sidestream.tasks.goals import Tokens
from tiny_model import llama, save, tokenizer, write_goals

GOAL = "Answer in French."
PROMPT = "Where does the trip go?"
ASKED = ["--prompt", PROMPT, "--window", "12", "--max_new_tokens", "6"]
KW = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
WINDOW = Window(size=12, policy="reindex")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pinned")
    save(folder / "base")
    (folder / "policy.txt").write_text(GOAL)
    (folder / "key").write_text("ab" * 32)
    (folder / "other").write_text("cd" * 32)
    write_goals(folder / "goals.jsonl", 6)
    return folder


@pytest.fixture(scope="module")
def model(here):
    return attach(load_base(here / "base").eval(), tokenizer=load_tokenizer(here / "base"))


@pytest.fixture
def call(here, capsys, monkeypatch):
    monkeypatch.chdir(here)

    def called(command, *words, model="base"):
        capsys.readouterr()
        status = cli.main([command, "--model", model, *words])
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if line and "Loading weights" not in line]
        return status, said.out, errors

    return called


def told(model, ids, goal, window=WINDOW):
    out = model.generate(torch.tensor([ids]), goal=goal, window=window, **KW)
    return model.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True) + "\n"


def test_a_base_model_pins_the_goal_as_a_line_in_front(call, model):
    status, said, _ = call("generate", "--goal", GOAL, *ASKED)
    ids = model.tokenizer(PROMPT).input_ids
    assert status == 0 and said == told(model, ids, [model.tokenizer(GOAL + "\n").input_ids])
    assert said != call("generate", *ASKED)[1]
    assert said == call("generate", "--goal", GOAL + "\n", *ASKED)[1]


def test_the_text_begins_once(model):
    """With a tokenizer that puts a token in front, goal and prompt are one text."""
    from tokenizers.processors import TemplateProcessing

    words = tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    words.bos_token = "<|im_start|>"
    model = attach(llama(len(words)), tokenizer=words)
    state, ids = plain_text(model, GOAL, PROMPT)
    assert [*state.entry_ids[0].tolist(), *ids] == prompt_ids(words, GOAL + "\n") + prompt_ids(words, PROMPT)[1:]
    assert plain_text(model, None, PROMPT)[1] == prompt_ids(words, PROMPT)


def test_a_run_holds_its_goal_in_the_channel_and_with_pinned_both_ways(call, here):
    base = load_base(here / "base")
    made = attach(base, goal=GoalConfig(width=8), tokenizer=load_tokenizer(here / "base"))
    with torch.no_grad():
        for parameter in made.channel.film.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    made.save_pretrained(here / "run")
    made.detach()
    vector = call("generate", "--goal", GOAL, *ASKED, model="run")[1]
    both = call("generate", "--goal", GOAL, *ASKED, "--pinned", model="run")[1]
    again = sidestream.load(here / "run", pinned=True)
    state, ids = plain_text(again, GOAL, PROMPT)
    close = dict(atol=1e-5, rtol=0)
    torch.testing.assert_close(state.goal, again.encode_goal(GOAL).goal, **close)  # as it was trained: no line break
    assert both == told(again, ids, state) != vector
    status, _, errors = call("generate", "--goal_file", "policy.txt", *ASKED, model="run")
    assert status == 2 and "this run keeps goals in its channel; give --pinned" in errors[0]


@pytest.mark.parametrize("chat", [[], ["--chat"]], ids=["plain", "chat"])
def test_a_compiled_goal_is_the_goal(call, chat):
    for precision in ("float32", "int8"):
        options = ["--precision", precision, "--key_file", "key", *chat]
        status, said, _ = call("compile-goal", "--goal", "policy.txt", "--out", f"{precision}.safetensors", *options)
        assert status == 0 and f"{precision}.safetensors: " in said and "entries" in said and "loaded again in" in said
    signed = ["--goal_file", "float32.safetensors", "--key_file", "key"]
    assert call("generate", *signed, *chat, *ASKED)[1] == call("generate", "--goal", GOAL, *chat, *ASKED)[1]
    assert call("generate", *signed[:-1], "other", *ASKED)[2][0].count("signed with another key")
    assert call("compile-goal", "--goal_text", GOAL, "--out", "inline.safetensors", *chat)[0] == 0
    assert "is not signed" in call("generate", "--goal_file", "inline.safetensors", *signed[2:], *ASKED)[2][0]


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["generate", "--goal", "x", "--goal_file", "f", *ASKED], "--goal and --goal_file exclude each other"),
        (["generate", "--key_file", "key", *ASKED], "give --goal_file with it"),
        (["generate", "--goal_file", "f", "--key_file", "key", "--key_env", "K", *ASKED], "exclude each other"),
        (["generate", "--goal_file", "nowhere", *ASKED], "nowhere: there is no such goal file"),
        (["generate", "--goal_file", "policy.txt", *ASKED], "policy.txt is no goal file"),
        (["generate", "--goal", "far " * 300, *ASKED], "made for 256; shorten it"),
        (["generate", "--goal", "far " * 124, *ASKED], "and a window of 12 need more than the 256 positions"),
        (["generate", "--base", "base", *ASKED], "--base is for what `sidestream train` wrote"),
        (["generate", "--goal", "x", "--prompt", "x", "--window", "1"], "Window.size is 1 tokens"),
        (["generate", "--goal", "x", "--prompt", "x", "--max_new_tokens", "0"], "--max_new_tokens is 0"),
        (["compile-goal", "--out", "f"], "give the goal once"),
        (["compile-goal", "--goal", "nowhere.txt", "--out", "f"], "nowhere.txt: there is no such file"),
        (["compile-goal", "--goal_text", "x", "--out", "f", "--precision", "fp8"], "precision is 'fp8'; use float32"),
        (["compile-goal", "--goal_text", "x"], "--out is missing"),
        (["compile-goal", "--goal", "/dev/null", "--out", "f"], "/dev/null is empty"),
        (["eval", "--data", "goals.jsonl", "--arms", "[channel]"], "this model has none; use 'pinned'"),
        (["eval", "--data", "goals.jsonl", "--every", "0"], "--every is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_line(call, words, complaint):
    status, _, errors = call(*words)
    errors = [line for line in errors if not line.startswith("note:")]
    assert status == 2 and len(errors) == 1 and complaint in errors[0], errors


def test_a_folder_without_a_model_says_what_is_missing(call, here):
    (here / "empty").mkdir(exist_ok=True)
    assert "empty is no model: it holds neither sidestream.json" in call("generate", *ASKED, model="empty")[2][0]


# ---------------------------------------------------------------- a conversation through a pipe

TALK = f"""{PROMPT}
And then?
/goal Eat well.
/nothing
/window none
/window 1

Where now?
/goal
/window 16
/help
Thanks.
/window
/quit
not read
"""


def test_a_conversation_in_the_terminal(call, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TALK))
    status, said, errors = call("generate", "--chat", "--goal", GOAL, "--window", "24", "--max_new_tokens", "6")
    chat = Chat(model, GOAL, window=Window(size=24, policy="reindex"))
    answers = [chat.say(PROMPT, **KW), chat.say("And then?", **KW)]
    pinned = chat.goal_tokens
    before = f"{chat.tokens} tokens, {chat.gone} have left the window of 24, {pinned} pinned"
    chat.set_goal("Eat well.")
    answers.append(chat.say("Where now?", **KW))
    chat.set_goal(None)
    chat.set_window(Window(size=16, policy="reindex"))
    answers.append(chat.say("Thanks.", **KW))
    assert status == 0 and [line.strip() for line in said.split("\n")[:-1]] == answers
    assert errors[0] == f"0 tokens, 0 have left the window of 24, {pinned} pinned; /help says what can be typed"
    assert errors[2] == before and chat.gone > 0
    complaints = [line for line in errors if line.startswith("sidestream: ")]
    assert len(complaints) == 3 and "'/nothing'" in complaints[0] and "got 'none'" in complaints[1]
    assert f"{chat.tokens} tokens, {chat.gone} have left the window of 16, 0 pinned" in errors
    assert errors[-1] == f"{chat.tokens} tokens, no window, 0 pinned"
    assert "not read" not in str(errors)


def test_a_channel_holds_a_conversation_too(call, here, monkeypatch):
    if not (here / "run").exists():
        test_a_run_holds_its_goal_in_the_channel_and_with_pinned_both_ways(call, here)
    spoken = {}
    for orders in ("", "/goal Eat well.\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{orders}{PROMPT}\n"))
        status, spoken[orders], errors = call(
            "generate", "--chat", "--goal", GOAL, "--max_new_tokens", "6", model="run"
        )
        assert status == 0 and errors[-1].endswith("no window, the goal is in the channel")
    assert len(set(spoken.values())) == 2


# ---------------------------------------------------------------- eval


def test_eval_needs_no_training(call, here):
    status, said, _ = call("eval", "--data", "goals.jsonl", "--window", "24", "--out", "found.json")
    assert status == 0
    cells = json.loads((here / "found.json").read_text())["cells"]
    by = {(cell["arm"], cell["metric"]): cell["value"] for cell in cells}
    assert {arm for arm, _ in by} == {"pinned", "closed", "swapped", "in_text", "reinserted", "sinks"}
    assert by["pinned", "goal_tokens"] == 0 < by["reinserted", "goal_tokens"] and by["in_text", "goal_tokens"] == 12
    assert len({by[arm, "loss"] for arm in ("pinned", "closed", "swapped", "in_text")}) == 4
    assert call("eval", "--data", "goals.jsonl", "--window", "24", "--arms", "[pinned,closed]")[0] == 0
    assert (here / "eval.json").exists() and not (here / "base" / "eval.json").exists()


def test_pinned_is_the_goal_before_the_whole_window(model):
    ids = torch.randint(5, 380, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    text, goal = Tokens(tuple(ids), (False, *[True] * 39)), [7, 8, 9, 10]
    found = goal_outcomes(
        model, [text], [goal], window=16, arms=("pinned", "closed", "in_text", "reinserted"), every=10
    )

    def loss(head, count, first=0):
        with torch.no_grad():
            seen = torch.tensor([[*head, *ids[39 - count : 39]]])
            scores = model.lm(seen).logits[0, len(head) :].log_softmax(-1)
        return -sum(float(scores[k, ids[40 - count + k]]) for k in range(first, count))

    assert found["pinned"][0].loss == pytest.approx(loss(goal, 16), rel=1e-4)
    assert found["closed"][0].loss == pytest.approx(loss([], 16), rel=1e-4)
    assert found["in_text"][0].loss == pytest.approx(loss(goal, 12), rel=1e-4)
    # The stream of `reinserted`: 0-9, goal, 10-19, goal, 20-29, goal, 30-38, so 16 places hold 27-29, goal, 30-38.
    assert found["reinserted"][0].goal_tokens == 4 and found["reinserted"][0].tokens == 12
    # The tokens that all four score are what in_text leaves, from place 28 on.
    assert {arm: outcome[0].shared_tokens for arm, outcome in found.items()} == dict.fromkeys(found, 12)
    assert found["pinned"][0].shared_loss == pytest.approx(loss(goal, 16, first=4), rel=1e-4)


def test_the_relative_score_is_a_share_of_what_the_text_is_worth():
    def outcomes(loss, right):
        return [Outcome(2 * loss, 2, right, 0, loss, 1)]

    found = {
        "pinned": outcomes(1.5, 2),
        "closed": outcomes(4.0, 0),
        "in_text": outcomes(2.0, 2),
        "sinks": outcomes(3.0, 1),
    }
    cells = {(cell["arm"], cell["metric"]): cell["value"] for cell in goal_cells(found, {"W": 8}, exact=True)}
    shares = {arm: cells[arm, "relative"] for arm in found}
    assert shares == pytest.approx({"pinned": 1.25, "closed": 0.0, "in_text": 1.0, "sinks": 0.5})
    assert cells["pinned", "relative_accuracy"] == 1.0 and cells["sinks", "relative_accuracy"] == 0.0
    nothing = goal_cells({**found, "in_text": outcomes(4.5, 0)}, {"W": 8}, exact=True)
    assert not [cell for cell in nothing if cell["metric"].startswith("relative")]


def test_arms_that_a_model_does_not_have_are_named(model):
    text = Tokens((5, 6, 7), (False, True, True))
    vector = attach(llama(60), goal=GoalConfig(width=8))
    with pytest.raises(ValueError, match="arm 'pinned' pins goals, and this model does not"):
        goal_outcomes(vector, [text], [[8]], window=8, arms=("pinned",))
    with pytest.raises(ValueError, match="arm 'channel' needs a goal channel"):
        goal_outcomes(model, [text], [[8]], window=8)
    with pytest.raises(ValueError, match="need more than the 256 positions"):
        goal_outcomes(model, [text], [[8] * 255], window=8, arms=("pinned",))
