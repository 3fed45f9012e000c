"""Blocksworld through a model: rows and crops, vectors of whole texts, the batched closed loop, Table 3 at smoke."""

import random
from itertools import islice
from pathlib import Path

import pytest
import torch

from sidestream.channels import GoalConfig, LatentState
from sidestream.evaluation.planning import run_episodes
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.backbones import Backbone
from sidestream.lm.text import WordVocabulary
from sidestream.papers.planning import noise_like, paper_table3, run_table3, table3
from sidestream.tasks.base import Example
from sidestream.tasks.blocksworld_data import TRIGGER, WORDS, BlocksworldConfig, PlanExample, examples
from sidestream.tasks.blocksworld_loop import make_episode
from sidestream.training.loop import LoopConfig, train
from sidestream.training.objectives import UNSCORED
from sidestream.training.planning import PlanLM, PlanRowConfig, PlanRows, collate_plans, plan_row, plan_vectors
from sidestream.training.stages import pooled_states

VOCABULARY = WordVocabulary(WORDS)
CONFIG = BlocksworldConfig(blocks=(4,), budgets=(0,))


@pytest.fixture(scope="module")
def plans() -> list[PlanExample]:
    return list(islice(examples(CONFIG, "train", 8), 8))


def encoded(plans: list[PlanExample]) -> list[Example]:
    return [plan.encoded(VOCABULARY.encode) for plan in plans]


def model(mode: str, seed: int = 0, history: int = 1) -> AttachedLM:
    torch.manual_seed(seed)
    shape = Backbone(layers=2, width=48, heads=2)
    size = {"vocabulary": VOCABULARY.size, "window": 120, "pad_id": VOCABULARY.pad_id}
    decoder, base = shape.build(**size), shape.build(**size)
    triggers = tuple(VOCABULARY.encode(TRIGGER)) if mode == "dynamic" else ()
    config = GoalConfig(mode=mode, width=48, trigger_ids=triggers, tracker_heads=4, tracker_history=history)  # type: ignore[arg-type]
    return attach(decoder, goal=config, encoder=base)


def open_gates(model: AttachedLM) -> None:
    torch.nn.init.normal_(model.channel.film.projection.weight, std=0.5)
    if model.channel.tracker is not None:
        torch.nn.init.constant_(model.channel.tracker.alpha, 0.5)


def test_whole_rows_score_the_plan_and_nothing_else(plans: list[PlanExample]) -> None:
    for example in encoded(plans):
        row = plan_row(example, PlanRowConfig(), random.Random(0))
        text = [*example.goal_ids, *example.target_ids]
        assert row["ids"] == text[:-1] and row["first"] == 0
        scored = [label for label in row["labels"] if label != UNSCORED]
        assert scored == list(example.target_ids)
        everything = plan_row(example, PlanRowConfig(prompt_scored=True), random.Random(0))
        assert everything["labels"] == text[1:]


def test_crops_are_stretches_of_the_text_that_predict_some_of_the_plan(plans: list[PlanExample]) -> None:
    starts = set()
    for seed in range(40):
        for example in encoded(plans):
            row = plan_row(example, PlanRowConfig(windows=(16,)), random.Random(seed))
            first, text = row["first"], [*example.goal_ids, *example.target_ids]
            assert len(row["ids"]) == 16
            assert row["ids"] == text[first : first + 16]
            for place, label in enumerate(row["labels"]):
                assert label in (UNSCORED, text[first + place + 1])
                assert (label == UNSCORED) == (first + place + 1 < len(example.goal_ids))
            assert row["labels"][-1] != UNSCORED
            starts.add(first)
    assert len(starts) > 5


@pytest.mark.parametrize(("mode", "history"), [("static", 1), ("dynamic", 1), ("dynamic", 3)])
def test_training_sees_what_decoding_sees(plans: list[PlanExample], mode: str, history: int) -> None:
    """A crop with vectors from the whole text gives the logits that the windowed cache gives, step by step."""
    lm = model(mode, history=history).eval()
    open_gates(lm)
    row = plan_row(encoded(plans)[0], PlanRowConfig(), random.Random(0))
    batch = collate_plans([row])
    text, goal = torch.tensor([row["full"]]), row["goal"]
    with torch.no_grad():
        vectors = plan_vectors(lm, batch["full_ids"], batch["full_mask"], batch["goal_length"])
        crop = text[:, -17:-1]
        part = vectors[:, -17:-1] if vectors.shape[1] > 1 else vectors
        hidden = lm.hidden(crop, terms=lm.channel.film.terms(part))
        trained = lm.lm.get_output_embeddings()(hidden[:, -1])  # type: ignore[misc]
        cache = lm.new_cache(text[:, :goal], window=16)
        for token in text[0, :-1]:
            decoded = lm(input_ids=token.view(1, 1), cache=cache).logits[:, -1]
        closed = lm(input_ids=crop).logits[:, -1]
    assert torch.allclose(trained, decoded, atol=1e-4)
    assert not torch.allclose(trained, closed, atol=1e-2)


