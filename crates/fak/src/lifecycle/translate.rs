//! Between the kernel's words for calls, answers and observations, the adapter's, and the ledger's
//! JSON.
//!
//! Invariant: nothing is added on the way: an answer that the adapter does not have becomes no
//! answer, never a success.

use fak_kernel::witness::{self, Call, Part, Parts, Refusal};
use fak_wire::metrics::Snapshot;
use serde_json::{Map, Value, json};

use crate::engine::{
    Answer, Control, Mode, NotSent, Observation, Seen, SleepLevel, Success, WakeTag,
};

/// The adapter's call for the kernel's.
pub(crate) fn control(call: Call) -> Control {
    match call {
        Call::Pause { mode, clear_cache, spare_connector } => Control::Pause {
            mode: self::mode(mode),
            clear_cache,
            keep_connector_cache: spare_connector,
        },
        Call::Resume => Control::Resume,
        Call::Sleep { level, mode, spare_connector } => Control::Sleep {
            level: match level {
                witness::Level::One => SleepLevel::WeightsOffloaded,
                witness::Level::Two => SleepLevel::DiscardAll,
            },
            mode: self::mode(mode),
            keep_connector_cache: spare_connector,
        },
        Call::WakeUp { tags } => Control::WakeUp { tags: tags.iter().map(tag).collect() },
        Call::Reload => Control::ReloadWeights,
        Call::ResetPrefixCache { external, running } => {
            Control::ResetPrefixCache { external, running_requests: running }
        }
    }
}

fn mode(mode: witness::Mode) -> Mode {
    match mode {
        witness::Mode::Abort => Mode::Abort,
        witness::Mode::Wait => Mode::Wait,
        witness::Mode::Keep => Mode::Keep,
    }
}

fn tag(part: Part) -> WakeTag {
    match part {
        Part::Weights => WakeTag::Weights,
        Part::KvCache => WakeTag::KvCache,
        Part::Scheduling => WakeTag::Scheduling,
    }
}

/// The kernel's reading of what came back of `call`.
pub(crate) fn answer(call: Call, answered: &Answer) -> witness::Answer {
    match answered {
        Answer::NotSent(NotSent::NotAllowed(_)) if call == Call::Reload => {
            witness::Answer::AwaitsWeights
        }
        // No connection, so that the engine has seen nothing; nor is there anybody to ask.
        Answer::NotSent(_) | Answer::Cut { .. } => witness::Answer::Cut,
        Answer::TimedOut { .. } => witness::Answer::Timeout,
        Answer::Answered { status, .. } => match witness::Answer::from_status(*status) {
            witness::Answer::Ok => accepted(call, answered),
            other => other,
        },
    }
}

/// A 2xx, by what its body says.
fn accepted(call: Call, answered: &Answer) -> witness::Answer {
    let body = answered.body();
    match call {
        Call::ResetPrefixCache { .. } => match answered.success() {
            Success::True => witness::Answer::Success(true),
            Success::False => witness::Answer::Success(false),
            Success::Absent => witness::Answer::NoBody,
        },
        Call::Sleep { level, .. } if contradicts(body, "level", level.as_str()) => {
            witness::Answer::Mismatch
        }
        // A wake by tag answers `sleeping` while a part is still asleep (0.32.0, observed).
        Call::WakeUp { tags } if tags.is_empty() && contradicts(body, "status", "awake") => {
            witness::Answer::Mismatch
        }
        _ => witness::Answer::Ok,
    }
}

/// Whether the body names `field` with another value than `wanted`.
fn contradicts(body: &Value, field: &str, wanted: &str) -> bool {
    match body.get(field) {
        Some(Value::String(told)) => told != wanted,
        Some(Value::Number(told)) => told.to_string() != wanted,
        _ => false,
    }
}

