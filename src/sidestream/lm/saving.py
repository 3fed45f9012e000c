"""Channel files: weights of channel and stream in safetensors, settings and the base model's fingerprint in JSON.

Beside them, where there are any: `adapter/`, LoRA weights in PEFT's format, and `model/`, a base model that was trained
with the channel.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sidestream.channels import GoalConfig, StreamConfig
from sidestream.lm.base import has_lora, load_base, load_lora, load_tokenizer, save_lora

if TYPE_CHECKING:
    from sidestream.lm.attach import AttachedLM

WEIGHTS_FILE = "channel.safetensors"
CONFIG_FILE = "sidestream.json"
ADAPTER_FOLDER = "adapter"
MODEL_FOLDER = "model"
_SAMPLES = 256
_FORMAT = 1


def fingerprint(model: nn.Module) -> str:
    """sha256 over names, shapes and evenly spaced values of all weights: cheap on any size, moved by any training.

    Values are rounded to bfloat16, so that a base trained in float32 is known again when it is served in bfloat16.
    LoRA adapters in a model are not part of its base.
    """
    digest = hashlib.sha256()
    weights = {n.replace(".base_layer.", "."): t for n, t in model.state_dict().items() if ".lora_" not in n}
    for name, tensor in sorted(weights.items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def save_channel(model: AttachedLM, directory: Path) -> None:
    """Write both files into `directory`, made if missing. Until both are complete, what was there stays.

    A base model that carries LoRA adapters has them saved in `adapter/`. One whose weights are in `model/` already is
    loaded from there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    adapted = has_lora(model.lm)
    if adapted:
        save_lora(model.lm, directory / ADAPTER_FOLDER)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in _weights(model).items()}
    temporary = {name: directory / f"{name}.partial" for name in (WEIGHTS_FILE, CONFIG_FILE)}
    try:
        save_file(weights, temporary[WEIGHTS_FILE])
        config = {
            "format": _FORMAT,
            "goal": None if model.channel is None else asdict(model.channel.config),
            "stream": None if model.stream is None else asdict(model.stream.config),
            "sites": model.sites,
            "base": {
                "class": type(model.lm).__name__,
                "name_or_path": model.lm.config.name_or_path,
                "fingerprint": fingerprint(model.lm),
                "inside": (directory / MODEL_FOLDER).is_dir(),
            },
            "adapter": adapted,
            "encoder": None if model.encoder is None else {"fingerprint": fingerprint(model.encoder)},
            "weights_sha256": _sha256(temporary[WEIGHTS_FILE]),
            "transformers": transformers.__version__,
        }
        temporary[CONFIG_FILE].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, path in temporary.items():
            path.replace(directory / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def load(
    directory: str | Path,
    lm: PreTrainedModel | None = None,
    *,
    encoder: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> AttachedLM:
    """Attach a saved channel, stream or both.

    Args:
        directory: what `save_pretrained` or `sidestream train` wrote, or the hub id of a repository that holds it.
        lm: the base model it was trained on; None loads the model named in the file, whatever its class.
        encoder: E_base, where the channel was trained with one of its own.
        tokenizer: lets goals be given as text; None takes the base model's, where that is loaded here and has one.

    Raises:
        ValueError: files missing or damaged, or a base model or encoder other than the one trained on.
    """
    from sidestream.lm.attach import attach

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
        if tokenizer is None:
            with suppress(ValueError):
                tokenizer = load_tokenizer(name)
    if fingerprint(lm) != base["fingerprint"]:
        raise ValueError(
            f"{directory} was trained on another base: {base['class']} {base['name_or_path']!r} with other weights "
            f"than this {type(lm).__name__}; load it onto the model it was trained on"
        )
    if (config["encoder"] is None) != (encoder is None):
        wanted = "a separate encoder; pass encoder=" if encoder is None else "no separate encoder; leave encoder out"
        raise ValueError(f"{directory} was trained with {wanted}")
    if encoder is not None and fingerprint(encoder) != config["encoder"]["fingerprint"]:
        raise ValueError(f"{directory} was trained with another encoder than the one given")
    if config["adapter"]:
        load_lora(lm, directory / ADAPTER_FOLDER)
    try:
        sites = None if goal is None else config["sites"]
        model = attach(lm, goal=goal, stream=stream, encoder=encoder, tokenizer=tokenizer, sites=sites)
    except ValueError as error:
        raise ValueError(f"{directory} cannot be attached: {error}") from error
    own = _weights(model)
    expected = {name: tensor.shape for name, tensor in own.items()}
    if {name: tensor.shape for name, tensor in weights.items()} != expected:
        model.detach()
        raise ValueError(f"{directory / WEIGHTS_FILE} does not hold the weights its {CONFIG_FILE} describes")
    for name, tensor in own.items():
        tensor.copy_(weights[name])  # what state_dict hands out shares the module's memory
    return model


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


def _weights(model: AttachedLM) -> dict[str, torch.Tensor]:
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
            "inside": config["base"].get("inside") is True
        }
        config["adapter"] = config.get("adapter") is True
        config["encoder"] = config["encoder"] and {"fingerprint": config["encoder"]["fingerprint"]}
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


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
