"""Rows, objectives and the three stages."""

import gc
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from families import VOCABULARY, attached, tiny, tokens
from sidestream import AttachedLM, GoalConfig, LatentState, attach
from sidestream.channels import GoalEncoder
from sidestream.lm.decoding.decode import greedy
from sidestream.lm.models.backbones import Backbone
from sidestream.tasks.base import Example
from sidestream.training.batches import RowConfig, Rows, collate, make_row, plan
from sidestream.training.loop import LoopConfig
from sidestream.training.objectives import UNSCORED, GoalAlignment, GoalReconstruction, ScoredLM, vicreg
from sidestream.training.stages import align_goal, pooled_states, train_lm

# Every Trainer collects garbage twice; without torch's own objects in the count that takes no time.
gc.freeze()

FILLER = range(900, 1000)


@st.composite
def examples(draw) -> Example:
    """Goal ids from 100, context from 500, targets from 700: every token tells where it is from."""
    sizes = [draw(st.integers(low, 12)) for low in (1, 0, 1)]
    return Example(*(tuple(range(first, first + n)) for first, n in zip((100, 500, 700), sizes, strict=True)))


# ---------------------------------------------------------------- rows


@given(example=examples(), window=st.integers(1, 40), seed=st.integers(0, 5))
def test_row_is_a_window_of_the_text_that_ends_before_an_answer_token(example, window, seed):
    ids, labels = make_row(example, RowConfig(window=window), (), random.Random(seed))
    text = [token for part in example for token in part]
    assert len(ids) == len(labels) <= window
    end = text.index(ids[-1]) + 1
    assert ids == text[max(0, end - window) : end], "the last W tokens"
    target = list(example.target_ids)
    ended = target.index(text[end]) + 1  # how many answer tokens the row predicts, were the window large enough
    assert [token for token in labels if token != UNSCORED] == target[:ended][-window:]
    if len(text) - 1 <= window:
        assert ids == text[:-1] and ended == len(target), "nothing is cut from a text that fits"
    for position, label in enumerate(labels):
        assert label in (UNSCORED, text[max(0, end - window) + position + 1])


@given(example=examples(), window=st.integers(1, 40), seed=st.integers(0, 5))
def test_scored_all_scores_every_position(example, window, seed):
    answer = make_row(example, RowConfig(window=window), (), random.Random(seed))
    ids, labels = make_row(example, RowConfig(window=window, scored="all"), (), random.Random(seed))
    assert ids == answer[0]
    assert labels[:-1] == ids[1:] and labels[-1] in example.target_ids


def test_each_answer_token_is_predicted_from_the_window_edge():
    """What test time asks for: no answer token may be missing at the last position of a cut row."""
    example = Example(tuple(range(100, 110)), tuple(range(500, 520)), (700, 701, 702))
    last = [make_row(example, RowConfig(window=8), (), random.Random(seed))[1][-1] for seed in range(300)]
    for token in example.target_ids:
        assert 0.2 < last.count(token) / 300 < 0.47


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_prompt_is_masked_with_probability_p(p):
    example = Example((100, 101, 102), (500, 501), (700, 701))
    config = RowConfig(window=20, mask_prompt=p)
    rows = [make_row(example, config, FILLER, random.Random(seed))[0] for seed in range(1000)]
    masked = [row for row in rows if row[0] in FILLER]
    assert len(masked) / 1000 == pytest.approx(p, abs=0.05)
    for row in masked:
        start = row[0]
        assert row == [start, start + 1, start + 2, 500, 501, 700], "only the prompt is replaced, length kept"
    assert all(row == [100, 101, 102, 500, 501, 700] for row in rows if row not in masked)
    if p == 0.3:
        assert len({row[0] for row in masked}) > 20, "the filler varies"


def test_filler_must_cover_the_prompt():
    data = [Example((1, 2, 3), (), (4,))]
    config = RowConfig(window=8, mask_prompt=0.5)
    with pytest.raises(ValueError, match="filler has 2 tokens"):
        Rows(data, config, batch_size=1, steps=1, seed=0, filler=[9, 9])
    Rows(data, config, batch_size=1, steps=1, seed=0, filler=[9, 9, 9])


