//! What is done next: drawn from the seed alone.
//! Invariant: prompts come from a small pool whose blocks are more than the caches hold, so that
//! they are shared, evicted and stored anew.

use fak_sim::RouteFault;
use fastrand::Rng;
use serde_json::{Value, json};

use super::Hunt;
use super::weights::Training;
use crate::fak::Ask;
use crate::prompt::Prompt;

/// Prompts that begin alike.
const FAMILIES: u32 = 6;

/// Labels of a family: its stem, then its branches.
const FAMILY_LABELS: u32 = 100;

/// Blocks of a family's stem.
const STEM_BLOCKS: u32 = 12;

/// Ways to go on from a stem.
const BRANCHES: u32 = 4;

/// Kills of fak in a thousand accidents.
const KILLS: u32 = 15;

/// Sessions in use.
const SESSIONS: u32 = 8;

/// One turn of the hunt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// One request, and its answer.
    Ask,
    /// Requests at once.
    Burst(usize),
    /// An action through fak, with requests under way.
    Act(usize),
    /// Calls straight to an engine, with requests under way.
    Behind(usize),
    /// Both, and nobody knows which comes first.
    Collide,
    /// Batches are dropped, lost or sent twice.
    Batches,
    /// The publisher stands still while requests and a reset go on.
    Hold,
    /// A control route goes wrong once.
    Route,
    /// The engine's process ends, and another begins.
    Restart,
    /// A sleep for a trainer, with requests under way, and a wake with or without other weights.
    Rollout(usize),
    /// Other weights under a serving engine, with requests under way.
    Weights(usize),
    /// fak is killed, and another begins on its ledger.
    Kill,
    /// Looks at an engine's metrics fail for a while.
    Unseen,
    /// The live socket is open and brings nothing, while replay has it all.
    Deaf,
}

impl Turn {
    /// Whether anything but requests happens in it.
    pub(super) fn is_accident(&self) -> bool {
        !matches!(self, Self::Ask | Self::Burst(_))
    }

    /// Its kind.
    pub(super) fn name(&self) -> String {
        let told = format!("{self:?}");
        told.split('(').next().unwrap_or_default().to_lowercase()
    }
}

/// An action through fak: what on, its name, its options.
#[derive(Clone, Debug)]
pub(super) struct Action {
    pub(super) on: String,
    pub(super) name: &'static str,
    pub(super) options: Value,
}

impl Action {
    /// The same, with no sleep that takes the weights.
    pub(super) fn keeping_weights(mut self) -> Self {
        if self.options["level"] == 2 {
            self.options["level"] = 1.into();
        }
        self
    }
}

/// Draws from a seed.
#[derive(Debug)]
pub(super) struct Draw {
    pub(super) rng: Rng,
    accidents: u32,
    restarts: u32,
    trains: bool,
    has_faults: bool,
}

impl Draw {
    pub(super) fn new(hunt: &Hunt, has_faults: bool) -> Self {
        let Hunt { seed, accidents, restarts, trains, .. } = *hunt;
        Self { rng: Rng::with_seed(seed), accidents, restarts, trains, has_faults }
    }

    pub(super) fn turn(&mut self) -> Turn {
        if self.rng.u32(0..100) < self.accidents {
            return self.accident();
        }
        match self.rng.u32(0..11) {
            0 => Turn::Burst(self.rng.usize(2..6)),
            _ => Turn::Ask,
        }
    }

    fn accident(&mut self) -> Turn {
        let under_way = self.rng.usize(0..4);
        if self.rng.u32(0..1_000) < self.restarts {
            return Turn::Restart;
        }
        if self.rng.u32(0..1_000) < KILLS {
            return Turn::Kill;
        }
        match self.rng.u32(0..21) {
            0..=5 => Turn::Act(under_way),
            6..=9 => Turn::Behind(under_way),
            10 => Turn::Collide,
            11..=12 => Turn::Rollout(under_way),
            13 if self.trains => Turn::Weights(under_way),
            14 if self.has_faults => Turn::Batches,
            15 if self.has_faults => Turn::Hold,
            16 if self.has_faults => Turn::Route,
            17 if self.has_faults => Turn::Unseen,
            18..=20 if self.has_faults => Turn::Deaf,
            _ => Turn::Ask,
        }
    }

    /// A stem of a family, a way to go on, and a tail.
    pub(super) fn ask(&mut self) -> Ask {
        let rng = &mut self.rng;
        let first = rng.u32(0..FAMILIES) * FAMILY_LABELS + 1;
        let stem = rng.u32(1..=STEM_BLOCKS);
        let mut text = format!("{first}-{}", first + stem - 1);
        let branch = rng.u32(0..=3);
        if branch > 0 {
            let from = first + STEM_BLOCKS + rng.u32(0..BRANCHES) * 4;
            text += &format!(" {from}-{}", from + branch - 1);
        }
        // A prompt of whole blocks is reused but for its last one.
        if rng.u32(0..4) > 0 {
            text += &format!(" +{}", rng.u32(1..32));
        }
        let prompt = Prompt::try_from(text).expect("labels are from 1 to 9,999, tails below 32");
        Ask {
            prompt: prompt.tokens(),
            max_tokens: if rng.u32(0..20) == 0 { rng.u32(20..40) } else { rng.u32(1..4) },
            stream: rng.bool(),
            session: (rng.u32(0..3) > 0).then(|| session(rng)),
            salt: (rng.u32(0..20) == 0).then(|| "salt".to_owned()),
            id: None,
            more: if rng.u32(0..6) == 0 { odd(rng) } else { Value::Null },
        }
    }

