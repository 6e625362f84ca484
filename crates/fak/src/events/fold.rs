//! What a rank's stream means for what is believed of it: decodes, asks the kernel, and carries its
//! effects out on the index.
//!
//! Invariant: one fold is the only writer of its rank's beliefs, and every batch that reaches the
//! index went through [`fak_kernel::rank`].

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use fak_index::{
    EngineHash, Extra, ExtraKey, GroupKind, Index, Loss, Origin, RankId, Remove, Store,
};
use fak_kernel::rank::{Effect, Event, Head, Note, Rank, Take, Trust};
use fak_kernel::{LossCause, Tier, TierSet};
use fak_wire::kv::{self, BlockHash, Removed, Stored};
use xxhash_rust::xxh3::xxh3_128;

use super::Item;
use super::medium::Media;
use super::recorder::{self, Cause, Kind, Recorder};

/// What the kernel wants of the rank's sockets, or tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// A replay from `from` on, in place of any other.
    Replay {
        /// Names it.
        session: u64,
        /// First batch.
        from: u64,
        /// 0 at first; back off by it.
        attempt: u8,
    },
    /// A new live connection.
    Reconnect,
    /// Something worth a log line, a count or a row.
    Tell(Note),
}

/// A request of fak's own whose store shows where in the stream its sending lies.
#[derive(Clone, Debug)]
pub struct Marker {
    /// The kernel's name for it.
    pub id: u64,
    /// The tokens of its first block, which no other prompt has.
    pub tokens: Vec<u32>,
}

/// What a rank's stream has shown of clears.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Clear events that were taken in, in order.
    pub clears: u64,
    /// How often the stream's order broke off: what came after may not follow what came before.
    pub breaks: u64,
    /// Since the last [`Fold::watch`]: the clears that came before the store watched for.
    pub clears_before: Option<u64>,
}

/// One rank's fold.
pub struct Fold {
    rank: Rank,
    index: Arc<Index>,
    id: RankId,
    parked: BTreeMap<u64, kv::Batch>,
    media: Media,
    limits: kv::Limits,
    marker: Option<Marker>,
    /// The tokens of a store that is watched for.
    watched: Option<Vec<u32>>,
    tally: Tally,
    /// The rank that the stream's first batch named. Its number is the engine's own, which is not
    /// the source's where each rank is a server of its own.
    named_rank: Option<u32>,
    recorder: Arc<Recorder>,
    name: recorder::Rank,
}

impl Fold {
    /// A fold that writes to `id` in `index` and tells `recorder` what it did.
    #[must_use]
    pub fn new(
        rank: Rank,
        (index, id): (Arc<Index>, RankId),
        recorder: Arc<Recorder>,
        name: recorder::Rank,
    ) -> Self {
        Self {
            rank,
            index,
            id,
            parked: BTreeMap::new(),
            media: Media::default(),
            limits: kv::Limits::default(),
            marker: None,
            watched: None,
            tally: Tally::default(),
            named_rank: None,
            recorder,
            name,
        }
    }

    /// Takes in what the live source yields.
    pub fn item(&mut self, item: Item) -> Vec<Ask> {
        match item {
            Item::Connected { .. } => self.fact(Event::Connected),
            Item::Disconnected { .. } => self.fact(Event::Disconnected),
            Item::Bad { why } => {
                tracing::warn!(rank = %self.name, error = %why, "not a batch");
                self.recorder.bad(&self.name);
                self.fact(Event::NoBatch)
            }
            Item::Batch { seq, payload } => {
                let (head, batch) = self.read(seq, &payload);
                self.step(Event::Live(head), Some(batch), Cause::Live)
            }
        }
    }

    /// Takes in a batch of the replay `session`.
    pub fn replayed(&mut self, session: u64, seq: u64, payload: &Bytes) -> Vec<Ask> {
        let (head, batch) = self.read(seq, payload);
        self.step(Event::ReplayBatch { session, head }, Some(batch), Cause::Replay)
    }

    /// Takes in a fact that is no batch.
    pub fn fact(&mut self, event: Event) -> Vec<Ask> {
        self.step(event, None, Cause::Live)
    }

    /// From now on a store of the marker's tokens is taken for the marker's.
    pub fn expect(&mut self, marker: Marker) {
        self.marker = Some(marker);
    }

    /// From now on the store of a prompt that begins with `tokens` is watched for, whatever its
    /// blocks count for.
    pub fn watch(&mut self, tokens: Vec<u32>) {
        self.watched = Some(tokens);
        self.tally.clears_before = None;
    }

    /// What the stream has shown of clears.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// How far the rank's beliefs can be relied on.
    #[must_use]
    pub fn trust(&self) -> Trust {
        self.rank.trust()
    }

