"""A dynamic channel for a model that exists: the vector follows the text, also what of it has left the window."""

import json
import random
from dataclasses import replace

import pytest
import torch

import sidestream
from sidestream import cli
from sidestream.evaluation.goals import goal_outcomes
from sidestream.lm.decoding.cache import Window
from sidestream.lm.models.base import load_base, load_tokenizer, offsets, pooled_goals
from sidestream.tasks.goals import GoalRecord, read_goals, tokens
from sidestream.training.finetune import (
    FinetuneConfig,
    GoalLM,
    GoalRows,
    attach_channel,
    collate_goals,
    finetune,
    trigger_ids,
)
from tiny_model import llama, save, tokenizer, write_goals

W = 8
SMALL = FinetuneConfig(window=W, width=16, goal_steps=5, steps=4, batch_size=4, save_every=2, trigger=".")
WORDS = [f"--window={W}", "--width=16", "--goal_steps=5", "--steps=4", "--batch_size=4", "--save_every=2"]


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.fixture(scope="module")
def model(words):
    """Open as after training: random FiLM, and a tracker that moves the vector."""
    made = attach_channel(llama(len(words)), SMALL, words)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        made.channel.tracker.alpha.fill_(0.7)
        for parameter in made.channel.film.parameters():
            parameter.normal_(std=0.3, generator=draw)
    return made


def texts_of(words, *texts):
    return [tokens(GoalRecord("here", "g", text, (), None), None, offsets(words, special=True)) for text in texts]


TEXTS = ("The red suitcase. It went to Lima. Then one two three four five six seven", "To Oslo. A code word, then. Red")
GOALS = ("The trip goes to Oslo.", "The code word is apple.")


def test_every_token_that_has_the_trigger_in_it(words):
    found = trigger_ids(words, ".")
    assert found and all("." in words.decode([token]) for token in found)
    assert not any("." in words.decode([token]) for token in set(range(len(words))) - set(found))
    for text in TEXTS:
        ids = words(text).input_ids
        assert sum(token in found for token in ids) == sum("." in words.decode([token]) for token in ids) > 1
    with pytest.raises(ValueError, match="the trigger 'no such word' is in no token"):
        trigger_ids(words, "no such word")


def test_training_rows_have_the_vectors_that_generate_has(words, model):
    """Row by row against the cached model with its window, which reads the text from the first token on."""
    texts = texts_of(words, *TEXTS)
    goal_ids = [words(goal).input_ids for goal in GOALS]
    rows = GoalRows(texts, pooled_goals(model, goal_ids), window=W, batch_size=2, steps=3, seed=0, whole=True)
    objective = GoalLM(model, 2)
    moved = 0
    for start in (0, 2, 4):
        batch = [rows[start], rows[start + 1]]
        total = 0.0
        for row, which in zip(batch, rows.order[start : start + 2], strict=True):
            cache = model.new_cache(GOALS[which], window=Window(size=W, policy="reindex"))
            with torch.no_grad():
                whole = model(torch.tensor([row["full"]]), cache=cache).logits[0]
                scores = whole[-len(row["labels"]) :].log_softmax(-1)
                bare = model(torch.tensor([row["ids"]]), goal=GOALS[which]).logits[0].log_softmax(-1)
            scored = [(at, label) for at, label in enumerate(row["labels"]) if label >= 0]
            total -= sum(float(scores[at, label]) for at, label in scored)
            moved += row["first"] > 0 and abs(sum(float(scores[at, y] - bare[at, y]) for at, y in scored)) > 1e-2
        loss = objective(**collate_goals(batch))["loss"]
        assert loss.item() == pytest.approx(total / batch[0]["count"], rel=1e-4)
    assert moved, "what left the window makes no difference"
    loss.backward()
    trained = [(name, p.grad) for name, p in objective.named_parameters() if p.requires_grad]
    assert all(grad is not None for _, grad in trained), "DDP would wait for it"
    assert any("tracker.alpha" in name and grad.abs() > 0 for name, grad in trained)


def test_evaluation_reads_the_text_before_the_window(words, model):
    texts = texts_of(words, *TEXTS)
    goal_ids = [words(goal).input_ids for goal in GOALS]
    found = goal_outcomes(model, texts, goal_ids, window=W, arms=("channel", "closed"))
    for text, goal, outcome in zip(texts, GOALS, found["channel"], strict=True):
        cache = model.new_cache(goal, window=Window(size=W, policy="reindex"))
        with torch.no_grad():
            scores = model(torch.tensor([text.ids[:-1]]), cache=cache).logits[0, -W:].log_softmax(-1)
        wanted = -scores.gather(1, torch.tensor(text.ids[-W:])[:, None]).sum()
        assert outcome.loss == pytest.approx(float(wanted), rel=1e-4)
    # Another beginning, long out of the window: the same for a closed channel, not for one that has read it.
    other = texts_of(words, TEXTS[0].replace("red", "blue").replace("Lima", "Oslo"), TEXTS[1])
    again = goal_outcomes(model, other, goal_ids, window=W, arms=("channel", "closed"))
    assert again["closed"][0].loss == pytest.approx(found["closed"][0].loss, abs=1e-5)
    assert abs(again["channel"][0].loss - found["channel"][0].loss) > 1e-3


