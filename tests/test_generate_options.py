"""Options of `generate` that people pass, and the forms that they give goals and masks in."""

import pytest
import torch
from transformers import BatchEncoding, GenerationConfig

from families import attached, close, open_gate, tiny, tokens
from sidestream import GoalConfig, Window, attach
from tiny_model import llama, tokenizer

IDS, GOALS = tokens(2, 6), [[5, 6, 7], [9, 8]]
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return attached("llama", "static")


@pytest.fixture(scope="module")
def plain(model):
    return model.generate(IDS, attention_mask=MASK, goal=GOALS, **GREEDY)


# ---------------------------------------------------------------- masks, prompts and configurations


def test_a_mask_may_come_by_position(model, plain):
    with torch.no_grad():
        assert torch.equal(model(IDS, MASK, goal=GOALS).logits, model(IDS, attention_mask=MASK, goal=GOALS).logits)
    assert torch.equal(model.generate(IDS, MASK, goal=GOALS, **GREEDY), plain)
    assert not torch.equal(model.generate(IDS, torch.ones_like(MASK), goal=GOALS, **GREEDY), plain)
    with pytest.raises(ValueError, match="the second argument is list; give a .* attention_mask or a GenerationConfig"):
        model.generate(IDS, [1], goal=GOALS)


def test_a_generation_config_may_come_in_every_way(model, plain):
    config = GenerationConfig(**GREEDY)
    off = GenerationConfig(use_cache=False, **GREEDY)
    given = dict(attention_mask=MASK, goal=GOALS)
    assert torch.equal(model.generate(IDS, generation_config=config, **given), plain)
    assert torch.equal(model.generate(IDS, generation_config=off, **given), plain)
    assert torch.equal(model.generate(inputs=IDS, **given, **GREEDY), plain)
    assert torch.equal(model.generate(input_ids=IDS, **given, **GREEDY), plain)
    alone = model.generate(IDS[1:], config, goal=GOALS[1])
    assert torch.equal(alone, plain[1:])
    for call, message in [
        (lambda: model.generate(IDS, inputs=IDS, goal=GOALS), "the same prompt"),
        (lambda: model.generate(IDS, config, generation_config=config, goal=GOALS), "given twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_long_prompt_may_be_read_in_pieces(model, plain):
    """transformers computes the pieces from the mask and the count of tokens held."""
    assert torch.equal(model.generate(IDS, MASK, goal=GOALS, prefill_chunk_size=4, **GREEDY), plain)


# ---------------------------------------------------------------- what cannot be had


@pytest.mark.parametrize(
    "options", [{"goal": GOALS}, {"window": 4}, {"goal": GOALS, "window": Window(size=4, policy="reindex")}]
)
@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "cache_implementation",
            "static",
            "'static' makes another cache, and a goal or a window rides on a LatentCache",
        ),
        ("cache_implementation", "offloaded", "'offloaded' makes another cache"),
        ("cache_implementation", "quantized", "'quantized' makes another cache"),
        ("prompt_lookup_num_tokens", 3, "prompt_lookup_num_tokens guesses tokens .* cannot be cropped"),
        ("assistant_early_exit", 1, "assistant_early_exit guesses tokens"),
        ("assistant_model", tiny("llama", seed=5), "assistant_model guesses tokens"),
        ("use_cache", False, "leave use_cache on"),
    ],
)
def test_what_cannot_hold_is_named_before_anything_runs(model, monkeypatch, name, value, message, options):
    monkeypatch.setattr(type(model.lm), "forward", None)  # whatever runs would fail on it
    with pytest.raises(ValueError, match=message):
        model.generate(IDS, **options, **{name: value}, **GREEDY)
    if name not in ("assistant_model", "use_cache"):
        config = GenerationConfig(**{name: value}, **GREEDY)
        with pytest.raises(ValueError, match=message):
            model.generate(IDS, **options, generation_config=config)
        monkeypatch.setattr(model.lm, "generation_config", config)
        with pytest.raises(ValueError, match=message):
            model.generate(IDS, **options, **GREEDY)


def test_what_a_latent_cache_is_anyway_may_be_asked_for(model, plain, monkeypatch):
    assert torch.equal(model.generate(IDS, MASK, goal=GOALS, cache_implementation="dynamic", **GREEDY), plain)
    monkeypatch.setattr(model.lm.generation_config, "cache_implementation", "dynamic")
    assert torch.equal(model.generate(IDS, MASK, goal=GOALS, **GREEDY), plain)


def test_without_a_goal_the_base_model_takes_its_own_options(model):
    base = model.generate(IDS[:1], **GREEDY)
    for more in ({"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}, {"use_cache": False}):
        assert torch.equal(model.generate(IDS[:1], **more, **GREEDY), base)
    assert torch.equal(model.generate(IDS[:1], assistant_model=tiny("llama", seed=5), **GREEDY), base)


def test_a_token_without_an_embedding_is_named(model):
    with pytest.raises(ValueError, match="token ids 2 to 97 and LlamaForCausalLM has embeddings for 0 to 96"):
        model.generate(torch.tensor([[2, 97]]), goal=GOALS[0], **GREEDY)


# ---------------------------------------------------------------- goals


def test_a_goal_may_be_what_a_tokenizer_returns(model):
    padded = torch.tensor([[5, 6, 7], [9, 8, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    want = model.encode_goal(GOALS).goal
    for goal in (
        BatchEncoding({"input_ids": padded, "attention_mask": mask}),
        {"input_ids": padded.tolist(), "attention_mask": mask.tolist()},
        {"input_ids": padded.numpy(), "attention_mask": mask.numpy()},
        {"input_ids": GOALS, "attention_mask": [[1, 1, 1], [1, 1]]},
        [torch.tensor(row) for row in GOALS],
    ):
        close(model.encode_goal(goal).goal, want)
    for one in ([5, 6, 7], torch.tensor([5, 6, 7]), {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, (5, 6, 7)):
        close(model.encode_goal(one).goal, want[:1])
    close(model.encode_goal(torch.tensor([5, 6, 7, 0]), torch.tensor([1, 1, 1, 0])).goal, want[:1])
    assert not torch.allclose(model.encode_goal(padded).goal, want), "the mask did not matter"
    assert torch.equal(model.generate(IDS, goal=[5, 6, 7], **GREEDY), model.generate(IDS, goal=[[5, 6, 7]], **GREEDY))


def test_a_goal_may_be_a_chat():
    words = tokenizer()
    model = open_gate(attach(llama(len(words)), goal=GoalConfig(width=16), tokenizer=words))
    chat = [{"role": "system", "content": "Book Oslo to Lima."}, {"role": "user", "content": "Hi"}]
    text = words.apply_chat_template(chat, tokenize=False)
    close(model.encode_goal(chat).goal, model.encode_goal(text).goal)
    mixed = model.encode_goal([chat, "one word", [5, 6]])
    close(mixed.goal, torch.cat([model.encode_goal(goal).goal for goal in (chat, "one word", [5, 6])]))
    words.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(ValueError, match="the chat template refuses the messages: no system turn"):
        model.encode_goal(chat)
    words.chat_template = None
    with pytest.raises(ValueError, match="messages need a chat template"):
        model.encode_goal(chat)
