import json
import random
from itertools import chain, combinations, islice, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.tasks import blocksworld as bw
from sidestream.tasks.blocksworld import HELD, OPERATORS, PREDICATES, TABLE, Action, Fact, Problem
from sidestream.tasks.blocksworld_data import (
    WORDS,
    BlocksworldConfig,
    data_hash,
    examples,
    parse_action,
    plan_text,
    problems,
    prompt_text,
    relabel,
    split_of,
    standard_names,
    write_jsonl,
)

DATA = Path(__file__).parent / "data" / "blocksworld"
GOLDEN = [json.loads(line) for line in (DATA / "optimal.jsonl").read_text().splitlines()]


def all_facts(blocks: int) -> list[Fact]:
    return [
        Fact(predicate, tuple(where))
        for predicate, arity in PREDICATES.items()
        for where in ([()] if arity == 0 else [(x,) for x in range(blocks)])
        if arity < 2
    ] + [Fact("on", (x, y)) for x in range(blocks) for y in range(blocks)]


def all_actions(blocks: int) -> list[Action]:
    singles = [Action(name, (x,)) for name in ("pickup", "putdown") for x in range(blocks)]
    pairs = [(x, y) for x in range(blocks) for y in range(blocks)]
    return singles + [Action(name, pair) for name in ("stack", "unstack") for pair in pairs]


def strips(facts: set[Fact], action: Action) -> set[Fact] | None:
    """The oracle: operators as sets of facts, straight from the PDDL domain."""
    x, y = action.blocks[0], action.blocks[-1]
    on, table, clear, clear_y = Fact("on", (x, y)), Fact("ontable", (x,)), Fact("clear", (x,)), Fact("clear", (y,))
    held, empty = Fact("holding", (x,)), Fact("handempty")
    needs, deletes, adds = {
        "pickup": ({clear, table, empty}, {clear, table, empty}, {held}),
        "putdown": ({held}, {held}, {clear, empty, table}),
        "stack": ({held, clear_y}, {held, clear_y}, {clear, empty, on}),
        "unstack": ({on, clear, empty}, {on, clear, empty}, {held, clear_y}),
    }[action.name]
    return (facts - deletes) | adds if needs <= facts else None


def problem_strategy(blocks: int, partial: bool) -> st.SearchStrategy[Problem]:
    states = st.sampled_from(bw.state_graph(blocks).states)

    @st.composite
    def draw_problem(draw):
        facts = bw.state_facts(draw(states))
        goal = draw(st.sets(st.sampled_from(facts), min_size=1)) if partial else facts
        return Problem(names=tuple("abcdefg"[:blocks]), init=draw(states), goal=frozenset(goal))

    return draw_problem()


# ---- the world


@pytest.mark.parametrize(
    ("blocks", "hand_empty", "states"),
    [(1, 1, 2), (2, 3, 5), (3, 13, 22), (4, 73, 125), (5, 501, 866), (6, 4051, 7057), (7, 37633, 65990)],
)
def test_state_counts(blocks, hand_empty, states):
    graph = bw.state_graph(blocks)
    assert (len(graph.hand_empty), len(graph.states)) == (hand_empty, states)
    assert len(set(graph.states)) == states


def test_state_graph_refuses_eight_blocks():
    with pytest.raises(ValueError, match="1 to 7 blocks, got 8"):
        bw.state_graph(8)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_actions_equal_strips(blocks):
    for state in bw.state_graph(blocks).states:
        facts = set(bw.state_facts(state))
        legal = {}
        for action in all_actions(blocks):
            after = bw.try_apply(state, action)
            expected = strips(facts, action)
            assert (None if after is None else set(bw.state_facts(after))) == expected
            if after is not None:
                legal[action] = after
        assert dict(bw.successors(state)) == legal
        assert set(bw.legal_actions(state)) == set(legal)


def test_every_action_is_reversible():
    neighbors = bw.state_graph(4).neighbors
    for place, row in enumerate(neighbors):
        assert all(place in neighbors[other] for other in row)


