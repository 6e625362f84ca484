//! What does an action wait for, who may see it, and who may end the wait?
//!
//! Invariant: while requests that are inside may end, the worker is looked at as at any other time;
//! and what is sent then is planned by how the engine stands once they have.

use std::pin::pin;

use fak_kernel::witness::{Mode, Move, Quarantine, Refusal};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until};

use super::act::{Planned, Ready};
use super::owner::Owner;
use super::rows::new_intent;
use super::{Cancelled, Command, Error, Request};
use crate::fleet::{Busy, Stage};

/// How a wait ended.
enum Waited {
    /// Nobody is inside any more.
    Empty,
    /// Somebody is, and the time is over.
    TooLong,
    /// Somebody said that it is not to be done.
    Cancelled(tokio::sync::oneshot::Sender<Cancelled>),
}

impl Owner {
    /// Shows what is about to be done.
    pub(super) fn show_busy(&mut self, request: &Request) {
        let intent = new_intent(request.mv, None);
        self.state.busy = Some(Busy {
            action: intent.action,
            level: intent.level,
            since: self.config.store.now().into(),
            holder: request.holder.as_deref().map(Into::into),
            session: request.session.as_deref().map(Into::into),
            stage: Stage::Begins,
        });
        self.publish_standing();
    }

    fn show_stage(&mut self, stage: Stage) {
        if let Some(busy) = &mut self.state.busy {
            busy.stage = stage;
        }
        self.publish_standing();
    }

    /// Shuts the door, and waits for requests in flight where the action's mode lets them end, or
    /// where it is about the cache that they were promised. A reset that preempts them does not
    /// wait: that is what it is for.
    pub(super) async fn drained(&mut self, ready: Ready) -> Result<Planned, Error> {
        self.worker.door.shut();
        if !waits(ready.request.mv) || self.worker.door.in_flight() == 0 {
            self.show_stage(Stage::Runs);
            return Ok(Planned::Ready(ready));
        }
        let until = Instant::now() + ready.request.drain;
        self.show_stage(Stage::Drains { until });
        let (refusal, by) = match self.emptied(until).await {
            Waited::Empty => (None, None),
            Waited::TooLong => (Some(Refusal::DrainTimeout), None),
            Waited::Cancelled(by) => (Some(Refusal::Cancelled), Some(by)),
        };
        self.show_stage(Stage::Runs);
        let look = self.look_first().await?;
        let Some(refusal) = refusal else {
            // The engine may stand otherwise than before.
            return self.planned(ready.request, &look).await;
        };
        let row = self.refuse(&ready.request, refusal, &look).await;
        if let Some(by) = by {
            let told = row.as_ref().ok().map(|row| Box::new(row.clone()));
            self.cancelled = Some((by, told.map_or(Cancelled::Unwritten, Cancelled::Row)));
        }
        Ok(Planned::Refused(Box::new(row?)))
    }

    async fn emptied(&mut self, until: Instant) -> Waited {
        let door = self.worker.door.clone();
        let (mut empty, mut over) = (pin!(door.empty()), pin!(sleep_until(until)));
        let every = self.config.probe_every;
        let mut tick = interval_at(Instant::now() + every, every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = &mut empty => return Waited::Empty,
                () = &mut over => return Waited::TooLong,
                _ = tick.tick() => self.look().await,
                (rank, news) = self.notes.1.recv() => self.hear(rank, news).await,
                Some(command) = self.commands.recv() => match command {
                    Command::Cancel { done } => return Waited::Cancelled(done),
                    command => self.attend(command).await,
                },
            }
        }
    }
}

/// Whether requests that are inside may end first.
fn waits(mv: Move) -> bool {
    matches!(
        mv,
        Move::Pause { mode: Mode::Wait, .. }
            | Move::Sleep { mode: Mode::Wait, .. }
            | Move::Reset { running: false, .. }
            | Move::Quarantine(Quarantine::Flush)
    )
}
