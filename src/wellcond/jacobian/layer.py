r"""Forms made of forms: heads behind a gate or a norm, side by side, and mixed by the output projection W_O.

Heads are forms that know their value. The rows of a form's Jacobian are those of its `output()`, (heads, N, dv) or
(N, dv), flattened.

Legend (everything float64):

    o_i^h  (dv)                 output of head h on token i;  c_i = (o_i^1 .. o_i^H) the concatenation
    W_h  (dv x Do)              rows of W_O that read head h;  torch stores W_O^T = [W_1^T .. W_H^T] (Do, H dv)
    y_i = W_O^T c_i + b_O       output of the layer, rows (i, o), n = N Do

    QKV parameters, `ProjectedHeads`:   G_ij = sum over forms of  sum_hh' W_h^T G_(h,i),(h',j) W_h'    h, h' of one form
    W_O parameters, `OutputWeights`:    G_ij += (c_i . c_j) I                                          b_O: G_ij += I

Query heads that share keys and values share parameters, so they are one form and h != h' occurs.

Without W_O different forms share neither outputs nor parameters: J of the layer is block-diagonal, its singular values
are the union of theirs, and kappa(layer) = max sigma_max / min sigma_min.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from wellcond.jacobian.form import AbstractForm
from wellcond.jacobian.head import compressed, with_constant
from wellcond.linalg.records import JacobianSpectrum
from wellcond.linalg.spectrum import cast_to_float64, move_to, numerical_rank
from wellcond.theory.ranks import Structure


@dataclass(frozen=True, eq=False)
class MappedRows(AbstractForm):
    """G J of another form's J; G has one block for each token, the Jacobian of what happens to its outputs before W_O.

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


