"""What `push_to_hub` would upload: which files, by the hub library's own filter, and what they say. No network."""

import json
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from sidestream import cli
from sidestream.lm.models.base import load_base, load_tokenizer
from sidestream.lm.saving.card import push_to_hub
from sidestream.training.finetune import FinetuneConfig, attach_channel
from tiny_model import save, write_goals

CHANNEL = {"README.md", "channel.safetensors", "sidestream.json"}
OURS = ("train/final/model.safetensors", "goals/encoder.safetensors", "experiment.json", "calls.json", ".env")
WORDS = ["--window=24", "--width=16", "--goal_steps=5", "--steps=2", "--batch_size=4"]


@pytest.fixture
def sent(monkeypatch):
    """Path in the repository -> bytes, as the hub would have them after the push."""
    files: dict[str, bytes] = {}

    class Hub:
        def create_repo(self, repo_id, **options):
            assert options == {"private": True, "exist_ok": True}
            return f"https://hub/{repo_id}"

        def upload_folder(self, *, repo_id, folder_path, **patterns):
            assert repo_id == "owner/name"
            found = (
                path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()
            )
            for name in filter_repo_objects(found, **patterns):
                files[name] = (Path(folder_path) / name).read_bytes()

        def upload_file(self, *, repo_id, path_in_repo, path_or_fileobj):
            files[path_in_repo] = path_or_fileobj

    monkeypatch.setattr("sidestream.lm.saving.card.HfApi", Hub)
    return files


def test_a_trained_and_evaluated_run(tmp_path, monkeypatch, sent):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "my-base")
    write_goals(tmp_path / "goals.jsonl")
    assert cli.main(["train", "--model", "my-base", "--data", "goals.jsonl", "--out", "run", *WORDS]) == 0
    assert cli.main(["eval", "--model", "run", "--data", "goals.jsonl", "--limit", "4"]) == 0
    assert push_to_hub("run", "owner/name") == "https://hub/owner/name"
    assert set(sent) == {*CHANNEL, "eval.json"}
    here = {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert here >= {"train/final/model.safetensors", "goals/encoder.safetensors", "experiment.json", "card.json"}
    assert not [name for name, data in sent.items() if str(tmp_path).encode() in data], "a folder of this machine"
    assert str(tmp_path) in (tmp_path / "run" / "sidestream.json").read_text()
    assert sent["channel.safetensors"] == (tmp_path / "run" / "channel.safetensors").read_bytes()
    card = sent["README.md"].decode()
    header, _, body = card.removeprefix("---\n").partition("---\n")
    assert (
        header == "library_name: sidestream\ntags: [goal-channel, ls-ar]\n"
    )  # a local base is no `base_model` of the hub
    facts = json.loads((tmp_path / "run" / "card.json").read_text())
    assert body.startswith(
        "# Goal channel for my-base\n\nBase model: `my-base` (LlamaForCausalLM), frozen. Goal vector: 16"
    )
    for line in (
        f"- data: `goals.jsonl`, 24 records, sha256 `{facts['data_hash']}`",
        f"- command: `sidestream train --model my-base --data goals.jsonl --out run {' '.join(WORDS)}`",
        f"- loss at the end: {facts['training']['loss']:.3f} (step 2)",
        "## Evaluation",
        "## Safety",
    ):
        assert f"\n{line}\n" in body, line
    rows = [line.split(" | ") for line in body.splitlines() if line.startswith("| ") and line.endswith(" 4 |")]
    cells = json.loads(sent["eval.json"])["cells"]
    assert [(row[0][2:], row[1], float(row[3])) for row in rows] == [
        (cell["metric"], cell["arm"], pytest.approx(cell["value"], abs=5e-4)) for cell in cells
    ]


@pytest.mark.parametrize("method", ["channel", "lora", "full"])
def test_what_belongs_to_each_method_and_nothing_else(method, tmp_path, sent):
    if method == "lora":
        pytest.importorskip("peft")
    base, run = save(tmp_path / "base"), tmp_path / "run"
    tokenizer = load_tokenizer(base)
    model = attach_channel(load_base(base), FinetuneConfig(width=16, method=method), tokenizer)
    if method == "full":
        model.lm.save_pretrained(run / "model")
        tokenizer.save_pretrained(run / "model")
    model.save_pretrained(run)
    for name in OURS:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    push_to_hub(run, "owner/name")
    more = set(sent) - CHANNEL
    assert sent.keys() >= CHANNEL and not set(OURS) & set(sent)
    if method == "channel":
        assert not more
    if method == "lora":
        assert more == {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    if method == "full":
        assert more >= {"model/config.json", "model/model.safetensors", "model/tokenizer.json"}
        assert {name.split("/")[0] for name in more} == {"model"}
    assert not [name for name, data in sent.items() if str(tmp_path).encode() in data], "a folder of this machine"
