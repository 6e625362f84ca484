"""Against the built fak: rollouts, by both clients."""

import logging

import pytest

from fak_client import BadRequest, Begun, Client, Failed, LeftAsleep, Refused

from . import process
from .ask import ask
from .conftest import Connect


def test_a_rollout_frees_every_gpu_holds_the_workers_and_lets_them_go(fak: Client) -> None:
    begun = fak.rollout.begin(holder="trainer-7")
    assert [(end.worker, end.outcome, end.phase) for end in begun] == [
        ("sim-0", "done", "sleeping"),
        ("sim-1", "done", "sleeping"),
    ]
    for end in begun:
        assert (end.gpu_free, end.running, end.held_by) == (True, 0, "trainer-7")
        assert end.row is not None
        assert (end.row.action, end.row.level, end.row.reason) == ("sleep", 1, "confirmed")
    assert [worker.held_by for worker in fak.workers()] == ["trainer-7", "trainer-7"]
    assert {(hold.worker, hold.holder) for hold in fak.rollout.holds()} == {
        ("sim-0", "trainer-7"),
        ("sim-1", "trainer-7"),
    }

    ended = fak.rollout.end(weights="same", holder="trainer-7")
    for woken in ended:
        assert (woken.outcome, woken.phase, woken.serving) == ("done", "serving", True)
        assert (woken.held_by, woken.canary) == (None, "not_run")
        assert [row.action for row in woken.rows] == ["wake"]
    assert fak.rollout.holds() == ()
    assert all(worker.serving and worker.held_by is None for worker in fak.workers())


def test_a_held_worker_is_its_holders_alone(fak: Client) -> None:
    fak.rollout.begin(workers=["sim-0"], holder="trainer-7")
    with pytest.raises(Refused, match="trainer-7") as held:
        fak.wake(worker="sim-0", weights="same")
    assert held.value.row is not None
    assert (held.value.row.reason, held.value.row.evidence) == ("held", "not_sent")
    with pytest.raises(Refused, match="by trainer-7") as other:
        fak.rollout.end(weights="same", workers=["sim-0"], holder="trainer-8")
    assert [end.reason for end in other.value.workers] == ["held"]
    with pytest.raises(Refused):
        fak.rollout.begin(workers=["sim-0"], holder="trainer-8")
    assert fak.worker("sim-1").serving, "what was not named is not touched"
    fak.pause(worker="sim-1")

    assert fak.wake(worker="sim-0", tags=["weights"], holder="trainer-7").phase == "waking"
    assert fak.wake(worker="sim-0", weights="same", force=True).phase == "serving"
    with pytest.raises(Refused, match="`trainer-7` holds no worker"):
        fak.rollout.end(weights="same", holder="trainer-7")
    with pytest.raises(Refused, match="sim-0") as free:
        fak.rollout.end(weights="same", workers=["sim-0"], holder="trainer-7")
    assert [end.reason for end in free.value.workers] == ["not_held"]
    assert fak.worker("sim-1").phase == "paused", "an operator paused it"


def test_a_block_ends_as_was_said(kept: Client, keeper: process.Gateway) -> None:
    first = ask(keeper.url)
    with kept.rollout(level=1, keep_tier=True, holder="trainer-7") as rollout:
        assert rollout.begun[0].gpu_free
        assert rollout.begun[0].row is not None
        assert rollout.begun[0].row.tiers == {"gpu": "forgotten", "cpu": "preserved"}
        rollout.same()
    assert [(end.serving, end.canary) for end in rollout.ended] == [(True, "not_run")]
    again = ask(keeper.url)
    assert (first.cached, again.cached > 0) == (0, True), "the tier was kept"
    assert again.warm == f"cpu={again.cached}"


def test_a_canary_is_recorded_and_compared(kept: Client, keeper: process.Gateway) -> None:
    ask(keeper.url)
    with kept.rollout(keep_tier=True, canary=True) as rollout:
        rollout.same()
    assert [end.canary for end in rollout.ended] == ["same"]
    again = ask(keeper.url)
    assert (again.cached > 0, again.warm) == (True, f"cpu={again.cached}")
    with kept.rollout(canary=True) as rollout:
        rollout.wake_weights()
        rollout.loaded("v8")
    assert [end.canary for end in rollout.ended] == ["recorded"]
    kept.rollout.begin(canary=True)
    (unasked,) = kept.rollout.end(weights="same", canary=False)
    assert unasked.canary == "not_run"


