//! Headers that fak reads and writes by itself. What of the others passes, `engine::Passing` says.

use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};

/// The worker that answers.
pub(super) const WORKER: HeaderName = HeaderName::from_static("x-fak-worker");
/// The session, both ways.
pub(super) const SESSION: HeaderName = HeaderName::from_static("x-fak-session");
/// The session of a coding agent, where nothing else names one (Claude Code).
pub(super) const AGENT_SESSION: HeaderName = HeaderName::from_static("x-claude-code-session-id");
/// Whether the worker's cache is warm for this prompt.
pub(super) const KV: HeaderName = HeaderName::from_static("x-fak-kv");
/// Why neither is claimed, where `x-fak-kv` is `unknown`.
pub(super) const KV_REASON: HeaderName = HeaderName::from_static("x-fak-kv-reason");
/// Tokens claimed, by tier.
pub(super) const WARM_TOKENS: HeaderName = HeaderName::from_static("x-fak-warm-tokens");
/// The weight version of the worker when the request was sent to it.
pub(super) const WEIGHT_VERSION: HeaderName = HeaderName::from_static("x-fak-weight-version");
/// And the version since, where that is another.
pub(super) const WEIGHT_VERSION_MIXED: HeaderName =
    HeaderName::from_static("x-fak-weight-version-mixed");
/// Workers that were tried.
pub(super) const ATTEMPTS: HeaderName = HeaderName::from_static("x-fak-attempts");
/// Tells OpenAI's clients whether to repeat the request by themselves.
pub(super) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// The request's name, both ways.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Tells nginx and its kin not to collect a stream.
pub(super) const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// vLLM's choice of a data-parallel rank (since 0.12.0).
pub(super) use crate::engine::RANK_HEADER as RANK;
/// A priority that vLLM takes before the body's (since 0.28.0, source).
pub(super) const PRIORITY: HeaderName = HeaderName::from_static("x-vllm-priority");
/// What of an answer a page of another origin may read, beside what every page may.
pub const EXPOSED: [HeaderName; 10] = [
    WORKER,
    SESSION,
    KV,
    KV_REASON,
    WARM_TOKENS,
    WEIGHT_VERSION,
    WEIGHT_VERSION_MIXED,
    ATTEMPTS,
    REQUEST_ID,
    RETRY_AFTER,
];

/// The client's request id, or a new one. The one given is kept as it is.
pub(super) fn request_id(headers: &HeaderMap) -> HeaderValue {
    headers.get(REQUEST_ID).filter(|value| !value.is_empty()).cloned().unwrap_or_else(|| {
        let text = format!("{:032x}", fastrand::u128(..));
        HeaderValue::try_from(text).expect("hexadecimal digits are a header value")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_is_kept_or_made() {
        let mut headers = HeaderMap::new();
        let (one, other) = (request_id(&headers), request_id(&headers));
        assert_eq!(one.len(), 32);
        assert_ne!(one, other);
        headers.insert(REQUEST_ID, HeaderValue::from_static("mine"));
        assert_eq!(request_id(&headers), "mine");
    }
}
