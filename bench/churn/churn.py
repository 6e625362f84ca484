#!/usr/bin/env python3
"""What a router does when an engine behind it is reset, sleeps and wakes: two real engines, one router.

Each phase sends the same 16 conversations through the router, 4 at once, and counts answers, hangs and
errors, and the prompt tokens that the engines prefilled again. Control calls go straight to the engines,
behind the router's back, as an operator's or a trainer's would. Exits with 1 if any request hung or
failed, or if a phase after the wake left one of the engines out. Only what vLLM and OpenAI's API offer is used, so that any router can be put in.
"""

import argparse
import concurrent.futures
import json
import sys
import time
import urllib.error
import urllib.request

CONVERSATIONS = 16
AT_ONCE = 4
CONTROL_SECONDS = 30
# Before the round after the wake, so that a router that probes has had its chance to look.
SETTLE_SECONDS = 2


def call(url: str, body: dict | None = None, method: str | None = None, timeout: float = 4.0) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read()


def counter(engines: list[str], name: str) -> float:
    """A counter, summed over the engines."""
    total = 0.0
    for engine in engines:
        for line in call(f"{engine}/metrics").decode().splitlines():
            if line.startswith(name + "{"):
                total += float(line.rsplit(" ", 1)[1])
    return total


def shares(options: argparse.Namespace, before: list[float]) -> list[float]:
    """Answers that each engine gave since."""
    now = [counter([engine], "vllm:request_success_total") for engine in options.engines]
    return [after - then for after, then in zip(now, before, strict=True)]


def ask(options: argparse.Namespace, number: int) -> str:
    """Sends one conversation; says how it went in a word or two."""
    system = f"You are agent number {number % 4} of the fleet. " + "Follow the rules of the house. " * 24
    user = f"item {number} " + f"v{number} " * 40
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": options.model, "messages": messages, "max_tokens": 4, "temperature": 0}
    try:
        call(f"{options.router}/v1/chat/completions", body, timeout=options.timeout)
        return "ok"
    except urllib.error.HTTPError as error:
        return f"http {error.code}"
    except OSError as error:
        return "hung" if "timed out" in str(error) else type(error).__name__


def phase(options: argparse.Namespace, name: str, by_all: bool = False) -> bool:
    """One round of all conversations; whether every one was answered, and, where it is to be so, by
    all engines."""
    before = shares(options, [0.0] * len(options.engines))
    prompt = counter(options.engines, "vllm:prompt_tokens_total")
    hits = counter(options.engines, "vllm:prefix_cache_hits_total")
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        ends = list(pool.map(lambda number: ask(options, number), range(CONVERSATIONS)))
    seconds = time.monotonic() - started
    prompt = counter(options.engines, "vllm:prompt_tokens_total") - prompt
    hits = counter(options.engines, "vllm:prefix_cache_hits_total") - hits
    answered = shares(options, before)
    by = " + ".join(f"{count:.0f}" for count in answered)
    counts = ", ".join(f"{ends.count(end)} {end}" for end in sorted(set(ends)))
    print(
        f"{name:24s} {counts:12s} by {by:8s} prompt {prompt:6.0f}  prefilled again {prompt - hits:6.0f}"
        f"  {seconds:5.1f} s",
        flush=True,
    )
    return set(ends) == {"ok"} and (all(answered) or not by_all)


def churn(options: argparse.Namespace) -> bool:
    first = options.engines[0]

    def control(engine: str, path: str) -> None:
        call(f"{engine}{path}", method="POST", timeout=CONTROL_SECONDS)

    for engine in options.engines:
        control(engine, "/reset_prefix_cache")
    whole = [phase(options, name) for name in ("cold", "warm", "warm again")]
    control(first, "/reset_prefix_cache")
    whole += [phase(options, name) for name in ("after a reset of A", "warm")]
    control(first, "/sleep?level=1")
    whole += [phase(options, name) for name in ("while A sleeps", "while A sleeps, again")]
    control(first, "/wake_up")
    time.sleep(SETTLE_SECONDS)
    whole += [phase(options, name, by_all=True) for name in ("after A woke", "warm")]
    return all(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", required=True, help="http://HOST:PORT")
    parser.add_argument("--engines", required=True, help="the two behind it, A first: URL,URL")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds until a request hung")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    sys.exit(0 if churn(options) else 1)


main()
