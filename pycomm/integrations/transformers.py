"""transformers: a hook in Trainer, whose residuals are saved in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pycomm._training.comm_state import CommState, NamedParameters
from pycomm.integrations import missing

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
    from transformers import TrainingArguments as Arguments
except ModuleNotFoundError as error:
    raise missing("transformers", "transformers") from error

FILE = "pycomm.pt"


class CommCallback(TrainerCallback):
    """Registers a hook when training begins, and saves its state in each checkpoint.

    .. code-block:: python

        trainer.add_callback(CommCallback(trainer, pycomm.hooks.Int8State))

    A run that resumes loads the state of the checkpoint of its step in ``args.output_dir``.

    Args:
        trainer: the trainer, which wraps its model in DistributedDataParallel.
        make_state: makes a state of ``named_parameters()``.

    Attributes:
        state: the state, from the start of a training on.
    """

    def __init__(
        self, trainer: Trainer, make_state: Callable[[NamedParameters], CommState]
    ) -> None:
        self._trainer, self._make_state = trainer, make_state
        self.state: Any = None

    def on_train_begin(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes and registers the state, and loads it if the run resumes."""
        del control, kwargs
        model = self._trainer.model_wrapped
        self.state = self._make_state(model.named_parameters())
        self.state.register(model)
        if state.global_step:
            file = _file(args, state)
            self.state.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def on_save(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Saves the residuals of all ranks; Trainer calls this on all of them."""
        del control, kwargs
        if gathered := self.state.state_dict(gathered=True):
            torch.save(gathered, _file(args, state))


def _file(args: Arguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / FILE
