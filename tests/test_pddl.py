import json
from pathlib import Path

import pytest

from sidestream.tasks.blocksworld import HELD, TABLE, Action, Fact, Problem, optimal_plan
from sidestream.tasks.blocksworld_data import plan_text, prompt_text, standard_names
from sidestream.tasks.blocksworld_loop import score_plan
from sidestream.tasks.pddl import SPELLING, read_domain, read_problem, write_plan

DATA = Path(__file__).parent / "data" / "blocksworld"
GOLDEN = [json.loads(line) for line in (DATA / "optimal.jsonl").read_text().splitlines()]
DOMAINS = {
    source: DATA / ("domain-ipc2000.pddl" if source == "ipc2000" else "domain-planbench.pddl")
    for source in {row["source"] for row in GOLDEN}
}

GOOD = """; a comment (with a parenthesis
(define (problem P) (:domain Blocks)
  (:objects A b-1 c)  ; three
  (:INIT (HANDEMPTY) (ontable a) (on b-1 a) (clear B-1) (on-table c) (clear c))
  (:goal (AND (on a B-1))))
"""
HOLDING = "(ontable a) (clear a) (holding b-1)"


def problem_file(tmp_path, text):
    path = tmp_path / "p.pddl"
    path.write_text(text)
    return path


# ---- reading


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["id"])
def test_shared_problems(row):
    domain = read_domain(DOMAINS[row["source"]])
    problem = read_problem(DATA / "problems" / f"{row['id']}.pddl", domain)
    assert list(problem.names) == row["objects"]
    below = {x: y for predicate, x, y in (atom for atom in row["init"] if atom[0] == "on")}
    assert problem.init == tuple(problem.names.index(below[x]) if x in below else TABLE for x in problem.names)
    goal = {(fact.predicate, *(problem.names[x] for x in fact.blocks)) for fact in problem.goal}
    assert goal == {tuple(atom) for atom in row["goal"]}
    # The plan survives the way through text with the names a model knows.
    plan = optimal_plan(problem.init, problem.goal)
    renamed = standard_names(problem)
    assert prompt_text(renamed).startswith("init ")
    score = score_plan(renamed, plan_text(plan, renamed.names).split())
    assert score.success and score.steps == row["optimal_length"]


