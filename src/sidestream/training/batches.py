"""From problems to training rows: windows, masked prompts, batches of like length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sidestream.lm.decoding.decode import pad_right
from sidestream.tasks.base import Example
from sidestream.training.objectives import UNSCORED


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """How a problem becomes a row of text under the window."""

    window: int
    """W: a row holds the last W tokens before the last token it predicts."""
    scored: Literal["answer", "all"] = "answer"
    """`answer` puts the loss on the answer alone; `all` on every token, as a language model's."""
    mask_prompt: float = 0.0
    """p: probability that the text prompt of a row is replaced by filler (stage 3b, Latent-Forced: 0.30)."""

    def __post_init__(self) -> None:
        if self.scored not in ("answer", "all"):
            raise ValueError(f"scored is {self.scored!r}; use 'answer' or 'all'")
        if not 0 <= self.mask_prompt <= 1:
            raise ValueError(f"mask_prompt is {self.mask_prompt}; it is a probability, 0 to 1")
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1")


class Rows(Dataset):
    """A fixed number of training rows, each a function of (seed, index): what a step sees does not depend on the past.

    Args:
        examples: the problems.
        config: window, loss positions, masking.
        batch_size, steps: rows are planned for exactly this many.
        seed: of order, crops and masks.
        filler: tokens that stand in for a masked prompt.
        pooled: (len(examples), E) pooled encoder states of the goals, handed out with the rows; None for a bare LM.

    Raises:
        ValueError: less than a batch of problems, or prompts to be masked and a filler shorter than one of them.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        config: RowConfig,
        *,
        batch_size: int,
        steps: int,
        seed: int,
        filler: Sequence[int] = (),
        pooled: Tensor | None = None,
    ) -> None:
        longest = max(len(example.goal_ids) for example in examples)
        if config.mask_prompt and len(filler) < longest:
            raise ValueError(f"the filler has {len(filler)} tokens, a prompt to be masked {longest}; give a longer one")
        self.examples = examples
        self.config = config
        self.seed = seed
        self.filler = filler
        self.pooled = pooled
        lengths = [min(config.window, sum(map(len, example))) for example in examples]
        self.order = plan(lengths, batch_size=batch_size, steps=steps, seed=seed)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict:
        which = self.order[index]
        ids, labels = make_row(
            self.examples[which], self.config, self.filler, random.Random(f"row {self.seed} {index}")
        )
        row: dict[str, Any] = {"ids": ids, "labels": labels}
        if self.pooled is not None:
            row["pooled"] = self.pooled[which]
        return row


def make_row(
    example: Example, config: RowConfig, filler: Sequence[int], rng: random.Random
) -> tuple[list[int], list[int]]:
    """Input ids and labels (the token after each) of one problem, at most W of each."""
    goal = list(example.goal_ids)
    # CHOICE(LS-AR, B.3.3): "30% of steps" is drawn per row, the same in expectation and smoother.
    if config.mask_prompt and rng.random() < config.mask_prompt:
        start = rng.randrange(max(1, len(filler) - len(goal)))
        goal = list(filler[start : start + len(goal)])
    before = len(example.goal_ids) + len(example.context_ids)
    text = goal + list(example.context_ids) + list(example.target_ids)
    if len(text) - 1 > config.window:
        # At test time every answer token is predicted from the window's last position. Ending the row at a random
        # answer token gives each of them that position in training.
        text = text[: before + rng.randint(1, len(example.target_ids))]
    first = before - 1 if config.scored == "answer" else 0
    labels = [UNSCORED] * first + text[first + 1 :]
    return text[:-1][-config.window :], labels[-config.window :]


def collate(rows: Sequence[dict]) -> dict[str, Tensor]:
    """Right-padded batch of rows."""
    ids, mask = pad_right([row["ids"] for row in rows])
    labels, _ = pad_right([row["labels"] for row in rows], value=UNSCORED)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if "pooled" in rows[0]:
        batch["pooled"] = torch.stack([row["pooled"] for row in rows])
    return batch


@dataclass(frozen=True, kw_only=True)
class GoalCollator:
    """Batches of rows with a goal each, for `Trainer(model=attached)` and TRL's `SFTTrainer(attached, ...)`.

    A row has `goal`, text or token ids of any length, and `input_ids` or `text`; `labels` where not every token is
    scored, and `attention_mask` where it is padded already.
    """

    tokenizer: Any
    """The base model's; Trainer saves it with its checkpoints."""
    max_length: int | None = None
    """Tokens a row keeps, from its beginning; None keeps all."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """(B, T) `input_ids`, `attention_mask` and `labels`, padded on the right, and the goals as they are.

        Raises:
            ValueError: a row without goal or text, or labels that are not as many as the tokens.
        """
        ids, labels = zip(*(self._row(row) for row in rows), strict=True)
        goals = [row["goal"].tolist() if isinstance(row["goal"], Tensor) else row["goal"] for row in rows]
        padded, mask = pad_right(ids)
        return {
            "input_ids": padded,
            "attention_mask": mask,
            "labels": pad_right(labels, value=UNSCORED)[0],
            "goal": goals,
        }

    def _row(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        lost = f"a row has {sorted(row)}"
        if row.get("goal") is None or "input_ids" not in row and "text" not in row:
            what = "'goal'" if row.get("goal") is None else "'input_ids' or 'text'"
            raise ValueError(f"{lost} and no {what}; where Trainer took it out, set remove_unused_columns=False")
        ids = row["input_ids"] if "input_ids" in row else self.tokenizer(row["text"], verbose=False)["input_ids"]
        labels = ids if row.get("labels") is None else row["labels"]
        ids, labels = [int(token) for token in ids], [int(token) for token in labels]  # from lists or tensors
        if len(labels) != len(ids):
            raise ValueError(f"{lost}: {len(labels)} labels for {len(ids)} tokens; give one each, {UNSCORED} for none")
        real = [at for at, seen in enumerate(row.get("attention_mask", [1] * len(ids))) if seen][: self.max_length]
        return [ids[at] for at in real], [labels[at] for at in real]


def plan(lengths: Sequence[int], *, batch_size: int, steps: int, seed: int) -> list[int]:
    """An order of `steps` batches, epoch after epoch, each batch of rows of nearly equal length (little padding).

    Rows are shuffled, sorted by length within pools of 50 batches, cut into batches, and the batches shuffled.
    """
    rng = random.Random(f"plan {seed}")
    batches: list[list[int]] = []
    while len(batches) < steps:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        epoch = []
        for start in range(0, len(order), 50 * batch_size):
            pool = sorted(order[start : start + 50 * batch_size], key=lambda row: lengths[row])
            epoch += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
        epoch = [batch for batch in epoch if len(batch) == batch_size]
        if not epoch:
            raise ValueError(
                f"{len(lengths)} problems do not fill one batch of {batch_size}; use more problems or a smaller batch"
            )
        rng.shuffle(epoch)
        batches += epoch
    return [row for batch in batches[:steps] for row in batch]
