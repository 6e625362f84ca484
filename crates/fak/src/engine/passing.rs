//! Headers on their way between clients and engines: one rule for every route.
//!
//! Invariant: what passes is listed, both ways: a header that nobody thought of may hold a secret
//! of the client's, and goes to no engine; an engine's cookies, challenges and redirects are
//! between it and fak. Host and length are made anew.

use http::header::{
    ACCEPT, ACCEPT_ENCODING, ACCEPT_LANGUAGE, CACHE_CONTROL, CONNECTION, CONTENT_DISPOSITION,
    CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_TYPE, DATE, HeaderMap, HeaderName,
    HeaderValue, RETRY_AFTER, USER_AGENT, VARY,
};

use super::RANK_HEADER;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// What of a request's headers goes to an engine, besides [`VLLM`] and what the settings add.
const TO_ENGINE: [HeaderName; 14] = [
    ACCEPT,
    ACCEPT_LANGUAGE,
    CONTENT_ENCODING,
    CONTENT_LANGUAGE,
    CONTENT_TYPE,
    USER_AGENT,
    RANK_HEADER,
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    HeaderName::from_static("anthropic-version"),
    HeaderName::from_static("anthropic-beta"),
    // Whether a request of OpenAI's clients is a repetition, and of which version they are.
    HeaderName::from_static("x-stainless-retry-count"),
    HeaderName::from_static("x-stainless-package-version"),
    // Asks vLLM for its load in the answer's head (source).
    HeaderName::from_static("endpoint-load-metrics-format"),
];
/// What of an engine's headers goes to the client, besides [`VLLM`] and what the settings add.
const TO_CLIENT: [HeaderName; 13] = [
    CACHE_CONTROL,
    CONTENT_DISPOSITION,
    CONTENT_ENCODING,
    CONTENT_LANGUAGE,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    DATE,
    RETRY_AFTER,
    VARY,
    REQUEST_ID,
    HeaderName::from_static("x-should-retry"),
    HeaderName::from_static("endpoint-load-metrics"),
    HeaderName::from_static("traceparent"),
];
/// vLLM's own headers begin so.
const VLLM: &str = "x-vllm-";

/// Names that no setting can add: secrets, what fak makes anew, and what is of one hop alone.
const NEVER: [&str; 17] = [
    "authorization",
    "proxy-authorization",
    "proxy-authenticate",
    "proxy-connection",
    "www-authenticate",
    "x-api-key",
    "cookie",
    "set-cookie",
    "host",
    "content-length",
    "expect",
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The names that pass besides those of the lists, both ways.
#[derive(Clone, Debug, Default)]
pub struct Passing(Vec<HeaderName>);

impl Passing {
    /// Those of a setting.
    ///
    /// # Errors
    ///
    /// The first that is no header's name, or may never pass.
    pub fn new(names: &[String]) -> Result<Self, String> {
        let named = |name: &String| {
            let may = HeaderName::try_from(name.as_str()).ok().filter(|name| {
                !NEVER.contains(&name.as_str()) && !name.as_str().starts_with("x-fak-")
            });
            may.ok_or_else(|| name.clone())
        };
        names.iter().map(named).collect::<Result<_, _>>().map(Self)
    }

    /// What of a request's headers goes to an engine. `Accept-Encoding: identity`, since usage
    /// could not be read off an answer that is compressed, an event stream must not be, and without
    /// a word any encoding is right (RFC 9110, 12.5.3).
    pub(crate) fn to_engine(&self, headers: &HeaderMap, request_id: &HeaderValue) -> HeaderMap {
        let mut passed = self.pass(headers, &TO_ENGINE);
        passed.insert(REQUEST_ID, request_id.clone());
        passed.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        passed
    }

    /// What of an engine's headers goes to the client.
    pub(crate) fn to_client(&self, headers: &HeaderMap) -> HeaderMap {
        self.pass(headers, &TO_CLIENT)
    }

    /// The names that a setting added.
    pub(crate) fn added(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(HeaderName::as_str)
    }

    fn pass(&self, headers: &HeaderMap, listed: &[HeaderName]) -> HeaderMap {
        let of_this_hop = named_in_connection(headers);
        let passes = |name: &HeaderName| {
            let is_listed = listed.contains(name) || name.as_str().starts_with(VLLM);
            (is_listed || self.0.contains(name)) && !of_this_hop.contains(name)
        };
        let passed = headers.iter().filter(|(name, _)| passes(name));
        passed.map(|(name, value)| (name.clone(), value.clone())).collect()
    }
}

/// Headers that concern this connection alone (RFC 9110, 7.6.1).
fn named_in_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).filter_map(|name| name.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(&'static str, &'static str)]) -> HeaderMap {
        let one = |&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
        all.iter().map(one).collect()
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn only_listed_headers_reach_an_engine() {
        let mut sent = headers(&[
            ("traceparent", "00-1-2-01"),
            ("content-type", "application/json"),
            ("x-data-parallel-rank", "1"),
            ("x-vllm-priority", "1"),
            ("x-of-settings", "1"),
            ("x-unknown", "1"),
            ("connection", "accept, Keep-Alive"),
            ("accept", "*/*"),
            ("te", "trailers"),
            ("content-length", "9"),
            ("host", "fak"),
            ("accept-encoding", "gzip"),
        ]);
        for secret in [
            "authorization",
            "x-api-key",
            "proxy-authorization",
            "x-fak-key",
            "api-key",
            "x-goog-api-key",
            "ocp-apim-subscription-key",
            "cookie",
            "x-forwarded-access-token",
            "x-vault-token",
        ] {
            sent.insert(HeaderName::from_static(secret), HeaderValue::from_static("hunter2"));
        }
        let passing = Passing::new(&["X-Of-Settings".into()]).expect("it may pass");
        let passed = passing.to_engine(&sent, &HeaderValue::from_static("id"));
        assert_eq!(
            names(&passed),
            [
                "accept-encoding",
                "content-type",
                "traceparent",
                "x-data-parallel-rank",
                "x-of-settings",
                "x-request-id",
                "x-vllm-priority"
            ]
        );
        assert_eq!(passed[ACCEPT_ENCODING], "identity");
    }

    #[test]
    fn only_listed_headers_reach_a_client() {
        let sent = headers(&[
            ("content-type", "application/json"),
            ("set-cookie", "a=b"),
            ("www-authenticate", "Bearer"),
            ("location", "http://10.0.0.1/"),
            ("server", "uvicorn"),
            ("x-fak-kv", "warm"),
            ("connection", "vary"),
            ("vary", "origin"),
            ("retry-after", "1"),
        ]);
        let passed = Passing::default().to_client(&sent);
        assert_eq!(names(&passed), ["content-type", "retry-after"]);
    }

    #[test]
    fn no_setting_lets_a_secret_or_faks_own_names_pass() {
        for name in NEVER.into_iter().chain(["x-fak-kv", "X-FAK-KEY", "no name", ""]) {
            assert_eq!(Passing::new(&[name.into()]).expect_err(name), name);
        }
    }
}
