"""`sidestream solve`: PDDL files in, plans out, judged by somebody else's validator."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sidestream import cli
from sidestream.commands.solve import plan_files
from sidestream.experiments import run as kernel
from sidestream.experiments.engine import LocalEngine
from sidestream.papers.lsar.planning import table3

DATA = Path(__file__).parent / "data" / "blocksworld"
ROWS = [json.loads(line) for line in (DATA / "optimal.jsonl").read_text(encoding="utf-8").splitlines()]
SMALL = [row for row in ROWS if row["blocks"] == 3][:2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An all but untrained planner: among legal actions even that finds its way with three blocks."""
    directory = tmp_path_factory.mktemp("solve") / "run"
    experiment = replace(
        table3("smoke"), arms=("dynamic_state",), perturbations=(0,), more_blocks=(), windows=(0,), test_problems=2
    )
    kernel.run(experiment, directory, command="sidestream run lsar.table3", engine=LocalEngine(1))
    return directory


def files(rows: list[dict]) -> list[str]:
    return [str(DATA / "problems" / f"{row['id']}.pddl") for row in rows]


@pytest.mark.slow
def test_every_plan_written_is_valid(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("unified_planning", reason="the `plan` extra is not installed")
    from unified_planning.engines import SequentialPlanValidator
    from unified_planning.io import PDDLReader

    status = cli.main(["solve", *files(SMALL), "--run", str(run), "--tries", "12", "--out", str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    plans = sorted(tmp_path.glob("*.soln"))
    assert plans and said[-1] == f"{len(plans)} of {len(SMALL)} solved" and (status == 0) == (len(plans) == len(SMALL))
    sources = {row["id"]: row["source"] for row in SMALL}
    for plan in plans:
        domain = DATA / f"domain-{'ipc2000' if sources[plan.stem] == 'ipc2000' else 'planbench'}.pddl"
        reader = PDDLReader()
        problem = reader.parse_problem(str(domain), str(DATA / "problems" / f"{plan.stem}.pddl"))
        judge = SequentialPlanValidator()
        assert judge.validate(problem, reader.parse_plan(problem, str(plan))).status.name == "VALID"
        line = next(line for line in said if f"{plan.stem}.pddl" in line)
        optimal = next(row["optimal_length"] for row in SMALL if row["id"] == plan.stem)
        steps, over = (int(word) for word in line.replace(",", " ").split() if word.isdigit())
        assert steps - over == optimal == len(plan.read_text().splitlines()) - 1 - over
        broken = plan.read_text().splitlines()[:-2]
        (tmp_path / "broken.plan").write_text("\n".join(broken) + "\n")
        assert (
            judge.validate(problem, reader.parse_plan(problem, str(tmp_path / "broken.plan"))).status.name == "INVALID"
        )


def test_no_plan_is_said_and_not_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = files([max((row for row in ROWS if row["blocks"] == 5), key=lambda row: row["optimal_length"])])
    assert cli.main(["solve", *large, "--run", str(run), "--tries", "2", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "no plan" in out and "0 of 1 solved" in out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(define (problem p)", "never closed"),
        (
            "(define (problem p) (:domain d) (:objects a b) (:init (on a b) (big a)) (:goal (on b a)))",
            "unknown predicate",
        ),
        (
            "(define (problem p) (:domain d) (:objects a b) "
            "(:init (ontable a) (ontable b) (clear a) (clear b) (handempty)) (:goal (and (on a b) (on b a))))",
            "impossible :goal",
        ),
    ],
)
def test_a_bad_problem_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    path = tmp_path / "bad.pddl"
    path.write_text(text)
    assert cli.main(["solve", str(path), "--run", str(run)]) == 2
    error = capsys.readouterr().err
    assert "bad.pddl" in error and expected in error and error.count("\n") == 1


def problem(path: Path, goal: str = "(holding b1)") -> Path:
    """A problem that is solved at once, or by one pick-up."""
    blocks = "(arm-empty) (on-table b1) (clear b1) (on-table b2) (clear b2)"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(f"(define (problem p) (:domain d) (:objects b1 b2) (:init {blocks}) (:goal {goal}))")
    return path


def test_two_problems_of_one_name_have_two_plans(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = problem(tmp_path / "x" / "p.pddl", "(on-table b1)"), problem(tmp_path / "y" / "z" / "p.pddl")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    monkeypatch.chdir(tmp_path / "x")
    again = ["p.pddl", str(tmp_path / "link" / "p.pddl"), "../y/../x/p.pddl"]
    asked = [
        "solve",
        str(first),
        str(second),
        *again,
        "--run",
        str(run),
        "--tries",
        "8",
        "--out",
        str(tmp_path / "out"),
    ]
    for _ in range(2):  # a plan of an earlier call is replaced
        assert cli.main(asked) == 0
        said = capsys.readouterr()
        assert "2 of 2 solved" in said.out and said.err.count("again\n") == 3
        found = {str(path.relative_to(tmp_path / "out")): path.read_text() for path in (tmp_path / "out").rglob("*.*")}
        assert found == {
            "x/p.soln": "; cost = 0 (unit cost)\n",
            "y/z/p.soln": "(pick-up b1)\n; cost = 1 (unit cost)\n",
        }


def test_where_plans_go(tmp_path: Path) -> None:
    a, b, same = tmp_path / "a" / "p.pddl", tmp_path / "b" / "q.pddl", tmp_path / "b" / "P.pddl"
    out = tmp_path / "out"
    assert plan_files([a, b], str(out)) == [out / "p.soln", out / "q.soln"]
    assert plan_files([a, b], None) == [a.with_suffix(".soln"), b.with_suffix(".soln")]
    assert plan_files([a, same], str(out)) == [out / "a" / "p.soln", out / "b" / "P.soln"]
    assert plan_files([a, tmp_path / "p.pddl"], str(out)) == [out / "a" / "p.soln", out / "p.soln"]


@pytest.mark.parametrize("out", [[], ["--out", "out"]])
def test_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: list[str]
) -> None:
    """What would be is said before anything runs: there is no run to solve with here."""
    monkeypatch.chdir(tmp_path)
    folder = Path(*out[1:])
    folder.mkdir(exist_ok=True)
    names = ("p.pddl", "p.PDDL", "own.soln", "theirs.pddl", "folder.pddl", "link.pddl", "ours.pddl")
    for name in names:
        problem(Path(name))
    (folder / "theirs.soln").write_text("(pick-up b1)\n")
    (folder / "folder.soln").mkdir()
    (folder / "link.soln").symlink_to(tmp_path / "kept.soln")
    (folder / "ours.soln").write_text("(pick-up b1)\n; cost = 1 (unit cost)\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}

    def said(*files: str) -> str:
        assert cli.main(["solve", *files, *out, "--run", "none"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert f"p.pddl and p.PDDL would both have their plan in {folder / 'p.soln'}" in said("p.pddl", "p.PDDL")
    for name in ("theirs", "folder", "link"):
        assert f"{folder / name}.soln is there and is no plan" in said("ours.pddl", f"{name}.pddl")
    expected = "holds no run" if out else "own.soln is there and is no plan"
    assert expected in said("own.soln") and "holds no run" in said("ours.pddl")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}


def test_the_spelling_is_that_of_the_files_own_domain(run: Path, tmp_path: Path) -> None:
    path = problem(tmp_path / "p.pddl")
    domain = (DATA / "domain-ipc2000.pddl").read_text().replace("pick-up", "pickup").lower().replace("blocks)", "d)")
    path.write_text(path.read_text() + domain)
    asked = ["solve", str(path), "--run", str(run), "--tries", "8"]
    assert cli.main(asked) == 0
    assert path.with_suffix(".soln").read_text().startswith("(pickup b1)")
    (tmp_path / "hyphen.pddl").write_text(domain.replace("pickup", "pick-up"))
    assert cli.main([*asked, "--domain", str(tmp_path / "hyphen.pddl")]) == 0
    assert path.with_suffix(".soln").read_text().startswith("(pick-up b1)")


def test_a_users_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = files(SMALL)[0]
    for words, expected in (
        ([problem, "--run", str(tmp_path)], "holds no run of lsar.table3"),
        ([problem, "--run", str(run), "--arm", "static"], "holds no finished arm 'static'; it has dynamic_state"),
        ([problem, "--run", str(run), "--tries", "0"], "tries is 0"),
        ([str(tmp_path / "none.pddl"), "--run", str(run)], "No such file"),
    ):
        assert cli.main(["solve", *words]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1
