"""S-T8, S-T9, S-F1 and A-cost: what the fixed correction costs, by formula, by count and by clock; no training.

Q, K and V of one head, each X W with X of N x D and W of D x d, in the forms that give the same numbers:
  original    X W                              nothing is added
  weight      X (W + C)                        D d additions a matrix, and W + C is stored while it is used
  activation  X W + lam X[:, :d]               N d multiplications and N d additions a matrix
  folded      X W', W' = W + C made once       as the original
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from wellcond.lab.report.table import Table
from wellcond.lab.report.values import MISSING
from wellcond.lab.reproduce.paper_numbers import paper_tables
from wellcond.lab.reproduce.tensor_counts import ElementwiseCount, PeakMemory

LAM = 10.0
ROUNDS = 15


@dataclass(frozen=True)
class HeadSize:
    """Tokens N, width D, width of a head d."""

    tokens: int
    width: int
    head: int

    def __str__(self) -> str:
        """For a note."""
        return f"N = {self.tokens}, D = {self.width}, d = {self.head}"


SIZES = {"tiny": HeadSize(65, 64, 16), "small": HeadSize(65, 192, 64), "paper": HeadSize(197, 768, 64)}
"""Of the ViT of each scale."""


@dataclass(frozen=True)
class Counted:
    """One form, forward and backward."""

    form: str
    parameters: int
    gradients: int
    correction: int
    """Elements that are stored beside the weights."""
    activations: int
    """Elements of Q, K and V."""
    matmul_flops: int
    elementwise: int
    """Additions and multiplications."""
    peak_bytes: int
    seconds: float
    error: float
    """Largest difference to the weight form, over its largest number; NaN for the original."""


class Forms:
    """The projections of one head in every form, with the same numbers."""

    def __init__(self, size: HeadSize) -> None:
        """Weights of deviation 0.02, layer-normed tokens."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(size.tokens, size.width, generator=generator)
        self.size = size
        self.x = torch.nn.functional.layer_norm(tokens, (size.width,))
        self.weights = [0.02 * torch.randn(size.width, size.head, generator=generator) for _ in range(3)]
        self.correction = LAM * torch.eye(size.width, size.head)
        self.lam = torch.tensor(LAM)

    def project(self, form: str) -> Callable[[list[Tensor]], list[Tensor]]:
        """From the weights to Q, K and V."""
        x, c, lam, head = self.x, self.correction, self.lam, self.size.head
        return {
            "original": lambda weights: [x @ w for w in weights],
            "weight": lambda weights: [x @ (w + c) for w in weights],
            "activation": lambda weights: [x @ w + lam * x[:, :head] for w in weights],
            "folded": lambda weights: [x @ w for w in weights],
        }[form]

    def leaves(self, form: str) -> list[Tensor]:
        """Trainable weights of a form."""
        made = [w + self.correction if form == "folded" else w.clone() for w in self.weights]
        return [w.requires_grad_() for w in made]

    def stored(self, form: str) -> list[Tensor]:
        """What the projections of a form read beside weights and tokens."""
        return {"weight": [self.correction], "activation": [self.lam]}.get(form, [])

    def count(self, form: str) -> Counted:
        """Everything about one form."""
        weights, project = self.leaves(form), self.project(form)
        with torch.no_grad(), FlopCounterMode(display=False) as flops, ElementwiseCount() as elementwise:
            outputs = project(weights)
        with PeakMemory() as memory:
            sum(y.sum() for y in project(weights)).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            expected = [self.x @ (w + self.correction) for w in self.weights]
            errors = [float((y - e).abs().max() / e.abs().max()) for y, e in zip(outputs, expected, strict=True)]
        return Counted(
            form=form,
            parameters=sum(w.numel() for w in weights),
            gradients=sum(w.grad.numel() for w in weights if w.grad is not None),
            correction=sum(stored.numel() for stored in self.stored(form)),
            activations=sum(y.numel() for y in outputs),
            matmul_flops=flops.get_total_flops(),
            elementwise=elementwise.total,
            peak_bytes=memory.peak,
            seconds=_fastest(lambda: sum(y.sum() for y in project(weights)).backward()),  # type: ignore[union-attr]
            error=float("nan") if form == "original" else max(errors),
        )


