"""What a rollout's owner says of the weights before its block ends.

Invariant: nothing is assumed. A block that fails, or ends without a word, leaves its workers asleep
and held.
"""

import logging

from .errors import Answered, LeftAsleep, Unreachable
from .model import Begun, Ended
from .words import Weights

log = logging.getLogger("fak_client")
#: Who holds workers for a rollout that names nobody.
DEFAULT_HOLDER = "rollout"
_WAY_OUT = "the client's rollout.end(weights=...) wakes them"


class Statement:
    """The part of a rollout's block that asks nothing of fak."""

    #: How each worker was put to sleep: known once the block is entered.
    begun: tuple[Begun, ...] = ()
    #: How each was woken: known once the block has ended well.
    ended: tuple[Ended, ...] = ()

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._said: tuple[Weights, str | None] | None = None

    def same(self) -> None:
        """The weights are those from before the sleep."""
        self._said = ("same", None)

    def loaded(self, weight_version: str | None = None) -> None:
        """Other weights, and their owner has loaded them into the engines already."""
        self._said = ("loaded", weight_version)

    def changed(self, weight_version: str | None = None) -> None:
        """Other weights, which fak is to reload from where the engines have them from."""
        self._said = ("changed", weight_version)

    def _word(self, holder: str | None) -> tuple[Weights, str | None]:
        if self._said is None:
            raise LeftAsleep(
                f"nobody said what became of the weights: {self._standing(holder)}; say same(), "
                "loaded() or changed() in the block, or call the client's rollout.end(weights=...)"
            )
        return self._said

    def _not_begun(self, error: BaseException, holder: str | None) -> None:
        if isinstance(error, Answered):
            begun = (end for end in error.workers if isinstance(end, Begun))
            self.begun = tuple(end for end in begun if end.outcome == "done")
            if self.begun:
                _say(error, f"{self._standing(holder)}; {_WAY_OUT}")
        elif not (isinstance(error, Unreachable) and not error.sent):
            told = f"a rollout of {holder or DEFAULT_HOLDER} may have begun"
            _say(error, f"{told}; the client's rollout.holds() tells")

    def _leave(self, error: BaseException, holder: str | None) -> None:
        _say(error, f"{self._standing(holder)}; {_WAY_OUT}")

    def _standing(self, holder: str | None) -> str:
        names = ", ".join(result.worker for result in self.begun) or "no worker"
        held = {result.held_by or holder or DEFAULT_HOLDER for result in self.begun}
        return f"{names} left asleep, held by {', '.join(sorted(held))}"


def _say(error: BaseException, told: str) -> None:
    log.warning("%s: %s", type(error).__name__, told)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"fak: {told}")
