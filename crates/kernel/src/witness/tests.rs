//! What must the decision table hold?
//!
//! The rows of DESIGN section 4 literally; then its invariants over the closed vocabularies; then
//! the verdicts that CASES parts A and B ask for.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::*;

/// A row as DESIGN writes it; `demoted` in the order gpu, cpu, disk, remote.
fn line(row: &Row) -> String {
    let demoted: Vec<&str> = row.demoted.iter().map(Tier::as_str).collect();
    let serving = match row.serving {
        Some(true) => "yes",
        Some(false) => "no",
        None => "by phase",
    };
    format!(
        "{} | {} | {} | {} | {} | {} | {} | {} | {} | {}",
        row.action,
        row.circumstance,
        row.sent,
        row.phase,
        row.tiers.gpu,
        row.tiers.cpu,
        row.tiers.disk,
        row.tiers.remote,
        if demoted.is_empty() { "-".to_string() } else { demoted.join(" ") },
        serving
    )
}

const ALL: &str = "gpu cpu disk remote";

#[test]
fn the_five_base_rows_hold_exactly() {
    let rows: Vec<String> = table()
        .take_while(|row| row.base)
        .map(|row| {
            let (warm, serving) = (row.warm_demoted(), row.serving);
            format!(
                "{}, {} | {} | {} | {warm} | {serving:?}",
                row.action,
                row.circumstance,
                row.phase,
                row.kv()
            )
        })
        .collect();
    let expected = [
        "pause, default | paused | preserved | false | Some(false)",
        "sleep, level 1 | sleeping | forgotten | true | Some(false)",
        "sleep, level 2 | sleeping | forgotten | true | Some(false)",
        "sleep, no level | error | unknown | true | Some(false)",
        "reset, success:true | serving | forgotten | true | Some(true)",
        "wake, full, same weights | serving | unknown | true | Some(true)",
    ];
    assert_eq!(rows, expected);
    assert_eq!(table().filter(|row| row.base).count(), expected.len(), "none comes later");
}

