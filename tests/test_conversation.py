"""A conversation under a window: turns as the template writes them, the system message pinned."""

import pytest
import torch

from sidestream import Window, attach
from sidestream.lm.texts.conversation import Chat, system_text
from tiny_model import llama, tokenizer

TOKENIZER = tokenizer()
GOAL = "Answer in French."
KW = dict(max_new_tokens=5, do_sample=False)


@pytest.fixture(scope="module")
def model():
    return attach(llama(len(TOKENIZER)), tokenizer=TOKENIZER)


def test_a_conversation_is_what_the_template_writes(model):
    chat = Chat(model, GOAL)
    for message in ("Where does the trip go?", "And then?", "Thanks."):
        chat.say(message, **KW)
    messages = [{"role": "system", "content": GOAL}, *chat.messages]
    head = TOKENIZER.decode(chat.cache.goal.entry_ids[0])
    assert head == system_text(TOKENIZER, GOAL) == TOKENIZER.apply_chat_template(messages[:1], tokenize=False)
    # Every answer is what one forward over the whole text, system message in front, chooses.
    said = torch.tensor([[*chat.cache.goal.entry_ids[0].tolist(), *chat._ids]])
    with torch.no_grad():
        choice = model.lm(said).logits.argmax(-1)[0, :-1]
    assert chat.tokens == said.shape[1] - chat.goal_tokens
    assert torch.equal(choice[-5:], said[0, -5:])
    text = TOKENIZER.decode(chat._ids)
    assert text.startswith("<|im_start|>user\nWhere does the trip go?<|im_end|>\n<|im_start|>assistant\n")
    assert "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n" in text


def test_text_leaves_the_window_and_the_goal_does_not(model):
    chat = Chat(model, GOAL, window=Window(size=24, policy="reindex"))
    for message in ("Where does the trip go?", "And then? " * 4):
        chat.say(message, **KW)
    assert chat.gone == chat.tokens - 24 > 0
    assert chat.goal_tokens == len(TOKENIZER(system_text(TOKENIZER, GOAL))["input_ids"])
    chat.set_goal("Other words.")
    system = TOKENIZER(system_text(TOKENIZER, "Other words."))["input_ids"]
    seen = [*chat.cache.held[0].tolist(), 7][-24:]
    with torch.no_grad():
        given = model(torch.tensor([[7]]), cache=chat.cache).logits[0, -1]
        torch.testing.assert_close(given, model.lm(torch.tensor([[*system, *seen]])).logits[0, -1], atol=1e-4, rtol=0)
    chat.set_goal(None)
    assert chat.goal_tokens == 0


def test_a_chat_that_cannot_be_held_says_so(model):
    with pytest.raises(ValueError, match="the goal is empty"):
        Chat(model, "  ")
    with pytest.raises(ValueError, match="the message is empty"):
        Chat(model, GOAL).say(" ")
    with pytest.raises(ValueError, match="a chat needs a tokenizer with a chat template"):
        Chat(attach(llama(50)), GOAL)
