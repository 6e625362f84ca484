"""Against the built fak: questions, actions, refusals and failures, by both clients."""

import threading
from typing import cast

import httpx
import pytest

from fak_client import (
    BadRequest,
    Busy,
    Client,
    Failed,
    Refused,
    Unauthorized,
    Unreachable,
)
from fak_client.reading import read
from fak_client.words import Action, Level

from . import process
from .ask import ask
from .conftest import Connect


def test_workers_are_listed_and_told_one_by_one(fak: Client) -> None:
    workers = fak.workers()
    assert [worker.id for worker in workers] == ["sim-0", "sim-1"]
    for worker in workers:
        assert (worker.phase, worker.serving, worker.models) == ("serving", True, ("sim",))
        assert set(worker.tiers) == {"gpu", "cpu"}
        assert worker.held_by is None
        assert fak.worker(worker.id).url == worker.url


def test_an_action_answers_its_row_and_the_worker_is_as_the_row_says(fak: Client) -> None:
    row = fak.sleep(worker="sim-0", level=1, drain_ms=1000)
    assert (row.action, row.level, row.phase, row.kv) == ("sleep", 1, "sleeping", "forgotten")
    assert (row.evidence, row.reason, row.serving) == ("observed", "confirmed", False)
    assert row.tiers["gpu"] == "forgotten"
    worker = fak.worker("sim-0")
    assert (worker.phase, worker.serving, worker.last_witness) == ("sleeping", False, row.seq)
    assert fak.worker("sim-1").serving

    assert fak.wake(worker="sim-0", tags=["weights"], weights="same").phase == "waking"
    row = fak.wake(worker="sim-0", weights="same")
    assert (row.phase, row.kv, row.serving) == ("serving", "unknown", True)


def test_a_pause_keeps_and_a_reset_drops(fak: Client) -> None:
    assert fak.pause(worker="sim-0").kv == "preserved"
    assert fak.resume(worker="sim-0").kv == "preserved"
    assert fak.pause(worker="sim-0", mode="abort", clear=True).kv == "forgotten"
    assert fak.resume(worker="sim-0").phase == "serving"
    row = fak.reset(worker="sim-0", external=True)
    assert (row.kv, row.tiers["cpu"], row.serving) == ("forgotten", "forgotten", True)


def test_a_repeat_is_refused_with_its_row(fak: Client) -> None:
    fak.sleep(worker="sim-0", level=1)
    with pytest.raises(Refused) as refused:
        fak.sleep(worker="sim-0", level=1)
    assert refused.value.status == 409
    row = refused.value.row
    assert row is not None
    assert (row.evidence, row.reason, row.phase) == ("not_sent", "already_asleep", "sleeping")


def test_a_tier_that_cannot_be_kept_is_refused_unless_evicting_is_allowed(fak: Client) -> None:
    with pytest.raises(Refused) as refused:
        fak.sleep(worker="sim-0", level=1, keep_tier=True)
    row = refused.value.row
    assert row is not None
    assert (row.evidence, row.phase, row.tiers["cpu"]) == ("not_sent", "serving", "preserved")
    row = fak.sleep(worker="sim-0", level=1, keep_tier=True, allow_evict=True)
    assert row.tiers == {"gpu": "forgotten", "cpu": "forgotten"}


def test_a_tier_that_can_be_kept_is(kept: Client) -> None:
    row = kept.sleep(worker="w0", level=1, keep_tier=True)
    assert row.tiers == {"gpu": "forgotten", "cpu": "preserved"}


def test_a_request_that_cannot_be_read_names_what_is_wrong(fak: Client) -> None:
    with pytest.raises(BadRequest, match="no worker is called `nobody`") as unknown:
        fak.sleep(worker="nobody", level=1)
    assert (unknown.value.status, unknown.value.code) == (404, "unknown_worker")
    with pytest.raises(BadRequest, match="drain_ms has to be") as wrong:
        fak.pause(worker="sim-0", drain_ms=-1)
    assert (wrong.value.status, wrong.value.param) == (400, "drain_ms")
    with pytest.raises(BadRequest) as level:
        fak.sleep(worker="sim-0", level=cast(Level, 3))
    assert level.value.param == "level"
    with pytest.raises(BadRequest) as action:
        fak.witness(action=cast(Action, "nap"))
    assert action.value.param == "action"
    assert {row.action for row in fak.witness()} == {"join"}, "what fak noticed at its start"


