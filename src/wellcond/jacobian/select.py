"""The operator of a captured attention: structured where its mathematics is known, else that of its module.

A structured operator of an attention that is not plain (channel attention, rotary positions, QK-norm, what is
registered) is believed only if it has the output and the derivative of the module's own float64 copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from wellcond.attention.kernels import AttentionStatistics
from wellcond.attention.site import AttentionSite
from wellcond.errors import WeightError, WellcondError
from wellcond.jacobian.capture import CapturedAttention
from wellcond.jacobian.channel import ChannelHead
from wellcond.jacobian.diagnosis import HeadDiagnosis
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.operator import JacobianOperator, MappedOutputs
from wellcond.jacobian.rowwise import RowwiseHead
from wellcond.jacobian.softmax import SoftmaxJacobian
from wellcond.jacobian.trace import NotTracedError, trace_rowwise

AGREEMENT_OF_OUTPUT: Final = 1e-9
"""Relative difference up to which a structured operator has the output of the module's own float64 copy."""
AGREEMENT_OF_PRODUCT: Final = 1e-6
"""The same of J J^T u: iterations inside a module (Nystrom) amplify rounding, in automatic differentiation most."""
PLAIN: Final = "structured: plain softmax"
PLAIN_STACKED: Final = f"{PLAIN}, samples stacked"
ALONE: Final = ("nystrom",)
"""Kinds whose heads depend on the other samples of a batch: a sample is measured as if it were the only one."""


@dataclass(frozen=True, eq=False)
class SelectedOperator:
    """The operator of one head, and how it was chosen; what explains its conditioning, where that is known."""

    operator: JacobianOperator
    how: str
    diagnose: Callable[[], HeadDiagnosis] | None = None


@dataclass(frozen=True)
class ApproximatedMap:
    """The softmax that an attention approximates."""

    statistics: AttentionStatistics
    error: float | None
    """Relative difference, in the Frobenius norm, of what stands in its place; None where the module computes it."""


Build = Callable[[ModuleJacobian, bool], SelectedOperator | None]
Approximated = Callable[[CapturedAttention, int], ApproximatedMap | None]
BUILDERS: dict[str, Build] = {}
APPROXIMATED: dict[str, Approximated] = {}


def register_operator(*kinds: str, approximated: Approximated | None = None) -> Callable[[Build], Build]:
    """Decorator: use a function to build the operators of attention layers of these kinds (`AttentionSite.kind`).

    The function gets the operator that differentiates the module itself (with its layer, head and samples), and whether
    biases count as parameters. It returns a `SelectedOperator`, or None where it does not apply. Its operator has an
    ``output()`` too, and is believed only if this and a product with J J^T are the module's own. `approximated` is
    asked for the softmax that such an attention approximates.
    """

    def register(build: Build) -> Build:
        for kind in kinds:
            BUILDERS[kind] = build
            if approximated is not None:
                APPROXIMATED[kind] = approximated
        return build

    return register


def approximated_map(captured: CapturedAttention, kv_head: int) -> ApproximatedMap | None:
    """The softmax that an attention approximates, if its kind is registered with one."""
    ask = APPROXIMATED.get(captured.site.kind)
    return None if ask is None else ask(captured, kv_head)


def select_operator(
    captured: CapturedAttention,
    kv_head: int,
    *,
    samples: Sequence[int] = (0,),
    biases: bool = False,
    query_head: int | None = None,
) -> SelectedOperator:
    """The operator of one key/value head of a captured attention on one sample, or on several as one Jacobian.

    Of grouped queries it is of all query heads of the group, or of `query_head` alone.
    """
    if captured.is_plain:
        plain = SoftmaxJacobian(captured.head(kv_head, samples, query_head=query_head), biases)
        return SelectedOperator(plain, PLAIN_STACKED if len(samples) > 1 else PLAIN)
    kind = captured.site.kind
    alone = kind in ALONE and len(samples) == 1
    module = ModuleJacobian(captured, kv_head, samples=samples, alone=alone, query_head=query_head)
    build = BUILDERS.get(kind)
    candidate = None if build is None else build(module, False)
    if build is not None and candidate is not None and _agree(candidate.operator, module):
        # With biases as parameters the module cannot be asked; without them it could, and agreed.
        found = build(module, True) if biases else candidate
        if found is not None:
            return found
    left_out = "; biases are not counted" if biases else ""
    return SelectedOperator(module, f"generic derivatives: {captured.why_not_plain}{left_out}")


