"""From facts to findings: one function per rule, in the order in which findings of equal severity are shown.

Rules about a start speak of models before training only: trained weights are what training made them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wellcond.diagnosis.examine import MOST_TOKENS
from wellcond.diagnosis.phrases import (
    count,
    names_of,
    only_sites,
    scale_line,
    some_of,
    title_of,
    two_digits,
)
from wellcond.diagnosis.records import SEVERITIES, Finding, LayerFacts, Severity, TokenFacts
from wellcond.diagnosis.thresholds import THRESHOLDS, above

TABLES = "results/evidence/tables.md"
CAUSAL = "results/evidence/causal/report/report.md"
EXPLAINS = {
    "not-finite": {"dead-heads", "logits", "precision", "stream", "positions", "words", "value-scale"},
    "lambda": {"dead-heads", "logits", "precision", "stream", "value-scale", "shared-values"},
    "dead-heads": {"logits"},
    "words": {"stream"},
    "value-scale": {"shared-values"},
}
"""Findings that follow from another are left out beside it."""
WORD_LENGTH, POSITION_RATIO, STREAM_SHARE = 0.55, 1.0, 2.5
"""What the remedies aim at: the values of the best starts in the records."""
LIBRARY_STD = 0.02
"""With which timm and Hugging Face draw weights."""


@dataclass(frozen=True)
class Case:
    """What the rules judge."""

    layers: Sequence[LayerFacts]
    tokens: TokenFacts
    fresh: bool


Rule = Callable[[Case], Finding | None]


def judge(case: Case) -> tuple[Finding, ...]:
    """Findings by severity, without those that follow from another one."""
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    explained = set().union(*(EXPLAINS.get(finding.kind, set()) for finding in found))
    order = list(SEVERITIES)
    kept = (finding for finding in found if finding.kind not in explained)
    return tuple(sorted(kept, key=lambda finding: order.index(finding.severity)))


def _not_finite(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if not layer.finite]
    if not bad:
        return None
    return Finding(
        kind="not-finite",
        severity="fault",
        verdict=f"NaN or infinite numbers reach or leave {some_of(bad)}: this model has diverged.",
        layers=names_of(bad),
        value=math.nan,
        threshold=math.inf,
        remedy="model.load_state_dict(checkpoint)  # an earlier one, at a lower learning rate",
        evidence="None of our records is about this line.",
    )


def _lambda(case: Case) -> Finding | None:
    bad = above(case.layers, lambda layer: layer.saturation, "lambda")
    if not bad:
        return None
    worst, tokens = bad[0].saturation, bad[0].num_tokens
    assert worst is not None and tokens is not None
    gap = worst * (math.log(tokens) + 5)
    return _finding(
        "lambda",
        "fault",
        f"The correction lam I raises each token's logit with itself by about {gap:.0f} ({some_of(bad)}), so that it "
        "sees little but itself and W_Q, W_K hardly learn.",
        bad,
        worst,
        'wc.condition_(model, "balanced")  # in place of "identity"; or lam=1',
        "lam = 10 has 21.1 % on digits and 18.1 on CIFAR-10, where the default has 91.2 and 31.2, balanced 91.5 and "
        "31.5, lam = 1 91.2 and 31.2. In GPT-2 it beats a weak default and loses to larger embeddings (53.0 and 41.7).",
        TABLES,
    )


def _dead_heads(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.dead_heads]
    if not bad:
        return None
    heads = sum(len(layer.dead_heads) for layer in bad)
    whole = [layer for layer in bad if len(layer.dead_heads) == layer.num_heads]
    if any(layer.collapsed_heads for layer in bad):
        why, options = "every token attends to one key alone", ', projections="qk"'
    else:
        why, options = "both factors of a product (W_Q and W_K, or W_V and W_O) are zero", ""
    return _finding(
        "dead-heads",
        "fault" if case.fresh or whole else "warning",
        f"{count(heads, 'head')} of {some_of(bad)} {'is' if heads == 1 else 'are'} dead: {why}, and W_Q, W_K get no "
        "gradient.",
        bad,
        float(heads),
        f'wc.init_(model, "gaussian"{options}{only_sites(len(case.layers), bad)})',
        "As a start gaussian is as good as any in the records (digits 92.7 %, conditioned 92.9). None is about "
        "redrawing heads in training.",
        TABLES,
    )


def _positions(case: Case) -> Finding | None:
    ratio = case.tokens.position_ratio
    if not case.fresh or ratio is None or not ratio < THRESHOLDS["positions"].value:
        return None
    factor = two_digits(POSITION_RATIO / ratio) if ratio > 0 else math.inf
    remedy = scale_line(case.tokens.positions, factor)
    if ratio == 0:
        name, std = case.tokens.positions[0], case.tokens.spread
        remedy = f'torch.nn.init.normal_(model.get_parameter("{name}"), std={std:.2g})'
    return _finding(
        "positions",
        "warning",
        f"Position embeddings have {ratio:.2g} of the size of the {case.tokens.kind} they are added to, so that tokens "
        f"hardly know where they are{_about_tokens(case.layers[0])}.",
        [],
        ratio,
        remedy,
        "With positions (and patches) at a searched scale digits rise from 91.2 to 97.5 %, CIFAR-10 with ViT from 31.2 "
        "to 33.5: more than any attention start gives. The factor is worth a search of its own.",
        TABLES,
    )


def _about_tokens(layer: LayerFacts) -> str:
    """How dependent the tokens are, if they are more so than Gaussian ones (edges of the Marchenko-Pastur law)."""
    if layer.kappa_tokens is None or layer.num_tokens is None:
        return ""
    wide, long = math.sqrt(layer.width), math.sqrt(min(layer.num_tokens, MOST_TOKENS))
    usual = (wide + long) / max(abs(wide - long), 1e-9)
    told = f": kappa(X) is {layer.kappa_tokens:.3g} in the first attention, {usual:.2g} for Gaussian tokens"
    return told if layer.kappa_tokens > 3 * usual else ""


def _words(case: Case) -> Finding | None:
    length = case.tokens.length
    if not case.fresh or not length or length >= THRESHOLDS["words"].value:
        return None
    return _finding(
        "words",
        "warning",
        f"Word embeddings are short for this width: length {length:.2g} (0.55 in GPT-2 small), so that what the blocks "
        "add soon outweighs them.",
        [],
        length,
        scale_line([f"{name}.weight" for name in case.tokens.embeddings], two_digits(WORD_LENGTH / length)),
        "GPT-2 of width 64 with embeddings x 3.46 (length 0.55) and matrices at the scale of GPT-2 small: perplexity "
        "41.7 where its library's start has 59.6 (TinyStories), 185 and 319 (WikiText-2). Embeddings alone: 36.3 and "
        "39.6 in pilot runs of two seeds.",
        TABLES,
    )


def _value_scale(case: Case) -> Finding | None:
    def value(layer: LayerFacts) -> float | None:
        heard = layer.attention_share is None or _own_share(layer) >= THRESHOLDS["value-share"].value
        return layer.scale_v if layer.causal and heard else None

    bad = above(case.layers, value, "value-scale") if case.fresh else []
    if not bad:
        return None
    assert bad[0].scale_v is not None
    usual = min(LIBRARY_STD * math.sqrt(bad[0].width), WORD_LENGTH)
    factor = two_digits(usual / bad[0].scale_v)
    return _finding(
        "value-scale",
        "warning",
        f"W_V starts at scale {bad[0].scale_v:.2g} under a causal mask ({some_of(bad)}): an average of the past "
        "outweighs the token it is added to.",
        bad,
        bad[0].scale_v,
        f"for site in wc.find_attention(model): site.v.write_({factor:g} * site.v.read_raw())",
        "GPT-2 on TinyStories, five seeds: perplexity 56.6 with conditioned and 45.1 with this W_V "
        '(value_scale="default"), 44.6 with conditioned Q and K alone (projections="qk"), 45.7 by default.',
        CAUSAL,
    )


def _own_share(layer: LayerFacts) -> float:
    """What a causal attention adds to the first token, relative to the stream, if later ones average those before.

    The average of i tokens is 1/sqrt(i) as large as one, so the mean square over N tokens is (1 + 1/2 + ... + 1/N)/N.
    """
    count = layer.num_tokens or 1
    averaged = math.fsum(1 / i for i in range(1, count + 1)) / count
    return (layer.attention_share or 0.0) / math.sqrt(averaged)


def _stream(case: Case) -> Finding | None:
    def added(layer: LayerFacts) -> float | None:
        parts = [share for share in (layer.attention_share, layer.mlp_share) if share is not None]
        return math.hypot(*parts) if parts and not layer.scales_itself else None

    bad = above(case.layers, added, "stream") if case.fresh else []
    if not bad:
        return None
    worst = added(bad[0])
    assert worst is not None
    if case.tokens.kind == "words":
        names = [f"{name}.weight" for name in case.tokens.embeddings]
        remedy = scale_line(names, two_digits(worst / STREAM_SHARE))
        evidence = (
            "GPT-2 of width 64 at the scale of GPT-2 small, whose first block adds 6.5 times what it receives: "
            "perplexity 97.4, and 41.7 with embeddings x 3.46 (2.6 times)."
        )
        record = TABLES
    else:
        remedy = 'wc.init_(model, "calibrated", batch=batch, start="keep")  # each part adds 0.15 of its stream'
        record = "docs/methods/calibrated.md"
        evidence = (
            "Pilot runs only: digits 97.6 %, near the 98.1 of a search over the scales of embeddings and positions."
        )
    return _finding(
        "stream",
        "warning",
        f"Attention and MLP add up to {worst:.2g} times what their block receives (at {some_of(bad)}): little is left "
        "of the tokens themselves.",
        bad,
        worst,
        remedy,
        evidence,
        record,
    )


def _logits(case: Case) -> Finding | None:
    def spread(layer: LayerFacts) -> float | None:
        return None if layer.qk_norm else layer.logit_spread  # a norm's own gain decides, not W_Q and W_K

    bad = above(case.layers, spread, "logits") if case.fresh else []
    if not bad:
        return None
    assert bad[0].logit_spread is not None
    return _finding(
        "logits",
        "warning",
        f"Logits start with a standard deviation of {bad[0].logit_spread:.2g} ({some_of(bad)}): the softmax is nearly "
        "a choice of one key, and W_Q, W_K get little gradient.",
        bad,
        bad[0].logit_spread,
        'wc.init_(model, "gaussian", projections="qk")  # and check the factor 1/sqrt(head_dim)',
        "gaussian starts logits at 1: digits 92.7 %, CIFAR-10 31.3, where the default has 91.2 and 31.2.",
        TABLES,
    )


def _precision(case: Case) -> Finding | None:
    bad = above(case.layers, lambda layer: layer.largest_logit, "precision")
    if not bad:
        return None
    worst = bad[0].largest_logit
    assert worst is not None
    spacing = 2.0 ** (math.floor(math.log2(worst)) - 7)
    overflow = ", and float16 overflows" if worst > 65504 else ""
    return _finding(
        "precision",
        "warning",
        f"Logits reach {worst:.0f} ({some_of(bad)}), where numbers of bfloat16 are {spacing:g} apart{overflow}: in 16 "
        "bits the softmax is rounded away.",
        bad,
        worst,
        'wc.init_(model, "gaussian", projections="qk")'
        if case.fresh
        else 'with torch.autocast("cuda", enabled=False): ...  # around the attention; and a lower rate for Q and K',
        "None is about large logits in training. QK-norm, which rules them out, does no harm: digits 91.8 % (default "
        "91.2), CIFAR-10 31.7 (31.2).",
        TABLES,
    )


def _projection_scale(case: Case) -> Finding | None:
    def smallest(layer: LayerFacts) -> float | None:
        scales = [layer.scale_v, *([] if layer.qk_norm else [layer.scale_q, layer.scale_k])]
        known = [scale for scale in scales if scale]
        return min(known) if known and not layer.causal else None

    if not case.fresh or case.tokens.kind == "words":
        return None
    bad = [layer for layer in case.layers if (smallest(layer) or math.inf) < THRESHOLDS["projection-scale"].value]
    if not bad:
        return None
    bad.sort(key=lambda layer: smallest(layer) or math.inf)
    worst = smallest(bad[0])
    assert worst is not None
    return _finding(
        "projection-scale",
        "warning",
        f"W_Q, W_K, W_V are small for this width: sigma sqrt(fan_in) down to {worst:.2g} in {some_of(bad)}, 0.55 in "
        "a ViT-B.",
        bad,
        worst,
        'wc.init_(model, "gaussian")  # "conditioned" is as good',
        "Over timm's start gaussian takes digits from 83.8 to 92.7 %, CIFAR-10 with ViT from 29.1 to 31.3, with XCiT "
        "from 29.9 to 32.9, with Swin from 24.5 to 26.4; conditioned has 92.9, 31.9, 33.2, 26.4.",
        TABLES,
    )


def _duplicate_heads(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.duplicate_heads]
    if not bad:
        return None
    pairs = sum(len(layer.duplicate_heads) for layer in bad)
    first, second = bad[0].duplicate_heads[0]
    return _finding(
        "duplicate-heads",
        "warning",
        f"{count(pairs, 'pair')} of heads in {some_of(bad)} compare and read the same (heads {first} and {second} of "
        f"{title_of(bad[0])}): one of each pair is wasted.",
        bad,
        float(pairs),
        f'wc.init_(model, "gaussian"{only_sites(len(case.layers), bad)})',
        "As a start gaussian is as good as any in the records (digits 92.7 %). None is about redrawing heads in "
        "training.",
        TABLES,
    )


def _shared_values(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.shared_values]
    if not case.fresh or not bad:
        return None
    return _finding(
        "shared-values",
        "note",
        f"W_V of all heads together has rank {bad[0].head_dim} of {bad[0].width} in {some_of(bad)}: all heads read the "
        "same directions, as conditioned starts them.",
        bad,
        float(bad[0].head_dim),
        'wc.init_(model, "conditioned", value="joint")  # each head its own directions',
        "No harm is shown: conditioned, which starts so, has 92.9 % on digits and 31.9 on CIFAR-10, gaussian with a "
        "W_V of full rank 92.7 and 31.3.",
        TABLES,
    )


RULES: tuple[Rule, ...] = (
    _not_finite,
    _lambda,
    _dead_heads,
    _positions,
    _words,
    _value_scale,
    _stream,
    _logits,
    _precision,
    _projection_scale,
    _duplicate_heads,
    _shared_values,
)


def _finding(
    kind: str,
    severity: Severity,
    verdict: str,
    layers: Sequence[LayerFacts],
    value: float,
    remedy: str,
    evidence: str,
    record: str,
) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        verdict=verdict,
        layers=names_of(layers),
        value=value,
        threshold=THRESHOLDS[kind].value,
        remedy=remedy,
        evidence=evidence,
        record=record,
    )
