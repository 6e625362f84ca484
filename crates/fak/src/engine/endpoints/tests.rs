//! The guard of the engine boundary: every constructor is driven with hostile input, and nothing
//! outside the two lists comes out.

use super::*;

/// The lists of DESIGN section 7, written down a second time, so that widening one fails here
/// first.
const DATA: &[&str] = &[
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/inference/v1/generate",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/load",
    "/ping",
    "/metrics",
    "/health",
    "/version",
];
const CONTROL: &[&str] = &[
    "/pause",
    "/resume",
    "/is_paused",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reset_prefix_cache",
    "/kv_event_sources",
    "/weight_info",
    "/server_info",
    "/openapi.json",
    "/collective_rpc",
];

const HOSTILE: &[&str] = &[
    "/v1/../sleep",
    "/v1/..%2fsleep",
    "/v1%2fmodels",
    "/v1/%2e%2e/sleep",
    "//sleep",
    "/sleep/",
    "/sleep?level=2",
    "/sleep#",
    "/%73leep",
    "/SLEEP",
    "/Sleep",
    "/V1/models",
    "/v1//models",
    "/v1/models/",
    "/v1/models/../../sleep",
    "/v1/models;/sleep",
    "/v1/models\\..\\sleep",
    "/v1/models?x=/sleep",
    "/v1/models\r\nHost: evil",
    "/v1/models\nGET /sleep HTTP/1.1",
    "/v1/models\0",
    "/v1/models ",
    " /v1/models",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/internal",
    "/internal/state",
    "/debug",
    "/debug/pprof",
    "/invocations",
    "/update_weights",
    "/abort_requests",
    "/start_profile",
    "sleep",
    "",
    "/",
    ".",
    "..",
    "/\u{ff53}leep",
    "/s\u{131}eep",
    "/\u{2024}\u{2024}/sleep",
    "/v1/models\u{0}",
    "http://evil/v1/models",
    "@evil/v1/models",
];

fn every_control() -> Vec<Control> {
    let mut calls = vec![
        Control::Resume,
        Control::IsPaused,
        Control::IsSleeping,
        Control::KvEventSources,
        Control::WeightInfo,
        Control::ServerInfo,
        Control::OpenApi,
        Control::ReloadWeights,
        Control::WakeUp { tags: Vec::new() },
        Control::WakeUp { tags: WakeTag::ALL.to_vec() },
    ];
    for flag in [false, true] {
        for other in [false, true] {
            calls.push(Control::ResetPrefixCache { external: flag, running_requests: other });
        }
        for mode in Mode::ALL.iter().copied() {
            for keep_connector_cache in [false, true] {
                calls.push(Control::Pause { mode, clear_cache: flag, keep_connector_cache });
            }
            for level in SleepLevel::ALL.iter().copied() {
                calls.push(Control::Sleep { level, mode, keep_connector_cache: flag });
            }
        }
    }
    calls
}

/// Every URL that `endpoints` can make.
fn every_url(endpoints: &Endpoints) -> Vec<EngineUrl> {
    let data = Data::ALL.iter().map(|route| endpoints.data(*route));
    let control = every_control().into_iter().filter_map(|call| endpoints.control(&call).ok());
    data.chain(control).collect()
}

fn is_listed(url: &EngineUrl) -> bool {
    let path = url.uri().path();
    path == url.path() && (DATA.contains(&path) || CONTROL.contains(&path))
}

#[test]
fn the_lists_are_those_of_the_design() {
    let data: Vec<_> = Data::ALL.iter().map(|route| route.path()).collect();
    let control: Vec<_> = ControlPath::ALL.iter().map(|path| path.path()).collect();
    assert_eq!(data, DATA);
    assert_eq!(control, CONTROL);
    let driven: std::collections::HashSet<_> =
        every_control().iter().map(|call| call.path()).collect();
    assert_eq!(driven.len(), ControlPath::ALL.len(), "a control path has no call");
}

#[test]
fn no_hostile_path_is_a_route() {
    for path in HOSTILE {
        assert_eq!(Data::from_path(path), None, "{path:?}");
        assert_eq!(ControlPath::from_path(path), None, "{path:?}");
    }
    for control in CONTROL {
        assert_eq!(Data::from_path(control), None, "a control path is no data route");
    }
}

#[test]
fn no_hostile_word_is_a_parameter() {
    for word in
        ["", "0", "3", "01", "1 ", "-1", "1&level=2", "keep\r\n", "KEEP", "abort#", "a%62ort"]
    {
        assert_eq!(Mode::parse(word), None);
        assert_eq!(SleepLevel::parse(word), None);
        assert_eq!(WakeTag::parse(word), None);
    }
}

