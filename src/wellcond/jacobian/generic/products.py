"""Products with the Jacobian of any function of a few weights: J v in forward mode, J^T u in reverse mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.autograd import forward_ad

ADJOINT = 1e-9
"""<u, J v> = <J^T u, v>, up to rounding, relative to the lengths of the vectors."""


@cache
def _load_forward_mode() -> None:
    """The first dual number makes torch script its decompositions, of which it then warns."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


class Products:
    """J of `function` at `weights`; columns are the weights in order, each flattened as its transpose, row by row."""

    def __init__(
        self, function: Callable[..., Tensor], weights: tuple[Tensor, ...], size: int, batch_size: int
    ) -> None:
        """Of a function with `size` outputs; `batch_size` products J^T u are computed together."""
        self.function, self.weights, self.size, self.batch_size = function, weights, size, batch_size
        self.num_parameters = sum(w.numel() for w in weights)
        self._in_batches = True

    @cached_property
    def _recorded(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Weights and output with the graph between them."""
        with torch.enable_grad():
            leaves = tuple(w.clone().requires_grad_(True) for w in self.weights)
            return leaves, self.function(*leaves)

    @cached_property
    def _forward_mode(self) -> bool:
        """Whether forward mode differentiates what reverse mode does, which is what training sees.

        An operation may have no forward-mode derivative, and forward mode goes through what a module computes under
        `torch.no_grad`, where reverse mode stops.
        """
        # NaN and infinity have no mode that is right: they are left to whoever reads the products.
        return self._has_forward_mode and not self.adjoint_error() > ADJOINT

    @cached_property
    def _has_forward_mode(self) -> bool:
        try:
            self._jvp_forward(tuple(torch.zeros_like(w) for w in self.weights))
        except (NotImplementedError, RuntimeError) as error:
            if "forward" not in str(error).lower():
                raise
            return False
        return True

    def adjoint_error(self, generator: torch.Generator | None = None) -> float:
        """|<u, J v> - <J^T u, v>| / (|u| |J v| + |J^T u| |v|) for random u and v: rounding, if all is well.

        J v is in forward mode wherever there is one, independent of the reverse mode of J^T u.
        """
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        u = torch.randn(self.size, dtype=torch.float64, generator=generator)
        v = torch.randn(self.num_parameters, dtype=torch.float64, generator=generator)
        push = self._jvp_forward if self._has_forward_mode else self._jvp_reverse
        pushed, pulled = push(self.unflatten(v)), self.vjp(u)
        size = float(u.norm() * pushed.norm() + pulled.norm() * v.norm())
        return 0.0 if size == 0 else abs(float(u @ pushed - pulled @ v)) / size

    def vjp(self, u: Tensor) -> Tensor:
        """J^T u."""
        leaves, output = self._recorded
        # A weight that does not matter (the queries of a single token) has no path to the output.
        return self.flatten(*_grad(output, leaves, u.view_as(output)))

    def jvp(self, v: Tensor) -> Tensor:
        """J v."""
        tangents = self.unflatten(v)
        return self._jvp_forward(tangents) if self._forward_mode else self._jvp_reverse(tangents)

    def _jvp_forward(self, tangents: tuple[Tensor, ...]) -> Tensor:
        _load_forward_mode()
        with forward_ad.dual_level(), torch.no_grad():
            duals = [forward_ad.make_dual(w, t) for w, t in zip(self.weights, tangents, strict=True)]
            output = self.function(*duals)
            tangent = forward_ad.unpack_dual(output).tangent
            return torch.zeros(self.size, dtype=torch.float64) if tangent is None else tangent.flatten()

    def _jvp_reverse(self, tangents: tuple[Tensor, ...]) -> Tensor:
        """J v = d<J^T u, v>/du: reverse mode twice."""
        with torch.enable_grad():
            leaves = tuple(w.clone().requires_grad_(True) for w in self.weights)
            output = self.function(*leaves)
            u = torch.zeros_like(output, requires_grad=True)
            pulled = _grad(output, leaves, u, create_graph=True)
            total = torch.stack([(p * t).sum() for p, t in zip(pulled, tangents, strict=True)]).sum()
        return _grad(total, (u,), None)[0].flatten()

    def vjps(self, covectors: Tensor) -> Tensor:
        """J^T u for many u at a time: (count, p) from (count, n)."""
        found = torch.empty(len(covectors), self.num_parameters, dtype=torch.float64)
        for some, into in zip(covectors.split(self.batch_size), found.split(self.batch_size), strict=True):
            if self._in_batches:
                try:
                    into.copy_(self._pull(some))
                    continue
                except (NotImplementedError, RuntimeError, ValueError):
                    self._in_batches = False  # an operation of this module cannot be batched (or must fail by itself)
            into.copy_(torch.stack([self.vjp(covector) for covector in some]))
        return found

    def _pull(self, covectors: Tensor) -> Tensor:
        leaves, output = self._recorded
        if not output.requires_grad:
            return torch.zeros(len(covectors), self.num_parameters, dtype=torch.float64)
        pulled = torch.autograd.grad(
            output, leaves, covectors.view(-1, *output.shape), retain_graph=True, is_grads_batched=True,
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        return torch.cat([w.mT.reshape(len(covectors), -1) for w in pulled], dim=1)

    def flatten(self, *weights: Tensor) -> Tensor:
        """Weights as one vector (p,), in the order of the columns."""
        return torch.cat([w.mT.reshape(-1) for w in weights])

    def unflatten(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `flatten`."""
        parts = vector.split([w.numel() for w in self.weights])
        return tuple(part.view(w.mT.shape).mT for part, w in zip(parts, self.weights, strict=True))


def _grad(
    output: Tensor, inputs: tuple[Tensor, ...], weight: Tensor | None, *, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Gradients; zero where no path leads from an input to the output."""
    if not output.requires_grad:
        return tuple(torch.zeros_like(w) for w in inputs)
    return torch.autograd.grad(
        output, inputs, weight, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
