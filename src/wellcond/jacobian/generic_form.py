"""`GenericHead` with the face of a form: Gram matrices and products through the module's own derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from wellcond.jacobian.generic import GenericHead
from wellcond.jacobian.structure import Structure


class GenericForm:
    """The Jacobian of any attention, formed row by row."""

    def __init__(self, head: GenericHead) -> None:
        """Wrap a generic head."""
        self.head = head
        self.num_outputs = head.size

    @property
    def gram_side(self) -> int:
        """Side of the smaller Gram matrix."""
        return min(self.num_outputs, self.head.num_parameters)

    @property
    def table_entries(self) -> int:
        """J itself."""
        return self.num_outputs * self.head.num_parameters

    def structure(self) -> Structure:
        """Sizes; the rank is an upper bound."""
        return self.head.structure

    def explicit_jacobian(self) -> Tensor:
        """One reverse pass per output."""
        return self.head.explicit_jacobian()

    def smaller_gram(self) -> Tensor:
        """J J^T, or J^T J where that is smaller."""
        jacobian = self.head.explicit_jacobian()
        return jacobian @ jacobian.T if len(jacobian) <= jacobian.shape[1] else jacobian.T @ jacobian

    def output_gram(self) -> Tensor:
        """From the explicit Jacobian."""
        jacobian = self.head.explicit_jacobian()
        return torch.matmul(jacobian, jacobian.T)

    def product(self, flat: Tensor) -> Tensor:
        """J (J^T u)."""
        return self.head.matvec(flat)
