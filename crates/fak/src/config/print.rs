//! The settings that are in force, and where each comes from, for `fak config print`.
//!
//! Invariant: no secret is printed; and what is printed as TOML is a settings' file that leads to
//! the same settings, but for a password in a database's URL.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::keys::Place;
use super::names;
use super::serve::{Serve, WorkerSpec};
use crate::engine::Data;

/// Where a setting comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An argument.
    Flag,
    /// This variable.
    Environment(&'static str),
    /// The settings' file.
    File,
    /// Nobody said anything.
    Default,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flag => f.write_str("flag"),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::File => f.write_str("file"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One setting: its table, its key there, and its value.
struct Setting {
    table: Option<&'static str>,
    key: &'static str,
    value: Value,
}

impl Serve {
    /// As a settings' file.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for setting in self.settings() {
            let Setting { table, key, value } = setting;
            if let Some(table) = table {
                line(&mut text, &format!("\n[{table}]"), None);
            }
            line(&mut text, &format!("{key} = {value}"), Some(self.origin(table, key)));
        }
        for worker in &self.workers {
            line(&mut text, "\n[[worker]]", Some(self.origin(None, "worker")));
            for (key, value) in worker_fields(worker) {
                line(&mut text, &format!("{key} = {value}"), None);
            }
        }
        for key in &self.keys {
            line(&mut text, "\n[[key]]", Some(self.origin(None, "key")));
            for (key, value) in key_fields(key) {
                line(&mut text, &format!("{key} = {value}"), None);
            }
        }
        text.push('\n');
        for (name, is_set) in self.secrets() {
            line(&mut text, &format!("# {name}: {}", if is_set { "set" } else { "not set" }), None);
        }
        text
    }

    /// As JSON: `{"settings":{"KEY":{"value","from"}},"workers":[..],"keys":[..],
    /// "secrets":{"NAME":true}}`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let settings: Map<String, Value> = self
            .settings()
            .map(|Setting { table, key, value }| {
                let from = self.origin(table, key).to_string();
                (named(table, key), json!({ "value": value, "from": from }))
            })
            .collect();
        let object = |fields: Vec<(&str, Value)>| {
            Value::Object(fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
        };
        let workers: Vec<_> = self.workers.iter().map(|w| object(worker_fields(w))).collect();
        let keys: Vec<_> = self.keys.iter().map(|key| object(key_fields(key))).collect();
        let secrets: Map<String, Value> =
            self.secrets().map(|(name, is_set)| (name.to_owned(), is_set.into())).collect();
        json!({ "settings": settings, "workers": workers, "keys": keys, "secrets": secrets })
    }

    fn settings(&self) -> impl Iterator<Item = Setting> {
        let ms = |duration: Duration| {
            u64::try_from(duration.as_millis()).map_or(Value::Null, Value::from)
        };
        let origins: Vec<_> =
            self.cors_origins.iter().map(|origin| origin.to_str().unwrap_or_default()).collect();
        let plain = [
            ("listen", self.listen.to_string().into()),
            ("db", without_password(&self.db).into()),
            ("probe_every_ms", ms(self.probe_every)),
            ("probe_failures_max", self.probe_failures_max.into()),
            ("progress_patience_ms", ms(self.progress_patience)),
            ("settle_within_ms", ms(self.settle_within)),
            ("hold_ms", ms(self.hold)),
            ("hold_max", self.hold_max.into()),
            ("first_byte_ms", ms(self.first_byte)),
            ("body_bytes_max", self.body_bytes_max.into()),
            ("bodies_bytes_max", self.bodies_bytes_max.into()),
            ("drain_ms", ms(self.drain)),
            ("allow_reload_weights", self.allow_reload_weights.into()),
            ("pass_headers", self.passing.added().collect::<Vec<_>>().into()),
            ("cors_origins", origins.into()),
            ("isolation", self.isolation.into()),
        ];
        let salt = if self.salts_carry_version { "version" } else { "off" };
        let plain = plain.into_iter().chain(self.limits.settings()).map(|(key, value)| Setting {
            table: None,
            key,
            value,
        });
        let table = Some("weights");
        plain.chain([Setting { table, key: "salt", value: salt.into() }])
    }

    fn secrets(&self) -> impl Iterator<Item = (&'static str, bool)> {
        [
            (names::ADMIN_KEY, self.admin_key.is_some()),
            (names::API_KEY, self.engine_key.is_some()),
            (names::SALT_KEY, self.salt_key.is_some()),
        ]
        .into_iter()
    }

    fn origin(&self, table: Option<&str>, key: &str) -> Origin {
        self.origins.get(&named(table, key)).copied().unwrap_or(Origin::Default)
    }
}

fn named(table: Option<&str>, key: &str) -> String {
    table.map_or_else(|| key.to_owned(), |table| format!("{table}.{key}"))
}

fn worker_fields(worker: &WorkerSpec) -> Vec<(&'static str, Value)> {
    let models = worker.endpoints.data(Data::Models).uri().to_string();
    let url = models.trim_end_matches(Data::Models.path());
    let mut fields = vec![("id", worker.id.clone().into()), ("url", url.into())];
    let sockets = [("kv", &worker.kv), ("replay", &worker.replay)];
    for (key, socket) in sockets {
        fields.extend(socket.as_ref().map(|socket| (key, socket.to_string().into())));
    }
    if worker.defer_aborts {
        fields.push(("defer_aborts", true.into()));
    }
    fields
}

