"""What needs no training: the cost of the fixed correction (S-T8, S-T9, S-F1, A-cost).

Q, K and V of one head, each X W with X of N x D and W of D x d, in the forms that give the same numbers:
  original    X W                              nothing is added
  weight      X (W + C)                        D d additions a matrix, and W + C is stored while it is used
  activation  X W + lam X[:, :d]               N d multiplications and N d additions a matrix
  folded      X W', W' = W + C made once       as the original
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from wellcond.lab.report.table import MISSING, Cell, Table

ROUNDS = 15
FORMS = ("original", "weight", "activation", "folded")
ELEMENTWISE = (torch.ops.aten.add, torch.ops.aten.mul)
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


SIZES = {"tiny": (65, 64, 16), "small": (65, 192, 64), "paper": (197, 768, 64)}
"""Tokens N, width D and width of a head d in the ViT of each scale."""


def count(size: tuple[int, int, int], form: str) -> dict[str, float]:
    """The projections of one head in a form, with the same weights of deviation 0.02 and layer-normed tokens in all.

    FLOPs are of the forward pass, the rest of forward and backward. The time is the fastest of several rounds, since
    whatever else the machine does can only make one slower; the error is the largest difference to the weight form,
    over its largest number.
    """
    n, width, d = size
    generator = torch.Generator().manual_seed(0)
    x = nn.functional.layer_norm(torch.randn(n, width, generator=generator), (width,))
    plain = [0.02 * torch.randn(width, d, generator=generator) for _ in range(3)]
    correction, lam = 10.0 * torch.eye(width, d), torch.tensor(10.0)

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
    note = f"One head with N = {n}, D = {width}, d = {d}; float32, forward and backward. "
    note += f"Time is the fastest of {ROUNDS} rounds."
    if kind in ("memory", "cost"):
        weights, outputs = ("3Dd", 3 * width * d), ("3Nd", 3 * n * d)
        formulas: dict[str, tuple[Formula, Formula]] = {
            "trainable parameters": (weights, weights),
            "gradient storage": (weights, weights),
            "correction matrices": (("-", None), ("one constant", None)),
            "activations": (outputs, outputs),
            "peak memory of tensors, bytes": (UNKNOWN, UNKNOWN),
            "time, microseconds": (UNKNOWN, UNKNOWN),
        }
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