    /// Whether the last action is settled.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.rank.is_settled()
    }

    /// Whether what the connector's tiers hold is in doubt until a batch more was folded.
    #[must_use]
    pub fn is_contested(&self) -> bool {
        self.rank.is_contested()
    }

    /// Whether the live connection was seen to bring less than the engine publishes, and has not
    /// shown better since.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.rank.is_dead()
    }

    /// The marker that the kernel waits for, if it does.
    #[must_use]
    pub fn wanted_marker(&self) -> Option<u64> {
        self.rank.wanted_marker()
    }

    /// Ticks for which beliefs count from the last tick on.
    #[must_use]
    pub fn lasts_for(&self) -> u32 {
        self.rank.lasts_for()
    }

    /// The last batch that was folded.
    #[must_use]
    pub fn last_seq(&self) -> Option<u64> {
        self.rank.cursor()
    }

    fn read(&mut self, seq: u64, payload: &Bytes) -> (Head, kv::Batch) {
        let digest = xxh3_128(payload);
        match kv::decode(payload, &self.limits) {
            Ok(batch) if self.is_of_another_rank(&batch) => {
                // Two caches are never taken for one.
                tracing::warn!(rank = %self.name, seq, found = batch.rank, "another rank's batch");
                self.unreadable(seq, digest)
            }
            Ok(batch) => {
                let clears =
                    batch.events.iter().filter(|e| matches!(e, kv::Event::Cleared)).count();
                let clears = u32::try_from(clears).unwrap_or(u32::MAX);
                let marker = self.marker_in(&batch);
                (Head { seq, digest, clears, marker, readable: true }, batch)
            }
            Err(error) => {
                tracing::warn!(rank = %self.name, seq, %error, "a batch does not decode");
                self.unreadable(seq, digest)
            }
        }
    }

    fn unreadable(&self, seq: u64, digest: u128) -> (Head, kv::Batch) {
        self.recorder.bad(&self.name);
        let head = Head { seq, digest, clears: 0, marker: None, readable: false };
        (head, kv::Batch::default())
    }

    fn is_of_another_rank(&mut self, batch: &kv::Batch) -> bool {
        batch.rank.is_some_and(|rank| *self.named_rank.get_or_insert(rank) != rank)
    }

    fn marker_in(&self, batch: &kv::Batch) -> Option<u64> {
        let marker = self.marker.as_ref()?;
        let is_it = |event: &kv::Event| match event {
            kv::Event::Stored(stored) => begins_with(stored, &marker.tokens),
            kv::Event::Removed(_) | kv::Event::Cleared => false,
        };
        batch.events.iter().any(is_it).then_some(marker.id)
    }

    fn step(&mut self, event: Event, batch: Option<kv::Batch>, cause: Cause) -> Vec<Ask> {
        let (fed, origin) = match event {
            Event::Live(head) => (Some(head.seq), Origin::Live),
            Event::ReplayBatch { head, .. } => (Some(head.seq), Origin::Replay),
            Event::ReplayEnd { .. } | Event::ReplayFailed { .. } => (None, Origin::Replay),
            _ => (None, Origin::None),
        };
        self.tally.breaks += u64::from(breaks_order(event));
        let effects = self.rank.step(event);
        let mut batch = batch;
        let mut asks = Vec::new();
        for effect in effects {
            match effect {
                Effect::Take(take) => {
                    let fresh = if fed == Some(take.seq) { batch.take() } else { None };
                    // A batch of that number may be parked as well: it is the same one.
                    let parked = self.parked.remove(&take.seq);
                    // It came live, though a replay let it be taken.
                    let origin = if parked.is_some() { Origin::Live } else { origin };
                    if let Some(batch) = fresh.or(parked) {
                        self.apply(&batch, take, (cause, origin));
                    }
                }
                Effect::Park { seq } => {
                    if let Some(batch) = batch.take() {
                        self.parked.insert(seq, batch);
                    }
                }
                Effect::Unpark { through } => {
                    self.parked = self.parked.split_off(&through.saturating_add(1));
                }
                Effect::Demote { tiers, to, cause } => {
                    self.index.demote(self.id, tiers, to, Loss { cause, origin });
                }
                Effect::SetAside { tiers } => self.index.set_aside(self.id, tiers),
                Effect::Reinstate { tiers } => self.index.reinstate(self.id, tiers),
                Effect::ForgetIdentities => self.index.forget_identities(self.id),
                Effect::Suspend => self.index.suspend(self.id),
                Effect::Restore => self.index.restore(self.id),
                Effect::Ignore { seq, why } => {
                    tracing::debug!(rank = %self.name, seq, %why, "batch ignored");
                }
                Effect::Replay { session, from, attempt } => {
                    asks.push(Ask::Replay { session, from, attempt })
                }
                Effect::Reconnect => asks.push(Ask::Reconnect),
                // Whoever can send one reads it from the rank's status.
                Effect::Mark { .. } => {}
                Effect::Note(note) => {
                    match note {
                        Note::Gap { lost } => self.recorder.gap(&self.name, lost),
                        Note::GapNotClosed | Note::NewLife => self.tally.breaks += 1,
                        _ => {}
                    }
                    asks.push(Ask::Tell(note));
                }
            }
        }
        asks
    }

    fn apply(&mut self, batch: &kv::Batch, take: Take, (cause, origin): (Cause, Origin)) {
        let mut recorded = Vec::with_capacity(batch.events.len());
        for event in &batch.events {
            recorded.push(match event {
                kv::Event::Stored(stored) => {
                    let store = store(stored, self.media.tier(stored.medium.as_deref()));
                    self.index.store(self.id, &store, take.gain);
                    let is_watched = |tokens: &Vec<u32>| begins_with(stored, tokens);
                    if self.watched.take_if(|tokens| is_watched(tokens)).is_some() {
                        self.tally.clears_before = Some(self.tally.clears);
                    }
                    recorder::Event {
                        kind: Kind::Stored,
                        tier: Some(store.tier),
                        cause,
                        blocks: store.hashes.len() as u64,
                    }
                }
                kv::Event::Removed(removed) => {
                    let remove = remove(removed, self.media.tier(removed.medium.as_deref()));
                    self.index.remove(self.id, &remove, origin);
                    recorder::Event {
                        kind: Kind::Removed,
                        tier: Some(remove.tier),
                        cause,
                        blocks: remove.hashes.len() as u64,
                    }
                }
                kv::Event::Cleared => {
                    self.tally.clears += 1;
                    let cause = self.clear(take, origin);
                    recorder::Event { kind: Kind::Cleared, tier: None, cause, blocks: 0 }
                }
            });
        }
        self.recorder.batch(&self.name, take.seq, recorded);
    }

    fn clear(&self, take: Take, origin: Origin) -> Cause {
        let cause = if take.explained { LossCause::OwnAction } else { LossCause::Cleared };
        for tier in Tier::ALL {
            if let Some(to) = take.clear.get(*tier) {
                self.index.demote(self.id, TierSet::of(*tier), to, Loss { cause, origin });
            }
        }
        if take.explained { Cause::OwnAction } else { Cause::Unexplained }
    }
}

