"""AGCLR's tables: experiments as data, text, analyses against slow oracles, and every table at smoke scale."""

import gc
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sidestream import cli
from sidestream.channels import StreamConfig
from sidestream.evaluation.latent import batches, generate_answers, trace_passes
from sidestream.evaluation.stats import mean_and_band
from sidestream.experiments import run as kernel
from sidestream.experiments.engine import LocalEngine
from sidestream.experiments.report.page import write_report
from sidestream.experiments.run import run
from sidestream.experiments.settings import from_json, to_json
from sidestream.experiments.table import load
from sidestream.lm.attach import attach
from sidestream.lm.decoding.passes import PassConfig, latent_passes
from sidestream.lm.models.backbones import Backbone
from sidestream.papers.agclr.controls import controls
from sidestream.papers.agclr.methods import ABLATIONS, METHODS, MethodsWork, ablations, prosqa, table1
from sidestream.papers.agclr.retention import retention
from sidestream.papers.agclr.settings import ARMS, DERIVED, LOOKS, LatentSettings, published
from sidestream.papers.agclr.work import LatentWork, TextForm
from sidestream.tasks.base import ReasoningExample
from sidestream.training.curriculum import Curriculum, latent_row, plain_row, prompt
from sidestream.training.latent import pretrained

DATA = Path(__file__).parents[1] / "data"
MAKERS = {f"agclr.{make.__name__}": make for make in (table1, prosqa, ablations, retention, controls)}
TABLES = {"agclr.table1": METHODS, "agclr.prosqa": METHODS, "agclr.ablations": ABLATIONS}


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Every call's Trainer collects garbage; what the libraries hold need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


# ---------------------------------------------------------------- experiments


