"""Blocksworld with four operators: states, actions, goals, and shortest plans.

The world of LS-AR's planning task. One hand moves blocks between towers on a table: `pickup` and `putdown` act on
the table, `unstack` and `stack` on another block. Every action costs 1 and has an inverse.

Everything here is a pure function of small values. Blocks are the integers 0..N-1; a name is only ever used to
render or to complain. Search is exact: up to `GRAPH_BLOCKS` blocks from tables over the whole state graph, beyond
that by A*.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np

TABLE = -1
HELD = -2

GRAPH_BLOCKS = 7
"""Most blocks whose whole state graph is kept (65,990 states); with more, `distance_to` searches per state."""

PREDICATES = {"on": 2, "ontable": 1, "clear": 1, "holding": 1, "handempty": 0}
"""Predicate -> number of blocks it takes."""

OPERATORS = {"pickup": 1, "putdown": 1, "stack": 2, "unstack": 2}
"""Operator -> number of blocks it takes."""

State = tuple[int, ...]
"""What each block stands on: `state[x]` is a block, `TABLE` or `HELD`. At most one block is `HELD`."""


class Fact(NamedTuple):
    """A ground atom, e.g. `Fact("on", (0, 1))`: block 0 stands on block 1."""

    predicate: str
    blocks: tuple[int, ...] = ()


class Action(NamedTuple):
    """A ground action, e.g. `Action("stack", (0, 1))`: put the held block 0 onto block 1."""

    name: str
    blocks: tuple[int, ...]


Goal = frozenset[Fact]
"""Facts that must all hold. A partial goal simply says nothing about the other blocks."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Bring `init` to a state where every fact of `goal` holds."""

    names: tuple[str, ...]
    """Name of each block; block `x` is called `names[x]`."""
    init: State
    """The state to start from."""
    goal: Goal
    """The facts to reach."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.init) or len(set(self.names)) != len(self.names):
            raise ValueError(f"{len(self.init)} blocks need as many different names, got {' '.join(self.names)!r}")


def state_facts(state: State) -> list[Fact]:
    """Every fact true in `state`, in block order."""
    facts = []
    for x, below in enumerate(state):
        facts.append(_position(x, below))
        if below != HELD and x not in state:
            facts.append(Fact("clear", (x,)))
    if HELD not in state:
        facts.append(Fact("handempty"))
    return facts


@lru_cache(maxsize=2**16)
def state_goal(state: State) -> Goal:
    """The full goal that only `state` satisfies: where each block stands."""
    return frozenset(_position(x, below) for x, below in enumerate(state))


def _position(x: int, below: int) -> Fact:
    if below >= 0:
        return Fact("on", (x, below))
    return Fact("ontable" if below == TABLE else "holding", (x,))


def satisfies(state: State, goal: Goal) -> bool:
    """Whether every fact of `goal` holds in `state`."""
    for predicate, blocks in goal:
        if predicate == "on":
            holds = state[blocks[0]] == blocks[1]
        elif predicate == "ontable":
            holds = state[blocks[0]] == TABLE
        elif predicate == "holding":
            holds = state[blocks[0]] == HELD
        elif predicate == "clear":
            holds = state[blocks[0]] != HELD and blocks[0] not in state
        else:
            holds = HELD not in state
        if not holds:
            return False
    return True


@cache
def _action(name: str, *blocks: int) -> Action:
    # One object for each ground action: trajectories by the 100,000 share them.
    return Action(name, blocks)


def successors(state: State) -> list[tuple[Action, State]]:
    """Every legal action with the state it leads to: by moved block; `putdown` before `stack`, by support."""
    if HELD in state:
        x = state.index(HELD)
        before, after = state[:x], state[x + 1 :]
        moves = [(_action("putdown", x), (*before, TABLE, *after))]
        for y in range(len(state)):
            if y != x and y not in state:
                moves.append((_action("stack", x, y), (*before, y, *after)))
        return moves
    moves = []
    for x, below in enumerate(state):
        if x not in state:
            action = _action("pickup", x) if below == TABLE else _action("unstack", x, below)
            moves.append((action, (*state[:x], HELD, *state[x + 1 :])))
    return moves


def legal_actions(state: State) -> list[Action]:
    """Every legal action, in the order of `successors`."""
    return [action for action, _ in successors(state)]


def try_apply(state: State, action: Action) -> State | None:
    """The state after `action`, or None where it is illegal."""
    name, blocks = action
    x = blocks[0]
    if name == "pickup":
        legal, below = state[x] == TABLE and HELD not in state and x not in state, HELD
    elif name == "unstack":
        legal, below = state[x] == blocks[1] and HELD not in state and x not in state, HELD
    elif name == "putdown":
        legal, below = state[x] == HELD, TABLE
    else:
        legal, below = state[x] == HELD and x != blocks[1] and blocks[1] not in state, blocks[1]
    return (*state[:x], below, *state[x + 1 :]) if legal else None


def apply(state: State, action: Action, names: Sequence[str] = ()) -> State:
    """The state after `action`.

    Raises:
        ValueError: the action is illegal in `state`; the message says why, with `names` if given.
    """
    after = try_apply(state, action)
    if after is None:
        raise ValueError(why_illegal(state, action, names))
    return after


def why_illegal(state: State, action: Action, names: Sequence[str] = ()) -> str:
    """One line: the first precondition of an illegal `action` that does not hold in `state`."""
    names = names or [str(x) for x in range(len(state))]
    x = action.blocks[0]
    text = " ".join([action.name, *(names[block] for block in action.blocks)])
    if action.name in ("putdown", "stack"):
        if state[x] != HELD:
            return f"{text}: not holding {names[x]}"
        y = action.blocks[1]
        return f"{text}: onto itself" if x == y else f"{text}: {names[state.index(y)]} is on {names[y]}"
    if HELD in state:
        return f"{text}: already holding {names[state.index(HELD)]}"
    if x in state:
        return f"{text}: {names[state.index(x)]} is on {names[x]}"
    where = "the table" if state[x] == TABLE else names[state[x]]
    return f"{text}: {names[x]} is on {where}"


def trace(init: State, actions: Iterable[Action], names: Sequence[str] = ()) -> list[State]:
    """The states before the first and after each of `actions`, one more than there are actions.

    Raises:
        ValueError: an action is illegal; the message names its place in the plan and the reason.
    """
    states = [init]
    for step, action in enumerate(actions):
        try:
            states.append(apply(states[-1], action, names))
        except ValueError as error:
            raise ValueError(f"step {step}: {error}") from None
    return states


def check_facts(facts: Iterable[Fact], names: Sequence[str]) -> None:
    """Raise ValueError, in one line, where `facts` cannot all hold in one state; any other set of facts can."""
    below: dict[int, int] = {}
    above: dict[int, int] = {}
    facts = set(facts)
    for x, y in sorted(fact.blocks for fact in facts if fact.predicate == "on"):
        if x == y:
            raise ValueError(f"block {names[x]} on itself")
        if x in below:
            raise ValueError(f"block {names[x]} on both {names[below[x]]} and {names[y]}")
        if y in above:
            raise ValueError(f"both {names[above[y]]} and {names[x]} on block {names[y]}")
        below[x], above[y] = y, x
    for start in sorted(below):
        x = start
        while x in below:
            x = below[x]
            if x == start:
                raise ValueError(f"block {names[start]} above itself: its tower is a cycle")
    held = sorted(fact.blocks[0] for fact in facts if fact.predicate == "holding")
    if len(held) > 1:
        raise ValueError(f"more than one block in hand: {', '.join(names[x] for x in held)}")
    if held and Fact("handempty") in facts:
        raise ValueError(f"hand empty and holding {names[held[0]]}")
    for x in range(len(names)):
        if Fact("ontable", (x,)) in facts and x in below:
            raise ValueError(f"block {names[x]} both on the table and on {names[below[x]]}")
        if Fact("clear", (x,)) in facts and x in above:
            raise ValueError(f"block {names[x]} clear although {names[above[x]]} is on it")
        elsewhere = x in below or x in above or {Fact("ontable", (x,)), Fact("clear", (x,))} & facts
        if x in held and elsewhere:
            raise ValueError(f"block {names[x]} in hand and also on, under, on the table or clear")


def state_from_facts(facts: Iterable[Fact], names: Sequence[str]) -> State:
    """The state in which exactly `facts` hold.

    Raises:
        ValueError: the facts contradict each other, or leave out one that the others imply (PDDL takes an unlisted
            fact as false, and without its `clear` a block could never be moved).
    """
    given = set(facts)
    check_facts(given, names)
    state = [HELD + HELD] * len(names)
    for predicate, blocks in given:
        if predicate in ("on", "ontable", "holding"):
            state[blocks[0]] = {"on": blocks[-1], "ontable": TABLE, "holding": HELD}[predicate]
    for x, where in enumerate(state):
        if where == HELD + HELD:
            raise ValueError(f"block {names[x]} is nowhere: neither on a block, nor on the table, nor in hand")
    for fact in state_facts(tuple(state)):
        if fact not in given:
            text = " ".join([fact.predicate, *(names[x] for x in fact.blocks)])
            raise ValueError(f"({text}) is missing although it follows from the other facts")
    return tuple(state)


def canonical_form(goal: Goal, blocks: int, init: State | None = None) -> tuple[tuple, tuple[int, ...]]:
    """A code that is equal for two goals (or problems) exactly when renaming blocks turns one into the other.

    `on` is injective both ways, so from any block one walk in a fixed order of links (below and above, in `init` and
    in `goal`) visits its connected part in an order that does not depend on names; the least code over starting
    blocks is canonical.

    Returns:
        The code, and the blocks in canonical order.
    """
    links = [[-1] * 4 for _ in range(blocks)]
    if init is not None:
        for x, y in enumerate(init):
            if y >= 0:
                links[x][0], links[y][1] = y, x
    labels = [[min(init[x], 0) if init else 0] for x in range(blocks)]
    for predicate, where in sorted(goal):
        if predicate == "on":
            links[where[0]][2], links[where[1]][3] = where[1], where[0]
        elif where:
            labels[where[0]].append(list(PREDICATES).index(predicate))

    def walk(start: int) -> tuple[tuple, list[int]]:
        order, seen = [start], {start: 0, -1: -1}
        for x in order:
            for y in links[x]:
                if y not in seen:
                    seen[y] = len(order)
                    order.append(y)
        return tuple((*labels[x], *(seen[y] for y in links[x])) for x in order), order

    parts: list[tuple[tuple, list[int]]] = []
    left = set(range(blocks))
    while left:
        part = walk(min(left))[1]
        left.difference_update(part)
        parts.append(min(walk(x) for x in part))
    parts.sort()
    code = (Fact("handempty") in goal, *(part for part, _ in parts))
    return code, tuple(x for _, order in parts for x in order)


class StateGraph(NamedTuple):
    """Every state of N blocks, and the moves between them."""

    states: tuple[State, ...]
    """All S states: 2, 5, 22, 125, 866, 7057, 65990 for N = 1..7."""
    index: dict[State, int]
    """Place of a state in `states`."""
    neighbors: np.ndarray
    """(S, N) int32: where the legal actions lead, padded with the state's own index."""
    hand_empty: tuple[State, ...]
    """The states with nothing in hand: 1, 3, 13, 73, 501, 4051, 37633 for N = 1..7."""


