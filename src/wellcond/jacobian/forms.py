"""What a method needs to know of an attention: the common face of all structured forms of the Jacobian."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from wellcond.errors import WellcondError
from wellcond.jacobian import bounds
from wellcond.jacobian.gram import explicit_jacobian, output_gram, parameter_gram, stack_gram
from wellcond.jacobian.head import Blocks, SoftmaxHead, build_blocks
from wellcond.jacobian.operator import GramOperator, gram_operator
from wellcond.jacobian.squared import OutputSide, ParameterSide, parameter_side
from wellcond.jacobian.structure import Structure, stack_structure, wide_structure


class NotDefinedError(WellcondError, ValueError):
    """A convention or a method that is not defined for this attention."""


class Form(Protocol):
    """One attention head (or layer) whose parameter Jacobian is asked for."""

    @property
    def num_outputs(self) -> int:
        """Rows n of the wide Jacobian."""
        ...

    def structure(self) -> Structure:
        """Sizes, and the largest rank that such a Jacobian can have."""
        ...

    def output_gram(self) -> Tensor:
        """J J^T, n x n."""
        ...

    def explicit_jacobian(self) -> Tensor:
        """J, or a matrix with fewer columns and the same non-zero singular values."""
        ...

    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector."""
        ...


@dataclass(frozen=True)
class WideForm:
    """The Jacobian of a plain softmax head, outputs x parameters."""

    head: SoftmaxHead
    biases: bool = False

    @property
    def num_outputs(self) -> int:
        """R dv."""
        return self.head.num_outputs

    @cached_property
    def blocks(self) -> Blocks:
        """Built once, when first needed."""
        return build_blocks(self.head, biases=self.biases)

    @cached_property
    def operator(self) -> GramOperator:
        """Matrix-free J J^T."""
        return gram_operator(self.head, biases=self.biases)

    def structure(self) -> Structure:
        """See `wide_structure`."""
        return wide_structure(self.head, biases=self.biases)

    @property
    def gram_side(self) -> int:
        """Side of the smaller of the two Gram matrices."""
        g, d, dv = self.head.num_query_heads, self.head.head_dim, self.head.value_dim
        columns = g * d * min(self.head.x.shape) + (d + dv) * min(self.head.memory.shape)
        return min(self.num_outputs, columns)

    @property
    def table_entries(self) -> int:
        """Entries of the tables of products that J^T J is assembled from; none for J J^T."""
        if self.num_outputs <= self.gram_side:
            return 0
        widest = max(self.head.num_query_heads * min(self.head.x.shape), min(self.head.memory.shape))
        return 2 * self.head.num_rows * widest**2

    def smaller_gram(self) -> Tensor:
        """J J^T, or J^T J where that is smaller."""
        return output_gram(self.blocks) if self.num_outputs <= self.gram_side else parameter_gram(self.blocks)

    def output_gram(self) -> Tensor:
        """J J^T."""
        return output_gram(self.blocks)

    def output_side(self) -> OutputSide:
        """J J^T for iterations."""
        return OutputSide(self.blocks)

    def smaller_side(self) -> OutputSide | ParameterSide | None:
        """The smaller of J J^T and J^T J for iterations; None where its null space is not known as a basis."""
        if self.num_outputs <= self.gram_side:
            return self.output_side()
        return None if self.biases else parameter_side(self.head, self.blocks)

    def explicit_jacobian(self) -> Tensor:
        """The compressed J."""
        return explicit_jacobian(self.blocks)

    def product(self, flat: Tensor) -> Tensor:
        """J J^T u."""
        return self.operator(flat)

    def certified(self) -> tuple[float, float]:
        """Bounds (L) on sigma_min and (U1) on sigma_max."""
        return bounds.lower_bound(self.blocks), bounds.upper_bound(self.blocks)

    def minimum_from_values(self) -> tuple[float, float] | None:
        """An interval for sigma_min that closes when the values can make a constant, V u = 1 (theory.md, section 6).

        Then M_r^T u = 0 and B_r^T u = 0, because Lambda_r 1 = 0: on w (x) u only J_V acts, and with w the last left
        singular vector of P Y the lower bound sigma_R(PY) of (L) is attained. The upper end is |J^T v| of that very
        vector, whatever the residual of V u = 1, so the interval is sure. None if P Y has more rows than columns.
        """
        py, v = self.blocks.py, self.blocks.v
        if py.shape[0] > py.shape[1]:
            return None
        left, sigma, _ = torch.linalg.svd(py, full_matrices=False)
        u = torch.linalg.lstsq(v, torch.ones_like(v[:, :1]), driver="gelsd").solution[:, 0]
        if not bool(u.any()) or not bool(torch.isfinite(u).all()):
            return None
        vector = left[:, -1:] * (u / u.norm())
        return float(sigma[-1]), float(self._pull_back(vector))

    def _pull_back(self, u: Tensor) -> Tensor:
        """|J^T u| for u (R, dv), without squaring J."""
        b = self.blocks
        to_q = b.x.T @ torch.einsum("roc,ro->rc", b.m, u)
        to_k = torch.einsum("roe,ro->re", b.b, u).T @ b.q
        return torch.cat([to_q.flatten(), to_k.flatten(), (b.py.T @ u).flatten()]).norm()


