"""A conversation under a window, its system message pinned: what `sidestream generate --chat` holds with a user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.decoding.cache import CACHE_NAME, LatentCache, Window

_PROBE = "Speak in rhyme"


def system_text(tokenizer: Any, goal: str) -> str:
    """The goal as the system message of a chat, in the words of the template.

    A template that knows no system message, or writes one into the user's first turn, gets the goal as plain text in
    front of the conversation.

    Raises:
        ValueError: a tokenizer without a chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model has no chat template; give the goal as plain text")
    if _has_system(tokenizer):
        return _rendered(tokenizer, [{"role": "system", "content": goal}])
    text = goal if goal[-1:].isspace() else goal + "\n\n"
    return _begin(tokenizer) + text


def _has_system(tokenizer: Any) -> bool:
    """Whether the template writes a system message alone, as what comes before the other turns."""
    system, user = {"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}
    # Templates raise jinja's errors and, through them, anything. Gemma's knows no system message, for one.
    try:
        alone, before = _rendered(tokenizer, [system]), _rendered(tokenizer, [system, user])
    except Exception:
        return False
    return _PROBE in alone and before.startswith(alone)


def _begin(tokenizer: Any) -> str:
    """The begin token, where the template writes it in front of a conversation and nowhere else; else nothing."""
    begin, turns = tokenizer.bos_token, [("user", "x"), ("assistant", "y"), ("user", "z")]
    try:
        text = _rendered(tokenizer, [{"role": role, "content": content} for role, content in turns])
    except Exception:  # templates raise anything
        return ""
    return begin if begin and text.startswith(begin) and text.count(begin) == 1 else ""


def _rendered(tokenizer: Any, messages: list[dict[str, str]], *, answer: bool = False) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer))


class Chat:
    """A conversation that may outgrow its window. The goal does not leave it.

    Args:
        model: an attached model with a tokenizer that has a chat template.
        goal: the system message, a state of `encode_goal` or the `Path` of a compiled goal; None for none. Where the
            model pins, text is pinned in the template's own words; a model that does not holds it in its channel.
        window: W or a `Window`; None keeps the whole text in view.

    Raises:
        ValueError: a model without a tokenizer or template, or a goal or window that it cannot take.
    """

    def __init__(
        self, model: Any, goal: str | LatentState | Path | None = None, *, window: int | Window | None = None
    ) -> None:
        if model.tokenizer is None or not model.tokenizer.chat_template:
            raise ValueError("a chat needs a tokenizer with a chat template: attach(lm, tokenizer=...)")
        self.model, self.tokenizer = model, model.tokenizer
        system = model.pinned and _has_system(self.tokenizer)
        self._system = [{"role": "system", "content": _PROBE}] if system else []
        # The begin token stands in front of the goal, whatever that is, and so outlives the window.
        self._begin = _begin(self.tokenizer) if model.pinned else ""
        self._window = window
        self._state: LatentState | None = None
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

    @torch.no_grad()
    def set_goal(self, goal: str | LatentState | Path | None) -> None:
        """Another system message from here on; what is in view of the conversation is read again under it.

        Raises:
            ValueError: a goal that cannot be pinned.
        """
        if isinstance(goal, str) and not goal.strip():
            raise ValueError("the goal is empty; None takes it away")
        state = self._encoded(goal)
        moves = not self.model.pinned or self.model.channel is not None and self.model.channel.tracker is not None
        if moves:
            self._restart(state, self._window)
        else:
            self.model.set_goal(self.cache, state)
        self._state = state

    def _encoded(self, goal: str | LatentState | Path | None) -> LatentState | None:
        if goal is None:
            ids = self.tokenizer(self._begin, add_special_tokens=False)["input_ids"] if self._begin else []
            return self.model.encode_goal([ids]) if ids and self.model.channel is None else None
        if not isinstance(goal, str) or not self.model.pinned:
            return self.model.encode_goal(goal)
        ids = self.tokenizer(system_text(self.tokenizer, goal), add_special_tokens=False)["input_ids"]
        pinned = self.model.encode_goal([ids])
        # A channel was trained on goals as they are, without a template's words.
        return pinned if self.model.channel is None else self.model.encode_goal(goal).with_entries(pinned)

    def set_window(self, window: int | Window | None) -> None:
        """Another window from here on; the conversation is read again under it.

        Raises:
            ValueError: a window that the model cannot take.
        """
        self._restart(self._state, window)
        self._window = window

    def _restart(self, state: LatentState | None, window: int | Window | None) -> None:
        """A new cache, onto which the next turn reads the conversation from its beginning."""
        self.cache = self.model.new_cache(state, window=window)

    def prompt(self, message: str) -> str:
        """What the template adds to the conversation for this message, up to where the answer begins."""
        before = [*self._system, *self.messages]
        try:
            head = _rendered(self.tokenizer, before) if before else ""
            whole = _rendered(self.tokenizer, [*before, {"role": "user", "content": message}], answer=True)
        except Exception as error:  # templates raise anything
            raise ValueError(f"the chat template refuses the conversation: {error}") from None
        if not whole.startswith(head):
            raise ValueError(
                "the chat template rewrites earlier turns; such a conversation cannot be continued token by token"
            )
        turn = whole[len(head) :]
        if not head:
            turn = turn.removeprefix(self._begin)
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

        A turn that fails or is interrupted is as if it had not been.

        Raises:
            ValueError: an empty message, or options that a goal or window cannot take.
        """
        if not message.strip():
            raise ValueError("the message is empty")
        new = self.tokenizer(self.prompt(message), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*self._ids, *new]], device=self.model.device)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        options = {"pad_token_id": pad, "max_new_tokens": 256, **options}
        try:
            out: Tensor = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), **{CACHE_NAME: self.cache}, **options
            )
        except BaseException:  # an interrupt as well: the cache holds part of a turn
            self._restart(self._state, self._window)
            raise
        said = out[0, ids.shape[1] :]
        answer = self.tokenizer.decode(said, skip_special_tokens=True).strip()
        self._ids = out[0].tolist()
        self._text = self.tokenizer.decode(said)
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        return answer
