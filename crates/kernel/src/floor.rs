//! May this tool be called? The capability floor: an allow-list that denies what it does not name.
//!
//! Invariant: a tool is allowed only if the floor names it or a prefix of it, and does not deny it.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

/// Longest name of a tool, and longest prefix, in bytes.
pub const TOOL_BYTES_MAX: usize = 256;
/// Longest named reason, in bytes.
pub const REASON_BYTES_MAX: usize = 64;

const DEFAULT_DENY: &str = "DEFAULT_DENY";
const POLICY_BLOCK: &str = "POLICY_BLOCK";

/// A floor as its file writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Tools allowed by name.
    pub allow: Vec<String>,
    /// Tools allowed by how their name begins.
    pub allow_prefix: Vec<String>,
    /// Tools denied by name, each with its reason: `POLICY_BLOCK` or a named one.
    pub deny: Vec<(String, String)>,
}

/// Why a call was denied. The set is closed: two codes, and the names that a floor declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenyReason<'a> {
    /// The floor does not name the tool.
    Default,
    /// The floor denies it.
    Policy,
    /// The floor denies it, for this reason: upper snake case.
    Named(&'a str),
}

impl<'a> DenyReason<'a> {
    fn of(word: &'a str) -> Self {
        match word {
            DEFAULT_DENY => Self::Default,
            POLICY_BLOCK => Self::Policy,
            name => Self::Named(name),
        }
    }

    /// The code.
    #[must_use]
    pub const fn as_str(self) -> &'a str {
        match self {
            Self::Default => DEFAULT_DENY,
            Self::Policy => POLICY_BLOCK,
            Self::Named(name) => name,
        }
    }
}

impl fmt::Display for DenyReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the floor says of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision<'a> {
    /// It may be made.
    Allow,
    /// It may not.
    Deny(DenyReason<'a>),
}

/// Why rules make no floor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FloorError {
    /// An empty name, or an empty prefix, which would allow everything.
    Empty {
        /// `allow`, `allow_prefix` or `deny`.
        field: &'static str,
    },
    /// A name or prefix over [`TOOL_BYTES_MAX`].
    TooLong {
        /// `allow`, `allow_prefix` or `deny`.
        field: &'static str,
        /// The name.
        value: String,
    },
    /// A tool denied twice, so that its reason is not one.
    DeniedTwice {
        /// The tool.
        tool: String,
    },
    /// A reason that is empty, over [`REASON_BYTES_MAX`], or not upper snake case.
    Reason {
        /// The tool that it is for.
        tool: String,
        /// The reason.
        value: String,
    },
}

impl fmt::Display for FloorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty { field } => write!(f, "{field}: an empty name is not allowed"),
            Self::TooLong { field, value } => {
                write!(f, "{field}: {value:?} is longer than {TOOL_BYTES_MAX} bytes")
            }
            Self::DeniedTwice { tool } => write!(f, "deny: {tool:?} is named twice"),
            Self::Reason { tool, value } => write!(
                f,
                "deny: the reason {value:?} of {tool:?} is not upper snake case \
                 of 1 to {REASON_BYTES_MAX} bytes"
            ),
        }
    }
}

impl core::error::Error for FloorError {}

/// A checked floor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Floor {
    allows_all: bool,
    allow: BTreeSet<String>,
    allow_prefix: Vec<String>,
    deny: BTreeMap<String, String>,
}

impl Floor {
    /// The floor that `rules` describe. Without any rule it denies every tool.
    ///
    /// # Errors
    ///
    /// On the first name, prefix or reason that is not well formed.
    pub fn new(rules: Rules) -> Result<Self, FloorError> {
        for name in &rules.allow {
            check_name("allow", name)?;
        }
        for prefix in &rules.allow_prefix {
            check_name("allow_prefix", prefix)?;
        }
        let mut deny = BTreeMap::new();
        for (tool, reason) in rules.deny {
            check_name("deny", &tool)?;
            if !is_reason(&reason) {
                return Err(FloorError::Reason { tool, value: reason });
            }
            if deny.contains_key(&tool) {
                return Err(FloorError::DeniedTwice { tool });
            }
            deny.insert(tool, reason);
        }
        let allow = rules.allow.into_iter().collect();
        Ok(Self { allows_all: false, allow, allow_prefix: rules.allow_prefix, deny })
    }

    /// No floor: every tool is allowed. Whoever runs under it has to say so.
    #[must_use]
    pub const fn allow_all() -> Self {
        Self {
            allows_all: true,
            allow: BTreeSet::new(),
            allow_prefix: Vec::new(),
            deny: BTreeMap::new(),
        }
    }

    /// Whether this is [`Floor::allow_all`].
    #[must_use]
    pub const fn allows_all(&self) -> bool {
        self.allows_all
    }

    /// Whether `tool` may be called. Names are compared byte for byte; a denial outweighs every
    /// allowance.
    #[must_use]
    pub fn decide(&self, tool: &str) -> Decision<'_> {
        if let Some(reason) = self.deny.get(tool) {
            return Decision::Deny(DenyReason::of(reason));
        }
        let allowed = self.allows_all
            || self.allow.contains(tool)
            || self.allow_prefix.iter().any(|prefix| tool.starts_with(prefix.as_str()));
        if allowed { Decision::Allow } else { Decision::Deny(DenyReason::Default) }
    }
}

