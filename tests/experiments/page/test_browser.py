"""The page in a browser, at the widths of a phone and a desktop.

Skipped where there is no Chrome: `CHROME=/path/to/chrome`, one on the PATH, or that of
`python -m playwright install chromium`.
"""

import json
import re
import subprocess
from html import escape

import pytest

pytest.importorskip("matplotlib")

from browser import find_chrome

from mrp_lightning.experiments.report import main

CHROME = find_chrome()
pytestmark = pytest.mark.skipif(
    CHROME is None, reason="no Chrome or Chromium: set CHROME, or install one"
)

MEASURED = """
<script>
function measured(page, width) {
    const wide = [...page.querySelectorAll('main *')].filter(e => !e.closest('.scroll')
        && e.getBoundingClientRect().right > width + 0.5).map(e => e.tagName + e.textContent);
    const small = [...page.querySelectorAll('figure img')].map(e => e.getBoundingClientRect())
        .filter(box => box.width < 100 || box.height < 40).length;
    return {width: page.documentElement.scrollWidth, wide, small, images: page.images.length};
}
onload = () => {
    const result = [...document.querySelectorAll('iframe')].map(frame => {
        const page = frame.contentDocument;
        page.querySelectorAll('details').forEach(d => d.open = true);
        return measured(page, page.documentElement.clientWidth);
    });
    document.body.textContent = 'measured: ' + JSON.stringify(result) + ' end';
};
</script>
"""


def test_the_page_fits(save_sweep, tmp_path):
    """With all parts unfolded, and a directory whose name has no place to be broken."""
    root = save_sweep(tmp_path / "sweep")
    (root / "tiny" / "2of4-SM-s128-seed0").rename(root / "tiny" / ("along" * 30))
    main([str(root)])
    page, widths = escape((root / "report.html").read_text()), (390, 1280)
    frames = [f'<iframe width="{w}" height="800" srcdoc="{page}"></iframe>' for w in widths]
    (tmp_path / "frames.html").write_text("".join(frames) + MEASURED)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
    command = [CHROME, *flags, (tmp_path / "frames.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    (found,) = re.findall("measured: (.*) end", shown)
    for width, measured in zip(widths, json.loads(found), strict=True):
        assert measured["width"] <= width
        assert measured["wide"] == []
        assert measured["small"] == 0
        assert measured["images"] > 2
