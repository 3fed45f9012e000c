"""Saving a channel and loading it onto the base it was trained on, and onto nothing else."""

import json

import pytest
import torch

import sidestream
from families import FAMILIES, MODES, attached, logits, open_gate, our_hooks, settings, tiny, tokens, unchecked_types
from sidestream import attach
from sidestream.lm.saving import channel as saving

IDS, GOALS = tokens(3, 9), tokens(3, 5, seed=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, mode, tmp_path):
    model = attached(family, mode)
    model.save_pretrained(tmp_path)
    encoder = None if model.encoder is None else tiny("llama", seed=1, width=24)
    loaded = sidestream.load(tmp_path, tiny(family), encoder=encoder)
    assert torch.equal(logits(loaded, IDS, goal=GOALS), logits(model, IDS, goal=GOALS))
    assert loaded.channel.config == model.channel.config and loaded.sites == model.sites
    assert {path.name for path in tmp_path.iterdir()} == {saving.WEIGHTS_FILE, saving.CONFIG_FILE}
    assert (tmp_path / saving.WEIGHTS_FILE).stat().st_size < 100_000  # channel weights only


def test_load_finds_the_base_by_its_name(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    lm = type(tiny("llama")).from_pretrained(tmp_path / "base")
    model = open_gate(attach(lm, goal=settings("static")))
    model.save_pretrained(tmp_path / "channel")
    loaded = sidestream.load(tmp_path / "channel")
    assert torch.equal(logits(loaded, IDS, goal=GOALS), logits(model, IDS, goal=GOALS))
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot load the base model"):
        sidestream.load(tmp_path / "channel")


def test_another_base_is_refused(tmp_path):
    attached("llama", "static").save_pretrained(tmp_path)
    trained = tiny("llama")
    with torch.no_grad():
        trained.model.layers[0].mlp.down_proj.weight.add_(1e-3)
    for other in (trained, tiny("llama", seed=5), tiny("qwen3"), tiny("llama", width=40)):
        with pytest.raises(ValueError, match="another base"):
            sidestream.load(tmp_path, other)
        assert our_hooks(other) == []
    sidestream.load(tmp_path, tiny("llama").to(torch.bfloat16))  # the same weights, served narrower
    with pytest.raises(ValueError, match="no separate encoder"):
        sidestream.load(tmp_path, tiny("llama"), encoder=tiny("llama"))


def test_another_encoder_is_refused(tmp_path):
    attached("llama", "dynamic").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pass encoder="):
        sidestream.load(tmp_path, tiny("llama"))
    with pytest.raises(ValueError, match="another encoder"):
        sidestream.load(tmp_path, tiny("llama"), encoder=tiny("llama", seed=2, width=24))


def damage(directory, how):
    weights, config = directory / saving.WEIGHTS_FILE, directory / saving.CONFIG_FILE
    text = config.read_text()
    if how == "weights missing":
        weights.unlink()
    elif how == "weights truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "weights empty":
        weights.write_bytes(b"")
    elif how == "weights flipped":
        raw = bytearray(weights.read_bytes())
        raw[-50] ^= 1
        weights.write_bytes(raw)
    elif how == "config missing":
        config.unlink()
    elif how == "config truncated":
        config.write_text(text[: len(text) // 2])
    elif how == "config not UTF-8":
        config.write_bytes(b"\xff\xfe\x00")
    elif how == "config a list":
        config.write_text("[]")
    elif how == "unknown setting":
        config.write_text(text.replace('"width"', '"wdith"'))
    elif how == "bad setting":
        config.write_text(text.replace('"static"', '"statik"'))
    elif how == "newer format":
        config.write_text(text.replace('"format": 1', '"format": 2'))
    elif how == "other widths":
        config.write_text(text.replace('"width": 16', '"width": 24'))
    elif how == "other sites":
        config.write_text(text.replace("model.layers.0.mlp", "model.layers.9.mlp"))
    elif how == "not there":
        return directory / "nothing"
    return directory


@pytest.mark.parametrize(
    "how",
    ["weights missing", "weights truncated", "weights empty", "weights flipped", "config missing", "config truncated"]
    + ["config not UTF-8", "config a list", "unknown setting", "bad setting", "newer format", "other widths"]
    + ["other sites", "not there"],
)
def test_damaged_files_give_one_line(how, tmp_path):
    attached("llama", "static").save_pretrained(tmp_path)
    sidestream.load(tmp_path, tiny("llama"))
    lm = tiny("llama")
    with unchecked_types(), pytest.raises(ValueError) as error:
        sidestream.load(damage(tmp_path, how), lm)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert our_hooks(lm) == []


def test_a_failed_save_keeps_the_last_one(tmp_path, monkeypatch):
    model = attached("llama", "static")
    model.save_pretrained(tmp_path)
    expected = logits(model, IDS, goal=GOALS)

    def full_disk(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    open_gate(model, seed=99)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            model.save_pretrained(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(logits(sidestream.load(tmp_path, tiny("llama")), IDS, goal=GOALS), expected)


def test_configuration_file_is_plain(tmp_path):
    attached("gemma3", "dynamic").save_pretrained(tmp_path)
    config = json.loads((tmp_path / saving.CONFIG_FILE).read_text())
    assert config["sites"] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert config["base"]["class"] == "Gemma3ForCausalLM" and config["goal"]["mode"] == "dynamic"