@lru_cache(maxsize=GRAPH_BLOCKS)
def state_graph(blocks: int) -> StateGraph:
    """The whole state graph by breadth-first search from all blocks on the table; built once per N.

    Raises:
        ValueError: fewer than 1 or more than `GRAPH_BLOCKS` blocks.
    """
    if not 1 <= blocks <= GRAPH_BLOCKS:
        raise ValueError(f"state_graph takes 1 to {GRAPH_BLOCKS} blocks, got {blocks}; optimal_plan takes any number")
    states: list[State] = [(TABLE,) * blocks]
    index = {states[0]: 0}
    rows: list[list[int]] = []
    for state in states:
        row = []
        for _, after in successors(state):
            if after not in index:
                index[after] = len(states)
                states.append(after)
            row.append(index[after])
        rows.append(row + [len(rows)] * (blocks - len(row)))
    hand_empty = tuple(state for state in states if HELD not in state)
    return StateGraph(tuple(states), index, np.array(rows, dtype=np.int32), hand_empty)


@lru_cache(maxsize=256)
def _distance_table(blocks: int, goal: Goal) -> bytes:
    """Steps from every state of the graph to the nearest state of `goal`, by backward breadth-first search."""
    graph = state_graph(blocks)
    # Actions are reversible, so the predecessors of a state are its neighbors.
    frontier = np.array([i for i, state in enumerate(graph.states) if satisfies(state, goal)])
    distance = np.full(len(graph.states), 255, dtype=np.uint8)
    distance[frontier] = 0
    for step in count(1):
        frontier = np.unique(graph.neighbors[frontier])
        frontier = frontier[distance[frontier] == 255]
        if not frontier.size:
            break
        distance[frontier] = step
    return distance.tobytes()


