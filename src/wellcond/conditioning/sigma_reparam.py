r"""Sigma-Reparam (Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2303.06296).

.. math:: \hat W = \frac{\gamma}{\sigma_1(W)} \, W, \qquad \gamma \text{ learned}, \quad \gamma_0 = \sigma_1(W_0)

The largest singular value comes from one step of power iteration per forward pass in training: the right singular
vector is a buffer beside the weight, found by SVD at first. It is a constant of the gradient, as in the release, so
that the gradient of :math:`\sigma_1 = |W v|` with respect to W is :math:`u v^T`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from wellcond.attention.sharding import full_tensor, is_distributed, local_shard
from wellcond.conditioning.corrections import FollowingCorrection
from wellcond.conditioning.methods import Correction, Layout, register_condition
from wellcond.private import in_backward, is_functorch_tensor

DIRECTION = "direction"


class PowerIterated(FollowingCorrection):
    """A correction that keeps a right singular vector of every matrix, and improves it in every pass of training."""

    def first_state(self, raw: Tensor) -> dict[str, Tensor]:
        """The learned gains, and the directions, which are buffers."""
        state = super().first_state(raw)
        name = self._learned_name(DIRECTION)
        return {**state, name: state[name].detach()}

    def before_pass(self, module: nn.Module, raw: Tensor) -> None:
        """One step of power iteration; not in evaluation, nor when a backward pass computes this forward again."""
        if not module.training or is_distributed(raw) or not _is_trained(raw):
            return
        name = self._learned_name(DIRECTION)
        directions, matrices, start = self.state_of(module)[name], self.view.matrices(raw.detach()[None]), 0
        with torch.no_grad():
            for group in self.groups:
                own = directions[start : start + len(group)]
                own.copy_(improved(self._select(matrices, group), own))
                start += len(group)

    def value(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The corrected weight; gains that FSDP2 shards are gathered."""
        return super().value(raw, {name: full_tensor(tensor) for name, tensor in state.items()})

    def shard(self, raw: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The part of this rank, for a checkpoint; tensor parallelism cannot train it."""
        if torch.is_grad_enabled():
            return super().shard(raw, state)
        return local_shard(raw, self.shape).of(self.value(full_tensor(raw), state)).contiguous()


def _is_trained(raw: Tensor) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch.is_grad_enabled()
    return not in_backward() and not is_functorch_tensor(raw) and get_proxy_mode() is None


@register_condition("sigma_reparam")
def sigma_reparam(*, layout: Layout = "per_head") -> Correction:
    """Every head's weight divided by its largest singular value, times a learned gain.

    Args:
        layout: a gain for each head of a projection, or one for all its heads as one matrix.
    """
    return Correction(
        reparametrised,
        layout=layout,
        gradient="through",
        learned={
            "gamma": lambda heads: largest_singular(heads)[0],
            DIRECTION: lambda heads: largest_singular(heads)[1],
        },
        settings={"layout": layout},
        stored_as=PowerIterated,
    )


def reparametrised(matrices: Tensor, gamma: Tensor, direction: Tensor) -> Tensor:
    """`gamma W / |W v|` for matrices (count, rows, in) and directions (count, in); zeros stay zero.

    Example:
        >>> weights = torch.diag(torch.tensor([4.0, 1.0]))[None]
        >>> reparametrised(weights, torch.ones(1), torch.tensor([[1.0, 0.0]]))[0].diagonal().tolist()
        [1.0, 0.25]
    """
    with torch.autocast(matrices.device.type, enabled=False):
        wide = _wide(matrices)
        along = _unit(direction.detach().to(wide.dtype))  # a copy: the buffer changes before a later backward pass
        square = torch.bmm(wide, along[:, :, None]).square().sum((1, 2))
        scale = gamma.to(wide.dtype) * torch.where(square > 0, square, 1.0).rsqrt()
        return (wide * scale[:, None, None]).to(matrices.dtype)


def improved(matrices: Tensor, direction: Tensor) -> Tensor:
    """One step of power iteration with W^T W; the direction stays where W is zero."""
    with torch.autocast(matrices.device.type, enabled=False):
        wide = _wide(matrices)
        former = direction.to(wide.dtype)
        found = torch.bmm(wide.mT, torch.bmm(wide, _unit(former)[:, :, None]))[:, :, 0]
        return torch.where(found.norm(dim=1, keepdim=True) > 0, _unit(found), former)


def largest_singular(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Largest singular values (count) and their right singular vectors (count, in), by SVD."""
    _, sigma, right = torch.linalg.svd(_wide(matrices), full_matrices=False)
    return sigma[:, 0].to(matrices.dtype), right[:, 0].to(matrices.dtype).contiguous()


def _wide(matrices: Tensor) -> Tensor:
    return matrices.to(torch.promote_types(matrices.dtype, torch.float32))


def _unit(vectors: Tensor) -> Tensor:
    norm = vectors.norm(dim=-1, keepdim=True)
    return vectors / torch.where(norm > 0, norm, 1.0)
