"""Pinned goals as users handle them: goals that change, precisions, copies, callbacks, threads, foreign states."""

import copy
import threading

import pytest
import torch
from transformers import LogitsProcessor, TextIteratorStreamer, pipeline

from families import tiny, tokens
from sidestream import GoalConfig, Window, attach, load
from sidestream.lm.decoding.cache import CACHE_NAME
from sidestream.lm.goals.goalfile import save_goal
from sidestream.lm.texts.conversation import Chat, system_text
from tiny_model import llama, tokenizer

TOKENIZER = tokenizer()
GOAL, OTHER = "Go to Oslo now or later.", "Eat."
IDS = torch.randint(5, 380, (2, 20), generator=torch.Generator().manual_seed(0))
REINDEX, ROLLING = Window(size=8, policy="reindex"), Window(size=8, policy="rolling")
WINDOWS = pytest.mark.parametrize("window", [None, REINDEX, ROLLING], ids=["whole", "reindex", "rolling"])
KW = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
RECORD = dict(output_logits=True, return_dict_in_generate=True)


@pytest.fixture(scope="module")
def model():
    return attach(llama(len(TOKENIZER)), tokenizer=TOKENIZER)


def behind(model, goal, text):
    """Logits after a text that stands behind a goal's text."""
    ids = [*(TOKENIZER(goal).input_ids if isinstance(goal, str) else goal), *text]
    with torch.no_grad():
        return model.lm(torch.tensor([ids])).logits[0, -1]


def same(left, right, atol=1e-4):
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


def read(model, ids, goal, window):
    with torch.no_grad():
        cache = model.new_cache(goal, window=window)
        model(ids, cache=cache)
    return cache


@WINDOWS
@pytest.mark.parametrize("first", [GOAL, None])
def test_another_goal_in_the_next_turn_is_as_if_it_had_stood_there(model, first, window):
    """Its length is another one: without reading the text again, the text would stand at the wrong distance."""
    cache, more = read(model, IDS[:1], first, window), torch.cat([IDS[:1], IDS[1:, :2]], 1)
    other = copy.deepcopy(cache)
    said = model.generate(more, goal=OTHER, **{CACHE_NAME: cache}, **RECORD, **KW).logits[0][0]
    model.set_goal(other, OTHER)
    same(said, model.generate(more, **{CACHE_NAME: other}, **RECORD, **KW).logits[0][0])
    seen = more[0].tolist()
    if window is not ROLLING:
        same(said, behind(model, OTHER, seen if window is None else seen[-8:]))


@WINDOWS
def test_the_same_goal_again_changes_nothing(model, window):
    caches = [read(model, IDS, [GOAL, OTHER], window) for _ in range(2)]
    with torch.no_grad():
        again = model(IDS[:, :1], goal=[GOAL, OTHER], cache=caches[0]).logits
        assert torch.equal(again, model(IDS[:, :1], cache=caches[1]).logits)


def test_a_moved_vector_cannot_start_over():
    goal = GoalConfig(width=8, mode="dynamic", trigger_ids=(9,))
    model = attach(llama(len(TOKENIZER)), goal=goal, pinned=True, tokenizer=TOKENIZER)
    cache = read(model, IDS, GOAL, None)
    with pytest.raises(ValueError, match="a dynamic channel has moved with the text"):
        model(IDS[:, :1], goal=OTHER, cache=cache)


class Changes(LogitsProcessor):
    """Changes the goal after the third token, from within `generate`."""

    def __init__(self, model, cache):
        self.model, self.cache, self.calls = model, cache, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            self.model.update_goal(self.cache, {"wish": "Eat well and long."})
        return scores


@pytest.mark.parametrize("window", [None, REINDEX], ids=["whole", "reindex"])
def test_a_goal_changes_in_the_middle_of_generate(model, window):
    cache = model.new_cache({"wish": GOAL}, window=window)
    said = model.generate(IDS[:1], logits_processor=[Changes(model, cache)], **{CACHE_NAME: cache}, **RECORD, **KW)
    seen = said.sequences[0, :-1].tolist()
    same(said.logits[-1][0], behind(model, "Eat well and long.\n", seen if window is None else seen[-8:]))


