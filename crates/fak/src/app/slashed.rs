//! Paths with one slash too many at their end, as clients of older RL frameworks write all of them.
//!
//! Invariant: only what would be a route without that slash is redirected, to that route on the
//! same server; the lists of routes stay byte for byte.

use bytes::Bytes;
use http::header::{HeaderValue, LOCATION};
use http::{Response, StatusCode, Uri};

use crate::admin;
use crate::gateway::{Body, Gateway};

/// Where a request has to go instead, as vLLM says it: 307, so that method and body stay (0.32.0,
/// observed).
pub(super) fn redirect(uri: &Uri) -> Option<Response<Body>> {
    let path = uri.path().strip_suffix('/')?;
    if !Gateway::serves(path) && !admin::owns(path) {
        return None;
    }
    let to = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut answer = Response::new(Body::full(Bytes::new()));
    *answer.status_mut() = StatusCode::TEMPORARY_REDIRECT;
    answer.headers_mut().insert(LOCATION, HeaderValue::try_from(to).ok()?);
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_too_many_leads_to_the_route_and_to_nothing_else() {
        let led = |uri: &str| {
            let answer = redirect(&uri.parse().expect("a URI"))?;
            assert_eq!(answer.status(), 307);
            Some(answer.headers()[LOCATION].to_str().expect("text").to_owned())
        };
        for (from, to) in [
            ("/health/", "/health"),
            ("/v1/chat/completions/", "/v1/chat/completions"),
            ("/v1/models/org/m/", "/v1/models/org/m"),
            ("/sleep/?level=1&mode=abort", "/sleep?level=1&mode=abort"),
            ("/fak/v1/workers/", "/fak/v1/workers"),
        ] {
            assert_eq!(led(from).as_deref(), Some(to));
        }
        for path in
            ["/", "//", "/health", "/health//", "//health/", "/v1/", "/nothing/", "//evil.example/"]
        {
            assert_eq!(led(path), None, "{path}");
        }
    }
}
