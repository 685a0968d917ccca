"""Headless Chromium by the WebDriver protocol, which is JSON over HTTP: the standard library is enough."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Browser", "missing"]

_FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--force-color-profile=srgb"),
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that the protocol gives references


def missing() -> str:
    """Why there is no browser here; empty where there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(absent)}: make browser installs them on Debian" if absent else ""


class Browser:
    """A browser with an empty profile of its own, until the block ends."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="pfl-browser-")
        self._driver = subprocess.Popen(
            [shutil.which("chromedriver") or "chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            self._address = f"http://127.0.0.1:{self._port()}/session"
            options = {"binary": shutil.which("chromium"), "args": [*_FLAGS, f"--user-data-dir={self._profile.name}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
            session = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
            self._address += f"/{session['sessionId']}"
        except BaseException:
            self._end()
            raise

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return int(found[1])
        raise RuntimeError("chromedriver ended before it took a port")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._end()

    def _end(self) -> None:
        self._driver.terminate()
        try:
            self._driver.wait(10)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        self._profile.cleanup()

    def _call(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if verb != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"}, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            value = json.load(error)["value"]
            raise RuntimeError(f"{value['error']}: {value['message']}") from None

    # ---- what tests do ----------------------------------------------------------------------------------------------

    def open(self, address: str) -> None:
        """Go to a page, and forget what was logged before. Returns when its script has run."""
        self.errors()
        self.requests()
        self._call("POST", "/url", {"url": address})
        self.wait("return document.documentElement.dataset.ready === 'yes'")

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any, seconds: float = 30.0) -> Any:
        """The value of a script as soon as it is one that counts as true."""
        until = time.monotonic() + seconds
        while not (value := self.run(script, *arguments)):
            if time.monotonic() > until:
                raise AssertionError(f"this did not become true in {seconds:g} s: {script}")
            time.sleep(0.05)
        return value

    def element(self, selector: str) -> str:
        """The reference of the first element that a CSS selector finds."""
        found: str = self._call("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        return found

    def click(self, selector: str) -> None:
        """As a user does: it must be seen, and nothing may cover it."""
        self._call("POST", f"/element/{self.element(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Keys into an element; those without a letter are of WebDriver's table, U+E000 and on."""
        self._call("POST", f"/element/{self.element(selector)}/value", {"text": text})

    def pointer(self, selector: str, *steps: tuple[str, float, float]) -> None:
        """Move, press or release the mouse at shares of an element's width and height, from its middle."""
        box = self.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.width, b.height]",
            selector,
        )
        origin, actions = {_ELEMENT: self.element(selector)}, list[dict[str, Any]]()
        for what, x, y in steps:
            place = {"x": int(x * box[0] / 2), "y": int(y * box[1] / 2), "origin": origin}
            actions.append({"type": "pointerMove", "duration": 20, **place})
            if what != "move":
                actions.append({"type": "pointerDown" if what == "press" else "pointerUp", "button": 0})
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._call("POST", "/actions", {"actions": [mouse]})

    def press(self, key: str) -> None:
        """A key to whatever has the focus."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def look(self, width: int, height: int = 900, *, dark: bool = False, scale: float = 1.0) -> None:
        """The size of the window, and which colours the system prefers."""
        phone = width < 600
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        wanted = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.command("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        shot = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def errors(self) -> list[str]:
        """What the console has said since it was last asked, warnings and errors."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> list[str]:
        """The addresses of all requests since it was last asked; what is in an address itself is none."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self._call("POST", "/se/log", {"type": "performance"})
        ]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith("data:")]
