"""From a captured call of Hugging Face's Nystrom attention (or a class derived from it) to its heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellcond.jacobian.capture.attention import CapturedAttention
from wellcond.jacobian.diagnosis import AttentionStatistics, map_statistics
from wellcond.jacobian.nystrom.form import NystromForm
from wellcond.jacobian.nystrom.head import NystromHead

MASKED = -1e9
LARGEST_MAP = 256  # rows of the exact attention map that are looked at


def nystrom_form(captured: CapturedAttention, index: int, sample: int) -> NystromForm | None:
    """The structured form of one head on one sample, if the module is what it seems to be; see `captured_form`."""
    head = nystrom_head(captured, index, sample)
    if head is None or not _approximates(captured):
        return None
    # Layer-normed tokens have mean zero but for the model's own rounding, which must not count as a direction.
    return NystromForm(head, None if captured.dtype == torch.float64 else 10 * torch.finfo(captured.dtype).eps)


def _approximates(captured: CapturedAttention) -> bool:
    """With as many landmarks as tokens the module computes the softmax itself."""
    module: Any = captured.site.module
    return module.num_landmarks < module.seq_len


def nystrom_head(captured: CapturedAttention, index: int, sample: int) -> NystromHead | None:
    """One head on one sample by itself; None for another class or a mask of another shape."""
    site, call = captured.site, captured.call
    module: Any = site.module
    names = ("num_landmarks", "seq_len", "conv_kernel_size", "init_option")
    if site.kind != "nystrom" or captured.x is None or call is None or not all(hasattr(module, n) for n in names):
        return None
    x = captured.x[sample].detach().cpu().double()
    masks = _masks([*call.args[1:], *call.kwargs.values()], captured, sample)
    if masks is None or len(x) % module.num_landmarks:
        return None
    kernel = None
    if module.conv_kernel_size is not None:
        kernel = module.conv.weight.detach().cpu().double()[index].flatten()
    heads = []
    for number in range(site.num_heads):
        slots = [site.by_role(role) for role in ("query", "key", "value")]
        weights = [slot.read()[number].detach().cpu().double() for slot in slots]
        biases = [None if (b := slot.read_bias()) is None else b[number].detach().cpu().double() for slot in slots]
        heads.append(NystromHead(x, *weights, module.num_landmarks, *biases, **masks))  # type: ignore
    own = replace(heads.pop(index), kernel=kernel)
    if module.init_option != "original" or not heads:
        return own
    # All heads of the call share c, so that another head may decide it.
    return replace(own, column_sum=max(float(head.between.sum(0).max()) for head in heads))


def _masks(others: list[Any], captured: CapturedAttention, sample: int) -> dict[str, Tensor] | None:
    """Marks of tokens (L, N), 0 or 1, or numbers (L, 1, 1, N) that are added to logits; None for anything else."""
    assert captured.x is not None
    tensors, tokens = [value for value in others if isinstance(value, Tensor)], captured.x.shape[1]
    if not tensors:
        return {}
    if len(tensors) > 1 or tensors[0].shape[-1] != tokens:
        return None
    mask = tensors[0].detach().cpu().double()
    mask = mask[0 if len(mask) == 1 else sample]
    if mask.shape == (1, 1, tokens):
        return {"key_bias": mask[0, 0]}
    if mask.shape == (tokens,):
        return {"visible": mask, "key_bias": MASKED * (1 - mask)}
    return None


@dataclass(frozen=True)
class NystromMap:
    """The softmax that a Nystrom head approximates, and how far off it is."""

    statistics: AttentionStatistics
    """Of P = softmax(s Q K^T) itself."""
    error: float | None
    """|F Z B - P| / |P| in the Frobenius norm; None where the module computes P itself."""


def nystrom_map(captured: CapturedAttention, index: int, sample: int = 0) -> NystromMap | None:
    """Of at most 256 query tokens at equal distances, padding left out; None where the masks are not known."""
    head = nystrom_head(captured, index, sample)
    if head is None:
        return None
    hidden = torch.zeros(len(head.x)) if head.key_bias is None else head.key_bias
    tokens = (hidden > MASKED / 2).nonzero().flatten()
    if not len(tokens):
        return None
    count = min(LARGEST_MAP, len(tokens))
    rows = tokens[torch.linspace(0, len(tokens) - 1, count).round().long()]
    p = (head.q[rows] @ head.k.T + hidden).softmax(-1)
    statistics = map_statistics(p, torch.full((count,), float(len(tokens))), own=p[torch.arange(count), rows])
    if not _approximates(captured):
        return NystromMap(statistics, None)
    off = head.mixing[rows] @ head.from_landmarks - p
    return NystromMap(statistics, float(off.norm() / p.norm()))
