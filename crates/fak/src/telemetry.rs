//! Where talk goes: logs to stderr, so that stdout is data alone; and the registry of all metrics.
//!
//! Metrics are `prometheus`: an observation of its histogram is a few atomic adds, where
//! `prometheus-client` takes a lock, and `metrics` fills buckets that somebody has to empty.

pub use prometheus::Registry;
use prometheus::TextEncoder;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Starts logging at `filter` (as `RUST_LOG` would have it); at warnings where it is absent or
/// cannot be read.
pub fn start(filter: Option<&str>) {
    let quiet = EnvFilter::default().add_directive(LevelFilter::WARN.into());
    let filter = filter.and_then(|text| EnvFilter::try_new(text).ok()).unwrap_or(quiet);
    let started = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
    // A test process may have started it before; one subscriber is as good as another then.
    drop(started);
}

/// All metrics of a registry as Prometheus text.
///
/// # Errors
/// A collector gave a family without metrics or with two types.
pub fn text(registry: &Registry) -> prometheus::Result<String> {
    TextEncoder::new().encode_to_string(&registry.gather())
}
