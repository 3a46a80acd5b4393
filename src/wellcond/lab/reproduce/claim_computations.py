"""Claims that hold or fail by construction: computed when the page is made, on a real attention."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from wellcond.attention.find import find_attention
from wellcond.conditioning.apply import condition_, fold_
from wellcond.errors import NumericalWarning
from wellcond.lab.reproduce.correction_cost import LAM, SIZES, Forms
from wellcond.theory.weights import theorem38_printed

WIDTH, HEADS, DEVIATION, TOKENS = 768, 12, 0.02, 16
ATTENTION = f"an attention of ViT-B's size (width {WIDTH}, {HEADS} heads, weights of deviation {DEVIATION})"


def computed(what: str) -> tuple[bool, str]:
    """Whether a claim holds, and the evidence: weights, theorem35, theorem38, memory, flops or folding."""
    known = {
        "weights": _weights, "theorem35": _theorem35, "theorem38": _theorem38, "memory": _memory, "flops": _flops,
        "folding": _folding,
    }  # fmt: skip
    return known[what]()


def _attention() -> tuple[nn.MultiheadAttention, Tensor]:
    """An attention as ViT-B starts, and layer-normed tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=()):
        attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with torch.no_grad():
        for weight in (attention.in_proj_weight, attention.out_proj.weight):
            weight.normal_(std=DEVIATION, generator=generator)
    tokens = torch.randn(1, TOKENS, WIDTH, generator=generator)
    return attention, nn.functional.layer_norm(tokens, (WIDTH,))


def _conditioned(attention: nn.MultiheadAttention, method: str, **options: Any) -> nn.MultiheadAttention:
    made = copy.deepcopy(attention)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", NumericalWarning
        )  # lambda = 10 saturates the softmax, which is not the question
        condition_(made, method, **options)
    return made


def _kappas(attention: nn.MultiheadAttention) -> Tensor:
    """Condition numbers of every head's Q, K and V, as the forward pass uses them."""
    [site] = find_attention(attention)
    with torch.no_grad():
        return torch.cat([torch.linalg.cond(site.slots[role].read().double()) for role in "qkv"])


def _run(attention: nn.MultiheadAttention, tokens: Tensor) -> Tensor:
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
        parameters = [p for p in module.parameters() if p.requires_grad]
        counts.append(
            (sum(p.numel() for p in parameters), sum(p.grad.numel() for p in parameters if p.grad is not None))
        )
    constants = sorted(
        {round(float(x), 4) for x in _correction(attention, conditioned).unique() if abs(float(x)) > 1e-4}
    )
    evidence = (
        f"condition_ on {ATTENTION}: {counts[0][0]:,} trainable parameters and {counts[0][1]:,} gradients without, "
        f"{counts[1][0]:,} and {counts[1][1]:,} with it; the non-zero entries of C have "
        f"{len(constants)} value{'s' if len(constants) != 1 else ''} ({', '.join(f'{x:g}' for x in constants)})"
    )
    return counts[0] == counts[1] and len(constants) == 1, evidence


def _correction(plain: nn.MultiheadAttention, conditioned: nn.MultiheadAttention) -> Tensor:
    """C, as the difference of the weights that the two use."""
    ([before], [after]) = (find_attention(module) for module in (plain, conditioned))
    with torch.no_grad():
        return torch.cat([(after.slots[r].read() - before.slots[r].read()).flatten() for r in "qkv"])


def _flops() -> tuple[bool, str]:
    size = SIZES["paper"]
    counted = Forms(size).count("activation")
    # A multiplication and an addition for each entry; the paper counts them as one.
    as_one, both = counted.elementwise / 2 / counted.matmul_flops, counted.elementwise / counted.matmul_flops
    evidence = (
        f"counted for {size}: {as_one:.3%} with one operation an entry (1 / (2D) = {1 / (2 * size.width):.3%}), "
        f"{both:.3%} with the multiplication and the addition"
    )
    return abs(as_one * 2 * size.width - 1) < 1e-9, evidence


def _folding() -> tuple[bool, str]:
    attention, tokens = _attention()
    conditioned = _conditioned(attention, "identity", lam=LAM)
    with torch.no_grad():
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
