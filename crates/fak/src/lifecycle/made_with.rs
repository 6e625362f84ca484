//! What is a worker's KV computed with, in each of its lives?
//!
//! A tier that outlives a process may hold KV that was computed with another revision or in another
//! type. Invariant: what a life told is kept until the next has told, in the ledger over a restart
//! of fak, too; and what changed between the two is in the log, and in the row of the restart where
//! the engine tells by then.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::mem;
use std::sync::Arc;

use fak_kernel::Action;
use fak_kernel::witness::Move;
use serde_json::{Map, Value, json};

use super::owner::Owner;
use crate::engine::KvIdentity;
use crate::store::{self, Filter, Row};

/// Lives that are looked through for one that told.
const LIVES_MAX: u32 = 16;

impl Owner {
    /// Takes over from the ledger what the last life told that an earlier fak asked.
    pub(super) async fn recall_kv_identity(&mut self) -> Result<(), store::Error> {
        let mut rows = Vec::new();
        for action in [Action::Join, Action::Restart] {
            let (worker, action) = (Some(self.worker.id.to_string()), Some(action));
            let limit = Some(LIVES_MAX);
            let filter = Filter { worker, action, limit, newest_first: true, ..Filter::default() };
            rows.extend(self.config.store.rows(&filter).await?);
        }
        rows.sort_by_key(|row| Reverse(row.seq));
        let told = |row: &Row| serde_json::from_value(row.observed["kv_identity"].clone()).ok()?;
        self.former = rows.iter().find_map(told).map(Arc::new);
        Ok(())
    }

    /// Another life begins: what the last one told is what the next is held against.
    pub(super) fn end_kv_identity(&mut self) {
        self.former = mem::take(&mut self.state.kv_identity).or(mem::take(&mut self.former));
    }

    /// Takes in what the engine tells.
    pub(super) fn hear_kv_identity(&mut self, now: &KvIdentity) {
        if self.state.kv_identity.is_some() {
            // Another life may have begun without a sign.
            self.end_kv_identity();
        }
        if let Some(before) = &self.former
            && let changed = changed(before, now)
            && !changed.is_empty()
        {
            let (worker, changed) = (&self.worker.id, Value::Object(changed));
            tracing::warn!(
                %worker, %changed,
                "its KV is computed otherwise than in its life before: \
                 a tier that outlives a process may hold KV of that life"
            );
        }
        self.state.kv_identity = Some(Arc::new(now.clone()));
    }

    /// Adds it to what a row shows of a life that begins.
    pub(super) async fn show_kv_identity(&mut self, mv: Move, shown: &mut Value) {
        if !matches!(mv, Move::Join | Move::Restart) {
            return;
        }
        let before = self.former.clone();
        if self.state.kv_identity.is_none()
            && let Some(settings) = self.worker.engine.settings().await.told()
        {
            self.hear_kv_identity(&settings.identity);
        }
        let now = self.state.kv_identity.as_deref();
        shown["kv_identity"] = json!(now);
        if mv == Move::Restart {
            let both = before.as_deref().zip(now);
            shown["kv_identity_changed"] = json!(both.map(|(before, now)| changed(before, now)));
        }
    }
}

/// The settings that differ, each with both values.
fn changed(before: &KvIdentity, now: &KvIdentity) -> Map<String, Value> {
    let names: BTreeSet<_> = before.keys().chain(now.keys()).collect();
    let differs = names.into_iter().filter(|name| before.get(*name) != now.get(*name));
    differs
        .map(|name| {
            let (before, now) = (before.get(name), now.get(name));
            (name.clone(), json!({ "before": before, "now": now }))
        })
        .collect()
}
