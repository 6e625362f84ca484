//! Headers on their way through: one rule for every route.
//!
//! Invariant: end-to-end headers are kept, hop-by-hop ones dropped, those named in `Connection`
//! included; length and host are made anew; no key of a client's is ever sent to an engine.

use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap,
    HeaderName, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};

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
/// Anthropic clients send their key here.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// fak's own names. None of them comes from an engine.
const OWN: [HeaderName; 8] =
    [WORKER, SESSION, KV, KV_REASON, WARM_TOKENS, ATTEMPTS, WEIGHT_VERSION, WEIGHT_VERSION_MIXED];

/// Names that are dropped from a request besides. `Accept-Encoding`: fak asks for
/// [`identity`](to_engine) instead. `Expect`: fak has the body already.
const REQUEST_ONLY: [HeaderName; 7] =
    [HOST, CONTENT_LENGTH, AUTHORIZATION, API_KEY, ACCEPT_ENCODING, EXPECT, SESSION];

/// What of a request's headers goes to an engine. `Accept-Encoding: identity`, since usage could
/// not be read off an answer that is compressed, an event stream must not be, and without a word
/// any encoding is right (RFC 9110, 12.5.3).
pub(super) fn to_engine(mut headers: HeaderMap, request_id: &HeaderValue) -> HeaderMap {
    drop_hop_by_hop(&mut headers);
    for name in &REQUEST_ONLY {
        headers.remove(name);
    }
    headers.insert(REQUEST_ID, request_id.clone());
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    headers
}

/// What of an engine's headers goes to the client. fak's own names are fak's alone.
pub(super) fn to_client(headers: &mut HeaderMap) {
    drop_hop_by_hop(headers);
    for name in &OWN {
        headers.remove(name);
    }
}

fn drop_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

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
    fn only_end_to_end_headers_pass() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("traceparent", "00-1-2-01"),
            ("connection", "x-foo, Keep-Alive"),
            ("connection", "x-bar"),
            ("x-foo", "1"),
            ("x-bar", "1"),
            ("keep-alive", "1"),
            ("te", "trailers"),
            ("authorization", "Bearer gateway"),
            ("x-api-key", "gateway"),
            ("content-length", "9"),
            ("host", "fak"),
            ("x-data-parallel-rank", "1"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let passed = to_engine(headers, &HeaderValue::from_static("id"));
        let mut names: Vec<_> = passed.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["accept-encoding", "traceparent", "x-data-parallel-rank", "x-request-id"]
        );
    }

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
