"""Several processes give the losses of one: DDP through the command, and raw FSDP2 with channels attached."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sidestream.tasks.goals import Tokens
from sidestream.training.finetune import FinetuneConfig, GoalLM, GoalRows, attach_channel, collate_goals, pooled_goals
from tiny_model import llama, save, shuffled_tokens, tokenizer, write_goals

STEPS, ROWS, WIDTH = 4, 4, 16
SETTINGS = ["--window=24", f"--width={WIDTH}", "--goal_steps=5", "--batch_size=8", "--log_every=1", "--save_every=2"]


def launch(processes: int, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": "0"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["channel", "full", "dynamic"])
def test_two_processes_take_the_steps_of_one(method, tmp_path):
    save(tmp_path / "base")
    write_goals(tmp_path / "goals.jsonl")
    train = ["-m", "sidestream", "train", "--model", "base", "--data", "goals.jsonl", *SETTINGS, f"--steps={STEPS}"]
    train += ["--learning_rate=1e-2", *{"full": ["--full"], "dynamic": ["--dynamic", "--trigger=."]}.get(method, [])]
    one = subprocess.run([sys.executable, *train, "--out", "one"], cwd=tmp_path, capture_output=True, text=True)
    assert one.returncode == 0, one.stderr
    two = launch(2, *train, "--out", "two", "--processes", "2", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    assert "DDP over 2 processes on cpu, 4 rows each" in two.stderr and "one process on cpu, 8 rows" in one.stderr
    assert len(losses(tmp_path / "one")) == STEPS
    torch.testing.assert_close(losses(tmp_path / "one"), losses(tmp_path / "two"), atol=2e-6, rtol=2e-6)
    parts = launch(2, *train, "--out", "parts", "--accumulate", "2", cwd=tmp_path)
    assert parts.returncode == 0, parts.stderr
    torch.testing.assert_close(losses(tmp_path / "one"), losses(tmp_path / "parts"), atol=2e-6, rtol=2e-6)
    # The control: another order of rows gives other losses.
    other = [sys.executable, *train, "--out", "other", "--seed", "1"]
    assert subprocess.run(other, cwd=tmp_path, capture_output=True).returncode == 0
    assert abs(losses(tmp_path / "one")[0] - losses(tmp_path / "other")[0]) > 1e-3


@pytest.mark.slow
def test_a_launcher_that_starts_too_few_is_caught(tmp_path):
    save(tmp_path / "base")
    write_goals(tmp_path / "goals.jsonl")
    train = ["-m", "sidestream", "train", "--model", "base", "--data", "goals.jsonl", "--processes", "2"]
    done = launch(1, *train, cwd=tmp_path)
    assert done.returncode != 0 and "--processes 2 and WORLD_SIZE is 1" in done.stderr


def steps_by_hand(shard: bool) -> list[float]:
    """The losses of a hand-written loop over the whole model, each process taking its part of every batch."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    words = tokenizer()
    lm = llama(len(words))
    config = FinetuneConfig(method="full", window=12, width=8, batch_size=ROWS)
    model = attach_channel(lm, config, words)
    texts = [shuffled_tokens(13, len(words), seed=k) for k in range(8)]
    goals = [shuffled_tokens(5, len(words), seed=100 + k) for k in range(8)]
    read = [Tokens(tuple(ids), (False, *[True] * 12)) for ids in texts]
    rows = GoalRows(read, pooled_goals(model, goals), window=12, batch_size=ROWS, steps=STEPS, seed=0)
    objective = GoalLM(model, ROWS).train()
    if shard:
        from torch.distributed import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for block in lm.model.layers:
            fully_shard(block, mesh=mesh)
        # What is left, the channel too, belongs to the module whose forward is called.
        fully_shard(objective, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=0.05)
    found = []
    for step in range(STEPS):
        places = range(step * ROWS, (step + 1) * ROWS)
        batch = collate_goals([rows[index] for index in places][rank * ROWS // world : (rank + 1) * ROWS // world])
        loss = objective(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world > 1:
            torch.distributed.all_reduce(mean)
        found.append((mean / world).item())
    return found


@pytest.mark.slow
def test_fully_sharded_with_channels_attached(tmp_path):
    done = launch(2, str(Path(__file__).resolve()), str(tmp_path / "losses.json"), cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    sharded = json.loads((tmp_path / "losses.json").read_text())
    assert sharded["world"] == 2 and sharded["sharded"] > 20
    alone = steps_by_hand(shard=False)
    torch.testing.assert_close(sharded["losses"], alone, atol=1e-5, rtol=1e-5)
    assert alone[-1] < alone[0] - 1e-2, "nothing trained"


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    from torch.distributed.tensor import DTensor

    kept: list[torch.nn.Module] = []
    original = GoalLM.__init__

    def remember(self, *args):
        original(self, *args)
        kept.append(self)

    GoalLM.__init__ = remember  # type: ignore[method-assign]
    result = steps_by_hand(shard=True)
    if torch.distributed.get_rank() == 0:
        count = sum(isinstance(parameter, DTensor) for parameter in kept[0].parameters())
        record = {"losses": result, "world": torch.distributed.get_world_size(), "sharded": count}
        Path(sys.argv[1]).write_text(json.dumps(record))
    torch.distributed.destroy_process_group()
