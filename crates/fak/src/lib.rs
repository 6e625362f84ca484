//! The product: one library and one binary.

pub mod events;
