"""ProsQA problems at will: the generator whose graphs have the statistics of the official files.

The published pseudo-code does not give them; this one passes a chi-square test on every histogram of 550 official
records (nodes, edges, in-degrees, steps, shortest paths, roots, labels and so on).
"""

import math
import random
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from sidestream.tasks.base import Split, hash_split, shuffled
from sidestream.tasks.prosqa import ASK, EDGE_END, ProsqaProblem, answer_text, query_text, statement_text

# fmt: off
ENTITIES = (
    "Alex", "Bob", "Carol", "Davis", "Eva", "Fae", "Gabriel", "Jack", "Max", "Oliver", "Polly", "Rex",
    "Sally", "Sam", "Stella", "Tom", "Wren",
)
"""The entity names of the official files."""

CONCEPTS = (
    "bompus", "boompus", "brimpus", "chorpus", "dumpus", "felpus", "fompus", "gerpus", "gorpus", "grimpus",
    "gwompus", "hilpus", "impus", "jelpus", "jompus", "kerpus", "lempus", "lorpus", "numpus", "quimpus",
    "rempus", "rompus", "rorpus", "scrompus", "shumpus", "sterpus", "storpus", "terpus", "timpus", "tumpus",
    "vumpus", "worpus", "wumpus", "yerpus", "yimpus", "yumpus", "zhorpus", "zumpus",
)
"""The concept names of the official files."""

SMALL_ENTITIES = ("Alex", "Bob", "Jack", "Max", "Sam", "Tom")
"""Entity names that are one token of GPT-2's BPE, with and without a space before them."""

SMALL_CONCEPTS = (
    "bird", "fish", "tree", "rock", "star", "lamp", "boat", "door", "book", "coin", "leaf", "ring", "ship",
    "road", "hand", "wolf", "bear", "king", "moon", "salt", "wine", "milk", "cake", "corn", "seed", "gold",
)
"""26 concept names that are one token of GPT-2's BPE after a space."""
# fmt: on

VALID_SHARE = TEST_SHARE = 0.1
"""The share of all graphs that each of these splits owns."""

MOST_MISSES = 200_000
"""Graphs drawn in a row without a wanted one before a problem is given up."""

_NAME = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class ProsqaConfig:
    """Which problems to draw. The defaults are the official files'."""

    nodes: int = 28
    """Node slots, N; those that end without an edge are dropped (the official graphs keep 14 to 28)."""
    hops: tuple[int, ...] = (3, 4, 5, 6)
    """Numbers of steps to keep; graphs of any other depth are drawn again, so their proportions stay natural."""
    entities: tuple[str, ...] = ENTITIES
    """Names of nodes without parents, at least 2. A graph that needs more names is drawn again: hardly ever with the
    official 17, often with 2 or 3."""
    concepts: tuple[str, ...] = CONCEPTS
    """Names of all other nodes, at least `nodes - 2`. `made_up_concepts` gives as many as are wanted."""
    wording: Literal["official", "short"] = "official"
    """`official`: the sentences above. `short`: one word a name, `Bob lempus ; lempus yerpus ; ? yerpus zumpus Bob`,
    each step the name it leads to, the answer the target's name: for word-level vocabularies (`words`)."""
    branch_shares: tuple[float, float] = (0.35, 0.45)
    """Chance that a node's parents come from the first root's side only, and from the second's; else from all nodes."""
    mean_parents: float = 1.5
    """Mean of the Poisson number of parents."""
    depth_weight: float = 1.5
    """A candidate parent's weight is `depth_weight * depth + 1`: more makes deeper graphs."""
    seed: int = 0
    """Same seed, same problems."""

    def __post_init__(self) -> None:
        if self.nodes < 4 or not self.hops or not all(0 < hops < self.nodes - 1 for hops in self.hops):
            raise ValueError(
                f"nodes is {self.nodes} and hops {self.hops}: give 4 nodes or more, and at least one number of hops "
                "from 1 to nodes - 2"
            )
        names = (*self.entities, *self.concepts)
        if len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)) or {"is", "a", "or"} & set(names):
            raise ValueError("entities and concepts must be distinct single words without punctuation, none a keyword")
        if len(self.entities) < 2 or len(self.concepts) < self.nodes - 2:
            raise ValueError(
                f"{len(self.entities)} entities and {len(self.concepts)} concepts: {self.nodes} nodes need at least 2 "
                f"and {self.nodes - 2} (made_up_concepts gives more)"
            )
        first, second = self.branch_shares
        if min(first, second) < 0 or first + second > 1 or self.mean_parents <= 0 or self.depth_weight < 0:
            raise ValueError(
                "branch_shares must be two shares that sum to 1 at most, mean_parents above 0, depth_weight 0 or more"
            )


SMALL = ProsqaConfig(nodes=12, hops=(2, 3, 4), entities=SMALL_ENTITIES, concepts=SMALL_CONCEPTS, wording="short")
"""A reduced size for small models: about 10 nodes, 12 statements, 34 words of vocabulary."""


