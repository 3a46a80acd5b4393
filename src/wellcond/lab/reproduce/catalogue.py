"""Every table, figure and ablation by id with the paper's numbers, and the studies that are run for them: `papers/`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import PositiveFloat, PositiveInt, model_validator

from wellcond.arguments import check_choice
from wellcond.lab.settings import Scale, Settings, read_yaml

SCALES: tuple[Scale, ...] = get_args(Scale)


class _FromText(Settings):
    """Settings that may be given as a text, the values of some fields separated by spaces."""

    text: ClassVar[tuple[str, ...]]

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, values: Any) -> Any:
        if not isinstance(values, str):
            return values
        return dict(zip(cls.text, values.split(" ", len(cls.text) - 1), strict=False))


class AtScale(_FromText):
    """How a study is run at one scale."""

    text = ("recipe",)
    recipe: str
    settings: tuple[str, ...] = ()
    """``path.to.field=value``."""
    seeds: PositiveInt | None = None
    """How many, from 0; None: those of the recipe."""
    after: str | None = None
    """The study that comes first; nothing comes before that one."""
    title: str = ""
    """What runs, if its settings make the title of its recipe untrue."""
    samples: PositiveInt | None = None
    parameters: PositiveFloat | None = None
    note: str = ""
    """What differs from the paper beside size and length."""


class Study(Settings):
    """One comparison that ids share."""

    title: str
    records: str = ""
    """Of committed runs: the file RECORDS.jsonl below results/."""
    methods: tuple[str, ...] = ()
    """Always these; by default those of the study that it comes before."""
    glue: bool = False
    """Fine-tuned on GLUE afterwards."""
    tiny: AtScale | None = None
    small: AtScale | None = None
    paper: AtScale | None = None

    def at(self, scale: str) -> AtScale | None:
        """How it is run at a scale; None if there is nothing to run it on."""
        return {"tiny": self.tiny, "small": self.small, "paper": self.paper}.get(scale)


class Variant(Settings):
    """A change of studies that rows of a table ask for, or a reading."""

    settings: tuple[str, ...]
    records: dict[str, str] = {}
    """By study."""
    of: tuple[str, ...] = ()
    """Of a reading: the studies that it changes."""


class Address(NamedTuple):
    """One comparison: a study, perhaps changed."""

    study: str
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its folder, beside those of all others."""
        return "-".join((self.study, *self.variants))

    @property
    def settings(self) -> tuple[str, ...]:
        """What the variants change."""
        return tuple(setting for name in self.variants for setting in catalogue().variants[name].settings)

    @property
    def records(self) -> str:
        """The file of committed runs below results/, without its ending; empty if there is none."""
        if not self.variants:
            return catalogue().studies[self.study].records
        return catalogue().variants[self.variants[0]].records.get(self.study, "") if len(self.variants) == 1 else ""


class Row(_FromText):
    """A method by its name in the paper; runs are labelled by the method's own text."""

    text = ("method",)
    method: str
    variant: str = ""
    only: tuple[str, ...] = ()
    """Columns that have it; all by default."""
    tiny: str = ""
    """The method in its place at scale tiny, if the committed records are of that one."""
    scales: tuple[str, ...] = ()
    """Scales at which it is run; all by default."""

    def is_run_at(self, scale: str) -> bool:
        """Whether there are runs of it at a scale."""
        return not self.scales or scale in self.scales

    def at(self, scale: str) -> Row:
        """With the method of a scale."""
        return self.model_copy(update={"method": self.tiny or self.method}) if scale == "tiny" else self


class Source(_FromText):
    """Where the numbers of a column come from, or the curves of a panel."""

    text = ("study", "metric")
    study: str
    metric: str = ""
    """A number of the record, or ``glue:TASK``; by default what the study is judged by."""
    tiny: str = ""
    """The study in its place at scale tiny, if the committed records are of that one."""
    paper: str = ""
    """The study in its place at scale paper, if one run serves several columns."""
    variant: str = ""
    """By a reading."""
    quantity: Literal["", "jacobian", "loss", "match", "sigma_min", "sigma_max", "kappa"] = ""
    """Of a panel."""
    of: Literal["raw", "effective", "both"] = "effective"
    """Of singular values: those of W, of W + C, or both."""

    def at(self, scale: str) -> Source:
        """With the study of a scale; readings change what is run at scale paper only."""
        study = {"tiny": self.tiny, "paper": self.paper}.get(scale) or self.study
        return self.model_copy(update={"study": study, "variant": self.variant if scale == "paper" else ""})


