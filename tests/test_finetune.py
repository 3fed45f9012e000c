"""A channel for a model that exists: what trains, what stays, resume, the files, and that goals are learned."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import sidestream
from sidestream import cli
from sidestream.evaluation.goals import _other_goals, goal_cells, goal_outcomes
from sidestream.lm.models.base import load_base, load_tokenizer, offsets, pooled_goals
from sidestream.lm.saving.card import push_to_hub, shown_name, write_card
from sidestream.tasks import goals_agents
from sidestream.tasks.goals import GoalRecord, Tokens, read_goals, tokens
from sidestream.training import loop
from sidestream.training.finetune import FinetuneConfig, GoalLM, GoalRows, attach_channel, collate_goals, finetune
from tiny_model import llama, save, tokenizer, write_goals

SMALL = FinetuneConfig(
    window=24, width=16, goal_steps=5, steps=4, batch_size=4, save_every=2, log_every=1, learning_rate=1e-2
)
WORDS = ["--window=24", "--width=16", "--goal_steps=5", "--steps=4", "--batch_size=4", "--save_every=2"]


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def goals(tmp_path_factory):
    return write_goals(tmp_path_factory.mktemp("goals") / "goals.jsonl")


@pytest.fixture(scope="module")
def records(goals):
    return read_goals(str(goals))


def fresh(words):
    return llama(len(words))


def losses(directory):
    return [json.loads(line)["loss"] for line in (directory / "train" / "metrics.jsonl").read_text().splitlines()]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.channel.state_dict().items()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


# ---------------------------------------------------------------- training


def test_the_base_stays_and_reads_the_goals_itself(words, records, tmp_path):
    lm, before = fresh(words), fresh(words).state_dict()
    model = finetune(lm, words, records, SMALL, tmp_path)
    assert model.encoder is None and model.lm is lm, "a second copy of the base model"
    assert same(before, lm.state_dict())
    assert model.channel.film.projection.weight.abs().max() > 0
    kept = GoalLM(model, 4).state_dict()
    assert all(name.startswith("model.channel.") for name in kept)
    assert (tmp_path / "train" / "final" / "model.safetensors").stat().st_size < 2 * sum(
        4 * tensor.numel() for tensor in kept.values()
    )


def test_stopped_at_any_moment_it_ends_with_the_same_weights(words, records, tmp_path, monkeypatch):
    whole = finetune(fresh(words), words, records, SMALL, tmp_path / "whole")
    add = loop._StageTrainer.compute_loss
    calls = []

    def stops(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return add(self, *args, **kwargs)

    monkeypatch.setattr(loop._StageTrainer, "compute_loss", stops)
    with pytest.raises(KeyboardInterrupt):
        finetune(fresh(words), words, records, SMALL, tmp_path / "stopped")
    assert (tmp_path / "stopped" / "train" / "checkpoint-2").is_dir()
    resumed = finetune(fresh(words), words, records, SMALL, tmp_path / "stopped", resume=True)
    assert same(weights(whole), weights(resumed)) and losses(tmp_path / "whole") == losses(tmp_path / "stopped")
    other = finetune(fresh(words), words, records, replace(SMALL, seed=1), tmp_path / "other")
    assert not same(weights(whole), weights(other))


@pytest.mark.slow
def test_parts_of_a_step_give_the_step(words, records, tmp_path):
    whole = finetune(fresh(words), words, records, SMALL, tmp_path / "whole")
    parts = finetune(fresh(words), words, records, replace(SMALL, accumulate=4), tmp_path / "parts")
    torch.testing.assert_close(losses(tmp_path / "whole"), losses(tmp_path / "parts"), atol=1e-5, rtol=1e-5)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(tensor, weights(parts)[name], atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="batch_size 4 does not divide into 1 process.es. x 3 part"):
        finetune(fresh(words), words, records, replace(SMALL, accumulate=3), tmp_path / "odd")


@pytest.mark.slow
def test_recomputed_blocks_and_bf16(words, records, tmp_path):
    one = replace(SMALL, steps=2)
    plain = finetune(fresh(words), words, records, one, tmp_path / "plain")
    again = finetune(fresh(words), words, records, replace(one, gradient_checkpointing=True), tmp_path / "again")
    assert same(weights(plain), weights(again))
    finetune(fresh(words), words, records, replace(one, precision="bf16"), tmp_path / "bf16")
    served = finetune(fresh(words).to(torch.bfloat16), words, records, one, tmp_path / "narrow")
    assert served.lm.dtype == torch.bfloat16 and served.channel.film.projection.weight.dtype == torch.float32
    assert abs(losses(tmp_path / "narrow")[0] - losses(tmp_path / "plain")[0]) < 0.1
    first, narrow = losses(tmp_path / "plain")[0], losses(tmp_path / "bf16")[0]
    assert first != narrow and abs(first - narrow) < 0.1


def test_rows_hold_the_last_window_and_count_the_whole_step(words):
    text = tokens(GoalRecord("here", "g", "one " * 60 + "Oslo", (), "Oslo"), None, offsets(words, special=True))
    free = Tokens(text.ids, (False, *[True] * (len(text.ids) - 1)))
    rows = GoalRows([text, free], torch.zeros(2, 3), window=16, batch_size=4, steps=3, seed=0)
    assert len(rows) == 12
    counts = []
    for index in range(12):
        row = rows[index]
        assert len(row["ids"]) == len(row["labels"]) == 16
        scored = [label for label in row["labels"] if label != -100]
        counts.append(len(scored))
        if rows.order[index] == 0:  # the answer, and nothing before it
            assert scored == [i for i, s in zip(text.ids, text.scored, strict=True) if s]
        else:
            assert len(scored) == 16
    assert [rows[index]["count"] for index in range(12)] == [sum(counts[i // 4 * 4 :][:4]) for i in range(12)]
    batch = collate_goals([rows[0], rows[1]])
    assert batch["pooled"].shape == (2, 3) and batch["count"].tolist() == [rows[0]["count"]] * 2


@pytest.mark.slow
def test_eight_goals_are_learned_by_the_channel_alone(words, tmp_path):
    """The base model is random and frozen: what it says right it has from the vector, and from the right one."""
    write_goals(tmp_path / "eight.jsonl", 8, words=[30, 40], facts=["colour"])
    eight = read_goals(str(tmp_path / "eight.jsonl"))
    config = replace(SMALL, window=12, goal_steps=100, steps=60, batch_size=8, learning_rate=3e-3)
    model = finetune(fresh(words), words, eight, config, tmp_path / "run")
    texts = [tokens(record, None, offsets(words, special=True)) for record in eight]
    found = goal_outcomes(
        model, texts, [words(r.goal)["input_ids"] for r in eight], window=12, arms=("channel", "closed", "swapped")
    )
    right = {arm: sum(outcome.right == outcome.tokens for outcome in outcomes) for arm, outcomes in found.items()}
    assert right["channel"] == 8 and right["closed"] <= 1, right
    different = sum(eight[k].answer != eight[(k + 1) % 8].answer for k in range(8))
    assert different >= 5 and right["swapped"] <= 8 - different
    cells = {(cell["arm"], cell["metric"]): cell for cell in goal_cells(found, {"W": 12}, exact=True)}
    assert cells["channel", "accuracy"]["value"] == 1.0 and cells["channel", "accuracy"]["ci"][0] > 0.6
    low, high = cells["closed", "loss"]["ci"]
    assert cells["channel", "loss"]["value"] < low <= cells["closed", "loss"]["value"] <= high


def test_evaluation_puts_the_goal_into_the_window_and_says_what_it_costs(words, records):
    model = attach_channel(fresh(words), SMALL, words)
    texts = [tokens(record, None, offsets(words, special=True)) for record in records[:6]]
    ids = [words(record.goal)["input_ids"] for record in records[:6]]
    found = goal_outcomes(model, texts, ids, window=16, arms=("channel", "closed", "in_text", "sinks"), batch_size=4)
    # A fresh channel is the identity.
    assert [o.loss for o in found["channel"]] == pytest.approx([o.loss for o in found["closed"]], abs=1e-5)
    assert [o.goal_tokens for o in found["in_text"]] == [8] * 6 and found["closed"][0].goal_tokens == 0
    assert [o.goal_tokens for o in found["sinks"]] == [4] * 6
    assert found["in_text"][0].loss != pytest.approx(found["closed"][0].loss, abs=1e-3)
    # By hand: the last 16 tokens before the last one, and nothing else.
    text = texts[0]
    row = torch.tensor([text.ids[-17:-1]])
    scores = model.lm(row).logits[0].log_softmax(-1)
    wanted = sum(float(-scores[k - len(text.ids) + 16, text.ids[k]]) for k in range(len(text.ids)) if text.scored[k])
    assert found["closed"][0].loss == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(ValueError, match="unknown arm 'open'"):
        goal_outcomes(model, texts, ids, window=16, arms=("open",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="5 goals for 6"):
        goal_outcomes(model, texts, ids[:5], window=16)


def test_pooled_goals_are_each_goals_own_mean(words, records):
    model = attach_channel(fresh(words), SMALL, words)
    ids = [words(record.goal)["input_ids"] for record in records[:3]]
    pooled = pooled_goals(model, ids)
    for row, one in zip(pooled, ids, strict=True):
        torch.testing.assert_close(row, model.goal_hidden(torch.tensor([one])).mean(1)[0], atol=1e-5, rtol=1e-5)
    assert (pooled[0] - pooled[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"method": "half"}, "method is 'half'"),
        ({"method": "full", "pool_layer": -1}, "needs a pool_layer counted from the front"),
        ({"window": 1}, "window is 1; it must be at least 2"),
        ({"goal_steps": -1}, "goal_steps is -1"),
        ({"base_rate": 0.0}, "base_rate is 0.0"),
    ],
)
def test_settings_that_make_no_sense(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        FinetuneConfig(**changes)


def test_film_on_the_last_blocks_only(words):
    model = attach_channel(fresh(words), replace(SMALL, film_blocks=1), words)
    assert model.sites == ["model.layers.2.mlp"] and model.channel.config.num_blocks == 1
    with pytest.raises(ValueError, match="film_blocks is 4; LlamaForCausalLM has 3 blocks"):
        attach_channel(fresh(words), replace(SMALL, film_blocks=4), words)


# ---------------------------------------------------------------- the command line and its files


def test_train_eval_load_and_another_base(base, goals, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ["train", "--model", str(base), "--data", str(goals), "--out", "run", *WORDS]
    assert cli.main(train) == 0
    out, err = capsys.readouterr()
    assert "saved run" in out and "24 records; LlamaForCausalLM" in err and "frozen; one process on cpu, 4 rows" in err
    assert cli.main(train) == 2
    assert "already holds this run; add --resume" in capsys.readouterr().err
    before = sidestream.load("run").channel.film.projection.weight.clone()
    assert cli.main([*train, "--resume"]) == 0
    model = sidestream.load("run")  # knows neither class nor place of the base
    assert torch.equal(model.channel.film.projection.weight, before) and model.tokenizer is not None
    closed, opened = model(torch.tensor([[5, 6, 7]])), model(torch.tensor([[5, 6, 7]]), goal="The trip goes to Oslo.")
    assert (closed.logits - opened.logits).abs().max() > 1e-4
    capsys.readouterr()
    assert cli.main(["eval", "--model", "run", "--data", str(goals), "--limit", "6"]) == 0
    out = capsys.readouterr().out
    assert "n = 6, W = 24" in out and "goal in the channel" in out and "%" in out
    found = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert {cell["arm"] for cell in found["cells"]} == {"channel", "closed", "swapped", "in_text"}
    card = (tmp_path / "run" / "README.md").read_text()
    for fact in ("sha256 `", "sidestream train --model", "## Safety", "| accuracy | channel | 24 |", base.name):
        assert fact in card, fact
    assert f"# Goal channel for {base.name}\n" in card
    other = save(tmp_path / "other", seed=1)
    assert cli.main(["eval", "--model", "run", "--data", str(goals), "--base", str(other)]) == 2
    assert "was trained on another base" in capsys.readouterr().err


def test_what_is_refused_leaves_its_folder_as_it_was(base, goals, tmp_path, capsys, monkeypatch):
    """The command put right must not meet the remains of the wrong one."""
    monkeypatch.chdir(tmp_path)
    lines = goals.read_text().splitlines()
    far = json.dumps({"goal": "far " * 300, "trajectory": "a long way"})
    for wrong, complaint in (
        ({"--film_blocks": "9"}, "film_blocks is 9"),
        ({"--data": [*lines, '{"goal": "w", "trajectory": "x"}']}, "no token to score"),
        ({"--data": [far, *lines]}, "wrong.jsonl:1: field 'goal' has"),
        ({"--trigger": "@@@"}, "the trigger '@@@' is in no token"),
    ):
        options = {"--model": str(base), "--data": str(goals), "--out": "run", **wrong}
        if isinstance(options["--data"], list):
            (tmp_path / "wrong.jsonl").write_text("\n".join(options["--data"]))
            options["--data"] = "wrong.jsonl"
        assert cli.main(["train", *(word for pair in options.items() for word in pair), *WORDS]) == 2
        (line,) = [line for line in capsys.readouterr().err.split("\n") if line and "Loading weights" not in line]
        assert complaint in line
        assert not (tmp_path / "run").exists()
    right = ["train", "--model", str(base), "--data", str(goals), "--out", "run", *WORDS]
    assert cli.main([*right, "--resume"]) == 0
    assert "run holds no run yet: this one begins there" in capsys.readouterr().err


def test_a_damaged_base_is_told_of(base, tmp_path):
    shutil.copytree(base, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ValueError, match="cannot load the model .*cut.*incomplete metadata"):
        load_base(tmp_path / "cut")


def test_swapped_is_another_goal_or_none(base, goals, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--model", str(base), "--data", str(goals), "--out", "run", *WORDS]) == 0
    row = json.loads(goals.read_text().splitlines()[0])
    (tmp_path / "one.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    capsys.readouterr()
    assert cli.main(["eval", "--model", "run", "--data", "one.jsonl"]) == 0
    assert "there is no other to swap it for" in capsys.readouterr().err
    cells = json.loads((tmp_path / "run" / "eval.json").read_text())["cells"]
    assert {cell["arm"] for cell in cells} == {"channel", "closed", "in_text"}
    assert _other_goals([[1], [1], [2], [1]]) == [2, 2, 3, 2]


# peft 0.21 asks transformers 5.24 by a name that this one is about to drop.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("method", ["lora", "full"])
def test_adapters_and_trained_bases_come_back(method, base, goals, tmp_path):
    pytest.importorskip("peft")
    out = tmp_path / "run"
    assert (
        cli.main(["train", "--model", str(base), "--data", str(goals), "--out", str(out), f"--{method}", *WORDS]) == 0
    )
    model, start = sidestream.load(out), load_base(base)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert (model(ids).logits - start(ids).logits).abs().max() > 1e-4, "the base has not trained"
    # What reads goals has not moved: embeddings and the first block.
    reads = [n for n in start.state_dict() if "embed" in n or "layers.0." in n]
    assert len(reads) > 5 and all(torch.equal(model.lm.state_dict()[n], start.state_dict()[n]) for n in reads)
    if method == "lora":
        from peft import PeftModel

        plain = PeftModel.from_pretrained(load_base(base), str(out / "adapter")).eval()
        torch.testing.assert_close(plain(input_ids=ids).logits, model(ids).logits)
        assert all(".lora_" in n or n.startswith("channel.") for n, p in model.named_parameters() if p.requires_grad)
        with pytest.raises(ValueError, match="was trained on another base"):
            sidestream.load(out, llama(len(tokenizer()), seed=1))
    else:
        with pytest.raises(ValueError, match="was trained on another base"):
            sidestream.load(out, start)


@pytest.mark.parametrize(
    "extra, complaint",
    [
        (["--lora", "--full"], "exclude each other"),
        (["--processes", "2"], "--processes 2 and WORLD_SIZE is 1: start it with torchrun --nproc_per_node 2"),
        (["--dtype", "int8"], "use float32 or bfloat16"),
        (["--dtype", "bfloat16", "--full"], "with --full use --precision bf16"),
        (["--stepz", "3"], "unknown field --stepz, did you mean '--steps'?"),
        (["--steps", "three"], "--steps must be a whole number; got 'three'"),
        (["--model", "nowhere"], "cannot load the tokenizer of 'nowhere'"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
    ],
)
def test_mistakes_are_one_line(extra, complaint, base, goals, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--model", str(base), "--data", str(goals), *WORDS, *extra]) == 2
    out, err = capsys.readouterr()
    assert complaint in err and err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_what_is_pushed_names_no_folder_of_this_machine(base, words, tmp_path, monkeypatch):
    model = attach_channel(load_base(base), SMALL, load_tokenizer(base))
    model.save_pretrained(tmp_path / "run")
    sent = {}

    class Hub:
        def create_repo(self, repo_id, **options):
            sent["options"] = options
            return f"hub/{repo_id}"

        def upload_folder(self, **given):
            sent["folder"] = given

        def upload_file(self, *, path_in_repo, path_or_fileobj, **_):
            sent[path_in_repo] = path_or_fileobj.decode()

    monkeypatch.setattr("sidestream.lm.saving.card.HfApi", Hub)
    assert push_to_hub(tmp_path / "run", "owner/name") == "hub/owner/name" and sent["options"]["private"]
    assert str(base) in (tmp_path / "run" / "sidestream.json").read_text()
    assert (
        str(base) not in sent["sidestream.json"] and json.loads(sent["sidestream.json"])["base"]["name_or_path"] == ""
    )
    assert str(base.parent) not in (tmp_path / "run" / "README.md").read_text()
    assert (
        "channel.safetensors" in sent["folder"]["allow_patterns"] and "train/*" not in sent["folder"]["allow_patterns"]
    )
    assert shown_name("owner/name") == "owner/name" and shown_name(str(base)) == base.name
    with pytest.raises(ValueError, match="not a saved channel"):
        write_card(tmp_path)


def test_agent_runs_become_records_without_their_goal(tmp_path):
    shop = {"goal": "a red hat ", "steps": [{"action": "reset", "observation": "Instruction: a red hat"}]}
    tau = {
        "goal": "fly",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "find", "arguments": "{}"}]},
        ],
    }
    house = {"goal": "put it away.", "text": "Your task is to: put it away.\n> go"}
    for name, read, record, text in (
        ("shop", goals_agents.webshop, shop, "> reset\nInstruction: ..."),
        ("tau", goals_agents.tau_bench, tau, "user: Hi\nassistant: find({})"),
        ("house", goals_agents.alfworld, house, "Your task is to: ...\n> go"),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(record))
        (made,) = read(path)
        assert (made.goal, made.trajectory) == (str(record["goal"]).strip(), text)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"goal": "x", "steps": [{"action": "a"}]}))
    with pytest.raises(ValueError, match=r"bad.jsonl:1: each of 'steps' needs 'action' and 'observation'"):
        goals_agents.webshop(tmp_path / "bad.jsonl")
    many = [GoalRecord("", f"goal {k % 40}", "text", (), None) for k in range(80)]
    train, test = goals_agents.part(many, "train"), goals_agents.part(many, "test")
    assert len(train) + len(test) == 80 and train and test and not {r.goal for r in train} & {r.goal for r in test}
