//! Which manifests break a rule on dependencies and lints?
//!
//! Invariant: a version is written once, in `[workspace.dependencies]`, with its reason beside it,
//! and every dependency is used by the crate that asks for it.

use std::collections::BTreeSet;

use super::Violation;
use crate::tree::{Manifest, Tree};

const KINDS: &[&str] = &["dependencies", "build-dependencies", "dev-dependencies"];

/// Checks every manifest. A workspace of its own, such as `fuzz`, cannot inherit: it answers for
/// its reasons itself.
pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let mut out = Vec::new();
    for manifest in &tree.manifests {
        let workspace = manifest.table.get("workspace").and_then(toml::Value::as_table);
        if let Some(shared) = workspace.and_then(|w| w.get("dependencies")?.as_table()) {
            check_reasons(manifest, "[workspace.dependencies]", shared, &mut out);
            check_shared_are_used(tree, manifest, shared, &mut out);
        }
        if manifest.package().is_none() {
            continue;
        }
        if workspace.is_none() {
            check_inherits(manifest, &mut out);
        } else if let Some(own) = manifest.table.get("dependencies").and_then(|d| d.as_table()) {
            check_reasons(manifest, "[dependencies]", own, &mut out);
        }
        check_are_used(tree, manifest, &mut out);
    }
    check_default_run(tree, &mut out);
    out
}

/// One package at most is what a bare `cargo run` runs: with two, cargo runs neither.
fn check_default_run(tree: &Tree, out: &mut Vec<Violation>) {
    let names = |manifest: &&Manifest| {
        manifest.table.get("package").is_some_and(|package| package.get("default-run").is_some())
    };
    // A workspace of its own has a `cargo run` of its own.
    let members = tree.manifests.iter().filter(|m| !m.table.contains_key("workspace"));
    let named: Vec<_> = members.filter(names).collect();
    if let [_, _, ..] = named[..] {
        for manifest in named {
            let message = "only one crate may have a default-run: it is what `cargo run` runs";
            out.push(Violation::plain("default-run", &manifest.path, 1, message));
        }
    }
}

/// Every entry from a registry says why it is there, and takes no default features.
fn check_reasons(
    manifest: &Manifest,
    section: &str,
    entries: &toml::Table,
    out: &mut Vec<Violation>,
) {
    let lines = manifest.text.lines().enumerate();
    let start = manifest.text.lines().position(|line| line.trim() == section).unwrap_or_default();
    for (name, value) in entries.iter().filter(|(_, value)| value.get("path").is_none()) {
        let is_entry = |text: &str| {
            text.strip_prefix(name.as_str())
                .is_some_and(|rest| rest.trim_start().starts_with(['=', '.']))
        };
        let found = lines.clone().skip(start).find(|(_, text)| is_entry(text));
        let (index, text) = found.unwrap_or((start, ""));
        let mut broken = |rule, message| {
            out.push(Violation::plain(rule, &manifest.path, index + 1, message));
        };
        if text.rsplit_once(" # ").is_none_or(|(_, reason)| reason.trim().is_empty()) {
            broken("dependency-reason", format!("{name}: say why, behind ` # ` on its line"));
        }
        if value.get("default-features").and_then(toml::Value::as_bool) != Some(false) {
            broken("default-features", format!("{name}: name the features that are needed"));
        }
    }
}

fn check_shared_are_used(
    tree: &Tree,
    root: &Manifest,
    shared: &toml::Table,
    out: &mut Vec<Violation>,
) {
    let asked: BTreeSet<&str> = tree
        .manifests
        .iter()
        .flat_map(|m| KINDS.iter().flat_map(|kind| m.dependencies(kind)))
        .map(|(name, _)| name)
        .collect();
    for name in shared.keys().filter(|name| !asked.contains(name.as_str())) {
        let message = format!("{name}: no crate asks for it");
        out.push(Violation::plain("unused-dependency", &root.path, 1, message));
    }
}

/// A member takes versions and lints from the workspace.
fn check_inherits(manifest: &Manifest, out: &mut Vec<Violation>) {
    let is_inherited = |value: Option<&toml::Value>| {
        value.and_then(|v| v.get("workspace")?.as_bool()) == Some(true)
    };
    if !is_inherited(manifest.table.get("lints")) {
        let message = "inherit them: [lints] workspace = true";
        out.push(Violation::plain("lints", &manifest.path, 1, message));
    }
    for (name, value) in KINDS.iter().flat_map(|kind| manifest.dependencies(kind)) {
        if !is_inherited(Some(value)) {
            let message = format!("{name}: write its version in [workspace.dependencies]");
            out.push(Violation::plain("dependency-version", &manifest.path, 1, message));
        }
    }
}