/// Whether it stores the first block of a prompt that begins with `tokens`.
fn begins_with(stored: &Stored, tokens: &[u32]) -> bool {
    stored.parent.is_none() && stored.tokens.starts_with(tokens)
}

/// Whether what comes after `event` may not follow what came before.
fn breaks_order(event: Event) -> bool {
    match event {
        Event::Connected | Event::Disconnected | Event::NoBatch => true,
        Event::NewIncarnation | Event::Lost => true,
        Event::Live(head) | Event::ReplayBatch { head, .. } => !head.readable,
        _ => false,
    }
}

fn store(stored: &Stored, tier: Tier) -> Store {
    Store {
        hashes: stored.hashes.iter().map(hash).collect(),
        parent: stored.parent.as_ref().map(hash),
        tokens: stored.tokens.clone(),
        block_size: stored.block_size,
        extra: extra(&stored.extra_keys),
        lora: lora(stored),
        tier,
        group: stored.group,
        kind: match stored.spec_kind.as_deref() {
            Some("full_attention") => GroupKind::Full,
            Some("sliding_window") => GroupKind::Window { tokens: stored.sliding_window },
            Some(_) => GroupKind::Other,
            None => GroupKind::NotReported,
        },
    }
}

fn remove(removed: &Removed, tier: Tier) -> Remove {
    Remove { hashes: removed.hashes.iter().map(hash).collect(), tier, group: removed.group }
}

fn hash(hash: &BlockHash) -> EngineHash {
    match hash {
        BlockHash::Int(value) => EngineHash::Int(*value),
        BlockHash::Bytes(bytes) => EngineHash::Bytes(bytes.clone()),
    }
}

/// The adapter's name. Layouts before vLLM 0.14.1 give its number alone, which is no name that a
/// request could have.
fn lora(stored: &Stored) -> Option<Box<str>> {
    let number = || stored.lora_id.map(|id| format!("#{id}").into_boxed_str());
    stored.lora_name.as_deref().map(Box::from).or_else(number)
}

fn extra(keys: &kv::ExtraKeys) -> Extra {
    match keys {
        kv::ExtraKeys::NotReported => Extra::NotReported,
        kv::ExtraKeys::None => Extra::PerBlock(Vec::new()),
        kv::ExtraKeys::PerBlock(blocks) => Extra::PerBlock(
            blocks.iter().map(|keys| keys.iter().map(extra_key).collect()).collect(),
        ),
    }
}

fn extra_key(key: &kv::ExtraKey) -> ExtraKey {
    match key {
        kv::ExtraKey::Text(text) => ExtraKey::Text(text.as_str().into()),
        kv::ExtraKey::Int(number) => ExtraKey::Int(*number),
        kv::ExtraKey::Pair(item, offset) => ExtraKey::Item(item.as_str().into(), *offset),
        kv::ExtraKey::Bytes(bytes) | kv::ExtraKey::Opaque(bytes) => ExtraKey::Bytes(bytes.clone()),
    }
}