@dataclass(frozen=True, eq=False)
class HeadUnion(AbstractForm):
    """Heads side by side, without W_O. Rows are ordered head by head."""

    forms: tuple[AbstractForm, ...]

    def __post_init__(self) -> None:
        """Check that there are heads."""
        object.__setattr__(self, "forms", tuple(self.forms))
        if not self.forms:
            raise ValueError("expected at least one head")

    @property
    def num_outputs(self) -> int:
        """Sum over heads."""
        return sum(form.num_outputs for form in self.forms)

    def output(self) -> Tensor:
        """Outputs of all heads, (H, N, dv)."""
        return torch.cat([_by_head(form) for form in self.forms])

    def structure(self) -> Structure:
        """Sums over heads; ranks add because the blocks share nothing."""
        parts = [form.structure() for form in self.forms]
        return Structure(
            num_outputs=self.num_outputs,
            num_parameters=sum(part.num_parameters for part in parts),
            token_rank=max(part.token_rank for part in parts),
            memory_rank=max(part.memory_rank for part in parts),
            max_rank=sum(part.max_rank for part in parts),
            null_space=_listed(parts),
        )

    def output_gram(self) -> Tensor:
        """J J^T, block-diagonal."""
        return torch.block_diag(*[form.output_gram() for form in self.forms])

    def explicit_jacobian(self) -> Tensor:
        """J with compressed tokens, block-diagonal."""
        return torch.block_diag(*[form.explicit_jacobian() for form in self.forms])

    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector."""
        parts = flat.split([form.num_outputs for form in self.forms])
        return torch.cat([form.product(part) for form, part in zip(self.forms, parts, strict=True)])


def union_condition_number(spectra: Sequence[JacobianSpectrum], kind: Literal["strict", "pseudo"] = "strict") -> float:
    """Condition number of a layer without W_O from the spectra of its heads (or groups of heads).

    Strict: infinite as soon as one head has a deficient rank, or if some heads have more outputs than parameters and
    others fewer: then the layer has min(shape) above the number of singular values of its heads.
    """
    if not spectra:
        raise ValueError("expected the spectrum of at least one head")
    largest = max(one.sigma_max for one in spectra)
    if largest == 0:
        return math.nan
    if kind == "pseudo":
        last = [one.sigma_rank for one in spectra if one.rank]
        if any(math.isnan(sigma) for sigma in last):
            return math.nan
        return largest / min(last) if min(last) > 0 else math.inf
    rows, columns = (sum(one.shape[axis] for one in spectra) for axis in (0, 1))
    complete = min(rows, columns) == sum(min(one.shape) for one in spectra)
    last = [one.sigma_min for one in spectra]
    if not complete or 0 in last or any(one.nullity for one in spectra):
        return math.inf
    return math.nan if any(math.isnan(sigma) for sigma in last) else largest / min(last)


@dataclass(frozen=True, eq=False)
class ProjectedHeads(AbstractForm):
    """Heads behind the output projection, which is fixed; with `OutputWeights` beside them it is a parameter too.

    Attributes:
        forms: heads, or groups of heads, in the order in which W_O reads them.
        w_o: (Do, H dv), as torch stores it.
        b_o: (Do).
    """

    forms: tuple[AbstractForm, ...]
    w_o: Tensor
    b_o: Tensor | None = None

    def __post_init__(self) -> None:
        """Cast to float64 and check shapes and values."""
        object.__setattr__(self, "forms", tuple(self.forms))
        cast_to_float64(self, ("w_o", "b_o"))
        move_to(torch.device("cpu"), self, ("w_o", "b_o"))
        if self.w_o.dim() != 2 or self.w_o.shape[1] != self.concatenated.shape[1]:
            raise ValueError(f"w_o: expected {self.concatenated.shape[1]} columns, got shape {tuple(self.w_o.shape)}")

    @cached_property
    def concatenated(self) -> Tensor:
        """The rows c_i, (N, H dv)."""
        return torch.cat([_tokens_first(output) for output in self._outputs], dim=1)

    @property
    def num_outputs(self) -> int:
        """N Do."""
        return self.concatenated.shape[0] * self.w_o.shape[0]

    def output(self) -> Tensor:
        """The output of the layer, (N, Do)."""
        y = self.concatenated @ self.w_o.T
        return y if self.b_o is None else y + self.b_o

    def structure(self) -> Structure:
        """Sizes and an upper bound on the rank: at most N rank(W_O), and no more than the heads have together."""
        heads = HeadUnion(self.forms).structure()
        rank = min(self.num_outputs, heads.max_rank, self.concatenated.shape[0] * numerical_rank(self.w_o))
        names = [heads.null_space] if heads.null_space else []
        if rank < self.num_outputs:
            names = ["upper bound on the rank", f"outputs that W_O does not reach: {self.num_outputs - rank}", *names]
        return Structure(
            self.num_outputs, heads.num_parameters, heads.token_rank, heads.memory_rank, rank, "; ".join(names)
        )

    def output_gram(self) -> Tensor:
        """J J^T, (N Do, N Do); at scale use `product`."""
        n, out = self.concatenated.shape[0], self.w_o.shape[0]
        gram = self.w_o.new_zeros(n, out, n, out)
        for form, weight, (heads, dv) in self._slices:
            w = weight.reshape(out, heads, dv)
            part = form.output_gram().view(heads, n, dv, heads, n, dv)
            half = torch.einsum("ohv,hivkjw->iokjw", w, part)
            gram += torch.einsum("iokjw,pkw->iojp", half, w)
        return gram.reshape(n * out, n * out)

    def explicit_jacobian(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        n, out = self.concatenated.shape[0], self.w_o.shape[0]
        parts = []
        for form, weight, (heads, dv) in self._slices:
            jacobian = form.explicit_jacobian().view(heads, n, dv, -1)
            parts.append(torch.einsum("ohv,hivp->iop", weight.reshape(out, heads, dv), jacobian).reshape(n * out, -1))
        return torch.cat(parts, dim=1)

    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector of length N Do: nothing of size n x n is formed if no head forms it."""
        u = flat.view(self.concatenated.shape[0], -1)
        result = torch.zeros_like(u)
        for form, weight, (heads, dv) in self._slices:
            pulled = (u @ weight).view(-1, heads, dv).transpose(0, 1)
            pushed = form.product(pulled.flatten()).view(heads, -1, dv)
            result = result + _tokens_first(pushed) @ weight.T
        return result.flatten()

    @cached_property
    def _outputs(self) -> list[Tensor]:
        return [_by_head(form) for form in self.forms]

    @cached_property
    def _slices(self) -> list[tuple[AbstractForm, Tensor, tuple[int, int]]]:
        """Each form with the columns of w_o that read it, (Do, heads dv), and its (heads, dv)."""
        sizes = [(out.shape[0], out.shape[2]) for out in self._outputs]
        return list(zip(self.forms, self.w_o.split([h * dv for h, dv in sizes], dim=1), sizes, strict=True))


