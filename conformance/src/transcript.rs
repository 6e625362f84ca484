//! What an engine did in a scenario, as lines, and how two such accounts differ.

use std::collections::{BTreeMap, BTreeSet};

/// The account of one scenario.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transcript {
    /// One observation each.
    pub lines: Vec<String>,
    /// How many of the lines are KV events.
    pub events: usize,
}

impl Transcript {
    /// A recording is the lines, and the marker that events carry.
    pub fn from_recording(text: &str) -> Self {
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        let events = lines.iter().filter(|line| is_event(line)).count();
        Transcript { lines, events }
    }

    /// As it is kept in a file.
    pub fn to_recording(&self) -> String {
        self.lines.iter().fold(String::new(), |text, line| text + line + "\n")
    }

    /// A heading: what was done.
    pub fn step(&mut self, number: usize, what: &str) {
        self.lines.push(format!("{number:02} {what}"));
    }

    /// What was seen.
    pub fn saw(&mut self, what: impl AsRef<str>) {
        self.lines.push(format!("   {}", what.as_ref()));
    }

    /// An event that was seen.
    pub fn saw_event(&mut self, line: &str) {
        self.lines.push(format!("{EVENT}{line}"));
        self.events += 1;
    }
}

const EVENT: &str = "   event ";

fn is_event(line: &str) -> bool {
    line.starts_with(EVENT)
}

/// Lines around a difference, for orientation.
const CONTEXT: usize = 2;

/// Characters of a line that a difference shows.
const WIDTH: usize = 200;

/// Characters before the first that differs.
const LEAD: usize = 60;

/// The differences, `-` for lines of `expected` only and `+` for lines of `actual` only; none if
/// there are none. The number counts the lines so marked.
pub fn difference(expected: &Transcript, actual: &Transcript) -> Option<(usize, String)> {
    let marked = merge(&expected.lines, &actual.lines);
    let changed: Vec<_> = (0..marked.len()).filter(|index| marked[*index].0 != ' ').collect();
    if changed.is_empty() {
        return None;
    }
    let mut shown: BTreeSet<usize> = BTreeSet::new();
    for at in &changed {
        shown.extend(at.saturating_sub(CONTEXT)..=(at + CONTEXT).min(marked.len() - 1));
        // The step that it stands under.
        shown.extend((0..*at).rfind(|index| is_heading(marked[*index].1)));
    }
    let counterparts = counterparts(&marked);
    let mut text = String::new();
    let mut last = None;
    for index in shown {
        if last.is_some_and(|last| last + 1 != index) {
            text.push_str("      …\n");
        }
        last = Some(index);
        let (mark, line) = marked[index];
        let other = counterparts.get(&index).map_or("", |other| marked[*other].1);
        text += &format!("    {mark} {}\n", excerpt(line, other));
    }
    Some((changed.len(), text))
}

fn is_heading(line: &str) -> bool {
    line.starts_with(|first: char| first.is_ascii_digit())
}

/// Within each run of changed lines, the first `-` belongs to the first `+`, and so on.
fn counterparts(marked: &[(char, &str)]) -> BTreeMap<usize, usize> {
    let mut pairs = BTreeMap::new();
    let mut start = 0;
    for run in marked.chunk_by(|a, b| (a.0 == ' ') == (b.0 == ' ')) {
        let of = |mark: char| (0..run.len()).filter(move |i| run[*i].0 == mark);
        for (left, right) in of('-').zip(of('+')) {
            pairs.insert(start + left, start + right);
            pairs.insert(start + right, start + left);
        }
        start += run.len();
    }
    pairs
}

/// The part of a long line where it differs from `other`.
fn excerpt(line: &str, other: &str) -> String {
    let length = line.chars().count();
    if length <= WIDTH {
        return line.to_owned();
    }
    let common = line.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    let start = common.saturating_sub(LEAD).min(length - WIDTH);
    let part: String = line.chars().skip(start).take(WIDTH).collect();
    let before = if start > 0 { "…" } else { "" };
    let after = if start + WIDTH < length { "…" } else { "" };
    format!("{before}{part}{after}")
}

/// A longest common subsequence, with the other lines of either side in their places.
fn merge<'a>(left: &'a [String], right: &'a [String]) -> Vec<(char, &'a str)> {
    let width = right.len() + 1;
    let mut common = vec![0_u32; (left.len() + 1) * width];
    for i in (0..left.len()).rev() {
        for j in (0..right.len()).rev() {
            common[i * width + j] = if left[i] == right[j] {
                common[(i + 1) * width + j + 1] + 1
            } else {
                common[(i + 1) * width + j].max(common[i * width + j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut merged = Vec::new();
    while i < left.len() || j < right.len() {
        if i < left.len() && j < right.len() && left[i] == right[j] {
            merged.push((' ', left[i].as_str()));
            (i, j) = (i + 1, j + 1);
        } else if j == right.len()
            || (i < left.len() && common[(i + 1) * width + j] >= common[i * width + j + 1])
        {
            merged.push(('-', left[i].as_str()));
            i += 1;
        } else {
            merged.push(('+', right[j].as_str()));
            j += 1;
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript(text: &str) -> Transcript {
        Transcript::from_recording(text)
    }

    #[test]
    fn equal_transcripts_have_no_difference() {
        let one = transcript("01 a\n   event x\n   b\n");
        assert_eq!(one.events, 1);
        assert_eq!(difference(&one, &one.clone()), None);
        assert_eq!(Transcript::from_recording(&one.to_recording()), one);
    }

    #[test]
    fn a_missing_and_a_new_line_are_told_with_their_step() {
        let old = transcript("01 a\n   1\n   2\n   3\n   4\n   5\n02 b\n   6\n");
        let new = transcript("01 a\n   1\n   2\n   3\n   4\n   six\n02 b\n   6\n   7\n");
        let (lines, text) = difference(&old, &new).unwrap();
        assert_eq!(lines, 3);
        assert!(text.contains("-    5") && text.contains("+    six"), "{text}");
        assert!(text.starts_with("      01 a"), "{text}");
        assert!(text.contains("+    7"), "{text}");
    }

    #[test]
    fn a_long_line_is_shown_where_it_differs() {
        let long = |mark: &str| format!("   {}{mark}{}", "x".repeat(500), "y".repeat(500));
        let (_, text) =
            difference(&transcript(&long("here")), &transcript(&long("there"))).unwrap();
        assert!(text.contains("xhere") && text.contains("xthere"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() < 220), "{text}");
    }
}