@lru_cache(maxsize=2**16)
def distance_to(goal: Goal, blocks: int) -> Callable[[State], int]:
    """A function from a state to the length of a shortest plan from it to `goal`. The goal must be possible.

    Up to `GRAPH_BLOCKS` blocks the function reads a table; goals that differ only by renaming blocks share one, so
    full goals need 7, 11 and 15 tables for N = 5, 6 and 7.
    """
    if blocks > GRAPH_BLOCKS:
        return _Search(goal, blocks).distance
    _, order = canonical_form(goal, blocks)
    # Two extra entries let TABLE and HELD, as negative indices, map to themselves.
    label = [0] * blocks + [HELD, TABLE]
    for new, old in enumerate(order):
        label[old] = new
    table = _distance_table(blocks, frozenset(Fact(p, tuple(label[x] for x in where)) for p, where in goal))
    index = state_graph(blocks).index
    return lambda state: table[index[tuple([label[state[x]] for x in order])]]


def ranked_actions(state: State, goal: Goal) -> tuple[list[Action], list[Action]]:
    """The legal actions that begin a shortest plan to `goal`, and those that do not, each in legal order.

    In a state that satisfies the goal every legal action is of the second kind.
    """
    distance = distance_to(goal, len(state))
    here = distance(state)
    optimal, suboptimal = [], []
    for action, after in successors(state):
        (optimal if distance(after) < here else suboptimal).append(action)
    return optimal, suboptimal


