//! What a refusal says to whoever can do something about it.
//!
//! Invariant: everything told is in the row.

use fak_kernel::Action;
use fak_kernel::witness::{Reason, Refusal};
use serde_json::Value;

use crate::store::Row;

/// `message`, with what the row tells of the cause, and with the way out where there is one.
pub(super) fn with_way_out(message: String, row: &Row) -> String {
    let hint =
        match Refusal::parse(&row.reason) {
            Some(Refusal::Held) => row.asked.get("held_by").and_then(Value::as_str).map(|holder| {
                format!("by {holder}; end the rollout, name that holder, or force it")
            }),
            Some(Refusal::KeepNotProven) => Some(keep_tier(&row.asked)),
            Some(Refusal::WeightsAsleep) => {
                Some("wake the weights' memory first (tags weights), then load them".to_owned())
            }
            Some(Refusal::DrainTimeout) => {
                Some("give requests more time, or a mode that does not wait for them".to_owned())
            }
            Some(Refusal::CanaryNotRecorded) => Some(
                "no route answered the fixed prompts: go on without a canary, or look why".into(),
            ),
            Some(Refusal::AlreadyAsleep) if row.action != Action::Sleep => {
                Some("wake it first".to_owned())
            }
            Some(Refusal::NotOneEngine) => Some(
                "its address leads to several engines, or to another worker's (fak worker status)"
                    .to_owned(),
            ),
            Some(Refusal::OnlyPaused) => Some("resume it instead".to_owned()),
            Some(Refusal::PartlyAwake) => Some("wake the rest of it first".to_owned()),
            Some(Refusal::StateUnknown) => {
                Some("it is in phase error: wake it once its engine answers".to_owned())
            }
            _ => None,
        };
    match hint {
        Some(hint) => format!("{message}: {hint}"),
        None => message,
    }
}

/// `message` of an action that ended so, and is not proven to be done; with the way on where there
/// is one.
pub(super) fn with_way_on(message: String, reason: &str, row: Option<&Row>) -> String {
    let hint = match Reason::parse(reason) {
        Some(Reason::WeightsNotProven) => {
            // Where the engine dropped them, they cannot be the same before they were loaded.
            let standing = row.and_then(|row| row.standing.as_ref());
            let same = match standing.is_some_and(|standing| standing.weights_proven) {
                true => " or same (--weights same) if they are those from before;",
                false => "",
            };
            return format!(
                "{message}: it waits for its weights; say weights loaded (--weights loaded) once \
                 they are in it;{same} by vLLM's own routes, wake their memory by name \
                 (/wake_up?tags=weights), load them, and wake the rest"
            );
        }
        Some(Reason::NoEffect) => {
            "the engine answered that it is done, and requests still run or no cache was cleared; \
             look at the engine, and ask again"
        }
        Some(Reason::ClearNotSeen) => {
            "the engine answered that it is done, and its event stream did not show the clear in \
             time; look at the stream (worker status)"
        }
        Some(Reason::Declined) => {
            "blocks were in use; ask again once no other client's request runs"
        }
        _ => return message,
    };
    format!("{message}: {hint}")
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
    let cause = if is_declared {
        format!("{connector} is not known to keep its tiers")
    } else {
        format!(
            "the engine ({connector}) does not declare clear_connector_cache, which \
             plugins/vllm-keep-tier adds"
        )
    };
    format!("{cause}; allow_evict (--allow-evict) goes on without keeping them")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        ] {
            let text = keep_tier(&asked);
            assert!(told.iter().all(|part| text.contains(part)), "{text}");
            assert!(text.contains("--allow-evict"), "{text}");
        }
    }
}
