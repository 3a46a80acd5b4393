"""What needs no training: the cost of the fixed correction (S-T8, S-T9, S-F1, A-cost), and claims by construction.

Q, K and V of one head, each X W with X of N x D and W of D x d, in the forms that give the same numbers:
  original    X W                              nothing is added
  weight      X (W + C)                        D d additions a matrix, and W + C is stored while it is used
  activation  X W + lam X[:, :d]               N d multiplications and N d additions a matrix
  folded      X W', W' = W + C made once       as the original
"""

from __future__ import annotations

import copy
import math
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from wellcond.attention.find import find_attention
from wellcond.conditioning.apply import condition_, fold_
from wellcond.errors import NumericalWarning
from wellcond.lab.report.table import MISSING, Cell, Table
from wellcond.theory.weights import theorem38_printed

LAM = 10.0
ROUNDS = 15
FORMS = ("original", "weight", "activation", "folded")
ELEMENTWISE = (torch.ops.aten.add, torch.ops.aten.mul, torch.ops.aten.sub)
"""Operations of which every entry of the result counts as one."""


class PeakMemory(TorchDispatchMode):
    """Most bytes that the tensors hold at once which operations make; nothing is counted that exists before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        result = func(*args, **(kwargs or {}))  # all operations of a projection give one tensor
        storage = result.untyped_storage()
        if storage._cdata not in given:
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.bytes += num_bytes
        self.peak = max(self.peak, self.bytes)


Size = tuple[int, int, int]
"""Tokens N, width D, width of a head d."""
SIZES: dict[str, Size] = {"tiny": (65, 64, 16), "small": (65, 192, 64), "paper": (197, 768, 64)}
"""Of the ViT of each scale."""
NAMED = "N = {}, D = {}, d = {}"


def count(size: Size, form: str) -> dict[str, float]:
    """The projections of one head in a form, with the same weights of deviation 0.02 and layer-normed tokens in all.

    FLOPs are of the forward pass, the rest of forward and backward. The time is the fastest of several rounds, since
    whatever else the machine does can only make one slower; the error is the largest difference to the weight form,
    over its largest number.
    """
    n, width, d = size
    generator = torch.Generator().manual_seed(0)
    x = nn.functional.layer_norm(torch.randn(n, width, generator=generator), (width,))
    plain = [0.02 * torch.randn(width, d, generator=generator) for _ in range(3)]
    correction, lam = LAM * torch.eye(width, d), torch.tensor(LAM)

    def project(form: str, weights: list[Tensor]) -> list[Tensor]:
        if form == "weight":
            return [x @ (w + correction) for w in weights]
        if form == "activation":
            return [x @ w + lam * x[:, :d] for w in weights]
        return [x @ w for w in weights]

    weights = [(w + correction if form == "folded" else w.clone()).requires_grad_() for w in plain]

    def train() -> float:
        start = time.perf_counter()
        sum(y.sum() for y in project(form, weights)).backward()  # type: ignore[union-attr]
        return time.perf_counter() - start

    one_each = dict.fromkeys(ELEMENTWISE, lambda *_, out_shape, **__: math.prod(out_shape))
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=one_each) as flops:
        outputs = project(form, weights)
    elementwise = sum(flops.get_flop_counts()["Global"].get(operation, 0) for operation in ELEMENTWISE)
    with PeakMemory() as memory:
        train()
    with torch.no_grad():
        pairs = zip(outputs, project("weight", plain), strict=True)
        error = max(float((y - expected).abs().max() / expected.abs().max()) for y, expected in pairs)
    return {
        "trainable parameters": sum(w.numel() for w in weights),
        "gradient storage": sum(w.grad.numel() for w in weights if w.grad is not None),
        "correction matrices": {"weight": correction.numel(), "activation": lam.numel()}.get(form, 0),
        "activations": sum(y.numel() for y in outputs),
        "peak memory of tensors, bytes": memory.peak,
        "time, microseconds": 1e6 * min(train() for _ in range(ROUNDS)),
        "matmul": flops.get_total_flops() - elementwise,
        "elementwise": elementwise,
        "error": error,
    }


Formula = tuple[str, float | None]
UNKNOWN: Formula = (MISSING, None)


def static_tables(kind: str, scale: str) -> Iterator[Table]:
    """The tables of ``memory`` (S-T8), ``flops`` (S-T9), ``cost`` (both) or ``forms`` (S-F1), at the scale's size."""
    n, width, d = size = SIZES[scale]
    counted = [count(size, form) for form in FORMS]
    note = (
        f"One head with {NAMED.format(*size)}; float32, forward and backward. Time is the fastest of {ROUNDS} rounds."
    )
    if kind in ("memory", "cost"):
        weights, outputs = ("3Dd", 3 * width * d), ("3Nd", 3 * n * d)
        formulas: dict[str, tuple[Formula, Formula]] = {
            "trainable parameters": (weights, weights), "gradient storage": (weights, weights),
            "correction matrices": (("-", None), ("one constant", None)), "activations": (outputs, outputs),
            "peak memory of tensors, bytes": (UNKNOWN, UNKNOWN), "time, microseconds": (UNKNOWN, UNKNOWN),
        }  # fmt: skip
        rows = [_row("elements", name, *both, [form[name] for form in counted]) for name, both in formulas.items()]
        yield Table.of("s-t8", "S-T8: memory of one attention head", rows, (note,))
    if kind in ("flops", "cost"):
        totals = [form["matmul"] + form["elementwise"] for form in counted]
        shares = [form["elementwise"] / form["matmul"] for form in counted]
        each, more = 2 * n * width * d, n * d
        rows = [
            _row("FLOPs", "each of Q, K, V", ("2NDd", each), ("2NDd + Nd", each + more), [x // 3 for x in totals]),
            _row("FLOPs", "total", ("6NDd", 3 * each), ("6NDd + 3Nd", 3 * (each + more)), totals),
            _row("FLOPs", "more than the original", UNKNOWN, ("1 / (2D)", 1 / (2 * width)), shares, ".3%"),
        ]
        counts = (
            "The paper counts one operation for each entry of the activation form; it takes a multiplication and an "
            f"addition, so 6Nd = {6 * more} in all, counted here. The weight form adds 3Dd = {3 * width * d}, whatever "
            "N is."
        )
        yield Table.of("s-t9", "S-T9: forward FLOPs of the projections of one head", rows, (note, counts))
    if kind == "forms":
        rows = [
            {
                "form of the layer with C": (form, {"form": form}),
                "largest difference to X (W + C), relative": (f"{found['error']:.1e}", {"error": found["error"]}),
            }
            for form, found in zip(FORMS[1:], counted[1:], strict=True)
        ]
        notes = (note, "The figure is a diagram of a layer with C added; these are the forms it stands for.")
        yield Table.of("s-f1", "S-F1: the forms of a layer with C are the same", rows, notes)


def _row(
    what: str, name: str, plain: Formula, spectral: Formula, found: Sequence[float], digits: str = ".0f"
) -> dict[str, Cell]:
    """What is counted in each form beside the paper's formula and number without and with C."""
    row: dict[str, Cell] = {what: (name, {what: name})}
    for side, (text, value) in (("original", plain), ("spectral", spectral)):
        row[f"paper: {side}"] = (text if value is None else f"{text} = {value:{digits}}", {f"paper_{side}": value})
    return row | {f"counted: {f}": (f"{value:{digits}}", {f: value}) for f, value in zip(FORMS, found, strict=True)}


WIDTH, HEADS, DEVIATION, TOKENS = 768, 12, 0.02, 16
ATTENTION = f"an attention of ViT-B's size (width {WIDTH}, {HEADS} heads, weights of deviation {DEVIATION})"


def _attention() -> tuple[nn.MultiheadAttention, Tensor]:
    """An attention as ViT-B starts, and layer-normed tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=()):
        attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    for weight in (attention.in_proj_weight, attention.out_proj.weight):
        nn.init.normal_(weight, std=DEVIATION, generator=generator)
    tokens = torch.randn(1, TOKENS, WIDTH, generator=generator)
    return attention, nn.functional.layer_norm(tokens, (WIDTH,))


def _conditioned(attention: nn.Module, method: str, **options: Any) -> nn.Module:
    with warnings.catch_warnings():  # lambda = 10 saturates the softmax, which is not the question
        warnings.simplefilter("ignore", NumericalWarning)
        return condition_(copy.deepcopy(attention), method, **options)


@torch.no_grad()
def _used_weights(attention: nn.Module) -> list[Tensor]:
    """Every head's Q, K and V, as the forward pass uses them."""
    [site] = find_attention(attention)
    return [site.slots[role].read() for role in "qkv"]


def _kappas(attention: nn.Module) -> Tensor:
    return torch.cat([torch.linalg.cond(weight.double()) for weight in _used_weights(attention)])


def _run(attention: nn.Module, tokens: Tensor) -> Tensor:
    output: Tensor = attention(tokens, tokens, tokens, need_weights=False)[0]
    return output


def _weights() -> tuple[bool, str]:
    attention, _ = _attention()
    before, after = _kappas(attention), _kappas(_conditioned(attention, "identity", lam=LAM))
    lower = int((after < before).sum())
    evidence = (
        f"condition_ on {ATTENTION}: lower in {lower} of {len(before)} matrices of a head, largest {before.max():.3g} "
        f"before and {after.max():.3g} after; with sigma_max below lambda it is at most (lambda + sigma_max) / "
        "(lambda - sigma_max)"
    )
    return lower == len(before), evidence


def _theorem35() -> tuple[bool, str]:
    attention, _ = _attention()
    with torch.no_grad():  # a head without full rank, where the bound is reached
        attention.in_proj_weight[1] = attention.in_proj_weight[0]
    after = _kappas(_conditioned(attention, "polar"))
    above = int((after > 2 * (1 + 1e-5)).sum())
    evidence = (
        f"condition_ on {ATTENTION}, one head rank-deficient: {above} of {len(after)} matrices of a head are above 2, "
        f"the largest has {after.max():.3f}; it is computed at every step, so that training cannot change it"
    )
    return above == 0, evidence


def _theorem38() -> tuple[bool, str]:
    """A = diag(-1.9, 0.1) and lambda = 2 meet the printed hypothesis."""
    a, lam = torch.diag(torch.tensor([-1.9, 0.1], dtype=torch.float64)), 2.0
    met = theorem38_printed(a, lam, strict=False).applies
    before, after = (float(torch.linalg.cond(m)) for m in (a, a + lam * torch.eye(2, dtype=torch.float64)))
    evidence = (
        f"A = diag(-1.9, 0.1) with lambda = 2 {'meets' if met else 'does not meet'} the hypothesis, and the condition "
        f"number goes from {before:.3g} to {after:.3g}; it needs lambda > sigma_max (kappa + 1) / (kappa - 1)"
    )
    return not (met and after > before), evidence


def _memory() -> tuple[bool, str]:
    attention, tokens = _attention()
    conditioned = _conditioned(attention, "identity", lam=LAM)
    counts = []
    for module in (attention, conditioned):
        _run(module, tokens).sum().backward()
        trained = [p for p in module.parameters() if p.requires_grad]
        counts.append((sum(p.numel() for p in trained), sum(p.grad.numel() for p in trained if p.grad is not None)))
    pairs = zip(_used_weights(attention), _used_weights(conditioned), strict=True)
    added = torch.cat([(after - before).flatten() for before, after in pairs])
    constants = sorted({round(x, 4) for x in added[added.abs() > 1e-4].tolist()})
    evidence = (
        f"condition_ on {ATTENTION}: {counts[0][0]:,} trainable parameters and {counts[0][1]:,} gradients without, "
        f"{counts[1][0]:,} and {counts[1][1]:,} with it; the non-zero entries of C have "
        f"{len(constants)} value{'s' if len(constants) != 1 else ''} ({', '.join(f'{x:g}' for x in constants)})"
    )
    return counts[0] == counts[1] and len(constants) == 1, evidence


def _flops() -> tuple[bool, str]:
    size = SIZES["paper"]
    counted = count(size, "activation")
    # A multiplication and an addition for each entry; the paper counts them as one.
    as_one, both = counted["elementwise"] / 2 / counted["matmul"], counted["elementwise"] / counted["matmul"]
    evidence = (
        f"counted for {NAMED.format(*size)}: {as_one:.3%} with one operation an entry (1 / (2D) = "
        f"{1 / (2 * size[1]):.3%}), {both:.3%} with the multiplication and the addition"
    )
    return abs(as_one * 2 * size[1] - 1) < 1e-9, evidence


@torch.no_grad()
def _folding() -> tuple[bool, str]:
    attention, tokens = _attention()
    conditioned = _conditioned(attention, "identity", lam=LAM)
    wanted = _run(conditioned, tokens)
    fold_(conditioned)
    error = float((_run(conditioned, tokens) - wanted).abs().max() / wanted.abs().max())
    counts = []
    for module in (attention, conditioned):
        with FlopCounterMode(display=False) as flops:
            _run(module, tokens)
        counts.append(flops.get_total_flops())
    plain = type(conditioned) is type(attention) and list(conditioned.state_dict()) == list(attention.state_dict())
    evidence = (
        f"fold_ on {ATTENTION}: class and state-dict keys {'are' if plain else 'are not'} those of the plain module, "
        f"{counts[1]:,} FLOPs against {counts[0]:,}; "
        f"{'its output is that of the conditioned module' if error < 1e-5 else f'its output differs by {error:.0e}'}"
    )
    return plain and counts[0] == counts[1] and error < 1e-5, evidence


COMPUTED = {
    "weights": _weights, "theorem35": _theorem35, "theorem38": _theorem38, "memory": _memory, "flops": _flops,
    "folding": _folding,
}  # fmt: skip
"""Whether a claim holds, and the evidence: computed when the page is made, on a real attention."""
