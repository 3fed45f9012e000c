"""Every attack judged under every defence, on players that follow one channel alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from families import attached
from sidestream.evaluation.attacks import Measured
from sidestream.evaluation.attacks_subject import Problem, Subject
from sidestream.evaluation.attacks_suite import DEFENCES, Attacks, Strength, best_override

SMOKE = Strength(
    token_problems=3,
    token_steps=2,
    token_candidates=4,
    pgd_steps=2,
    embedding_steps=2,
    radii=(0.1, 0.5),
    shares=(0.5,),
    tampers=2000,
)
ROWS = 6


def problem(row: int) -> Problem:
    other = (row + 1) % ROWS
    goal, wanted = (60 + row, 70 + row), (60 + other, 70 + other)
    return Problem(
        goal=goal,
        stated=goal,
        context=tuple(range(36, 36 + 12)),
        question=(50, 51),
        answer=(80 + row, 2),
        other=other,
        overrides={"restate": wanted, "answered": (50, 51, 80 + other, 2)},
    )


def subject(mode: str = "static", **changes: Any) -> Subject:
    settings: dict[str, Any] = {
        "model": attached("llama", mode),
        "problems": [problem(row) for row in range(ROWS)],
        "calibration": [(36 + k % 12, 40 + k % 7, 50 + k % 9) for k in range(99)],
        "window": None,
        "sentence_ends": frozenset({40, 45}),
        "allowed": None,
    }
    return Subject(**{**settings, **changes})


class Follower(Attacks):
    """Attacks on a player that says the answer of the goal in one channel: the last one that the text states, or the
    one whose vector is nearest to what FiLM gets."""

    def __init__(self, channel: str, **changes: Any) -> None:
        super().__init__(subject(**changes), SMOKE)
        self.channel = channel

    def _objective(self, defence, targets, window):
        attacks = self

        class Player:
            def measure(self, texts, vectors=None, rows=None):
                said = [attacks.says(defence, *pair) for pair in zip(texts, vectors, strict=True)]
                hit = torch.tensor([one == target for one, target in zip(said, targets, strict=True)])
                return Measured(torch.zeros(len(hit)), hit)

            def counts(self):
                return 0, 0

            def spent(self, since, steps):
                from sidestream.evaluation.attacks import Cost

                return Cost(steps=steps, forwards=len(targets))

        return Player()

    def says(self, defence, text, vector):
        if self.channel == "text":
            found = [(k, p) for p in self.problems for k in range(len(text)) if tuple(text[k : k + 2]) == p.goal]
            return max(found, key=lambda pair: pair[0])[1].answer if found else ()
        if defence == "codes":
            vector = self.codes(vector.unsqueeze(0))[0]
        return self.problems[int((self.honest - vector).norm(dim=1).argmin())].answer


def rates(attacks: Attacks, name: str) -> dict[str, tuple[float, float, float]]:
    """Defence -> shares of success, kept, refused."""
    found = attacks.run(name)["rows"]
    return {d: tuple(sum(found[d][key]) / ROWS for key in ("success", "kept", "refused")) for d in DEFENCES}


# ---------------------------------------------------------------- judging


def test_nothing_done_is_nothing_refused():
    for channel in ("text", "vector"):
        assert rates(Follower(channel), "none") == dict.fromkeys(DEFENCES, (0.0, 1.0, 0.0))


def test_a_player_of_its_vector_ignores_every_text():
    attacks = Follower("vector")
    for place in ("front", "middle", "end", "repeated"):
        assert rates(attacks, f"override restate, {place}") == dict.fromkeys(DEFENCES, (0.0, 1.0, 0.0))
    ahead = rates(attacks, "override restate, head")
    assert ahead["none"] == ahead["codes"] == (0.0, 1.0, 0.0)
    assert ahead["arbitration"] == ahead["signed"] == (0.0, 0.0, 1.0)  # who reads the head reads the attacker's goal
    replaced = rates(attacks, "prompt replaced")
    assert replaced["none"] == replaced["codes"] == (0.0, 1.0, 0.0)
    assert replaced["arbitration"] == replaced["signed"] == (0.0, 0.0, 1.0)  # text and vector disagree


def test_a_player_of_its_text_follows_overrides_and_no_vector():
    attacks = Follower("text")
    assert rates(attacks, "override restate, end") == dict.fromkeys(DEFENCES, (1.0, 0.0, 0.0))
    assert rates(attacks, "override answered, end") == dict.fromkeys(DEFENCES, (0.0, 1.0, 0.0))  # states no goal
    swapped = rates(attacks, "swap")
    assert swapped["none"] == swapped["codes"] == (0.0, 1.0, 0.0)
    assert swapped["arbitration"] == swapped["signed"] == (0.0, 0.0, 1.0)


def test_what_each_defence_does_to_a_swap():
    attacks = Follower("vector")
    swapped = rates(attacks, "swap")
    assert swapped["none"] == swapped["codes"] == (1.0, 0.0, 0.0)  # an admissible goal is an admissible goal
    assert swapped["arbitration"] == swapped["signed"] == (0.0, 0.0, 1.0)
    # A change of goal in both channels is what nobody can tell from an honest one.
    assert rates(attacks, "both replaced") == dict.fromkeys(DEFENCES, (1.0, 0.0, 0.0))


def test_codes_take_back_what_does_not_reach_the_next_one():
    attacks = Follower("vector", calibration=[problem(k % ROWS).goal for k in range(99)])
    near, far = (rates_of(attacks, share) for share in (0.1, 0.95))
    assert near["codes"] == (0.0, 1.0, 0.0) and far["codes"] == (1.0, 0.0, 0.0)
    assert near["arbitration"] == near["signed"] == (0.0, 0.0, 1.0)
    reach = attacks.codes.margin(attacks.honest) / attacks.honest.norm(dim=1)
    shares = attacks.certified()
    assert shares == {f"{r:g}": pytest.approx(float((reach > r).float().mean())) for r in SMOKE.radii}


def rates_of(attacks: Attacks, share: float) -> dict[str, tuple[float, float, float]]:
    attacks.attacks["moved"] = lambda defence: attacks._interpolate(share, defence)
    attacks.rows["moved"], attacks.windows["moved"] = list(range(ROWS)), None
    return rates(attacks, "moved")


def test_every_tampered_seal_is_refused_and_every_honest_one_accepted():
    attacks = Attacks(subject(), SMOKE)
    assert attacks.tampered() == {"honest": ROWS, "goals": ROWS, "accepted": 0, "tampered": SMOKE.tampers}
    # The control: the same count with a check that believes everything.
    assert attacks._unsealed(attacks.seals[0], attacks.problems[0].goal, attacks.honest[0])
    assert not attacks._unsealed(attacks.seals[0], attacks.problems[0].goal, attacks.honest[1])
    assert not attacks._unsealed(attacks.seals[0], attacks.problems[1].goal, attacks.honest[0])
    forged = attacks._forged(attacks.seals[0], attacks.honest[0])
    assert forged == attacks.seals[0] and attacks._forged(forged, attacks.honest[1]) != forged


def test_an_override_at_the_head_pushes_the_goal_back():
    attacks = Attacks(subject(), SMOKE)
    tried = attacks.attacks["override restate, head"]("none")
    for row, text in enumerate(tried.texts):
        own, wanted = attacks.problems[row], attacks.problems[attacks.others[row]]
        assert tuple(text[:4]) == wanted.goal + own.goal and text[-2:] == own.question
        assert len(text) == len(own.text) and tried.stated[row] == wanted.goal


def test_an_attacker_who_tries_every_override_is_at_least_as_good():
    attacks = Follower("text")
    records = {name: attacks.run(name) for name in attacks.override_names}
    best = best_override(records, attacks.override_names)
    assert all(best["rows"]["none"]["success"]) and not any(best["rows"]["none"]["kept"])
    assert best["cost"]["none"]["forwards"] == len(attacks.override_names)


def test_vector_attacks_stay_in_their_ball_and_arbitration_shrinks_it():
    attacks = Attacks(subject(), SMOKE)
    for defence in DEFENCES:
        moved = attacks.attacks["PGD 0.5"](defence).vectors
        away = ((moved - attacks.honest).norm(dim=1) / attacks.honest.norm(dim=1)).max().item()
        assert away <= (attacks.arbiter.threshold if defence == "arbitration" else 0.5) + 1e-6
    assert not any(attacks.run("PGD 0.5")["rows"]["arbitration"]["refused"])  # the attacker who knows it is let pass
    assert all(attacks.run("PGD 0.5")["rows"]["signed"]["refused"])
    cost = attacks.run("PGD 0.5")["cost"]
    # Two starts of two steps, one forward more each; against codes two straight walks besides.
    assert (cost["none"]["forwards"], cost["none"]["backwards"], cost["codes"]["forwards"]) == (6, 4, 8)


def test_a_token_search_begins_with_the_override_and_costs_what_it_says():
    attacks = Attacks(subject(), replace(SMOKE, token_length=2, token_steps=1, token_candidates=3, token_problems=2))
    tried = attacks.attacks["token search"]("none")
    for row, text in enumerate(tried.texts):
        plain = attacks._inserted(row, attacks.problems[row].overrides["restate"], "end")[0]
        assert sum(a != b for a, b in zip(text, plain, strict=True)) <= 1
    found = attacks.run("token search")
    assert len(found["rows"]["none"]["kept"]) == 2 and found["cost"]["none"]["forwards"] == 4


def test_forced_tokens_out_of_view_reach_a_tracker_alone():
    attacks = Attacks(subject("dynamic"), SMOKE)
    names = [name for name in attacks.attacks if name.endswith("out of view")]
    assert len(names) == 3 and all(attacks.windows[name] == 20 for name in names)
    tried = attacks.attacks["override restate, out of view"]("none")
    assert all(len(text) > 14 for text in tried.texts)
    assert not any(name.endswith("out of view") for name in Attacks(subject(), SMOKE).attacks)


def test_a_strength_out_of_range_is_named():
    for change, words in (({"radii": ()}, "radii"), ({"shares": (1.0,)}, "swap"), ({"copies": 1}, "copies")):
        with pytest.raises(ValueError, match=words):
            replace(SMOKE, **change)
