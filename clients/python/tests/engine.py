"""A real vLLM, which `conformance/rig` installs and starts.

Invariant: it ends with its block.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RIG = Path(__file__).parents[3] / "conformance/rig/engine"
ANY_PORTS = ("--port", "0", "--kv-port", "0", "--replay-port", "0")


@contextmanager
def engine(*options: str) -> Iterator[str]:
    """Its address, once it answers."""
    command = [sys.executable, str(RIG), "serve", *ANY_PORTS, *options, "--until-stdin-closes"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        try:
            line = started.stdout.readline()
            if not line:
                raise RuntimeError(f"no engine: {' '.join(command)}")
            yield str(json.loads(line)["base_url"])
        finally:
            started.stdin.close()
            started.wait()
