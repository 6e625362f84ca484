//! Whose turn it is, and what the engine is told of it: a salt and a priority.
//!
//! Invariant: equal identities give equal salts and different ones different salts, whatever their
//! parts hold; a salt tells nothing of its identity to who lacks the key, and no credential is ever
//! mixed in.

use std::fmt::Write as _;

use fak_wire::openai::Request;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use super::secret::Secret;

/// Key of the digest where none is configured. It is public, so a salt then separates tenants, but
/// a reader of the engine's events, where vLLM publishes salts in clear, can test a guess at a
/// tenant's name.
const PUBLIC_KEY: &str = "fak cache salt, public key";

/// Names this construction, so that a later one cannot give the same salts.
const DOMAIN: &str = "fak/cache-salt/1";
/// And that of two salts in one.
const SESSION_DOMAIN: &str = "fak/session-salt/1";
/// And that of weights and a salt in one.
const WEIGHTS_DOMAIN: &str = "fak/weights-salt/1";

/// Whose turn it is. None of the parts is a credential.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Whose cache it is.
    pub tenant: String,
    /// Who vouches for the tenant; two authorities may use the same tenant name.
    pub authority: String,
    /// The model.
    pub family: String,
}

/// Whether tenants are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// Salts come from identities alone; a client's own is dropped.
    On,
    /// A client's salt is passed through.
    Off,
}

/// Writes salts and priorities into request bodies.
#[derive(Clone, Debug)]
pub struct Stamp {
    key: Secret,
    isolation: Isolation,
    priority_scheduling: bool,
}

impl Stamp {
    /// A stamp. Without `key` a public one is used. `priority_scheduling`: the engine was declared
    /// to run `--scheduling-policy priority`; an older one answers a priority with 400 otherwise.
    #[must_use]
    pub fn new(key: Option<Secret>, isolation: Isolation, priority_scheduling: bool) -> Self {
        let key = key.unwrap_or_else(|| Secret::new(PUBLIC_KEY.to_owned()));
        Self { key, isolation, priority_scheduling }
    }

    /// Whether tenants are kept apart.
    #[must_use]
    pub fn isolation(&self) -> Isolation {
        self.isolation
    }

    /// The salt of an identity: 64 hexadecimal digits.
    #[must_use]
    pub fn cache_salt(&self, identity: &Identity) -> String {
        self.digest(&[DOMAIN, &identity.tenant, &identity.authority, &identity.family])
    }

    /// The salt of a request that has one already, in a session that has its own: 64 hexadecimal
    /// digits. vLLM takes 128 characters at most, and no `@`, `/`, `\` or NUL (0.32.0, observed),
    /// so that the two cannot be written one behind the other.
    #[must_use]
    pub fn session_salt(&self, request: &str, session: &str) -> String {
        self.digest(&[SESSION_DOMAIN, request, session])
    }

    /// The salt of a request on a worker with these weights, whatever salt the request has: 64
    /// hexadecimal digits. `epoch`: what tells these weights from others of the same version.
    #[must_use]
    pub fn weights_salt(
        &self,
        version: Option<&str>,
        epoch: Option<u64>,
        salt: Option<&str>,
    ) -> String {
        // None is not the empty text: a mark stands before each that is there.
        let marked = |text: Option<&str>| text.map_or_else(String::new, |text| format!("={text}"));
        let epoch = epoch.map(|epoch| epoch.to_string());
        let parts = [marked(version), marked(epoch.as_deref()), marked(salt)];
        self.digest(&[WEIGHTS_DOMAIN, &parts[0], &parts[1], &parts[2]])
    }

