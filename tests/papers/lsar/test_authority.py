"""LS-AR Table 5: settings, what each condition shows, whose goal counts, and every cell at smoke scale."""

import json
from dataclasses import replace

import pytest
import torch

from sidestream.experiments.engine import LocalEngine
from sidestream.experiments.report.page import write_report
from sidestream.experiments.results import load_results
from sidestream.experiments.run import run
from sidestream.experiments.settings import from_json, to_json
from sidestream.lm.texts.text import WordVocabulary
from sidestream.papers.lsar.authority import (
    CONDITIONS,
    AuthorityWork,
    _last,
    _named,
    ask_plans,
    ask_treasure,
    counted,
    published,
    table5,
)
from sidestream.papers.lsar.authority_models import Hunt, Plans, Table5
from sidestream.tasks.blocksworld import optimal_plan, satisfies
from sidestream.tasks.blocksworld_data import GOAL, PLAN, TRIGGER, WORDS, blank_goal, plan_text, prompt_text, split_of
from sidestream.tasks.treasure import partners
from sidestream.training.objectives import BallLM, ScoredLM
from sidestream.training.planning import MaskedPlans

WHERE = "sidestream.papers.lsar.authority"


@pytest.fixture(scope="module")
def hunt(tmp_path_factory) -> Hunt:
    return Hunt(table5("smoke"), tmp_path_factory.mktemp("hunt"), show=False)


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> Plans:
    return Plans(table5("smoke"), tmp_path_factory.mktemp("plans"), show=False)


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_settings_travel(scale):
    experiment = table5(scale)
    assert from_json(Table5, to_json(experiment)) == experiment
    names = [t.name for task in experiment.tasks for t in experiment.trained(task)]
    assert len(set(names)) == len(names)
    shares = {t.mask for t in experiment.trained("treasure") if t.arm in ("standard", "latent_forced")}
    assert {0.0, 0.3, 0.9} <= shares and (scale == "smoke" or shares == {0.0, 0.1, 0.3, 0.5, 0.9})


