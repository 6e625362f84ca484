//! What a refusal or a failure says to whoever can do something about it.
//!
//! Invariant: everything told is in the row; and every reason for which something can be done says
//! what: the lists below name each reason of the kernel's.

use fak_kernel::Action;
use fak_kernel::witness::{Reason, Refusal};
use serde_json::Value;

use crate::fleet::{busy_with, rollout_end};
use crate::store::Row;

/// `message`, with what the row tells of the cause, and with the way out where there is one.
pub(super) fn with_way_out(message: String, row: &Row) -> String {
    let hint = match Reason::parse(&row.reason) {
        Some(Reason::NotSent(refusal)) => way_out(refusal, row),
        Some(Reason::Refused) => Some(
            "the engine turned the call away before it did anything; are its control routes open \
             (VLLM_SERVER_DEV_MODE=1), and is its key right (FAK_VLLM_API_KEY)?"
                .to_owned(),
        ),
        _ => None,
    };
    joined(message, hint.as_deref())
}

fn joined(message: String, hint: Option<&str>) -> String {
    match hint {
        Some(hint) => format!("{message}: {hint}"),
        None => message,
    }
}

fn way_out(refusal: Refusal, row: &Row) -> Option<String> {
    let told = match refusal {
        Refusal::AlreadyPaused | Refusal::AlreadyAwake => return None,
        Refusal::AlreadyAsleep => return asleep(row),
        Refusal::Held => {
            let holder = row.asked.get("held_by").and_then(Value::as_str)?;
            return Some(format!(
                "by {holder}; end the rollout, by {}, or act for it (--holder NAME); a \
                 worker's own actions also take --force",
                rollout_end(holder)
            ));
        }
        Refusal::KeepNotProven => return Some(keep_tier(&row.asked)),
        Refusal::DrainTimeout => return Some(drain_timeout(row)),
        Refusal::Busy => return Some(busy(row)),
        Refusal::NoPause => {
            "its engine has no /pause: it is older than vLLM 0.12.0, or VLLM_SERVER_DEV_MODE is \
             not set"
        }
        Refusal::ModeNotOffered => "its engine's pause offers abort alone (--mode abort)",
        Refusal::ExternalNotOffered => {
            "its engine cannot reset a connector's tiers (reset_external, since vLLM 0.13.0): \
             reset the gpu alone, or restart it"
        }
        Refusal::LevelMissing => "a sleep is of level 1 or 2 (--level); a pause drops nothing",
        Refusal::WeightsAsleep => return Some(weights_asleep(row)),
        Refusal::Cancelled => "somebody cancelled it while it waited for requests to end",
        Refusal::CanaryNotRecorded => {
            "no route answered the fixed prompts: go on without a canary, or look why"
        }
        Refusal::NotOneEngine => {
            "its address leads to several engines, or to another worker's (fak worker status)"
        }
        Refusal::OnlyPaused => "resume it instead",
        Refusal::PartlyAwake => "wake the rest of it first",
        Refusal::StateUnknown => {
            "it is in phase error: look at it (fak worker status); fak takes it back by itself \
             once its engine answers and shows its state"
        }
        Refusal::NotHeld => "nobody holds it (fak rollout ls)",
    };
    Some(told.to_owned())
}

/// Of a sleeper that is to be paused, reset or put to sleep at another level.
fn asleep(row: &Row) -> Option<String> {
    let seen = match row.observed.get("sleep_state").and_then(Value::as_str) {
        Some("weights_offloaded") => Some(1),
        Some("discard_all") => Some(2),
        _ => None,
    };
    match (row.action, seen, row.level) {
        (Action::Sleep, Some(seen), Some(level)) if seen != level => Some(format!(
            "it sleeps at level {seen}: wake it first, then let it sleep at level {level}"
        )),
        (Action::Sleep, ..) => None,
        _ => Some("wake it first".to_owned()),
    }
}

fn weights_asleep(row: &Row) -> String {
    let worker = &row.worker;
    format!(
        "its sleep dropped them, and into memory that is asleep nobody has loaded any: wake the \
         weights' memory first (tags weights: fak worker wake {worker} --tag weights, or in a \
         rollout fak rollout end --stage weights --weights loaded), load them, then say it again"
    )
}

fn drain_timeout(row: &Row) -> String {
    let inside = row.asked.get("in_flight").and_then(Value::as_u64);
    let inside =
        inside.map(|count| format!("{count} requests had not ended; ")).unwrap_or_default();
    let instead = match row.action {
        Action::Reset => ", or preempt them (running, --running)",
        Action::Quarantine => ", or give the session a new salt instead (isolate, --isolate)",
        _ => ", or a mode that does not wait for them (--mode abort or keep)",
    };
    format!("{inside}give them more time (drain_ms, --drain-ms){instead}")
}