class Part(Settings):
    """One metric of a table, with the numbers that the paper prints: transcribed, never computed here."""

    columns: tuple[str, ...]
    metric: str = ""
    """For all columns, instead of their own."""
    lower_is_better: bool = False
    numbers: dict[str, tuple[float | None, ...]] = {}
    """By row."""
    stds: dict[str, tuple[float | None, ...]] = {}
    printed: dict[str, tuple[str, ...]] = {}
    """The same as the paper writes it, where that is something else."""

    def mean(self, row: str, columns: Sequence[str]) -> float | None:
        """A number, or the mean of a row over some columns; None where the paper has none."""
        values = [self._at(self.numbers, row, column) for column in columns]
        return None if None in values else round(math.fsum(values) / len(values), 6)

    def gain(self, row: str, baseline: str, *columns: str) -> float | None:
        """Row minus baseline over one column or several, positive is better; None where a number is missing."""
        value, base = self.mean(row, columns), self.mean(baseline, columns)
        if value is None or base is None or row == baseline:
            return None
        return round(base - value if self.lower_is_better else value - base, 6)

    def share(self, row: str, baseline: str, *columns: str) -> float | None:
        """A gain as a share of what the baseline gets wrong: what a score lacks of 100, or a perplexity itself."""
        gain, base = self.gain(row, baseline, *columns), self.mean(baseline, columns)
        error = 0.0 if base is None else base if self.lower_is_better else 100 - base
        return gain / error if gain is not None and error else None

    def show(self, row: str, column: str) -> str:
        """A number as it stands in the paper, its standard deviation in brackets; empty where there is none."""
        value, std, printed = (self._at(rows, row, column) for rows in (self.numbers, self.stds, self.printed))
        behind = "".join(f" ({text})" for text in ("" if std is None else f"{std:.2f}", printed) if text)
        return "" if value is None else f"{value:g}{behind}"

    def _at(self, rows: dict[str, tuple[Any, ...]], row: str, column: str) -> Any:
        return rows[row][self.columns.index(column)] if row in rows and column in self.columns else None


READINGS = {
    "mean": {
        "arithmetic": "means over heads and layers, mean and standard deviation over seeds, as the papers draw them",
        "geometric": "geometric means over heads and layers, mean and standard deviation of log10 over seeds",
    },
    "weights": {
        "original": "W of the original run beside W + C of the conditioned one",
        "conditioned": "W and W + C of the conditioned run",
    },
    "jacobian": {
        "stacked": "the papers' matrix [J_Q; J_K; J_V] at scale paper, for softmax attention",
        "joint": "the Jacobian of Q, K and V together, which is the true one",
    },
    "model": {
        "bert-12": "12 layers and 110 M parameters, as paper S says",
        "crammed-bert": "the final model of the Crammed BERT release, 16 layers and 119.6 M parameters",
    },
    "text": {
        "4000": "the first 4,000 bytes of a review, as the release's configuration says",
        "1000": "the first 1,000 bytes, as the release's data script writes",
    },
    "upsampling": {
        "single": "a single transposed convolution from stride 16 to 4, as the papers say",
        "two": "two of them with a norm between, as the XCiT release has it",
    },
}
"""Ways to read a paper's words, by name; the first of each is what the words say.

A choice that changes what is run is a study, or the variant NAME-CHOICE of studies.
"""


def default_readings(columns: Mapping[str, Source]) -> dict[str, str]:
    """Readings of an entry with these columns, each at its first choice."""
    quantities, studies = {source.quantity for source in columns.values()}, {s.study for s in columns.values()}
    of_weights = bool(quantities & {"sigma_min", "sigma_max", "kappa"})
    wanted = {
        "mean": of_weights or "jacobian" in quantities,
        "weights": of_weights,
        "jacobian": any(source.quantity == "jacobian" and source.study == "vit" for source in columns.values()),
        "model": "bert-12" in studies,
        "text": any(study.startswith("lra-text") for study in studies),
        "upsampling": "coco-xcit" in studies,
    }
    return {name: next(iter(READINGS[name])) for name, applies in wanted.items() if applies}


