"""`sidestream generate`: text from a model with a goal, as it comes; with --chat, a conversation."""

from __future__ import annotations

import json
import sys
from os.path import isfile
from pathlib import Path
from typing import Any

from sidestream.commands.options import Options, command_parser, parsed
from sidestream.tasks.base import read_text

USAGE = (
    "sidestream generate --model ANY [--goal TEXT|--goal_file FILE] --prompt TEXT|--prompt_file FILE|--chat "
    "[--window W] [--temperature T]"
)
ABOUT = """Continue a prompt under a goal. A base model (folder, hub id, .gguf, package:NAME) holds the goal pinned: a
line of text in front that never leaves the window, or with --chat the system message. What `sidestream train` wrote
holds it in its channel, and with --pinned both ways. Tokens are printed as they come. With --window W the model sees
the last W tokens of the text and nothing older; the goal stays. --chat without a prompt is a conversation."""


def load_run(model: str, base: str | None, *, pinned: bool | None = None) -> tuple[Any, dict[str, Any]]:
    """The attached model of a run or of a base model, with its tokenizer, on a GPU if there is one, and the settings
    that a run was trained with.

    Args:
        model: what `sidestream train` wrote, or a base model, whose goals are pinned.
        base: the base model of a run, where it is not where the run says.
        pinned: whether a run's goals are pinned too; None: as it was saved.

    Raises:
        ValueError: neither, another base model, or a base model without a tokenizer.
    """
    import torch

    import sidestream
    from sidestream.lm.models.base import load_base, load_tokenizer
    from sidestream.lm.saving.channel import CONFIG_FILE, is_saved

    if not is_saved(model):
        if base is not None:
            raise ValueError(f"--base is for what `sidestream train` wrote, and {model} holds no {CONFIG_FILE}")
        if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
            raise ValueError(
                f"{model} is no model: it holds neither {CONFIG_FILE} (`sidestream train` writes it) nor config.json"
            )
        lm = load_base(model)
        attached = sidestream.attach(lm, tokenizer=load_tokenizer(model))
    elif base is None:
        attached = sidestream.load(model, pinned=pinned)
    else:
        attached = sidestream.load(model, load_base(base), tokenizer=load_tokenizer(base), pinned=pinned)
    if attached.tokenizer is None:
        raise ValueError(f"the base model of {model} comes without a tokenizer; name one that has it with --base")
    if torch.cuda.is_available():
        attached.to("cuda")
    record = Path(model) / "experiment.json"
    settings = json.loads(record.read_text(encoding="utf-8"))["config"] if record.exists() else {}
    return attached.eval(), settings


def key_of(given: Any) -> Any:
    """The key of --key_file or --key_env; None where neither is given.

    Raises:
        ValueError: both, or no key there.
    """
    from sidestream.lm.goals.signing import load_key

    if given.key_file is not None and given.key_env is not None:
        raise ValueError("--key_file and --key_env exclude each other; leave one out")
    if given.key_file is None and given.key_env is None:
        return None
    return load_key(file=given.key_file, environment=given.key_env)


def _prompt(text: str | None, file: str | None) -> str:
    """The text to continue.

    Raises:
        ValueError: none is given, or two, or an empty one, or the file cannot be read.
    """
    if text is not None and file is not None:
        raise ValueError("--prompt and --prompt_file exclude each other; leave one out")
    if text is None and file is None:
        raise ValueError("--prompt is missing; give it, or --prompt_file FILE")
    prompt = read_text(file) if file is not None else str(text)
    if not prompt.strip():
        raise ValueError(f"{file} is empty; it must hold the text to continue")
    if file is None and prompt.startswith("@") and isfile(prompt[1:]):
        print(f"note: --prompt is taken as text; --prompt_file {prompt[1:]} reads that file", file=sys.stderr)
    return prompt


