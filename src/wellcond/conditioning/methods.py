"""The corrections that `condition_` knows by name. A new one is a function with `@register_condition`, in any file."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellcond.arguments import CORRECTIONS as METHODS
from wellcond.arguments import check_choice
from wellcond.attention.blocks import POSITIONS
from wellcond.attention.sharding import full_tensor
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.conditioning.corrections import (
    Correct,
    FixedCorrection,
    FollowingCorrection,
    FrozenCorrection,
    StoredCorrection,
)
from wellcond.errors import UnknownChoiceError, WeightError
from wellcond.linalg.polar import mix_with_polar, mix_with_svd
from wellcond.linalg.spectrum import spectra

Layout = Literal["joint", "per_head"]
Parts = Sequence[tuple[str, Slot]]
"""Projections (q, k or v) that one stored weight holds, and where."""
Check = Callable[[nn.Module, list[AttentionSite], str, int | None], Iterable[str]]


@dataclass(frozen=True, eq=False)
class Correction:
    """What a forward pass uses in place of a weight: returned by the functions of `register_condition`."""

    correct: Correct | None = None
    """Function of matrices (count, rows, in) that returns those which the forward pass uses. Learned tensors are given
    as keyword arguments. It must not read numbers on the host (`.item()`, `if` on a tensor): it runs in every pass."""
    layout: Layout = "per_head"
    """What the matrices are: one for each head, or one for all heads of a projection (``joint``)."""
    gradient: Literal["straight_through", "through"] = "straight_through"
    """The gradient of W is that of the effective weight, or what autograd finds for `correct`."""
    frozen: bool = False
    """Whether the first C = correct(W) - W is kept for good instead of following the weight."""
    learned: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Parameters that are trained with the weight: from the matrices to the first value (count, ...) of each."""
    settings: Mapping[str, Any] | None = None
    """What a checkpoint must agree on, as JSON can say it; the options of the function if None."""
    check: Check | None = None
    """`(model, sites, projections, num_tokens)` to texts of warnings, before anything is changed; it may raise."""
    build: Callable[[Parts], StoredCorrection] | None = None
    """Instead of `correct`: a correction in closed form, such as that of ``identity``."""
    stored_as: type[FollowingCorrection] = FollowingCorrection
    """What applies `correct` to a stored weight: a class of its own where more than parameters is kept beside it."""
    name: str = ""
    """Filled in by the registry."""
    key: str = field(init=False)

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, get_args(Layout))
        check_choice("gradient", self.gradient, ("straight_through", "through"))
        if (self.correct is None) == (self.build is None):
            raise ValueError("a Correction is given by `correct` or by `build`: expected one of them")
        if self.frozen and self.learned:
            raise ValueError("a frozen Correction has no learned parameters: expected frozen=False, or learned={}")
        object.__setattr__(self, "key", repr((self.name, self.settings)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made by the registry again, so `correct` may be any function."""
        return make_method, (self.name, dict(self.settings or {}))

    def stored(self, weight_name: str, parts: Parts) -> StoredCorrection:
        """The correction of one stored weight."""
        if self.build is not None:
            return self.build(parts)
        following = self.stored_as(self, weight_name, [slot for _role, slot in parts])
        return FrozenCorrection(following) if self.frozen else following


Make = Callable[..., Correction | Correct]


def register_condition(name: str) -> Callable[[Make], Make]:
    """Make `condition_(model, name, **options)` known.

    Decorate a function that takes the options and returns a `Correction`, or just its function `correct`.

    Example:
        >>> @register_condition("equal_rows")
        ... def equal_rows():
        ...     def correct(heads):  # (count, rows, in)
        ...         norms = heads.norm(dim=-1, keepdim=True)
        ...         return heads * norms.mean(dim=-2, keepdim=True) / norms
        ...     return correct
        >>> from wellcond import condition_, find_attention
        >>> site = find_attention(condition_(nn.MultiheadAttention(8, 2), "equal_rows"))[0]
        >>> norms = site.q.read().norm(dim=-1)
        >>> bool(torch.allclose(norms, norms.mean(dim=-1, keepdim=True)))
        True
        >>> del METHODS["equal_rows"]
    """

    def decorate(make: Make) -> Make:
        METHODS.register(name, make)
        return make

    return decorate


def make_method(method: str, options: Mapping[str, Any]) -> Correction:
    """Validate a method and its options.

    Raises: UnknownChoiceError for either.
    """
    METHODS.check(method)
    signature = inspect.signature(METHODS[method])
    for name in options:
        if name not in signature.parameters:
            raise UnknownChoiceError(f"option of {method!r}", name, list(signature.parameters))
    made: Correction | Correct = METHODS[method](**options)
    correction = made if isinstance(made, Correction) else Correction(made)
    bound = signature.bind(**options)
    bound.apply_defaults()
    settings = bound.arguments if correction.settings is None else correction.settings
    return replace(correction, name=method, settings=dict(settings))


@register_condition("identity")
def identity(*, lam: float | Mapping[str, float] = 10.0, layout: Layout = "joint") -> Correction:
    """C = lam I, fixed (paper S, section 3.3).

    Args:
        lam: one number, or one per projection such as ``{"q": 1.0, "k": 1.0, "v": 10.0}`` (absent: 0).
        layout: one identity over all heads, or the same one in each head.
    """
    lams = per_projection(lam)

    def build(parts: Parts) -> StoredCorrection:
        return FixedCorrection([(slot, lams[role]) for role, slot in parts], layout)

    def check(model: nn.Module, sites: list[AttentionSite], projections: str, num_tokens: int | None) -> Iterator[str]:
        chosen = {role: value if role in projections else 0.0 for role, value in lams.items()}
        _check_representable(sites, chosen)
        yield from _saturation(model, sites, chosen, num_tokens)
        yield from _rounded_away(sites, chosen)

    settings = {"lam": lams if isinstance(lam, Mapping) else lams["q"], "layout": layout}
    return Correction(build=build, layout=layout, settings=settings, check=check)


@register_condition("polar")
def polar(*, layout: Layout = "per_head", frozen: bool = False, solver: str = "products") -> Correction:
    """C = sigma_max(W) times the polar factor of W (paper S, theorem 3.5): condition number at most 2.

    Args:
        layout: for each head (the theorem's W), or for all heads as one matrix.
        frozen: keep the first C instead of following the weights.
        solver: ``products`` of matrices, or ``svd``, a decomposition in every step as in the paper, which costs more.
    """
    check_choice("solver", solver, ("products", "svd"))
    if solver == "products":
        return _mixture(mix_with_polar, 1.0, 1.0, layout, frozen, {})
    return _mixture(mix_with_svd, 1.0, 1.0, layout, frozen, {"solver": solver})


@register_condition("balanced")
def balanced(*, target: float = 2.0, layout: Layout = "per_head", frozen: bool = False) -> Correction:
    """The polar correction rescaled so that the largest singular value stays that of W.

    Args:
        target: the condition number that W + C does not exceed, at least 1.
        layout: for each head, or for all heads as one matrix.
        frozen: keep the first C instead of following the weights.
    """
    number = _number(target)
    if number is None or number < 1.0:
        raise ValueError(f"target: expected a condition number of at least 1, got {target!r}")
    return _mixture(mix_with_polar, 1 - 1 / number, 1 / number, layout, frozen, {"target": number})


def _mixture(
    mix: Correct, keep: float, share: float, layout: Layout, frozen: bool, extra: dict[str, Any]
) -> Correction:
    """W + C = keep W + share sigma_1(W) U V^T for W = U S V^T."""
    check_choice("frozen", frozen, (True, False))
    frozen = bool(frozen)  # NumPy has booleans of its own, which JSON does not know
    settings = {**extra, "layout": layout, "frozen": frozen}
    correct = functools.partial(mix, keep=keep, share=share)
    return Correction(correct, layout=layout, frozen=frozen, settings=settings, check=_degenerate_heads)


def per_projection(lam: float | Mapping[str, float]) -> dict[str, float]:
    """Lam for each of q, k, v.

    Raises:
        UnknownChoiceError: another projection than q, k, v.
        ValueError: not a finite number.
    """
    given = dict(lam) if isinstance(lam, Mapping) else dict.fromkeys("qkv", lam)
    for role in given:
        check_choice("projection of lam", role, ("q", "k", "v"))
    lams = {role: _number(given.get(role, 0.0)) for role in "qkv"}
    for role, value in lams.items():
        if value is None:
            raise ValueError(f"lam: expected a finite number, got {given[role]!r} for {role}")
    return lams  # type: ignore[return-value]


def _number(value: Any) -> float | None:
    """A finite number of Python or NumPy as a float; None for anything else, such as a boolean."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


# What a user should know before training with a correction.

SHORT = 197
"""Tokens of a ViT at 224 px: where a model does not say how many it has, the rule must hold for that many at least."""
RECORDS = (
    "In our records lam = 10 loses on every image task at every learning rate (digits: 21 % correct, 91 % without; "
    "CIFAR-10 with a ViT: 18 % and 31 %; results/README.md)."
)


def _check_representable(sites: list[AttentionSite], lams: dict[str, float]) -> None:
    for site in sites:
        for role, lam in lams.items():
            largest = torch.finfo(site.slots[role].parameter.dtype).max
            if abs(lam) > largest:
                raise WeightError(
                    f"{site.name or 'the model itself'} ({role}): lam={lam:g} does not fit into its weights, which are "
                    f"{site.slots[role].parameter.dtype} (at most {largest:.3g}); expected a smaller lam"
                )


def _saturation(
    model: nn.Module, sites: list[AttentionSite], lams: dict[str, float], num_tokens: int | None
) -> Iterator[str]:
    """One warning if lam I makes every token attend to itself alone.

    With layer-normed tokens, lam I on Q and K raises each token's logit with itself over the others by about
    s lam_q lam_k d. From ln N + 5 on, at least 99 % of the attention sits on the diagonal: Q and K get next to no
    gradient (theory.md, section 7.1).
    """
    for site in sites:
        known = num_tokens or count_positions(model, site)
        limit = math.log(known or SHORT) + 5
        gap = own_logit_gap(site, lams)
        if gap is not None and gap > limit:
            at = f"at N = {known} tokens" if known else f"at N = {SHORT}; how many tokens this model reads is not known"
            yield (
                f"{site.name or 'the model'}: lam={lams['q']:g} saturates the softmax: each token's own logit exceeds "
                f"the others by about s lam^2 d = {gap:.0f}, more than ln N + 5 = {limit:.1f} {at}. So attention "
                "begins as the identity and W_Q, W_K receive almost no gradient. "
                f"{RECORDS} condition_(model, 'balanced') leaves the scale of the logits as it is."
            )
            return


def own_logit_gap(site: AttentionSite, lams: Mapping[str, float]) -> float | None:
    """How far lam I on Q and K raises a token's own logit, s lam_q lam_k d; None where the weights do not set it."""
    if site.kind != "softmax" or site.scale is None or site.qk_norm is not None or site.cross:
        return None
    return site.scale * lams["q"] * lams["k"] * min(site.head_dim, site.in_features)


def count_positions(model: nn.Module, site: AttentionSite) -> int | None:
    """Tokens for which a model has learned positions as wide as the tokens of a site; None if it has none or several.

    A table of positions holds all tokens of an image, or those of the longest text.
    """
    lengths = set()
    for name, parameter in model.named_parameters():
        in_attention = site.name and name.startswith(f"{site.name}.")
        table = any(part in name for part in POSITIONS) and parameter.dim() in (2, 3)
        if table and not in_attention and parameter.shape[-1] == site.in_features:
            lengths.add(parameter.shape[-2] + _tokens_without_position(model, name))
    return lengths.pop() if len(lengths) == 1 else None


def _tokens_without_position(model: nn.Module, name: str) -> int:
    """Class and register tokens that timm's models put before tokens which have their positions already."""
    owner = model.get_submodule(name.rpartition(".")[0])
    count = getattr(owner, "num_prefix_tokens", 0) if getattr(owner, "no_embed_class", False) else 0
    return count if isinstance(count, int) else 0


def _rounded_away(sites: list[AttentionSite], lams: dict[str, float]) -> Iterator[str]:
    """One warning if a 16-bit weight of the size of W vanishes beside lam."""
    for site in sites:
        for role, lam in lams.items():
            weight = site.slots[role].parameter
            if weight.element_size() > 2 or lam == 0:
                continue
            spacing = torch.finfo(weight.dtype).eps * 2 ** math.floor(math.log2(abs(lam)))
            typical = float(full_tensor(weight.detach()).float().square().mean().sqrt())
            # Rounding errors are spread evenly over one spacing: standard deviation spacing / sqrt(12).
            if spacing / math.sqrt(12) > 0.25 * typical:
                yield (
                    f"{site.name or 'the model'} ({role}): stored as {weight.dtype}, whose numbers near {lam:g} are "
                    f"{spacing:g} apart, so weights of about {typical:.2g} are rounded away on the diagonal of W + C. "
                    "Keep master weights in float32 (autocast), and fold in float32."
                )
                return


def _degenerate_heads(
    model: nn.Module, sites: list[AttentionSite], projections: str, num_tokens: int | None
) -> Iterator[str]:
    """Warnings about zero and rank-deficient heads, whose polar factor is not unique."""
    zero, deficient = [], []
    for site in sites:
        for role in projections:
            for head, s in enumerate(spectra(site.slots[role].read_raw())):
                if s.rank == 0:
                    zero.append(f"{site.name} ({role}, head {head})")
                elif s.nullity:
                    deficient.append(f"{site.name} ({role}, head {head})")
    for heads, what in (
        (zero, "zero weights have no polar factor and stay zero (C = 0)"),
        (deficient, "rank-deficient weights have many polar factors; the one of the SVD is used"),
    ):
        if heads:
            shown = ", ".join(heads[:3]) + (f" and {len(heads) - 3} more" if len(heads) > 3 else "")
            yield f"{shown}: {what}."
