"""A thin layer on transformers' Trainer: exact resume without pickles, metrics.jsonl, progress, a stop at NaN."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from sidestream.training.checkpoints import (
    TrainingStopped,
    checkpoints,
    damage,
    load_generators,
    load_optimizer,
    newest_checkpoint,
    save_generators,
    save_optimizer,
    write_folder,
)
from sidestream.training.muon import Muon, muon_groups

__all__ = ["LoopConfig", "TrainingStopped", "train"]

FINAL = "final"
WEIGHTS = "model.safetensors"
KEPT = 2


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How one stage is optimised: linear warm-up, linear decay."""

    steps: int
    """Optimiser steps."""
    batch_size: int
    """Rows a step."""
    learning_rate: float
    """Peak learning rate."""
    warmup: float = 0.1
    """Fraction of the steps with a rising learning rate (LS-AR, B.3.3: 10%)."""
    weight_decay: float = 0.01
    """Decoupled decay, at each parameter's own rate."""
    clip: float = 1.0
    """Gradient norm clip (LS-AR, B.3.3)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`adamw` (the papers'), or `muon`: orthogonalised momentum for weight matrices, AdamW for the rest."""
    matrix_rate: float = 10.0
    """With `muon`: learning rate of the matrices over `learning_rate`."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`fp32` or `bf16` (autocast)."""
    gradient_checkpointing: bool = False
    """Recompute blocks in backward; exact, with channels too."""
    save_every: int = 500
    """Steps between checkpoints; the last two are kept, and none once the stage is finished."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}; use 'fp32' or 'bf16'")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer is {self.optimizer!r}; use 'adamw' or 'muon'")
        for name in ("steps", "batch_size", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("learning_rate", "clip", "matrix_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number above 0")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is {self.warmup}; it is a fraction of the steps, 0 to 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is {self.weight_decay}; it must be a number, 0 or above")


def train(
    module: nn.Module,
    data: Dataset | Callable[[], Dataset],
    config: LoopConfig,
    directory: Path,
    *,
    seed: int,
    collate: Any = None,
    label: str = "",
    resume: bool = False,
    tags: dict[str, Any] | None = None,
    rates: dict[str, float] | None = None,
    accumulate: int = 1,
    processes: int = 1,
) -> None:
    """Train `module` in place for `config.steps` steps, where it is (CPU or GPU). It is left in evaluation mode.

    Killed at any moment and called again with `resume`, on a CPU it ends with the same bits as if nothing had happened,
    and with the same metrics.jsonl but for the seconds.

    Args:
        module: `forward(**batch)` returns a dict with "loss".
        data: row i is what step i // batch_size sees; at least steps x batch_size rows, read in order. A row must
            depend on its index alone. A function that makes the data is called only if there is training to do.
        directory: gets metrics.jsonl, `checkpoint-N` folders on the way, and at the end `final` with the weights.
        seed: of dropout and whatever else draws from the global generators.
        label: shown at the progress bar; empty shows none.
        resume: load `final` if the stage is finished, else go on from the newest intact checkpoint, if there is one.
        tags: added to every line of metrics.jsonl.
        rates: factors on the learning rate of parameters, by the last part of their name, or, where a key ends with a
            dot, by its beginning.
        accumulate: parts in which a process takes its rows of a step. A step's loss is the mean over all parts.
        processes: how many processes this is meant to run in. With torchrun and N of them, the rows of a step go to
            the processes in order, and gradients are averaged (DDP): the same step as in one, if the module's loss
            averaged over equal parts is that of the whole.

    Raises:
        ValueError: the directory holds training already and `resume` is off, another number of processes than meant,
            rows that do not divide into the parts, or gradient checkpointing of a module that has no blocks.
        TrainingStopped: the loss or its gradient is not finite (the batch is saved), a checkpoint cannot be written
            (the one before stays), or the checkpoints found are damaged.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != processes:
        way = (
            "start it without a launcher" if processes == 1 else f"start it with torchrun --nproc_per_node {processes}"
        )
        raise ValueError(f"WORLD_SIZE is {world}, but this training runs in {processes} process(es); {way}")
    if config.batch_size % (accumulate * processes):
        raise ValueError(
            f"batch_size {config.batch_size} does not divide into {processes} process(es) x {accumulate} part(s)"
        )
    first_rank = int(os.environ.get("RANK", "0")) == 0
    if not resume and (checkpoints(directory) or (directory / FINAL).exists()):
        raise ValueError(f"{directory} holds training already; go on with resume, or choose another directory")
    if (directory / FINAL).exists():
        problem = damage(directory / FINAL)
        if problem:
            raise TrainingStopped(
                f"{directory / FINAL} is damaged ({problem}); delete {directory} to train the stage anew"
            )
        load_model(module, str(directory / FINAL / WEIGHTS))
        module.eval()
        return
    if config.gradient_checkpointing and not hasattr(module, "gradient_checkpointing_enable"):
        raise ValueError(
            f"gradient_checkpointing is on, but {type(module).__name__} has no blocks to recompute; turn it off"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        step, checkpoint = newest_checkpoint(directory)
        with closing(_Log(directory / "metrics.jsonl", tags or {}, label if first_rank else "", step)) as log:
            arguments = _arguments(
                config,
                directory,
                seed,
                on_cpu=next(module.parameters()).device.type == "cpu",
                rows=config.batch_size // (accumulate * processes),
                accumulate=accumulate,
            )
            torch.manual_seed(seed)
            module.train()
            if config.gradient_checkpointing:
                module.gradient_checkpointing_enable()  # type: ignore[operator]
            trainer = _StageTrainer(
                model=module,
                args=arguments,
                train_dataset=data if isinstance(data, Dataset) else data(),
                data_collator=collate,
                callbacks=[log],
            )
            trainer.rates = rates or {}
            if config.optimizer == "muon":
                groups = muon_groups(module, weight_decay=config.weight_decay, matrix_rate=config.matrix_rate)
                trainer.optimizer = Muon(groups, lr=config.learning_rate, fused=True)
            trainer.remove_callback(PrinterCallback)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        if config.gradient_checkpointing:
            module.gradient_checkpointing_disable()  # type: ignore[operator]
        module.eval()
    if first_rank:
        _save(directory / FINAL, lambda folder: save_model(module, str(folder / WEIGHTS)), "the finished weights")
        for path in checkpoints(directory).values():
            shutil.rmtree(path)
    trainer.accelerator.wait_for_everyone()


def _arguments(
    config: LoopConfig, directory: Path, seed: int, *, on_cpu: bool, rows: int, accumulate: int
) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=config.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulate,
        ddp_find_unused_parameters=False,
        learning_rate=config.learning_rate,
        warmup_steps=round(config.warmup * config.steps),
        lr_scheduler_type="linear",
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        optim="adamw_torch_fused",
        bf16=config.precision == "bf16",
        use_cpu=on_cpu,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        save_steps=config.save_every,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        seed=seed,
        data_seed=seed,
    )
    # More than one GPU would mean DataParallel: other rows a step than planned.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def _save(path: Path, fill: Any, what: str) -> None:
    try:
        write_folder(path, fill)
    except (OSError, SafetensorError) as error:
        raise TrainingStopped(
            f"could not save {what} to {path}: {error}; what was saved before is intact: make room and run again with "
            "--resume"
        ) from error


