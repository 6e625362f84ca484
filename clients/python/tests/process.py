"""The built fak, and a simulated vLLM, in processes of their own.

Invariant: what was started is ended with its block, and answers once its block is entered.
"""

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from time import monotonic
from typing import IO

import httpx

from fak_client import Client

START_S = 60.0


def binary() -> Path:
    found = os.environ.get("FAK_BIN")
    if not found:
        raise RuntimeError("FAK_BIN has to name the built fak; clients/python/test sets it")
    return Path(found)


@dataclass
class Process:
    """A process, and what it says."""

    process: subprocess.Popen[str]
    #: `None` is its end.
    lines: "Queue[str | None]" = field(default_factory=Queue)
    log: list[str] = field(default_factory=list)

    def listen(self, pipe: IO[str]) -> None:
        """Keeps the pipe empty, for as long as the process lives."""
        for line in pipe:
            self.log.append(line.rstrip("\n"))
            self.lines.put(self.log[-1])
        self.lines.put(None)

    def said(self, start: str) -> str:
        """What follows `start` on the first line that begins with it."""
        deadline = monotonic() + START_S
        while True:
            try:
                line = self.lines.get(timeout=max(deadline - monotonic(), 0))
            except Empty:
                raise RuntimeError(f"no {start!r} in {START_S} s; it said {self.log}") from None
            if line is None:
                raise RuntimeError(f"it ended without {start!r}; it said {self.log}")
            if line.startswith(start):
                return line.removeprefix(start).strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running(
    *arguments: str, out: bool = False, env: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """fak with arguments; `out` listens to its stdout instead of its stderr."""
    # Nothing of the settings of whoever runs the tests.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FAK_")}
    process = subprocess.Popen(
        [binary(), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if out else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if out else subprocess.PIPE,
        text=True,
        env={**kept, **(env or {})},
    )
    pipe = process.stdout if out else process.stderr
    assert pipe is not None
    started = Process(process)
    listener = threading.Thread(target=started.listen, args=(pipe,), daemon=True)
    listener.start()
    try:
        yield started
    finally:
        started.kill()
        listener.join()
        pipe.close()


@dataclass(frozen=True)
class Sim:
    """A simulated vLLM."""

    url: str
    process: Process


@contextmanager
def sim(profile: str = "0.32", connector: str = "offloading") -> Iterator[Sim]:
    free = "127.0.0.1:0"
    at = ["--listen", free, "--kv-events", free, "--replay", free]
    kind = ["--profile", profile, "--connector", connector]
    with running("sim", *at, *kind, out=True) as process:
        yield Sim(process.said("FAK_VLLM_BASE_URL="), process)


@dataclass(frozen=True)
class Gateway:
    """A running `fak serve`."""

    url: str
    process: Process


@contextmanager
def gateway(
    *workers: str, sims: int = 0, env: Mapping[str, str] | None = None, settings: str = ""
) -> Iterator[Gateway]:
    """In front of workers (`ID=URL`) and embedded simulators, with a database of its own.

    `settings` is the text of its `fak.toml`.
    """
    named = [argument for worker in workers for argument in ("--worker", worker)]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "fak.toml")
        config.write_text(settings)
        arguments = ["--config", str(config), "--db", f"sqlite:{folder}/fak.db"]
        arguments += ["--listen", "127.0.0.1:0", "--sim", str(sims)]
        with running("serve", *arguments, *named, env=env) as process:
            url = process.said("fak serve: ")
            seen(url, (env or {}).get("FAK_ADMIN_KEY", ""), len(workers) + sims)
            yield Gateway(url, process)


def seen(url: str, key: str, count: int) -> None:
    """Waits until fak has found out what so many workers do."""
    with Client(url, key) as fak:
        found: set[str] = set()
        with fak.events(after=0) as events:
            while len(found) < count:
                found.add(next(events).row.worker)
        # A row comes before the worker's state is told; this look comes after both.
        with httpx.Client(base_url=url, headers={"x-fak-key": key}, trust_env=False) as http:
            http.get("/is_paused").raise_for_status()
