"""Weights of the best evaluation so far: in memory until a checkpoint holds them, then only on the disk."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from wellcond.attention.distributed import gather_model
from wellcond.lab.train.averaging import reshard
from wellcond.lab.train.checkpoint import BEST, check_tensors, read_tensors, scatter_model_


class BestWeights:
    """Whole tensors on the first process; every process must call `take` and `put_into_`."""

    def __init__(self, *, is_main: bool) -> None:
        """Nothing yet."""
        self.is_main = is_main
        self._kept: dict[str, Tensor] | Path | None = None

    @property
    def to_save(self) -> dict[str, Tensor] | Path | None:
        """Tensors that no checkpoint holds yet, or the file in the last one that does."""
        return self._kept

    def take(self, model: nn.Module) -> None:
        """Keep a copy of the weights and buffers that the model has now."""
        self._kept = {name: value.detach().to("cpu", copy=True) for name, value in gather_model(model).items()}

    def resume(self, checkpoint: Path) -> None:
        """Go on with those of a checkpoint.

        Raises: RunError if it has none, or their file is damaged.
        """
        check_tensors(checkpoint / BEST)
        self._kept = checkpoint / BEST

    def saved_in(self, checkpoint: Path) -> None:
        """A checkpoint holds them now."""
        if self._kept is not None:
            self._kept = checkpoint / BEST

    def put_into_(self, model: nn.Module, *, broadcast: bool) -> None:
        """Give the model these weights; with `broadcast` only the first process needs to have them.

        Raises: RunError if their file is missing or damaged.
        """
        tensors: dict[str, Tensor] = {}
        if self.is_main and self._kept is not None:
            tensors = read_tensors(self._kept) if isinstance(self._kept, Path) else self._kept
        reshard(model)
        scatter_model_(model, tensors, broadcast=broadcast)