def fit(lm: AttachedLM, rows: list[Example], directory: Path, *, steered: bool) -> None:
    loop = LoopConfig(steps=900, batch_size=8, learning_rate=4e-3, save_every=1000)
    config = PlanRowConfig(windows=(16,))
    data = PlanRows(rows, config, batch_size=8, steps=loop.steps, seed=0)
    train(PlanLM(lm, steered=steered), data, loop, directory, seed=0, collate=collate_plans)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_overfits_eight_plans_past_the_window(mode: str, plans: list[PlanExample], tmp_path: Path) -> None:
    """With 16 tokens in view the prompt has gone: the vector carries 8 problems, and another's vector fails them."""
    lm = model(mode)
    # E_base is untrained: without this its pooled states are all but equal.
    lm.channel.encoder.calibrate(pooled_states(lm, [example.goal_ids for example in encoded(plans)]))
    fit(lm, encoded(plans), tmp_path / mode, steered=True)
    tests = [make_episode(plan.problem, perturbations=0, seed=k) for k, plan in enumerate(plans)]
    goals = lm.encode_goal([list(example.goal_ids) for example in encoded(plans)])
    scores = run_episodes(lm, tests, VOCABULARY, window=16, goals=goals, batch_size=5)
    # A static vector does not say how far the plan has come; where 16 tokens of it repeat, it cannot know either.
    needed = 8 if mode == "dynamic" else 7
    assert sum(score.success for score in scores) >= needed, [score.reason for score in scores]
    swapped = goals.select(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0]))
    wrong = run_episodes(lm, tests, VOCABULARY, window=16, goals=swapped)
    assert sum(score.success for score in wrong) <= 4
    one_by_one = [
        run_episodes(lm, [test], VOCABULARY, window=16, goals=goals.select(torch.tensor([k])))[0]
        for k, test in enumerate(tests)
    ]
    assert one_by_one == scores


def test_perturbations_are_shown_and_must_be_spent(plans: list[PlanExample]) -> None:
    """An untrained model fails, but never on a forced step: the simulator's words are fed, not judged."""
    lm = model("static").eval()
    tests = [make_episode(plan.problem, perturbations=1, seed=k) for k, plan in enumerate(plans)]
    tests = [test for test in tests if test.perturb_at == (0,)] or tests
    scores = run_episodes(lm, tests, VOCABULARY, window=0)
    assert not any(score.success for score in scores)
    first = [score for score, test in zip(scores, tests, strict=True) if test.perturb_at == (0,)]
    assert all(score.failed_at == 1 for score in first)


def test_noise_has_the_vectors_spread_and_nothing_of_them() -> None:
    goal = torch.randn(400, 8) * 3 + 5
    noise = noise_like(goal, 0)
    assert torch.equal(noise, noise_like(goal, 0))
    assert torch.allclose(noise.mean(0), goal.mean(0), atol=0.6) and torch.allclose(noise.std(0), goal.std(0), atol=0.5)
    assert abs(torch.corrcoef(torch.stack([noise.flatten(), (goal - goal.mean(0)).flatten()]))[0, 1]) < 0.1


def test_noise_changes_the_terms() -> None:
    lm = model("static").eval()
    open_gates(lm)
    honest = lm.encode_goal([[1, 2, 3], [3, 2, 1]])
    noisy = lm.encode_goal(LatentState(goal=noise_like(honest.goal, 0)))
    assert honest.terms is not None and noisy.terms is not None
    assert not torch.allclose(honest.terms, noisy.terms)


def test_table3_smoke_has_every_cell(tmp_path: Path) -> None:
    experiment = table3("smoke")
    results = run_table3(experiment, tmp_path / "run", command="sidestream run lsar.table3 --scale smoke", jobs=1)
    places = len(experiment.perturbations) + len(experiment.more_blocks)
    assert len(results["cells"]) == len(experiment.arms) * places * len(experiment.windows)
    assert all(cell["n"] == experiment.test_problems for cell in results["cells"])
    again = run_table3(experiment, tmp_path / "run", command="again", resume=True, jobs=1)
    assert again == results


def test_paper_values() -> None:
    assert paper_table3("dynamic", {"K": 1, "N": 5, "W": 0}) == 0.89
    assert paper_table3("static", {"K": 0, "N": 6, "W": 0}) == 0.0
    assert paper_table3("dynamic", {"K": 1, "N": 5, "W": 16}) is None
    assert paper_table3("random_film", {"K": 1, "N": 5, "W": 0}) is None
