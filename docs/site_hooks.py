"""Hooks of mkdocs: what a page links to outside docs/ becomes part of the site.

Documents link to results and tests by their paths in the repository, so that the links work on disk too. Here a linked
markdown file becomes a page, a picture or table a file, and a source file a page that shows it, with a heading for each
test. In files outside docs/, links to what is not there (pages that are not committed) become text. Pages with formulas
load KaTeX.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?P<open>!?\[(?P<text>[^\]]*)\])\((?P<path>[^)\s#:]+)(?P<fragment>#[^)\s]*)?\)")
COPIED = {".png", ".svg", ".csv"}
SHOWN = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that is linked to, directly or from a file that is."""
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in seen or target.is_relative_to(DOCS):
                continue
            seen.add(target)
            if target.suffix in SHOWN:
                files.append(File.generated(config, site_path(target), content=_source_page(target)))
            else:
                files.append(File.generated(config, site_path(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets are in the site."""
    if page.file.src_uri.removesuffix(".md").endswith(tuple(SHOWN)):
        return markdown
    inside = (DOCS / page.file.src_uri).exists()
    origin = (DOCS if inside else ROOT) / page.file.src_uri
    if not inside and "report" in origin.parts:
        page.meta["search"] = {"exclude": True}

    def lead(match: re.Match[str]) -> str:
        target = find_target(origin, match["path"])
        if target is None:
            return match[0] if inside else match["text"]
        path = posixpath.relpath(site_path(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{match['open']}({path}{match['fragment'] or ''})"

    # GitHub needs `a\|b` in the cell of a table, Python-Markdown shows the backslash.
    markdown = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), markdown)
    return LINK.sub(lead, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load KaTeX on a page that has formulas."""
    if 'class="arithmatex"' not in output:
        return output
    folder = posixpath.relpath("assets/katex", posixpath.dirname(page.url) or ".")
    style = f'<link rel="stylesheet" href="{folder}/katex.min.css">'
    scripts = [f'<script defer src="{folder}/{name}"></script>' for name in ("katex.min.js", "render.js")]
    return output.replace("</head>", "".join([style, *scripts, "</head>"]), 1)


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


def _targets(page: Path) -> Iterator[Path]:
    for match in LINK.finditer(page.read_text("utf-8")):
        target = find_target(page, match["path"])
        if target is not None:
            yield target


def _source_page(path: Path) -> str:
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


def _tests(path: Path) -> Iterator[tuple[int, str]]:
    """Index of the first line and name of each test, decorators included."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1, node.name