@pytest.mark.parametrize(
    ("state", "action", "reason"),
    [
        ((TABLE, 0, TABLE), Action("pickup", (0,)), "pickup a: b is on a"),
        ((TABLE, 0, TABLE), Action("pickup", (1,)), "pickup b: b is on a"),
        ((TABLE, 0, HELD), Action("pickup", (1,)), "pickup b: already holding c"),
        ((TABLE, 0, TABLE), Action("putdown", (2,)), "putdown c: not holding c"),
        ((TABLE, 0, TABLE), Action("stack", (2, 1)), "stack c b: not holding c"),
        ((TABLE, 0, HELD), Action("stack", (2, 0)), "stack c a: b is on a"),
        ((TABLE, 0, HELD), Action("stack", (2, 2)), "stack c c: onto itself"),
        ((TABLE, 0, TABLE), Action("unstack", (2, 1)), "unstack c b: c is on the table"),
        ((TABLE, 0, 1), Action("unstack", (1, 0)), "unstack b a: c is on b"),
        ((TABLE, 0, 1), Action("unstack", (2, 0)), "unstack c a: c is on b"),
    ],
)
def test_illegal_action_says_why(state, action, reason):
    assert bw.try_apply(state, action) is None
    with pytest.raises(ValueError) as error:
        bw.apply(state, action, "abc")
    assert str(error.value) == reason


def test_trace_names_the_step():
    with pytest.raises(ValueError, match="^step 1: pickup b: already holding a$"):
        bw.trace((TABLE, TABLE), [Action("pickup", (0,)), Action("pickup", (1,))], "ab")


def test_problem_refuses_wrong_names():
    with pytest.raises(ValueError, match="2 blocks need as many different names"):
        Problem(names=("a", "a"), init=(TABLE, TABLE), goal=frozenset())


def test_facts_of_two_blocks_exhaustively():
    """All 2,048 sets of facts over two blocks: possible, and complete, exactly when some state says so."""
    states = bw.state_graph(2).states
    complete = {frozenset(bw.state_facts(state)): state for state in states}
    facts = all_facts(2)
    num_possible = 0
    for given_facts in chain.from_iterable(combinations(facts, size) for size in range(len(facts) + 1)):
        goal = frozenset(given_facts)
        possible = any(bw.satisfies(state, goal) for state in states)
        num_possible += possible
        if possible:
            bw.check_facts(goal, "ab")
        else:
            with pytest.raises(ValueError):
                bw.check_facts(goal, "ab")
        if goal in complete:
            assert bw.state_from_facts(goal, "ab") == complete[goal]
        else:
            with pytest.raises(ValueError):
                bw.state_from_facts(goal, "ab")
    assert 0 < num_possible < 2048


@given(st.sets(st.sampled_from(all_facts(4)), max_size=6))
def test_facts_of_four_blocks(facts):
    possible = any(bw.satisfies(state, frozenset(facts)) for state in bw.state_graph(4).states)
    try:
        bw.check_facts(facts, "abcd")
    except ValueError:
        assert not possible
    else:
        assert possible


# ---- shortest plans


def test_golden_set_is_whole():
    assert len(GOLDEN) == 72 and {row["blocks"] for row in GOLDEN} == {3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["id"])
def test_plans_are_as_short_as_the_planners(row):
    names = row["objects"]

    def facts(atoms):
        return frozenset(Fact(atom[0], tuple(names.index(x) for x in atom[1:])) for atom in atoms)

    init, goal = bw.state_from_facts(facts(row["init"]), names), facts(row["goal"])
    plan = bw.optimal_plan(init, goal)
    assert len(plan) == bw.optimal_length(init, goal) == row["optimal_length"]
    states = bw.trace(init, plan)
    assert bw.satisfies(states[-1], goal) and not any(bw.satisfies(state, goal) for state in states[:-1])
    golden = [parse_action(text.replace("-", "").split(), names) for text in row["optimal_plan"]]
    parsed = [action for action in golden if action is not None]
    assert len(parsed) == len(golden) and bw.satisfies(bw.trace(init, parsed)[-1], goal)


def slow_distance(problem: Problem) -> int:
    frontier, seen, steps = {problem.init}, {problem.init}, 0
    while not any(bw.satisfies(state, problem.goal) for state in frontier):
        frontier = {after for state in frontier for _, after in bw.successors(state)} - seen
        seen |= frontier
        steps += 1
    return steps