def test_no_goal_is_put_on_a_cache_that_a_forward_writes_to(model):
    cache, refused = model.new_cache({"wish": GOAL}), []

    def change(*_):
        with pytest.raises(ValueError, match="a forward is writing to this cache"):
            model.update_goal(cache, {"wish": OTHER})
        refused.append(True)

    hook = model.lm.model.layers[1].register_forward_hook(change)
    try:
        with torch.no_grad():
            model(IDS, cache=cache)
    finally:
        hook.remove()
    assert refused == [True]
    model.update_goal(cache, {"wish": OTHER})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision(dtype):
    attention = "sdpa" if dtype is torch.float16 else "eager"
    lm = llama(len(TOKENIZER)).to(dtype)
    lm.set_attn_implementation(attention)
    model, exact = attach(lm, tokenizer=TOKENIZER), attach(llama(len(TOKENIZER)), tokenizer=TOKENIZER)
    state = exact.encode_goal([GOAL, OTHER])  # read in float32: taken over into the model's precision
    for window in (None, REINDEX, ROLLING):
        for goal in ([GOAL, OTHER], state):
            said = model.generate(IDS, goal=goal, window=window, **RECORD, **KW).logits[0]
            wanted = exact.generate(IDS, goal=[GOAL, OTHER], window=window, **RECORD, **KW).logits[0]
            same(said.float(), wanted, atol=0.1 * float(wanted.abs().max()))


def test_states_of_other_models_are_refused(model):
    state = model.encode_goal(GOAL)
    config = copy.deepcopy(model.lm.config)
    config.num_key_value_heads = 4
    with pytest.raises(ValueError, match="another model read it"):
        attach(type(model.lm)(config).eval()).generate(IDS, goal=state, **KW)
    with pytest.raises(ValueError, match="entries for 3 blocks, the model 2"):
        attach(llama(len(TOKENIZER), layers=2)).generate(IDS, goal=state, **KW)


def test_learned_positions_run_out_in_one_line():
    model = attach(tiny("gpt2"))
    kw = dict(goal=[[5, 6, 7, 8]], do_sample=False, pad_token_id=0, eos_token_id=None)
    assert model.generate(tokens(1, 50), max_new_tokens=11, **kw).shape == (1, 61)  # the last token is not read
    with pytest.raises(ValueError, match="need more than the 64 learned positions of GPT2LMHeadModel; give a window"):
        model.generate(tokens(1, 50), max_new_tokens=12, **kw)
    assert model.generate(tokens(1, 50), max_new_tokens=12, window=20, **kw).shape == (1, 62)


@pytest.mark.parametrize("goal", [None, GoalConfig(width=8)], ids=["pinned", "with a vector"])
def test_what_is_pinned_is_saved(goal, tmp_path):
    lm = llama(len(TOKENIZER))
    model = attach(lm, goal=goal, pinned=True, tokenizer=TOKENIZER)
    expected = model.generate(IDS, goal=GOAL, window=ROLLING, **KW)
    model.save_pretrained(tmp_path)
    model.detach()
    again = load(tmp_path, lm, tokenizer=TOKENIZER)
    assert again.pinned and torch.equal(expected, again.generate(IDS, goal=GOAL, window=ROLLING, **KW))
    again.detach()
    if goal is not None:
        assert not load(tmp_path, lm, pinned=False).pinned


def test_a_path_is_a_compiled_goal(model, tmp_path):
    path = tmp_path / "goal.safetensors"
    save_goal(model, model.encode_goal(GOAL), path)
    for window in (None, ROLLING):
        expected = model.generate(IDS, goal=GOAL, window=window, **KW)
        assert torch.equal(expected, model.generate(IDS, goal=path, window=window, **KW))
    with pytest.raises(ValueError, match="there is no such goal file"):
        model.generate(IDS, goal=tmp_path / "none", **KW)
    with pytest.raises(ValueError, match="this model holds vectors"):
        attach(llama(len(TOKENIZER)), goal=GoalConfig(width=8), tokenizer=TOKENIZER).generate(IDS, goal=path, **KW)
    # Beside a channel: no vector, the entries alone; also where checkpointing reads the goal's tokens again.
    both = attach(llama(len(TOKENIZER)), goal=GoalConfig(width=8), pinned=True, tokenizer=TOKENIZER)
    with torch.no_grad():
        for parameter in both.channel.film.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    loss = model(IDS, goal=GOAL, labels=IDS).loss
    same(both(IDS, goal=path, labels=IDS).loss, loss)
    both.train().gradient_checkpointing_enable()
    same(both(IDS, goal=path, labels=IDS).loss, loss)


