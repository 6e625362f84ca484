"""An `AsyncClient` with the face of a `Client`, so that every test holds for both.

Invariant: each method runs the asynchronous one, and nothing of the blocking client.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, cast

from anyio.from_thread import BlockingPortal

from fak_client import AsyncClient, Client
from fak_client.aio import AsyncRollout, AsyncRollouts


class Awaited:
    """An object whose coroutines are run to their ends."""

    def __init__(self, portal: BlockingPortal, inner: object) -> None:
        self._portal, self._inner = portal, inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = getattr(self._inner, name)
        if isinstance(found, AsyncRollouts):
            return Awaited(self._portal, found)
        if not iscoroutinefunction(found):
            return found
        return lambda *given, **named: self._portal.call(partial(found, *given, **named))

    def __call__(self, **options: Any) -> Any:  # noqa: ANN401
        begin = cast(Callable[..., AsyncRollout], self._inner)
        return self._block(begin(**options))

    @contextmanager
    def _block(self, rollout: AsyncRollout) -> Iterator[Any]:
        with self._portal.wrap_async_context_manager(rollout) as entered:
            yield Awaited(self._portal, entered)

    @contextmanager
    def events(self, **options: Any) -> Iterator[Iterator[Any]]:  # noqa: ANN401
        block = cast(AsyncClient, self._inner).events(**options)
        with self._portal.wrap_async_context_manager(block) as events:

            def each() -> Iterator[Any]:
                while True:
                    yield self._portal.call(events.__anext__)

            yield each()


def awaited(portal: BlockingPortal, client: AsyncClient) -> Client:
    return cast(Client, Awaited(portal, client))
