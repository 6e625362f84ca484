//! Bodies of control requests: options are a few words.
//!
//! Invariant: no body is waited for that is announced too long or comes too slowly, and no handler
//! runs before its body is there whole.

use std::time::Duration;

use axum::Json;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::{Method, StatusCode};
use http_body_util::LengthLimitError;
use hyper::body::Body as _;
use tokio::time::timeout;

use super::dropin;
use super::error::Error;

/// Bytes of a body.
pub(super) const BYTES_MAX: usize = 64 << 10;
/// Time for one to come whole.
const WITHIN: Duration = Duration::from_secs(10);

/// Why a body is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Refused {
    #[error("the body is larger than {BYTES_MAX} bytes, the most that a control request may have")]
    TooLarge,
    #[error("the body did not come whole within {} s", WITHIN.as_secs())]
    Slow,
    #[error("the body could not be read to its end")]
    Cut,
}

/// Reads the body of a request that may have one before its handler runs.
pub(super) async fn bounded(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let has_none = matches!(parts.method, Method::GET | Method::HEAD);
    let read = if has_none { Ok(Bytes::new()) } else { read(body).await };
    match read {
        Ok(body) => next.run(Request::from_parts(parts, Body::from(body))).await,
        Err(refused) => refused.answer(parts.uri.path()),
    }
}

async fn read(body: Body) -> Result<Bytes, Refused> {
    if body.size_hint().lower() > BYTES_MAX as u64 {
        return Err(Refused::TooLarge);
    }
    let read = timeout(WITHIN, to_bytes(body, BYTES_MAX)).await.map_err(|_| Refused::Slow)?;
    read.map_err(|error| {
        let cause = std::error::Error::source(&error);
        let is_too_large = cause.is_some_and(|cause| cause.is::<LengthLimitError>());
        if is_too_large { Refused::TooLarge } else { Refused::Cut }
    })
}

impl Refused {
    /// In the shape that `path` has for errors.
    fn answer(self, path: &str) -> Response {
        let (status, code) = match self {
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            Self::Slow => (StatusCode::REQUEST_TIMEOUT, "body_slow"),
            Self::Cut => (StatusCode::BAD_REQUEST, "body_cut"),
        };
        if path.starts_with("/fak/") {
            return Error::new(status, code, self.to_string()).into_response();
        }
        (status, Json(dropin::envelope(status, &self.to_string(), Some("body")))).into_response()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream::{self, StreamExt as _};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stays_away_is_waited_for_so_long_and_no_longer() {
        let begun = tokio::time::Instant::now();
        let some = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"{"))]);
        let body = Body::from_stream(some.chain(stream::pending()));
        assert_eq!(read(body).await, Err(Refused::Slow));
        assert_eq!(begun.elapsed(), WITHIN);
    }

    #[tokio::test]
    async fn a_body_is_bounded_whether_or_not_it_says_its_length() {
        let of = |length: usize| Bytes::from(vec![b' '; length]);
        assert_eq!(read(Body::from(of(BYTES_MAX))).await, Ok(of(BYTES_MAX)));
        assert_eq!(read(Body::from(of(BYTES_MAX + 1))).await, Err(Refused::TooLarge));
        let parts = vec![Ok::<_, Infallible>(of(BYTES_MAX)), Ok(of(1))];
        assert_eq!(read(Body::from_stream(stream::iter(parts))).await, Err(Refused::TooLarge));
    }
}
