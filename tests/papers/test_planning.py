"""Blocksworld through a model: rows and crops, vectors of whole texts, the batched closed loop, Table 3 at smoke."""

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from sidestream.channels import GoalConfig, LatentState
from sidestream.commands.solve import finished, solve
from sidestream.evaluation.attacks_vector import noise_like
from sidestream.evaluation.planning import finish_episodes, run_episodes
from sidestream.experiments.engine import LocalEngine
from sidestream.experiments.run import run
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.models.backbones import Backbone
from sidestream.lm.texts.text import WordVocabulary
from sidestream.papers.lsar.planning import PlanWork, published, table3
from sidestream.tasks.blocksworld import TABLE, Fact, Problem, optimal_length, satisfies, trace
from sidestream.tasks.blocksworld_data import (
    TRIGGER,
    WORDS,
    BlocksworldConfig,
    PlanExample,
    action_text,
    examples,
    relabel,
    split_of,
)
from sidestream.tasks.blocksworld_loop import episodes, make_episode
from sidestream.training.loop import LoopConfig, train
from sidestream.training.objectives import UNSCORED
from sidestream.training.planning import (
    FACTS,
    PLACES,
    PlanLM,
    PlanRowConfig,
    PlanRows,
    PlanText,
    collate_plans,
    plan_row,
    plan_vectors,
    symbolic_states,
)
from sidestream.training.stages import pooled_states

VOCABULARY = WordVocabulary(WORDS)
CONFIG = BlocksworldConfig(blocks=(4,), budgets=(0,))


@pytest.fixture(scope="module")
def plans() -> list[PlanExample]:
    return list(islice(examples(CONFIG, "train", 8), 8))


def encoded(plans: list[PlanExample]) -> list[PlanText]:
    return [PlanText.of(plan, VOCABULARY.encode) for plan in plans]


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


def test_a_mistake_is_shown_and_not_scored() -> None:
    config = BlocksworldConfig(blocks=(5,), budgets=(3,), perturb_probability=0.6, names="pool")
    seen = 0
    for example in encoded(list(islice(examples(config, "train", 20), 20))):
        every = plan_row(example, PlanRowConfig(), random.Random(0))
        some = plan_row(example, PlanRowConfig(mistakes_scored=False), random.Random(0))
        assert some["ids"] == every["ids"]
        hidden = [
            token for token, kept in zip(every["labels"], some["labels"], strict=True) if kept == UNSCORED != token
        ]
        words = VOCABULARY.decode(hidden).split(f" {TRIGGER}")
        names = example.example.problem.names
        mistakes = [action_text(example.example.actions[step], names) for step in example.example.suboptimal]
        assert [word.strip() for word in words if word.strip()] == mistakes
        seen += len(mistakes)
    assert seen > 20


def test_symbolic_states_say_where_every_block_is() -> None:
    names = ("c", "x", "a")
    # c on x, x on the table, a on the table; a onto c.
    problem = Problem(names=names, init=(1, TABLE, TABLE), goal=frozenset({Fact("on", (2, 0)), Fact("ontable", (1,))}))
    example = relabel(problem, [])
    places = [row[:26] for row in symbolic_states(example)]
    goals = [row[26:52] for row in symbolic_states(example)]
    assert [row[52:] for row in symbolic_states(example)] == [[0, 0, UNSCORED], [2, 0, 2], [4, UNSCORED, UNSCORED]]
    c, x, a, table, hand = 2, 23, 0, 26, 27
    assert [action.name for action in example.actions] == ["pickup", "stack"]
    assert [[row[n] for n in (c, x, a)] for row in places] == [[x, table, table], [x, table, hand], [x, table, c]]
    assert all(sum(n != UNSCORED for n in row) == 3 for row in places)
    assert all(row[a] == c and row[x] == table and row[c] == UNSCORED for row in goals)


def test_the_state_loss_reads_the_vector_at_triggers(plans: list[PlanExample]) -> None:
    lm = model("dynamic")
    open_gates(lm)
    module = PlanLM(lm, state_weight=1.0)
    rows = [plan_row(text, PlanRowConfig(windows=(16,), states=True), random.Random(1)) for text in encoded(plans)]
    for row, plan in zip(rows, plans, strict=True):
        assert [row["full"][place] for place in row["places"][1:]] == VOCABULARY.encode(TRIGGER) * len(plan.actions)
        assert len(row["states"]) == len(row["places"])
    out = module(**collate_plans(rows))
    out["state_loss"].backward()
    tracker = lm.channel.tracker
    assert tracker is not None and tracker.mlp[0].weight.grad is not None
    assert tracker.mlp[0].weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in lm.lm.parameters()), "the decoder has no part in it"
    plain = PlanLM(lm)(**collate_plans([plan_row(t, PlanRowConfig(), random.Random(1)) for t in encoded(plans)]))
    assert set(plain) == {"loss"}
    assert module.reader is not None and module.reader.out_features == FACTS * PLACES
    bare = PlanLM(lm, steered=False, state_weight=1.0)
    whole = [plan_row(text, PlanRowConfig(states=True), random.Random(1)) for text in encoded(plans)]
    bare(**collate_plans(whole))["state_loss"].backward()
    assert any(p.grad is not None and p.grad.any() for p in lm.lm.parameters()), "it teaches a bare decoder"
    with pytest.raises(ValueError, match="needs a dynamic channel"):
        PlanLM(model("static"), state_weight=1.0)


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
        trained = lm.lm.get_output_embeddings()(hidden[:, -1])  # type: ignore
        cache = lm.new_cache(text[:, :goal], window=16)
        for token in text[0, :-1]:
            decoded = lm(input_ids=token.view(1, 1), cache=cache).logits[:, -1]
        closed = lm(input_ids=crop).logits[:, -1]
    assert torch.allclose(trained, decoded, atol=1e-4)
    assert not torch.allclose(trained, closed, atol=1e-2)


