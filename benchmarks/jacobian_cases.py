"""What `benchmarks/jacobian.py` runs: one case in one process, so that its peak memory is its own.

Heads read layer-normed Gaussian tokens; everything is float64. Times are of the processor on one thread, which other
processes disturb less; else of the clock. A warm-up on a tiny head is not counted; cases that take seconds run three
times, and the fastest counts.
"""

from __future__ import annotations

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
from torch import Tensor, nn

from wellcond.jacobian.head import Head
from wellcond.jacobian.problem import JacobianSpectrum
from wellcond.jacobian.rowwise import RowwiseHead
from wellcond.jacobian.softmax import RowSoftmax, SoftmaxJacobian, TokenMap
from wellcond.jacobian.solve import operator_spectrum
from wellcond.jacobian.spectrum import jacobian_spectrum
from wellcond.lab.nystrom import NystromJacobian
from wellcond.lab.nystrom.head import NystromHead
from wellcond.linalg.lanczos import largest_eigenvalue

Size = tuple[int, int, int]

KERNEL, PADDED = 35, 0.4
CAUSAL_STD = 0.01
"""Of a causal head's weights: with logits of size one, P of random weights is singular to float64 at 256 tokens."""
WARM_UP = (6, 8, 3)
CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Case:
    """What one process does."""

    what: str
    size: Size
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
    how: str = ""
    beside: tuple[float, ...] = ()
    """Seconds of what it is compared with in its own process."""

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


def make_head(size: Size, std: float | None) -> tuple[Tensor, ...]:
    tokens, width, d = size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, d, width, generator=generator, dtype=torch.float64) * (width**-0.5 if std is None else std)
    return nn.functional.layer_norm(x, (width,)), *weights.unbind()


def record_of(found: JacobianSpectrum) -> Result:
    how = "closed form" if "span a constant" in found.reason else f"`{found.method}`"
    how += ", ends proved" if "proved" in found.reason else ""
    rank = "" if found.rank == min(found.shape) else f", rank {found.rank} of {min(found.shape)}"
    return Result(0.0, found.sigma_max, found.sigma_min, found.sigma_rank, f"{found.status}{rank}", how=how)


def ours(size: Size, case: Case) -> Result:
    return record_of(jacobian_spectrum(*make_head(size, case.std)))


def in_turn(case: Case, runs: dict[str, Callable[[], object]]) -> tuple[list[float], list[object]]:
    """The least seconds of each, and what they gave; they alternate, so that all meet the same machine."""
    clock = clock_of(case)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(2):
        found = []
        for seconds, run in zip(times, runs.values(), strict=True):
            start = clock()
            found.append(run())
            seconds.append(clock() - start)
    return [min(seconds) for seconds in times], found


def yardstick(size: Size, case: Case) -> Result:
    """Ours and `torch.linalg.cholesky` of as many rows as outputs in turn: the machine's own speed at the time."""
    head, n = make_head(size, case.std), size[0] * size[2]
    a = torch.randn(n, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    matrix = (a @ a.T).add_(64 * torch.eye(n, dtype=torch.float64))
    single = matrix.float()
    times, found = in_turn(case, {
        "ours": lambda: jacobian_spectrum(*head),
        "float64": lambda: torch.linalg.cholesky(matrix) is None,  # not kept
        "float32": lambda: torch.linalg.cholesky(single) is None,
    })  # fmt: skip
    return replace(record_of(found[0]), seconds=times[0], beside=tuple(times[1:]))


def rotated(size: Size, case: Case) -> Result:
    """A causal head with rotary positions, and the same without them, in turn: one query head of Llama's groups."""
    tokens, width, d = size
    x, *weights = make_head(size, CAUSAL_STD)
    mask = torch.zeros(tokens, tokens).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    head = Head(x, *weights, d**-0.5, mask=mask)
    frequencies = 10_000.0 ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), frequencies).repeat(1, 2)

    def with_rotary() -> JacobianSpectrum:
        return operator_spectrum(rotated_head(head, angles))

    times, found = in_turn(case, {"rotary": with_rotary, "plain": lambda: operator_spectrum(SoftmaxJacobian(head))})
    rotary_found, plain = (record_of(one) for one in found)
    note = f"{rotary_found.note}; plain: {plain.note}, kappa {plain.kappa:.4g}"
    return replace(rotary_found, seconds=times[0], beside=(times[1],), note=note)


