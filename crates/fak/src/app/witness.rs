//! `fak witness table`: the kernel's decision table, as JSON or as columns.

use std::io::{self, Write};

use fak_kernel::lease::LeaseEvent;
use fak_kernel::witness::{Row, table};
use fak_kernel::{Disposition, Tier};
use serde_json::{Map, Value, json};

use super::Error;
use crate::cli::Exit;

/// Prints the table to stdout.
pub(super) fn print(as_json: bool) -> Result<Exit, Error> {
    let mut out = io::stdout().lock();
    let written = if as_json { write_json(&mut out) } else { write_columns(&mut out) };
    written.and_then(|()| out.flush()).map_err(Error::failed)?;
    Ok(Exit::Done)
}

fn write_json(out: &mut impl Write) -> io::Result<()> {
    let rows: Vec<Value> =
        table().map(|row| to_json(&row)).chain(leases().map(lease_json)).collect();
    serde_json::to_writer_pretty(&mut *out, &rows)?;
    writeln!(out)
}

fn to_json(row: &Row) -> Value {
    let tiers: Map<String, Value> = Tier::ALL
        .iter()
        .map(|tier| (tier.as_str().to_owned(), row.tiers.get(*tier).to_string().into()))
        .collect();
    json!({
        "action": row.action.as_str(),
        "circumstance": row.circumstance,
        "base": row.base,
        "sent": row.sent,
        "phase": row.phase.to_string(),
        "kv": row.kv().to_string(),
        "tiers": tiers,
        "warm_demoted": row.warm_demoted(),
        "serving": row.serving,
    })
}

/// What happened to a NIXL lease, whether it names blocks, and what becomes of them.
struct Lease {
    circumstance: String,
    kv: Disposition,
    is_demoted: bool,
}

/// Each event of a lease that names blocks, and of one that names none.
fn leases() -> impl Iterator<Item = Lease> {
    let named = LeaseEvent::ALL.iter().map(|event| (*event, 1, event.to_string()));
    let unnamed = (LeaseEvent::Granted, 0, "any event, no block named".to_owned());
    named.chain([unnamed]).map(|(event, blocks, circumstance)| Lease {
        circumstance,
        kv: event.kv(blocks),
        is_demoted: event.demotes(blocks),
    })
}

fn lease_json(lease: Lease) -> Value {
    json!({
        "action": LEASE,
        "circumstance": lease.circumstance,
        "base": false,
        "sent": "-",
        "phase": "unchanged",
        "kv": lease.kv.as_str(),
        "tiers": { "gpu": lease.kv.as_str() },
        "warm_demoted": lease.is_demoted,
        "serving": null,
    })
}

fn lease_columns(lease: Lease) -> [String; HEAD.len()] {
    let demoted = if lease.is_demoted { "gpu" } else { "-" };
    let kv = lease.kv.as_str();
    [LEASE, &lease.circumstance, "-", "unchanged", kv, "-", "-", demoted, "with the phase"]
        .map(str::to_owned)
}

/// The word of a lease's rows: no action of fak's or of an engine's.
const LEASE: &str = "lease";

const HEAD: [&str; 9] =
    ["ACTION", "CIRCUMSTANCE", "SENT", "PHASE", "KV", "CPU", "DISK, REMOTE", "DEMOTED", "SERVING"];

fn write_columns(out: &mut impl Write) -> io::Result<()> {
    let lines: Vec<_> = std::iter::once(HEAD.map(str::to_owned))
        .chain(table().map(|row| columns(&row)))
        .chain(leases().map(lease_columns))
        .collect();
    let width = |column: usize| {
        lines.iter().map(|line| line[column].chars().count()).max().unwrap_or_default()
    };
    let widths: [usize; HEAD.len()] = std::array::from_fn(width);
    for line in &lines {
        let cells: Vec<_> =
            line.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

fn columns(row: &Row) -> [String; HEAD.len()] {
    let (disk, remote) = (row.tiers.get(Tier::Disk), row.tiers.get(Tier::Remote));
    let far = if disk == remote { disk.to_string() } else { format!("{disk}, {remote}") };
    let demoted: Vec<_> = row.demoted.iter().map(Tier::as_str).collect();
    let serving = match row.serving {
        Some(true) => "yes",
        Some(false) => "no",
        None => "with the phase",
    };
    [
        row.action.to_string(),
        row.circumstance.to_owned(),
        row.sent.clone(),
        row.phase.to_string(),
        row.kv().to_string(),
        row.tiers.get(Tier::Cpu).to_string(),
        far,
        if demoted.is_empty() { "-".to_owned() } else { demoted.join(" ") },
        serving.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_five_base_rows_come_first_and_hold() {
        let mut text = Vec::new();
        write_json(&mut text).expect("a vector takes all");
        let rows: Vec<Value> = serde_json::from_slice(&text).expect("JSON");
        let base: Vec<_> = rows
            .iter()
            .take_while(|row| row["base"] == true)
            .map(|row| {
                let word = |key: &str| row[key].as_str().expect("a word").to_owned();
                let flags = (row["warm_demoted"].as_bool(), row["serving"].as_bool());
                (word("action"), word("phase"), word("kv"), flags)
            })
            .collect();
        let row = |action: &str, phase: &str, kv: &str, demoted, serving| {
            (action.to_owned(), phase.to_owned(), kv.to_owned(), (Some(demoted), Some(serving)))
        };
        assert_eq!(
            base,
            [
                row("pause", "paused", "preserved", false, false),
                row("sleep", "sleeping", "forgotten", true, false),
                row("sleep", "sleeping", "forgotten", true, false),
                row("sleep", "error", "unknown", true, false),
                row("reset", "serving", "forgotten", true, true),
                row("wake", "serving", "unknown", true, true),
            ]
        );
        assert!(rows.iter().skip(base.len()).all(|row| row["base"] == false));
        assert_eq!(rows.len(), table().count() + leases().count());
    }

    #[test]
    fn the_events_of_a_lease_are_rows_of_their_own_behind_the_actions() {
        let mut text = Vec::new();
        write_json(&mut text).expect("a vector takes all");
        let rows: Vec<Value> = serde_json::from_slice(&text).expect("JSON");
        let leases: Vec<_> = rows
            .iter()
            .skip(table().count())
            .map(|row| {
                let told = ["action", "circumstance", "kv"].map(|key| row[key].as_str());
                (told.map(|word| word.expect("a word")), row["warm_demoted"] == true)
            })
            .collect();
        assert_eq!(
            leases,
            [
                (["lease", "granted", "preserved"], false),
                (["lease", "heartbeat", "preserved"], false),
                (["lease", "transferred", "forgotten"], true),
                (["lease", "aborted", "forgotten"], true),
                (["lease", "released", "forgotten"], true),
                (["lease", "expired", "unknown"], true),
                (["lease", "any event, no block named", "unknown"], true),
            ]
        );
    }

    #[test]
    fn columns_line_up() {
        let mut text = Vec::new();
        write_columns(&mut text).expect("a vector takes all");
        let text = String::from_utf8(text).expect("UTF-8");
        let sent = text.lines().next().and_then(|head| head.find("SENT")).expect("a head");
        for line in text.lines().skip(1) {
            let before: String = line.chars().take(sent).collect();
            assert!(before.ends_with("  "), "{line}");
        }
        assert_eq!(text.lines().count(), table().count() + leases().count() + 1);
    }
}
