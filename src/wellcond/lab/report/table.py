"""Tables as data, as markdown and as CSV (as HTML: the template `table.html`), and how statistics look in them."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from wellcond.lab.report.records import Metric
from wellcond.lab.report.statistics import Interval, LogSummary, PairedDifference, Summary
from wellcond.lab.report.values import INFINITE, MISSING, plain_number, show
from wellcond.lab.report.verdicts import Verdict

Value = str | int | float | None
Values = dict[str, Value]
Cell = str | tuple[str, Values]
"""What is shown, and the numbers behind it, each by its name in a file for programs."""
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class Table:
    """Header and rows of text; the first column names the row."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: frozenset[int] = frozenset({0})
    """Columns of words; all others are numbers and stand at the right."""
    values: tuple[Mapping[str, Value], ...] = field(default=(), compare=False)
    """The rows as numbers, for programs: one column for each number, NaN or None where there is none. Tables are equal
    if they show the same: packed records have fewer digits."""

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        rows: Iterable[Mapping[str, Cell]],
        notes: Iterable[str] = (),
        words: Iterable[int] = (0,),
    ) -> Table:
        """A table of rows by column: a text, or a text with the numbers behind it by their names for programs."""
        listed = list(rows)
        pairs = [[cell if isinstance(cell, tuple) else (cell, {}) for cell in row.values()] for row in listed]
        values = [{name: value for _, known in row for name, value in known.items()} for row in pairs]
        header, shown = tuple(listed[0]) if listed else (), tuple(tuple(text for text, _ in row) for row in pairs)
        return cls(name, title, header, shown, tuple(notes), frozenset(words), tuple(values) if any(values) else ())

    def look(self, at: int) -> str:
        """Style of a column: `t` of words, `n` of numbers."""
        return "t" if at in self.text_columns else "n"

    def only(self, columns: Sequence[int]) -> Table:
        """The table with some of its columns."""
        return replace(
            self,
            header=tuple(self.header[at] for at in columns),
            rows=tuple(tuple(row[at] for at in columns) for row in self.rows),
            text_columns=frozenset(new for new, at in enumerate(columns) if at in self.text_columns),
        )


def without_empty_columns(table: Table) -> Table:
    """The table without columns in which nothing is known, as far as there are rows.

    Example:
        >>> without_empty_columns(Table("t", "T", ("a", "b", "c"), (("x", MISSING, "1"),))).header
        ('a', 'c')
    """
    kept = [at for at in range(len(table.header)) if not at or any(row[at] not in ("", MISSING) for row in table.rows)]
    return table.only(kept) if table.rows else table


def table_markdown(table: Table) -> str:
    r"""As a markdown table, followed by its notes.

    Example:
        >>> print(table_markdown(Table("t", "T", ("a", "b"), (("x|y", "1"),))))
        | a | b |
        |:---|---:|
        | x\|y | 1 |
    """
    rules = [":---" if at in table.text_columns else "---:" for at in range(len(table.header))]
    lines = [
        "| " + " | ".join(map(plain_markdown, table.header)) + " |",
        "|" + "|".join(rules) + "|",
        *("| " + " | ".join(map(plain_markdown, row)) + " |" for row in table.rows),
    ]
    if table.notes:
        lines += ["", *(f"- {plain_markdown(note)}" for note in table.notes)]
    return "\n".join(lines)


def plain_markdown(text: str) -> str:
    """Text that markdown shows as it is: no markup of its own gets through."""
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_|\[\]#~$])", r"\\\1", html.escape(one_line, quote=False))


def table_csv(table: Table) -> str:
    r"""As CSV: the values, numbers in full and empty where there is none; a table of words only as it is shown.

    Example:
        >>> table_csv(Table("t", "T", ("method", "mean"), (("a", "0.33 ± 0.1"),), values=({"mean": 1 / 3, "sd": 0.1},)))
        'mean,sd\n0.3333333333333333,0.1\n'
    """
    if not table.values:
        return csv_text(table.header, table.rows)
    columns = list(dict.fromkeys(name for row in table.values for name in row))
    return csv_text(columns, ([_cell(row.get(name)) for name in columns] for row in table.values))


def _cell(value: Value) -> str:
    return value if isinstance(value, str) else "" if value is None else plain_number(float(value))


FORMULA = re.compile(r"[=@\t\r]|[+-][A-Za-z(]")
"""How a text begins that a spreadsheet would compute; +1.5 and -0.3 are numbers."""


