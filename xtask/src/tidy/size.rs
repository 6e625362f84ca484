//! Which functions and files are too big to be read at once?
//!
//! Invariant: what is measured is what a reader sees: source lines, comments and blanks included.

use syn::visit::Visit;

use super::Violation;
use crate::tree::{Source, Tree};

/// Lines of a function, from `fn` to its closing brace; tests count too.
const FUNCTION_LINES_MAX: usize = 70;
/// Lines of a file, those under `cfg(test)` left out.
const FILE_LINES_MAX: usize = 600;
/// Parameters of a function, the receiver left out.
const PARAMETERS_MAX: usize = 5;
/// Columns of a line; rustfmt holds code to it, but neither comments nor strings.
const LINE_COLUMNS_MAX: usize = 100;

/// Measures every source.
pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    tree.sources.iter().flat_map(check_source).collect()
}

fn check_source(source: &Source) -> Vec<Violation> {
    let mut functions = Functions { path: &source.path, owner: None, out: Vec::new() };
    functions.visit_file(&source.ast);
    let mut out = functions.out;
    let mut own_lines = 0;
    for (index, text) in source.text.lines().enumerate() {
        let (line, columns) = (index + 1, text.chars().count());
        own_lines += usize::from(!source.is_test_line(line));
        // An address cannot be broken.
        if columns > LINE_COLUMNS_MAX && !text.contains("://") {
            out.push(measured("line-columns", &source.path, line, (columns, LINE_COLUMNS_MAX)));
        }
    }
    if own_lines > FILE_LINES_MAX {
        out.push(measured("file-lines", &source.path, 1, (own_lines, FILE_LINES_MAX)));
    }
    out
}

fn measured(
    rule: &'static str,
    place: &str,
    line: usize,
    (value, limit): (usize, usize),
) -> Violation {
    let message = format!("{value}, at most {limit}");
    Violation { place: place.to_owned(), line, rule, value, message }
}

/// Measures functions as it meets them.
struct Functions<'a> {
    path: &'a str,
    /// The type whose `impl` is being read.
    owner: Option<String>,
    out: Vec<Violation>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &syn::Signature, block: Option<&syn::Block>) {
        let place = match &self.owner {
            Some(owner) => format!("{}::{owner}::{}", self.path, signature.ident),
            None => format!("{}::{}", self.path, signature.ident),
        };
        let start = signature.fn_token.span.start().line;
        if let Some(block) = block {
            let lines = block.brace_token.span.close().end().line - start + 1;
            if lines > FUNCTION_LINES_MAX {
                let sizes = (lines, FUNCTION_LINES_MAX);
                self.out.push(measured("function-lines", &place, start, sizes));
            }
        }
        let is_receiver = |input: &&syn::FnArg| matches!(input, syn::FnArg::Receiver(_));
        let parameters =
            signature.inputs.len() - signature.inputs.iter().filter(is_receiver).count();
        if parameters > PARAMETERS_MAX {
            self.out.push(measured("parameters", &place, start, (parameters, PARAMETERS_MAX)));
        }
    }
}

impl Visit<'_> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &syn::ItemFn) {
        self.measure(&item.sig, Some(&item.block));
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &syn::ItemImpl) {
        let name = match item.self_ty.as_ref() {
            syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
            _ => None,
        };
        let outer = std::mem::replace(&mut self.owner, name);
        syn::visit::visit_item_impl(self, item);
        self.owner = outer;
    }

    fn visit_item_trait(&mut self, item: &syn::ItemTrait) {
        let outer = self.owner.replace(item.ident.to_string());
        syn::visit::visit_item_trait(self, item);
        self.owner = outer;
    }

    fn visit_impl_item_fn(&mut self, item: &syn::ImplItemFn) {
        self.measure(&item.sig, Some(&item.block));
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &syn::TraitItemFn) {
        self.measure(&item.sig, item.default.as_ref());
        syn::visit::visit_trait_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{names, tree};
    use super::*;

    fn broken(text: &str) -> Vec<String> {
        names(&check(&tree(&[("a.rs", text)])))
    }

    #[test]
    fn a_function_has_70_lines_at_most() {
        let of =
            |lines: usize| format!("impl A {{ fn f() {{\n{}}} }}\n", "g();\n".repeat(lines - 2));
        assert_eq!(broken(&of(70)), [""; 0]);
        assert_eq!(broken(&of(71)), ["function-lines a.rs::A::f"]);
    }

    #[test]
    fn a_file_has_600_lines_at_most_without_its_tests() {
        let of = |lines: usize| {
            let test = "#[cfg(test)]\nmod tests {\n    use super::*;\n}\n";
            format!("{}{test}", "use a;\n".repeat(lines))
        };
        assert_eq!(broken(&of(600)), [""; 0]);
        assert_eq!(broken(&of(601)), ["file-lines a.rs"]);
    }

    #[test]
    fn a_function_takes_5_parameters_at_most_beside_its_receiver() {
        let of = |inputs: &str| format!("trait A {{ fn f({inputs}); }}\n");
        assert_eq!(broken(&of("&self, a: A, b: A, c: A, d: A, e: A")), [""; 0]);
        assert_eq!(broken(&of("a: A, b: A, c: A, d: A, e: A, f: A")), ["parameters a.rs::A::f"]);
    }

    #[test]
    fn a_line_has_100_columns_at_most() {
        assert_eq!(broken(&format!("//{}\n", "ü".repeat(98))), [""; 0]);
        assert_eq!(broken(&format!("//{}\n", "ü".repeat(99))), ["line-columns a.rs"]);
        assert_eq!(broken(&format!("// https://{}\n", "a".repeat(99))), [""; 0]);
    }
}
