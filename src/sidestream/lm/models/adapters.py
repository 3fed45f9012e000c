"""PEFT adapters in a base model: put in, found, told apart from the base's own weights, saved and loaded.

Adapters act inside the base's layers, so a channel goes onto the innermost model and works with any of them, whichever
came first. What works outside those layers, such as prefix tuning, which moves positions, is refused.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sidestream.lm.models.blocks import decoder_blocks

ADAPTER = "default"
_WEIGHTS = "adapter_model.safetensors"
_SETTINGS = "adapter_config.json"
_INNER = ("base_layer", "original_module")
_OUTSIDE = {"XLORA", "POLY", "SHADOW", "ADAPTION_PROMPT"}
"""PEFT types that need more than the base's own layers: a second pass, task ids, another attention."""
_SAVED = (
    "LORA ADALORA BOFT C3A DELORA FOURIERFT HIRA HRA IA3 LN_TUNING LOHA LOKR OFT RANDLORA VERA".split()  # noqa: SIM905
)
"""PEFT types that come back from a file as they were; the tests try each."""
_REWRITING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA's ways to begin that change the base's own weights."""


def innermost(model: Any) -> PreTrainedModel:
    """The causal LM inside a `PeftModel`, or the model itself.

    Raises:
        ValueError: adapters that act outside the model's layers.
    """
    peft = sys.modules.get("peft")
    lm = model
    if peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        outer: Any = model
        for config in outer.peft_config.values():
            if config.is_prompt_learning:
                raise ValueError(
                    f"a {_kind(config)} adapter puts tokens of its own before the text, which a goal channel cannot "
                    "carry; use one that acts inside the layers, such as LoRA or IA3"
                )
        lm = outer.base_model.model
    for config in getattr(lm, "peft_config", {}).values():
        if _kind(config) in _OUTSIDE or getattr(config, "alora_invocation_tokens", None):
            kind = "activated LoRA" if _kind(config) == "LORA" else _kind(config)
            raise ValueError(
                f"a {kind} adapter acts through PEFT's own forward, which a goal channel goes past; use one that acts "
                "inside the layers, such as LoRA or IA3"
            )
    return lm


def mixed_rows(given: Any, names: list[str], beams: int | None = None) -> AbstractContextManager:
    """Context in which each row has an adapter of its own.

    Args:
        given: what was handed to `attach`.
        names: one adapter per row.
        beams: rows that `generate` makes of each.

    Raises:
        ValueError: that was no `PeftModel`, which alone can do this.
    """
    if not hasattr(given, "_enable_peft_forward_hooks"):
        raise ValueError("adapter_names needs the PeftModel: attach(peft_model, ...), or set one adapter for all rows")
    more = {} if beams is None else {"num_beams": beams}
    return given._enable_peft_forward_hooks(adapter_names=names, **more)


def add_lora(lm: PreTrainedModel, *, rank: int, first_block: int) -> None:
    """Put trainable LoRA adapters into every linear layer of the blocks from `first_block` on (needs `peft`).

    Blocks below stay as they are: a goal encoder that pools an early layer reads with the base model's own weights.

    Raises:
        ValueError: the package is missing, or there is nothing to adapt.
    """
    name, blocks = decoder_blocks(lm)
    found = {
        f"{name}.{index}.{inner}": module
        for index, block in enumerate(blocks)
        if index >= first_block
        for inner, module in block.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    if not found:
        raise ValueError(f"{type(lm).__name__} has no linear layer from block {first_block} on, for LoRA to adapt")
    peft = _peft()
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(found),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in found.values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=lm.config.name_or_path,
    )
    # Not `lm.add_adapter`: what transformers asks of the version of peft moves faster than what peft does here.
    peft.inject_adapter_in_model(settings, lm, ADAPTER)


def adapter_names(lm: nn.Module) -> list[str]:
    """Names of the adapters in a model; none once they are merged and unloaded."""
    return sorted(getattr(lm, "peft_config", {})) if any(True for _ in _wrappers(lm)) else []


def base_weights(
    model: nn.Module, state_dict: dict[str, Tensor] | None = None, *, keep_vars: bool = False
) -> dict[str, Tensor]:
    """The state dict as it was before adapters came: their weights left out, the base's under its own names."""
    state_dict = model.state_dict(keep_vars=keep_vars) if state_dict is None else state_dict
    wrappers = dict(_wrappers(model))
    found = {}
    for name, tensor in state_dict.items():
        kept: list[str] = []
        own, path = True, ""
        for part in name.split("."):
            inner = wrappers.get(path)
            path = f"{path}.{part}".strip(".")
            if inner is None:
                kept.append(part)
            elif part != inner:
                own = False
                break
        if own:
            found[".".join(kept)] = tensor
    return found


def _wrappers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules of PEFT's that hold one of the base's: name, and the attribute that holds it."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            inner = next((inner for inner in _INNER if isinstance(getattr(module, inner, None), nn.Module)), None)
            if inner is not None:
                yield name, inner


