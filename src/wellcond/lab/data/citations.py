"""Pairs of papers, related or not: the retrieval task of the Long Range Arena, and pairs made of lists of citations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from wellcond.errors import DataError
from wellcond.lab.data.base import Data, SourceConfig, register_source, report_progress
from wellcond.lab.data.disk import find_path, require
from wellcond.lab.seeding import generator

CLASS_NAMES = ("unrelated", "related")
MAX_BYTES = 4100
"""Of each published text; more than any recipe reads."""
Pair = tuple[int, int]
Row = TypeVar("Row")


@dataclass(frozen=True, eq=False)
class PairDataset:
    """Pairs of texts, each of which is held once, in UTF-8."""

    texts: Sequence[bytes]
    pairs: Tensor
    """(n, 2), numbers of texts."""
    labels: Tensor

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Half a character at the end of a text is left out.
        text, text_pair = (self.texts[number].decode("utf-8", "ignore") for number in self.pairs[index].tolist())
        return {"text": text, "text_pair": text_pair, "label": int(self.labels[index])}

    def take(self, rows: Tensor) -> PairDataset:
        """Some of the pairs."""
        return replace(self, pairs=self.pairs[rows], labels=self.labels[rows])

    def content(self, index: int) -> bytes:
        """Both texts."""
        return b"\0".join(self.texts[number] for number in self.pairs[index].tolist())


def _read_lines(file: Path, parse: Callable[[bytes], Row], expected: str) -> Iterator[Row]:
    """What `parse` makes of each line of a file; DataError for a line of which it makes nothing."""
    done, size = 0, file.stat().st_size
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield parse(line.rstrip(b"\r\n"))
            except (ValueError, KeyError) as error:
                raise DataError(
                    f"{file}, line {number}: the row cannot be used.",
                    expected=expected,
                    found=f"{line.decode('utf-8', 'replace').rstrip()[:60]!r}; {type(error).__name__}: {error}",
                    path=file,
                    row=number,
                ) from error
            done += len(line)
            if number % 1000 == 0:
                report_progress(f"reading {file.name}", done, size)


class AanPairsConfig(SourceConfig):
    """Settings of `aan_pairs`, the files of the Long Range Arena's retrieval task."""

    source: Literal["aan_pairs"] = "aan_pairs"
    path: str
    """Folder of new_aan_pairs.train.tsv, .eval.tsv and .test.tsv; from the recipe's folder, or a name in a mirror."""


@register_source(AanPairsConfig)
def load_aan_pairs(config: AanPairsConfig, base: Path) -> Data:
    """Check every row of the three files; `eval` is evaluated on, and `test` is the test split."""
    folder = find_path(config.path, base)
    files = [require(folder / f"new_aan_pairs.{name}.tsv") for name in ("train", "eval", "test")]
    train, evaluation, test = (_read_aan(file) for file in files)
    origin = f"paper pairs of the Long Range Arena, the first {MAX_BYTES} bytes of each text"
    return Data("aan_pairs", "text", train, evaluation, CLASS_NAMES, origin, {"test": test})


def _read_aan(file: Path) -> PairDataset:
    """Rows of label, two ids and two texts.

    Texts keep the b and the quotes of the Python literals they were written as, as in the published pipeline.
    """
    texts: dict[bytes, int] = {}

    def parse(line: bytes) -> tuple[int, list[int]]:
        # No quoting: the texts hold quotes of their own.
        label, _, _, *both = line.split(b"\t")
        if len(both) != 2 or not all(both):
            raise ValueError(f"{len(both)} texts, or an empty one")
        pair = [texts.setdefault(text[:MAX_BYTES], len(texts)) for text in both]
        return {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}[label], pair

    expected = "separated by tabs: the label 0 or 1, two ids, and two texts that are not empty"
    rows = list(_read_lines(file, parse, expected))
    if not rows:
        raise DataError(f"{file}: there are no rows.", expected=expected, found="an empty file")
    labels, pairs = zip(*rows, strict=True)
    return PairDataset(list(texts), torch.tensor(pairs), torch.tensor(labels))


class CitationPairsConfig(SourceConfig):
    """Settings of `citation_pairs`: related pairs from two lists, and as many unrelated ones."""

    source: Literal["citation_pairs"] = "citation_pairs"
    path: str
    """Folder of docs_first4100B.json, texts by the id of the paper, and of citation_pairs.tsv and cocited_pairs.tsv,
    ids of two papers a line, separated by a tab; from the recipe's folder, or a name in a mirror."""