def made_up_concepts(n: int) -> tuple[str, ...]:
    """`n` concept names: the official 38, then made-up ones in their style. ValueError: more than 398 asked for."""
    more = [f"{onset}{vowel}{end}us" for vowel in "aeiou" for end in ("sp", "nd", "lt", "rk") for onset in _ONSETS]
    names = (*CONCEPTS, *more)
    if not 0 <= n <= len(names):
        raise ValueError(f"{n} concept names asked for: there are {len(names)}")
    return names[:n]


_ONSETS = ("b", "br", "ch", "d", "f", "fl", "g", "gl", "h", "j", "k", "l", "n", "pl", "r", "s", "t", "v")


def words(config: ProsqaConfig) -> tuple[str, ...]:
    """Every word of the short wording, one token each."""
    return (EDGE_END, ASK, *config.entities, *config.concepts)


def problems(config: ProsqaConfig, split: Split, exclude: Set[str] = frozenset()) -> Iterator[ProsqaProblem]:
    """Endless random problems of one split, the same for the same arguments on every machine.

    A hash of the graph's `structure` decides which split owns it, whatever the seed: no graph is in two splits, nor
    under other names or another numbering. `exclude`: structures to leave out, such as those of an official file.
    `train` may repeat a problem, which hardly happens; `valid` and `test` never do.

    Raises ValueError: unknown split, or no further problem in `MOST_MISSES` graphs (too deep, too few names).
    """
    if split not in ("train", "valid", "test"):
        raise ValueError(f"split is {split!r}: choose one of train, valid, test")
    rng = random.Random(f"prosqa {config.seed} {split}")
    seen: set[tuple[object, ...]] = set()
    misses = 0
    while True:
        misses += 1
        if misses > MOST_MISSES:
            raise ValueError(
                f"no further {split} problem in {MOST_MISSES} graphs of {config.nodes} nodes and {config.hops} hops: "
                "ask for other hops, more nodes, more entities or fewer problems"
            )
        graph = _graph(config, rng)
        if graph is None:
            continue
        owner = structure(graph.edges)
        if hash_split(owner, VALID_SHARE, TEST_SHARE) != split or owner in exclude:
            continue
        problem = _worded(config, graph, rng)
        if problem is None:
            continue
        if split != "train":
            key = (problem.idx_to_symbol, problem.edges, problem.root, problem.target, problem.neg_target)
            if key in seen:
                continue
            seen.add(key)
        misses = 0
        yield problem


def structure(edges: Sequence[tuple[int, int]]) -> str:
    """A name for the graph: equal for graphs that differ in numbering only (3 rounds of Weisfeiler-Lehman colouring, in
    which a node's new colour is made of its own, its parents' and its children's)."""
    colour = {node: 1 for edge in edges for node in edge}
    for _ in range(3):
        up, down = dict.fromkeys(colour, 0), dict.fromkeys(colour, 0)
        mixed = {node: _mixed(old) for node, old in colour.items()}
        for parent, child in edges:
            up[child] += mixed[parent]
            down[parent] += mixed[child]
        colour = {node: _mixed(3 * old + 5 * _mixed(up[node]) + 7 * down[node]) for node, old in colour.items()}
    return f"{len(colour)}-{len(edges)}-{sum(map(_mixed, colour.values())) % 2**64:016x}"


def _mixed(value: int) -> int:
    # The multiply and xor-shift of common 64-bit hashes, so that sums of colours do not meet by chance.
    value = (value ^ value >> 31) * 0x7FB5D329728EA185 % 2**64
    return value ^ value >> 29


@dataclass(frozen=True, slots=True)
class _Graph:
    size: int
    edges: tuple[tuple[int, int], ...]
    root: int
    target: int
    neg_target: int


