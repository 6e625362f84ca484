//! Do ARCHITECTURE.md and docs/cases.md say what is so?
//!
//! Invariant: the first shows the import tables as they are enforced, and every test that either
//! names exists.

use std::collections::BTreeSet;

use super::Violation;
use super::imports::rendered;
use crate::tree::Tree;

/// The page, from the root.
pub(super) const PAGE: &str = "ARCHITECTURE.md";
/// The faults and the tests that hold them off, from the root.
pub(super) const CASES: &str = "docs/cases.md";
/// Around the import tables.
const MARKS: (&str, &str) = ("<!-- cargo xtask imports -->\n", "<!-- end -->\n");
/// A name in code style with more words than this is a test's.
const NAME_WORDS_MAX: usize = 3;

/// Holds the page against the tree.
pub(super) fn check(tree: &Tree, page: &str) -> Vec<Violation> {
    let mut out = Vec::new();
    let (open, close) = MARKS;
    let shown = page.split_once(open).and_then(|(_, rest)| Some(rest.split_once(close)?.0));
    if shown != Some(rendered().as_str()) {
        let message =
            format!("put the output of `cargo xtask imports` between {open:?} and {close:?}");
        out.push(Violation::plain("import-table", PAGE, 1, message));
    }
    out.extend(check_tests(tree, PAGE, page));
    out
}

/// Holds the tests that a page names against the tree.
pub(super) fn check_tests(tree: &Tree, path: &str, page: &str) -> Vec<Violation> {
    let mut out = Vec::new();
    let known: BTreeSet<String> =
        tree.sources.iter().flat_map(|s| s.idents()).map(|(ident, _)| ident).collect();
    for (index, line) in page.lines().enumerate() {
        for name in line.split('`').skip(1).step_by(2).filter(|name| is_test_name(name)) {
            if !known.contains(name) {
                let message = format!("there is no test {name}");
                out.push(Violation::plain("cited-test", path, index + 1, message));
            }
        }
    }
    out
}

fn is_test_name(name: &str) -> bool {
    let is_word = |word: &str| word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    name.split('_').all(is_word) && name.split('_').count() > NAME_WORDS_MAX
}

#[cfg(test)]
mod tests {
    use super::super::testing::{names, tree};
    use super::*;

    fn broken(page: &str) -> Vec<String> {
        let test = "#[test]\nfn what_is_cold_stays_cold() {}\n";
        names(&check(&tree(&[("a.rs", test)]), page))
    }

    fn page(rest: &str) -> String {
        format!("# Parts\n{}{}{}{rest}\n", MARKS.0, rendered(), MARKS.1)
    }

    #[test]
    fn the_page_shows_the_tables() {
        assert_eq!(broken(&page("")), [""; 0]);
        let other = page("").replacen("fak-index", "fak-other", 1);
        assert_eq!(broken(&other), ["import-table ARCHITECTURE.md"]);
        assert_eq!(broken("# Parts\n"), ["import-table ARCHITECTURE.md"]);
    }

    #[test]
    fn a_test_that_the_page_names_exists() {
        assert_eq!(broken(&page("`cached_tokens`, `what_is_cold_stays_cold`")), [""; 0]);
        assert_eq!(broken(&page("`what_is_cold_warms_up`")), ["cited-test ARCHITECTURE.md"]);
    }
}
