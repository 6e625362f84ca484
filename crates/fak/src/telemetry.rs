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

/// An error with what caused it, in one line. What an error tells of its cause itself is not told
/// again: some libraries' do.
#[must_use]
pub fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut told = error.to_string();
    for cause in std::iter::successors(error.source(), |cause| cause.source()) {
        let cause = cause.to_string();
        if !told.contains(&cause) {
            told.push_str(": ");
            told.push_str(&cause);
        }
    }
    told
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

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Told(&'static str, #[source] Option<Box<Told>>);

    #[test]
    fn a_cause_is_told_once_whether_or_not_the_error_tells_it_itself() {
        let full = || Some(Box::new(Told("(code: 13) database or disk is full", None)));
        let database = |text| Told("the database failed", Some(Box::new(Told(text, full()))));
        assert_eq!(
            error_chain(&database("error returned from database")),
            "the database failed: error returned from database: (code: 13) database or disk is full"
        );
        let repeats = "error returned from database: (code: 13) database or disk is full";
        let told = error_chain(&database(repeats));
        assert_eq!(told, format!("the database failed: {repeats}"));
    }

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