def test_a_name_is_one_segment_of_the_path(fak: Client) -> None:
    for name in ["a/b", "..", "sim-0/sleep", "sim-0?x=1", "ü"]:
        with pytest.raises(BadRequest) as unknown:
            fak.worker(name)
        assert (unknown.value.code, name in str(unknown.value)) == ("unknown_worker", True)


def test_sessions_are_acted_on_through_the_worker_behind_them(
    fak: Client, fleet: process.Gateway
) -> None:
    fak.sleep(worker="sim-1", level=1)  # so that both sessions share a worker
    ask(fleet.url, "s1")
    ask(fleet.url, "s2")
    assert {session.id for session in fak.sessions(worker="sim-0")} == {"s1", "s2"}
    assert len(fak.sessions(limit=1)) == 1
    assert fak.sessions(limit=0) == ()
    assert fak.session("s1").run == "active"

    with pytest.raises(Refused) as refused:
        fak.sleep(session="s1", level=1)
    assert (refused.value.code, refused.value.sessions) == ("sessions_active", ("s2",))
    row = fak.sleep(session="s1", level=1, force=True)
    assert (row.worker, row.session) == ("sim-0", "s1")
    slept = fak.session("s1")
    assert (slept.run, slept.reason, slept.dormant_since) == ("dormant", "sleep", row.seq)
    assert fak.session("s2").run == "active", "its worker's rest is not its own"
    fak.wake(session="s1", weights="same")

    assert fak.quarantine(session="s2", isolate=True).reason == "isolated"
    assert fak.session("s2").isolated
    assert fak.quarantine(session="s2", flush=True, force=True).kv == "forgotten"
    fak.end_session("s2")
    with pytest.raises(BadRequest, match="no session is called `s2`"):
        fak.session("s2")


def test_rows_are_filtered_and_ordered(fak: Client) -> None:
    at_start = fak.witness()
    slept = fak.sleep(worker="sim-0", level=1)
    woken = fak.wake(worker="sim-0", weights="same")
    paused = fak.pause(worker="sim-1")
    assert fak.witness() == (*at_start, slept, woken, paused)
    assert fak.witness(after=0) == fak.witness()
    assert fak.witness(after=at_start[-1].seq) == (slept, woken, paused)
    assert fak.witness(after=slept.seq, worker="sim-0") == (woken,)
    assert fak.witness(newest_first=True, limit=1) == (paused,)
    assert fak.witness(kv="preserved") == (paused,)
    assert fak.witness(action="sleep") == (slept,)
    assert fak.witness(session="nobody") == ()


def test_events_are_told_from_the_blocks_start_and_again_after_an_id(fak: Client) -> None:
    fak.pause(worker="sim-0")  # which is not told any more
    with fak.events() as events:
        row = fak.sleep(worker="sim-1", level=1)
        first, second = next(events), next(events)
    assert (first.kind, first.row.seq, first.row.kv) == ("intent", row.seq, "unknown")
    assert (second.kind, second.row) == ("witness", row)
    assert second.id > first.id
    with fak.events(after=first.id) as again:
        assert next(again) == second
    with fak.events(after=0) as all_of_them:
        assert next(all_of_them).row.seq == 1


def test_a_stream_that_fak_ends_is_told_so(connect: Connect) -> None:
    with process.gateway(sims=1) as gateway, connect(gateway.url).events() as events:
        gateway.process.process.terminate()
        with pytest.raises(Unreachable) as cut:
            next(events)
    assert cut.value.sent


