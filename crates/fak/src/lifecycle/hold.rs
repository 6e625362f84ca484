//! Whose is a worker, while its device's memory is somebody else's?
//!
//! Invariant: a hold is durable before anything is done under it, and outlives fak; while there is
//! one the worker takes no requests, however awake its engine is; and it ends where its holder ends
//! it, or where a forced action leaves the worker serving.

use serde_json::json;

use super::Error;
use super::canary::Record;
use super::owner::Owner;
use super::planted::Planted;
use crate::store;

/// What an engine did before it slept, to be held against what it does after.
#[derive(Clone, Debug, Default)]
pub(super) struct Before {
    pub(super) answers: Option<Record>,
    pub(super) planted: Option<Planted>,
}

impl Owner {
    /// Asks the store, once, whose the worker is.
    pub(super) async fn recall_hold(&mut self) -> Result<(), store::Error> {
        if !self.is_recalled {
            self.hold = self.config.store.hold_get(&self.worker.id).await?;
            self.is_recalled = true;
            self.show_hold();
        }
        Ok(())
    }

    /// Puts the worker into `holder`'s hands; nobody enters it from here on.
    pub(super) async fn take_hold(&mut self, holder: &str, before: &Before) -> Result<(), Error> {
        let canary = json!({
            "answers": before.answers.as_ref().map(Record::json),
            "planted": before.planted,
        });
        self.hold = Some(self.config.store.hold_put(&self.worker.id, holder, canary).await?);
        self.show_hold();
        self.worker.door.shut();
        self.publish_standing();
        Ok(())
    }

    /// Lets the worker go.
    pub(super) async fn let_go(&mut self) -> Result<(), Error> {
        if self.hold.is_some() {
            self.config.store.hold_delete(&self.worker.id).await?;
            self.hold = None;
            self.show_hold();
        }
        Ok(())
    }

    /// What is known of the engine from before its sleep.
    pub(super) fn before(&self) -> Before {
        let Some(hold) = &self.hold else { return Before::default() };
        let planted = serde_json::from_value(hold.canary["planted"].clone());
        Before {
            answers: Record::from_json(&hold.canary["answers"]),
            planted: planted.ok().flatten(),
        }
    }

    pub(super) fn is_held_by(&self, holder: &str) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.holder == holder)
    }

    fn show_hold(&mut self) {
        self.state.held_by = self.hold.as_ref().map(|hold| hold.holder.as_str().into());
    }
}
