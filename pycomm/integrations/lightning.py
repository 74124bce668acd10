"""Lightning: a callback with a hook's state, and a strategy with pycomm's wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from torch import nn

from pycomm._training.comm_state import CommState, NamedParameters
from pycomm.data_parallel import DataParallel
from pycomm.integrations import missing

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise missing("lightning", "lightning") from error


class CommCallback(Callback):
    """Registers a hook with DDPStrategy, on every device, and saves its state in checkpoints.

    DDPStrategy itself registers hooks on CUDA devices only, and does not save their states. With
    :class:`DataParallelStrategy`, this saves the wrapper's state.

    Args:
        make_state: makes a state of ``named_parameters()``, such as
            :class:`pycomm.hooks.Int8State`; None with :class:`DataParallelStrategy`.

    Attributes:
        state: the state, from the start of a training on.
    """

    def __init__(self, make_state: Callable[[NamedParameters], CommState] | None = None) -> None:
        self._make_state = make_state
        self._loaded: dict[str, Any] | None = None
        self.state: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Registers the hook; Lightning calls this when it has wrapped the module."""
        model = trainer.strategy.model
        if isinstance(model, DataParallel) and self._make_state is None:
            self.state = model.comm_state
        elif self._make_state is not None:
            self.state = self._make_state(pl_module.named_parameters())
            self.state.register(model)
        else:
            raise TypeError("make_state must be given, such as pycomm.hooks.Int8State")
        if self._loaded is not None:
            self.state.load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks on rank 0, which saves Lightning's checkpoint."""
        return {} if self.state is None else dict(self.state.state_dict(gathered=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until the training starts, because Lightning calls this before."""
        self._loaded = state_dict


class DataParallelStrategy(DDPStrategy):
    """Wraps the module in :class:`pycomm.DataParallel` instead of DistributedDataParallel.

    Args:
        wrapper: the wrapper's options, such as ``{"shard": "optimizer"}``.
        options: those of DDPStrategy that do not concern DistributedDataParallel.
    """

    strategy_name = "pycomm"

    def __init__(self, wrapper: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._wrapper = wrapper or {}

    def _setup_model(self, model: nn.Module) -> Any:
        if isinstance(model, LightningModule) and not model.automatic_optimization:
            raise ValueError("automatic_optimization must be True, because pycomm.DataParallel "
                "exchanges gradients after its forward")  # fmt: skip
        return DataParallel(model, **self._wrapper)

    def _register_ddp_hooks(self) -> None:
        """The wrapper has a state, and no hook."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Surrounds backwards that only add up gradients."""
        assert isinstance(self.model, DataParallel)
        with self.model.no_sync():
            yield

    def teardown(self) -> None:
        """Unwraps the module."""
        self.model = self.lightning_module
        super().teardown()
