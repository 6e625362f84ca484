//! Batches of KV events to msgpack, in each version's layout.
//! Invariant: key order, omitted defaults and nils are those of the recordings.

use rmpv::Value;

use crate::core::events::{Event, GroupKind, Stored};
use crate::core::hash::BlockHash;
use crate::profile::Layout;

/// How hashes and events are written.
#[derive(Clone, Copy, Debug)]
pub struct Encoding {
    /// Event layout.
    pub layout: Layout,
    /// Hashes as 32 bytes (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`), else as their low 64 bits.
    pub byte_hashes: bool,
}

impl Encoding {
    /// The payload of a batch: `[unix seconds, [events], rank]`.
    #[must_use]
    pub fn batch(&self, unix_seconds: f64, events: &[Event], rank: u32) -> Vec<u8> {
        let events = events.iter().map(|event| self.event(event)).collect();
        let batch =
            Value::Array(vec![Value::F64(unix_seconds), Value::Array(events), Value::from(rank)]);
        let mut bytes = Vec::new();
        rmpv::encode::write_value(&mut bytes, &batch).expect("a Vec takes every write");
        bytes
    }

    fn event(&self, event: &Event) -> Value {
        match (event, self.layout) {
            (Event::Stored(stored), layout) => {
                let fields = self.stored(stored);
                let count = match layout {
                    Layout::Positional { stored, .. } => stored,
                    Layout::Map => fields.len(),
                };
                self.tagged("BlockStored", fields, count)
            }
            (Event::Removed { hashes, medium, group }, layout) => {
                let fields = vec![
                    ("block_hashes", Some(self.hashes(hashes))),
                    ("medium", Some(Value::from(medium.as_str()))),
                    ("group_idx", Some(Value::from(*group))),
                ];
                let count = match layout {
                    Layout::Positional { removed, .. } => removed,
                    Layout::Map => fields.len(),
                };
                self.tagged("BlockRemoved", fields, count)
            }
            (Event::Cleared, _) => self.tagged("AllBlocksCleared", Vec::new(), 0),
        }
    }

    /// None is a field at its default: nil in an array, left out of a map.
    fn tagged(&self, tag: &str, fields: Vec<(&str, Option<Value>)>, count: usize) -> Value {
        let fields = fields.into_iter().take(count);
        match self.layout {
            Layout::Positional { .. } => Value::Array(
                std::iter::once(Value::from(tag))
                    .chain(fields.map(|(_, value)| value.unwrap_or(Value::Nil)))
                    .collect(),
            ),
            Layout::Map => Value::Map(
                std::iter::once((Value::from("type"), Value::from(tag)))
                    .chain(fields.filter_map(|(key, value)| Some((Value::from(key), value?))))
                    .collect(),
            ),
        }
    }

    fn stored(&self, stored: &Stored) -> Vec<(&'static str, Option<Value>)> {
        let lora = stored.lora.as_ref();
        let window = match stored.spec {
            Some(GroupKind::SlidingWindow(tokens)) => Some(Value::from(tokens as u64)),
            _ => None,
        };
        let kind = stored.spec.map(|spec| match spec {
            GroupKind::Full => "full_attention",
            GroupKind::SlidingWindow(_) => "sliding_window",
        });
        let keys = stored
            .extra_keys
            .as_ref()
            .map(|blocks| Value::Array(blocks.iter().map(|keys| nil_if_empty(keys)).collect()));
        vec![
            ("block_hashes", Some(self.hashes(&stored.hashes))),
            ("parent_block_hash", Some(stored.parent.map_or(Value::Nil, |h| self.hash(&h)))),
            ("token_ids", Some(stored.tokens.iter().map(|t| Value::from(*t)).collect())),
            ("block_size", Some(Value::from(stored.block_size as u64))),
            ("lora_id", Some(lora.map_or(Value::Nil, |lora| Value::from(lora.id)))),
            ("medium", Some(Value::from(stored.medium.as_str()))),
            ("lora_name", Some(lora.map_or(Value::Nil, |lora| Value::from(lora.name.as_str())))),
            ("extra_keys", keys),
            ("group_idx", Some(Value::from(stored.group))),
            ("kv_cache_spec_kind", kind.map(Value::from)),
            ("kv_cache_spec_sliding_window", window),
            ("session_id", stored.session_id.as_deref().map(Value::from)),
        ]
    }

    fn hashes(&self, hashes: &[BlockHash]) -> Value {
        hashes.iter().map(|hash| self.hash(hash)).collect()
    }

    fn hash(&self, hash: &BlockHash) -> Value {
        if self.byte_hashes { Value::Binary(hash.0.to_vec()) } else { Value::from(hash.low64()) }
    }
}

fn nil_if_empty(keys: &[String]) -> Value {
    if keys.is_empty() {
        return Value::Nil;
    }
    keys.iter().map(|key| Value::from(key.as_str())).collect()
}
