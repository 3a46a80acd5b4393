"""Every table, figure and ablation by id, and the studies that they ask for: read from `catalogue/`."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, Literal, TypeVar, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from wellcond.errors import UnknownChoiceError
from wellcond.lab.settings import RecipeError, Scale, Settings, explain, read_yaml

SCALES: tuple[Scale, ...] = get_args(Scale)
ENTRY_FILES = ("tables", "figures", "ablations")
Quantity = Literal["jacobian", "loss", "match", "sigma_min", "sigma_max", "kappa"]


class AtScale(Settings):
    """How a study is run at one scale, and what a run costs."""

    recipe: str
    settings: tuple[str, ...] = ()
    """``path.to.field=value``; ``{after}`` is the folder of the study that comes first."""
    seeds: PositiveInt | None = None
    """How many, from 0; None: those of the recipe."""
    after: str | None = None
    after_methods: tuple[str, ...] = ()
    """Of the study that comes first; by default those of this one."""
    glue_rows: PositiveInt | None = None
    """Of a split in fine-tuning; None: what `wellcond glue` does by default."""
    seconds: PositiveFloat | None = None
    glue_seconds: PositiveFloat = 60.0
    """Of fine-tuning on one task."""
    gflops: PositiveFloat | None = None
    samples: PositiveInt | None = None
    gpu_hours: PositiveFloat | None = None
    parameters: PositiveFloat
    """In millions."""
    gpus: NonNegativeInt = 0
    note: str = ""
    """What differs from the paper beside size and length."""


class Study(Settings):
    """One comparison that ids share."""

    title: str
    records: str | None = None
    """Folder of committed records, below results/."""
    glue: bool = False
    """Fine-tuned on GLUE afterwards."""
    tiny: AtScale | None = None
    small: AtScale | None = None
    paper: AtScale | None = None

    def at(self, scale: str) -> AtScale | None:
        """How it is run at a scale; None if there is nothing to run it on."""
        found: AtScale | None = getattr(self, scale)
        return found


class Variant(Settings):
    """A change of studies."""

    settings: tuple[str, ...]
    records: dict[str, str] = Field(default_factory=dict)
    """By study."""


class Row(Settings):
    """A method in the paper's words, and what it is here."""

    method: str
    label: str = ""
    """In records; the method's own text by default."""
    variant: str = ""
    in_records: str = ""
    """Its label in committed records, where that is another."""
    only: tuple[str, ...] = ()
    """Studies in which it makes sense; all by default."""

    def is_in(self, study: str) -> bool:
        """Whether a study has this row."""
        return not self.only or study in self.only

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, values: Any) -> Any:
        return {"method": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _labelled(self) -> Row:
        if not self.label:
            object.__setattr__(self, "label", self.method)
        return self


class Column(Settings):
    """Where the numbers of a column come from."""

    study: str
    metric: str = ""
    """A number of the record, or ``glue:TASK``; by default what the study is judged by."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, values: Any) -> Any:
        return {"study": values} if isinstance(values, str) else values


class PanelSettings(Settings):
    """One panel of a figure."""

    title: str
    study: str
    quantity: Quantity
    of: Literal["raw", "effective", "both"] = "effective"
    """Of singular values: those of W, of W + C, or both."""


PartT = TypeVar("PartT", Column, PanelSettings)


class Entry(Settings):
    """What an id stands for."""

    kind: Literal["table", "figure", "static"]
    title: str
    rows: dict[str, Row] = Field(default_factory=dict)
    """The first is the baseline."""
    controls: dict[str, Row] = Field(default_factory=dict)
    """Methods that the paper does not have."""
    columns: dict[str, Column] = Field(default_factory=dict)
    part_metrics: tuple[str, ...] = ("",)
    """One table for each: a metric for all columns."""
    panels: tuple[PanelSettings, ...] = ()
    static: Literal["", "memory", "flops", "cost", "forms"] = ""
    records: dict[str, str] = Field(default_factory=dict)
    """Folders of committed records by study, where they are others than the study's."""
    at_tiny: dict[str, str] = Field(default_factory=dict)
    """Studies that take the place of others at scale tiny, since those records are of them."""
    note: str = ""

    @property
    def baseline(self) -> str:
        """Name of the row that gains are measured from."""
        return next(iter(self.rows), "")

    @property
    def all_rows(self) -> dict[str, Row]:
        """The paper's and ours."""
        return self.rows | self.controls

    def at(self, scale: str) -> Entry:
        """What is run at a scale: at tiny, what the records ran."""
        if scale != "tiny" or not self.at_tiny:
            return self

        def swap(part: PartT) -> PartT:
            return part.model_copy(update={"study": self.at_tiny.get(part.study, part.study)})

        rows = {
            name: {key: row.model_copy(update={"only": tuple(self.at_tiny.get(study, study) for study in row.only)})
                   for key, row in getattr(self, name).items()}
            for name in ("rows", "controls")
        }  # fmt: skip
        columns = {name: swap(column) for name, column in self.columns.items()}
        return self.model_copy(update=rows | {"columns": columns, "panels": tuple(map(swap, self.panels))})

    @property
    def studies(self) -> tuple[str, ...]:
        """Names, each once."""
        parts = [column.study for column in self.columns.values()] + [panel.study for panel in self.panels]
        return tuple(dict.fromkeys(parts))


@functools.cache
def entries() -> dict[str, Entry]:
    """Every id, those of paper C first, then paper S, then the ablations.

    Example:
        >>> entries()["C-T1"].studies
        ('vit', 'deit', 'swin', 'xcit', 'davit')
    """
    found = {id: entry for name in ENTRY_FILES for id, entry in _read(name, Entry).items()}
    return {id: found[id] for id in sorted(found, key=_place)}


@functools.cache
def studies() -> dict[str, Study]:
    """By name."""
    return _read("studies", Study)


@functools.cache
def variants() -> dict[str, Variant]:
    """By name."""
    return _read("variants", Variant)


def find_entry(id: str) -> Entry:
    """The entry of an id.

    Raises: UnknownChoiceError.
    """
    known = {name.lower(): name for name in entries()}
    if id.lower() not in known:
        raise UnknownChoiceError("table or figure", id, list(entries()))
    return entries()[known[id.lower()]]


def find_study(name: str, scale: str) -> AtScale:
    """How a study is run at a scale.

    Raises: RecipeError if it is not.
    """
    found = studies()[name].at(scale)
    if found is None:
        raise RecipeError(f"the study {name} is not run at scale {scale}")
    return found


def _place(id: str) -> tuple[int, str, int, str]:
    """Order of the ids: C-T1 .. C-T13, C-F1 .., S-T1 .., S-F1 .., A-..."""
    paper, _, rest = id.partition("-")
    number = rest[1:] if rest[1:].isdigit() else ""
    return "CSA".index(paper), {"T": "0", "F": "1"}.get(rest[:1] if number else "", "2"), int(number or 0), rest


SettingsT = TypeVar("SettingsT", bound=Settings)


def _read(name: str, kind: type[SettingsT]) -> dict[str, SettingsT]:
    file = resources.files("wellcond.lab.reproduce") / "catalogue" / f"{name}.yaml"
    data = read_yaml(file.read_text(encoding="utf-8"), file.name)
    found = {}
    for key, value in data.items():
        try:
            found[key] = kind.model_validate(value)
        except ValidationError as error:
            raise explain(error, f"{file.name}: {key}", value) from error
    return found
