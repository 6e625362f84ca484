//! The repository's sources and manifests, read once for every rule.
//!
//! Invariant: a line counts as test code if and only if it is compiled under `cfg(test)` alone: an
//! item so marked, a file declared by such an item, or a file of an integration test.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::Visit;

/// Folders that hold no source of ours, from the root; hidden ones are left out too.
const SKIPPED: &[&str] = &["fixtures", "fuzz/artifacts", "fuzz/corpus", "fuzz/target", "target"];

/// One Rust file.
pub(crate) struct Source {
    /// Path from the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) tokens: TokenStream,
    pub(crate) ast: syn::File,
    /// Lines (from 1) of items under `cfg(test)`, or of the whole file.
    tests: Vec<RangeInclusive<usize>>,
}

/// One `Cargo.toml`.
pub(crate) struct Manifest {
    /// Path from the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) table: toml::Table,
}

/// Everything the rules look at.
#[derive(Default)]
pub(crate) struct Tree {
    pub(crate) sources: Vec<Source>,
    pub(crate) manifests: Vec<Manifest>,
}

impl Tree {
    /// Reads the tree under `root`.
    pub(crate) fn load(root: &Path) -> Result<Self> {
        let mut files = Vec::new();
        collect(root, "", &mut files)?;
        files.sort();
        Self::from_files(files)
    }

    /// A tree of `(path, text)` pairs.
    pub(crate) fn from_files(files: Vec<(String, String)>) -> Result<Self> {
        let mut tree = Self::default();
        for (path, text) in files {
            if path.ends_with(".rs") {
                tree.sources.push(Source::parse(path, text)?);
            } else {
                let table = text.parse().with_context(|| format!("{path} is not TOML"))?;
                tree.manifests.push(Manifest { path, text, table });
            }
        }
        tree.mark_test_files();
        Ok(tree)
    }

    /// The sources below `dir`, a path from the root without a final `/`.
    pub(crate) fn under<'a>(&'a self, dir: &'a str) -> impl Iterator<Item = &'a Source> {
        self.sources.iter().filter(move |s| s.below(dir).is_some())
    }

    /// Files that `#[cfg(test)] mod name;` declares are test code from end to end.
    fn mark_test_files(&mut self) {
        let declared: Vec<String> = self.sources.iter().flat_map(Source::test_modules).collect();
        for source in &mut self.sources {
            let is_test = declared.iter().any(|stem| {
                source
                    .path
                    .strip_prefix(stem.as_str())
                    .is_some_and(|r| matches!(r.chars().next(), Some('.' | '/')))
            });
            if is_test || source.path.split('/').any(|part| part == "tests") {
                source.tests = vec![1..=usize::MAX];
            }
        }
    }
}

impl Manifest {
    /// Folder of the crate, from the root; empty for the root itself.
    pub(crate) fn dir(&self) -> &str {
        self.path.strip_suffix("Cargo.toml").expect("only manifests are read").trim_end_matches('/')
    }

    /// The package's name, absent for a manifest that is only a workspace.
    pub(crate) fn package(&self) -> Option<&str> {
        self.table.get("package")?.get("name")?.as_str()
    }

    /// Names and values of one kind of dependency, such as `dev-dependencies`.
    pub(crate) fn dependencies(&self, kind: &str) -> Vec<(&str, &toml::Value)> {
        let table = self.table.get(kind).and_then(toml::Value::as_table);
        table.into_iter().flatten().map(|(name, value)| (name.as_str(), value)).collect()
    }
}

impl Source {
    fn parse(path: String, text: String) -> Result<Self> {
        let place = || format!("{path} does not parse");
        let tokens: TokenStream = text.parse().map_err(|error| anyhow!("{}: {error}", place()))?;
        let ast: syn::File = syn::parse2(tokens.clone()).with_context(place)?;
        let mut finder = TestItems::default();
        finder.visit_file(&ast);
        Ok(Self { path, text, tokens, ast, tests: finder.lines })
    }

    /// The rest of the path below `dir`, if the file lies there.
    pub(crate) fn below(&self, dir: &str) -> Option<&str> {
        if dir.is_empty() {
            return Some(&self.path);
        }
        self.path.strip_prefix(dir)?.strip_prefix('/')
    }

    /// Whether `line` (from 1) is test code.
    pub(crate) fn is_test_line(&self, line: usize) -> bool {
        self.tests.iter().any(|range| range.contains(&line))
    }

    /// Every identifier with its line, macro bodies included, comments and literals not.
    pub(crate) fn idents(&self) -> Vec<(String, usize)> {
        let mut out = Vec::new();
        flatten(self.tokens.clone(), &mut |token| {
            if let TokenTree::Ident(ident) = token {
                out.push((ident.to_string(), ident.span().start().line));
            }
        });
        out
    }

    /// Path stems (`a/b` for `a/b.rs` and `a/b/`) of the modules declared for tests only.
    fn test_modules(&self) -> Vec<String> {
        let (dir, file) = self.path.rsplit_once('/').unwrap_or(("", &self.path));
        let base = match file.strip_suffix(".rs").expect("only Rust files are read") {
            "lib" | "main" => dir.to_owned(),
            stem => format!("{dir}/{stem}"),
        };
        let is_test_mod = |item: &syn::Item| match item {
            syn::Item::Mod(m) if m.content.is_none() && m.attrs.iter().any(is_test_attribute) => {
                Some(format!("{base}/{}", m.ident))
            }
            _ => None,
        };
        self.ast.items.iter().filter_map(is_test_mod).collect()
    }
}

