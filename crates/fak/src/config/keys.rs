//! API keys of the data plane: whose they are, and where each secret is.
//!
//! Invariant: no secret stands in the settings' file or in a message.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::faults::{Error, Found};
use super::{Lookup, names};
use crate::engine::Secret;

/// Bytes of a secret.
const SECRET_BYTES_MAX: usize = 4096;
/// Keys of one gateway.
const KEYS_MAX: usize = 1024;
/// Bytes of a tenant's name, and of an authority's.
const NAME_BYTES_MAX: usize = 256;
/// Who vouches for a tenant where nobody is named: this list.
const AUTHORITY: &str = "fak";

/// One key as written.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct RawKey {
    /// Whose requests it shows.
    pub tenant: String,
    /// Who vouches for the tenant; `fak` where nobody is named.
    pub authority: Option<String>,
    /// The environment variable that holds the secret.
    pub env: Option<String>,
    /// The file that holds it.
    pub file: Option<PathBuf>,
}

/// One key, checked.
#[derive(Clone, Debug)]
pub struct KeySpec {
    /// What a client has to show.
    pub secret: Secret,
    /// Whose cache its requests use, where tenants are kept apart.
    pub tenant: String,
    /// Who vouches for the tenant.
    pub authority: String,
    /// Where the secret is.
    pub place: Place,
}

/// Where a secret is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In an environment variable.
    Environment(String),
    /// In a file.
    File(PathBuf),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
        }
    }
}

/// Checks keys and reads their secrets. Where tenants are to be kept apart, there has to be one.
pub(super) fn checked(
    written: &[RawKey],
    isolation: bool,
    lookup: Lookup<'_>,
    (admin, engine): (Option<&Secret>, Option<&Secret>),
    f: &mut Found<'_>,
) -> Vec<KeySpec> {
    if written.len() > KEYS_MAX {
        let value = written.len() as u64;
        f.wrong(Error::Range { field: "key", value, range: 0..=KEYS_MAX as u64 });
        return Vec::new();
    }
    if isolation && written.is_empty() && !f.is_file_faulty() {
        f.wrong(Error::NoKey);
    }
    let mut keys: Vec<KeySpec> = Vec::with_capacity(written.len());
    for (number, raw) in written.iter().enumerate() {
        let place = format!("key.{number}");
        let Some(key) = f.kept_at(&place, raw.check(lookup)) else { continue };
        let is_same = |other: &Secret| *other == key.secret;
        let of_tenant = keys.iter().find(|other| is_same(&other.secret));
        let of_fak = [(admin, names::ADMIN_KEY), (engine, names::API_KEY)];
        let whose = of_tenant.map(|other| format!("tenant {:?}", other.tenant)).or_else(|| {
            let same = of_fak.into_iter().find(|(other, _)| other.is_some_and(is_same));
            same.map(|(_, name)| name.to_owned())
        });
        if let Some(whose) = whose {
            let problem = format!("holds the secret of {whose} too");
            let (tenant, secret) = (key.tenant, key.place.to_string());
            f.wrong_at(&place, Error::Key { tenant, place: secret, problem });
            continue;
        }
        keys.push(key);
    }
    keys
}

impl RawKey {
    fn check(&self, lookup: Lookup<'_>) -> Result<KeySpec, Error> {
        let authority = self.authority.clone().unwrap_or_else(|| AUTHORITY.to_owned());
        for (field, name) in [("key.tenant", &self.tenant), ("key.authority", &authority)] {
            if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
                let right = "a name of 1 to 256 bytes";
                return Err(Error::Value { field, value: name.clone(), right });
            }
        }
        let place = match (&self.env, &self.file) {
            (Some(name), None) => Place::Environment(name.clone()),
            (None, Some(path)) => Place::File(path.clone()),
            _ => {
                let problem = "have to name one place of the secret, and only one";
                return Err(self.bad("env and file", problem));
            }
        };
        let text = match &place {
            Place::Environment(name) => {
                let value = lookup(name).ok_or_else(|| self.bad(&place, "is not set"))?;
                value.into_string().unwrap_or_default()
            }
            Place::File(path) => read(path)?,
        };
        let is_plain = (1..=SECRET_BYTES_MAX).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_plain {
            let problem =
                "does not hold 1 to 4096 printable ASCII characters, without spaces, alone";
            return Err(self.bad(&place, problem));
        }
        Ok(KeySpec { secret: Secret::new(text), tenant: self.tenant.clone(), authority, place })
    }

    fn bad(&self, place: impl ToString, problem: &str) -> Error {
        let (tenant, place) = (self.tenant.clone(), place.to_string());
        Error::Key { tenant, place, problem: problem.to_owned() }
    }
}

