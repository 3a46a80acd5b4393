"""Packed records: what runs share is stored once for their comparison, rows are columns, rounded as they are plotted.

What a table prints is kept as it is: scores in full, and the first and the last measurement of every head with enough
digits. Between them, the weights and attention maps of all heads are one mean, since that is what figures show; the
Jacobian of each head stays.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wellcond.lab.report.values import number

Rows = list[dict[str, Any]]
Keys = tuple[str, ...]

PACKED = "wellcond-packed-run"
SCORES = frozenset({"final", "best", "test"})
OWN = SCORES | {"schema", "kind", "method", "seed", "status", "samples"}
"""Fields of a record that are never shared: what a run is and what came out."""
MOST_POINTS = 60
PLOTTED, PRINTED = 4, 7
"""Significant digits of what is plotted, and of what tables print means of."""
ROLES = ("q", "k", "v")
STEPS = ("step", "epoch", "loss", *(f"grad_norm_{role}" for role in ROLES))
JACOBIAN = ("condition_number", "pseudo_condition_number", "papers_bound_log10", "bound_log10", "status")
KAPPAS, LARGEST, SMALLEST = (
    tuple(f"{prefix}{what}_{role}" for prefix in ("", "raw_") for role in ROLES)
    for what in ("kappa", "sigma_max", "sigma_min")
)
ARITHMETIC = ("normalised_entropy", "diagonal_mass", "dead")
MEASURED = ("step", "epoch", "layer", "head", *JACOBIAN, *ARITHMETIC, *KAPPAS, *LARGEST, *SMALLEST)
COPIES = {"condition_number": "pseudo_condition_number", **{f"raw_{key}": key for key in (*KAPPAS[:3], *LARGEST[:3])}}
"""Columns that are often equal to another, and then stored once."""


def share(records: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What most of some records have in common, and of each record the rest; `merge` puts them together again.

    Example:
        >>> shared, (first, second) = share([{"lr": 1, "name": "a"}, {"lr": 1, "name": "b"}])
        >>> shared, first, merge(shared, second)
        ({'lr': 1}, {'name': 'a'}, {'lr': 1, 'name': 'b'})
    """
    flat = [dict(_leaves(record)) for record in records]
    shared: dict[Keys, Any] = {}
    for path in dict.fromkeys(path for leaves in flat for path in leaves):
        if path[0] in OWN or SCORES.intersection(path):
            continue
        texts = Counter(json.dumps(leaves[path], sort_keys=True) for leaves in flat if path in leaves)
        text, count = texts.most_common(1)[0]
        if count > 1 and 2 * count > len(records):
            shared[path] = json.loads(text)
    rests = []
    for leaves in flat:
        absent = [list(path) for path in shared if path not in leaves]
        own = {path: leaf for path, leaf in leaves.items() if path not in shared or shared[path] != leaf}
        rests.append(_nested(own) | ({"absent": absent} if absent else {}))
    return _nested(shared), rests


