//! Who may ask for control?
//!
//! Invariant: without the configured key nobody, told or not told which part was wrong; and where
//! no key is configured, nobody but a program on this machine that no web page made ask.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::header::{AUTHORIZATION, HOST, HeaderMap, ORIGIN, WWW_AUTHENTICATE};
use http::uri::Authority;
use http::{HeaderValue, StatusCode};
use sha2::Sha256;

use super::AdminState;
use super::error::Error;
use crate::engine::Secret;

/// Whom control is given to.
#[derive(Clone, Debug)]
pub struct Access {
    /// The admin key.
    pub key: Option<Secret>,
    /// Whether fak listens on loopback alone. Only there may the key be left out.
    pub is_loopback_only: bool,
}

/// Lets requests through that may ask for control.
pub(super) async fn require(
    State(state): State<AdminState>,
    request: Request,
    next: Next,
) -> Response {
    let Err(error) = state.access.check(request.headers()) else {
        return next.run(request).await;
    };
    let is_unauthorized = error.status() == StatusCode::UNAUTHORIZED;
    let mut response = error.into_response();
    if is_unauthorized {
        let scheme = HeaderValue::from_static("Bearer");
        response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
    }
    response
}

impl Access {
    fn check(&self, headers: &HeaderMap) -> Result<(), Error> {
        let denied = |message| Err(Error::new(StatusCode::UNAUTHORIZED, "unauthorized", message));
        match &self.key {
            Some(key) => match given(headers) {
                Some(given) if is_same(key.expose().as_bytes(), given) && !given.is_empty() => {
                    Ok(())
                }
                Some(_) => denied("the admin key is wrong"),
                None => denied("control needs the admin key, as a bearer token or x-fak-key"),
            },
            None if !self.is_loopback_only => {
                denied("no admin key is configured, and fak listens beyond loopback")
            }
            None => local(headers),
        }
    }
}

/// The key that a request shows.
fn given(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
    });
    bearer.or_else(|| headers.get("x-fak-key").map(HeaderValue::as_bytes))
}

/// In a time that tells nothing of where two texts differ, nor of their lengths.
fn is_same(key: &[u8], given: &[u8]) -> bool {
    let digest = |text: &[u8]| {
        let mac = Hmac::<Sha256>::new_from_slice(text).expect("any length keys an HMAC");
        mac.chain_update(b"fak admin key")
    };
    digest(key).verify(&digest(given).finalize().into_bytes()).is_ok()
}

/// What proxies add to what they pass on.
const FORWARDED: [&str; 6] =
    ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via"];

/// A browser can be made to ask on behalf of any page, and any name can be made to lead to
/// loopback: so pages of other origins are refused, and names that are not loopback's own.
fn local(headers: &HeaderMap) -> Result<(), Error> {
    let error = |message| Error::new(StatusCode::FORBIDDEN, "forbidden_origin", message);
    let denied = |message: &str| Err(error(message.to_owned()));
    // Then it comes from wherever that proxy listens.
    if let Some(name) = FORWARDED.iter().find(|name| headers.contains_key(**name)) {
        return denied(&format!("without an admin key, no proxy may ask for control ({name})"));
    }
    let is_one = |name| headers.get_all(name).iter().nth(1).is_none();
    if !is_one(HOST) || !is_one(ORIGIN) {
        return denied("without an admin key, a request has one Host and one Origin at most");
    }
    if headers.get("sec-fetch-site").is_some_and(|site| site == "cross-site") {
        return denied("without an admin key, no page of another origin may ask for control");
    }
    // No browser leaves it out, and what cannot be read is no name of loopback's own.
    let host = headers.get(HOST).map(|host| host.to_str().unwrap_or_default());
    if !host.is_none_or(|host| host.parse().is_ok_and(|host| is_loopback(&host))) {
        return denied("without an admin key, fak is asked by a name of loopback alone");
    }
    let is_own = |origin: &HeaderValue| {
        let origin = origin.to_str().ok().and_then(|origin| origin.strip_prefix("http://"));
        origin.is_some() && origin == host
    };
    match headers.get(ORIGIN) {
        Some(origin) if !is_own(origin) => {
            denied("without an admin key, no page of another origin may ask for control")
        }
        _ => Ok(()),
    }
}

fn is_loopback(authority: &Authority) -> bool {
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let address = host.parse::<std::net::IpAddr>();
    let is_address = address.is_ok_and(|ip| ip.to_canonical().is_loopback());
    is_address || host.eq_ignore_ascii_case("localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(access: &Access, headers: &[(&str, &str)]) -> u16 {
        let headers = headers.iter().map(|(name, value)| {
            let name = http::HeaderName::from_bytes(name.as_bytes()).expect("a name");
            (name, HeaderValue::from_str(value).expect("a value"))
        });
        let headers: HeaderMap = headers.collect();
        access.check(&headers).map_or_else(|error| error.status().as_u16(), |()| 200)
    }

    fn with_key(is_loopback_only: bool) -> Access {
        Access { key: Some(Secret::new("s3cret".to_owned())), is_loopback_only }
    }

    #[test]
    fn a_configured_key_is_asked_for_everywhere() {
        for access in [with_key(true), with_key(false)] {
            assert_eq!(status(&access, &[]), 401);
            assert_eq!(status(&access, &[("authorization", "Bearer s3cret")]), 200);
            assert_eq!(status(&access, &[("authorization", "bearer s3cret")]), 200);
            assert_eq!(status(&access, &[("x-fak-key", "s3cret")]), 200);
            for wrong in ["s3cre", "s3cret ", "S3cret", "", "s3crets3cret"] {
                assert_eq!(status(&access, &[("x-fak-key", wrong)]), 401, "{wrong:?}");
            }
            assert_eq!(status(&access, &[("authorization", "Basic s3cret")]), 401);
            assert_eq!(status(&access, &[("authorization", "s3cret")]), 401);
        }
    }

    #[test]
    fn an_empty_key_opens_nothing() {
        let access = Access { key: Some(Secret::new(String::new())), is_loopback_only: true };
        for headers in [&[][..], &[("x-fak-key", "")], &[("authorization", "Bearer ")]] {
            assert_eq!(status(&access, headers), 401, "{headers:?}");
        }
    }

    #[test]
    fn without_a_key_only_loopback_is_served() {
        let open = Access { key: None, is_loopback_only: false };
        assert_eq!(status(&open, &[("host", "127.0.0.1:8080")]), 401);
        let local = Access { key: None, is_loopback_only: true };
        let mapped = "[::ffff:127.0.0.1]:8080";
        let named = ["127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "127.9.9.9"];
        for host in named.into_iter().chain([mapped]) {
            assert_eq!(status(&local, &[("host", host)]), 200, "{host}");
        }
        // A backtick may stand in a name for a browser, and is none of a name's for others.
        let foreign = ["127.0.0.1.evil.example", "10.0.0.1", "[::ffff:10.0.0.1]", "a`b.evil"];
        for host in foreign.into_iter().chain(["evil.example:8080"]) {
            assert_eq!(status(&local, &[("host", host)]), 403, "{host}");
        }
    }

    #[test]
    fn without_a_key_no_page_of_another_origin_asks() {
        let local = Access { key: None, is_loopback_only: true };
        let ask = |origin| status(&local, &[("host", "127.0.0.1:8080"), ("origin", origin)]);
        assert_eq!(ask("http://127.0.0.1:8080"), 200);
        for origin in ["http://evil.example", "null", "http://127.0.0.1:9090"] {
            assert_eq!(ask(origin), 403, "{origin}");
        }
    }
}
