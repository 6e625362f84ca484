"""Gives a released vLLM the connector-tier opt-out proposed in vLLM change 57810, for tests.

Off unless FAK_RIG_KEEP_TIER=1, so that the same rig also stands for an engine without
the argument. It is written against vLLM 0.32 and only for the rig: the product drives
whatever engine it meets over HTTP and never needs this.

What it adds, as the proposal describes it:
  POST /sleep?level=1&clear_connector_cache=false   keeps the offloaded tier
  POST /pause?clear_connector_cache=false           likewise
  Any connector but OffloadingConnector refuses the opt-out with HTTP 400, before pausing.
"""

import os


def register() -> None:
    if os.environ.get("FAK_RIG_KEEP_TIER") != "1":
        return
    _patch_engine_core()
    _patch_offloading_flush()
    _patch_frontend()


def _patch_engine_core() -> None:
    from vllm.v1.engine import core

    if getattr(core.EngineCore, "_rig_keep_tier", False):
        return
    core.EngineCore._rig_keep_tier = True
    stock_reset = core.EngineCore._reset_caches

    def reset_caches(self, reset_running_requests=True, reset_connector=True):
        keep = getattr(self, "_rig_keep_connector", False)
        return stock_reset(self, reset_running_requests, reset_connector and not keep)

    def with_opt_out(stock):
        def call(self, first, second, clear_connector_cache=True):
            if not clear_connector_cache:
                refuse_if_unsafe(self)
            self._rig_keep_connector = not clear_connector_cache
            return stock(self, first, second)

        return call

    core.EngineCore._reset_caches = reset_caches
    core.EngineCore.sleep = with_opt_out(core.EngineCore.sleep)
    core.EngineCoreProc.pause_scheduler = _keep_flag_of_sleep(core.EngineCoreProc.pause_scheduler)


def _keep_flag_of_sleep(stock):
    """pause_scheduler is called both directly and by sleep(), which has already set the flag."""

    def call(self, mode="abort", clear_cache=True, clear_connector_cache=None):
        if clear_connector_cache is not None:
            if not clear_connector_cache:
                refuse_if_unsafe(self)
            self._rig_keep_connector = not clear_connector_cache
        return stock(self, mode, clear_cache)

    return call


def _patch_offloading_flush() -> None:
    """A request preempted by the sleep and resumed with its tier kept is preempted and loading
    in one step, which the stock flush asserts against (the engine then dies on wake_up). The
    flush is for stores, whose source blocks were freed; the load reads no freed block."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    cls = scheduler.OffloadingConnectorScheduler
    stock_build = cls.build_connector_meta
    if getattr(cls, "_rig_keep_tier", False):
        return
    cls._rig_keep_tier = True

    def build_connector_meta(self, scheduler_output):
        preempted = scheduler_output.preempted_req_ids or set()
        loading = {r for r in preempted if self._rig_has_load(r)}
        for request in loading:
            jobs = self._req_status[request].transfer_jobs
            self._current_batch_jobs_to_flush.update(j for j in jobs if self._jobs[j].is_store)
        scheduler_output.preempted_req_ids = set(preempted) - loading
        try:
            return stock_build(self, scheduler_output)
        finally:
            scheduler_output.preempted_req_ids = preempted

    def has_load(self, request):
        status = self._req_status.get(request)
        return status is not None and any(not self._jobs[j].is_store for j in status.transfer_jobs)

    cls.build_connector_meta = build_connector_meta
    cls._rig_has_load = has_load


def refuse_if_unsafe(engine) -> None:
    connector = engine.scheduler.connector
    name = type(connector).__name__
    if connector is not None and name != "OffloadingConnector":
        raise ValueError(
            f"{name} cannot keep its cache across a pause. Drop clear_connector_cache=False."
        )


def _patch_frontend() -> None:
    from typing import Annotated

    from fastapi import Query, Request
    from fastapi.responses import JSONResponse
    from vllm.entrypoints.rl.online import api_router as rl
    from vllm.entrypoints.serve.dev.sleep import api_router as dev
    from vllm.v1.engine import PauseMode

    for module in (rl, dev):
        module.router.routes[:] = [
            r for r in module.router.routes if r.path not in ("/pause", "/sleep")
        ]

    async def utility(raw_request, *call):
        engine = raw_request.app.state.engine_client
        await engine.engine_core.call_utility_async(*call)
        return engine

    @rl.router.post("/pause")
    async def pause(
        raw_request: Request,
        mode: Annotated[PauseMode, Query()] = "abort",
        clear_cache: Annotated[bool, Query()] = True,
        clear_connector_cache: Annotated[bool, Query()] = True,
    ) -> JSONResponse:
        try:
            await utility(raw_request, "pause_scheduler", mode, clear_cache, clear_connector_cache)
        except Exception as err:
            return JSONResponse({"error": str(err)}, status_code=400)
        return JSONResponse({"status": "paused"})

    @dev.router.post("/sleep")
    async def sleep(
        raw_request: Request,
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        mode: Annotated[PauseMode, Query()] = "abort",
        clear_connector_cache: Annotated[bool, Query()] = True,
    ) -> JSONResponse:
        try:
            engine = await utility(raw_request, "sleep", level, mode, clear_connector_cache)
        except Exception as err:
            return JSONResponse({"error": str(err)}, status_code=400)
        engine.logger_manager.record_sleep_state(1, level)
        return JSONResponse({"status": "sleeping", "level": level})
