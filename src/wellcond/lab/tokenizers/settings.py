"""Which tokeniser a recipe asks for, in `task.tokenizer`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from wellcond.lab.settings import Settings


class TrainedTokenizer(Settings):
    """A tokeniser trained on the training split."""

    train: Literal["wordpiece", "bpe"]
    """Word pieces as in BERT, or byte pairs as in GPT-2."""
    vocabulary: Annotated[int, Field(ge=2, le=10_000_000)]
    """Number of tokens, special ones and single characters among them."""
    lower_case: bool = False
    """Whether texts are written in lower case first; word pieces then lose their accents as well."""
    min_frequency: PositiveInt = 2
    """How often a pair must occur to become a token."""
    documents: PositiveInt | None = None
    """Only the first so many documents are looked at; null: all."""


class TokenizerFile(Settings):
    """A tokeniser that exists."""

    file: str
    """tokenizer.json, vocab.txt, or a folder with one of them or with vocab.json and merges.txt; from the recipe's
    folder, or by name in a mirror."""
    lower_case: bool | None = None
    """Of vocab.txt: whether texts are written in lower case first; null: if no word of it has a capital."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Refuses any tokeniser but that of this fingerprint."""


def _choose(raw: Any) -> Any:
    if isinstance(raw, dict) and ("train" in raw) != ("file" in raw):
        return (TrainedTokenizer if "train" in raw else TokenizerFile).model_validate(raw)
    if raw == "bytes" or isinstance(raw, (TrainedTokenizer, TokenizerFile)):
        return raw
    raise ValueError("expected bytes, {train: wordpiece or bpe, vocabulary: 4096} or {file: PATH}")


TokenizerChoice = Annotated[Literal["bytes"] | TrainedTokenizer | TokenizerFile, BeforeValidator(_choose)]
"""Field type of a task."""
