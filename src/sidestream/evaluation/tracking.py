"""Looking at a tracked vector: how it moves when a plan is perturbed, and what a trigger costs late in a rollout.

Both return plain dicts, to be written as JSON and drawn from there.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestream.channels import GoalTracker, LatentState, mean_pool
from sidestream.evaluation.stats import paired_bootstrap
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.cache import LatentCache, Window
from sidestream.lm.models.blocks import learned_positions, text_config
from sidestream.lm.texts.text import WordVocabulary
from sidestream.tasks.base import Split
from sidestream.tasks.blocksworld import apply, optimal_plan, ranked_actions, trace
from sidestream.tasks.blocksworld_data import TRIGGER, BlocksworldConfig, PlanExample, problems

# ---------------------------------------------------------------- how the vector moves


def movement_pairs(config: BlocksworldConfig, split: Split, n: int) -> tuple[list[PlanExample], list[PlanExample]]:
    """`n` problems, each with a shortest plan, and with the same plan up to one forced sub-optimal action.

    The step of that action is drawn uniformly from those that have a legal sub-optimal action, the action uniformly
    from these; a shortest plan from where it led follows. Problems without such a step are passed over. Drawn by index,
    so the first pairs of a longer list are those of a shorter one.

    Returns:
        The plain and the perturbed examples, in the same order; `suboptimal` of a perturbed one holds its one step.
    """
    plain: list[PlanExample] = []
    perturbed: list[PlanExample] = []
    for index, problem in enumerate(problems(config, split)):
        if len(plain) == n:
            break
        actions = optimal_plan(problem.init, problem.goal)
        states = trace(problem.init, actions)
        choices = [(step, ranked_actions(state, problem.goal)[1]) for step, state in enumerate(states[:-1])]
        choices = [(step, wrong) for step, wrong in choices if wrong]
        if not choices:
            continue
        rng = random.Random(f"movement {index}")
        step, wrong = rng.choice(choices)
        forced = rng.choice(wrong)
        rest = optimal_plan(apply(states[step], forced), problem.goal)
        straight = PlanExample(
            problem=problem, actions=actions, suboptimal=(), optimal_length=len(actions), split=split
        )
        plain.append(straight)
        perturbed.append(replace(straight, actions=(*actions[:step], forced, *rest), suboptimal=(step,)))
    return plain, perturbed


@torch.no_grad()
def vector_movement(
    model: AttachedLM,
    plain: Sequence[PlanExample],
    perturbed: Sequence[PlanExample],
    vocabulary: WordVocabulary,
    *,
    batch_size: int = 64,
) -> dict[str, Any]:
    r"""How far one forced action moves the vector, trigger by trigger.

    With :math:`P_i` the vector after the i-th trigger of the plain plan, :math:`P'_i` that of the perturbed one and s
    the step of the forced action, offset o stands for :math:`i = s + o`: 0 is the trigger of the forced action. E_base
    reads the whole text, as in training.

    Args:
        model: with a dynamic channel.
        plain, perturbed: from `movement_pairs`; at least 2 pairs.
        vocabulary: word-level, of the domain.
        batch_size: pairs at a time.

    Returns:
        `pairs`; `alpha`; `offset`, those that at least a tenth of the pairs (and 2) reach before either plan ends;
        `n`, pairs at each; and at each, as `mean`, `low` and `high` (95 % bootstrap interval over pairs): `distance`,
        :math:`\|P'_i - P_i\| / \|P_i\|`, exactly 0 at negative offsets; `plain_step` and `perturbed_step`,
        :math:`\|P_i - P_{i-1}\|` (:math:`P_{-1} = P_0` of the prompt) of either. `between`: the mean of the same
        relative distance between plain plans of different problems after as many triggers, a scale to read it by.

    Raises:
        ValueError: a static channel, fewer than 2 pairs, or lists that are no pairs.
    """
    tracker = _tracker(model)
    if len(plain) != len(perturbed) or len(plain) < 2:
        raise ValueError(f"{len(plain)} plain and {len(perturbed)} perturbed plans: give at least 2 pairs")
    if any(a.problem != b.problem or len(b.suboptimal) != 1 for a, b in zip(plain, perturbed, strict=True)):
        raise ValueError("the plans are no pairs of one problem with one forced action; use movement_pairs")
    texts = [[example.encoded(vocabulary.encode) for example in side] for side in (plain, perturbed)]
    # One width for both passes, and a column of padding in every row: two texts then go through the same kernels, and
    # where they agree their vectors do to the last bit.
    width = 1 + max(len(example.goal_ids) + len(example.target_ids) for side in texts for example in side)
    straight, pushed = [
        [path for at in range(0, len(side), batch_size) for path in _paths(model, side[at : at + batch_size], width)]
        for side in texts
    ]
    found: dict[int, list[tuple[float, float, float]]] = {}
    for p, q, example in zip(straight, pushed, perturbed, strict=True):
        for i in range(1, min(len(p), len(q))):
            # Row 0 is P_0 of the prompt, row i + 1 the vector after the i-th trigger.
            found.setdefault(i - 1 - example.suboptimal[0], []).append(
                (
                    float(np.linalg.norm(q[i] - p[i]) / np.linalg.norm(p[i])),
                    float(np.linalg.norm(p[i] - p[i - 1])),
                    float(np.linalg.norm(q[i] - q[i - 1])),
                )
            )
    offsets = sorted(offset for offset, rows in found.items() if len(rows) >= max(2, len(plain) / 10))
    pairs_apart = zip(straight, straight[1:], strict=False)
    apart = [
        float(np.linalg.norm(q[i] - p[i]) / np.linalg.norm(p[i]))
        for p, q in pairs_apart
        for i in range(1, min(len(p), len(q)))
    ]
    measured = zip(("distance", "plain_step", "perturbed_step"), range(3), strict=True)
    return {
        "pairs": len(plain),
        "alpha": float(tracker.alpha),
        "between": statistics.mean(apart),
        "offset": offsets,
        "n": [len(found[offset]) for offset in offsets],
        **{name: _means([[row[column] for row in found[offset]] for offset in offsets]) for name, column in measured},
    }


def _paths(model: AttachedLM, texts: Sequence[Any], width: int) -> list[np.ndarray]:
    """For each text (1 + triggers, G): P_0 and the vector after each trigger."""
    channel, device = model.channel, model.device
    assert channel.tracker is not None
    rows = [[*text.goal_ids, *text.target_ids] for text in texts]
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    goal_length = torch.tensor([len(text.goal_ids) for text in texts], device=device)
    in_goal = torch.arange(width, device=device)[None] < goal_length[:, None]
    # E_base is causal: pooling the prompt's part of the text's states equals encoding the prompt alone.
    pooled = mean_pool(model.goal_hidden(ids, mask), in_goal)
    starts = channel.encoder.predict(pooled)
    hidden = model.goal_hidden(ids, mask, layer=channel.config.tracker_layer)
    fires = model.fires(ids, mask)
    vectors, _ = channel.tracker.sequence(LatentState(goal=starts), hidden, fires)
    return [
        torch.cat([start[None], row[fired]]).double().cpu().numpy()
        for start, row, fired in zip(starts, vectors, fires, strict=True)
    ]


def _means(samples: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    intervals = [paired_bootstrap(sample, np.zeros(len(sample)), resamples=2000) for sample in samples]
    return {
        "mean": [interval.difference for interval in intervals],
        "low": [interval.low for interval in intervals],
        "high": [interval.high for interval in intervals],
    }


# ---------------------------------------------------------------- what a trigger costs


@torch.no_grad()
def trigger_cost(
    model: AttachedLM,
    vocabulary: WordVocabulary,
    *,
    places: Sequence[int] = (50, 500, 5000),
    repeats: int = 5,
    encoder_size: int | None = None,
) -> dict[str, Any]:
    """Seconds from a trigger token to the FiLM terms of the vector it moves, at several places of one long rollout.

    Three ways to have the tracker's `s_i`: E_base goes on from its own keys and values of the whole text (`cached`,
    what `LatentCache` does), or of the last tokens only (`bounded`, what `Window(encoder_size=...)` does), or reads the
    whole text again (`reread`, the paper's). The decoder's own step, the same in each, is left out. Measured in turn,
    `repeats` rounds after one that does not count; medians.

    Args:
        model: with a dynamic channel.
        vocabulary: word-level, of Blocksworld.
        places: tokens of text up to and with the trigger. Learned positions end them at their table.
        repeats: rounds.
        encoder_size: tokens that `bounded` keeps; None leaves it out. Needs a rotary E_base.

    Returns:
        `places`; `cached`, `bounded` (or None) and `reread`, seconds at each; `encoder_size`; `repeats`; `difference`,
        the largest relative distance between the vectors of `cached` and `reread`: rounding, or a mistake.

    Raises:
        ValueError: a static channel, no place of at least 2 tokens, or an encoder_size that E_base cannot take.
    """
    _tracker(model)
    reader = model.encoder if model.encoder is not None else model.lm
    table = learned_positions(reader)
    if encoder_size is not None and table is not None:
        raise ValueError(f"encoder_size needs a rotary E_base; {type(reader).__name__} has learned positions")
    places = sorted({place if table is None else min(place, table) for place in places})
    if not places or places[0] < 2 or repeats < 1:
        raise ValueError(f"places are {places}, repeats {repeats}: give places of at least 2 tokens and 1 repeat")
    text = _long_text(model, vocabulary, places[-1])
    state = model.encode_goal(text[:, : places[0]])
    sizes = {"cached": None} if encoder_size is None else {"cached": None, "bounded": encoder_size}
    caches = {name: _caches(model, text, places, size) for name, size in sizes.items()}
    layer = model.channel.config.tracker_layer
    trigger = torch.tensor([[model.channel.config.trigger_ids[0]]], device=model.device)

    def vector(hidden: Tensor) -> Tensor:
        _, after = model.channel.advance(state, hidden[:, -1:], torch.ones_like(trigger, dtype=torch.bool))
        assert after.goal is not None
        return after.goal

    seconds: dict[str, list[list[float]]] = {name: [[] for _ in places] for name in (*caches, "reread")}
    difference = 0.0
    for repeat in range(repeats + 1):
        for index, place in enumerate(places):
            vectors = {}
            for name, cached in caches.items():
                own = deepcopy(cached[index])
                spent, vectors[name] = _timed(
                    model, lambda own=own: vector(model.goal_hidden(trigger, cache=own, layer=layer))
                )
                seconds[name][index] += [spent] if repeat else []
            whole = torch.cat([text[:, : place - 1], trigger], dim=1)
            spent, again = _timed(model, lambda whole=whole: vector(model.goal_hidden(whole, layer=layer)))
            seconds["reread"][index] += [spent] if repeat else []
            apart = (vectors["cached"] - again).norm() / again.norm().clamp(min=1e-12)
            difference = max(difference, float(apart))
    medians = {name: [statistics.median(times) for times in rows] for name, rows in seconds.items()}
    return {
        "places": places,
        "cached": medians["cached"],
        "bounded": medians.get("bounded"),
        "reread": medians["reread"],
        "encoder_size": encoder_size,
        "repeats": repeats,
        "difference": difference,
    }


def _long_text(model: AttachedLM, vocabulary: WordVocabulary, length: int) -> Tensor:
    """(1, T) a plan that goes nowhere: what it says does not matter, its length does."""
    words = f"pickup a {TRIGGER} putdown a {TRIGGER} "
    round_trip = vocabulary.encode(words.strip())
    return torch.tensor([(round_trip * (length // len(round_trip) + 1))[:length]], device=model.device)


def _caches(model: AttachedLM, text: Tensor, places: Sequence[int], size: int | None) -> list[LatentCache]:
    """E_base's keys and values just before each place, read on from one place to the next."""
    window = None if size is None else Window(size=size, policy="rolling")
    reader = model.encoder if model.encoder is not None else model.lm
    cache = LatentCache(text_config(reader), window=window)
    caches, read = [], 0
    for place in places:
        model.goal_hidden(text[:, read : place - 1], cache=cache)
        caches.append(deepcopy(cache))
        read = place - 1
    return caches


def _timed(model: AttachedLM, work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result


def _tracker(model: AttachedLM) -> GoalTracker:
    if model.channel.tracker is None:
        raise ValueError("the model's goal channel is static: it has no vector that moves; give a dynamic one")
    return model.channel.tracker
