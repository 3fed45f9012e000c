"""`sidestream compile-goal`: a goal's keys and values as a file, loaded in place of reading the text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sidestream.commands.options import Options, command_parser, parsed
from sidestream.tasks.base import read_text

USAGE = "sidestream compile-goal --model ANY --goal FILE|--goal_text TEXT --out FILE.safetensors [--precision P]"
ABOUT = """Read a goal once and keep what the model made of it: `sidestream generate --goal_file` and, in Python,
goal=Path("FILE.safetensors") pin it without reading. The file fits the base model and tokenizer it was made with and
no other. With a key it is signed."""


def run(words: list[str], parser_class: Any, add_fields: Any) -> int:
    """Compile one goal. Returns the exit status."""
    options: Options = {
        "model": (str | None, None, "a base model, or what `sidestream train` wrote"),
        "base": (str | None, None, "the base model of a run, where it is no longer where the run says"),
        "goal": (str | None, None, "a text file that holds the goal"),
        "goal_text": (str | None, None, "the goal itself, in place of --goal"),
        "out": (str | None, None, "the file to write"),
        "precision": (str, "float32", "of keys and values in the file: float32, bfloat16 or int8"),
        "chat": (bool, False, "as the system message of the model's chat template, for generate --chat"),
        "key_file": (str | None, None, "the key to sign with"),
        "key_env": (str | None, None, "the environment variable that holds it, in place of --key_file"),
    }
    parser = command_parser(parser_class, USAGE, ABOUT, options)
    given = parsed(parser, words, "model", "out")
    if (given.goal is None) == (given.goal_text is None):
        raise ValueError("give the goal once: --goal names a text file that holds it, --goal_text is the text itself")
    text = given.goal_text if given.goal is None else read_text(given.goal)
    if not text.strip():
        raise ValueError(f"{given.goal} is empty; it must hold the goal")

    import torch

    from sidestream.commands.generate import key_of, load_run, plain_text
    from sidestream.lm.goals.goalfile import check_precision, load_goal, save_goal
    from sidestream.lm.texts.conversation import system_text

    check_precision(given.precision)
    key = key_of(given)
    model, _ = load_run(given.model, given.base, pinned=True)
    tokenizer: Any = model.tokenizer
    begun = time.monotonic()
    with torch.no_grad():
        if given.chat:
            ids = tokenizer(system_text(tokenizer, text), add_special_tokens=False)["input_ids"]
            state = model.encode_goal([ids])
        else:
            state, _ = plain_text(model, text, "")
    read = time.monotonic() - begun
    save_goal(model, state, given.out, precision=given.precision, key=key)
    begun = time.monotonic()
    again = load_goal(model, given.out, key=key)
    loaded = time.monotonic() - begun
    assert again.entries is not None
    print(
        f"{given.out}: {int(again.entries.sum())} entries, {Path(given.out).stat().st_size:,} bytes; "
        f"read in {read:.3f} s, loaded again in {loaded:.3f} s"
    )
    return 0
