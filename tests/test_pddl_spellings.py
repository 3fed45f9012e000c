"""One problem, written in every way that generators and benchmarks write it, is read as that problem."""

import gzip
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.tasks.blocksworld import HELD, TABLE, Problem, optimal_plan, state_facts
from sidestream.tasks.pddl import Domain, included_domain, read_domain, read_problem, write_plan

NAMES = ("b1", "b-2", "a", "7", "?x", "#c", "on", "problem", "block", "c.d")


def world(rng):
    names = rng.sample(NAMES, rng.randint(1, 5))

    def state():
        order, places = rng.sample(range(len(names)), len(names)), [TABLE] * len(names)
        for below, block in zip(order, order[1:], strict=False):
            places[block] = rng.choice([below, TABLE])
        if rng.random() < 0.3:
            places[order[-1]] = HELD
        return tuple(places)

    facts = state_facts(state())
    return Problem(names=tuple(names), init=state(), goal=frozenset(rng.sample(facts, rng.randint(0, len(facts)))))


def nested(rng, facts):
    """The facts in their order, some of them together in an (and ...), at any depth."""
    if len(facts) < 2 or rng.random() < 0.3:
        return facts
    first, last = sorted(rng.sample(range(len(facts) + 1), 2))
    within = " ".join(nested(rng, facts[first:last])) if last - first < len(facts) else " ".join(facts)
    return [*facts[:first], f"({rng.choice(['and', 'AND'])} {within})", *facts[last:]]


def written(rng, problem):
    """The bytes of a file."""
    words = {
        "handempty": rng.choice(["handempty", "hand-empty", "arm-empty", "hand_empty", "armempty", "ARM-EMPTY"]),
        "ontable": rng.choice(["ontable", "on-table", "on_table", "OnTable"]),
        "on": rng.choice(["on", "ON"]),
        "clear": rng.choice(["clear", "Clear"]),
        "holding": rng.choice(["holding", "HOLDING"]),
    }

    def shuffled(facts):
        said = [f"({' '.join([words[fact.predicate], *(problem.names[x] for x in fact.blocks)])})" for fact in facts]
        return rng.sample(said, len(said))

    names, holds = problem.names, state_facts(problem.init)
    init = shuffled(holds)
    init += rng.choices(init, k=rng.randint(0, 2))
    init += rng.choice(
        [[], ["(= (total-cost) 0)"], [f"(= (weight {names[0]}) 2.5)"], [f"(not (on {names[0]} {names[0]}))"]]
    )
    if rng.random() < 0.3:
        init += [f"({rng.choice(['block', 'Block'])} {name})" for name in names]
    goal = nested(rng, shuffled(sorted(problem.goal)))
    types = rng.choice(["", " - block", " - (either block cube)"])
    objects = " ".join(f"{name}{types}" for name in names) if rng.random() < 0.5 else " ".join(names) + types
    sections = [
        f"(:domain {rng.choice(['blocksworld-4ops', 'BLOCKS', 'blocks-strips-typed'])})",
        f"(:objects {objects})",
        f"(:init {' '.join(nested(rng, init))})",
        f"(:goal {goal[0] if len(goal) == 1 else '(and ' + ' '.join(goal) + ')'})",
        rng.choice(["", "(:requirements :strips :typing :action-costs)"]),
        rng.choice(["", "(:metric minimize (total-cost))", "(:metric MINIMIZE total-time)"]),
        rng.choice(["", "(:constraints)", "(:constraints (and))"]),
        rng.choice(["", "(:length (:serial 8) (:parallel 3))"]),
    ]
    end = rng.choice(["\n", "\r\n", "\r"])
    encoding = rng.choice(["utf-8", "utf-8-sig", "utf-16", "latin-1"])
    comment = rng.choice(["; of old (and", "; é\x85)", "; \u2028 (" if encoding != "latin-1" else "; \xa0)"])
    text = f"{comment}{end}(define (problem BW-rand-3){end.join(rng.sample(sections, 8))}){comment}"
    data = (text.upper() if rng.random() < 0.2 else text).encode(encoding)
    return gzip.compress(data) if rng.random() < 0.2 else data


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_every_spelling_is_the_same_problem(tmp_path_factory, seed):
    rng = random.Random(seed)
    problem = world(rng)
    path = tmp_path_factory.getbasetemp() / "spelled.pddl"
    path.write_bytes(written(rng, problem))
    assert read_problem(path) == problem
    # One fact fewer is another problem, or none.
    if problem.goal:
        fewer = Problem(names=problem.names, init=problem.init, goal=frozenset(sorted(problem.goal)[1:]))
        path.write_bytes(written(rng, fewer))
        assert read_problem(path) == fewer != problem