def merge(shared: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """A record from what all share and what is its own."""
    absent = {tuple(path) for path in rest.get("absent", ())}
    leaves = {path: leaf for path, leaf in _leaves(shared) if path not in absent}
    return _nested(leaves | dict(_leaves({key: value for key, value in rest.items() if key != "absent"})))


def _leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value


def _nested(leaves: Mapping[Keys, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, leaf in leaves.items():
        place = made
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = leaf
    return made


def to_columns(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Rows as a list for each key, a single value if all are equal; keys that no row has a value for are left out."""
    columns: dict[str, Any] = {}
    for key in keys:
        values = [row.get(key) for row in rows]
        if any(value is not None for value in values):
            alike = len(rows) > 1 and all(value == values[0] and type(value) is type(values[0]) for value in values)
            columns[key] = values[0] if alike else values
    return {"rows": len(rows), **columns} if columns else {}


def to_rows(columns: Mapping[str, Any]) -> Rows:
    """Rows from what `to_columns` made.

    Raises: ValueError if columns are not of one length.
    """
    names = [key for key in columns if key != "rows"]
    spread = [_spread(columns, key) for key in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*spread, strict=True)]


def _spread(columns: Mapping[str, Any], key: str) -> list[Any]:
    """Values of a column, as many as there are rows."""
    count, value = columns.get("rows", 0), columns[key]
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise ValueError(f"expected {count} rows in each column")
    return values


def pack_steps(rows: Rows) -> dict[str, Any]:
    """Training rows; many of them as means over equal stretches, each placed at its end."""
    size = max(math.ceil(len(rows) / MOST_POINTS), 1)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    early = max(len(parts) // 10, 1)  # whose gradient norms a finding prints
    kept = []
    for at, part in enumerate(parts):
        means = {key: _mean([number(row.get(key)) for row in part]) for key in STEPS[2:]}
        digits = PRINTED if at < early else PLOTTED
        kept.append({"step": part[-1]["step"], "epoch": part[-1].get("epoch"), **_rounded(means, digits)})
    return to_columns(kept, STEPS)


def pack_evaluations(rows: Rows, metric: str) -> dict[str, Any]:
    """Evaluations: the metric in full, since matching compares it; the others as plotted or printed."""
    kept = [
        {"step": row["step"], "epoch": row.get("epoch"), metric: row.get(metric)}
        | _rounded({"loss": row.get("loss")}, PLOTTED)
        | _rounded({"seconds": row.get("seconds")}, PRINTED)
        for row in rows
    ]
    return to_columns(kept, tuple(dict.fromkeys(("step", "epoch", metric, "loss", "seconds"))))


def pack_heads(rows: Rows) -> dict[str, Any]:
    """Measured heads: all of them where a quantity is first or last measured; the Jacobian everywhere; else means."""
    ends: set[Any] = set()
    for key in (*JACOBIAN[:4], *ARITHMETIC, *KAPPAS):
        steps = [row["step"] for row in rows if row.get(key) is not None]
        ends |= {min(steps, key=number), max(steps, key=number)} if steps else set()
    by_step: dict[Any, Rows] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    kept = []
    for step, heads in by_step.items():
        if step in ends:
            kept += [
                _rounded({key: row.get(key) for key in MEASURED}, PRINTED)
                | _rounded({key: row.get(key) for key in (*LARGEST, *SMALLEST)}, PLOTTED)
                for row in heads
            ]
            continue
        measured = [row for row in heads if any(row.get(key) is not None for key in JACOBIAN[:4])] or heads[:1]
        listed = [
            {key: row.get(key) for key in MEASURED[:4]} | _rounded({key: row.get(key) for key in JACOBIAN}, PLOTTED)
            for row in measured
        ]
        listed[0] |= _rounded(_means(heads), PLOTTED)
        kept += listed
    return _without_copies(to_columns(kept, MEASURED))


def _means(heads: Rows) -> dict[str, Any]:
    """Over heads and layers, geometric or arithmetic, of finite values; infinite if all are."""
    means: dict[str, Any] = {}
    for key in (*KAPPAS, *LARGEST, *SMALLEST, *ARITHMETIC):
        values = [number(row.get(key)) for row in heads if row.get(key) is not None]
        usable = [x for x in values if math.isfinite(x) and (x > 0 or key in ARITHMETIC)]
        if usable:
            means[key] = _mean(usable) if key in ARITHMETIC else 10 ** _mean([math.log10(x) for x in usable])
        elif math.inf in values:
            means[key] = math.inf
    return means


def _without_copies(columns: dict[str, Any]) -> dict[str, Any]:
    """Without what follows from other columns: copies, and sigma_min, which is sigma_max / kappa."""
    kept = dict(columns)
    for names in zip(KAPPAS, LARGEST, SMALLEST, strict=True):
        if set(names) <= columns.keys():
            kappas, tops, ends = (np.array([number(value) for value in _spread(columns, key)]) for key in names)
            known = ~(np.isnan(kappas) | np.isnan(tops))
            with np.errstate(divide="ignore", invalid="ignore"):
                close = np.isclose(tops / kappas, ends, rtol=2e-3, atol=0, equal_nan=True)
            if np.all(close[known]) and np.all(np.isnan(ends[~known])):
                del kept[names[2]]
    copies = [key for key, source in COPIES.items() if key in columns and columns[key] == columns.get(source)]
    for key in copies:
        del kept[key]
    return kept | ({"copies": copies} if copies else {})


def unpack_heads(columns: Mapping[str, Any]) -> Rows:
    """Rows of heads, with the columns that follow from others.

    Raises: ValueError if columns are not of one length.
    """
    stored = {key: value for key, value in columns.items() if key != "copies"}
    for key in columns.get("copies", ()):
        stored[key] = stored[COPIES[key]]
    rows = to_rows(stored)
    for kappa, largest, smallest in zip(KAPPAS, LARGEST, SMALLEST, strict=True):
        if smallest in stored or kappa not in stored or largest not in stored:
            continue
        for row in rows:
            if row[kappa] is not None and row[largest] is not None:
                row[smallest] = number(row[largest]) / number(row[kappa])
    return rows


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _rounded(values: Mapping[str, Any], digits: int) -> dict[str, Any]:
    """Numbers with so many significant digits; NaN is no value."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        x = value
        if isinstance(value, float):
            x = None if math.isnan(value) else float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
        made[key] = int(x) if isinstance(x, float) and x == int(x) and abs(x) < 1e15 else x
    return made