def test_case_comments_and_both_spellings(tmp_path):
    problem = read_problem(problem_file(tmp_path, GOOD))
    expected = Problem(names=("a", "b-1", "c"), init=(TABLE, 0, TABLE), goal=frozenset({Fact("on", (0, 1))}))
    assert problem == expected


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("(AND (on a B-1))", "(on a b-1)", "goal", frozenset({Fact("on", (0, 1))})),
        ("(AND (on a B-1))", "(and)", "goal", frozenset()),
        ("(on a B-1)", "(holding c) (clear b-1)", "goal", frozenset({Fact("holding", (2,)), Fact("clear", (1,))})),
        ("A b-1 c)", "a - block b-1 c - block)", "names", ("a", "b-1", "c")),
        ("(HANDEMPTY) (ontable a) (on b-1 a) (clear B-1)", HOLDING, "init", (TABLE, HELD, TABLE)),
        ("(HANDEMPTY)", "(hand-empty) (handempty)", "init", (TABLE, 0, TABLE)),
        ("(:objects", "(:requirements :strips) (:objects", "init", (TABLE, 0, TABLE)),
    ],
)
def test_accepted_variants(tmp_path, old, new, field, value):
    assert old in GOOD
    assert getattr(read_problem(problem_file(tmp_path, GOOD.replace(old, new))), field) == value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # syntax
        ("(:objects A b-1 c)", "(:objects A b-1 c", "'(' of line 2 is never closed"),
        ("(AND (on a B-1))))", "(AND (on a B-1)))))", "line 5: ')' without '('"),
        ("(define", "define", "line 2: 'define' outside of (define ...)"),
        ("(define (problem P)", "(define problem", "must start with (define (problem NAME) ..."),
        ("(problem P)", "(domain P)", "expected a problem, got (domain p)"),
        ("(:domain Blocks)", "", "no (:domain ...)"),
        ("(:goal (AND (on a B-1)))", "", "no (:goal ...)"),
        ("(:goal (AND (on a B-1)))", "(:goal (on a c)) (:goal (on a c))", "two sections :goal"),
        ("(:objects A b-1 c)", "", "no (:objects ...)"),
        ("(:objects A b-1 c)", "(:objects)", "no objects"),
        ("(:objects A b-1 c)", "(:objects A b-1 (c))", ":objects must be names, got (c)"),
        ("(:objects A b-1 c)", "(:objects A b-1 c a)", "object 'a' declared twice"),
        ("(:goal", "(:metric maximize (total-cost)) (:goal", "unsupported section (:metric maximize (total-cost))"),
        ("(:goal", "(:constraints (always (clear a))) (:goal", "unsupported section (:constraints"),
        ("(:goal", "(:metric minimize f) (:metric minimize f) (:goal", "two sections :metric"),
        ("(:goal", "goal (:goal", "unsupported section 'goal'"),
        # facts
        ("(on a B-1)", "(above a b-1)", ":goal: unknown predicate 'above' in (above a b-1)"),
        ("(clear c)", "(free c)", ":init: unknown predicate 'free' in (free c)"),
        ("(on a B-1)", "(on a)", ":goal: on takes 2 blocks, got (on a)"),
        ("(clear c)", "(clear c a)", ":init: clear takes 1 blocks, got (clear c a)"),
        ("(on a B-1)", "(on a d)", ":goal: undeclared object 'd' in (on a d)"),
        ("(clear c)", "(clear d)", ":init: undeclared object 'd' in (clear d)"),
        ("(on a B-1)", "on", ":goal: expected a fact, got 'on'"),
        ("(on a B-1)", "()", ":goal: expected a fact, got ()"),
        ("(on a B-1)", "(on a (b-1))", ":goal: undeclared object (b-1)"),
        ("(on a B-1)", "(not (on a b-1))", ":goal: only plain facts are supported, got (not (on a b-1))"),
        ("(AND (on a B-1))", "(or (on a b-1))", ":goal: only plain facts are supported"),
        ("(AND (on a B-1))", "(on a b-1) (on c a)", ":goal must be one fact or (and ...)"),
        # impossible goals
        ("(on a B-1)", "(on a b-1) (on b-1 a)", "impossible :goal: block a above itself: its tower is a cycle"),
        ("(on a B-1)", "(on a a)", "impossible :goal: block a on itself"),
        ("(on a B-1)", "(on a b-1) (on a c)", "impossible :goal: block a on both b-1 and c"),
        ("(on a B-1)", "(on a c) (on b-1 c)", "impossible :goal: both a and b-1 on block c"),
        ("(on a B-1)", "(holding a) (holding c)", "impossible :goal: more than one block in hand: a, c"),
        ("(on a B-1)", "(holding a) (handempty)", "impossible :goal: hand empty and holding a"),
        ("(on a B-1)", "(holding a) (clear a)", "impossible :goal: block a in hand and also"),
        ("(on a B-1)", "(on a c) (clear c)", "impossible :goal: block c clear although a is on it"),
        ("(on a B-1)", "(on a c) (ontable a)", "impossible :goal: block a both on the table and on c"),
        # inconsistent initial states
        ("(on b-1 a)", "", "impossible :init: block b-1 is nowhere"),
        ("(clear c)", "", "impossible :init: (clear c) is missing"),
        ("(HANDEMPTY)", "", "impossible :init: (handempty) is missing"),
        ("(HANDEMPTY)", "(holding c)", "impossible :init: block c in hand and also"),
        ("(ontable a)", "(on a b-1)", "impossible :init: block a above itself"),
        ("(clear c)", "(clear c) (clear a)", "impossible :init: block a clear although b-1 is on it"),
        ("(clear c)", "(clear c) (on c b-1)", "impossible :init: block b-1 clear although c is on it"),
    ],
)
def test_nasty_problems_are_one_clear_line(tmp_path, old, new, message):
    assert old in GOOD
    path = problem_file(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ValueError) as error:
        read_problem(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ") and message in text and "\n" not in text


@pytest.mark.parametrize("content", [b"", b"; nothing but a comment", b"(define (problem p)) (define (problem q))"])
def test_not_one_definition(tmp_path, content):
    path = tmp_path / "p.pddl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected one \(define"):
        read_problem(path)


def test_binary_file(tmp_path):
    path = tmp_path / "p.pddl"
    path.write_bytes(b"\xff\xfe\x00(")
    with pytest.raises(ValueError, match="p.pddl: not a text file"):
        read_problem(path)


def test_problem_of_another_domain():
    with pytest.raises(ValueError, match="is for domain .*blocksworld-4ops.*, not for blocks"):
        read_problem(DATA / "problems" / "pb3-3-15.pddl", read_domain(DATA / "domain-ipc2000.pddl"))


# ---- domains