class _StageTrainer(Trainer):
    """Trainer that reads its data in order and keeps its checkpoints in safetensors and JSON.

    The stock Trainer pickles optimiser, scheduler and generators. Ours are plain tensors and numbers, so a checkpoint
    from a stranger can at worst be wrong.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)  # type: ignore[arg-type]

    rates: dict[str, float] = {}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = super().create_optimizer(*args, **kwargs)
        names = {id(p): name for name, p in self.model.named_parameters()}  # type: ignore[union-attr]
        for group in list(optimizer.param_groups):
            for key, factor in self.rates.items():
                own = [p for p in group["params"] if _is_meant(names[id(p)], key)]
                if own:
                    group["params"] = [p for p in group["params"] if not _is_meant(names[id(p)], key)]
                    optimizer.add_param_group({**group, "params": own, "lr": group["lr"] * factor})
        return optimizer

    def compute_loss(self, model: nn.Module, inputs: dict, return_outputs: bool = False, **_: Any) -> Any:
        self._batch = inputs
        out = model(**inputs)
        if not torch.isfinite(out["loss"].detach()):
            self._stop(f"the loss is {out['loss'].item()}")
        return (out["loss"], out) if return_outputs else out["loss"]

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        # A loss can be finite and its gradient not. One more step and the weights would be gone, and then a checkpoint.
        norm: Any = super()._clip_grad_norm(model)
        if not math.isfinite(norm):
            self._stop(f"the gradient is {float(norm)}")
        return norm

    def _stop(self, what: str) -> NoReturn:
        step = self.state.global_step + 1
        file = Path(str(self.args.output_dir)) / f"bad-batch-step{step}.safetensors"
        save_file({k: v.detach().cpu().clone() for k, v in self._batch.items() if isinstance(v, Tensor)}, file)
        raise TrainingStopped(f"{what} at step {step}; its batch is in {file}; try a lower learning rate")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        directory, step = Path(str(self.args.output_dir)), self.state.global_step
        if not self.is_world_process_zero():
            return self.accelerator.wait_for_everyone()
        _save(directory / f"checkpoint-{step}", self._fill, f"the checkpoint of step {step}")
        for path in list(checkpoints(directory).values())[KEPT:]:
            shutil.rmtree(path, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _fill(self, folder: Path) -> None:
        save_model(self.accelerator.unwrap_model(self.model), str(folder / WEIGHTS))
        save_optimizer(folder, self.optimizer, self.lr_scheduler)
        save_generators(folder)
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model(self.accelerator.unwrap_model(self.model), str(Path(resume_from_checkpoint) / WEIGHTS))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_generators(Path(checkpoint))


def _is_meant(name: str, key: str) -> bool:
    return name.startswith(key) if key.endswith(".") else name.rsplit(".", 1)[-1] == key


class _Log(TrainerCallback):
    """metrics.jsonl, and a progress bar with the time left and the current loss.

    After a resume, lines past the checkpoint are dropped: each step appears once. `seconds` counts over all calls.
    """

    def __init__(self, path: Path, tags: dict[str, Any], label: str, first: int) -> None:
        self.path, self.tags, self.label, self.first = path, tags, label, first
        kept = [line for line in _lines(path) if line["step"] <= first]
        if int(os.environ.get("RANK", "0")) == 0:
            path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self.start = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            disable=not label,
        )

    def close(self) -> None:
        """End the bar, whatever happened: an open one leaves the terminal without a cursor."""
        self.progress.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.task = self.progress.add_task(self.label, total=state.max_steps, completed=self.first, loss="-")
        self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.update(self.task, completed=state.global_step)
        # A logged loss is the mean since the last line. With a line at each checkpoint no mean spans one, and a resumed
        # run logs what an undisturbed one does.
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        self.progress.update(self.task, loss=f"{float(logs['loss']):.3f}")
        numbers = {name: float(logs[name]) for name in ("loss", "grad_norm", "learning_rate")}
        seconds = round(time.monotonic() - self.start, 2)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self.tags, "step": state.global_step, **numbers, "seconds": seconds}) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; one that a kill has torn is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict) and {"step", "seconds"} <= line.keys()]
