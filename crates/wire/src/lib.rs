//! Bytes to plain structs, and nothing else: no I/O, no clock, no logging.
