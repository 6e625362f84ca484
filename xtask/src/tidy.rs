//! Which rules of this repository does the tree break?
//!
//! Invariant: every rule has a test that shows it failing, and every exception in
//! `xtask/tidy-allow.txt` is needed: one that no violation needs fails as well.

mod allow;
mod bans;
pub(crate) mod imports;
mod manifests;
mod page;
mod size;
mod text;

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::mutants;
use crate::tree::Tree;

/// One broken rule at one place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    /// File, or `file::function`; what an exception names.
    place: String,
    /// Line from 1.
    line: usize,
    rule: &'static str,
    /// What was measured, for an exception to be held against; 1 where nothing is.
    value: usize,
    message: String,
}

impl Violation {
    /// A breach of a rule that measures nothing.
    pub(crate) fn plain(
        rule: &'static str,
        place: &str,
        line: usize,
        message: impl Into<String>,
    ) -> Self {
        Self { place: place.to_owned(), line, rule, value: 1, message: message.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, line, rule, message, .. } = self;
        write!(f, "{place}:{line}: [{rule}] {message}")
    }
}

/// Checks the tree at `root` and prints what is wrong.
pub(crate) fn run(root: &Path) -> Result<()> {
    let tree = Tree::load(root)?;
    let read = |path: &str| {
        fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path}"))
    };
    let mut found = Vec::new();
    found.extend(text::check(&tree));
    found.extend(size::check(&tree));
    found.extend(bans::check(&tree));
    found.extend(manifests::check(&tree));
    found.extend(imports::check(&tree, imports::CRATES, imports::PARTS));
    found.extend(page::check(&tree, &read(page::PAGE)?));
    found.extend(page::check_tests(&tree, page::CASES, &read(page::CASES)?));
    found.extend(mutants::check(root, &tree)?);
    let mut left = allow::apply(found, &read(allow::PATH)?);
    left.sort();
    for violation in &left {
        println!("{violation}");
    }
    if !left.is_empty() {
        bail!("{} broken rules in {} files", left.len(), tree.sources.len());
    }
    println!("tidy: {} sources, {} manifests", tree.sources.len(), tree.manifests.len());
    Ok(())
}

#[cfg(test)]
mod testing {
    //! Small trees for the rules' tests.

    use super::{Tree, Violation};

    /// A tree of `(path, text)` pairs.
    pub(super) fn tree(files: &[(&str, &str)]) -> Tree {
        let files = files.iter().map(|(p, t)| ((*p).to_owned(), (*t).to_owned())).collect();
        Tree::from_files(files).expect("well-formed test input")
    }

    /// `rule place` of each violation, in order.
    pub(super) fn names(violations: &[Violation]) -> Vec<String> {
        violations.iter().map(|v| format!("{} {}", v.rule, v.place)).collect()
    }
}
