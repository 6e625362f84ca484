"""An RL loop that shares its GPUs with vLLM: generate, sleep, train, wake; through fak.

    python examples/rollout_loop.py [http://127.0.0.1:8080] [--weights same|loaded]

What stands in for a trainer here: `train` computes nothing. With `--weights same` the policy does
not move between two rounds, as while gradients are accumulated, and the KV in the engines' host
memory is worth keeping. With `--weights loaded` the trainer writes new weights into the engines:
`push` only tells each engine another weight version, which is also all that can be seen of a real
transfer from outside. Either way the KV that survives is what the next round can reuse.

Prints what fak claimed and the engines reused, round by round, and the witness rows in between.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import httpx

from fak_client import Client, WitnessRow, Worker

HOLDER = "rollout-loop"
RULES = "You are given a sum. Think aloud, one step a line, then write the result alone. " * 12
QUESTIONS = [f"{RULES}\n{n} + {n + 7} =" for n in range(4)]
SAMPLES = 2
ROUNDS = 2
#: Prompt tokens that the engines found in a connector's tier, under fak's name for it.
TIER_HITS = "fak_serving_external_prefix_cache_hits_total"


@dataclass(frozen=True)
class Rollout:
    """One sampled answer."""

    text: str
    prompt_tokens: int
    #: Of these, what the engine took from its caches, and what fak had claimed, tier by tier.
    cached_tokens: int
    claimed_tokens: dict[str, int]


@dataclass(frozen=True)
class Round:
    """What a round reused."""

    rollouts: int
    prompt_tokens: int
    cached_tokens: int
    claimed_tokens: dict[str, int]
    tier_hits: int
    weight_versions: list[str | None]


def sample(http: httpx.Client, model: str, prompt: str, seed: int) -> Rollout:
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 1.0, "seed": seed}
    answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    told, usage = answer.json(), answer.json()["usage"]
    # As in `gpu=512,cpu=1024`; absent where nothing is claimed.
    claims = answer.headers.get("x-fak-warm-tokens", "").split(",")
    claimed = {
        tier: int(count) for tier, _, count in (claim.partition("=") for claim in claims) if count
    }
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Rollout(told["choices"][0]["text"], usage["prompt_tokens"], cached, claimed)


def generate(http: httpx.Client, model: str) -> list[Rollout]:
    """Samples each question a few times, all at once."""
    asks = [(question, seed) for seed in range(SAMPLES) for question in QUESTIONS]
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(lambda ask: sample(http, model, *ask), asks))


def train(rollouts: list[Rollout]) -> float:
    """Stands for the optimizer, which has the GPUs meanwhile."""
    return sum(len(rollout.text) for rollout in rollouts) / len(rollouts)


def push(workers: Iterable[Worker], version: str) -> None:
    """Stands for the transfer of new weights into the engines, which goes past fak."""
    for worker in workers:
        body = {"new_version": version}
        httpx.post(f"{worker.url}/update_weight_version", json=body).raise_for_status()


def tier_hits(http: httpx.Client) -> int:
    lines = http.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(TIER_HITS))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def show(row: WitnessRow | None) -> None:
    if row is not None:
        tiers = " ".join(f"{tier}={kv}" for tier, kv in row.tiers.items())
        said = f"{row.action} -> {row.phase}, {tiers}, weights {row.weight_version}, {row.reason}"
        print(f"  row {row.seq} {row.worker} {said}", file=sys.stderr)


def play(fak: Client, weights: str) -> list[Round]:
    workers = fak.workers()
    model = workers[0].models[0]
    rounds = []
    key = os.environ.get("OPENAI_API_KEY") or "none"  # a client's, where fak asks for one
    with httpx.Client(base_url=fak.address, headers=bearer(key), timeout=120) as http:
        hits = tier_hits(http)
        for number in range(ROUNDS):
            rollouts = generate(http, model)
            # The tier is kept where the engine can keep it, and given up where it cannot. Nothing
            # runs on the GPUs once the block is entered; if anything in it fails, the engines stay
            # asleep and held.
            with fak.rollout(keep_tier=True, allow_evict=True, holder=HOLDER) as gpus:
                before, hits = hits, tier_hits(http)
                for begun in gpus.begun:
                    show(begun.row)
                reward = train(rollouts)
                if weights == "same":
                    gpus.same()
                else:
                    gpus.wake_weights()
                    push(workers, f"v{number + 1}")
                    gpus.loaded(f"v{number + 1}")
            for ended in gpus.ended:
                for row in ended.rows:
                    show(row)
            claimed: Counter[str] = Counter()
            for rollout in rollouts:
                claimed.update(rollout.claimed_tokens)
            rounds.append(
                Round(
                    rollouts=len(rollouts),
                    prompt_tokens=sum(rollout.prompt_tokens for rollout in rollouts),
                    cached_tokens=sum(rollout.cached_tokens for rollout in rollouts),
                    claimed_tokens=dict(claimed),
                    tier_hits=hits - before,
                    weight_versions=[ended.weight_version for ended in gpus.ended],
                )
            )
            print(f"  round {number}, mean reward {reward:.1f}: {rounds[-1]}", file=sys.stderr)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address", nargs="?", help="FAK_ADDR where it is not given")
    parser.add_argument("--weights", choices=["same", "loaded"], default="same")
    options = parser.parse_args()
    with Client(options.address) as fak:
        rounds = play(fak, options.weights)
    print(json.dumps([asdict(one) for one in rounds], indent=1))


if __name__ == "__main__":
    main()