def fit(lm: AttachedLM, rows: list[PlanText], directory: Path, *, steered: bool) -> None:
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
    assert honest.goal is not None
    noisy = lm.encode_goal(LatentState(goal=noise_like(honest.goal, 0)))
    assert honest.terms is not None and noisy.terms is not None
    assert not torch.allclose(honest.terms, noisy.terms)


@pytest.mark.slow
def test_table3_smoke_has_every_cell(tmp_path: Path) -> None:
    experiment = table3("smoke")
    results = run(
        experiment, tmp_path / "run", command="sidestream run lsar.table3 --scale smoke", engine=LocalEngine(1)
    )
    places = len(experiment.perturbations) + len(experiment.more_blocks)
    assert len(results["cells"]) == len(experiment.arms) * places * len(experiment.windows)
    assert all(cell["n"] == experiment.test_problems for cell in results["cells"])
    again = run(experiment, tmp_path / "run", command="again", resume=True, engine=LocalEngine(1))
    assert again == results


def test_alpha_frozen_at_zero_is_the_static_channel(plans: list[PlanExample]) -> None:
    """Why the arm `alpha_zero` plays the static arm's weights: every gradient is the same, and none reaches the rest
    of the tracker."""
    rows = [plan_row(text, PlanRowConfig(windows=(16,)), random.Random(0)) for text in encoded(plans)]
    gradients = {}
    for mode, alpha in (("static", 0.0), ("dynamic", 0.0), ("moved", 0.1)):
        lm = model("static" if mode == "static" else "dynamic").double()
        torch.manual_seed(5)
        torch.nn.init.normal_(lm.channel.film.projection.weight, std=0.5)
        tracker = lm.channel.tracker
        if tracker is not None:
            torch.nn.init.constant_(tracker.alpha, alpha)
        lm.channel.encoder.predictor.load_state_dict(model("static").channel.encoder.predictor.state_dict())
        PlanLM(lm)(**collate_plans(rows))["loss"].backward()
        parts = (lm.lm, lm.channel.encoder, lm.channel.film)
        gradients[mode] = torch.cat(
            [p.grad.flatten() for part in parts for p in part.parameters() if p.grad is not None]
        )
        if mode == "dynamic":
            assert tracker is not None
            rest = [p.grad for name, p in tracker.named_parameters() if name != "alpha" and p.grad is not None]
            assert rest and not any(gradient.any() for gradient in rest)
    assert torch.allclose(gradients["static"], gradients["dynamic"], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(gradients["static"], gradients["moved"], rtol=1e-2, atol=1e-6)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two arms."""
    directory = tmp_path_factory.mktemp("table3") / "run"
    experiment = replace(table3("smoke"), arms=("static", "alpha_zero", "dynamic_state"), windows=(0, 16))
    run(experiment, directory, command="sidestream run lsar.table3 --scale smoke", engine=LocalEngine(1))
    return directory


def test_alpha_zero_plays_as_static(smoke: Path) -> None:
    cells = json.loads((smoke / "results.json").read_text())["cells"]
    values = {arm: [cell["value"] for cell in cells if cell["arm"] == arm] for arm in ("static", "alpha_zero")}
    assert values["static"] == values["alpha_zero"]
    for path in sorted((smoke / "static").glob("scores-*.json")):
        assert path.read_text() == (smoke / "alpha_zero" / path.name).read_text()


def test_own_prefixes_are_the_base_models_and_end_at_the_goal(smoke: Path) -> None:
    models = finished(smoke, "dynamic_state")
    own = models.own_prefixes("ours")
    assert len(own) >= models.settings.ours.own_prefixes and models.own_prefixes("faithful") == []
    assert any(example.suboptimal for example in own)
    for example in own:
        assert satisfies(trace(example.problem.init, example.actions)[-1], example.problem.goal)
        assert split_of(example.problem, "pool") == "train"
    assert len(models.encoded("ours", own=True)) == models.settings.train_problems + len(own)


@pytest.mark.slow
def test_drawn_rollouts_are_legal(smoke: Path) -> None:
    models = finished(smoke, "dynamic_state")
    lm, _ = models.load("dynamic_state")
    tests = episodes(models.task("ours"), "test", 10, perturbations=1)
    goals = lm.encode_goal([VOCABULARY.encode(test.prompt) for test in tests])
    greedy = finish_episodes(lm, tests, VOCABULARY, window=0, goals=goals)
    assert any(end.failure in ("illegal", "malformed", "stopped_early") for end in greedy), "the control"
    for seed in range(2):
        drawn = finish_episodes(lm, tests, VOCABULARY, window=16, goals=goals, draw=torch.Generator().manual_seed(seed))
        assert all(end.failure in (None, "step_limit") for end in drawn)


@pytest.mark.slow
def test_solve_keeps_the_shortest_plan_and_says_what_is_wrong(smoke: Path) -> None:
    config = BlocksworldConfig(blocks=(3,))
    problems = [example.problem for example in examples(config, "train", 5)]
    found = solve(smoke, problems, arm="dynamic_state", tries=8)
    once = solve(smoke, problems, arm="dynamic_state")
    assert any(score.success for score, _ in found) and not any(score.success for score, _ in once)
    for problem, (score, actions) in zip(problems, found, strict=True):
        if score.success:
            assert satisfies(trace(problem.init, actions)[-1], problem.goal)
            assert score.over == len(actions) - optimal_length(problem.init, problem.goal) >= 0
    with pytest.raises(ValueError, match="holds no finished arm 'dynamic'; it has static, dynamic_state"):
        solve(smoke, problems, arm="dynamic")
    with pytest.raises(ValueError, match="holds no run of lsar.table3"):
        solve(smoke / "static", problems, arm="static")


def test_an_arm_needs_what_it_starts_from(tmp_path: Path) -> None:
    jobs = {job.name: job for job in PlanWork(table3("smoke"), tmp_path).jobs()}
    shared = ["base_faithful", "bare_faithful", "base_ours", "bare_ours"]
    assert list(jobs) == [*shared, *table3("smoke").arms]
    assert jobs["baseline_pool"].needs == ("base_ours", "bare_ours") and jobs["static"].needs == ("base_faithful",)
    assert jobs["alpha_zero"].needs == ("static",) and not jobs["alpha_zero"].stages
    stages = {arm: [path.name for path in jobs[arm].stages] for arm in ("baseline", "dynamic", "dynamic_no_stage2")}
    assert stages == {"baseline": ["stage3"], "dynamic": ["stage2", "stage3"], "dynamic_no_stage2": ["stage3"]}
    without = PlanWork(replace(table3("smoke"), arms=("static",)), tmp_path).jobs()
    assert [job.name for job in without] == ["base_faithful", "static"], "no baseline, no stage 1 for it"


def test_what_cannot_be_run_is_said_before_anything_is_written(tmp_path: Path) -> None:
    for changed, said in (
        ({"arms": ("random_film", "dynamic")}, "evaluates the weights of 'static'; add that arm"),
        ({"arms": ("statik",)}, "arms names the unknown 'statik'"),
        ({"windows": (16, 16)}, "windows is .16, 16."),
        ({"more_blocks": (40,)}, "blocks must be numbers from 2 to"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            run(replace(table3("smoke"), **changed), tmp_path / "run")
        assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_paper_values() -> None:
    assert published("dynamic", "success", {"K": 1, "N": 5, "W": 0}) == 0.89
    assert published("static", "success", {"K": 0, "N": 6, "W": 0}) == 0.0
    assert published("dynamic", "success", {"K": 1, "N": 5, "W": 16}) is None
    assert published("random_film", "success", {"K": 1, "N": 5, "W": 0}) is None


def test_rotary_decoders_are_played_with_a_strict_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window that fits a rotary model would leave traces of the evicted prompt in its keys."""
    shape = Backbone(layers=2, width=32, heads=2, family="llama")
    lm = attach(shape.build(vocabulary=VOCABULARY.size, window=64, pad_id=VOCABULARY.pad_id), goal=GoalConfig(width=8))
    assert lm.new_cache(window=16).window.policy == "rolling", "the control: what a number would pick"  # type: ignore
    asked = []
    original = AttachedLM.new_cache
    monkeypatch.setattr(AttachedLM, "new_cache", lambda self, *a, **k: asked.append(k) or original(self, *a, **k))
    tests = episodes(BlocksworldConfig(blocks=(3,)), "test", 2, perturbations=0)
    run_episodes(lm.eval(), tests, VOCABULARY, window=16)
    run_episodes(lm, tests, VOCABULARY, window=0)
    assert [k["window"] and k["window"].policy for k in asked] == ["reindex", None]
