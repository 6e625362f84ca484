"""Where fak is, what it is shown, and what a broken connection means.

Invariant: the admin key goes to the configured address alone, and is shown nowhere.
"""

import os
from typing import Any
from urllib.parse import urlsplit

import httpx

from .errors import FakError, Unreachable

DEFAULT = "http://127.0.0.1:8080"
#: Seconds to connect, and for what only reads.
CONNECT_S = 5.0
READ_S = 30.0
#: fak sends a comment every 15 s on a stream that has nothing to tell.
SILENCE_S = 60.0

READS = httpx.Timeout(READ_S, connect=CONNECT_S)
#: An action takes as long as its drain and the engine do, which fak bounds.
ACTS = httpx.Timeout(READ_S, connect=CONNECT_S, read=None)
STREAMS = httpx.Timeout(READ_S, connect=CONNECT_S, read=SILENCE_S)


def settings(address: str | None, key: str | None) -> dict[str, Any]:
    """What an httpx client is made with. `FAK_ADDR` and `FAK_KEY` stand in for what is not given.

    Raises `ValueError` for an address or a key that cannot be one.
    """
    base = base_url(address or os.environ.get("FAK_ADDR") or DEFAULT)
    key = key if key is not None else os.environ.get("FAK_KEY")
    if key and not key.isascii():
        raise ValueError("the key (FAK_KEY) holds a character that no HTTP header can carry")
    if key and any(ord(character) < 32 or ord(character) == 127 for character in key):
        raise ValueError("the key (FAK_KEY) holds a control character")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # No proxy and no .netrc of the environment's: control goes to the configured address alone.
    return {"base_url": base, "headers": headers, "timeout": READS, "trust_env": False}


def base_url(address: str) -> str:
    """`http://host:port` of an address with or without the scheme."""
    wrong = ValueError(f"address {address!r} (FAK_ADDR) has to be http://host:port")
    try:
        url = urlsplit(address if "://" in address else f"http://{address}")
        port = url.port  # raises where it is no number
    except ValueError:
        raise wrong from None
    is_bare = url.path in ("", "/") and not url.query and not url.fragment
    if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc or not is_bare:
        raise wrong
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{url.scheme}://{host}" + (f":{port}" if port is not None else "")


def broken(error: httpx.HTTPError, base: httpx.URL) -> FakError:
    """The error that a connection's failure is."""
    never_sent = isinstance(
        error,
        (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol),
    )
    at = f"{base.host}:{base.port}" if base.port else base.host
    if never_sent:
        return Unreachable(f"no fak answers at {at}: {error}", sent=False)
    told = str(error) or type(error).__name__
    return Unreachable(f"{at} gave no whole answer: {told}", sent=True)


def ended() -> Unreachable:
    """A stream that never ends by itself did."""
    return Unreachable("fak ended the stream; go on after the last event's id", sent=True)
