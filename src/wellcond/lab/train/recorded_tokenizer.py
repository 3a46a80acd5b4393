"""What a run record says about the tokeniser, by which a run that goes on finds out whether it is still the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wellcond.lab.tokenizers.base import Tokenizer
from wellcond.lab.train.run_folder import RunError


def describe_tokenizer(tokenizer: Tokenizer | None, former: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Field `tokenizer` of a record; nothing for a task without one.

    Args:
        tokenizer: of the task.
        former: this field as an earlier session wrote it; None in older records, and if there was no session.
        folder: of the run, for messages.

    Raises: RunError if the earlier session had another tokeniser.
    """
    if tokenizer is None:
        return {}
    found = tokenizer.fingerprint
    if former is not None and former["fingerprint"] != found:
        raise RunError(
            f"{folder} holds a run with another tokeniser: expected fingerprint {former['fingerprint']}, found "
            f"{found}. Restore the tokeniser's file, or the text it was trained on, or give another folder"
        )
    return {"tokenizer": {"fingerprint": found, "vocabulary_size": tokenizer.vocabulary_size}}
