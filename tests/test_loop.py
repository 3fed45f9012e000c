"""The training loop: exact resume, checkpoints that are whole or absent, clear stops."""

import errno
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from sidestream.training import checkpoints as checkpoint_files
from sidestream.training import loop
from sidestream.training.batches import collate
from sidestream.training.checkpoints import MANIFEST, checkpoints, damage, newest_checkpoint, write_folder
from sidestream.training.loop import LoopConfig, TrainingStopped, train
from sidestream.training.objectives import ScoredLM

# Every Trainer collects garbage twice; without torch's own objects in the count that takes no time.
gc.freeze()

CONFIG = LoopConfig(steps=12, batch_size=2, learning_rate=1e-2, save_every=3, log_every=2)
LONGER = LoopConfig(steps=60, batch_size=2, learning_rate=1e-2, save_every=7, log_every=5)


class Stop(BaseException):
    """Stands in for a kill: nothing in the library may handle it."""


class Text(Dataset):
    """Random rows, each a function of its index. `stop_at` raises Stop at that row, `pause` sleeps at every row."""

    def __init__(self, rows: int = 24, *, stop_at: int | None = None, pause: float = 0.0) -> None:
        self.rows, self.stop_at, self.pause = rows, stop_at, pause
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict:
        if index == self.stop_at:
            raise Stop
        time.sleep(self.pause)
        self.read.append(index)
        rng = random.Random(index)
        ids = [rng.randrange(20) for _ in range(rng.randint(3, 8))]
        return {"ids": ids[:-1], "labels": ids[1:]}


