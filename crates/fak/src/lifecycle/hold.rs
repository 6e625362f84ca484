//! Whose is a worker, while its device's memory is somebody else's?
//!
//! Invariant: a hold is durable before anything is done under it, and outlives fak; while there is
//! one the worker takes no requests, however awake its engine is; and it ends where its holder ends
//! it, or where a forced action leaves the worker serving.

use serde_json::Value;

use super::Error;
use super::canary::Record;
use super::owner::Owner;
use crate::store;

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
    pub(super) async fn take_hold(
        &mut self,
        holder: &str,
        canary: Option<&Record>,
    ) -> Result<(), Error> {
        let canary = canary.map_or(Value::Null, Record::json);
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

    pub(super) fn is_held_by(&self, holder: &str) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.holder == holder)
    }

    fn show_hold(&mut self) {
        self.state.held_by = self.hold.as_ref().map(|hold| hold.holder.as_str().into());
    }
}