fn busy(row: &Row) -> String {
    match row.asked.get("busy_with") {
        Some(told) => format!("with {}", busy_with(told, &row.worker)),
        None => "another command was taken on at that moment; ask again".to_owned(),
    }
}

/// `message` of an action that ended so, and is not proven to be done; with the way on where there
/// is one.
pub(super) fn with_way_on(message: String, reason: &str, row: Option<&Row>) -> String {
    let hint = match Reason::parse(reason) {
        Some(Reason::WeightsNotProven) => Some(weights_not_proven(row)),
        Some(Reason::Cut) => Some(cut(row).to_owned()),
        Some(reason) => way_on(reason).map(str::to_owned),
        None => None,
    };
    joined(message, hint.as_deref())
}

fn way_on(reason: Reason) -> Option<&'static str> {
    Some(match reason {
        Reason::Confirmed | Reason::Noticed | Reason::Isolated | Reason::NotSent(_) => return None,
        Reason::TierNotKept | Reason::WeightsNotProven | Reason::Cut => return None,
        Reason::Refused => "the engine turned the call away",
        Reason::Declined => "blocks were in use; ask again once no other client's request runs",
        Reason::NoBody => {
            "the engine does not say whether it did it (up to vLLM 0.25.1); nothing is claimed of \
             what it held, and it serves on"
        }
        Reason::Failed => {
            "the engine answered with an error, and may have done a part of it: its log says why; \
             fak looks at it on and on (fak worker status), and serves with it once it shows that \
             it can; else wake it, or start it anew"
        }
        Reason::Timeout | Reason::Unrecorded | Reason::NotObserved => {
            "what it did is not known, and it may be done still: look at the worker (fak worker \
             status) before you ask again"
        }
        Reason::AnswerMismatch | Reason::Contradicted => {
            "the engine says one thing and shows another: somebody else may act on it, or several \
             engines answer; look at it (fak worker status), and ask again"
        }
        Reason::Gone => "the engine's process is gone: start it; fak takes it back by itself",
        Reason::HitsAfterClear => {
            "the engine still reuses what it was to drop: reset it, or start it anew"
        }
        Reason::NoEffect => {
            "the engine answered that it is done, and requests still run or no cache was cleared; \
             look at the engine, and ask again"
        }
        Reason::ClearNotSeen => {
            "the engine answered that it is done, and its event stream did not show the clear in \
             time; look at the stream (worker status)"
        }
        Reason::LevelMismatch => {
            "it sleeps at another level than the one asked for: wake it, then let it sleep again"
        }
        Reason::LevelMissing => "it is not known at which level it sleeps: wake it",
        Reason::SleepFailedPaused => {
            "the sleep failed half-way: the engine is paused, and its memory is not free; resume \
             it, then let it sleep again"
        }
        Reason::NotAchieved => {
            "the connector's tier still serves what it was to drop: reset it with external \
             (--external), or start the engine anew"
        }
        Reason::CanaryMismatch => {
            "it does not answer a fixed prompt as before its sleep, so that its weights may be \
             wrong: load them, and say weights loaded (--weights loaded); or take it all the same \
             by a wake (fak worker wake --force)"
        }
        Reason::NotServing => {
            "all was done, and the engine gives no answer or gets nothing done: look at it (fak \
             worker status), and end it again"
        }
        Reason::RequestsRunning => {
            "the engine shows requests that run, which may be another client's: its device is not \
             free; ask again once they have ended, or abort them (--mode abort)"
        }
        Reason::RunningNotTold => {
            "the engine does not tell what runs, so that its device is not known to be free: look \
             at its /metrics"
        }
    })
}

/// A connection that broke, or that there never was.
fn cut(row: Option<&Row>) -> &'static str {
    match row.is_some_and(|row| row.answered.get("not_sent").is_some()) {
        true => {
            "nobody answers at the engine's address, so that nothing was done: start it, or mend \
             its address; fak takes it back by itself, and then ask again"
        }
        false => {
            "the connection broke before the answer, so that what was done is not known, and the \
             engine may be gone: look at it (fak worker status) before you ask again"
        }
    }
}

fn weights_not_proven(row: Option<&Row>) -> String {
    // Where the engine dropped them, they cannot be the same before they were loaded.
    let standing = row.and_then(|row| row.standing.as_ref());
    let same = match standing.is_some_and(|standing| standing.weights_proven) {
        true => " or same (--weights same) if they are those from before;",
        false => "",
    };
    let by_fak = match row.is_some_and(|row| row.answered.get("not_sent").is_some()) {
        true => "; or let fak have the engine load its checkpoint (allow_reload_weights = true)",
        false => "",
    };
    format!(
        "it waits for its weights; say weights loaded (--weights loaded) once they are in \
         it;{same} by vLLM's own routes, wake their memory by name (/wake_up?tags=weights), load \
         them, and wake the rest{by_fak}"
    )
}

