//! Every integration test of the product, in one binary.

mod admin;
mod bench;
mod e2e;
mod engine;
mod events;
mod gateway;
mod lifecycle;
mod owners;
mod run;
mod store;