def output_operator(captured: CapturedAttention, samples: Sequence[int], biases: bool) -> MappedOutputs:
    """The Jacobian of the output of a plain attention through W_O, with respect to the weights of all its heads."""
    site = captured.site
    assert site.o is not None
    w_o = site.o.read().detach().cpu().double().transpose(0, 1)  # (out, heads, dv) from (heads, out, dv)
    if not bool(torch.isfinite(w_o).all()):
        raise WeightError(f"{site.name}: W_O has NaN or infinite entries: the Jacobian is not defined")
    heads = [head.cpu() for head in captured.heads([(head, None) for head in range(site.num_kv_heads)], samples)]
    maps = tuple(part[None] for part in w_o.split([head.num_query_heads for head in heads], dim=1))
    return MappedOutputs(tuple(SoftmaxJacobian(head, biases) for head in heads), maps, heads[0].num_tokens, "W_O")


def _agree(operator: Any, module: ModuleJacobian) -> bool:
    """Whether it has the output of the module and, for a vector drawn at random, its product with J J^T."""
    mine, theirs = operator.output().flatten(), module.output().flatten()
    if mine.shape != theirs.shape or not _close(mine, theirs, AGREEMENT_OF_OUTPUT):
        return False
    u = torch.randn(module.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    product = operator.gram().matvec(u)
    return _close(product, module.gram().matvec(u), AGREEMENT_OF_PRODUCT)


def _close(mine: Tensor, theirs: Tensor, rtol: float) -> bool:
    return bool((mine - theirs).norm() <= rtol * theirs.norm())


@register_operator("cross_covariance", "channel")
def _channel(jacobian: ModuleJacobian, biases: bool) -> SelectedOperator | None:
    site, x, samples = jacobian.site, jacobian.captured.x, jacobian.samples
    if x is None or len(samples) > 1 or samples[0] >= len(x):
        return None
    module: Any = site.module
    temperature = getattr(module, "temperature", None)
    scale = site.scale
    if isinstance(temperature, Tensor):
        scale = float(temperature.detach().flatten()[jacobian.kv_head])
    elif scale is None:  # DaViT's second version scales by the number of tokens
        scale = x.shape[1] ** -0.5
    operator = ChannelHead(
        x[samples[0]].cpu().double(),
        scale=scale,
        normalise=site.kind == "cross_covariance",
        biases=biases,
        **_weights(site, jacobian.kv_head),
    )
    how = f"structured: {site.kind.replace('_', '-')} attention"
    return SelectedOperator(operator, how)


def _weights(site: AttentionSite, kv_head: int) -> dict[str, Any]:
    """Weights and biases by role, in float64 on the CPU."""
    found: dict[str, Any] = {}
    for role, letter in (("query", "q"), ("key", "k"), ("value", "v")):
        slot = site.by_role(role)
        bias = slot.read_bias()
        found[f"w_{letter}"] = slot.read()[kv_head].detach().cpu().double()
        found[f"b_{letter}"] = None if bias is None else bias[kv_head].detach().cpu().double()
    return found


@register_operator("softmax")
def _rowwise(module: ModuleJacobian, biases: bool) -> SelectedOperator | None:
    site = module.site
    try:
        operator = trace_rowwise(module, biases=biases)
    except (NotTracedError, WellcondError, RuntimeError, ValueError, IndexError):  # the graph may be of any shape
        return None
    parts = ["rotary"] if site.rotary else []
    parts += [f"{site.qk_norm} norm on queries and keys"] if site.qk_norm else []
    parts += site.modifiers
    diagnose = operator.diagnose if isinstance(operator, RowwiseHead) else None
    how = f"structured: {', '.join(parts) or 'row-wise softmax'}"
    return SelectedOperator(operator, how, diagnose)
