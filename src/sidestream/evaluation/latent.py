"""Latent reasoning, measured: answers, answers after interventions on the latents, and what the latents keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sidestream.channels.stream import GATES
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.layout import pad_left
from sidestream.lm.decoding.passes import PassConfig, latent_generate, latent_passes, replacement

Intervention = Literal["zero", "noise", "mean", "first", "other", "permuted"]
INTERVENTIONS: tuple[Intervention, ...] = get_args(Intervention)
"""What may be fed in place of the latents (`lm.passes.replacement` says what each is)."""


@torch.no_grad()
def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: PassConfig,
    *,
    max_new_tokens: int,
    stop_id: int,
    intervention: Intervention | None = None,
    seed: int = 0,
    batch_size: int = 100,
) -> list[list[int]]:
    """Greedy continuations, one a prompt.

    Args:
        model: in evaluation mode.
        prompts: token ids with latent slots.
        config: what fills the slots, and how many of them are used.
        intervention: what is fed instead. A row without two latents keeps its own where they are to be permuted, and
            so does a problem that nobody shares its number of latents with where they are to come from others.
        seed: of `noise` and `permuted`; each batch draws its own.
        batch_size: prompts at a time, of one number of latents.
    """
    if config.depth is not None:
        # Not masked but taken out: where prompts end in latents, the answer must not begin at a masked column.
        prompts = [first_latents(ids, config.latent_id, config.depth) for ids in prompts]
        config = replace(config, depth=None)
    answers: list[list[int]] = [[] for _ in prompts]
    for number, batch in enumerate(batches(prompts, config.latent_id, batch_size)):
        rows = [prompts[index] for index in batch]
        replace_by = None
        latents = list(rows[0]).count(config.latent_id)
        alone = (intervention in ("other", "mean") and len(rows) < 2) or (intervention == "permuted" and latents < 2)
        if intervention is not None and latents and not alone:
            # Padding and column of every token are those of generation, so the clean latents are too.
            ids, mask = pad_left(rows, pad_id=0, device=model.device)
            clean = latent_passes(model, ids, config, attention_mask=mask)
            generator = torch.Generator().manual_seed(1_000_003 * seed + number)
            replace_by = replacement(intervention, clean, generator)
        said = latent_generate(model, rows, config, max_new_tokens=max_new_tokens, stop_id=stop_id, replace=replace_by)
        for index, ids in zip(batch, said, strict=True):
            answers[index] = ids
    return answers


def batches(prompts: Sequence[Sequence[int]], latent_id: int, batch_size: int) -> list[list[int]]:
    """Numbers of prompts in batches with one number of latents each and nearly one length; no batch of a single one
    where its number of latents occurs twice."""
    groups: dict[int, list[int]] = {}
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        groups.setdefault(list(prompts[index]).count(latent_id), []).append(index)
    found = []
    for group in groups.values():
        cuts = [group[first : first + batch_size] for first in range(0, len(group), batch_size)]
        if len(cuts) > 1 and len(cuts[-1]) == 1:
            cuts[-2:] = [cuts[-2] + cuts[-1]]
        found += cuts
    return found


class Trace(NamedTuple):
    """What passes 1 to K leave, averaged over problems. Problems with fewer passes count where they have one."""

    cosine: list[list[float]]
    """Pass -> problem: cosine of h_t to h_1, so 1 in pass 1."""
    gates: dict[str, list[list[float]]]
    """Gate -> pass -> problem: mean over the dimensions. Empty without gates."""


@torch.no_grad()
def trace_passes(model: Any, prompts: Sequence[Sequence[int]], config: PassConfig, *, batch_size: int = 100) -> Trace:
    """How alike the hidden state of each pass is to that of the first, and how far the gates open.

    Source: AGCLR, memory retention. h_t is the state at the end of pass t, before the stream.

    Raises:
        ValueError: no prompt has a latent.
    """
    states: list[Tensor] = []  # one (K, D) a problem
    for batch in batches(prompts, config.latent_id, batch_size):
        ids, mask = pad_left([prompts[index] for index in batch], pad_id=0, device=model.device)
        passes = latent_passes(model, ids, config, attention_mask=mask)
        states += [row[there] for row, there in zip(passes.states.float(), passes.present, strict=True)]
    most = max(map(len, states))
    if not most:
        raise ValueError("no prompt has a latent slot; the passes of an arm without latents cannot be compared")
    cosine: list[list[float]] = [[] for _ in range(most)]
    gates: dict[str, list[list[float]]] = {}
    stream = model.stream if isinstance(model, AttachedLM) and config.slots == "hidden" else None
    for rows in filter(len, states):
        for place, value in enumerate(torch.cosine_similarity(rows, rows[:1], dim=-1).tolist()):
            cosine[place].append(value)
        if stream is None or stream.config.memory == "mlp":
            continue
        count = torch.arange(len(rows), device=rows.device)
        means = stream.gates(rows.to(stream.ln_h.weight.dtype), count).float().mean(dim=-1)  # (K, 3)
        for gate, values in zip(GATES, means.T.tolist(), strict=True):
            for place, value in enumerate(values):
                gates.setdefault(gate, [[] for _ in range(most)])[place].append(value)
    return Trace(cosine, gates)


def first_latents(ids: Sequence[int], latent_id: int, depth: int) -> list[int]:
    """A prompt with its first `depth` latent slots, the others taken out."""
    seen, kept = 0, []
    for token in ids:
        seen += token == latent_id
        if token != latent_id or seen <= depth:
            kept.append(token)
    return kept
