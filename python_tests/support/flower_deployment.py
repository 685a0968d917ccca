"""A deployment of Flower on the loopback: a SuperLink and SuperNodes, real processes that talk TLS."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

__all__ = ["Deployment", "deployment"]

_HOST = "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as server:
        server.bind((_HOST, 0))
        return int(server.getsockname()[1])


class Deployment:
    """Processes in a folder, each with a log there."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.port = folder, _free_port()
        self.environment = {**environment, "FLWR_HOME": str(folder / "home")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._certify()
        (folder / "home").mkdir()
        (folder / "home/config.toml").write_text(
            f'[superlink]\ndefault = "clinics"\n\n[superlink.clinics]\naddress = "{_HOST}:{self.port}"\n'
            f'root-certificates = "{folder}/ca.crt"\n\n'
            f'[superlink.simulation]\naddress = "{_HOST}:{self.port}"\ninsecure = true\n'
        )

    def _certify(self) -> None:
        """A certificate authority, and a certificate of it for the loopback: as docs/flower.md shows."""
        (self.folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        key = "-newkey rsa:2048 -nodes"
        for command in (
            f"req -x509 {key} -days 2 -keyout ca.key -out ca.crt -subj /CN=authority",
            f"req {key} -keyout server.key -out server.csr -subj /CN=localhost",
            "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.pem -days 2 -extfile names",
        ):
            self.run("openssl", *command.split())

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """A command to its end; what it said."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    def start(self, name: str, *command: str) -> None:
        """A process that goes on, in a group of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, name: str, pattern: str, seconds: float = 120.0, count: int = 1) -> None:
        """Until a log says something so many times."""
        end = time.monotonic() + seconds
        while len(re.findall(pattern, self.log(name))) < count:
            assert time.monotonic() < end, f"{pattern!r} is not in the log of {name}:\n{self.log(name)[-3000:]}"
            time.sleep(0.1)

    def wait_until(self, path: Path, seconds: float = 300.0) -> None:
        """Until a file is there."""
        end = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < end, f"{path} is not there:\n{self.log('superlink')[-3000:]}"
            time.sleep(0.05)

    def superlink(self) -> None:
        before = len(re.findall("Uvicorn running", self.log("superlink")))
        files = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        # With a database nodes are known to it when it is back.
        state = ["--database", str(self.folder / "superlink.db")]
        self.start("superlink", "flower-superlink", "--host", _HOST, "--port", str(self.port), *files, *state)
        self.wait_for("superlink", "Uvicorn running", count=before + 1)

    def simulation(self) -> None:
        """A SuperLink that simulates its nodes."""
        self.start(
            "superlink", "flower-superlink", "--host", _HOST, "--port", str(self.port), "--insecure", "--simulation"
        )
        self.wait_for("superlink", "Uvicorn running")

    def node(self, name: str, config: str) -> None:
        address = f"{_HOST}:{self.port}"
        files = ["--root-certificates", "ca.crt", "--port", str(_free_port())]
        self.start(name, "flower-supernode", "--superlink", address, *files, "--node-config", config)

    def kill(self, name: str) -> None:
        """End a process with its group, at once, as a crash would."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)

    def kill_server(self) -> None:
        """End the SuperLink and the ServerApp, which is in a session of its own: as if their machine had crashed."""
        nodes = {process.pid for name, process in self._processes.items() if name != "superlink"}
        self.kill("superlink")
        self._kill_others(nodes)

    def _kill_others(self, spared: Set[int]) -> None:
        """End what the processes of this deployment have started: all that have its folder as Flower's home.

        Args:
            spared: leaders of groups that stay.
        """
        home = f"FLWR_HOME={self.environment['FLWR_HOME']}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            # One may end while it is looked at.
            with contextlib.suppress(OSError):
                own = home in (path / "environ").read_bytes().split(b"\0")
                if own and not self._of(int(path.name), spared):
                    os.kill(int(path.name), signal.SIGKILL)

    @staticmethod
    def _of(process: int, leaders: Set[int]) -> bool:
        """Whether one of these has started a process, or what started it."""
        while process > 1:
            if process in leaders:
                return True
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return False

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)
        self._kill_others(set())


@contextlib.contextmanager
def deployment(folder: Path, environment: Mapping[str, str]) -> Iterator[Deployment]:
    """A deployment that leaves no process."""
    made = Deployment(folder, environment)
    try:
        yield made
    finally:
        made.close()
