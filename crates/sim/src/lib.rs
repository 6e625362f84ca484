//! A simulated vLLM that behaves as the real one was observed to.