@dataclass(frozen=True)
class StackForm:
    """The papers' stacked matrix [J_Q; J_K; J_V] of one head, 3 R dv x Dd.

    Its rows outnumber its columns, so methods are given its transpose, which has the same singular values: the rows of
    this form are the parameters, in the basis of the compressed tokens, and J J^T is H of theory.md 2.3.
    """

    head: SoftmaxHead

    def __post_init__(self) -> None:
        """Refuse heads on which it is not defined."""
        head = self.head
        if head.num_query_heads > 1 or head.y is not None or head.value_dim != head.head_dim:
            raise NotDefinedError(
                "the stacked convention is defined for one self-attention head without biases, dv = d"
            )

    @cached_property
    def blocks(self) -> Blocks:
        """Queries and keys read the same tokens, compressed alike: the three parameter spaces keep one basis."""
        return build_blocks(self.head)

    @property
    def num_outputs(self) -> int:
        """D~ d, the rows of the transpose."""
        return self.head.head_dim * min(self.head.x.shape)

    def structure(self) -> Structure:
        """See `stack_structure`."""
        return stack_structure(self.head)

    @property
    def block_rows(self) -> int:
        """R dv, the outputs that the blocks describe."""
        return self.head.num_outputs

    @property
    def table_entries(self) -> int:
        """Entries of the tables of products that H is assembled from."""
        return 2 * self.head.num_rows * self.head.head_dim**2

    def output_gram(self) -> Tensor:
        """H = J_Q^T J_Q + J_K^T J_K + J_V^T J_V."""
        return stack_gram(self.blocks)

    def explicit_jacobian(self) -> Tensor:
        """The three blocks side by side, transposed: (D~ d, 3 R dv)."""
        return torch.cat([block.T for block in explicit_jacobian(self.blocks).tensor_split(3, dim=1)], dim=1)

    def product(self, flat: Tensor) -> Tensor:
        """H w: forward to the outputs of the three blocks, and back."""
        b, w = self.blocks, flat.view(-1, self.head.head_dim)
        of_q = torch.einsum("roc,rc->ro", b.m, b.x @ w)
        of_k = torch.einsum("roa,ra->ro", b.b, b.q @ w.T)
        back = b.x.T @ torch.einsum("roc,ro->rc", b.m, of_q) + torch.einsum("roa,ro->ra", b.b, of_k).T @ b.q
        return (back + b.py.T @ (b.py @ w)).flatten()

    def certified(self) -> tuple[float, float]:
        """(U1) holds for the stacked matrix too."""
        return 0.0, bounds.upper_bound(self.blocks)


def gram_side(form: Form) -> int:
    """Side of the smaller Gram matrix that a form can build."""
    return getattr(form, "gram_side", form.num_outputs)


def smaller_gram(form: Form) -> Tensor:
    """The smaller Gram matrix that a form can build."""
    build = getattr(form, "smaller_gram", form.output_gram)
    return build()


def certified(form: Form) -> tuple[float, float]:
    """Sure bounds on sigma_min (of all n rows) and sigma_max; (0, inf) where none is known."""
    known = getattr(form, "certified", None)
    return (0.0, math.inf) if known is None else known()