fn check_name(field: &'static str, name: &str) -> Result<(), FloorError> {
    if name.is_empty() {
        return Err(FloorError::Empty { field });
    }
    if name.len() > TOOL_BYTES_MAX {
        return Err(FloorError::TooLong { field, value: name.to_string() });
    }
    Ok(())
}

/// Upper snake case: letters first, then letters, digits and single underscores between them.
fn is_reason(word: &str) -> bool {
    let starts = word.starts_with(|c: char| c.is_ascii_uppercase());
    let holds = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let separated = !word.ends_with('_') && !word.contains("__");
    starts && separated && word.chars().all(holds) && word.len() <= REASON_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(allow: &[&str], allow_prefix: &[&str], deny: &[(&str, &str)]) -> Rules {
        let owned = |words: &[&str]| words.iter().map(ToString::to_string).collect();
        Rules {
            allow: owned(allow),
            allow_prefix: owned(allow_prefix),
            deny: deny.iter().map(|(tool, why)| (tool.to_string(), why.to_string())).collect(),
        }
    }

    fn code(floor: &Floor, tool: &str) -> String {
        match floor.decide(tool) {
            Decision::Allow => "allow".to_string(),
            Decision::Deny(reason) => reason.to_string(),
        }
    }

    #[test]
    fn what_is_not_named_is_denied_and_a_denial_wins() {
        let denied = [
            ("fs.write", "POLICY_BLOCK"),
            ("search", "SELF_MODIFY"),
            ("web.open", "EGRESS_2"),
            ("odd", "DEFAULT_DENY"),
        ];
        let floor = Floor::new(rules(&["search", "read"], &["fs.", "web."], &denied))
            .expect("well-formed rules");
        for (tool, expected) in [
            ("read", "allow"),
            ("fs.read", "allow"),
            ("fs.", "allow"),
            ("fs.write", "POLICY_BLOCK"),
            ("fs.writer", "allow"),
            ("search", "SELF_MODIFY"),
            ("web.open", "EGRESS_2"),
            ("odd", "DEFAULT_DENY"),
            ("fs", "DEFAULT_DENY"),
            ("read2", "DEFAULT_DENY"),
            ("READ", "DEFAULT_DENY"),
            (" read", "DEFAULT_DENY"),
            ("xfs.read", "DEFAULT_DENY"),
            ("", "DEFAULT_DENY"),
        ] {
            assert_eq!(code(&floor, tool), expected, "{tool:?}");
        }
        assert!(!floor.allows_all());
        assert_eq!(floor.decide("search"), Decision::Deny(DenyReason::Named("SELF_MODIFY")));
        assert_eq!(floor.decide("fs.write"), Decision::Deny(DenyReason::Policy));
        assert_eq!(floor.decide("odd"), Decision::Deny(DenyReason::Default));
    }

    #[test]
    fn no_rules_deny_everything_and_no_floor_allows_everything() {
        let none = Floor::new(Rules::default()).expect("no rules are well formed");
        for tool in ["read", "", "anything at all"] {
            assert_eq!(code(&none, tool), "DEFAULT_DENY");
            assert_eq!(code(&Floor::allow_all(), tool), "allow");
        }
        assert!(Floor::allow_all().allows_all() && !none.allows_all());
    }

    #[test]
    fn what_is_not_well_formed_is_named() {
        let long = "x".repeat(TOOL_BYTES_MAX + 1);
        let long_reason = "X".repeat(REASON_BYTES_MAX + 1);
        let fails = |rules: Rules| Floor::new(rules).expect_err("not well formed").to_string();
        assert_eq!(fails(rules(&["a", ""], &[], &[])), "allow: an empty name is not allowed");
        assert_eq!(fails(rules(&[], &[""], &[])), "allow_prefix: an empty name is not allowed");
        assert_eq!(fails(rules(&[], &[], &[("", "A")])), "deny: an empty name is not allowed");
        for (field, rules) in [
            ("allow", rules(&[&long], &[], &[])),
            ("allow_prefix", rules(&[], &[&long], &[])),
            ("deny", rules(&[], &[], &[(&long, "A")])),
        ] {
            let message = fails(rules);
            assert!(message.starts_with(&alloc::format!("{field}: \"xxx")), "{message}");
            assert!(message.ends_with("is longer than 256 bytes"), "{message}");
        }
        let bad = ["", "a", "A b", "_A", "A_", "A__B", "1A", "É", "A-B", long_reason.as_str()];
        for reason in bad {
            let message = fails(rules(&[], &[], &[("tool", reason)]));
            let expected = alloc::format!("deny: the reason {reason:?} of \"tool\" is not upper");
            assert!(message.starts_with(&expected), "{message}");
        }
        let twice = rules(&[], &[], &[("tool", "A"), ("tool", "B")]);
        assert_eq!(fails(twice), "deny: \"tool\" is named twice");
    }

    #[test]
    fn the_limits_themselves_are_allowed() {
        let (tool, reason) = ("x".repeat(TOOL_BYTES_MAX), "X".repeat(REASON_BYTES_MAX));
        let rules = rules(&[], &[&tool], &[("a", &reason), ("b", "A"), ("c", "A1_B2")]);
        assert!(Floor::new(rules).is_ok());
    }
}