@pytest.mark.parametrize("table", MAKERS)
@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_experiments_go_through_json(table, scale):
    experiment = MAKERS[table](scale)
    assert experiment.table == table and experiment.arms == TABLES.get(table, experiment.arms)
    assert from_json(LatentSettings, json.loads(json.dumps(to_json(experiment)))) == experiment
    assert ("masked" in experiment.tasks) == (scale != "paper" and table in ("agclr.ablations", "agclr.controls"))
    assert set(load(table).arms) == {*ARMS, *DERIVED}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"arms": ("agclr", "other")}, "arms names the unknown 'other'; use no_cot"),
        ({"arms": ()}, "arms is .*; give at least one"),
        ({"arms": ("agclr", "agclr")}, "each once"),
        ({"arms": ("coconut", "agclr_write2")}, "evaluates the weights of 'agclr'; add that arm"),
        ({"tasks": ("hops", "chess")}, "tasks names the unknown 'chess'"),
        ({"tasks": ("gsm8k",)}, "task 'gsm8k' has no settings at scale smoke, which has hops, masked, prosqa"),
        ({"test_problems": 0}, "test_problems is 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes, part):
    with pytest.raises(ValueError, match=part):
        replace(table1("smoke"), **changes)


def test_paper_values():
    assert published("agclr", "accuracy", {"task": "gsm8k"}) == 0.340
    assert published("agclr_no_write", "f1", {"task": "hotpotqa"}) == 0.171
    assert published("agclr_write2", "em", {"task": "hotpotqa"}) == 0.132
    assert published("coconut", "accuracy", {"task": "prosqa", "latents": "learned"}) == 0.92
    assert published("coconut", "accuracy", {"task": "prosqa", "latents": "noise"}) is None
    assert published("agclr_no_write", "accuracy", {"task": "prosqa"}) is None
    assert published("coconut", "cosine", {"task": "prosqa", "pass": 6}) == 0.126
    assert published("coconut", "cosine", {"task": "prosqa", "pass": 5}) is None
    assert published("coconut", "accuracy", {"task": "hops"}) is None
    assert published("coconut", "accuracy", {"task": "prosqa", "stage": 2}) is None


def test_the_papers_epochs():
    """Stages of 3 + 3 + 3 + 6 epochs of 15,000, and of 3 x 6 + 2 of 17,886, at 128 a step."""
    experiment = table1("paper")
    for task, epochs in (("hotpotqa", [3, 6, 9, 15]), ("prosqa", [3, 6, 9, 12, 15, 18, 20])):
        training = experiment.training(task)
        ends = training.curriculum.ends(training.loop.steps)
        assert [round(end * 128 / training.problems, 1) for end in ends] == epochs


# ---------------------------------------------------------------- text


def test_text_and_rows_are_the_authors():
    """Every recorded layout of the published code, from the text on."""
    record = json.loads(gzip.decompress((DATA / "coconut_golden" / "layouts.json.gz").read_bytes()))
    checked = 0
    for case in record["cases"]:
        form = TextForm.bpe(markers=not case["no_special_marker"])
        assert (form.stop_id, form.pad_id, form.size) == (record["eos_id"], record["pad_id"], record["vocab_size"])
        curriculum = Curriculum(
            latents_per_step=case["c_thought"],
            max_stage=case["max_latent_stage"],
            drop_all=case["stage"] > case["max_latent_stage"],
            pad_to_max=case["pad_latent_to_max"],
        )
        for row in case["rows"]:
            sample = record["samples"][case["data"]][row["idx"]]
            problem = form.encode(ReasoningExample(sample["question"], tuple(sample["steps"]), sample["answer"]))
            assert len(problem.question) == row["n_question"]
            if case["no_cot"]:
                if form.layout.markers:  # no arm of ours
                    continue
                made, start = plain_row(problem, 10_000, form.layout).row, list(problem.question)
            else:
                made = latent_row(problem, case["stage"], curriculum, form.layout).row
                start = prompt(problem, "latent", case["stage"], curriculum, form.layout)
            assert made.ids[row["n_question"] :] == row["train_tail"]
            assert made.labels[row["n_question"] :] == row["label_tail"]
            assert start[row["n_question"] :] == row["eval_tail"]
            checked += 1
    assert checked > 150


def test_words_are_one_token_each():
    form = TextForm.words(("1", "2", "a", "b", "c"), markers=False)
    problem = form.encode(ReasoningExample("a b 2 a", ("b",), "a"))
    assert [len(problem.question), len(problem.steps), len(problem.answer)] == [4, 1, 2]
    assert form.decode([*problem.question, *problem.steps[0], form.layout.latent_id]) == "a b 2 a b"
    assert form.size == form.pad_id + 1 == 10 and problem.answer[-1] == form.stop_id


# ---------------------------------------------------------------- analyses

LATENT = 18
CONFIG = PassConfig(latent_id=LATENT)
PROMPTS = [[1, 2, 3, *[LATENT] * k, 4] for k in (2, 1, 3, 3)] + [[5, 6, 7, 8, *[LATENT] * 3], [1, 1]]


def tiny(stream=None, seed=0):
    torch.manual_seed(seed)
    lm = Backbone(layers=2, width=32, heads=2, family="llama").build(vocabulary=20, window=32, pad_id=19)
    with torch.no_grad():  # as drawn, a pass hardly changes its state
        for layer in lm.base_model.layers:  # type: ignore[union-attr]
            for weight in layer.parameters():
                weight *= 6 if weight.ndim == 2 else 1
    model = lm if stream is None else attach(lm, stream=stream)
    if stream is not None:
        for linear in (model.stream.read_gate, model.stream.forget_gate, model.stream.write_gate):
            torch.nn.init.normal_(linear.weight, std=0.3)
    return model.eval()


def test_batches_hold_like_prompts_and_no_lonely_one():
    found = batches(PROMPTS, LATENT, 2)
    assert sorted(index for batch in found for index in batch) == list(range(len(PROMPTS)))
    assert all(len({PROMPTS[index].count(LATENT) for index in batch}) == 1 for batch in found)
    assert sorted(map(len, found)) == [1, 1, 1, 3], "three of a kind are not parted into two and one"


@pytest.mark.parametrize("stream", [None, StreamConfig(), StreamConfig(write_until=1)])
def test_traced_passes_are_those_of_each_problem_alone(stream):
    model = tiny(stream)
    trace = trace_passes(model, PROMPTS, CONFIG)
    assert [len(values) for values in trace.cosine] == [5, 4, 3]
    assert all(value == pytest.approx(1.0) for value in trace.cosine[0])
    alone: list[list[float]] = [[], [], []]
    for ids in PROMPTS:
        states = latent_passes(model, torch.tensor([ids]), CONFIG).states[0].detach()
        for place, state in enumerate(states):
            alone[place].append(float(state @ states[0] / (state.norm() * states[0].norm())))
    for mine, theirs in zip(trace.cosine, alone, strict=True):
        assert sorted(mine) == pytest.approx(sorted(theirs), abs=1e-5)
    assert max(trace.cosine[2]) < 0.99
    assert set(trace.gates) == (set() if stream is None else {"read", "forget", "write"})
    if stream is not None:
        assert min(trace.gates["read"][1]) > 0 and max(trace.gates["read"][1]) < 1
        assert any(trace.gates["write"][1]) == (stream.write_until is None), "frozen after pass 1"
        assert all(trace.gates["write"][0])
    with pytest.raises(ValueError, match="no prompt has a latent slot"):
        trace_passes(model, [[1, 2]], CONFIG)


def test_interventions_act_on_latents_and_on_nothing_else():
    model = tiny(StreamConfig())
    ask = {"max_new_tokens": 2, "stop_id": 0}
    clean = generate_answers(model, PROMPTS, CONFIG, **ask)
    for kind in ("zero", "noise", "mean", "first", "other", "permuted"):
        said = generate_answers(model, PROMPTS, CONFIG, intervention=kind, **ask)
        again = generate_answers(model, PROMPTS, CONFIG, intervention=kind, **ask)
        assert said == again and said[-1] == clean[-1], "the last prompt has no latents"
        if kind == "permuted":
            assert said[1] == clean[1], "one latent has no other place"
    noisy = [generate_answers(model, PROMPTS, CONFIG, intervention="noise", seed=s, **ask) for s in range(2)]
    assert any(said != clean for said in noisy)
    assert generate_answers(model, PROMPTS, replace(CONFIG, depth=3), **ask) == clean
    bare = [[token for token in ids if token != LATENT] for ids in PROMPTS]
    assert generate_answers(model, PROMPTS, replace(CONFIG, depth=0), **ask) == generate_answers(
        model, bare, CONFIG, **ask
    )


def test_bands():
    mean, low, high = mean_and_band([0.0, 1.0] * 50)
    assert mean == 0.5 and high - mean == pytest.approx(mean - low) == pytest.approx(1.96 * 0.0502519, rel=1e-4)
    assert mean_and_band([0.25]) == (0.25, 0.25, 0.25)


# ---------------------------------------------------------------- whole runs

COMMAND = "sidestream run agclr.table1 --scale smoke"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Each table once, over arms trained once; `masked` stands for all tasks where it is in a table."""
    root, found = tmp_path_factory.mktemp("agclr"), {}
    for table, make in MAKERS.items():
        experiment = make("smoke")
        experiment = replace(experiment, tasks=experiment.tasks[:1], models=str(root / "models"))
        if table == "agclr.controls":
            experiment = replace(experiment, tasks=("masked",), arms=("coconut", "agclr"))
        found[table] = (root / table, experiment, run(experiment, root / table, command=COMMAND))
    return found


def places(results, **wanted):
    return [c for c in results["cells"] if all(c[k] == v or c["where"].get(k) == v for k, v in wanted.items())]


@pytest.mark.parametrize("table", ["agclr.table1", "agclr.ablations"])
def test_tables_of_arms_have_every_cell(table, shared):
    directory, experiment, results = shared[table]
    assert len(results["cells"]) == len(experiment.arms)
    assert all(cell["n"] == experiment.test_problems and cell["metric"] == "accuracy" for cell in results["cells"])
    stages: dict[str, list[dict]] = {}
    for found in json.loads((directory / "stages.json").read_text())["cells"]:
        stages.setdefault(found["arm"], []).append(found)
    latent = [arm for arm in experiment.arms if arm in ARMS and ARMS[arm].text == "latent"]
    assert list(stages) == latent and all([p["where"]["stage"] for p in stages[arm]] == [0, 1] for arm in latent)
    for arm in latent:
        (final,) = places(results, arm=arm)
        assert stages[arm][-1]["value"] == final["value"]
    tests = [note for note in results["notes"] if "McNemar" in note]
    assert len(tests) == (7 if table == "agclr.table1" else len(experiment.arms) - 1)
    assert all("hops, seed 0: " in note and f"of {experiment.test_problems} (" in note for note in tests)


def test_retention_has_every_pass(shared):
    _, _, results = shared["agclr.retention"]
    for arm, metrics in (("coconut", 1), ("agclr", 4)):
        assert len(places(results, arm=arm)) == 2 * metrics
        assert places(results, arm=arm, metric="cosine")[0]["value"] == pytest.approx(1.0)
    means = {metric: places(results, arm="agclr", metric=metric)[0]["value"] for metric in ("read_gate", "write_gate")}
    assert means == pytest.approx({"read_gate": 0.43, "write_gate": 0.18}, abs=0.05), "hardly trained"
    assert {c["metric"] for c in places(results, arm="agclr")} == {"cosine", "read_gate", "forget_gate", "write_gate"}


def test_controls_have_every_condition(shared):
    _, experiment, results = shared["agclr.controls"]
    conditions = {cell["where"]["latents"] for cell in results["cells"]}
    replaced = {"learned", "zero", "noise", "mean", "first", "other", "permuted"}
    assert conditions == {*replaced, "depth 0", "depth 1"}
    assert len(results["cells"]) == len(experiment.arms) * len(conditions) * 3
    assert {cell["metric"] for cell in results["cells"]} == {"accuracy", "last", "early"}


def test_an_arm_is_trained_once_for_all_tables(shared, monkeypatch):
    first, second = (shared[table][1] for table in ("agclr.table1", "agclr.ablations"))
    models = Path(first.models)
    trained = {path.parent.name for path in (models / "hops").glob("*/stage1")}
    assert {path.parent.name for path in (models / "hops").glob("*/stage0")} == {"all_arms"}
    assert trained == {arm for arm in (*first.arms, *second.arms) if arm in ARMS}
    calls = json.loads((models / "hops" / "calls.json").read_text())
    assert len(calls) == 3, "what was done here is on record whichever table did it"
    with pytest.raises(ValueError, match="holds arms trained otherwise: seed is 0 there and 1 here"):
        LatentWork(replace(first, seed=1), Path(first.models)).open_task("hops")


@pytest.mark.parametrize("arm", ["agclr", "pause_multi", "coconut_sim", "cot", "icot"])
def test_sharing_stage_0_changes_no_bit_of_an_arm(arm, tmp_path):
    experiment = replace(table1("smoke"), arms=(arm,), tasks=("hops",))
    models = LatentWork(experiment, tmp_path / "shared", show=False)
    shared = models.load("hops", arm).state_dict()
    alone = models.fresh("hops", arm)
    start = {name: weight.clone() for name, weight in alone.state_dict().items()}
    models._train("hops", arm, alone, "alone", models.calls("hops"))
    assert all(torch.equal(weight, alone.state_dict()[name]) for name, weight in shared.items())
    assert any(not torch.equal(weight, start[name]) for name, weight in shared.items()), "nothing was trained"


def test_finished_run_is_read_again(shared, monkeypatch):
    directory, experiment, results = shared["agclr.table1"]
    monkeypatch.setattr(MethodsWork, "jobs", lambda self: pytest.fail("it runs again"))
    assert run(experiment, directory, command="again", resume=True) == results
    with pytest.raises(ValueError, match="add --resume"):
        run(experiment, directory, command="again")


def test_a_derived_arm_closes_the_write_gate_and_trains_nothing(shared, monkeypatch):
    directory, experiment, _ = shared["agclr.ablations"]
    work, seen = MethodsWork(experiment, directory, show=False), {}
    monkeypatch.setattr(MethodsWork, "measure", lambda self, task, arm, module: seen.update({arm: module}) or [])
    jobs = {job.name: job for job in work.jobs()}
    assert jobs["hops/agclr_write2"].needs == ("hops/agclr",) and not jobs["hops/agclr_write2"].stages
    for name in ("hops/agclr", "hops/agclr_write2"):
        jobs[name].work()
    state, passes = torch.randn(1, 32), torch.tensor([2])
    frozen, free = (seen[name].model.stream for name in ("agclr_write2", "agclr"))
    read, _, write = frozen.gates(state, passes)[0]
    assert not write.any() and read.all() and frozen.gates(state, passes - 1)[0, 2].all()
    assert free.gates(state, passes)[0, 2].all()


def test_arms_without_latents_are_refused_where_latents_are_looked_at(tmp_path):
    for make in (controls, retention):
        with pytest.raises(ValueError, match="which arm 'no_cot' has not"):
            run(replace(make("smoke"), arms=("no_cot",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("table", MAKERS)
def test_reports_have_their_pictures(table, shared):
    directory, _, results = shared[table]
    page = write_report(directory).read_text(encoding="utf-8")
    pictures = {
        "agclr.table1": ["answers", "stages", "loss"],
        "agclr.prosqa": ["answers", "stages", "loss"],
        "agclr.ablations": ["answers", "stages", "loss"],
        "agclr.retention": ["passes", "loss"],
        "agclr.controls": ["latents", "loss"],
    }[table]
    for picture in pictures:
        assert (directory / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("<figure") == len(pictures)
    assert all(LOOKS[cell["arm"]].name.replace("'", "&#39;") in page for cell in results["cells"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("table", MAKERS)
def test_every_cell_of_every_table(table, tmp_path_factory, tmp_path):
    experiment = MAKERS[table]("smoke")
    results = run(experiment, tmp_path / "run", command=COMMAND)
    for task in experiment.tasks:
        for arm in experiment.arms:
            assert places(results, task=task, arm=arm), (task, arm)
    assert write_report(tmp_path / "run").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_give_the_same_cells(shared, tmp_path):
    """Two processes, over models trained here."""
    _, experiment, results = shared["agclr.controls"]
    again = run(experiment, tmp_path / "run", command=COMMAND, engine=LocalEngine(2))
    assert again["cells"] == results["cells"]
    anew = run(replace(experiment, models=None), tmp_path / "anew", command=COMMAND, engine=LocalEngine(2))
    assert anew["cells"] == results["cells"]


# ---------------------------------------------------------------- data, base models, command line


def test_files_take_the_place_of_generators(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"question": f"How many is {n} + 1?", "answer": f"<<{n}+1={n + 1}>>\n#### {n + 1}"} for n in range(9)]
    for split, part in (("train", rows[:6]), ("test", rows[6:])):
        (folder / f"gsm8k_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    smoke = table1("smoke")
    experiment = replace(smoke, tasks=("gsm8k",), gsm8k=smoke.hops, files=str(folder))
    models = LatentWork(experiment, tmp_path / "run", show=False)
    assert [e.answer for e in models.examples("gsm8k", "train")] == ["1", "2", "3", "4", "5", "6"]
    form = models.form("gsm8k")
    assert form.lines and form.decode(models.encoded("gsm8k", "test")[0].answer) == "### 7"
    assert models.scores("gsm8k", [form.encode(e).answer for e in models.examples("gsm8k", "test")]) == {
        "accuracy": [1.0, 1.0, 1.0],
        "number": [1.0, 1.0, 1.0],
    }
    with pytest.raises(ValueError, match="must hold one file gsm8k_valid"):
        models.examples("gsm8k", "valid")
    with pytest.raises(ValueError, match="there is no such folder"):
        LatentWork(replace(experiment, files="nowhere"), tmp_path / "other").examples("gsm8k", "train")


def test_test_problems_are_the_same_for_every_seed(tmp_path):
    smoke = replace(table1("smoke"), tasks=("hops",))
    one, two = (LatentWork(replace(smoke, seed=s), tmp_path / str(s)) for s in (0, 1))
    assert one.examples("hops", "test") == two.examples("hops", "test")
    assert one.examples("hops", "train") != two.examples("hops", "train")
    shown = {e.question.rsplit(" ", 2)[0] for e in one.examples("hops", "train")}
    assert not shown & {e.question.rsplit(" ", 2)[0] for e in one.examples("hops", "test")}


def test_a_base_model_learns_new_tokens_and_must_fit(tmp_path):
    torch.manual_seed(0)
    lm = Backbone(layers=1, width=8, heads=1).build(vocabulary=30, window=16, pad_id=0)
    lm.save_pretrained(tmp_path / "base")
    old = lm.get_input_embeddings().weight.detach()  # type: ignore[union-attr]
    got = pretrained(str(tmp_path / "base"), size=33, new_ids=(30, 31, 32), like=7)
    new = got.get_input_embeddings().weight  # type: ignore[union-attr]
    assert torch.equal(new[:30], old) and all(torch.equal(new[k], old[7]) for k in (30, 31, 32))
    assert got.get_output_embeddings().weight.shape[0] == 33  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="knows 30 tokens, the text has 50257"):
        pretrained(str(tmp_path / "base"), size=50260, new_ids=(50257, 50258, 50259), like=7)
    with pytest.raises(ValueError, match="the model 'nobody/nothing' cannot be had .*give a folder") as error:
        pretrained("nobody/nothing", size=33, new_ids=(30,), like=7)
    assert "\n" not in str(error.value)


def test_the_commands_settings_are_the_experiments(monkeypatch, capfd, tmp_path):
    calls = []
    monkeypatch.setattr(kernel, "run", lambda experiment, out, **_: calls.append(experiment) or 1 / 0)

    def started(*words):
        with pytest.raises(ZeroDivisionError):
            cli.main(["run", *words])
        return calls[-1]

    for table, make in MAKERS.items():
        assert started(table, "--scale", "smoke") == make("smoke")
    assert started("agclr.table1") == table1("cpu")
    words = ["--tasks", "[hops]", "--hops.curriculum.max_stage", "3", "--hops.loop.steps", "9", "--models", "m"]
    changed = started("agclr.table1", "--scale", "smoke", *words)
    assert changed.tasks == ("hops",) and changed.hops.curriculum.max_stage == 3 and changed.models == "m"
    file = tmp_path / "experiment.json"
    file.write_text(json.dumps(to_json(changed)), encoding="utf-8")
    assert started("agclr.table1", "--config", str(file)) == changed
    with pytest.raises(SystemExit):
        cli.main(["run", "agclr.controls", "--scale", "smoke", "--help"])
    assert "--masked.sees" in (out := capfd.readouterr().out) and "--gsm8k" not in out
    assert cli.main(["run", "agclr.table1", "--scale", "smoke", "--hops.curriculum.mix", "some"]) == 2
    assert "--hops.curriculum.mix must be one of none, proportional; got 'some'" in capfd.readouterr().err
