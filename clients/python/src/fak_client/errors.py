"""Why something was not done.

Invariant: whatever is not done as asked raises one of these; what fak said of each worker comes
along.
"""

from .model import RolloutResult, WitnessRow


class FakError(Exception):
    """Any of them."""


class Unreachable(FakError):
    """fak gave no whole answer."""

    #: Whether the request may have reached fak. Then nobody here knows what became of an action:
    #: the worker's rows do.
    sent: bool

    def __init__(self, message: str, *, sent: bool) -> None:
        """`sent` says whether fak may have got the request."""
        super().__init__(message)
        self.sent = sent


class BadAnswer(FakError):
    """What answered does not speak as fak does."""


class LeftAsleep(FakError):
    """A rollout's block ended, and nobody said what became of the weights: its workers sleep on."""


class Answered(FakError):
    """fak answered that it did not do what was asked."""

    status: int
    #: A closed word of fak's, or a status where vLLM's own routes answer.
    code: str
    #: The part of the request that is at fault.
    param: str | None
    #: The action's row, where it has one.
    row: WitnessRow | None
    #: Of a rollout verb: how it ended on each worker.
    workers: tuple[RolloutResult, ...]
    #: Other sessions that are active on the worker, where they are in the way. The first 100.
    sessions: tuple[str, ...]

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str = "",
        param: str | None = None,
        row: WitnessRow | None = None,
        workers: tuple[RolloutResult, ...] = (),
        sessions: tuple[str, ...] = (),
    ) -> None:
        """As fak's error body has it."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.row, self.workers, self.sessions = row, workers, sessions


class BadRequest(Answered):
    """The request cannot be read, or names what does not exist (4xx): nothing was done."""


class Unauthorized(Answered):
    """The admin key is missing or wrong (401, 403): nothing was done."""


class Refused(Answered):
    """fak or the engine refused (409): nothing changed where it did. `workers` says where."""


class Failed(Answered):
    """It failed, or nobody knows (5xx): `row` and `workers` say what was seen."""
