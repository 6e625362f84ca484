//! Where a worker's ranks publish: from the engine's answer to `/kv_event_sources` (vLLM 0.31.0 and
//! later), or from endpoints that the operator named.
//!
//! Invariant: a rank is either a source that can be connected to, or said to be silent; an answer
//! that cannot be read is an error that names the field and its value.

use serde_json::{Map, Value};

use super::endpoint::{self, Endpoint};

/// Ranks that one worker may have.
pub const RANKS_MAX: u32 = 4096;

/// One rank's sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Data-parallel rank.
    pub rank: u32,
    /// Its PUB socket.
    ///
    /// A host that the engine names may be one that it connects out to, and is then heard by nobody
    /// who connects: vLLM binds `*` and `::` only, but reports the address that it bound for
    /// `tcp://*:0` without a `*` too (0.32.0, source), so the two look alike.
    pub live: Endpoint,
    /// Its ROUTER socket; `None` if the engine replays nothing, which is its default.
    pub replay: Option<Endpoint>,
    /// The topic it publishes under.
    pub topic: String,
}

/// Why a rank publishes nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Silent {
    /// `enable_kv_cache_events` is false, or the publisher is `null`.
    #[error("KV events are off: start the engine with --kv-events-config")]
    Off,
    /// A publisher that fak has no client for.
    #[error("KV events go out through the publisher `{0}`, which fak cannot listen to")]
    Publisher(String),
}

/// What a worker said about its ranks, in order of rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Discovery {
    /// Ranks to listen to. None at all if the engine has no KV events configured, or serves no
    /// engine (a render-only server answers `{}`).
    pub sources: Vec<Source>,
    /// Ranks that publish nothing.
    pub silent: Vec<(u32, Silent)>,
}

/// Why there are no sources.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The answer is not a JSON object.
    #[error("/kv_event_sources did not answer with a JSON object")]
    Json(#[source] serde_json::Error),
    /// A key that is no rank.
    #[error("/kv_event_sources: `{value}` is not a rank below {RANKS_MAX}")]
    Rank {
        /// The key.
        value: String,
    },
    /// A field that is missing or of another type.
    #[error("/kv_event_sources: rank {rank}: {field} is {value}, not {wanted}")]
    Field {
        /// The rank.
        rank: u32,
        /// The field's name.
        field: &'static str,
        /// What it holds, as JSON, cut short.
        value: String,
        /// What it should hold.
        wanted: &'static str,
    },
    /// An endpoint that cannot be connected to.
    #[error("rank {rank}: {field}")]
    Endpoint {
        /// The rank.
        rank: u32,
        /// Which of the two.
        field: &'static str,
        /// What is wrong with it.
        #[source]
        source: endpoint::Error,
    },
    /// The engine connects out instead of listening.
    #[error(
        "rank {rank}: endpoint `{value}` is one that vLLM connects out to: give it tcp://*:PORT"
    )]
    ConnectsOut {
        /// The rank.
        rank: u32,
        /// The endpoint.
        value: String,
    },
    /// Base port and rank go past the last port.
    #[error("rank {rank}: {base} plus the rank is past port 65535")]
    Port {
        /// The rank.
        rank: u32,
        /// Rank 0's endpoint.
        base: Endpoint,
    },
    /// A number of ranks that no worker has.
    #[error("{ranks} ranks: a worker has from 1 to {RANKS_MAX}")]
    Ranks {
        /// What was asked for.
        ranks: u32,
    },
}

/// Reads the body of an engine's answer to `/kv_event_sources`. `worker_host` is the host of the
/// worker's URL.
///
/// # Errors
/// [`Error`].
pub fn from_answer(body: &[u8], worker_host: &str) -> Result<Discovery, Error> {
    let ranks: Map<String, Value> = serde_json::from_slice(body).map_err(Error::Json)?;
    let mut found = Discovery::default();
    for (key, value) in &ranks {
        let rank = key
            .parse()
            .ok()
            .filter(|rank| *rank < RANKS_MAX)
            .ok_or_else(|| Error::Rank { value: short(key) })?;
        match source(rank, value, worker_host)? {
            Ok(source) => found.sources.push(source),
            Err(silent) => found.silent.push((rank, silent)),
        }
    }
    found.sources.sort_by_key(|source| source.rank);
    found.silent.sort_by_key(|(rank, _)| *rank);
    Ok(found)
}