def _graph(config: ProsqaConfig, rng: random.Random) -> _Graph | None:
    """One draw of the graph and its question; None where its depth is not wanted."""
    label, depth = [1, 2], [0, 0]
    edges: list[tuple[int, int]] = []
    # Candidate parents and their weights: under each label, and under None all of them.
    candidates: dict[int | None, list[int]] = {None: [0, 1], 0: [], 1: [0], 2: [1], 3: []}
    weights: dict[int | None, list[float]] = {None: [1.0, 1.0], 0: [], 1: [1.0], 2: [1.0], 3: []}
    first, second = config.branch_shares
    for child in range(2, config.nodes):
        count, place = _poisson(config.mean_parents, rng), rng.random()
        side = 1 if place < first else 2 if place < first + second else None
        drawn = _draw(candidates[side], weights[side], count, rng)
        mark = 0
        for parent in drawn:
            edges.append((parent, child))
            mark |= label[parent]
        label.append(mark)
        depth.append(1 + min(depth[parent] for parent in drawn if label[parent] == mark) if mark in (1, 2) else 0)
        for pool in (None, mark):
            candidates[pool].append(child)
            weights[pool].append(config.depth_weight * depth[child] + 1)

    children, _ = _neighbours(edges)
    farthest: list[dict[int, int]] = []
    for root in (0, 1):
        distance = _distances(root, children)
        leaves = [node for node in range(2, config.nodes) if node not in children and label[node] == root + 1]
        farthest.append({leaf: distance[leaf] for leaf in leaves})
    if not all(farthest):
        return None
    reach = [max(leaves.values()) for leaves in farthest]
    root = int(rng.random() < 0.5) if reach[0] == reach[1] else int(reach[1] > reach[0])
    # CHOICE(AGCLR, Training): CoCoNuT's data have 3 to 6 steps; whether longer ones were left out or just did not occur
    # in its 800 official valid and test records is not known, so 7 and more are made only when asked for.
    if reach[root] not in config.hops:
        return None
    target = _one_of([node for node, far in farthest[root].items() if far == reach[root]], rng)
    neg_target = _one_of(list(farthest[1 - root]), rng)

    kept = {node: number for number, node in enumerate(sorted({node for edge in edges for node in edge}))}
    assert kept[0] == 0 and kept[1] == 1
    renumbered = tuple((kept[parent], kept[child]) for parent, child in edges)
    return _Graph(len(kept), renumbered, root, kept[target], kept[neg_target])


def _worded(config: ProsqaConfig, graph: _Graph, rng: random.Random) -> ProsqaProblem | None:
    """The graph with names, as text; None where there are not enough entity names."""
    short = config.wording == "short"
    children, parents = _neighbours(graph.edges)
    if graph.size - len(parents) > len(config.entities):
        return None
    entities, concepts = iter(shuffled(config.entities, rng)), iter(shuffled(config.concepts, rng))
    names = tuple(next(concepts if node in parents else entities) for node in range(graph.size))

    def statement(parent: int, child: int) -> str:
        return statement_text(names[parent], names[child], parent not in parents, short)

    statements = [statement(*edge) for edge in shuffled(graph.edges, rng)]
    path = _shortest_path(graph.root, graph.target, children, rng)
    root, target = names[graph.root], names[graph.target]
    one, other = shuffled((target, names[graph.neg_target]), rng)
    return ProsqaProblem(
        question=" ".join([*statements, query_text(root, one, other, short)]),
        steps=tuple(
            names[child] if short else statement(parent, child) for parent, child in zip(path, path[1:], strict=False)
        ),
        answer=answer_text(root, target, short),
        idx_to_symbol=names,
        edges=graph.edges,
        root=graph.root,
        target=graph.target,
        neg_target=graph.neg_target,
    )


Neighbours = dict[int, list[int]]


def _neighbours(edges: Sequence[tuple[int, int]]) -> tuple[Neighbours, Neighbours]:
    children: Neighbours = {}
    parents: Neighbours = {}
    for parent, child in edges:
        children.setdefault(parent, []).append(child)
        parents.setdefault(child, []).append(parent)
    return children, parents


def _distances(root: int, children: Neighbours) -> dict[int, int]:
    found = {root: 0}
    queue = [root]
    for node in queue:
        for child in children.get(node, ()):
            if child not in found:
                found[child] = found[node] + 1
                queue.append(child)
    return found


def _shortest_path(root: int, target: int, children: Neighbours, rng: random.Random) -> list[int]:
    """One of the shortest paths, each as likely."""
    # Edges lead to higher numbers only, so one pass from the last node down has every child ready.
    left: dict[int, tuple[int, int]] = {target: (0, 1)}
    for node in range(target - 1, root - 1, -1):
        ways = [left[child] for child in children.get(node, ()) if child in left]
        if ways:
            nearest = min(far for far, _ in ways)
            left[node] = (nearest + 1, sum(count for far, count in ways if far == nearest))
    path = [root]
    while path[-1] != target:
        far = left[path[-1]][0] - 1
        onward = [child for child in children[path[-1]] if child in left and left[child][0] == far]
        path += _draw(onward, [float(left[child][1]) for child in onward], 1, rng)
    return path


def _poisson(mean: float, rng: random.Random) -> int:
    # Knuth: how many uniform numbers can be multiplied before the product falls below exp(-mean).
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def _draw(values: list[int], weights: list[float], count: int, rng: random.Random) -> list[int]:
    """Up to `count` of the values, in the order drawn, without replacement, with chances in proportion to weights."""
    drawn: list[int] = []
    for _ in range(min(count, len(values))):
        place, index = rng.random() * sum(weights), 0
        while index < len(values) - 1 and place >= weights[index]:
            place -= weights[index]
            index += 1
        drawn.append(values[index])
        if count > 1:
            values, weights = values[:index] + values[index + 1 :], weights[:index] + weights[index + 1 :]
    return drawn


def _one_of(values: Sequence[int], rng: random.Random) -> int:
    return values[int(rng.random() * len(values))]
