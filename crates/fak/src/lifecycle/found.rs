//! Is a worker that vanished the process that it was, in the state that it was in?
//!
//! A silence of HTTP alone, as of a proxy or of a busy front end, costs an engine nothing of its
//! cache. What was believed of it was set aside, and counts again where it is back. Invariant: it
//! is back by the start of its process and by its state together, with nothing noticed and nothing
//! done in between; what became of its cache meanwhile is in its event stream, and nothing is
//! claimed before a marker came back on it.

use std::sync::Arc;

use fak_kernel::rank::Event;
use fak_kernel::witness::{Level, Move, Seen, Standing};

use super::mixed::Shown;
use super::owner::Owner;
use super::probe::Look;

/// What held of a worker when it vanished.
pub(super) struct Vanished {
    incarnation: Arc<str>,
    standing: Standing,
    is_kept_at_rest: bool,
    slept: Option<Level>,
}

impl Owner {
    /// Keeps what holds of the worker, where `mv` says that it vanished; any other move ends that.
    pub(super) fn keep_vanished(&mut self, mv: Move) {
        let incarnation = self.state.incarnation.clone().filter(|_| mv == Move::Lost);
        self.vanished = incarnation.map(|incarnation| Vanished {
            incarnation,
            standing: self.state.standing,
            is_kept_at_rest: self.state.pace.is_kept_at_rest,
            slept: self.slept,
        });
    }

    /// Takes the worker back, where a look shows it to be the process that vanished, as it was.
    pub(super) async fn find(&mut self, look: &Look) {
        let shown = self.shown(&look.observation);
        let is_back = |v: &Vanished| {
            look.incarnation().as_ref() == Some(&v.incarnation) && self.is_in(&v.standing, &shown)
        };
        if !self.vanished.as_ref().is_some_and(is_back) {
            return;
        }
        let Some(vanished) = self.vanished.take() else { return };
        self.state.standing = vanished.standing;
        self.state.pace.is_kept_at_rest = vanished.is_kept_at_rest;
        self.slept = vanished.slept;
        self.tell(Event::Found).await;
        tracing::info!(worker = %self.worker.id, "answers again: the same process, as it was");
    }

    fn is_in(&self, standing: &Standing, shown: &Shown) -> bool {
        let seen = self.seen(shown);
        !matches!(seen, Seen::Nothing | Seen::Gone | Seen::Unnamed) && standing.agrees(seen)
    }
}
