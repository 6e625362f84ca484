"""What fak answers with.

Invariant: each field has the name and the meaning that it has in fak's JSON. A field that fak may
not know is `None` where it does not: never 0, never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .words import (
    Action,
    Canary,
    Disposition,
    Evidence,
    Level,
    Outcome,
    Phase,
    Rest,
    Run,
    Stage,
    State,
    Tier,
    Trust,
)


@dataclass(frozen=True)
class Held:
    """What is proven to be in a tier."""

    #: `None` where no rank of the worker publishes events.
    blocks: int | None


@dataclass(frozen=True)
class Stream:
    """How far a rank's event stream is."""

    rank: int
    state: Trust
    #: The last batch that was taken in; the engine counts from 0 in each of its lives.
    last_seq: int | None
    #: Whether its engine looks prompts up while no event of it is heard.
    blind: bool
    #: Whether its live connection brings less than its engine publishes.
    dead: bool
    #: How long its live connection has been silent; `None` where it never brought a batch.
    last_event_age_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Busy:
    """An action that is under way on a worker."""

    action: Action
    level: Level | None = None
    since: str
    #: For whom.
    holder: str | None = None
    session: str | None = None
    #: One that drains waits for requests to end, and can be cancelled.
    stage: Stage
    #: Requests that are inside.
    waits_for: int | None = None
    #: How long it waits for them from now on, at most.
    waits_ms_max: int | None = None


@dataclass(frozen=True)
class Worker:
    """One vLLM server."""

    id: str
    url: str
    models: tuple[str, ...]
    phase: Phase
    serving: bool
    state: State
    #: A tier that the worker does not have is absent.
    tiers: Mapping[Tier, Held]
    sessions: int
    sessions_active: int
    in_flight: int
    weight_version: str | None
    #: The number of the last row on it.
    last_witness: int | None
    streams: tuple[Stream, ...]
    recovering: bool
    reachable: bool
    progressing: bool
    incarnation: str | None
    version: str | None
    claimed_tokens: int
    cached_tokens: int
    #: Whose rollout holds it.
    held_by: str | None = None
    #: What is being done to it.
    busy: Busy | None = None
    #: What keeps requests out beside the phase, and what would help.
    why: str | None = None
    #: What its KV is computed with, as far as the engine tells.
    kv_identity: Mapping[str, str] | None = None
    #: Why nothing can be claimed of it, where that is for an operator to mend.
    warning: str | None = None
    #: Why nothing is claimed of it for a while: too many claims were not borne out.
    claims_withheld: str | None = None
    #: Why claims on it lapse unless a request of fak's own came back lately, and what to do about
    #: it.
    claims_lapse: str | None = None


@dataclass(frozen=True)
class Session:
    """Calls that belong together, and the worker that served them last."""

    id: str
    worker: str | None
    run: Run
    phase: Phase | None
    serving: bool
    claimed_tokens: int
    cached_tokens: int
    last_witness: int | None
    #: What put it to rest.
    reason: Rest | None
    dormant_since: int | None
    warm: bool
    isolated: bool
    #: In Unix milliseconds, as is `last_seen_at`.
    created_at: int
    last_seen_at: int


@dataclass(frozen=True)
class Standing:
    """What of a worker its engine does not show."""

    #: Tiers that may hold KV of other weights than those loaded.
    stale: tuple[Tier, ...]
    #: Whether weights are known to be loaded once the engine is awake.
    weights_proven: bool
    #: Whether a fixed prompt was answered otherwise than before the sleep.
    suspect: bool
    #: The row of the last change of weights by which no version moved.
    weights_epoch: int | None


@dataclass(frozen=True)
class WitnessRow:
    """What was asked of a worker, answered and observed, and what became of its KV."""

    seq: int
    #: RFC 3339, UTC.
    at: str
    worker: str
    rank: int | None
    incarnation: str | None
    session: str | None
    action: Action
    level: int | None
    phase: Phase
    #: Of the gpu tier.
    kv: Disposition
    tiers: Mapping[Tier, Disposition]
    weight_version: str | None
    warm_demoted: bool
    serving: bool
    evidence: Evidence
    #: JSON, as it was sent, answered and seen.
    asked: object
    answered: object
    observed: object
    reason: str
    #: After the row; `None` where it was refused while another action ran.
    standing: Standing | None


@dataclass(frozen=True)
class Event:
    """The ledger as it is written."""

    #: Where to go on from after a cut.
    id: int
    #: `intent` while the outcome is not recorded, `witness` once it is.
    kind: Literal["intent", "witness"]
    row: WitnessRow


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """How a rollout verb ended on one worker. Of one whose ledger failed, nothing more is known."""

    worker: str
    outcome: Outcome
    phase: Phase | None = None
    #: Whose rollout holds it now.
    held_by: str | None = None
    #: A word.
    reason: str
    #: A text, where it is not done.
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Begun(RolloutResult):
    """How `begin` ended on one worker."""

    #: Asleep by answer and by observation, and nothing runs: what a trainer may rely on.
    gpu_free: bool = False
    #: Requests that the engine said it runs; `None` where it did not say.
    running: int | None = None
    row: WitnessRow | None = None


@dataclass(frozen=True, kw_only=True)
class Ended(RolloutResult):
    """How `end` ended on one worker."""

    serving: bool = False
    canary: Canary = "not_run"
    weight_version: str | None = None
    rows: tuple[WitnessRow, ...] = ()


@dataclass(frozen=True)
class Hold:
    """A worker that a rollout holds."""

    worker: str
    holder: str
    since: str
