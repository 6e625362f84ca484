//! Requests pass through unharmed, answers of both frontends and all endings read as they were
//! meant.

use fak_wire::openai::{
    Answer, Api, CachedTokens, Choice, ErrorBody, ErrorCode, Prompt, Request, RequestError,
    StreamEnd, StreamItem, StreamWatch, Tokenized, Usage, beside_usage,
};
use fak_wire::sse::{Reader, Tail};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::fixtures;

fn request(api: Api, body: &str) -> Request {
    Request::parse(api, body.as_bytes()).unwrap()
}

fn completions(body: &str) -> Request {
    request(Api::Completions, body)
}

fn text(request: &Request) -> String {
    String::from_utf8(request.to_bytes()).unwrap()
}

// Requests.

#[test]
fn what_is_not_set_keeps_its_bytes_and_its_place() {
    let body = concat!(
        r#"{"zeta":1.50,"model":"a","big":123456789012345678901234567890,"odd":"\ud800","#,
        r#""nest":{"b":1,"a":[ 1e2 ]},"alpha":null}"#
    );
    let mut request = completions(body);
    assert_eq!(text(&request), body);
    request.set_model("b");
    request.set_priority(Some(-3));
    let expected = body.replace(r#""model":"a""#, r#""model":"b""#);
    let expected = expected.replace(r#""alpha":null"#, r#""alpha":null,"priority":-3"#);
    assert_eq!(text(&request), expected);
    request.set_priority(None);
    request.remove("zeta");
    assert!(!text(&request).contains("priority") && !text(&request).contains("zeta"));
}

#[test]
fn fields_that_fak_needs_are_read_and_absent_ones_are_none() {
    let body = r#"{"model":"tiny","stream":true,"stream_options":{"include_usage":true},
        "cache_salt":"s","priority":-1,"prompt_cache_key":"k","max_tokens":9,"n":2,"prompt":"hi"}"#;
    let full = completions(body);
    assert_eq!(full.model().unwrap().as_deref(), Some("tiny"));
    assert!(full.stream().unwrap() && full.include_usage().unwrap());
    assert_eq!(full.cache_salt().unwrap().as_deref(), Some("s"));
    assert_eq!((full.priority().unwrap(), full.max_tokens().unwrap()), (Some(-1), Some(9)));
    assert_eq!(full.prompt_cache_key().unwrap().as_deref(), Some("k"));
    assert_eq!((full.choices().unwrap(), full.raw("prompt")), (2, Some("\"hi\"")));
    let nulls = r#"{"model":null,"stream":null,"stream_options":null,"cache_salt":null,
        "priority":null,"prompt_cache_key":null,"max_tokens":null,"n":null,"prompt":null}"#;
    for body in ["{}", nulls] {
        let empty = completions(body);
        assert_eq!(empty.model().unwrap(), None);
        assert!(!empty.stream().unwrap() && !empty.include_usage().unwrap());
        assert_eq!((empty.cache_salt().unwrap(), empty.prompt_cache_key().unwrap()), (None, None));
        assert_eq!((empty.priority().unwrap(), empty.max_tokens().unwrap()), (None, None));
        assert_eq!((empty.prompt().unwrap(), empty.choices().unwrap()), (None, 1));
    }
}

#[test]
fn a_prompt_is_text_or_tokens_one_or_many() {
    for (prompt, expected, count) in [
        (json!("a b"), Prompt::Text("a b".to_owned()), 1),
        (json!([1, 2]), Prompt::Tokens(vec![1, 2]), 1),
        (json!(["a", "b"]), Prompt::Texts(vec!["a".to_owned(), "b".to_owned()]), 2),
        (json!([[1], [2, 3], []]), Prompt::TokenLists(vec![vec![1], vec![2, 3], vec![]]), 3),
        (json!([]), Prompt::Tokens(vec![]), 1),
    ] {
        let request = completions(&json!({"prompt": prompt, "n": 2}).to_string());
        assert_eq!(request.choices().unwrap(), 2 * count, "{prompt}");
        assert_eq!(request.prompt().unwrap(), Some(expected), "{prompt}");
    }
    for prompt in [json!(1), json!([-1]), json!([1, "a"]), json!({"a": 1}), json!([1.5])] {
        let error = completions(&json!({"prompt": prompt}).to_string()).prompt().unwrap_err();
        assert_eq!(error.param(), Some("prompt"), "{prompt}");
    }
}

