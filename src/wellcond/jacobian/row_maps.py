"""Outputs that pass a map of their own, row by row, before W_O reads them: gates and norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.jacobian.form import AbstractForm, Structure


@dataclass(frozen=True, eq=False)
class MappedRows(AbstractForm):
    """G J of another form's J; G has one block for each token, the Jacobian of what happens to its outputs.

    A gate acts on each query head by itself; a norm over all heads mixes those of a group (theory.md, section 5.4).

    Attributes:
        form: the heads before the map, rows (g, N, dv).
        maps: (g, g, N, dv', dv), from the second head to the first.
        value: the heads behind the map, (g, N, dv').
    """

    form: AbstractForm
    maps: Tensor
    value: Tensor

    @property
    def num_outputs(self) -> int:
        """R dv'."""
        return self.value.numel()

    def output(self) -> Tensor:
        """Behind the map."""
        return self.value

    def structure(self) -> Structure:
        """That of the form; a map that is not injective can only lower its rank."""
        inner = self.form.structure()
        by_token = self.maps.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
        rank = min(inner.max_rank, int(torch.linalg.matrix_rank(by_token).sum()))
        return Structure(
            self.num_outputs, inner.num_parameters, inner.token_rank, inner.memory_rank, rank, inner.null_space
        )

    def _forward(self, rows: Tensor) -> Tensor:
        """G applied to the outputs of the form, (R dv, columns) -> (R dv', columns)."""
        g, _, n, _, dv = self.maps.shape
        return torch.einsum("hknop,knpc->hnoc", self.maps, rows.reshape(g, n, dv, -1)).reshape(self.num_outputs, -1)

    def product(self, flat: Tensor) -> Tensor:
        """G (J J^T) G^T u."""
        back = torch.einsum("hknop,hno->knp", self.maps, flat.view_as(self.value))
        return self._forward(self.form.product(back.flatten()))[:, 0]

    def explicit_jacobian(self) -> Tensor:
        """G J."""
        return self._forward(self.form.explicit_jacobian())

    def output_gram(self) -> Tensor:
        """G (J J^T) G^T."""
        return self._forward(self._forward(self.form.output_gram()).T)
