"""Words of a method that stand for fields of the recipe: what acts during training, and what is built into the model.

``default+qk_clip(tau=50)`` is ``default+set(optimizer.qk_clip={tau: 50})``, and ``default+muon(heads=each)`` is
``default+set(optimizer.name=muon, optimizer.heads=each)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from wellcond.arguments import check_names

Fields = dict[str, Any]


def _given(**options: Any) -> Fields:
    return {name: value for name, value in options.items() if value is not None}


def qk_clip(*, tau: float | None = None, alpha: float | None = None) -> Fields:
    """QK-Clip: the largest logit that is left alone, and the share of the queries in the correction."""
    return {"optimizer.qk_clip": _given(tau=tau, alpha=alpha)}


def spectral_cap(*, w_max: float, projections: str | None = None) -> Fields:
    """The largest singular value that a head's weight may have, and of which projections."""
    return {"optimizer.spectral_cap": _given(w_max=w_max, projections=projections)}


def muon(*, heads: str | None = None) -> Fields:
    """Muon for the matrices of the blocks: each head by itself, pairs, or fused."""
    return _given(**{"optimizer.name": "muon", "optimizer.heads": heads})


def qk_norm(*, gain: bool = False) -> Fields:
    """QK-norm in layers that have none, with or without a learned ``gain``."""
    return {"model.qk_norm": "gain" if gain else True}


def qk_rate(*, factor: float) -> Fields:
    """Steps of queries and keys ``factor`` times as long."""
    return {"optimizer.qk_lr_factor": factor}


def conditioned_tokens(*, keep_scale: bool | None = None, of: str | None = None) -> Fields:
    """Conditioned Embedded Tokens: `wellcond.condition_tokens_`."""
    return _tokens("conditioned", of, keep_scale=keep_scale)


def grayed_tokens(*, eps: float | None = None, by: str | None = None, of: str | None = None) -> Fields:
    """Token Graying: `wellcond.condition_tokens_`."""
    return _tokens("grayed", of, eps=eps, by=by)


def _tokens(name: str, of: str | None, **options: Any) -> Fields:
    return {"model.token_correction": _given(name=name, of=of) | {"options": _given(**options)}}


ACTING: Mapping[str, Callable[..., Fields]] = {
    one.__name__: one for one in (qk_clip, spectral_cap, muon, qk_norm, qk_rate, conditioned_tokens, grayed_tokens)
}


def fields_of(name: str, options: Mapping[str, Any]) -> Fields:
    """The fields of the recipe that a word of `ACTING` sets; ValueError for options that it does not have."""
    check_names(ACTING[name], name, options)
    return ACTING[name](**options)


def only_option(name: str) -> str | None:
    """The option that may be given without its name, as in ``qk_rate(0.3)``: that of a word which has no other."""
    parameters = list(inspect.signature(ACTING[name]).parameters.values()) if name in ACTING else []
    return parameters[0].name if len(parameters) == 1 and parameters[0].kind is parameters[0].KEYWORD_ONLY else None