def test_other_weights_never_meet_what_older_ones_computed(
    kept: Client, keeper: process.Gateway
) -> None:
    ask(keeper.url)
    with kept.rollout(keep_tier=True) as rollout:
        (woken,) = rollout.wake_weights()
        assert (woken.phase, woken.serving, woken.held_by) == ("waking", False, "rollout")
        rollout.loaded("v8")
    (end,) = rollout.ended
    assert (end.serving, end.weight_version) == (True, "v8")
    assert end.rows[-1].tiers == {"gpu": "forgotten", "cpu": "forgotten"}
    assert kept.worker("w0").weight_version == "v8"
    assert ask(keeper.url).cached == 0


def test_weights_that_nobody_loads_are_not_served(kept: Client) -> None:
    with pytest.raises(Failed, match="w0 failed") as failed, kept.rollout(level=2) as rollout:
        rollout.changed("v8")
    (end,) = failed.value.workers
    assert (end.reason, end.phase) == ("weights_not_proven", "waking")
    assert kept.worker("w0").serving is False
    (loaded,) = kept.rollout.end(weights="loaded", weight_version="v8")
    assert (loaded.serving, loaded.weight_version) == (True, "v8")


def test_a_block_that_fails_leaves_its_workers_asleep_and_says_so(
    fak: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with fak.rollout(holder="trainer-7") as rollout:
            rollout.same()
            raise ZeroDivisionError

    caplog.set_level(logging.WARNING, logger="fak_client")
    with pytest.raises(ZeroDivisionError) as raised:
        train()
    told = "sim-0, sim-1 left asleep, held by trainer-7"
    assert told in caplog.text
    assert told in "".join(getattr(raised.value, "__notes__", [told]))
    for worker in fak.workers():
        assert (worker.phase, worker.held_by) == ("sleeping", "trainer-7")
    fak.rollout.end(weights="same", holder="trainer-7")


def test_a_block_that_says_nothing_of_the_weights_wakes_nobody(fak: Client) -> None:
    told = "sim-0, sim-1 left asleep, held by rollout"
    with pytest.raises(LeftAsleep, match=told), fak.rollout():
        pass
    assert [worker.phase for worker in fak.workers()] == ["sleeping", "sleeping"]
    fak.rollout.end(weights="same")


def test_a_partial_begin_is_none_and_tells_of_each_worker(fak: Client) -> None:
    fak.rollout.begin(workers=["sim-1"], holder="trainer-8")
    with pytest.raises(Refused, match=r"sim-1 refused: .*trainer-8") as refused:
        fak.rollout.begin(holder="trainer-7")
    done, left = refused.value.workers
    assert isinstance(done, Begun)
    assert isinstance(left, Begun)
    assert (done.worker, done.outcome, done.gpu_free, done.held_by) == (
        "sim-0",
        "done",
        True,
        "trainer-7",
    )
    assert (left.worker, left.outcome, left.gpu_free) == ("sim-1", "refused", False)
    assert (left.reason, left.held_by) == ("held", "trainer-8")


def test_a_block_that_begins_in_part_says_who_is_left_asleep(
    fak: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fak.rollout.begin(workers=["sim-1"], holder="trainer-8")
    with pytest.raises(Refused), fak.rollout(holder="trainer-7"):
        pass
    left = "sim-0 left asleep, held by trainer-7; the client's rollout.end(weights=...) wakes them"
    assert left in caplog.text
    fak.rollout.end(weights="same", workers=["sim-0"], holder="trainer-7")


def test_a_tier_that_cannot_be_kept_refuses_the_rollout(fak: Client) -> None:
    with pytest.raises(Refused, match="allow") as refused:
        fak.rollout.begin(keep_tier=True)
    assert {end.outcome for end in refused.value.workers} == {"refused"}
    assert all(worker.serving for worker in fak.workers())
    assert fak.rollout.holds() == ()
    fak.rollout.begin(keep_tier=True, allow_evict=True)


def test_an_engine_that_died_fails_the_rollout(connect: Connect) -> None:
    settings = "probe_every_ms = 60000"  # so that nothing but the action looks at the engine
    with process.sim() as sim, process.gateway(f"w0={sim.url}", settings=settings) as gateway:
        client = connect(gateway.url)
        sim.process.kill()
        with pytest.raises(Failed, match="w0 failed") as failed:
            client.rollout.begin()
        (end,) = failed.value.workers
        assert isinstance(end, Begun)
        assert (end.phase, end.gpu_free) == ("error", False)


def test_what_a_rollout_does_not_know_is_named(fak: Client) -> None:
    with pytest.raises(BadRequest, match="nobody"):
        fak.rollout.begin(workers=["nobody"])
    with pytest.raises(BadRequest) as wrong:
        fak.rollout.begin(drain_ms=-1)
    assert wrong.value.param == "drain_ms"
    assert all(worker.serving for worker in fak.workers())