@settings(max_examples=60)
@given(problem_strategy(4, partial=True))
def test_table_and_search_are_exact(problem):
    expected = slow_distance(problem)
    assert bw.optimal_length(problem.init, problem.goal) == expected
    search = bw._Search(problem.goal, 4)
    assert search.distance(problem.init) == len(search.plan(problem.init)) == expected
    for state, known in search.known.items():
        assert known == bw.optimal_length(state, problem.goal)


@settings(max_examples=60)
@given(problem_strategy(5, partial=True))
def test_lower_bound_is_consistent(problem):
    search = bw._Search(problem.goal, 5)
    bound = search.lower_bound(problem.init)
    assert bound <= bw.optimal_length(problem.init, problem.goal)
    if not bw.satisfies(problem.init, problem.goal):
        assert all(bound <= 1 + search.lower_bound(after) for _, after in bw.successors(problem.init))


@settings(max_examples=60)
@given(problem_strategy(4, partial=True))
def test_ranked_actions_cut_the_legal_ones(problem):
    optimal, suboptimal = bw.ranked_actions(problem.init, problem.goal)
    assert sorted(optimal + suboptimal) == sorted(bw.legal_actions(problem.init))
    here = bw.optimal_length(problem.init, problem.goal)
    for action, after in bw.successors(problem.init):
        assert (action in optimal) == (bw.optimal_length(after, problem.goal) == here - 1)
    assert bool(optimal) == (here > 0)


def test_eight_blocks_rank_by_search():
    init, goal = (TABLE,) * 8, frozenset({Fact("on", (0, 1)), Fact("on", (1, 2))})
    optimal, suboptimal = bw.ranked_actions(init, goal)
    assert optimal == [Action("pickup", (1,))] and len(suboptimal) == 7


def test_canonical_form_names_orbits():
    """Codes of all problems over three blocks: equal exactly within an orbit of the 6 renamings."""
    states = bw.state_graph(3).states

    def renamed(state, order):
        return tuple(order.index(y) if y >= 0 else y for y in (state[old] for old in order))

    codes = {}
    for init in states:
        for target in states:
            orbit = frozenset((renamed(init, p), renamed(target, p)) for p in permutations(range(3)))
            codes.setdefault(bw.canonical_form(bw.state_goal(target), 3, init)[0], set()).add(orbit)
    assert all(len(orbits) == 1 for orbits in codes.values())
    assert sum(len(next(iter(orbits))) for orbits in codes.values()) == 22 * 22


# ---- text


def test_vocabulary():
    assert len(WORDS) == len(set(WORDS)) <= 100
    assert all(word and not any(c.isspace() for c in word) for word in WORDS)
    assert {"pickup", "putdown", "stack", "unstack", "on", ",", "end", "a", "z"} <= set(WORDS)


def test_text_of_one_problem():
    goal = frozenset({Fact("on", (1, 2)), Fact("clear", (0,)), Fact("handempty")})
    problem = Problem(names=("x", "a", "q"), init=(1, TABLE, HELD), goal=goal)
    assert prompt_text(problem) == "init on x a ontable a holding q goal handempty clear x on a q plan"
    plan = bw.optimal_plan(problem.init, goal)
    assert plan_text(plan[:2], problem.names) == "putdown q , unstack x a , end"
    assert plan_text([], problem.names) == "end"


@given(st.sampled_from(all_actions(4)), st.permutations("abcdxyz"))
def test_action_text_round_trip(action, names):
    words = plan_text([action], names).split()
    assert words[-2:] == [",", "end"] and set(words) <= set(WORDS)
    assert parse_action(words[:-2], names) == action


@pytest.mark.parametrize("text", ["", "pickup", "pickup a b", "stack a", "stack a z", "a pickup", "end", "on a b", ","])
def test_not_an_action(text):
    assert parse_action(text.split(), "abc") is None


def test_names_outside_the_vocabulary():
    problem = Problem(names=("b1", "b2"), init=(TABLE, TABLE), goal=frozenset({Fact("on", (0, 1))}))
    with pytest.raises(ValueError, match="'b1' is not in the vocabulary"):
        prompt_text(problem)
    assert prompt_text(standard_names(problem)) == "init ontable a ontable b goal on a b plan"


