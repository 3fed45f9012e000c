"""What Trainer, TRL and others who take a `PreTrainedModel` ask of one, answered by the wrapped model.

So `Trainer(model=attached)` and `SFTTrainer(attached, ...)` train, evaluate, save and resume as with any other model.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from sidestream.lm.models.terms import disable_checkpointing, enable_checkpointing
from sidestream.lm.saving.channel import save_channel, save_checkpoint

_PLAIN: Any = object()


class TrainerModel(PreTrainedModel):
    """A `PreTrainedModel` by class, without a configuration, weights or loading of its own: `self.lm` has them."""

    lm: Any
    _given: tuple[Any]

    def __init__(self) -> None:
        nn.Module.__init__(self)  # the next one's would set up a model from a configuration

    # ---------------------------------------------------------------- the wrapped model's

    @property
    def config(self) -> Any:  # type: ignore[override]
        """The wrapped model's configuration."""
        return self.lm.config

    @property
    def generation_config(self) -> Any:
        """The wrapped model's settings of `generate`."""
        return self.lm.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.lm.generation_config = value

    @property
    def outer(self) -> Any:
        """What was attached to: `lm`, or the `PeftModel` around it, which chooses and merges adapters."""
        return self._given[0]

    @property
    def name_or_path(self) -> str:  # type: ignore[override]
        """Where the wrapped model came from."""
        return self.lm.config.name_or_path

    @property
    def loss_type(self) -> str:  # type: ignore[override]
        """The wrapped model's, by which Trainer knows that its loss shifts the labels. GPT-2 and some others name none
        and have the common one."""
        return getattr(self.lm, "loss_type", None) or "ForCausalLM"

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the wrapped model's loss takes `num_items_in_batch`, as Trainer finds it out."""
        if hasattr(self.lm, "accepts_loss_kwargs"):
            return bool(self.lm.accepts_loss_kwargs)
        arguments = inspect.signature(type(self.lm).forward).parameters.values()
        return any(argument.kind == argument.VAR_KEYWORD for argument in arguments)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.to`."""
        return super().to(*args, **kwargs)  # type: ignore[arg-type]

    def can_generate(self) -> bool:  # type: ignore[override]
        """Whether the wrapped model can."""
        return self.lm.can_generate()

    def get_input_embeddings(self) -> nn.Module:
        """The wrapped model's embeddings."""
        return self.lm.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the wrapped model's embeddings."""
        self.lm.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        """The wrapped model's head."""
        return self.lm.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace the wrapped model's head."""
        self.lm.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped model does it."""
        return self.lm.resize_token_embeddings(*args, **kwargs)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped model does it."""
        self.lm.tie_weights(*args, **kwargs)

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Put a PEFT adapter into the wrapped model; the channel has none."""
        self.lm.add_adapter(*args, **kwargs)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load a PEFT adapter into the wrapped model."""
        return self.lm.load_adapter(*args, **kwargs)

    @property
    def base_model(self) -> Any:
        """The decoder below the head, called as transformers' are and with `goal`: TRL applies the head by itself."""
        return self._below_head

    def _below_head(
        self: Any, input_ids: Tensor, *, goal: Any = None, goal_attention_mask: Any = None, **kwargs: Any
    ) -> BaseModelOutput:
        check_trains(self, goal)
        if goal is not None and goal_attention_mask is not None:
            goal = self.encode_goal(goal, goal_attention_mask)
        return self.body(input_ids, goal=goal, **kwargs)

    # ---------------------------------------------------------------- gradient checkpointing

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, **kwargs: Any
    ) -> None:
        """Gradient checkpointing that is exact: the recomputation sees the terms its forward saw.

        Raises:
            ValueError: reentrant checkpointing was asked for, which cannot carry a state.
        """
        enable_checkpointing(self.lm, activation_checkpointing_kwargs, **kwargs)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any) -> None:
        """The older name of `activation_checkpointing_enable`."""
        enable_checkpointing(self.lm, gradient_checkpointing_kwargs, **kwargs)

    def activation_checkpointing_disable(self) -> None:
        """Turn gradient checkpointing off."""
        disable_checkpointing(self.lm)

    def gradient_checkpointing_disable(self) -> None:
        """The older name of `activation_checkpointing_disable`."""
        disable_checkpointing(self.lm)

    # ---------------------------------------------------------------- files

    def save_pretrained(  # type: ignore[override]
        self: Any,
        directory: str | Path,
        *,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = _PLAIN,
    ) -> None:
        """Write the channel's weights (safetensors) and settings (JSON): not the base model, only what tells it apart.

        Args:
            directory: made if missing.
            is_main_process: False writes nothing.
            state_dict: given, be it None, as Trainer does, the folder is a checkpoint to resume from, too, and holds
                the base where it trains. A dict stands in for this model's own, which may be sharded.

        Raises:
            ValueError: an adapter that would not come back from a file as it is.
        """
        if not is_main_process:
            return
        if state_dict is _PLAIN:
            save_channel(self, Path(directory))
        else:
            save_checkpoint(self, Path(directory), state_dict)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: what goes to the hub is a saved folder, with its card and without the paths of this machine.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "save_pretrained(folder) first, then sidestream.lm.saving.card.push_to_hub(folder, 'owner/name')"
        )

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module.load_state_dict`; without `strict` only what trains can be missing, which checkpoints hold."""
        found = super().load_state_dict(state_dict, strict=strict, assign=assign)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        found.missing_keys[:] = [name for name in found.missing_keys if name in trained]
        return found


def check_trains(model: Any, goal: Any) -> None:
    """Complain of training that can train nothing: the base is frozen, and without a goal the channel has no part.

    Raises:
        ValueError: that.
    """
    if goal is not None or not (model.training and torch.is_grad_enabled()):
        return
    if not any(parameter.requires_grad for parameter in model.lm.parameters()):
        raise ValueError(
            "a training batch came without goals, and the base model is frozen, so nothing would train; keep the "
            "column 'goal' (remove_unused_columns=False) and give data_collator=GoalCollator(tokenizer=...)"
        )
