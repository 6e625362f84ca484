//! The vLLM adapter: one engine, over its public surfaces alone.
//!
//! Invariant: every URL comes from `endpoints`, every wait is bounded by `client`, and nothing
//! here judges: what was asked, answered and observed is handed on as data.

mod capabilities;
mod client;
mod completions;
mod connection;
mod control;
mod endpoints;
mod identity;
mod models;
mod passing;
mod scrape;
mod secret;
mod tokens;
mod unmatchable;

pub use capabilities::{Capabilities, KvIdentity, Learnt, Offload, Settings};
pub use client::{
    BODY_BYTES_MAX, BadKey, Body, BoxError, Client, Error, NEVER, Outgoing, Response, Streaming,
    Timeouts, Wait,
};
pub use completions::{Admitted, Event, StartError, Turn, TurnEnd, TurnStream, Unary};
pub use control::{Answer, Called, NotSent, Observation, Seen, Success};
pub use endpoints::{
    BadUrl, Control, ControlPath, Data, Endpoints, EngineUrl, Mode, NotAllowed, Origin, SleepLevel,
    WakeTag,
};
pub use fak_kernel::witness::SleepState;
pub use identity::{Identity, Isolation, Stamp};
pub use models::{Model, Models, Named};
pub use passing::Passing;
pub use scrape::ScrapeError;
pub use secret::Secret;
pub use tokens::{TokensError, prompt_digest, prompt_shape};
pub use unmatchable::{Unmatchable, skips_prefix_cache, unmatchable};

/// Asks for the data-parallel rank of this number.
pub const RANK_HEADER: http::HeaderName = http::HeaderName::from_static("x-data-parallel-rank");

/// One vLLM engine. Cheap to clone; clones share connections.
#[derive(Clone, Debug)]
pub struct Engine {
    client: Client,
    endpoints: Endpoints,
}

impl Engine {
    /// The engine at `endpoints`.
    #[must_use]
    pub fn new(client: Client, endpoints: Endpoints) -> Self {
        Self { client, endpoints }
    }

    /// Its URLs.
    #[must_use]
    pub fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// The HTTP client, for a part that relays.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }
}