@dataclass(frozen=True, eq=False)
class SumForm(AbstractForm):
    """Several sets of parameters behind the same outputs: J = [J_1 J_2 ...], and J J^T is the sum of theirs.

    Heads behind W_O, and W_O itself, for example. The first part has the output.
    """

    parts: tuple[AbstractForm, ...]

    def __post_init__(self) -> None:
        """Check that the parts are about the same outputs."""
        if len({part.num_outputs for part in self.parts}) != 1:
            raise ValueError(f"expected parts of one size, got {[part.num_outputs for part in self.parts]} outputs")

    @property
    def num_outputs(self) -> int:
        """The same for all."""
        return self.parts[0].num_outputs

    def output(self) -> Tensor:
        """That of the first part."""
        return self.parts[0].output()

    def structure(self) -> Structure:
        """Sizes, and an upper bound on the rank: the parts may move the outputs alike."""
        found = [part.structure() for part in self.parts]
        rank = min(self.num_outputs, sum(part.max_rank for part in found))
        names = ["upper bound on the rank", _listed(found)] if rank < self.num_outputs else []
        return Structure(
            num_outputs=self.num_outputs,
            num_parameters=sum(part.num_parameters for part in found),
            token_rank=max(part.token_rank for part in found),
            memory_rank=max(part.memory_rank for part in found),
            max_rank=rank,
            null_space="; ".join(name for name in names if name),
        )

    def product(self, flat: Tensor) -> Tensor:
        """Sum of the parts' products."""
        return sum((part.product(flat) for part in self.parts[1:]), start=self.parts[0].product(flat))

    def output_gram(self) -> Tensor:
        """Sum of the parts' Gram matrices."""
        return sum((part.output_gram() for part in self.parts[1:]), start=self.parts[0].output_gram())

    def explicit_jacobian(self) -> Tensor:
        """The parts side by side."""
        return torch.cat([part.explicit_jacobian() for part in self.parts], dim=1)


@dataclass(frozen=True, eq=False)
class OutputWeights(AbstractForm):
    """The Jacobian of a linear layer's output with respect to its own weight: J = inputs (x) I.

    Attributes:
        inputs: what the parameters multiply, (N, columns).
        out: outputs per token.
    """

    inputs: Tensor
    out: int

    @property
    def num_outputs(self) -> int:
        """N Do."""
        return self.inputs.shape[0] * self.out

    def structure(self) -> Structure:
        """Do rank(inputs), exactly."""
        rank, (_, columns) = numerical_rank(self.inputs), self.inputs.shape
        return Structure(self.num_outputs, self.out * columns, rank, rank, self.out * rank, "")

    def explicit_jacobian(self) -> Tensor:
        """J with compressed inputs."""
        return torch.kron(compressed(self.inputs), torch.eye(self.out, dtype=torch.float64))

    def product(self, flat: Tensor) -> Tensor:
        """(inputs inputs^T (x) I) u."""
        u = flat.view(self.inputs.shape[0], -1)
        return (self.inputs @ (self.inputs.T @ u)).flatten()


def with_output_weights(layer: ProjectedHeads, *, weight: bool = True, bias: bool = False) -> AbstractForm:
    """A layer with W_O, or b_O, or both among its parameters.

    Q, K, V and W_O overlap in general (W_v E with -E W_h is null for every E): the rank is an upper bound.
    """
    if bias and layer.b_o is None:
        raise ValueError("b_o cannot be a parameter: there is none")
    rows = layer.concatenated
    inputs = with_constant(rows, bias) if weight else torch.ones_like(rows[:, : int(bias)])
    return SumForm((layer, OutputWeights(inputs, layer.w_o.shape[0]))) if inputs.shape[1] else layer


def _by_head(form: AbstractForm) -> Tensor:
    """Output as (heads, N, dv)."""
    output = form.output()
    return output[None] if output.dim() == 2 else output


def _tokens_first(by_head: Tensor) -> Tensor:
    """(heads, N, dv) -> (N, heads dv)."""
    return by_head.transpose(0, 1).flatten(1)


def _listed(parts: Sequence[Structure]) -> str:
    """Null spaces of the parts, each once."""
    return " | ".join(dict.fromkeys(part.null_space for part in parts if part.null_space))
