"""Tables of goals on real text: what each arm sees, that all are asked the same, and whole runs at smoke scale."""

import gzip
import json

import pytest
import torch

from sidestream import attach, cli
from sidestream.evaluation.scoring import asked_tokens, read_goals, score, view_of
from sidestream.experiments.results import load_results
from sidestream.papers import goals, goals_needle
from sidestream.tasks.goals import Tokens
from sidestream.tasks.needle import needles
from tiny_model import llama, save, shuffled_tokens

W, VOCABULARY = 12, 60
TEXT = Tokens(tuple(shuffled_tokens(30, VOCABULARY, 1)), (False, *[True] * 29))
HEADS = [shuffled_tokens(n, VOCABULARY, 2 + k) for k, n in enumerate((3, 5, 5))]


@pytest.fixture(scope="module")
def model():
    return attach(llama(VOCABULARY)).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def shops(tmp_path_factory):
    """Sessions whose goals are as different as needles'."""
    path = tmp_path_factory.mktemp("runs") / "shop.jsonl.gz"
    made = needles("train", 20, words=(10, 14))
    lines = [
        json.dumps({"goal": one.goal, "steps": [{"action": "search", "observation": one.trajectory}]}) for one in made
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return str(path)


def by_hand(model, ids, wanted):
    """Nats of the last tokens of one plain forward."""
    with torch.no_grad():
        told = model.lm(torch.tensor([ids])).logits[0, -len(wanted) :].log_softmax(-1)
    return -told.gather(1, torch.tensor(wanted)[:, None]).sum().item()


def test_pinned_is_the_goal_in_front_of_the_full_window(model):
    """By hand, one forward each, over windows and goals of several lengths in one call; another goal is not."""
    asked = asked_tokens(TEXT, W, 5)
    assert len(asked) == W - 5, "as many as the window has room for beside the longest goal"
    states = read_goals(model, HEADS)
    pinned = [view_of("pinned", TEXT, [], W, asked, goal=k) for k in range(3)]
    free = [view_of("text_free", TEXT, head, W, asked) for head in HEADS]
    found = score(model, [*pinned, *free, pinned[0]], states)
    wanted, window = TEXT.ids[-len(asked) :], TEXT.ids[-1 - W : -1]
    for k, head in enumerate(HEADS):
        told = by_hand(model, [*head, *window], wanted)
        assert found[k].loss == pytest.approx(told, abs=1e-4) == found[3 + k].loss
        assert found[k].tokens == len(asked) and found[k].said == found[3 + k].said
    assert found[-1] == found[0] and abs(found[0].loss - found[1].loss) > 0.1
    (closed,) = score(model, [view_of("none", TEXT, [], W, asked)])
    assert closed.loss == pytest.approx(by_hand(model, window, wanted), abs=1e-4) and closed.loss != found[0].loss


def test_every_arm_is_asked_the_same_tokens():
    asked = asked_tokens(TEXT, W, max(map(len, HEADS)))
    wanted = [TEXT.ids[at] for at in sorted(asked)]
    for arm in ("none", "sinks", "text", "text_free", "reinserted", "pinned"):
        for head in HEADS:
            view = view_of(arm, TEXT, head, W, asked, room=W - 5)
            assert [token for token, on in zip(view.wanted, view.scored, strict=True) if on] == wanted, arm
            assert view.wanted[:-1] == view.ids[1:] and len(view.ids) <= W + (len(head) if arm == "text_free" else 0)


def test_what_a_goal_costs_the_window():
    asked, head = asked_tokens(TEXT, W, 5), HEADS[1]
    text = view_of("text", TEXT, head, W, asked)
    assert text.ids == (*head, *TEXT.ids[-1 - (W - 5) : -1]) and text.spent == 5
    sinks = view_of("sinks", TEXT, head, W, asked)
    assert sinks.ids == (*head[:4], *TEXT.ids[-1 - (W - 4) : -1])
    assert view_of("text", TEXT, shuffled_tokens(20, VOCABULARY), W, asked).spent == W // 2
    again = view_of("reinserted", TEXT, head, W, asked, every=9)  # back before token 27: two tokens of text follow
    assert again.ids == (*TEXT.ids[22:27], *head, *TEXT.ids[27:29]) and again.spent == 5
    assert view_of("pinned", TEXT, head, W, asked, goal=0).spent == 0


def test_a_goal_is_read_once(model, monkeypatch):
    read = []
    encode = model.encode_goal
    monkeypatch.setattr(model, "encode_goal", lambda goal: read.append(len(goal)) or encode(goal))
    states = read_goals(model, [HEADS[0], HEADS[1], HEADS[0], HEADS[2], HEADS[1]])
    assert sorted(read) == [1, 2] and torch.equal(states[0].keys, states[2].keys)
    assert not torch.equal(states[1].keys, states[3].keys)


def test_goals_offered():
    texts = ["a", "b", "a", "c", "d"]
    for row, who in enumerate(goals.offered_goals(texts, 3, 0)):
        assert who[0] == row and len({texts[k] for k in who}) == 3
    assert goals.offered_goals(texts, 3, 0) != goals.offered_goals(texts, 3, 1)
    with pytest.raises(ValueError, match="4 different goals, and 5 candidates"):
        goals.offered_goals(texts, 5, 0)


def cells(path):
    return {(cell["arm"], cell["metric"]): cell for cell in load_results(path / "results.json")["cells"]}


def test_needle_at_smoke(base, tmp_path):
    words = ["--scale", "smoke", "--model", base, "--out", str(tmp_path / "run"), "--window", "48"]
    assert cli.main(["run", "goals.needle_pinned", *words]) == 0
    found = cells(tmp_path / "run")
    assert {arm for arm, _ in found} == {"none", "sinks", "text", "text_free", "reinserted", "pinned", "another"}
    value = {key: cell["value"] for key, cell in found.items()}
    assert value["pinned", "loss"] == pytest.approx(value["text_free", "loss"], abs=1e-4)
    assert value["pinned", "loss"] != value["another", "loss"] != value["none", "loss"]
    assert value["pinned", "goal_tokens"] == 0 < value["text", "goal_tokens"] <= 24
    assert value["none", "tokens_spent"] == 0 < value["pinned", "tokens_spent"] < value["reinserted", "tokens_spent"]
    assert {arm for arm, metric in found if metric == "tokens_per_s"} == {"none", "text", "reinserted", "pinned"}


def test_runs_at_smoke(base, shops, tmp_path, capsys):
    words = ["--scale", "smoke", "--model", base, "--data", shops, "--test", "0.9", "--window", "48"]
    assert cli.main(["run", "goals.webshop_pinned", *words, "--out", str(tmp_path / "run")]) == 0
    found = cells(tmp_path / "run")
    value = {key: cell["value"] for key, cell in found.items()}
    assert value["pinned", "margin"] == pytest.approx(value["text_free", "margin"], abs=1e-3)
    assert value["text_free", "relative"] == 1 and value["pinned", "relative"] == pytest.approx(1, abs=1e-3)
    assert value["text", "relative"] == pytest.approx(value["text", "margin"] / value["text_free", "margin"])
    assert ("none", "margin") not in found and ("words", "margin") not in found
    assert {"top1", "pairs", "reciprocal_rank"} <= {metric for arm, metric in found if arm == "words"}
    # With three candidates, each judged under the next one's goal, the three margins of a run cancel out.
    assert abs(value["another", "margin"] - value["pinned", "margin"]) > 1e-3
    assert cli.main(["run", "goals.tau_pinned", "--scale", "smoke", "--model", base]) == 2
    assert "needs a file of agent runs; give it as --data" in capsys.readouterr().err
    assert cli.main(["run", "goals.webshop_pinned", *words, "--arms", "[channel]"]) == 2
    assert "give its folder as --run" in capsys.readouterr().err


def test_ties_are_no_success(base, shops, tmp_path):
    """By hand on losses: the right goal must be better than every other."""
    work = goals.RunsWork(goals.runs("goals.webshop_pinned", "smoke"), tmp_path)
    told = {
        one.metric: one.values for one in work._ranks("pinned", [[1.0, 2.0, 3.0], [1.0, 1.0, 3.0], [2.0, 1.0, 1.5]])
    }
    assert told == {"top1": [1, 0, 0], "pairs": [1, 0.75, 0], "reciprocal_rank": [1, 1 / 2, 1 / 3]}


def test_a_sentence_states_another_answer(base, tmp_path):
    settings = goals_needle.override("smoke")
    work = goals_needle.OverrideWork(settings, tmp_path)
    for mine, theirs in work.asked("answered"):
        assert mine.answer != theirs.answer and mine.goal == theirs.goal
        assert mine.trajectory.removesuffix(mine.answer) == theirs.trajectory.removesuffix(theirs.answer)
        assert mine.trajectory.count("Question:") == 2 and theirs.answer in mine.trajectory
    assert all(mine.trajectory.count("Question:") == 1 for mine, _ in work.asked(goals_needle.NO_SENTENCE))
    words = [
        "--scale",
        "smoke",
        "--model",
        base,
        "--out",
        str(tmp_path / "run"),
        "--sentences",
        "[restate,no sentence]",
    ]
    assert cli.main(["run", "goals.override", *words]) == 0
    found = load_results(tmp_path / "run" / "results.json")["cells"]
    assert {cell["where"]["sentence"] for cell in found} == {"restate", "no sentence"}
    for place in range(0, len(found), 3):
        assert sum(cell["value"] for cell in found[place : place + 3]) == pytest.approx(1)