    fn digest(&self, parts: &[&str]) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.key.expose().as_bytes())
            .expect("HMAC takes a key of any length");
        for part in parts {
            // The length first, so that ("ab", "c") and ("a", "bc") differ.
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part.as_bytes());
        }
        mac.finalize().into_bytes().iter().fold(String::with_capacity(64), |mut hex, byte| {
            write!(hex, "{byte:02x}").expect("writing to a string cannot fail");
            hex
        })
    }

    /// Sets `cache_salt` and `priority` of a request body from the turn's identity, and drops what
    /// the client put there where it does not count.
    pub fn apply(&self, request: &mut Request, identity: Option<&Identity>, priority: Option<i64>) {
        if self.isolation == Isolation::On {
            request.set_cache_salt(identity.map(|identity| self.cache_salt(identity)).as_deref());
            request.set_priority(None);
        }
        if !self.priority_scheduling {
            request.set_priority(None);
        } else if priority.is_some() {
            request.set_priority(priority);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fak_wire::openai::Api;
    use serde_json::{Value, json};

    fn identity(tenant: &str, authority: &str, family: &str) -> Identity {
        Identity {
            tenant: tenant.to_owned(),
            authority: authority.to_owned(),
            family: family.to_owned(),
        }
    }

    fn stamp(isolation: Isolation, priority_scheduling: bool) -> Stamp {
        Stamp::new(None, isolation, priority_scheduling)
    }

    fn applied(stamp: &Stamp, body: Value, tenant: Option<&str>, priority: Option<i64>) -> Value {
        let mut request = Request::parse(Api::Chat, body.to_string().as_bytes()).expect("a body");
        stamp.apply(&mut request, tenant.map(|t| identity(t, "test", "m")).as_ref(), priority);
        serde_json::from_slice(&request.to_bytes()).expect("JSON")
    }

    #[test]
    fn parts_are_framed_by_length() {
        let stamp = stamp(Isolation::On, false);
        let salts: std::collections::HashSet<_> = [
            identity("ab", "c", "m"),
            identity("a", "bc", "m"),
            identity("", "abc", "m"),
            identity("abc", "", "m"),
            identity("ab", "", "cm"),
            identity("ab\0", "c", "m"),
            identity("ab", "\0c", "m"),
        ]
        .iter()
        .map(|identity| stamp.cache_salt(identity))
        .collect();
        assert_eq!(salts.len(), 7);
        assert!(salts.iter().all(|salt| salt.len() == 64));
    }

    #[test]
    fn two_salts_in_one_are_a_salt_that_engines_take() {
        let stamp = stamp(Isolation::Off, false);
        let long = "x".repeat(128);
        let salts = [("a", "b"), ("b", "a"), ("ab", ""), (&long, "b")];
        let salts = salts.map(|(request, session)| stamp.session_salt(request, session));
        let distinct: std::collections::HashSet<_> = salts.iter().collect();
        assert_eq!(distinct.len(), 4);
        let is_plain = |salt: &String| salt.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(salts.iter().all(|salt| salt.len() == 64 && is_plain(salt)));
    }

    #[test]
    fn weights_and_salts_of_all_kinds_give_salts_of_their_own() {
        let stamp = stamp(Isolation::Off, false);
        let (versions, epochs) = ([None, Some(""), Some("v1"), Some("=v1")], [None, Some(1)]);
        let mut distinct = std::collections::HashSet::new();
        for version in versions {
            for epoch in epochs {
                for salt in [None, Some(""), Some("v1"), Some("1")] {
                    let written = stamp.weights_salt(version, epoch, salt);
                    assert_eq!(written, stamp.weights_salt(version, epoch, salt));
                    assert!(distinct.insert(written), "{version:?} {epoch:?} {salt:?}");
                }
            }
        }
        assert_eq!(distinct.len(), 32);
    }

    #[test]
    fn a_salt_is_stable_and_depends_on_the_key() {
        let keyed = |key: &str| {
            let key = Some(Secret::new(key.to_owned()));
            Stamp::new(key, Isolation::On, false).cache_salt(&identity("a", "b", "c"))
        };
        assert_eq!(keyed("k1"), keyed("k1"));
        assert_ne!(keyed("k1"), keyed("k2"));
        // Python: hmac.new(b"k1", b"".join(len(p).to_bytes(8, "big") + p for p in
        //   (b"fak/cache-salt/1", b"a", b"b", b"c")), "sha256").hexdigest()
        assert_eq!(keyed("k1"), "58f87df708101a543a6729914315961ffa7ef3edb7590402e3c5e3e91615495c");
    }

    #[test]
    fn under_isolation_neither_salt_is_the_clients() {
        let stamp = stamp(Isolation::On, false);
        let stolen = stamp.cache_salt(&identity("a", "test", "m"));
        let a = applied(&stamp, json!({"prompt": "p"}), Some("a"), None);
        let b = applied(&stamp, json!({"prompt": "p", "cache_salt": stolen}), Some("b"), None);
        let nobody = applied(&stamp, json!({"prompt": "p", "cache_salt": stolen}), None, None);
        assert_eq!(a["cache_salt"], stolen);
        assert_ne!(b["cache_salt"], stolen);
        assert_ne!(a["cache_salt"], b["cache_salt"]);
        assert_eq!(nobody, json!({"prompt": "p"}));
    }

    #[test]
    fn without_isolation_the_clients_salt_passes() {
        let body = json!({"cache_salt": "mine", "unknown": {"kept": [1]}});
        assert_eq!(applied(&stamp(Isolation::Off, false), body.clone(), None, None), body);
    }

    #[test]
    fn a_priority_is_sent_only_where_declared() {
        let body = json!({"priority": 9});
        let sent = |isolation, declared, priority| {
            applied(&stamp(isolation, declared), body.clone(), None, priority)["priority"].clone()
        };
        assert_eq!(sent(Isolation::Off, false, Some(1)), Value::Null);
        assert_eq!(sent(Isolation::Off, true, Some(1)), 1);
        assert_eq!(sent(Isolation::Off, true, None), 9);
        assert_eq!(sent(Isolation::On, true, None), Value::Null);
        assert_eq!(sent(Isolation::On, true, Some(-3)), -3);
    }
}
