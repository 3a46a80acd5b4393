"""`bottom_line`: what a comparison shows, in one sentence."""

from __future__ import annotations

from collections import Counter

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.formats import show_interval
from wellcond.lab.report.reading import find_findings
from wellcond.lab.report.statistics import FEWEST_SEEDS
from wellcond.lab.report.values import show_seeds
from wellcond.lab.report.verdicts import Kind

WORDS: dict[Kind, str] = {
    "better": "better",
    "worse": "worse",
    "equal": "equal within the margin",
    "undecided": "undecided",
}


def bottom_line(analysis: Analysis) -> str:
    """How many methods are better, worse, equal or undecided against the baseline, and the largest difference.

    Where no difference can be judged, the first finding says why.
    """
    metric = analysis.comparison.result
    compared = [difference for difference in analysis.differences.values() if difference.count]
    if not compared or max(difference.count for difference in compared) < FEWEST_SEEDS:
        return " ".join(find_findings(analysis)[: 2 if compared else 1])
    counts = Counter(analysis.judge(difference).kind for difference in compared)
    told = ", ".join(f"{counts[kind]} {'is' if counts[kind] == 1 else 'are'} {word}" for kind, word in WORDS.items()
                     if counts[kind])  # fmt: skip
    which = "method" if len(compared) == 1 else "methods"
    top = max(compared, key=lambda difference: difference.mean)
    size = "largest gain" if top.mean > 0 else "smallest loss"
    facts = [f"95 % interval {show_interval(top.interval, metric)}"] if top.interval is not None else []
    facts += [show_seeds(top.count), WORDS[analysis.judge(top).kind]]
    return (
        f"Of {len(compared)} {which} against {analysis.comparison.baseline}, {told}; the {size} is "
        f"{metric.show(top.mean, sign=True)}{metric.unit}, of {top.method} ({', '.join(facts)})."
    )
