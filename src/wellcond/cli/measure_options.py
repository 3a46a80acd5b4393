"""Options of `wellcond measure`, checked before a model is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wellcond.errors import WellcondError, check_choice

CONVENTIONS = ("wide", "stack")
KAPPAS = ("strict", "pseudo")
COMBINES = ("mean", "stack")
METHODS = ("auto", "dense", "gram", "cholesky", "implicit")


class MeasureError(WellcondError, ValueError):
    """Options that do not fit the model or each other."""


class InputError(WellcondError, ValueError):
    """An input that is missing, unreadable, or not what the model reads."""


@dataclass(frozen=True)
class Options:
    """Options of the command that `measure` takes as they are."""

    layers: str = "all"
    heads: str = "all"
    convention: str = "wide"
    kappa: str = "strict"
    samples: int = 1
    combine: str = "mean"
    method: str = "auto"
    biases: bool = False

    def check(self) -> None:
        """Everything that can be known without a model.

        Raises: MeasureError, UnknownChoiceError.
        """
        check_choice("convention", self.convention, CONVENTIONS)
        check_choice("kappa", self.kappa, KAPPAS)
        check_choice("combine", self.combine, COMBINES)
        check_choice("Jacobian method", self.method, METHODS)
        if self.samples < 1:
            raise MeasureError(f"--samples: expected at least 1, found {self.samples}")
        if self.convention == "stack" and self.biases:
            raise MeasureError(
                "--convention stack is defined without biases. Leave out --biases, or use --convention wide"
            )
        read_numbers(self.layers, "--layers")
        read_numbers(self.heads, "--heads")


def read_numbers(text: str, option: str) -> list[int] | None:
    """Numbers such as ``0,5,11``; None for ``all``.

    Raises: MeasureError for anything else, and for numbers that are given twice.
    """
    if text.strip() == "all":
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise MeasureError(f"{option}: expected 'all' or numbers such as 0,5,11, found {text!r}") from error
    if len(set(numbers)) < len(numbers):
        raise MeasureError(f"{option}: expected every number once, found {text!r}")
    return numbers


def check_input(source: str, *, tokens: int = 1) -> None:
    """Whether ``--input`` names anything.

    Raises: InputError.
    """
    if tokens < 1:
        raise InputError(f"--tokens: expected at least 1, found {tokens}")
    path = Path(source)
    if source in ("random", "digits") or path.is_dir():
        return
    if path.suffix == ".npy":
        if not path.is_file():
            raise InputError(f"--input: expected a .npy file, found nothing at {path}")
        return
    raise InputError(
        f"--input: expected 'digits', 'random', a folder of images or a file named *.npy, found {source!r}"
        + ("" if path.exists() else ", which does not exist")
    )
