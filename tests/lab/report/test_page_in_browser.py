"""The page as a reader meets it: a real browser, opened from a file."""

from pathlib import Path

import pytest

from lab.report.fake_runs import page_of, usual_methods, write_comparison
from patience import PATIENCE, wait_until
from wellcond.lab.records import load_comparisons

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("matplotlib")
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no /usr/bin/chromium")
TABS = ["summary", "learning", "matching", "conditioning", "attention", "cost", "runs"]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = write_comparison(tmp_path_factory.mktemp("page"), usual_methods(), points=3, layers=2, heads=2)
    path = folder / "report.html"
    path.write_text(page_of(load_comparisons(folder)[0]))
    return path.as_uri()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, address):
    """Opens the page; afterwards there must have been no error and no request."""
    problems, contexts = [], []

    def go(width=1180, scheme="light", script=True, part=""):
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, java_script_enabled=script
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else problems.append(r.url))
        page.goto(address + part)
        return page

    yield go
    for context in contexts:
        context.close()
    assert problems == []


def shown(page):
    return page.evaluate("[...document.querySelectorAll('section.tab')].filter(s => !s.hidden).map(s => s.id)")


@pytest.mark.slow
def test_tabs_by_mouse_and_keys(visit):
    page = visit()
    for name in TABS:
        page.click(f'nav.tabs a[href="#{name}"]')
        assert shown(page) == [name]
        plots = page.locator(f"#{name} .plot:visible")
        for at in range(plots.count()):
            assert plots.nth(at).locator("svg").count() == 1
    page.locator('nav.tabs a[href="#summary"]').click()
    page.keyboard.press("ArrowRight")
    assert shown(page) == ["learning"]
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    page.keyboard.press("End")
    assert shown(page) == ["runs"]
    page.keyboard.press("ArrowRight")
    assert shown(page) == ["summary"]
    page.keyboard.press("ArrowLeft")
    assert shown(page) == ["runs"]
    page.keyboard.press("Home")
    assert shown(page) == ["summary"]
    assert page.get_by_role("tab").count() == len(TABS) and page.get_by_role("tabpanel").count() == 1


@pytest.mark.slow
def test_every_tab_has_an_address(visit):
    page = visit(part="#conditioning")
    assert shown(page) == ["conditioning"]
    page.click('nav.tabs a[href="#cost"]')
    assert shown(page) == ["cost"] and page.url.endswith("#cost")
    page.go_back()
    assert shown(page) == ["conditioning"]
    page = visit(part="#figure-weights")
    assert shown(page) == ["conditioning"]
    assert page.locator("#weights-0 svg").first.is_visible()


@pytest.mark.slow
def test_the_tabs_are_on_the_first_screen_of_a_phone(visit):
    page = visit(width=375)
    assert page.locator("nav.tabs").bounding_box()["y"] < 300


@pytest.mark.slow
def test_the_summary_fits_a_wide_screen(visit):
    page = visit(width=1400)
    hidden = "[...document.querySelectorAll('#summary .scroll')].map(box => box.scrollWidth - box.clientWidth)"
    assert max(page.evaluate(hidden)) <= 1


@pytest.mark.slow
def test_methods_can_be_hidden(visit):
    page = visit()
    page.click('nav.tabs a[href="#learning"]')
    series = page.locator('#learning-0 svg [data-method="1"]')
    button = page.locator("#figure-learning").get_by_role("button", name="conditioned")
    button.click()
    same = page.locator("#figure-gradients").get_by_role("button", name="conditioned")
    assert same.get_attribute("aria-pressed") == "false"
    assert button.get_attribute("aria-pressed") == "false"
    assert series.count() > 0 and series.evaluate_all("all => all.every(one => one.style.display === 'none')")
    button.click()
    assert series.evaluate_all("all => all.every(one => one.style.display === '')")


@pytest.mark.slow
def test_a_phone_does_not_scroll_sideways(visit):
    page = visit(width=375)
    for name in TABS:
        page.click(f'nav.tabs a[href="#{name}"]')
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, name
        cut = page.evaluate(
            f"[...document.querySelectorAll('#{name} .plot')].filter(p => p.getBoundingClientRect().right > 375).length"
        )
        assert cut == 0, name


@pytest.mark.slow
def test_the_scheme_recolours_page_and_plots(visit):
    page = visit()
    page.click('nav.tabs a[href="#learning"]')

    def colours():
        return page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " ...['text', 'g[data-method] path'].map(part => {"
            "   const style = getComputedStyle([...document.querySelectorAll('#learning-0 svg ' + part)].pop());"
            "   return style.fill + style.stroke; })]"
        )

    light = colours()
    page.emulate_media(color_scheme="dark")
    dark = wait_until(lambda: all(a and b and a != b for a, b in zip(light, colours(), strict=True)) and colours())
    assert visit(scheme="dark").evaluate("getComputedStyle(document.body).backgroundColor") == dark[0]


def test_without_scripts_everything_is_there(visit):
    page = visit(script=False)
    for name in TABS:
        assert page.locator(f"#{name}").is_visible()
    assert page.locator("#learning-0 svg").is_visible()
