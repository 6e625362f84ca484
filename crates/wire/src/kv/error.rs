//! Why a payload is not a batch of events.
//! Invariant: every error names the event, the field, what was found and what would be right.

use std::fmt;

/// Where in a batch the decoder stood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the event in its batch; `None` outside the events.
    pub event: Option<u32>,
    /// Name of the field, as the engine spells it.
    pub field: &'static str,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.event {
            Some(index) => write!(f, "event {index}, field {}", self.field),
            None => write!(f, "batch, field {}", self.field),
        }
    }
}

/// A payload that is no batch, or a batch over its [`Limits`](super::Limits). The batch counts as
/// lost as a whole: what came before the fault is not given out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A value of the wrong type or range, or one that contradicts another field.
    #[error("{at}: found {found}, expected {expected}")]
    Unexpected {
        /// Where.
        at: Place,
        /// The value, or its type.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// The payload ended inside a value, or claims more elements than it has bytes.
    #[error("{at}: payload ended, expected {expected}")]
    Truncated {
        /// Where.
        at: Place,
        /// What was still to come.
        expected: &'static str,
    },
    /// More of something than the limits allow.
    #[error("{at}: found {found} {unit}, expected at most {limit}")]
    Limit {
        /// Where.
        at: Place,
        /// How many were claimed.
        found: u64,
        /// Of what.
        unit: &'static str,
        /// The limit.
        limit: u64,
    },
    /// A field given twice in one event.
    #[error("{at}: found it twice, expected once")]
    Duplicate {
        /// Where.
        at: Place,
    },
    /// A field without which the event means nothing.
    #[error("{at}: found nothing, expected {expected}")]
    Missing {
        /// Where.
        at: Place,
        /// What would be right.
        expected: &'static str,
    },
}

impl DecodeError {
    /// Where in the batch the fault lies.
    #[must_use]
    pub fn place(&self) -> Place {
        match self {
            DecodeError::Unexpected { at, .. }
            | DecodeError::Truncated { at, .. }
            | DecodeError::Limit { at, .. }
            | DecodeError::Duplicate { at }
            | DecodeError::Missing { at, .. } => *at,
        }
    }
}