def _fastest(call: Callable[[], object]) -> float:
    """Of several rounds: whatever else the machine does can only make one slower."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def static_tables(kind: str, scale: str) -> Iterator[Table]:
    """The tables of a static id.

    Args:
        kind: ``memory`` (S-T8), ``flops`` (S-T9), ``cost`` (both) or ``forms`` (S-F1).
        scale: whose size of a head is computed.
    """
    size = SIZES[scale]
    forms = Forms(size)
    counted = [forms.count(form) for form in ("original", "weight", "activation", "folded")]
    note = f"One head with {size}; float32, forward and backward. Time is the fastest of {ROUNDS} rounds."
    if kind in ("memory", "cost"):
        yield _memory(size, counted, note)
    if kind in ("flops", "cost"):
        yield _flops(size, counted, note)
    if kind == "forms":
        yield _equal_forms(counted, note)


def _memory(size: HeadSize, counted: list[Counted], note: str) -> Table:
    formulas = paper_tables()["S-T8"].formulas
    assert formulas is not None
    values = {"3Dd": 3 * size.width * size.head, "3Nd": 3 * size.tokens * size.head}
    names = ("parameters", "gradients", "correction", "activations")
    rows = []
    for (what, (plain, spectral)), name in zip(formulas.rows.items(), names, strict=True):
        shown = [f"{text} = {values[text]}" if text in values else text for text in (plain, spectral)]
        rows.append((what, *shown, *(str(getattr(form, name)) for form in counted)))
    rows.append(("peak memory of tensors, bytes", MISSING, MISSING, *(str(form.peak_bytes) for form in counted)))
    rows.append(("time, microseconds", MISSING, MISSING, *(f"{1e6 * form.seconds:.0f}" for form in counted)))
    header = ("elements", "paper: original", "paper: spectral", *(f"counted: {form.form}" for form in counted))
    return Table("s-t8", "S-T8: memory of one attention head", header, tuple(rows), (note,))


def _flops(size: HeadSize, counted: list[Counted], note: str) -> Table:
    n, d, h = size.tokens, size.width, size.head
    rows = [
        ("each of Q, K, V", f"2NDd = {2 * n * d * h}", f"2NDd + Nd = {2 * n * d * h + n * h}",
         *(str((form.matmul_flops + form.elementwise) // 3) for form in counted)),
        ("total", f"6NDd = {6 * n * d * h}", f"6NDd + 3Nd = {6 * n * d * h + 3 * n * h}",
         *(str(form.matmul_flops + form.elementwise) for form in counted)),
        ("more than the original", MISSING, f"1 / (2D) = {1 / (2 * d):.3%}",
         *(f"{form.elementwise / form.matmul_flops:.3%}" for form in counted)),
    ]  # fmt: skip
    header = ("FLOPs", "paper: original", "paper: spectral", *(f"counted: {form.form}" for form in counted))
    notes = (
        note,
        "The paper counts one operation for each entry of the activation form; it takes a multiplication and an "
        f"addition, so 6Nd = {6 * n * h} in all, counted here. The weight form adds 3Dd = {3 * d * h}, whatever N is.",
    )
    return Table("s-t9", "S-T9: forward FLOPs of the projections of one head", header, tuple(rows), notes)


def _equal_forms(counted: list[Counted], note: str) -> Table:
    rows = tuple((form.form, f"{form.error:.1e}") for form in counted if form.form != "original")
    header = ("form of the layer with C", "largest difference to X (W + C), relative")
    notes = (note, "The figure is a diagram of a layer with C added; these are the forms it stands for.")
    return Table("s-f1", "S-F1: the forms of a layer with C are the same", header, rows, notes)
