"""`committed_files`: all that is committed beside the records and follows from them: claims, tables and figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wellcond.errors import RunRecordError
from wellcond.lab.records import Comparison, load_comparisons, packed_path
from wellcond.lab.report.analysis import Analysis, analyse
from wellcond.lab.report.draw import BETTER, COLOURS, GREY, WORSE, styled, subplots, to_svg
from wellcond.lab.report.statistics import compare_paired
from wellcond.lab.report.tuning import find_tuning
from wellcond.lab.reproduce import predictors
from wellcond.lab.reproduce.claims import Judged, judge_claims
from wellcond.lab.reproduce.claims_page import claims_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TASKS = {
    "digits": "ViT, digits",
    "vit": "ViT, CIFAR-10",
    "xcit": "XCiT, CIFAR-10",
    "swin": "Swin, CIFAR-10",
    "listops": "Nystromformer, ListOps",
    "text": "Nystromformer, IMDB",
    "crammed-bert": "BERT, WikiText-2",
    "gpt2-tinystories": "GPT-2, TinyStories",
    "gpt2-wikitext2": "GPT-2, WikiText-2",
}
STRONG = "strong default"
DRAWN_BY = re.compile(rb"<dc:title>(Matplotlib [^<]*)</dc:title>")
CALIBRATED = "calibrated(positions=0.5)"


def check_committed(results: Path) -> str:
    """Compare committed files with what the records beside them give; a sentence on what was compared.

    A figure that another version of matplotlib drew cannot be compared, and the sentence says so.

    Raises: RunRecordError if a file is missing or differs, with `names` of all of them.
    """
    files = committed_files(results, judge_claims(results))
    differing: list[str] = []
    other: list[str] = []
    for name, content in files.items():
        stored = (results / name).read_bytes() if (results / name).is_file() else b""
        if stored != content:
            drawn_alike = not name.endswith(".svg") or DRAWN_BY.findall(stored) in ([], DRAWN_BY.findall(content))
            (differing if drawn_alike else other).append(name)
    if differing:
        problem = f"{', '.join(differing)}: not what the records give"
        raise RunRecordError(results, problem, f"Write what they give: wellcond claims {results}")
    unseen = f"; not compared, since another version of matplotlib drew them: {', '.join(other)}" if other else ""
    return f"{len(files) - len(other)} files are what the records give, byte for byte{unseen}."


def committed_files(results: Path, judged: Sequence[Judged]) -> dict[str, bytes]:
    """Content of every such file by its path below a folder laid out like results/; the same records, the same bytes.

    Figures have the same bytes under the same version of matplotlib.

    Raises: RunRecordError if there are records of no claim.
    """
    if all(one.verdict.word == "no records" for one in judged if one.by_runs):
        advice = "Give a folder laid out like results/ of the repository, with evidence/ in it."
        raise RunRecordError(results, "holds no records of any claim, so that nothing was written", advice)
    files = {"claims.md": claims_markdown(judged).encode()}
    evidence = results / "evidence"
    analyses = {
        task: analyse(load_comparisons(evidence / task)[0]) for task in TASKS if packed_path(evidence / task).is_file()
    }
    figures: dict[str, Figure] = {}
    with styled():
        if analyses:
            files["evidence/tables.md"] = tables_markdown(analyses).encode()
            figures["evidence/gains.svg"] = draw_gains(analyses)
            figures["evidence/calibrated.svg"] = draw_calibrated(analyses)
            figures["evidence/rates.svg"] = draw_rates(analyses)
            figures["evidence/methods.svg"] = draw_methods(analyses)
        if packed_path(evidence / "causal").is_file():
            figures["evidence/causal.svg"] = draw_scores(load_comparisons(evidence / "causal")[0])
        measured = results / "method" / "predictors.json"
        if measured.is_file():
            stored = json.loads(measured.read_text("utf-8"))
            best, rates = predictors.correlations({task: analyses[task].comparison for task in stored}, stored)
            files["method/predictors.md"] = predictors.markdown(best, rates).encode()
            figures["method/predictors.svg"] = predictors.draw(best)
        return files | {name: to_svg(figure) for name, figure in figures.items()}


def words(method: str, strong: str) -> str:
    """A method as a reader would call it."""
    known = {
        "default(library=true)": "library default",
        "default": "scale-true default",
        strong: STRONG,
        "default+set(model.qk_norm=true)": "default, QK-norm",
        "default+set(optimizer.name=muon)": "default, Muon",
        "conditioned(value_scale=default)": "conditioned, V at the default's norm",
        CALIBRATED: "calibrated",
        "default+set(model.layer_scale=0.1)": "default, LayerScale 0.1",
        "t_fixup": "T-Fixup",
        "small": "small initialisation",
        "mimetic(position=sincos1d)": "mimetic, sine-cosine positions",
        "mimetic(position=sincos2d)": "mimetic, sine-cosine positions",
    }
    return known.get(method, method.replace(f"{strong}+", f"{STRONG} + "))


def spelt(method: str, strong: str) -> str:
    """A method with the strong default of a task in it, which may be the scale-true default itself."""
    return (
        method.removeprefix(f"{STRONG}+") if strong == "default" and "+" in method else method.replace(STRONG, strong)
    )


def error_of(comparison: Comparison, method: str) -> float:
    """Mean error of a method over its seeds, in the unit of the metric: what an accuracy lacks, or the perplexity."""
    values = list(comparison.results(method).values())
    mean = math.fsum(values) / len(values)
    return 1 - mean if comparison.result.higher_is_better else mean


def shares(analysis: Analysis, method: str, over: str) -> tuple[float, float, float] | None:
    """How much of the error of `over` a method removes, in percent, with its 95 % interval; None if one is missing."""
    comparison = analysis.comparison
    if method == over or not {method, over} <= set(comparison.methods):
        return None
    values, base = (analysis.summaries[name].values for name in (method, over))
    better = comparison.metric.higher_is_better
    difference = compare_paired(method, values, over, base, higher_is_better=better)
    if difference.interval is None:
        return None
    error = error_of(comparison, over)
    return tuple(100 * value / error for value in (difference.mean, *difference.interval))  # type: ignore[return-value]


def draw_gains(analyses: Mapping[str, Analysis]) -> Figure:
    """What each of four steps removes of the error, by task."""
    questions = [
        ("scale: gaussian\nover the scale-true default", "gaussian", "default"),
        ("spectrum: conditioned\nover gaussian", "conditioned", "gaussian"),
        ("tokens: strong default\nover the scale-true default", STRONG, "default"),
        ("both: strong default + conditioned\nover the strong default", f"{STRONG}+conditioned", STRONG),
    ]
    figure, [panels] = subplots(1, len(questions), 10.5, 0.34 * len(analyses) + 1.2, sharey=True)
    for panel, (title, method, over) in zip(panels, questions, strict=True):
        found = [
            shares(a, spelt(method, a.comparison.baseline), spelt(over, a.comparison.baseline))
            for a in analyses.values()
        ]
        draw_shares(panel, found)
        panel.set_title(title, fontsize=8.5)
    panels[0].set_yticks(range(len(analyses)), [TASKS[task] for task in analyses])
    panels[0].set_ylim(len(analyses) - 0.5, -0.5)
    return figure


def draw_calibrated(analyses: Mapping[str, Analysis]) -> Figure:
    """What `calibrated` removes of the error of three others, by held-out task."""
    tested = {task: found for task, found in analyses.items() if CALIBRATED in found.comparison.methods}
    others = ("default", STRONG, "default+set(optimizer.name=muon)")
    figure, [panels] = subplots(1, len(others), 9.0, 0.34 * len(tested) + 1.1, sharey=True)
    for panel, over in zip(panels, others, strict=True):
        draw_shares(panel, [shares(a, CALIBRATED, spelt(over, a.comparison.baseline)) for a in tested.values()])
        panel.set_title(
            f"over the {words(over, STRONG)}".replace("the default, Muon", "default with Muon"), fontsize=8.5
        )
    panels[0].set_yticks(range(len(tested)), [TASKS[task] for task in tested])
    panels[0].set_ylim(len(tested) - 0.5, -0.5)
    return figure


def draw_shares(panel: Axes, found: Sequence[tuple[float, float, float] | None]) -> None:
    """A row for each share with its interval, grey where that holds 0."""
    for row, share in enumerate(found):
        if share is not None:
            mean, low, high = share
            colour = GREY if low <= 0 <= high else BETTER if low > 0 else WORSE
            panel.plot([low, high], [row, row], color=colour, lw=2)
            panel.plot(mean, row, "o", ms=4.5, color=colour)
    panel.axvline(0, color="0.6", lw=0.8)
    panel.set_xlabel("% of the error removed")


def draw_rates(analyses: Mapping[str, Analysis]) -> Figure:
    """Score over the learning rate, a panel for each task."""
    columns = min(3, len(analyses))
    rows = math.ceil(len(analyses) / columns)
    figure, panels = subplots(rows, columns, 3.5 * columns, 2.4 * rows)
    shown = [
        "default(library=true)",
        "default",
        "gaussian",
        "conditioned",
        "default+set(optimizer.name=muon)",
        STRONG,
        f"{STRONG}+conditioned",
    ]
    for panel in panels.flat[len(analyses) :]:
        panel.axis("off")
    for panel, (task, analysis) in zip(panels.flat, analyses.items(), strict=False):
        comparison, tuning = analysis.comparison, find_tuning(analysis.comparison)
        assert tuning is not None
        for colour, label in zip(COLOURS, shown, strict=False):
            found = [method for method in tuning.methods if method.label == label.replace(STRONG, comparison.baseline)]
            for method in found:
                points = method.profile("optimizer.lr")
                panel.plot(
                    [point.values["optimizer.lr"] for point in points],
                    [tuning.metric.scale * point.mean for point in points],
                    "o-",
                    ms=3,
                    lw=1.3,
                    color=colour,
                    label=words(method.label, comparison.baseline),
                )
        panel.set(xscale="log", title=TASKS[task], xlabel="learning rate", ylabel=tuning.metric.label)
        if not tuning.metric.higher_is_better:
            panel.set_yscale("log")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_methods(analyses: Mapping[str, Analysis]) -> Figure:
    """Error of every method on every task, as a multiple of the strong default's; grey if it may be the same."""
    import matplotlib
    from matplotlib.patches import Rectangle

    named: dict[str, dict[str, tuple[float, bool]]] = {}
    for task, analysis in analyses.items():
        strong = analysis.comparison.baseline
        for method in analysis.comparison.methods:
            found = shares(analysis, method, strong) if method != strong else None
            if found is not None:
                mean, low, high = found
                named.setdefault(words(method, strong), {})[task] = 1 - mean / 100, not low <= 0 <= high
    scores = {name: [math.log2(ratio) for ratio, _ in row.values()] for name, row in named.items()}
    methods = sorted(named, key=lambda name: math.fsum(scores[name]) / len(scores[name]))
    figure, [[axes]] = subplots(1, 1, 0.95 * len(analyses) + 2.6, 0.3 * len(methods) + 0.9)
    colours = matplotlib.colormaps["RdYlGn_r"]
    for row, method in enumerate(methods):
        for column, task in enumerate(analyses):
            if task not in named[method]:
                continue
            ratio, certain = named[method][task]
            place = max(-1.0, min(1.0, math.log2(ratio) / 2))  # a quarter to four times
            shade = colours(0.5 + 0.4 * place) if certain else "0.94"
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color=shade, lw=0))
            axes.text(
                column,
                row,
                f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
                ha="center",
                va="center",
                fontsize=8,
                color="black" if certain else "0.4",
            )
    axes.set(xlim=(-0.5, len(analyses) - 0.5), ylim=(len(methods) - 0.5, -0.5))
    axes.set_xticks(range(len(analyses)), [TASKS[task].replace(", ", ",\n") for task in analyses], fontsize=7.5)
    axes.set_yticks(range(len(methods)), methods)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.xaxis.tick_top()
    return figure


