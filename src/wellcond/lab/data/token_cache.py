"""The tokens of a split as one flat file that is mapped into memory, never loaded whole, and made only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.base import Dataset
from wellcond.lab.data.disk_cache import CacheEntry
from wellcond.lab.data.errors import DataError
from wellcond.lab.data.growing_files import Piece, find_grown, grow
from wellcond.lab.data.progress import tell
from wellcond.lab.data.stored_text import map_file
from wellcond.lab.data.text_batches import text_batches, text_digest
from wellcond.lab.tokenizers.base import Tokenizer, document_end, id_type

VERSION = 1
TOKENS, ENDS = "tokens.bin", "document_ends.bin"
Ids = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Counts:
    """What a stream was made from."""

    documents: int = 0
    skipped: int = 0
    """Documents without a token, or of white space alone."""
    tokens: int = 0
    """With the one that ends each document."""
    words: int = 0
    """Separated by white space."""
    bytes: int = 0
    """In UTF-8."""


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents one after the other, each ended by the same token. Handed to another process, only paths travel."""

    path: Path
    ends_path: Path
    vocabulary_size: int
    counts: Counts

    def __len__(self) -> int:
        """Number of tokens."""
        return self.counts.tokens

    @cached_property
    def tokens(self) -> Ids:
        """All tokens, read from disk as they are asked for.

        Raises: DataError if the file is not as long as it was.
        """
        return map_file(self.path, id_type(self.vocabulary_size), self.counts.tokens)

    @cached_property
    def document_ends(self) -> NDArray[np.int64]:
        """Place behind the last token of each document."""
        return map_file(self.ends_path, np.dtype("<i8"), self.counts.documents)

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps, which would be copied."""
        return {key: value for key, value in vars(self).items() if key not in ("tokens", "document_ends")}


def open_token_stream(
    split: Dataset, tokenizer: Tokenizer, what: str, *, limit_tokens: int | None = None, root: Path | None = None
) -> TokenStream:
    """The tokens of a split, from the cache or made now.

    Two processes that ask for the same wait for each other; one that was killed leaves what it had for the next. Files
    are checked by size and, once in a process, by sha256; a damaged one is made again.

    Args:
        split: Texts.
        tokenizer: What makes tokens of them.
        what: Name of the split in messages.
        limit_tokens: Stop behind the document in which so many are reached.
        root: Of the cache, instead of `cache_root()`.

    Raises:
        DataError: there is no text in the split.
        CacheError: the cache cannot be written.
    """
    end = document_end(tokenizer)
    made_from = {
        "version": VERSION,
        "text": text_digest(split),
        "tokenizer": tokenizer.fingerprint,
        "end": end,
        "limit_tokens": limit_tokens,
    }
    entry = CacheEntry("tokens", made_from, root=root)

    def pieces(state: dict[str, Any] | None) -> Iterator[Piece]:
        return _tokenise(split, tokenizer, end, limit_tokens, state, what)

    names = (TOKENS, ENDS)
    state = find_grown(entry, names)
    if state is None:
        waiting = f"waiting for another process: tokenising {what}"
        state = grow(entry, names, pieces, lambda: tell(waiting, 0, len(split)))
    counts = Counts(**state["counts"])
    return TokenStream(entry.folder / TOKENS, entry.folder / ENDS, tokenizer.vocabulary_size, counts)


def _tokenise(
    split: Dataset, tokenizer: Tokenizer, end: int, limit_tokens: int | None, state: dict[str, Any] | None, what: str
) -> Iterator[Piece]:
    """Tokens and ends of documents, a batch of rows at a time, from where the state says on."""
    row = 0 if state is None else int(state["rows"])
    counts = Counts() if state is None else Counts(**state["counts"])
    for texts, encoded in _encoded(tokenizer, text_batches(split, row)):
        if limit_tokens is not None and counts.tokens >= limit_tokens:
            break
        stream, ends, counts = _join(texts, encoded, end, limit_tokens, counts, tokenizer.vocabulary_size)
        row += len(texts)
        yield Piece({TOKENS: stream, ENDS: ends}, {"rows": row, "counts": vars(counts)})
        tell(f"tokenising {what}, documents", row, len(split))
    if counts.documents == 0:
        raise DataError(
            f"{what}: there is no text.",
            expected="at least one document that is not empty",
            found=f"{counts.skipped} documents without text",
            todo="Check the data, or name another column in 'input'.",
        )


def _encoded(tokenizer: Tokenizer, batches: Iterator[list[str]]) -> Iterator[tuple[list[str], list[Ids]]]:
    """Batches with their tokens; the next one is encoded while the caller is busy with this one."""
    with ThreadPoolExecutor(1) as thread:
        waiting: tuple[list[str], Future[list[Ids]]] | None = None
        for texts in batches:
            following = (texts, thread.submit(tokenizer.encode_batch, texts))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = following
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def _join(
    texts: Sequence[str],
    encoded: Sequence[Ids],
    end: int,
    limit_tokens: int | None,
    counts: Counts,
    vocabulary_size: int,
) -> tuple[bytes, bytes, Counts]:
    """A batch of documents one after the other, with the places where they end, and the counts with them."""
    parts, ends = [], []
    last = np.array([end], dtype=id_type(vocabulary_size))
    documents, skipped, tokens, words, size = astuple(counts)
    for text, ids in zip(texts, encoded, strict=True):
        if limit_tokens is not None and tokens >= limit_tokens:
            break
        found = len(text.split())
        if not found or not len(ids):
            skipped += 1
            continue
        parts += [ids, last]
        tokens += len(ids) + 1
        ends.append(tokens)
        documents += 1
        words += found
        size += len(text.encode("utf-8", "surrogatepass"))
    joined = np.concatenate(parts) if parts else last[:0]
    outside = joined[joined >= vocabulary_size]
    if len(outside):
        raise DataError(
            "the tokeniser makes a token that it does not know.",
            expected=f"ids below {vocabulary_size}",
            found=str(int(outside[0])),
            todo="Use another tokeniser; the file of this one is not consistent.",
        )
    return joined.tobytes(), np.array(ends, "<i8").tobytes(), Counts(documents, skipped, tokens, words, size)
