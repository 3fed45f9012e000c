"""Jobs as Ray's tasks, on local nodes that stand for machines: the same numbers, one node lost, all of it stopped."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from test_engine import SMOKE, alive, cells, command, same_weights

from sidestream import cli
from sidestream.experiments import cluster as engine
from sidestream.experiments.cluster import RayEngine
from sidestream.papers.lsar import recall

TOYS = Path(__file__).parent / "tables"


@pytest.fixture(scope="module")
def cluster():
    """A head that does no work, and two nodes of one core."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the `ray` extra is not installed")
    before = dict(os.environ)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_period_ms": "500"}
    memory = {"object_store_memory": 80 * 2**20}
    found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
    for _ in range(2):
        found.add_node(num_cpus=1, **memory)
    yield found
    found.shutdown()
    os.environ.clear()
    os.environ |= before


def at_work() -> list[psutil.Process]:
    """Workers that do a job; a worker's title is its task's name."""
    return [
        each for each in psutil.process_iter(["cmdline"]) if "ray::sidestream" in " ".join(each.info["cmdline"] or ())
    ]


def wait_for(what, seconds: float = 120):
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_machines_training_goes_on_elsewhere_to_the_same_bits(cluster, tmp_path):
    words = [*SMOKE, "--arms", "[baseline,static]", "--stage3.steps", "150", "--stage3.save_every", "10", "--out"]
    assert cli.main([*words, str(tmp_path / "whole"), "--jobs", "1"]) == 0
    ray = ["--engine", "ray", "--address", cluster.address]
    run = subprocess.Popen(command(*words, str(tmp_path / "run"), *ray), stdout=subprocess.DEVNULL)
    stage = tmp_path / "run" / "static" / "stage3"
    assert wait_for(lambda: list(stage.glob("checkpoint-*"))), "no checkpoint came"
    (worker,) = (each for each in at_work() if "ray::sidestream static" in " ".join(each.cmdline()))
    (lost,) = (
        node
        for node in cluster.worker_nodes
        if worker.parent().pid in [each.process.pid for each in node.all_processes["raylet"]]
    )
    assert not (stage / "final").exists(), "it was to be killed in the middle"
    cluster.remove_node(lost, allow_graceful=False)
    assert wait_for(lambda: not alive(worker.pid), 30), "the lost node's worker lives"
    assert run.wait(timeout=300) == 0
    assert cells(tmp_path / "run") == cells(tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    steps = [json.loads(line)["step"] for line in (stage / "metrics.jsonl").read_text().splitlines()]
    assert steps.count(1) == 1 and steps[-1] == 150, "it began again instead of going on"
    assert not at_work() and not list((tmp_path / "run").glob(".shared*"))
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_seeds_on_a_cluster_give_the_local_cells(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_TABLES", str(TOYS))
    words = ["run", "toy.coin", "--scale", "smoke", "--seeds", "0", "1", "--throws", "3", "--out"]
    subprocess.run(command(*words, str(tmp_path / "here")), check=True, stdout=subprocess.DEVNULL)
    ray = ["--engine", "ray", "--address", cluster.address]
    subprocess.run(command(*words, str(tmp_path / "there"), *ray), check=True, stdout=subprocess.DEVNULL)
    assert cells(tmp_path / "there") == cells(tmp_path / "here")
    text = (TOYS / "toy.py").read_text(encoding="utf-8").replace("toy.coin", "bad.coin")
    (tmp_path / "bad.py").write_text(text.replace("share = self.base()", "raise ValueError('the coin is lost')"))
    monkeypatch.setenv("SIDESTREAM_TABLES", str(tmp_path))
    words[1] = "bad.coin"
    for more, said in (([], "the coin is lost"), (["--gpus", "1"], "no machine of the cluster")):
        done = subprocess.run(
            command(*words, str(tmp_path / "bad"), *ray, "--resume", *more), capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stderr.startswith("sidestream: ") and said in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupt_stops_every_job(cluster, tmp_path):
    words = [*SMOKE, "--out", str(tmp_path / "run"), "--stage1.steps", "20000", "--engine", "ray"]
    run = subprocess.Popen(
        command(*words, "--address", cluster.address),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    logs = tmp_path / "run"
    assert wait_for(lambda: len(list(logs.glob("*/stage1/metrics.jsonl"))) == 2), "two jobs were to be at work"
    assert len(at_work()) >= 2
    os.killpg(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert err.strip().splitlines() == ["sidestream: stopped; run the same command with --resume to go on"]
    assert not at_work()
    sizes = [path.stat().st_size for path in logs.glob("*/stage1/metrics.jsonl")]
    time.sleep(1)
    assert sizes == [path.stat().st_size for path in logs.glob("*/stage1/metrics.jsonl")]


# ---------------------------------------------------------------- what is refused, without a cluster


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "ray", "--jobs", "2"], "--jobs is for --engine local"),
        (["--engine", "ray", "--cpus", "0"], "cpus is 0"),
        (["--engine", "ray", "--gpus", "-1"], "a job takes at least 1 core and no less than 0 GPUs"),
        (["--engine", "rya"], "--engine must be one of local, ray; got 'rya'"),
        (["--address", "auto"], "--address is for --engine ray"),
        (["--gpus", "1"], "--gpus is for --engine ray"),
        (["--engine", "ray", "--address", "nowhere"], "no Ray cluster is reached at nowhere"),
    ],
)
def test_words_that_do_not_fit(words, said, tmp_path, capfd):
    assert cli.main([*SMOKE, "--out", str(tmp_path / "run"), *words]) == 2
    err = capfd.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_an_address_where_nobody_listens_is_one_line(tmp_path, capfd):
    with socket.socket() as taken:  # bound and not listening: refuses at once
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = [*SMOKE, "--out", str(tmp_path / "run"), "--engine", "ray", "--address", address]
        assert cli.main(words) == 2
    err = capfd.readouterr().err
    assert f"no Ray cluster is reached at {address} (" in err and "ray start --head" in err
    assert len(err.splitlines()) == 1


def test_without_ray_the_extra_is_named(tmp_path, capfd, monkeypatch):
    find = engine.importlib.util.find_spec
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    assert cli.main([*SMOKE, "--out", str(tmp_path / "run"), "--engine", "ray"]) == 2
    assert "pip install 'sidestream[ray]'" in capfd.readouterr().err


def test_what_is_timed_stays_on_one_machine(tmp_path, capfd):
    words = ["run", "lsar.table2", "--scale", "smoke", "--out", str(tmp_path / "run"), "--engine", "ray"]
    assert cli.main(words) == 2
    assert "lsar.table2 times one job at a time" in capfd.readouterr().err


def test_a_machine_of_another_kind_is_named(tmp_path):
    there = {"folder": str(tmp_path), "mark": ".shared", "threads": 1, "versions": engine._versions()}
    address = (recall.table1("smoke"), tmp_path, "base")
    with pytest.raises(ValueError, match=rf"^{socket.gethostname()} does not see {tmp_path}"):
        engine._on_a_machine(address, there)
    (tmp_path / ".shared").touch()
    there["versions"]["torch"] = "1.0"
    with pytest.raises(ValueError, match=r"has torch .*, the command 1\.0; install the same everywhere"):
        engine._on_a_machine(address, there)


def test_nothing_to_do_needs_no_cluster():
    RayEngine("nowhere").run([])
