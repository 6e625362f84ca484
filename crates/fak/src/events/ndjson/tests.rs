//! Lines good and bad, and the batches that they become.

use fak_wire::kv::{BlockHash, Event, ExtraKey, ExtraKeys};

use super::*;

const SMALL: usize = 1000;

async fn read(input: &str) -> Vec<Item> {
    let limits = Limits { line_bytes_max: SMALL, ..Limits::default() };
    let mut lines = Lines::new(input.as_bytes(), limits);
    let mut items = Vec::new();
    while let Some(item) = lines.next().await {
        items.push(item);
    }
    assert!(lines.next().await.is_none());
    assert!(matches!(items.remove(0), Item::Connected { epoch: 1 }));
    assert!(matches!(items.pop(), Some(Item::Disconnected { why: Lost::Ended })));
    items
}

/// The only batch of a line.
async fn one(line: &str) -> (u64, kv::Batch) {
    match &read(line).await[..] {
        [Item::Batch { seq, payload }] => {
            (*seq, kv::decode(payload, &kv::Limits::default()).unwrap())
        }
        other => panic!("{other:?}"),
    }
}

fn errors(items: &[Item]) -> Vec<String> {
    items
        .iter()
        .filter_map(|item| match item {
            Item::Bad { why: Bad::Line { number, why } } => Some(format!("{number}: {why}")),
            _ => None,
        })
        .collect()
}

#[tokio::test]
async fn a_line_becomes_the_batch_that_vllm_would_have_published() {
    let (seq, batch) = one(r#"{"seq":7,"ts":1700000000,"rank":1,"more":[],"events":[
            {"type":"stored","block_hashes":[5,"0x05",-1,"0xFFFFFFFFFFFFFFFF"],
             "parent_block_hash":"0x0102030405060708090A","token_ids":[1,2,3,4],"block_size":1,
             "lora_id":null,"lora_name":null,"medium":"GPU","extra_keys":[["salt"],null,null,null],
             "group_idx":2,"session_id":"s","new_field":{"a":[1]}},
            {"type":"removed","block_hashes":[18446744073709551615],"medium":"CPU"},
            {"type":"something"},
            {"type":"cleared"}]}"#
        .replace('\n', " ")
        .as_str())
    .await;
    assert_eq!((seq, batch.ts, batch.rank), (7, 1_700_000_000.0, Some(1)));
    assert_eq!(batch.unknown_tags, ["something"]);
    let [Event::Stored(stored), Event::Removed(removed), Event::Cleared] = &batch.events[..] else {
        panic!("{batch:?}");
    };
    let int = BlockHash::Int;
    assert_eq!(stored.hashes, [int(5), int(5), int(u64::MAX), int(u64::MAX)]);
    assert_eq!(stored.parent, Some(BlockHash::Bytes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10].into())));
    assert_eq!((&stored.tokens[..], stored.group), (&[1, 2, 3, 4][..], 2));
    let salt = vec![ExtraKey::Text("salt".to_owned())];
    let keys = ExtraKeys::PerBlock(vec![salt, Vec::new(), Vec::new(), Vec::new()]);
    assert_eq!(stored.extra_keys, keys);
    assert_eq!(removed.hashes, [int(u64::MAX)]);
    assert_eq!(removed.medium.as_deref(), Some("CPU"));
}

#[tokio::test]
async fn equal_lines_have_equal_payloads_and_others_have_not() {
    let items = read(
        "{\"seq\":1,\"events\":[{\"type\":\"cleared\"}]}\r\n\
         { \"events\" : [ { \"type\" : \"cleared\" } ], \"seq\" : 1 }\n\
         {\"seq\":1,\"events\":[]}",
    )
    .await;
    let payloads: Vec<_> = items
        .iter()
        .map(|item| match item {
            Item::Batch { payload, .. } => payload,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(payloads[0], payloads[1]);
    assert_ne!(payloads[1], payloads[2]);
}

#[tokio::test]
async fn a_bad_line_is_told_and_the_next_is_read() {
    let long = "x".repeat(SMALL + 1);
    let exact = format!("{{\"seq\":9,\"events\":[]{}}}", " ".repeat(SMALL - 21));
    assert_eq!(exact.len(), SMALL);
    let good = r#"{"seq":8,"events":[]}"#;
    let stored = |rest: &str| format!(r#"{{"seq":1,"events":[{{"type":"stored",{rest}}}]}}"#);
    let lines = [
        "nonsense",
        "[]",
        "{}",
        r#"{"seq":-1,"events":[]}"#,
        r#"{"seq":18446744073709551615,"events":[]}"#,
        r#"{"seq":1}"#,
        r#"{"seq":1,"ts":"now","events":[]}"#,
        r#"{"seq":1,"events":[1]}"#,
        &stored(r#""block_hashes":["5"]"#),
        &stored(r#""block_hashes":["0xfg"]"#),
        &stored(r#""block_hashes":["0x"]"#),
        &stored(r#""block_hashes":["0x00000000000000001"]"#),
        &stored(r#""block_hashes":1"#),
        &stored(r#""parent_block_hash":null"#),
        r#"{"seq":1,"events":[],"rank":"one"}"#,
        &long,
        "",
        "   ",
        &exact,
        good,
    ];
    let items = read(&lines.join("\n")).await;
    let hash =
        "block hash is not an integer or a string 0x… of hex digits, an even number beyond 16";
    let seq = "seq is not a number from 0 to 2^64-2";
    let wanted: Vec<_> = [
        "not a JSON object",
        "not a JSON object",
        seq,
        seq,
        seq,
        "events is not an array",
        "ts is not a number of seconds",
        "event is not an object",
        hash,
        hash,
        hash,
        hash,
        "not a batch",
        "not a batch",
        "not a batch",
        "longer than 1000 bytes",
    ]
    .iter()
    .zip(1..)
    .map(|(why, number)| format!("{number}: {why}"))
    .collect();
    assert_eq!(errors(&items), wanted);
    let good: Vec<_> = items
        .iter()
        .filter_map(|item| match item {
            Item::Batch { seq, .. } => Some(*seq),
            _ => None,
        })
        .collect();
    assert_eq!(good, [9, 8]);
}

/// A reader that fails half-way.
#[tokio::test]
async fn an_input_that_fails_ends_the_source() {
    let mut lines = Lines::new(Failing, Limits::default());
    assert!(matches!(lines.next().await, Some(Item::Connected { .. })));
    assert!(matches!(lines.next().await, Some(Item::Disconnected { why: Lost::Read(_) })));
    assert!(lines.next().await.is_none());
}

struct Failing;

impl AsyncRead for Failing {
    fn poll_read(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        _: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Ready(Err(std::io::Error::other("on purpose")))
    }
}

#[tokio::test]
async fn lines_come_whole_however_the_input_is_cut() {
    let (mut writer, reader) = tokio::io::duplex(3);
    let text = "{\"seq\":1,\"events\":[]}\n{\"seq\":2,\"events\":[]}\n";
    let write = async move {
        tokio::io::AsyncWriteExt::write_all(&mut writer, text.as_bytes()).await.unwrap();
    };
    let read = async {
        let mut lines = Lines::new(reader, Limits::default());
        let mut seqs = Vec::new();
        while let Some(item) = lines.next().await {
            if let Item::Batch { seq, .. } = item {
                seqs.push(seq);
            }
        }
        seqs
    };
    assert_eq!(tokio::join!(write, read).1, [1, 2]);
}
