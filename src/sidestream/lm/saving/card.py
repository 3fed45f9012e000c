"""Model card of a trained channel, and sharing it on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from sidestream.lm.saving.channel import ADAPTER_FOLDER, CONFIG_FILE, MODEL_FOLDER, WEIGHTS_FILE

CARD = "README.md"
EVALUATION = "eval.json"
_FACTS = "card.json"
SAFETY = """The goal vector is an instruction that no log of the text shows. Whoever can set it steers the model, and no
text filter sees it. Treat a vector from elsewhere as you would a system prompt from elsewhere: make it from text you
can read, with this channel, or accept only signed ones. A channel file holds tensors and settings and no code; loading
it runs nothing, and it loads onto the base model it was trained on and no other."""


def write_card(directory: Path, facts: dict[str, Any] | None = None, training: dict[str, Any] | None = None) -> Path:
    """Write `README.md` from what is known; with no `facts`, from those of the last time and the latest `eval.json`.

    Args:
        directory: holds the saved channel.
        facts: `command`, `commit`, `versions`, `data_hash`, `model`, `data`, `records`, `method`.
        training: the last line of metrics.jsonl.

    Raises:
        ValueError: the folder holds no saved channel.
    """
    kept = directory / _FACTS
    if facts is not None:
        names = ("command", "commit", "versions", "data_hash", "model", "data", "records", "method")
        known = {name: facts.get(name) for name in names}
        kept.write_text(json.dumps({**known, "training": training or {}}, indent=1) + "\n", encoding="utf-8")
    if not (directory / CONFIG_FILE).is_file():
        raise ValueError(f"{directory} holds no {CONFIG_FILE}: not a saved channel")
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    base = shown_name(known.get("model") or config["base"]["name_or_path"])
    header = ["---", "library_name: sidestream", "tags: [goal-channel, ls-ar]"]
    if "/" in base and not base.endswith(".gguf"):
        header.append(f"base_model: {base}")
    method = {"lora": ", with LoRA adapters (`adapter/`)", "full": ", trained as a whole (`model/`)"}
    goal = config["goal"] or {}
    lines = [
        *header,
        "---",
        f"# Goal channel for {base}",
        "",
        f"Base model: `{base}` ({config['base']['class']}){method.get(str(known.get('method')), ', frozen')}. Goal "
        f"vector: {goal.get('width')} numbers, read at layer {goal.get('pool_layer')}, FiLM on "
        f"{goal.get('num_blocks')} blocks.",
        "",
        "```python",
        "import sidestream",
        "",
        f'model = sidestream.load("{directory.name}")',
        "```",
        "",
    ]
    if known:
        lines += [
            "## Training",
            "",
            f"- data: `{shown_name(known['data'])}`, {known['records']} records, sha256 `{known['data_hash']}`",
            f"- command: `{known['command']}`",
            f"- code: {known['commit']}; "
            + ", ".join(f"{name} {version}" for name, version in (known["versions"] or {}).items()),
        ]
        if known["training"]:
            lines.append(f"- loss at the end: {known['training']['loss']:.3f} (step {known['training']['step']})")
        lines.append("")
    lines += _evaluation(directory / EVALUATION)
    lines += ["## Safety", "", SAFETY, ""]
    path = directory / CARD
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def shown_name(name: str) -> str:
    """A hub id as it is; of a path its last part, which says nothing of the machine."""
    path = Path(name)
    return path.name if path.is_absolute() or path.exists() else name


def _evaluation(path: Path) -> list[str]:
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        "## Evaluation",
        "",
        f"`{shown_name(found['data'])}`, sha256 `{found['data_hash']}`. Of a text the last W tokens are seen.",
        "",
        "| metric | arm | W | value | 95% interval | n |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for cell in found["cells"]:
        interval = "" if cell["ci"] is None else f"{cell['ci'][0]:.3f} to {cell['ci'][1]:.3f}"
        row = (cell["metric"], cell["arm"], cell["where"]["W"], f"{cell['value']:.3f}", interval, cell["n"])
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return [*lines, ""]


def push_to_hub(directory: str | Path, repo_id: str, *, private: bool = True) -> str:
    """Upload a saved channel, its card and, where there are any, its adapter or model. Returns the address.

    A base model that was a folder on this machine is not named in what is uploaded: pass it to `load` there.

    Args:
        directory: what `sidestream train` or `save_pretrained` wrote.
        repo_id: `owner/name`.
        private: only you can see it.

    Raises:
        ValueError: the folder holds no saved channel, or the hub refuses.
    """
    directory = Path(directory)
    write_card(directory)
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    config["base"]["name_or_path"] = _public(config["base"]["name_or_path"])
    rewritten = {CONFIG_FILE: config}
    if config.get("adapter"):
        name = f"{ADAPTER_FOLDER}/adapter_config.json"
        settings = json.loads((directory / name).read_text(encoding="utf-8"))
        base = _public(settings.get("base_model_name_or_path"))
        rewritten[name] = {**settings, "base_model_name_or_path": base}
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=directory,
            allow_patterns=[CARD, WEIGHTS_FILE, EVALUATION, f"{ADAPTER_FOLDER}/*", f"{MODEL_FOLDER}/*"],
            ignore_patterns=list(rewritten),
        )
        for name, settings in rewritten.items():
            api.upload_file(
                repo_id=repo_id,
                path_in_repo=name,
                path_or_fileobj=(json.dumps(settings, indent=2) + "\n").encode(),
            )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"the hub refuses {repo_id}: {str(error).splitlines()[0]}") from None
    return str(address)


def _public(name: str | None) -> str:
    """The name of a base model where it means the same to everyone, nothing where it is a folder of this machine."""
    return "" if not name or Path(name).is_absolute() or Path(name).exists() else name