def optimal_length(state: State, goal: Goal) -> int:
    """Number of actions in a shortest plan from `state` to `goal`."""
    return distance_to(goal, len(state))(state)


def optimal_plan(state: State, goal: Goal) -> tuple[Action, ...]:
    """A shortest plan from `state` to `goal`; of several, the first in legal order (with A*: any one)."""
    if len(state) > GRAPH_BLOCKS:
        return _Search(goal, len(state)).plan(state)
    distance = distance_to(goal, len(state))
    plan: list[Action] = []
    left = distance(state)
    while left:
        action, state = next((a, after) for a, after in successors(state) if distance(after) == left - 1)
        plan.append(action)
        left -= 1
    return tuple(plan)


class _Search:
    """A* for one goal; exact for any number of blocks."""

    def __init__(self, goal: Goal, blocks: int) -> None:
        self.goal = goal
        self.blocks = blocks
        self.support = {where[0]: where[1] for predicate, where in goal if predicate == "on"}
        self.support |= {where[0]: TABLE for predicate, where in goal if predicate == "ontable"}
        self.top = {y: x for x, y in self.support.items() if y >= 0}
        self.clear = {where[0] for predicate, where in goal if predicate == "clear"}
        self.lifted = {where[0] for predicate, where in goal if predicate == "holding"}
        # Only a goal of `clear` or `holding` can come true by lifting a block; any other ends by setting one down.
        self.ends_held = bool(self.clear or self.lifted) and Fact("handempty") not in goal
        self.known: dict[State, int] = {}

    def lower_bound(self, state: State) -> int:
        """A consistent heuristic: each block that cannot stay is lifted and set down, bar the last held one."""

        def must_move(x: int) -> bool:
            y = state[x]
            if y == HELD:
                return False
            if x in self.lifted or self.support.get(x, y) != y:
                return True
            return y >= 0 and (y in self.clear or self.top.get(y, x) != x or must_move(y))

        moves = 2 * sum(must_move(x) for x in range(self.blocks)) + (HELD in state) - self.ends_held
        # A satisfied goal may leave an unrelated block in hand.
        return 0 if moves <= 0 or moves == 1 and satisfies(state, self.goal) else moves

    def plan(self, init: State) -> tuple[Action, ...]:
        order = count()
        queue = [(self.lower_bound(init), 0, 0, init)]
        best: dict[State, tuple[int, Action | None, State]] = {init: (0, None, init)}
        closed: set[State] = set()
        while True:
            _, _, _, state = heapq.heappop(queue)
            if state in closed:
                continue
            closed.add(state)
            if satisfies(state, self.goal):
                break
            steps = best[state][0] + 1
            for action, after in successors(state):
                if after not in best or steps < best[after][0]:
                    best[after] = (steps, action, state)
                    # Among equal estimates the deepest state first: it reaches the goal with fewest expansions.
                    heapq.heappush(queue, (steps + self.lower_bound(after), -steps, next(order), after))
        plan: list[Action] = []
        self.known[state] = 0
        while (entry := best[state])[1] is not None:
            plan.append(entry[1])
            state = entry[2]
            self.known[state] = len(plan)
        return tuple(reversed(plan))

    def distance(self, state: State) -> int:
        if state not in self.known:
            self.plan(state)
        return self.known[state]