def test_pipelines_defaults_and_streamers(model):
    pipe = pipeline("text-generation", model=model, tokenizer=TOKENIZER)
    options = dict(max_new_tokens=5, do_sample=False, return_full_text=False)
    said = pipe("Where does", goal=GOAL, **options)[0]["generated_text"]
    assert said != pipe("Where does", **options)[0]["generated_text"]
    model.default_goal = GOAL
    try:
        assert said == pipe("Where does", **options)[0]["generated_text"]
        ids = TOKENIZER("Where does", return_tensors="pt").input_ids
        streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, skip_special_tokens=True)
        model.generate(ids, streamer=streamer, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert "".join(streamer) == said
    finally:
        model.default_goal = None


@WINDOWS
def test_what_inference_mode_made_is_of_use_outside(model, window):
    with torch.inference_mode():
        state = model.encode_goal(GOAL)
        cache = model.new_cache(state, window=window)
        model(IDS, cache=cache)
    plain = read(model, IDS, GOAL, window)
    same(model(IDS[:, :1], cache=cache).logits.detach(), model(IDS[:, :1], cache=plain).logits.detach())
    trained = attach(llama(len(TOKENIZER)), tokenizer=TOKENIZER)
    trained(IDS, goal=state, labels=IDS).loss.backward()
    assert trained.lm.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


def test_one_token_goals_the_least_window_and_long_rollouts(model):
    for policy in ("reindex", "rolling"):
        window = Window(size=2, policy=policy)
        said = model.generate(IDS, goal=[[7]], window=window, **RECORD, **KW)
        if policy == "reindex":
            same(said.logits[0][0], behind(model, [7], IDS[0, -2:].tolist()))
    cache = read(model, IDS, GOAL, ROLLING)
    size = cache.nbytes()
    with torch.no_grad():
        for _ in range(30):
            assert torch.isfinite(model(IDS, cache=cache).logits).all()
    assert cache.nbytes() == size and cache.get_seq_length() == 31 * 20


def test_two_chats_at_once_on_one_model(model):
    def talk(name, store):
        chat = Chat(model, f"Answer about {name}.", window=ROLLING)
        for turn in range(2):
            chat.say(f"Hello {name}, {turn}?", max_new_tokens=5, do_sample=False)
        store[name] = chat.messages

    alone, together = {}, {}
    for name in ("apple", "pear"):
        talk(name, alone)
    threads = [threading.Thread(target=talk, args=(name, together)) for name in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone and alone["apple"] != alone["pear"]


# ---------------------------------------------------------------- conversations


def test_a_turn_that_is_interrupted_is_forgotten(model):
    chats = [Chat(model, GOAL, window=REINDEX) for _ in range(2)]
    for chat in chats:
        chat.say("Hello?", **KW)

    class Interrupts(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chats[0].say("And then?", logits_processor=[Interrupts()], **KW)
    assert chats[0].say("Where now?", **KW) == chats[1].say("Where now?", **KW)
    assert chats[0].messages == chats[1].messages and chats[0].tokens == chats[1].tokens


MERGED = (  # Mistral's form: a system message goes into the user's first turn
    "{{ bos_token }}{% set s = namespace(text='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set s.text = m['content'] + '\n' %}{% elif m['role'] == 'user' %}[INST] "
    "{{ s.text if loop.index0 == 1 else '' }}{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
NONE = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (
    "<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("template, begins", [(MERGED, "<|im_start|>"), (NONE, "")], ids=["merged", "none"])
def test_a_template_without_a_system_message_gets_the_goal_as_text(template, begins):
    words = tokenizer()
    words.chat_template, words.bos_token = template, "<|im_start|>"
    assert system_text(words, GOAL) == begins + GOAL + "\n\n"
    model = attach(llama(len(words)), tokenizer=words)
    chat = Chat(model, GOAL)
    chat.say("Hello?", **KW)
    chat.say("And then?", **KW)
    whole = words.apply_chat_template(chat.messages[:1], tokenize=False, add_generation_prompt=True)
    assert words.decode(chat._ids).startswith(whole.removeprefix(begins))
    assert words.decode([*chat.cache.goal.entry_ids[0].tolist(), *chat._ids]).count("[INST]") == (2 if begins else 0)
    chat.set_goal(None)
    assert chat.goal_tokens == bool(begins)  # the begin token stays
