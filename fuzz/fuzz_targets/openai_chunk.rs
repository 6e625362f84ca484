//! Any bytes as the data of a stream's event, a whole answer, an error body or a tokenize answer:
//! no panic, and an error that was read reads the same after it was written.
#![no_main]

use fak_wire::openai::{Answer, ErrorBody, StreamItem, StreamWatch, Tokenized};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut watch = StreamWatch::new(2);
    for line in data.split(|byte| *byte == b'\n') {
        if let Ok(item) = StreamItem::parse(line) {
            watch.see(&item);
        }
    }
    let _ = (watch.end(), Answer::parse(data), Tokenized::parse(data));
    let error = ErrorBody::from_answer(500, data);
    assert_eq!(ErrorBody::from_answer(500, &error.to_bytes()), error);
    let event = error.to_event();
    let written = event.strip_prefix(b"data: ").expect("an event starts with its data");
    assert_eq!(StreamItem::parse(written), Ok(StreamItem::Error(error)));
});
