//! Names for block hashes: the chain of contents that leads to a block.
//! Invariant: within a scenario a name stands for one hash.

use std::collections::HashMap;

use rmpv::Value;

use crate::prompt::{BLOCK_SIZE, Contents, Prompt};

/// An event written down.
#[derive(Debug)]
pub struct Line {
    /// The line.
    pub text: String,
    /// It stores blocks that decoding filled, and no other.
    pub is_generated: bool,
}

/// Writes events down with names in place of hashes and counts in place of tokens.
#[derive(Debug, Default)]
pub struct Names {
    contents: Contents,
    by_hash: HashMap<Vec<u8>, String>,
    uses: HashMap<String, usize>,
}

impl Names {
    /// Makes a prompt known before it is sent.
    pub fn learn(&mut self, prompt: &Prompt) {
        self.contents.learn(prompt);
    }

    /// A new engine may hash otherwise.
    pub fn forget_hashes(&mut self) {
        self.by_hash.clear();
        self.uses.clear();
    }

    /// One line for one event: what happened, then every field in the order of the wire.
    pub fn line(&mut self, event: &Value) -> Line {
        let Value::Map(fields) = event else {
            return Line { text: format!("not a map: {event}"), is_generated: false };
        };
        let get = |key: &str| {
            let found = fields.iter().find(|(name, _)| name.as_str() == Some(key));
            found.map_or(&Value::Nil, |(_, value)| value)
        };
        let hashes = get("block_hashes").as_array().map_or(&[][..], Vec::as_slice);
        let parent = self.parent(get("parent_block_hash"), get("extra_keys"));
        let tokens: Vec<u64> = get("token_ids")
            .as_array()
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .filter_map(Value::as_u64)
            .collect();
        let mut is_generated = false;
        let blocks = if tokens.is_empty() {
            let names: Vec<_> = hashes.iter().map(|hash| self.name(hash)).collect();
            names.join(" ")
        } else {
            let labels = self.learn_chain(&parent, hashes, &tokens);
            is_generated = labels.iter().all(|label| label.contains('g'));
            format!("{parent} > {}", labels.join(" "))
        };
        let fields: Vec<_> = fields.iter().map(|(key, value)| self.field(key, value)).collect();
        let medium = get("medium").as_str().unwrap_or("-");
        Line { text: format!("{medium} {blocks} | {}", fields.join(" ")), is_generated }
    }

    /// The name of a parent; a root is named by the salt and other keys of its first block.
    fn parent(&self, parent: &Value, extra_keys: &Value) -> String {
        if !parent.is_nil() {
            return self.name(parent);
        }
        match extra_keys.as_array().and_then(|blocks| blocks.first()) {
            None | Some(Value::Nil) => "/".to_owned(),
            Some(keys) => format!("{keys}/"),
        }
    }

    fn learn_chain(&mut self, parent: &str, hashes: &[Value], tokens: &[u64]) -> Vec<String> {
        let mut chain = parent.to_owned();
        let mut labels = Vec::new();
        for (hash, tokens) in hashes.iter().zip(tokens.chunks(BLOCK_SIZE)) {
            let content = self.contents.name(tokens);
            let separator = if chain.ends_with('/') { "" } else { "/" };
            let plain = format!("{chain}{separator}{content}");
            let known = self.by_hash.get(&key(hash)).cloned();
            chain = known.filter(|name| same_but_number(name, &plain)).unwrap_or_else(|| {
                let name = self.numbered(plain);
                self.by_hash.insert(key(hash), name.clone());
                name
            });
            let label = chain.rsplit('/').next().unwrap_or_default();
            labels.push(label.to_owned());
        }
        labels
    }

    /// Generated blocks of equal length share a description; a number tells them apart.
    fn numbered(&mut self, plain: String) -> String {
        let uses = self.uses.entry(plain.clone()).or_default();
        *uses += 1;
        if *uses == 1 { plain } else { format!("{plain}#{uses}") }
    }

    fn name(&self, hash: &Value) -> String {
        self.by_hash.get(&key(hash)).cloned().unwrap_or_else(|| "unknown".to_owned())
    }

    fn field(&self, key: &Value, value: &Value) -> String {
        let name = key.as_str().unwrap_or("?");
        let text = match (name, value) {
            ("type", Value::String(tag)) => return tag.as_str().unwrap_or("?").to_owned(),
            ("block_hashes" | "token_ids", Value::Array(items)) => {
                format!("{}*{}", items.len(), items.first().map_or("-", kind))
            }
            ("parent_block_hash", Value::Nil) => "nil".to_owned(),
            ("parent_block_hash", hash) => kind(hash).to_owned(),
            _ => value.to_string(),
        };
        format!("{name}={text}")
    }
}

fn same_but_number(name: &str, plain: &str) -> bool {
    name.strip_prefix(plain).is_some_and(|rest| rest.is_empty() || rest.starts_with('#'))
}

fn key(hash: &Value) -> Vec<u8> {
    hash.to_string().into_bytes()
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Integer(number) if number.is_u64() => "uint",
        Value::Integer(_) => "int",
        Value::Binary(_) => "bytes",
        _ => "other",
    }
}
