"""Gateways, and both clients of each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from anyio.from_thread import start_blocking_portal

from fak_client import AsyncClient, Client

from . import engine, process
from .awaited import awaited

Connect = Callable[..., Client]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=["sim", "vllm"], default="sim")


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest) -> Iterator[str]:
    """A worker that can keep its tier: `ID=URL`."""
    if request.config.getoption("--engine") == "sim":
        with process.sim("keep-tier") as sim:
            yield f"w0={sim.url}"
        return
    with engine.engine("--offload", "--keep-tier") as url:
        yield f"w0={url}"


@pytest.fixture
def rollouts(vllm: str) -> Iterator[process.Gateway]:
    """A gateway of its own in front of it."""
    with process.gateway(vllm) as gateway:
        yield gateway


@pytest.fixture
def fleet() -> Iterator[process.Gateway]:
    """Two simulated workers of a released vLLM, which cannot keep its tier."""
    with process.gateway(sims=2) as gateway:
        yield gateway


@pytest.fixture
def keeper() -> Iterator[process.Gateway]:
    """A simulated worker that can."""
    with process.sim("keep-tier") as sim, process.gateway(f"w0={sim.url}") as gateway:
        yield gateway


@pytest.fixture(params=["blocking", "awaited"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of one kind."""
    with ExitStack() as stack:
        if request.param == "blocking":
            yield lambda *given: stack.enter_context(Client(*given))
            return
        portal = stack.enter_context(start_blocking_portal())

        def make(*given: str | None) -> Client:
            client = AsyncClient(*given)
            return awaited(portal, stack.enter_context(portal.wrap_async_context_manager(client)))

        yield make


@pytest.fixture
def fak(connect: Connect, fleet: process.Gateway) -> Client:
    """A client of the fleet."""
    return connect(fleet.url)


@pytest.fixture
def kept(connect: Connect, keeper: process.Gateway) -> Client:
    """A client of the worker that can keep its tier."""
    return connect(keeper.url)
