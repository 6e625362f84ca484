//! What the clients of the control API print: JSON, or columns for people.
//!
//! Invariant: data goes to stdout, whole or not at all; and no text that came over the wire can
//! steer the terminal.

use std::io::{self, Write as _};

use comfy_table::presets::NOTHING;
use serde::Serialize;
use serde_json::Value;

use crate::store::Row;

/// In place of a verdict on the cache.
const NOT_SENT: &str = "not sent";

/// Columns under a head.
pub(super) struct Table(comfy_table::Table);

impl Table {
    pub(super) fn new<const N: usize>(head: [&str; N]) -> Self {
        let mut table = comfy_table::Table::new();
        table.load_style(NOTHING).set_header(head);
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        Self(table)
    }

    pub(super) fn add<const N: usize>(&mut self, cells: [String; N]) {
        self.0.add_row(cells.map(|cell| visible(&cell)));
    }

    /// Prints the columns, or `data` as JSON.
    pub(super) fn print(&self, data: &impl Serialize, as_json: bool) -> io::Result<()> {
        if as_json { json(data) } else { write(&format!("{}\n", self.0.trim_fmt())) }
    }
}

/// Prints `data` as JSON.
pub(super) fn json(data: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string_pretty(data).map_err(io::Error::other)?;
    write(&format!("{text}\n"))
}

/// Prints an object's fields, one a line, or as JSON.
pub(super) fn object(data: &impl Serialize, as_json: bool) -> io::Result<()> {
    if as_json {
        return json(data);
    }
    let mut table = comfy_table::Table::new();
    table.load_style(NOTHING);
    if let Value::Object(fields) = serde_json::to_value(data).map_err(io::Error::other)? {
        for (name, value) in fields {
            let value = match value {
                Value::String(text) => text,
                Value::Null => "-".to_owned(),
                value if name.ends_with("_at") => time(&value),
                other => other.to_string(),
            };
            table.add_row([name, visible(&value)]);
        }
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    write(&format!("{}\n", table.trim_fmt()))
}

/// Milliseconds since 1970 as rows write a time; anything else as it is.
fn time(value: &Value) -> String {
    let at = value.as_i64().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    at.map_or_else(|| value.to_string(), |at| format!("{at:.3}"))
}

/// Prints one row as a line, or as JSON on one line.
pub(super) fn row(row: &Row, as_json: bool) -> io::Result<()> {
    if as_json {
        let text = serde_json::to_string(row).map_err(io::Error::other)?;
        return write(&format!("{text}\n"));
    }
    write(&format!("{}\n", visible(&line_of(row))))
}

fn line_of(row: &Row) -> String {
    let Row { seq, at, worker, phase, reason, .. } = row;
    let kv = match row.is_sent() {
        true => format!("kv {} ({})", row.kv, tiers(row)),
        false => NOT_SENT.to_owned(),
    };
    format!("#{seq} {at} {} on {worker}: {phase}, {kv}, {reason}", action(row))
}

/// What a row's action did to the gpu tier. A row of what was not sent repeats what was believed
/// before it, which is no news of the cache.
pub(super) fn kv(row: &Row) -> String {
    if row.is_sent() { row.kv.to_string() } else { NOT_SENT.to_owned() }
}

/// Prints texts, one a line.
pub(super) fn lines(texts: &[String]) -> io::Result<()> {
    write(&texts.iter().map(|text| format!("{}\n", visible(text))).collect::<String>())
}

/// `sleep 1`, `pause`.
pub(super) fn action(row: &Row) -> String {
    match row.level {
        Some(level) => format!("{} {level}", row.action),
        None => row.action.to_string(),
    }
}

/// `gpu forgotten, cpu preserved`; a dash for what was not sent.
pub(super) fn tiers(row: &Row) -> String {
    if !row.is_sent() {
        return or_dash(None::<String>);
    }
    let tiers = row.tiers.0.iter().map(|(tier, kv)| format!("{tier} {kv}"));
    tiers.collect::<Vec<_>>().join(", ")
}

pub(super) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn visible(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_time_reads_as_it_does_in_a_row() {
        assert_eq!(time(&json!(1_795_989_158_845_i64)), "2026-11-29T21:52:38.845Z");
        assert_eq!(time(&json!(true)), "true");
    }
}
