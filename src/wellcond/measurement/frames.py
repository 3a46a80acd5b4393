"""Records as a pandas table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wellcond.errors import needs_extra

WHOLE = ("step", "head", "rank", "nullity", "num_tokens")
"""Columns of integers, which may be missing."""


def make_frame(rows: Sequence[Mapping[str, Any]], attrs: Mapping[str, Any]) -> Any:
    """A `pandas.DataFrame` of rows; `attrs` say what was measured and how.

    Raises: MissingExtraError if pandas is not installed.
    """
    with needs_extra("pandas", "train"):  # which has it through datasets
        import pandas
    frame = pandas.DataFrame(rows)
    frame = frame.astype({name: "Int64" for name in WHOLE if name in frame})
    frame.attrs |= attrs
    return frame
