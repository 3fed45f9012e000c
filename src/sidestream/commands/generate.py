"""`sidestream generate`: text from a trained channel, as it comes."""

from __future__ import annotations

import json
import sys
from os.path import isfile
from pathlib import Path
from typing import Any

from sidestream.commands.options import Options, command_parser, parsed
from sidestream.tasks.base import read_text

USAGE = "sidestream generate --model DIR --goal TEXT --prompt TEXT|--prompt_file FILE [--window W] [--temperature T]"
ABOUT = """Continue a prompt with the goal in the channel. Tokens are printed as they come. With --window W the model
sees the last W tokens of the text and nothing older; the goal stays. Without --goal the base model speaks."""


def load_run(model: str, base: str | None) -> tuple[Any, dict[str, Any]]:
    """The attached model of a run with its tokenizer, on a GPU if there is one, and the settings it was trained with.

    Raises:
        ValueError: no saved channel, another base model, or a base model without a tokenizer.
    """
    import torch

    import sidestream
    from sidestream.lm.models.base import load_base, load_tokenizer

    if base is None:
        attached = sidestream.load(model)
    else:
        attached = sidestream.load(model, load_base(base), tokenizer=load_tokenizer(base))
    if attached.tokenizer is None:
        raise ValueError(f"the base model of {model} comes without a tokenizer; name one that has it with --base")
    if torch.cuda.is_available():
        attached.to("cuda")
    record = Path(model) / "experiment.json"
    settings = json.loads(record.read_text(encoding="utf-8"))["config"] if record.exists() else {}
    return attached.eval(), settings


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
    """Generate once. Returns the exit status."""
    options: Options = {
        "model": (str | None, None, "what `sidestream train` wrote"),
        "base": (str | None, None, "the base model, where it is no longer where the file says"),
        "goal": (str | None, None, "what the channel is to hold; without one it is closed"),
        "prompt": (str | None, None, "the text to continue, as it stands here"),
        "prompt_file": (str | None, None, "a file that holds it, in place of --prompt"),
        "chat": (bool, False, "the prompt is a message of the user's: the chat template goes around it"),
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
    if given.temperature < 0 or not 0 < given.top_p <= 1:
        raise ValueError("--temperature must be 0 or above, and --top_p above 0 and at most 1")
    if given.top_p < 1 and not given.temperature:
        raise ValueError("--top_p is about drawing, and at --temperature 0 nothing is drawn; give a temperature")
    if given.policy is not None and given.window is None:
        raise ValueError("--policy says how a window moves; give --window W with it")
    if not 0 <= given.seed < 2**63:
        raise ValueError(f"--seed is {given.seed}; it must be 0 or more, and below 2**63")
    prompt = _prompt(given.prompt, given.prompt_file)

    import torch

    from sidestream.lm.decoding.cache import Window
    from sidestream.lm.goals.reading import positions
    from sidestream.lm.models.base import text_streamer
    from sidestream.lm.texts.prompts import chat_ids, prompt_ids

    window = None if given.window is None else Window(size=given.window, policy=given.policy or "reindex")
    model, _ = load_run(given.model, given.base)
    tokenizer: Any = model.tokenizer
    if given.chat and not tokenizer.chat_template:
        raise ValueError("--chat needs a model with a chat template; leave it out")
    said = [{"role": "user", "content": prompt}]
    ids = chat_ids(tokenizer, said, answer=True) if given.chat else prompt_ids(tokenizer, prompt)
    if not ids:
        raise ValueError("the prompt has no token")
    input_ids = torch.tensor([ids], device=model.device)
    limit, length = positions(model.lm), len(ids) + given.max_new_tokens
    if window is None and limit is not None and length > limit:
        print(
            f"note: prompt and continuation may have {length} tokens, the model was made for {limit}; --window W keeps "
            "it within what it knows",
            file=sys.stderr,
        )
    torch.manual_seed(given.seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if given.temperature:
        sampling = {"do_sample": True, "temperature": given.temperature, "top_p": given.top_p}
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        goal=given.goal,
        window=window,
        max_new_tokens=given.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        streamer=text_streamer(tokenizer),
        **sampling,
    )
    return 0
