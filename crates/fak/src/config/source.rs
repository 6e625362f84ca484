//! A settings' file: what it says, where each key stands, and what of it cannot be read.
//!
//! Invariant: of the file's text only the names of known keys and values of a wrong kind are shown,
//! since somebody may have written a secret elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use super::faults::Error;
use super::serve::Raw;

/// Faults of one file that are told.
const FAULTS_MAX: usize = 100;

/// Where a file's settings stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    path: String,
    /// The line of each key, from 1: `key`, `table.key`, `worker.NUMBER` or `worker.NUMBER.key`.
    lines: BTreeMap<String, usize>,
    /// What cannot be read, by line.
    faults: Vec<(usize, String)>,
}

impl Source {
    /// What `text` says, which stands at `path`. What cannot be read of it is left out, and told.
    pub(super) fn read(text: &str, path: String) -> Raw {
        let line = |at: usize| {
            let before = text.as_bytes().get(..at).unwrap_or_default();
            1 + before.iter().filter(|byte| **byte == b'\n').count()
        };
        let start = |span: Option<Range<usize>>| span.map_or(0, |span| span.start);
        let (mut table, broken) = DeTable::parse_recoverable(text);
        let broken = broken.iter().take(FAULTS_MAX);
        let broken: Vec<_> =
            broken.map(|e| (line(start(e.span())), e.message().to_owned())).collect();
        if !broken.is_empty() {
            // What else the lines say is not sure.
            let source = Self { path, faults: broken, lines: BTreeMap::new() };
            return Raw { source, ..Raw::default() };
        }
        let (mut faults, mut left_out) = (Vec::new(), BTreeSet::new());
        let raw = loop {
            let error = match Raw::deserialize(Deserializer::from(table.clone())) {
                Ok(raw) => break raw,
                Err(error) => error,
            };
            let at = start(error.span());
            let entry = without(&mut table, at);
            let key = entry.as_ref().map(|(_, key)| key.as_str());
            let missing = error.message().strip_prefix("missing field `");
            let missing = missing.map(|name| (at, name.trim_end_matches('`').to_owned()));
            // What is missing because it was left out is no fault of its own.
            if missing.is_none_or(|missing| !left_out.contains(&missing)) {
                faults.push((line(at), told(&error, key)));
            }
            let Some(entry) = entry.filter(|_| faults.len() < FAULTS_MAX) else {
                break Raw::default();
            };
            left_out.insert(entry);
        };
        let mut lines = BTreeMap::new();
        note(table.get_ref(), "", &mut |place, at| {
            lines.insert(place, line(at));
        });
        Raw { source: Self { path, lines, faults }, ..raw }
    }

    /// What cannot be read.
    pub(super) fn faults(&self) -> impl Iterator<Item = Error> {
        self.faults.iter().map(|(line, problem)| {
            let (path, line, problem) = (self.path.clone(), *line, problem.clone());
            Error::Toml { path, line, problem }
        })
    }

    /// Whether there is any of it.
    pub(super) fn is_faulty(&self) -> bool {
        !self.faults.is_empty()
    }

    /// The file and the line where `place` stands, or what it is in.
    pub(super) fn at(&self, place: &str) -> Option<(&str, usize)> {
        let mut place = place;
        loop {
            if let Some(line) = self.lines.get(place) {
                return Some((&self.path, *line));
            }
            place = place.rsplit_once('.')?.0;
        }
    }
}

/// What is wrong, of the value of a key where that is known.
fn told(error: &toml::de::Error, key: Option<&str>) -> String {
    let problem = error.message().replace("expected u64", "expected a whole number from 0");
    // Only a key that is known gets as far as a value of a wrong kind.
    match key.filter(|_| problem.starts_with("invalid ")) {
        Some(key) => format!("{key}: {problem}"),
        None => problem,
    }
}

/// An entry of a table: where the table begins, and the key.
type Entry = (usize, String);

/// Takes the innermost entry at this byte out of the table.
fn without(table: &mut Spanned<DeTable<'_>>, at: usize) -> Option<Entry> {
    let begins = table.span().start;
    without_in(table.get_mut(), begins, at)
}

fn without_in(table: &mut DeTable<'_>, begins: usize, at: usize) -> Option<Entry> {
    let mut found = None;
    for (key, value) in table.iter_mut() {
        if key.span().contains(&at) {
            found = Some(key.get_ref().to_string());
            continue;
        }
        match without_at(value, at) {
            Some(Inner::Gone(entry)) => return Some(entry),
            Some(Inner::Whole) => found = Some(key.get_ref().to_string()),
            None => {}
        }
    }
    let name = found?;
    table.remove(&*name);
    Some((begins, name))
}