# ---- generator and splits

CONFIGS = st.builds(
    BlocksworldConfig,
    blocks=st.sampled_from([(3,), (5,), (4, 6)]),
    names=st.sampled_from(["fixed", "pool"]),
    goals=st.sampled_from(["full", "on"]),
    budgets=st.sampled_from([(0,), (1,), (0, 1, 2, 3, 4)]),
    perturb_probability=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=60)
@given(CONFIGS)
def test_examples_are_optimal_but_for_their_forced_steps(config):
    for example in examples(config, "train", 4):
        problem = example.problem
        blocks = len(problem.init)
        assert blocks in config.blocks and HELD not in problem.init
        assert config.names == "pool" or problem.names == tuple("abcdef"[:blocks])
        assert config.goals == "full" or {fact.predicate for fact in problem.goal} == {"on"}
        states = bw.trace(problem.init, example.actions)
        left = [bw.optimal_length(state, problem.goal) for state in states]
        assert left[0] == example.optimal_length > 0
        assert left[-1] == 0 and 0 not in left[:-1]
        assert example.suboptimal == tuple(i for i in range(len(example.actions)) if left[i + 1] >= left[i])
        assert len(example.suboptimal) <= max(config.budgets)
        if config.perturb_probability == 0:
            assert not example.suboptimal
        assert set(example.prompt.split()) | set(example.trajectory.split()) <= set(WORDS)
        assert "," not in example.prompt.split()
        assert split_of(problem, config.names) == example.split == "train"


def test_budget_is_spent_and_bounded():
    spent = {}
    for budget in (0, 1, 3):
        config = BlocksworldConfig(budgets=(budget,), perturb_probability=1.0)
        spent[budget] = {len(example.suboptimal) for example in examples(config, "train", 50)}
    assert spent == {0: {0}, 1: {1}, 3: {3}}
    drawn = {len(example.suboptimal) for example in examples(BlocksworldConfig(budgets=(3,)), "train", 100)}
    assert drawn == {0, 1, 2, 3}


def test_perturbation_rate_is_the_papers():
    """With more budget than can be spent, each step that has a choice is perturbed with probability 0.3."""
    forced = choices = 0
    for example in examples(BlocksworldConfig(budgets=(10**6,)), "train", 300):
        forced += len(example.suboptimal)
        states = bw.trace(example.problem.init, example.actions)
        choices += sum(bool(bw.ranked_actions(state, example.problem.goal)[1]) for state in states[:-1])
    assert 0.28 < forced / choices < 0.32


def test_a_share_of_trajectories_is_perturbed():
    """`perturb_per="trajectory"`: 0.3 of them hold the whole budget, spread over the plan; the others are optimal."""
    config = BlocksworldConfig(budgets=(2,), perturb_per="trajectory")
    drawn = [example for example in examples(config, "train", 600) if example.optimal_length > 2]
    assert {len(example.suboptimal) for example in drawn} <= {0, 1, 2}
    perturbed = [example for example in drawn if example.suboptimal]
    assert 0.25 < len(perturbed) / len(drawn) < 0.35
    assert sum(len(example.suboptimal) == 2 for example in perturbed) > 0.9 * len(perturbed)
    assert all(len(example.actions) == example.optimal_length for example in drawn if not example.suboptimal)
    where = [step / example.optimal_length for example in perturbed for step in example.suboptimal]
    assert 0.4 < sum(where) / len(where) < 0.6
    # Drawn at every step, nearly all of them hold one, and early.
    each = list(examples(BlocksworldConfig(), "train", 300))
    assert sum(bool(example.suboptimal) for example in each) > 0.9 * len(each)


def test_data_is_deterministic():
    config = BlocksworldConfig(names="pool", goals="on", budgets=(0, 1, 2))
    assert data_hash(examples(config, "train", 50)) == data_hash(examples(config, "train", 50))
    assert data_hash(examples(config, "train", 50)) != data_hash(examples(config, "valid", 50))
    # A change of the generator changes every experiment's data: it must be deliberate.
    assert data_hash(examples(BlocksworldConfig(), "train", 200))[:16] == "0fe96083d40ec87f"
    assert data_hash(examples(BlocksworldConfig(seed=1), "train", 200))[:16] != "0fe96083d40ec87f"


