"""docs/api.md is what the docstrings say now."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "api.py"


def check(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, cwd=ROOT
    )


def test_the_page_is_current():
    shown = check(SCRIPT)
    assert shown.returncode == 0, shown.stderr


def test_a_page_that_is_not_current_would_be_found(tmp_path):
    (tmp_path / "docs").mkdir()
    for package in ("mrp_lightning", "callbacks", "export"):
        (tmp_path / package).symlink_to(ROOT / package)
    script = tmp_path / "docs" / "api.py"
    script.write_text(SCRIPT.read_text())
    page = SCRIPT.with_suffix(".md").read_text()
    script.with_suffix(".md").write_text(page.replace("tolerance", "patience"))
    assert check(script).stderr.startswith("docs/api.md is not current")


def test_every_public_name_is_on_it():
    import callbacks
    import export
    import mrp_lightning

    page = SCRIPT.with_suffix(".md").read_text()
    for package in (callbacks, export, mrp_lightning):
        for name in package.__all__:
            assert f"### `{name}`" in page or f"* `{name}` (" in page, name
