"""What attacks on a goal-steered LM share: the attacker's objective, what asking it costs, and a row's verdict.

An attacker wants the model to say a *target* (the answer to another goal) after a text, and may change the text
(`attacks_text`) or the vector (`attacks_vector`). Everything is measured on what greedy decoding sees under the window
policy `reindex`: each target token is predicted from the last W tokens before it, while a dynamic channel's E_base
reads the whole text. So a row is hit exactly if greedy decoding says the target.

To attack a defended model and know it: `defence` stands between vector and FiLM in every forward and backward
(`GoalCodes` lets the gradient through), and `penalty` is what a detector would notice (`Arbiter.penalty`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sidestream.channels import LatentState
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.decode import pad_right
from sidestream.lm.models.terms import InForce

Texts = Sequence[Sequence[int]]
"""Token ids of each row, up to the place where the model must go on."""

Penalty = Callable[[Texts, Tensor | None], Tensor]
"""Texts and (B, G) vectors, before any defence, to (B,): at most 0 where the defence notices nothing. Differentiable in
the vectors if an attack on them is to avoid it."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an attack spent, summed over its rows."""

    steps: int = 0
    """Rounds of the search; every row has its own search, so this is not a sum."""
    forwards: int = 0
    """Sequences run through the decoder. Under a window a row costs one for each target token that it cannot share. A
    dynamic channel's encoder reads each text besides."""
    backwards: int = 0
    """Sequences that a gradient was taken through."""


class Measured(NamedTuple):
    """How the rows stand, each tensor (B,)."""

    loss: Tensor
    """Mean cross-entropy of the target tokens in nats, plus the penalty."""
    hit: Tensor
    """Whether greedy decoding says the whole target and the penalty is at most 0."""

    def better_than(self, other: Measured) -> Tensor:
        """(B,) rows that are hit where the other is not, or as far and with a lower loss."""
        return (self.hit & ~other.hit) | ((self.hit == other.hit) & (self.loss < other.loss))


