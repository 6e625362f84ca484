"""Says whether this vLLM is one that the plugin was tested with.

Invariant: nothing of vLLM is changed here, and what cannot be examined counts as different.
"""

import hashlib
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

TESTED_VERSIONS = ("0.32.0",)

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_CONNECTORS}.offloading.scheduler"
_SLEEP_ROUTES = "vllm.entrypoints.serve.dev.sleep.api_router"
_PAUSE_ROUTES = "vllm.entrypoints.rl.online.api_router"


@dataclass(frozen=True)
class Target:
    """A function that is replaced, or relied on by a replacement."""

    module: str
    path: str
    signature: str
    """Without annotations: what a caller may pass."""
    source: str
    """Start of the SHA-256 of its source, vLLM 0.32.0: the replacements rely on attributes and
    calls inside, which no signature shows."""
    is_replaced: bool = True

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}"


TARGETS = (
    Target(
        "vllm.v1.engine.core",
        "EngineCore.sleep",
        "(self, level=1, mode='abort')",
        "f08683c8b249ae7b",
    ),
    Target(
        "vllm.v1.engine.core",
        "EngineCore.pause_scheduler",
        "(self, mode='abort', clear_cache=True)",
        "dc44b06a1a99ee69",
    ),
    Target(
        "vllm.v1.engine.core",
        "EngineCoreProc.pause_scheduler",
        "(self, mode='abort', clear_cache=True)",
        "e02778ea0e810f9c",
    ),
    Target(
        "vllm.v1.engine.core",
        "EngineCore._finish_pause",
        "(self, clear_cache)",
        "a676d04ac1f1733f",
    ),
    Target(
        "vllm.v1.engine.core",
        "EngineCore._reset_caches",
        "(self, reset_running_requests=True, reset_connector=True)",
        "2bf1e4a269acf99c",
        is_replaced=False,
    ),
    Target(
        _OFFLOADING,
        "OffloadingConnectorScheduler.build_connector_meta",
        "(self, scheduler_output)",
        "dfbdaa29c12f67ba",
    ),
    Target(
        _OFFLOADING,
        "OffloadingConnectorScheduler.has_pending_push_work",
        "(self)",
        "eb64a5ba357511d6",
        is_replaced=False,
    ),
    Target(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.sleep_async",
        "(self, level=1, mode='abort')",
        "75bbd1fb91f34ff8",
    ),
    Target(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.pause_scheduler_async",
        "(self, mode='abort', clear_cache=True)",
        "991e33036873618c",
    ),
    Target(
        "vllm.v1.engine.core_client",
        "AsyncMPClient.call_utility_async",
        "(self, method, *args)",
        "56362d56455fba4f",
        is_replaced=False,
    ),
    Target(_SLEEP_ROUTES, "sleep", "(raw_request, level=1, mode='abort')", "fb903e16fee76daf"),
    Target(
        _PAUSE_ROUTES,
        "pause_generation",
        "(raw_request, mode='abort', clear_cache=True)",
        "6145eea95e2cf7e6",
    ),
)

# Classes and attributes that the replacements name.
PRESENT = (
    (f"{_CONNECTORS}.offloading_connector", "OffloadingConnector"),
    (f"{_CONNECTORS}.multi_connector", "MultiConnector.sub_connectors"),
)

# Each has exactly one route, served by one of the functions above.
ROUTES = ((_SLEEP_ROUTES, "sleep", "/sleep"), (_PAUSE_ROUTES, "pause_generation", "/pause"))


def differences() -> list[str]:
    """What keeps the plugin from loading, in words; empty on a vLLM it was tested with."""
    try:
        version = vllm_version()
    except Exception as error:
        return [f"the version of vLLM cannot be read ({error!r})"]
    # A local label (0.32.0+cpu) names how that release was built.
    if version.split("+")[0] not in TESTED_VERSIONS:
        return [f"vLLM is {version}, tested with {', '.join(TESTED_VERSIONS)} only"]
    found = [difference(target) for target in TARGETS]
    found += [absence(module, path) for module, path in PRESENT]
    found += [route_difference(*route) for route in ROUTES]
    return [each for each in found if each]


def vllm_version() -> str:
    return importlib.import_module("vllm.version").__version__


def difference(target: Target) -> str | None:
    try:
        function = _find(target.module, target.path)
        signature = _without_annotations(inspect.signature(function))
        source = inspect.getsource(function)
    except Exception as error:
        return f"{target.name} cannot be examined ({error!r})"
    if signature != target.signature:
        return f"{target.name} takes {signature}, tested with {target.signature}"
    if hashlib.sha256(source.encode()).hexdigest()[:16] != target.source:
        return f"{target.name} is not the function of a tested release"
    return None


def absence(module: str, path: str) -> str | None:
    try:
        _find(module, path)
    except Exception as error:
        return f"{module}.{path} is absent ({error!r})"
    return None


def route_difference(module: str, endpoint: str, path: str) -> str | None:
    try:
        expected = _find(module, endpoint)
        routes = _find(module, "router").routes
        served_by = [route.endpoint for route in routes if route.path == path]
    except Exception as error:
        return f"the routes of {module} cannot be examined ({error!r})"
    if served_by != [expected]:
        return f"{path} is not served by {module}.{endpoint} alone"
    return None


def _find(module: str, path: str) -> Any:
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _without_annotations(signature: inspect.Signature) -> str:
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))
