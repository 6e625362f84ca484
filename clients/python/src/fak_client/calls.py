"""What is sent for each question and action, and what its answer means. No I/O.

Invariant: what was not given is not sent, so that fak's own defaults hold; and an answer is taken
as what it says, never as a success that it does not say.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads
from typing import Generic, TypeVar, cast
from urllib.parse import quote

from .errors import Answered, BadAnswer, BadRequest, Failed, Refused, Unauthorized
from .model import Begun, Ended, Hold, RolloutResult, Session, WitnessRow, Worker
from .reading import Unreadable, read
from .words import Action, Disposition, Level, Mode, Tag, Weights

T = TypeVar("T")
R = TypeVar("R", bound=RolloutResult)
Json = object


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and how its answer is read."""

    method: str
    path: str
    parse: Callable[[object], T]
    query: Mapping[str, str] | None = None
    body: Mapping[str, Json] | None = None
    #: Takes as long as a drain and the engine do, which fak bounds.
    acts: bool = False
    #: What a rollout verb says of each worker.
    of_worker: type[RolloutResult] | None = None

    def answer(self, status: int, body: bytes) -> T:
        """The answer as it is meant, or the error that it is."""
        try:
            value = loads(body)
        except (JSONDecodeError, UnicodeDecodeError) as error:
            raise BadAnswer(f"{self.path}: status {status} without JSON") from error
        try:
            if 200 <= status < 300:
                return self.parse(value)
            raise failure(status, value, self.of_worker)
        except Unreadable as error:
            raise BadAnswer(f"{self.path}: {error}") from error


def failure(
    status: int, body: object, of_worker: type[RolloutResult] | None = None
) -> Answered | BadAnswer:
    """The error that fak answered with. Raises `Unreadable`."""
    error = body.get("error") if isinstance(body, dict) else None
    # An engine answers so to a path that it does not know; fak's own codes are words.
    is_engines = isinstance(error, dict) and status == 404 and isinstance(error.get("code"), int)
    if not isinstance(body, dict) or not isinstance(error, dict) or is_engines:
        return BadAnswer(
            f"status {status} without fak's error body; the address (FAK_ADDR) has to be that of "
            "a running fak serve, not of an engine"
        )
    row = body.get("row")
    workers = read_many(of_worker, body.get("workers", []), "workers") if of_worker else ()
    undone = [result for result in workers if result.outcome != "done"]
    message = [read(str, error.get("message"), "error.message")]
    message += [f"{end.worker} {end.outcome}: {end.error or end.reason}" for end in undone]
    code = str(error.get("code", ""))
    return _kind(status, code)(
        "; ".join(message),
        status=status,
        code=code,
        param=read(cast(type[str | None], str | None), error.get("param"), "error.param"),
        row=None if row is None else read(WitnessRow, row, "row"),
        workers=workers,
        sessions=read_many(str, body.get("sessions", []), "sessions"),
    )


def _kind(status: int, code: str) -> type[Answered]:
    if status in (401, 403):
        return Unauthorized
    # The call was sent, and its worker waits for weights: no repeat loads them.
    if code == "weights_not_proven":
        return Failed
    if status == 409:
        return Refused
    return BadRequest if 400 <= status < 500 else Failed


def read_many(kind: type[T], value: object, at: str) -> tuple[T, ...]:
    """Reads a list. Raises `Unreadable`."""
    if not isinstance(value, list):
        raise Unreadable(f"{at} has to be a list")
    return tuple(read(kind, item, f"{at}[{n}]") for n, item in enumerate(value))


def _one(kind: type[T]) -> Callable[[object], T]:
    return lambda value: read(kind, value)


def _many(kind: type[T]) -> Callable[[object], tuple[T, ...]]:
    return lambda value: read_many(kind, value, "the answer")


def segment(name: str) -> str:
    """A name as one segment of a path."""
    # A dot may stand in a name, though not be all of it: `..` would climb.
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def _given(**options: Json) -> dict[str, Json]:
    """The options that were given: neither absent nor a flag that is down."""
    kept = options.items()
    return {name: value for name, value in kept if value is not None and value is not False}


# Questions.


def workers() -> Call[tuple[Worker, ...]]:
    """Every worker."""
    return Call("GET", "/fak/v1/workers", _many(Worker))


def worker(name: str) -> Call[Worker]:
    """One worker."""
    return Call("GET", f"/fak/v1/workers/{segment(name)}", _one(Worker))


def sessions(*, worker: str | None, limit: int | None) -> Call[tuple[Session, ...]]:
    """Sessions, the last seen first."""
    query = _given(worker=worker, limit=limit)
    return Call("GET", "/fak/v1/sessions", _many(Session), query=_words(query))


def session(name: str) -> Call[Session]:
    """One session."""
    return Call("GET", f"/fak/v1/sessions/{segment(name)}", _one(Session))


def end_session(name: str) -> Call[None]:
    """Forgets a session's binding and totals."""
    return Call("DELETE", f"/fak/v1/sessions/{segment(name)}", lambda _: None)


def witness(
    *,
    worker: str | None,
    session: str | None,
    action: Action | None,
    kv: Disposition | None,
    after: int | None,
    limit: int | None,
    newest_first: bool,
) -> Call[tuple[WitnessRow, ...]]:
    """Rows of the ledger."""
    query = _given(worker=worker, session=session, action=action, kv=kv, limit=limit)
    # Row 0 is none, and `after` it are all.
    query.update({} if after is None else {"after": after})
    query.update({"newest_first": "true"} if newest_first else {})
    return Call("GET", "/fak/v1/witness", _many(WitnessRow), query=_words(query))


def _words(query: Mapping[str, Json]) -> dict[str, str]:
    return {name: str(value) for name, value in query.items()}


