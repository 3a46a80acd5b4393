r"""Several heads: side by side, and mixed by the output projection W_O.

Heads are given as forms (`wellcond.jacobian.forms`) that know their value: `PlainHead`, `NormalisedHead`,
`ChannelHead`, `PositionBiasHead`. The rows of a form's Jacobian are those of its `output()`, (heads, N, dv) or (N, dv),
flattened.

Legend (theory.md, section 3; everything float64):

    o_i^h  (dv)                 output of head h on token i;  c_i = (o_i^1 .. o_i^H) the concatenation
    W_h  (dv x Do)              rows of W_O that read head h;  torch stores W_O^T = [W_1^T .. W_H^T] (Do, H dv)
    y_i = W_O^T c_i + b_O       output of the layer, rows (i, o), n = N Do

    QKV parameters:   G_ij = sum over forms of  sum_hh' W_h^T G_(h,i),(h',j) W_h'      h, h' the heads of one form
    W_O parameters:   G_ij += (c_i . c_j) I                                            b_O: G_ij += I

Query heads that share keys and values share parameters, so they are one form and h != h' occurs.

Without W_O different forms share neither outputs nor parameters: J of the layer is block-diagonal, its singular values
are the union of theirs, and kappa(layer) = max sigma_max / min sigma_min.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.head import compressed
from wellcond.jacobian.forms import Form, WideForm
from wellcond.jacobian.normalised import with_constant
from wellcond.jacobian.records import JacobianSpectrum
from wellcond.jacobian.structure import Structure, token_rank


class HeadForm(Form, Protocol):
    """A form whose value is known too."""

    def output(self) -> Tensor:
        """The value, (heads, N, dv) or (N, dv); flattened, it has the order of the rows of J."""
        ...


@dataclass(frozen=True, eq=False)
class PlainHead(WideForm):
    """The form of a `Head`, with its value."""

    @property
    def num_query_heads(self) -> int:
        """Query heads g of the group."""
        return self.head.num_query_heads

    @cached_property
    def p(self) -> Tensor:
        """P, (R, M)."""
        return self.head.probabilities().flatten(0, 1)

    @cached_property
    def v(self) -> Tensor:
        """V, (M, dv)."""
        return self.head.values()

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.head.output()


@dataclass(frozen=True, eq=False)
class HeadUnion:
    """Heads side by side, without W_O. Rows are ordered head by head."""

    forms: tuple[HeadForm, ...]

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
    smallest = min(one.sigma_min for one in spectra)
    if not complete or smallest == 0 or any(one.nullity for one in spectra):
        return math.inf
    return largest / smallest


@dataclass(frozen=True, eq=False)
class ProjectedHeads:
    """Heads and the output projection.

    Attributes:
        forms: heads, or groups of heads, in the order in which W_O reads them.
        w_o: (Do, H dv), as torch stores it.
        b_o: (Do).
        weight_is_parameter: W_O counts as a parameter.
        bias_is_parameter: b_o counts as a parameter.
    """

    forms: tuple[HeadForm, ...]
    w_o: Tensor
    b_o: Tensor | None = None
    weight_is_parameter: bool = False
    bias_is_parameter: bool = False

    def __post_init__(self) -> None:
        """Cast to float64 and check shapes and values."""
        object.__setattr__(self, "forms", tuple(self.forms))
        for name in ("w_o", "b_o"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not bool(torch.isfinite(tensor).all()):
                raise WeightError(f"{name} has NaN or infinite entries: the Jacobian is not defined")
            object.__setattr__(self, name, tensor.detach().to(torch.float64))
        if self.bias_is_parameter and self.b_o is None:
            raise ValueError("b_o cannot be a parameter: there is none")
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
        """Sizes and an upper bound on the rank.

        QKV parameters reach at most N rank(W_O) dimensions, and no more than the ranks of the heads together; W_O
        reaches Do rank(C~), C~ the rows c_i with a constant input for the bias. The two overlap in general (W_v E with
        -E W_h is null for every E), so this is an upper bound unless it is the number of outputs.
        """
        heads = HeadUnion(self.forms).structure()
        n, out = self.concatenated.shape[0], self.w_o.shape[0]
        inputs = self._inputs()
        mixed = min(heads.max_rank, n * token_rank(self.w_o))
        rank = min(self.num_outputs, mixed + (out * token_rank(inputs) if inputs.shape[1] else 0))
        parameters = heads.num_parameters + self.weight_is_parameter * self.w_o.numel() + self.bias_is_parameter * out
        names = [heads.null_space] if heads.null_space else []
        if rank < self.num_outputs:
            names = ["upper bound on the rank", f"outputs that W_O does not reach: {self.num_outputs - rank}", *names]
        return Structure(self.num_outputs, parameters, heads.token_rank, heads.memory_rank, rank, "; ".join(names))

    def output_gram(self) -> Tensor:
        """J J^T, (N Do, N Do); at scale use `product`."""
        n, out = self.concatenated.shape[0], self.w_o.shape[0]
        gram = self.w_o.new_zeros(n, out, n, out)
        for form, weight, (heads, dv) in self._slices:
            w = weight.reshape(out, heads, dv)
            part = form.output_gram().view(heads, n, dv, heads, n, dv)
            half = torch.einsum("ohv,hivkjw->iokjw", w, part)
            gram += torch.einsum("iokjw,pkw->iojp", half, w)
        inputs = self._inputs()
        gram.diagonal(dim1=1, dim2=3).add_((inputs @ inputs.T)[:, :, None])
        return gram.reshape(n * out, n * out)

    def parameter_blocks(self) -> dict[str, Tensor]:
        """J of the parameters of the heads, ``heads``, and of the output projection, ``o`` (bias included)."""
        n, out = self.concatenated.shape[0], self.w_o.shape[0]
        parts = []
        for form, weight, (heads, dv) in self._slices:
            jacobian = form.explicit_jacobian().view(heads, n, dv, -1)
            parts.append(torch.einsum("ohv,hivp->iop", weight.reshape(out, heads, dv), jacobian).reshape(n * out, -1))
        inputs = compressed(self._inputs())
        identity = torch.eye(out, dtype=torch.float64, device=inputs.device)
        of_output = torch.einsum("ia,op->ioap", inputs, identity).reshape(n * out, -1)
        return {"heads": torch.cat(parts, dim=1), "o": of_output}

    def explicit_jacobian(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return torch.cat(list(self.parameter_blocks().values()), dim=1)

    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector of length N Do: nothing of size n x n is formed if no head forms it."""
        u = flat.view(self.concatenated.shape[0], -1)
        inputs = self._inputs()
        result = inputs @ (inputs.T @ u)
        for form, weight, (heads, dv) in self._slices:
            pulled = (u @ weight).view(-1, heads, dv).transpose(0, 1)
            pushed = form.product(pulled.flatten()).view(heads, -1, dv)
            result = result + _tokens_first(pushed) @ weight.T
        return result.flatten()

    def _inputs(self) -> Tensor:
        """What the parameters of the output projection multiply; no columns if none is counted."""
        c = self.concatenated if self.weight_is_parameter else self.concatenated[:, :0]
        if self.weight_is_parameter:
            return with_constant(c, self.bias_is_parameter)
        return torch.ones_like(self.concatenated[:, :1]) if self.bias_is_parameter else c

    @cached_property
    def _outputs(self) -> list[Tensor]:
        return [_by_head(form) for form in self.forms]

    @cached_property
    def _slices(self) -> list[tuple[HeadForm, Tensor, tuple[int, int]]]:
        """Each form with the columns of w_o that read it, (Do, heads dv), and its (heads, dv)."""
        sizes = [(out.shape[0], out.shape[2]) for out in self._outputs]
        return list(zip(self.forms, self.w_o.split([h * dv for h, dv in sizes], dim=1), sizes, strict=True))


def _by_head(form: HeadForm) -> Tensor:
    """Output as (heads, N, dv)."""
    output = form.output()
    return output[None] if output.dim() == 2 else output


def _tokens_first(by_head: Tensor) -> Tensor:
    """(heads, N, dv) -> (N, heads dv)."""
    return by_head.transpose(0, 1).flatten(1)


def _listed(parts: Sequence[Structure]) -> str:
    """Null spaces of the heads, each once."""
    return " | ".join(dict.fromkeys(part.null_space for part in parts if part.null_space))
