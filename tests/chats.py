"""Chat templates in the shape of public families, each with its text written by hand: pieces, and whose they are."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

Pieces = list[tuple[str, bool]]


class Family(NamedTuple):
    template: str
    pieces: Callable[[list[dict[str, Any]]], Pieces]
    """The text of a chat, and whether the assistant wrote it; the token that ends a turn is a part of it."""
    system: bool = True
    """Whether it takes a system message."""
    alternates: bool = False
    """Whether it refuses two messages of one role in a row."""


MARKS = (
    "<|im_end|>", "<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<bos>", "<s>", "</s>", "[INST]", "[/INST]", "[gMASK]", "<sop>", "<|user|>",
    "<|assistant|>", "<|system|>", "<|observation|>", "<|end|>", "<|endoftext|>", "<|start_of_role|>", "<|eom_id|>",
    "<|end_of_role|>", "<|end_of_text|>", "<|START|>", "<|END|>", "<|USER|>", "<|BOT|>", "<|SYS|>", "<User>", "<Bot>",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|pad|>",
)  # fmt: skip
EOS = "<|endoftext|>"


def own(message):
    return message["role"] == "assistant"


def turns(head, close, after="\n", trim=str.strip, start=""):
    """A chat of turns that are all written alike."""

    def pieces(messages):
        made = [(start, False)]
        for message in messages:
            made += [(head(message["role"]), False), (trim(message["content"]) + close, own(message)), (after, False)]
        return made

    return pieces


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
chatml = turns(lambda role: f"<|im_start|>{role}\n", "<|im_end|>")
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The mark that ends a turn stands outside of the block.
HALF_MARKED = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
QWEN = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_TOOLS = (
    "{{ '<|begin_of_text|>' }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday is 1 May.\n\n{{ first }}<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eom_id|>'
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
MISTRAL = "{{ '<s>' }}" + ALTERNATE + (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} "
    "{{ m['content'] }}</s>{% endif %}{% endfor %}"
)  # fmt: skip
MISTRAL_TOOLS = (
    "{{ '<s>' }}{% set ns = namespace(k=0) %}{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' "
    "and not m.tool_calls %}{% if (m.role == 'user') != (ns.k % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set ns.k = ns.k + 1 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]</s>"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + ALTERNATE
    + "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
THOUGHTS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{% set thought = '' %}"
    "{% set said = m.content %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ said.strip() }}{% else %}{{ said.strip() }}{% endif %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] if m['role'] != 'tool' else 'observation' }}|>\n"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ m['content'] }}<|end_of_text|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
COMMAND = (
    "{% for m in messages %}<|START|>{{ {'user': '<|USER|>', 'assistant': '<|BOT|>'}.get(m['role'], '<|SYS|>') }}"
    "{{ m['content'].strip() }}<|END|>{% endfor %}{% if add_generation_prompt %}<|START|><|BOT|>{% endif %}"
)
VICUNA = (
    "A chat between a user and an assistant.{% for m in messages %}{% if m['role'] == 'assistant' %} ASSISTANT: "
    "{{ m['content'] }}</s>{% else %} {{ m['role'] | upper }}: {{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
WORDS = (
    "{% for m in messages %}{{ m['role'] | title }}: {{ m['content'] | trim }}{{ '' if loop.last else '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}\n\nAssistant:{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<Bot>{{ m['content'].split('</think>')[-1] }}<|end|>"
    "{% elif m['role'] == 'user' %}<User>{{ m['content'] }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Bot><think>\n{% endif %}"
)
HEADERS = {"user": "<|START|><|USER|>", "assistant": "<|START|><|BOT|>"}


def with_default(messages):
    default = [("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", False)]
    return ([] if messages[0]["role"] == "system" else default) + chatml(messages)


def llama_tools(messages):
    first = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    head = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    made = [(f"<|begin_of_text|>{head('system')}Today is 1 May.\n\n{first}<|eot_id|>", False)]
    for message in messages[messages[0]["role"] == "system" :]:
        if message["role"] == "tool":
            said = json.dumps(message["content"], ensure_ascii=False)
            made += [(head("ipython") + f"{said}<|eot_id|>", False)]
        elif message.get("tool_calls"):
            call = message["tool_calls"][0]["function"]
            arguments = json.dumps(json.loads(call["arguments"]), ensure_ascii=False)
            said = f'{{"name": "{call["name"]}", "parameters": {arguments}}}<|eom_id|>'
            made += [(head("assistant"), False), (said, True)]
        else:
            made += [(head(message["role"]), False), (message["content"].strip() + "<|eot_id|>", own(message))]
    return made


def mistral(messages):
    made = [("<s>", False)]
    for message in messages:
        if own(message):
            made += [(" ", False), (message["content"] + "</s>", True)]
        else:
            made.append((f"[INST] {message['content']} [/INST]", False))
    return made


def mistral_tools(messages):
    made = [("<s>", False)]
    for message in messages:
        if message["role"] == "tool":
            made.append((f"[TOOL_RESULTS] {message['content']}[/TOOL_RESULTS]", False))
        elif message.get("tool_calls"):
            call = message["tool_calls"][0]["function"]
            function = {"name": call["name"], "arguments": json.loads(call["arguments"])}
            made.append((f"[TOOL_CALLS] [{json.dumps(function, ensure_ascii=False)}]</s>", True))
        elif own(message):
            made += [(" ", False), (message["content"].strip() + "</s>", True)]
        else:
            made.append((f"[INST] {message['content']}[/INST]", False))
    return made


def thoughts(messages):
    asked = max((k for k, message in enumerate(messages) if message["role"] == "user"), default=-1)
    made = []
    for k, message in enumerate(messages):
        said = message["content"].strip()
        if own(message):
            thought, _, said = said.rpartition("</think>")
            thought, said = thought.split("<think>")[-1].strip("\n"), said.strip()
            if k > asked and (k == len(messages) - 1 or thought):
                said = f"<think>\n{thought}\n</think>\n\n{said}"
        made += [(f"<|im_start|>{message['role']}\n", False), (f"{said}<|im_end|>", own(message)), ("\n", False)]
    return made


def glm(messages):
    made = [("[gMASK]<sop>", False)]
    for message in messages:
        name = message["role"].replace("tool", "observation")
        made += [(f"<|{name}|>", bool(made[1:]) and made[-1][1]), ("\n", False), (message["content"], own(message))]
    return made


def vicuna(messages):
    made = [("A chat between a user and an assistant.", False)]
    for message in messages:
        made.append((f" {message['role'].upper()}: ", False))
        made.append((message["content"] + ("</s>" if own(message) else ""), own(message)))
    return made


def words(messages):
    made = []
    for message in messages:
        # What ends an answer is how the next turn begins.
        ended = bool(made) and made[-1][1]
        made += [("\n\n" if made else "", ended), (f"{message['role'].title()}:", ended), (" ", False)]
        made.append((message["content"].strip(), own(message)))
    return made


def deepseek(messages):
    made = []
    for message in messages:
        said = message["content"]
        if own(message):
            made += [("<Bot>", False), (said.split("</think>")[-1] + "<|end|>", True)]
        else:
            made.append((("<User>" if message["role"] == "user" else "") + said, False))
    return made


def raw(text):
    return text


FAMILIES = {
    "chatml": Family(CHATML, chatml),
    "blocks": Family(MARKED, turns(lambda role: f"<|im_start|>{role}\n", "<|im_end|>", trim=raw)),
    "half_blocks": Family(HALF_MARKED, turns(lambda role: f"<|im_start|>{role}\n", "<|im_end|>", trim=raw)),
    "qwen": Family(QWEN, with_default),
    "llama": Family(
        LLAMA,
        turns(
            lambda role: f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "", start="<|begin_of_text|>"
        ),
    ),
    "llama_tools": Family(LLAMA_TOOLS, llama_tools),
    "mistral": Family(MISTRAL, mistral, system=False, alternates=True),
    "mistral_tools": Family(MISTRAL_TOOLS, mistral_tools, system=False, alternates=True),
    "gemma": Family(
        GEMMA,
        turns(lambda role: f"<start_of_turn>{role.replace('assistant', 'model')}\n", "<end_of_turn>", start="<bos>"),
        system=False,
        alternates=True,
    ),
    "thoughts": Family(THOUGHTS, thoughts),
    "glm": Family(GLM, glm),
    "phi": Family(PHI, lambda m: [*turns(lambda role: f"<|{role}|>\n", "<|end|>", trim=raw)(m), (EOS, False)]),
    "zephyr": Family(ZEPHYR, turns(lambda role: f"<|{role}|>\n", "</s>", trim=raw)),
    "granite": Family(
        GRANITE, turns(lambda role: f"<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>", trim=raw)
    ),
    "command": Family(COMMAND, turns(lambda role: HEADERS.get(role, "<|START|><|SYS|>"), "<|END|>", "")),
    "vicuna": Family(VICUNA, vicuna),
    "words": Family(WORDS, words),
    "deepseek": Family(DEEPSEEK, deepseek),
}
TOOLS = ("llama_tools", "mistral_tools")
