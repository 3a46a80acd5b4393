"""Build the documentation: `python tools/site/build.py [FOLDER]`, by default into site/.

Documents link to results and tests by their paths in the repository, so that the links work on disk too. The generator
sees a copy of docs/ in which a linked markdown file or notebook has become a page, a picture or table a file, and a
source file a page that shows it, with a heading for each test. In files outside docs/, links to what is not there
(pages that are not committed) become text. A line `<!-- figure: NAME -->` becomes a figure that figures.py draws,
and pages with formulas load KaTeX. The rest is plain markdown and mkdocs.yml, which Zensical and MkDocs both read.
"""

from __future__ import annotations

import argparse
import ast
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path

from figures import FIGURES
from svg import figure_as_html

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?P<open>!?\[(?P<text>[^\]]*)\])\((?P<path>[^)\s#:]+)(?P<fragment>#[^)\s]*)?\)")
MARKER = re.compile(r"^<!-- figure: ([a-z-]+) -->$", re.MULTILINE)
PLACE = '<div class="wc-figure" id="figure-{}"></div>'
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
LONG_CELL = 45
"""Letters of a cell from which on its table is one of words."""
COPIED = {".png", ".svg", ".csv", ".jsonl"}
SHOWN = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", ".ipynb": "python"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def build(folder: Path) -> None:
    """Build the site into `folder`, which is replaced; a warning is an error."""
    with tempfile.TemporaryDirectory() as temporary:
        stage = Path(temporary)
        shutil.copy(ROOT / "mkdocs.yml", stage)
        for name in ("src", "tools"):
            (stage / name).symlink_to(ROOT / name)
        named = write_sources(stage / "docs")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=stage, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"The site was not built:\n{done.stdout}")
        figures = {name: figure_as_html(name) for name in sorted(named)}
        for page in (stage / "site").rglob("*.html"):
            page.write_text(finish_page(page.read_text("utf-8"), page.relative_to(stage / "site"), figures), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(stage / "site", folder)


def write_sources(folder: Path) -> set[str]:
    """Write docs/ and everything that it links to, directly or not, as sources of the site; names of its figures."""
    shutil.copytree(DOCS, folder)
    waiting = sorted(DOCS.rglob("*.md"))
    seen, figures = set(waiting), set()
    while waiting:
        page = waiting.pop()
        text = page.read_text("utf-8")
        place = folder / site_path(page)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(lead_links(text, page), encoding="utf-8")
        figures |= set(MARKER.findall(text))
        for target in linked_files(text, page):
            if target in seen or target.is_relative_to(DOCS):
                continue
            seen.add(target)
            if target.suffix == ".md":
                waiting.append(target)
                continue
            place = folder / site_path(target)
            place.parent.mkdir(parents=True, exist_ok=True)
            if target.suffix in SHOWN:
                page_of = notebook_page if target.suffix == ".ipynb" else source_page
                place.write_text(page_of(target), encoding="utf-8")
            else:
                shutil.copy(target, place)
    if unknown := figures - set(FIGURES):
        sys.exit(f"tools/site/figures.py draws no {', '.join(sorted(unknown))}; it has {', '.join(sorted(FIGURES))}.")
    return figures


def lead_links(text: str, origin: Path) -> str:
    """A page with its links led to where their targets are in the site, and places for its figures."""
    inside = origin.is_relative_to(DOCS)
    here = site_path(origin)

    def lead(match: re.Match[str]) -> str:
        target = find_target(origin, match["path"])
        if target is None:
            return match[0] if inside else match["text"]
        path = posixpath.relpath(site_path(target), posixpath.dirname(here) or ".")
        return f"{match['open']}({path}{match['fragment'] or ''})"

    # GitHub needs `a\|b` in the cell of a table, Python-Markdown shows the backslash.
    text = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), text)
    text = MARKER.sub(lambda match: PLACE.format(match[1]), LINK.sub(lead, text))
    return UNSEARCHED + text if not inside and "report" in origin.parts else text


