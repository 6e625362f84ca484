//! Signals that end `fak serve`, and those that do not.
//!
//! Invariant: no signal that can be caught cuts a stream: it asks for the end that SIGTERM asks
//! for, or it does nothing.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// By number on Linux and macOS; the standard library names none of them.
const SIGHUP: i32 = 1;
const SIGXCPU: i32 = 24;
const SIGXFSZ: i32 = 25;

/// What asks for the end.
#[derive(Debug)]
pub(super) struct Signals {
    ending: Vec<Signal>,
    /// Caught and never read: the default of each would end the process at once. A file that may
    /// not grow any more is an error of the write that meets it.
    _passed_over: Vec<Signal>,
}

impl Signals {
    /// Catches them from here on.
    pub(super) fn catch() -> io::Result<Self> {
        let mut ending = vec![SignalKind::terminate(), SignalKind::interrupt(), SignalKind::quit()];
        let mut passed_over = vec![
            SignalKind::user_defined1(),
            SignalKind::user_defined2(),
            SignalKind::alarm(),
            SignalKind::from_raw(SIGXCPU),
            SignalKind::from_raw(SIGXFSZ),
        ];
        // Under `nohup` it is ignored, and stays so.
        if is_ignored(SIGHUP) { &mut passed_over } else { &mut ending }.push(SignalKind::hangup());
        Ok(Self { ending: caught(ending)?, _passed_over: caught(passed_over)? })
    }

    /// The next one that asks for the end.
    pub(super) async fn next(&mut self) {
        poll_fn(|cx| {
            let is_any = self.ending.iter_mut().any(|signal| signal.poll_recv(cx).is_ready());
            if is_any { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

fn caught(kinds: Vec<SignalKind>) -> io::Result<Vec<Signal>> {
    kinds.into_iter().map(signal).collect()
}

/// Whether the process was started with this signal ignored; where that cannot be read, it was not.
fn is_ignored(number: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (number - 1) & 1 == 1
}