def language_model(*, dropout: float = 0.3) -> ScoredLM:
    """With dropout, so that a resumed run needs the generators' states. Input and output embeddings are tied."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return ScoredLM(GPT2LMHeadModel(config))


def run(directory: Path, data: Dataset | None = None, *, resume: bool = False, config: LoopConfig = CONFIG) -> ScoredLM:
    model = language_model()
    train(model, data or Text(), config, directory, seed=5, collate=collate, resume=resume, tags={"arm": "x"})
    return model


def stopped(directory: Path, *, after: int, config: LoopConfig = CONFIG) -> None:
    """A run that dies while it fetches the batch of step `after` + 2 (the loader is one batch ahead)."""
    with pytest.raises(Stop):
        run(directory, Text(stop_at=2 * (after + 1)), config=config)


def same(a: nn.Module, b: nn.Module) -> bool:
    """Every weight, bit by bit."""
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def metrics(directory: Path) -> list[dict]:
    """Lines of metrics.jsonl without their seconds."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[ScoredLM, Path]:
    directory = tmp_path_factory.mktemp("undisturbed")
    return run(directory), directory


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("after", [1, 4, 9])
def test_stopped_and_resumed_is_bit_identical(tmp_path, undisturbed, after):
    model, directory = undisturbed
    stopped(tmp_path, after=after)
    data = Text()
    assert same(run(tmp_path, data, resume=True), model)
    assert metrics(tmp_path) == metrics(directory)
    assert [line["step"] for line in metrics(tmp_path)] == [2, 3, 4, 6, 8, 9, 10, 12]
    assert data.read[0] == 2 * 3 * (after // 3), "steps before the checkpoint were run again, or some were left out"


def test_muon_resumes_bit_identical(tmp_path, undisturbed):
    config = replace(CONFIG, optimizer="muon")
    model = run(tmp_path / "whole", config=config)
    assert not same(model, undisturbed[0]), "the control: it is another optimiser"
    stopped(tmp_path / "cut", after=4, config=config)
    assert same(run(tmp_path / "cut", resume=True, config=config), model)


@pytest.mark.slow
def test_killed_process_resumes_bit_identical(tmp_path):
    """A real SIGKILL, at a random moment after the second checkpoint."""
    whole = run(tmp_path / "whole", Text(120), config=LONGER)
    directory = tmp_path / "killed"
    child = subprocess.Popen([sys.executable, __file__, str(directory)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (directory / "checkpoint-14").exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 1))
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert checkpoints(directory) and not (directory / "final").exists(), "the child was to be killed half-way"
    assert same(run(directory, Text(120), resume=True, config=LONGER), whole)
    assert metrics(directory) == metrics(tmp_path / "whole")


@pytest.mark.parametrize("left_out", ["load_generators", "load_optimizer"])
def test_everything_restored_is_needed(tmp_path, monkeypatch, undisturbed, left_out):
    """The negative control of the tests above."""
    stopped(tmp_path, after=4)
    monkeypatch.setattr(loop, left_out, lambda *_: None)
    assert not same(run(tmp_path, resume=True), undisturbed[0])


def test_a_finished_stage_is_loaded_not_trained(tmp_path, undisturbed):
    model = run(tmp_path)
    data = Text(stop_at=0)
    again = run(tmp_path, data, resume=True)
    assert same(again, model) and not again.training
    assert again.model.lm_head.weight is again.model.transformer.wte.weight
    assert {path.name for path in tmp_path.iterdir()} == {"final", "metrics.jsonl"}
    assert not same(language_model(), model)


def test_stopped_between_last_checkpoint_and_final_weights(tmp_path, monkeypatch, undisturbed):
    def full(module, path):
        if "final" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_model(module, path)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_model", full)
        with pytest.raises(TrainingStopped, match="finished weights.*--resume"):
            run(tmp_path)
    assert max(checkpoints(tmp_path)) == 12
    assert same(run(tmp_path, Text(stop_at=0), resume=True), undisturbed[0])
    assert metrics(tmp_path) == metrics(undisturbed[1])


def test_a_directory_with_training_needs_resume(tmp_path):
    stopped(tmp_path, after=4)
    with pytest.raises(ValueError, match="holds training already"):
        run(tmp_path)


def test_torn_line_of_metrics(tmp_path, undisturbed):
    stopped(tmp_path, after=4)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"arm": "x", "step": 4, "lo')
    run(tmp_path, resume=True)
    assert metrics(tmp_path) == metrics(undisturbed[1])


def test_seconds_count_over_all_calls(tmp_path):
    stopped(tmp_path, after=4)
    path = tmp_path / "metrics.jsonl"
    lines = [{**json.loads(line), "seconds": 1000.0} for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run(tmp_path, resume=True)
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    assert 1000 < last["seconds"] < 1100


# ---------------------------------------------------------------- checkpoints


def test_only_the_last_two_checkpoints_are_kept(tmp_path):
    stopped(tmp_path, after=10)
    assert list(checkpoints(tmp_path)) == [9, 6]


def break_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "byte": lambda folder: break_byte(folder / "model.safetensors"),
    "truncated": lambda folder: truncate(folder / "optimizer.safetensors"),
    "missing": lambda folder: (folder / "generators.json").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "manifest": lambda folder: truncate(folder / MANIFEST),
    "not a manifest": lambda folder: (folder / MANIFEST).write_text("[1]", encoding="utf-8"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_seen(tmp_path, capfd, name):
    def fill(folder: Path) -> None:
        for file in ("model.safetensors", "optimizer.safetensors", "generators.json"):
            (folder / file).write_bytes(bytes(range(100)))

    for step in (3, 12):
        write_folder(tmp_path / f"checkpoint-{step}", fill)
    assert newest_checkpoint(tmp_path)[0] == 12 and capfd.readouterr().err == ""
    DAMAGES[name](tmp_path / "checkpoint-12")
    assert newest_checkpoint(tmp_path)[0] == 3
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "checkpoint-12 is damaged" in said[0]


def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capfd, undisturbed):
    stopped(tmp_path, after=7)
    break_byte(tmp_path / "checkpoint-6" / "model.safetensors")
    data = Text()
    assert same(run(tmp_path, data, resume=True), undisturbed[0])
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "checkpoint-6 is damaged" in said[0] and "step 3" in said[0]
    assert data.read[0] == 6
    assert metrics(tmp_path) == metrics(undisturbed[1])


def test_all_checkpoints_damaged(tmp_path, capfd):
    stopped(tmp_path, after=7)
    for path in checkpoints(tmp_path).values():
        truncate(path / "model.safetensors")
    with pytest.raises(TrainingStopped) as stop:
        run(tmp_path, resume=True)
    assert "\n" not in str(stop.value) and str(tmp_path) in str(stop.value) and "delete" in str(stop.value)
    assert capfd.readouterr().err == ""


def test_damaged_final_weights(tmp_path):
    run(tmp_path)
    break_byte(tmp_path / "final" / "model.safetensors")
    with pytest.raises(TrainingStopped, match="final is damaged .*delete"):
        run(tmp_path, resume=True)


def test_unfinished_folder_of_a_killed_save_is_no_checkpoint(tmp_path, undisturbed):
    stopped(tmp_path, after=4)
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "checkpoint-6.partial")
    (tmp_path / "checkpoint-x").mkdir()
    assert newest_checkpoint(tmp_path) == (3, tmp_path / "checkpoint-3")
    assert same(run(tmp_path, resume=True), undisturbed[0])
    assert not (tmp_path / "checkpoint-6.partial").exists()


def test_write_folder_appears_whole_or_not_at_all(tmp_path):
    def first(folder: Path) -> None:
        (folder / "a").write_text("1", encoding="utf-8")
        assert not (tmp_path / "new").exists()

    def second(folder: Path) -> None:
        (folder / "a").write_text("2", encoding="utf-8")
        raise Stop

    write_folder(tmp_path / "new", first)
    with pytest.raises(Stop):
        write_folder(tmp_path / "new", second)
    assert (tmp_path / "new" / "a").read_text(encoding="utf-8") == "1" and damage(tmp_path / "new") is None
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def full_after(count: int, monkeypatch) -> None:
    """The disk is full in the middle of the count-th optimiser file."""
    save_file, calls = checkpoint_files.save_file, []

    def write(tensors, path):
        calls.append(path)
        if len(calls) > count:
            Path(path).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint_files, "save_file", write)


