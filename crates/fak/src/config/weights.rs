//! The table `[weights]` of a settings' file.

use serde::{Deserialize, Serialize};

use super::faults::Error;

/// What the file says of weights.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct RawWeights {
    /// `off` or `version`: whether every request's salt carries the weight version.
    pub salt: Option<String>,
}

impl RawWeights {
    pub(super) fn carries_version(&self) -> Result<bool, Error> {
        match self.salt.as_deref() {
            None | Some("off") => Ok(false),
            Some("version") => Ok(true),
            Some(other) => {
                let (field, value) = ("weights.salt", other.to_owned());
                Err(Error::Value { field, value, right: "off or version" })
            }
        }
    }
}