def test_mistakes_in_settings_are_named():
    smoke = table5("smoke")
    for change, words in (
        ({"arms": ("standart",)}, "standart"),
        ({"sweep": (0.0, 0.3)}, "p = 0 is the arm standard"),
        ({"sweep": ()}, "sweep is empty"),
        ({"tasks": ("blocksworld",), "arms": ("ball",)}, "none of the arms"),
        ({"overrides": 2.0}, "share"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(smoke, **change)


def test_a_prompt_out_of_view_is_refused(tmp_path):
    with pytest.raises(ValueError, match="in view"):
        AuthorityWork(replace(table5("smoke"), horizon=80), tmp_path).check()


def test_paper_values_stand_where_they_belong():
    def value(arm, p, condition, metric):
        return published(arm, metric, {"task": "treasure", "p": p, "condition": condition})

    assert value("latent_forced", 0.3, "(A, B)", "goal_b") == 0.672
    assert value("latent_forced", 0.5, "(A, B)", "goal_b") is None
    assert value("standard", 0.0, "(A, None)", "goal_a") == 0.304
    assert value("baseline", 0.0, "(B, B)", "goal_b") == 0.622
    assert value("standard", 0.0, "(A, B)", "neither") is None
    assert value("ball", 0.3, "(A, B)", "goal_b") is None


# ---------------------------------------------------------------- Treasure Hunt


def test_partners_share_nothing(hunt):
    assert all(a.item != b.item and a.code != b.code for a, b in zip(hunt.tests, hunt.partners, strict=True))
    with pytest.raises(ValueError, match="no other goal"):
        partners([hunt.tests[0], hunt.tests[0]])


class Says:
    """Greedy decoding replaced by a player that copies the goal of one channel."""

    def __init__(self, hunt, channel):
        self.hunt, self.channel, self.vectors = hunt, channel, None

    def __call__(self, model, forced, *, new_tokens, window, goal):
        answers = {problem.goal_ids: problem.answer_ids for problem in self.hunt.tests}
        said = []
        for row, text in enumerate(forced):
            ids = () if goal is None or self.channel == "text" else answers.get(goal[row], ())
            if self.channel == "text":
                ids = next((answer for stated, answer in answers.items() if tuple(text[: len(stated)]) == stated), ())
            said.append(([*ids, *[0] * new_tokens])[:new_tokens])
        return said


@pytest.mark.parametrize("channel", ["text", "vector"])
def test_conditions_show_what_they_say(hunt, channel, monkeypatch):
    """A player of one channel alone answers exactly what that channel states; with that channel blank, nothing."""
    monkeypatch.setattr(f"{WHERE}.greedy", Says(hunt, channel))
    monkeypatch.setattr(
        f"{WHERE}._vectors",
        lambda model, vector, goals: (
            None if vector == "none" else [None if vector == "noise" else (b if vector == "b" else a) for a, b in goals]
        ),
    )
    for text, vector in CONDITIONS.values():
        stated = text if channel == "text" else vector
        expected = stated if stated in ("a", "b") else "neither"
        outcomes = ask_treasure(None, hunt, text, vector, closed=False)
        assert outcomes == [expected] * len(hunt.tests), (text, vector)


def test_half_of_each_goal_is_neither_and_is_told(hunt):
    a, b = hunt.tests[0], hunt.partners[0]
    for code, item, outcome in ((a, a, "a"), (b, b, "b"), (a, b, "mixed"), (b, a, "mixed")):
        assert _named((a, b), code.code_ids + item.item_ids, hunt.vocabulary.decode) == outcome
    assert _named((a, b), a.code_ids, hunt.vocabulary.decode) == "neither"
    trained = hunt.settings.trained("treasure")[0]
    found = {one.metric: one.values for one in counted(trained, "(A, B)", ["a", "mixed", "neither", "b"])}
    assert found == {"goal_a": [1, 0, 0, 0], "goal_b": [0, 0, 0, 1], "neither": [0, 1, 1, 0], "mixed": [0, 1, 0, 0]}


def test_a_blank_text_states_no_goal(hunt, monkeypatch):
    shown = []
    monkeypatch.setattr(
        f"{WHERE}.greedy",
        lambda model, forced, new_tokens, **_: shown.extend(forced) or [[0] * new_tokens for _ in forced],
    )
    ask_treasure(None, hunt, "none", "none", closed=True)
    ask_treasure(None, hunt, "a", "none", closed=True)
    number = len(hunt.tests)
    for problem, blank, full in zip(hunt.tests, shown[:number], shown[number:], strict=True):
        assert full == problem.forced_ids and len(blank) == len(full)
        assert str(problem.code) not in hunt.vocabulary.decode(blank) and str(problem.code) in hunt.vocabulary.decode(
            full
        )


def test_overrides_in_training_state_another_goal_and_keep_the_answer(hunt):
    clean, noisy = [problem.example for problem in hunt.training], hunt.overridden(1.0)
    changed = [(a, b) for a, b in zip(clean, noisy, strict=True) if a != b]
    assert len(changed) > len(clean) / 4 and hunt.overridden(0.0) == clean
    for before, after in changed:
        assert (after.goal_ids, after.target_ids) == (before.goal_ids, before.target_ids)
        assert "passcode" in hunt.vocabulary.decode(after.context_ids[:-8])
        assert sum(map(len, after)) - 1 <= hunt.settings.window


def test_training_rows_keep_the_prompt_in_view(hunt):
    longest = max(sum(map(len, problem.example)) for problem in hunt.training)
    assert hunt.settings.window - 8 < longest <= hunt.settings.window + 1


def test_training_in_a_ball_is_harder_than_outside(hunt):
    model = hunt.attached(hunt.fresh(hunt.settings.encoder), pool_layer=1)
    torch.nn.init.normal_(model.channel.film.projection.weight, std=0.3)
    ids = torch.tensor([problem.forced_ids + problem.answer_ids for problem in hunt.tests[:1] * 4])
    labels = torch.full_like(ids[:, :-1], -100)
    labels[:, -3:] = ids[:, -3:]
    batch = {"input_ids": ids[:, :-1], "attention_mask": torch.ones_like(ids[:, :-1]), "labels": labels}
    pooled = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    losses = [BallLM(model, radius=r, steps=2)(**batch, pooled=pooled)["loss"].item() for r in (1e-6, 0.1, 0.5)]
    assert losses[0] < losses[1] < losses[2]
    # Every row has as many scored tokens, so that next to no ball gives what no ball gives.
    assert losses[0] == pytest.approx(ScoredLM(model)(**batch, pooled=pooled)["loss"].item(), rel=1e-4)
    BallLM(model, radius=0.1, steps=1)(**batch, pooled=pooled)["loss"].backward()
    assert model.channel.film.projection.weight.grad.abs().sum() > 0


# ---------------------------------------------------------------- Blocksworld


def test_pairs_share_the_state_and_not_the_goal(plans):
    for a, b in plans.tests:
        assert a.init == b.init and a.goal != b.goal and not satisfies(a.init, b.goal)
        assert split_of(a, "fixed") == split_of(b, "fixed") == "test"
    assert len(set(plans.tests)) == len(plans.tests)


def test_only_the_goal_is_blanked(plans):
    words, others = (prompt_text(problem).split() for problem in plans.tests[0])
    blank, start = blank_goal(words, GOAL, PLAN), words.index(GOAL)
    assert words[start:] != others[start:] and blank[:start] == words[:start] == others[:start]
    assert blank[start:] == [GOAL] * len(words[start:-1]) + [PLAN]


def test_rows_are_masked_for_the_decoder_alone(plans):
    texts, marks = plans.models.encoded("faithful", own=False), plans.vocabulary.encode(f"{GOAL} {PLAN}")
    size = {"batch_size": 8, "steps": 4, "seed": 0}
    never, always, some = (MaskedPlans(texts, mask=p, marks=marks, **size) for p in (0.0, 1.0, 0.5))
    masked = 0
    for i in range(len(never)):
        plain, blank = never[i], always[i]
        assert blank["full"] == plain["full"] and blank["labels"] == plain["labels"] and blank["ids"] != plain["ids"]
        masked += some[i]["ids"] == blank["ids"]
    assert 4 < masked < 28


class Plays:
    """Closed-loop play replaced by a player that follows the goal of one channel."""

    def __init__(self, plans, channel):
        self.goals = {prompt_text(problem): problem for pair in plans.tests for problem in pair}
        self.channel = channel

    def __call__(self, model, played, vocabulary, *, window, goals):
        from sidestream.tasks.blocksworld_loop import score_plan

        scores = []
        for row, episode in enumerate(played):
            followed = episode.prompt if self.channel == "text" else goals[row] if goals else ""
            problem = self.goals.get(followed)
            words = plan_text(optimal_plan(problem.init, problem.goal), problem.names).split() if problem else []
            scores.append(score_plan(episode.problem, words))
        return scores


@pytest.mark.parametrize("channel", ["text", "vector"])
def test_plans_count_for_the_channel_that_is_followed(plans, channel, monkeypatch):
    monkeypatch.setattr(f"{WHERE}.run_episodes", Plays(plans, channel))
    decode = plans.vocabulary.decode
    monkeypatch.setattr(
        f"{WHERE}._vectors",
        lambda model, vector, goals: (
            None
            if vector == "none"
            else ["" if vector == "noise" else decode(b if vector == "b" else a) for a, b in goals]
        ),
    )
    for text, vector in CONDITIONS.values():
        stated = text if channel == "text" else vector
        expected = stated if stated in ("a", "b") else "neither"
        assert ask_plans(None, plans, text, vector, closed=False) == [expected] * len(plans.tests), (text, vector)


def test_the_goal_reached_last_counts():
    reached = ((3, None), (None, 3), (2, 5), (5, 2), (None, None))
    assert [_last(*pair) for pair in reached] == ["a", "b", "b", "a", "neither"]


def test_the_marks_are_words():
    assert {GOAL, PLAN, TRIGGER} <= set(WORDS) and WordVocabulary(WORDS).encode(f"{GOAL} {PLAN}")


# ---------------------------------------------------------------- the table


FULL = table5("smoke")
SMALL = replace(FULL, tasks=("treasure",), arms=("baseline", "standard"))


@pytest.mark.parametrize("experiment", [SMALL, pytest.param(FULL, marks=pytest.mark.slow)], ids=["small", "full"])
def test_every_cell_at_smoke_scale(tmp_path, experiment):
    experiment = replace(experiment, test_problems=4, sweep=(0.3,), train_problems=16)
    experiment = replace(experiment, blocksworld=replace(experiment.blocksworld, test_problems=2, train_problems=16))
    results = run(experiment, tmp_path / "run", command="test", engine=LocalEngine(1))
    assert load_results(tmp_path / "run" / "results.json")["cells"] == results["cells"]
    seen = {(c["where"]["task"], c["arm"], c["where"]["condition"], c["metric"]) for c in results["cells"]}
    for task in experiment.tasks:
        for trained in experiment.trained(task):
            here = {condition for t, arm, condition, _ in seen if (t, arm) == (task, trained.arm)}
            closed = trained.arm == "baseline"
            assert here == ({"(A, A)", "(B, B)", "(None, None)"} if closed else set(CONDITIONS))
    by_place: dict[str, float] = {}
    for cell in results["cells"]:
        key = json.dumps([cell["arm"], cell["where"]])
        by_place[key] = by_place.get(key, 0.0) + cell["value"] * (cell["metric"] != "mixed")
    assert all(total == pytest.approx(1.0) for total in by_place.values())
    assert any(note.startswith("Utility first") for note in results["notes"])
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Authority over p" in page and (tmp_path / "run" / "authority.png").exists()
    (tmp_path / "run" / "results.json").unlink()
    again = run(experiment, tmp_path / "run", command="test", resume=True)
    assert again["cells"] == results["cells"] and again["parameters"] == results["parameters"]


def test_jobs_need_what_they_share(tmp_path):
    jobs = {job.name: job for job in AuthorityWork(FULL, tmp_path).jobs()}
    assert jobs["treasure-goal"].needs == ("treasure-base",) and jobs["treasure-ball"].needs == ("treasure-goal",)
    assert jobs["blocksworld-standard"].needs == ("blocksworld/static",) and not jobs["treasure-baseline"].needs
    closed = AuthorityWork(replace(FULL, arms=("baseline",)), tmp_path).jobs()
    assert [job.name for job in closed] == ["treasure-baseline", "blocksworld-baseline"]


def test_a_run_that_an_older_version_began_is_told(tmp_path):
    work = AuthorityWork(SMALL, tmp_path)
    work.check()
    (tmp_path / "treasure-standard").mkdir()
    (tmp_path / "treasure-standard" / "arm.json").write_text("{}")
    with pytest.raises(ValueError, match="older version"):
        work.check()


def test_scale_is_named():
    with pytest.raises(ValueError, match="smoke, cpu or paper"):
        table5("tiny")  # type: ignore[arg-type]
