//! Who may import whom?
//!
//! Invariant: the tables below name every crate of the workspace and every part of the product, and
//! nothing else; ARCHITECTURE.md shows them as rendered here. A new edge is a decision: see
//! CONTRIBUTING.md.

use std::fmt::Write as _;

use proc_macro2::{TokenStream, TokenTree};

use super::Violation;
use super::page::PAGE;
use crate::tree::{Manifest, Source, Tree, after_colons, named_below};

/// The product's sources.
pub(super) const PRODUCT: &str = "crates/fak/src";
/// In front of the names of the workspace's libraries.
const PREFIX: &str = "fak-";
/// May import all others.
const ALL: &[&str] = &["*"];

/// One crate of the repository.
pub(super) struct CrateRow {
    name: &'static str,
    /// Crates of the workspace that it may depend on.
    may: &'static [&'static str],
    /// Other crates that it must not depend on, tests left out; `*` for any.
    never: &'static [&'static str],
    /// Modules of the standard library that it must not name, tests left out.
    never_std: &'static [&'static str],
}

/// One part (top-level module) of the product.
pub(super) struct PartRow {
    name: &'static str,
    /// Parts, and crates of the workspace without their prefix.
    may: &'static [&'static str],
}

const OUTSIDE: &[&str] = &["env", "fs", "net", "process", "thread", "time"];

pub(super) const CRATES: &[CrateRow] = &[
    CrateRow { name: "fak-kernel", may: &[], never: &["*"], never_std: &["*"] },
    CrateRow {
        name: "fak-index",
        may: &["fak-kernel"],
        never: &["tokio", "tracing"],
        never_std: OUTSIDE,
    },
    CrateRow { name: "fak-wire", may: &[], never: &["tokio", "tracing"], never_std: OUTSIDE },
    CrateRow { name: "fak-sim", may: &[], never: &[], never_std: &[] },
    CrateRow {
        name: "fak",
        may: &["fak-kernel", "fak-index", "fak-wire", "fak-sim"],
        never: &[],
        never_std: &[],
    },
    CrateRow { name: "fak-conformance", may: &["fak-sim"], never: &[], never_std: &[] },
    CrateRow { name: "proxybench", may: &[], never: &[], never_std: &[] },
    CrateRow { name: "fak-fuzz", may: &["fak-wire"], never: &[], never_std: &[] },
    CrateRow { name: "xtask", may: &[], never: &[], never_std: &[] },
];

pub(super) const PARTS: &[PartRow] = &[
    PartRow { name: "runtime", may: &[] },
    PartRow { name: "telemetry", may: &[] },
    PartRow { name: "store", may: &["kernel", "runtime", "telemetry"] },
    PartRow { name: "engine", may: &["wire", "kernel", "runtime", "telemetry"] },
    PartRow { name: "events", may: &["wire", "kernel", "index", "runtime", "telemetry"] },
    // A worker's state names its ranks in the index and holds its last scrape.
    PartRow { name: "fleet", may: &["kernel", "index", "wire", "engine"] },
    // Beliefs have one writer a rank, in events: owners tell it what they do.
    PartRow {
        name: "lifecycle",
        may: &["kernel", "index", "wire", "engine", "events", "fleet", "store", "runtime"],
    },
    PartRow { name: "sessions", may: &["kernel", "store", "fleet", "lifecycle", "runtime"] },
    PartRow {
        name: "gateway",
        may: &["wire", "kernel", "index", "engine", "fleet", "sessions", "runtime", "telemetry"],
    },
    PartRow {
        name: "admin",
        may: &[
            "kernel",
            "index",
            "wire",
            "engine",
            "events",
            "fleet",
            "lifecycle",
            "sessions",
            "store",
            "runtime",
            "telemetry",
        ],
    },
    PartRow { name: "config", may: &["engine", "events"] },
    // A client of the control API: it reads the API's own JSON types and event stream.
    PartRow { name: "cli", may: &["admin", "config", "store", "wire"] },
    PartRow { name: "app", may: ALL },
];

