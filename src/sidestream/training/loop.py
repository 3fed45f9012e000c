"""A thin layer on transformers' Trainer: exact resume from checkpoints without pickles, metrics.jsonl, progress, a NaN stop."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How one stage is optimised. AdamW, linear warm-up, linear decay."""

    steps: int
    """Optimiser steps."""
    batch_size: int
    """Rows a step, on one device."""
    learning_rate: float
    """Peak learning rate."""
    warmup: float = 0.1
    """Fraction of the steps with a rising learning rate (LS-AR, B.3.3: 10%)."""
    weight_decay: float = 0.01
    """AdamW's decoupled decay."""
    clip: float = 1.0
    """Gradient norm clip (LS-AR, B.3.3)."""
    precision: str = "fp32"
    """`fp32` or `bf16` (autocast)."""
    gradient_checkpointing: bool = False
    """Recompute blocks in backward; exact, with channels too."""
    save_every: int = 500
    """Steps between checkpoints; the last two are kept."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}; use 'fp32' or 'bf16'")
        for name in ("steps", "batch_size", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says at which step, why, and what is safe."""


def train(
    module: nn.Module,
    data: Dataset,
    config: LoopConfig,
    directory: Path,
    *,
    seed: int,
    collate: Any = None,
    label: str = "",
    resume: bool = False,
    tags: dict[str, Any] | None = None,
) -> None:
    """Train `module` in place for `config.steps` steps.

    Args:
        module: `forward(**batch)` returns a dict with "loss".
        data: row i is what step i // batch_size sees; at least steps x batch_size rows, read in order.
        directory: gets checkpoint-N folders and metrics.jsonl.
        seed: of dropout and whatever else draws from the global generators.
        label: shown at the progress bar.
        resume: go on from the newest intact checkpoint in `directory`, if there is one.
        tags: added to every line of metrics.jsonl.

    Raises:
        TrainingStopped: the loss is not finite (the batch is saved), or a checkpoint cannot be written (the one before
            stays), or every checkpoint found is damaged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = newest_checkpoint(directory) if resume else None
    first = int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0
    metrics = _Metrics(directory / "metrics.jsonl", tags or {}, first)
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        warmup_steps=round(config.warmup * config.steps),
        lr_scheduler_type="linear",
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        optim="adamw_torch_fused",
        bf16=config.precision == "bf16",
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.gradient_checkpointing else None,
        logging_steps=config.log_every,
        save_steps=config.save_every,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=seed,
        data_seed=seed,
        full_determinism=False,
    )
    trainer = _StageTrainer(
        model=module, args=arguments, train_dataset=data, data_collator=collate, callbacks=[metrics, _Bar(label, first)]
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback", "DefaultFlowCallbackPrinter"):
            trainer.remove_callback(callback)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint whose files match their manifest; None if there is no checkpoint at all.

    Raises:
        TrainingStopped: there are checkpoints and all are damaged.
    """
    found = sorted(directory.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]), reverse=True)
    for path in found:
        problem = _damage(path)
        if problem is None:
            return path
        print(f"checkpoint {path} is damaged ({problem}); trying the one before")
    if found:
        raise TrainingStopped(f"every checkpoint in {directory} is damaged; delete that folder to train the stage anew")
    return None