/// A file's text but for the end of its last line; empty where it is none of a secret.
fn read(path: &Path) -> Result<String, Error> {
    let shown = || path.display().to_string();
    let failed = |source| Error::File { path: shown(), source };
    let mut bytes = Vec::new();
    let limit = SECRET_BYTES_MAX as u64 + 3;
    File::open(path).map_err(failed)?.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    let text = String::from_utf8(bytes).unwrap_or_default();
    let line = text.strip_suffix('\n').unwrap_or(&text);
    Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::source::Source;
    use super::*;
    use std::collections::BTreeMap;
    use std::ffi::OsString;

    fn key(tenant: &str, env: Option<&str>, file: Option<PathBuf>) -> RawKey {
        let env = env.map(str::to_owned);
        RawKey { tenant: tenant.to_owned(), authority: None, env, file }
    }

    fn check(keys: &[RawKey]) -> Result<Vec<KeySpec>, String> {
        let lookup = |name: &str| match name {
            "A" => Some(OsString::from("sk-hidden-a")),
            "ADMIN" => Some(OsString::from("sk-hidden-admin")),
            "AGAIN" => Some(OsString::from("sk-hidden-a")),
            "BAD" => Some(OsString::from("sk hidden")),
            "EMPTY" => Some(OsString::new()),
            _ => None,
        };
        let source = Source::default();
        let mut found = Found::new(&source, BTreeMap::new());
        let admin = Secret::new("sk-hidden-admin".to_owned());
        let keys = checked(keys, false, &lookup, (Some(&admin), None), &mut found);
        found.end().map(|_| keys).map_err(|faults| faults.to_string())
    }

    #[test]
    fn a_secret_comes_from_one_place_and_is_in_no_message() {
        let folder = std::env::temp_dir().join(format!("fak-keys-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("secret");
        std::fs::write(&file, "sk-hidden-b\n").expect("a file");
        let keys = check(&[key("a", Some("A"), None), key("b", None, Some(file.clone()))]);
        let keys = keys.expect("both are right");
        assert_eq!(keys[0].secret.expose(), "sk-hidden-a");
        assert_eq!(keys[1].secret.expose(), "sk-hidden-b");
        assert_eq!((keys[0].authority.as_str(), keys[0].tenant.as_str()), ("fak", "a"));
        std::fs::write(&file, "sk-hidden\nsecond line").expect("a file");
        let two = |env, file| key("t", env, file);
        for (keys, told) in [
            (vec![two(None, None)], "only one"),
            (vec![two(Some("A"), Some(file.clone()))], "only one"),
            (vec![two(Some("NONE"), None)], "environment variable NONE is not set"),
            (vec![two(Some("ADMIN"), None)], "ADMIN holds the secret of FAK_ADMIN_KEY too"),
            (vec![two(Some("BAD"), None)], "BAD does not hold"),
            (vec![two(Some("EMPTY"), None)], "EMPTY does not hold"),
            (vec![two(None, Some(file.clone()))], "secret does not hold"),
            (vec![two(None, Some(folder.join("none")))], "cannot be read"),
            (vec![key("", Some("A"), None)], "key.tenant"),
            (vec![key("a", Some("A"), None), two(Some("AGAIN"), None)], "of tenant \"a\" too"),
        ] {
            let error = check(&keys).expect_err(told);
            assert!(error.contains(told) && !error.contains("hidden"), "{told}: {error}");
        }
        std::fs::remove_dir_all(&folder).expect("its own folder");
    }
}