class Objective:
    """The attacker's view of a model: how far each text and vector is from making it say the target.

    The model is in evaluation mode while it is asked, and no parameter's `.grad` is touched.

    Args:
        model: an `AttachedLM`; or a bare causal LM, which takes no vectors.
        targets: token ids that the attacker wants after each text; none empty.
        window: W, as for `greedy`; None for the whole text.
        defence: applied to the vectors before FiLM; must pass gradients for attacks that follow them.
        penalty: added to the loss of each row.
        batch_size: rows at a time.

    Raises:
        ValueError: an empty target or a window below 1.
    """

    def __init__(
        self,
        model: Any,
        targets: Texts,
        *,
        window: int | None = None,
        defence: Callable[[Tensor], Tensor] | None = None,
        penalty: Penalty | None = None,
        batch_size: int = 128,
    ) -> None:
        if not targets or not all(len(target) for target in targets):
            raise ValueError("a target is empty: the attacker must want the model to say something")
        if window is not None and window < 1:
            raise ValueError(f"window is {window}; it must be at least 1")
        self.model = model
        self.lm: Any = model.lm if isinstance(model, AttachedLM) else model
        self.targets = [tuple(target) for target in targets]
        self.window = window
        self.defence = defence
        self.penalty = penalty
        self.batch_size = batch_size
        self.forwards = self.backwards = 0

    def spent(self, since: tuple[int, int], steps: int) -> Cost:
        """The cost of what was asked since `(forwards, backwards)` stood at these counts."""
        return Cost(steps=steps, forwards=self.forwards - since[0], backwards=self.backwards - since[1])

    def counts(self) -> tuple[int, int]:
        """`forwards` and `backwards` so far, for `spent`."""
        return self.forwards, self.backwards

    @torch.no_grad()
    def measure(self, texts: Texts, vectors: Tensor | None = None, rows: Sequence[int] | None = None) -> Measured:
        """Loss and hit of each text with its vector.

        Args:
            texts: as many as vectors.
            vectors: (N, G); None leaves the channel closed (a blank vector).
            rows: for each text whose target counts; None for one text a target, in order.
        """
        which = self._checked(texts, vectors, rows)
        parts = []
        for start in range(0, len(texts), self.batch_size):
            part = slice(start, start + self.batch_size)
            parts.append(self._run(texts[part], None if vectors is None else vectors[part], which[part]))
        return Measured(torch.cat([part.loss for part in parts]), torch.cat([part.hit for part in parts]))

    def vector_gradient(self, texts: Texts, vectors: Tensor) -> tuple[Measured, Tensor]:
        """How the rows stand, and the (B, G) gradient of each row's loss with respect to its vector."""
        which = self._checked(texts, vectors, None)
        parts, gradients = [], []
        for start in range(0, len(texts), self.batch_size):
            part = slice(start, start + self.batch_size)
            leaf = vectors[part].detach().requires_grad_(True)
            before = self.forwards
            measured = self._run(texts[part], leaf, which[part])
            self.backwards += self.forwards - before
            gradients.append(torch.autograd.grad(measured.loss.sum(), leaf)[0])
            parts.append(measured)
        loss = torch.cat([part.loss.detach() for part in parts])
        return Measured(loss, torch.cat([part.hit for part in parts])), torch.cat(gradients)

    def token_gradient(
        self, texts: Texts, vectors: Tensor | None, starts: Sequence[int], length: int, rows: Sequence[int]
    ) -> tuple[Measured, Tensor]:
        """How the rows stand, and the (B, P, V) gradient of each row's loss with respect to the one-hot tokens at
        positions `starts[b]` to `starts[b] + P`, through the decoder and through a dynamic channel's encoder."""
        which = self._checked(texts, vectors, rows)
        parts, gradients = [], []
        for start in range(0, len(texts), self.batch_size):
            part = slice(start, start + self.batch_size)
            nudge = _Nudge(self, starts[part], length)
            before = self.forwards
            measured = self._run(texts[part], None if vectors is None else vectors[part], which[part], nudge)
            self.backwards += self.forwards - before
            gradients.append(nudge.one_hot_gradient(measured.loss.sum()))
            parts.append(measured)
        loss = torch.cat([part.loss.detach() for part in parts])
        return Measured(loss, torch.cat([part.hit for part in parts])), torch.cat(gradients)

    def _checked(self, texts: Texts, vectors: Tensor | None, rows: Sequence[int] | None) -> Sequence[int]:
        rows = range(len(self.targets)) if rows is None else rows
        if len(rows) != len(texts) or (vectors is not None and len(vectors) != len(texts)):
            given = "no" if vectors is None else len(vectors)
            raise ValueError(f"{len(texts)} texts, {given} vectors and {len(rows)} targets; give one of each per row")
        if vectors is not None and not isinstance(self.model, AttachedLM):
            raise ValueError("vectors were given for a model without a goal channel; leave them out")
        if not all(len(text) for text in texts):
            raise ValueError("a text is empty: the model needs a token to go on from")
        return rows

    def _run(self, texts: Texts, vectors: Tensor | None, rows: Sequence[int], nudge: _Nudge | None = None) -> Measured:
        layout = _lay_out(texts, [self.targets[row] for row in rows], self.window, self.lm.device)
        with _evaluating(self.model):
            terms = None if vectors is None else self._terms(layout, vectors, nudge)
            moved = None if nudge is None else nudge.of_decoder(layout)
            with _nudged(self.lm, moved):
                if isinstance(self.model, AttachedLM):
                    hidden = self.model.hidden(layout.ids, terms=terms, attention_mask=layout.mask)
                else:
                    out = self.lm.base_model(input_ids=layout.ids, attention_mask=layout.mask, use_cache=False)
                    hidden = out.last_hidden_state
            logits = self.lm.get_output_embeddings()(hidden[layout.row, layout.column]).float()
        self.forwards += len(layout.ids)
        losses = F.cross_entropy(logits, layout.label, reduction="none")
        totals = losses.new_zeros(len(texts)).index_add(0, layout.text, losses)
        wrong = (logits.argmax(dim=-1) != layout.label).float()
        hit = wrong.new_zeros(len(texts)).index_add(0, layout.text, wrong) == 0
        loss = totals / torch.bincount(layout.text, minlength=len(texts))
        if self.penalty is not None:
            paid = self.penalty(texts, vectors)
            loss, hit = loss + paid, hit & (paid.detach() <= 0)
        return Measured(loss, hit)

    def _terms(self, layout: _Layout, vectors: Tensor, nudge: _Nudge | None) -> Tensor:
        channel = self.model.channel
        goal = vectors if self.defence is None else self.defence(vectors)
        if channel.tracker is None:
            return channel.film.terms(goal[layout.text_of_row].unsqueeze(1))
        layer = channel.config.tracker_layer
        if nudge is None:
            hidden = self.model.goal_hidden(layout.full, layout.full_mask, layer=layer)
        else:
            hidden = self._read(layout, layer, nudge)
        fires = self.model.fires(layout.full, layout.full_mask)
        tracked, _ = channel.tracker.sequence(LatentState(goal=goal), hidden, fires)
        return channel.film.terms(tracked[layout.text_of_row[:, None], layout.places])

    def _read(self, layout: _Layout, layer: int, nudge: _Nudge) -> Tensor:
        """`goal_hidden` with gradients, which the encoder is normally read without."""
        reader = self.model.encoder if self.model.encoder is not None else self.lm
        with _nudged(reader, nudge.of_encoder(layout)), InForce(None):
            out = reader.base_model(
                input_ids=layout.full, attention_mask=layout.full_mask, output_hidden_states=True, use_cache=False
            )
        return out.hidden_states[layer].to(self.model.channel.film.projection.weight.dtype)


