//! `fak witness table`: the kernel's decision table, as JSON or as columns.

use std::io::{self, Write};

use fak_kernel::Tier;
use fak_kernel::witness::{Row, table};
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
    let rows: Vec<Value> = table().map(|row| to_json(&row)).collect();
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

const HEAD: [&str; 9] =
    ["ACTION", "CIRCUMSTANCE", "SENT", "PHASE", "KV", "CPU", "DISK, REMOTE", "DEMOTED", "SERVING"];

fn write_columns(out: &mut impl Write) -> io::Result<()> {
    let lines: Vec<_> =
        std::iter::once(HEAD.map(str::to_owned)).chain(table().map(|row| columns(&row))).collect();
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
        assert_eq!(rows.len(), table().count());
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
        assert_eq!(text.lines().count(), table().count() + 1);
    }
}