/// What a value has at a byte.
enum Inner {
    /// An entry of a table, taken out.
    Gone(Entry),
    /// The value itself.
    Whole,
}

fn without_at(value: &mut Spanned<DeValue<'_>>, at: usize) -> Option<Inner> {
    let span = value.span();
    match value.get_mut() {
        DeValue::Table(table) => {
            if let Some(entry) = without_in(table, span.start, at) {
                return Some(Inner::Gone(entry));
            }
        }
        DeValue::Array(items) => {
            for number in 0..items.len() {
                match items.get_mut(number).and_then(|item| without_at(item, at)) {
                    Some(Inner::Whole) => {
                        let others = items.iter().enumerate().filter(|(n, _)| *n != number);
                        *items = others.map(|(_, item)| item.clone()).collect();
                        return Some(Inner::Gone((span.start, number.to_string())));
                    }
                    Some(gone) => return Some(gone),
                    None => {}
                }
            }
        }
        _ => {}
    }
    span.contains(&at).then_some(Inner::Whole)
}

/// Tells the place of every key, and at which byte it begins.
fn note(table: &DeTable<'_>, around: &str, tell: &mut dyn FnMut(String, usize)) {
    for (key, value) in table {
        let place = format!("{around}{}", key.get_ref());
        tell(place.clone(), key.span().start);
        match value.get_ref() {
            DeValue::Table(inner) => note(inner, &format!("{place}."), tell),
            DeValue::Array(items) => {
                for (number, item) in items.iter().enumerate() {
                    let place = format!("{place}.{number}");
                    tell(place.clone(), item.span().start);
                    if let DeValue::Table(inner) = item.get_ref() {
                        note(inner, &format!("{place}."), tell);
                    }
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str) -> Vec<(usize, String)> {
        Source::read(text, "fak.toml".to_owned()).source.faults
    }

    #[test]
    fn a_value_of_a_wrong_kind_is_told_with_its_line_and_its_key() {
        let whole = "expected a whole number from 0";
        for (text, line, problem) in [
            ("hold_ms = \"x\"", 1, format!("hold_ms: invalid type: string \"x\", {whole}")),
            ("\nhold_ms = -1", 2, format!("hold_ms: invalid value: integer `-1`, {whole}")),
            ("isolation = 1", 1, "isolation: invalid type: integer `1`, expected a boolean".into()),
            ("[[worker]]\nid = 7", 2, "id: invalid type: integer `7`, expected a string".into()),
        ] {
            assert_eq!(wrong(text)[0], (line, problem), "{text}");
        }
    }

    #[test]
    fn everything_that_cannot_be_read_is_told_and_nothing_twice() {
        let file = "hold_ms = \"x\"\nbogus = 1\nprobe_every_ms = 500\n\
            [[worker]]\nid = 7\nurl = \"http://h\"\nport = 3\n\
            [[worker]]\nid = \"b\"\nurl = \"http://b\"\n\
            [[worker]]\nurl = \"http://c\"\n\
            [weights]\nsalt = 1\n";
        let mut lines: Vec<_> = wrong(file).into_iter().map(|(line, _)| line).collect();
        lines.sort_unstable();
        assert_eq!(lines, [1, 2, 5, 7, 11, 14], "{:?}", wrong(file));
        let raw = Source::read(file, "fak.toml".to_owned());
        assert_eq!(raw.probe_every_ms, Some(500), "what is right is kept");
        let ids: Vec<_> = raw.worker.iter().map(|worker| worker.id.as_str()).collect();
        assert_eq!(ids, ["b"]);
        assert_eq!(raw.source.at("worker.0.url"), Some(("fak.toml", 10)));
        assert_eq!(raw.source.at("worker.0.kv"), Some(("fak.toml", 8)));
        assert_eq!(raw.source.at("probe_every_ms"), Some(("fak.toml", 3)));
    }

    #[test]
    fn what_is_no_known_key_is_shown_in_no_other_way_than_by_its_reader() {
        let (line, problem) = wrong("\nbogus = 1").remove(0);
        assert!(line == 2 && problem.starts_with("unknown field `bogus`, expected"), "{problem}");
        let broken = wrong("hold_ms = 1\nc2VrcmV0=\n");
        assert!(!broken.is_empty() && broken.iter().all(|(_, told)| !told.contains("c2VrcmV0")));
    }
}
