"""A vLLM plugin: the stock host-memory tier, by its own name, on a platform without an accelerator.

What an engine tells of itself (`/server_info`) names its tier's spec, and fak claims of the stock
one alone. With the name of another spec here, nothing of this engine's tier would ever be claimed.
"""


def register() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    # Not by `register_spec`, which refuses a name that it has.
    OffloadingSpecFactory._registry["CPUOffloadingSpec"] = stock_spec


def stock_spec() -> type:
    from fak_rig.host_offload import HostOffloadingSpec

    return HostOffloadingSpec
