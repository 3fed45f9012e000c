"""The tracked vector under a microscope, and the pictures of LS-AR Table 3. Numbers in the pictures are invented."""

import json
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib import colors as mcolors
from matplotlib.image import imread
from test_report import Page, invented, planning_cells, write

from families import open_gate, our_hooks, tiny
from sidestream import AttachedLM, GoalConfig, attach
from sidestream.evaluation.tracking import movement_pairs, trigger_cost, vector_movement
from sidestream.experiments.report.page import write_report
from sidestream.experiments.table import load
from sidestream.lm.texts.text import WordVocabulary
from sidestream.tasks.blocksworld import HELD, TABLE, optimal_length, ranked_actions, trace
from sidestream.tasks.blocksworld_data import TRIGGER, WORDS, BlocksworldConfig
from sidestream.tasks.blocksworld_loop import (
    Episode,
    Rollout,
    emit,
    episodes,
    forced_action,
    perturb,
    plan_outcomes,
    start,
)
from sidestream.tasks.blocksworld_picture import FRAME, HEIGHT, RAIL, REST, plan_lines, rollout_svg, standalone

VOCABULARY = WordVocabulary(WORDS)
CONFIG = BlocksworldConfig(blocks=(4,))


def dynamic(*, alpha: float = 0.5, history: int = 1, encoder: str = "llama") -> AttachedLM:
    """A tracker that moves, on random models."""
    config = GoalConfig(
        mode="dynamic",
        width=16,
        encoder_hidden=24,
        trigger_ids=tuple(VOCABULARY.encode(TRIGGER)),
        tracker_heads=2,
        tracker_history=history,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = attach(tiny("llama"), goal=config, encoder=tiny(encoder, seed=1, width=24))
    return open_gate(model, alpha=alpha).eval()


@pytest.fixture(scope="module")
def pairs():
    return movement_pairs(CONFIG, "test", 12)


def test_pairs_part_at_one_forced_action_and_both_end_at_the_goal(pairs) -> None:
    steps = set()
    for plain, perturbed in zip(*pairs, strict=True):
        problem, (step,) = plain.problem, perturbed.suboptimal
        assert perturbed.problem == problem and plain.suboptimal == ()
        assert plain.actions[:step] == perturbed.actions[:step] and plain.actions[step] != perturbed.actions[step]
        ends = [trace(problem.init, example.actions) for example in (plain, perturbed)]
        assert perturbed.actions[step] in ranked_actions(ends[1][step], problem.goal)[1]
        assert len(plain.actions) == optimal_length(problem.init, problem.goal) == plain.optimal_length
        left = [optimal_length(state, problem.goal) for state in ends[1]]
        assert left[-1] == 0 and left[step + 1 :] == list(range(left[step + 1], -1, -1)) and left[step + 1] > left[step]
        steps.add(step)
    assert len(steps) > 3
    again = movement_pairs(CONFIG, "test", 5)
    assert again == (pairs[0][:5], pairs[1][:5])


@pytest.mark.parametrize("history", [1, 3])
def test_the_vector_moves_from_the_forced_action_on_and_not_before(pairs, history: int) -> None:
    moved = vector_movement(dynamic(history=history), *pairs, VOCABULARY, batch_size=5)
    at = dict(zip(moved["offset"], moved["distance"]["mean"], strict=True))
    assert min(at) < -1 and max(at) > 1 and moved["alpha"] == 0.5
    assert all(distance == 0 for offset, distance in at.items() if offset < 0)
    assert all(distance > 1e-3 for offset, distance in at.items() if offset >= 0)
    assert moved["n"][moved["offset"].index(0)] == len(pairs[0]) == moved["pairs"]
    assert min(moved["plain_step"]["mean"]) > 0 and moved["between"] > 0
    for low, mean, high in zip(*(moved["distance"][name] for name in ("low", "mean", "high")), strict=True):
        assert low <= mean <= high
    json.dumps(moved)
    # Frozen at 0 the vector holds still, whatever the text.
    still = vector_movement(dynamic(alpha=0.0, history=history), *pairs, VOCABULARY)
    assert set(still["distance"]["high"]) == set(still["perturbed_step"]["high"]) == {0.0}
    assert still["between"] > 0


@torch.no_grad()
def decoded(model: AttachedLM, example) -> np.ndarray:
    """P_0 and the vector after each trigger, as decoding has them: one token after the other."""
    encoded = example.encoded(VOCABULARY.encode)
    cache = model.new_cache([list(encoded.goal_ids)])
    vectors = [cache.latent.goal[0]]
    for token in (*encoded.goal_ids, *encoded.target_ids):
        model(input_ids=torch.tensor([[token]]), cache=cache)
        if [token] == VOCABULARY.encode(TRIGGER):
            vectors.append(cache.latent.goal[0])
    return torch.stack(vectors).double().numpy()


def test_the_movement_is_that_of_decoding(pairs) -> None:
    model = dynamic(history=2)
    few = pairs[0][:2], pairs[1][:2]
    moved = vector_movement(model, *few, VOCABULARY)
    expected: dict[int, list[tuple[float, float]]] = {}
    for plain, perturbed in zip(*few, strict=True):
        p, q = decoded(model, plain), decoded(model, perturbed)
        for i in range(len(plain.actions)):
            distance = np.linalg.norm(q[i + 1] - p[i + 1]) / np.linalg.norm(p[i + 1])
            step = np.linalg.norm(q[i + 1] - q[i])
            expected.setdefault(i - perturbed.suboptimal[0], []).append((distance, step))
    kept = sorted(offset for offset, rows in expected.items() if len(rows) >= 2)
    assert moved["offset"] == kept and len(kept) > 3
    means = np.array([np.mean(expected[offset], axis=0) for offset in kept])
    np.testing.assert_allclose(moved["distance"]["mean"], means[:, 0], atol=1e-5)
    np.testing.assert_allclose(moved["perturbed_step"]["mean"], means[:, 1], rtol=1e-4)


def test_looking_leaves_no_trace(pairs) -> None:
    model = dynamic()
    model.channel.train()
    before = (random.getstate(), torch.get_rng_state().tolist(), [m.training for m in model.modules()])
    hooks = our_hooks(model.lm)
    first = vector_movement(model, *pairs, VOCABULARY)
    trigger_cost(model, VOCABULARY, places=(8,), repeats=1)
    assert vector_movement(model, *pairs, VOCABULARY) == first
    assert before == (random.getstate(), torch.get_rng_state().tolist(), [m.training for m in model.modules()])
    assert our_hooks(model.lm) == hooks
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_looked_at_is_said(pairs) -> None:
    static = attach(tiny("llama"), goal=GoalConfig(width=16))
    for call in (lambda: vector_movement(static, *pairs, VOCABULARY), lambda: trigger_cost(static, VOCABULARY)):
        with pytest.raises(ValueError, match="static"):
            call()
    model = dynamic()
    with pytest.raises(ValueError, match="at least 2 pairs"):
        vector_movement(model, pairs[0][:1], pairs[1][:1], VOCABULARY)
    with pytest.raises(ValueError, match="no pairs of one problem"):
        vector_movement(model, pairs[0], pairs[0], VOCABULARY)
    with pytest.raises(ValueError, match="places of at least 2 tokens"):
        trigger_cost(model, VOCABULARY, places=(1,))
    with pytest.raises(ValueError, match="learned positions"):
        trigger_cost(dynamic(encoder="gpt2"), VOCABULARY, places=(20,), encoder_size=8)


def test_a_trigger_reads_one_token_wherever_it_stands() -> None:
    """Not by the clock: what E_base is fed, and the keys it looks at."""
    model = dynamic()
    assert model.encoder is not None
    fed: list[tuple[int, int]] = []

    def note(_, args, kwargs) -> None:
        tokens, mask = kwargs["input_ids"].shape[1], kwargs["attention_mask"]
        fed.append((tokens, tokens if mask is None else mask.shape[-1]))

    hook = model.encoder.base_model.register_forward_pre_hook(note, with_kwargs=True)
    cost = trigger_cost(model, VOCABULARY, places=(300, 30), repeats=2, encoder_size=16)
    hook.remove()
    # (new tokens, keys) of cached, bounded, read again, at either place.
    rounds = 3 * [(1, 30), (1, 16), (30, 30), (1, 300), (1, 16), (300, 300)]
    assert fed[-len(rounds) :] == rounds
    assert cost["places"] == [30, 300] and cost["repeats"] == 2 and cost["encoder_size"] == 16
    assert all(len(cost[way]) == 2 and min(cost[way]) > 0 for way in ("cached", "bounded", "reread"))
    assert cost["difference"] < 1e-4
    json.dumps(cost)


def test_learned_positions_end_the_places_at_their_table() -> None:
    cost = trigger_cost(dynamic(encoder="gpt2"), VOCABULARY, places=(20, 500, 5000), repeats=1)
    assert cost["places"] == [20, 64] and cost["bounded"] is None and cost["difference"] < 1e-4


# ---------------------------------------------------------------- one rollout in motion


def play(episode: Episode, *, slips: bool) -> Rollout:
    """An optimal player, or one that stacks a block it does not hold once it has been pushed twice."""
    rollout = start(episode)
    while not rollout.done:
        action = forced_action(episode, rollout)
        if action is not None:
            rollout = perturb(episode, rollout, action)
            continue
        names = episode.problem.names
        best = ranked_actions(rollout.state, episode.problem.goal)[0][0]
        held = rollout.state.index(HELD) if HELD in rollout.state else -1
        wrong = ["stack", names[(held + 1) % len(names)], names[held]]
        words = [best.name, *(names[x] for x in best.blocks)]
        rollout = emit(episode, rollout, wrong if slips and len(rollout.forced) == 2 else words)
    return rollout


def rollouts_file() -> dict:
    found = episodes(BlocksworldConfig(), "test", 30, perturbations=2)
    episode = next(e for e in found if e.optimal_length >= 8 and e.perturb_at[1] - e.perturb_at[0] > 2)
    problem, arms = episode.problem, {}
    for arm in ("baseline", "dynamic"):
        end = play(episode, slips=arm == "baseline")
        arms[arm] = {
            "actions": [[action.name, list(action.blocks)] for action in end.actions],
            "forced": list(end.forced),
            "success": end.failure is None,
            "failure": end.failure,
            "reason": end.reason,
        }
    goal = [[fact.predicate, list(fact.blocks)] for fact in sorted(problem.goal)]
    return {
        "K": 2,
        "N": 5,
        "W": 16,
        "names": list(problem.names),
        "init": list(problem.init),
        "goal": goal,
        "arms": arms,
    }


ROLLOUTS = rollouts_file()
LOOKS = load("lsar.table3").looks(["baseline", "dynamic"])


def positions(svg: str, name: str, cycle: float, at: float) -> tuple[float, float]:
    """Where the keyframes have something at this moment, where it rests."""
    rules = re.search(rf"@keyframes {name}\{{(.*?\}})\}}", svg)
    assert rules
    steps = re.findall(r"([\d.]+)%\{transform:translate\(([-\d.]+)px,([-\d.]+)px\)\}", rules[1])
    return next((float(x), float(y)) for share, x, y in reversed(steps) if float(share) * cycle / 100 <= at + 0.01)


def test_every_frame_shows_the_simulators_state() -> None:
    svg = rollout_svg(ROLLOUTS, LOOKS)
    longest = max(len(rollout["actions"]) for rollout in ROLLOUTS["arms"].values())
    cycle = FRAME * (longest + 1) + REST
    for number, arm in enumerate(("baseline", "dynamic")):
        states = trace(tuple(ROLLOUTS["init"]), [(n, tuple(b)) for n, b in ROLLOUTS["arms"][arm]["actions"]])
        ground = RAIL + HEIGHT * 5 + 6
        for frame, state in enumerate(states):
            spots = [positions(svg, f"bw{number}b{x}", cycle, FRAME * (frame + 1) - 0.05) for x in range(5)]
            assert len(set(spots)) == 5
            for (x, y), on in zip(spots, state, strict=True):
                if on == TABLE:
                    assert y == ground - HEIGHT
                elif on == HELD:
                    assert y == RAIL and positions(svg, f"bw{number}h", cycle, FRAME * (frame + 1) - 0.05) == (x, y)
                else:
                    assert (x, y + HEIGHT) == spots[on]


def test_the_svg_stands_alone_and_still_says_how_it_ended() -> None:
    svg = rollout_svg(ROLLOUTS, LOOKS)
    assert not re.search(r"<script|https?:|url\(|@import", svg)
    tree = ElementTree.fromstring(standalone(svg))
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    seen: list[str] = []

    def visible(element: ElementTree.Element) -> None:
        if element.get("opacity") != "0":
            seen.extend(filter(None, [element.text, *(part.tail for part in element)]))
            for part in element:
                visible(part)

    visible(tree)
    said = " ".join(text for text in seen if "@keyframes" not in text)
    step, last = len(ROLLOUTS["arms"]["baseline"]["actions"]) + 1, len(ROLLOUTS["arms"]["dynamic"]["actions"])
    assert f"failed at step {step}" in said and ROLLOUTS["arms"]["baseline"]["reason"] in said
    assert f"goal reached after {last} actions" in said
    assert "(forced)" not in said and svg.count("(forced)") == 4
    lines = plan_lines(ROLLOUTS, LOOKS)["LS-AR Dynamic"]
    assert [i for i, (_, forced) in enumerate(lines) if forced] == ROLLOUTS["arms"]["dynamic"]["forced"]
    assert lines[-1] == (f"goal reached after {last} actions", False)


def test_names_cannot_break_out_of_the_svg() -> None:
    odd = json.loads(json.dumps(ROLLOUTS))
    odd["names"][0] = "<b>&"
    odd["arms"]["baseline"]["reason"] = "<script>"
    svg = rollout_svg(odd, LOOKS)
    assert ElementTree.fromstring(standalone(svg)) is not None and "<b>" not in svg and "<script" not in svg


# ---------------------------------------------------------------- the report's sections


def scores(solved: int, failures: str, at: int = 4) -> list[dict]:
    done = [{"success": True, "over": 2, "excess": 0, "failure": None, "failed_at": None}] * solved
    return done + [
        {"success": False, "over": -3, "excess": 9, "failure": kind, "failed_at": at} for kind in failures.split()
    ]


def movement(alpha: float) -> dict:
    series = {"mean": [0.0, 0.4, 0.3], "low": [0.0, 0.3, 0.2], "high": [0.0, 0.5, 0.4]}
    steps = dict.fromkeys(("distance", "plain_step", "perturbed_step"), series)
    return {"pairs": 40, "alpha": alpha, "between": 0.9, "offset": [-1, 0, 1], "n": [30, 40, 40], **steps}


COST = {
    "places": [50, 500, 5000],
    "cached": [0.001, 0.001, 0.002],
    "bounded": None,
    "reread": [0.002, 0.01, 0.4],
    "encoder_size": None,
    "repeats": 5,
    "difference": 1e-6,
}
ARMS = ("baseline", "dynamic", "dynamic_pool")


def run_directory(folder: Path, *, extra=((0, 6), (0, 7))) -> Path:
    results = invented() | {"table": "lsar.table3", "cells": planning_cells(ARMS, extra)}
    write(folder / "results.json", results)
    return folder


def test_sections_come_with_their_files(tmp_path: Path) -> None:
    text = Page(write_report(run_directory(tmp_path, extra=()))).text
    assert "Success under perturbations" in text
    for absent in (
        "More blocks",
        "One perturbed rollout",
        "Where plans fail",
        "How the vector moves",
        "What a trigger",
    ):
        assert absent not in text
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.html", "success.png"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = run_directory(tmp_path_factory.mktemp("table3"))
    write(folder / "rollouts.json", ROLLOUTS)
    write(folder / "vectors.json", {"arms": {"dynamic": movement(0.25), "dynamic_pool": movement(0.5)}})
    write(folder / "trigger.json", COST)
    write(folder / "dynamic" / "scores-K1-N5-W16.json", scores(6, "illegal illegal step_limit stopped_early"))
    write_report(folder)
    return folder


@pytest.mark.slow
def test_a_whole_report_of_table_3(whole: Path) -> None:
    page = Page(whole / "report.html")
    assert page.open == []
    pictures = {"success.png", "blocks.png", "vectors.png", "trigger.png", "rollout.svg"}
    assert pictures <= {path.name for path in whole.iterdir()}
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    without_pictures = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", page.source)
    assert not re.search(r"https?:|url\(|@import", without_pictures)
    assert "One test problem (N = 5, K = 2, W = 16)" in page.text
    assert "LS-AR Dynamic 0.25, LS-AR Dynamic, our data 0.5" in page.text
    rows = [[" ".join(part.split()) for part in row] for row in page.rows]
    failing = next(row for row in rows if "+2.0 (0.0)" in " ".join(row))
    heads = next(row for row in rows if row[1:2] == ["K = 0 N = 5"])
    assert failing[0] == "LS-AR Dynamic W = 16" and heads[2] == "K = 1 N = 5"
    assert failing[2] == "+2.0 (0.0) 50 / 0 / 25 / 25 illegal at 5" and failing[1] == ""
    assert [" ".join(row[0].split()) for row in page.rows].count("LS-AR Dynamic W = 16") == 2


def test_the_pictures_use_each_arms_colour(whole: Path) -> None:
    looks = load("lsar.table3").looks(ARMS)
    assert looks["dynamic_pool"].color == looks["dynamic"].color and looks["dynamic_pool"].dashed

    def has(name: str, color: str) -> bool:
        image = imread(whole / f"{name}.png")[..., :3]
        return bool((np.abs(image - np.array(mcolors.to_rgb(color))).max(-1) < 0.01).sum() > 20)

    for name, absent in (("success", "static"), ("blocks", "static"), ("vectors", "static")):
        assert has(name, looks["dynamic"].color)
        assert not has(name, load("lsar.table3").looks([absent])[absent].color)
    # Two groups of arms, two rows of panels.
    assert imread(whole / "success.png").shape[0] > 1.5 * imread(whole / "vectors.png").shape[0]


def test_plan_outcomes_count_every_plan() -> None:
    found = plan_outcomes([*scores(1, ""), *scores(0, "illegal", at=7), *scores(2, "illegal malformed", at=2)])
    assert found["shares"] == {"solved": 0.5, "illegal": 2 / 6, "malformed": 1 / 6, "stopped_early": 0, "step_limit": 0}
    assert (found["over"], found["excess"], found["first_illegal"]) == (2, 0, 4.5)
    nothing = plan_outcomes(scores(0, "malformed"))
    assert nothing["over"] is None and nothing["first_illegal"] is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rollouts.json", {**ROLLOUTS, "init": [-1] * 4}, "rollouts.json: cannot be drawn"),
        (
            "rollouts.json",
            {**ROLLOUTS, "arms": {"dynamic": {**ROLLOUTS["arms"]["dynamic"], "actions": [["putdown", [0]]]}}},
            "rollouts.json: cannot be drawn .step 0: putdown a: not holding a",
        ),
        ("vectors.json", {"dynamic": movement(0.1)}, "vectors.json: cannot be drawn .KeyError: 'arms'"),
        ("vectors.json", {"arms": {"other": movement(0.1)}}, "vectors.json: cannot be drawn .KeyError: 'other'"),
        ("trigger.json", [], "trigger.json: cannot be drawn"),
        ("dynamic/scores-K1-N5-W16.json", scores(0, "tired"), "scores-K1-N5-W16.json: .*unknown failure 'tired'"),
        ("dynamic/scores-K1-N5-W16.json", [], "scores-K1-N5-W16.json: cannot be drawn .no scores"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, name: str, content, said: str) -> None:
    write(run_directory(tmp_path) / name, content)
    with pytest.raises(ValueError, match=said) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
