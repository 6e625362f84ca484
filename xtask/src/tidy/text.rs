//! Which sources break a rule on what a file may hold?
//!
//! Invariant: code is judged by its tokens, so that no comment or string trips a rule, except the
//! rules on comments and on SQL, which are about those.

use proc_macro2::TokenTree;

use super::Violation;
use crate::tree::{Source, Tree, flatten, named_below};

/// Words that put work off; split so that this file does not hold them.
const DEFERRALS: &[&str] =
    &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("X", "XX"), concat!("HA", "CK")];

/// How an SQL statement starts.
const SQL: &[&str] = &[
    "SELECT ", "INSERT ", "UPDATE ", "DELETE ", "CREATE ", "ALTER ", "DROP ", "PRAGMA ", "BEGIN ",
];

/// The only folder that may hold SQL.
const STORE: &str = "crates/fak/src/store";
/// Tests that speak to the database as somebody else would.
const STORE_TESTS: [&str; 3] = [
    "crates/fak/tests/it/store",
    "crates/fak/tests/it/e2e/crash.rs",
    "crates/fak/tests/it/e2e/ledger.rs",
];

/// Checks every source.
pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    tree.sources.iter().flat_map(check_source).collect()
}

fn check_source(source: &Source) -> Vec<Violation> {
    let mut out = Vec::new();
    let path = source.path.as_str();
    if !source.text.starts_with("//! ") {
        out.push(Violation::plain(
            "opening-doc",
            path,
            1,
            "open with `//!`: what the file answers",
        ));
    }
    if path.ends_with("/mod.rs") {
        out.push(Violation::plain("mod-rs", path, 1, "name it after its folder, beside it"));
    }
    for (index, text) in source.text.lines().enumerate() {
        for word in DEFERRALS.iter().filter(|word| has_word(text, word)) {
            let message = format!("{word}: do it now, or file it");
            out.push(Violation::plain("deferral", path, index + 1, message));
        }
    }
    check_tokens(source, &mut out);
    out
}

/// Whether `text` holds `word` with no letter or digit on either side.
fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        ![before, after].iter().flatten().any(|c| c.is_alphanumeric())
    })
}

fn check_tokens(source: &Source, out: &mut Vec<Violation>) {
    let mut tokens = Vec::new();
    flatten(source.tokens.clone(), &mut |token| tokens.push(token.clone()));
    let mut broken = |rule, line, message: &str| {
        out.push(Violation::plain(rule, &source.path, line, message));
    };
    for module in ["time", "thread"] {
        for (name, line) in named_below(&source.tokens, module) {
            if name.starts_with("sleep") && source.is_test_line(line) {
                broken("test-sleep", line, "wait for the state, or pause the clock and advance it");
            }
        }
    }
    for (index, token) in tokens.iter().enumerate() {
        let line = token.span().start().line;
        let next = tokens.get(index + 1);
        match token {
            TokenTree::Ident(ident) if ident == "todo" && is_punct(next, '!') => {
                broken("unfinished", line, "write the code");
            }
            TokenTree::Punct(punct) if punct.as_char() == '#' && is_ignore(next) => {
                broken("ignored-test", line, "a test that does not run proves nothing");
            }
            TokenTree::Literal(literal) if holds_sql(source, &literal.to_string()) => {
                broken("sql-outside-store", line, "SQL is written in the store only");
            }
            _ => {}
        }
    }
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

/// Whether the token after `#` is `[ignore]` or `[ignore = "..."]`.
fn is_ignore(token: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = token else { return false };
    matches!(group.stream().into_iter().next(), Some(TokenTree::Ident(i)) if i == "ignore")
}

/// Whether a literal of the product, outside the store and its tests, starts as a statement does.
fn holds_sql(source: &Source, literal: &str) -> bool {
    let text = literal.trim_start_matches(['r', 'b', 'c', '#', '"']).trim_start();
    source.path.starts_with("crates/")
        && !STORE_TESTS.iter().any(|tests| source.path.starts_with(tests))
        && source.below(STORE).is_none()
        && SQL.iter().any(|verb| text.starts_with(verb))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{names, tree};
    use super::*;

    fn broken(path: &str, body: &str) -> Vec<String> {
        let text = format!("//! Doc.\n{body}\n");
        check(&tree(&[(path, &text)])).iter().map(|v| v.rule.to_owned()).collect()
    }

    #[test]
    fn a_file_opens_with_its_doc() {
        let found = check(&tree(&[("a.rs", "// Doc.\n"), ("b.rs", "//! Doc.\n")]));
        assert_eq!(names(&found), ["opening-doc a.rs"]);
    }

    #[test]
    fn no_file_is_called_mod() {
        assert_eq!(broken("a/mod.rs", ""), ["mod-rs"]);
        assert_eq!(broken("a/model.rs", ""), [""; 0]);
    }

    #[test]
    fn nothing_is_put_off() {
        let note = concat!("// TO", "DO: later");
        assert_eq!(broken("a.rs", note), ["deferral"]);
        assert_eq!(broken("a.rs", "fn f() { todo!() }"), ["unfinished"]);
        assert_eq!(broken("a.rs", "// todo!() is not finished"), [""; 0]);
    }

    #[test]
    fn no_test_is_ignored() {
        assert_eq!(broken("a.rs", "#[test]\n#[ignore = \"slow\"]\nfn f() {}"), ["ignored-test"]);
        assert_eq!(broken("a.rs", "fn ignore() { ignore() }"), [""; 0]);
    }

    #[test]
    fn no_test_sleeps() {
        let call = "async fn f() { tokio::time::sleep(d).await }";
        assert_eq!(broken("a.rs", &format!("#[cfg(test)] mod t {{ {call} }}")), ["test-sleep"]);
        assert_eq!(broken("a/tests/it/b.rs", call), ["test-sleep"]);
        assert_eq!(broken("a.rs", call), [""; 0]);
        assert_eq!(broken("a/tests/it/b.rs", "use tokio::time::{Instant, sleep};"), ["test-sleep"]);
        // A word of the domain too.
        assert_eq!(broken("a/tests/it/b.rs", "fn f() { control::sleep(1); a.sleep(1) }"), [""; 0]);
    }

    #[test]
    fn sql_is_written_in_the_store_only() {
        let sql = "const Q: &str = \"SELECT seq FROM witness\";";
        assert_eq!(broken("crates/fak/src/cli.rs", sql), ["sql-outside-store"]);
        assert_eq!(broken("crates/fak/src/cli.rs", "const Q: &str = \"SELECTED\";"), [""; 0]);
        assert_eq!(broken("crates/fak/src/store/ledger.rs", sql), [""; 0]);
    }
}
