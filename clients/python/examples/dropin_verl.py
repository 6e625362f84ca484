"""The calls by which RL frameworks drive vLLM, pointed at fak: only the address changes.

    python examples/dropin_verl.py [http://127.0.0.1:8080]

The orders are the frameworks' own; sources stand beside them, as read in November 2026. verl and
OpenRLHF call the engine in their own processes: over HTTP these are their calls. PUSH marks where
the trainer writes weights into the engines. That goes to the engines themselves: fak carries no
weights, and a client that sends /update_weights to the same address (TRL, SkyRL, prime-rl) needs
the engines' own for it. Weights that were woken by themselves count as replaced, and KV of the old
ones is dropped everywhere. Of weights that are written into an engine while it serves, fak learns
from /weight_info alone: give /finish_weight_update a weight_version.

Prints each call with its answer and the witness rows that it left. Exit status 1: a call was not
answered as vLLM answers it, or a worker does not serve at the end of a cycle.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from fak_client import Client

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Post:
    """One call, as the framework's HTTP client writes it."""

    path: str
    query: Pairs = ()
    body: object = None


PUSH = None
SLEEP_1 = Post("/sleep", (("level", "1"),))
SLEEP_2 = Post("/sleep", (("level", "2"),))
WAKE = Post("/wake_up")
WAKE_WEIGHTS = Post("/wake_up", (("tags", "weights"),))
WAKE_KV = Post("/wake_up", (("tags", "kv_cache"),))
WAKE_BOTH = Post("/wake_up", (("tags", "kv_cache"), ("tags", "weights")))
RESET = Post("/reset_prefix_cache")
RESET_ALL = Post("/reset_prefix_cache", (("reset_external", "true"),))

CYCLES: dict[str, tuple[Post | None, ...]] = {
    # verl/workers/rollout/vllm_rollout/vllm_async_server.py: COLOCATED, then HYBRID
    "verl, the weights stay": (SLEEP_1, WAKE_BOTH, RESET_ALL),
    "verl, other weights": (SLEEP_2, WAKE_WEIGHTS, PUSH, WAKE_KV, RESET_ALL),
    # openrlhf/trainer/ray/ppo_actor.py, with vllm_enable_sleep
    "OpenRLHF": (SLEEP_1, WAKE, RESET, PUSH, SLEEP_1, WAKE),
    # trl/generation/vllm_client.py: its server never sleeps
    "TRL": (PUSH, RESET),
    # skyrl: inference_servers/remote_inference_client.py
    "SkyRL, colocated": (
        SLEEP_2,
        WAKE_WEIGHTS,
        PUSH,
        WAKE_KV,
        Post("/reset_prefix_cache", body={"reset_running_requests": False}),
    ),
    # the same file, and prime_rl/utils/client.py
    "SkyRL and prime-rl, in flight": (
        Post("/pause", (("mode", "keep"), ("clear_cache", "false"))),
        PUSH,
        Post("/resume"),
    ),
}


def play(http: httpx.Client, cycle: tuple[Post | None, ...]) -> Iterator[str]:
    """Yields a line for each call; raises at the first that is not answered with success."""
    for post in cycle:
        if post is PUSH:
            yield "  (the trainer trains, and pushes the weights to the engines)"
            continue
        answer = http.post(post.path, params=httpx.QueryParams(post.query), json=post.body)
        path = answer.request.url.raw_path.decode()
        yield f"  POST {path:46} {answer.status_code} {answer.text[:200]}"
        answer.raise_for_status()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address", nargs="?", help="FAK_ADDR where it is not given")
    options = parser.parse_args()
    with Client(options.address) as fak:
        # Stands for the frameworks' own clients, which know a vLLM's address and API key.
        key = os.environ.get("FAK_KEY") or "none"
        headers = {"authorization": f"Bearer {key}"}
        http = httpx.Client(base_url=fak.address, headers=headers, timeout=120)
        for name, cycle in CYCLES.items():
            print(name)
            last = next(iter(fak.witness(newest_first=True, limit=1)), None)
            try:
                for line in play(http, cycle):
                    print(line)
            except httpx.HTTPError as error:
                print(f"FAIL {name}: {error}")
                return 1
            for row in fak.witness(after=last.seq if last else 0):
                kv = " ".join(f"{tier}={kv}" for tier, kv in row.tiers.items())
                print(f"    {row.seq} {row.worker} {row.action} -> {row.phase}: {kv}, {row.reason}")
            silent = [worker.id for worker in fak.workers() if not worker.serving]
            if silent:
                print(f"FAIL {name}: {', '.join(silent)} does not serve")
                return 1
            print(f"ok {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
