"""Users' mistakes get a ValueError that says what was given and what to do."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from families import attached, close, logits, settings, tiny, tokens, unchecked_types
from sidestream import GoalConfig, LatentState, attach

IDS, GOALS = tokens(3, 9), tokens(3, 5, seed=1)


class NoMLP(PreTrainedModel):
    """Attention without an MLP."""

    config_class = PretrainedConfig

    def __init__(self, depth=2, parts=None):
        super().__init__(PretrainedConfig(num_hidden_layers=2, hidden_size=8, vocab_size=97))
        parts = {"attention": nn.MultiheadAttention(8, 2), "norm": nn.LayerNorm(8), **(parts or {})}
        block = [nn.ModuleDict(parts) for _ in range(depth)]
        self.blocks = nn.ModuleList(block)


def test_a_model_without_a_site_is_named():
    with pytest.raises(ValueError, match="no FiLM site in block 0 of NoMLP: ModuleDict has no MLP; .*sites="):
        attach(NoMLP(), goal=settings("static"))
    two = {"sparse_moe": nn.Linear(8, 8), "shared_mlp": nn.Linear(8, 8), "mlp_dropout": nn.Dropout()}
    with pytest.raises(ValueError, match="ModuleDict has sparse_moe and shared_mlp; name one"):
        attach(NoMLP(parts=two), goal=settings("static"))
    with pytest.raises(ValueError, match="NoMLP has no list of 2 decoder blocks"):
        attach(NoMLP(depth=3), goal=settings("static"))
    with pytest.raises(ValueError, match="Linear has no list of decoder blocks"):
        attach(nn.Linear(2, 2), goal=settings("static"))


def test_sites_can_be_given():
    found = attached("llama", "static")
    given = attach(tiny("llama"), goal=settings("static"), sites=found.sites)
    given.channel.load_state_dict(found.channel.state_dict())
    assert torch.equal(logits(given, IDS, goal=GOALS), logits(found, IDS, goal=GOALS))
    with pytest.raises(ValueError, match="no module 'model.layers.7.mlp'"):
        attach(tiny("llama"), goal=settings("static"), sites=["model.layers.7.mlp"])


@pytest.mark.parametrize(
    "goal, message",
    [
        ("find the key", "need a tokenizer"),
        (["find", "the key"], "need a tokenizer"),
        ([1, 2.5], "got list"),
        ([[1, 2], []], "empty"),
        ([], "empty"),
        (torch.tensor([[[1, 2]]]), r"\(1, 1, 2\) torch.int64"),
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        ({"input_ids": []}, "empty"),
        ([{"role": "user", "content": "find"}], "need a tokenizer"),
        (torch.rand(3, 16), r"\(3, 16\) torch.float32"),
        (7, "got int"),
        (LatentState(goal=torch.rand(3, 8)), "8 wide, the channel 16"),
    ],
)
def test_wrong_goals(goal, message):
    model = attached("llama", "static")
    for call in (model.encode_goal, lambda g: model(IDS, goal=g), lambda g: model.generate(IDS, goal=g)):
        with pytest.raises(ValueError, match=message):
            call(goal)


def test_goals_as_text():
    model = attach(
        tiny("llama"),
        goal=settings("static"),
        tokenizer=lambda text: {"input_ids": [ord(letter) - 30 for letter in text]},
    )
    close(model.encode_goal(["ab", "c"]).goal, model.encode_goal([[67, 68], [69]]).goal)
    close(model.encode_goal("ab").goal, model.encode_goal([[67, 68]]).goal)
    with pytest.raises(ValueError, match="empty"):
        model.encode_goal(["ab", ""])


def test_wrong_calls():
    model = attached("llama", "static")
    for call, message in [
        (lambda: attach(model.lm, goal=settings("static")), "already carries a channel"),
        (lambda: attach(tiny("llama"), goal=settings("static", pool_layer=3)), "layers 0..2"),
        (lambda: attach(tiny("llama"), goal=settings("dynamic", trigger_ids=(97,))), "vocabulary of 97"),
        (lambda: model.generate(IDS, goal=GOALS, use_cache=False), "use_cache"),
        (lambda: model.generate(IDS, goal=GOALS, cache=DynamicCache()), "needs a LatentCache"),
        (lambda: model(IDS, goal=GOALS, cache=DynamicCache()), "needs a LatentCache"),
        (lambda: model.generate(IDS, goal=GOALS[:2]), "2 goals for 3 rows"),
        (lambda: model(torch.cat([IDS, IDS]), cache=model.new_cache(GOALS)), "3 goals for 6 rows"),
        (lambda: model.new_cache(GOALS).crop(-1), "cannot be cropped"),
        (lambda: model.generate(IDS[:1], goal=GOALS[:1], max_new_tokens=9, assistant_model=tiny("llama")), "crop"),
        (lambda: model.encode_goal(GOALS, torch.zeros(3, 5)), "row 0 of the goal batch is empty"),
        (lambda: attached("gpt2", "static").encode_goal(tokens(1, 65)), "a goal has 65 tokens and E_base"),
        (lambda: attached("llama", "dynamic")(inputs_embeds=torch.rand(3, 4, 32), goal=GOALS), "pass input_ids"),
        (lambda: GoalConfig(mode="static", trigger_ids=(1,)), "never updates"),
        (lambda: GoalConfig(mode="dynamic"), "trigger_ids is empty"),
        (lambda: GoalConfig(mode="dynamic", trigger_ids=(1,), width=12), "does not divide"),
        (lambda: GoalConfig(width=0), "at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with unchecked_types(), pytest.raises(ValueError, match="'static' or 'dynamic'"):
        GoalConfig(mode="moving")  # type: ignore[arg-type]
    lm = tiny("llama")
    with pytest.raises(ValueError, match="leave encoder out"):
        attach(lm, goal=settings("static"), encoder=lm)
    cache = model.new_cache(GOALS)
    logits(model, IDS[:, :4], cache=cache)
    with pytest.raises(ValueError, match="must cover the 4 tokens"):
        model(IDS[:, 4:], cache=cache, attention_mask=torch.ones(3, 5, dtype=torch.long))


def test_wrong_kinds_of_settings_are_named():
    with pytest.raises(ValueError, match="goal is 32; give the channel's settings"), unchecked_types():
        attach(tiny("gpt2"), goal=32)  # type: ignore[arg-type]
    model = attached("llama", "static")
    for window in ("16", 16.0, True):
        with pytest.raises(ValueError, match="window is .*; give a number of tokens"):
            model.new_cache(window=window)  # type: ignore[arg-type]


def test_goal_ids_outside_the_vocabulary_are_named():
    with pytest.raises(ValueError, match="a goal has token ids 1 to 999; E_base knows 0 to 96"):
        attached("gpt2", "static").encode_goal([[999], [1]])


def test_a_cache_passed_back_keeps_its_window():
    model = attached("llama", "static")
    asked = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(IDS, attention_mask=torch.ones_like(IDS), goal=GOALS, window=6, **asked)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    text = out.sequences
    again = model.generate(text, attention_mask=torch.ones_like(text), cache=cache, window=6, **asked)
    assert again.sequences.shape[1] == text.shape[1] + 2
    with pytest.raises(ValueError, match="was made with window 6, which stays"):
        model.generate(again.sequences, cache=cache, window=8, **asked)
    with pytest.raises(ValueError, match="was made with window None"):
        model.generate(IDS, cache=model.new_cache(), window=8, **asked)
