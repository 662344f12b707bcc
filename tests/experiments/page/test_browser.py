"""The page in a browser: at the widths of a phone and a desktop, light and dark, without a script.

Skipped where there is no Chrome: `CHROME=/path/to/chrome`, one on the PATH, or that of
`python -m playwright install chromium`.
"""

import pytest

pytest.importorskip("matplotlib")

import numpy as np
from browser import Browser, find_chrome
from html_page import turned_round
from matplotlib.colors import to_rgb
from PIL import Image

from mrp_lightning.experiments.pictures import INK, MUTED, PAPER, color_of
from mrp_lightning.experiments.report import main

CHROME = find_chrome()
pytestmark = pytest.mark.skipif(
    CHROME is None, reason="no Chrome or Chromium: set CHROME, or install one"
)

WIDER_THAN_PAGE = """
[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll')
    && e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map(e => e.tagName + ' ' + e.textContent.slice(0, 40))
"""
EMPTY_PICTURES = """
[...document.querySelectorAll('figure img')].filter(e => {
    const box = e.getBoundingClientRect();
    return e.checkVisibility() && (box.width < 100 || box.height < 40);
}).length
"""


@pytest.fixture(scope="module")
def browser():
    with Browser(CHROME) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(save_sweep, tmp_path_factory):
    """With a directory whose name has no place to be broken."""
    root = save_sweep(tmp_path_factory.mktemp("report") / "sweep")
    (root / "tiny" / "2of4-SM-s128-seed0").rename(root / "tiny" / ("along" * 30))
    main([str(root)])
    return root / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits(browser, page, width, scheme):
    browser.open(page, width, scheme=scheme)
    for fold in (False, True):
        if fold:
            browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(WIDER_THAN_PAGE) == []
        assert browser.evaluate(EMPTY_PICTURES) == 0
    assert browser.evaluate("[...document.images].every(i => i.naturalWidth > 0)")
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(253, 253, 251)", "dark": "rgb(21, 24, 27)"}[scheme]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_are_turned_round_on_dark_paper(browser, page, scheme, tmp_path):
    browser.open(page, 1280, scheme=scheme)
    # So large that strokes are wider than a pixel: small ones are blended with the paper, and the
    # fonts of the machine would decide how much.
    browser.screenshot(tmp_path / "picture.png", "figure img", scale=4)
    with Image.open(tmp_path / "picture.png") as image:
        pixels = np.asarray(image.convert("RGB"), dtype=int).reshape(-1, 3)
    paper = {"light": PAPER, "dark": "#15181b"}[scheme]
    colors = {PAPER: paper}
    for color in (INK, MUTED, color_of("SM")):
        colors[color] = turned_round(color) if scheme == "dark" else color
    for color, shown in colors.items():
        away = np.abs(pixels - 255 * np.array(to_rgb(shown))).max(-1)
        assert (away < 3).sum() > 100, (color, shown)
    # Nor has the picture a paper of its own, which would show as a box.
    assert np.abs(np.median(pixels, axis=0) - 255 * np.array(to_rgb(paper))).max() < 1


def test_nothing_is_asked_of_the_network(browser, page):
    browser.open(page, 1280)
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked == [page.as_uri()]


def test_the_page_works_without_scripts(browser, page):
    browser.open(page, 390, script=False)
    assert browser.evaluate("document.querySelectorAll('table').length") > 5
    assert browser.evaluate("document.querySelector('h1').textContent").startswith("someone/tiny")
