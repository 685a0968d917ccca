"""The page while runs go on: a server for this machine alone."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .document import content, document, embedded
from .found import Reader

__all__ = ["serve"]


def serve(folders: Sequence[Path], port: int = 0, *, ready: Callable[[str], None]) -> None:
    """Serve the page on 127.0.0.1, always as the folders are now, until Ctrl-C.

    Args:
        folders: of runs, comparisons or sweeps, or with any of these in them.
        port: 0 for a free one.
        ready: called with the page's address once it can be opened.

    Raises:
        FileNotFoundError, ValueError, ImportError: as of `write_page`, before anything is served.
        OSError: the port is taken.
    """
    page = _Page(folders)
    page.document()
    try:
        server = _Server(("127.0.0.1", port), page)
    except OSError as error:
        raise OSError(f"cannot serve on port {port}: {error.strerror or error}; --port 0 takes a free one") from error
    with server:
        ready(f"http://127.0.0.1:{server.server_address[1]}/")
        server.serve_forever()


class _Page:
    """What is served, made again when a file has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._reader = Reader(folders)
        self._lock = threading.Lock()
        self._made: tuple[object, str] | None = None

    def document(self) -> str:
        with self._lock:
            return document(self._reader.read(), live=True)

    def numbers(self) -> str:
        with self._lock:
            state = self._reader.state()
            if self._made is None or self._made[0] != state:
                self._made = (state, embedded(content(self._reader.read())))
            return self._made[1]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], page: _Page) -> None:
        super().__init__(address, _Handler)
        self.page = page


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """The page, or its newest numbers, which are sent once."""
        # Another site's page in the same browser could reach this port by a name of its own that leads here.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost"):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", "this page is for 127.0.0.1 alone")
        if self.path not in ("/", "/numbers"):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is / and /numbers")
        try:
            if self.path == "/":
                self._send(HTTPStatus.OK, "text/html", self.server.page.document())
            else:
                self._send(HTTPStatus.OK, "application/json", self.server.page.numbers())
        except (OSError, ValueError) as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        same = status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        try:
            self.send_response(HTTPStatus.NOT_MODIFIED if same else status)
            self.send_header("ETag", tag)
            self.send_header("Cache-Control", "no-cache")
            self.send_header("X-Content-Type-Options", "nosniff")
            if not same:
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not same:
                self.wfile.write(body)
        except ConnectionError:  # the page was closed
            pass

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line every two seconds helps nobody."""
