"""The words of `AttentionSite.modifiers`: what changes the mathematics and no other field expresses."""

from __future__ import annotations

from collections.abc import Mapping

ATTENTION_SINKS = "attention sinks"
EXTRA_KEYS = "extra keys"
SELECTED_KEYS = "selected keys"
QUERY_POSITION_TERM = "query position term"
POSITION_DEPENDENT_SCALE = "position-dependent scale"
LOGIT_SOFTCAP = "logit softcap"
POOLED_QUERIES = "pooled queries"
CLIPPED_QKV = "clipped qkv"
SCALED_VALUES = "scaled values"
VALUE_CONVOLUTION = "value convolution"
OUTPUT_NORM = "output norm"
GATED_OUTPUT = "gated output"

VOCABULARY: Mapping[str, str] = {
    ATTENTION_SINKS: "a learned logit per head joins the softmax, so that the weights of the keys sum to less than one",
    EXTRA_KEYS: "keys and values that no token makes are seen too: learned ones, or zeros",
    SELECTED_KEYS: "something besides position decides which keys a query sees: an indexer, or chance",
    QUERY_POSITION_TERM: "the logits have a term that multiplies positions with the query",
    POSITION_DEPENDENT_SCALE: "the scale of the logits grows with the position of the query",
    LOGIT_SOFTCAP: "the logits pass c tanh(x / c)",
    POOLED_QUERIES: "queries are pooled over tokens after their projection",
    CLIPPED_QKV: "projected queries, keys and values are clamped",
    SCALED_VALUES: "values are multiplied by a fixed number",
    VALUE_CONVOLUTION: "a convolution of the values is added to the output of the heads",
    OUTPUT_NORM: "a norm stands between the heads and W_O",
    GATED_OUTPUT: "the output of the heads is multiplied by a gate that reads the tokens, before W_O",
}


def those(holds: Mapping[str, bool]) -> tuple[str, ...]:
    """The words that hold, in the order of the vocabulary.

    Raises: ValueError for a word outside the vocabulary.

    Example:
        >>> those({GATED_OUTPUT: True, OUTPUT_NORM: True, EXTRA_KEYS: False})
        ('output norm', 'gated output')
    """
    unknown = sorted(set(holds) - set(VOCABULARY))
    if unknown:
        raise ValueError(f"unknown modifiers {unknown}; expected some of {list(VOCABULARY)}")
    return tuple(word for word in VOCABULARY if holds.get(word))