def test_row_depends_on_seed_and_index_alone():
    rng = random.Random(0)
    data = [
        Example(
            tuple(range(100, 100 + rng.randint(2, 9))), tuple(range(500, 500 + rng.randint(0, 30))), (700, 701, 702)
        )
        for _ in range(40)
    ]
    config = RowConfig(window=12, mask_prompt=0.4)
    pooled = torch.arange(40.0).unsqueeze(1)

    def rows(seed: int) -> Rows:
        return Rows(data, config, batch_size=4, steps=25, seed=seed, filler=FILLER, pooled=pooled)

    first, again, other = rows(1), rows(1), rows(2)
    forwards = [first[i] for i in range(100)]
    backwards = [again[i] for i in reversed(range(100))][::-1]
    assert forwards == backwards
    assert [row["ids"] for row in forwards] != [other[i]["ids"] for i in range(100)]
    for index, row in enumerate(forwards):
        assert row["pooled"] == first.order[index], "each row comes with its own goal's vector"
    repeats = [i for i in range(100) if first.order[i] == first.order[0]]
    assert len({tuple(forwards[i]["ids"]) for i in repeats}) > 1, "a problem is cropped and masked anew each time"


@given(n=st.integers(1, 60), batch_size=st.integers(1, 8), steps=st.integers(1, 40), seed=st.integers(0, 3))
@settings(max_examples=50)
def test_every_row_of_an_epoch_once(n, batch_size, steps, seed):
    lengths = [random.Random(i).randint(1, 50) for i in range(n)]
    if batch_size > n:
        with pytest.raises(ValueError, match="do not fill one batch"):
            plan(lengths, batch_size=batch_size, steps=steps, seed=seed)
        return
    order = plan(lengths, batch_size=batch_size, steps=steps, seed=seed)
    assert len(order) == steps * batch_size and set(order) <= set(range(n))
    epoch = n // batch_size * batch_size
    for start in range(0, len(order), epoch):
        part = order[start : start + epoch]
        assert len(set(part)) == len(part), "a row came twice in one epoch"
    if n % batch_size == 0 and len(order) >= n:
        assert sorted(order[:n]) == list(range(n))


def test_batches_hold_rows_of_like_length_in_random_order():
    rng = random.Random(0)
    lengths = [rng.randint(1, 500) for _ in range(1600)]

    def padding(order: list[int]) -> int:
        groups = [[lengths[row] for row in order[i : i + 16]] for i in range(0, len(order), 16)]
        return sum(max(group) * 16 - sum(group) for group in groups)

    order = plan(lengths, batch_size=16, steps=100, seed=0)
    assert padding(order) < 0.1 * padding(rng.sample(range(1600), 1600))
    sizes = [lengths[order[i]] for i in range(0, 1600, 16)]
    assert sizes != sorted(sizes) and order != plan(lengths, batch_size=16, steps=100, seed=1)


