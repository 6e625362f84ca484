"""The engine core's side: a pause that clears the device's caches and leaves the tier.

Invariant: the choice belongs to one pause. It travels with that pause's own argument to where
the caches are cleared, also when that is later, and no other clearing ever sees it.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from vllm_keep_tier.refusal import refusal

# Stands for clear_cache=True in a pause that keeps the tier. True for whoever only asks whether
# to clear, told apart by identity where it is cleared.
_CLEAR_ALL_BUT_THE_TIER: Any = object()

# Set while sleep() calls pause_scheduler(), which it does before it returns.
_sleep_keeps_tier: ContextVar[bool] = ContextVar("sleep_keeps_tier", default=False)


def install() -> None:
    EngineCore.sleep = _sleep(EngineCore.sleep)
    for engine in (EngineCore, EngineCoreProc):
        engine.pause_scheduler = _pause_scheduler(engine.pause_scheduler)
    EngineCore._finish_pause = _finish_pause(EngineCore._finish_pause)


def survives(connector: Any) -> bool:
    """By identity of the class: what a subclass does at a reset is its own."""
    if type(connector) is MultiConnector:
        return all(survives(part) for part in connector.sub_connectors)
    return connector is None or type(connector) is OffloadingConnector


def refuse_unless_safe(engine: Any) -> None:
    connector = engine.scheduler.connector
    if not survives(connector):
        raise ValueError(refusal(type(connector).__name__))


def _sleep(stock: Callable) -> Callable:
    def sleep(self, level: int = 1, mode: str = "abort", clear_connector_cache: bool = True) -> Any:
        if clear_connector_cache:
            return stock(self, level, mode)
        refuse_unless_safe(self)
        before = _sleep_keeps_tier.set(True)
        try:
            return stock(self, level, mode)
        finally:
            _sleep_keeps_tier.reset(before)

    return sleep


def _pause_scheduler(stock: Callable) -> Callable:
    def pause_scheduler(
        self, mode: str = "abort", clear_cache: bool = True, clear_connector_cache: bool = True
    ) -> Any:
        if not clear_connector_cache:
            refuse_unless_safe(self)
        keeps_tier = not clear_connector_cache or _sleep_keeps_tier.get()
        if clear_cache and keeps_tier:
            clear_cache = _CLEAR_ALL_BUT_THE_TIER
        return stock(self, mode, clear_cache)

    return pause_scheduler


def _finish_pause(stock: Callable) -> Callable:
    def finish_pause(self, clear_cache: Any) -> None:
        if clear_cache is not _CLEAR_ALL_BUT_THE_TIER:
            return stock(self, clear_cache)
        stock(self, False)  # waits for the device
        connector = self.scheduler.connector
        # The engine steps on until its transfers are done, in each mode, so this does not happen
        # in 0.32.0. It must not: the sleep that follows takes away the memory they read.
        if connector is not None and connector.has_pending_push_work():
            raise RuntimeError("the tier cannot be kept: a transfer to or from it is in flight")
        self._reset_caches(reset_connector=False)

    return finish_pause
