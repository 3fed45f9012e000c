"""One attached model or one cache and several texts: pipelines, default goals, turns, copies."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from transformers import GenerationConfig, pipeline

from families import GoalConfig, attached, close, differ, logits, open_gate, our_hooks, settings, tiny, tokens
from sidestream import LatentState, Window, attach, load
from sidestream.lm.decoding.cache import CACHE_NAME
from tiny_model import llama, tokenizer

GREEDY = {"max_new_tokens": 4, "do_sample": False}
GOAL = "The code word is apple."
PROMPTS = ["Hi", "Where does the trip go? To the north or to the south?", "Where does the trip go?"]


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.fixture(scope="module")
def model(words):
    return open_gate(attach(llama(len(words)), goal=GoalConfig(width=16), tokenizer=words))


@pytest.fixture(scope="module")
def pipe(model, words):
    return pipeline("text-generation", model=model, tokenizer=words)


def fresh(model, words, goal, prompts=PROMPTS):
    """What each prompt gives alone, with a cache of its own."""
    given = [words(prompt, return_tensors="pt") for prompt in prompts]
    outs = [model.generate(**one, goal=goal, pad_token_id=0, **GREEDY) for one in given]
    return [
        prompt + words.decode(out[0, one["input_ids"].shape[1] :], skip_special_tokens=True)
        for prompt, one, out in zip(prompts, given, outs, strict=True)
    ]


def said(found):
    return [row["generated_text"] for rows in found for row in (rows if isinstance(rows, list) else [rows])]


# ---------------------------------------------------------------- pipeline


def test_a_pipeline_takes_the_attached_model(pipe, model, words):
    alone = fresh(model, words, GOAL)
    assert said(pipe(PROMPTS, goal=GOAL, **GREEDY)) == alone
    assert said(pipe(PROMPTS, goal=GOAL, batch_size=2, **GREEDY)) == alone
    assert [said(pipe(prompt, goal=GOAL, **GREEDY))[0] for prompt in PROMPTS] == alone
    assert said(pipe(PROMPTS, **GREEDY)) == fresh(model, words, None) != alone
    both = [GOAL, "Book Oslo to Lima."]
    own = [fresh(model, words, goal, [prompt])[0] for goal, prompt in zip(both, PROMPTS, strict=False)]
    assert said(pipe(PROMPTS[:2], goal=both, batch_size=2, **GREEDY)) == own
    with pytest.raises(ValueError, match="2 goals for 1 rows"):
        pipe(PROMPTS[:2], goal=both, **GREEDY)
    assert "AttachedLM" in repr(pipe)


def test_a_pipeline_takes_chats(pipe, model, words):
    chat = [{"role": "user", "content": "Where does the trip go?"}]
    ids = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, goal=GOAL, pad_token_id=0, **GREEDY)[0, ids["input_ids"].shape[1] :]
    for found in (pipe(chat, goal=GOAL, **GREEDY), pipe([chat, chat], goal=GOAL, batch_size=2, **GREEDY)[1]):
        assert found[0]["generated_text"][-1]["content"] == words.decode(out, skip_special_tokens=True)


def test_a_default_goal_is_that_of_every_call(pipe, model, words):
    ids = words(PROMPTS[1], return_tensors="pt").input_ids
    closed, steered = logits(model, ids), logits(model, ids, goal=GOAL)
    differ(closed, steered)
    try:
        model.default_goal = GOAL
        assert said(pipe(PROMPTS, batch_size=3, **GREEDY)) == fresh(model, words, GOAL)
        assert torch.equal(logits(model, ids), steered)
        close(logits(model, ids, use_cache=True), steered)
        other = "Book Oslo to Lima."
        assert torch.equal(logits(model, ids, goal=other), logits(attach_again(model), ids, goal=other))
        # What a cache carries comes before the default.
        close(logits(model, ids, cache=model.new_cache(other)), logits(model, ids, goal=other))
        close(logits(model, ids, cache=model.new_cache()), steered)
        with pytest.raises(ValueError, match="one goal, for texts of any number; got 2"):
            model.default_goal = [GOAL, GOAL]
        with pytest.raises(ValueError, match="empty"):
            model.default_goal = ""
        assert model.default_goal == GOAL
        model.default_goal = LatentState(goal=torch.zeros(1, 16))
        differ(logits(model, ids), steered)
    finally:
        model.default_goal = None
    assert torch.equal(logits(model, ids), closed)


def attach_again(model):
    """The same weights in a second model, without a default."""
    made = copy.deepcopy(model)
    made.default_goal = None
    return made


def test_generation_config_is_the_wrapped_model_s():
    model = attached("llama", "static")
    model.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
    assert model.generate(tokens(1, 4), goal=[[5, 6]]).shape == (1, 7)


# ---------------------------------------------------------------- turns


def turn(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **GREEDY, **options)


@pytest.mark.parametrize("window", [None, Window(size=5, policy="reindex"), Window(size=5, policy="rolling")])
def test_another_text_is_told_from_one_that_goes_on(window):
    model, goal = attached("llama", "static"), [[5, 6]]
    first = turn(model, tokens(2, 6), goal=goal, window=window)
    cache = getattr(first, CACHE_NAME)
    before = cache.nbytes()
    unrelated = tokens(2, 30, seed=3)
    edited = torch.cat([first.sequences, tokens(2, 3, seed=4)], 1)
    edited[1, 2] += 1
    for ids, message in [
        (unrelated, "row 0 begins otherwise"),
        (edited, r"the text does not continue the 9 tokens .* \(row 1 begins otherwise\); pass the whole text so far"),
        (first.sequences[:, :9], "the cache holds 9 tokens and input_ids 9"),
        (torch.cat([first.sequences, first.sequences[:, :1]], 1)[:1], "holds 2 rows of text and input_ids 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            turn(model, ids, **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="2 x 3"):
        turn(model, edited, num_beams=3, **{CACHE_NAME: cache})
    assert cache.nbytes() == before and cache.get_seq_length() == 9, "something was computed"
    longer = torch.cat([first.sequences, tokens(2, 3, seed=4)], 1)
    second = turn(model, longer, **{CACHE_NAME: cache})
    if window is None:
        assert torch.equal(second.sequences, turn(model, longer, goal=goal).sequences)
    # The new tokens alone, with the mask of the whole text, is the other form that transformers knows.
    alone = turn(model, tokens(2, 6), goal=goal, window=window)
    mask = torch.ones_like(longer)
    new = model.generate(longer[:, 9:], attention_mask=mask, **{CACHE_NAME: getattr(alone, CACHE_NAME)}, **GREEDY)
    assert torch.equal(new[:, 4:], second.sequences[:, 13:])
    with pytest.raises(ValueError, match="14 columns"):
        wide = torch.ones(2, 14, dtype=torch.long)
        model.generate(
            longer[:, 9:], attention_mask=wide, **{CACHE_NAME: turn(model, tokens(2, 6), goal=goal)[CACHE_NAME]}
        )


def test_the_hash_follows_rows_as_the_cache_does():
    model, ids = attached("llama", "static"), tokens(2, 6)
    cache = model.new_cache([[5, 6]])
    logits(model, ids[:, :4], cache=cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 3, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    swapped = ids.flip(0)
    expected = model.generate(swapped, goal=[[5, 6]], **GREEDY)
    with pytest.raises(ValueError, match="row 0 begins otherwise"):
        model.generate(ids, **{CACHE_NAME: cache}, **GREEDY)
    assert torch.equal(model.generate(swapped, **{CACHE_NAME: cache}, **GREEDY), expected)
    cache.reset()
    assert torch.equal(model.generate(swapped, **{CACHE_NAME: cache}, **GREEDY), expected)


@runs(max_examples=25, deadline=None)
@given(st.data())
def test_any_other_beginning_is_noticed(data):
    """However the text came into the cache, in whichever pieces."""
    model = SHARED.setdefault("model", attached("llama", "static"))
    ids = tokens(1, 8, seed=data.draw(st.integers(0, 99)))
    cut = data.draw(st.integers(1, 6))
    cache = model.new_cache([[5, 6]])
    for piece in (ids[:, :cut], ids[:, cut:7]):
        logits(model, piece, cache=cache)
    with cache.continued_by(ids, None):
        pass
    wrong = ids.clone()
    at = data.draw(st.integers(0, 6))
    wrong[0, at] = data.draw(st.integers(0, 96).filter(lambda token: token != ids[0, at]))
    with pytest.raises(ValueError, match="begins otherwise"), cache.continued_by(wrong, None):
        pass


SHARED = {}


def test_the_wrapped_model_s_own_generate_does_not_go_on_unchecked(model, words):
    """It cuts a text by the length of what the cache holds, whatever that is."""
    bare, cache = pipeline("text-generation", model=model.lm, tokenizer=words), model.new_cache(GOAL)
    assert said(bare(PROMPTS[0], **{CACHE_NAME: cache}, **GREEDY)) == fresh(model, words, GOAL)[:1]
    for prompts in (PROMPTS[1], PROMPTS[1:]):
        with pytest.raises(ValueError, match="only the attached model checks that another continues it"):
            bare(prompts, **{CACHE_NAME: cache}, **GREEDY)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_deep_copy_is_a_second_attached_model(mode):
    model, ids = attached("llama", mode), tokens(2, 7)
    made = copy.deepcopy(model)
    steered = logits(model, ids, goal=[[5, 6]])
    assert torch.equal(logits(made, ids, goal=[[5, 6]]), steered)
    assert torch.equal(made.generate(ids, goal=[[5, 6]], **GREEDY), model.generate(ids, goal=[[5, 6]], **GREEDY))
    with torch.no_grad():
        made.channel.film.projection.weight.mul_(-1)
    differ(logits(made, ids, goal=[[5, 6]]), steered)
    assert torch.equal(logits(model, ids, goal=[[5, 6]]), steered)
    bare = made.detach()
    assert not our_hooks(bare) and our_hooks(model.lm)
    assert torch.equal(logits(copy.deepcopy(bare), ids), logits(model.lm, ids))
    attach(bare, goal=settings(mode))


def test_what_would_lose_the_channel_says_so(tmp_path):
    model = attached("llama", "static")
    for lose, message in [
        (lambda: torch.save(model, io.BytesIO()), "not pickled: model.save_pretrained"),
        (lambda: pickle.dumps(model), "not pickled: model.save_pretrained"),
        (lambda: copy.copy(model), "copy.deepcopy"),
        (lambda: torch.save(model.lm, io.BytesIO()), "carries a channel, which a pickle would lose"),
        (lambda: copy.deepcopy(model.lm), "a copy of it alone would lose it"),
    ]:
        with pytest.raises(ValueError, match=message):
            lose()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model.save_pretrained(tmp_path)
    ids = tokens(1, 5)
    assert torch.equal(logits(load(tmp_path, tiny("llama")), ids, goal=[[5, 6]]), logits(model, ids, goal=[[5, 6]]))
