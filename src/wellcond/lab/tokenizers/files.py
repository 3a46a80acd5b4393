"""Tokenisers from files: tokenizer.json, GPT-2's vocab.json and merges.txt, or BERT's vocab.txt. Only data are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from wellcond.files import read_regular
from wellcond.lab.data.errors import DataError, files_or_folders, listed
from wellcond.lab.data.reading import MIRROR_VARIABLE, mirror_roots
from wellcond.lab.tokenizers.library_tokenizer import NAMES, LibraryTokenizer, import_tokenizers

TOKENIZER, VOCABULARY, MERGES, WORDS = "tokenizer.json", "vocab.json", "merges.txt", "vocab.txt"


def read_tokenizer(path: Path, *, lower_case: bool | None = None) -> LibraryTokenizer:
    """The tokeniser of a file, or of a folder that has one of these sets of files.

    Args:
        path: File or folder.
        lower_case: For vocab.txt, whether texts are written in lower case first; by default if no word of it has a
            capital.

    Raises:
        DataError: a file is missing or is not what its name says.
    """
    if path.is_dir():
        folder = path
        if (folder / TOKENIZER).is_file():
            return _read_json(folder / TOKENIZER)
        if (folder / VOCABULARY).is_file() or (folder / MERGES).is_file():
            return _read_pairs(folder)
        if (folder / WORDS).is_file():
            return _read_words(folder / WORDS, lower_case)
        raise DataError(
            f"{folder}: there is no tokeniser.",
            expected=f"{TOKENIZER}, or {VOCABULARY} with {MERGES}, or {WORDS}",
            found=files_or_folders(folder.iterdir()),
            todo="Copy the files of the tokeniser into the folder.",
        )
    if path.name in (VOCABULARY, MERGES):
        return _read_pairs(path.parent)
    return _read_words(path, lower_case) if path.suffix == ".txt" else _read_json(path)


def find_tokenizer(name: str, base: Path) -> Path:
    """The file or folder that `task.tokenizer.file` names: from the recipe's folder, or else by name in a mirror.

    Raises: DataError if it is in neither.
    """
    path = (base / Path(os.path.expanduser(name))).absolute()
    if path.exists():
        return path
    # A name may not lead out of the mirror.
    roots = [] if Path(name).is_absolute() or {"..", "~"} & set(Path(name).parts) else mirror_roots()
    for root in roots:
        if (root / name).exists():
            return root / name
    there = files_or_folders(path.parent.iterdir()) if path.parent.is_dir() else "nothing: that folder is missing too"
    raise DataError(
        f"{path}: no such file or folder.",
        expected=f"the tokeniser that 'task.tokenizer.file' names, or one of that name in {MIRROR_VARIABLE}",
        found=f"in {path.parent}: {there}; {MIRROR_VARIABLE}: {listed(roots)}",
        todo="Correct 'task.tokenizer.file'; relative paths start at the recipe's folder.",
    )


def _read_json(path: Path) -> LibraryTokenizer:
    content = _read_text(path)
    try:
        return LibraryTokenizer(import_tokenizers().Tokenizer.from_str(content))
    except Exception as error:  # the library has no class of its own for errors
        raise DataError(
            f"{path}: the tokeniser cannot be read.",
            expected="a tokenizer.json of the tokenizers library",
            found=str(error),
            todo="Write the file again with Tokenizer.save, or give vocab.json with merges.txt.",
        ) from error


def _read_pairs(folder: Path) -> LibraryTokenizer:
    """Byte-level byte-pair encoding, as of GPT-2."""
    library = import_tokenizers()
    for name in (VOCABULARY, MERGES):
        if not (folder / name).is_file():
            raise DataError(
                f"{folder / name}: no such file.",
                expected=f"{VOCABULARY} and {MERGES} side by side",
                found=files_or_folders(folder.iterdir()),
                todo="Copy the missing file into the folder.",
            )
    vocabulary = _read_vocabulary(folder / VOCABULARY)
    missing = sorted(set(library.pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary))
    if missing:
        raise DataError(
            f"{folder / VOCABULARY}: the vocabulary is not one of bytes: some text would be left out.",
            expected="a token for each of the 256 bytes",
            found=f"none for {len(missing)} of them",
            todo="Give the vocabulary of a byte-level tokeniser such as GPT-2's, or its tokenizer.json.",
        )
    merges = _read_merges(folder / MERGES)
    try:
        model = library.models.BPE(vocabulary, merges)
    except Exception as error:
        raise DataError(
            f"{folder}: {VOCABULARY} and {MERGES} do not fit together.",
            expected="merges of tokens of the vocabulary",
            found=str(error),
            todo="Copy both files from the same tokeniser.",
        ) from error
    return byte_pair_tokenizer(model)


def byte_pair_tokenizer(model: Any, *, lower_case: bool = False) -> LibraryTokenizer:
    """A model of byte pairs with what goes in front of it and behind it in GPT-2."""
    library = import_tokenizers()
    tokenizer = library.Tokenizer(model)
    if lower_case:
        tokenizer.normalizer = library.normalizers.Lowercase()
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return _with_special_tokens(tokenizer)


def word_piece_tokenizer(vocabulary: dict[str, int], *, lower_case: bool) -> LibraryTokenizer:
    """A vocabulary of word pieces with what goes in front of it and behind it in BERT."""
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return _with_special_tokens(tokenizer)


def _with_special_tokens(tokenizer: Any) -> LibraryTokenizer:
    vocabulary = tokenizer.get_vocab()
    special = dict.fromkeys(name for names in NAMES.values() for name in names if name in vocabulary)
    tokenizer.add_special_tokens(sorted(special, key=vocabulary.__getitem__))
    return LibraryTokenizer(tokenizer)


def _read_words(path: Path, lower_case: bool | None) -> LibraryTokenizer:
    """WordPiece, as of BERT: one token a line."""
    words = _read_text(path).splitlines()
    while words and not words[-1]:
        words.pop()
    vocabulary = {word: number for number, word in enumerate(words)}
    special = {name for names in NAMES.values() for name in names}
    if len(vocabulary) < len(words) or "[UNK]" not in vocabulary:
        raise DataError(
            f"{path}: this is no vocabulary of word pieces.",
            expected="one token a line, each once, [UNK] among them",
            found=f"{len(words)} lines, {len(vocabulary)} of them different, "
            + ("with" if "[UNK]" in vocabulary else "without")
            + " [UNK]",
            todo="Give the vocab.txt of a BERT model.",
        )
    if lower_case is None:
        lower_case = not any(word != word.lower() for word in words if word not in special)
    return word_piece_tokenizer(vocabulary, lower_case=lower_case)


def _read_vocabulary(path: Path) -> dict[str, int]:
    problem = ""
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: the vocabulary cannot be read.",
            expected="JSON: a mapping of tokens to numbers",
            found=str(error),
            todo="Copy the file again.",
        ) from error
    if not isinstance(found, dict):
        problem = f"a {type(found).__name__}"
    elif wrong := [f"{token!r}: {id!r}" for token, id in found.items() if type(id) is not int or not 0 <= id < 2**32]:
        problem = f"{wrong[0]}, and {len(wrong) - 1} more that are no such numbers"
    elif len(set(found.values())) < len(found):
        problem = f"{len(found)} tokens with {len(set(found.values()))} different numbers"
    if problem or not found:
        raise DataError(
            f"{path}: this is no vocabulary.",
            expected="a mapping of tokens to different numbers from 0",
            found=problem or "an empty mapping",
            todo="Copy the file again.",
        )
    return found


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip() or line.startswith("#version"):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise DataError(
                f"{path}, line {number}: this is no merge.",
                expected="two tokens with a space between them",
                found=repr(line[:80]),
                todo="Copy the file again.",
            )
        merges.append((pair[0], pair[1]))
    return merges


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: the file cannot be read.",
            expected="a text in UTF-8",
            found=f"{type(error).__name__}: {error}",
            todo="Correct 'task.tokenizer.file', or copy the file again.",
        ) from error