def test_shared_domains():
    assert read_domain(DATA / "domain-ipc2000.pddl") == ("blocks", SPELLING)
    assert read_domain(DATA / "domain-planbench.pddl") == ("blocksworld-4ops", SPELLING)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(holding ?x) (clear ?y)", "(holding ?x)", "operator 'stack' does not do what it does in Blocksworld"),
        ("(not (clear ?y))", "", "operator 'stack' does not do"),
        ("(:action stack", "(:action paint", "unexpected operator 'paint'"),
        ("(:action unstack", "(:action stack", "unexpected operator 'stack'"),
        ("(?x ?y)\n\t     :pre", "(?y ?x)\n\t     :pre", "operator 'stack' does not do"),
        (":precondition (holding ?x)", ":condition (holding ?x)", "operator 'put-down' needs :parameters"),
        (":precondition (holding ?x)", ":precondition (not (not (holding ?x)))", "operator 'put-down' does not do"),
        ("(define (domain", "(define (problem", "expected a domain"),
        ("(holding ?x)))\n\n", "(holding ?x))\n\n", "is never closed"),
    ],
)
def test_other_domains_are_refused(tmp_path, old, new, message):
    text = (DATA / "domain-ipc2000.pddl").read_text()
    assert old in text
    path = tmp_path / "d.pddl"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError) as error:
        read_domain(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


def test_domain_without_an_operator(tmp_path):
    path = tmp_path / "d.pddl"
    text = (DATA / "domain-ipc2000.pddl").read_text()
    path.write_text(text[: text.index("(:action unstack")] + ")")
    with pytest.raises(ValueError, match="no operator unstack"):
        read_domain(path)


def test_unhyphenated_domain(tmp_path):
    path = tmp_path / "d.pddl"
    text = (DATA / "domain-ipc2000.pddl").read_text()
    path.write_text(text.replace("pick-up", "PickUp").replace("put-down", "putdown"))
    domain = read_domain(path)
    assert domain.spelling == {"pickup": "pickup", "putdown": "putdown", "stack": "stack", "unstack": "unstack"}


# ---- plans


def test_plan_file(tmp_path):
    problem = Problem(names=("x1", "y"), init=(1, TABLE), goal=frozenset({Fact("on", (1, 0))}))
    plan = optimal_plan(problem.init, problem.goal)
    write_plan(tmp_path / "p.soln", problem, plan)
    expected = "(unstack x1 y)\n(put-down x1)\n(pick-up y)\n(stack y x1)\n; cost = 4 (unit cost)\n"
    assert (tmp_path / "p.soln").read_text() == expected
    write_plan(tmp_path / "p.soln", problem, plan, {name: name for name in SPELLING})
    assert (tmp_path / "p.soln").read_text() == expected.replace("-", "")
    write_plan(tmp_path / "p.soln", problem, [])
    assert (tmp_path / "p.soln").read_text() == "; cost = 0 (unit cost)\n"


def judged_status(tmp_path, row, problem, actions):
    """What unified-planning's own reader and validator say about a plan we wrote, against the original files."""
    pytest.importorskip("unified_planning", reason="the `plan` extra is not installed")
    from unified_planning.engines import SequentialPlanValidator
    from unified_planning.io import PDDLReader

    domain, path = DOMAINS[row["source"]], tmp_path / f"{row['id']}.soln"
    write_plan(path, problem, actions, read_domain(domain).spelling)
    reader = PDDLReader()
    judged = reader.parse_problem(str(domain), str(DATA / "problems" / f"{row['id']}.pddl"))
    return SequentialPlanValidator().validate(judged, reader.parse_plan(judged, str(path))).status.name


def solved(row):
    problem = read_problem(DATA / "problems" / f"{row['id']}.pddl")
    return problem, optimal_plan(problem.init, problem.goal)


# One problem of each source here, the other 66 in the slow suite: the validator reads slowly.
SAMPLE = list({row["source"]: row for row in GOLDEN}.values())


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row["id"])
def test_independent_validator_accepts_our_plans(tmp_path, row):
    problem, plan = solved(row)
    assert judged_status(tmp_path, row, problem, plan) == "VALID"


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in GOLDEN if row not in SAMPLE], ids=lambda row: row["id"])
def test_independent_validator_accepts_all_other_plans(tmp_path, row):
    test_independent_validator_accepts_our_plans(tmp_path, row)


@pytest.mark.parametrize("row", SAMPLE[:2], ids=lambda row: row["id"])
def test_independent_validator_rejects_broken_plans(tmp_path, row):
    problem, plan = solved(row)
    assert judged_status(tmp_path, row, problem, plan[:-1]) == "INVALID"  # short of the goal
    assert judged_status(tmp_path, row, problem, [Action("putdown", (0,)), *plan]) == "INVALID"  # nothing in hand
