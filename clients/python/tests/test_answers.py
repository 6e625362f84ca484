"""What is sent, and what each kind of answer means, without a fak."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import getmembers, isfunction, signature
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from fak_client import (
    AsyncClient,
    BadAnswer,
    Begun,
    Client,
    Ended,
    Failed,
    Refused,
    Session,
    Standing,
    Stream,
    Unreachable,
    WitnessRow,
    Worker,
    calls,
    words,
)
from fak_client.aio import AsyncRollout, AsyncRollouts
from fak_client.calls import Target
from fak_client.client import Rollout, Rollouts
from fak_client.link import base_url
from fak_client.reading import Unreadable, read
from fak_client.stream import Reader

from .conftest import Connect

OPENAPI = Path(__file__).parents[3] / "crates/fak/src/admin/openapi.json"

ROW: dict[str, Any] = {
    "seq": 12,
    "at": "2026-11-29T18:00:00Z",
    "worker": "w0",
    "rank": None,
    "incarnation": "a",
    "session": None,
    "action": "sleep",
    "level": 1,
    "phase": "sleeping",
    "kv": "forgotten",
    "tiers": {"gpu": "forgotten", "cpu": "preserved"},
    "weight_version": "v7",
    "warm_demoted": True,
    "serving": False,
    "evidence": "observed",
    "asked": {"level": 1},
    "answered": None,
    "observed": [1],
    "reason": "confirmed",
    "standing": {
        "stale": ["cpu"],
        "weights_proven": True,
        "suspect": False,
        "weights_epoch": None,
    },
}


def test_a_row_is_read_as_it_is_and_fields_of_a_later_fak_are_passed_over() -> None:
    row = read(WitnessRow, {**ROW, "mood": "sleepy"})
    assert row.tiers == {"gpu": "forgotten", "cpu": "preserved"}
    assert (row.asked, row.answered, row.observed) == ({"level": 1}, None, [1])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("phase", "napping", "row.phase is 'napping'; it has to be 'serving' or"),
        ("kv", None, "row.kv is None"),
        ("seq", True, "row.seq is True; it has to be int"),
        ("seq", 1.5, "row.seq is 1.5"),
        ("serving", 0, "row.serving is 0; it has to be bool"),
        ("tiers", {"tape": "unknown"}, "a key of row.tiers is 'tape'"),
        ("tiers", {"gpu": "warm"}, "row.tiers.gpu is 'warm'"),
        ("worker", 7, "row.worker is 7"),
    ],
)
def test_what_is_outside_its_vocabulary_or_type_is_not_passed_on(
    name: str, value: object, told: str
) -> None:
    with pytest.raises(Unreadable, match=told):
        read(WitnessRow, {**ROW, name: value}, "row")


def test_a_field_that_is_missing_is_told() -> None:
    with pytest.raises(Unreadable, match=r"row.kv is missing"):
        read(WitnessRow, {name: value for name, value in ROW.items() if name != "kv"}, "row")


def test_what_was_not_given_is_not_sent() -> None:
    target = Target("w0", None)
    slept = calls.sleep(
        target, level=1, mode=None, keep_tier=False, allow_evict=False, drain_ms=None
    )
    assert slept.body == {"level": 1}
    slept = calls.sleep(target, level=2, mode="keep", keep_tier=True, allow_evict=True, drain_ms=0)
    assert slept.body == {
        "level": 2,
        "mode": "keep",
        "keep_tier": True,
        "allow_evict": True,
        "drain_ms": 0,
    }
    assert calls.resume(Target(None, "s/1", True, "trainer")).body == {
        "force": True,
        "holder": "trainer",
    }
    assert calls.resume(Target(None, "s/1")).path == "/fak/v1/sessions/s%2F1/resume"
    assert calls.sessions(worker=None, limit=0).query == {"limit": "0"}


def test_an_action_is_for_a_worker_or_for_a_session() -> None:
    for target in [Target(None, None), Target("w0", "s1")]:
        with pytest.raises(ValueError, match="either worker or session"):
            calls.resume(target)
    with pytest.raises(ValueError, match="either flush or isolate"):
        calls.quarantine(Target(None, "s"), flush=True, isolate=True)


def begin(**changes: object) -> dict[str, Any]:
    return {
        "worker": "w0",
        "outcome": "done",
        "phase": "sleeping",
        "gpu_free": True,
        "running": 0,
        "held_by": "trainer-7",
        "reason": "confirmed",
        "row": ROW,
        "error": None,
        **changes,
    }


BEGIN = calls.rollout_begin(
    workers=None,
    level=None,
    mode=None,
    keep_tier=False,
    allow_evict=False,
    drain_ms=None,
    holder=None,
    canary=False,
)


def answered(status: int, body: object) -> object:
    return BEGIN.answer(status, json.dumps(body).encode())


def test_a_partial_rollout_raises_with_what_became_of_each_worker() -> None:
    ends = [begin(), begin(worker="w1", outcome="failed", gpu_free=False, row=None, error="gone")]
    told = {"error": {"message": "done on 1 of 2", "code": 502, "param": None}, "done": False}
    with pytest.raises(Failed, match="done on 1 of 2") as failed:
        answered(502, {**told, "workers": ends})
    assert [result.outcome for result in failed.value.workers] == ["done", "failed"]
    assert failed.value.workers[1].error == "gone"
    with pytest.raises(Refused):
        answered(409, {**told, "workers": ends})


@pytest.mark.parametrize(
    "body",
    [
        {"done": False, "workers": [begin()]},
        {"done": True, "workers": []},
        {"done": True, "workers": [begin(outcome="refused")]},
        {"done": True, "workers": [begin(gpu_free=False)]},
        {"workers": [begin()]},
        [],
    ],
)
def test_a_success_that_says_less_than_done_is_none(body: object) -> None:
    with pytest.raises(BadAnswer):
        answered(200, body)


@pytest.mark.parametrize("status", [200, 301, 404, 502])
@pytest.mark.parametrize("body", [b"<html>", b"", b"\xff", b'{"error":"no"}', b"[1]", b"null"])
def test_what_does_not_speak_as_fak_is_told(status: int, body: bytes) -> None:
    with pytest.raises(BadAnswer):
        calls.workers().answer(status, body)


def test_an_engine_that_answers_in_faks_place_is_said_to_be_none() -> None:
    error = {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}
    for body in [{"detail": "Not Found"}, {"error": error}]:
        with pytest.raises(BadAnswer, match=r"FAK_ADDR.*not of an engine"):
            calls.workers().answer(404, json.dumps(body).encode())


def test_an_address_is_a_host_and_a_port() -> None:
    for given, is_read in [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://h:1/", "http://h:1"),
        ("https://h", "https://h"),
        ("[::1]:80", "http://[::1]:80"),
    ]:
        assert base_url(given) == is_read
    for wrong in ["", "ftp://h", "http://h/v1", "http://u:p@h", "http://h:x", "http://h?k=v"]:
        with pytest.raises(ValueError, match="FAK_ADDR"):
            base_url(wrong)
    for key in ["a\nb", "ü"]:
        with pytest.raises(ValueError, match="FAK_KEY"):
            Client("h:1", key)


def test_an_event_is_whole_or_not_there() -> None:
    reader = Reader()
    lines = [": hello", "id: 7", "event: witness", f"data: {json.dumps(ROW)}"]
    assert [event for line in lines for event in reader.line(line)] == []
    (event,) = reader.line("")
    assert (event.id, event.kind, event.row.seq) == (7, "witness", 12)
    assert list(reader.line("")) == []  # after a comment, say
    for broken in ["data: {", "data: {}", f"data: {json.dumps(ROW)}"]:
        list(reader.line(broken))
        with pytest.raises(BadAnswer):
            list(reader.line(""))
    with pytest.raises(BadAnswer, match="more than"):
        list(reader.line("data: " + "x" * (1 << 20)))


@contextmanager
def deaf() -> Iterator[tuple[str, list[bytes]]]:
    """Takes requests and hangs up without an answer."""
    taken: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    taken.append(connection.recv(65536))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", taken
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_an_action_is_sent_once_whatever_becomes_of_it(connect: Connect) -> None:
    with deaf() as (address, taken):
        with pytest.raises(Unreachable) as lost:
            connect(address).sleep(worker="w0", level=1)
        assert lost.value.sent
        assert [request.split()[:2] for request in taken] == [
            [b"POST", b"/fak/v1/workers/w0/sleep"]
        ]


def test_a_rollout_that_may_have_begun_says_so(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with deaf() as (address, _):
        with pytest.raises(Unreachable), connect(address).rollout(holder="trainer-7"):
            pass
        assert "a rollout of trainer-7 may have begun" in caplog.text
        caplog.clear()
    with pytest.raises(Unreachable), connect(address).rollout(holder="trainer-7"):
        pass
    assert caplog.text == "", "nobody was there to begin it"


def test_both_clients_have_the_same_face() -> None:
    for blocking, awaited in [
        (Client, AsyncClient),
        (Rollouts, AsyncRollouts),
        (Rollout, AsyncRollout),
    ]:
        face = {
            name: list(signature(method).parameters.values())
            for name, method in getmembers(blocking, isfunction)
            if not name.startswith("_") or name == "__call__"
        }
        for name, parameters in face.items():
            method = getattr(awaited, name)
            assert list(signature(method).parameters.values()) == parameters, name
        missing = {name for name, _ in getmembers(awaited, isfunction) if name[0] != "_"}
        assert missing - set(face) == set()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Worker", Worker),
        ("Stream", Stream),
        ("Row", WitnessRow),
        ("Standing", Standing),
        ("Session", Session),
    ],
)
def test_the_types_are_those_that_fak_describes(name: str, kind: type) -> None:
    described = json.loads(OPENAPI.read_text())["components"]["schemas"][name]["properties"]
    check(kind, described)


@pytest.mark.parametrize(("name", "kind"), [("RolloutBegun", Begun), ("RolloutEnded", Ended)])
def test_what_a_rollout_tells_of_a_worker_is_what_fak_describes(name: str, kind: type) -> None:
    described = json.loads(OPENAPI.read_text())["components"]["schemas"][name]
    check(kind, described["properties"]["workers"]["items"]["properties"])


def check(kind: type, described: dict[str, Any]) -> None:
    assert {field.name for field in fields(kind)} == set(described)
    hints = get_type_hints(kind)
    for field, schema in described.items():
        plain = [schema, *schema.get("anyOf", [])]
        words_of = next((set(part["enum"]) for part in plain if "enum" in part), None)
        if words_of is not None:
            assert set(flat(hints[field])) == words_of, field


def flat(kind: object) -> Iterator[object]:
    """The words of a closed vocabulary, in an optional or not."""
    for part in get_args(kind):
        if isinstance(part, str):
            yield part
        elif get_origin(part) is not None:
            yield from flat(part)


def test_the_options_words_are_those_that_fak_describes() -> None:
    schema = json.loads(OPENAPI.read_text())["components"]["schemas"]["Options"]["properties"]
    for option, kind in [("mode", words.Mode), ("level", words.Level), ("weights", words.Weights)]:
        assert set(get_args(kind)) == set(schema[option]["enum"]), option
    assert set(get_args(words.Tag)) == set(schema["tags"]["items"]["enum"])