fn key_fields(key: &super::keys::KeySpec) -> Vec<(&'static str, Value)> {
    let place = match &key.place {
        Place::Environment(name) => ("env", name.clone().into()),
        Place::File(path) => ("file", path.display().to_string().into()),
    };
    vec![("tenant", key.tenant.clone().into()), ("authority", key.authority.clone().into()), place]
}

/// `scheme://user:(secret)@host/…?password=(secret)`.
pub(crate) fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (place, query) = rest.split_once('?').map_or((rest, None), |(p, q)| (p, Some(q)));
    let authority = place.find('/').map_or(place, |end| &place[..end]);
    let path = &place[authority.len()..];
    let named = authority.rsplit_once('@').and_then(|(u, host)| Some((u.split_once(':')?.0, host)));
    let mut shown = match named {
        Some((user, host)) => format!("{scheme}://{user}:(secret)@{host}{path}"),
        None => format!("{scheme}://{place}"),
    };
    let blank = |pair: &str| match pair.starts_with("password=") {
        true => "password=(secret)".to_owned(),
        false => pair.to_owned(),
    };
    if let Some(query) = query {
        shown.push('?');
        shown.push_str(&query.split('&').map(blank).collect::<Vec<_>>().join("&"));
    }
    shown
}

fn line(text: &mut String, what: &str, origin: Option<Origin>) {
    match origin {
        Some(origin) => writeln!(text, "{what}  # {origin}"),
        None => writeln!(text, "{what}"),
    }
    .expect("writing to a string cannot fail");
}

#[cfg(test)]
mod tests {
    use super::super::serve::{Flags, Raw};
    use super::*;
    use std::ffi::OsString;

    const FILE: &str = "probe_every_ms = 500\nhold_ms = 7\nisolation = true\n\
        [weights]\nsalt = \"version\"\n\
        [[worker]]\nid = \"a\"\nurl = \"http://gpu:8000/v1\"\nkv = \"tcp://gpu:5557\"\n\
        [[key]]\ntenant = \"t \\\" # x\"\nenv = \"KEY\"\n";

    fn resolved(file: &str, flags: Flags) -> Serve {
        let raw: Raw = toml::from_str(file).expect("TOML");
        let env = [
            ("KEY", "sk-hidden"),
            ("FAK_ADMIN_KEY", "hidden-admin"),
            ("FAK_DB", "postgres://me:hidden@db:5432/fak"),
            ("FAK_LISTEN", "127.0.0.1:9"),
        ];
        let lookup =
            |name: &str| env.iter().find(|(k, _)| *k == name).map(|(_, v)| OsString::from(v));
        raw.resolve(flags, &lookup, 0).expect("right")
    }

    #[test]
    fn a_password_in_a_databases_url_is_not_shown_wherever_it_stands() {
        for (url, shown) in [
            ("postgres://u:p@h/db", "postgres://u:(secret)@h/db"),
            ("postgres://u:p@h/db?sslmode=require", "postgres://u:(secret)@h/db?sslmode=require"),
            ("postgres://u@h/db?a=b&password=p", "postgres://u@h/db?a=b&password=(secret)"),
            ("postgres://u@h/db", "postgres://u@h/db"),
            ("postgres://h", "postgres://h"),
            ("sqlite:fak.db", "sqlite:fak.db"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }

    #[test]
    fn each_setting_says_where_it_comes_from_and_no_secret_is_shown() {
        let flags = Flags { listen: Some("127.0.0.1:1".to_owned()), ..Flags::default() };
        let serve = resolved(FILE, flags);
        let text = serve.to_toml();
        for line in [
            "listen = \"127.0.0.1:1\"  # flag",
            "db = \"postgres://me:(secret)@db:5432/fak\"  # environment FAK_DB",
            "probe_every_ms = 500  # file",
            "drain_ms = 30000  # default",
            "isolation = true  # file",
            "salt = \"version\"  # file",
            "[[worker]]  # file",
            "url = \"http://gpu:8000\"",
            "env = \"KEY\"",
            "# FAK_ADMIN_KEY: set",
            "# FAK_CACHE_SALT_KEY: not set",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        let json = serve.to_json();
        assert_eq!(json["settings"]["weights.salt"], json!({"value": "version", "from": "file"}));
        assert_eq!(json["keys"][0]["env"], "KEY");
        assert!(!text.contains("hidden") && !json.to_string().contains("hidden"), "{text}");
    }

    #[test]
    fn what_is_printed_leads_to_the_same_settings() {
        let once = resolved(FILE, Flags::default()).to_toml();
        let twice = resolved(&once, Flags::default());
        // Now all of it but the database comes from the file.
        let values = |text: &str| -> Vec<String> {
            text.lines().map(|l| l.rsplit_once("  # ").map_or(l, |(v, _)| v).to_owned()).collect()
        };
        assert_eq!(values(&once), values(&twice.to_toml()));
        assert_eq!(twice.keys[0].tenant, "t \" # x");
    }
}
