"""Draw what `wellcond doctor` prints as a picture for README and the home page: `python tools/site/doctor_picture.py`.

The text is the command's own output on a small ViT and scikit-learn's digits, cut after the first rows of its table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "assets" / "doctor.svg"
MODEL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 4, "num_heads": 4}
COMMAND = ["doctor", "timm:vit_tiny_patch16_224", *(f"--model-arg={k}={v}" for k, v in MODEL.items())]
SHOWN = "$ wellcond doctor timm:vit_tiny_patch16_224 --model-arg embed_dim=64 ... --input digits"
SIZE, LINE = 13, 18  # of the letters, and from line to line
COLUMNS = 100
LABEL = "Output of wellcond doctor"
COLOURS = {"1. ": "#e5c07b", "2. ": "#e5c07b", "   fix": "#98c379", "$ ": "#61afef", "layer": "#7f8a9b"}


def doctor_says() -> list[str]:
    """Lines of the findings and of the table, as they are printed in a terminal of 100 columns."""
    environment = os.environ | {"COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT / "src")}
    program = [sys.executable, "-c", "from wellcond.cli.main import main; main()", *COMMAND, "--input", "digits"]
    done = subprocess.run(program, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if " findings in " in line)
    last = next(i for i, line in enumerate(lines) if line.startswith("kappa(X):"))
    return [SHOWN, "", *without_records(lines[first : last - 1])]


def without_records(lines: list[str]) -> list[str]:
    """The same without the paragraphs of evidence, which the documents have."""
    kept, inside = [], False
    for line in lines:
        inside = line.startswith("   records:") or (inside and line.startswith("     "))
        if not inside:
            kept.append(line)
    return kept


def picture(lines: list[str]) -> str:
    """An SVG of a terminal that shows these lines."""
    width, height = COLUMNS * SIZE * 0.602 + 40, len(lines) * LINE + 36
    rows = []
    for i, line in enumerate(lines):
        colour = next((c for start, c in COLOURS.items() if line.startswith(start)), "#d7dae0")
        rows.append(f'<text x="20" y="{30 + i * LINE}" fill="{colour}">{escape(line, quote=False)}</text>')
    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{LABEL}">',
        f"<style>text{{font:{SIZE}px {font};white-space:pre}}</style>",
        '<rect width="100%" height="100%" rx="8" fill="#1f2329"/>',
        *rows,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(doctor_says()), encoding="utf-8")
    print(PICTURE)
