"""Channel files: weights of channel and stream in safetensors, settings and the base model's fingerprint in JSON.

Beside them, where there are any: `adapter/`, adapters in PEFT's format, and `model/`, a base model that was trained
with the channel. A checkpoint of Trainer's also holds `model.safetensors`: all that trains, under the attached model's
names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sidestream.channels import GoalConfig, StreamConfig
from sidestream.lm.models.adapters import (
    ADAPTER,
    active_adapters,
    adapter_names,
    base_weights,
    load_adapters,
    save_adapters,
)
from sidestream.lm.models.adapters import innermost as without_adapters
from sidestream.lm.models.base import load_base, load_tokenizer
from sidestream.lm.models.fingerprint import difference, fingerprint, sampled

WEIGHTS_FILE = "channel.safetensors"
CONFIG_FILE = "sidestream.json"
ADAPTER_FOLDER = "adapter"
MODEL_FOLDER = "model"
CHECKPOINT_FILE = "model.safetensors"
_FORMAT = 1


def save_channel(model: Any, directory: Path) -> None:
    """Write both files into `directory`, made if missing. Until both are complete, what was there stays.

    A base model that carries adapters has them saved in `adapter/`. One whose weights are in `model/` already is loaded
    from there.

    Raises:
        ValueError: an adapter that would not come back from a file as it is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    adapters = adapter_names(model.lm)
    if adapters:
        save_adapters(model.lm, directory / ADAPTER_FOLDER)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in _weights(model).items()}
    temporary = {name: directory / f"{name}.partial" for name in (WEIGHTS_FILE, CONFIG_FILE)}
    try:
        save_file(weights, temporary[WEIGHTS_FILE])
        config = {
            "format": _FORMAT,
            "goal": None if model.channel is None else asdict(model.channel.config),
            "stream": None if model.stream is None else asdict(model.stream.config),
            "pinned": model.pinned,
            "sites": model.sites,
            "base": {
                "class": type(model.lm).__name__,
                "name_or_path": model.lm.config.name_or_path,
                "inside": (directory / MODEL_FOLDER).is_dir(),
                **_identity(model.lm),
            },
            "adapter": bool(adapters),  # for earlier versions, which know one adapter, of PEFT's default name
            "adapters": {"names": adapters, "active": active_adapters(model.lm)},
            "encoder": None if model.encoder is None else _identity(model.encoder),
            "weights_sha256": _sha256(temporary[WEIGHTS_FILE]),
            "transformers": transformers.__version__,
        }
        temporary[CONFIG_FILE].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, path in temporary.items():
            path.replace(directory / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def save_checkpoint(model: Any, directory: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
    """What Trainer's checkpoints hold: the files of `save_channel`, the base in `model/` where it trains itself, and in
    `model.safetensors` all that trains, for `resume_from_checkpoint`.

    Args:
        state_dict: of the attached model, where its own is sharded.
    """
    directory.mkdir(parents=True, exist_ok=True)
    whole = model.state_dict() if state_dict is None else state_dict
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}  # tied weights once
    if any(tensor.requires_grad for tensor in base_weights(model.lm, keep_vars=True).values()):
        _save_base(model, directory / MODEL_FOLDER, whole)
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        trained |= {name for name in whole if name.startswith("lm.") and name not in parameters}  # buffers
    kept = {name: whole[name] for name in whole if name in trained or name.startswith(("channel.", "stream."))}
    kept = {name: tensor.detach().contiguous().cpu() for name, tensor in kept.items()}
    save_file(kept, directory / CHECKPOINT_FILE, metadata={"format": "pt"})
    save_channel(model, directory)


def _save_base(model: Any, directory: Path, whole: dict[str, torch.Tensor]) -> None:
    """The base alone, for `from_pretrained`: adapters, which are saved beside it, left out."""
    lm: Any = model.lm
    own = {name.removeprefix("lm."): tensor for name, tensor in whole.items() if name.startswith("lm.")}
    adapted = getattr(lm, "_hf_peft_config_loaded", False)
    lm._hf_peft_config_loaded = False  # else transformers would write the adapter and no base
    try:
        lm.save_pretrained(directory, state_dict=base_weights(lm, own))
    finally:
        lm._hf_peft_config_loaded = adapted
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(directory)


class Saved(NamedTuple):
    """What a folder holds, and the models it goes onto."""

    directory: Path
    lm: Any
    """The base model, with the adapters that were saved beside the channel."""
    tokenizer: PreTrainedTokenizerBase | None
    goal: GoalConfig | None
    stream: StreamConfig | None
    sites: list[str] | None
    pinned: bool
    weights: dict[str, torch.Tensor]


def read_saved(
    directory: str | Path,
    lm: PreTrainedModel | None,
    *,
    encoder: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    any_base: bool,
) -> Saved:
    """Read a folder and see that it belongs to these models; arguments and errors as for `sidestream.load`."""
    directory = _local(directory)
    config, goal, stream, weights = _read(directory)
    base = config["base"]
    if lm is None:
        name = str(directory / MODEL_FOLDER) if base["inside"] else base["name_or_path"]
        if not name:
            raise ValueError(f"{directory} does not name its base model ({base['class']}); pass it: load(dir, lm)")
        try:
            lm = load_base(name)
        except ValueError as error:
            raise ValueError(f"cannot load the base model {name!r}; pass it: load(dir, lm) ({error})") from error
        for place in (name, directory):  # Trainer puts its own beside the channel
            with suppress(ValueError):
                tokenizer = load_tokenizer(place) if tokenizer is None else tokenizer
    inner = without_adapters(lm)
    why = _another(base, inner)
    if why is not None:
        told = (
            f"{directory} was trained on another base: {base['class']} {base['name_or_path']!r} with other weights "
            f"than this {type(inner).__name__} ({why})"
        )
        if not any_base:
            raise ValueError(f"{told}; load it onto the model it was trained on")
        warnings.warn(f"{told}; loaded all the same, as any_base=True asks", stacklevel=2)
    if (config["encoder"] is None) != (encoder is None):
        wanted = "a separate encoder; pass encoder=" if encoder is None else "no separate encoder; leave encoder out"
        raise ValueError(f"{directory} was trained with {wanted}")
    if encoder is not None and _another(config["encoder"], encoder) is not None:
        raise ValueError(f"{directory} was trained with another encoder than the one given")
    if config["adapter"]:
        lm = load_adapters(inner, directory / ADAPTER_FOLDER, **config["adapters"])
    sites = None if goal is None else config["sites"]
    return Saved(directory, lm, tokenizer, goal, stream, sites, config["pinned"], weights)


def fill(model: Any, saved: Saved) -> None:
    """Put saved weights into a model attached by the saved settings.

    Raises:
        ValueError: weights of other names or shapes.
    """
    own = _weights(model)
    expected = {name: tensor.shape for name, tensor in own.items()}
    if {name: tensor.shape for name, tensor in saved.weights.items()} != expected:
        model.detach()
        raise ValueError(f"{saved.directory / WEIGHTS_FILE} does not hold the weights its {CONFIG_FILE} describes")
    for name, tensor in own.items():
        tensor.copy_(saved.weights[name])  # what state_dict hands out shares the module's memory


def is_saved(name: str | Path) -> bool:
    """Whether this names a saved channel, in a folder or on the hub, and not a base model."""
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        return (Path(name) / CONFIG_FILE).is_file()
    try:
        hf_hub_download(str(name), CONFIG_FILE)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return False
    return True


def _identity(lm: nn.Module) -> dict[str, Any]:
    """What a file says of a model to know it again; the hash is for earlier versions."""
    return {"fingerprint": fingerprint(lm), "weights": sampled(lm)}


def _another(kept: dict[str, Any], lm: nn.Module) -> str | None:
    """How a model is not the one a file was made with; None where it is. Earlier versions' files hold a hash alone."""
    if kept["weights"] is not None:
        return difference(kept["weights"], lm)
    return None if fingerprint(lm) == kept["fingerprint"] else "by the fingerprint"


def _local(directory: str | Path) -> Path:
    """The folder itself, or a copy of the hub's repository of that name."""
    if Path(directory).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(directory)):
        return Path(directory)
    try:
        return Path(snapshot_download(str(directory)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(
            f"{directory} holds no {CONFIG_FILE}: no such folder, and the hub's {directory} cannot be had "
            f"({type(error).__name__})"
        ) from None


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights of the channel by their names, and those of the stream under `stream.`."""
    channel = {} if model.channel is None else model.channel.state_dict()
    stream = {} if model.stream is None else model.stream.state_dict(prefix="stream.")
    return {**channel, **stream}


def _read(
    directory: Path,
) -> tuple[dict[str, Any], GoalConfig | None, StreamConfig | None, dict[str, torch.Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} holds no {name}: not a saved channel")
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        if config["format"] != _FORMAT:
            raise ValueError(f"format {config['format']!r}, this version reads {_FORMAT}")
        goal = stream = None
        if config["goal"] is not None:
            goal = GoalConfig(**{**config["goal"], "trigger_ids": tuple(config["goal"]["trigger_ids"])})
        if config.get("stream") is not None:  # files of earlier versions know no stream
            stream = StreamConfig(**{name: _tuples(value) for name, value in config["stream"].items()})
        config["sites"] = list(config["sites"])
        config["base"] = {name: config["base"][name] for name in ("class", "name_or_path", "fingerprint")} | {
            "inside": config["base"].get("inside") is True,
            "weights": _checked_weights(config["base"].get("weights")),
        }
        nothing = config["goal"] is None and config.get("stream") is None
        config["pinned"] = config.get("pinned", nothing) is True  # files of earlier versions do not say
        config["adapter"] = config.get("adapter") is True
        adapters = config.get("adapters") or {"names": [ADAPTER], "active": [ADAPTER]}
        config["adapters"] = {name: [str(each) for each in adapters[name]] for name in ("names", "active")}
        config["encoder"] = config["encoder"] and {
            "fingerprint": config["encoder"]["fingerprint"],
            "weights": _checked_weights(config["encoder"].get("weights")),
        }
        digest = config["weights_sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / CONFIG_FILE} is damaged: {error}") from error
    if _sha256(directory / WEIGHTS_FILE) != digest:
        raise ValueError(
            f"{directory / WEIGHTS_FILE} is corrupt, truncated or from another save than its {CONFIG_FILE}"
        )
    try:
        return config, goal, stream, load_file(directory / WEIGHTS_FILE)
    except SafetensorError as error:
        raise ValueError(f"{directory / WEIGHTS_FILE} is not a safetensors file: {error}") from error


def _checked_weights(weights: Any) -> dict[str, Any] | None:
    """The samples of a file, each entry whole."""
    if weights is None:
        return None
    for about in weights.values():
        if len(base64.b64decode(about["values"], validate=True)) % 4 or not isinstance(about["tokens"], bool):
            raise ValueError("the samples of the base are not whole")
        if not all(isinstance(size, int) for size in about["shape"]):
            raise ValueError("a shape of the base is no shape")
    return weights


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
