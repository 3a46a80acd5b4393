"""From where on a number is a finding, and why there: one table.

Set on models whose health is known: the initialisations of `results/evidence`, whose cost is measured; timm's and
Hugging Face's own; a small ViT before and after training (tests/doctor).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wellcond.doctor.records import LayerFacts


@dataclass(frozen=True)
class Threshold:
    """A limit and the reason for it."""

    value: float
    reason: str


THRESHOLDS: dict[str, Threshold] = {
    "lambda": Threshold(
        1.0,
        "s lam_q lam_k d over ln N + 5 (theory.md, section 7.1): beyond 1 at least 99.3 % of the attention between "
        "layer-normed tokens sits on the diagonal",
    ),
    "dead-heads": Threshold(
        0.9999, "mean largest probability of a token: there the softmax passes on no gradient (as in `measure`)"
    ),
    "positions": Threshold(
        0.15,
        "positions over the spread of embeddings: 0.03 in timm's ViTs, where larger ones help; 1 in BERT and GPT-2; on "
        "digits most of the gain is there from 0.3 on",
    ),
    "words": Threshold(
        0.3,
        "length of an embedding (root mean square times sqrt(D)): 0.55 in GPT-2 and BERT of width 768; 0.16 at width "
        "64, where x 3.46 was the best of the factors tried",
    ),
    "value-scale": Threshold(
        0.8,
        "sigma sqrt(fan_in) of W_V under a causal mask: 0.16 to 0.55 where GPT-2 trains well, 1 after conditioned and "
        "gaussian, which cost a tenth to a third of the perplexity",
    ),
    "value-share": Threshold(
        2.0,
        "what the attention adds to the first token, over the stream, from which on `value-scale` counts: 3 to 5 in "
        "those records, 1 in T5, whose embeddings are as large",
    ),
    "stream": Threshold(
        4.0,
        "what a block adds over what it receives: 2.6 in the best GPT-2 of a search over embeddings, 2.7 in GPT-2 "
        "small, 6.5 in the one that has twice its perplexity; 0.2 to 0.8 in ViTs",
    ),
    "logits": Threshold(
        3.0,
        "standard deviation of the logits before training: 0.3 in a ViT-B, 1 with Gaussian Q and K at 1/sqrt(D); pilot "
        "runs lose a little at 2; a forgotten factor 1/sqrt(d) gives 4 and more",
    ),
    "precision": Threshold(
        128.0, "largest logit: from 128 on, numbers of bfloat16 are 1 apart, and probabilities off by up to exp(0.5)"
    ),
    "projection-scale": Threshold(
        0.3,
        "sigma sqrt(fan_in) of W_Q, W_K, W_V in image models: 0.55 in a ViT-B (0.02 at width 768), 0.16 at width 64, "
        "which costs 7 points on digits; 1 is the best we know",
    ),
    "small-logits": Threshold(
        0.3,
        "standard deviation of the logits below which small W_Q and W_K count: 0.3 in a ViT-B, 0.02 at width 64 by "
        "timm's constants, 1 after calibrated",
    ),
    "small-share": Threshold(
        0.1,
        "what the attention adds, over the stream, below which a small W_V counts: 0.02 at width 64 by timm's "
        "constants, 0.15 after calibrated, which scales W_O instead",
    ),
    "duplicate-heads": Threshold(
        0.99, "cosine between two heads of W_Q^T W_K and of W_V on random vectors: below 0.9 for independent heads"
    ),
    "shared-values": Threshold(0.01, "share of W_V outside the directions that the first head reads"),
}


def above(layers: Sequence[LayerFacts], number: Callable[[LayerFacts], float | None], kind: str) -> list[LayerFacts]:
    """Layers beyond a threshold, the worst first."""
    limit = THRESHOLDS[kind].value
    found = [(value, layer) for layer in layers if (value := number(layer)) is not None and value > limit]
    return [layer for _, layer in sorted(found, key=lambda pair: -pair[0])]
