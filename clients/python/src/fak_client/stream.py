"""The ledger's server-sent events, from bytes to `Event`s. No I/O.

Invariant: an event is handed out whole or not at all, however its bytes were cut.
"""

from collections.abc import Iterator
from json import JSONDecodeError, loads

from .errors import BadAnswer
from .model import Event
from .reading import Unreadable, read

#: Characters of one event: three columns of JSON, and words.
EVENT_CHARS_MAX = 1 << 20


class Reader:
    """Puts events together from lines."""

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._fields: dict[str, str] = {}
        self._size = 0

    def line(self, line: str) -> Iterator[Event]:
        """Takes a line without its end; hands out the event that it ends. Raises `BadAnswer`."""
        if not line:
            fields, self._fields, self._size = self._fields, {}, 0
            if "data" in fields:
                yield _event(fields)
            return
        self._size += len(line)
        if self._size > EVENT_CHARS_MAX:
            raise BadAnswer(f"an event of more than {EVENT_CHARS_MAX} characters")
        name, _, value = line.partition(":")
        if name:  # a line that starts with a colon is a comment, which keeps the connection open
            value = value.removeprefix(" ")
            before = self._fields.get(name)
            is_more = name == "data" and before is not None
            self._fields[name] = f"{before}\n{value}" if is_more else value


def _event(fields: dict[str, str]) -> Event:
    try:
        number, row = int(fields.get("id", "")), loads(fields["data"])
        return read(Event, {"id": number, "kind": fields.get("event"), "row": row}, "an event")
    except (JSONDecodeError, Unreadable, ValueError) as error:
        raise BadAnswer(f"an event cannot be read: {error}") from error
