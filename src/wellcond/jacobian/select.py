"""Which method computes a Jacobian's spectrum: a table that can be asked.

| method | what it does | all singular values | wants |
|---|---|---|---|
| dense | automatic differentiation, then SVD | yes | n x p entries; tests and tiny heads |
| gram | J J^T or J^T J from blocks, eigenvalues; SVD of J where squaring loses them | yes | smaller side <= 6200 |
| cholesky | J J^T from blocks, Cholesky, inverse Lanczos | no | full row rank, n up to 20000 |
| implicit | Lanczos on products with J J^T | no | nothing but tokens; sigma_min is only bounded |
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from wellcond.errors import WellcondError, check_choice
from wellcond.jacobian.head import SoftmaxHead
from wellcond.jacobian.records import MethodName
from wellcond.jacobian.structure import Structure

DENSE_LIMIT = 256
GRAM_LIMIT = 6200
CHOLESKY_LIMIT = 20_000
METHODS = ("dense", "gram", "cholesky", "implicit")


class MemoryLimitError(WellcondError, MemoryError):
    """A method would need more memory than there is."""


@dataclass(frozen=True)
class Choice:
    """A method, why it was chosen, and the bytes it needs at its peak."""

    method: MethodName
    reason: str
    num_bytes: int


def needed_bytes(method: str, head: SoftmaxHead, structure: Structure) -> int:
    """Peak memory of a method, roughly, in bytes."""
    n, rows, m = head.num_outputs, head.num_rows, head.memory.shape[0]
    blocks = n * (head.head_dim + min(head.memory.shape))
    compressed = 3 * head.head_dim * min(head.x.shape)
    entries = {
        "dense": 3 * n * structure.num_parameters,
        "gram": 3 * min(n, compressed) ** 2 + 2 * blocks,
        "cholesky": n * n + 3 * blocks,
        "implicit": 8 * rows * max(rows, m) + 300 * n,
    }
    return 8 * entries[method]


def choose_method(
    head: SoftmaxHead, structure: Structure, *, asked: str = "auto", memory_limit: int | None = None
) -> Choice:
    """The method for a head, with the reason.

    Raises:
        UnknownChoiceError: no such method.
        MemoryLimitError: the method asked for does not fit; says what would.
    """
    check_choice("Jacobian method", asked, ("auto", *METHODS))
    limit = available_bytes() if memory_limit is None else memory_limit
    fitting = [name for name in METHODS if needed_bytes(name, head, structure) <= limit]
    if asked != "auto":
        num_bytes = needed_bytes(asked, head, structure)
        if num_bytes > limit:
            raise MemoryLimitError(
                f"method {asked!r} needs about {num_bytes:,} bytes for {head.num_rows} rows of width {head.value_dim}, "
                f"and {limit:,} are available; would fit: {', '.join(fitting) or 'none, use fewer tokens'}"
            )
        return Choice(asked, "asked for", num_bytes)  # type: ignore[arg-type]
    n, smaller = head.num_outputs, min(head.num_outputs, 3 * head.head_dim * min(head.x.shape))
    full_row_rank = structure.max_rank == n
    if smaller <= GRAM_LIMIT and "gram" in fitting:
        return Choice("gram", f"the smaller side has {smaller} <= {GRAM_LIMIT}", needed_bytes("gram", head, structure))
    if full_row_rank and n <= CHOLESKY_LIMIT and "cholesky" in fitting:
        reason = f"full row rank and {GRAM_LIMIT} < n = {n} <= {CHOLESKY_LIMIT}"
        return Choice("cholesky", reason, needed_bytes("cholesky", head, structure))
    if "implicit" not in fitting:
        raise MemoryLimitError(
            f"even matrix-free products need about {needed_bytes('implicit', head, structure):,} bytes, and {limit:,} "
            "are available; use fewer tokens"
        )
    reason = (
        f"n = {n} is too large to factorise" if full_row_rank else f"n = {n}, rank-deficient, too large for eigenvalues"
    )
    return Choice("implicit", reason, needed_bytes("implicit", head, structure))


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
