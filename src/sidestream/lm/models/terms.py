"""The FiLM terms in force while a forward runs: set around it, applied by a hook, restored for a recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sidestream.channels import modulate

# (B, N, L, 2, D), or None while the channel is closed. A context variable, not a module attribute: it is scoped to the
# call and separate per thread, so interleaved rollouts and a frozen reader of the same model do not see each other's.
_TERMS: ContextVar[Tensor | None] = ContextVar("sidestream_terms", default=None)


class InForce:
    """Context in which these terms are in force. Not a generator: a backward that runs twice enters it twice."""

    def __init__(self, terms: Tensor | None) -> None:
        self.terms = terms

    def __enter__(self) -> None:
        self.token = _TERMS.set(self.terms)

    def __exit__(self, *_: object) -> None:
        _TERMS.reset(self.token)


def put_in_force(terms: Tensor | None) -> Token:
    """For hooks, which cannot hold a context open; `lift` ends it."""
    return _TERMS.set(terms)


def lift(token: Token) -> None:
    """End what `put_in_force` began."""
    _TERMS.reset(token)


def film_hook(block: int, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Pre-hook of one block's MLP: modulate its input, its first argument."""
    terms = _TERMS.get()
    if terms is None:
        return None
    if args:
        return (modulate(args[0], terms[:, :, block]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: modulate(kwargs[name], terms[:, :, block])}


class Hook(partial):
    """A hook of an attached model on the model it wraps; a copy of that model alone would keep it by half.

    Args:
        owner: the attached model.
        function: what the hook calls.
        *first: its first arguments.
    """

    owner: Any

    def __new__(cls, owner: nn.Module, function: Any, *first: Any) -> Hook:
        made = super().__new__(cls, function, *first)
        made.owner = owner
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        owner = memo.get(id(self.owner))
        if owner is None and self.func is film_hook:
            return Hook(self.owner, self.func, *self.args)  # PEFT copies layers; `FilmHooks` cleans up after it
        if owner is None:
            raise ValueError(
                "this model carries a channel, and a copy of it alone would lose it: copy.deepcopy(model) copies the "
                "attached model, model.detach() gives the bare one"
            )
        return Hook(owner, self.func, *(owner if value is self.owner else value for value in self.args))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "this model carries a channel, which a pickle would lose: use save_pretrained or state_dict(), or "
            "model.detach() first"
        )


class FilmHooks:
    """The hooks that modulate, one a site, each on whatever module stands there.

    PEFT puts a wrapper in a layer's place, merging puts the layer back, and both read the layer's input: the hook moves
    with the place, so that an adapter put in later reads what one put in earlier reads.

    Args:
        owner: the attached model.
        lm: the model it wraps.
        sites: one module name per block.
    """

    def __init__(self, owner: nn.Module, lm: nn.Module, sites: Sequence[str]) -> None:
        self._owner = owner
        paths = [site.rpartition(".") for site in sites]
        self._places = [(lm.get_submodule(parent), name) for parent, _, name in paths]
        self._seated: list[nn.Module | None] = [None] * len(sites)
        self._handles: list[Any] = [None] * len(sites)
        self.seat()

    def seat(self, *_: object) -> None:
        """Move the hooks whose place has got another module. Cheap where none has."""
        for block, (parent, name) in enumerate(self._places):
            module = parent._modules[name]
            if module is not self._seated[block] and module is not None:
                self._move(block, module)

    def _move(self, block: int, module: nn.Module) -> None:
        if self._seated[block] is not None:
            self._handles[block].remove()
            for inner in module.modules():  # a wrapper may hold a copy of the layer, made with its hook
                for key, hook in list(inner._forward_pre_hooks.items()):
                    if getattr(hook, "func", None) is film_hook:
                        del inner._forward_pre_hooks[key]
                        inner._forward_pre_hooks_with_kwargs.pop(key, None)
        self._seated[block] = module
        self._handles[block] = module.register_forward_pre_hook(Hook(self._owner, film_hook, block), with_kwargs=True)

    def remove(self) -> None:
        """Take all of them off."""
        for handle in self._handles:
            handle.remove()


def enable_checkpointing(lm: PreTrainedModel, asked: dict[str, Any] | None, **kwargs: Any) -> None:
    """Switch on checkpointing whose recomputation sees the terms that its forward saw.

    Raises:
        ValueError: reentrant checkpointing was asked for, which cannot carry a state.
    """
    settings = dict(asked or {})
    if settings.pop("use_reentrant", False):
        raise ValueError("use_reentrant=True recomputes without the latent state (wrong gradients); use False")
    settings.update(use_reentrant=False, context_fn=_contexts)
    # transformers 5.24 renamed gradient checkpointing to activation checkpointing.
    if hasattr(lm, "activation_checkpointing_enable"):
        lm.activation_checkpointing_enable(activation_checkpointing_kwargs=settings, **kwargs)
    else:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings, **kwargs)


def disable_checkpointing(lm: PreTrainedModel) -> None:
    """Switch it off."""
    if hasattr(lm, "activation_checkpointing_disable"):
        lm.activation_checkpointing_disable()
    else:
        lm.gradient_checkpointing_disable()


def checkpoints(lm: PreTrainedModel) -> bool:
    """Whether the next forward keeps no activations, and so no cache."""
    on = any(getattr(module, "gradient_checkpointing", False) is True for module in lm.modules())
    return on and lm.training and torch.is_grad_enabled()


def check_checkpointing(lm: PreTrainedModel, cache: Any) -> None:
    """Refuse what would give wrong gradients without an error.

    Raises:
        ValueError: checkpointing that does not restore the terms, or checkpointing with a cache, which it drops.
    """
    if not (lm.training and torch.is_grad_enabled()):
        return
    for module in lm.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            if cache is not None:
                raise ValueError("gradient checkpointing drops the cache and its state; switch one of them off")
            function = getattr(module, "_gradient_checkpointing_func", None)
            if getattr(function, "keywords", {}).get("context_fn") is not _contexts:
                raise ValueError(
                    "gradient checkpointing was switched on past the channel and would give wrong gradients; call "
                    "gradient_checkpointing_enable on the attached model"
                )


def _contexts() -> tuple[Any, InForce]:
    return nullcontext(), InForce(_TERMS.get())