/// Why a tier cannot be kept: an engine that does not know the argument, or a connector that is not
/// known to survive.
fn keep_tier(asked: &Value) -> String {
    let names = asked.get("connectors").and_then(Value::as_array);
    let connector = match names.map(Vec::as_slice) {
        None => "a connector that the engine does not name".to_owned(),
        Some([]) => "no connector".to_owned(),
        Some(names) => names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "),
    };
    let is_declared = asked.get("argument_declared").and_then(Value::as_bool) == Some(true);
    let cause = match (is_declared, connector.as_str()) {
        (true, "no connector") => "the engine has no connector, and so no tier to keep".to_owned(),
        (true, connector) => format!("{connector} is not known to keep its tiers"),
        (false, connector) => format!(
            "the engine ({connector}) does not declare clear_connector_cache, which \
             plugins/vllm-keep-tier adds"
        ),
    };
    format!("{cause}; allow_evict (--allow-evict) goes on without keeping them")
}

#[cfg(test)]
mod tests {
    use super::*;
    use fak_kernel::{Disposition, Evidence, Phase};
    use serde_json::json;

    fn row(action: Action, reason: &str, asked: Value) -> Row {
        Row {
            seq: 1,
            at: String::new(),
            worker: "w0".to_owned(),
            rank: None,
            incarnation: None,
            session: None,
            action,
            level: (action == Action::Sleep).then_some(2),
            phase: Phase::Serving,
            kv: Disposition::Unknown,
            tiers: crate::store::Tiers::default(),
            weight_version: None,
            warm_demoted: false,
            serving: true,
            evidence: Evidence::NotSent,
            asked,
            answered: Value::Null,
            observed: Value::Null,
            reason: reason.to_owned(),
            standing: None,
        }
    }

    #[test]
    fn a_tier_that_cannot_be_kept_names_the_connector_and_the_way_out() {
        for (asked, told) in [
            (
                json!({"connectors": ["OffloadingConnector"], "argument_declared": false}),
                ["OffloadingConnector", "plugins/vllm-keep-tier"],
            ),
            (
                json!({"connectors": ["MooncakeStoreConnector"], "argument_declared": true}),
                ["MooncakeStoreConnector", "not known to keep"],
            ),
            (json!({"connectors": null}), ["does not name", "clear_connector_cache"]),
            (json!({"connectors": []}), ["no connector", "clear_connector_cache"]),
            (
                json!({"connectors": [], "argument_declared": true}),
                ["the engine has no connector", "no tier to keep"],
            ),
        ] {
            let text = keep_tier(&asked);
            assert!(told.iter().all(|part| text.contains(part)), "{text}");
            assert!(text.contains("--allow-evict"), "{text}");
        }
    }

    #[test]
    fn a_drain_that_took_too_long_names_only_what_the_action_offers() {
        for (action, told, not) in [
            (Action::Sleep, "--mode abort", "--running"),
            (Action::Pause, "--mode abort", "--running"),
            (Action::Reset, "--running", "--mode"),
            (Action::Quarantine, "--isolate", "--mode"),
        ] {
            let row = row(action, "drain_timeout", json!({"in_flight": 3}));
            let text = with_way_out("refused".to_owned(), &row);
            assert!(text.contains(told) && !text.contains(not), "{text}");
            assert!(text.contains("3 requests") && text.contains("--drain-ms"), "{text}");
        }
    }

    #[test]
    fn a_sleeper_that_is_to_sleep_at_another_level_has_to_wake_first() {
        let at = |state: &str| Row {
            observed: json!({"sleep_state": state}),
            ..row(Action::Sleep, "already_asleep", Value::Null)
        };
        let text = with_way_out("refused".to_owned(), &at("weights_offloaded"));
        assert!(text.contains("level 1: wake it first") && text.contains("level 2"), "{text}");
        assert_eq!(with_way_out("refused".to_owned(), &at("discard_all")), "refused");
    }

    #[test]
    fn who_is_busy_is_told_with_what_it_waits_for_and_how_that_ends() {
        let told = json!({"busy_with": {
            "action": "reset", "since": "then", "holder": "t", "waits_for": 1, "waits_ms_max": 9500,
        }});
        let text = with_way_out("refused".to_owned(), &row(Action::Sleep, "busy", told));
        let said = "with reset since then for t, which waits for 1 request to end, 10 s more at \
                    most (fak worker cancel w0 ends that)";
        assert!(text.contains(said), "{text}");
    }

    #[test]
    fn a_call_that_was_cut_is_told_from_one_that_never_left() {
        let cut = |answered| {
            let row = Row { answered, ..row(Action::Wake, "cut", Value::Null) };
            with_way_on("failed".to_owned(), "cut", Some(&row))
        };
        assert!(cut(json!({"not_sent": "refused"})).contains("nothing was done: start it"));
        assert!(cut(json!({"cut": "reset"})).contains("what was done is not known"));
    }
}
