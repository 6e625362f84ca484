//! Pages of other origins.
//!
//! Invariant: only the data plane answers them, only those that the settings name, and none by
//! default.

use std::time::Duration;

use http::{HeaderValue, Method};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::gateway::EXPOSED;

/// How long a browser may go by one answer.
const MAX_AGE: Duration = Duration::from_secs(3_600);

/// What lets pages of `origins` in.
pub(super) fn layer(origins: &[HeaderValue]) -> Option<CorsLayer> {
    let allowed = match origins {
        [] => return None,
        [all] if all == "*" => AllowOrigin::any(),
        some => AllowOrigin::list(some.iter().cloned()),
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // A list of headers cannot stand for those that a client's library adds tomorrow.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(MAX_AGE);
    Some(layer)
}
