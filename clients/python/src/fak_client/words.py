"""The closed vocabularies, in the very words of fak's JSON.

Invariant: a word outside its vocabulary is never passed on: reading it fails.
"""

from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["serving", "paused", "sleeping", "waking", "error"]
Disposition: TypeAlias = Literal["preserved", "forgotten", "unknown"]
Tier: TypeAlias = Literal["gpu", "cpu", "disk", "remote"]
Evidence: TypeAlias = Literal["observed", "answered", "not_sent", "none"]
Action: TypeAlias = Literal[
    # asked
    "pause",
    "resume",
    "sleep",
    "wake",
    "reset",
    "quarantine",
    # noticed
    "join",
    "restart",
    "lost",
    "gap",
    "weights",
    "drift",
]
#: How far beliefs can be relied on.
Trust: TypeAlias = Literal["exact", "degraded", "load-only"]
#: The same of a worker; ambiguous where several engines answer at its address.
State: TypeAlias = Literal["exact", "degraded", "load-only", "ambiguous"]
#: How far an action is that is under way.
Stage: TypeAlias = Literal["begins", "drains", "runs"]
Run: TypeAlias = Literal["active", "dormant"]
Rest: TypeAlias = Literal["pause", "sleep"]

#: 1 keeps the weights in host memory, 2 drops them.
Level: TypeAlias = Literal[1, 2]
#: What happens to requests in flight.
Mode: TypeAlias = Literal["abort", "wait", "keep"]
#: What can be woken by itself.
Tag: TypeAlias = Literal["weights", "kv_cache", "scheduling"]
#: What is known of the weights at a wake: those from before; others, loaded by their owner already;
#: others, which fak is to reload; nothing.
Weights: TypeAlias = Literal["same", "loaded", "changed", "unproven"]

Outcome: TypeAlias = Literal["done", "refused", "failed"]
Canary: TypeAlias = Literal["same", "recorded", "mismatch", "not_run"]
