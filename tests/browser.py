"""A headless Chrome or Chromium, for what a page looks like."""

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chrome() -> str | None:
    """`$CHROME`, a Chrome or Chromium on the PATH, or the one that playwright installed."""
    named = [os.environ.get("CHROME"), *map(shutil.which, NAMES)]
    caches = [os.environ.get("PLAYWRIGHT_BROWSERS_PATH"), "~/.cache/ms-playwright"]
    caches += ["~/Library/Caches/ms-playwright"]
    installed = [
        str(path)
        for cache in caches
        if cache
        for pattern in ("chromium-*/chrome-linux*/chrome", "chromium-*/chrome-mac*/*/*/*/Chromium")
        for path in sorted(Path(cache).expanduser().glob(pattern))
    ]
    return next((name for name in [*named, *installed] if name), None)
