//! The JSON of the control API, as its clients read it.
//!
//! Invariant: fields may be added; none is renamed, and none changes its meaning.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::store::Row;

/// A worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Its configured name.
    pub id: String,
    /// Where it is.
    pub url: String,
    /// The models that it serves; the last ones told while it does not answer.
    pub models: Vec<String>,
    /// What it is doing: `serving`, `paused`, `sleeping`, `waking` or `error`.
    pub phase: String,
    /// Whether requests are sent to it.
    pub serving: bool,
    /// How far its beliefs can be relied on: `exact`, `degraded` or `load-only`; `ambiguous` where
    /// it is not known which engine they are of.
    pub state: String,
    /// Why nothing can be claimed of it, where that is for an operator to mend.
    #[serde(default)]
    pub warning: Option<String>,
    /// The tiers that it has, each with `blocks`: how many are proven there; null where no rank of
    /// it publishes events.
    pub tiers: Map<String, Value>,
    /// Sessions that it served last and that are not over, the dormant ones included.
    pub sessions: u64,
    /// Requests inside.
    pub in_flight: u64,
    /// The weight version, where it is known.
    pub weight_version: Option<String>,
    /// Who holds it: then it takes no requests, and others' actions are refused.
    #[serde(default)]
    pub held_by: Option<String>,
    /// What is being done to it: `action`, `level`, `since`, `holder`, `session`, and its `stage`:
    /// `begins`, `drains` (it waits for `waits_for` requests to end, for `waits_ms_max` at most,
    /// and can be cancelled) or `runs`; null where nothing is.
    #[serde(default)]
    pub busy: Option<Value>,
    /// What keeps requests out beside the phase, and what would help; null where it serves.
    #[serde(default)]
    pub why: Option<String>,
    /// The last row on it.
    pub last_witness: Option<u64>,
    /// Why nothing is claimed of it for a while: too many claims were not borne out.
    #[serde(default)]
    pub claims_withheld: Option<String>,
    /// Why claims on it lapse unless a request of fak's own came back lately, and what to do about
    /// it.
    #[serde(default)]
    pub claims_lapse: Option<String>,
    /// How far the event stream of each rank is.
    pub streams: Vec<Stream>,
    /// Whether fak, started anew, does not know yet what of the engine's history still holds.
    pub recovering: bool,
    /// Whether the last probe got an answer.
    pub reachable: bool,
    /// False where requests run and no token came for too long.
    pub progressing: bool,
    /// This life of its process.
    pub incarnation: Option<String>,
    /// The engine's version.
    pub version: Option<String>,
    /// What its KV is computed with, by the setting's name; null where the engine does not tell.
    #[serde(default)]
    pub kv_identity: Option<BTreeMap<String, String>>,
    /// Of those sessions, the ones whose requests are taken.
    pub sessions_active: u64,
    /// Prompt tokens that fak claimed to be cached, of those sessions.
    pub claimed_tokens: u64,
    /// Prompt tokens that engines took from their caches for them.
    pub cached_tokens: u64,
}

/// How far a rank's event stream is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stream {
    /// Data-parallel rank.
    pub rank: u32,
    /// How far its beliefs can be relied on: `exact`, `degraded` or `load-only`.
    pub state: String,
    /// The last batch that was taken in: the engine numbers them from 0 in each of its lives.
    pub last_seq: Option<u64>,
    /// Whether its engine looks prompts up while no event of it is heard.
    pub blind: bool,
    /// Whether its live connection brings less than its engine publishes.
    pub dead: bool,
    /// How long its live connection has been silent; null where it never brought a batch.
    pub last_event_age_ms: Option<u64>,
}

/// A session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// Its name.
    pub id: String,
    /// The worker that served it last.
    pub worker: Option<String>,
    /// `active`, or `dormant` after a pause or a sleep.
    pub run: String,
    /// What its worker is doing; null where it has none that is known.
    pub phase: Option<String>,
    /// Whether its worker is sent requests.
    pub serving: bool,
    /// Prompt tokens that fak claimed to be cached.
    pub claimed_tokens: u64,
    /// Prompt tokens that engines took from their caches.
    pub cached_tokens: u64,
    /// The last row on it: through it, or on its worker.
    pub last_witness: Option<u64>,
    /// What put it to rest, where it is dormant: `pause` or `sleep`.
    pub reason: Option<String>,
    /// The row of that action.
    pub dormant_since: Option<u64>,
    /// Whether hits on its worker's gpu tier may be called warm: something of its own was proven
    /// after the last verdict.
    pub warm: bool,
    /// Whether it has a salt of its own, after a quarantine.
    pub isolated: bool,
    /// When it was first seen, in Unix milliseconds.
    pub created_at: i64,
    /// When it was last seen, in Unix milliseconds.
    pub last_seen_at: i64,
}

/// A refusal or a failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// What went wrong.
    pub error: FailureText,
    /// The row of the action, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row: Option<Row>,
    /// Other sessions that are active on the worker, where they are in the way.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sessions: Vec<String>,
}

impl Failure {
    /// Whether a call reached the engine all the same.
    #[must_use]
    pub fn is_of_a_sent_call(&self) -> bool {
        self.row.as_ref().is_some_and(Row::is_sent)
    }
}

/// What went wrong, in words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailureText {
    /// For people.
    pub message: String,
    /// For programs: a closed word.
    pub code: String,
    /// The part of the request that is at fault.
    pub param: Option<String>,
}