/// A dependency is named in the crate's sources, and outside its tests unless it is for tests.
fn check_are_used(tree: &Tree, manifest: &Manifest, out: &mut Vec<Violation>) {
    let (mut product, mut tests) = (BTreeSet::new(), BTreeSet::new());
    for source in tree.under(manifest.dir()) {
        for (ident, line) in source.idents() {
            if source.is_test_line(line) { &mut tests } else { &mut product }.insert(ident);
        }
    }
    for kind in KINDS {
        for (name, _) in manifest.dependencies(kind) {
            let ident = name.replace('-', "_");
            let is_used =
                product.contains(&ident) || (*kind == "dev-dependencies" && tests.contains(&ident));
            if !is_used {
                let message = match tests.contains(&ident) {
                    true => format!("{name}: only tests use it, so it is a dev-dependency"),
                    false => format!("{name}: nothing uses it"),
                };
                out.push(Violation::plain("unused-dependency", &manifest.path, 1, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::tree;
    use super::*;

    const SHARED: &str = "[workspace]\n[workspace.dependencies]\n";
    const MEMBER: &str = "[package]\nname = \"a\"\n[lints]\nworkspace = true\n";

    fn broken(root: &str, member: &str, source: &str) -> Vec<String> {
        let tree =
            tree(&[("Cargo.toml", root), ("a/Cargo.toml", member), ("a/src/lib.rs", source)]);
        check(&tree).into_iter().map(|v| format!("{} {}", v.rule, v.message)).collect()
    }

    #[test]
    fn a_version_comes_with_its_reason_and_without_default_features() {
        let member = format!("{MEMBER}[dependencies]\nserde.workspace = true\n");
        let root = |entry: &str| format!("{SHARED}{entry}\n");
        let of = |entry: &str| broken(&root(entry), &member, "use serde::Serialize;");
        let good = "serde = { version = \"1\", default-features = false } # JSON types";
        assert_eq!(of(good), [""; 0]);
        let expected = ["dependency-reason serde: say why, behind ` # ` on its line"];
        assert_eq!(of("serde = { version = \"1\", default-features = false }"), expected);
        let expected = ["default-features serde: name the features that are needed"];
        assert_eq!(of("serde = { version = \"1\" } # JSON types"), expected);
    }

    #[test]
    fn a_member_inherits_versions_and_lints() {
        let member = "[package]\nname = \"a\"\n[dev-dependencies]\nserde = \"1\"\n";
        let expected = [
            "lints inherit them: [lints] workspace = true",
            "dependency-version serde: write its version in [workspace.dependencies]",
        ];
        assert_eq!(broken("[workspace]\n", member, "use serde::Serialize;"), expected);
    }

    #[test]
    fn a_workspace_of_its_own_gives_its_own_reasons() {
        let member = "[package]\nname = \"a\"\n[workspace]\n[dependencies]\n\
                      b = { version = \"1\", default-features = false }\n";
        let expected = ["dependency-reason b: say why, behind ` # ` on its line"];
        assert_eq!(broken("[workspace]\n", member, "use b::B;"), expected);
    }

    #[test]
    fn a_bare_cargo_run_has_one_program_to_run() {
        let member = |name: &str| {
            format!(
                "[package]\nname = \"{name}\"\ndefault-run = \"{name}\"\n\
                 [lints]\nworkspace = true\n"
            )
        };
        let of = |second: &str| {
            let (a, root) = (member("a"), "[workspace]\n");
            let files =
                [("Cargo.toml", root), ("a/Cargo.toml", a.as_str()), ("b/Cargo.toml", second)];
            check(&tree(&files)).into_iter().map(|v| v.place).collect::<Vec<_>>()
        };
        assert_eq!(of(MEMBER), [""; 0]);
        assert_eq!(of(&member("b")), ["a/Cargo.toml", "b/Cargo.toml"]);
        assert_eq!(of("[package]\nname = \"b\"\ndefault-run = \"b\"\n[workspace]\n"), [""; 0]);
    }

    #[test]
    fn a_dependency_is_used_by_the_crate_that_asks_for_it() {
        let root =
            format!("{SHARED}b-c = {{ version = \"1\", default-features = false }} # reason\n");
        let member = |kind: &str| format!("{MEMBER}[{kind}]\nb-c.workspace = true\n");
        let of = |kind: &str, source: &str| broken(&root, &member(kind), source);
        let test = "#[cfg(test)]\nmod tests {\n    use b_c::B;\n}\n";
        assert_eq!(of("dependencies", "use b_c::B;"), [""; 0]);
        assert_eq!(of("dev-dependencies", test), [""; 0]);
        let expected = ["unused-dependency b-c: nothing uses it"];
        assert_eq!(of("dependencies", "// b_c is not used"), expected);
        let expected = ["unused-dependency b-c: only tests use it, so it is a dev-dependency"];
        assert_eq!(of("dependencies", test), expected);
        let expected = ["unused-dependency b-c: no crate asks for it"];
        assert_eq!(broken(&root, MEMBER, ""), expected);
    }
}
