"""Spectra of the heads of an attention layer and of their QK and OV circuits, from d x d Gram matrices alone.

`gram_matrices` multiplies on the device of the weights and waits for nothing; `circuit_numbers` decomposes what it
returned, on the CPU. No D x D matrix is made: the singular values of W_Q^T W_K are the square roots of the eigenvalues
of L^T G_K L, with L L^T = G_Q = W_Q W_Q^T by Cholesky, or by eigenvectors where that fails.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ROLES = ("q", "k", "v", "o")
CIRCUITS = {"qk": ("q", "k"), "ov": ("o", "v")}
PROBES = 8
NUMBERS = (
    *(f"{name}_{role}" for role in ROLES for name in ("sigma_max", "sigma_min", "kappa", "rank")),
    *(f"{name}_{circuit}" for circuit in CIRCUITS for name in ("sigma_max", "sigma_min", "sec", "rank")),
    "duplicate",
)
"""Names of what `circuit_numbers` returns."""


@torch.no_grad()
def gram_matrices(heads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """W W^T of every head (heads, d, d), of W_O the other way round, and how alike heads are; in float64.

    Args:
        heads: by role: q, k, v (heads, d, D) and o (heads, D, d), o may be missing; k and v may have fewer heads.

    Example:
        >>> heads = {role: torch.randn(2, 3, 12) for role in "qkv"}
        >>> {role: tuple(gram.shape) for role, gram in gram_matrices(heads).items()}
        {'q': (2, 3, 3), 'k': (2, 3, 3), 'v': (2, 3, 3), 'duplicate': (2,)}
    """
    found = {}
    for role, weights in heads.items():
        wide = weights.detach().to(_exact(weights.device))
        found[role] = wide.mT @ wide if role == "o" else wide @ wide.mT
    found["duplicate"] = most_alike(heads["q"], heads["k"], heads["v"])
    return found


def most_alike(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of every query head the largest cosine with another one, of W_Q^T W_K and of W_V, whichever is smaller.

    Both are compared on random vectors. NaN where there is one head, or heads of another width.
    """
    alike = head_cosines(q, k, v)
    if alike is None or len(alike) < 2:
        return torch.full((len(q),), torch.nan, device=q.device)
    return alike.masked_fill(torch.eye(len(alike), dtype=torch.bool, device=alike.device), -torch.inf).amax(1)


def head_cosines(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Cosines of all pairs of query heads, as `most_alike`; None where queries and keys read other widths."""
    if k.shape[2] != q.shape[2]:
        return None
    q, k, v = (part.detach().float() for part in (q, k, v))
    probes = torch.randn(PROBES, q.shape[2], generator=torch.Generator().manual_seed(0)).to(q.device)
    keys = (k @ probes.T).repeat_interleave(len(q) // len(k), 0)
    values = (v @ probes[:, : v.shape[2]].T).repeat_interleave(len(q) // len(v), 0)
    return torch.minimum(_cosines(q.mT @ keys), _cosines(values))


def _cosines(heads: Tensor) -> Tensor:
    flat = torch.nn.functional.normalize(heads.flatten(1), dim=1)
    return flat @ flat.T


def circuit_numbers(grams: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Singular values in numbers, (heads) each, from Gram matrices on the CPU; NaN where one is missing or not finite.

    ``rank`` is the effective rank, exp of the entropy of sigma / sum(sigma); ``sec`` is the SEC index, the share of the
    largest d/16 (at least one) of the squared singular values of a circuit. `sigma_min` of a circuit is its d-th.

    Example:
        >>> numbers = circuit_numbers(gram_matrices({role: torch.eye(3).expand(2, 3, 3) for role in "qkvo"}), 2)
        >>> numbers["kappa_q"].tolist(), [round(one, 4) for one in numbers["rank_qk"].tolist()]
        ([1.0, 1.0], [3.0, 3.0])
    """
    found = {name: torch.full((num_heads,), torch.nan, dtype=torch.float64) for name in NUMBERS}
    for role in ROLES:
        if role in grams:
            values = _of_query_heads(_eigenvalues(grams[role]), num_heads)
            found |= _numbers(values, role, ("sigma_max", "sigma_min", "kappa", "rank"))
    for circuit, (first, second) in CIRCUITS.items():
        if first not in grams or second not in grams:
            continue
        factor = _of_query_heads(_factor(grams[first].double()), num_heads)
        gram = _of_query_heads(grams[second].double(), num_heads)
        if factor.shape == gram.shape:
            values = _eigenvalues(factor.mT @ gram @ factor)
            found |= _numbers(values, circuit, ("sigma_max", "sigma_min", "sec", "rank"))
    if "duplicate" in grams:
        found["duplicate"] = _of_query_heads(grams["duplicate"], num_heads).double()
    return found


def _eigenvalues(gram: Tensor) -> Tensor:
    """In ascending order; NaN where a matrix is not finite."""
    gram = gram.double()
    bad = ~torch.isfinite(gram).flatten(1).all(1)
    gram = torch.where(bad[:, None, None], 0.0, gram)
    return torch.linalg.eigvalsh(gram).clamp_min(0.0).masked_fill(bad[:, None], torch.nan)


def _factor(gram: Tensor) -> Tensor:
    """L with L L^T = G, for positive semi-definite G; NaN where a matrix is not finite."""
    factor, failed = torch.linalg.cholesky_ex(gram)
    failed = failed.nonzero().flatten()  # rank deficient, or not finite
    if len(failed):
        known = gram[failed].isfinite().flatten(1).all(1)[:, None, None]
        values, vectors = torch.linalg.eigh(torch.where(known, gram[failed], 0.0))
        root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
        factor[failed] = torch.where(known, root, torch.nan)
    return factor


def _numbers(squares: Tensor, name: str, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    sigma = squares.sqrt()
    share = sigma / sigma.sum(-1, keepdim=True)
    top = max(1, squares.shape[-1] // 16)
    numbers = {
        "sigma_max": sigma[:, -1],
        "sigma_min": sigma[:, 0],
        "kappa": sigma[:, -1] / sigma[:, 0],
        "rank": torch.special.entr(share).sum(-1).exp(),
        "sec": squares[:, -top:].sum(-1) / squares.sum(-1),
    }
    return {f"{one}_{name}": numbers[one] for one in wanted}


def _of_query_heads(part: Tensor, num_heads: int) -> Tensor:
    return part.repeat_interleave(num_heads // len(part), 0)


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