/// Endpoints that the operator named for rank 0; each further rank's ports are higher by its
/// number, as vLLM counts them.
///
/// # Errors
/// [`Error::Endpoint`], [`Error::Port`], [`Error::Ranks`].
pub fn named(
    live: &str,
    replay: Option<&str>,
    topic: &str,
    ranks: u32,
    worker_host: &str,
) -> Result<Vec<Source>, Error> {
    if ranks == 0 || ranks > RANKS_MAX {
        return Err(Error::Ranks { ranks });
    }
    let parse = |value, field| {
        Endpoint::parse(value, worker_host).map_err(|source| Error::Endpoint {
            rank: 0,
            field,
            source,
        })
    };
    let live = parse(live, "kv")?;
    let replay = replay.map(|value| parse(value, "replay")).transpose()?;
    let of_rank = |base: &Endpoint, rank| {
        base.for_rank(rank).ok_or_else(|| Error::Port { rank, base: base.clone() })
    };
    (0..ranks)
        .map(|rank| {
            Ok(Source {
                rank,
                live: of_rank(&live, rank)?,
                replay: replay.as_ref().map(|base| of_rank(base, rank)).transpose()?,
                topic: topic.to_owned(),
            })
        })
        .collect()
}

fn source(rank: u32, value: &Value, worker_host: &str) -> Result<Result<Source, Silent>, Error> {
    let text = |field: &'static str| match &value[field] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.as_str())),
        other => Err(wrong(rank, field, other, "a string or null")),
    };
    let Some(is_on) = value["enable_kv_cache_events"].as_bool() else {
        let field = "enable_kv_cache_events";
        return Err(wrong(rank, field, &value[field], "true or false"));
    };
    match text("publisher")? {
        _ if !is_on => return Ok(Err(Silent::Off)),
        None | Some("null") => return Ok(Err(Silent::Off)),
        Some("zmq") => {}
        Some(other) => return Ok(Err(Silent::Publisher(short(other)))),
    }
    let live = text("endpoint")?
        .ok_or_else(|| wrong(rank, "endpoint", &Value::Null, "where it publishes"))?;
    if live.starts_with("tcp://0.0.0.0:") {
        return Err(Error::ConnectsOut { rank, value: live.to_owned() });
    }
    let parse = |value, field| {
        Endpoint::parse(value, worker_host).map_err(|source| Error::Endpoint {
            rank,
            field,
            source,
        })
    };
    Ok(Ok(Source {
        rank,
        live: parse(live, "endpoint")?,
        replay: text("replay_endpoint")?
            .filter(|value| !value.is_empty())
            .map(|value| parse(value, "replay_endpoint"))
            .transpose()?,
        topic: text("topic")?.unwrap_or_default().to_owned(),
    }))
}

fn wrong(rank: u32, field: &'static str, value: &Value, wanted: &'static str) -> Error {
    Error::Field { rank, field, value: short(&value.to_string()), wanted }
}