/// Checks manifests and sources against the tables.
pub(super) fn check(tree: &Tree, crates: &[CrateRow], parts: &[PartRow]) -> Vec<Violation> {
    let mut out = check_crates(tree, crates);
    out.extend(check_parts(tree, parts));
    out
}

fn check_crates(tree: &Tree, crates: &[CrateRow]) -> Vec<Violation> {
    let mut out = Vec::new();
    for manifest in &tree.manifests {
        let Some(name) = manifest.package() else { continue };
        match crates.iter().find(|row| row.name == name) {
            None => out.push(broken(&manifest.path, 1, format!("{name} is in no row of CRATES"))),
            Some(row) => {
                check_dependencies(manifest, row, crates, &mut out);
                check_std(tree, manifest, row, &mut out);
            }
        }
    }
    for row in crates {
        if !tree.manifests.iter().any(|manifest| manifest.package() == Some(row.name)) {
            out.push(broken(PAGE, 1, format!("there is no crate {}: remove its row", row.name)));
        }
    }
    out
}

fn check_dependencies(
    manifest: &Manifest,
    row: &CrateRow,
    crates: &[CrateRow],
    out: &mut Vec<Violation>,
) {
    for kind in ["dependencies", "build-dependencies", "dev-dependencies"] {
        for (name, _) in manifest.dependencies(kind) {
            let is_local = crates.iter().any(|other| other.name == name);
            let is_banned = row.never.contains(&"*") || row.never.contains(&name);
            if is_local && !row.may.contains(&name) {
                out.push(broken(&manifest.path, 1, format!("{} must not import {name}", row.name)));
            } else if !is_local && is_banned && kind != "dev-dependencies" {
                out.push(broken(&manifest.path, 1, format!("{} must not use {name}", row.name)));
            }
        }
    }
}

fn check_std(tree: &Tree, manifest: &Manifest, row: &CrateRow, out: &mut Vec<Violation>) {
    let src = format!("{}/src", manifest.dir());
    for source in tree.under(&src) {
        for (name, line) in named_below(&source.tokens, "std") {
            let is_banned = row.never_std.contains(&"*") || row.never_std.contains(&name.as_str());
            if is_banned && !source.is_test_line(line) {
                let message = format!("{} must not use std::{name}", row.name);
                out.push(broken(&source.path, line, message));
            }
        }
        if row.never_std.contains(&"*")
            && source.below(&src) == Some("lib.rs")
            && !source.text.lines().any(|line| line == "#![no_std]")
        {
            out.push(broken(&source.path, 1, format!("{} is #![no_std]", row.name)));
        }
    }
}

fn check_parts(tree: &Tree, parts: &[PartRow]) -> Vec<Violation> {
    let mut out = Vec::new();
    let mut seen = Vec::new();
    for source in tree.under(PRODUCT) {
        let module = module_path(source);
        let Some(part) = module.first() else { continue };
        seen.push(part.clone());
        let Some(row) = parts.iter().find(|row| row.name == part) else {
            out.push(broken(&source.path, 1, format!("{part} is in no row of PARTS")));
            continue;
        };
        for (name, line) in imports(source, &module) {
            let is_own = name == *part;
            let is_allowed = row.may == ALL || row.may.contains(&name.as_str());
            // Tests may drive a part against the simulator.
            let is_rig = name == "sim" && source.is_test_line(line);
            if !(is_own || is_allowed || is_rig) {
                out.push(broken(&source.path, line, format!("{part} must not import {name}")));
            }
        }
    }
    for row in parts.iter().filter(|row| !seen.iter().any(|part| part == row.name)) {
        out.push(broken(PAGE, 1, format!("there is no part {}: remove its row", row.name)));
    }
    out
}

fn broken(place: &str, line: usize, message: String) -> Violation {
    Violation::plain("import", place, line, message)
}

