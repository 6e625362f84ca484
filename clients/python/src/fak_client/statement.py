"""What a rollout's owner says of the weights before its block ends.

Invariant: nothing is assumed. A block that fails, or ends without a word, leaves its workers asleep
and held.
"""

import logging

from .errors import LeftAsleep
from .model import Begun, Ended
from .words import Weights

log = logging.getLogger("fak_client")


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
                "loaded() or changed() in the block, or call rollout.end()"
            )
        return self._said

    def _leave(self, error: BaseException, holder: str | None) -> None:
        note = f"fak: {self._standing(holder)}; rollout.end() wakes them"
        log.warning("%s, after %s in the block", note, type(error).__name__)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)

    def _standing(self, holder: str | None) -> str:
        names = ", ".join(result.worker for result in self.begun) or "no worker"
        held = {result.held_by for result in self.begun} - {None} or {holder or "rollout"}
        return f"{names} left asleep, held by {', '.join(sorted(map(str, held)))}"
