"""The examples, as somebody runs them; on a real vLLM with `--engine vllm`."""

import subprocess
import sys
from pathlib import Path

from . import process

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints; it has to end well."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_calls_of_frameworks_are_answered_as_vllm_answers_them(
    rollouts: process.Gateway,
) -> None:
    told = run("dropin_verl.py", rollouts.url)
    assert [line for line in told.splitlines() if line.startswith("ok ")] == [
        "ok verl, the weights stay",
        "ok verl, other weights",
        "ok OpenRLHF",
        "ok TRL",
        "ok SkyRL, colocated",
        "ok SkyRL and prime-rl, in flight",
    ]
    # Of woken weights' old KV nothing is kept, and a pause in flight keeps all of it.
    assert "wake -> serving: gpu=forgotten cpu=forgotten" in told
    assert "resume -> serving: gpu=preserved cpu=preserved" in told
