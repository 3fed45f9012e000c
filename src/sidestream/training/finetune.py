"""A goal channel for a model that exists: what `sidestream train` does.

Two stages, after LS-AR's second and third. First E_pred learns to keep the goal's words apart; the base model reads
each goal once, so this stage costs next to nothing. Then FiLM and E_pred train on the trajectories, the base model
frozen, or with LoRA adapters, or as a whole.
"""

from __future__ import annotations

import bisect
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sidestream.channels import GoalConfig, GoalEncoder, LatentState
from sidestream.lm.attach import AttachedLM, attach
from sidestream.lm.decoding.decode import pad_right
from sidestream.lm.decoding.tracked import tracked_terms
from sidestream.lm.goals.reading import positions
from sidestream.lm.models.adapters import add_lora
from sidestream.lm.models.base import chat_template, offsets, pooled_goals
from sidestream.lm.models.blocks import decoder_blocks, film_sites
from sidestream.lm.texts.prompts import prompt_ids
from sidestream.tasks.goals import GoalRecord, Tokens, tokens
from sidestream.training.batches import collate, plan
from sidestream.training.checkpoints import damage, write_folder
from sidestream.training.loop import LoopConfig, train
from sidestream.training.objectives import UNSCORED, GoalReconstruction, token_losses, vicreg

