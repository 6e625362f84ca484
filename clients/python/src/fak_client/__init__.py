"""A typed client of fak's control API, blocking (`Client`) and not (`AsyncClient`).

Invariant: a call that returns did what was asked, on every worker that was meant; anything less
raises a `FakError` that carries what fak said. No action is sent twice by itself.
"""

from .aio import AsyncClient
from .client import Client
from .errors import (
    Answered,
    BadAnswer,
    BadRequest,
    Failed,
    FakError,
    LeftAsleep,
    Refused,
    Unauthorized,
    Unreachable,
)
from .model import (
    Begun,
    Busy,
    Ended,
    Event,
    Hold,
    RolloutResult,
    Session,
    Standing,
    Stream,
    WitnessRow,
    Worker,
)

__all__ = [
    "Answered",
    "AsyncClient",
    "BadAnswer",
    "BadRequest",
    "Begun",
    "Busy",
    "Client",
    "Ended",
    "Event",
    "Failed",
    "FakError",
    "Hold",
    "LeftAsleep",
    "Refused",
    "RolloutResult",
    "Session",
    "Standing",
    "Stream",
    "Unauthorized",
    "Unreachable",
    "WitnessRow",
    "Worker",
]