/// Short enough for a log line.
fn short(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(path: &str) -> String {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/");
        let fixture = std::fs::read(format!("{root}{path}")).unwrap();
        let fixture: Value = serde_json::from_slice(&fixture).unwrap();
        fixture["response"]["body_text"].as_str().unwrap().to_owned()
    }

    fn shown(sources: &[Source]) -> Vec<String> {
        let shown = |source: &Source| {
            let replay = source.replay.as_ref().map(ToString::to_string).unwrap_or_default();
            format!("{} {} {replay} {}", source.rank, source.live, source.topic)
        };
        sources.iter().map(shown).collect()
    }

    #[test]
    fn recorded_answers_name_every_rank() {
        let two = recorded("vllm-0.32/http/kv_event_sources-dp2.json");
        let found = from_answer(two.as_bytes(), "worker-1").unwrap();
        assert_eq!(
            shown(&found.sources),
            [
                "0 tcp://worker-1:5957 tcp://worker-1:5967 kv@tiny",
                "1 tcp://worker-1:5958 tcp://worker-1:5968 kv@tiny"
            ]
        );
        assert_eq!(found.silent, []);
        for (path, port) in [
            ("vllm-0.32/http/kv_event_sources.json", 5557),
            ("vllm-rs-0.33-frontend/http/kv_event_sources.json", 6057),
        ] {
            let found = from_answer(recorded(path).as_bytes(), "[::1]").unwrap();
            assert_eq!(found.sources[0].live.to_string(), format!("tcp://[::1]:{port}"));
        }
    }

    #[test]
    fn a_rank_that_publishes_nothing_is_told() {
        let body = br#"{"10":{"enable_kv_cache_events":false,"publisher":"zmq","endpoint":5},
            "2":{"enable_kv_cache_events":true,"publisher":"null"},
            "3":{"enable_kv_cache_events":true,"publisher":"kafka"},
            "0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:1",
                 "replay_endpoint":null}}"#;
        let found = from_answer(body, "w").unwrap();
        assert_eq!(shown(&found.sources), ["0 tcp://w:1  "]);
        let kafka = Silent::Publisher("kafka".to_owned());
        assert_eq!(found.silent, [(2, Silent::Off), (3, kafka), (10, Silent::Off)]);
        assert_eq!(from_answer(b"{}", "w").unwrap(), Discovery::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let on = r#""enable_kv_cache_events":true,"publisher":"zmq""#;
        for (body, wanted) in [
            ("[]".to_owned(), "/kv_event_sources did not answer with a JSON object"),
            (r#"{"x":{}}"#.to_owned(), "/kv_event_sources: `x` is not a rank below 4096"),
            (r#"{"4096":{}}"#.to_owned(), "/kv_event_sources: `4096` is not a rank below 4096"),
            (
                r#"{"0":[]}"#.to_owned(),
                "/kv_event_sources: rank 0: enable_kv_cache_events is null, not true or false",
            ),
            (
                format!(r#"{{"1":{{{on}}}}}"#),
                "/kv_event_sources: rank 1: endpoint is null, not where it publishes",
            ),
            (
                format!(r#"{{"1":{{{on},"endpoint":7}}}}"#),
                "/kv_event_sources: rank 1: endpoint is 7, not a string or null",
            ),
            (
                format!(r#"{{"1":{{{on},"endpoint":"tcp://*:7","topic":[]}}}}"#),
                "/kv_event_sources: rank 1: topic is [], not a string or null",
            ),
            (
                format!(r#"{{"1":{{{on},"endpoint":"tcp://0.0.0.0:7"}}}}"#),
                "rank 1: endpoint `tcp://0.0.0.0:7` is one that vLLM connects out to: \
                 give it tcp://*:PORT",
            ),
        ] {
            let error = from_answer(body.as_bytes(), "w").unwrap_err();
            assert_eq!(error.to_string(), wanted);
        }
        let body = format!(r#"{{"1":{{{on},"endpoint":"ipc:///tmp/x"}}}}"#);
        let error = from_answer(body.as_bytes(), "w").unwrap_err();
        assert_eq!(error.to_string(), "rank 1: endpoint");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(
            source,
            "endpoint `ipc:///tmp/x` is not tcp://host:port: fak connects over TCP only"
        );
    }

    #[test]
    fn named_endpoints_count_up_by_rank() {
        let sources = named("tcp://*:5557", Some("tcp://*:5600"), "kv", 2, "w").unwrap();
        assert_eq!(
            shown(&sources),
            ["0 tcp://w:5557 tcp://w:5600 kv", "1 tcp://w:5558 tcp://w:5601 kv"]
        );
        assert!(matches!(
            named("tcp://h:65535", None, "", 2, "w"),
            Err(Error::Port { rank: 1, .. })
        ));
        assert!(matches!(named("tcp://h:1", None, "", 0, "w"), Err(Error::Ranks { ranks: 0 })));
        assert!(matches!(named("h:1", None, "", 1, "w"), Err(Error::Endpoint { field: "kv", .. })));
    }
}
