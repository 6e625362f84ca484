"""Completions through fak's data plane, as any OpenAI client sends them."""

from dataclasses import dataclass

import httpx

#: Several blocks of the simulator's cache.
PROMPT = "A prompt that fills a few blocks of cache, so that there is something to hold warm."


@dataclass(frozen=True)
class Answer:
    """What became of one."""

    cached: int
    kv: str
    warm: str


def ask(url: str, session: str | None = None, prompt: str = PROMPT) -> Answer:
    headers = {} if session is None else {"x-fak-session": session}
    body = {"model": "sim", "prompt": prompt, "max_tokens": 4}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        response = http.post("/v1/completions", json=body)
    response.raise_for_status()
    details = response.json()["usage"]["prompt_tokens_details"]
    return Answer(
        details["cached_tokens"],
        response.headers["x-fak-kv"],
        response.headers.get("x-fak-warm-tokens", ""),
    )
