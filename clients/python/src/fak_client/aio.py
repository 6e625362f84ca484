"""fak, asked from code that awaits.

Invariant: no action is sent twice by itself. Each method is one call of `calls`; what it sends and
how its answer is read stands there, for both clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Literal, TypeVar

import httpx

from . import calls, link
from .calls import Call, Target
from .model import Begun, Ended, Event, Hold, Session, WitnessRow, Worker
from .statement import Statement
from .stream import Reader
from .words import Action, Disposition, Level, Mode, Tag, Weights

T = TypeVar("T")


class AsyncClient:
    """One fak. Methods raise `FakError`s; a context manager, which closes its connections."""

    #: Where fak is: `http://host:port`, which is also the base of its OpenAI routes.
    address: str
    #: Sleep, train, wake.
    rollout: AsyncRollouts

    def __init__(
        self,
        address: str | None = None,
        key: str | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`FAK_ADDR` (http://127.0.0.1:8080 by default) and `FAK_KEY` where they are not given.

        Raises `ValueError` for an address or a key that cannot be one.
        """
        settings = link.settings(address, key)
        self.address = settings["base_url"]
        self._http = httpx.AsyncClient(transport=transport, **settings)
        self.rollout = AsyncRollouts(self)

    async def __aenter__(self) -> AsyncClient:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes its connections."""
        await self.close()

    async def close(self) -> None:
        """Closes its connections."""
        await self._http.aclose()

    async def run(self, call: Call[T]) -> T:
        """Makes one call."""
        try:
            response = await self._http.request(
                call.method,
                call.path,
                params=call.query,
                json=call.body,
                timeout=link.ACTS if call.acts else link.READS,
            )
        except httpx.HTTPError as error:
            raise link.broken(error, self._http.base_url) from error
        return call.answer(response.status_code, response.content)

    async def workers(self) -> tuple[Worker, ...]:
        """Every worker."""
        return await self.run(calls.workers())

    async def worker(self, worker: str) -> Worker:
        """One worker."""
        return await self.run(calls.worker(worker))

    async def sessions(
        self, *, worker: str | None = None, limit: int | None = None
    ) -> tuple[Session, ...]:
        """Sessions, the last seen first."""
        return await self.run(calls.sessions(worker=worker, limit=limit))

    async def session(self, session: str) -> Session:
        """One session."""
        return await self.run(calls.session(session))

    async def end_session(self, session: str) -> None:
        """Forgets a session's binding and totals."""
        await self.run(calls.end_session(session))

    async def witness(
        self,
        *,
        worker: str | None = None,
        session: str | None = None,
        action: Action | None = None,
        kv: Disposition | None = None,
        after: int | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> tuple[WitnessRow, ...]:
        """Rows of the ledger, the oldest first; 1,000 at most."""
        return await self.run(
            calls.witness(
                worker=worker,
                session=session,
                action=action,
                kv=kv,
                after=after,
                limit=limit,
                newest_first=newest_first,
            )
        )

    @asynccontextmanager
    async def events(self, *, after: int | None = None) -> AsyncIterator[AsyncIterator[Event]]:
        """The ledger as it is written, from the block's start on, or after the event with that id.

        Never ends by itself: once fak does, or the connection, the iterator raises `Unreachable`.
        """
        call = calls.events()
        headers = {} if after is None else {"last-event-id": str(after)}
        stream = self._http.stream(call.method, call.path, headers=headers, timeout=link.STREAMS)
        with _told(self._http):
            async with stream as response:
                if response.status_code != 200:
                    call.answer(response.status_code, await response.aread())
                yield self._events(response)

    async def _events(self, response: httpx.Response) -> AsyncIterator[Event]:
        reader = Reader()
        with _told(self._http):
            async for line in response.aiter_lines():
                for event in reader.line(line):
                    yield event
        raise link.ended()

    async def pause(
        self,
        *,
        worker: str | None = None,
        session: str | None = None,
        mode: Mode | None = None,
        clear: bool = False,
        keep_tier: bool = False,
        allow_evict: bool = False,
        drain_ms: int | None = None,
        force: bool = False,
        holder: str | None = None,
    ) -> WitnessRow:
        """Stops a worker's scheduler. Drops nothing, unless `clear`."""
        return await self.run(
            calls.pause(
                Target(worker, session, force, holder),
                mode=mode,
                clear=clear,
                keep_tier=keep_tier,
                allow_evict=allow_evict,
                drain_ms=drain_ms,
            )
        )

    async def resume(
        self,
        *,
        worker: str | None = None,
        session: str | None = None,
        force: bool = False,
        holder: str | None = None,
    ) -> WitnessRow:
        """Starts it again."""
        return await self.run(calls.resume(Target(worker, session, force, holder)))

    async def sleep(
        self,
        *,
        level: Level,
        worker: str | None = None,
        session: str | None = None,
        mode: Mode | None = None,
        keep_tier: bool = False,
        allow_evict: bool = False,
        drain_ms: int | None = None,
        force: bool = False,
        holder: str | None = None,
    ) -> WitnessRow:
        """Frees the device's memory: the gpu tier is dropped, a connector's unless `keep_tier`."""
        return await self.run(
            calls.sleep(
                Target(worker, session, force, holder),
                level=level,
                mode=mode,
                keep_tier=keep_tier,
                allow_evict=allow_evict,
                drain_ms=drain_ms,
            )
        )

    async def wake(
        self,
        *,
        worker: str | None = None,
        session: str | None = None,
        tags: Iterable[Tag] = (),
        weights: Weights | None = None,
        force: bool = False,
        holder: str | None = None,
    ) -> WitnessRow:
        """Takes the device's memory back: all of it, or what `tags` name."""
        target = Target(worker, session, force, holder)
        return await self.run(calls.wake(target, tags=tuple(tags), weights=weights))

    async def reset(
        self,
        *,
        worker: str | None = None,
        session: str | None = None,
        external: bool = False,
        running: bool = False,
        force: bool = False,
        holder: str | None = None,
    ) -> WitnessRow:
        """Drops the prefix cache; a connector's tiers as well where `external`."""
        target = Target(worker, session, force, holder)
        return await self.run(calls.reset(target, external=external, running=running))

    async def quarantine(
        self,
        *,
        session: str,
        flush: bool = False,
        isolate: bool = False,
        force: bool = False,
        holder: str | None = None,
    ) -> WitnessRow:
        """Drops its worker's whole cache (`flush`), or gives the session a new salt (`isolate`)."""
        target = Target(None, session, force, holder)
        return await self.run(calls.quarantine(target, flush=flush, isolate=isolate))

    async def cancel(self, *, worker: str) -> WitnessRow:
        """Ends an action that waits for requests to end: nothing of it is done.

        The row is of that action. Raises `Refused` where nothing waits.
        """
        return await self.run(calls.cancel(worker))


@contextmanager
def _told(http: httpx.AsyncClient) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise link.broken(error, http.base_url) from error


class AsyncRollouts:
    """The rollout verbs; called, a block that begins a rollout and ends it."""

    def __init__(self, client: AsyncClient) -> None:
        """Of a client."""
        self._client = client

    async def holds(self) -> tuple[Hold, ...]:
        """Workers that a rollout holds."""
        return await self._client.run(calls.holds())

    async def begin(
        self,
        *,
        workers: Iterable[str] | None = None,
        level: Level | None = None,
        mode: Mode | None = None,
        keep_tier: bool = False,
        allow_evict: bool = False,
        drain_ms: int | None = None,
        holder: str | None = None,
        canary: bool = False,
    ) -> tuple[Begun, ...]:
        """Drains workers, all by default, puts them to sleep and holds them.

        When it returns, their GPUs are free. Raises `Refused` or `Failed`, with a result for each
        worker, where that is not so of one of them.
        """
        return await self._client.run(
            calls.rollout_begin(
                workers=None if workers is None else tuple(workers),
                level=level,
                mode=mode,
                keep_tier=keep_tier,
                allow_evict=allow_evict,
                drain_ms=drain_ms,
                holder=holder,
                canary=canary,
            )
        )

    async def end(
        self,
        *,
        weights: Weights,
        workers: Iterable[str] | None = None,
        holder: str | None = None,
        weight_version: str | None = None,
        stage: Literal["weights"] | None = None,
        canary: bool | None = None,
    ) -> tuple[Ended, ...]:
        """Wakes workers, by default all that the holder holds, and lets them go.

        What other weights computed is evicted. A worker that the holder does not hold is refused.

        When it returns, they serve; with `stage="weights"` only the weights' memory is awake, to be
        written to. Raises `Refused` or `Failed`, with a result for each worker.
        """
        return await self._client.run(
            calls.rollout_end(
                weights=weights,
                workers=None if workers is None else tuple(workers),
                holder=holder,
                weight_version=weight_version,
                stage=stage,
                canary=canary,
            )
        )

    def __call__(
        self,
        *,
        workers: Iterable[str] | None = None,
        level: Level | None = None,
        mode: Mode | None = None,
        keep_tier: bool = False,
        allow_evict: bool = False,
        drain_ms: int | None = None,
        holder: str | None = None,
        canary: bool = False,
    ) -> AsyncRollout:
        """A block in which the GPUs are the trainer's.

        In it, say `same()`, `loaded(version)` or `changed(version)`. An exception, or silence,
        leaves the workers asleep and held: nothing unproven is served.
        """
        named = None if workers is None else tuple(workers)
        begin = calls.rollout_begin(
            workers=named,
            level=level,
            mode=mode,
            keep_tier=keep_tier,
            allow_evict=allow_evict,
            drain_ms=drain_ms,
            holder=holder,
            canary=canary,
        )
        return AsyncRollout(self._client, begin, named, holder)


class AsyncRollout(Statement):
    """A block of `AsyncClient.rollout`."""

    def __init__(
        self,
        client: AsyncClient,
        begin: Call[tuple[Begun, ...]],
        workers: tuple[str, ...] | None,
        holder: str | None,
    ) -> None:
        """Not begun yet."""
        super().__init__()
        self._client, self._begin, self._workers, self._holder = client, begin, workers, holder

    async def __aenter__(self) -> AsyncRollout:
        """Begins it."""
        try:
            self.begun = await self._client.run(self._begin)
        except BaseException as error:
            self._not_begun(error, self._holder)
            raise
        return self

    async def wake_weights(self) -> tuple[Ended, ...]:
        """Wakes the weights' memory alone, so that new weights can be written into it."""
        return await self._client.rollout.end(
            weights="unproven", workers=self._workers, holder=self._holder, stage="weights"
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it as was said; or leaves the workers asleep and held, and says so."""
        if error is not None:
            self._leave(error, self._holder)
            return
        weights, version = self._word(self._holder)
        self.ended = await self._client.rollout.end(
            weights=weights, workers=self._workers, holder=self._holder, weight_version=version
        )
