"""The stock Trainer on an attached model: what it drops, saves, resumes and refuses."""

import json

import pytest
import torch
from transformers import Trainer, TrainingArguments

import sidestream
from families import open_gate, tiny
from sidestream import GoalConfig, attach
from sidestream.lm.saving.channel import CHECKPOINT_FILE, CONFIG_FILE, MODEL_FOLDER, WEIGHTS_FILE
from sidestream.training.batches import GoalCollator
from sidestream.training.finetune import GoalLM

ROWS = [{"input_ids": [5 + k, 6, 7, 8][: 3 + k % 2], "goal": [9 + k] * (1 + k % 3)} for k in range(8)]
COLLATE = GoalCollator(tokenizer=None)
# transformers 5.24 renamed gradient checkpointing to activation checkpointing.
RECOMPUTE = f"{'activation' if hasattr(TrainingArguments, 'activation_checkpointing') else 'gradient'}_checkpointing"
IDS = torch.tensor([[5, 6, 7, 8]])


def fresh(*, family="llama", frozen=True, tied=False):
    lm = tiny(family, tie_word_embeddings=tied).requires_grad_(not frozen)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return open_gate(attach(lm, goal=GoalConfig(width=16, encoder_hidden=24)), scale=0.05)


def trainer(model, folder, steps=2, **settings):
    quiet = dict(report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=4, learning_rate=1e-2)
    arguments = TrainingArguments(str(folder), max_steps=steps, **{**quiet, "save_strategy": "no", **settings})
    return Trainer(model, arguments, settings.get("collate", COLLATE), ROWS, eval_dataset=ROWS)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("frozen, tied", [(True, True), (True, False), (False, True), (False, False)])
def test_stopped_and_resumed_is_as_if_never_stopped(frozen, tied, tmp_path):
    """With default columns; the checkpoint is a folder for `load`, with the base where the base trains."""
    saving = dict(steps=4, save_strategy="steps", save_steps=2)
    whole = fresh(frozen=frozen, tied=tied)
    trainer(whole, tmp_path / "run", **saving).train()
    resumed = fresh(frozen=frozen, tied=tied)
    trainer(resumed, tmp_path / "run", **saving).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert same(state(whole), state(resumed))
    assert not same(state(whole), state(fresh(frozen=frozen, tied=tied)))
    folder = tmp_path / "run" / "checkpoint-4"
    assert (folder / MODEL_FOLDER).is_dir() is not frozen
    loaded = sidestream.load(folder, tiny("llama", tie_word_embeddings=tied) if frozen else None)
    assert torch.equal(loaded(IDS, goal=[[9]]).logits, whole.eval()(IDS, goal=[[9]]).logits)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    run = trainer(
        fresh(),
        tmp_path,
        steps=3,
        learning_rate=3.0,  # bad after the first step
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    run.train()
    best = sidestream.load(run.state.best_model_checkpoint, tiny("llama"))
    assert same(state(best.channel), state(run.model.channel))
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric)


def test_saved_files_and_what_a_plain_save_holds(tmp_path):
    model = fresh(tied=True)
    trainer(model, tmp_path / "run").save_model(str(tmp_path / "saved"))
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        CHECKPOINT_FILE,
        WEIGHTS_FILE,
        CONFIG_FILE,
        "training_args.bin",
    }
    model.save_pretrained(tmp_path / "plain")
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {WEIGHTS_FILE, CONFIG_FILE}
    model.save_pretrained(tmp_path / "other_rank", is_main_process=False)
    assert not (tmp_path / "other_rank").exists()


def test_the_loss_is_the_attached_models_and_gpt2_takes_no_loss_arguments(tmp_path):
    for family in ("llama", "gpt2", "opt"):
        model = fresh(family=family)
        run = trainer(model, tmp_path / family, steps=1, per_device_train_batch_size=8, learning_rate=0.0)
        batch = COLLATE(ROWS)
        expected = model.eval()(**batch).loss.item()
        assert run.train().training_loss == pytest.approx(expected, abs=1e-4)
        assert run.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)


def test_gradient_checkpointing_through_the_arguments(tmp_path):
    plain, recomputed = fresh(), fresh()
    trainer(plain, tmp_path / "plain").train()
    trainer(recomputed, tmp_path / "recomputed", **{RECOMPUTE: True}).train()
    assert recomputed.lm.model.gradient_checkpointing
    torch.testing.assert_close(state(plain), state(recomputed))
    asked = {RECOMPUTE: True, f"{RECOMPUTE}_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="use_reentrant=True recomputes without the latent state"):
        trainer(fresh(), tmp_path / "reentrant", **asked).train()
    objective = GoalLM(fresh(), 4)
    objective.activation_checkpointing_enable(activation_checkpointing_kwargs={})
    assert objective.model.lm.model.gradient_checkpointing
    with pytest.raises(ValueError, match="use_reentrant=True"):
        objective.gradient_checkpointing_enable({"use_reentrant": True})


def test_rows_without_what_training_needs_are_told_of(tmp_path):
    with pytest.raises(ValueError, match="no 'goal'; where Trainer took it out, set remove_unused_columns=False"):
        COLLATE([{"input_ids": [5, 6]}])
    with pytest.raises(ValueError, match="no 'input_ids' or 'text'"):
        COLLATE([{"goal": [5, 6]}])
    with pytest.raises(ValueError, match="1 labels for 2 tokens"):
        COLLATE([{"goal": [5], "input_ids": [5, 6], "labels": [5]}])
    batch = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(ValueError, match="came without goals, and the base model is frozen"):
        fresh().train()(**batch)
    assert fresh(frozen=False).train()(**batch).loss.requires_grad
    with torch.no_grad():
        fresh().train()(**batch)  # nobody means to train here


def test_the_collator_pads_what_is_real_and_scores_what_is_scored():
    rows = [
        {"goal": "one", "input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"goal": "another", "input_ids": torch.tensor([7, 8, 9]), "labels": [-100, 8, 9]},
    ]
    batch = COLLATE(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]] and batch["goal"] == ["one", "another"]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[5, 6, -100], [-100, 8, 9]]
    short = GoalCollator(tokenizer=None, max_length=2)(rows)
    assert short["input_ids"].tolist() == [[5, 6], [7, 8]] and short["labels"].tolist() == [[5, 6], [-100, 8]]


def test_an_attached_model_answers_as_a_pretrained_one(tmp_path):
    model = fresh()
    assert model.get_output_embeddings() is model.lm.lm_head and model.can_generate()
    assert model.get_input_embeddings() is model.lm.get_input_embeddings()
    model.generation_config.eos_token_id = 3
    assert model.lm.generation_config.eos_token_id == 3
    assert model.resize_token_embeddings(100).num_embeddings == 100
    below = model.base_model(IDS, goal=[[9]], attention_mask=torch.ones_like(IDS), use_cache=False)
    assert torch.equal(below.last_hidden_state, model.hidden(IDS, goal=[[9]]))
    with pytest.raises(ValueError, match="already carries a channel"):
        attach(model, goal=GoalConfig(width=16))
    with pytest.raises(ValueError, match="card.push_to_hub"):
        model.push_to_hub("me/mine")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["format"] == 1
    again = type(model).from_pretrained(tmp_path, tiny("llama"))
    assert torch.equal(again(IDS, goal=[[9]]).logits, model(IDS, goal=[[9]]).logits[..., :97])