    /// An action on `worker`, or through a session on whichever it is bound to.
    pub(super) fn action(&mut self, worker: &str) -> Action {
        let rng = &mut self.rng;
        let mode = *rng.choice(&["abort", "wait", "keep"]).expect("there are three");
        let (name, mut options) = match rng.u32(0..12) {
            0..=2 => ("sleep", sleep(rng, mode)),
            3..=5 => ("pause", pause(rng, mode)),
            6..=8 => ("reset", json!({"external": rng.bool(), "running": rng.bool()})),
            9 => ("resume", json!({})),
            10 => ("wake", json!({"weights": "same"})),
            _ if rng.bool() => ("quarantine", json!({"flush": true})),
            _ => ("quarantine", json!({"isolate": true})),
        };
        let is_sessions = name == "quarantine" || rng.u32(0..4) == 0;
        let on = if is_sessions {
            options["force"] = true.into();
            format!("sessions/{}", session(rng))
        } else {
            format!("workers/{worker}")
        };
        Action { on, name, options }
    }

    /// A sleep for a trainer, and what the trainer does.
    pub(super) fn rollout(&mut self) -> (Value, Training) {
        let rng = &mut self.rng;
        let mode = *rng.choice(&["abort", "wait", "keep"]).expect("there are three");
        let kinds = [Training::None, Training::Silent, Training::Versioned];
        let training = *rng.choice(&kinds).expect("there are three");
        let training = if self.trains { training } else { Training::None };
        (sleep(rng, mode), training)
    }

    /// Calls that somebody else makes, one after the other.
    pub(super) fn behind(&mut self, takes_weights: bool) -> Vec<String> {
        let rng = &mut self.rng;
        let mode = *rng.choice(&["abort", "wait", "keep"]).expect("there are three");
        // Engines that do not know the argument ignore it.
        let spared = if rng.u32(0..3) == 0 { "&clear_connector_cache=false" } else { "" };
        let sleep = |level: u8| format!("POST /sleep?level={level}&mode={mode}{spared}");
        let pause = |clear: bool| format!("POST /pause?mode={mode}&clear_cache={clear}{spared}");
        let (wake, resume) = ("POST /wake_up".to_owned(), "POST /resume".to_owned());
        match rng.u32(0..12) {
            0 => vec![sleep(1)],
            1 => vec![sleep(1), wake],
            2 => vec![sleep(if takes_weights { 2 } else { 1 }), wake],
            3 => vec![sleep(0), resume],
            4 => vec![pause(false)],
            5 => vec![pause(true), resume],
            6 => vec![pause(false), resume],
            7 => vec![resume],
            8 => vec![wake],
            9 => vec!["POST /reset_prefix_cache?reset_external=true".to_owned()],
            10 => vec!["POST /reset_prefix_cache?reset_running_requests=true".to_owned()],
            _ => vec!["POST /reset_prefix_cache".to_owned()],
        }
    }

    /// A control route, and what it does the next time.
    pub(super) fn route_fault(&mut self) -> (&'static str, RouteFault) {
        let routes = ["/sleep", "/pause", "/resume", "/wake_up", "/reset_prefix_cache"];
        let route = *self.rng.choice(&routes).expect("there are five");
        let fault = match self.rng.u32(0..3) {
            0 => RouteFault::Fail(500),
            1 => RouteFault::FailAfter(500),
            _ => RouteFault::EmptyBody,
        };
        (route, fault)
    }
}

/// Fields by which an engine passes its cache by, or announces what it holds once more.
fn odd(rng: &mut Rng) -> Value {
    match rng.u32(0..6) {
        0 => json!({"echo": true, "logprobs": 0}),
        1 => json!({"echo": true}),
        2 => json!({"prompt_logprobs": false}),
        3 => json!({"prompt_logprobs": 0}),
        4 => json!({"logprobs": 1}),
        _ => json!({"vllm_xargs": {"kv_cache_report_mode": "full"}}),
    }
}

fn sleep(rng: &mut Rng, mode: &str) -> Value {
    json!({"level": rng.u8(1..=2), "mode": mode, "drain_ms": 2_000, "keep_tier": rng.bool(),
        "allow_evict": rng.bool()})
}

fn pause(rng: &mut Rng, mode: &str) -> Value {
    json!({"mode": mode, "clear": rng.bool(), "drain_ms": 2_000, "keep_tier": rng.bool(),
        "allow_evict": rng.bool()})
}

fn session(rng: &mut Rng) -> String {
    format!("s{}", rng.u32(0..SESSIONS))
}
