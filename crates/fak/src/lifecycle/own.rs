//! Requests of fak's own, straight to an engine: past the gateway, whose doors may be shut.
//!
//! Invariant: each has a salt of its own, so that it is in nobody's prompts.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use serde_json::Value;

use crate::engine::{Data, Engine, Error, Outgoing, RANK_HEADER, Response};

/// Sends `body` to the data-parallel rank of that number, or to whichever the engine picks, and
/// waits for all of the answer.
///
/// # Errors
/// The engine does not answer within `within`.
pub(super) async fn ask(
    engine: &Engine,
    path: Data,
    body: &Value,
    rank: Option<u32>,
    within: Duration,
) -> Result<Response, Error> {
    let mut headers = HeaderMap::new();
    headers.extend(rank.map(|rank| (RANK_HEADER, HeaderValue::from(rank))));
    let to = engine.endpoints().data(path);
    let request = Outgoing::to(to).json(body.to_string().into()).headers(headers);
    engine.client().send(request, within).await
}
