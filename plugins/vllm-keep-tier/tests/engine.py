"""Starts the rig's engine and speaks to it: the calls, the counters and a stream."""

import http.client
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

BLOCK_TOKENS = 32  # the rig's engine
ANY_PORTS = ("--port", "0", "--kv-port", "0", "--replay-port", "0")
WAIT_SECONDS = 60  # for a state that comes within a second on an idle machine

EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries_total"
LOADED_BYTES = "vllm:kv_offload_load_bytes_total"
STORED_BYTES = "vllm:kv_offload_store_bytes_total"
COUNTERS = (EXTERNAL_QUERIES, EXTERNAL_HITS, LOADED_BYTES, STORED_BYTES)


def prompt(first: int, blocks: int) -> list[int]:
    """Token ids of that many full blocks and one token, different for each `first`."""
    return [100 + (first * 997 + at * 31) % 3900 for at in range(blocks * BLOCK_TOKENS + 1)]


def wait_until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WAIT_SECONDS} s: {what}")
        time.sleep(0.02)


class Engine:
    """`options` are the rig's, `vllm` the engine's own; what the engine says is in the file `log`."""

    def __init__(
        self, *options: str, launcher: str | None = None, vllm: tuple[str, ...] = ()
    ) -> None:
        launcher = launcher or os.environ["FAK_RIG"]
        rig = [launcher, "serve", "--until-stdin-closes", *ANY_PORTS, *options]
        self._rig = subprocess.Popen(
            [*rig, "--", *vllm],
            # The rig has its own interpreter and builds the path of the engine's packages.
            env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self._rig.stdout.readline()
        if not line:
            raise RuntimeError("the engine did not start; the rig has said why")
        ready = json.loads(line)
        self.address, self.log = ready["base_url"].removeprefix("http://"), ready["log"]

    def stop(self) -> None:
        self._rig.stdin.close()
        self._rig.wait()
        self._rig.stdout.close()

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, text = self.raw(method, path, body)
        return status, json.loads(text) if text else None

    def raw(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_SECONDS)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"content-type": "application/json"},
            )
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def complete(self, tokens: list[int]) -> str:
        status, answer = self.call("POST", "/v1/completions", _request(tokens, 8))
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def stream(self, tokens: list[int], max_tokens: int) -> "Stream":
        return Stream(self.address, _request(tokens, max_tokens))

    def counters(self) -> dict[str, float]:
        """Summed over labels; a series that has not appeared yet is 0."""
        totals = dict.fromkeys(COUNTERS, 0.0)
        for line in self.raw("GET", "/metrics")[1].splitlines():
            name = line.partition("{")[0]
            if name in totals:
                totals[name] += float(line.rpartition(" ")[2])
        return totals

    def states(self) -> tuple[bool, bool]:
        paused = self.call("GET", "/is_paused")[1]["is_paused"]
        return paused, self.call("GET", "/is_sleeping")[1]["is_sleeping"]

    def arguments(self, path: str) -> list[str]:
        declared = self.call("GET", "/openapi.json")[1]["paths"][path]["post"]["parameters"]
        return [each["name"] for each in declared]


class Stream:
    """A streamed completion, read on a thread of its own."""

    def __init__(self, address: str, request: dict) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=WAIT_SECONDS)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        self._connection.request(
            "POST",
            "/v1/completions",
            json.dumps(request | options),
            {"content-type": "application/json"},
        )
        self.chunks: list[dict] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            self.chunks.extend(self._events())
        finally:
            self._connection.close()

    def _events(self) -> Iterator[dict]:
        for line in self._connection.getresponse():
            text = line.decode().removeprefix("data: ").strip()
            if text == "[DONE]":
                return
            if text:
                yield json.loads(text)

    def end(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the stream did not end"

    def finish_reason(self) -> str | None:
        reasons = [c["choices"][0]["finish_reason"] for c in self.chunks if c.get("choices")]
        return next((each for each in reasons if each), None)

    def completion_tokens(self) -> int | None:
        usage = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return usage[-1]["completion_tokens"] if usage else None

    def error(self) -> dict | None:
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)


def _request(tokens: list[int], max_tokens: int) -> dict:
    return {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