/// The module that a source of the product is, from the crate's root; empty for the root itself.
pub(super) fn module_path(source: &Source) -> Vec<String> {
    let below = source.below(PRODUCT).expect("only the product's sources are asked for");
    let stem = below.strip_suffix(".rs").expect("only Rust files are read");
    match stem {
        "lib" | "main" => Vec::new(),
        _ => stem.split('/').map(str::to_owned).collect(),
    }
}

/// Every part and crate of the workspace that `source` names, with the line.
fn imports(source: &Source, module: &[String]) -> Vec<(String, usize)> {
    let mut out = named_below(&source.tokens, "crate");
    let prefix = PREFIX.replace('-', "_");
    for (ident, line) in source.idents() {
        if let Some(name) = ident.strip_prefix(&prefix) {
            out.push((name.to_owned(), line));
        }
    }
    through_super(&source.tokens, module.len(), &mut out);
    out
}

/// The names reached by climbing to the crate's root with `super`, from a module `depth` below it.
fn through_super(tokens: &TokenStream, depth: usize, out: &mut Vec<(String, usize)>) {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let mut index = 0;
    while index < tokens.len() {
        match &tokens[index] {
            TokenTree::Group(group) => {
                let is_module = index >= 2 && is_ident(&tokens[index - 2], "mod");
                through_super(&group.stream(), depth + usize::from(is_module), out);
            }
            token if is_ident(token, "super") => {
                let mut climbed = 1;
                while is_ident_at(&tokens, index + 3, "super") {
                    climbed += 1;
                    index += 3;
                }
                if climbed == depth {
                    out.extend(after_colons(&tokens[index + 1..]));
                }
            }
            _ => {}
        }
        index += 1;
    }
}

fn is_ident(token: &TokenTree, name: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == name)
}

fn is_ident_at(tokens: &[TokenTree], index: usize, name: &str) -> bool {
    tokens.get(index).is_some_and(|token| is_ident(token, name))
}

/// The tables as ARCHITECTURE.md has to show them.
pub(crate) fn rendered() -> String {
    let mut out = String::from("| crate | may import | never |\n|---|---|---|\n");
    for row in CRATES {
        let std = row.never_std.iter().map(|name| format!("std::{name}"));
        let never: Vec<String> = match row.never {
            ["*"] => vec!["any other crate, std".to_owned()],
            names => names.iter().map(|&name| name.to_owned()).chain(std).collect(),
        };
        line(&mut out, &[row.name, &list(row.may), &or_dash(&never.join(", "))]);
    }
    out.push_str("\n| part of `fak` | may import |\n|---|---|\n");
    for row in PARTS {
        line(&mut out, &[row.name, &list(row.may)]);
    }
    out
}

fn line(out: &mut String, cells: &[&str]) {
    writeln!(out, "| {} |", cells.join(" | ")).expect("a string takes any text");
}

