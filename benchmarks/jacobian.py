"""Exact spectra of one head's parameter Jacobian, against automatic differentiation and generic products.

Run: make bench. Every case has a process of its own, so that its peak memory is its own. Heads read layer-normed
Gaussian tokens; everything is float64. Times are of the processor on one thread, which other processes disturb less;
else of the clock. A warm-up on a tiny head is not counted; cases that take seconds run three times, and the fastest
counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import scipy.sparse.linalg as sparse
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from wellcond.head import Head
from wellcond.jacobian.nystrom.form import NystromForm
from wellcond.jacobian.nystrom.head import NystromHead
from wellcond.jacobian.plain import WideForm
from wellcond.jacobian.spectrum import form_spectrum, jacobian_spectrum
from wellcond.linalg.spectrum import largest_eigenvalue

SMALL, MIDDLE, VIT_B, LRA = (32, 96, 32), (64, 192, 64), (197, 768, 64), (1024, 64, 32)
DIGITS = (17, 64, 16)
HEADS = {"small": SMALL, "middle": MIDDLE, "ViT-B": VIT_B, "LRA": LRA}
GROWTH = [(tokens, 192, 64) for tokens in (16, 32, 64, 128)]
NYSTROM = [((256, 64, 32), 64), ((256, 64, 32), 32), ((128, 64, 32), 16)]
KERNEL, PADDED = 35, 0.4
WARM_UP = (6, 8, 3)
CHUNK_BYTES = 256 * 2**20
NAMES = {
    "ours": "wellcond",
    "jacrev": "jacrev + svdvals(J)",
    "transposed": "jacrev + svdvals(J.T)",
    "largest": "wellcond, sigma_max only",
    "LM": "{products} + svds LM",
    "SM": "{products} + svds SM",
}


@dataclass(frozen=True)
class Case:
    """What one process does."""

    what: str
    size: tuple[int, int, int]
    threads: int
    std: float | None
    cap: float


@dataclass(frozen=True)
class Result:
    """What it found; None where it found nothing."""

    seconds: float
    sigma_max: float | None = None
    sigma_min: float | None = None
    sigma_rank: float | None = None
    note: str = ""
    gigabytes: float = 0.0
    cholesky: tuple[float, float] | None = None
    """Seconds of one Cholesky factorisation of as many rows as there are outputs, in float64 and in float32."""

    @property
    def kappa(self) -> float | None:
        """Over the non-zero singular values."""
        return self.sigma_max / self.sigma_rank if self.sigma_max and self.sigma_rank else None


class HeadModule(nn.Module):
    """One plain head, as anyone would write it."""

    def __init__(self, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> None:
        """Take the weights (d, D)."""
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(w) for w in (w_q, w_k, w_v))

    def forward(self, x: Tensor) -> Tensor:
        """Softmax attention, (..., N, d)."""
        return attend(x, self.w_q, self.w_k, self.w_v)


def attend(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    logits = (x @ w_q.mT) @ (x @ w_k.mT).mT * w_k.shape[0] ** -0.5
    return logits.softmax(-1) @ (x @ w_v.mT)


def make_head(size: tuple[int, int, int], std: float | None) -> tuple[Tensor, ...]:
    tokens, width, d = size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, d, width, generator=generator, dtype=torch.float64) * (width**-0.5 if std is None else std)
    return nn.functional.layer_norm(x, (width,)), *weights.unbind()


def ours(size: tuple[int, int, int], case: Case) -> Result:
    found = jacobian_spectrum(*make_head(size, case.std))
    note = f"{found.method}, {found.status}, rank {found.rank} of {min(found.shape)}"
    return Result(0.0, found.sigma_max, found.sigma_min, found.sigma_rank, note)


def yardstick(size: tuple[int, int, int], case: Case) -> Result:
    """Ours and `torch.linalg.cholesky` in turn, in one process: the machine's own speed at the time."""
    head, clock, n = make_head(size, case.std), clock_of(case), size[0] * size[2]
    a = torch.randn(n, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    matrix = (a @ a.T).add_(64 * torch.eye(n, dtype=torch.float64))
    matrices = {"float64": matrix, "float32": matrix.float()}
    times: dict[str, list[float]] = {"ours": [], "float64": [], "float32": []}
    for _ in range(2):
        for name, seconds in times.items():
            start = clock()
            if name == "ours":
                found = jacobian_spectrum(*head)
            else:
                torch.linalg.cholesky(matrices[name])
            seconds.append(clock() - start)
    ours_best, *cholesky = (min(seconds) for seconds in times.values())
    note = f"{found.method}, {found.status}: {found.reason}"
    return Result(ours_best, found.sigma_max, found.sigma_min, found.sigma_rank, note, cholesky=tuple(cholesky))


def digits(size: tuple[int, int, int], case: Case) -> Result:
    """`measure` of an untrained ViT on images of 8 x 8: 4 layers of 4 heads, as in the recipe `digits`."""
    import timm

    from wellcond.measurement import measure

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=size[1], depth=4,
        num_heads=size[1] // size[2], mlp_ratio=2.0,
    ).eval()  # fmt: skip
    image, clock, times = torch.randn(1, 1, 8, 8), clock_of(case), []
    for _ in range(6):  # the first warms up
        start = clock()
        report = measure(model, image)
        times.append(clock() - start)
    return Result(min(times[1:]), note=f"{sum(len(layer.heads) for layer in report.layers)} heads")


