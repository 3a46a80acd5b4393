"""How the spectrum of a `JacobianOperator` is computed: a table of solvers, each with a cost and a run.

`choose` can be asked, and what it answers is what runs:

| method | solver | what it does | all singular values | taken by `auto` if |
|---|---|---|---|---|
| dense | dense | automatic differentiation (or J itself), then SVD | yes | never: tests and tiny heads |
| implicit | closed form | sigma_min(J) = sigma_min(PY); sigma_max by Lanczos | no | n > 768, values span a constant |
| gram | triangle | J made triangular, both ends by Lanczos on it and its inverse | no | it is cheap, side > 2500 |
| gram | proved ends | float32 factor of the smaller Gram matrix, float64 products, a proof | no | side > 2500 |
| gram | gram | J J^T or J^T J from factors, eigenvalues; SVD of J where squaring loses them | yes | side <= 6200 |
| cholesky | cholesky | J J^T from factors, float32 or float64 factor, iterations | no | full row rank, n <= 20000 |
| implicit | exhaustive products | Lanczos through the whole space of outputs | no | full row rank, n <= 1500 |
| implicit | products | Lanczos on products with J J^T; sigma_min is only bounded | no | otherwise |

The method is what a user asks for and what the record names, the solver what runs. `auto` takes the first that fits
into memory. Ask for ``gram`` to have all singular values. The limits, each with its reason, are in
`wellcond.jacobian.problem`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellcond.arguments import check_choice
from wellcond.errors import MemoryLimitError, NotDefinedError, TooLongError
from wellcond.jacobian import problem as limits
from wellcond.jacobian.ends import factorise_, from_qr, from_triangle, least_singular_value, no_eigenvalue_below
from wellcond.jacobian.operator import JacobianOperator
from wellcond.jacobian.problem import (
    CLOSED,
    DECOMPOSED_PER_SECOND,
    FACTORISED_PER_SECOND,
    LANCZOS_STEPS,
    LARGEST_SHIFTED_KAPPA,
    LARGEST_SQUARED_KAPPA,
    METHODS,
    OPERATIONS_PER_SECOND,
    Convention,
    Cost,
    JacobianSpectrum,
    MethodName,
    Problem,
    Status,
    show_seconds,
)
from wellcond.linalg.lanczos import largest_eigenvalue
from wellcond.linalg.spectrum import singular_values, where_decomposed

ASKED = "asked for"


@dataclass(frozen=True)
class Solver:
    """One way to a spectrum.

    Attributes:
        name: of this solver.
        method: the name that a user asks for.
        cost: bytes and seconds; None where it is not applicable, or not what was asked for.
        run: computes the spectra of problems that it was chosen for.
    """

    name: str
    method: MethodName
    cost: Callable[[Problem], Cost | None]
    run: Callable[[Sequence[Problem]], list[JacobianSpectrum]]


def choose(problem: Problem) -> tuple[Solver, Cost]:
    """The first solver of the table that is applicable and fits into the memory.

    Raises:
        UnknownChoiceError: no such method.
        MemoryLimitError: the method asked for does not fit; says what would.
    """
    check_choice("Jacobian method", problem.asked, ("auto", *METHODS))
    for solver in SOLVERS:
        cost = solver.cost(problem) if problem.is_auto or solver.method == problem.asked else None
        if cost is not None and cost.num_bytes <= problem.limit:
            return solver, cost
    if problem.is_auto:
        raise MemoryLimitError(
            f"even matrix-free products need about {problem.needed_bytes('implicit'):,} bytes, and {problem.limit:,} "
            "are available; use fewer tokens"
        )
    needed = {method: problem.needed_bytes(method) for method in METHODS}
    fitting = [method for method in METHODS if needed[method] <= problem.limit]
    raise MemoryLimitError(
        f"method {problem.asked!r} needs about {needed[problem.asked]:,} bytes for {problem.gram.size} outputs, and "  # type: ignore[index]
        f"{problem.limit:,} are available; would fit: {', '.join(fitting) or 'none, use fewer tokens'}"
    )


def solve(problems: Sequence[Problem], admit: Callable[[float], bool] | None = None) -> list[JacobianSpectrum]:
    """Spectra of operators of one class and shape; those that take the same solver are given to it together.

    Raises: as `choose`; TooLongError if `admit`, asked with the seconds expected, says no.
    """
    choices = [choose(problem) for problem in problems]
    seconds = sum(cost.seconds for _, cost in choices)
    if admit is not None and not admit(seconds):
        raise TooLongError(seconds, show_seconds(seconds))
    found: dict[Problem, JacobianSpectrum] = {}
    for solver in SOLVERS:
        mine = []
        for problem, (chosen, cost) in zip(problems, choices, strict=True):
            if chosen is solver:
                problem.method, problem.why = solver.method, cost.reason
                mine.append(problem)
        found |= zip(mine, solver.run(mine) if mine else [], strict=True)
    return [found[problem] for problem in problems]


def operator_spectrum(operator: JacobianOperator, **options: Any) -> JacobianSpectrum:
    """Spectrum of any operator; options as in `operator_spectra`."""
    return operator_spectra([operator], **options)[0]


def operator_spectra(
    operators: Sequence[JacobianOperator],
    *,
    convention: Convention = "wide",
    method: str = "auto",
    rtol: float | None = None,
    memory_limit: int | None = None,
    admit: Callable[[float], bool] | None = None,
) -> list[JacobianSpectrum]:
    """Spectra of operators of one class and shape; those that take the solver ``gram`` are decomposed together.

    Raises: as `jacobian_spectrum`; TooLongError if `admit`, asked with the seconds expected, says no.
    """
    return solve([Problem(one, convention, method, rtol, memory_limit) for one in operators], admit)


def _each(run: Callable[[Problem], JacobianSpectrum]) -> Callable[[Sequence[Problem]], list[JacobianSpectrum]]:
    return lambda problems: [run(problem) for problem in problems]


# --- dense -----------------------------------------------------------------------------------------------------------


def _dense_cost(problem: Problem) -> Cost | None:
    if problem.is_auto:
        return None
    rows, columns = problem.shape
    seconds = rows * columns * min(rows, columns) / DECOMPOSED_PER_SECOND
    return Cost(problem.needed_bytes("dense"), seconds, ASKED)


def _dense(problem: Problem) -> JacobianSpectrum:
    reference = problem.hints.reference or problem.operator.as_matrix
    return problem.from_singular_values(singular_values(reference()))


# --- closed form -----------------------------------------------------------------------------------------------------


def _closed_form_cost(problem: Problem) -> Cost | None:
    n, needed = problem.gram.size, problem.needed_bytes("implicit")
    if not problem.is_auto or not problem.has_full_rank or n <= limits.SPECTRUM_LIMIT or needed > problem.limit:
        return None
    if problem.closed_form is None:
        return None
    why = f"n = {n} > {limits.SPECTRUM_LIMIT} and the values span a constant: sigma_min(J) = sigma_min(PY)"
    return Cost(needed, 0.0, why)  # both ends are known by now


def _closed_form(problem: Problem) -> JacobianSpectrum:
    closed = problem.closed_form
    assert closed is not None
    (low, high, error), top = closed
    return problem.record(
        math.sqrt(top.value),
        low,
        low,
        problem.gram.size,
        "exact",
        rank_bounds=(low - error, high + error),
        num_products=top.num_products,
    )


# --- gram: all singular values, or both ends of a large one ----------------------------------------------------------


def _gram_cost(problem: Problem) -> Cost | None:
    side = problem.smaller_gram.size
    if problem.is_auto and side > limits.GRAM_LIMIT:
        return None
    seconds = problem.smaller_gram.scratch / OPERATIONS_PER_SECOND + side**3 / DECOMPOSED_PER_SECOND
    why = f"the smaller side has {side} <= {limits.GRAM_LIMIT}" if problem.is_auto else ASKED
    return Cost(problem.needed_bytes("gram"), seconds, why)


def _only_ends(problem: Problem, side: int) -> bool:
    return problem.is_auto and side > limits.LARGEST_FULL_SVD


def _triangle_cost(problem: Problem) -> Cost | None:
    triangle = problem.hints.triangle
    wanted = triangle is not None and triangle.preferred and _only_ends(problem, problem.smaller_gram.size)
    return _gram_cost(problem) if wanted else None


def _proved_ends_cost(problem: Problem) -> Cost | None:
    wanted = problem.smaller_gram.steps is not None and _only_ends(problem, problem.smaller_gram.size)
    return _gram_cost(problem) if wanted else None


def _proved_ends(problem: Problem) -> JacobianSpectrum:
    """Both ends; all eigenvalues where float32 does not suffice, or the proof fails."""
    return _certified_ends(problem) or _gram([problem])[0]


def _certified_ends(problem: Problem) -> JacobianSpectrum | None:
    """Both ends of J from the smaller Gram matrix, the lower one proved to be the lowest; None where that fails."""
    gram = problem.smaller_gram
    steps = None if gram.steps is None else gram.steps()
    if steps is None or steps.size - steps.num_null != problem.bound.rank:
        return None
    top = largest_eigenvalue(lambda u: steps.matmat(u.to(gram.device)[None])[0].cpu(), steps.size)
    if top.value <= 0 or not top.converged:
        return None
    largest = math.sqrt(top.value)
    least = least_singular_value(steps, largest)
    if least.value is None or least.value * LARGEST_SQUARED_KAPPA < largest:
        return None
    rounding = steps.size * limits.EPSILON * top.value
    below = least.value**2 * (1 - CLOSED) - rounding
    if not no_eigenvalue_below(steps, largest, below):
        return None
    return problem.record(
        largest,
        problem.last(least.value),
        least.value,
        problem.bound.rank,
        "exact",
        reason=f"more than {limits.LARGEST_FULL_SVD}, so both ends only: {least.reason}, proved by a factorisation",
        rank_bounds=(math.sqrt(max(0.0, below - rounding)), _squared_interval(least.value, largest, steps.size)[1]),
        num_products=top.num_products + least.num_products,
    )


def _gram(problems: Sequence[Problem]) -> list[JacobianSpectrum]:
    """Eigenvalues of the smaller Gram matrices, all at once; SVD of those J whose squares lose too much."""
    found: dict[Problem, JacobianSpectrum] = {}
    squared = [problem for problem in problems if not _surely_lost(problem)]
    if squared:
        grams = _grams(squared)
        full = [problem.bound.rank >= grams.shape[-1] and _svd_fits(problem) for problem in squared]
        lost = _squaring_loses(grams) if any(full) else full
        kept = [at for at, losses in enumerate(zip(full, lost, strict=True)) if not all(losses)]
        squares = torch.linalg.eigvalsh(where_decomposed(grams if len(kept) == len(grams) else grams[kept]))
        del grams
        for at, values in zip(kept, squares.flip(-1).clamp_min(0), strict=True):
            record = _from_squares(squared[at], values)
            if record is not None:
                found[squared[at]] = record
    left = [problem for problem in problems if problem not in found]
    found |= zip(left, _svd(left) if left else [], strict=True)
    return [found[problem] for problem in problems]


def _grams(problems: Sequence[Problem]) -> Tensor:
    """The smaller Gram matrices, stacked."""
    together = problems[0].hints.grams
    if together is not None:
        return together([problem.operator for problem in problems])
    return _stacked([problem.smaller_gram.matrix() for problem in problems])


def _stacked(matrices: list[Tensor]) -> Tensor:
    return matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)


def _surely_lost(problem: Problem) -> bool:
    """Whether squaring loses too much of a J whose SVD fits: an operator may know that without any square."""
    full = problem.bound.rank >= problem.smaller_gram.size
    return full and _svd_fits(problem) and problem.hints.lower_kappa() > LARGEST_SQUARED_KAPPA


def _from_squares(problem: Problem, squares: Tensor) -> JacobianSpectrum | None:
    """Record of eigenvalues of the smaller Gram matrix; None if they lose too much and the SVD of J fits."""
    sigma, side = squares.sqrt(), len(squares)
    rank = min(problem.bound.rank, side)
    largest, smallest = float(sigma[0]), float(sigma[rank - 1])
    if largest == 0:
        return problem.from_singular_values(sigma)
    if smallest * LARGEST_SQUARED_KAPPA >= largest:
        values = torch.zeros(min(problem.shape), dtype=torch.float64)
        values[:rank] = sigma[:rank]
        return problem.record(
            largest,
            float(values[-1]),
            smallest,
            rank,
            "exact",
            values=values,
            max_bounds=_squared_interval(largest, largest, side),
            rank_bounds=_squared_interval(smallest, largest, side),
        )
    if _svd_fits(problem):
        return None
    high = _squared_interval(largest / LARGEST_SQUARED_KAPPA, largest, side)[1]
    return _without_squares(problem, "squaring loses the small ones and J itself is too large", largest, high)


def _squaring_loses(grams: Tensor) -> list[bool]:
    """Whether kappa(J) > LARGEST_SQUARED_KAPPA for sure, at a fifth of the price of the eigenvalues of G = J J^T.

    A Cholesky factorisation that breaks down has lambda_min < n eps lambda_max. One that does not has L_ii^2 >=
    lambda_min, as lambda_max >= G_ii, and power steps with G and G^-1 sharpen both: |G v| <= lambda_max and
    |G^-1 w| <= 1 / lambda_min for unit vectors v and w.
    """
    factor, info = torch.linalg.cholesky_ex(grams)
    largest, least = grams.diagonal(dim1=-2, dim2=-1).amax(-1), factor.diagonal(dim1=-2, dim2=-1).amin(-1)
    lost = (info > 0) | (largest > LARGEST_SQUARED_KAPPA**2 * least**2)
    generator = torch.Generator().manual_seed(0)
    v = w = torch.randn(grams.shape[-1], 1, generator=generator, dtype=torch.float64).to(grams.device)
    for _ in range(limits.POWER_STEPS):
        if bool(lost.all()):
            break
        v, w = grams @ (v / _length(v)), torch.cholesky_solve(w / _length(w), factor)
        lost = lost | ((_length(v) * _length(w))[..., 0, 0] > LARGEST_SQUARED_KAPPA**2)
    return (lost & (largest > 0)).tolist()


def _length(columns: Tensor) -> Tensor:
    return torch.linalg.vector_norm(columns, dim=-2, keepdim=True)


def _squared_interval(sigma: float, largest: float, side: int) -> tuple[float, float]:
    """Weyl: an eigenvalue computed with backward error side * eps * lambda_max is off by no more than that."""
    error = side * limits.EPSILON * largest**2
    return math.sqrt(max(0.0, sigma**2 - error)), math.sqrt(sigma**2 + error)


def _svd_fits(problem: Problem) -> bool:
    rows, columns = problem.shape
    return 24 * rows * columns <= problem.limit and rows * columns * min(rows, columns) <= limits.LARGEST_SVD


def _without_squares(
    problem: Problem, why: str, largest: float, high: float, num_products: int = 0
) -> JacobianSpectrum:
    """The ends from a triangular form of J, where there is one that fits; else what is certain of them.

    That a squared J is singular to rounding says nothing of the rank of J: sigma_min is somewhere in its interval, from
    what the operator is sure of to `high`, and no number stands for it.
    """
    if problem.fits_triangle():
        return from_triangle(problem, f"{why}: ")
    rank, sure = problem.bound.rank, problem.hints.bounds()[0]
    sure = sure if problem.has_full_rank else 0.0
    return problem.record(
        largest,
        math.nan if rank == min(problem.shape) else 0.0,
        math.nan,
        rank,
        "estimate" if sure else "numerically singular",
        reason=why,
        rank_bounds=(sure, max(sure, high)),
        num_products=num_products,
    )


def _svd(problems: Sequence[Problem]) -> list[JacobianSpectrum]:
    """The SVDs of J themselves, where squaring loses the small singular values."""
    first = problems[0]
    if len(problems) > 1 and first.gram.device.type == "cpu":
        # LAPACK takes one by one, and one fits the cache.
        return [_svd([problem])[0] for problem in problems]
    if first.hints.matrices is None:
        jacobians = _stacked([problem.operator.as_matrix() for problem in problems])
    else:
        jacobians = first.hints.matrices([problem.operator for problem in problems])
    if jacobians.shape[-2] < jacobians.shape[-1]:
        jacobians = jacobians.mT
    # As `qr` with fewer copies; LAPACK's matrices lie column by column.
    triangles = torch.geqrf(jacobians)[0][:, : jacobians.shape[-1]].mT.tril().mT
    del jacobians
    if _only_ends(first, triangles.shape[-1]):
        ends = [from_qr(problem, triangle.cpu()) for problem, triangle in zip(problems, triangles, strict=True)]
        known = [record for record in ends if record is not None]
        if len(known) == len(problems):
            return known
    values = torch.linalg.svdvals(where_decomposed(triangles))
    reason = "squaring loses the small ones: SVD of J"
    return [problem.from_singular_values(sigma, reason=reason) for problem, sigma in zip(problems, values, strict=True)]


# --- cholesky --------------------------------------------------------------------------------------------------------


def _cholesky_cost(problem: Problem) -> Cost | None:
    n = problem.gram.size
    if problem.is_auto and not (problem.has_full_rank and n <= limits.CHOLESKY_LIMIT):
        return None
    seconds = problem.smaller_gram.scratch / OPERATIONS_PER_SECOND + problem.shape[0] ** 3 / FACTORISED_PER_SECOND
    why = f"full row rank and {limits.GRAM_LIMIT} < n = {n} <= {limits.CHOLESKY_LIMIT}" if problem.is_auto else ASKED
    return Cost(problem.needed_bytes("cholesky"), seconds, why)


def _cholesky(problem: Problem) -> JacobianSpectrum:
    gram = problem.gram
    n = gram.size
    if not problem.has_full_rank:
        raise NotDefinedError(
            f"method 'cholesky' needs full row rank, and this Jacobian has at most {problem.bound.rank} of {n}; "
            "use 'gram' or 'auto'"
        )
    beyond = f"kappa exceeds {LARGEST_SQUARED_KAPPA:g}"
    if problem.fits_triangle() and problem.hints.lower_kappa() > LARGEST_SQUARED_KAPPA:
        return from_triangle(problem, f"{beyond}: ")
    top = largest_eigenvalue(gram.matvec, n)
    if top.value <= 0:
        return problem.from_singular_values(torch.zeros(n, dtype=torch.float64))
    largest, sure = math.sqrt(top.value), problem.hints.bounds()[0]
    reason = None
    steps = gram.steps() if gram.steps is not None and n >= limits.SMALLEST_FLOAT32 else None
    if steps is not None:
        least = least_singular_value(steps, largest)
        if least.value is not None and least.value * LARGEST_SQUARED_KAPPA >= largest:
            # |J^T x| of the vector found: sigma_min is at most this, up to rounding.
            return problem.record(
                largest,
                problem.last(least.value),
                least.value,
                n,
                "exact",
                reason=least.reason,
                rank_bounds=(sure, _squared_interval(least.value, largest, n)[1]),
                num_products=top.num_products + least.num_products,
            )
        reason = f"{least.reason if least.value is None else beyond}: float64 factor"
    factor = gram.matrix()
    if not factorise_(factor):
        # Rounding made G indefinite, so its least eigenvalue is below n eps |G|.
        high = _squared_interval(0.0, largest, n)[1]
        del factor
        return _without_squares(problem, "Cholesky of J J^T broke down", largest, high, top.num_products)

    def solve_with(vector: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(factor, vector.to(factor.device)[:, None], upper=False)
        return torch.linalg.solve_triangular(factor.T, half, upper=True)[:, 0].cpu()

    bottom = largest_eigenvalue(solve_with, n)
    smallest = 1 / math.sqrt(bottom.value)
    status: Status = "exact" if smallest * LARGEST_SQUARED_KAPPA >= largest else "estimate"
    if status == "estimate" and problem.fits_triangle():
        del factor
        return from_triangle(problem, f"{beyond}: ")
    # A Ritz value of the inverse never exceeds its largest eigenvalue, so sigma_min is at most this, up to rounding.
    return problem.record(
        largest,
        problem.last(smallest),
        smallest,
        n,
        status,
        reason=reason,
        rank_bounds=(sure, _squared_interval(smallest, largest, n)[1]),
        num_products=top.num_products + bottom.num_products,
    )


# --- products --------------------------------------------------------------------------------------------------------


def _exhaustive_cost(problem: Problem) -> Cost | None:
    n = problem.gram.size
    return _products_cost(problem, n) if problem.has_full_rank and n <= limits.EXHAUSTIVE_LIMIT else None


def _products_cost(problem: Problem, steps: int = LANCZOS_STEPS) -> Cost:
    n, rows = problem.gram.size, problem.shape[0]
    why = "too large to factorise" if problem.has_full_rank else "rank-deficient and too large for all eigenvalues"
    seconds = 2 * steps * rows * (steps + 1000) / OPERATIONS_PER_SECOND
    return Cost(problem.needed_bytes("implicit"), seconds, f"n = {n} is {why}" if problem.is_auto else ASKED)


def _exhaustive_products(problem: Problem) -> JacobianSpectrum:
    return _lanczos(problem, problem.gram.size, exhaustive=True)


def _products(problem: Problem) -> JacobianSpectrum:
    return _lanczos(problem, LANCZOS_STEPS, exhaustive=False)


def _lanczos(problem: Problem, steps: int, *, exhaustive: bool) -> JacobianSpectrum:
    product = problem.gram.matvec
    n = problem.gram.size
    top = largest_eigenvalue(product, n)
    if top.value <= 0:
        return problem.from_singular_values(torch.zeros(n, dtype=torch.float64))
    largest, sure = math.sqrt(top.value), problem.hints.bounds()[0]
    # shift I - G turns the smallest eigenvalue into the largest one. It converges slowly when eigenvalues cluster at
    # the lower end, but its Ritz value bounds sigma_min^2 from above in any case, and n steps exhaust the space.
    shift = top.value + top.residual
    low = largest_eigenvalue(
        lambda u: shift * u - product(u), n, max_steps=steps, tolerance=-1.0 if exhaustive else 1e-15
    )
    square = max(shift - low.value, 0.0)
    smallest = math.sqrt(square) or math.nan  # a zero is rounding's, and says nothing of the rank
    # The shift rounds at eps * lambda_max, so less of the lower end survives than in a factorisation.
    exact = exhaustive and smallest * LARGEST_SHIFTED_KAPPA >= largest
    full = problem.has_full_rank
    high = _squared_interval(math.sqrt(square), largest, n)[1]
    return problem.record(
        largest,
        problem.last(smallest),
        smallest if full else math.nan,
        problem.bound.rank,
        "exact" if exact else "estimate",
        rank_bounds=(sure, high) if full else (0.0, largest),
        num_products=top.num_products + low.num_products,
    )


SOLVERS: tuple[Solver, ...] = (
    Solver("dense", "dense", _dense_cost, _each(_dense)),
    Solver("closed form", "implicit", _closed_form_cost, _each(_closed_form)),
    Solver("triangle", "gram", _triangle_cost, _each(from_triangle)),
    Solver("proved ends", "gram", _proved_ends_cost, _each(_proved_ends)),
    Solver("gram", "gram", _gram_cost, _gram),
    Solver("cholesky", "cholesky", _cholesky_cost, _each(_cholesky)),
    Solver("exhaustive products", "implicit", _exhaustive_cost, _each(_exhaustive_products)),
    Solver("products", "implicit", _products_cost, _each(_products)),
)