fn list(names: &[&str]) -> String {
    if names == ALL { "every part".to_owned() } else { or_dash(&names.join(", ")) }
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::testing::tree;
    use super::*;

    const PURE: CrateRow =
        CrateRow { name: "fak-pure", may: &[], never: &["*"], never_std: &["*"] };
    const SHELL: CrateRow =
        CrateRow { name: "fak-shell", may: &["fak-pure"], never: &["tokio"], never_std: &["time"] };

    fn crates(pure: (&str, &str), shell: (&str, &str)) -> Vec<String> {
        let manifest = |name: &str, rest| format!("[package]\nname = \"{name}\"\n{rest}");
        let tree = tree(&[
            ("pure/Cargo.toml", &manifest("fak-pure", pure.0)),
            ("pure/src/lib.rs", pure.1),
            ("shell/Cargo.toml", &manifest("fak-shell", shell.0)),
            ("shell/src/lib.rs", shell.1),
        ]);
        check_crates(&tree, &[PURE, SHELL]).into_iter().map(|v| v.message).collect()
    }

    #[test]
    fn a_crate_imports_what_its_row_allows() {
        let good = ("[dependencies]\nfak-pure = {}\nserde = {}", "use std::fmt;");
        let no_std = "#![no_std]\n#[cfg(test)]\nuse std::vec::Vec;\n";
        assert_eq!(crates(("[dev-dependencies]\nproptest = {}", no_std), good), [""; 0]);
        let back = ("[dev-dependencies]\nfak-shell = {}", no_std);
        assert_eq!(crates(back, good), ["fak-pure must not import fak-shell"]);
        let impure = ("[dependencies]\nserde = {}", "use std::vec::Vec;");
        let expected = [
            "fak-pure must not use serde",
            "fak-pure must not use std::vec",
            "fak-pure is #![no_std]",
        ];
        assert_eq!(crates(impure, good), expected);
        let clock = ("[dependencies]\ntokio = {}", "fn f() { std::time::Instant::now(); }");
        let expected = ["fak-shell must not use tokio", "fak-shell must not use std::time"];
        assert_eq!(crates(("", no_std), clock), expected);
    }

    #[test]
    fn a_crate_has_a_row_and_a_row_has_its_crate() {
        let tree = tree(&[("new/Cargo.toml", "[package]\nname = \"fak-new\"")]);
        let messages: Vec<String> =
            check_crates(&tree, &[PURE]).into_iter().map(|v| v.message).collect();
        let expected =
            ["fak-new is in no row of CRATES", "there is no crate fak-pure: remove its row"];
        assert_eq!(messages, expected);
    }

    const LOW: PartRow = PartRow { name: "low", may: &["wire"] };
    const HIGH: PartRow = PartRow { name: "high", may: &["low"] };

    fn parts(path: &str, text: &str) -> Vec<String> {
        let path = format!("{PRODUCT}/{path}");
        let mut files = vec![(path.as_str(), text)];
        for other in ["crates/fak/src/low.rs", "crates/fak/src/high.rs"] {
            if other != path {
                files.push((other, ""));
            }
        }
        check_parts(&tree(&files), &[LOW, HIGH]).into_iter().map(|v| v.message).collect()
    }

    #[test]
    fn a_part_imports_what_its_row_allows() {
        assert_eq!(parts("high.rs", "use crate::{high::a, low::{self, b}};"), [""; 0]);
        assert_eq!(parts("low.rs", "use crate::{low, high};"), ["low must not import high"]);
        assert_eq!(
            parts("low/a.rs", "fn f() { m!(crate::high::g()) }"),
            ["low must not import high"]
        );
        assert_eq!(parts("low.rs", "use crate::*;"), ["low must not import *"]);
        assert_eq!(parts("high.rs", "fn f(a: fak_wire::A) {}"), ["high must not import wire"]);
        assert_eq!(parts("low.rs", "use fak_wire::A;"), [""; 0]);
        assert_eq!(parts("main.rs", "use crate::{low, high};"), [""; 0]);
    }

    #[test]
    fn climbing_out_of_a_part_is_an_import() {
        let expected = ["low must not import high"];
        assert_eq!(parts("low.rs", "use super::high;"), expected);
        assert_eq!(parts("low/a.rs", "use super::super::{high, low};"), expected);
        assert_eq!(
            parts("low.rs", "mod tests { use super::super::high; use super::a; }"),
            expected
        );
        assert_eq!(parts("low/a.rs", "use super::high;"), [""; 0]);
    }

    #[test]
    fn tests_may_use_the_simulator() {
        assert_eq!(parts("low.rs", "#[cfg(test)] mod tests { use fak_sim::Sim; }"), [""; 0]);
        assert_eq!(parts("low.rs", "use fak_sim::Sim;"), ["low must not import sim"]);
    }

    #[test]
    fn a_part_has_a_row_and_a_row_has_its_part() {
        assert_eq!(parts("new/a.rs", ""), ["new is in no row of PARTS"]);
        let messages: Vec<String> =
            check_parts(&tree(&[]), &[LOW]).into_iter().map(|v| v.message).collect();
        assert_eq!(messages, ["there is no part low: remove its row"]);
    }
}