def test_collate_pads_on_the_right():
    batch = collate([{"ids": [1, 2, 3], "labels": [UNSCORED, 3, 4]}, {"ids": [5], "labels": [6]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[UNSCORED, 3, 4], [6, UNSCORED, UNSCORED]]
    assert "pooled" not in batch


@pytest.mark.parametrize("change", [{"mask_prompt": 1.1}, {"mask_prompt": -0.1}, {"scored": "some"}, {"window": 0}])
def test_row_settings_out_of_range(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        RowConfig(**{"window": 4, **change})


# ---------------------------------------------------------------- objectives


def vicreg_by_loops(z: list[list[float]], t: list[list[float]], weights=(25.0, 25.0, 1.0)) -> float:
    """Bardes et al. (2022), equations 1 to 6, one number at a time."""
    n, d = len(z), len(z[0])
    invariance = sum((z[i][j] - t[i][j]) ** 2 for i in range(n) for j in range(d)) / (n * d)
    mean = [sum(z[i][j] for i in range(n)) / n for j in range(d)]
    cov = [
        [sum((z[i][a] - mean[a]) * (z[i][b] - mean[b]) for i in range(n)) / (n - 1) for b in range(d)] for a in range(d)
    ]
    variance = sum(max(0.0, 1 - math.sqrt(cov[j][j] + 1e-4)) for j in range(d)) / d
    covariance = sum(cov[a][b] ** 2 for a in range(d) for b in range(d) if a != b) / d
    return weights[0] * invariance + weights[1] * variance + weights[2] * covariance


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_vicreg_equals_its_loops(scale):
    generator = torch.Generator().manual_seed(0)
    z, t = (scale * torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    assert vicreg(z, t).item() == pytest.approx(vicreg_by_loops(z.tolist(), t.tolist()), rel=1e-9)
    for weights in itertools.permutations((1.0, 0.0, 0.0)):
        ours = vicreg(z, t, invariance=weights[0], variance=weights[1], covariance=weights[2])
        assert ours.item() == pytest.approx(vicreg_by_loops(z.tolist(), t.tolist(), weights), rel=1e-9)


def test_vicreg_punishes_collapse():
    target = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    collapsed = target.mean(dim=0).expand(32, 8)
    assert vicreg(collapsed, target) > vicreg(target, target) + 25


def reconstruction_by_loops(scores: Tensor, goals: list[list[int]]) -> float:
    total = 0.0
    for row, goal in zip(scores.tolist(), goals, strict=True):
        loss = 0.0
        for token, score in enumerate(row):
            p = 1 / (1 + math.exp(-score))
            loss -= math.log(p if token in goal else 1 - p)
        total += loss / len(goal)
    return total / len(goals)


def test_reconstruction_equals_its_loops():
    torch.manual_seed(0)
    module = GoalReconstruction(5, 11)
    vector = torch.randn(3, 5)
    goals = [[1, 4, 4, 10], [0], [7, 2]]
    padded = torch.tensor([[1, 4, 4, 10], [0, *[UNSCORED] * 3], [7, 2, *[UNSCORED] * 2]])
    wanted = reconstruction_by_loops(module.head(vector), goals)
    assert module(vector, padded).item() == pytest.approx(wanted, rel=1e-5)
    other = padded.clone()
    other[2, 1] = 3
    assert module(vector, other).item() != pytest.approx(wanted, rel=1e-3)


@pytest.mark.slow
def test_reconstruction_keeps_what_vicreg_lets_go():
    """Eight goals, two trajectories: with VICReg alone goals of one trajectory become one, with the other term not."""
    pooled = torch.eye(8)
    trajectory = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]).repeat_interleave(4, dim=0) * 4
    goals = torch.arange(8).unsqueeze(1)
    nearest = {}
    for weight in (0.0, 10.0):
        torch.manual_seed(0)
        encoder = GoalEncoder(
            GoalConfig(width=4, encoder_hidden=32).sized(encoder_width=8, model_width=8, num_blocks=1)
        )
        module = GoalAlignment(encoder, GoalReconstruction(4, 8) if weight else None, weight)
        optimiser = torch.optim.Adam(module.parameters(), lr=3e-2)
        for _ in range(200):
            optimiser.zero_grad()
            out = module(pooled, trajectory, goals)
            out["loss"].backward()
            optimiser.step()
        assert out["loss"].item() == pytest.approx(
            out["vicreg"].item() + (weight * out["reconstruction"].item() if weight else 0), rel=1e-5
        )
        vectors = encoder.predict(pooled)
        nearest[weight] = torch.cdist(vectors, vectors).fill_diagonal_(math.inf).min().item()
    assert nearest[10.0] > 3 * nearest[0.0]


def text_batch() -> dict[str, Tensor]:
    """Three rows of different lengths, every position scored; labels are the token after each."""
    rows = [tokens(1, n, seed=n)[0].tolist() for n in (9, 5, 7)]
    return collate([{"ids": row, "labels": [*row[1:], UNSCORED]} for row in rows])


@pytest.mark.parametrize("kind", ["bare", "closed", "goal"])
def test_scored_loss_is_the_models_own_where_all_is_scored(kind):
    batch = text_batch()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, UNSCORED)
    if kind == "bare":
        model = tiny("gpt2")
        theirs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        ours = ScoredLM(model)(**batch)["loss"]
    else:
        model = attached("gpt2", "static")
        state = None
        if kind == "goal":
            batch["pooled"] = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
            state = LatentState(goal=model.channel.encoder.predict(batch["pooled"]))
        theirs = model(batch["input_ids"], goal=state, attention_mask=batch["attention_mask"], labels=labels).loss
        ours = ScoredLM(model)(**batch)["loss"]
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    batch["labels"][0, 0] = UNSCORED
    assert ScoredLM(model)(**batch)["loss"].item() != pytest.approx(theirs.item(), rel=1e-6)


def test_head_is_applied_at_scored_positions_only():
    model = tiny("gpt2")
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[:-1].numel()))
    batch = text_batch()
    batch["labels"][:, 2:] = UNSCORED
    ScoredLM(model)(**batch)
    model(input_ids=batch["input_ids"])
    assert rows == [6, 27], "ours: two positions a row; the stock forward: all"


