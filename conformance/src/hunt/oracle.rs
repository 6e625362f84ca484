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

/// What never came live explains for longer: that a live socket is dead, fak finds out within a
/// second, by what the engine replays.
pub(super) const UNHEARD: Duration = Duration::from_secs(1);

/// A block as an engine names it.
type Hash = String;

/// What a block holds: its parent, its tokens, and what else the engine hashed with it.
type Content = (Option<Hash>, Vec<u64>, String);

/// A claim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claimed<'a> {
    pub(super) ask: &'a Ask,
    pub(super) tokens: u64,
    /// Whether it may have been sent with a salt of the gateway's own.
    pub(super) is_salted: bool,
}

/// Blocks of a prompt that events told to be on the gpu, each with its store's number, by what the
/// first one may have been hashed with.
pub(super) type Told = HashMap<String, Vec<(Hash, u64)>>;

/// One life of one engine, as its events tell it.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// Batches of the live socket that were taken in.
    taken: usize,
    names: HashMap<Content, Hash>,
    /// Blocks that are there, once however many copies there are, since a hit may be announced
    /// again. Each with the number of the store that brought it.
    held: HashMap<Hash, u64>,
    stores: u64,
    /// Blocks that may be there: what was done since leaves it open, until the engine tells of them
    /// again or uses them.
    doubted: HashSet<Hash>,
    /// How often anything was put in doubt.
    doubts: u64,
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

    /// Something was done after which nobody can say what is there.
    pub(super) fn doubt(&mut self) {
        self.doubted.extend(self.held.drain().map(|(hash, _)| hash));
        self.doubts += 1;
    }

    /// How often anything was put in doubt.
    pub(super) fn doubts(&self) -> u64 {
        self.doubts
    }

    /// The engine used the first `cached` tokens of a prompt that was sent at that count of doubts.
    pub(super) fn used(&mut self, ask: &Ask, cached: u64, doubts: u64) {
        if doubts != self.doubts {
            return;
        }
        let own = ask.salt.as_deref().map(extra).unwrap_or_default();
        let mut chain = self.chain_under(&ask.prompt, &own);
        chain.truncate(usize::try_from(cached).unwrap_or(usize::MAX) / BLOCK_SIZE);
        let shown = chain.into_iter().filter(|hash| self.doubted.contains(hash));
        let shown: Vec<_> = shown.collect();
        for hash in shown {
            self.doubted.remove(&hash);
            self.hold(hash);
        }
    }

    fn take(&mut self, event: &Value) {
        let hashes = || field(event, "block_hashes").and_then(Value::as_array);
        let hashes = hashes().map(|hashes| hashes.iter().map(Value::to_string).collect::<Vec<_>>());
        let is_gpu = field(event, "medium").and_then(Value::as_str).is_none_or(|m| m == "GPU");
        match (kind(event), hashes) {
            ("AllBlocksCleared", _) => {
                self.held.clear();
                self.doubted.clear();
            }
            ("BlockStored", Some(hashes)) if is_gpu => self.store(event, hashes),
            ("BlockRemoved", Some(hashes)) if is_gpu => {
                for hash in hashes {
                    self.held.remove(&hash);
                    self.doubted.remove(&hash);
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
            self.doubted.remove(&hash);
            self.hold(hash.clone());
            parent = Some(hash);
        }
    }

    fn hold(&mut self, hash: Hash) {
        self.stores += 1;
        self.held.entry(hash).or_insert(self.stores);
    }

    /// What events told of a prompt, the block of its last token left out, which the engine always
    /// computes.
    pub(super) fn told(&self, ask: &Ask, is_salted: bool) -> Told {
        let usable = ask.prompt.len().saturating_sub(1) / BLOCK_SIZE;
        let held = |extra: &str| {
            let chain = self.chain_under(&ask.prompt, extra).into_iter().take(usable);
            chain.map_while(|hash| Some((hash.clone(), *self.held.get(&hash)?))).collect()
        };
        let extras = self.extras(ask, is_salted).into_iter();
        extras.map(|extra| (extra.clone(), held(&extra))).collect()
    }

    /// Tokens of what was told that are there without a break since, of a request that came with
    /// that salt; the most of them where nothing tells the salt.
    pub(super) fn still_told(&self, told: &Told, salt: Option<Option<&str>>) -> u64 {
        let salt = salt.map(|salt| salt.map(extra).unwrap_or_default());
        let chains = told.iter().filter(|(extra, _)| salt.as_ref().is_none_or(|s| s == *extra));
        let is_held = |(hash, store): &&(Hash, u64)| self.held.get(hash) == Some(store);
        let held = chains.map(|(_, chain)| chain.iter().take_while(is_held).count());
        (held.max().unwrap_or(0) * BLOCK_SIZE) as u64
    }

    /// The names of the blocks that `prompt` begins with, as far as they were ever told, where the
    /// first one was hashed with `extra`.
    fn chain_under(&self, prompt: &[u32], extra: &str) -> Vec<Hash> {
        let mut chain: Vec<Hash> = Vec::new();
        for block in prompt.chunks_exact(BLOCK_SIZE) {
            let parent = chain.last().cloned();
            let tokens = block.iter().map(|token| u64::from(*token)).collect();
            let extra = if parent.is_none() { extra } else { "" };
            match self.names.get(&(parent, tokens, extra.to_owned())) {
                Some(hash) => chain.push(hash.clone()),
                None => break,
            }
        }
        chain
    }

    /// The blocks that a prompt begins with, by what its first block may have been hashed with: a
    /// salt of the gateway's own is known to nobody else.
    fn chains(&self, ask: &Ask, is_salted: bool) -> Vec<Vec<Hash>> {
        let extras = self.extras(ask, is_salted).into_iter();
        extras.map(|extra| self.chain_under(&ask.prompt, &extra)).collect()
    }

    /// What the first block of a prompt may have been hashed with.
    fn extras(&self, ask: &Ask, is_salted: bool) -> HashSet<String> {
        let firsts = self.names.keys().filter(|(parent, ..)| is_salted && parent.is_none());
        let own = ask.salt.as_deref().map(extra).unwrap_or_default();
        firsts.map(|(_, _, extra)| extra.clone()).chain([own]).collect()
    }

    /// The blocks that a claim may be of; of one that there is nothing, the first.
    fn claimed_blocks(&self, claim: Claimed<'_>) -> anyhow::Result<Vec<Hash>> {
        let blocks = usize::try_from(claim.tokens)?.div_ceil(BLOCK_SIZE).max(1);
        let chains = self.chains(claim.ask, claim.is_salted);
        Ok(chains.into_iter().flat_map(|chain| chain.into_iter().take(blocks)).collect())
    }

    /// Whether an event that takes away some of the claimed tokens of a prompt, or, where none were
    /// claimed, brings its first block, was put on the wire just before `since`, or later; or
    /// whether it may be in a batch that was `lost`, which the next batch alone shows.
    pub(super) async fn explains(
        &mut self,
        endpoint: &str,
        claim: Claimed<'_>,
        since: SystemTime,
        lost: &[SystemTime],
    ) -> anyhow::Result<bool> {
        let batches = replay(endpoint, &[]).await?.batches;
        // What never came live has taught nothing yet.
        let before = (self.held.clone(), self.doubted.clone());
        for batch in &batches {
            batch.events()?.iter().for_each(|event| self.take(event));
        }
        (self.held, self.doubted) = before;
        let chain = self.claimed_blocks(claim)?;
        for batch in &batches {
            if self.explains_until(batch)? >= since
                && batch.events()?.iter().any(|event| match claim.tokens {
                    0 => brings(event, &chain),
                    _ => takes(event, &chain),
                })
            {
                return Ok(true);
            }
        }
        for lost in lost {
            let mut next = None;
            for batch in &batches {
                let is_later = batch.published()? > *lost;
                next = next.or(is_later.then(|| self.explains_until(batch)).transpose()?);
            }
            if next.is_none_or(|until| until >= since) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// How long fak may have known nothing of a batch.
    fn explains_until(&self, batch: &Batch) -> anyhow::Result<SystemTime> {
        let explains_for = if self.came_live(batch) { ON_THE_WIRE } else { UNHEARD };
        Ok(self.when(batch)? + explains_for)
    }

    /// What the engine told of the blocks that `prompt` begins with, to be read by people.
    pub(super) async fn history(
        &mut self,
        endpoint: &str,
        claim: Claimed<'_>,
        since: SystemTime,
    ) -> anyhow::Result<String> {
        let chain = self.claimed_blocks(claim)?;
        let mut told = String::new();
        for batch in &replay(endpoint, &[]).await?.batches {
            let ago = match since.duration_since(self.when(batch)?) {
                Ok(before) => format!("{} ms before", before.as_millis()),
                Err(after) => format!("{} ms after", after.duration().as_millis()),
            };
            let way = if self.came_live(batch) { "live" } else { "not live" };
            for event in batch.events()? {
                let hashes = field(&event, "block_hashes").and_then(Value::as_array);
                let hashes: Vec<_> = hashes.into_iter().flatten().map(Value::to_string).collect();
                let blocks = (0..chain.len()).filter(|block| hashes.contains(&chain[*block]));
                let blocks: Vec<_> = blocks.collect();
                if kind(&event) == "AllBlocksCleared" || !blocks.is_empty() {
                    let medium = field(&event, "medium").map(Value::to_string).unwrap_or_default();
                    let (kind, seq) = (kind(&event), batch.seq);
                    told += &format!("\n     {seq} {ago}, {way}: {kind} {blocks:?} {medium}");
                }
            }
        }
        Ok(told)
    }

    fn came_live(&self, batch: &Batch) -> bool {
        self.came.contains_key(&batch.seq)
    }

    fn when(&self, batch: &Batch) -> anyhow::Result<SystemTime> {
        self.came.get(&batch.seq).map_or_else(|| batch.published(), |came| Ok(*came))
    }
}

/// Whether an event takes one of these blocks away, on whichever tier.
fn takes(event: &Value, chain: &[Hash]) -> bool {
    match kind(event) {
        "AllBlocksCleared" => true,
        "BlockRemoved" => is_of(event, chain),
        _ => false,
    }
}

/// Whether an event brings one of these blocks, on whichever tier.
fn brings(event: &Value, chain: &[Hash]) -> bool {
    kind(event) == "BlockStored" && is_of(event, chain)
}

fn is_of(event: &Value, chain: &[Hash]) -> bool {
    let mut hashes = field(event, "block_hashes").and_then(Value::as_array).into_iter().flatten();
    hashes.any(|hash| chain.contains(&hash.to_string()))
}

/// What an engine hashes with the first block of a prompt under that salt.
fn extra(salt: &str) -> String {
    format!("[\"{salt}\"]")
}

fn kind(event: &Value) -> &str {
    field(event, "type").and_then(Value::as_str).unwrap_or_default()
}

fn field<'a>(event: &'a Value, name: &str) -> Option<&'a Value> {
    let mut fields = event.as_map()?.iter();
    Some(&fields.find(|(key, _)| key.as_str() == Some(name))?.1)
}
