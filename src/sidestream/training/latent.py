"""Training of latent reasoning: the module whose forward is the loss, and the curriculum as calls of the loop.

One step: `CurriculumRows` makes a problem the row of its stage, the collator a batch, `LatentLM.forward` runs the
latent passes and takes the loss on what stands behind the latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.layout import UNSCORED, Layout
from sidestream.lm.decoding.passes import PassConfig, latent_passes, next_token_loss
from sidestream.training.curriculum import Call, Curriculum, CurriculumRows, Problem, Text, collator
from sidestream.training.loop import FINAL, LoopConfig, train


class StepDecoder(nn.Module):
    """SIM-CoT's extra objective: from the latents that stand for a step, a small decoder must say the step's text.

    Source: SIM-CoT (arXiv 2509.20317). It reads and writes with the model's own embeddings and head, so that what it
    asks of a latent is asked in the model's terms; it is not used at inference.

    Args:
        blocks: a causal LM as wide as the model, whose blocks are used and whose vocabulary is not.
        latents_per_step: c, the latents before each step's text.
    """

    def __init__(self, blocks: PreTrainedModel, latents_per_step: int) -> None:
        super().__init__()
        self.blocks: Any = blocks.base_model
        # Its own table of tokens is never read.
        self.blocks.get_input_embeddings().requires_grad_(False)
        self.latents_per_step = latents_per_step

    def forward(self, lm: Any, latents: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the steps' tokens.

        Args:
            lm: the model that the latents are of.
            latents: (M, c, D) of M steps.
            ids, labels: (M, S) their text, padded on the right; `UNSCORED` at padding.
        """
        embeds = torch.cat([latents, lm.get_input_embeddings()(ids[:, :-1])], dim=1)  # (M, c + S - 1, D)
        hidden = self.blocks(inputs_embeds=embeds, use_cache=False).last_hidden_state
        scored = labels != UNSCORED
        logits = lm.get_output_embeddings()(hidden[:, self.latents_per_step - 1 :][scored])  # (scored, V)
        return F.cross_entropy(logits.float(), labels[scored])


class LatentLM(nn.Module):
    """A causal LM that is trained on rows with latent slots, or on rows without.

    Args:
        model: a Hugging Face causal LM, or one with a concept stream attached.
        config: what fills the slots.
        step_decoder: adds SIM-CoT's objective, for batches whose collator gives the steps.
        step_weight: of that objective.
    """

    def __init__(
        self, model: Any, config: PassConfig, *, step_decoder: StepDecoder | None = None, step_weight: float = 1.0
    ) -> None:
        super().__init__()
        self.model = model
        self.pass_config = config
        self.step_decoder = step_decoder
        self.step_weight = step_weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor,
        step_rows: Tensor | None = None,
        step_firsts: Tensor | None = None,
        step_ids: Tensor | None = None,
        step_labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Mean cross-entropy of the text behind the latents.

        Args:
            input_ids, labels, attention_mask: (B, T).
            step_rows, step_firsts: (M,) whose step it is, and the number of the first of its latents.
            step_ids, step_labels: (M, S) the step's text.
        """
        passes = latent_passes(self.model, input_ids, self.pass_config, attention_mask=attention_mask)
        loss = next_token_loss(self.model, passes, labels)
        if self.step_decoder is None or step_rows is None:
            return {"loss": loss}
        assert step_firsts is not None and step_ids is not None and step_labels is not None
        offsets = range(self.step_decoder.latents_per_step)
        latents = torch.stack(
            [passes.latents[step_rows, step_firsts + offset] for offset in offsets], dim=1
        )  # (M, c, D)
        step_loss = self.step_decoder(self.lm, latents, step_ids, step_labels)
        return {"loss": loss + self.step_weight * step_loss, "step_loss": step_loss}

    @property
    def lm(self) -> Any:
        """The model without its channels."""
        return self.model.lm if isinstance(self.model, AttachedLM) else self.model


def train_curriculum(
    module: LatentLM,
    problems: Sequence[Problem],
    text: Text,
    curriculum: Curriculum,
    layout: Layout,
    loop: LoopConfig,
    directory: Path,
    *,
    seed: int,
    pad_id: int,
    stop_id: int,
    label: str = "",
    tags: dict[str, Any] | None = None,
    rates: dict[str, float] | None = None,
    calls: Sequence[Call] | None = None,
) -> None:
    """Train `module` in place over all stages: one call of `training.loop.train` for each reset of the optimiser.

    Killed at any moment and called again it goes on, and on a CPU ends with the same bits as if nothing had happened.

    Args:
        problems: what to learn.
        text: the method.
        curriculum, layout: how a problem becomes a row.
        loop: how it is optimised; `loop.steps` are those of all stages together.
        directory: gets one folder a call.
        seed: of rows and of dropout.
        pad_id, stop_id: padding, and the end of a step for the step decoder.
        label, tags, rates: as for `train`; "{stage}" in a tag stands for the stage's number.
        calls: some of the curriculum's calls, for a module that has been through those before; None for all.
    """
    if calls is None:
        calls = curriculum.calls(loop.steps, len(problems) // loop.batch_size)
    # The newest finished call holds all that came before it.
    finished = [number for number, call in enumerate(calls) if (directory / call.name / FINAL).exists()]
    collate = collator(layout, pad_id=pad_id, stop_id=stop_id, spoken=module.step_decoder is not None)
    for call in calls[max(finished, default=0) :]:
        rows = partial(
            CurriculumRows,
            problems,
            text,
            curriculum,
            layout,
            batch_size=loop.batch_size,
            steps=loop.steps,
            call=call,
            seed=seed,
        )
        train(
            module,
            rows,
            replace(loop, steps=call.steps),
            directory / call.name,
            seed=seed + call.first,
            collate=collate,
            label=f"{label} {call.name}" if label else "",
            resume=True,
            tags={name: str(value).format(stage=call.stage) for name, value in (tags or {}).items()},
            rates=rates,
        )


def pretrained(name: str, *, size: int, new_ids: Sequence[int], like: int) -> PreTrainedModel:
    """A causal LM from the hub or a folder, its vocabulary made larger.

    Args:
        name: on the hub, or a folder.
        size: the vocabulary wanted.
        new_ids: tokens it has not had, which start as token `like` does.

    Raises:
        ValueError: it cannot be had, or its vocabulary is not the one that `size` was counted from.
    """
    try:
        lm = AutoModelForCausalLM.from_pretrained(name)
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the model {name!r} cannot be had ({why}); give a folder that holds it as base") from None
    if lm.config.vocab_size != min(new_ids):
        raise ValueError(f"{name} knows {lm.config.vocab_size} tokens, the text has {min(new_ids)}; take a GPT-2")
    lm.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        tables: list[Any] = [lm.get_input_embeddings(), lm.get_output_embeddings()]
        for table in tables:
            table.weight[list(new_ids)] = table.weight[like].clone()
    return lm
