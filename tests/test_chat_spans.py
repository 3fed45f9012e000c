"""Which characters of a chat are scored: the assistant's and the end of its turns, in every family of templates."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chats import EOS, FAMILIES, MARKS, TOOLS
from sidestream.lm.base import chat_template, offsets
from sidestream.tasks.goals import GoalRecord, scored_text, tokens

# Words of headers, marks' own letters, text in other messages, nothing, white space, what looks like a mark.
TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "a", "user", "assistant", "model", "system", "I", "start", "end", "You", "\n", " a ", "x\n\nx", "<b>"]
        + ["INST", "User:", "Assistant: a", "tool", '{"a": "é\\"', "<|", "im", "qzx0y0xzq", "Today", "1 May"]
    ),
    st.text(alphabet='ab<|>[] \n:é"', max_size=6),
)
TURN = st.tuples(TEXTS, TEXTS, st.booleans(), TEXTS)


def made_tokenizer(template, marks=MARKS, eos=EOS):
    """Bytes, and one token for each mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={x: k for k, x in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(list(marks))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **({"eos_token": eos} if eos else {}))
    made.chat_template = template
    return made


TEMPLATES = {name: chat_template(made_tokenizer(family.template)) for name, family in FAMILIES.items()}
BARE = {name: chat_template(made_tokenizer(f.template, (), None)) for name, f in FAMILIES.items() if name != "phi"}


def chat(family, turns, first, thought):
    """A conversation as the family takes it."""
    messages = [{"role": "system", "content": first}] if FAMILIES[family].system and first is not None else []
    for number, (asked, said, called, told) in enumerate(turns):
        messages.append({"role": "user", "content": asked})
        if called and family in TOOLS:
            function = {"name": "find", "arguments": json.dumps({"it": said}, ensure_ascii=False)}
            call = {"id": f"callnr{number:03}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": told, "tool_call_id": call["id"]})
        elif called and not FAMILIES[family].alternates:
            messages.append({"role": "assistant", "content": told})
        if thought and family in ("thoughts", "deepseek"):
            said = f"<think>\n{told}\n</think>\n\n{said}"
        messages.append({"role": "assistant", "content": said})
    return messages


def record(messages, **more):
    return GoalRecord("f:1", "g", None, tuple(messages), None, **more)


def by_hand(messages, family):
    """The text, and for each character whether it is scored."""
    pieces = FAMILIES[family].pieces(messages)
    return "".join(text for text, _ in pieces), [mine for text, mine in pieces for _ in text]


def check(messages, family, template):
    text, wanted = by_hand(messages, family)
    found, spans = scored_text(record(messages), template)
    assert found == text and (family in TOOLS or text == template(messages))
    got = [any(start <= at < stop for start, stop in spans) for at in range(len(text))]
    shown = "".join(f"[{x}]" if mine else x for x, mine in zip(text, got, strict=True))
    assert got == wanted, shown


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(TURN, min_size=1, max_size=3), st.one_of(st.none(), TEXTS), st.booleans())
def test_exactly_the_assistants_characters_and_the_end_of_its_turns(family, turns, first, thought):
    messages = chat(family, turns, first, thought)
    check(messages, family, TEMPLATES[family])
