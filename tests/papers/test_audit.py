"""The audit: its settings, what it takes, and that it runs, resumes and reports."""

import json
from dataclasses import replace

import pytest
import torch

from sidestream import cli
from sidestream.evaluation.attacks_suite import ANY_OVERRIDE, DEFENCES
from sidestream.experiments.engine import LocalEngine
from sidestream.experiments.report.page import write_report
from sidestream.experiments.report.tables import markdown_table
from sidestream.experiments.run import run
from sidestream.experiments.settings import from_json, to_json
from sidestream.papers.audit import Audit, audit, subjects
from sidestream.papers.lsar.authority import table5

SMOKE = replace(audit("smoke"), calibration=99, tampers=2000)
HERE = LocalEngine(1)


# ---------------------------------------------------------------- settings


def test_settings_travel_and_mistakes_are_named():
    for scale in ("smoke", "cpu"):
        assert from_json(Audit, to_json(audit(scale))) == audit(scale)
    for change, words in (({"radii": ()}, "radii"), ({"shares": (1.0,)}, "swap"), ({"problems": 1}, "problems")):
        with pytest.raises(ValueError, match=words):
            replace(SMOKE, **change)


def test_what_is_no_model_is_told_in_one_line(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "experiment.json").write_text('{"table": "lsar.table1"}')
    for model, words in (
        ("", "name what to audit"),
        (str(tmp_path), "--data"),
        (str(tmp_path / "other"), "lsar.table1"),
    ):
        with pytest.raises(ValueError, match=words):
            subjects(replace(SMOKE, model=model))
    assert cli.main(["audit", str(tmp_path), "--scale", "smoke", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--data" in said and not (tmp_path / "out").exists()
    assert cli.main(["audit", str(tmp_path), "--scale", "paper"]) == 2
    assert "smoke and cpu" in capsys.readouterr().err


def test_help_says_what_to_give(capsys):
    with pytest.raises(SystemExit):
        cli.main(["audit", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "save_pretrained" in said and "--radii" in said and "units of each honest vector's norm" in said


# ---------------------------------------------------------------- runs


@pytest.mark.slow
def test_a_run_of_table5_is_audited_resumed_and_reported(tmp_path):
    experiment = replace(table5("smoke"), arms=("standard", "dynamic"), test_problems=6)
    run(replace(experiment, train_problems=16), tmp_path / "t5", command="test", engine=HERE)
    assert subjects(replace(SMOKE, model=str(tmp_path / "t5"))) == ["standard", "dynamic"]
    arms = ("standard", "dynamic", "blocksworld-standard")
    settings = replace(SMOKE, model=str(tmp_path / "t5"), arms=arms)
    results = run(settings, tmp_path / "audit", command="test", engine=HERE)
    places = {(c["arm"], c["where"]["defence"], c["where"]["attack"]) for c in results["cells"]}
    for arm in arms:
        for defence in DEFENCES:
            assert {
                (arm, defence, name) for name in ("none", ANY_OVERRIDE, "token search", "PGD 0.1", "swap")
            } <= places
    assert ("dynamic", "none", "token search, out of view") in places
    accepted = [c["value"] for c in results["cells"] if c["metric"] == "accepted"]
    assert accepted == [0.0, 1.0] * 3
    # A kill loses one attack at most: what is there is not made again, what is not is made the same.
    kept = tmp_path / "audit" / "standard" / "swap.json"
    marked = json.loads(kept.read_text())
    (tmp_path / "audit" / "results.json").unlink()
    (tmp_path / "audit" / "standard" / "outcomes.json").unlink()
    (tmp_path / "audit" / "standard" / "PGD-0.1.json").unlink()
    kept.write_text(json.dumps({**marked, "cost": {d: {**marked["cost"][d], "steps": 77} for d in DEFENCES}}))
    again = run(settings, tmp_path / "audit", command="test", resume=True, engine=HERE)
    assert again["cells"] == results["cells"] and again["costs"]["standard"]["swap"]["none"]["steps"] == 77
    page = write_report(tmp_path / "audit").read_text(encoding="utf-8")
    for words in (
        "Attacks on the vector, over their radius",
        "Authority over p",
        "Every attack on Standard",
        "tampered",
    ):
        assert words in page
    quoted = tmp_path / "cpu-seed0.json"
    quoted.write_text(json.dumps({**results, "scale": "cpu", "dirty": False}))
    table = markdown_table([quoted])
    assert "right answers, no attack" in table and "PGD 0.1" in table and "interpolation" not in table


@pytest.mark.slow
def test_a_saved_channel_is_audited_with_its_own_goals(tmp_path):
    import tiny_model
    from sidestream import GoalConfig, attach
    from sidestream.lm.models.base import load_base, load_tokenizer

    base = tiny_model.save(tmp_path / "base")
    model = attach(load_base(base), goal=GoalConfig(width=16), tokenizer=load_tokenizer(base))
    torch.nn.init.normal_(model.channel.film.projection.weight, std=0.1)
    model.save_pretrained(tmp_path / "channel")
    goals = tmp_path / "goals.jsonl"
    rows = [
        {"goal": f"The key is number {k}.", "trajectory": f"It rained all day. What is the key? {k}", "answer": str(k)}
        for k in range(8)
    ]
    goals.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = replace(SMOKE, model=str(tmp_path / "channel"), data=str(goals), problems=6)
    results = run(settings, tmp_path / "audit", command="test", engine=HERE)
    attacks = {c["where"]["attack"] for c in results["cells"]}
    assert {"override ignore, end", "override system, repeated", "unbounded", "both replaced"} <= attacks
    assert "at most 11%" in " ".join(results["notes"])  # 8 honest pairs show no less
    write_report(tmp_path / "audit")
    with pytest.raises(ValueError, match="8 records"):
        run(replace(settings, problems=9), tmp_path / "more", command="test")