def finish_page(page: str, path: Path, figures: dict[str, str]) -> str:
    """Put figures into their places, name the cells of tables of words, and load KaTeX if the page has formulas."""
    for name, html in figures.items():
        page = page.replace(PLACE.format(name), html)
    page = TABLE.sub(lambda found: name_cells(found[0]), page)
    if 'class="arithmatex"' not in page:
        return page
    folder = posixpath.relpath("assets/katex", path.parent.as_posix())
    style = f'<link rel="stylesheet" href="{folder}/katex.min.css">'
    scripts = [f'<script defer src="{folder}/{name}"></script>' for name in ("katex.min.js", "render.js")]
    return page.replace("</head>", "".join([style, *scripts, "</head>"]), 1)


def name_cells(table: str) -> str:
    """A table with long cells, in which each cell has the name of its column: a narrow screen shows a row as a list.

    Example:
        >>> name_cells("<table><thead><tr><th>you have</th></tr></thead><tr><td>short</td></tr></table>")
        '<table><thead><tr><th>you have</th></tr></thead><tr><td>short</td></tr></table>'
    """
    names = [plain_text(name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    cells = [plain_text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", table, re.DOTALL)]
    if len(names) < 2 or max(map(len, cells), default=0) < LONG_CELL:
        return table

    def name_row(row: re.Match[str]) -> str:
        parts = re.split(r"(?=<td)", row[0])
        named = [
            part.replace("<td", f'<td data-label="{name}"', 1) for part, name in zip(parts[1:], names, strict=False)
        ]
        return "".join([parts[0], *named, *parts[1 + len(named) :]])

    return re.sub(r"<tr>.*?</tr>", name_row, table, flags=re.DOTALL).replace("<table>", "<table data-stacked>", 1)


def plain_text(html: str) -> str:
    """The text of some HTML, fit for an attribute."""
    return escape(unescape(re.sub(r"<[^>]+>", "", html)).strip())


def find_target(origin: Path, link: str) -> Path | None:
    """The file of the repository that a relative link means; None if there is none that the site can show."""
    target = (origin.parent / link).resolve()
    if target.is_dir():
        target /= "README.md"
    known = target.suffix == ".md" or target.suffix in COPIED or target.suffix in SHOWN
    return target if known and target.is_relative_to(ROOT) and target.is_file() else None


def site_path(target: Path) -> str:
    """Where a file of the repository is in the site's sources."""
    path = target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()
    return f"{path}.md" if target.suffix in SHOWN else path


def linked_files(text: str, page: Path) -> Iterator[Path]:
    """Files of the repository that a page links to and the site can show."""
    for match in LINK.finditer(text):
        target = find_target(page, match["path"])
        if target is not None:
            yield target


def source_page(path: Path) -> str:
    """A source file as markdown; each test of a Python file has a heading to link to."""
    lines, language = path.read_text("utf-8").splitlines(), SHOWN[path.suffix]
    cuts = dict(_tests(path)) if path.suffix == ".py" else {}
    starts = sorted({0, *cuts})
    front = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    parts = [front, f"# {path.relative_to(ROOT).as_posix()}\n"]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        heading = [f"## `{cuts[start]}` {{ #{cuts[start]} }}\n"] if start in cuts else []
        code = "\n".join(lines[start:end]).rstrip()
        parts += [*heading, f'~~~~~~ {{.{language} linenums="{start + 1}"}}\n{code}\n~~~~~~\n']
    return "\n".join(parts)


def notebook_page(path: Path) -> str:
    """A notebook as markdown: text, code, and what the code showed."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(lead_links(source, path))
            continue
        parts.append(f"~~~~~~ python\n{source}\n~~~~~~")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                picture = data["image/png"].strip()
                parts.append(f'<img alt="The figure that the code draws" src="data:image/png;base64,{picture}">')
            elif "text/html" in data:
                table = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
                parts.append(table.replace(' border="1" class="dataframe"', ""))
            else:
                parts.append(f"~~~~~~ text\n{''.join(data['text/plain']).rstrip()}\n~~~~~~")
    return "\n\n".join(parts)


def _tests(path: Path) -> Iterator[tuple[int, str]]:
    """Index of the first line and name of each test, decorators included."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1, node.name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help="where to; replaced if it exists")
    build(parser.parse_args().folder.resolve())
