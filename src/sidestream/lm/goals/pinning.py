"""A pinned goal: its own keys and values, read once by the bare model and kept outside the window.

The goal stands at positions 0..n-1 and the text behind it, so that nothing has been lost while nothing has left the
window: the logits are those of the goal's text in front. Under `rolling`, as the text moves on, the goal's keys move
along (`Rotation`) and stand right before the oldest token that is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sidestream.channels import LatentState
from sidestream.channels.rotation import Rotation
from sidestream.lm.decoding.masks import attention_for, near, own_reach, positions_of
from sidestream.lm.models.blocks import CACHE_NAME, takes, text_config
from sidestream.lm.models.terms import InForce

COPIES = 1024
"""Under `rolling`, entries of a goal that one forward may hold, in the copies that its tokens see."""
_APART = 7
"""Positions between the two readings by which the rotation is found."""


class PinnedLayer(DynamicLayer):
    """Keys and values of the text seen so far, and before them, while a forward runs, those of the goal.

    Args:
        limit: W - 1, how many tokens of the text are kept; None for all.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.goal: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values; returns all that the new tokens may see, the goal's first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        goal, ahead = self.goal or (None, None), 0 if self.goal is None else self.goal[0].shape[-2]
        if self.goal is not None and not all(map(_fits, self.goal, (key_states, value_states))):
            raise ValueError(
                f"the pinned goal has entries of {tuple(self.goal[0].shape)} a block and the text of "
                f"{tuple(key_states.shape)}: another model read it"
            )
        keys = _joined(goal[0], self.keys, key_states)
        values = _joined(goal[1], self.values, value_states)
        first = ahead if self.limit is None else max(ahead, keys.shape[-2] - self.limit)
        self.keys, self.values = keys[..., first:, :], values[..., first:, :]
        return keys, values

    def get_seq_length(self) -> int:
        """Entries and tokens held."""
        held = self.keys.shape[-2] if self.is_initialized and self.keys.numel() else 0  # type: ignore[union-attr]
        return held + (0 if self.goal is None else self.goal[0].shape[-2])


def _fits(goal: Tensor, new: Tensor) -> bool:
    return goal.shape[1] == new.shape[1] and goal.shape[-1] == new.shape[-1]


def _joined(goal: Tensor | None, held: Tensor | None, new: Tensor) -> Tensor:
    text = [new] if held is None or held.dim() == 1 else [held, new]
    return torch.cat(text if goal is None else [goal, *text], dim=-2)


