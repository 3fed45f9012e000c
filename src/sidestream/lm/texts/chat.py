"""A tokenizer's chat template, with what is needed to tell whose each character of a rendered chat is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Messages = Sequence[dict[str, Any]]


class ChatTemplate:
    """Messages to text in a model's own form.

    Args:
        tokenizer: one with a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, messages: Messages, tools: Messages | None = None, prompt: bool = False) -> str:
        """The chat as text; with `prompt`, and the opening of an answer after it.

        Raises:
            Exception: whatever the template raises at messages that it does not take.
        """
        made = self._tokenizer.apply_chat_template(
            _present(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=prompt
        )
        return str(made)

    def blocks(self, messages: Messages, tools: Messages | None = None) -> list[tuple[int, int]] | None:
        """The characters in the template's `{% generation %}` blocks, in order; None where it has none.

        Raises:
            Exception: as a call.
        """
        source: Any = self._tokenizer.get_chat_template(tools=list(tools) if tools else None)
        if not _GENERATION.search(source):
            return None
        special: dict[str, Any] = self._tokenizer.special_tokens_map
        _, found = render_jinja_template(
            conversations=[_present(messages)],
            tools=list(tools) if tools else None,  # type: ignore[arg-type]
            chat_template=source,
            return_assistant_tokens_mask=True,
            **special,
        )
        return [(int(start), int(stop)) for start, stop in found[0]]  # type: ignore[misc]

    @cached_property
    def opening(self) -> str:
        """What the template writes before an answer is generated; empty where it writes nothing, or cannot be asked."""
        chat = [{"role": "user", "content": "x"}]
        try:
            without, opened = self(chat), self(chat, prompt=True)
        except Exception:  # a template raises anything
            return ""
        return opened.removeprefix(without) if opened.startswith(without) else ""

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The texts that are one token whatever is around them, the longest first."""
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        found = {text for text in (*self._tokenizer.all_special_tokens, *added) if text.strip()}
        return tuple(sorted(found, key=lambda text: (-len(text), text)))

    @property
    def eos(self) -> str | None:
        """The tokenizer's end of text."""
        eos = self._tokenizer.eos_token
        return None if eos is None else str(eos)


def _present(messages: Messages) -> list[dict[str, Any]]:
    """The messages without fields that are None, as newer releases of transformers hand them to a template."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]