def nystrom(size: tuple[int, int, int], case: Case) -> Result:
    """A head of the Long Range Arena: "nystrom 32" has 32 landmarks, "padded 32" the same with padding at the end."""
    kind, landmarks = case.what.split()
    x, *weights = make_head(size, case.std)
    tokens, width, d = size
    generator = torch.Generator().manual_seed(1)
    biases = torch.randn(3, d, generator=generator, dtype=torch.float64) * width**-0.5
    kernel = torch.randn(KERNEL, generator=generator, dtype=torch.float64) * KERNEL**-0.5
    masks = {}
    if kind == "padded":
        visible = (torch.arange(tokens) < round((1 - PADDED) * tokens)).double()
        masks = {"visible": visible, "key_bias": -1e9 * (1 - visible)}
    count = min(int(landmarks), tokens // 2)
    found = form_spectrum(NystromForm(NystromHead(x, *weights, count, *biases, kernel=kernel, **masks)))
    note = f"{found.method}, {found.status}, rank {found.rank} of {min(found.shape)}"
    return Result(0.0, found.sigma_max, found.sigma_min, found.sigma_rank, note)


def largest(size: tuple[int, int, int], case: Case) -> Result:
    x, w_q, w_k, w_v = make_head(size, case.std)
    form = WideForm(Head(x, w_q, w_k, w_v, size[2] ** -0.5))
    found = largest_eigenvalue(form.product, form.num_outputs)
    return Result(0.0, math.sqrt(found.value), note=f"{found.num_products} products")


def jacrev(size: tuple[int, int, int], case: Case) -> Result:
    x, *weights = make_head(size, case.std)
    chunk = max(1, CHUNK_BYTES // (8 * size[0] ** 2))  # all outputs at once would hold an attention map for each
    blocks = torch.func.jacrev(attend, argnums=(1, 2, 3), chunk_size=chunk)(x, *weights)
    jacobian = torch.cat([block.flatten(0, 1).flatten(1) for block in blocks], dim=1)
    # J is wide. LAPACK reduces a wide matrix through LQ, which can be far slower than QR of its transpose.
    sigma = torch.linalg.svdvals(jacobian.mT if case.what == "transposed" else jacobian)
    rank = int((sigma > 9 * size[0] * size[1] * torch.finfo(sigma.dtype).eps * sigma[0]).sum())
    return Result(
        0.0, float(sigma[0]), float(sigma[-1]), float(sigma[rank - 1]), f"rank {rank} of {len(sigma)} by tolerance"
    )


class OutOfTimeError(Exception):
    """The cap was reached."""


def generic_products(x: Tensor, weights: list[Tensor]) -> sparse.LinearOperator:
    """J as products: curvlinops if it is installed, else torch.func."""
    if importlib.util.find_spec("curvlinops") is not None:
        from curvlinops import JacobianLinearOperator

        model = HeadModule(*weights)
        data = [(x[None], torch.zeros(1, len(x), len(weights[2]), dtype=x.dtype))]
        return JacobianLinearOperator(model, list(model.parameters()), data, check_deterministic=False).to_scipy()
    width = weights[0].numel()

    def product(v: np.ndarray) -> np.ndarray:
        tangents = [t.view_as(weights[0]) for t in torch.from_numpy(v).flatten().split(width)]
        return torch.func.jvp(lambda *w: attend(x, *w), tuple(weights), tuple(tangents))[1].flatten().numpy()

    _, pull = torch.func.vjp(lambda *w: attend(x, *w), *weights)

    def adjoint(u: np.ndarray) -> np.ndarray:
        pulled = pull(torch.from_numpy(u).view(len(x), -1), retain_graph=True)
        return torch.cat([t.flatten() for t in pulled]).detach().numpy()

    shape = (len(x) * len(weights[2]), 3 * width)
    return sparse.LinearOperator(shape, product, adjoint, dtype=np.float64)


def singular_value(size: tuple[int, int, int], case: Case) -> Result:
    x, *weights = make_head(size, case.std)
    clock = clock_of(case)
    inner, count, start = generic_products(x, weights), 0, clock()

    def counted(call: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        def product(vector: np.ndarray) -> np.ndarray:
            nonlocal count
            if clock() - start > case.cap:
                raise OutOfTimeError
            count += 1
            return call(np.ascontiguousarray(vector).reshape(-1))

        return product

    operator = sparse.LinearOperator(inner.shape, counted(inner.matvec), counted(inner.rmatvec), dtype=np.float64)
    first = np.random.default_rng(0).standard_normal(min(inner.shape))
    try:
        [sigma] = sparse.svds(operator, k=1, which=case.what, v0=first, return_singular_vectors=False, solver="arpack")
    except (OutOfTimeError, sparse.ArpackNoConvergence) as error:
        why = f"after {case.cap:.0f} s" if isinstance(error, OutOfTimeError) else "ARPACK gave up"
        return Result(0.0, note=f"not converged: {why}, {count} products")
    note = f"converged, {count} products"
    return Result(0.0, float(sigma), note=note) if case.what == "LM" else Result(0.0, None, float(sigma), note=note)


RUN = {
    "ours": ours,
    "jacrev": jacrev,
    "transposed": jacrev,
    "largest": largest,
    "LM": singular_value,
    "SM": singular_value,
    "nystrom": nystrom,
    "padded": nystrom,
    "yardstick": yardstick,
    "digits": digits,
}
TIMES_ITSELF = ("yardstick", "digits")


def clock_of(case: Case) -> Callable[[], float]:
    return time.process_time if case.threads == 1 else time.perf_counter


def run_case(case: Case) -> Result:
    """The case itself, in the process made for it."""
    torch.set_num_threads(case.threads)
    clock = clock_of(case)
    run = RUN[case.what.split()[0]]
    if case.what in TIMES_ITSELF:
        return replace(run(case.size, case), gigabytes=peak_gigabytes())
    run(WARM_UP, case)
    times: list[float] = []
    while not times or (sum(times) < 20 and len(times) < 3):
        start = clock()
        result = run(case.size, case)
        times.append(clock() - start)
    return replace(result, seconds=min(times), gigabytes=peak_gigabytes())


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def in_a_process(case: Case) -> Result:
    # torch's own setting does not reach the BLAS that scipy brings along.
    pinned = {name: str(case.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    command = [sys.executable, "-W", "ignore", __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, env=os.environ | pinned, capture_output=True, text=True)
    if done.returncode:
        return Result(math.nan, note=f"failed: {(done.stderr.strip().splitlines() or [str(done.returncode)])[-1][:60]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def dense_gigabytes(size: tuple[int, int, int]) -> float:
    """J, joined from its blocks, and the copy that the SVD works in."""
    tokens, width, d = size
    return 3 * 8 * (tokens * d) * (3 * d * width) / 1e9


def number(value: float | None, digits: int = 6) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def disagreement(result: Result, reference: Result) -> float | None:
    """Largest relative difference of the numbers that both have."""
    pairs = [
        (result.sigma_max, reference.sigma_max),
        (result.sigma_min, reference.sigma_min) if reference.sigma_min else (None, None),
        (result.sigma_rank, reference.sigma_rank),
    ]
    errors = [abs(mine - theirs) / theirs for mine, theirs in pairs if mine is not None and theirs]
    return max(errors, default=None)


def plan(full: bool, heads: list[str]) -> list[tuple[str, tuple[int, int, int]]]:
    wanted = []
    for name in heads:
        size = HEADS[name]
        wanted.append(("ours", size))
        if size == SMALL or (full and size != VIT_B):
            wanted.append(("jacrev", size))
        if size in (SMALL, MIDDLE):
            wanted.append(("transposed", size))
        wanted += [("LM", size), ("SM", size)]
        if size == VIT_B:
            wanted.append(("largest", size))
    return wanted


def skipped(size: tuple[int, int, int]) -> str:
    needs = f"needs about {dense_gigabytes(size):.1f} GB"
    return f"infeasible: {needs}" if size == VIT_B else f"skipped (minutes; --full): {needs}"


def comparison(results: dict[tuple[str, tuple[int, int, int]], Result], heads: list[str], products: str) -> Table:
    table = Table(title="One head, (N, D, d); kappa = sigma_max / sigma_rank")
    for column in ("head", "method"):
        table.add_column(column)
    for column in ("s", "/ ours", "jacrev /", "peak GB", "sigma_max", "sigma_min", "sigma_rank", "kappa", "off by"):
        table.add_column(column, justify="right")
    table.add_column("remark")
    for name in heads:
        size = HEADS[name]
        reference, dense = results["ours", size], results.get(("jacrev", size))
        for what in NAMES:
            label = NAMES[what].format(products=products)
            if (what, size) not in results:
                if what == "jacrev":
                    table.add_row("", label, *[""] * 9, skipped(size))
                continue
            result = results[what, size]
            off = None if what == "ours" else disagreement(result, reference)
            table.add_row(
                f"{name} {size}" if what == "ours" else "", label, f"{result.seconds:.3g}",
                "" if what == "ours" else f"{result.seconds / reference.seconds:.3g}",
                f"{dense.seconds / result.seconds:.3g}" if dense and what != "jacrev" else "",
                f"{result.gigabytes:.2f}",
                number(result.sigma_max), number(result.sigma_min), number(result.sigma_rank), number(result.kappa),
                "" if off is None else f"{off:.0e}", result.note,
            )  # fmt: skip
        table.add_section()
    return table


def nystrom_table(results: dict[tuple[str, tuple[int, int, int]], Result]) -> Table:
    title = f"Nystrom attention with a convolution of {KERNEL}; padded: the last {PADDED:.0%} of the tokens"
    table = Table("(N, D, d)", "landmarks", "s", "peak GB", "sigma_max", "sigma_rank", "kappa", "remark", title=title)
    for (what, size), found in results.items():
        kind, count = what.split()
        numbers = (number(value) for value in (found.sigma_max, found.sigma_rank, found.kappa))
        landmarks = count + (", padded" if kind == "padded" else "")
        table.add_row(str(size), landmarks, f"{found.seconds:.3g}", f"{found.gigabytes:.2f}", *numbers, found.note)
    return table


def yardstick_table(results: dict[tuple[str, tuple[int, int, int]], Result], threads: int) -> Table:
    title = f"Against one Cholesky factorisation with as many rows as outputs, in one process, {threads} thread(s)"
    table = Table("(N, D, d)", "outputs n", "s", title=title)
    for column in ("float64 Cholesky, s", "ratio", "float32 Cholesky, s", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("remark")
    for (_, size), found in results.items():
        if found.cholesky is None:
            table.add_row(str(size), str(size[0] * size[2]), "", "", "", "", "", found.note)
            continue
        cells = [cell for s in found.cholesky for cell in (f"{s:.3g}", f"{found.seconds / s:.2f}")]
        table.add_row(str(size), str(size[0] * size[2]), f"{found.seconds:.3g}", *cells, found.note)
    return table


def goals(results: dict[tuple[str, tuple[int, int, int]], Result]) -> Table:
    table = Table("goal", "measured", "", title="Goals")

    def row(goal: str, measured: str, met: bool | None) -> None:
        table.add_row(goal, measured, "not measured" if met is None else "met" if met else "MISSED")

    for size in (SMALL, MIDDLE):
        for what in ("jacrev", "transposed"):
            mine, theirs, goal = results.get(("ours", size)), results.get((what, size)), f"{size}: >= 50 x faster than "
            if mine and theirs and theirs.sigma_max:
                ratio, off = theirs.seconds / mine.seconds, disagreement(theirs, mine) or 0.0
                row(goal + NAMES[what], f"{ratio:.1f} x", ratio >= 50)
                row(f"{size}: same numbers to 1e-6", f"{off:.0e}", off <= 1e-6)
            elif mine:
                row(goal + NAMES[what], "needs --full", None)
    for name, size, seconds, gigabytes in (("ViT-B", VIT_B, 60, 3), ("LRA", LRA, 20, 2)):
        if found := results.get(("ours", size)):
            met = "exact" in found.note and found.seconds <= seconds and found.gigabytes <= gigabytes
            measured = f"{found.note.split(',')[1].strip()}, {found.seconds:.1f} s, {found.gigabytes:.2f} GB"
            row(f"{name} {size}: exact in {seconds} s and {gigabytes} GB", measured, met)
    if (found := results.get(("yardstick", VIT_B))) and found.cholesky:
        ratio = found.seconds / found.cholesky[0]
        row("ViT-B: at most one float64 Cholesky of n rows", f"{ratio:.2f}", ratio <= 1)
    if found := results.get(("largest", VIT_B)):
        row("ViT-B: sigma_max alone in 1 s", f"{found.seconds:.3f} s", found.seconds <= 1)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--std", type=float, help="of the weights; 1/sqrt(D) by default")
    parser.add_argument("--cap", type=float, default=60.0, help="seconds after which svds is stopped")
    parser.add_argument("--full", action="store_true", help="jacrev on the larger heads too, which takes many minutes")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--skip-growth", action="store_true")
    parser.add_argument("--only-nystrom", action="store_true", help="nothing but heads of Nystrom attention")
    parser.add_argument("--only-yardstick", action="store_true", help="nothing but ours against Cholesky and `measure`")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        given = json.loads(options.case)
        print(json.dumps(asdict(run_case(Case(**given | {"size": tuple(given["size"])})))))
        return

    console, out = Console(stderr=True), Console(width=190)
    products = "curvlinops" if importlib.util.find_spec("curvlinops") else "curvlinops not installed: torch.func"
    std = "1/sqrt(D)" if options.std is None else f"{options.std:g}"
    imports = peak_gigabytes()
    out.print(f"torch {torch.__version__}, {options.threads} thread(s), float64, CPU, weights of std {std}")
    out.print(f"Peak memory is that of the whole process; imports alone take {imports:.2f} GB.")

    def case(what: str, size: tuple[int, int, int]) -> Case:
        return Case(what, size, options.threads, options.std, options.cap)

    approximate = [(f"{kind} {count}", size) for size, count in NYSTROM for kind in ("nystrom", "padded")]
    wanted = [] if options.only_nystrom else plan(options.full, options.heads)
    if not (options.skip_growth or options.only_nystrom):
        wanted += [("ours", size) for size in GROWTH if ("ours", size) not in wanted]
    yardsticks = [("yardstick", HEADS[name]) for name in options.heads if HEADS[name] in (VIT_B, LRA)]
    own = [("digits", DIGITS), *yardsticks]
    if options.only_yardstick:
        wanted, approximate = [], []
    if options.only_nystrom:
        own = []
    every = [*own, *wanted, *approximate]
    results = {key: in_a_process(case(*key)) for key in track(every, "cases", console=console)}
    if approximate:
        out.print(nystrom_table({key: results[key] for key in approximate}))
    if options.only_nystrom:
        return
    measured = results["digits", DIGITS]
    out.print(f"measure of a ViT of 4 layers on 8 x 8 images, {measured.note}: {measured.seconds:.3g} s")
    out.print(yardstick_table({key: results[key] for key in yardsticks}, options.threads))
    if options.only_yardstick:
        return
    out.print(comparison(results, options.heads, products))
    if not options.skip_growth:
        table = Table("(N, D, d)", "outputs n", "s", "peak GB", "kappa", "remark", title="Growth with N")
        for size in GROWTH:
            found = results["ours", size]
            table.add_row(str(size), str(size[0] * size[2]), f"{found.seconds:.3g}", f"{found.gigabytes:.2f}",
                          number(found.kappa), found.note)  # fmt: skip
        out.print(table)
    out.print(goals(results))


if __name__ == "__main__":
    main()