def test_attached_model_trains_through_the_goal():
    model = attached("gpt2", "static")
    batch = {**text_batch(), "pooled": torch.randn(3, 32, generator=torch.Generator().manual_seed(0))}
    ScoredLM(model)(**batch)["loss"].backward()
    for name, parameter in model.channel.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


# ---------------------------------------------------------------- options of the loop


def trained(directory: Path, **options) -> tuple[AttachedLM, int]:
    """Three steps of stage 3 with dropout; returns the model and how often a block ran."""
    base = tiny("llama", attention_dropout=0.2)
    torch.manual_seed(0)
    model = attach(base, goal=GoalConfig(width=16, encoder_hidden=24), encoder=tiny("llama", seed=1, width=24))
    calls = []
    # Before the MLP: the recomputation ends as soon as it has what backward needs.
    base.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    data = [Example(tuple(tokens(1, 4, seed=i)[0].tolist()), (5, 6), (7 + i, 8)) for i in range(6)]
    config = LoopConfig(steps=3, batch_size=2, learning_rate=1e-2, **options)
    train_lm(model, data, RowConfig(window=8), config, directory, seed=0, filler=(), pooled=torch.eye(24)[:6])
    return model, len(calls)


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([tensor.float().flatten() for tensor in model.state_dict().values()])


def test_gradient_checkpointing_through_the_loop_is_exact(tmp_path):
    plain, calls = trained(tmp_path / "plain")
    recomputed, more = trained(tmp_path / "recomputed", gradient_checkpointing=True)
    assert (calls, more) == (3, 6), "each block must have run twice a step"
    assert torch.equal(weights(plain), weights(recomputed))
    assert not any(getattr(module, "gradient_checkpointing", False) for module in recomputed.lm.modules())
    assert not torch.equal(weights(plain.channel.film), torch.zeros_like(weights(plain.channel.film)))


def test_bf16_runs_and_is_another_arithmetic(tmp_path):
    plain, _ = trained(tmp_path / "fp32")
    half, _ = trained(tmp_path / "bf16", precision="bf16")
    assert half.lm.dtype == torch.float32, "weights stay in float32; only the arithmetic is narrower"
    difference = (weights(half) - weights(plain)).abs().max()
    assert 0 < difference < 0.06
    again, _ = trained(tmp_path / "again")
    assert torch.equal(weights(again), weights(plain)), "a bf16 stage must not leak into the next one"


# ---------------------------------------------------------------- stages: each overfits 8 examples


WINDOW = 8
EIGHT = [
    Example((40 + i, 60 + i * i % 11, 80 + i % 3), tuple(range(20)), (3 + i, 11 + i * i % 11, 2)) for i in range(8)
]
LOOP = LoopConfig(steps=150, batch_size=8, learning_rate=1e-2)


def exact(model, problems=EIGHT, goals=None, *, window: int = WINDOW) -> float:
    """Share of problems whose whole target is generated."""
    given = [[*problem.goal_ids, *problem.context_ids] for problem in problems]
    made = greedy(model, given, new_tokens=3, window=window, goal=goals)
    return sum(ids == list(p.target_ids) for ids, p in zip(made, problems, strict=True)) / len(problems)