NAMED = "goals"
TRAINED = "train"
ALPHA_RATE = 30.0
"""Learning rate of the tracker's alpha over that of the rest: from 0, AdamW's equal steps would leave it near 0."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How a channel is trained for a model that exists."""

    method: Literal["channel", "lora", "full"] = "channel"
    """What trains beside the channel: `channel` nothing (the base model is frozen), `lora` adapters in it (needs
    `peft`), `full` all of it. Blocks that read goals always stay as they are."""
    window: int = 256
    """W: a row of training holds at most the last W tokens before the last one it predicts."""
    width: int = 256
    """G, width of the goal vector."""
    pool_layer: int = 1
    """The base model's layer whose states are pooled into the vector. 1, the first block's, keeps exact words."""
    film_blocks: int | None = None
    """How many blocks FiLM acts on, counted from the last; null: all. With fewer a step is cheaper."""
    trigger: str = ""
    """Makes the channel dynamic: at each token that has this text in it, the vector takes in the text so far, all of
    it, in the window or not. Empty: static, the goal's vector for the whole text."""
    goal_steps: int = 400
    """Steps in which E_pred learns to keep goals apart before FiLM trains; 0 leaves them out."""
    steps: int = 300
    """Optimiser steps on the trajectories."""
    batch_size: int = 16
    """Rows a step, over all processes and accumulated parts together."""
    accumulate: int = 1
    """Parts that a step's rows are taken in, one after the other, to need less memory. The result is the same."""
    learning_rate: float = 1e-3
    """Peak learning rate of the channel."""
    base_rate: float = 0.1
    """With `lora` or `full`: the learning rate of the base model's weights over `learning_rate`."""
    rank: int = 16
    """With `lora`: rank of the adapters."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`fp32`, or `bf16` (autocast; for GPUs and CPUs that have it)."""
    gradient_checkpointing: bool = False
    """Recompute blocks in backward to need less memory; exact."""
    save_every: int = 50
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    seed: int = 0
    """Of the channel's first weights and of the order of rows."""

    def __post_init__(self) -> None:
        if self.method not in ("channel", "lora", "full"):
            raise ValueError(f"method is {self.method!r}; use 'channel', 'lora' or 'full'")
        if self.method != "channel" and self.pool_layer < 0:
            raise ValueError(
                f"method {self.method!r} needs a pool_layer counted from the front, got {self.pool_layer}: the blocks "
                "that read goals stay frozen"
            )
        if self.window < 2:
            raise ValueError(f"window is {self.window}; it must be at least 2")
        for name in ("width", "accumulate", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.goal_steps < 0:
            raise ValueError(f"goal_steps is {self.goal_steps}; it must be 0 or more")
        if not self.base_rate > 0:
            raise ValueError(f"base_rate is {self.base_rate}; it must be above 0")

    def loop(self) -> LoopConfig:
        """How the second stage is optimised."""
        return LoopConfig(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            save_every=self.save_every,
            log_every=self.log_every,
        )


class GoalRows(Dataset):
    """Training rows, each a function of (seed, index): at most the last W tokens before the last one they predict.

    Args:
        texts: the trajectories.
        pooled: (len(texts), E) pooled states of their goals.
        window: W.
        batch_size, steps: rows are planned for exactly this many.
        seed: of order and crops.
        whole: hand out the text before the window too, for a tracker to read.
    """

    def __init__(
        self,
        texts: Sequence[Tokens],
        pooled: Tensor,
        *,
        window: int,
        batch_size: int,
        steps: int,
        seed: int,
        whole: bool = False,
    ) -> None:
        self.texts, self.pooled, self.window, self.batch_size, self.seed = texts, pooled, window, batch_size, seed
        self.whole = whole
        self.places = [[at for at, scored in enumerate(text.scored) if scored] for text in texts]
        lengths = [min(window, len(text.ids) - 1) for text in texts]
        # A file may hold less than a batch of records.
        repeats = -(-batch_size // len(texts))
        order = plan(lengths * repeats, batch_size=batch_size, steps=steps, seed=seed)
        self.order = [row % len(texts) for row in order]
        self._counts: tuple[int, int] = (-1, 0)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        which = self.order[index]
        ids, (first, last), labels = self.texts[which].ids, *self._crop(index)
        row = {"ids": list(ids[first:last]), "labels": labels, "pooled": self.pooled[which]}
        more = {"full": list(ids[:last]), "first": first} if self.whole else {}
        return {**row, **more, "count": self._count(index)}

    def _crop(self, index: int) -> tuple[tuple[int, int], list[int]]:
        which = self.order[index]
        text, places = self.texts[which], self.places[which]
        last = places[-1]
        if last > self.window:
            # Only places with a full window before them, or the last: what a rollout past the window sees.
            first = min(bisect.bisect_left(places, self.window), len(places) - 1)
            last = places[random.Random(f"row {self.seed} {index}").randrange(first, len(places))]
            # To the end of what is scored here, so that one forward pass scores more than one token.
            stop = last + self.window // 2
            while last < stop and last + 1 < len(text.ids) and text.scored[last + 1]:
                last += 1
        start = max(0, last - self.window)
        labels = [text.ids[at] if text.scored[at] else UNSCORED for at in range(start + 1, last + 1)]
        return (start, last), labels

    def _count(self, index: int) -> int:
        """Scored tokens in all rows of the step that this row belongs to, whoever computes them."""
        step = index // self.batch_size
        if self._counts[0] != step:
            rows = range(step * self.batch_size, (step + 1) * self.batch_size)
            total = sum(label != UNSCORED for row in rows for label in self._crop(row)[1])
            self._counts = (step, total)
        return self._counts[1]


def collate_goals(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Right-padded batch of rows."""
    batch = {**collate(rows), "count": torch.tensor([row["count"] for row in rows])}
    if "full" in rows[0]:
        batch["full_ids"], batch["full_mask"] = pad_right([row["full"] for row in rows])
        batch["first"] = torch.tensor([row["first"] for row in rows])
    return batch


class GoalLM(nn.Module):
    """Next-token loss on trajectories whose goals are in the channel; what Trainer, DDP or a bare loop sees.

    Its state dict holds what trains and nothing else, so a checkpoint of a frozen base model is small.

    Args:
        model: the attached model, what is to train marked by `requires_grad`.
        batch_size: rows a step, over all processes and parts.
    """

    def __init__(self, model: AttachedLM, batch_size: int) -> None:
        super().__init__()
        self.model = model
        self.batch_size = batch_size
        self.frozen = not any(parameter.requires_grad for parameter in model.lm.parameters())
        self._recomputes = False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        pooled: Tensor,
        count: Tensor,
        full_ids: Tensor | None = None,
        full_mask: Tensor | None = None,
        first: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Cross-entropy summed over these rows, scaled so that its mean over all parts of a step is the step's mean.

        Args:
            input_ids, attention_mask, labels: (B, T), labels already shifted, `UNSCORED` where nothing is to predict.
            pooled: (B, E) pooled states of the goals.
            count: (B,) scored tokens in the whole step.
            full_ids, full_mask: (B, F) with a dynamic channel: the text up to the end of each row.
            first: (B,) where in it the row begins.
        """
        state = LatentState(goal=self.model.channel.encoder.predict(pooled))
        goal: dict[str, Any] = {"goal": state}
        if full_ids is not None and full_mask is not None and first is not None:
            goal = {"terms": tracked_terms(self.model, state, full_ids, full_mask, first, input_ids.shape[1])}
        hidden = self.model.hidden(input_ids, **goal, attention_mask=attention_mask)
        loss = token_losses(self.model.lm, hidden, labels, reduction="sum")
        return {"loss": loss * (self.batch_size / len(input_ids)) / count[0]}

    def train(self, mode: bool = True) -> GoalLM:
        """A frozen base model stays in evaluation mode (no dropout), unless it has to recompute its blocks."""
        super().train(mode)
        if self.frozen and not self._recomputes:
            self.model.lm.eval()
        return self

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, **kwargs: Any
    ) -> None:
        """Recompute blocks in backward.

        Raises:
            ValueError: reentrant checkpointing was asked for, which cannot carry a state.
        """
        self.model.activation_checkpointing_enable(activation_checkpointing_kwargs, **kwargs)
        self._recomputes = True
        self.train(self.training)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self._recomputes = False
        self.model.gradient_checkpointing_disable()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What trains, and the channel's buffers."""
        whole = super().state_dict(*args, **kwargs)
        names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: whole[name] for name in whole if name in names or name.startswith("model.channel.")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module.load_state_dict`, with nothing missing where all that trains is there."""
        own = self.state_dict()
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        found.missing_keys[:] = [name for name in found.missing_keys if name in own]
        if strict and (found.missing_keys or found.unexpected_keys):
            raise RuntimeError(f"missing {found.missing_keys}, unexpected {found.unexpected_keys}")
        return found


def finetune(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[GoalRecord],
    config: FinetuneConfig,
    directory: Path,
    *,
    resume: bool = False,
    processes: int = 1,
    show: bool = False,
    begin: Callable[[], None] = lambda: None,
) -> AttachedLM:
    """Attach a channel to `lm` and train it; the result is in evaluation mode and knows the tokenizer.

    Killed at any moment and called again with `resume`, on a CPU it ends with the same weights.

    Args:
        lm: the base model, where it is to train (a CPU or a GPU).
        tokenizer: its tokenizer.
        records: what to train on.
        config: how.
        directory: gets `goals` (the first stage's weights) and `train` (metrics.jsonl, checkpoints, final weights).
        resume: go on with what is in the directory.
        processes: how many processes this runs in; more than one needs torchrun, which splits each step's rows.
        show: progress bars.
        begin: called when model, settings and every record have been checked, before anything is written.

    Raises:
        ValueError: settings, records and model do not fit together.
        TrainingStopped: as `training.loop.train`.
    """
    template = chat_template(tokenizer)
    plain, chat = offsets(tokenizer, special=True), offsets(tokenizer, special=False)
    texts = [tokens(record, template, plain if record.trajectory is not None else chat) for record in records]
    model = attach_channel(lm, config, tokenizer)
    tracked = model.channel.tracker is not None
    if tracked:
        longest = max(texts, key=lambda text: len(text.ids))
        model.goal_hidden(torch.tensor([longest.ids], device=model.device))  # complains of a text that is too long
        if not any(set(text.ids) & set(model.channel.config.trigger_ids) for text in texts):
            raise ValueError(f"the trigger {config.trigger!r} is in no trajectory: the vector would never change")
    goal_ids = [prompt_ids(tokenizer, record.goal) for record in records]
    limit = positions(lm)
    for record, ids in zip(records, goal_ids, strict=True):
        if limit is not None and len(ids) > limit:
            raise ValueError(f"{record.where}: field 'goal' has {len(ids)} tokens, the model was made for {limit}")
    begin()
    if processes > 1:  # nobody writes before the first process has opened the folder
        PartialState(cpu=not torch.cuda.is_available()).wait_for_everyone()
    pooled = pooled_goals(model, goal_ids)
    if len(records) > 1:
        model.channel.encoder.calibrate(pooled.to(model.device))
    if config.goal_steps and len(records) > 1:
        name_goals(model.channel.encoder, pooled, goal_ids, config, directory / NAMED)
    rows = GoalRows(
        texts,
        pooled,
        window=config.window,
        batch_size=config.batch_size,
        steps=config.steps,
        seed=config.seed,
        whole=tracked,
    )
    train(
        GoalLM(model, config.batch_size),
        rows,
        config.loop(),
        directory / TRAINED,
        seed=config.seed,
        collate=collate_goals,
        label="train" if show else "",
        resume=resume,
        rates={"model.lm.": config.base_rate, "alpha": ALPHA_RATE},
        accumulate=config.accumulate,
        processes=processes,
    )
    return model.eval()


def attach_channel(lm: PreTrainedModel, config: FinetuneConfig, tokenizer: Any) -> AttachedLM:
    """The model with a fresh channel in float32, and `requires_grad` set for the method.

    Raises:
        ValueError: settings that this model cannot take, or a trigger that no token has.
    """
    name, blocks = decoder_blocks(lm)
    depth = len(blocks)
    chosen = depth if config.film_blocks is None else config.film_blocks
    if not 1 <= chosen <= depth:
        raise ValueError(f"film_blocks is {chosen}; {type(lm).__name__} has {depth} blocks")
    sites = film_sites(lm)
    lm.requires_grad_(config.method == "full")
    torch.manual_seed(config.seed)
    if config.method == "lora":
        add_lora(lm, rank=config.rank, first_block=config.pool_layer)
    if config.method == "full":
        for embedding in (lm.get_input_embeddings(), *blocks[: config.pool_layer]):
            embedding.requires_grad_(False)  # type: ignore[union-attr]
    goal = GoalConfig(width=config.width, pool_layer=config.pool_layer)
    if config.trigger:
        # CHOICE(LS-AR, 3.2): `replace`, not the paper's sum: a user's text has any number of triggers.
        goal = replace(
            goal, mode="dynamic", trigger_ids=trigger_ids(tokenizer, config.trigger), tracker_update="replace"
        )
    model = attach(lm, goal=goal, tokenizer=tokenizer, sites=sites[depth - chosen :])
    model.channel.float()
    if model.channel.tracker is not None:
        for idle in (model.channel.tracker.attention.q_proj_weight, model.channel.tracker.attention.k_proj_weight):
            if idle is not None:  # with one key they get no gradient, and DDP waits for every gradient
                idle.requires_grad_(False)
    return model.eval()


def trigger_ids(tokenizer: PreTrainedTokenizerBase, trigger: str) -> tuple[int, ...]:
    """Every token whose text has the trigger in it: a comma may come in one token with what is before or behind it.

    Raises:
        ValueError: there is none.
    """
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    found = tuple(token for token, text in enumerate(texts) if trigger in text)
    if not found:
        raise ValueError(f"the trigger {trigger!r} is in no token of this model's tokenizer; give a shorter one")
    return found


def name_goals(
    encoder: GoalEncoder,
    pooled: Tensor,
    goal_ids: Sequence[Sequence[int]],
    config: FinetuneConfig,
    directory: Path,
) -> None:
    """The first stage: E_pred learns vectors from which each goal's tokens can be told, spread by VICReg's variance and
    covariance. Its weights are kept in `directory`, and taken from there when it is called again."""
    # CHOICE(LS-AR, 3.1): no invariance to the trajectory's vector: a user's trajectory may be any text of any length,
    # and G is the user's choice, so there is no target of that width.
    file = directory / "encoder.safetensors"
    if directory.exists() and damage(directory) is None:
        load_model(encoder, str(file))
        return
    device = next(encoder.parameters()).device
    kept = sorted({token for row in goal_ids for token in row})
    place = {token: index for index, token in enumerate(kept)}
    wanted, _ = pad_right([[place[token] for token in row] for row in goal_ids], value=UNSCORED)
    torch.manual_seed(config.seed)
    naming = GoalReconstruction(encoder.width, len(kept)).to(device)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *naming.parameters()], weight_decay=0.01)
    generator = torch.Generator().manual_seed(config.seed)
    for step in range(config.goal_steps):
        share = step / config.goal_steps
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, share / 0.1 + 1e-3, (1 - share) / 0.9)
        batch = torch.randint(len(pooled), (256,), generator=generator)
        vector = encoder.predict(pooled[batch].to(device))
        loss = vicreg(vector, vector.detach()) + 10 * naming(vector, wanted[batch].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    if int(os.environ.get("RANK", "0")) == 0:
        write_folder(directory, lambda folder: save_model(encoder, str(folder / file.name)))
