//! The cache groups that a rank announced, their block size, and what each needs of a prefix.
//!
//! Invariant: a layout that contradicts itself, or that does not fit, has a fault, and then nothing
//! is claimed: a group that nobody keeps could be the one that lacks the block.

use std::collections::BTreeMap;

use fak_kernel::TierSet;

use crate::event::GroupKind;
use crate::held::HeldReason;

/// The groups of one rank.
#[derive(Default)]
pub(crate) struct Layout {
    /// `None`: named by a connector's event only, so nothing is known of it and no claim waits for
    /// it.
    groups: BTreeMap<u32, Option<Group>>,
    /// A group's block size changed: the tiers that have not been demoted since.
    changed: Option<TierSet>,
    /// Stands until a new incarnation.
    fault: Option<HeldReason>,
}

/// A group that the engine's own cache announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) block_size: u32,
    pub(crate) need: Need,
    /// Whether its kind was told, so that a hit tells which of its blocks are there.
    pub(crate) is_told: bool,
}

impl Group {
    pub(crate) fn new(block_size: u32, kind: GroupKind) -> Self {
        let is_told = match kind {
            GroupKind::Full | GroupKind::Window { tokens: Some(1..) } => true,
            GroupKind::Window { .. } | GroupKind::Other | GroupKind::NotReported => false,
        };
        Self { block_size, need: kind.into(), is_told }
    }
}

/// Which blocks of a prefix a group must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// The last ones that cover so many tokens.
    Window(u32),
    /// Every one.
    Whole,
}

impl From<GroupKind> for Need {
    fn from(kind: GroupKind) -> Self {
        match kind {
            GroupKind::Window { tokens: Some(tokens @ 1..) } => Self::Window(tokens),
            GroupKind::Window { .. }
            | GroupKind::Full
            | GroupKind::Other
            | GroupKind::NotReported => Self::Whole,
        }
    }
}

impl Layout {
    /// Takes in a store of the engine's own cache. Where two announcements differ, the stricter
    /// need stands.
    pub(crate) fn announce(&mut self, id: u32, group: Group, groups_max: usize) {
        if !self.mention(id, groups_max) {
            self.fault = Some(HeldReason::TooManyGroups);
            return;
        }
        let known = self.groups.entry(id).or_default().get_or_insert(group);
        known.need = known.need.max(group.need);
        known.is_told &= group.is_told;
        if known.block_size != group.block_size {
            self.changed = self.changed.or(Some(TierSet::ALL));
        }
        if self.announced().any(|(_, other)| Some(other.block_size) != self.block_size()) {
            self.fault = self.fault.or(Some(HeldReason::GroupsDiffer));
        }
    }

    /// Notes that a group exists. False where there is no room for it.
    pub(crate) fn mention(&mut self, id: u32, groups_max: usize) -> bool {
        if !self.groups.contains_key(&id) && self.groups.len() >= groups_max {
            return false;
        }
        self.groups.entry(id).or_default();
        true
    }

    /// A changed block size is forgiven once every tier was demoted: nothing of the old size counts
    /// then.
    pub(crate) fn demoted(&mut self, tiers: TierSet) {
        let Some(left) = self.changed.map(|left| left.without(tiers)) else { return };
        self.changed = Some(left);
        if left.is_empty() {
            self.groups.clear();
            self.changed = None;
        }
    }

    /// Why nothing may be claimed, if so.
    pub(crate) fn fault(&self) -> Option<HeldReason> {
        self.fault.or(self.changed.map(|_| HeldReason::BlockSizeChanged))
    }

    /// The block size that all groups share unless there is a fault; the first group's.
    pub(crate) fn block_size(&self) -> Option<u32> {
        self.announced().next().map(|(_, group)| group.block_size)
    }

    /// The groups that a claim waits for, by number.
    pub(crate) fn announced(&self) -> impl Iterator<Item = (u32, Group)> {
        self.groups.iter().filter_map(|(id, group)| Some((*id, (*group)?)))
    }

    /// Every group that a block may be in.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        self.groups.keys().copied()
    }
}