def draw_scores(comparison: Comparison) -> Figure:
    """Every seed of every method."""
    figure, [[axes]] = subplots(1, 1, 6.2, 0.3 * len(comparison.methods) + 0.8, layout=None)
    for row, method in enumerate(reversed(comparison.methods)):
        values = [comparison.result.scale * value for value in comparison.results(method).values()]
        axes.plot(values, [row] * len(values), "o", ms=4, alpha=0.7, color=COLOURS[0])
    axes.set_yticks(range(len(comparison.methods)), list(reversed(comparison.methods)))
    axes.set_xlabel(comparison.result.label)
    return figure


def table_of(task: str, analysis: Analysis) -> list[str]:
    """Every method of a task, best first, beside the strong default."""
    comparison, tuning = analysis.comparison, find_tuning(analysis.comparison)
    assert tuning is not None
    metric, strong = comparison.result, comparison.baseline
    tuned = {method.label: method for method in tuning.methods}
    order = sorted(comparison.methods, key=lambda method: error_of(comparison, method))
    lines = [
        f"## {TASKS[task]}",
        "",
        f"{comparison.title}. Strong default: `{strong}`. [The runs]({task}.jsonl)",
        "",
        f"| start | rate | {metric.label} | better than the strong default by [95 % interval] | p (Holm) | lost over "
        "the rates |",
        "|---|---|---|---|---|---|",
    ]
    for method in order:
        values = [metric.scale * value for value in comparison.results(method).values()]
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
        difference = analysis.differences.get(method)
        beside = chance = ""
        if difference is not None and difference.interval is not None:
            low, high = (metric.scale * end for end in difference.interval)
            beside = f"{metric.scale * difference.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
            chance = "–" if difference.p_holm is None else f"{difference.p_holm:.2g}"
        best = tuned[method].best
        rate = "" if best is None else f"{best.values['optimizer.lr']:g}"
        worst = max((tuned[method].loss(point) for point in tuned[method].points), default=math.nan)
        diverged = analysis.outcomes(method)["diverged"]
        score = f"{mean:.1f} ± {spread:.1f}{f', {diverged} diverged' if diverged else ''}"
        lines.append(
            f"| {words(method, strong)} | {rate} | {score} | {beside} | {chance} | {metric.scale * worst:.1f} |"
        )
    return [*lines, ""]