def test_jsonl(tmp_path):
    drawn = list(examples(BlocksworldConfig(), "test", 5))
    write_jsonl(drawn, tmp_path / "test.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert [row["goal"] for row in rows] == [example.prompt for example in drawn]
    assert [row["trajectory"] for row in rows] == [example.trajectory for example in drawn]
    assert rows[0]["split"] == "test" and rows[0]["blocks"] == 5


@pytest.mark.parametrize("names", ["fixed", "pool"])
def test_splits_are_disjoint_and_sized(names):
    config = BlocksworldConfig(blocks=(4,), names=names)
    drawn = {
        split: {(p.names, p.init, p.goal) for p in islice(problems(config, split), 100)}
        for split in ("train", "valid", "test")
    }
    assert len(drawn["test"]) == len(drawn["valid"]) == 100  # never twice the same
    assert not (drawn["train"] & drawn["test"] or drawn["train"] & drawn["valid"] or drawn["valid"] & drawn["test"])
    states = bw.state_graph(4).hand_empty
    owners = [
        split_of(Problem(names=tuple("abcd"), init=init, goal=bw.state_goal(target)), names)
        for init in states
        for target in states[:30]
    ]
    assert 0.02 < owners.count("test") / len(owners) < 0.09 and 0.82 < owners.count("train") / len(owners) < 0.95


def renamed_splits(problem: Problem, names) -> set[str]:
    splits = set()
    for order in permutations(range(4)):
        init = tuple(order.index(y) if y >= 0 else y for y in (problem.init[old] for old in order))
        goal = frozenset(Fact(p, tuple(order.index(x) for x in where)) for p, where in problem.goal)
        splits.add(split_of(Problem(names=problem.names, init=init, goal=goal), names))
    return splits


def test_pool_splits_ignore_names_and_fixed_splits_do_not():
    pool = list(islice(problems(BlocksworldConfig(blocks=(4,), names="pool"), "test"), 20))
    assert all(renamed_splits(problem, "pool") == {"test"} for problem in pool)
    assert any(len(renamed_splits(problem, "fixed")) > 1 for problem in pool)


def test_exhausted_split_says_so():
    with pytest.raises(ValueError, match=r"test split of N=\(2,\) ends after \d problems: ask for fewer"):
        list(examples(BlocksworldConfig(blocks=(2,)), "test", 6))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": (8,)}, "blocks must be numbers from 2 to 7"),
        ({"blocks": ()}, "blocks must be"),
        ({"budgets": (-1,)}, "budgets must be"),
        ({"perturb_probability": 1.5}, "perturb_probability must be"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        BlocksworldConfig(**fields)


@settings(max_examples=50)
@given(problem_strategy(5, partial=True), st.integers(0, 12), st.integers(0, 1000))
def test_relabel_continues_from_where_the_prefix_led(problem, steps, seed):
    rng = random.Random(seed)
    prefix, state = [], problem.init
    for _ in range(steps):
        action, state = rng.choice(bw.successors(state))
        prefix.append(action)
    example = relabel(problem, prefix)
    left = [bw.optimal_length(state, problem.goal) for state in bw.trace(problem.init, example.actions)]
    assert left[-1] == 0 and 0 not in left[:-1]
    kept = min(len(prefix), len(example.actions))
    assert list(example.actions[:kept]) == prefix[:kept]
    assert example.suboptimal == tuple(i for i in range(len(example.actions)) if left[i + 1] >= left[i])
    assert all(step < len(prefix) for step in example.suboptimal)


def test_relabel_refuses_an_illegal_prefix():
    problem = Problem(names=("a", "b"), init=(TABLE, 0), goal=frozenset({Fact("on", (0, 1))}))
    with pytest.raises(ValueError, match="step 0: pickup a: b is on a"):
        relabel(problem, [Action("pickup", (0,))])


def test_operators_and_predicates_cover_the_words():
    assert set(OPERATORS) | set(PREDICATES) <= set(WORDS)
