"""Related papers divided into splits, and unrelated pairs to tell them from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wellcond.lab.data.errors import DataError
from wellcond.lab.seeding import generator

Pair = tuple[int, int]
TRIES = 64


@dataclass(frozen=True)
class CitationGraph:
    """Papers by number and which are related."""

    positives: tuple[Pair, ...]
    """Different pairs in the order of the file; of a pair in both directions the first."""
    related: frozenset[Pair]
    """All pairs that are related in any way, the smaller number first."""

    @classmethod
    def of(cls, positives: Sequence[Pair], related: Sequence[Pair], *, without: Set[int]) -> CitationGraph:
        """Drop repeated pairs, and those of the papers in `without`."""
        different = {_unordered(pair): pair for pair in reversed(positives)}
        kept = tuple(pair for pair in reversed(different.values()) if not without & set(pair))
        return cls(kept, frozenset(map(_unordered, related)))


def divide(
    graph: CitationGraph, fractions: Mapping[str, float], *, by: Literal["pairs", "papers"], seed: int
) -> dict[str, list[Pair]]:
    """Related pairs of each split; `train` is what the named fractions leave.

    By pairs, no pair is in two splits in any direction, but papers are. By papers, no paper is in two splits, and
    related pairs with a paper in each of two splits are in none.
    """
    papers = sorted({paper for pair in graph.positives for paper in pair})
    count = len(graph.positives) if by == "pairs" else len(papers)
    order = torch.randperm(count, generator=generator(seed, f"citations, division by {by}")).tolist()
    splits, start = {}, 0
    sizes = {name: round(fraction * count) for name, fraction in fractions.items()}
    for name, size in (*sizes.items(), ("train", count - sum(sizes.values()))):
        chosen = sorted(order[start : start + size])
        start += size
        if by == "pairs":
            splits[name] = [graph.positives[index] for index in chosen]
        else:
            own = {papers[index] for index in chosen}
            splits[name] = [pair for pair in graph.positives if own.issuperset(pair)]
    return splits


def balanced_pairs(
    graph: CitationGraph, positives: Sequence[Pair], taken: set[Pair], *, seed: int, split: str, where: str
) -> tuple[Tensor, Tensor]:
    """Every related pair, and for each an unrelated one with the same first paper: pairs (2n, 2), labels (2n,), mixed.

    The second paper is drawn from the second papers of the related pairs, as often as it occurs among them, so that a
    paper alone says little about the class: otherwise papers that are cited often would give a pair away. No unrelated
    pair is one of those `taken`, to which it is added: with one set for all splits none is in two of them.

    Raises:
        DataError: a paper is related to all the others of the split.
    """
    source = generator(seed, f"citations, unrelated pairs of {split}")
    seconds = [second for _, second in positives]
    papers = sorted({paper for pair in positives for paper in pair})
    negatives = []
    for first, _ in positives:
        for second in _draw(seconds, papers, source):
            pair = _unordered((first, second))
            if first != second and pair not in graph.related and pair not in taken:
                break
        else:
            raise DataError(
                f"{where}: the {split} split has too few unrelated papers.",
                expected="as many unrelated pairs as related ones",
                found=f"{len(papers)} papers and {len(positives)} related pairs",
                todo="Use more papers, or enlarge the split.",
            )
        taken.add(pair)
        negatives.append((first, second))
    pairs = torch.tensor([*positives, *negatives])
    labels = torch.tensor([1] * len(positives) + [0] * len(negatives))
    order = torch.randperm(len(pairs), generator=source)
    return pairs[order], labels[order]


def _draw(often: Sequence[int], all_of_them: Sequence[int], source: torch.Generator) -> Iterator[int]:
    """Elements of `often` by chance, and after some tries each of the others, so that none is missed."""
    yield from (often[index] for index in torch.randint(len(often), (TRIES,), generator=source).tolist())
    yield from (all_of_them[index] for index in torch.randperm(len(all_of_them), generator=source).tolist())


def _unordered(pair: Pair) -> Pair:
    return min(pair), max(pair)
