//! Any bytes as a stream, cut in two ways: the same events, the same end, and spans without a gap.
#![no_main]

use fak_wire::sse::{Event, Reader, Tail, TooLong};
use libfuzzer_sys::fuzz_target;

type Read = (Vec<Result<Event, TooLong>>, Tail);

fn read<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> Read {
    let mut reader = Reader::new(256);
    let mut events = Vec::new();
    for chunk in chunks {
        events.extend(reader.push(chunk));
    }
    (events, reader.finish())
}

fuzz_target!(|data: &[u8]| {
    let Some((size, stream)) = data.split_first() else { return };
    let whole = read(std::iter::once(stream));
    // A stream over the limit ends with the error in both, but may hold more or less by then.
    if whole.0.iter().all(Result::is_ok) {
        assert_eq!(read(stream.chunks(usize::from(*size).max(1))), whole);
    }
    let mut end = 0;
    for event in whole.0.iter().flatten() {
        assert_eq!(event.span.start, end);
        end = event.span.end;
    }
    assert!(end <= stream.len() as u64);
});
