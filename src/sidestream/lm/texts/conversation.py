"""A conversation under a window, its system message pinned: what `sidestream generate --chat` holds with a user."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache, Window


def system_text(tokenizer: Any, goal: str) -> str:
    """The goal as the system message of a chat, in the words of the template.

    Raises:
        ValueError: a tokenizer without a chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model has no chat template; give the goal as plain text")
    try:
        return tokenizer.apply_chat_template([{"role": "system", "content": goal}], tokenize=False)
    # Templates raise jinja's errors and, through them, anything. Gemma's knows no system message, for one.
    except Exception:
        return goal if goal[-1:].isspace() else goal + "\n\n"


class Chat:
    """A conversation that may outgrow its window. The goal does not leave it.

    Args:
        model: an attached model that pins, with a tokenizer that has a chat template.
        goal: the system message, or a state of `encode_goal`; None for none.
        window: W or a `Window`; None keeps the whole text in view.

    Raises:
        ValueError: a model without a tokenizer or template, or a goal or window that it cannot take.
    """

    def __init__(
        self, model: Any, goal: str | LatentState | None = None, *, window: int | Window | None = None
    ) -> None:
        if model.tokenizer is None or not model.tokenizer.chat_template:
            raise ValueError("a chat needs a tokenizer with a chat template: attach(lm, tokenizer=...)")
        self.model, self.tokenizer = model, model.tokenizer
        self._window = window
        self._goal: str | LatentState | None = None
        self.cache: LatentCache = model.new_cache(window=window)
        self._ids: list[int] = []
        self._text = ""
        self.messages: list[dict[str, str]] = []
        self.set_goal(goal)

    @property
    def tokens(self) -> int:
        """Tokens of the conversation so far, the goal not counted."""
        return len(self._ids)

    @property
    def gone(self) -> int:
        """How many of them the model no longer sees."""
        window = self.cache.window
        return 0 if window is None else max(0, len(self._ids) - window.size)

    @property
    def goal_tokens(self) -> int:
        """Entries pinned."""
        goal = self.cache.goal
        return 0 if goal is None or goal.entries is None else int(goal.entries.sum())

    def set_goal(self, goal: str | LatentState | None) -> None:
        """Another system message from here on; what is in view of the conversation is read again under it.

        Raises:
            ValueError: a goal that cannot be pinned.
        """
        if isinstance(goal, str) and not goal.strip():
            raise ValueError("the goal is empty; None takes it away")
        state = goal
        if isinstance(goal, str):
            ids = self.tokenizer(system_text(self.tokenizer, goal), add_special_tokens=False)["input_ids"]
            state = self.model.encode_goal([ids])
        self.model.set_goal(self.cache, state)
        self._goal = goal

    def prompt(self, message: str) -> str:
        """What the template adds to the conversation for this message, up to where the answer begins."""
        system = [{"role": "system", "content": "."}]
        before = [*system, *self.messages]
        after = [*before, {"role": "user", "content": message}]
        try:
            head = self.tokenizer.apply_chat_template(before, tokenize=False)
            whole = self.tokenizer.apply_chat_template(after, tokenize=False, add_generation_prompt=True)
        except Exception:  # no system message, or none alone
            head = self.tokenizer.apply_chat_template(before[1:], tokenize=False) if self.messages else ""
            whole = self.tokenizer.apply_chat_template(after[1:], tokenize=False, add_generation_prompt=True)
        if not whole.startswith(head):
            raise ValueError(
                "the chat template rewrites earlier turns; such a conversation cannot be continued token by token"
            )
        turn = whole[len(head) :]
        if self.messages:
            # What the template puts behind an answer and the model did not say itself, a line break for instance.
            said = self.messages[-1]["content"]
            close = head[head.rindex(said) + len(said) :] if said and said in head else ""
            ended = self._text[self._text.rindex(said) + len(said) :] if said and said in self._text else ""
            turn = (close.removeprefix(ended) if close.startswith(ended) else "") + turn
        return turn

    @torch.no_grad()
    def say(self, message: str, **options: Any) -> str:
        """The model's answer; `options` are `generate`'s (max_new_tokens, streamer, do_sample, ...).

        Raises:
            ValueError: an empty message, or options that a goal or window cannot take.
        """
        if not message.strip():
            raise ValueError("the message is empty")
        new = self.tokenizer(self.prompt(message), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*self._ids, *new]], device=self.model.device)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        options = {"pad_token_id": pad, "max_new_tokens": 256, **options}
        out: Tensor = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), **{CACHE_NAME: self.cache}, **options
        )
        said = out[0, ids.shape[1] :]
        answer = self.tokenizer.decode(said, skip_special_tokens=True).strip()
        self._ids = out[0].tolist()
        self._text = self.tokenizer.decode(said)
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        return answer
