"""Text that language models wrote after training. It can hold anything, and is shown as what it is: text."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.lab.report.detection_records import hold_detections
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.run_record import RunRecordError
from wellcond.lab.report.table import plain_markdown

LEAD = "What the models write after training, from the same random numbers. Words in bold were given."
WIDTH = 100


@dataclass(frozen=True)
class Sample:
    """One text of one run."""

    method: str
    seed: int
    prompt: str
    text: str
    """Begins with the prompt, as far as the tokeniser gives it back unchanged."""
    problem: str = ""
    """Why there is no text."""

    @property
    def title(self) -> str:
        """Which run wrote it."""
        return f"{self.method}, seed {self.seed}"

    @property
    def given(self) -> str:
        """The prompt, where the text begins with it."""
        return self.prompt if self.text.startswith(self.prompt) else ""

    @property
    def continued(self) -> str:
        """What the model wrote."""
        return self.text[len(self.given) :]


def find_samples(comparison: Comparison) -> dict[str, list[Sample]]:
    """Samples by prompt: of each method those of the finished run with the lowest seed that has any.

    Raises: RunRecordError if a record holds something else under `samples`.
    """
    found: dict[str, list[Sample]] = {}
    for method in comparison.methods:
        runs = [run for run in comparison.of(method) if run.finished and run.record.get("samples")]
        for run in [run for run in runs[:1] if not hold_detections(run.record["samples"])]:
            for row in _checked(run.folder / "run.json", run.record["samples"]):
                sample = Sample(method, run.seed, row["prompt"], row.get("text", ""), row.get("problem", ""))
                found.setdefault(sample.prompt, []).append(sample)
    return found


def _checked(path: Path, stored: Any) -> list[dict[str, str]]:
    rows: list[Any] = stored if isinstance(stored, list) else [None]
    for row in rows:
        values = [row.get("prompt"), row.get("text", row.get("problem"))] if isinstance(row, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise RunRecordError(path, "expected 'samples' to be a list of {prompt, text}", "Repeat the run.")
    return rows


def visible(text: str) -> str:
    r"""The text with every character that has no picture, or turns others around, as its number.

    Lines and tabs stay.

    Example:
        >>> visible("a" + chr(0) + "b" + chr(0x202E) + chr(10))
        'a<U+0000>b<U+202E>\n'
    """
    return "".join(character if _has_a_picture(character) else f"<U+{ord(character):04X}>" for character in text)


def _has_a_picture(character: str) -> bool:
    # Control, format, surrogate, private and unassigned characters; separators of lines and paragraphs.
    return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _heading(prompt: str) -> str:
    return "With a beginning" if prompt else "Without a beginning"


def sample_parts(samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """What the page shows of each prompt."""
    return [
        {"kind": "samples", "title": _heading(prompt), "samples": of_prompt} for prompt, of_prompt in samples.items()
    ]


def samples_markdown(samples: dict[str, list[Sample]]) -> Iterator[str]:
    """Lines of a section; texts are blocks of code, in which nothing is markup."""
    if not samples:
        return
    yield from ("## Samples", "", "What the models write after training, from the same random numbers.", "")
    for prompt, of_prompt in samples.items():
        shown = f": {plain_markdown(visible(prompt))}" if prompt else ""
        yield from (f"### {_heading(prompt)}{shown}", "")
        for sample in of_prompt:
            title = plain_markdown(sample.title)
            if sample.problem:
                yield from (f"{title}: nothing was written ({plain_markdown(visible(sample.problem))})", "")
            else:
                yield from (f"{title}:", "", *_fenced(_wrapped(visible(sample.text))), "")


def _wrapped(text: str) -> list[str]:
    lines = [line.expandtabs(4) for line in text.split("\n")]
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, WIDTH, drop_whitespace=False, replace_whitespace=False) or [""]
    ]


def _fenced(lines: Sequence[str]) -> list[str]:
    """A block of code, between fences longer than any in it."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *lines, fence]