#[test]
fn the_prompts_of_recorded_requests_count_their_choices() {
    for (file, api, choices) in [
        ("completion", Api::Completions, 1),
        ("completion-n2", Api::Completions, 2),
        ("completion-two-prompts", Api::Completions, 2),
        ("completion-two-token-prompts", Api::Completions, 2),
        ("chat", Api::Chat, 1),
    ] {
        let recorded = exchange(&format!("vllm-0.32/http/{file}.json"));
        let request = request(api, &recorded["request"]["body"].to_string());
        assert_eq!(request.choices().unwrap(), choices, "{file}");
        assert_eq!(request.model().unwrap().as_deref(), Some("tiny"), "{file}");
        let answer = Answer::parse(body(&recorded).as_bytes()).unwrap();
        assert_eq!(answer.choices.len(), choices, "{file}");
    }
}

#[test]
fn messages_and_token_limits_of_a_chat_are_read() {
    let chat = request(
        Api::Chat,
        r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"max_completion_tokens":2}"#,
    );
    assert_eq!(chat.messages().unwrap()[0]["content"], "hi");
    assert_eq!(chat.max_tokens().unwrap(), Some(2));
    assert_eq!(request(Api::Chat, r#"{"max_tokens":1}"#).max_tokens().unwrap(), Some(1));
    let plain = completions(r#"{"max_tokens":1,"max_completion_tokens":2}"#);
    assert_eq!(plain.max_tokens().unwrap(), Some(1));
    assert_eq!(
        request(Api::Chat, r#"{"messages":["hi"]}"#).messages().unwrap_err().to_string(),
        "messages: found [\"hi\"], expected an array of message objects"
    );
    let missing = request(Api::Chat, "{}").messages().unwrap_err();
    assert_eq!(
        missing.to_string(),
        "messages: found nothing, expected an array of message objects"
    );
}

#[test]
fn wrong_fields_are_named_with_what_is_right() {
    let check = |body: &str, read: fn(&Request) -> Option<RequestError>, expected: &str| {
        assert_eq!(read(&completions(body)).unwrap().to_string(), expected);
    };
    check(
        r#"{"stream":"maybe"}"#,
        |request| request.stream().err(),
        "stream: found \"maybe\", expected true or false",
    );
    for (written, read) in [("1", true), ("\"Yes\"", true), ("0.0", false), ("\"off\"", false)] {
        let body = format!("{{\"stream\":{written}}}");
        assert_eq!(completions(&body).stream().unwrap(), read, "{written}");
    }
    check(r#"{"model":7}"#, |r| r.model().err(), "model: found 7, expected a string");
    check(
        r#"{"cache_salt":""}"#,
        |r| r.cache_salt().err(),
        "cache_salt: found \"\", expected a string of 1 to 1024 characters",
    );
    check(
        r#"{"priority":1.5}"#,
        |r| r.priority().err(),
        "priority: found 1.5, expected a whole number",
    );
    check(
        r#"{"stream_options":[true]}"#,
        |r| r.include_usage().err(),
        "stream_options: found [true], expected an object whose include_usage is true or false",
    );
    check(r#"{"n":0}"#, |r| r.choices().err(), "n: found 0, expected a whole number of 1 or more");
    let long = format!(r#"{{"model":[{}]}}"#, "1,".repeat(500) + "1");
    let message = completions(&long).model().unwrap_err().to_string();
    assert!(message.len() < 120 && message.contains('…'), "{message}");
}

#[test]
fn bodies_that_parsers_may_read_differently_are_refused() {
    let error = |body: &str| {
        let error = Request::parse(Api::Chat, body.as_bytes()).unwrap_err();
        assert_eq!(error.param(), None);
        error.to_string()
    };
    let twice = error(r#"{"cache_salt":"a","model":"m","cache_salt":"b"}"#);
    assert!(twice.starts_with("body: found cache_salt twice, expected it once"), "{twice}");
    let escaped = error(r#"{"cache_salt":"a","cache_s\u0061lt":"b"}"#);
    assert!(escaped.starts_with("body: found cache_salt twice"), "{escaped}");
    assert!(error("[1]").contains("expected an object"));
    for body in ["", "{", "nul", "{\"a\":}", "{} {}"] {
        assert!(error(body).starts_with("body: "), "{body}");
    }
    let many: Vec<String> = (0..513).map(|n| format!("\"f{n}\":0")).collect();
    assert!(error(&format!("{{{}}}", many.join(","))).contains("more than 512 fields"));
}

#[test]
fn usage_is_asked_for_without_losing_other_stream_options() {
    let mut request = completions(r#"{"stream_options":{"continuous_usage_stats":true},"a":1}"#);
    request.set_include_usage(true).unwrap();
    assert_eq!(
        text(&request),
        r#"{"stream_options":{"continuous_usage_stats":true,"include_usage":true},"a":1}"#
    );
    assert!(request.include_usage().unwrap());
    assert!(completions(r#"{"stream_options":7}"#).set_include_usage(true).is_err());
}

// Answers.

fn exchange(path: &str) -> Value {
    serde_json::from_slice(&fixtures::bytes(path)).unwrap()
}

fn body(exchange: &Value) -> &str {
    exchange["response"]["body_text"].as_str().unwrap()
}

fn answer(file: &str) -> Answer {
    Answer::parse(body(&exchange(file)).as_bytes()).unwrap()
}

#[test]
fn whole_answers_of_both_routes_and_frontends_read_alike() {
    let chat = answer("vllm-0.32/http/chat.json");
    let expected = Choice {
        text: "thingtraceback".to_owned(),
        finish_reason: Some("length".to_owned()),
        ..Choice::default()
    };
    assert_eq!(chat.choices, std::slice::from_ref(&expected));
    assert_eq!(chat.id.as_deref(), Some("chatcmpl-9af3d49c5ad0c192"));
    let cached_tokens = CachedTokens::NotReported;
    let usage = Usage { prompt_tokens: 12, completion_tokens: 2, cached_tokens };
    assert_eq!(chat.usage, Some(usage));
    let plain = answer("vllm-0.32/http/completion.json");
    assert_eq!(plain.choices, [Choice { text: "ail::".to_owned(), ..expected }]);
    let rust = answer("vllm-rs-0.33-frontend/http/chat.json");
    assert_eq!(rust.choices[0].finish_reason.as_deref(), Some("length"));
    assert!(rust.choices[0].text.starts_with("thing"));
    let tokens = answer("vllm-0.32/http/completion-token-prompt-return_token_ids.json");
    assert!(!tokens.choices[0].token_ids.is_empty());
}

#[test]
fn an_aborted_answer_says_abort() {
    for file in [
        "vllm-0.32/http/completion-aborted-by-pause.json",
        "vllm-0.32/http/chat-aborted-by-pause.json",
        "vllm-0.32/http/chat-aborted-while-queued.json",
        "vllm-0.32/http/completion-aborted-while-queued.json",
        "vllm-rs-0.33-frontend/http/completion-aborted-by-sleep1.json",
    ] {
        let answer = answer(file);
        assert_eq!(answer.choices[0].finish_reason.as_deref(), Some("abort"), "{file}");
    }
}

#[test]
fn cached_tokens_are_unreported_zero_or_a_number() {
    let cached = |details: &str| {
        let answer = format!(r#"{{"choices":[],"usage":{{"prompt_tokens":48{details}}}}}"#);
        Answer::parse(answer.as_bytes()).unwrap().usage.unwrap().cached_tokens
    };
    assert_eq!(cached(""), CachedTokens::NotReported);
    assert_eq!(cached(r#","prompt_tokens_details":null"#), CachedTokens::NotReported);
    assert_eq!(cached(r#","prompt_tokens_details":{}"#), CachedTokens::NotReported);
    let null = r#","prompt_tokens_details":{"cached_tokens":null}"#;
    assert_eq!(cached(null), CachedTokens::NotReported);
    let zero = r#","prompt_tokens_details":{"cached_tokens":0}"#;
    assert_eq!(cached(zero), CachedTokens::Known(0));
    let some = r#","prompt_tokens_details":{"cached_tokens":48,"created_cache_tokens":0}"#;
    assert_eq!(cached(some), CachedTokens::Known(48));
}

#[test]
fn reasoning_and_tool_calls_are_told_from_text() {
    let choice = |delta: &str| {
        let chunk = format!(r#"{{"choices":[{{"index":3,"delta":{delta}}}]}}"#);
        Answer::parse(chunk.as_bytes()).unwrap().choices.remove(0)
    };
    let reasoning = choice(r#"{"content":null,"reasoning":"hm"}"#);
    assert_eq!((reasoning.text.as_str(), reasoning.reasoning.as_str()), ("", "hm"));
    assert_eq!(choice(r#"{"reasoning_content":"hm"}"#).reasoning, "hm");
    assert!(choice(r#"{"tool_calls":[{"index":0}]}"#).calls_tools);
    assert!(!choice(r#"{"tool_calls":null}"#).calls_tools);
    assert_eq!(
        choice(r#"{"content":"x"}"#),
        Choice { index: 3, text: "x".to_owned(), ..Choice::default() }
    );
}

// Streams.

struct Stream {
    items: Vec<StreamItem>,
    tail: Tail,
}

fn stream(path: &str) -> Stream {
    let mut reader = Reader::new(1 << 20);
    let bytes = fixtures::bytes(path);
    let events: Vec<_> = reader.push(&bytes).map(Result::unwrap).collect();
    let items = events.iter().map(|event| StreamItem::parse(&event.data).unwrap()).collect();
    Stream { items, tail: reader.finish() }
}

impl Stream {
    fn chunks(&self) -> impl Iterator<Item = &Answer> {
        self.items.iter().filter_map(|item| match item {
            StreamItem::Chunk(chunk) => Some(chunk),
            _ => None,
        })
    }

    fn text(&self, index: u32) -> String {
        let choices = self.chunks().flat_map(|chunk| &chunk.choices);
        choices.filter(|choice| choice.index == index).map(|choice| choice.text.as_str()).collect()
    }

    /// As a session record keeps it: the last one given.
    fn usage(&self) -> Option<Usage> {
        self.chunks().filter_map(|chunk| chunk.usage).last()
    }

    fn end(&self, choices: usize) -> StreamEnd {
        let mut watch = StreamWatch::new(choices);
        self.items.iter().for_each(|item| watch.see(item));
        watch.end()
    }
}

fn engine_error() -> ErrorBody {
    ErrorBody {
        message: "EngineCore encountered an issue. See stack trace (above) for the root cause."
            .to_owned(),
        kind: "InternalServerError".to_owned(),
        param: None,
        code: Some(ErrorCode::Number(500)),
    }
}

#[test]
fn every_recorded_stream_ends_as_it_did() {
    let failed = StreamEnd::Failed(Some(engine_error()));
    let endings = [
        ("vllm-0.32/sse/chat-stream.txt", StreamEnd::Complete),
        ("vllm-0.32/sse/chat-stream-usage.txt", StreamEnd::Complete),
        ("vllm-0.32/sse/chat-stream-return_token_ids.txt", StreamEnd::Complete),
        ("vllm-0.32/sse/completions-stream.txt", StreamEnd::Complete),
        ("vllm-0.32/sse/completions-stream-usage.txt", StreamEnd::Complete),
        ("vllm-0.32/sse/completions-stream-continuous-usage.txt", StreamEnd::Complete),
        ("vllm-0.32/sse/completions-stream-return_token_ids.txt", StreamEnd::Complete),
        ("vllm-0.32/sse/completions-stream-stop.txt", StreamEnd::Complete),
        ("vllm-0.32/sse/chat-stream-aborted-by-pause-abort.txt", StreamEnd::Aborted),
        ("vllm-0.32/sse/chat-stream-aborted-by-sleep1.txt", StreamEnd::Aborted),
        ("vllm-0.32/sse/completions-stream-aborted-by-pause-abort.txt", StreamEnd::Aborted),
        ("vllm-0.32/sse/completions-stream-aborted-by-sleep1.txt", StreamEnd::Aborted),
        ("vllm-0.32/sse/chat-stream-aborted-while-queued.txt", StreamEnd::Dropped),
        ("vllm-0.32/sse/completions-stream-aborted-while-queued.txt", StreamEnd::Dropped),
        ("vllm-0.32/sse/completions-stream-aborted-while-queued-no-usage.txt", StreamEnd::Dropped),
        ("vllm-0.32/sse/chat-stream-error-mid-stream.txt", failed.clone()),
        ("vllm-0.32/sse/completions-stream-error-mid-stream.txt", failed),
        ("vllm-rs-0.33-frontend/sse/chat-stream-usage.txt", StreamEnd::Complete),
        ("vllm-rs-0.33-frontend/sse/completions-stream-usage.txt", StreamEnd::Complete),
        ("vllm-rs-0.33-frontend/sse/chat-stream-aborted-by-sleep1.txt", StreamEnd::Aborted),
        ("vllm-rs-0.33-frontend/sse/chat-stream-aborted-while-queued.txt", StreamEnd::Aborted),
        ("vllm-rs-0.33-frontend/sse/completions-stream-aborted-by-sleep1.txt", StreamEnd::Aborted),
        (
            "vllm-rs-0.33-frontend/sse/completions-stream-aborted-while-queued.txt",
            StreamEnd::Aborted,
        ),
        ("vllm-rs-0.33-frontend/sse/completions-stream-error-mid-stream.txt", StreamEnd::Cut),
    ];
    for (path, end) in &endings {
        let stream = stream(path);
        assert_eq!(stream.tail, Tail::Clean, "{path}");
        assert_eq!(stream.end(1), *end, "{path}");
    }
    let two = "vllm-0.32/sse/completions-stream-two-prompts.txt";
    assert_eq!(stream(two).end(2), StreamEnd::Complete);
    assert_eq!(stream(two).end(3), StreamEnd::Dropped, "a third choice never came");

    let mut read: Vec<&str> = endings.iter().map(|(path, _)| *path).collect();
    read.push(two);
    for path in fixtures::list("sse", ".txt") {
        let is_no_stream = path.contains("error-before-stream") || path.contains("raw-http");
        assert!(is_no_stream || read.contains(&path.as_str()), "{path} is in no test");
    }
}

#[test]
fn streams_give_the_text_of_each_choice() {
    assert_eq!(stream("vllm-0.32/sse/chat-stream.txt").text(0), "thingtracebackanne");
    assert_eq!(stream("vllm-0.32/sse/completions-stream.txt").text(0), "ail::ilarET");
    assert_eq!(stream("vllm-0.32/sse/completions-stream-stop.txt").text(0), "ail::");
    let two = stream("vllm-0.32/sse/completions-stream-two-prompts.txt");
    assert_eq!((two.text(0).as_str(), two.text(1).as_str()), (" sign bool", " kindical"));
    let rust = stream("vllm-rs-0.33-frontend/sse/chat-stream-usage.txt");
    assert_eq!(rust.text(0), "thingtracebackanne");
}

#[test]
fn usage_is_read_from_whichever_chunk_has_it() {
    let known = |prompt_tokens, completion_tokens, cached| {
        let cached_tokens = CachedTokens::Known(cached);
        Some(Usage { prompt_tokens, completion_tokens, cached_tokens })
    };
    let usage = |path: &str| stream(path).usage();
    assert_eq!(usage("vllm-0.32/sse/completions-stream.txt"), None);
    assert_eq!(usage("vllm-0.32/sse/completions-stream-usage.txt"), known(241, 4, 224));
    assert_eq!(usage("vllm-0.32/sse/completions-stream-continuous-usage.txt"), known(241, 3, 224));
    assert_eq!(usage("vllm-0.32/sse/chat-stream-usage.txt"), known(12, 3, 0));
    let rust = "vllm-rs-0.33-frontend/sse/completions-stream-usage.txt";
    assert_eq!(usage(rust), known(241, 3, 224));
    let with_delta = br#"{"choices":[{"index":0,"delta":{}}],"usage":{"prompt_tokens":5}}"#;
    let StreamItem::Chunk(chunk) = StreamItem::parse(with_delta).unwrap() else { panic!() };
    assert_eq!(chunk.usage.unwrap().prompt_tokens, 5);
}

#[test]
fn errors_in_a_stream_are_known_in_every_shape_and_a_null_error_is_none() {
    let item = |data: &str| StreamItem::parse(data.as_bytes()).unwrap();
    let error = |data: &str| match item(data) {
        StreamItem::Error(error) => error,
        other => panic!("{data}: {other:?}"),
    };
    let wrapped =
        error(r#"{"error":{"message":"m","type":"T","param":"p","code":"engine_paused"}}"#);
    assert_eq!(
        wrapped,
        ErrorBody {
            message: "m".to_owned(),
            kind: "T".to_owned(),
            param: Some("p".to_owned()),
            code: Some(ErrorCode::Name("engine_paused".to_owned())),
        }
    );
    let flat = error(r#"{"object":"error","message":"m","type":"T","param":null,"code":400}"#);
    assert_eq!((flat.message.as_str(), flat.code), ("m", Some(ErrorCode::Number(400))));
    assert_eq!(error(r#"{"error":"boom"}"#).message, "boom");
    assert!(matches!(item(r#"{"error":null,"choices":[]}"#), StreamItem::Chunk(_)));
    assert_eq!(item(" [DONE] "), StreamItem::Done);
    for data in ["{}", "", "[DONE", "{\"choices\":{}}", "{\"choices\":[{\"index\":-1}]}"] {
        assert!(StreamItem::parse(data.as_bytes()).is_err(), "{data}");
    }
}

#[test]
fn an_error_beside_choices_or_usage_ends_no_stream() {
    for error in [r#"{}"#, "false", r#"{"message":"soft"}"#, r#""text""#, "7", "null"] {
        for chunk in [
            format!(r#"{{"choices":[{{"index":0,"text":"a"}}],"error":{error}}}"#),
            format!(r#"{{"choices":[],"usage":{{"prompt_tokens":5}},"error":{error}}}"#),
        ] {
            let item = StreamItem::parse(chunk.as_bytes()).unwrap();
            assert!(matches!(item, StreamItem::Chunk(_)), "{chunk}: {item:?}");
        }
    }
    for alone in [r#"{"error":"boom"}"#, r#"{"error":7}"#, r#"{"error":{}}"#] {
        let item = StreamItem::parse(alone.as_bytes()).unwrap();
        assert!(matches!(item, StreamItem::Error(_)), "{alone}");
    }
    let with_empty_choices = br#"{"choices":[],"error":{"message":"boom"}}"#;
    assert!(matches!(StreamItem::parse(with_empty_choices).unwrap(), StreamItem::Error(_)));
    assert!(StreamItem::parse(br#"{"error":false}"#).is_err());
}

#[test]
fn what_a_usage_chunk_brings_beside_the_usage_is_kept() {
    let chunk = |extra: &str| {
        let chunk = format!(r#"{{"id":"x","choices":[],"usage":{{"prompt_tokens":5}}{extra}}}"#);
        beside_usage(chunk.as_bytes()).map(|rest| String::from_utf8(rest).unwrap())
    };
    assert_eq!(chunk(""), None);
    assert_eq!(chunk(r#","system_fingerprint":"f","metrics":{"a":1},"extra":null"#), None);
    let rest = chunk(r#","extra":{"n":1.50}"#);
    assert_eq!(rest.as_deref(), Some(r#"{"id":"x","choices":[],"extra":{"n":1.50}}"#));
}

#[test]
fn a_finish_reason_error_is_a_failure_and_nothing_counts_after_the_end_marker() {
    let end = |data: &[&str]| {
        let mut watch = StreamWatch::new(1);
        data.iter().for_each(|data| watch.see(&StreamItem::parse(data.as_bytes()).unwrap()));
        (watch.is_done(), watch.end())
    };
    let finish = |reason: &str| {
        format!(r#"{{"choices":[{{"index":0,"text":"","finish_reason":"{reason}"}}]}}"#)
    };
    assert_eq!(end(&[&finish("error"), "[DONE]"]), (true, StreamEnd::Failed(None)));
    assert_eq!(end(&[&finish("abort")]), (false, StreamEnd::Aborted));
    assert_eq!(end(&[&finish("stop")]), (false, StreamEnd::Cut));
    assert_eq!(end(&[&finish("stop"), "[DONE]", &finish("abort")]), (true, StreamEnd::Complete));
    assert_eq!(end(&[]), (false, StreamEnd::Cut));
}

// Errors.

#[test]
fn every_recorded_error_body_gives_its_message_and_code() {
    let mut count = 0;
    for path in fixtures::list("http", ".json") {
        let exchange = exchange(&path);
        let Some(status) = exchange["response"]["status"].as_u64().filter(|s| *s >= 400) else {
            continue;
        };
        count += 1;
        let body = body(&exchange);
        let error = ErrorBody::from_answer(status as u16, body.as_bytes());
        assert_eq!(error.code, Some(ErrorCode::Number(status as i64)), "{path}");
        let recorded: Value = serde_json::from_str(body).unwrap_or_default();
        match (&recorded["error"], &recorded["detail"]) {
            (Value::Object(object), _) => {
                assert_eq!(error.message, object["message"], "{path}");
                assert_eq!(error.kind, object["type"], "{path}");
                assert_eq!(json!(error.param), object["param"], "{path}");
                let written: Value = serde_json::from_slice(&error.to_bytes()).unwrap();
                assert_eq!(written, recorded, "{path}");
            }
            (_, Value::String(detail)) => assert_eq!(error.message, *detail, "{path}"),
            _ if body.is_empty() => {
                let message = format!("the engine answered {status} without a body");
                assert_eq!(error.message, message, "{path}");
            }
            _ => assert_eq!(error.message, body, "{path}"),
        }
    }
    assert_eq!(count, 66);
}

#[test]
fn an_error_before_the_stream_is_read_like_any_other() {
    let bytes = fixtures::bytes("vllm-0.32/sse/error-before-stream-queue-full.txt");
    let error = ErrorBody::from_answer(503, &bytes);
    assert_eq!(error.kind, "Service Unavailable");
    assert_eq!(error.code, Some(ErrorCode::Number(503)));
    assert_eq!(error.to_bytes(), bytes);
}

#[test]
fn a_written_error_event_is_one_event_that_reads_back() {
    let error = ErrorBody { message: "line\nbreak".to_owned(), ..engine_error() };
    let mut reader = Reader::new(1 << 10);
    let event = error.to_event();
    let events: Vec<_> = reader.push(&event).map(Result::unwrap).collect();
    assert_eq!(events.len(), 1);
    assert_eq!(StreamItem::parse(&events[0].data).unwrap(), StreamItem::Error(error));
    assert_eq!(reader.finish(), Tail::Clean);
}

#[test]
fn tokenize_answers_give_the_tokens() {
    let read = |file: &str| Tokenized::parse(body(&exchange(file)).as_bytes());
    let chat = read("vllm-0.32/http/tokenize-chat.json").unwrap();
    assert_eq!(chat.tokens, [3, 1989, 203, 1853, 4, 203, 3, 3560, 777, 837, 203]);
    assert_eq!(chat.max_model_len, 4096);
    let text = read("vllm-0.32/http/tokenize-token-strs.json").unwrap();
    assert_eq!(text.tokens, [276, 80, 335, 1259, 550]);
    assert!(!read("vllm-rs-0.33-frontend/http/tokenize.json").unwrap().tokens.is_empty());
    assert!(read("vllm-0.32/http/tokenize-bad.json").is_err());
    assert_eq!(
        Tokenized::parse(br#"{"count":2,"max_model_len":8,"tokens":[1]}"#).unwrap_err().to_string(),
        "answer: tokens: found 1, expected 2 as in count"
    );
}

/// Names with quotes, escapes and characters of several bytes.
const NAME: &str = "[a-z\"\\\\\u{80}-\u{2fff}]{0,6}";

proptest! {
    #[test]
    fn any_object_passes_through_as_it_was(
        fields in prop::collection::btree_map(NAME, any::<i64>(), 0..9),
    ) {
        let body = serde_json::to_string(&fields).unwrap();
        prop_assert_eq!(text(&completions(&body)), body);
    }

    #[test]
    fn no_bytes_panic(bytes: Vec<u8>) {
        let _ = (Request::parse(Api::Chat, &bytes), StreamItem::parse(&bytes));
        let _ = (Tokenized::parse(&bytes), ErrorBody::from_answer(500, &bytes));
    }

    #[test]
    fn no_mutation_of_a_chunk_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = fixtures::bytes("vllm-0.32/sse/chat-stream-usage.txt");
        for (at, byte) in &edits {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        let mut reader = Reader::new(1 << 20);
        for event in reader.push(&bytes).map(Result::unwrap) {
            let _ = StreamItem::parse(&event.data);
        }
    }
}
