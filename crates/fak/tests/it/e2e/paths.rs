//! Paths as clients write them: with a slash too many, by HEAD, and those of the engine's server
//! that compute nothing; and what the access log says of them.

use fak_sim::{Binds, Sim, SimConfig};
use http_body_util::BodyExt as _;
use serde_json::json;

use super::process::{Fak, Setup, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_path_with_a_slash_at_its_end_is_redirected_for_data_and_for_control() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("slashes").sims([&sim]);
    let fak = setup.start().await;
    for (method, path, to) in [
        ("GET", "/health/", "/health"),
        ("POST", "/v1/chat/completions/?a=b", "/v1/chat/completions?a=b"),
        ("POST", "/reset_prefix_cache/", "/reset_prefix_cache"),
        ("POST", "/wake_up/?tags=weights", "/wake_up?tags=weights"),
    ] {
        let answer = fak.open(method, path, "{}".to_owned()).await.unwrap();
        assert_eq!(answer.status(), 307, "{path}");
        assert_eq!(answer.headers()["location"], to);
    }
    assert_eq!(fak.open("GET", "//health", String::new()).await.unwrap().status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_other_routes_of_an_engine_pass_and_each_request_is_a_line_of_the_access_log() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("passed").sims([&sim]).env("FAK_LOG", "fak::access=info");
    let fak = setup.start().await;
    fak.worker_is("w0", "serving", true).await;
    for path in ["/version", "/load", "/ping", "/v1/models"] {
        assert_eq!(fak.get(path).await.status, 200, "{path}");
        let head = fak.open("HEAD", path, String::new()).await.unwrap();
        assert_eq!(head.status(), 200, "{path}");
        assert!(head.into_body().collect().await.unwrap().to_bytes().is_empty(), "{path}");
    }
    let tokens = fak.post("/tokenize", &json!({"model": "tiny", "prompt": "a b c"})).await.json();
    assert!(tokens["count"].as_u64().unwrap() > 0, "{tokens}");
    let text = fak.post("/detokenize", &json!({"model": "tiny", "tokens": tokens["tokens"]})).await;
    assert_eq!(text.json()["prompt"], "a b c");
    for route in ["/tokenize", "/version", "/v1/models"] {
        let told = format!("route=\"{route}\" outcome=\"ok\"");
        until("its line", async || fak.talk().contains(&told).then_some(())).await;
    }
    assert_eq!(fak.get("/nothing").await.status, 404);
    let refused = "route=\"other\" outcome=\"refused\"";
    until("its line", async || fak.talk().contains(refused).then_some(())).await;
}

/// As a browser asks before a page of another origin may, and then for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_an_origin_that_the_settings_name_may_ask_for_inference_and_for_no_control() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let origin = "https://app.example";
    let origins =
        Setup::new("origins").sims([&sim]).file("cors_origins = [\"https://app.example\"]\n");
    let no_origins = Setup::new("no_origins").sims([&sim]);
    let (open, shut) = (origins.start().await, no_origins.start().await);
    open.worker_is("w0", "serving", true).await;
    let ask = async |fak: &Fak, method: &str, path: &str, origin: &str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,x-stainless-os"),
        ];
        let answer = fak.with(method, path, &headers, "{}".to_owned()).await;
        let header = |name: &str| answer.headers.get(name).map(|v| v.to_str().unwrap().to_owned());
        (
            answer.status,
            header("access-control-allow-origin"),
            header("access-control-allow-headers"),
            header("allow"),
        )
    };
    let chat = "/v1/chat/completions";
    let (status, allowed, headers, _) = ask(&open, "OPTIONS", chat, origin).await;
    assert_eq!((status, allowed.as_deref()), (200, Some(origin)));
    assert_eq!(headers.as_deref(), Some("authorization,x-stainless-os"));
    let (status, allowed, ..) = ask(&open, "POST", chat, origin).await;
    assert_eq!((status, allowed.as_deref()), (400, Some(origin)), "errors can be read, too");
    let (_, allowed, ..) = ask(&open, "OPTIONS", chat, "https://other.example").await;
    assert_eq!(allowed, None);
    let (status, allowed, ..) = ask(&open, "POST", "/sleep", origin).await;
    assert_eq!((status, allowed), (403, None));
    let (status, allowed, _, allow) = ask(&shut, "OPTIONS", chat, origin).await;
    assert_eq!((status, allowed, allow.as_deref()), (405, None, Some("POST")));
}
