//! A gateway over one simulated engine that has its owner and its events.

use std::sync::Arc;

use fak::engine::{Client, Endpoints, Engine, Timeouts};
use fak::events::recorder::Recorder;
use fak::fleet::{Door, Fleet, Worker};
use fak::gateway;
use fak::lifecycle::{Config, Lifecycle};
use fak::runtime::{OnExit, TaskGroup};
use fak::sessions::{self, Sessions};
use fak::store::Store;
use fak_index::{Index, Limits};
use fak_kernel::rank::Trust;
use fak_sim::{Binds, Sim, SimConfig};
use http::StatusCode;
use serde_json::json;

use super::rig::{PATIENT, Rig};
use crate::owners;

/// Where tests ask.
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// A gateway over one engine that has its owner and its events.
pub(crate) struct Bridged {
    pub(crate) sim: Sim,
    pub(crate) rig: Rig,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) sessions: Sessions,
    _tasks: TaskGroup,
}

impl Bridged {
    pub(crate) async fn start() -> Self {
        Self::with(SimConfig::default(), gateway::Config::default()).await
    }

    pub(crate) async fn with(sim: SimConfig, gateway: gateway::Config) -> Self {
        Self::over(Sim::start(sim, Binds::default()).await.unwrap(), gateway).await
    }

    /// Over an engine that somebody else has had before.
    pub(crate) async fn over(sim: Sim, gateway: gateway::Config) -> Self {
        let endpoints = Endpoints::new(&sim.base_url()).unwrap();
        let engine = Engine::new(Client::new(None, Timeouts::default()).unwrap(), endpoints);
        let fleet = Fleet::new([Worker { id: "w0".into(), engine, door: Door::new() }]);
        let index = Arc::new(Index::new(7, Limits::default()));
        let store = Store::open("sqlite::memory:").await.unwrap();
        let opened = Sessions::open(store.clone(), sessions::Config::default()).await;
        let (sessions, keeper) = opened.unwrap();
        let recorder = Arc::new(Recorder::new(0));
        let config = owners::config(&fleet, &store, &index, &recorder);
        let config = Config { patience: PATIENT, settle_within: PATIENT, ..config };
        let (lifecycle, mut tasks) = owners::run(&config);
        tasks.spawn("sessions", OnExit::StopProcess, keeper.run(tasks.shutdown()));
        let rig = Rig::around(fleet, index, gateway, Some(sessions.clone())).await;
        let bridged = Self { sim, rig, lifecycle, sessions, _tasks: tasks };
        bridged.heard().await;
        bridged
    }

    /// Waits until the engine's events are heard, and all of them.
    pub(crate) async fn heard(&self) {
        self.lifecycle.look("w0").await.unwrap();
        let rank = self.lifecycle.ranks("w0").await.unwrap().remove(0);
        rank.wait_for(|status| status.trust == Trust::Exact).await.unwrap();
        self.lifecycle.look("w0").await.unwrap();
    }

    /// Waits until what is stored from here on is believed.
    pub(crate) async fn settled(&self) {
        let rank = self.lifecycle.ranks("w0").await.unwrap().remove(0);
        let settled = rank.wait_for(|status| status.is_settled);
        tokio::time::timeout(PATIENT, settled).await.unwrap().unwrap();
    }

    /// Asks for one token, and waits until what the engine stored for it is believed.
    pub(crate) async fn ask(&self, text: &str) -> (String, String) {
        let (kv, warm, _) = self.ask_salted(text, None).await;
        (kv, warm)
    }

    /// As [`ask`](Self::ask), where the engine is to be sent `salt`. Also the tokens that it took
    /// from its caches.
    pub(crate) async fn ask_salted(&self, text: &str, salt: Option<&str>) -> (String, String, u64) {
        let asked = self.claimed_and_cached(text).await;
        let tokens = self.sim.tokenize(text);
        let rank = self.lifecycle.ranks("w0").await.unwrap().remove(0);
        let prompt = fak_index::Prompt { tokens: &tokens, lora: None, salt };
        let held = self.sim.holds(&tokens, salt).gpu;
        assert!(held > 0, "nothing was stored with this salt");
        let believed =
            rank.wait_for(|_| self.rig.index.held(rank.id(), &prompt).blocks.gpu as usize == held);
        tokio::time::timeout(PATIENT, believed).await.unwrap().unwrap();
        asked
    }

    /// Asks for one token: what was claimed, and the tokens that the engine took from its caches.
    pub(crate) async fn claimed_and_cached(&self, text: &str) -> (String, String, u64) {
        let body = json!({"model": "tiny", "prompt": text, "max_tokens": 1}).to_string();
        let answer = self.rig.post(COMPLETIONS, &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        let header = |name| answer.header(name).unwrap().to_owned();
        let cached = &answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
        (header("x-fak-kv"), header("x-fak-warm-tokens"), cached.as_u64().unwrap())
    }

    pub(crate) fn audited(&self, outcome: &str) -> u64 {
        self.rig.count(&format!("fak_claims_total{{outcome=\"{outcome}\"}}"))
    }

    /// Somebody else's call, behind fak's back.
    pub(crate) async fn behind(&self, path: &str, body: &str) {
        let url = format!("{}{path}", self.sim.base_url());
        let answer = self.rig.send("POST", &url, &[], body).await;
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
    }
}
