"""Which characters of a chat are scored: the assistant's and the end of its turns, in every family of templates."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chats import EOS, FAMILIES, MARKS, TOOLS
from sidestream.lm.models.base import chat_template, offsets
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


def made_tokenizer(template, marks=MARKS, eos: str | None = EOS):
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
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(TURN, min_size=1, max_size=3), st.one_of(st.none(), TEXTS), st.booleans())
def test_exactly_the_assistants_characters_and_the_end_of_its_turns(family, turns, first, thought):
    messages = chat(family, turns, first, thought)
    check(messages, family, TEMPLATES[family])


@pytest.mark.parametrize("family", BARE)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(TURN, min_size=1, max_size=3), st.one_of(st.none(), TEXTS), st.booleans())
def test_marks_that_are_no_tokens_and_plain_functions(family, turns, first, thought):
    messages = chat(family, turns, first, thought)
    check(messages, family, BARE[family])
    if family not in TOOLS:
        check(messages, family, lambda messages: BARE[family](messages))


def chars(messages, template, **more):
    text, spans = scored_text(record(messages, **more), template)
    return [text[start:stop] for start, stop in spans]


def said(*answers):
    made: list[dict[str, Any]] = []
    for number, answer in enumerate(answers):
        made += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": answer}]
    return made


def test_the_check_sees_what_a_search_in_the_text_would_do():
    """The negative control: each answer looked for from the start, as text, is found in a header."""
    for family in ("chatml", "llama", "gemma", "zephyr"):
        messages = said("a", "se")
        text, wanted = by_hand(messages, family)
        for answer in ("a", "se"):
            assert not wanted[text.find(answer)]


@pytest.mark.parametrize("family", ["glm", "words"])
def test_where_no_marker_follows_the_end_of_text_ends_the_answer(family):
    words = made_tokenizer(FAMILIES[family].template)
    encode, template = offsets(words, special=False), chat_template(words)
    for answers, last in ((("a", "b"), "b"), (("a", ""), ""), (("",), "")):
        ids, scored = tokens(record(said(*answers)), template, encode)
        assert ids[-1] == words.eos_token_id and scored[-1]
        run = words.convert_ids_to_tokens([i for i, s in zip(ids, scored, strict=True) if s])
        assert "".join(run).endswith(last + EOS) and ids[:-1] == tuple(encode(template(said(*answers)))[0])
    # Nothing is added where a turn follows, where an answer alone is scored, or where the tokenizer has no such token.
    ids, _ = tokens(record([*said("a"), {"role": "user", "content": "b"}]), template, encode)
    assert words.eos_token_id not in ids
    ids, _ = tokens(GoalRecord("f:1", "g", None, tuple(said("a")), "a"), template, encode)
    assert words.eos_token_id not in ids
    none = made_tokenizer(FAMILIES[family].template, eos=None)
    ids, scored = tokens(record(said("a")), chat_template(none), offsets(none, special=False))
    assert ids == tuple(offsets(none, special=False)(template(said("a")))[0])
    chatml = made_tokenizer(FAMILIES["chatml"].template)
    ids, _ = tokens(record(said("a")), chat_template(chatml), offsets(chatml, special=False))
    assert chatml.eos_token_id not in ids


def test_white_space_that_no_prompt_holds_is_the_models_to_write():
    for family, short in (("glm", "<|assistant|>"), ("chatml", "<|im_start|>assistant")):
        whole = FAMILIES[family].template
        for template, lead in ((whole, ""), (whole.replace(f"{short}\n{{% endif", f"{short}{{% endif"), "Ċ")):
            words = made_tokenizer(template)
            ids, scored = tokens(record(said("a")), chat_template(words), offsets(words, special=False))
            run = words.convert_ids_to_tokens([i for i, s in zip(ids, scored, strict=True) if s])
            assert "".join(run[:-1]) == f"{lead}a"


def test_a_weight_of_nothing_is_honoured():
    messages = said("one", "two", "one")
    messages[1]["weight"] = messages[5]["weight"] = 0
    for family in ("chatml", "blocks", "thoughts", "glm"):
        (only,) = chars(messages, TEMPLATES[family])
        assert only.startswith("two") and "one" not in only


def test_blocks_in_parts_are_taken_as_the_template_has_them():
    parts = FAMILIES["blocks"].template.replace(
        "<|im_end|>{% endgen", "{% endgeneration %}{% generation %}<|im_end|>{% endgen"
    )
    apart = FAMILIES["blocks"].template.replace(
        "{% generation %}{{", "{% generation %}hm{% endgeneration %}{{ '\\n' }}{% generation %}{{"
    )
    for template, shown in ((parts, ["a<|im_end|>", "<|im_end|>"]), (apart, ["hm", "a<|im_end|>", "hm", "<|im_end|>"])):
        words = made_tokenizer(template)
        assert chars(said("a", ""), chat_template(words)) == shown
        ids, _ = tokens(record(said("a", "")), chat_template(words), offsets(words, special=False))
        assert words.eos_token_id not in ids


def test_an_answer_is_found_in_the_last_turn_that_has_it():
    text, spans = scored_text(
        GoalRecord("f:1", "g", None, tuple(said("a cat", "a dog", "b")), "a"), TEMPLATES["chatml"]
    )
    assert spans == ((text.index("a dog"), text.index("a dog") + 1),)


CALLS = [
    {"id": "callnr001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Z\\u00fcrich"}'}},
    {"id": "callnr002", "type": "function", "function": {"name": "time", "arguments": "{}"}},
]
QWEN_CALLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRING_CALLS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<Bot>{% if m.content is not defined %}"
    "{% for c in m.tool_calls %}"
    "{{ c.function.name + ' ' + c.function.arguments }};{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>"
    "{% else %}<User>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<Bot>{% endif %}"
)


def test_calls_go_to_the_templates_that_show_them_and_are_text_of_the_turn_elsewhere():
    asked = {"role": "user", "content": "Weather?"}
    messages = [asked, {"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "tool", "content": "5"}]
    both = [*messages, {"role": "assistant", "content": "Sunny."}]
    tools = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
    qwen = chat_template(made_tokenizer(QWEN_CALLS))
    first, second = chars(both, qwen, tools=tools)
    assert (
        first
        == (
            '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n<tool_call>\n'
            '{"name": "time", "arguments": {}}\n</tool_call><|im_end|>'
        )
        and second == "Sunny.<|im_end|>"
    )
    text, _ = scored_text(record(both, tools=tools), qwen)
    assert text.startswith("<|im_start|>system\n{") and "weather" in text.split("<|im_end|>")[0]
    # One that joins texts takes arguments as text, and no content where there is none.
    strings = chat_template(made_tokenizer(STRING_CALLS))
    assert chars(messages, strings) == ['weather {"city": "Zürich"};time {};<|end|>']
    # One that shows none, and one that takes a single call: as text of the turn.
    for family in ("chatml", "llama_tools"):
        (shown,) = chars(messages, TEMPLATES[family])
        assert json.loads(shown.partition("<|")[0]) == CALLS
    for answer, template in (("Zürich", qwen), ('{"city":"Zürich"}', qwen), ("Zürich", TEMPLATES["chatml"])):
        found = scored_text(GoalRecord("f:1", "g", None, tuple(messages), answer), template)
        ((start, stop),) = found.spans
        assert found.text[start:stop] in (answer, '{"city": "Zürich"}', "Z\\u00fcrich", "Z\\\\u00fcrich")


def test_what_cannot_be_told_is_an_error_that_names_the_message():
    with pytest.raises(ValueError, match="f:1: the chat template does not show message 1 as a turn of its own: with"):
        scored_text(record(said("Oslo")), lambda messages: "Oslo and nothing else")
    with pytest.raises(ValueError, match="f:1: the model's chat template refuses the messages: .*no system role"):
        scored_text(record([{"role": "system", "content": "x"}, *said("a")]), TEMPLATES["gemma"])
    counts = "{{ messages[1].content | length }}|" + FAMILIES["chatml"].template
    with pytest.raises(ValueError, match="f:1: the chat template does not show message 1 .*: it rewrites"):
        scored_text(record(said("Oslo")), chat_template(made_tokenizer(counts)))
    shouts = FAMILIES["chatml"].template.replace("| trim", "| upper")
    assert chars(said("Oslo", "é"), chat_template(made_tokenizer(shouts))) == ["OSLO<|im_end|>", "É<|im_end|>"]
    # An empty message that the template leaves out is no turn.
    skips = "{% for m in messages if m.content %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    assert chars(said("a", "", "b"), chat_template(made_tokenizer(skips))) == ["a<|im_end|>", "b<|im_end|>"]
