"""S-T8, S-T9, S-F1 and A-cost: what the fixed correction costs, by formula, by count and by clock; no training.

Q, K and V of one head, each X W with X of N x D and W of D x d, in the forms that give the same numbers:
  original    X W                              nothing is added
  weight      X (W + C)                        D d additions a matrix, and W + C is stored while it is used
  activation  X W + lam X[:, :d]               N d multiplications and N d additions a matrix
  folded      X W', W' = W + C made once       as the original
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from wellcond.lab.report.table import Table, Values
from wellcond.lab.report.values import MISSING

LAM = 10.0
ROUNDS = 15
FORMS = ("original", "weight", "activation", "folded")


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages that operations make while it is active, at their highest: the same on every machine."""

    def __init__(self) -> None:
        """Nothing is counted that exists before."""
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what it made."""
        self._note((args, kwargs or {}), made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, made=True)
        return result

    def _note(self, values: Any, *, made: bool) -> None:
        for value in tree_iter(values):
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if made else 0
            if key in self._seen:
                continue
            self._seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


ELEMENTWISE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor)


class ElementwiseCount(TorchDispatchMode):
    """Additions, subtractions and multiplications of entries while it is active."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        made = func(*args, **(kwargs or {}))
        self.total += made.numel() if func in ELEMENTWISE else 0
        return made


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

    def project(self, form: str, weights: list[Tensor]) -> list[Tensor]:
        """From the weights of a form to Q, K and V."""
        if form == "weight":
            return [self.x @ (w + self.correction) for w in weights]
        if form == "activation":
            return [self.x @ w + self.lam * self.x[:, : self.size.head] for w in weights]
        return [self.x @ w for w in weights]

    def count(self, form: str) -> Counted:
        """Everything about one form."""
        made = [w + self.correction if form == "folded" else w.clone() for w in self.weights]
        weights = [w.requires_grad_() for w in made]
        stored = {"weight": self.correction, "activation": self.lam}.get(form)

        def train() -> None:
            sum(y.sum() for y in self.project(form, weights)).backward()  # type: ignore[union-attr]

        with torch.no_grad(), FlopCounterMode(display=False) as flops, ElementwiseCount() as elementwise:
            outputs = self.project(form, weights)
        with PeakMemory() as memory:
            train()
        with torch.no_grad():
            expected = [self.x @ (w + self.correction) for w in self.weights]
            errors = [float((y - e).abs().max() / e.abs().max()) for y, e in zip(outputs, expected, strict=True)]
        return Counted(
            form=form,
            parameters=sum(w.numel() for w in weights),
            gradients=sum(w.grad.numel() for w in weights if w.grad is not None),
            correction=0 if stored is None else stored.numel(),
            activations=sum(y.numel() for y in outputs),
            matmul_flops=flops.get_total_flops(),
            elementwise=elementwise.total,
            peak_bytes=memory.peak,
            seconds=_fastest(train),
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
    counted = [forms.count(form) for form in FORMS]
    note = f"One head with {size}; float32, forward and backward. Time is the fastest of {ROUNDS} rounds."
    if kind in ("memory", "cost"):
        yield _memory(size, counted, note)
    if kind in ("flops", "cost"):
        yield _flops(size, counted, note)
    if kind == "forms":
        yield _equal_forms(counted, note)


Line = tuple[str, tuple[str, float | None], tuple[str, float | None], Sequence[float], str]
"""What, the paper's formula and number without and with C, what is counted in each form, and how that is shown."""
UNKNOWN = (MISSING, None)


def _table(name: str, title: str, what: str, lines: Sequence[Line], notes: tuple[str, ...]) -> Table:
    header = (what, "paper: original", "paper: spectral", *(f"counted: {form}" for form in FORMS))
    rows, values = [], []
    for label, plain, spectral, found, digits in lines:
        shown = [text if value is None else f"{text} = {value:{digits}}" for text, value in (plain, spectral)]
        rows.append((label, *shown, *(f"{value:{digits}}" for value in found)))
        numbers = dict(zip(("paper_original", "paper_spectral", *FORMS), (plain[1], spectral[1], *found), strict=True))
        values.append({what: label} | numbers)
    return Table(name, title, header, tuple(rows), notes, values=tuple(values))


def _memory(size: HeadSize, counted: list[Counted], note: str) -> Table:
    weights, outputs = ("3Dd", 3 * size.width * size.head), ("3Nd", 3 * size.tokens * size.head)
    lines: list[Line] = [
        ("trainable parameters", weights, weights, [form.parameters for form in counted], "d"),
        ("gradient storage", weights, weights, [form.gradients for form in counted], "d"),
        ("correction matrices", ("-", None), ("one constant", None), [form.correction for form in counted], "d"),
        ("activations", outputs, outputs, [form.activations for form in counted], "d"),
        ("peak memory of tensors, bytes", UNKNOWN, UNKNOWN, [form.peak_bytes for form in counted], "d"),
        ("time, microseconds", UNKNOWN, UNKNOWN, [1e6 * form.seconds for form in counted], ".0f"),
    ]
    return _table("s-t8", "S-T8: memory of one attention head", "elements", lines, (note,))


def _flops(size: HeadSize, counted: list[Counted], note: str) -> Table:
    n, d, h = size.tokens, size.width, size.head
    totals = [form.matmul_flops + form.elementwise for form in counted]
    shares = [form.elementwise / form.matmul_flops for form in counted]
    lines: list[Line] = [
        ("each of Q, K, V", ("2NDd", 2 * n * d * h), ("2NDd + Nd", 2 * n * d * h + n * h),
         [total // 3 for total in totals], "d"),
        ("total", ("6NDd", 6 * n * d * h), ("6NDd + 3Nd", 6 * n * d * h + 3 * n * h), totals, "d"),
        ("more than the original", UNKNOWN, ("1 / (2D)", 1 / (2 * d)), shares, ".3%"),
    ]  # fmt: skip
    notes = (
        note,
        "The paper counts one operation for each entry of the activation form; it takes a multiplication and an "
        f"addition, so 6Nd = {6 * n * h} in all, counted here. The weight form adds 3Dd = {3 * d * h}, whatever N is.",
    )
    return _table("s-t9", "S-T9: forward FLOPs of the projections of one head", "FLOPs", lines, notes)


def _equal_forms(counted: list[Counted], note: str) -> Table:
    with_c = [form for form in counted if form.form != "original"]
    rows = tuple((form.form, f"{form.error:.1e}") for form in with_c)
    header = ("form of the layer with C", "largest difference to X (W + C), relative")
    notes = (note, "The figure is a diagram of a layer with C added; these are the forms it stands for.")
    values: list[Values] = [{"form": form.form, "error": form.error} for form in with_c]
    return Table("s-f1", "S-F1: the forms of a layer with C are the same", header, rows, notes, values=tuple(values))