def rotated_head(head: Head, angles: Tensor) -> RowwiseHead:
    """Queries and keys of one head, turned: channel c is paired with c + d/2, as in Llama."""
    d = head.head_dim
    swap = torch.zeros(d, d, dtype=torch.float64)
    half = torch.arange(d // 2)
    swap[half, half + d // 2], swap[half + d // 2, half] = -1.0, 1.0
    turn = torch.diag_embed(angles.cos()) + angles.sin()[:, :, None] * swap
    query, key = (TokenMap((turn @ rows[:, :, None])[..., 0], turn) for rows in (head.queries()[0], head.keys()))
    logits = head.scale * query.value @ key.value.T
    p = (logits if head.mask is None else logits + head.mask).softmax(-1)
    return RowwiseHead(head, query, key, RowSoftmax(p, torch.full_like(p, head.scale), TokenMap(head.values())))


def digits(size: Size, case: Case) -> Result:
    """`measure` of an untrained ViT on images of 8 x 8: 4 layers of 4 heads, as in the recipe `digits`."""
    import timm

    from wellcond.measurement.measure import measure

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=size[1], depth=4,
        num_heads=size[1] // size[2], mlp_ratio=2.0,
    ).eval()  # fmt: skip
    image, clock, times = torch.randn(1, 1, 8, 8), clock_of(case), []
    for _ in range(21):  # the first warms up
        start = clock()
        report = measure(model, image)
        times.append(clock() - start)
    return Result(min(times[1:]), note=f"{sum(len(layer.heads) for layer in report.layers)} heads")


def nystrom(size: Size, case: Case) -> Result:
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
    head = NystromHead(x, *weights, count, *biases, kernel=kernel, **masks)
    return record_of(operator_spectrum(NystromJacobian(head)))


def largest(size: Size, case: Case) -> Result:
    x, w_q, w_k, w_v = make_head(size, case.std)
    gram = SoftmaxJacobian(Head(x, w_q, w_k, w_v, size[2] ** -0.5)).gram()
    found = largest_eigenvalue(gram.matvec, gram.size)
    return Result(0.0, math.sqrt(found.value), note=f"{found.num_products} products")


def jacrev(size: Size, case: Case) -> Result:
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


def singular_value(size: Size, case: Case) -> Result:
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
    "rotary": rotated,
    "digits": digits,
}
TIMES_ITSELF = ("yardstick", "rotary", "digits")


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
    peaks: list[float] = []
    while not times or (sum(times) < 20 and len(times) < 3):
        start = clock()
        result = run(case.size, case)
        times.append(clock() - start)
        peaks.append(peak_gigabytes())
    return replace(result, seconds=min(times), gigabytes=peaks[0])  # later ones hold what the first left behind


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def in_a_process(case: Case) -> Result:
    # torch's own setting does not reach the BLAS that scipy brings along.
    pinned = {name: str(case.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    command = [sys.executable, "-W", "ignore", __file__, json.dumps(asdict(case))]
    done = subprocess.run(command, env=os.environ | pinned, capture_output=True, text=True)
    if done.returncode:
        return Result(math.nan, note=f"failed: {(done.stderr.strip().splitlines() or [str(done.returncode)])[-1][:60]}")
    given = json.loads(done.stdout.splitlines()[-1])
    return Result(**given | {"beside": tuple(given["beside"])})


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(asdict(run_case(Case(**given | {"size": tuple(given["size"])})))))
