"""Outputs that pass a map of their own, row by row, before W_O reads them: gates and norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.jacobian.form import AbstractForm, Structure


@dataclass(frozen=True, eq=False)
class MappedRows(AbstractForm):
    """blockdiag(G_r) J of another form's J; G_r is the Jacobian of what happens to row r (theory.md, section 5.4).

    Attributes:
        form: the heads before the map.
        maps: G_r, (R, dv', dv).
        value: the heads behind the map, (g, N, dv').
    """

    form: AbstractForm
    maps: Tensor
    value: Tensor

    @property
    def num_outputs(self) -> int:
        """R dv'."""
        return self.maps.shape[0] * self.maps.shape[1]

    def output(self) -> Tensor:
        """Behind the map."""
        return self.value

    def structure(self) -> Structure:
        """That of the form; a map that is not injective can only lower its rank."""
        inner, ranks = self.form.structure(), torch.linalg.matrix_rank(self.maps)
        return Structure(
            self.num_outputs, inner.num_parameters, inner.token_rank, inner.memory_rank,
            min(inner.max_rank, int(ranks.sum())), inner.null_space,
        )  # fmt: skip

    def _forward(self, rows: Tensor) -> Tensor:
        """G applied to the outputs of the form, (R dv, columns) -> (R dv', columns)."""
        return (self.maps @ rows.view(self.maps.shape[0], self.maps.shape[2], -1)).reshape(self.num_outputs, -1)

    def product(self, flat: Tensor) -> Tensor:
        """G (J J^T) G^T u."""
        back = self.maps.mT @ flat.view(self.maps.shape[0], -1, 1)
        return self._forward(self.form.product(back.flatten()))[:, 0]

    def explicit_jacobian(self) -> Tensor:
        """G J."""
        return self._forward(self.form.explicit_jacobian())

    def output_gram(self) -> Tensor:
        """G (J J^T) G^T."""
        return self._forward(self._forward(self.form.output_gram()).T)