#[test]
fn every_row_of_the_table_holds() {
    let unproven = "timeout, 5xx, cut connection, or observation against answer";
    let u = "error | unknown | unknown | unknown | unknown";
    let expected = [
        // Base.
        "pause | default | /pause?mode=keep&clear_cache=false | paused | preserved | preserved | preserved | preserved | - | no".to_string(),
        format!("sleep | level 1 | /sleep?level=1&mode=wait | sleeping | forgotten | by connector | unknown | unknown | {ALL} | no"),
        format!("sleep | level 2 | /sleep?level=2&mode=wait | sleeping | forgotten | by connector | unknown | unknown | {ALL} | no"),
        format!("sleep | no level | nothing | {u} | {ALL} | no"),
        "reset | success:true | /reset_prefix_cache | serving | forgotten | preserved | preserved | preserved | gpu | yes".to_string(),
        "wake | full, same weights | /wake_up | serving | unknown | as before | as before | as before | gpu | yes".to_string(),
        // Pause, resume, sleep.
        format!("pause | clear asked | /pause?mode=keep&clear_cache=true | paused | forgotten | by connector | unknown | unknown | {ALL} | no"),
        format!("pause | clear asked, engine before 0.23 | /pause?mode=keep&clear_cache=true | paused | forgotten | unknown | unknown | unknown | {ALL} | no"),
        "pause | clear asked, keep tier, argument and connector proven | /pause?mode=keep&clear_cache=true&clear_connector_cache=false | paused | forgotten | preserved | preserved | preserved | gpu | no".to_string(),
        "resume | after a witnessed preserving pause, same incarnation, no drift | /resume | serving | preserved | preserved | preserved | preserved | - | yes".to_string(),
        format!("resume | otherwise | /resume | serving | unknown | unknown | unknown | unknown | {ALL} | yes"),
        format!("sleep | level 1 or 2, engine before 0.23 | /sleep?level=1&mode=wait | sleeping | forgotten | unknown | unknown | unknown | {ALL} | no"),
        "sleep | keep tier, argument and connector proven | /sleep?level=1&mode=wait&clear_connector_cache=false | sleeping | forgotten | preserved | preserved | preserved | gpu | no".to_string(),
        // Wake.
        "wake | partial tags | /wake_up?tags=weights | waking | unknown | as before | as before | as before | gpu | no".to_string(),
        format!("wake | full, weights changed | /wake_up, reload, /reset_prefix_cache?reset_external=true | serving | forgotten | by connector | unknown | unknown | {ALL} | yes"),
        format!("wake | full, level 2 without proof of the same weights | /wake_up, reload, /reset_prefix_cache?reset_external=true | serving | forgotten | by connector | unknown | unknown | {ALL} | yes"),
        format!("wake | full, weights not loaded yet | /wake_up, reload, /reset_prefix_cache?reset_external=true | waking | unknown | as before | as before | as before | {ALL} | no"),
        "wake | full, same weights, engine 0.9.x | /wake_up, /reset_prefix_cache | serving | unknown | as before | as before | as before | gpu | yes".to_string(),
        // Reset, quarantine.
        format!("reset | external, success:true | /reset_prefix_cache?reset_external=true | serving | forgotten | by connector | unknown | unknown | {ALL} | yes"),
        "reset | success:false | /reset_prefix_cache | serving | unknown | preserved | preserved | preserved | gpu | yes".to_string(),
        format!("reset | external, success:false | /reset_prefix_cache?reset_external=true | serving | unknown | unknown | unknown | unknown | {ALL} | yes"),
        "reset | 200 without a body | /reset_prefix_cache | serving | unknown | preserved | preserved | preserved | gpu | yes".to_string(),
        format!("reset | external, 200 without a body | /reset_prefix_cache?reset_external=true | serving | unknown | unknown | unknown | unknown | {ALL} | yes"),
        format!("quarantine | flush, success:true | /reset_prefix_cache?reset_external=true | serving | forgotten | by connector | unknown | unknown | {ALL} | yes"),
        "quarantine | isolate | - | unchanged | preserved | preserved | preserved | preserved | - | by phase".to_string(),
        // Nothing sent.
        "pause | engine without /pause | nothing | unchanged | preserved | preserved | preserved | preserved | - | by phase".to_string(),
        "sleep | keep tier, not proven | nothing | unchanged | preserved | preserved | preserved | preserved | - | by phase".to_string(),
        "sleep | asleep already | nothing | sleeping | preserved | preserved | preserved | preserved | - | no".to_string(),
        "pause | asleep already | nothing | sleeping | preserved | preserved | preserved | preserved | - | no".to_string(),
        "resume | asleep | nothing | sleeping | preserved | preserved | preserved | preserved | - | no".to_string(),
        "wake | awake already | nothing | serving | preserved | preserved | preserved | preserved | - | yes".to_string(),
        "wake | only paused | nothing | paused | preserved | preserved | preserved | preserved | - | no".to_string(),
        // Any action that nothing proves.
        format!("pause | {unproven} | /pause?mode=keep&clear_cache=false | {u} | {ALL} | no"),
        format!("resume | {unproven} | /resume | {u} | {ALL} | no"),
        format!("sleep | {unproven} | /sleep?level=1&mode=wait | {u} | {ALL} | no"),
        format!("wake | {unproven} | /wake_up | {u} | {ALL} | no"),
        format!("reset | {unproven} | /reset_prefix_cache | {u} | {ALL} | no"),
        format!("quarantine | {unproven} | /reset_prefix_cache?reset_external=true | {u} | {ALL} | no"),
        // Noticed.
        format!("restart | cpu tier in process | - | as observed | forgotten | forgotten | unknown | unknown | {ALL} | by phase"),
        format!("restart | cpu tier outside | - | as observed | forgotten | unknown | unknown | unknown | {ALL} | by phase"),
        format!("lost | no answer any more | - | {u} | {ALL} | no"),
        format!("gap | not closed, that rank | - | unchanged | unknown | unknown | unknown | unknown | {ALL} | by phase"),
        format!("weights | changed | - | unchanged | unknown | unknown | unknown | unknown | {ALL} | by phase"),
        format!("drift | the state metric shows sleep | - | as observed | forgotten | unknown | unknown | unknown | {ALL} | by phase"),
        format!("drift | otherwise | - | as observed | unknown | unknown | unknown | unknown | {ALL} | by phase"),
        format!("drift | AllBlocksCleared not explained by fak's own action | - | unchanged | forgotten | unknown | unknown | unknown | {ALL} | by phase"),
    ];
    let rows: Vec<String> = table().map(|row| line(&row)).collect();
    for (row, expected) in rows.iter().zip(&expected) {
        assert_eq!(row, expected);
    }
    assert_eq!(rows.len(), expected.len());
}
