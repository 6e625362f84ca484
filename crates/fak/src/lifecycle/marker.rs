//! Markers: a request of fak's own, whose store shows where in a rank's event stream its sending
//! lies.
//!
//! What it costs: a prompt of one block and one token of output, on an engine that
//! serves. It is sent only where replay cannot show that an action is behind (no replay socket, or
//! traffic that leaves no quiet moment). Invariant: its tokens are random, so no earlier store can
//! be taken for it, and a salt of its own keeps it out of everybody's prompts.

use std::time::Duration;

use fak_index::Prompt;
use fak_kernel::rank::Event;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::own;
use crate::engine::{Data, Engine};
use crate::events::fold::Marker;
use crate::events::stream::Handle;

/// Block size where no engine told one: more than any that was seen but the largest of hybrid
/// models.
const BLOCK_SIZE: u32 = 1024;
/// Tokens by which the store is recognised, where a block has so many: 180 random bits.
const SHOWN_TOKENS: u32 = 16;
/// Token ids to draw from: in every vocabulary, and no special token of those that were seen.
const TOKENS: std::ops::Range<u32> = 300..3000;
/// Time for a request that an action waits for.
const WITHIN: Duration = Duration::from_secs(10);
/// Time for a marker: an engine's queue may be long, and whoever sends it gives it up by itself.
const MARKED_WITHIN: Duration = Duration::from_secs(24 * 3600);

/// What a marker is sent to.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) engine: &'a Engine,
    pub(super) model: &'a str,
    /// As the engine told it.
    pub(super) block_size: Option<u32>,
    /// The number of the rank that its rank header calls 0.
    pub(super) first_rank: u32,
    /// Whether it has no other rank than the one that is asked.
    pub(super) is_only_rank: bool,
}

/// A request that no other can be taken for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) prompt: Vec<u32>,
    pub(super) salt: String,
}

impl Request {
    /// One that fills a block of `block_size`.
    pub(super) fn new(block_size: Option<u32>) -> Self {
        // One token more than a block: the block with the last token is not stored before it is
        // full.
        let tokens = 0..=block_size.unwrap_or(BLOCK_SIZE);
        let prompt = tokens.map(|_| fastrand::u32(TOKENS)).collect();
        Self { prompt, salt: format!("fak-marker-{}", fastrand::u64(..)) }
    }

    /// As the index asks for it.
    pub(super) fn key(&self) -> Prompt<'_> {
        Prompt { tokens: &self.prompt, lora: None, salt: Some(&self.salt) }
    }
}

/// Sends the marker `id` to the rank behind `handle`.
pub(super) async fn send(to: Target<'_>, handle: &Handle, id: u64) {
    let request = Request::new(to.block_size);
    let tokens = to.block_size.map_or(SHOWN_TOKENS, |size| size.min(SHOWN_TOKENS));
    let tokens = request.prompt.iter().copied().take(tokens as usize).collect();
    if handle.expect(Marker { id, tokens }).await.is_ok()
        && post_within(to, handle, &request, MARKED_WITHIN).await
    {
        // A stream that has ended wants no marker.
        let _ = handle.tell(Event::Marked { id }).await;
    }
}

/// Sends a request to the rank behind `handle`, and waits until it is answered.
pub(super) async fn post(to: Target<'_>, handle: &Handle, request: &Request) {
    post_within(to, handle, request, WITHIN).await;
}

/// The same, for `within`; whether it was answered with success.
pub(super) async fn post_within(
    to: Target<'_>,
    handle: &Handle,
    request: &Request,
    within: Duration,
) -> bool {
    let Target { engine, model, first_rank, is_only_rank, .. } = to;
    let body = json!({
        "model": model,
        "prompt": request.prompt,
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": request.salt,
    });
    let ask = |rank| own::ask(engine, Data::Completions, &body, rank, within);
    let mut answered = ask(handle.rank().checked_sub(first_rank)).await;
    // Under hybrid and external load balancing the header counts local ranks; where the engine does
    // not tell which they are, its only one needs no header.
    if is_only_rank && matches!(&answered, Ok(a) if a.status == StatusCode::BAD_REQUEST) {
        answered = ask(None).await;
    }
    match answered {
        Ok(answer) if answer.status.is_success() => return true,
        Ok(answer) => tracing::warn!(status = %answer.status, "the engine refused a marker"),
        Err(error) => tracing::warn!(%error, "a marker was not answered"),
    }
    false
}
