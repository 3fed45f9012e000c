"""Text to the tokens of something that goes on: special tokens once, at the front, and none that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that is read from its beginning and goes on: a prompt, a goal, the head of a window.

    What the tokenizer puts in front is kept, what it appends (`add_eos_token`) is not.
    """
    ids = _ids(tokenizer, text)
    first, end = kept(tokenizer, text, ids)
    return ids[first:end]


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts in front of every text."""
    return prompt_ids(tokenizer, _ANY)[: -len(_ids(tokenizer, _ANY, add_special_tokens=False)) or None]


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], *, answer: bool = False) -> list[int]:
    """Token ids of messages in the model's own form, which brings its special tokens with it.

    Args:
        tokenizer: has the chat template.
        messages: objects with `role` and `content`.
        answer: go on to where the assistant's turn begins.

    Raises:
        ValueError: there is no chat template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"messages need a chat template, and this {type(tokenizer).__name__} has none; give text")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
    # Templates raise jinja's errors and, through them, anything.
    except Exception as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from None
    return _ids(tokenizer, str(text), add_special_tokens=False)


def kept(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> tuple[int, int]:
    """First and end of the tokens to keep, of all that the tokenizer makes of a text with its special tokens."""
    special = set(getattr(tokenizer, "all_special_ids", ()))  # any function to token ids will do for a tokenizer
    # Nothing is appended, and at most one token is put in front of what is no such token itself: the common case.
    if not ids or ids[-1] not in special and (len(ids) < 2 or ids[1] not in special):
        return 0, len(ids)
    bare = _ids(tokenizer, text, add_special_tokens=False)
    if not bare:
        return 0, 0 if text == _ANY else len(opening(tokenizer))
    for start in range(len(ids) - len(bare) + 1):
        if list(ids[start : start + len(bare)]) == bare:
            twice = bare[:start] == list(ids[:start])  # the text brings the front with it
            return start if twice else 0, start + len(bare)
    end = len(ids)
    while end and ids[end - 1] == tokenizer.eos_token_id:
        end -= 1
    return 0, end


_ANY = "a"


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> list[int]:
    quiet = {"verbose": False} if isinstance(tokenizer, PreTrainedTokenizerBase) else {}
    return list(tokenizer(text, **quiet, **options)["input_ids"])