DOMAIN = """(define (domain blocksworld)
(:requirements :strips :typing :action-costs) (:types block)
(:predicates (clear ?x) (on-table ?x) (arm-empty) (holding ?x) (on ?x ?y)) (:functions (total-cost) - number)
(:action pickup :parameters (?ob - block) :precondition (and (clear ?ob) (and (on-table ?ob) (arm-empty)))
 :effect (and (holding ?ob) (not (clear ?ob)) (not (on-table ?ob)) (not (arm-empty)) (increase (total-cost) 1)))
(:action putdown :parameters (?ob - block) :precondition (holding ?ob)
 :effect (and (clear ?ob) (arm-empty) (on-table ?ob) (not (holding ?ob)) (increase (total-cost) 1)))
(:action stack :parameters (?ob ?underob - block)
 :precondition (and (clear ?underob) (holding ?ob) (not (= ?ob ?underob)))
 :effect (and (arm-empty) (clear ?ob) (on ?ob ?underob) (not (clear ?underob)) (not (holding ?ob))
 (increase (total-cost) 1)))
(:action unstack :parameters (?ob ?underob - block) :precondition (and (on ?ob ?underob) (clear ?ob) (arm-empty))
 :effect (and (holding ?ob) (clear ?underob) (not (on ?ob ?underob)) (not (clear ?ob)) (not (arm-empty))
 (increase (total-cost) 1))))
"""
PROBLEM = """(define (problem BW-rand-3) (:domain blocksworld) (:objects b1 b2 b3 - block)
(:init (= (total-cost) 0) (arm-empty) (on-table b1) (on b2 b1) (clear b2) (on-table b3) (clear b3))
(:goal (and (on b1 b2) (on b2 b3))) (:metric minimize (total-cost)))
"""
PLAIN = {"pickup": "pickup", "putdown": "putdown", "stack": "stack", "unstack": "unstack"}


def test_a_generators_domain_its_costs_and_an_independent_judge(tmp_path):
    pytest.importorskip("unified_planning", reason="the `plan` extra is not installed")
    from unified_planning.engines import SequentialPlanValidator
    from unified_planning.io import PDDLReader

    for name, text in (("d.pddl", DOMAIN.replace("(not (= ?ob ?underob))", "")), ("p.pddl", PROBLEM)):
        (tmp_path / name).write_text(text)
    domain = read_domain(tmp_path / "d.pddl")
    assert domain == Domain("blocksworld", PLAIN)
    problem = read_problem(tmp_path / "p.pddl", domain)
    plan = optimal_plan(problem.init, problem.goal)
    assert len(plan) == 4
    judged = PDDLReader().parse_problem(str(tmp_path / "d.pddl"), str(tmp_path / "p.pddl"))
    for spelling, right in ((domain.spelling, True), ({**PLAIN, "unstack": "stack"}, False)):
        write_plan(tmp_path / "p.soln", problem, plan, spelling)
        found = SequentialPlanValidator().validate(judged, PDDLReader().parse_plan(judged, str(tmp_path / "p.soln")))
        assert (found.status.name == "VALID") == right


@pytest.mark.parametrize("text", [DOMAIN + PROBLEM, PROBLEM + DOMAIN])
def test_domain_and_problem_in_one_file(tmp_path, text):
    path = tmp_path / "both.pddl"
    path.write_text(text)
    problem = read_problem(path)
    assert problem.init == (TABLE, 0, TABLE) and len(problem.goal) == 2
    assert read_domain(path) == included_domain(path) == Domain("blocksworld", PLAIN)
    path.write_text(PROBLEM)
    assert included_domain(path) is None and read_problem(path) == problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DOMAIN + PROBLEM + PROBLEM, "or a domain and a problem, found 3 expressions"),
        (DOMAIN + PROBLEM.replace("(:domain blocksworld)", "(:domain roads)"), "is for domain (roads), not for blocks"),
        (DOMAIN.replace("(arm-empty) (clear ?ob)", "(arm-empty)") + PROBLEM, "'stack' does not do what it does"),
        (DOMAIN, "expected a problem, got (domain blocksworld)"),
        (PROBLEM.replace("(and (on b1 b2)", "(and (and (not (on b1 b2)))"), "only plain facts are supported, got (not"),
        (PROBLEM.replace("(and (on b1 b2)", "(and (forall (?x) (clear ?x))"), "only plain facts are supported"),
        (PROBLEM.replace("(and (on b1 b2)", "(and (preference q (on b1 b2))"), "only plain facts are supported"),
        (PROBLEM.replace("(and (on b1 b2)", "(and (<= (total-cost) 5)"), "only plain facts are supported"),
        (PROBLEM.replace("(arm-empty)", "(arm-empty) (not (clear b3))"), "(clear b3) is both stated and denied"),
        (PROBLEM.replace("(arm-empty)", "(arm-empty) (not (large b3))"), "unknown predicate 'large'"),
        (PROBLEM.replace("(arm-empty)", "(arm-empty) (= b1 b2)"), "only plain facts are supported, got (= b1 b2)"),
        (PROBLEM.replace("(arm-empty)", "(arm-empty) (block b1)"), "(block b2) is missing, and others are there"),
        (PROBLEM.replace("(and (on b1 b2)", "(and (block b1)"), "(block b1) is missing"),
        (PROBLEM.replace("(arm-empty)", "(handempty robot)"), "handempty takes 0 blocks, got (handempty robot)"),
        (PROBLEM.replace("(arm-empty)", "(and " * 99 + "(arm-empty)" + ")" * 99), "line 2: nested too deeply"),
        (PROBLEM.replace("b3", "bé").encode("latin-1"), "line 1: 'bé' is not UTF-8, which only a comment need not be"),
        (PROBLEM.encode("utf-16-le"), "not a text file"),
        (b"\xff\xfe" + PROBLEM.encode("utf-16-le")[:-1], "not a text file"),
        (gzip.compress(PROBLEM.encode())[:-9], "broken gzip file"),
        (b"\x89PNG\r\n\x1a\n\xff define", "is not UTF-8"),
    ],
)
def test_what_is_out_of_reach_is_one_line(tmp_path, text, message):
    path = tmp_path / "p.pddl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as error:
        read_problem(path)
    said = str(error.value)
    assert said.startswith(f"{path}: ") and message in said and "\n" not in said