def check_full_disk(directory: Path, message: str) -> None:
    """The checkpoint of step 3 is intact, that of step 6 left nothing, and the run can go on."""
    assert "\n" not in message and "step 6" in message and "--resume" in message
    assert list(checkpoints(directory)) == [3] and damage(directory / "checkpoint-3") is None
    assert not list(directory.glob("*.partial"))


def test_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch, undisturbed):
    with monkeypatch.context() as patch:
        full_after(2, patch)  # two such files a checkpoint
        with pytest.raises(TrainingStopped) as stop:
            run(tmp_path)
    check_full_disk(tmp_path, str(stop.value))
    assert same(run(tmp_path, resume=True), undisturbed[0])


def test_files_that_really_cannot_be_written(tmp_path, undisturbed):
    """The kernel refuses: no file of this process may grow beyond 1 kB, so safetensors fails half-way."""
    data = Text()
    read = data.__getitem__

    class Shrinking(Text):
        def __getitem__(self, index: int) -> dict:
            if index == 9:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
            return read(index)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(TrainingStopped) as stop:
            run(tmp_path, Shrinking())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_full_disk(tmp_path, str(stop.value))
    assert same(run(tmp_path, resume=True), undisturbed[0])


@pytest.mark.slow
def test_really_full_disk(tmp_path, undisturbed):
    stopped(tmp_path / "run", after=4)
    used = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*"))
    shutil.rmtree(tmp_path / "run")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * used)}", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with pytest.raises(TrainingStopped) as stop:
            run(disk / "run")
        check_full_disk(disk / "run", str(stop.value))
        shutil.copytree(disk / "run", tmp_path / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert same(run(tmp_path / "run", resume=True), undisturbed[0])


def pickles(directory: Path) -> list[str]:
    """Files that an unpickler would read: zip archives (torch.save), pickles, and their usual names."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    magic = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
    return [p.name for p in files if p.suffix in (".pt", ".bin", ".pth", ".pkl") or p.read_bytes().startswith(magic)]


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch, undisturbed):
    torch.save({"a": 1}, tmp_path / "weights")
    assert pickles(tmp_path) == ["weights"]
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("a pickle"))
    stopped(tmp_path / "run", after=7)
    assert pickles(tmp_path / "run") == [] and len(list((tmp_path / "run").rglob("*"))) > 10
    assert same(run(tmp_path / "run", resume=True), undisturbed[0])
    assert pickles(tmp_path / "run") == []


def test_tied_and_frozen_weights_survive_a_checkpoint(tmp_path):
    model = language_model()
    model.model.transformer.wte.requires_grad_(False)
    before = model.model.lm_head.weight.clone()
    with pytest.raises(Stop):
        train(model, Text(stop_at=14), CONFIG, tmp_path, seed=5, collate=collate)
    other = language_model()
    nn.init.zeros_(other.model.lm_head.weight)
    load_model(other, str(tmp_path / "checkpoint-3" / "model.safetensors"))
    assert torch.equal(other.model.lm_head.weight, before)
    assert other.model.lm_head.weight is other.model.transformer.wte.weight
    names = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert sum("wte" in name or "lm_head" in name for name in names) == 1, "tied weights are written once"


# ---------------------------------------------------------------- numbers


class Scripted(nn.Module):
    """A regression whose loss or gradient goes bad at one call."""

    def __init__(self, bad_at: int, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.bad_at, self.what, self.calls = bad_at, what, 0

    def forward(self, x: torch.Tensor) -> dict:
        self.calls += 1
        loss = (x * self.weight).square().mean()
        if self.calls == self.bad_at:
            # The root of 0 is 0, and its slope is not.
            loss = loss * float("nan") if self.what == "loss" else loss + (0 * self.weight).sum().sqrt()
        return {"loss": loss}


class Numbers(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict:
        return {"x": torch.full((3,), float(index))}


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_bad_number_stops_with_step_and_batch(tmp_path, what):
    module = Scripted(8, what)
    with pytest.raises(
        TrainingStopped, match=f"the {what} is nan at step 8; its batch is in .*bad-batch-step8"
    ) as stop:
        train(module, Numbers(), CONFIG, tmp_path, seed=0)
    assert "\n" not in str(stop.value)
    batch = load_file(tmp_path / "bad-batch-step8.safetensors")
    assert batch["x"].tolist() == [[14.0] * 3, [15.0] * 3]
    assert module.weight.isfinite().all(), "the bad gradient reached the weights"
    assert newest_checkpoint(tmp_path)[0] == 6


def test_good_numbers_do_not_stop(tmp_path):
    module = Scripted(0, "loss")
    train(module, Numbers(), CONFIG, tmp_path, seed=0)
    assert module.calls == 12 and not list(tmp_path.glob("bad-*"))


def test_optimiser_follows_the_schedule(tmp_path):
    """Linear up to the peak over the warm-up, then linear down to 0."""
    config = LoopConfig(steps=12, batch_size=2, learning_rate=0.4, warmup=1 / 3, log_every=1)
    train(Scripted(0, "loss"), Numbers(), config, tmp_path, seed=0)
    rates = [line["learning_rate"] for line in metrics(tmp_path)]
    wanted = [0.4 * step / 4 if step < 4 else 0.4 * (12 - step) / 8 for step in range(12)]
    assert rates == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"save_every": 0}, "save_every is 0"),
        ({"log_every": -1}, "log_every is -1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"precision": "fp16"}, "precision is 'fp16'"),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        LoopConfig(**{"steps": 1, "batch_size": 1, "learning_rate": 0.1, **change})


def test_more_than_one_process_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2"):
        run(tmp_path)


def test_checkpointing_without_blocks_is_refused(tmp_path):
    config = LoopConfig(steps=1, batch_size=2, learning_rate=0.1, gradient_checkpointing=True)
    with pytest.raises(ValueError, match="Scripted has no blocks"):
        train(Scripted(0, "loss"), Numbers(), config, tmp_path, seed=0)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Text(120, pause=0.05), config=LONGER)
