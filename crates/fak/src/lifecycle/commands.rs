//! What is an owner told to do, and what does it do about it?
//!
//! Invariant: actions are taken on one at a time; whatever else it is told is done at once, also
//! while an action waits.

use std::sync::atomic::Ordering;

use fak_kernel::rank::Event;
use tokio::sync::oneshot;

use super::owner::Owner;
use super::{Cancelled, Command};
use crate::events::notes;
use crate::events::stream::Handle;

impl Owner {
    pub(super) async fn obey(&mut self, command: Command) {
        match command {
            Command::Act { request, done } => {
                self.hold_markers();
                let row = self.act(request).await;
                self.answer(row, done);
            }
            Command::Begin { begin, done } => {
                self.hold_markers();
                let begun = self.begin(begin).await;
                self.answer(begun, done);
            }
            Command::End { end, done } => {
                self.hold_markers();
                let ended = self.end(end).await;
                self.answer(ended, done);
            }
            command => self.attend(command).await,
        }
    }

    /// Does what is no action, and so may be done while one waits.
    pub(super) async fn attend(&mut self, command: Command) {
        match command {
            // Actions are taken on one at a time.
            Command::Act { .. } | Command::Begin { .. } | Command::End { .. } => {}
            // Whoever asked may have left.
            Command::Cancel { done } => drop(done.send(Cancelled::Nothing)),
            Command::Ranks { done } => drop(done.send(self.ranks.clone())),
            Command::Late => self.ranks.iter().for_each(Handle::catch_up),
            Command::Missed => self.tell(Event::CatchUp).await,
            Command::Contradicted { rank, claimed, cached } => {
                self.contradicted(rank, claimed, cached).await;
            }
            Command::Look { done } => {
                self.is_hinted = true;
                self.look().await;
                // Whoever asked may have left.
                let _ = done.send(());
            }
        }
    }

    /// What a rank's stream tells.
    pub(super) async fn hear(&mut self, rank: u32, news: notes::News) {
        match news {
            notes::News::Note(note) => self.note(rank, note).await,
            // Claims are made by what is shown: nobody has to wait for the next look.
            notes::News::Trust => self.publish_standing(),
        }
    }

    fn answer<T>(&mut self, what: T, done: oneshot::Sender<T>) {
        self.is_busy.store(false, Ordering::Release);
        // Whoever asked may have left; the rows are in the ledger.
        let _ = done.send(what);
        if let Some((by, told)) = self.cancelled.take() {
            let _ = by.send(told);
        }
    }
}
