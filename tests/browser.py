"""A headless Chrome, driven by its DevTools protocol over a pipe: needs nothing but the browser."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--no-sandbox"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
# Chrome reads commands from file descriptor 3 and writes to 4.
_EXEC = "import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); "
_EXEC += "os.execv(c[0], c)"


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


class Browser:
    """One tab."""

    def __init__(self, chrome: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, answers = os.pipe(), os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands[0], answers[1])]
        flags = [*_FLAGS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, *map(str, high), chrome, *flags, "about:blank"],
            pass_fds=high,
            stderr=subprocess.DEVNULL,
        )
        for fd in (*high, commands[0], answers[1]):
            os.close(fd)
        self._write, self._read = commands[1], answers[0]
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = session["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path, width: int, *, scheme: str = "light", script: bool = True) -> None:
        """Load a file at a width, in a colour scheme, with or without JavaScript on the page."""
        mobile = width < 600
        size = {"width": width, "height": 844 if mobile else 800, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=mobile)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.events = []
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """What the page asked for since it was opened."""
        wanted = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in wanted]

    def screenshot(self, path: Path, selector: str, *, scale: int = 1) -> None:
        """The first element of a CSS selector, as PNG of `scale` pixels for one of the page."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        clip = {key: self.evaluate(f"{box}.{key}") for key in ("x", "y", "width", "height")}
        shot = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": scale}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self, timeout: float = 60) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
