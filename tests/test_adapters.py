"""Bases that are PEFT models: the goal acts in forward and generate, whichever came first; what is saved comes back."""

import copy

import pytest
import torch

import sidestream
from families import MODES, close, differ, logits, open_gate, our_hooks, settings, tiny, tokens
from sidestream import GoalConfig, Window, attach
from sidestream.lm.decoding.decode import LeanDecoder
from sidestream.lm.models.adapters import adapter_names, base_weights
from sidestream.lm.models.fingerprint import fingerprint

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

IDS, GOALS = tokens(2, 9), [[5, 6, 7], [9, 8, 7, 6]]
GREEDY = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(IDS))


def lora(*names, **more):
    return peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=list(names) or "all-linear", init_lora_weights=False, **more
    )


def adapted(family="llama", config=None, name="default", seed=1, **more):
    """A tiny model inside PEFT's wrapper, its adapter far from nothing."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return shaken(peft.get_peft_model(tiny(family, **more), config or lora(), adapter_name=name))


def shaken(model, scale=0.1):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "channel" not in name:
                parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()


def channelled(lm, mode="static", **more):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return open_gate(attach(lm, goal=settings(mode), **more))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, Window(size=6, policy="reindex"), Window(size=6, policy="rolling")])
def test_generate_is_greedy_by_forward_on_a_peft_model(mode, window):
    model = channelled(adapted(), mode)
    out = model.generate(IDS, goal=GOALS, window=window, **GREEDY)
    assert not torch.equal(out, model.generate(IDS, window=window, **GREEDY)), "the goal does nothing"
    first = channelled(tiny("llama"), mode)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        shaken(peft.get_peft_model(first.lm, lora()))
    assert torch.equal(out, first.generate(IDS, goal=GOALS, window=window, **GREEDY))
    if window is None:
        text = IDS
        for _ in range(8):
            text = torch.cat([text, logits(model, text, goal=GOALS)[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(out, text)
        assert torch.equal(
            model.generate(IDS, goal=GOALS, num_beams=3, **GREEDY),
            first.generate(IDS, goal=GOALS, num_beams=3, **GREEDY),
        )


@pytest.mark.parametrize(
    "family, names, more",
    [
        ("opt", ["fc1"], {}),
        ("gpt2", ["c_fc"], {"fan_in_fan_out": True}),
        ("llama", ["q_proj"], {"modules_to_save": ["mlp"]}),
    ],
)
def test_the_order_of_attach_and_adapter_does_not_matter(family, names, more):
    """FiLM acts on what adapter and layer both read, be the site the layer itself or a module that gets copied."""
    first = channelled(tiny(family))
    expected_closed = logits(first, IDS)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        outer = shaken(peft.get_peft_model(first.lm, lora(*names, **more)))
    second = channelled(adapted(family, lora(*names, **more)))
    assert first.sites == second.sites
    found = logits(first, IDS, goal=GOALS)
    close(found, logits(second, IDS, goal=GOALS))
    close(first.hidden(IDS, goal=GOALS), second.hidden(IDS, goal=GOALS))
    differ(found, logits(first, IDS))
    with outer.disable_adapter():
        close(logits(first, IDS), expected_closed)
    if not more.get("modules_to_save"):  # merged: the layer is back in its place, and the hook with it
        outer.merge_and_unload()
        close(logits(first, IDS, goal=GOALS), found, 1e-4)
    first.detach()
    assert our_hooks(first.lm) == []


def test_detach_gives_back_what_was_attached_to():
    outer = adapted()
    before = outer(input_ids=IDS).logits
    model = channelled(outer)
    assert model.detach() is outer and our_hooks(outer) == [] and torch.equal(outer(input_ids=IDS).logits, before)
    attach(outer, goal=GoalConfig(width=8))
    with pytest.raises(ValueError, match="already carries a channel"):
        attach(outer, goal=GoalConfig(width=8))


KINDS = {
    "LORA": dict(r=4, use_dora=True, target_modules=["q_proj", "up_proj"]),
    "ADALORA": dict(total_step=10, target_modules=["q_proj"]),
    "BOFT": dict(boft_block_size=4, target_modules=["q_proj"]),
    "C3A": dict(block_size=8, target_modules=["q_proj"]),
    "DELORA": dict(target_modules=["q_proj"]),
    "FOURIERFT": dict(n_frequency=16, target_modules=["q_proj"]),
    "HIRA": dict(target_modules=["q_proj"]),
    "HRA": dict(target_modules=["q_proj"]),
    "IA3": dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LN_TUNING": dict(target_modules=["input_layernorm"]),
    "LOHA": dict(target_modules=["q_proj", "down_proj"]),
    "LOKR": dict(target_modules=["q_proj"]),
    "OFT": dict(oft_block_size=4, target_modules=["q_proj"]),
    "RANDLORA": dict(target_modules=["q_proj", "down_proj"]),
    "VERA": dict(target_modules=["q_proj", "down_proj"]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's own, of layers and kernels it does not know
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_that_is_saved_comes_back(kind, tmp_path):
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if kind not in peft.PeftType.__members__:
        pytest.skip("this peft does not have it")
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]](task_type="CAUSAL_LM", **KINDS[kind])
    model = channelled(adapted(config=config, name="style"))
    found = logits(model, IDS, goal=GOALS)
    differ(found, logits(channelled(tiny("llama")), IDS, goal=GOALS), 1e-3)
    plain = tiny("llama")
    assert fingerprint(model.lm) == fingerprint(plain)
    assert {n: t.shape for n, t in base_weights(model.lm).items()} == {
        n: t.shape for n, t in plain.state_dict().items()
    }
    model.save_pretrained(tmp_path)
    loaded = sidestream.load(tmp_path, plain)
    close(logits(loaded, IDS, goal=GOALS), found)
    assert adapter_names(loaded.lm) == ["style"] and not any(
        p.requires_grad for n, p in plain.named_parameters() if "style" in n
    )


def test_the_kinds_tested_are_the_kinds_saved():
    from sidestream.lm.models import adapters

    assert set(KINDS) == set(adapters._SAVED)


def test_several_adapters_and_rows_of_different_ones(tmp_path):
    outer = adapted(name="left")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        outer.add_adapter("right", lora())
    model = channelled(outer)
    rows = {}
    for name in ("left", "right"):
        outer.set_adapter(name)
        rows[name] = logits(model, IDS, goal=GOALS)
    differ(rows["left"], rows["right"])
    mixed = logits(model, IDS, goal=GOALS, adapter_names=["left", "right"])
    close(mixed, torch.stack([rows["left"][0], rows["right"][1]]))
    out = model.generate(IDS, goal=GOALS, adapter_names=["left", "right"], **GREEDY)
    outer.set_adapter("left")
    assert torch.equal(out[0], model.generate(IDS, goal=GOALS, **GREEDY)[0])
    outer.set_adapter("right")
    model.save_pretrained(tmp_path)
    loaded = sidestream.load(tmp_path, tiny("llama"))
    close(logits(loaded, IDS, goal=GOALS), rows["right"])
    close(logits(loaded, IDS, goal=GOALS, adapter_names=["left", "right"]), mixed)
    loaded.outer.set_adapter("left")
    close(logits(loaded, IDS, goal=GOALS), rows["left"])
    with pytest.raises(ValueError, match="adapter_names needs the PeftModel"):
        channelled(tiny("llama"))(IDS, goal=GOALS, adapter_names=["left", "right"])
    # Saved again with one of them gone, nothing of the other stays behind.
    outer.delete_adapter("left")
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "adapter" / "left").exists()
    close(logits(sidestream.load(tmp_path, tiny("llama")), IDS, goal=GOALS), rows["right"])


def test_what_would_not_come_back_is_refused_when_it_is_saved(tmp_path):
    merged = adapted()
    merged.merge_adapter()
    cases = [
        (adapted(config=lora("q_proj", bias="all")), "bias='all' trains weights of the base itself"),
        (
            adapted(config=peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")),
            "changes the base",
        ),
        (adapted(config=peft.TrainableTokensConfig(token_indices=[3], task_type="CAUSAL_LM")), "TRAINABLE_TOKENS"),
        (merged, "while it is merged into the base"),
    ]
    for outer, complaint in cases:
        with pytest.raises(ValueError, match=complaint):
            channelled(outer).save_pretrained(tmp_path)
    unloaded = channelled(adapted().merge_and_unload())
    unloaded.save_pretrained(tmp_path / "unloaded")  # a base of its own
    assert not (tmp_path / "unloaded" / "adapter").exists()
    with pytest.raises(ValueError, match="trained on another base"):
        sidestream.load(tmp_path / "unloaded", tiny("llama"))


def test_adapters_that_act_outside_the_layers_are_refused_by_attach():
    prefix = peft.get_peft_model(tiny("llama"), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    prompt = peft.get_peft_model(tiny("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    invoked = peft.get_peft_model(tiny("llama"), lora("q_proj", alora_invocation_tokens=[5]))
    for outer, complaint in (
        (prefix, "PREFIX_TUNING adapter puts tokens"),
        (prompt, "PROMPT_TUNING adapter puts"),
        (invoked, "activated LoRA"),
    ):
        with pytest.raises(ValueError, match=complaint):
            attach(outer, goal=GoalConfig(width=8))


def test_a_base_with_adapters_of_its_own(tmp_path):
    """They are no part of the base; with a channel that brings adapters they are refused, not stacked unseen."""
    plain = channelled(tiny("llama"))
    plain.save_pretrained(tmp_path / "plain")
    outer = adapted()
    loaded = sidestream.load(tmp_path / "plain", outer)
    assert loaded.detach() is outer
    channelled(adapted()).save_pretrained(tmp_path / "with")
    with pytest.raises(ValueError, match="already carries the adapters"):
        sidestream.load(tmp_path / "with", adapted())


def test_the_stock_trainer_trains_an_adapter_with_the_channel(tmp_path):
    from transformers import Trainer, TrainingArguments

    from sidestream.training.batches import GoalCollator

    def run(**resume):
        model = channelled(peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])))
        settings = TrainingArguments(
            str(tmp_path), max_steps=4, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2
        )
        rows = [{"input_ids": [5, 6, 7, 8 + k], "goal": [9 + k, 10]} for k in range(8)]
        Trainer(model, settings, GoalCollator(tokenizer=None), rows).train(**resume)
        return model.eval()

    torch.manual_seed(4)
    whole = run()
    resumed = run(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    loaded = sidestream.load(tmp_path / "checkpoint-4", tiny("llama"))
    close(logits(loaded, IDS, goal=GOALS), logits(whole, IDS, goal=GOALS))
    assert not (tmp_path / "checkpoint-4" / "model").exists()


def test_lean_decoding_and_copies():
    model = channelled(adapted())
    with pytest.raises(ValueError, match="lean decoding reads the base's own weights, without \\['default'\\]"):
        LeanDecoder(model)
    again = copy.deepcopy(model)
    assert torch.equal(logits(again, IDS, goal=GOALS), logits(model, IDS, goal=GOALS))
