//! What the counters of both arms say.
//!
//! Invariant: latency and outputs do not enter the verdict, and a counter that is missing never
//! speaks for reuse.

use super::replay::Arms;
use crate::cli::bench::{Verdict, Workload};

/// The verdict and its reason.
pub(super) fn of(arms: &Arms, workload: &Workload) -> (Verdict, String) {
    let requests = u64::from(workload.requests);
    let asked = requests * u64::from(workload.prompt_tokens);
    let full = requests * u64::from(workload.block_tokens);
    let not = |reason: String| (Verdict::NotReused, reason);
    for (arm, name) in [(&arms.cleared, "cleared"), (&arms.kept, "kept")] {
        match arm.external_queries {
            Some(queries) if queries == asked => {}
            Some(queries) => {
                return not(format!(
                    "the replay after the {name} sleep looks up {asked} tokens and the engine \
                     counted {queries}: it did other work, or its own cache was not emptied"
                ));
            }
            None => return not("the engine does not count external queries".to_owned()),
        }
    }
    let (Some(cleared), Some(kept)) = (arms.cleared.external_hits, arms.kept.external_hits) else {
        return not("the engine does not count external hits".to_owned());
    };
    if cleared > 0 {
        return not(format!(
            "{cleared} tokens were hit after a sleep that should have cleared the tier"
        ));
    }
    if kept < full {
        return not(format!(
            "{kept} of {full} tokens in full blocks came from the tier that was kept"
        ));
    }
    let reason = format!(
        "{kept} of {asked} tokens, all of them in full blocks, came from the tier that was kept, \
         and none from the one that was cleared"
    );
    (Verdict::Reused, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::Arm;

    fn arm(external_queries: Option<u64>, external_hits: Option<u64>) -> Arm {
        Arm {
            external_queries,
            external_hits,
            stored_bytes: None,
            loaded_bytes: None,
            replay_p50_s: 0.0,
            warm_stored_bytes: None,
            outputs_differing: 0,
        }
    }

    /// Two prompts of 70 tokens with two full blocks of 32 each.
    fn verdict(cleared: Arm, kept: Arm) -> (Verdict, String) {
        let workload = Workload {
            model: "tiny".to_owned(),
            requests: 2,
            prompt_tokens: 70,
            block_tokens: 64,
            seed: 0,
        };
        of(&Arms { cleared, kept }, &workload)
    }

    #[test]
    fn only_all_full_blocks_against_none_are_reuse() {
        let queries = Some(140);
        let none = || arm(queries, Some(0));
        assert_eq!(verdict(none(), arm(queries, Some(128))).0, Verdict::Reused);
        let rows = [
            (none(), arm(queries, Some(96)), "96 of 128"),
            (none(), none(), "0 of 128"),
            (arm(queries, Some(32)), arm(queries, Some(128)), "should have cleared"),
            (none(), arm(Some(200), Some(128)), "counted 200"),
            (arm(Some(0), Some(0)), arm(queries, Some(128)), "after the cleared sleep"),
            (none(), arm(None, Some(128)), "external queries"),
            (none(), arm(queries, None), "external hits"),
        ];
        for (cleared, kept, expected) in rows {
            let (verdict, reason) = verdict(cleared, kept);
            assert_eq!(verdict, Verdict::NotReused, "{reason}");
            assert!(reason.contains(expected), "{expected:?} is not in: {reason}");
        }
    }
}
