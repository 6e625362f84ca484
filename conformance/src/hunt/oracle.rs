//! What the hunt knows of an engine's gpu cache by the engine's own events, apart from fak.
//! Invariant: nothing here comes from fak. An event counts from the moment at which it came by a
//! live socket of the hunt's own; one that never came there, from the moment that the engine says.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

use rmpv::Value;

use crate::events::{Batch, Subscriber, replay};
use crate::fak::Ask;
use crate::prompt::BLOCK_SIZE;

/// What takes blocks away explains a claim that was made so short a time after it: then fak could
/// not have taken it in before the request was on its way.
pub(super) const ON_THE_WIRE: Duration = Duration::from_millis(300);

/// A block as an engine names it.
type Hash = String;

/// What a block holds: its parent, its tokens, and what else the engine hashed with it.
type Content = (Option<Hash>, Vec<u64>, String);

/// One life of one engine, as its events tell it.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// Batches of the live socket that were taken in.
    taken: usize,
    names: HashMap<Content, Hash>,
    /// Blocks that are there, once however many copies there are: a hit may be announced again.
    held: HashSet<Hash>,
    /// When each batch came live.
    came: BTreeMap<u64, SystemTime>,
}

impl Oracle {
    /// Takes in what came by the live socket.
    pub(super) fn listen(&mut self, subscriber: &Subscriber) -> anyhow::Result<()> {
        for live in subscriber.after(self.taken) {
            self.taken += 1;
            self.came.insert(live.batch.seq, live.at);
            for event in live.batch.events()? {
                self.take(&event);
            }
        }
        Ok(())
    }

    fn take(&mut self, event: &Value) {
        let hashes = || field(event, "block_hashes").and_then(Value::as_array);
        let hashes = hashes().map(|hashes| hashes.iter().map(Value::to_string).collect::<Vec<_>>());
        let is_gpu = field(event, "medium").and_then(Value::as_str).is_none_or(|m| m == "GPU");
        match (kind(event), hashes) {
            ("AllBlocksCleared", _) => self.held.clear(),
            ("BlockStored", Some(hashes)) if is_gpu => self.store(event, hashes),
            ("BlockRemoved", Some(hashes)) if is_gpu => {
                for hash in hashes {
                    self.held.remove(&hash);
                }
            }
            _ => {}
        }
    }

    fn store(&mut self, event: &Value, hashes: Vec<Hash>) {
        let tokens = field(event, "token_ids").and_then(Value::as_array);
        let tokens: Vec<u64> = tokens.into_iter().flatten().filter_map(Value::as_u64).collect();
        let extra = field(event, "extra_keys").and_then(Value::as_array);
        let parent = field(event, "parent_block_hash").filter(|parent| !parent.is_nil());
        let mut parent = parent.map(Value::to_string);
        for (number, hash) in hashes.into_iter().enumerate() {
            let first = number * BLOCK_SIZE;
            if let Some(tokens) = tokens.get(first..first + BLOCK_SIZE) {
                let extra = extra.and_then(|keys| keys.get(number)).filter(|key| !key.is_nil());
                let extra = extra.map(Value::to_string).unwrap_or_default();
                self.names.insert((parent, tokens.to_vec(), extra), hash.clone());
            }
            self.held.insert(hash.clone());
            parent = Some(hash);
        }
    }

    /// Tokens of `prompt` that events told to be on the gpu, those of its last token's block left
    /// out, which the engine always computes.
    pub(super) fn told(&self, prompt: &[u32], salt: Option<&str>) -> u64 {
        let usable = prompt.len().saturating_sub(1) / BLOCK_SIZE;
        let chain = self.chain(prompt, salt);
        let told = chain.iter().take(usable).take_while(|hash| self.held.contains(*hash));
        (told.count() * BLOCK_SIZE) as u64
    }

    /// The names of the blocks that `prompt` begins with, as far as they were ever told.
    fn chain(&self, prompt: &[u32], salt: Option<&str>) -> Vec<Hash> {
        let mut chain: Vec<Hash> = Vec::new();
        for block in prompt.chunks_exact(BLOCK_SIZE) {
            let parent = chain.last().cloned();
            let tokens = block.iter().map(|token| u64::from(*token)).collect();
            let extra = salt.filter(|_| parent.is_none()).map(|salt| format!("[\"{salt}\"]"));
            match self.names.get(&(parent, tokens, extra.unwrap_or_default())) {
                Some(hash) => chain.push(hash.clone()),
                None => break,
            }
        }
        chain
    }

    /// Whether an event that takes away some of the first `claimed` tokens of a prompt was put on
    /// the wire just before `since`, or later.
    pub(super) async fn has_lost(
        &mut self,
        endpoint: &str,
        (ask, claimed): (&Ask, u64),
        since: SystemTime,
    ) -> anyhow::Result<bool> {
        let on_the_wire = since.checked_sub(ON_THE_WIRE).unwrap_or(since);
        let batches = replay(endpoint, &[]).await?.batches;
        // What never came live has taught nothing yet.
        let held = self.held.clone();
        for batch in &batches {
            batch.events()?.iter().for_each(|event| self.take(event));
        }
        self.held = held;
        let mut chain = self.chain(&ask.prompt, ask.salt.as_deref());
        chain.truncate(usize::try_from(claimed)?.div_ceil(BLOCK_SIZE));
        for batch in &batches {
            if self.when(batch)? >= on_the_wire
                && batch.events()?.iter().any(|event| takes(event, &chain))
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn when(&self, batch: &Batch) -> anyhow::Result<SystemTime> {
        self.came.get(&batch.seq).map_or_else(|| batch.published(), |came| Ok(*came))
    }
}

/// Whether an event takes one of these blocks away, on whichever tier.
fn takes(event: &Value, chain: &[Hash]) -> bool {
    let hashes = || field(event, "block_hashes").and_then(Value::as_array).into_iter().flatten();
    match kind(event) {
        "AllBlocksCleared" => true,
        "BlockRemoved" => hashes().any(|hash| chain.contains(&hash.to_string())),
        _ => false,
    }
}

fn kind(event: &Value) -> &str {
    field(event, "type").and_then(Value::as_str).unwrap_or_default()
}

fn field<'a>(event: &'a Value, name: &str) -> Option<&'a Value> {
    let mut fields = event.as_map()?.iter();
    Some(&fields.find(|(key, _)| key.as_str() == Some(name))?.1)
}