def test_control_takes_the_key(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    with process.gateway(sims=1, env={"FAK_ADMIN_KEY": "s3cret"}) as gateway:
        for key in ["", "wrong"]:
            client = connect(gateway.url, key)
            with pytest.raises(Unauthorized) as denied:
                client.workers()
            assert (denied.value.status, denied.value.code) == (401, "unauthorized")
            with pytest.raises(Unauthorized), client.events():
                pass
        assert connect(gateway.url, "s3cret").workers()
        monkeypatch.setenv("FAK_ADDR", gateway.url.removeprefix("http://"))
        monkeypatch.setenv("FAK_KEY", "s3cret")
        assert connect().workers()


def test_an_engine_that_is_gone_makes_an_action_fail_with_its_row(connect: Connect) -> None:
    settings = "probe_every_ms = 60000"  # so that nothing but the action looks at the engine
    with process.sim() as sim, process.gateway(f"w0={sim.url}", settings=settings) as gateway:
        client = connect(gateway.url)
        sim.process.kill()
        with pytest.raises(Failed, match="not proven to be done") as failed:
            client.sleep(worker="w0", level=1)
        row = failed.value.row
        assert (failed.value.status, failed.value.code) == (502, "failed")
        assert row is not None
        assert (row.phase, row.kv, row.serving) == ("error", "unknown", False)
        assert client.worker("w0").phase == "error"


def test_a_worker_that_is_lost_is_told_and_refuses(connect: Connect) -> None:
    with process.sim() as sim, process.gateway(f"w0={sim.url}") as gateway:
        client = connect(gateway.url)
        with client.events() as events:
            sim.process.kill()
            lost = next(event for event in events if event.row.action == "lost")
        assert (lost.kind, lost.row.phase, lost.row.kv) == ("witness", "error", "unknown")
        with pytest.raises(Refused) as refused:
            client.sleep(worker="w0", level=1)
        row = refused.value.row
        assert row is not None
        assert (row.reason, row.evidence, row.serving) == ("state_unknown", "not_sent", False)


def test_where_nothing_waits_for_requests_nothing_can_be_cancelled(fak: Client) -> None:
    with pytest.raises(Refused, match="nothing is done to worker `sim-0`") as refused:
        fak.cancel(worker="sim-0")
    assert (refused.value.status, refused.value.row) == (409, None)
    worker = fak.worker("sim-0")
    assert (worker.serving, worker.busy, worker.why) == (True, None, None)
    fak.sleep(worker="sim-0", level=1)
    fak.wake(worker="sim-0", tags=["weights"])
    assert "fak worker wake sim-0" in (fak.worker("sim-0").why or "")


def test_what_a_worker_is_busy_with_is_read() -> None:
    told = {
        "action": "sleep",
        "level": 1,
        "since": "2026-12-01T10:00:00.000Z",
        "holder": "night",
        "session": None,
        "stage": "drains",
        "waits_for": 3,
        "waits_ms_max": 600_000,
    }
    busy = read(Busy, told)
    assert (busy.action, busy.level, busy.holder, busy.session) == ("sleep", 1, "night", None)
    assert (busy.stage, busy.waits_for, busy.waits_ms_max) == ("drains", 3, 600_000)


def test_nobody_there_is_told_from_an_answer_that_was_cut(connect: Connect) -> None:
    with process.gateway(sims=1) as gateway:
        client = connect(gateway.url)
        # A request that runs until somebody stops it, so that the sleep's drain has to wait.
        body = {"model": "sim", "prompt": "p", "max_tokens": 100_000, "stream": True}
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=60) as told:
            next(told.iter_lines())
            with client.events() as events:

                def kill_once_asked() -> None:
                    next(events)
                    gateway.process.kill()

                cut = threading.Thread(target=kill_once_asked)
                cut.start()
                with pytest.raises(Unreachable) as lost:
                    client.sleep(worker="sim-0", level=1, drain_ms=600_000)
                cut.join()
    assert lost.value.sent
    with pytest.raises(Unreachable, match="no fak answers at 127") as nobody:
        client.sleep(worker="sim-0", level=1)
    assert not nobody.value.sent
