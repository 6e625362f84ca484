"""The one refusal, in words that the frontend knows again when the engine core says them.

An error of the engine core reaches the frontend as text, so that the text is all there is.
"""

_WHY = "cannot keep its cache across a pause. Drop clear_connector_cache=False."


class Refused(ValueError):
    """Nothing was paused. vLLM's own routes answer a ValueError with 400."""


def refusal(connector: str) -> str:
    return f"{connector} {_WHY}"


def is_refusal(error: Exception) -> bool:
    return str(error).endswith(_WHY)
