"""A headless Chromium on a pipe: open a page, ask it things, hear what it logs and loads. Standard library only."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = "SPECDOCTOR_REQUIRE_CHROMIUM"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_PATIENCE = 60.0  # seconds for one answer


def find_chromium() -> str | None:
    """The browser of this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab, spoken to in the DevTools protocol over two pipes; the page's own policy does not bind it."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._count = write, read, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send one command and wait for its result; events met on the way are kept."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, width: int, height: int, scheme: str) -> None:
        """Show a file at a window size, in the `light` or `dark` scheme, and wait until it is loaded."""
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """What a console would show: messages, exceptions, and the browser's own log (policy violations, failures)."""
        shown = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in shown]

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self._read, 1 << 16) if ready else b""
            assert chunk, "Chromium ended" if ready else f"Chromium gave no answer in {_PATIENCE:.0f} s"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.contextmanager
def chromium_page(program: str) -> Iterator[Page]:
    """A tab of a fresh browser with an empty profile; the browser ends with the block."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4; a shell puts ours there.
    command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            ["bash", "-c", command, program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(from_us, to_us)
        finally:
            with contextlib.suppress(OSError, AssertionError):
                os.write(from_us, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
            try:
                browser.wait(15)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
            os.close(from_us)
            os.close(to_us)
