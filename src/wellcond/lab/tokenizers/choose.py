"""From `task.tokenizer` to a tokeniser."""

from __future__ import annotations

from pathlib import Path

from wellcond.lab.data.base import Dataset
from wellcond.lab.settings import RecipeError
from wellcond.lab.tokenizers.base import Tokenizer
from wellcond.lab.tokenizers.byte_tokenizer import ByteTokenizer
from wellcond.lab.tokenizers.files import find_tokenizer, read_tokenizer
from wellcond.lab.tokenizers.settings import TokenizerChoice, TokenizerFile, TrainedTokenizer
from wellcond.lab.tokenizers.training import trained_tokenizer


def make_tokenizer(choice: TokenizerChoice, train: Dataset, what: str, base: Path | None = None) -> Tokenizer:
    """The tokeniser that a recipe asks for.

    Args:
        choice: Field `tokenizer` of a task.
        train: Texts to train it on, if it is to be trained.
        what: Name of these texts in messages.
        base: Folder that relative paths start from; the current one by default.

    Raises:
        DataError: a file is missing or wrong, or the text does not suffice.
        RecipeError: the file holds another tokeniser than the recipe says.
        MissingExtraError: the tokenizers library is not installed.
    """
    if isinstance(choice, TrainedTokenizer):
        return trained_tokenizer(choice, train, what)
    if isinstance(choice, TokenizerFile):
        path = find_tokenizer(choice.file, base or Path.cwd())
        tokenizer = read_tokenizer(path, lower_case=choice.lower_case)
        if choice.sha256 not in (None, tokenizer.fingerprint):
            raise RecipeError(
                f"task.tokenizer.sha256: {path} is another tokeniser: expected {choice.sha256}, found "
                f"{tokenizer.fingerprint}"
            )
        return tokenizer
    return ByteTokenizer()