#[test]
fn a_base_with_anything_hostile_is_refused() {
    for path in HOSTILE.iter().filter(|path| !["", "/"].contains(path)) {
        for base in [format!("http://h:8000{path}"), format!("http://h:8000/v1{path}")] {
            let made = Endpoints::new(&base);
            // `http://h:8000sleep` and the like are refused for their port, the others for what
            // they hold.
            assert!(made.is_err(), "{base:?} was taken");
        }
        let metrics = format!("http://h:8000{path}");
        let endpoints = Endpoints::new("http://h:8000").expect("plain");
        assert!(endpoints.with_metrics_url(&metrics).is_err(), "{metrics:?} was taken");
    }
    let bases = [
        "",
        "h:8000",
        "//h:8000",
        "ftp://h",
        "file:///etc/passwd",
        "HTTP//h",
        "http:/h",
        "http://",
        "http:///v1",
        "http://user@h/v1",
        "http://user:key@h/v1",
        "http://h@evil/v1",
        "http://h:0/v1",
        "http://h:65536",
        "http://h:+80",
        "http://h:80:90",
        "http://h:/v1",
        "http://[::1/v1",
        "http://[evil]/v1",
        "http://[::1]x/v1",
        "http://::1/v1",
        "http://h?x=1",
        "http://h#x",
        "http://h/v1?x",
        "http://h\r\nX: y/v1",
        "http://h /v1",
        " http://h/v1",
        "http://h/v1 ",
        "http://h%2fevil/v1",
        "http://h\\evil/v1",
        "http://\u{440}\u{443}/v1",
        "http://..",
        "http://.h",
        "http://-h",
        "http://*",
    ];
    for base in bases {
        assert!(Endpoints::new(base).is_err(), "{base:?} was taken");
    }
    assert_eq!(
        Endpoints::new(&format!("http://{}", "h".repeat(3000))).err(),
        Some(BadUrl::TooLong)
    );
}

#[test]
fn every_url_of_every_base_is_on_the_lists() {
    for base in
        ["http://h", "http://h:8000/", "https://h/v1", "http://[::1]:8000/v1/", "http://a_b.c"]
    {
        let endpoints = Endpoints::new(base).expect("honest").allowing_reload_weights();
        for url in every_url(&endpoints) {
            assert!(is_listed(&url), "{url:?}");
            let expected = base.trim_end_matches('/').trim_end_matches("/v1");
            assert!(url.uri().to_string().starts_with(&format!("{expected}{}", url.path())));
        }
    }
}

#[test]
fn worker_rpc_is_shut_until_opened() {
    let endpoints = Endpoints::new("http://h").expect("honest");
    let shut = endpoints.control(&Control::ReloadWeights);
    assert_eq!(shut, Err(NotAllowed { path: "/collective_rpc" }));
    let open = endpoints.allowing_reload_weights();
    assert_eq!(open.control(&Control::ReloadWeights).expect("opened").path(), "/collective_rpc");
    let bodies = every_control().iter().filter_map(Control::body).collect::<Vec<_>>();
    assert_eq!(bodies, [r#"{"method":"reload_weights"}"#]);
}

#[test]
fn parameters_go_into_the_query_in_full() {
    let endpoints = Endpoints::new("http://h/v1").expect("honest");
    let check = |call: Control, expected: &str| {
        assert_eq!(endpoints.control(&call).expect("allowed").uri().to_string(), expected);
    };
    check(
        Control::Pause { mode: Mode::Keep, clear_cache: false, keep_connector_cache: false },
        "http://h/pause?mode=keep&clear_cache=false",
    );
    check(
        Control::Pause { mode: Mode::Keep, clear_cache: true, keep_connector_cache: true },
        "http://h/pause?mode=keep&clear_cache=true&clear_connector_cache=false",
    );
    let level = SleepLevel::DiscardAll;
    check(
        Control::Sleep { level, mode: Mode::Wait, keep_connector_cache: true },
        "http://h/sleep?level=2&mode=wait&clear_connector_cache=false",
    );
    check(
        Control::Sleep { level, mode: Mode::Abort, keep_connector_cache: false },
        "http://h/sleep?level=2&mode=abort",
    );
    check(
        Control::WakeUp { tags: vec![WakeTag::Weights, WakeTag::KvCache] },
        "http://h/wake_up?tags=weights&tags=kv_cache",
    );
    check(
        Control::ResetPrefixCache { external: true, running_requests: false },
        "http://h/reset_prefix_cache?reset_external=true",
    );
    check(
        Control::ResetPrefixCache { external: false, running_requests: false },
        "http://h/reset_prefix_cache",
    );
}

#[test]
fn the_key_stays_with_the_engine() {
    let endpoints = Endpoints::new("http://h:8000").expect("honest");
    assert!(every_url(&endpoints).iter().all(EngineUrl::takes_key));
    let apart = endpoints.with_metrics_url("http://exporter:9/metrics").expect("honest");
    for url in every_url(&apart) {
        assert_eq!(url.takes_key(), url.path() != "/metrics", "{url:?}");
    }
}

/// The README writes `/a` and its `/b` for `/a/b`.
#[test]
fn the_readme_names_every_data_route() {
    let readme = include_str!("../../../../../README.md");
    let named = |path: &str| readme.contains(&format!("`{path}`"));
    for path in DATA {
        let below = path.rsplit_once('/').map(|(above, last)| (above, format!("/{last}")));
        let is_below = |(above, last): (&str, String)| named(above) && named(&last);
        assert!(named(path) || below.is_some_and(is_below), "{path}");
    }
}