def save_adapters(lm: PreTrainedModel, directory: Path) -> None:
    """Write every adapter in PEFT's own format, `adapter_config.json` and safetensors.

    A single adapter is in `directory` itself, several are in a folder each by their names.

    Raises:
        ValueError: an adapter that would not come back from a file as it is.
    """
    names = adapter_names(lm)
    peft = _peft()
    for name in names:
        _check_savable(lm, name, lm.peft_config[name])  # type: ignore[attr-defined, index]
    shell = _as_peft_model(lm)
    if directory.is_dir():  # of an earlier save, with other names
        for stale in (path for path in directory.iterdir() if (path / _SETTINGS).is_file()):
            shutil.rmtree(stale)
    for name in names:
        folder = directory if len(names) == 1 else directory / name
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet():
            found = peft.get_peft_model_state_dict(
                shell, shell.state_dict(), adapter_name=name, save_embedding_layers=False
            )
        # Adapters share tensors (VeRA's projections), which safetensors does not.
        kept = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in found.items()}
        save_file(kept, folder / _WEIGHTS, metadata={"format": "pt"})
        lm.peft_config[name].save_pretrained(str(folder))  # type: ignore[attr-defined, index]


def _check_savable(lm: PreTrainedModel, name: str, config: Any) -> None:
    told = f"the adapter {name!r} cannot be saved with the channel"
    if _kind(config) not in _SAVED:
        raise ValueError(f"{told}: {_kind(config)} is none of {', '.join(_SAVED)}; merge it into the base")
    if getattr(config, "bias", "none") not in ("none", False):
        raise ValueError(f"{told}: bias={config.bias!r} trains weights of the base itself; use bias='none'")
    begun = getattr(config, "init_lora_weights", None)
    if isinstance(begun, str) and begun.lower().startswith(_REWRITING):
        raise ValueError(f"{told}: init_lora_weights={begun!r} changes the base's own weights")
    if any(getattr(module, "merged", False) is True for module in lm.modules()):
        raise ValueError(
            f"{told} while it is merged into the base; call unmerge_adapter() first, or merge_and_unload()"
        )
    if "." in name or "/" in name:
        raise ValueError(f"{told}: its name is not one of a folder")


def _as_peft_model(lm: PreTrainedModel) -> nn.Module:
    """What PEFT's own functions look at, where the `PeftModel` is gone: its names, its settings, what layers share."""
    tuner, shell = nn.Module(), nn.Module()
    tuner.model = lm
    for module in lm.modules():
        for shared in ("vera_A", "vera_B"):
            if isinstance(getattr(module, shared, None), nn.Module):
                setattr(tuner, shared, getattr(module, shared))
    shell.base_model = tuner
    shell.peft_config = lm.peft_config  # type: ignore[assignment]
    return shell


def load_adapters(lm: PreTrainedModel, directory: Path, names: list[str], active: list[str]) -> Any:
    """Put saved adapters in, frozen, and give the `PeftModel` that chooses among them.

    Args:
        names: their names.
        active: those in force.

    Raises:
        ValueError: the package `peft` is missing, the model has adapters already, or the folder holds none of its own.
    """
    peft = _peft()
    if adapter_names(lm):
        raise ValueError(
            f"the model already carries the adapters {adapter_names(lm)}, and {directory} holds those that the channel "
            "was trained with; load onto the plain base"
        )
    folders = {name: directory if len(names) == 1 else directory / name for name in names}
    outer: Any = None
    try:
        with _quiet():
            for name, folder in folders.items():
                weights = load_file(folder / _WEIGHTS)
                if outer is None:
                    outer = peft.PeftModel.from_pretrained(lm, str(folder), adapter_name=name)
                else:
                    outer.load_adapter(str(folder), adapter_name=name)
                _check_loaded(lm, name, weights)
            if active and active != [names[0]]:
                outer.base_model.set_adapter(active if len(active) > 1 else active[0], inference_mode=True)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        told = str(error).strip().splitlines()
        raise ValueError(
            f"cannot load the adapter in {directory}: {told[0] if told else type(error).__name__}"
        ) from None
    return outer


def active_adapters(lm: nn.Module) -> list[str]:
    """Names of the adapters in force."""
    for module in lm.modules():
        if type(module).__module__.startswith("peft.") and hasattr(module, "active_adapters"):
            return [] if getattr(module, "disable_adapters", False) else list(module.active_adapters)  # type: ignore[arg-type]
    return []


def _check_loaded(lm: PreTrainedModel, name: str, weights: dict[str, Tensor]) -> None:
    """Every weight of the file is in the model, and in the precision it has in the file."""
    shell = _as_peft_model(lm)
    own = _peft().get_peft_model_state_dict(shell, shell.state_dict(), adapter_name=name, save_embedding_layers=False)
    if {key: tensor.shape for key, tensor in own.items()} != {key: tensor.shape for key, tensor in weights.items()}:
        raise ValueError(f"it does not fit {type(lm).__name__}")
    narrow = {tensor.dtype for tensor in weights.values()}
    if len(narrow) == 1 and own and narrow != {tensor.dtype for tensor in own.values()}:
        places = {tensor.data_ptr() for tensor in own.values()}
        for parameter in lm.parameters():
            if parameter.data_ptr() in places:
                parameter.data = parameter.data.to(next(iter(narrow)))


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT asks transformers 5.24 by names that this one is about to drop, and guesses at embeddings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _kind(config: Any) -> str:
    return getattr(config.peft_type, "value", str(config.peft_type))


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ValueError("LoRA needs the package peft: pip install 'sidestream[peft]'") from None
    return peft
