//! Who owns a task, and how it is told to stop.
//!
//! Invariant: a [`TaskGroup`] is the only caller of `spawn` in this crate, and every task has an
//! owner whose drop ends it.

mod shutdown;
mod task_group;

pub use shutdown::Shutdown;
pub use task_group::{OnExit, TaskGroup};
