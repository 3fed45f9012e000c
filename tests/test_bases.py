"""Which base is the one a channel was trained on: the same in other precisions, sizes and places, and no other."""

import json
import logging

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st
from torch import nn

import sidestream
from families import FAMILIES, attached, close, logits, our_hooks, tiny, tokens
from sidestream.lm.models.fingerprint import difference, fingerprint, sampled
from sidestream.lm.saving import channel as saving

IDS, GOALS = tokens(2, 9), tokens(2, 5, seed=1)
NARROW = (torch.float16, torch.bfloat16)


def moved(lm, by, *, only=""):
    """The same model after a little training: each weight moved by `by`, up or down."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if only in name:
                weight.add_(by * torch.randn(weight.shape, generator=generator).sign().to(weight.dtype))
    return lm


@pytest.mark.parametrize("family", FAMILIES)
def test_any_precision_of_the_same_base(family, tmp_path):
    forms = {torch.float32: tiny(family), **{dtype: tiny(family).to(dtype) for dtype in NARROW}}
    forms["twice"] = tiny(family).half().bfloat16()
    forms["back"] = tiny(family).bfloat16().float()
    for one, saved in forms.items():
        kept = json.loads(json.dumps(sampled(saved)))
        for other, lm in forms.items():
            # What was rounded twice is at some borders not the nearest any more; beside the nearest it is another.
            if {str(one), str(other)} not in ({"twice", "torch.bfloat16"}, {"twice", "back"}):
                assert difference(kept, lm) is None, (one, other)
    assert len(json.dumps(sampled(tiny(family)))) < 100_000


@tries(max_examples=60, deadline=None)
@given(st.lists(st.floats(-60000, 60000, width=32), min_size=4, max_size=80), st.sampled_from(NARROW))
def test_rounding_is_seen_as_rounding_wherever_the_borders_lie(values, dtype):
    def layer(weight):
        made = nn.Linear(len(values), 1, bias=False)
        made.weight = nn.Parameter(weight[None])
        return made

    exact = torch.tensor(values)
    rounded = exact.to(dtype)
    for left, right in ((exact, rounded), (rounded, exact), (rounded.float(), exact)):
        assert difference(sampled(layer(left)), layer(right)) in (
            None,
            "values have moved by less than rounding moves them",
        )
    if exact.abs().max() > 1:
        assert difference(sampled(layer(exact)), layer(rounded * 1.05)) is not None


@pytest.mark.parametrize("by", [1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("start", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", [torch.float32, *NARROW])
def test_a_fine_tuned_base_is_another(by, start, end):
    """Trained in float32 from weights of either precision, and served in any that can hold what training did."""
    base = tiny("llama").to(start).float()
    if by < 1e-4 and end != torch.float32 or by < 1e-3 and end == torch.bfloat16:
        return
    assert difference(sampled(base), moved(tiny("llama").to(start).float(), by).to(end)) is not None


def test_one_trained_block_is_enough_and_so_is_the_embedding():
    kept = sampled(tiny("llama"))
    for only, by in (
        ("layers.1.mlp.down_proj", 1e-5),
        ("embed_tokens", 1e-5),
        ("lm_head", 1e-5),
        ("input_layernorm", 1e-2),
    ):
        assert only in str(difference(kept, moved(tiny("llama"), by, only=only)))


def test_more_tokens_make_no_other_base(tmp_path, caplog):
    model = attached("llama", "static")
    model.save_pretrained(tmp_path / "small")
    expected = logits(model, IDS, goal=GOALS)
    for grow in (
        lambda lm: lm.resize_token_embeddings(97, pad_to_multiple_of=64),
        lambda lm: lm.resize_token_embeddings(101),
    ):
        lm = tiny("llama")
        grow(lm)
        loaded = sidestream.load(tmp_path / "small", lm)
        close(logits(loaded, IDS, goal=GOALS)[..., :97], expected)
        loaded.save_pretrained(tmp_path / "grown")
        sidestream.load(tmp_path / "grown", tiny("llama"))
        again = tiny("llama")
        torch.manual_seed(9)
        grow(again)  # with new rows of its own
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sidestream"):
            sidestream.load(tmp_path / "grown", again)
        assert "differs in its last tokens" in caplog.text
    model.lm.resize_token_embeddings(101)
    assert model.encode_goal([[100]]).goal.shape == (1, 16)
    model.save_pretrained(tmp_path / "after")
    close(logits(sidestream.load(tmp_path / "after", tiny("llama")), IDS, goal=GOALS), expected)
    with pytest.raises(ValueError, match="another base"):
        sidestream.load(tmp_path / "after", moved(tiny("llama"), 1e-3, only="embed_tokens"))


@pytest.mark.filterwarnings("ignore:You are calling .generate.. with:UserWarning")  # transformers 5.18 of meta tensors
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_weights(offload, tmp_path):
    model = attached("llama", "static")
    expected = logits(model, IDS, goal=GOALS)
    model.save_pretrained(tmp_path / "channel")
    lm = tiny("llama")
    if offload == "cpu":
        cpu_offload(lm, execution_device=torch.device("cpu"))
    else:
        disk_offload(lm, str(tmp_path / "disk"), execution_device=torch.device("cpu"))
    assert lm.device.type == "meta"
    loaded = sidestream.load(tmp_path / "channel", lm)
    close(logits(loaded, IDS, goal=GOALS), expected)
    assert loaded.device.type == "cpu" and loaded.channel.film.projection.weight.device.type == "cpu"
    out = loaded.generate(IDS, goal=GOALS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(out, model.generate(IDS, goal=GOALS, max_new_tokens=3, do_sample=False, pad_token_id=0))
    loaded.save_pretrained(tmp_path / "again")
    sidestream.load(tmp_path / "again", tiny("llama"))
    empty = tiny("llama").to("meta")
    with pytest.raises(ValueError, match="is on the meta device, without values"):
        sidestream.load(tmp_path / "channel", empty)


def test_any_base_loads_onto_another_with_a_warning(tmp_path):
    model = attached("llama", "static")
    model.save_pretrained(tmp_path)
    other = tiny("llama", seed=5)
    with pytest.raises(ValueError, match="trained on another base"):
        sidestream.load(tmp_path, other)
    assert our_hooks(other) == []
    with pytest.warns(UserWarning, match="any_base=True asks"):
        loaded = sidestream.load(tmp_path, other, any_base=True)
    assert not torch.equal(logits(loaded, IDS, goal=GOALS), logits(loaded, IDS))
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="does not hold the weights"):
        sidestream.load(tmp_path, tiny("llama", width=40), any_base=True)


def test_files_of_earlier_versions_are_checked_by_their_hash(tmp_path):
    model = attached("llama", "static")
    model.save_pretrained(tmp_path)
    path = tmp_path / saving.CONFIG_FILE
    config = json.loads(path.read_text())
    assert config["base"]["fingerprint"] == fingerprint(tiny("llama"))
    del config["base"]["weights"], config["adapters"]
    path.write_text(json.dumps(config))
    assert torch.equal(
        logits(sidestream.load(tmp_path, tiny("llama")), IDS, goal=GOALS), logits(model, IDS, goal=GOALS)
    )
    with pytest.raises(ValueError, match="another base"):
        sidestream.load(tmp_path, moved(tiny("llama"), 1e-3))
    config["base"]["weights"] = {"lm_head.weight": {"shape": [97, 32], "tokens": True, "values": "AAA"}}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is damaged"):
        sidestream.load(tmp_path, tiny("llama"))


def test_a_quantised_base_is_another_and_no_crash(tmp_path):
    class Packed(nn.Module):
        def __init__(self, weight):
            super().__init__()
            scale = weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (weight / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)

        def forward(self, hidden):
            return hidden @ (self.weight * self.scale).T

    def quantised():
        lm = tiny("llama")
        for block in lm.model.layers:
            block.self_attn.q_proj = Packed(block.self_attn.q_proj.weight.detach())
        return lm

    attached("llama", "static").save_pretrained(tmp_path / "full")
    with pytest.raises(ValueError, match="another base"):
        sidestream.load(tmp_path / "full", quantised())
    with pytest.warns(UserWarning):
        model = sidestream.load(tmp_path / "full", quantised(), any_base=True)
    model.save_pretrained(tmp_path / "packed")
    loaded = sidestream.load(tmp_path / "packed", quantised())
    assert torch.equal(logits(loaded, IDS, goal=GOALS), logits(model, IDS, goal=GOALS))