def csv_text(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    r"""CSV of texts; one that a spreadsheet would take for a formula begins with an apostrophe.

    Example:
        >>> csv_text(["method", "gain"], [["=HYPERLINK(x)", "-0.3"]])
        "method,gain\n'=HYPERLINK(x),-0.3\n"
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"'{cell}" if FORMULA.match(cell) else cell for cell in row] for row in rows)
    return text.getvalue()


def show_counts(outcomes: Counter[str]) -> str:
    """Runs in means, and the others by name, with the share of runs that diverged among those that ended.

    Example:
        >>> show_counts(Counter({"finished": 2, "diverged": 1}))
        '2 + 1 diverged (33 %)'
    """
    others = [f"{outcomes[name]} {name}" for name in ("diverged", "failed", "partial") if outcomes[name]]
    if outcomes["diverged"]:
        others[0] += f" ({show_share(outcomes['diverged'] / (outcomes['finished'] + outcomes['diverged']))})"
    return " + ".join([str(outcomes["finished"]), *others])


def show_interval(interval: Interval | None, metric: Metric) -> str:
    """An interval of a difference."""
    if interval is None:
        return MISSING
    return f"[{metric.show(interval[0], sign=True)}, {metric.show(interval[1], sign=True)}]"


def show_p(p: float | None) -> str:
    """A p value; never zero."""
    if p is None:
        return MISSING
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def show_mean(summary: Summary, metric: Metric) -> str:
    """Mean and standard deviation, the latter where there is one."""
    if math.isnan(summary.mean):
        return MISSING
    return metric.show(summary.mean) + ("" if math.isnan(summary.std) else f" {PLUS_MINUS} {metric.show(summary.std)}")


def show_gain(difference: PairedDifference | None, metric: Metric) -> str:
    """A mean difference with its interval."""
    if difference is None or not difference.count:
        return MISSING
    interval = "" if difference.interval is None else f" {show_interval(difference.interval, metric)}"
    return metric.show(difference.mean, sign=True) + interval


def show_known(value: float | None, form: str) -> str:
    """A number in a form of its own, where there is one.

    Example:
        >>> show_known(0.25, "{:.0%}"), show_known(math.nan, "{:.0%}")
        ('25%', '–')
    """
    return MISSING if value is None or math.isnan(value) else form.format(value)


def show_share(share: float) -> str:
    """A share in whole percent, never 0 for what is there.

    Example:
        >>> show_share(0.25), show_share(0.001)
        ('25 %', '< 1 %')
    """
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def show_kappa(summary: LogSummary, *, interval: bool = False) -> str:
    """A mean of condition numbers, and the share of infinite ones, which are in no mean."""
    if not summary.finite:
        return INFINITE if summary.infinite else MISSING
    shown = show(summary.geometric_mean)
    if interval and summary.interval is not None:
        shown += f" [{show(summary.interval[0])}, {show(summary.interval[1])}]"
    return shown + (f" ({INFINITE} in {show_share(summary.infinite_share)})" if summary.infinite else "")


def verdict_cell(verdict: Verdict | None, metric: Metric) -> Cell:
    """One or a few words."""
    if verdict is None:
        return MISSING, {"verdict": ""}
    shown: str = verdict.kind
    if verdict.kind == "equal":
        shown = f"equal: {verdict.reason}" if verdict.reason else f"equal within {metric.show(verdict.margin)}"
    elif verdict.kind in ("better", "worse") and verdict.within_margin:
        shown += f", by less than {metric.show(verdict.margin)}"
    return shown, {"verdict": verdict.kind}


def interval_values(interval: Interval | None, scale: float = 1.0, prefix: str = "") -> Values:
    """Both ends of an interval.

    Example:
        >>> interval_values((0.01, 0.02), 100)
        {'low': 1.0, 'high': 2.0}
    """
    low, high = interval or (math.nan, math.nan)
    return {f"{prefix}low": low * scale, f"{prefix}high": high * scale}


def summary_values(summary: Summary, metric: Metric) -> Values:
    """Mean and standard deviation over seeds."""
    return {"metric": metric.label, "n": summary.count, "mean": summary.mean * metric.scale,
            "sd": summary.std * metric.scale}  # fmt: skip


def difference_values(difference: PairedDifference | None, metric: Metric) -> Values:
    """A paired difference with its 95 % interval; empty of a method without pairs."""
    if difference is None or not difference.count:
        names = ("difference", "difference_sd", "low", "high", "relative", "p", "p_holm")
        return {"pairs": 0, **dict.fromkeys(names)}
    return {
        "pairs": difference.count, "difference": difference.mean * metric.scale,
        "difference_sd": difference.std * metric.scale, **interval_values(difference.interval, metric.scale),
        "relative": difference.relative, "p": difference.p, "p_holm": difference.p_holm,
    }  # fmt: skip
