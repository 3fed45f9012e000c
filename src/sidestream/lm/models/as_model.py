"""What other libraries ask of a model, answered by an attached one: its configuration, copies, a goal for all calls."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from sidestream.lm.decoding.generating import carries_goal
from sidestream.lm.goals.reading import Goal


class AsModel(nn.Module):
    """The side of an `AttachedLM` that has nothing to do with how its channels work."""

    lm: PreTrainedModel
    tokenizer: Any
    _default_goal: Goal | None = None

    def __getattr__(self, name: str) -> Any:
        # Not more than a `pipeline` asks for, or what the wrapped model does without the channel would pass for what it
        # does with it.
        asked = name in ("hf_device_map", "input_modalities", "output_modalities")
        return getattr(self.lm, name) if asked else super().__getattr__(name)

    @property
    def default_goal(self) -> Goal | None:
        """The goal of every `forward` and `generate` that is given none and continues none; None: the channel closed.

        For callers that know no `goal=`, such as a `pipeline`. One goal, as for `encode_goal`; it is encoded at each
        call, by the weights of that moment, unless it is a `LatentState`. It is not saved.

        Raises:
            ValueError: on setting, a goal that `encode_goal` refuses, or more than one.
        """
        return self._default_goal

    @default_goal.setter
    def default_goal(self, goal: Goal | None) -> None:
        if goal is not None:
            with torch.no_grad():
                rows = cast(Any, self).encode_goal(goal).batch_size
            if rows != 1:
                raise ValueError(
                    f"default_goal is one goal, for texts of any number; got {rows}: pass goal= to the call"
                )
        self._default_goal = goal

    def _goal_for(self, goal: Goal | None, cache: Any) -> Goal | None:
        return self._default_goal if goal is None and not carries_goal(cache) else goal

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A second attached model with weights and hooks of its own; the tokenizer is shared."""
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.tokenizer)] = self.tokenizer
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused, for pickles and shallow copies.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "an attached model is not pickled: model.save_pretrained(directory) writes it, sidestream.load reads it; "
            "copy.deepcopy(model) copies it"
        )
