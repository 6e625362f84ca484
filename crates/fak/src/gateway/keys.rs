//! Who may send requests, and as whom.
//!
//! Invariant: how long a comparison takes says nothing of the keys; a key is kept as a digest and
//! never sent anywhere.

use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest as _, Sha256};

use super::error::Problem;
use crate::engine::Secret;

/// An API key of the data plane.
#[derive(Clone, Debug)]
pub struct Key {
    /// The key.
    pub secret: Secret,
    /// Whose cache its requests use, where tenants are kept apart; its own where none is named.
    pub tenant: Option<String>,
    /// Who vouches for the tenant.
    pub authority: String,
}

/// Who sends a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) tenant: Arc<str>,
    pub(super) authority: Arc<str>,
}

#[derive(Debug)]
struct Known {
    digest: [u8; 32],
    caller: Caller,
}

/// The keys that are taken; where there are none, none is asked for.
#[derive(Debug, Default)]
pub(super) struct Keys(Vec<Known>);

impl Keys {
    pub(super) fn new(keys: Vec<Key>) -> Self {
        let known = |(number, key): (usize, Key)| {
            let digest = digest(key.secret.expose());
            // Nothing of the key may reach a salt, so a key without a tenant is one by its place in
            // the list.
            let tenant = key.tenant.unwrap_or_else(|| format!("key {number}"));
            let caller = Caller { tenant: tenant.into(), authority: key.authority.into() };
            Known { digest, caller }
        };
        Self(keys.into_iter().enumerate().map(known).collect())
    }

    /// Who sends a request; nobody where no key is asked for.
    pub(super) fn caller(&self, headers: &HeaderMap) -> Result<Option<Caller>, Problem> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let bearer = headers.get(AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
        });
        let plain = || headers.get("x-api-key").and_then(|value| value.to_str().ok());
        let given = digest(bearer.or_else(plain).ok_or(Problem::Key)?);
        // Every key is compared, whichever matches.
        let matching = self.0.iter().fold(None, |found, known| {
            if is_same(&known.digest, &given) { Some(&known.caller) } else { found }
        });
        matching.map(|caller| Some(caller.clone())).ok_or(Problem::Key)
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

fn is_same(one: &[u8; 32], other: &[u8; 32]) -> bool {
    one.iter().zip(other).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn a_key_names_its_tenant() {
        let key = |text: &str, tenant: Option<&str>| Key {
            secret: Secret::new(text.to_owned()),
            tenant: tenant.map(str::to_owned),
            authority: "here".to_owned(),
        };
        let keys = Keys::new(vec![key("one", Some("a")), key("two", None)]);
        let tenant = |name: &'static str, value: &'static str| {
            let headers = HeaderMap::from_iter([(
                name.parse().expect("a name"),
                HeaderValue::from_static(value),
            )]);
            let caller = keys.caller(&headers)?.expect("a key is asked for");
            assert_eq!(&*caller.authority, "here");
            Ok(caller.tenant.to_string())
        };
        assert_eq!(tenant("authorization", "Bearer one"), Ok("a".into()));
        assert_eq!(tenant("authorization", "bearer two"), Ok("key 1".into()));
        assert_eq!(tenant("x-api-key", "one"), Ok("a".into()));
        for wrong in ["Bearer on", "Bearer onee", "Basic one", "one", ""] {
            assert_eq!(tenant("authorization", wrong), Err(Problem::Key), "{wrong:?}");
        }
        assert_eq!(Keys::default().caller(&HeaderMap::new()), Ok(None));
    }
}