@register_source(CitationPairsConfig)
def load_citation_pairs(config: CitationPairsConfig, base: Path) -> Data:
    """80 % training, 10 % evaluation and 10 % test pairs; no pair is in two splits, in either direction.

    Papers without text (only blanks) are left out with their pairs, and counted in the description.
    """
    folder = find_path(config.path, base)
    documents = _read_documents(require(folder / "docs_first4100B.json"))
    numbers = {paper: number for number, paper in enumerate(documents)}
    texts = [text.encode("utf-8", "replace") for text in documents.values()]
    blank = {numbers[paper] for paper, text in documents.items() if not text.strip()}
    files = [require(folder / f"{name}_pairs.tsv") for name in ("citation", "cocited")]
    listed = [pair for file in files for pair in _read_pairs(file, numbers)]
    # Of a pair in both directions the first.
    different = {_unordered(pair): pair for pair in reversed(listed)}
    positives = [pair for pair in reversed(different.values()) if not blank & set(pair)]
    # No unrelated pair may be one of these, nor one that another split has drawn.
    taken = set(different)
    tenth = round(0.1 * len(positives))
    order = torch.randperm(len(positives), generator=generator(0, "citations, division by pairs"))
    parts = order.split([tenth, tenth, len(positives) - 2 * tenth])
    related = [[positives[number] for number in part.sort().values.tolist()] for part in parts]
    evaluation, test, train = (
        PairDataset(texts, *_balance(pairs, taken, name, folder))
        for name, pairs in zip(("evaluation", "test", "train"), related, strict=True)
    )
    origin = f"paper pairs of {folder.name}, without {len(blank)} papers that have no text"
    return Data(folder.name, "text", train, evaluation, CLASS_NAMES, origin, {"test": test})


def _read_documents(file: Path) -> dict[str, str]:
    try:
        return TypeAdapter(dict[str, str]).validate_json(file.read_bytes())
    except ValidationError as error:
        raise DataError(
            f"{file}: the file cannot be read.",
            expected='JSON in UTF-8, texts by id such as {"A00-1031": "text of the paper"}',
            found=str(error.errors()[0]["msg"]),
        ) from error


def _read_pairs(file: Path, numbers: dict[str, int]) -> list[Pair]:
    def parse(line: bytes) -> Pair:
        first, second, *_ = line.decode("utf-8", "replace").split("\t")
        if first == second:
            raise ValueError("twice the same")
        return numbers[first], numbers[second]

    expected = "the ids of two different papers that have a text, separated by a tab"
    return list(_read_lines(file, parse, expected))


def _balance(positives: Sequence[Pair], taken: set[Pair], split: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Every related pair, and for each an unrelated one with the same first paper: pairs (2n, 2), labels (2n,), mixed.

    The second paper is drawn from the second papers of the related pairs, as often as it occurs among them, so that a
    paper alone says little about the class: otherwise papers that are cited often would give a pair away. No unrelated
    pair is one of those `taken`, to which it is added.
    """
    source = generator(0, f"citations, unrelated pairs of {split}")
    seconds = [second for _, second in positives]
    papers = sorted({paper for pair in positives for paper in pair})
    negatives: list[Pair] = []
    for first, _ in positives:
        drawn = ((first, second) for second in _draw(seconds, papers, source))
        pair = next((pair for pair in drawn if pair[1] != first and _unordered(pair) not in taken), None)
        if pair is None:
            break
        taken.add(_unordered(pair))
        negatives.append(pair)
    if not positives or len(negatives) < len(positives):
        raise DataError(
            f"{folder}: the {split} split has too few papers.",
            expected="related pairs, and as many unrelated ones",
            found=f"{len(papers)} papers and {len(positives)} related pairs",
        )
    pairs = torch.tensor([*positives, *negatives])
    labels = torch.tensor([1] * len(positives) + [0] * len(negatives))
    order = torch.randperm(len(pairs), generator=source)
    return pairs[order], labels[order]


def _draw(often: Sequence[int], all_of_them: Sequence[int], source: torch.Generator) -> Iterator[int]:
    """64 elements of `often` by chance, then each of the others, so that none is missed."""
    yield from (often[index] for index in torch.randint(len(often), (64,), generator=source).tolist())
    yield from (all_of_them[index] for index in torch.randperm(len(all_of_them), generator=source).tolist())


def _unordered(pair: Pair) -> Pair:
    return min(pair), max(pair)
