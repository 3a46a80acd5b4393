"""`jacobian_spectrum`: singular values of an attention head's parameter Jacobian, by the method that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from wellcond.arguments import check_biases, check_int, check_number, check_tensor
from wellcond.errors import WeightError, check_choice
from wellcond.jacobian.ends import ends_of, factorise_, from_triangle, least_singular_value, no_eigenvalue_below
from wellcond.jacobian.form import AbstractForm, NotDefinedError
from wellcond.jacobian.head import Head
from wellcond.jacobian.plain import WideForm
from wellcond.jacobian.select import (
    ASKED,
    CLOSED,
    LANCZOS_STEPS,
    LARGEST_FULL_SVD,
    LARGEST_SHIFTED_KAPPA,
    LARGEST_SQUARED_KAPPA,
    LARGEST_SVD,
    POWER_STEPS,
    SMALLEST_FLOAT32,
    Route,
    Task,
    available_bytes,
    check_admitted,
    choose_method,
    from_singular_values,
    make_record,
)
from wellcond.linalg.records import Convention, JacobianSpectrum, Status
from wellcond.linalg.spectrum import default_rtol, largest_eigenvalue, singular_values, to_float64, where_decomposed


def jacobian_spectrum(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    memory: Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    convention: Convention = "wide",
    method: Literal["auto", "dense", "gram", "cholesky", "implicit"] = "auto",
    rtol: float | None = None,
    memory_limit: int | None = None,
) -> JacobianSpectrum:
    r"""Singular values of the Jacobian of one head's output with respect to W_Q, W_K, W_V.

    .. math:: J = \partial\, \mathrm{vec}(P V) / \partial (W_Q, W_K, W_V)

    Args:
        x: tokens (N, D).
        w_q: (d, D), or (g, d, D) for g query heads that share a key/value head.
        w_k: (d, E).
        w_v: (dv, E).
        scale: logit scale; 1/sqrt(d) if None.
        mask: added to the logits (N, N): -inf, position biases; or boolean, True where attention is allowed.
        memory: tokens (M, E) of keys and values under cross attention; x if None.
        biases: of q, k, v; they count as parameters.
        convention: ``wide``, the Jacobian (outputs x parameters), or ``stack``, the papers' [J_Q; J_K; J_V].
        method: see `wellcond.jacobian.select`.
        rtol: singular values up to rtol * sigma_max count as zero; max(shape) * eps if None.
        memory_limit: bytes that may be used; what is free if None.

    Returns: a `JacobianSpectrum`; its status says whether the numbers are exact.

    Raises:
        TypeError: something else than dense tensors of real numbers, or than a number where one is expected.
        ValueError: shapes that do not fit, empty tensors, a mask that hides everything from some token, a scale or a
            tolerance that is NaN or out of range.
        WeightError: NaN or infinite tokens or weights.
        MemoryLimitError: the method asked for does not fit.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> one = torch.ones(1, 1)
        >>> round(jacobian_spectrum(x, one, one, one, scale=1.0).condition_number, 3)
        753.489
    """
    check_choice("convention", convention, get_args(Convention))
    check_tensor("x", x, (2,))
    check_tensor("w_q", w_q, (2, 3))
    for name, weight in (("w_k", w_k), ("w_v", w_v)):
        check_tensor(name, weight, (2,))
    if memory is not None:
        check_tensor("memory", memory, (2,))
    if mask is not None:
        check_tensor("mask", mask, (2, 3))
        mask = to_float64(mask).log() if mask.dtype == torch.bool else mask
    b_q, b_k, b_v = check_biases(biases)
    rtol = None if rtol is None else check_number("rtol", rtol, at_least=0, below=1)
    memory_limit = None if memory_limit is None else check_int("memory_limit", memory_limit, at_least=1)
    head = Head(
        x, w_q, w_k, w_v, w_k.shape[0] ** -0.5 if scale is None else check_number("scale", scale),
        y=memory, b_q=b_q, b_k=b_k, b_v=b_v, mask=mask,
    )  # fmt: skip
    try:
        return head_spectrum(head, biases=biases is not None, convention=convention, method=method, rtol=rtol,
                             memory_limit=memory_limit)  # fmt: skip
    except torch.linalg.LinAlgError as error:
        raise WeightError(
            "tokens or weights are too large: squares of the Jacobian leave float64; rescale them"
        ) from error


def head_spectrum(
    head: Head,
    *,
    biases: bool = False,
    convention: Convention = "wide",
    method: str = "auto",
    rtol: float | None = None,
    memory_limit: int | None = None,
) -> JacobianSpectrum:
    """`jacobian_spectrum` of a head that is described already; `biases` counts its biases as parameters."""
    if convention == "stack" and biases:
        raise ValueError("the stacked convention is defined without biases")
    form: AbstractForm = WideForm(head, biases)
    form = form if convention == "wide" else form.stacked()
    return form_spectrum(form, convention=convention, method=method, rtol=rtol, memory_limit=memory_limit)


def form_spectrum(
    form: AbstractForm,
    *,
    convention: Convention = "wide",
    method: str = "auto",
    rtol: float | None = None,
    memory_limit: int | None = None,
) -> JacobianSpectrum:
    """Spectrum of any structured form of the Jacobian; arguments as in `jacobian_spectrum`."""
    return form_spectra([form], convention=convention, method=method, rtol=rtol, memory_limit=memory_limit)[0]


def form_spectra(
    forms: Sequence[AbstractForm],
    *,
    convention: Convention = "wide",
    method: str = "auto",
    rtol: float | None = None,
    memory_limit: int | None = None,
    admit: Callable[[float], bool] | None = None,
) -> list[JacobianSpectrum]:
    """Spectra of forms of one class and shape; all that take the route ``gram`` are decomposed together.

    Raises: as `jacobian_spectrum`; TooLongError if `admit`, asked with the seconds expected, says no.
    """
    limit = available_bytes(forms[0].device) if memory_limit is None else memory_limit
    tasks = []
    for form, structure in zip(forms, type(forms[0]).structures(forms), strict=True):
        choice = choose_method(form, structure, asked=method, memory_limit=limit, rtol=rtol)
        shape = (structure.num_outputs, structure.num_parameters)
        used = default_rtol(shape) if rtol is None else rtol
        tasks.append(Task(form, structure, choice, convention, used, limit))
    check_admitted(tasks, admit)
    found: dict[Task, JacobianSpectrum] = {}
    for route in {task.choice.route for task in tasks}:
        together = [task for task in tasks if task.choice.route == route]
        found |= zip(together, ROUTES[route](together), strict=True)
    return [found[task] for task in tasks]


def _closed_form(task: Task) -> JacobianSpectrum:
    closed = task.choice.closed_form
    assert closed is not None
    (low, high), largest = closed.interval, math.sqrt(closed.top.value)
    return make_record(
        task, largest, low, low, task.form.num_outputs, "exact", max_bounds=(largest, task.form.certified()[1]),
        rank_bounds=(low - closed.error, high + closed.error), num_products=closed.top.num_products,
    )  # fmt: skip


def _dense(task: Task) -> JacobianSpectrum:
    return from_singular_values(task, singular_values(task.form.reference_jacobian()))


def _gram(tasks: Sequence[Task]) -> list[JacobianSpectrum]:
    """Eigenvalues of the smaller Gram matrices, all at once; SVD of those J whose squares lose too much."""
    found: dict[Task, JacobianSpectrum] = {}
    squared = [task for task in tasks if not _surely_lost(task)]
    if squared:
        grams = type(squared[0].form).smaller_grams([task.form for task in squared])
        full = [task.structure.max_rank >= grams.shape[-1] and _svd_fits(task) for task in squared]
        lost = _squaring_loses(grams) if any(full) else full
        kept = [at for at, losses in enumerate(zip(full, lost, strict=True)) if not all(losses)]
        squares = torch.linalg.eigvalsh(where_decomposed(grams if len(kept) == len(grams) else grams[kept]))
        del grams
        for at, values in zip(kept, squares.flip(-1).clamp_min(0), strict=True):
            if (record := _from_squares(squared[at], values)) is not None:
                found[squared[at]] = record
    left = [task for task in tasks if task not in found]
    found |= zip(left, _svd(left) if left else [], strict=True)
    return [found[task] for task in tasks]


def _surely_lost(task: Task) -> bool:
    """Whether squaring loses too much of a J whose SVD fits: a form may know that without any square."""
    full = task.structure.max_rank >= task.form.gram_side
    return full and _svd_fits(task) and task.form.sure_condition_number() > LARGEST_SQUARED_KAPPA


def _from_squares(task: Task, squares: Tensor) -> JacobianSpectrum | None:
    """Record of eigenvalues of the smaller Gram matrix; None if they lose too much and the SVD of J fits."""
    sigma, side = squares.sqrt(), len(squares)
    rank = min(task.structure.max_rank, side)
    largest, smallest = float(sigma[0]), float(sigma[rank - 1])
    if largest == 0:
        return from_singular_values(task, sigma)
    if smallest * LARGEST_SQUARED_KAPPA >= largest:
        values = torch.zeros(task.structure.smaller_side, dtype=torch.float64)
        values[:rank] = sigma[:rank]
        return make_record(
            task, largest, float(values[-1]), smallest, rank, "exact", values=values,
            max_bounds=_squared_interval(largest, largest, side),
            rank_bounds=_squared_interval(smallest, largest, side),
        )  # fmt: skip
    return None if _svd_fits(task) else _too_large(task, largest, side)


def _proved_ends(task: Task) -> JacobianSpectrum:
    """Both ends; all eigenvalues where float32 does not suffice, or the proof fails."""
    return _certified_ends(task) or _gram([task])[0]


def _certified_ends(task: Task) -> JacobianSpectrum | None:
    """Both ends of J from the smaller Gram matrix, the lower one proved to be the lowest; None where that fails."""
    side = task.form.smaller_side()
    if side is None or side.side - side.num_null != task.structure.max_rank:
        return None
    top = largest_eigenvalue(lambda u: side.square(u.to(task.form.device)[None])[0].cpu(), side.side)
    if top.value <= 0 or not top.converged:
        return None
    largest = math.sqrt(top.value)
    least = least_singular_value(side, largest)
    if least.value is None or least.value * LARGEST_SQUARED_KAPPA < largest:
        return None
    rounding = side.side * torch.finfo(torch.float64).eps * top.value
    below = least.value**2 * (1 - CLOSED) - rounding
    if not no_eigenvalue_below(side, largest, below):
        return None
    rank = task.structure.max_rank
    return make_record(
        task, largest, _last(task, least.value), least.value, rank, "exact",
        reason=f"more than {LARGEST_FULL_SVD}, so both ends only: {least.reason}, proved by a factorisation",
        max_bounds=(largest, task.form.certified()[1]),
        rank_bounds=(math.sqrt(max(0.0, below - rounding)), _squared_interval(least.value, largest, side.side)[1]),
        num_products=top.num_products + least.num_products,
    )  # fmt: skip


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
    for _ in range(POWER_STEPS):
        if bool(lost.all()):
            break
        v, w = grams @ (v / _length(v)), torch.cholesky_solve(w / _length(w), factor)
        lost = lost | ((_length(v) * _length(w))[..., 0, 0] > LARGEST_SQUARED_KAPPA**2)
    return (lost & (largest > 0)).tolist()


def _length(columns: Tensor) -> Tensor:
    return torch.linalg.vector_norm(columns, dim=-2, keepdim=True)


def _squared_interval(sigma: float, largest: float, side: int) -> tuple[float, float]:
    """Weyl: an eigenvalue computed with backward error side * eps * lambda_max is off by no more than that."""
    error = side * torch.finfo(torch.float64).eps * largest**2
    return math.sqrt(max(0.0, sigma**2 - error)), math.sqrt(sigma**2 + error)


def _svd_fits(task: Task) -> bool:
    rows, columns = task.structure.num_outputs, task.structure.num_parameters
    return 24 * rows * columns <= task.limit and rows * columns * min(rows, columns) <= LARGEST_SVD


def _triangle_fits(task: Task) -> bool:
    needed = task.form.triangle_bytes()
    return needed is not None and needed <= task.limit


def _too_large(task: Task, largest: float, side: int) -> JacobianSpectrum:
    """Squaring lost the small singular values, and the SVD of J does not fit."""
    high = _squared_interval(largest / LARGEST_SQUARED_KAPPA, largest, side)[1]
    return _without_squares(task, "squaring loses the small ones and J itself is too large", largest, high)


def _without_squares(task: Task, why: str, largest: float, high: float, num_products: int = 0) -> JacobianSpectrum:
    """The ends from a triangular form of J, where there is one that fits; else what is certain of them.

    That a squared J is singular to rounding says nothing of the rank of J: sigma_min is somewhere in its interval, from
    what the form is sure of to `high`, and no number stands for it.
    """
    if _triangle_fits(task):
        return from_triangle(task, f"{why}: ")
    rank, (sure, highest) = task.structure.max_rank, task.form.certified()
    sure = sure if rank == task.form.num_outputs else 0.0
    return make_record(
        task, largest, math.nan if rank == task.structure.smaller_side else 0.0, math.nan, rank,
        "estimate" if sure else "numerically singular", reason=why, max_bounds=(largest, highest),
        rank_bounds=(sure, max(sure, high)), num_products=num_products,
    )  # fmt: skip


def _svd(tasks: Sequence[Task]) -> list[JacobianSpectrum]:
    """The SVDs of J themselves, where squaring loses the small singular values."""
    if len(tasks) > 1 and tasks[0].form.device.type == "cpu":
        return [record for task in tasks for record in _svd([task])]  # LAPACK takes one by one, and one fits the cache
    jacobians = type(tasks[0].form).explicit_jacobians([task.form for task in tasks])
    if jacobians.shape[-2] < jacobians.shape[-1]:
        jacobians = jacobians.mT
    # As `qr` with fewer copies; LAPACK's matrices lie column by column.
    triangles = torch.geqrf(jacobians)[0][:, : jacobians.shape[-1]].mT.tril().mT
    del jacobians
    if _only_ends(tasks[0], triangles.shape[-1]):
        ends = [ends_of(task, triangle.cpu()) for task, triangle in zip(tasks, triangles, strict=True)]
        known = [record for record in ends if record is not None]
        if len(known) == len(tasks):
            return known
    values = torch.linalg.svdvals(where_decomposed(triangles))
    reason = "squaring loses the small ones: SVD of J"
    return [from_singular_values(task, sigma, reason=reason) for task, sigma in zip(tasks, values, strict=True)]


def _only_ends(task: Task, side: int) -> bool:
    return side > LARGEST_FULL_SVD and task.choice.reason != ASKED


def _cholesky(task: Task) -> JacobianSpectrum:
    n = task.form.num_outputs
    if task.structure.max_rank < n:
        raise NotDefinedError(
            f"method 'cholesky' needs full row rank, and this Jacobian has at most {task.structure.max_rank} of {n}; "
            "use 'gram' or 'auto'"
        )
    if _triangle_fits(task) and task.form.sure_condition_number() > LARGEST_SQUARED_KAPPA:
        return from_triangle(task, f"kappa exceeds {LARGEST_SQUARED_KAPPA:g}: ")
    top = largest_eigenvalue(task.form.product, n)
    if top.value <= 0:
        return from_singular_values(task, torch.zeros(n, dtype=torch.float64))
    largest, (sure, highest) = math.sqrt(top.value), task.form.certified()
    max_bounds = (largest, highest)
    reason = None
    side = task.form.output_side() if n >= SMALLEST_FLOAT32 else None
    if side is not None:
        least = least_singular_value(side, largest)
        if least.value is not None and least.value * LARGEST_SQUARED_KAPPA >= largest:
            # |J^T x| of the vector found: sigma_min is at most this, up to rounding.
            return make_record(
                task, largest, _last(task, least.value), least.value, n, "exact", reason=least.reason,
                max_bounds=max_bounds, rank_bounds=(sure, _squared_interval(least.value, largest, n)[1]),
                num_products=top.num_products + least.num_products,
            )  # fmt: skip
        why = least.reason if least.value is None else f"kappa exceeds {LARGEST_SQUARED_KAPPA:g}"
        reason = f"{why}: float64 factor"
    factor = task.form.output_gram()
    if not factorise_(factor):
        # Rounding made G indefinite, so its least eigenvalue is below n eps |G|.
        high = _squared_interval(0.0, largest, n)[1]
        del factor
        return _without_squares(task, "Cholesky of J J^T broke down", largest, high, top.num_products)

    def solve(vector: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(factor, vector.to(factor.device)[:, None], upper=False)
        return torch.linalg.solve_triangular(factor.T, half, upper=True)[:, 0].cpu()

    bottom = largest_eigenvalue(solve, n)
    smallest = 1 / math.sqrt(bottom.value)
    status: Status = "exact" if smallest * LARGEST_SQUARED_KAPPA >= largest else "estimate"
    if status == "estimate" and _triangle_fits(task):
        del factor
        return from_triangle(task, f"kappa exceeds {LARGEST_SQUARED_KAPPA:g}: ")
    # A Ritz value of the inverse never exceeds its largest eigenvalue, so sigma_min is at most this, up to rounding.
    return make_record(
        task, largest, _last(task, smallest), smallest, n, status, reason=reason, max_bounds=max_bounds,
        rank_bounds=(sure, _squared_interval(smallest, largest, n)[1]),
        num_products=top.num_products + bottom.num_products,
    )  # fmt: skip


def _last(task: Task, smallest: float) -> float:
    """The last of min(shape) singular values: zero where the structure leaves fewer that are not."""
    return smallest if task.structure.max_rank == task.structure.smaller_side else 0.0


def _implicit(task: Task) -> JacobianSpectrum:
    n, product = task.form.num_outputs, task.form.product
    top = largest_eigenvalue(product, n)
    if top.value <= 0:
        return from_singular_values(task, torch.zeros(n, dtype=torch.float64))
    largest, (sure, highest) = math.sqrt(top.value), task.form.certified()
    # shift I - G turns the smallest eigenvalue into the largest one. It converges slowly when eigenvalues cluster at
    # the lower end, but its Ritz value bounds sigma_min^2 from above in any case, and n steps exhaust the space.
    shift = top.value + top.residual
    exhaustive = task.choice.route == "exhaustive products"
    steps = n if exhaustive else LANCZOS_STEPS
    low = largest_eigenvalue(
        lambda u: shift * u - product(u), n, max_steps=steps, tolerance=-1.0 if exhaustive else 1e-15
    )
    smallest = math.sqrt(max(shift - low.value, 0.0)) or math.nan  # a zero is rounding's, and says nothing of the rank
    # The shift rounds at eps * lambda_max, so less of the lower end survives than in a factorisation.
    exact = exhaustive and smallest * LARGEST_SHIFTED_KAPPA >= largest
    full = task.structure.max_rank == n
    return make_record(
        task, largest, _last(task, smallest), smallest if full else math.nan, task.structure.max_rank,
        "exact" if exact else "estimate",
        max_bounds=(largest, highest),
        rank_bounds=(sure, _squared_interval(_zero_if_nan(smallest), largest, n)[1]) if full else (0.0, largest),
        num_products=top.num_products + low.num_products,
    )  # fmt: skip


def _zero_if_nan(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _each(run: Callable[[Task], JacobianSpectrum]) -> Callable[[Sequence[Task]], list[JacobianSpectrum]]:
    return lambda tasks: [run(task) for task in tasks]


ROUTES: dict[Route, Callable[[Sequence[Task]], list[JacobianSpectrum]]] = {
    "dense": _each(_dense),
    "closed form": _each(_closed_form),
    "triangle": _each(from_triangle),
    "proved ends": _each(_proved_ends),
    "gram": _gram,
    "cholesky": _each(_cholesky),
    "exhaustive products": _each(_implicit),
    "products": _each(_implicit),
}
