//! How many files this process may have open. A request needs two of them: its client's connection
//! and its engine's.
//!
//! Invariant: connections of clients never take the files that fak itself needs for its engines,
//! their events and the ledger.

use rlimit::Resource;

/// Files that fak needs for itself: the ledger, the log, the listener.
const OWN: u64 = 48;
/// And for each worker: its event sockets, looks at it, actions on it.
const OWN_OF_WORKER: u64 = 8;
/// Of one request.
const OF_REQUEST: u64 = 2;
/// Fewer connections than this are a warning: a small fleet's clients can be so many.
const FEW: usize = 4_096;

/// Raises the soft limit to the hard one, and returns what is in force then; none where the system
/// does not tell.
pub(super) fn raise() -> Option<u64> {
    match rlimit::increase_nofile_limit(u64::MAX) {
        Ok(limit) => Some(limit),
        Err(error) => {
            tracing::warn!(%error, "the limit of open files cannot be raised");
            Resource::NOFILE.get_soft().ok()
        }
    }
}

/// How many of `most` connections of clients fit into the limit, beside what fak needs for itself
/// and so many workers. Says so in the log, as a warning where they are few.
pub(super) fn connections(limit: Option<u64>, workers: usize, most: usize) -> usize {
    let Some(limit) = limit else { return most };
    let fits = fitting(limit, workers, most);
    if fits == most || fits >= FEW {
        tracing::info!(open_files_max = limit, connections_max = fits, "limit of open files");
    } else {
        tracing::warn!(
            open_files_max = limit,
            connections_max = fits,
            "the hard limit of open files is low: {fits} connections of clients are taken at once, \
             not {most}; for all of them raise it (ulimit -Hn, LimitNOFILE=) to {}",
            own(workers) + OF_REQUEST * most as u64
        );
    }
    fits
}

fn fitting(limit: u64, workers: usize, most: usize) -> usize {
    let fits = limit.saturating_sub(own(workers)) / OF_REQUEST;
    usize::try_from(fits).unwrap_or(usize::MAX).clamp(1, most)
}

fn own(workers: usize) -> u64 {
    OWN + OWN_OF_WORKER * workers as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_get_what_fak_does_not_need_for_itself_two_files_each() {
        for (limit, workers, fits) in [
            (1_048_576, 4, 32_768),
            (65_592, 1, 32_768),
            (65_590, 1, 32_767),
            (1_024, 2, 480),
            (64, 1, 4),
            (20, 1, 1),
        ] {
            assert_eq!(fitting(limit, workers, 32_768), fits, "{limit} {workers}");
        }
        assert_eq!(connections(None, 1, 7), 7);
    }
}