def backbone(window: int = WINDOW):
    torch.manual_seed(0)
    return Backbone(layers=1, width=32, heads=2).build(vocabulary=VOCABULARY, window=window, pad_id=0)


def test_stage_1_overfits(tmp_path):
    model = backbone(window=32)
    assert exact(model, window=32) == 0
    train_lm(model, EIGHT, RowConfig(window=32), LOOP, tmp_path, seed=0, filler=())
    assert exact(model, window=32) == 1


def test_stage_1_past_the_window_cannot_know(tmp_path):
    """The negative control of stage 3: eight answers, one text in view."""
    model = backbone()
    train_lm(model, EIGHT, RowConfig(window=WINDOW), LOOP, tmp_path, seed=0, filler=())
    assert exact(model) <= 1 / 8


def conditioned() -> tuple[AttachedLM, Tensor, Tensor]:
    """An attached model and the pooled states of goals and of answers."""
    decoder, encoder = backbone(), backbone()
    model = attach(decoder, goal=GoalConfig(width=16, encoder_hidden=64, pool_layer=1), encoder=encoder)
    pooled = pooled_states(model, [example.goal_ids for example in EIGHT])
    model.channel.encoder.calibrate(pooled)
    return model, pooled, pooled_states(model, [example.target_ids for example in EIGHT])


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_stage_2_overfits(tmp_path, weight):
    model, pooled, trajectory = conditioned()
    encoder = model.channel.encoder
    # Wider than VICReg's hinge at 1, so that the target itself costs little.
    trajectory = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)) * 2
    before = F.mse_loss(encoder.predict(pooled), trajectory).item()
    goals = [example.goal_ids for example in EIGHT]
    decoder_before = weights(model.lm)
    align_goal(
        encoder, pooled, trajectory, goals, VOCABULARY, replace(LOOP, batch_size=32), tmp_path, seed=0,
        reconstruction_weight=weight,
    )  # fmt: skip
    after = F.mse_loss(encoder.predict(pooled), trajectory).item()
    assert after < 0.2 * before
    assert torch.equal(weights(model.lm), decoder_before), "stage 2 trains E_pred alone"


def test_stage_3_overfits_past_the_window(tmp_path):
    model, pooled, _ = conditioned()
    goals = model.encode_goal([example.goal_ids for example in EIGHT])
    assert exact(model, goals=goals) <= 1 / 8
    encoder_before = weights(model.encoder)
    train_lm(model, EIGHT, RowConfig(window=WINDOW), LOOP, tmp_path, seed=0, filler=(), pooled=pooled)
    with torch.no_grad():
        goals = model.encode_goal([example.goal_ids for example in EIGHT])
    assert exact(model, goals=goals) == 1, "the goal is nowhere in the text, and every answer is right"
    assert exact(model, goals=goals.select(torch.arange(8).roll(1))) == 0, "a swapped goal gives another's answer"
    assert exact(model) <= 1 / 8, "the channel closed: the text alone does not tell"
    assert torch.equal(weights(model.encoder), encoder_before)


def test_finished_stages_are_loaded(tmp_path):
    """A second call with resume gives the same models without training."""
    short = replace(LOOP, steps=3)

    def stages() -> tuple[Tensor, Tensor]:
        model, pooled, trajectory = conditioned()
        goals = [example.goal_ids for example in EIGHT]
        align_goal(
            model.channel.encoder, pooled, trajectory.new_ones(8, 16), goals, VOCABULARY, short, tmp_path / "2", seed=0,
            reconstruction_weight=1.0, resume=True,
        )  # fmt: skip
        train_lm(
            model, EIGHT, RowConfig(window=WINDOW), short, tmp_path / "3", seed=0, filler=(), pooled=pooled, resume=True
        )
        return weights(model.channel), weights(model.lm)

    trained_once = stages()
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    loaded = stages()
    assert all(torch.equal(a, b) for a, b in zip(trained_once, loaded, strict=True))
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
