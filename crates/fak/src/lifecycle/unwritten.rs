//! Rows that the database did not take when they came.
//!
//! Beliefs, and what is learnt of an engine, never wait for the database; but the next fak starts
//! from the ledger, so no row may be left out of it. Invariant: rows that wait keep their order and
//! their time, and are written before any other row of their worker.

use std::collections::VecDeque;

use super::rows::error_chain;
use crate::store::{Error, NewIntent, Outcome, Row, Store};

/// Rows of one worker that may wait: hours of an engine that restarts every minute.
const ROWS_MAX: usize = 1024;

/// A row that waits.
#[derive(Debug)]
pub(super) enum Unwritten {
    /// What was noticed, or not sent.
    Note(Box<(NewIntent, Outcome)>),
    /// What came of an intent that is written.
    Outcome(u64, Box<Outcome>),
}

/// One worker's rows that wait, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    rows: VecDeque<(String, Unwritten)>,
}

impl Backlog {
    /// Rows that wait.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Writes what waits and then `row`, or keeps it for later where the database does not take it.
    ///
    /// # Errors
    /// The database's, where `row` waits; or that it can never be written.
    pub(super) async fn write(
        &mut self,
        store: &Store,
        worker: &str,
        row: Unwritten,
    ) -> Result<Row, Error> {
        let at = store.now();
        let written = match self.flush(store, worker).await {
            Ok(()) => put(store, &at, &row).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &written
            && error.is_of_database()
        {
            let error = error_chain(error);
            if self.rows.len() < ROWS_MAX {
                self.rows.push_back((at, row));
                let waiting = self.rows.len();
                tracing::warn!(worker, error, waiting, "a row waits for the database");
            } else {
                tracing::error!(
                    worker,
                    error,
                    ?row,
                    "a row is lost: too many wait for the database"
                );
            }
        }
        written
    }

    /// Writes what waits, as far as the database takes it.
    ///
    /// # Errors
    /// The database's: the rest waits on.
    pub(super) async fn flush(&mut self, store: &Store, worker: &str) -> Result<(), Error> {
        while let Some((at, row)) = self.rows.front() {
            match put(store, at, row).await {
                Ok(row) => tracing::info!(worker, seq = row.seq, "a row that waited is written"),
                Err(error) if error.is_of_database() => return Err(error),
                // It was written after all, when the database had failed to say so.
                Err(Error::Conflict(_)) => {}
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::error!(worker, error, ?row, "a row that waited is lost");
                }
            }
            self.rows.pop_front();
        }
        Ok(())
    }
}

async fn put(store: &Store, at: &str, row: &Unwritten) -> Result<Row, Error> {
    match row {
        Unwritten::Note(note) => {
            let (intent, outcome) = (**note).clone();
            store.note_at(intent, outcome, at).await
        }
        Unwritten::Outcome(seq, outcome) => store.outcome_at(*seq, outcome, at).await,
    }
}