/// Calls `see` for every token, groups opened.
pub(crate) fn flatten(tokens: TokenStream, see: &mut impl FnMut(&TokenTree)) {
    for token in tokens {
        see(&token);
        if let TokenTree::Group(group) = token {
            flatten(group.stream(), see);
        }
    }
}

/// What each `base::name` or `base::{name, ..}` in `tokens` names, with its line; `*` for a glob.
pub(crate) fn named_below(tokens: &TokenStream, base: &str) -> Vec<(String, usize)> {
    let mut out = Vec::new();
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    for (index, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => out.extend(named_below(&group.stream(), base)),
            TokenTree::Ident(ident) if ident == base => {
                out.extend(after_colons(&tokens[index + 1..]));
            }
            _ => {}
        }
    }
    out
}

/// The first names behind a `::` that `tokens` open with; none if they do not.
pub(crate) fn after_colons(tokens: &[TokenTree]) -> Vec<(String, usize)> {
    let is_colon = |t: &TokenTree| matches!(t, TokenTree::Punct(p) if p.as_char() == ':');
    let [first, second, target, ..] = tokens else { return Vec::new() };
    if !(is_colon(first) && is_colon(second)) {
        return Vec::new();
    }
    let name = |token: &TokenTree| match token {
        TokenTree::Ident(_) => Some((token.to_string(), token.span().start().line)),
        TokenTree::Punct(p) if p.as_char() == '*' => Some(("*".into(), p.span().start().line)),
        _ => None,
    };
    let TokenTree::Group(group) = target else { return name(target).into_iter().collect() };
    let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
    let elements = tokens.split(|t| matches!(t, TokenTree::Punct(p) if p.as_char() == ','));
    elements.filter_map(|element| name(element.first()?)).collect()
}

/// Finds the line ranges of items under `cfg(test)` or `#[test]`.
#[derive(Default)]
struct TestItems {
    lines: Vec<RangeInclusive<usize>>,
}

impl Visit<'_> for TestItems {
    fn visit_item(&mut self, item: &syn::Item) {
        let attributes = match item {
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            syn::Item::Enum(item) => &item.attrs,
            syn::Item::Const(item) => &item.attrs,
            syn::Item::Static(item) => &item.attrs,
            syn::Item::Trait(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Macro(item) => &item.attrs,
            _ => return,
        };
        if attributes.iter().any(is_test_attribute) {
            let span = item.span();
            self.lines.push(span.start().line..=span.end().line);
        } else {
            syn::visit::visit_item(self, item);
        }
    }
}

/// `#[cfg(test)]` (alone, or in `all` or `any`), `#[test]`, `#[tokio::test]`.
fn is_test_attribute(attribute: &syn::Attribute) -> bool {
    if attribute.path().is_ident("cfg") {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let (mut tests, mut negated) = (false, false);
        flatten(list.tokens.clone(), &mut |token| {
            if let TokenTree::Ident(ident) = token {
                tests |= ident == "test";
                negated |= ident == "not";
            }
        });
        return tests && !negated;
    }
    attribute.path().segments.last().is_some_and(|segment| segment.ident == "test")
}

/// Gathers every Rust file and manifest below `root`, with its path from there.
fn collect(root: &Path, below: &str, out: &mut Vec<(String, String)>) -> Result<()> {
    let dir = root.join(below);
    let entries = fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if below.is_empty() { name.clone() } else { format!("{below}/{name}") };
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if !name.starts_with('.') && !SKIPPED.contains(&path.as_str()) {
                collect(root, &path, out)?;
            }
        } else if kind.is_file() && (name.ends_with(".rs") || name == "Cargo.toml") {
            let text =
                fs::read_to_string(entry.path()).with_context(|| format!("cannot read {path}"))?;
            out.push((path, text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Tree {
        let files = files.iter().map(|(p, t)| ((*p).to_owned(), (*t).to_owned())).collect();
        Tree::from_files(files).expect("well-formed test input")
    }

    #[test]
    fn test_code_is_told_apart_by_line() {
        let text =
            "fn a() {}\n#[cfg(test)]\nmod t {\n    fn b() {}\n}\n#[cfg(not(test))]\nfn c() {}\n";
        let tree = tree(&[("x/src/lib.rs", text)]);
        let tests: Vec<usize> = (1..=7).filter(|&l| tree.sources[0].is_test_line(l)).collect();
        assert_eq!(tests, [2, 3, 4, 5]);
    }

    #[test]
    fn paths_are_followed_through_groups_and_macros() {
        let text = "use std::{time::X, fs}; fn f() { m!(std::net::Y); a::time::b(); std::io::*; }";
        let named: Vec<String> = named_below(&text.parse().expect("tokens"), "std")
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(named, ["time", "fs", "net", "io"]);
    }

    #[test]
    fn a_file_declared_under_cfg_test_is_test_code() {
        let tree = tree(&[
            ("x/src/foo.rs", "mod real;\n#[cfg(test)]\nmod model;\n"),
            ("x/src/foo/model.rs", "fn a() {}\n"),
            ("x/src/foo/model/deep.rs", "fn a() {}\n"),
            ("x/src/foo/real.rs", "fn a() {}\n"),
            ("x/tests/it/main.rs", "fn a() {}\n"),
        ]);
        let tests: Vec<&str> =
            tree.sources.iter().filter(|s| s.is_test_line(1)).map(|s| s.path.as_str()).collect();
        assert_eq!(tests, ["x/src/foo/model.rs", "x/src/foo/model/deep.rs", "x/tests/it/main.rs"]);
    }
}
