"""``pfl-ext report FOLDER ...``: a page about runs, to be opened in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pfl_ext.reports.page import serve, write_page

from .flags import refuse_unknown
from .parser import Parser, UsageError

__all__ = ["Request", "execute", "parse"]


@dataclass(frozen=True)
class Request:
    """A page to be written or served."""

    folders: tuple[Path, ...]
    output: Path
    watch: bool
    port: int


def parse(arguments: Sequence[str]) -> Request:
    """Read from the command line which page to write or serve."""
    parser = Parser(
        "report",
        " FOLDER ...",
        description="Write one HTML page about runs: results, curves, clients, partition, costs, differences. It\n"
        "needs no internet and opens from disk. Each FOLDER is one that pfl-ext run, compare, sweep or paper wrote,\n"
        "or one that contains such folders.",
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="results of run, compare, sweep or paper"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the file to write (default: report.html in the first folder)"
    )
    parser.add_argument(
        "--watch", action="store_true", help="serve the page on this machine and keep it up to date; Ctrl-C ends it"
    )
    parser.add_argument("--port", type=int, metavar="N", help="with --watch: the port (default: a free one)")
    parsed, unknown = parser.parse_known_args(list(arguments))
    refuse_unknown(parser, unknown, {})
    if parsed.watch and parsed.output is not None:
        raise UsageError("--watch serves the page and writes no file: leave out --output")
    if parsed.port is not None and not parsed.watch:
        raise UsageError("--port works with --watch alone; add --watch, or leave out --port")
    if parsed.port is not None and not 0 <= parsed.port < 65536:
        raise UsageError(f"--port is {parsed.port}; accepted is 0 to 65535")
    output = parsed.output or parsed.folders[0] / "report.html"
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder; name a file in it, such as {output / 'report.html'}")
    return Request(tuple(parsed.folders), output, parsed.watch, parsed.port or 0)


def execute(request: Request) -> int:
    """Write the page, or serve it until Ctrl-C."""
    if request.watch:
        try:
            serve(
                request.folders,
                request.port,
                ready=lambda url: print(f"live report: {url} (Ctrl-C ends it)", flush=True),
            )
        except KeyboardInterrupt:
            print("\nended")
        return 0
    found = write_page(request.folders, request.output)
    for problem in found.problems:
        print(f"note: {problem}")
    size = request.output.stat().st_size / 1e6
    runs = len(found.runs)
    print(
        f"report on {runs} run{'' if runs == 1 else 's'}: {request.output} ({size:.1f} MB), to be opened in a browser"
    )
    return 0