def events() -> Call[None]:
    """The ledger as it is written; its answer is a stream."""
    return Call("GET", "/fak/v1/events", lambda _: None)


def holds() -> Call[tuple[Hold, ...]]:
    """Workers that a rollout holds."""

    def parse(value: object) -> tuple[Hold, ...]:
        held = value.get("holds") if isinstance(value, dict) else None
        return read_many(Hold, held, "holds")

    return Call("GET", "/fak/v1/rollout", parse)


# Actions.


@dataclass(frozen=True)
class Target:
    """Whom an action is for, and who says so."""

    worker: str | None
    session: str | None
    force: bool = False
    holder: str | None = None

    def call(self, action: str, options: Mapping[str, Json]) -> Call[WitnessRow]:
        """The action, with its options."""
        if (self.worker is None) == (self.session is None):
            raise ValueError(f"{action} needs either worker or session, and not both")
        kind, name = ("workers", self.worker) if self.worker else ("sessions", self.session)
        path = f"/fak/v1/{kind}/{segment(name or '')}/{action}"
        body = {**options, **_given(force=self.force, holder=self.holder)}
        return Call("POST", path, _one(WitnessRow), body=body, acts=True)


def pause(
    target: Target,
    *,
    mode: Mode | None,
    clear: bool,
    keep_tier: bool,
    allow_evict: bool,
    drain_ms: int | None,
) -> Call[WitnessRow]:
    """Stops a worker's scheduler."""
    options = _given(mode=mode, clear=clear, keep_tier=keep_tier, allow_evict=allow_evict)
    return target.call("pause", options | _drain(drain_ms))


def resume(target: Target) -> Call[WitnessRow]:
    """Starts it again."""
    return target.call("resume", {})


def sleep(
    target: Target,
    *,
    level: Level,
    mode: Mode | None,
    keep_tier: bool,
    allow_evict: bool,
    drain_ms: int | None,
) -> Call[WitnessRow]:
    """Frees a worker's device memory."""
    options = _given(level=level, mode=mode, keep_tier=keep_tier, allow_evict=allow_evict)
    return target.call("sleep", options | _drain(drain_ms))


def wake(target: Target, *, tags: tuple[Tag, ...], weights: Weights | None) -> Call[WitnessRow]:
    """Takes it back."""
    return target.call("wake", _given(tags=list(tags) or None, weights=weights))


def reset(target: Target, *, external: bool, running: bool) -> Call[WitnessRow]:
    """Drops a worker's prefix cache."""
    return target.call("reset", _given(external=external, running=running))


def quarantine(target: Target, *, flush: bool, isolate: bool) -> Call[WitnessRow]:
    """Puts a session's span out of reach."""
    if flush == isolate:
        raise ValueError("quarantine needs either flush or isolate, and not both")
    return target.call("quarantine", _given(flush=flush, isolate=isolate))


def cancel(worker: str) -> Call[WitnessRow]:
    """Ends what waits for requests to end; the row is of that action."""
    return Call("POST", f"/fak/v1/workers/{segment(worker)}/cancel", _one(WitnessRow), acts=True)


def _drain(drain_ms: int | None) -> dict[str, Json]:
    # 0 is a drain as well: none.
    return {} if drain_ms is None else {"drain_ms": drain_ms}


# Rollouts.


def rollout_begin(
    *,
    workers: tuple[str, ...] | None,
    level: Level | None,
    mode: Mode | None,
    keep_tier: bool,
    allow_evict: bool,
    drain_ms: int | None,
    holder: str | None,
    canary: bool,
) -> Call[tuple[Begun, ...]]:
    """Drains workers, puts them to sleep and holds them."""
    body = _given(
        workers=None if workers is None else list(workers),
        level=level,
        mode=mode,
        keep_tier=keep_tier,
        allow_evict=allow_evict,
        holder=holder,
        canary=canary,
    )

    def parse(value: object) -> tuple[Begun, ...]:
        begun = _all_done(Begun, value)
        unsafe = [result.worker for result in begun if not result.gpu_free]
        if unsafe:
            raise Unreadable(f"done, though the GPU is not free on {', '.join(unsafe)}")
        return begun

    path = "/fak/v1/rollout/begin"
    return Call("POST", path, parse, body=body | _drain(drain_ms), acts=True, of_worker=Begun)


def rollout_end(
    *,
    weights: Weights,
    workers: tuple[str, ...] | None,
    holder: str | None,
    weight_version: str | None,
    stage: str | None,
    canary: bool | None,
) -> Call[tuple[Ended, ...]]:
    """Wakes workers and lets them go; with `stage="weights"`, wakes the weights' memory alone."""
    body = _given(
        weights=weights,
        workers=None if workers is None else list(workers),
        holder=holder,
        weight_version=weight_version,
        stage=stage,
    )
    # That it is not to be compared has to be said: where nothing is said, it is if there is one.
    body.update({} if canary is None else {"canary": canary})

    def parse(value: object) -> tuple[Ended, ...]:
        ended = _all_done(Ended, value)
        silent = [result.worker for result in ended if not result.serving]
        if silent and stage is None:
            raise Unreadable(f"done, though {', '.join(silent)} does not serve")
        return ended

    return Call("POST", "/fak/v1/rollout/end", parse, body=body, acts=True, of_worker=Ended)


def _all_done(kind: type[R], value: object) -> tuple[R, ...]:
    if not isinstance(value, dict) or value.get("done") is not True:
        raise Unreadable("a success that does not say done")
    results = read_many(kind, value.get("workers"), "workers")
    undone = [result.worker for result in results if result.outcome != "done"]
    if undone or not results:
        raise Unreadable(f"done, though not on {', '.join(undone) or 'any worker'}")
    return results
