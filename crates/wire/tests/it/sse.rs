//! Events come out whole and the same however the bytes are cut.

use fak_wire::sse::{Event, Reader, Tail, TooLong};
use proptest::prelude::*;

use crate::fixtures;

const MAX: usize = 1 << 20;

/// Reads `chunks`, each with the errors left out.
fn read(chunks: &[&[u8]]) -> (Vec<Event>, Tail) {
    let mut reader = Reader::new(MAX);
    let mut events = Vec::new();
    for chunk in chunks {
        events.extend(reader.push(chunk).map(Result::unwrap));
    }
    (events, reader.finish())
}

fn data(stream: &str) -> Vec<String> {
    let (events, _) = read(&[stream.as_bytes()]);
    events.iter().map(|event| event.text().unwrap().to_owned()).collect()
}

#[test]
fn every_line_ending_ends_lines() {
    for end in ["\n", "\r\n", "\r"] {
        let stream = format!("data: one{end}data: two{end}{end}data: three{end}{end}");
        assert_eq!(data(&stream), ["one\ntwo", "three"], "{end:?}");
    }
    assert_eq!(data("data: a\r\ndata: b\n\r\ndata: c\r\r"), ["a\nb", "c"]);
}

#[test]
fn comments_unknown_fields_and_events_without_data_are_passed_over() {
    assert_eq!(data(": ping\n\nid: 7\nretry: 3\nevent: x\n\ndata: a\n: mid\n\n"), ["a"]);
    let (events, tail) = read(&[b"event: tool\ndata: a\n\ndata: b\n\n"]);
    assert_eq!((events[0].name.as_slice(), events[1].name.as_slice()), (&b"tool"[..], &b""[..]));
    assert_eq!(tail, Tail::Clean);
}

#[test]
fn one_space_after_the_colon_is_no_data_and_empty_data_is() {
    assert_eq!(data("data:a\n\ndata:  a\n\ndata\n\ndata:\ndata:\n\n"), ["a", " a", "", "\n"]);
}

#[test]
fn a_byte_order_mark_is_passed_over_at_the_start_only() {
    assert_eq!(data("\u{feff}data: a\n\n\u{feff}data: b\n\ndata: c\n\n"), ["a", "c"]);
    let (events, _) = read(&[b"\xef", b"\xbb", b"\xbfda", b"ta: a\n", b"\n"]);
    assert_eq!(events[0].data, b"a");
}

#[test]
fn characters_cut_between_chunks_come_out_whole() {
    let stream = "data: 漢🙂x\n\n".as_bytes();
    let cuts: [&[&[u8]]; 4] = [
        &[&stream[..7], &stream[7..]],
        &[&stream[..8], &stream[8..]],
        &[&stream[..10], &stream[10..11], &stream[11..12], &stream[12..13], &stream[13..]],
        &[&stream[..2], &stream[2..]],
    ];
    for chunks in cuts {
        let (events, tail) = read(chunks);
        assert_eq!(events[0].text().unwrap(), "漢🙂x");
        assert_eq!(tail, Tail::Clean);
        assert_eq!(chunks.concat(), stream, "what is relayed is what came in");
    }
}

#[test]
fn data_that_is_no_text_is_kept_as_bytes() {
    let (events, _) = read(&[b"data: \xff\xfe\n\n"]);
    assert_eq!(events[0].data, b"\xff\xfe");
    assert!(events[0].text().is_err());
}

#[test]
fn a_stream_that_stops_inside_an_event_says_so_and_where_it_began() {
    assert_eq!(read(&[b"data: a\n\ndata: {\"choi"]).1, Tail::Partial { start: 9 });
    assert_eq!(read(&[b"data: a\n\ndata: b\n"]).1, Tail::Partial { start: 9 });
    assert_eq!(read(&[b"data: a\n\n"]).1, Tail::Clean);
    assert_eq!(read(&[b"data: a\n\n: ping\n"]).1, Tail::Clean);
    assert_eq!(read(&[]).1, Tail::Clean);
}