def _damage(path: Path) -> str | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, digest in manifest.items():
            if _digest(path / name) != digest:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _StageTrainer(Trainer):
    """Trainer that reads its data in order and keeps its checkpoints in safetensors and JSON.

    The stock Trainer pickles optimiser, scheduler and generators. Ours are plain tensors and numbers, so a checkpoint
    from a stranger can at worst be wrong.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)  # type: ignore[arg-type]

    def compute_loss(self, model: nn.Module, inputs: dict, return_outputs: bool = False, **_: Any) -> Any:
        out = model(**inputs)
        loss = out["loss"]
        if not torch.isfinite(loss.detach()).all():
            step = self.state.global_step
            file = Path(str(self.args.output_dir)) / f"bad-batch-step{step}.safetensors"
            save_file({k: v.detach().cpu().contiguous() for k, v in inputs.items() if isinstance(v, Tensor)}, file)
            raise TrainingStopped(f"the loss is {loss.item()} at step {step}; its batch is in {file}; lower the learning rate")
        return (loss, out) if return_outputs else loss

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, SafetensorError, RuntimeError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise TrainingStopped(
                f"could not save the checkpoint of step {self.state.global_step}: {error}; the one before is intact: free "
                "some space and run again with --resume"
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.accelerator.unwrap_model(self.model), str(folder / "model.safetensors"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model(self.accelerator.unwrap_model(self.model), str(Path(resume_from_checkpoint) / "model.safetensors"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.optimizer is not None and self.lr_scheduler is not None
        state = self.optimizer.state_dict()
        tensors, scalars = {}, {}
        for index, entries in state["state"].items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{index}.{name}"] = value.detach().cpu().contiguous()
                else:
                    scalars[f"{index}.{name}"] = value
        save_file(tensors, Path(output_dir) / "optimizer.safetensors")
        scheduler = {k: v for k, v in self.lr_scheduler.state_dict().items() if isinstance(v, int | float | list | bool)}
        plain = {"groups": state["param_groups"], "scalars": scalars, "scheduler": scheduler}
        (Path(output_dir) / "optimizer.json").write_text(json.dumps(plain), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        plain = json.loads((Path(checkpoint) / "optimizer.json").read_text(encoding="utf-8"))
        state: dict[int, dict[str, Any]] = {}
        entries = {**load_file(Path(checkpoint) / "optimizer.safetensors"), **plain["scalars"]}
        for key, value in entries.items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = value
        groups = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in plain["groups"]]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.lr_scheduler.load_state_dict(plain["scheduler"])

    def _save_rng_state(self, output_dir: str) -> None:
        version, words, gauss = random.getstate()
        np_name, np_words, np_position, np_has, np_gauss = np.random.get_state(legacy=True)
        tensors = {"torch": torch.random.get_rng_state(), "numpy": torch.from_numpy(np.array(np_words, dtype=np.int64))}
        if torch.cuda.is_available():
            tensors.update({f"cuda.{i}": s for i, s in enumerate(torch.cuda.random.get_rng_state_all())})
        save_file(tensors, Path(output_dir) / f"rng-{self.args.process_index}.safetensors")
        plain = {
            "python": [version, list(words), gauss],
            "numpy": [str(np_name), int(np_position), int(np_has), float(np_gauss)],
        }
        (Path(output_dir) / f"rng-{self.args.process_index}.json").write_text(json.dumps(plain), encoding="utf-8")
        # Last of the tensors: from here on the folder is complete but for Trainer's own state file.
        files = [p for p in sorted(Path(output_dir).iterdir()) if p.is_file() and p.name != MANIFEST]
        (Path(output_dir) / MANIFEST).write_text(json.dumps({p.name: _digest(p) for p in files}), encoding="utf-8")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        name = f"rng-{self.args.process_index}"
        if not (Path(checkpoint) / f"{name}.json").is_file():
            return
        tensors = load_file(Path(checkpoint) / f"{name}.safetensors")
        plain = json.loads((Path(checkpoint) / f"{name}.json").read_text(encoding="utf-8"))
        version, words, gauss = plain["python"]
        random.setstate((version, tuple(words), gauss))
        np_name, position, has, np_gauss = plain["numpy"]
        np.random.set_state((np_name, tensors["numpy"].numpy().astype(np.uint32), position, has, np_gauss))
        torch.random.set_rng_state(tensors["torch"])
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                if f"cuda.{index}" in tensors:
                    torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)


class _Metrics(TrainerCallback):
    """One JSON line per logged step. After a resume, lines past the checkpoint are dropped: each step appears once."""

    def __init__(self, path: Path, tags: dict[str, Any], first: int) -> None:
        self.path, self.tags = path, tags
        self.start = time.monotonic()
        kept = []
        if first and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= first]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            line = {**self.tags, "step": state.global_step, **{k: logs[k] for k in ("loss", "grad_norm", "learning_rate") if k in logs}}
            line["seconds"] = round(time.monotonic() - self.start, 2)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class _Bar(TrainerCallback):
    """Progress with time left and the current loss."""

    def __init__(self, label: str, first: int) -> None:
        self.label, self.first = label, first
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.start()
        self.task = self.progress.add_task(self.label, total=state.max_steps, completed=self.first, loss="-")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.progress.update(self.task, loss=f"{float(logs['loss']):.3f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.stop()