/// The kernel's reading of an observation.
pub(crate) fn observed(seen: &Observation) -> witness::Observed {
    let is_awake = seen.sleep_state == Seen::Value(witness::SleepState::Awake);
    let flags = [&seen.is_paused, &seen.is_sleeping];
    let has_no_control = is_awake && flags.into_iter().all(|flag| *flag == Seen::NotOffered);
    let unreachable = |lost: bool| lost;
    let gone = [
        unreachable(matches!(seen.is_paused, Seen::Unreachable { .. })),
        unreachable(matches!(seen.is_sleeping, Seen::Unreachable { .. })),
        unreachable(matches!(seen.sleep_state, Seen::Unreachable { .. })),
    ];
    // Without its control routes nobody can pause an engine, or put it to sleep (0.32.0, observed).
    let flag = |seen: &Seen<bool>| seen.value().or(has_no_control.then_some(false));
    let state = witness::State {
        is_paused: flag(&seen.is_paused),
        is_sleeping: flag(&seen.is_sleeping),
        sleep_state: seen.sleep_state.value(),
        ..witness::State::default()
    };
    if seen.is_dead {
        witness::Observed::Nothing
    } else if state != witness::State::default() {
        witness::Observed::State(state)
    } else if gone.iter().all(|g| *g) {
        witness::Observed::Gone
    } else {
        witness::Observed::Nothing
    }
}

/// What was asked, for the ledger: one object where there was one call, else all in order.
pub(super) fn asked_json(calls: &[Call]) -> Value {
    let one = |call: &Call| json!({ "call": call.to_string() });
    match calls {
        [] => Value::Null,
        [call] => one(call),
        calls => json!({ "calls": calls.iter().map(Call::to_string).collect::<Vec<_>>() }),
    }
}

/// Requests in the engine before an action and after it, for the ledger: what became of them.
/// Absent where the engine does not tell.
pub(super) fn requests_json(before: Option<&Snapshot>, after: Option<&Snapshot>) -> Value {
    let mut object = Map::new();
    for (when, metrics) in [("before", before), ("after", after)] {
        let Some(total) = metrics.map(Snapshot::total) else { continue };
        let counts = [("running", total.running), ("waiting", total.waiting)];
        let told = counts.into_iter().filter_map(|(name, n)| Some((name.to_owned(), json!(n?))));
        object.insert(when.to_owned(), Value::Object(told.collect()));
    }
    Value::Object(object)
}

/// Why nothing was sent, for the ledger.
pub(super) fn refusal_json(refusal: Refusal) -> Value {
    json!({ "refused": refusal.as_str() })
}

/// What was answered, for the ledger.
pub(crate) fn answered_json(answered: &Answer) -> Value {
    match answered {
        Answer::NotSent(NotSent::NotAllowed(_)) => {
            json!({ "not_sent": "the configuration keeps it shut" })
        }
        Answer::NotSent(NotSent::Unreachable { detail }) => json!({ "not_sent": detail }),
        Answer::Answered { status, body } => json!({ "status": status, "body": body }),
        Answer::TimedOut { after_ms } => json!({ "timed_out_after_ms": after_ms }),
        Answer::Cut { detail } => json!({ "cut": detail }),
    }
}

/// An observation, for the kernel and for the ledger.
pub(super) fn seen(seen: &Observation) -> (witness::Observed, Value) {
    (observed(seen), observed_json(seen))
}

/// What was observed, for the ledger: what could be read, and nothing for what the engine does not
/// offer.
fn observed_json(seen: &Observation) -> Value {
    let mut object = Map::new();
    put(&mut object, "is_paused", &seen.is_paused, |flag| json!(flag));
    put(&mut object, "is_sleeping", &seen.is_sleeping, |flag| json!(flag));
    put(&mut object, "sleep_state", &seen.sleep_state, |state| json!(state.as_str()));
    if seen.is_dead {
        object.insert("is_dead".to_owned(), json!(true));
    }
    Value::Object(object)
}

fn put<T: Copy>(to: &mut Map<String, Value>, name: &str, seen: &Seen<T>, json: fn(T) -> Value) {
    let value = match seen {
        Seen::Value(value) => json(*value),
        Seen::NotOffered => return,
        Seen::Unreachable { detail } => json!({ "unreachable": detail }),
        Seen::Failed { detail } => json!({ "failed": detail }),
    };
    to.insert(name.to_owned(), value);
}

/// The tags of a wake by their words; `None` names the word that is none.
pub fn parts(words: &[String]) -> Result<Parts, &str> {
    words.iter().map(|word| Part::parse(word).ok_or(word.as_str())).collect()
}
