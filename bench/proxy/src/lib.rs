//! Shared by both binaries: the clock that stamps SSE chunks, and command-line flags.

/// CLOCK_MONOTONIC in nanoseconds: the same clock in every process of the machine, so a chunk
/// stamped by the backend can be aged by the client.
pub fn now_ns() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

/// What precedes the 19-digit stamp in every streamed delta.
pub const STAMP: &[u8] = b"\"content\":\"T";
pub const STAMP_DIGITS: usize = 19;

/// `--name value` from the command line.
pub fn flag(name: &str) -> Option<String> {
    let mut args = std::env::args();
    args.find(|a| a == name)?;
    args.next()
}

pub fn flag_or<T: std::str::FromStr>(name: &str, default: T) -> T {
    match flag(name) {
        None => default,
        Some(text) => text.parse().unwrap_or_else(|_| panic!("bad value for {name}: {text}")),
    }
}

pub fn switch(name: &str) -> bool {
    std::env::args().any(|a| a == name)
}
