//! Every integration test of the product, in one binary.

mod engine;
mod events;
mod run;
mod store;
