//! Where talk goes: logs to stderr, so that stdout is data alone; and the registry of all metrics.
//!
//! Metrics are `prometheus`: an observation of its histogram is a few atomic adds, where
//! `prometheus-client` takes a lock, and `metrics` fills buckets that somebody has to empty.

pub use prometheus::Registry;
use prometheus::TextEncoder;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Starts logging at `filter` (as `RUST_LOG` would have it); at warnings where it is absent or
/// empty, and where it cannot be read, which is told.
pub fn start(filter: Option<&str>) {
    let (filter, problem) = read(filter);
    let started = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
    // A test process may have started it before; one subscriber is as good as another then.
    drop(started);
    if let Some(problem) = problem {
        tracing::warn!("{problem}");
    }
}

fn read(filter: Option<&str>) -> (EnvFilter, Option<String>) {
    let quiet = EnvFilter::default().add_directive(LevelFilter::WARN.into());
    match filter.filter(|text| !text.is_empty()).map(|text| (text, EnvFilter::try_new(text))) {
        None => (quiet, None),
        Some((_, Ok(filter))) => (filter, None),
        Some((text, Err(error))) => {
            let problem = format!(
                "the log filter {text:?} is not one as fak=debug ({error}): warnings are logged"
            );
            (quiet, Some(problem))
        }
    }
}

/// All metrics of a registry as Prometheus text.
///
/// # Errors
/// A collector gave a family without metrics or with two types.
pub fn text(registry: &Registry) -> prometheus::Result<String> {
    TextEncoder::new().encode_to_string(&registry.gather())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_cannot_be_read_is_told_and_an_empty_one_is_none() {
        for (filter, shown) in
            [(None, "warn"), (Some(""), "warn"), (Some("fak=debug"), "fak=debug")]
        {
            let (read, problem) = read(filter);
            assert_eq!((read.to_string().as_str(), problem), (shown, None), "{filter:?}");
        }
        let (quiet, problem) = read(Some("fak=dbug"));
        assert_eq!(quiet.to_string(), "warn");
        assert!(problem.is_some_and(|problem| problem.contains("\"fak=dbug\"")));
    }
}
