"""Source `citation_pairs`: pairs of papers that cite each other or are cited together, and pairs that are not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from wellcond.lab.data.base import Data, check_index, describe_sizes
from wellcond.lab.data.citations import CitationGraph, balanced_pairs, divide
from wellcond.lab.data.errors import DataError, listed
from wellcond.lab.data.reading import find_folder, require_file
from wellcond.lab.data.registry import SourceConfig, register_source

CLASS_NAMES = ("unrelated", "related")


class CitationPairsConfig(SourceConfig):
    """Settings of `citation_pairs`."""

    source: Literal["citation_pairs"] = "citation_pairs"
    path: str
    """Folder of the files; from the recipe's folder, or a name in a mirror."""
    documents: str = "docs_first4100B.json"
    """Texts by the id of the paper."""
    citing: str = "citation_pairs.tsv"
    cocited: str = "cocited_pairs.tsv"
    """Ids of two papers a line, separated by a tab; further columns are ignored."""
    positives: Literal["citing", "cocited", "both"] = "citing"
    """Which pairs count as related. Pairs of the other file are never taken for unrelated."""
    split_by: Literal["pairs", "papers"] = "pairs"
    """What no two splits share. With papers, related pairs across splits are lost, most of them in the small splits."""
    evaluation_fraction: float = Field(0.1, gt=0, lt=1)
    test_fraction: float = Field(0.1, ge=0, lt=1)
    """Of the pairs or papers that are divided; 0 makes no test split."""
    seed: int = 0
    """Of the division and of the unrelated pairs."""

    @model_validator(mode="after")
    def _leave_some_to_train(self) -> CitationPairsConfig:
        if self.evaluation_fraction + self.test_fraction >= 1:
            raise ValueError("expected evaluation_fraction and test_fraction to leave something to train on")
        return self


@dataclass(frozen=True, eq=False)
class CitationSplit:
    """Pairs of texts that all splits share."""

    texts: Sequence[str]
    pairs: Tensor
    """(n, 2), numbers of texts."""
    labels: Tensor

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Two texts and whether they are related."""
        index = check_index(index, len(self))
        first, second = self.pairs[index].tolist()
        return {"text": self.texts[first], "text_pair": self.texts[second], "label": int(self.labels[index])}

    def content(self, index: int) -> bytes:
        """Both texts in UTF-8."""
        first, second = self.pairs[check_index(index, len(self))].tolist()
        return b"\0".join(self.texts[number].encode("utf-8", "surrogatepass") for number in (first, second))


@register_source(CitationPairsConfig)
def load(config: CitationPairsConfig, base: Path) -> Data:
    """As many unrelated pairs as related ones in every split; see `balanced_pairs` and `divide`.

    Papers without text (only blanks) are left out with their pairs, and counted in the description.
    """
    folder = find_folder(config.path, base)
    documents = _read_documents(require_file(folder / config.documents, "documents"))
    numbers = {paper: number for number, paper in enumerate(documents)}
    texts = list(documents.values())
    blank = {number for number, text in enumerate(texts) if not text.strip()}
    found = {
        name: _read_pairs(require_file(folder / getattr(config, name), name), numbers) for name in ("citing", "cocited")
    }
    chosen = found["citing"] + found["cocited"] if config.positives == "both" else found[config.positives]
    graph = CitationGraph.of(chosen, found["citing"] + found["cocited"], without=blank)
    fractions = {"evaluation": config.evaluation_fraction, "test": config.test_fraction}
    used = {name: part for name, part in fractions.items() if part > 0}
    divided = divide(graph, used, by=config.split_by, seed=config.seed)
    splits: dict[str, CitationSplit] = {}
    taken: set[tuple[int, int]] = set()
    for name, positives in divided.items():
        if not positives:
            raise DataError(
                f"{folder}: the {name} split has no related pairs.",
                expected="at least one pair in every split",
                found=f"{len(graph.positives)} pairs, divided by {config.split_by}",
                todo="Change 'evaluation_fraction' or 'test_fraction', or set 'split_by: pairs'.",
            )
        pairs, labels = balanced_pairs(graph, positives, taken, seed=config.seed, split=name, where=str(folder))
        splits[name] = CitationSplit(texts, pairs, labels)
    kept = sum(len(split) for split in splits.values()) // 2
    notes = [f"divided by {config.split_by}"]
    notes += [f"{len(splits['test'])} test examples"] if "test" in splits else []
    notes += [f"{lost} related pairs across splits left out"] if (lost := len(graph.positives) - kept) else []
    notes += [f"{len(blank)} papers without text left out"] if blank else []
    train, evaluation = splits["train"], splits["evaluation"]
    sizes = describe_sizes(train, evaluation, CLASS_NAMES)
    description = "; ".join([f"paper pairs ({config.positives}) of {folder.name}: {sizes}", *notes])
    rest = {"test": splits["test"]} if "test" in splits else {}
    return Data(folder.name, "text", train, evaluation, CLASS_NAMES, description, rest)


def _read_documents(file: Path) -> dict[str, str]:
    try:
        documents = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # of JSON or UTF-8
        raise DataError(
            f"{file}: the file cannot be read.",
            expected="JSON in UTF-8: texts by the id of the paper",
            found=f"{type(error).__name__}: {error}",
            todo="Check that the file is complete.",
        ) from error
    wrong = (
        type(documents).__name__
        if not isinstance(documents, dict)
        else listed(f"{paper!r}: {type(text).__name__}" for paper, text in documents.items() if type(text) is not str)
    )
    if wrong != "none":
        raise DataError(
            f"{file}: the documents are not texts by id.",
            expected='an object such as {"A00-1031": "text of the paper"}',
            found=wrong,
            todo="Write the file in this form.",
        )
    return documents


def _read_pairs(file: Path, numbers: dict[str, int]) -> list[tuple[int, int]]:
    pairs = []
    for line, row in enumerate(file.read_bytes().split(b"\n"), 1):
        papers = row.rstrip(b"\r").decode("utf-8", "replace").split("\t")[:2]
        if papers == [""]:
            continue
        unknown = [paper for paper in papers if paper not in numbers]
        if len(papers) < 2 or unknown or papers[0] == papers[1]:
            raise DataError(
                f"{file}, line {line}: the pair cannot be used.",
                expected="the ids of two different papers that have a text, separated by a tab",
                found=f"unknown ids {listed(map(repr, unknown))}" if unknown else listed(map(repr, papers)),
                todo="Correct or remove the line.",
            )
        pairs.append((numbers[papers[0]], numbers[papers[1]]))
    if not pairs:
        raise DataError(f"{file}: there are no pairs.", expected="pairs", found="none", todo="Check the file.")
    return pairs
