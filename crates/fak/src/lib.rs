//! The product: one library and one binary.
