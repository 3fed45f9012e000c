"""LS-AR experiments: sizes of the models, what arms train on, windows at evaluation."""

import dataclasses

import pytest
import torch

from sidestream.channels import GoalConfig
from sidestream.experiments.settings import Scale
from sidestream.lm.attach import attach
from sidestream.lm.decoding.decode import greedy
from sidestream.lm.models.backbones import Backbone, parameter_count
from sidestream.lm.texts.text import Vocabulary
from sidestream.papers.lsar import recall
from sidestream.tasks import treasure


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.subset(treasure.vocabulary_texts())


@pytest.fixture(scope="module")
def problem(vocabulary: Vocabulary) -> treasure.TreasureProblem:
    return treasure.problems("valid", 1, [60], 0, vocabulary.encode)[0]


def test_paper_sizes() -> None:
    """LS-AR ~85M, baseline ~89M, small ~38M at the paper's vocabulary and window, within 2%."""
    experiment = recall.table1("paper")
    size = {"vocabulary": 50257, "window": experiment.window, "pad_id": 50256}
    with torch.device("meta"):
        base, decoder = experiment.encoder.build(**size), experiment.encoder.build(**size)
        model = attach(decoder, goal=GoalConfig(width=experiment.goal_width), encoder=base)
        large, small = experiment.baseline.build(**size), Backbone(layers=4).build(**size)
    assert parameter_count(base, decoder, model.channel) == pytest.approx(85e6, rel=0.02)
    assert parameter_count(large) == pytest.approx(89e6, rel=0.02)
    assert parameter_count(small) == pytest.approx(38e6, rel=0.02)


def test_paper_settings() -> None:
    experiment = recall.table1("paper")
    assert (experiment.window, experiment.train_problems, experiment.test_problems) == (500, 50_000, 500)
    assert {64, 128, 256, 512, 1024, 16384} <= set(experiment.horizons)
    assert (experiment.encoder.layers, experiment.encoder.width, experiment.baseline.layers) == (4, 512, 20)
    assert (experiment.stage1.learning_rate, experiment.stage2.learning_rate) == (1e-4, 2e-4)
    assert experiment.stage2.batch_size == 32 and experiment.stage2.clip == 1.0 and experiment.stage2.warmup == 0.1
    assert experiment.vocabulary == "bpe"


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_horizons_cover_the_window(scale: Scale, problem: treasure.TreasureProblem) -> None:
    """Every scale asks inside the window, at the cut prompt, just outside and at 2 W; cpu also far outside."""
    experiment = recall.table1(scale)
    window = experiment.window
    around = len(problem.trigger_ids) + len(problem.answer_ids)
    inside = window - around - len(problem.goal_ids)
    assert min(experiment.horizons) <= inside
    assert any(inside < h < window - len(problem.trigger_ids) for h in experiment.horizons)
    assert any(h == pytest.approx(1.25 * window, rel=0.03) or h == 512 for h in experiment.horizons)
    assert any(h == pytest.approx(2 * window, rel=0.03) for h in experiment.horizons)
    if scale != "smoke":
        assert max(experiment.horizons) >= 16 * window


def test_training_horizons_mix(problem: treasure.TreasureProblem) -> None:
    horizons = recall.training_horizons(48, problem)
    whole = 48 - len(problem.trigger_ids) - len(problem.answer_ids) - len(problem.goal_ids)
    assert sum(h <= whole for h in horizons) >= len(horizons) / 2
    assert sum(h >= 48 for h in horizons) >= len(horizons) / 6
    assert any(whole < h < 48 for h in horizons)


def test_ladder_changes_one_thing_at_a_time() -> None:
    """Loss; pooling (layer and scale); objective of stage 2."""
    arms = [dataclasses.asdict(settings) for settings in recall.STATIC_ARMS.values()]
    changed = [
        sum(before[name] != after[name] for name in after) for before, after in zip(arms, arms[1:], strict=False)
    ]
    assert changed == [1, 2, 1]
    assert arms[0] == dataclasses.asdict(recall.StaticArm())


def test_paper_values_stand_at_the_papers_ratios() -> None:
    where = {"H": 96, "W": 48}
    assert recall.published("static", "code_token", where) == 0.844
    assert recall.published("baseline", "code_token", {"H": 12, "W": 48}) == 0.398
    assert recall.published("static", "code_exact", where) is None
    assert recall.published("static", "code_token", {"H": 60, "W": 48}) is None
    assert recall.published("static_scored", "code_token", where) is None


def test_window_must_hold_the_question(problem: treasure.TreasureProblem) -> None:
    need = len(problem.trigger_ids) + len(problem.answer_ids)
    recall.check_window(need, problem)
    with pytest.raises(ValueError, match=f"window is {need - 1} tokens"):
        recall.check_window(need - 1, problem)


def test_unknown_arm_is_named() -> None:
    with pytest.raises(ValueError, match="statik"):
        dataclasses.replace(recall.table1("smoke"), arms=("statik",))


def test_lean_decoding_equals_generate(vocabulary: Vocabulary) -> None:
    """`greedy` skips evicted tokens and pads rows on the right; `generate(window=W)` goes row by row, with a cache."""
    torch.manual_seed(0)
    problems = treasure.problems("valid", 4, [5, 20, 40, 90], 0, vocabulary.encode)
    shape = Backbone(layers=2, width=32, heads=2)
    size = {"vocabulary": vocabulary.size, "window": 48, "pad_id": vocabulary.pad_id}
    decoder, base = shape.build(**size).eval(), shape.build(**size).eval()
    model = attach(decoder, goal=GoalConfig(width=32, pool_layer=1), encoder=base).eval()
    torch.nn.init.normal_(model.channel.film.projection.weight, std=1.0)
    forced = [problem.forced_ids for problem in problems]
    goal = model.encode_goal([problem.goal_ids for problem in problems])
    lean = greedy(model, forced, new_tokens=6, window=48, goal=goal, batch_size=3)
    for row, (ids, tokens) in enumerate(zip(forced, lean, strict=True)):
        out = model.generate(
            torch.tensor([ids]),
            goal=goal.select(torch.tensor([row])),
            window=48,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=vocabulary.pad_id,
        )
        assert out[0, len(ids) :].tolist() == tokens
    closed = greedy(model, forced, new_tokens=6, window=48)
    assert closed != lean, "the goal must matter for this comparison to mean anything"