def test_train_resume_eval_generate_load(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "base")
    write_goals(tmp_path / "goals.jsonl")
    train = ["train", "--model", "base", "--data", "goals.jsonl", "--dynamic", *WORDS]
    assert cli.main([*train, "--trigger", ".", "--out", "run"]) == 0
    assert "W = 8, the vector follows the text at each '.'" in capsys.readouterr().err
    model = sidestream.load("run")
    assert model.channel.config.mode == "dynamic" and model.channel.tracker.alpha.abs().item() > 1e-3
    assert model.channel.config.trigger_ids == trigger_ids(model.tokenizer, ".")
    before = {name: tensor.clone() for name, tensor in model.channel.state_dict().items()}
    assert cli.main([*train, "--trigger", ".", "--out", "run", "--resume"]) == 0
    assert all(torch.equal(t, before[n]) for n, t in sidestream.load("run").channel.state_dict().items())
    assert cli.main(["eval", "--model", "run", "--data", "goals.jsonl", "--limit", "4"]) == 0
    assert "goal in the channel" in capsys.readouterr().out
    asked = ["generate", "--model", "run", "--window", "8", "--goal", GOALS[0], "--max_new_tokens", "6"]
    assert cli.main([*asked, "--prompt", TEXTS[0]]) == 0
    ids = model.tokenizer(TEXTS[0], return_tensors="pt").input_ids
    window = Window(size=8, policy="reindex")
    said = model.generate(ids, goal=GOALS[0], window=window, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert capsys.readouterr().out == model.tokenizer.decode(said, skip_special_tokens=True) + "\n"
    assert cli.main([*train, "--trigger", "no such word", "--out", "other"]) == 2
    assert "'no such word' is in no token" in capsys.readouterr().err


def test_dynamic_alone_means_the_comma(words, tmp_path):
    save(tmp_path / "base")
    write_goals(tmp_path / "goals.jsonl")
    run = tmp_path / "run"
    train = ["train", "--model", str(tmp_path / "base"), "--data", str(tmp_path / "goals.jsonl"), *WORDS, "--dynamic"]
    assert cli.main([*train, "--out", str(run)]) == 0
    assert json.loads((run / "experiment.json").read_text())["config"]["trigger"] == ","
    assert sidestream.load(run).channel.config.trigger_ids == trigger_ids(words, ",") != trigger_ids(words, ".")
    records = read_goals(str(tmp_path / "goals.jsonl"))
    with pytest.raises(ValueError, match="the trigger '~' is in no trajectory"):
        finetune(llama(len(words)), words, records, replace(SMALL, trigger="~"), tmp_path / "other")


def test_recomputed_blocks_give_the_same_weights(words, tmp_path):
    write_goals(tmp_path / "goals.jsonl")
    records = read_goals(str(tmp_path / "goals.jsonl"))
    plain = finetune(llama(len(words)), words, records, SMALL, tmp_path / "plain")
    recomputing = replace(SMALL, gradient_checkpointing=True)
    again = finetune(llama(len(words)), words, records, recomputing, tmp_path / "again")
    static = finetune(llama(len(words)), words, records, replace(SMALL, trigger=""), tmp_path / "static")
    assert all(torch.equal(t, again.channel.state_dict()[name]) for name, t in plain.channel.state_dict().items())
    assert static.channel.tracker is None
    assert not torch.equal(static.channel.film.projection.weight, plain.channel.film.projection.weight)


@pytest.mark.slow
def test_a_fact_of_the_text_outlives_its_window(words, tmp_path):
    """The goal says nothing; the text says it once, out of the window: only a vector that follows can know."""
    rng = random.Random(0)
    colours = ("red", "blue", "green", "black")
    records = []
    for k in range(16):
        colour = colours[k % 4]
        filler = " ".join(rng.choice(("one", "two", "three", "four")) for _ in range(12))
        text = f"The suitcase is {colour}. {filler} The suitcase is {colour}"
        records.append(GoalRecord(f"{k}", "Remember the colour.", text, (), colour))
    config = replace(SMALL, width=32, goal_steps=0, steps=150, batch_size=16, learning_rate=3e-3)
    scores = {}
    for trigger in (".", ""):
        model = finetune(
            llama(len(words)), words, records, replace(config, trigger=trigger), tmp_path / f"run{trigger}"
        )
        texts = [tokens(record, None, offsets(words, special=True)) for record in records]
        found = goal_outcomes(
            model, texts, [words(record.goal).input_ids for record in records], window=W, arms=("channel",)
        )
        scores[trigger] = sum(outcome.right == outcome.tokens for outcome in found["channel"])
    assert scores["."] == 16 and scores[""] <= 8, scores


def test_adapters_train_beside_a_tracker(tmp_path):
    """The tracker reads with the base model as it is at that step; what comes back is what was trained."""
    pytest.importorskip("peft")
    base, out = save(tmp_path / "base"), tmp_path / "run"
    write_goals(tmp_path / "goals.jsonl")
    records = read_goals(str(tmp_path / "goals.jsonl"))
    config = replace(SMALL, method="lora", steps=2, learning_rate=1e-2)
    model = finetune(load_base(base), load_tokenizer(base), records, config, out)
    model.save_pretrained(out)
    ids = torch.tensor([model.tokenizer(TEXTS[0]).input_ids])
    with torch.no_grad():
        said, again = (m(ids, goal=GOALS[0]).logits for m in (model, sidestream.load(out)))
    torch.testing.assert_close(said, again)
