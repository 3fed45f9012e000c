"""Channel files: the channel's weights in safetensors, its settings and the base model's fingerprint in JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sidestream.channels import GoalConfig

if TYPE_CHECKING:
    from sidestream.lm.attach import AttachedLM

WEIGHTS_FILE = "channel.safetensors"
CONFIG_FILE = "sidestream.json"
_SAMPLES = 256


def fingerprint(model: nn.Module) -> str:
    """sha256 over names, shapes and evenly spaced values of all weights: cheap on any size, moved by any training."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(flat[::step].to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_channel(model: AttachedLM, directory: Path) -> None:
    """Write both files into `directory`, made if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in model.channel.state_dict().items()}
    config = {
        "format": 1,
        "goal": asdict(model.channel.config),
        "sites": model.sites,
        "base": {
            "class": type(model.lm).__name__,
            "name_or_path": model.lm.config.name_or_path,
            "fingerprint": fingerprint(model.lm),
        },
        "encoder": None if model.encoder is None else {"fingerprint": fingerprint(model.encoder)},
        "transformers": transformers.__version__,
    }
    save_file(weights, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(
    directory: str | Path,
    lm: PreTrainedModel | None = None,
    *,
    encoder: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> AttachedLM:
    """Attach a saved channel.

    Args:
        directory: what `save_pretrained` wrote.
        lm: the base model it was trained on; None loads the model named in the file.
        encoder: E_base, where the channel was trained with one of its own.
        tokenizer: lets goals be given as text.

    Raises:
        ValueError: files missing or damaged, or a base model or encoder other than the one trained on.
    """
    from sidestream.lm.attach import attach

    directory = Path(directory)
    config, weights = _read(directory)
    if lm is None:
        name = config["base"]["name_or_path"]
        if not name:
            raise ValueError(
                f"{directory} does not name its base model ({config['base']['class']}); pass it: load(dir, lm)"
            )
        lm = AutoModelForCausalLM.from_pretrained(name)
    assert lm is not None
    if fingerprint(lm) != config["base"]["fingerprint"]:
        raise ValueError(
            f"{directory} was trained on another base: {config['base']['class']} {config['base']['name_or_path']!r} with "
            f"other weights than this {type(lm).__name__}; load it onto the model it was trained on"
        )
    if (config["encoder"] is None) != (encoder is None):
        wanted = "a separate encoder; pass encoder=" if encoder is None else "no separate encoder; leave encoder out"
        raise ValueError(f"{directory} was trained with {wanted}")
    if encoder is not None and fingerprint(encoder) != config["encoder"]["fingerprint"]:
        raise ValueError(f"{directory} was trained with another encoder than the one given")
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in config["goal"].items()}
    model = attach(lm, goal=GoalConfig(**settings), encoder=encoder, tokenizer=tokenizer, sites=config["sites"])
    expected = {name: tensor.shape for name, tensor in model.channel.state_dict().items()}
    if {name: tensor.shape for name, tensor in weights.items()} != expected:
        model.detach()
        raise ValueError(f"{directory / WEIGHTS_FILE} does not hold the weights its {CONFIG_FILE} describes")
    model.channel.load_state_dict(weights)
    return model


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} holds no {name}: not a saved channel")
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        config["goal"], config["sites"], config["base"]["fingerprint"], config["encoder"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory / CONFIG_FILE} is damaged: {error}") from error
    try:
        return config, load_file(directory / WEIGHTS_FILE)
    except SafetensorError as error:
        raise ValueError(f"{directory / WEIGHTS_FILE} is corrupt or truncated: {error}") from error
