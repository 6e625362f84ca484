//! Where talk goes: logs to stderr, so that stdout is data alone.

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
