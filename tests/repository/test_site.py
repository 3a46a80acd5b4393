"""The documentation builds without a warning and needs no network to be read and searched."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE

ROOT = Path(__file__).parents[2]
for package in ("zensical", "mkdocstrings", "matplotlib"):
    pytest.importorskip(package, reason="the docs extra is not installed", exc_type=ImportError)


pytestmark = pytest.mark.slow  # half a minute; .github/workflows/docs.yml builds the site for every change


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "tools" / "site" / "build.py"), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    loading = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?https?:|<link\b[^>]*rel=\"?(?:stylesheet|preconnect)\"?[^>]*https?:"
    )
    assert [page.name for page in pages if loading.search(page.read_text("utf-8"))] == []
    styles = sorted(site.rglob("*.css"))
    assert len(styles) > 3
    fetching = re.compile(r"@import|url\([\"']?(?:https?:)?//")
    assert [style.name for style in styles if fetching.search(style.read_text("utf-8"))] == []


def test_pages_with_formulas_load_the_bundled_katex(site):
    theory, reference = ((site / name).read_text("utf-8") for name in ("theory.html", "api/theory.html"))
    for page, folder in ((theory, "assets/katex"), (reference, "../assets/katex")):
        assert '<div class="arithmatex">\\[' in page and '<span class="arithmatex">\\(' in page
        loaded = re.findall(rf'(?:href|src)="{folder}/([^"]+)"', page)
        assert loaded == ["katex.min.css", "katex.min.js", "render.js"]
        assert all((site / "assets" / "katex" / name).is_file() for name in loaded)
    style = (site / "assets" / "katex" / "katex.min.css").read_text("utf-8")
    fonts = set(re.findall(r"url\((fonts/[^)]+\.woff2)\)", style))
    assert len(fonts) == 20 and all((site / "assets" / "katex" / font).is_file() for font in fonts)
    assert "katex" not in (site / "security.html").read_text("utf-8")


LEFT_OVER = """() => {
    const page = document.querySelector("article").cloneNode(true);
    page.querySelectorAll("code, .katex").forEach(element => element.remove());
    return page.textContent.match(/\\$|\\\\[([]/g) || [];
}"""
# Commas and full stops that stand at the start of a line, after a formula that ends the one before.
ORPHANS = """() => [...document.querySelectorAll("span.arithmatex")].filter(formula => {
    const next = formula.nextSibling;
    if (!/^[,.;:]/.test(next?.data ?? "")) return false;
    const mark = document.createRange();
    mark.setStart(next, 0);
    mark.setEnd(next, 1);
    return mark.getBoundingClientRect().top > [...formula.getClientRects()].at(-1).bottom;
}).map(formula => formula.textContent)"""


@pytest.fixture
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip("there is no /usr/bin/chromium")
    with sync_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=str(chromium), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (375, "light")])
def test_a_browser_sets_every_formula(site, browser, width, scheme):
    addresses = [page for page in sorted(site.rglob("*.html")) if "/katex.min.js" in page.read_text("utf-8")]
    assert {"theory.html", "jacobian.html", "methods.html"} <= {page.name for page in addresses}
    problems = []
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.set_default_timeout(1000 * PATIENCE)
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else problems.append(r.url))
    for address in addresses:
        page.goto(address.as_uri())
        formulas = page.locator(".arithmatex").count()
        assert page.locator(".arithmatex .katex").count() == formulas > 0, address
        assert page.locator(".katex-error").count() == 0, address
        assert page.evaluate(LEFT_OVER) == [], address
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
        page.evaluate("document.fonts.ready.then(() => null)")
        assert page.evaluate(ORPHANS) == [], address
        faces = "[...document.fonts].filter(font => font.status == 'loaded').map(font => font.family)"
        assert "KaTeX_Math" in page.evaluate(faces), address
    assert problems == []


def test_the_search_works_from_disk(site, browser):
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    problems = []
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else problems.append(r.url))
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.get_by_placeholder("Search").press_sequentially("commutant")
    found = page.locator(f"ol li a[href^='{(site / 'theory.html').as_uri()}']").first
    found.click()
    page.wait_for_url("**/theory.html?*")
    assert problems == []


def test_figures_stand_in_their_pages(site):
    sources = {path: path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")}
    named = {path: re.findall(r"^<!-- figure: ([a-z-]+) -->$", text, re.MULTILINE) for path, text in sources.items()}
    assert 5 <= sum(map(len, named.values())) == len({name for names in named.values() for name in names}) <= 8
    for path, names in named.items():
        page = (site / path.relative_to(ROOT / "docs").with_suffix(".html")).read_text("utf-8")
        assert page.count('<figure class="wc-figure"') == len(names)
        for name in names:
            start = page.index(f'<figure class="wc-figure" id="figure-{name}">')
            figure = page[start : page.index("</figure>", start)]
            assert re.search(r'<svg role="img" aria-label="[^"]{30,}"', figure)
            assert re.search(r"<figcaption>.{60,}</figcaption>", figure)
            assert "currentColor" in figure and "#010203" not in figure and len(figure) < 120_000
        identities = re.findall(r'\bid="([^"]+)"', page)
        repeated = {identity for identity in identities if identities.count(identity) > 1}
        assert not {identity for identity in repeated if identity.startswith(tuple(f"{name}-" for name in names))}


def test_errata_lead_to_their_tests(site):
    page = (site / "theory.html").read_text("utf-8")
    links = re.findall(r'href="(tests/theory/test_errata_\w+\.py\.html)#(test_E\d+\w*)"', page)
    assert len(links) == 27
    for path, anchor in links:
        shown = (site / path).read_text("utf-8")
        assert f'id="{anchor}"' in shown and re.search(rf">{anchor}<", shown)


def test_the_reference_has_signatures_and_examples(site):
    page = (site / "api" / "verbs.html").read_text("utf-8")
    assert 'id="wellcond.init_"' in page and "generator" in page and "&gt;&gt;&gt;" in page
