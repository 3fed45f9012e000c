"""What every task shares: how text becomes ids, what a model sees and must say, and what a score is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

Split = Literal["train", "valid", "test"]


class Example(NamedTuple):
    """One problem as token ids. The model reads `goal_ids + context_ids` and must continue with `target_ids`."""

    goal_ids: tuple[int, ...]
    """The prompt: what the goal vector encodes, and what the window evicts first."""
    context_ids: tuple[int, ...]
    """Tokens forced between the goal and the target; never scored. May be empty."""
    target_ids: tuple[int, ...]
    """The tokens to generate: the scored positions."""


class Score(NamedTuple):
    """What a scorer says about one output."""

    values: Mapping[str, float]
    """Metric name to a value in [0, 1]."""
    extracted: str
    """What the scorer read from the output, for people who look at single cases."""
