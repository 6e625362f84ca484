//! Which parts of the product reach for something that another part owns?
//!
//! Invariant: tests are free to; the product is not, and each ban names what to use instead.

use super::Violation;
use super::imports::{PRODUCT, module_path};
use crate::tree::{Tree, named_below};

/// A name that only its owner may use.
struct Ban {
    /// The path's last two names.
    base: &'static str,
    name: &'static str,
    /// The part that owns it; the crate's root where it is empty.
    owner: &'static str,
    instead: &'static str,
}

const BANS: &[Ban] = &[
    Ban { base: "tokio", name: "spawn", owner: "runtime", instead: "runtime::TaskGroup" },
    Ban { base: "task", name: "spawn", owner: "runtime", instead: "runtime::TaskGroup" },
    Ban { base: "thread", name: "spawn", owner: "runtime", instead: "runtime::TaskGroup" },
    Ban { base: "std", name: "env", owner: "config", instead: "a setting of config" },
    Ban { base: "process", name: "exit", owner: "", instead: "an exit code that main returns" },
    Ban { base: "mpsc", name: "unbounded_channel", owner: "", instead: "a channel with a bound" },
];

/// Checks every part of the product.
pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let mut out = Vec::new();
    for source in tree.under(PRODUCT) {
        let part = module_path(source).into_iter().next().unwrap_or_default();
        for Ban { base, name, instead, .. } in BANS.iter().filter(|ban| ban.owner != part) {
            for (found, line) in named_below(&source.tokens, base) {
                if found == *name && !source.is_test_line(line) {
                    let message = format!("{base}::{name}: use {instead}");
                    out.push(Violation::plain("ban", &source.path, line, message));
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::testing::tree;
    use super::*;

    fn broken(path: &str, text: &str) -> Vec<String> {
        check(&tree(&[(path, text)])).into_iter().map(|v| v.message).collect()
    }

    #[test]
    fn only_its_owner_uses_a_banned_name() {
        let spawn = "fn f() { tokio::spawn(g()); }";
        let expected = ["tokio::spawn: use runtime::TaskGroup"];
        assert_eq!(broken("crates/fak/src/engine/client.rs", spawn), expected);
        assert_eq!(broken("crates/fak/src/runtime/task_group.rs", spawn), [""; 0]);
        assert_eq!(broken("crates/sim/src/lib.rs", spawn), [""; 0]);
        let env = "use std::{env, fmt};";
        assert_eq!(broken("crates/fak/src/main.rs", env), ["std::env: use a setting of config"]);
        assert_eq!(broken("crates/fak/src/config.rs", env), [""; 0]);
    }

    #[test]
    fn tests_are_free() {
        let spawn = "#[cfg(test)]\nmod tests {\n    fn f() { tokio::spawn(g()); }\n}\n";
        assert_eq!(broken("crates/fak/src/engine/client.rs", spawn), [""; 0]);
    }
}
