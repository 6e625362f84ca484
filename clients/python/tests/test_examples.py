"""The examples, as somebody runs them; on a real vLLM with `--engine vllm`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from fak_client import Client

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


def test_what_survives_a_rollout_on_the_same_weights_is_reused(rollouts: process.Gateway) -> None:
    first, second = loop(rollouts, "same")
    assert first["tier_hits"] == 0
    assert second["tier_hits"] > 0
    assert second["claimed_tokens"]["cpu"] > 0
    assert second["cached_tokens"] >= sum(second["claimed_tokens"].values())


def test_nothing_of_old_weights_is_reused_after_a_rollout(rollouts: process.Gateway) -> None:
    first, second = loop(rollouts, "loaded")
    assert (first["tier_hits"], second["tier_hits"]) == (0, 0)
    assert [first["weight_versions"], second["weight_versions"]] == [["v1"], ["v2"]]
    assert "cpu" not in second["claimed_tokens"]


def loop(gateway: process.Gateway, weights: str) -> list[dict[str, Any]]:
    # Whatever ran on the engine before is out of the way.
    with Client(gateway.url) as fak:
        fak.reset(worker="w0", external=True)
    rounds = json.loads(run("rollout_loop.py", gateway.url, "--weights", weights))
    assert [one["rollouts"] for one in rounds] == [8, 8]
    return cast(list[dict[str, Any]], rounds)
