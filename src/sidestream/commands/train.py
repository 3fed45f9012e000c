"""`sidestream train`: a goal channel for a model and a file of goals."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sidestream.commands.options import GOAL_FROM, Options, command_parser, parsed
from sidestream.experiments.provenance import open_run, record_call
from sidestream.experiments.settings import from_json
from sidestream.tasks.goals import goals_hash, read_goals, tokens

USAGE = "sidestream train --model DIR|HUB_ID|FILE.gguf --data FILE.jsonl --out DIR [--lora|--full] [--resume]"
ABOUT = """Train a goal channel: the model is frozen, its goal becomes one vector that FiLM feeds to every block.
--data is JSONL: {"goal": text, "trajectory": text} or {"goal": text, "messages": [{"role", "content"}, ...]}, and
optionally "answer", the span to score. ShareGPT, prompt/completion and Alpaca are read too, and so are a glob, .json,
.csv, .parquet, .gz files and hub:owner/name; --goal_from says where the goal is. It need not be in the text: the
channel holds it. Stopped at any moment, the same command with --resume goes on."""


def run(words: list[str], parser_class: Any, add_fields: Any) -> int:
    """Train, save, write the model card. Returns the exit status."""
    from sidestream.training.finetune import FinetuneConfig
    from sidestream.training.loop import TrainingStopped

    options: Options = {
        "model": (str | None, None, "the base model: a folder, a hub id, a .gguf file, or package:NAME that holds one"),
        "data": (str | None, None, "file, glob or hub:owner/name[:config]"),
        "split": (str, "train", "which split of a hub data set"),
        "goal_from": (str | None, None, GOAL_FROM),
        "out": (str, "run", "folder for what is trained"),
        "dtype": (str, "float32", "of the frozen base model: float32 or bfloat16"),
        "processes": (int | None, None, "how many torchrun was asked for; null: take what is there"),
    }
    parser = command_parser(parser_class, USAGE, ABOUT, options)
    parser.add_argument("--config", action="config", help="read fields from a YAML or JSON file")
    for name, about in {
        "lora": "train LoRA adapters too",
        "full": "train the whole model too",
        "dynamic": "the vector follows the text: short for --trigger ','",
        "resume": "go on with a run that was stopped",
    }.items():
        parser.add_argument(f"--{name}", action="store_true", help=about)
    add_fields(parser, FinetuneConfig(), "", "training")
    given = parsed(parser, words, "model", "data").as_dict()
    extra = {name: given.pop(name) for name in (*options, "config", "lora", "full", "dynamic", "resume")}
    if extra["lora"] and extra["full"]:
        raise ValueError("--lora and --full exclude each other: adapters, or the whole model")
    config = from_json(FinetuneConfig, given)
    if extra["lora"] or extra["full"]:
        config = replace(config, method="lora" if extra["lora"] else "full")
    if extra["dynamic"] and not config.trigger:
        config = replace(config, trigger=",")
    try:
        return _train(config, extra, "sidestream train " + shlex.join(word for word in words if word != "--resume"))
    except TrainingStopped as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """What a run directory belongs to."""

    model: str
    """The base model."""
    data: str
    """Where the records came from."""
    data_hash: str
    """sha256 of the records."""
    config: Any
    """The settings."""


def _train(config: Any, extra: dict[str, Any], command: str) -> int:
    import torch

    from sidestream.lm.models.base import load_base, load_tokenizer
    from sidestream.lm.saving.card import write_card
    from sidestream.lm.saving.channel import MODEL_FOLDER
    from sidestream.training.finetune import TRAINED, finetune

    records = read_goals(extra["data"], split=extra["split"], goal_from=extra["goal_from"])
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    processes = world if extra["processes"] is None else extra["processes"]
    if processes != world:
        raise ValueError(
            f"--processes {processes} and WORLD_SIZE is {world}: start it with torchrun --nproc_per_node {processes} "
            "-m sidestream train ... (accelerate launch --cpu starts one process, whatever it is told)"
        )
    if extra["dtype"] not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype is {extra['dtype']!r}; use float32 or bfloat16")
    if extra["dtype"] == "bfloat16" and config.method == "full":
        raise ValueError("--dtype bfloat16 is for a base model that stays as it is; with --full use --precision bf16")
    out = Path(extra["out"])
    # A folder is found again from anywhere; a hub id is no path.
    model_name = str(Path(extra["model"]).resolve()) if Path(extra["model"]).exists() else extra["model"]
    tokenizer = load_tokenizer(model_name)
    lm = load_base(model_name, dtype=getattr(torch, extra["dtype"])).to(_device())  # type: ignore[arg-type]
    digest = goals_hash(records)
    origin: dict[str, Any] = {}
    about, warning = _about(records, lm, config, world), _unheard_ends(records, lm, tokenizer)

    def begin() -> None:
        if rank > 0:
            return
        if extra["resume"] and not (out / "experiment.json").exists():
            print(f"{out} holds no run yet: this one begins there", file=sys.stderr)
        described = TrainRun(model=model_name, data=extra["data"], data_hash=digest, config=config)
        open_run(out, described, resume=extra["resume"])
        origin.update(record_call(out, command, digest))
        print("\n".join(filter(None, (about, warning))), file=sys.stderr)

    options: dict[str, Any] = dict(processes=processes, show=rank == 0, begin=begin)
    model = finetune(lm, tokenizer, records, config, out, resume=True, **options)
    if rank > 0:
        return 0
    if config.method == "full":
        lm.save_pretrained(out / MODEL_FOLDER)
        tokenizer.save_pretrained(out / MODEL_FOLDER)
    model.save_pretrained(out)
    facts = {**origin, "model": model_name, "data": extra["data"], "records": len(records), "method": config.method}
    write_card(out, facts, _last_loss(out / TRAINED / "metrics.jsonl"))
    print(f"saved {out}. Next:")
    same = "" if extra["goal_from"] is None else f" --goal_from {extra['goal_from']}"
    print(f"  sidestream eval --model {out} --data {extra['data']}{same}")
    print(f"  sidestream generate --model {out} --goal '...' --prompt '...' --window {config.window}")
    return 0


def _device() -> Any:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _about(records: list[Any], lm: Any, config: Any, world: int) -> str:
    """What is about to happen, before anything does."""
    count = sum(parameter.numel() for parameter in lm.parameters()) / 1e6
    trained = {"channel": "frozen", "lora": f"with LoRA of rank {config.rank}", "full": "trained as a whole"}
    rows = config.batch_size // (world * config.accumulate)
    how = "one process" if world == 1 else f"DDP over {world} processes"
    parts = "" if config.accumulate == 1 else f" x {config.accumulate} parts"
    follows = f", the vector follows the text at each {config.trigger!r}" if config.trigger else ""
    return (
        f"{len(records)} records; {type(lm).__name__}, {count:.1f}M parameters, {trained[config.method]}; {how} on "
        f"{lm.device.type}, {rows} rows each{parts}; {config.steps} steps of {config.batch_size} rows, "
        f"W = {config.window}{follows}"
    )


def _unheard_ends(records: list[Any], lm: Any, tokenizer: Any) -> str:
    """What to know where answers are trained to end in tokens at which `generate` does not stop; else empty."""
    from sidestream.lm.models.base import chat_template, offsets

    template, encode, ends = chat_template(tokenizer), offsets(tokenizer, special=False), set()
    for record in [record for record in records if record.messages and record.answer is None][:100]:
        read = tokens(record, template, encode)
        after = (*read.scored[1:], False)
        ends |= {token for token, here, on in zip(read.ids, read.scored, after, strict=True) if here and not on}
    # A turn that ends as the next one's name begins ends in words, at which nothing can stop.
    marks = ends & (set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))
    found = getattr(lm.generation_config, "eos_token_id", None)
    stops = [] if found is None else [found] if isinstance(found, int) else list(found)
    if not ends or marks and marks <= set(stops):
        return ""

    def named(ids: Any) -> str:
        return ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in sorted(ids)) or "nothing"

    if not marks:
        return (
            "note: the answers of these chats end in no token of their own, and generate would go on after them; give "
            "the tokenizer an eos_token"
        )
    return (
        f"note: the answers of these chats end in {named(marks - set(stops))}, and the model's generation_config stops "
        f'at {named(stops)}: generate would go on after an answer. Set "eos_token_id": {sorted({*stops, *marks})} in '
        "generation_config.json beside the model"
    )


def _last_loss(path: Path) -> dict[str, Any]:
    import json

    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {}
