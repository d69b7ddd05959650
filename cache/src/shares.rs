//! The bound of each owner.

use std::collections::HashMap;

use crate::lists::ExtentLists;
use crate::policy::{ExtentKey, ExtentUse, ReplacementPolicy};

/// A policy in which no owner displaces others beyond its part.
///
/// An owner is for instance a user with all processes. An extent is charged to the owner whose use
/// brought it. When memory is short, only extents of owners with more than their part may leave:
/// the memory divided by the number of owners that have something in it. So an owner that has no
/// more than its part loses nothing to others, whatever they do, and one that is alone has all
/// memory. Of the extents that may leave, the policy chooses.
pub struct OwnerShares {
    policy: Box<dyn ReplacementPolicy>,
    owners: HashMap<u32, ExtentLists<(), 1>>,
    charged: HashMap<ExtentKey, u32>,
}

impl std::fmt::Debug for OwnerShares {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shares({} of {} bytes)", self.policy.bytes(), self.policy.capacity())
    }
}

impl OwnerShares {
    /// No owners, and this policy.
    pub fn new(policy: Box<dyn ReplacementPolicy>) -> OwnerShares {
        OwnerShares { policy, owners: HashMap::new(), charged: HashMap::new() }
    }

    /// [`ReplacementPolicy::access`], by a process of `owner`.
    pub fn access(&mut self, extent: ExtentUse, owner: u32, evicted: &mut Vec<ExtentKey>) -> bool {
        if !self.charged.contains_key(&extent.key) && extent.fits(self.policy.capacity()) {
            self.make_room(extent.size, owner, evicted);
            self.charged.insert(extent.key, owner);
            let own = self.owners.entry(owner).or_insert_with(ExtentLists::new);
            own.push(0, extent.key, extent.size, ());
        }
        let before = evicted.len();
        let hit = self.policy.access(extent, evicted);
        let (_, gone) = evicted.split_at(before);
        gone.iter().for_each(|key| self.discharge(*key));
        hit
    }

    /// [`ReplacementPolicy::remove`].
    pub fn remove(&mut self, key: ExtentKey) -> bool {
        self.discharge(key);
        self.policy.remove(key)
    }

    /// Returns the policy, for reading.
    pub fn policy(&self) -> &dyn ReplacementPolicy {
        &*self.policy
    }

    /// The bytes that are charged to an owner.
    pub fn bytes_of(&self, owner: u32) -> u64 {
        self.owners.get(&owner).map_or(0, |own| own.bytes(0))
    }

    fn make_room(&mut self, size: u64, owner: u32, evicted: &mut Vec<ExtentKey>) {
        while self.policy.bytes() + size > self.policy.capacity() {
            let OwnerShares { policy, owners, charged } = self;
            let count = owners.len() + usize::from(!owners.contains_key(&owner));
            let part = policy.capacity() / count.max(1) as u64;
            let more = |other: u32| if other == owner { size } else { 0 };
            let bytes = |other| owners.get(&other).map_or(0, |own| own.bytes(0)) + more(other);
            let may_leave = |key| charged.get(&key).is_none_or(|&other| bytes(other) > part);
            let chosen = policy.evict(&may_leave);
            let Some(gone) = chosen.or_else(|| self.evict_oldest(owner, size)) else { break };
            self.discharge(gone);
            evicted.push(gone);
        }
    }

    /// Evicts the oldest extent of the owner with the most bytes, if `owner` gets `size` more.
    fn evict_oldest(&mut self, owner: u32, size: u64) -> Option<ExtentKey> {
        let bytes = |(other, own): &(&u32, &ExtentLists<(), 1>)| {
            (own.bytes(0) + if **other == owner { size } else { 0 }, **other)
        };
        let (_, own) = self.owners.iter().max_by_key(bytes)?;
        let gone = own.back(0).map(|at| own.key(at))?;
        self.policy.remove(gone).then_some(gone)
    }

    fn discharge(&mut self, key: ExtentKey) {
        let Some(owner) = self.charged.remove(&key) else { return };
        let Some(own) = self.owners.get_mut(&owner) else { return };
        if let Some(at) = own.find(key) {
            own.remove(at);
        }
        if own.total() == 0 {
            self.owners.remove(&owner);
        }
    }
}