@contextmanager
def reading(lm: nn.Module) -> Iterator[None]:
    """Every channel closed and no dropout; with gradients only where the model itself trains."""
    training = [module for module in lm.modules() if module.training]
    for module in training:
        module.training = False
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in lm.parameters())
    try:
        with InForce(None), nullcontext() if learns else torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def read_entries(
    lm: PreTrainedModel, ids: Tensor, mask: Tensor, parts: Tensor | None = None, names: tuple[str, ...] = ()
) -> LatentState:
    """The state of B goals that are pinned.

    Args:
        lm: the bare model.
        ids: (B, M) tokens.
        mask: (B, M), 1 at tokens; padding on any side.
        parts: (B, M) which part of its goal a token belongs to; None for goals in one piece.
        names: of the parts.

    Raises:
        ValueError: a model that keeps something else than keys and values in every block.
    """
    mask = mask.to(torch.long)
    empty = (mask.sum(dim=1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"row {empty[0]} of the goal batch is empty: a goal needs at least one token")
    order = mask.argsort(dim=1, stable=True)  # padding to the left
    mask = mask.gather(1, order)
    ids = ids.gather(1, order) * mask
    parts = None if parts is None else parts.gather(1, order) * mask
    with reading(lm):
        keys, values = _keys_and_values(lm, ids, mask)
    return LatentState(keys=keys, values=values, entries=mask, entry_ids=ids, entry_parts=parts, part_names=names)


def in_front(lm: PreTrainedModel, state: LatentState, ids: Tensor, mask: Tensor | None) -> tuple[dict[str, Any], int]:
    """The goal's tokens in front of the text, for a forward without a cache: what is fed, and the columns to cut off.

    Raises:
        ValueError: entries whose tokens are not known.
    """
    if state.entry_ids is None or state.entries is None:
        raise ValueError("entries without their tokens need a cache; switch gradient checkpointing off")
    rows, ahead = ids.shape[0], state.entry_ids.shape[1]
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
    mask = torch.cat([state.entries.to(mask.dtype).expand(rows, -1), mask], dim=1)
    row = int(mask.sum(dim=1).argmax())
    check_room(lm, int(mask[row, :ahead].sum()), int(mask[row, ahead:].sum()))
    feed: dict[str, Any] = {"input_ids": torch.cat([state.entry_ids.expand(rows, -1), ids], 1), "attention_mask": mask}
    if takes(lm, "position_ids"):
        feed["position_ids"] = positions_of(mask)
    own = own_reach(text_config(lm))
    if own is not None:
        allowed = near(mask, mask.shape[1], mask.shape[1])
        feed["attention_mask"] = attention_for(text_config(lm), allowed, lm.dtype, ahead, reads=True)
    return feed, ahead


def _keys_and_values(lm: PreTrainedModel, ids: Tensor, mask: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """(B, L, H, M, K) and (B, L, H, M, J) of tokens whose first stands at position `first`."""
    cache = DynamicCache()  # without the configuration: no layer forgets
    feed: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, CACHE_NAME: cache, "use_cache": True}
    if takes(lm, "position_ids"):
        feed["position_ids"] = first + (mask.long().cumsum(1) - 1).clamp(min=0)
    if takes(lm, "logits_to_keep"):
        feed["logits_to_keep"] = 1
    config, name = text_config(lm), type(lm).__name__
    odd = {*(getattr(config, "layer_types", None) or [])} - {"full_attention", "sliding_attention"}
    refusal = (
        f"a goal cannot be pinned in {name}: not every block keeps the keys and values of every token "
        f"({', '.join(sorted(odd)) or 'recurrent, shared or compressed layers'}); attach a vector channel: "
        "attach(lm, goal=GoalConfig(...))"
    )
    if odd or getattr(lm, "_is_stateful", False):
        raise ValueError(refusal)
    try:
        lm(**feed)
    except (ValueError, TypeError, AttributeError, IndexError) as error:  # a model with a cache of its own kind
        raise ValueError(refusal) from error
    layers: list[Any] = list(cache.layers)
    depth = config.num_hidden_layers
    shapes = {tuple(layer.keys.shape) for layer in layers if isinstance(getattr(layer, "keys", None), Tensor)}
    whole = len(layers) == depth and all(type(layer) is DynamicLayer and layer.is_initialized for layer in layers)
    if not whole or len(shapes) != 1 or layers[0].keys.shape[-2] != ids.shape[1]:
        raise ValueError(refusal)
    return torch.stack([layer.keys for layer in layers], 1), torch.stack([layer.values for layer in layers], 1)


def find_rotation(lm: PreTrainedModel) -> Rotation:
    """How this model's positions turn its keys: found in its own tables and checked on keys that it computes.

    Raises:
        ValueError: no rotation explains the model's keys, or one that changes with the length of the text.
    """
    config, name = text_config(lm), type(lm).__name__
    ways = "use Window(policy='reindex')"
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {str(part.get("rope_type")) for part in (settings, *settings.values()) if isinstance(part, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise ValueError(f"{name} has rotary positions that change with the length of the text; {ways}")
    ids = torch.arange(6, device=lm.device)[None] % config.vocab_size
    mask = torch.ones_like(ids)
    with torch.no_grad(), reading(lm):
        here, still = _keys_and_values(lm, ids, mask)
        there, moved = _keys_and_values(lm, ids, mask, first=_APART)
    by, size = torch.tensor([_APART], device=lm.device), here.shape[-1]
    allowed = 5e-2 if lm.dtype in (torch.float16, torch.bfloat16) else 1e-3
    unmoved = bool((still - moved).abs().max() <= allowed * still.abs().max())  # DeepSeek keeps positions in them
    best: list[Any] | None = None
    for count, tables in _tables(lm, size).items():
        for start in {0, size - 2 * count}:
            for interleaved in (False, True):
                found = []
                for block in range(here.shape[1]):
                    near, far = here[:, block : block + 1].float(), there[:, block : block + 1].float()
                    scale = far.abs().max().clamp(min=1e-6)
                    for table in (torch.zeros_like(tables[0]), *tables):
                        turn = Rotation(frequencies=table[None], start=start, interleaved=interleaved)
                        found.append((float((turn.turn(near, by) - far).abs().max() / scale), block, table))
                chosen = [min((e for e in found if e[1] == b), key=lambda e: e[0]) for b in range(here.shape[1])]
                worst = max(error for error, _, _ in chosen)
                if best is None or worst < best[0]:
                    best = [worst, torch.stack([table for _, _, table in chosen]), start, interleaved]
    if best is None or best[0] > allowed or not unmoved:
        raise ValueError(f"the keys of {name} do not turn with their positions in a way known here; {ways}")
    return Rotation(frequencies=best[1], start=best[2], interleaved=best[3])


def _tables(lm: PreTrainedModel, size: int) -> dict[int, list[Tensor]]:
    """Frequencies that the model holds, by how many there are, and those of the plain scheme (GPT-J holds none)."""
    found: dict[int, list[Tensor]] = {}
    for name, buffer in lm.named_buffers():
        last = name.rsplit(".", 1)[-1]
        if last.endswith("inv_freq") and "original" not in last and buffer.dim() == 1 and 2 * len(buffer) <= size:
            found.setdefault(len(buffer), []).append(buffer.double())
    width = getattr(text_config(lm), "rotary_dim", None)
    if isinstance(width, int) and 0 < width <= size:
        steps = torch.arange(0, width, 2, device=lm.device).double()
        found.setdefault(width // 2, []).append(10000.0 ** (-steps / width))
    return found


def check_room(lm: PreTrainedModel, goal: int, text: int | None) -> None:
    """Raises `ValueError` where a goal of so many entries leaves too few positions for the text.

    Args:
        goal: n.
        text: W; None for no window.
    """
    config, name = text_config(lm), type(lm).__name__
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is not None and goal + (1 if text is None else text) > limit:
        rest = "no token of the text" if text is None else f"a window of {text}"
        raise ValueError(
            f"a pinned goal of {goal} tokens and {rest} need more than the {limit} positions that {name} was made for; "
            "shorten the goal or the window"
        )


def check_text(config: PretrainedConfig, entries: int, mask: Tensor) -> None:
    """Raises `ValueError` where a model could not see its goal through text like this.

    Args:
        config: of the model's text decoder.
        entries: n, of the goal.
        mask: (B, columns) of the text held, 0 at padding.
    """
    local = getattr(config, "window_size", None) if "local" in (getattr(config, "attention_layers", None) or []) else 0
    if local and entries + mask.shape[1] > local:  # GPT-Neo
        raise ValueError(
            f"{config.model_type} has layers that see {local} tokens, whatever the mask says: the goal ({entries} "
            f"tokens) and the text in view ({mask.shape[1]}) must fit into them together"
        )
    if config.model_type == "mpt" and not bool(mask.bool().all()):
        raise ValueError(
            "MPT counts distances over padding, which would part the goal from the text: give rows of one length"
        )
