"""The HTTP side: /sleep and /pause take clear_connector_cache, and declare it in /openapi.json.

Invariant: the engine core is sent the argument only when a caller opts out, so that all other
calls are vLLM's own from end to end. An opt-out that cannot be sent is refused.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from vllm.entrypoints.rl.online import api_router as pause_routes
from vllm.entrypoints.serve.dev.sleep import api_router as sleep_routes
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_keep_tier.refusal import Refused, is_refusal

_ARGUMENT = inspect.Parameter(
    "clear_connector_cache",
    inspect.Parameter.KEYWORD_ONLY,
    default=True,
    annotation=Annotated[bool, Query()],
)

# Set while a route's own handler runs, for the client's calls under it.
_keeps_tier: ContextVar[bool] = ContextVar("keeps_tier", default=False)


def install() -> None:
    AsyncMPClient.sleep_async = _sleep_async(AsyncMPClient.sleep_async)
    AsyncMPClient.pause_scheduler_async = _pause_scheduler_async(
        AsyncMPClient.pause_scheduler_async
    )
    _give_argument(sleep_routes.router, "/sleep")
    _give_argument(pause_routes.router, "/pause")


def _sleep_async(stock: Callable) -> Callable:
    async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
        if not _keeps_tier.get():
            return await stock(self, level, mode)
        await _call(self, "sleep", level, mode, False)

    return sleep_async


def _pause_scheduler_async(stock: Callable) -> Callable:
    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        if not _keeps_tier.get():
            return await stock(self, mode, clear_cache)
        await _call(self, "pause_scheduler", mode, clear_cache, False)

    return pause_scheduler_async


async def _call(client: AsyncMPClient, method: str, *arguments: Any) -> None:
    try:
        await client.call_utility_async(method, *arguments)
    except Exception as error:
        if is_refusal(error):
            raise Refused(str(error)) from error
        raise


def _give_argument(router: APIRouter, path: str) -> None:
    """Before the server takes over the router's routes; the place in their order stays."""
    [place] = [at for at, route in enumerate(router.routes) if route.path == path]
    stock = router.routes[place]
    assert isinstance(stock, APIRoute)
    router.add_api_route(path, _with_argument(stock.endpoint), methods=["POST"], name=stock.name)
    router.routes[place] = router.routes.pop()


def _with_argument(stock: Callable) -> Callable:
    async def endpoint(*, clear_connector_cache: bool, **arguments: Any) -> Any:
        if clear_connector_cache:
            return await stock(**arguments)
        client = arguments["raw_request"].app.state.engine_client
        if not isinstance(client.engine_core, AsyncMPClient):
            return _refused(f"{type(client.engine_core).__name__} cannot send the opt-out.")
        before = _keeps_tier.set(True)
        try:
            return await stock(**arguments)
        except Refused as error:
            return _refused(str(error))
        finally:
            _keeps_tier.reset(before)

    signature = inspect.signature(stock)
    parameters = [*signature.parameters.values(), _ARGUMENT]
    endpoint.__signature__ = signature.replace(parameters=parameters)
    endpoint.__name__ = stock.__name__
    endpoint.__doc__ = stock.__doc__
    return endpoint


def _refused(why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=400)