def tables_markdown(analyses: Mapping[str, Analysis]) -> str:
    """tables.md: pairs of methods, then every method of every task."""
    head = [
        "# Every method on every task",
        "",
        "Made by `wellcond claims results`; how it was done is in [README.md](README.md).",
        "",
    ]
    tables = [line for task, analysis in analyses.items() for line in table_of(task, analysis)]
    return "\n".join([*head, *answers(analyses), *tables])


def answers(analyses: Mapping[str, Analysis]) -> list[str]:
    """The pairs that the questions of results/README.md are about, task by task."""
    pairs: Sequence[tuple[str, str]] = (
        ("default", "default(library=true)"),
        ("gaussian", "default"),
        ("conditioned", "default"),
        ("conditioned", "gaussian"),
        ("conditioned", "mimetic"),
        ("balanced", "default"),
        ("identity(lam=10)", "default"),
        ("default+set(optimizer.name=muon)", "default"),
        (STRONG, "default"),
        (f"{STRONG}+gaussian", STRONG),
        (f"{STRONG}+conditioned", STRONG),
        (f"{STRONG}+conditioned", f"{STRONG}+gaussian"),
        (CALIBRATED, "default"),
        (CALIBRATED, STRONG),
        (CALIBRATED, "default+set(optimizer.name=muon)"),
    )
    lines = [
        "## Pairs",
        "",
        "Share of the second one's error that the first removes, in percent [95 % interval], by task.",
        "",
        "| first over second | " + " | ".join(TASKS[task] for task in analyses) + " |",
        "|---" * (len(analyses) + 1) + "|",
    ]
    for first, second in pairs:
        row = []
        for analysis in analyses.values():
            strong = analysis.comparison.baseline
            found = shares(analysis, spelt(first, strong), spelt(second, strong))
            row.append("–" if found is None else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*found))
        lines.append(f"| {words(first, STRONG)} over {words(second, STRONG)} | " + " | ".join(row) + " |")
    return [*lines, ""]
