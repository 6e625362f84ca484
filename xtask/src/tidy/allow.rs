//! Which violations are excepted, and is each exception still needed?
//!
//! Invariant: a ratchet. An exception holds its place to the value that was measured when it was
//! written: more fails, less fails until the entry is lowered, and none fails until it is removed.

use std::collections::BTreeMap;

use super::Violation;

/// The list, from the root. A line is `rule place value # reason`.
pub(super) const PATH: &str = "xtask/tidy-allow.txt";

/// One exception.
struct Entry {
    line: usize,
    value: usize,
}

/// The violations that `list` does not except, and those of the list itself.
pub(super) fn apply(found: Vec<Violation>, list: &str) -> Vec<Violation> {
    let (entries, mut left) = parse(list);
    let mut worst: BTreeMap<(String, String), usize> = BTreeMap::new();
    for violation in found {
        let key = (violation.rule.to_owned(), violation.place.clone());
        match entries.get(&key) {
            None => left.push(violation),
            Some(entry) => {
                if violation.value > entry.value {
                    left.push(violation.clone());
                }
                let value = worst.entry(key).or_default();
                *value = violation.value.max(*value);
            }
        }
    }
    for ((rule, place), entry) in entries {
        let message = match worst.get(&(rule.clone(), place.clone())) {
            None => format!("{rule} {place} holds by itself: remove the entry"),
            Some(&value) if value < entry.value => {
                format!("{rule} {place} is down to {value}: lower the entry")
            }
            Some(_) => continue,
        };
        left.push(Violation::plain("allow-list", PATH, entry.line, message));
    }
    left
}

/// The entries by rule and place, and a violation for every line that is none.
fn parse(list: &str) -> (BTreeMap<(String, String), Entry>, Vec<Violation>) {
    let mut entries = BTreeMap::new();
    let mut broken = Vec::new();
    for (index, text) in list.lines().enumerate() {
        if text.trim().is_empty() || text.starts_with('#') {
            continue;
        }
        match entry(text) {
            Some((rule, place, value)) => {
                entries.insert((rule, place), Entry { line: index + 1, value });
            }
            None => broken.push(Violation::plain(
                "allow-list",
                PATH,
                index + 1,
                "an entry is `rule place value # reason`",
            )),
        }
    }
    (entries, broken)
}

fn entry(text: &str) -> Option<(String, String, usize)> {
    let (entry, reason) = text.split_once(" # ")?;
    let mut words = entry.split_whitespace();
    let (rule, place, value) = (words.next()?, words.next()?, words.next()?.parse().ok()?);
    let complete = words.next().is_none() && !reason.trim().is_empty();
    complete.then(|| (rule.to_owned(), place.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use super::super::testing::names;
    use super::*;

    fn long(place: &str, value: usize) -> Violation {
        let message = format!("{value} lines");
        Violation { place: place.to_owned(), line: 1, rule: "function-lines", value, message }
    }

    #[test]
    fn an_exception_covers_its_place_up_to_its_value() {
        let list = "# notes\n\nfunction-lines a.rs::f 90 # a flat table\n";
        assert_eq!(apply(vec![long("a.rs::f", 90)], list), []);
        assert_eq!(names(&apply(vec![long("a.rs::f", 91)], list)), ["function-lines a.rs::f"]);
        let elsewhere = apply(vec![long("a.rs::f", 90), long("a.rs::g", 90)], list);
        assert_eq!(names(&elsewhere), ["function-lines a.rs::g"]);
    }

    #[test]
    fn an_exception_that_is_not_needed_in_full_fails() {
        let list = "function-lines a.rs::f 90 # a flat table\n";
        let lower = apply(vec![long("a.rs::f", 80)], list);
        assert_eq!(lower[0].message, "function-lines a.rs::f is down to 80: lower the entry");
        let gone = apply(Vec::new(), list);
        assert_eq!(gone[0].message, "function-lines a.rs::f holds by itself: remove the entry");
    }

    #[test]
    fn an_exception_without_a_reason_is_none() {
        for list in ["function-lines a.rs::f 90", "function-lines a.rs::f 90 # ", "a.rs 9 # why"] {
            assert_eq!(names(&apply(Vec::new(), list)), [format!("allow-list {PATH}")], "{list}");
        }
    }
}
