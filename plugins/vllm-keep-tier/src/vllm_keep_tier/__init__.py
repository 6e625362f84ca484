"""Lets a released vLLM keep its offloaded KV tier across sleep and pause.

vLLM loads this through its own plugin entry point, in each of its processes. Nothing happens
unless VLLM_KEEP_TIER=1. Then it REPLACES FUNCTIONS OF VLLM AT RUN TIME, in memory: no file of
vLLM's is changed, and the log names each function that is replaced. What it adds is the
argument that vLLM change 57810 proposes:

  POST /sleep?level=1&clear_connector_cache=false   keeps the offloaded tier
  POST /pause?clear_connector_cache=false           likewise

Without the argument the functions of vLLM run as they are.

Invariant: all of it is in place, or none. It is not loaded if the version, or any function it
replaces or relies on, is not one it was tested with.
"""

import logging
import os

from vllm_keep_tier import compatibility

# A child of vLLM's own logger, so that its lines go where vLLM's go.
logger = logging.getLogger("vllm.keep_tier")

_is_loaded = False


def register() -> None:
    """What vLLM calls in each process, more than once in some."""
    global _is_loaded
    if _is_loaded or os.environ.get("VLLM_KEEP_TIER") != "1":
        return
    differences = compatibility.differences()
    if differences:
        logger.warning(
            "vllm-keep-tier is NOT loaded, and clear_connector_cache is not an argument of "
            "/sleep and /pause: %s",
            "; ".join(differences),
        )
        return
    _replace()
    _is_loaded = True
    logger.warning(
        "vllm-keep-tier replaces functions of vLLM %s at run time: %s",
        compatibility.vllm_version(),
        ", ".join(target.name for target in compatibility.TARGETS if target.is_replaced),
    )


def _replace() -> None:
    # Here, because these import vLLM: an environment without the plugin asked for, or with
    # another vLLM, must not fail on an import.
    from vllm_keep_tier import core, flush, frontend

    core.install()
    flush.install()
    frontend.install()