class Entry(Settings):
    """What an id stands for."""

    title: str
    readings: dict[str, str] = {}
    """Chosen ones of `READINGS`."""
    each: dict[str, Any] = {}
    """Fields that all columns have."""
    rows: dict[str, Row] = {}
    """The first is the baseline."""
    controls: dict[str, Row] = {}
    """Methods that the paper does not have."""
    columns: dict[str, Source] = {}
    """Of a table, or the panels of a figure."""
    static: Literal["", "memory", "flops", "cost", "forms"] = ""
    """What is computed without runs."""
    parts: tuple[Part, ...]
    """One table for each."""
    paper_note: str = ""
    note: str = ""

    @model_validator(mode="before")
    @classmethod
    def _complete_columns(cls, values: Any) -> Any:
        columns, each = values.get("columns", {}), values.get("each", {})
        parts = [{"columns": tuple(columns), **part} for part in values.get("parts", [{}])]
        return values | {
            "parts": parts,
            "columns": {name: {**each, **own} for name, own in columns.items()} if each else columns,
        }

    @model_validator(mode="after")
    def _default_readings(self) -> Entry:
        object.__setattr__(self, "readings", default_readings(self.columns) | self.readings)
        return self

    @property
    def kind(self) -> Literal["table", "figure", "static"]:
        """What is made of it."""
        if self.static:
            return "static"
        return "figure" if any(source.quantity for source in self.columns.values()) else "table"

    @property
    def notes(self) -> list[str]:
        """What a reader must know: remarks on the paper, on what is done here, and the readings with their others."""
        found = [f"Paper: {self.paper_note}"] if self.paper_note else []
        found += [f"Here: {self.note}."] if self.note else []
        for name, chosen in self.readings.items():
            others = ", ".join(f"--reading {name}={other}" for other in READINGS[name] if other != chosen)
            found.append(f"Reading {name}={chosen}: {READINGS[name][chosen]} (another: {others}).")
        return found

    @property
    def all_rows(self) -> dict[str, Row]:
        """The paper's and ours."""
        return self.rows | self.controls

    def rows_of(self, column: str) -> dict[str, Row]:
        """The rows that a column has."""
        return {name: row for name, row in self.all_rows.items() if not row.only or column in row.only}

    def read(self, chosen: Mapping[str, str]) -> Entry:
        """With chosen readings, such as ``{"mean": "geometric"}``. OptionError for one that the id does not have."""
        for name, value in chosen.items():
            check_choice("reading", name, list(self.readings))
            check_choice(f"reading {name}", value, list(READINGS[name]))
        changed = dict(chosen)
        columns = {name: self._read_column(source, changed) for name, source in self.columns.items()}
        return self.model_copy(update={"readings": self.readings | changed, "columns": columns})

    def _read_column(self, source: Source, chosen: Mapping[str, str]) -> Source:
        for name, value in chosen.items():
            variant = catalogue().variants.get(f"{name}-{value}")
            if value in catalogue().studies:
                source = source.model_copy(update={"study": value})
            elif variant is not None and source.study in variant.of:
                source = source.model_copy(update={"variant": f"{name}-{value}"})
        return source

    def at(self, scale: str) -> Entry:
        """What is run at a scale: at tiny, what the records ran."""
        columns = {name: source.at(scale) for name, source in self.columns.items()}
        rows = {name: row.at(scale) for name, row in self.rows.items()}
        controls = {name: row.at(scale) for name, row in self.controls.items() if row.is_run_at(scale)}
        return self.model_copy(update={"columns": columns, "rows": rows, "controls": controls})

    def address(self, column: str, row: Row | None = None) -> Address:
        """Of the runs of a column, for a row with a variant those of the variant."""
        source = self.columns[column]
        named = ("" if row is None else row.variant, source.variant)
        return Address(source.study, tuple(name for name in named if name))

    def addresses(self) -> list[Address]:
        """Of all columns and rows, each once."""
        found = [self.address(name, row) for name in self.columns for row in self.rows_of(name).values()]
        return list(dict.fromkeys(found))


class Catalogue(Settings):
    """All tables, figures, ablations and studies."""

    studies: dict[str, Study]
    variants: dict[str, Variant]
    entries: dict[str, Entry]


@functools.cache
def catalogue() -> Catalogue:
    """What ships: ids of paper C first, then paper S, then the ablations."""
    found: dict[str, Any] = {"studies": {}, "variants": {}, "entries": {}}
    for name in ("C", "S", "ablations"):
        for key, values in read_paper_file(name).items():
            found[key] |= values
    return Catalogue.model_validate(found)


def read_paper_file(name: str) -> Any:
    """One of the files of `papers/`."""
    file = resources.files("wellcond.lab.reproduce") / "papers" / f"{name}.yaml"
    return read_yaml(file.read_text(encoding="utf-8"), file.name)


def find_entry(id: str) -> tuple[str, Entry]:
    """An id as it is written, in any case, and its entry."""
    entries = catalogue().entries
    name = next((name for name in entries if name.lower() == id.lower()), id)
    check_choice("table or figure", name, list(entries))
    return name, entries[name]
