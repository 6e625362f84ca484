"""Lets a request be preempted and resumed from the tier in one step.

A pause with mode=keep preempts the running requests. With the tier kept they find their blocks
there at the first step after the wake: vLLM 0.32.0 then sees a request that was preempted and is
loading in the same step, asserts that a preempted request only ever stores, and the engine dies.
What it flushes there are stores, whose source blocks the preemption freed. A load that was just
created reads nothing that was freed, and a request that loads has no store in flight
(`update_state_after_alloc` asserts that), so that there is nothing to flush for it.
"""

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)


def install() -> None:
    OffloadingConnectorScheduler.build_connector_meta = _build_connector_meta(
        OffloadingConnectorScheduler.build_connector_meta
    )


def _build_connector_meta(stock: Callable) -> Callable:
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        preempted = scheduler_output.preempted_req_ids
        if not preempted:
            return stock(self, scheduler_output)
        # Put back afterwards: the worker and other connectors must see who was preempted.
        scheduler_output.preempted_req_ids = {
            request for request in preempted if not _is_loading(self, request)
        }
        try:
            return stock(self, scheduler_output)
        finally:
            scheduler_output.preempted_req_ids = preempted

    return build_connector_meta


def _is_loading(scheduler: Any, request: str) -> bool:
    state = scheduler._req_status.get(request)
    return state is not None and any(
        not scheduler._jobs[job].is_store for job in state.transfer_jobs
    )