def run(words: list[str], parser_class: Any, add_fields: Any) -> int:
    """Generate once, or hold a conversation. Returns the exit status."""
    options: Options = {
        "model": (str | None, None, "a base model, or what `sidestream train` wrote"),
        "base": (str | None, None, "the base model of a run, where it is no longer where the run says"),
        "goal": (str | None, None, "what the model is to hold on to; without one the base model speaks"),
        "goal_file": (str | None, None, "a goal that `sidestream compile-goal` wrote, in place of --goal"),
        "key_file": (str | None, None, "the key that the goal file must be signed with"),
        "key_env": (str | None, None, "the environment variable that holds it, in place of --key_file"),
        "pinned": (bool, False, "of a run: the goal is in its channel, and pinned too"),
        "prompt": (str | None, None, "the text to continue, as it stands here"),
        "prompt_file": (str | None, None, "a file that holds it, in place of --prompt"),
        "chat": (
            bool,
            False,
            "the prompt is a message of the user's, and the chat template goes around it; without a prompt, a "
            "conversation (/help says what can be typed)",
        ),
        "window": (int | None, None, "W, the tokens in view; null: all"),
        "policy": (
            str | None,
            None,
            "how the window moves: reindex (the default; exact: nothing older than W reaches the model; a forward pass "
            "of W tokens for each new one) or rolling (one token a step; for models made for a sliding window)",
        ),
        "max_new_tokens": (int, 128, "at most this many"),
        "temperature": (float, 0.0, "0 takes the likeliest token; above, tokens are drawn"),
        "top_p": (float, 1.0, "draw among the likeliest tokens that have this probability together"),
        "seed": (int, 0, "of drawing"),
    }
    parser = command_parser(parser_class, USAGE, ABOUT, options)
    given = parsed(parser, words, "model")
    _check(given)
    talks = given.chat and given.prompt is None and given.prompt_file is None
    prompt = "" if talks else _prompt(given.prompt, given.prompt_file)
    key = key_of(given)

    import torch

    from sidestream.lm.decoding.cache import Window
    from sidestream.lm.goals.goalfile import load_goal
    from sidestream.lm.models.base import text_streamer
    from sidestream.lm.texts.conversation import Chat

    window = None if given.window is None else Window(size=given.window, policy=given.policy or "reindex")
    model, _ = load_run(given.model, given.base, pinned=given.pinned or None)
    tokenizer: Any = model.tokenizer
    if given.chat and not tokenizer.chat_template:
        raise ValueError("--chat needs a model with a chat template; leave it out")
    if given.goal_file is not None and not model.pinned:
        raise ValueError("--goal_file holds a pinned goal, and this run keeps goals in its channel; give --pinned")
    goal = given.goal if given.goal_file is None else load_goal(model, given.goal_file, key=key)
    torch.manual_seed(given.seed)
    sampling: dict[str, Any] = {"do_sample": False, "max_new_tokens": given.max_new_tokens}
    if given.temperature:
        sampling.update(do_sample=True, temperature=given.temperature, top_p=given.top_p)
    if given.chat:
        chat = Chat(model, goal, window=window)
        if talks:
            from sidestream.commands.converse import converse

            return converse(chat, given.policy or "reindex", sampling)
        said = tokenizer(chat.prompt(prompt), add_special_tokens=False)["input_ids"]
        _warn_of_length(model, chat.goal_tokens + len(said) + given.max_new_tokens, window)
        chat.say(prompt, streamer=text_streamer(tokenizer), **sampling)
        return 0
    state, ids = plain_text(model, goal, prompt)
    if not ids:
        raise ValueError("the prompt has no token")
    ahead = 0 if state is None or state.entries is None else state.entries.shape[1]
    _warn_of_length(model, ahead + len(ids) + given.max_new_tokens, window)
    input_ids = torch.tensor([ids], device=model.device)
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        goal=state,
        window=window,
        pad_token_id=tokenizer.pad_token_id,
        streamer=text_streamer(tokenizer),
        **sampling,
    )
    return 0


def plain_text(model: Any, goal: Any, prompt: str) -> tuple[Any, list[int]]:
    """A goal as a state, and the tokens of the prompt that follows it.

    A pinned goal is a line of text before the prompt. What the tokenizer puts in front of a text is in front of the
    goal then, and not of the prompt again.

    Args:
        goal: text, a state, or None.
    """
    import torch

    from sidestream.lm.texts.prompts import opening, prompt_ids

    ids = prompt_ids(model.tokenizer, prompt)
    if goal is None:
        return None, ids
    with torch.no_grad():
        state = model.encode_goal(goal)
        if model.pinned and isinstance(goal, str):
            line = goal if goal[-1].isspace() else goal + "\n"
            pinned = model.encode_goal([prompt_ids(model.tokenizer, line)])
            # A channel was trained on goals as they are.
            state = pinned if model.channel is None else state.with_entries(pinned)
    first = opening(model.tokenizer) if model.pinned else []
    return state, ids[len(first) :] if ids[: len(first)] == first else ids


def _check(given: Any) -> None:
    if given.goal is not None and given.goal_file is not None:
        raise ValueError("--goal and --goal_file exclude each other; leave one out")
    if given.goal_file is None and (given.key_file is not None or given.key_env is not None):
        raise ValueError("a key checks the signature of a goal file; give --goal_file with it")
    if given.temperature < 0 or not 0 < given.top_p <= 1:
        raise ValueError("--temperature must be 0 or above, and --top_p above 0 and at most 1")
    if given.top_p < 1 and not given.temperature:
        raise ValueError("--top_p is about drawing, and at --temperature 0 nothing is drawn; give a temperature")
    if given.policy is not None and given.window is None:
        raise ValueError("--policy says how a window moves; give --window W with it")
    if given.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens is {given.max_new_tokens}; it must be at least 1")
    if not 0 <= given.seed < 2**63:
        raise ValueError(f"--seed is {given.seed}; it must be 0 or more, and below 2**63")


def _warn_of_length(model: Any, length: int, window: Any) -> None:
    from sidestream.lm.goals.reading import positions

    limit = positions(model.lm)
    if window is None and limit is not None and length > limit:
        print(
            f"note: prompt and continuation may have {length} tokens, the model was made for {limit}; --window W keeps "
            "it within what it knows",
            file=sys.stderr,
        )