class _Layout(NamedTuple):
    """Texts and targets as the sequences that the decoder must be run on; all padded on the right."""

    full: Tensor  # (B, T): text and target, without the last token
    full_mask: Tensor
    ids: Tensor  # (R, C): what the window shows
    mask: Tensor
    text_of_row: Tensor  # (R,)
    places: Tensor  # (R, C): where in `full` each token stands
    row: Tensor  # (M,): row and column that predict each target token, the token, the text it belongs to
    column: Tensor
    label: Tensor
    text: Tensor


def _lay_out(texts: Texts, targets: Texts, window: int | None, device: torch.device) -> _Layout:
    full, rows, starts, owner = [], [], [], []
    scored: list[tuple[int, int, int, int]] = []
    for index, (text, target) in enumerate(zip(texts, targets, strict=True)):
        whole = [*text, *target[:-1]]
        full.append(whole)
        ends = [len(text) + k for k in range(len(target))]  # token k is predicted from what ends before ends[k]
        if window is None or len(whole) <= window:
            scored += [(len(rows), end - 1, token, index) for end, token in zip(ends, target, strict=True)]
            rows.append(whole)
            starts.append(0)
            owner.append(index)
            continue
        for end, token in zip(ends, target, strict=True):
            start = max(0, end - window)
            scored.append((len(rows), end - start - 1, token, index))
            rows.append(whole[start:end])
            starts.append(start)
            owner.append(index)
    full_ids, full_mask = pad_right(full, device=device)
    ids, mask = pad_right(rows, device=device)
    places = torch.tensor(starts, device=device)[:, None] + torch.arange(ids.shape[1], device=device)
    return _Layout(
        full_ids,
        full_mask,
        ids,
        mask,
        torch.tensor(owner, device=device),
        places.clamp(max=full_ids.shape[1] - 1),
        *torch.tensor(scored, device=device).unbind(dim=1),
    )


class _Nudge:
    """Zeros added to the embeddings of the attacked tokens, so that their gradient can be read off.

    The gradient of a one-hot token is that of its embedding times the table. Adding, and not replacing the ids by
    embeddings, leaves the ids visible to a dynamic channel, which finds its triggers by them.
    """

    def __init__(self, objective: Objective, starts: Sequence[int], length: int) -> None:
        lm, model = objective.lm, objective.model
        self.positions = torch.tensor([[start + k for k in range(length)] for start in starts], device=lm.device)
        self.tables = [_table(lm)]
        if isinstance(model, AttachedLM) and model.channel is not None and model.channel.tracker is not None:
            self.tables.append(_table(lm if model.encoder is None else model.encoder))
        self.leaves = [
            table.new_zeros(*self.positions.shape, table.shape[1]).requires_grad_(True) for table in self.tables
        ]

    def of_decoder(self, layout: _Layout) -> Tensor:
        """(R, C, E) laid out as the windows."""
        return self._in_full(0, layout)[layout.text_of_row[:, None], layout.places] * layout.mask.unsqueeze(-1)

    def of_encoder(self, layout: _Layout) -> Tensor:
        """(B, T, E) laid out as the whole texts."""
        return self._in_full(1, layout)

    def _in_full(self, which: int, layout: _Layout) -> Tensor:
        leaf = self.leaves[which]
        rows = torch.arange(len(leaf), device=leaf.device).unsqueeze(1).expand_as(self.positions)
        zeros = leaf.new_zeros(*layout.full.shape, leaf.shape[-1])
        return zeros.index_put((rows, self.positions), leaf)

    def one_hot_gradient(self, loss: Tensor) -> Tensor:
        """(B, P, V) of a loss."""
        found = torch.autograd.grad(loss, self.leaves, allow_unused=True)
        parts = [
            gradient.float() @ table.float().T
            for gradient, table in zip(found, self.tables, strict=True)
            if gradient is not None
        ]
        size = min(part.shape[-1] for part in parts)
        return torch.stack([part[..., :size] for part in parts]).sum(dim=0)


@torch.no_grad()
def _table(lm: Any) -> Tensor:
    """(V, E) what the embedding gives for each token; not its weight, which some families scale."""
    embedding = lm.get_input_embeddings()
    return embedding(torch.arange(embedding.num_embeddings, device=lm.device))


@contextmanager
def _nudged(lm: Any, nudge: Tensor | None) -> Iterator[None]:
    if nudge is None:
        yield
        return
    handle = lm.get_input_embeddings().register_forward_hook(lambda module, args, output: output + nudge)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
