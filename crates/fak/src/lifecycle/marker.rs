//! Markers: a request of fak's own, whose store shows where in a rank's event stream its sending
//! lies.
//!
//! What it costs: a prompt of a few hundred tokens and one token of output, on an engine that
//! serves. It is sent only where replay cannot show that an action is behind (no replay socket, or
//! traffic that leaves no quiet moment). Invariant: its tokens are random, so no earlier store can
//! be taken for it, and a salt of its own keeps it out of everybody's prompts.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::json;

use crate::engine::{Data, Engine, Outgoing};
use crate::events::fold::Marker;
use crate::events::stream::Handle;

/// Tokens of the prompt: more than a block of any size that was seen but the largest of hybrid
/// models.
const PROMPT_TOKENS: usize = 1025;
/// Tokens by which the store is recognised: those of the smallest block.
const SHOWN_TOKENS: usize = 16;
/// Token ids to draw from: in every vocabulary, and no special token of those that were seen.
const TOKENS: std::ops::Range<u32> = 300..3000;
/// Time for the request; it is tried again while the rank is unsettled.
const WITHIN: Duration = Duration::from_secs(10);

/// Sends the marker `id` to the rank behind `handle`.
pub(super) async fn send(engine: &Engine, model: &str, handle: &Handle, id: u64) {
    let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|_| fastrand::u32(TOKENS)).collect();
    let marker = Marker { id, tokens: prompt[..SHOWN_TOKENS].to_vec() };
    if handle.expect(marker).await.is_err() {
        return;
    }
    let body = json!({
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": format!("fak-marker-{id}-{}", fastrand::u64(..)),
    });
    let mut headers = HeaderMap::new();
    let rank = HeaderName::from_static("x-data-parallel-rank");
    headers.insert(rank, HeaderValue::from(handle.rank()));
    let request = Outgoing::to(engine.endpoints().data(Data::Completions))
        .json(body.to_string().into())
        .headers(headers);
    match engine.client().send(request, WITHIN).await {
        Ok(answer) if answer.status.is_success() => {}
        Ok(answer) => tracing::warn!(status = %answer.status, "the engine refused a marker"),
        Err(error) => tracing::warn!(%error, "a marker was not answered"),
    }
}