#[test]
fn an_event_over_the_limit_is_an_error_and_ends_the_reading() {
    let limit = 16;
    let events = |chunks: &[&[u8]]| -> Vec<_> {
        let mut reader = Reader::new(limit);
        chunks.iter().flat_map(|chunk| reader.push(chunk).collect::<Vec<_>>()).collect()
    };
    let too_long = Err(TooLong { limit });
    let one_line = events(&[b"data: a\n\n", b"data: 0123456789", b"0", b"\n\ndata: b\n\n"]);
    assert_eq!(one_line.len(), 2, "{one_line:?}");
    assert_eq!(one_line[1], too_long);
    let many_lines = events(&[b"data: 01234567\ndata: 01234567\ndata: 01234567\n\n"]);
    assert_eq!(many_lines, std::slice::from_ref(&too_long));
    assert_eq!(events(&[b": 0123456789abcdef", b"more"]), [too_long]);
    assert_eq!(TooLong { limit }.to_string(), "event: found more than 16 bytes, expected its end");
}

#[test]
fn recorded_streams_are_framed_whole_and_their_spans_are_the_stream() {
    for (path, count) in [
        ("vllm-0.32/sse/chat-stream.txt", 5),
        ("vllm-0.32/sse/chat-stream-usage.txt", 6),
        ("vllm-0.32/sse/completions-stream-aborted-while-queued-no-usage.txt", 1),
        ("vllm-0.32/sse/completions-stream-two-prompts.txt", 6),
        ("vllm-rs-0.33-frontend/sse/completions-stream-usage.txt", 6),
    ] {
        let bytes = fixtures::bytes(path);
        let (events, tail) = read(&[&bytes]);
        assert_eq!((events.len(), tail), (count, Tail::Clean), "{path}");
        assert_eq!(events.last().unwrap().data, b"[DONE]", "{path}");
        let relayed: Vec<u8> = events
            .iter()
            .flat_map(|event| &bytes[event.span.start as usize..event.span.end as usize])
            .copied()
            .collect();
        assert_eq!(relayed, bytes, "{path}");
    }
}

#[test]
fn a_usage_event_can_be_cut_out_by_its_span() {
    let bytes = fixtures::bytes("vllm-0.32/sse/completions-stream-usage.txt");
    let (events, _) = read(&[&bytes]);
    let usage = &events[events.len() - 2].span;
    let without = [&bytes[..usage.start as usize], &bytes[usage.end as usize..]].concat();
    let (left, tail) = read(&[&without]);
    assert_eq!((left.len(), tail), (events.len() - 1, Tail::Clean));
    assert!(!left.iter().any(|event| event.text().unwrap().contains("\"usage\"")));
}

/// Streams full of what a cut can hurt.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let pieces = prop::sample::select(vec![
        "data",
        ":",
        " ",
        "\n",
        "\r",
        "\r\n",
        "data: {\"a\":1}\n\n",
        "event: x",
        "é",
        "漢",
        "🙂",
        "\u{feff}",
        "id: 3",
        ": ping\n",
        "data: [DONE]\r\n\r\n",
    ]);
    prop::collection::vec(pieces, 0..40).prop_map(|pieces| pieces.concat().into_bytes())
}

proptest! {
    #[test]
    fn any_cut_gives_the_same_events(
        stream in stream(),
        cuts: Vec<prop::sample::Index>,
    ) {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        let chunks: Vec<&[u8]> = cuts.windows(2).map(|cut| &stream[cut[0]..cut[1]]).collect();
        prop_assert_eq!(read(&chunks), read(&[&stream]));
    }

    #[test]
    fn any_recording_gives_the_same_events_byte_by_byte(file in 0usize..100) {
        let files = fixtures::list("sse", ".txt");
        let bytes = fixtures::bytes(&files[file % files.len()]);
        let singles: Vec<&[u8]> = bytes.chunks(1).collect();
        prop_assert_eq!(read(&singles), read(&[&bytes]));
    }

    #[test]
    fn what_is_written_is_read_back(lines in prop::collection::vec("[^\r\n]{0,20}", 1..5)) {
        let stream: String = lines.iter().map(|line| format!("data: {line}\n")).collect();
        let (events, tail) = read(&[format!("{stream}\n").as_bytes()]);
        prop_assert_eq!(events[0].text().unwrap(), lines.join("\n"));
        prop_assert_eq!(tail, Tail::Clean);
    }
}
