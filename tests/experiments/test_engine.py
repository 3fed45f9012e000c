"""The command and its processes: killed, interrupted, resumed. Table 1 at smoke scale."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sidestream import cli

SMOKE = ["run", "lsar.table1", "--scale", "smoke"]


def cells(directory: Path) -> list[dict]:
    return json.loads((directory / "results.json").read_text(encoding="utf-8"))["cells"]


def same_weights(mine: Path, theirs: Path) -> bool:
    """Whether the last stages of both arms ended with the same bits."""
    for arm in ("baseline", "static"):
        ours, others = (load_file(run / arm / "stage3" / "final" / "model.safetensors") for run in (mine, theirs))
        if ours.keys() != others.keys() or not all(torch.equal(ours[name], others[name]) for name in ours):
            return False
    return True


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from sidestream.cli import main; sys.exit(main())", *words]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_normal_run_says_nothing_on_stderr(tmp_path):
    words = ["--arms", "[baseline,static]", "--out", str(tmp_path / "run")]
    done = subprocess.run(command(*SMOKE, *words), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "report" in done.stdout and "Warning" not in done.stdout


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Running, not only waiting for its parent to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers through /proc")
def test_killed_run_with_workers_ends_with_the_same_cells(tmp_path):
    """SIGKILL of the command alone: its workers must not go on writing, and the run can be resumed."""
    words = [*SMOKE, "--arms", "[baseline,static]", "--stage3.steps", "60", "--stage3.save_every", "10", "--out"]
    assert cli.main([*words, str(tmp_path / "whole"), "--jobs", "1"]) == 0
    run = subprocess.Popen(command(*words, str(tmp_path / "run"), "--jobs", "2"), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not list((tmp_path / "run").glob("*/stage3/checkpoint-10")) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = children(run.pid)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL and len(workers) >= 2
    assert not (tmp_path / "run" / "results.json").exists(), "it was to be killed half-way"
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers)), "workers outlive their parent"
    assert cli.main([*words, str(tmp_path / "run"), "--resume", "--jobs", "1"]) == 0
    assert cells(tmp_path / "run") == cells(tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_interrupted_command_says_how_to_go_on(jobs, tmp_path):
    """Ctrl-C reaches the command and its workers alike, as from a terminal."""
    run = subprocess.Popen(
        command(*SMOKE, "--out", str(tmp_path / "run"), "--stage1.steps", "2000", "--jobs", jobs),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not list((tmp_path / "run").glob("*/stage1/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert err.strip().splitlines() == ["sidestream: stopped; run the same command with --resume to go on"]
