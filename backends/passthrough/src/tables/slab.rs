//! Numbered storage with lookup in O(1). A generation distinguishes successive values in one slot.

use std::sync::Arc;

/// Bits of a number that select the shard; the caller has one [`GenerationSlab`] per shard.
pub(crate) const SHARD_BITS: u32 = 6;
/// Number of shards.
pub(crate) const SHARDS: usize = 1 << SHARD_BITS;
/// Maximum number of values in one shard: 2^26, and 2^32 in all.
const MAX_SLOTS: usize = 1 << (32 - SHARD_BITS);

/// The values of one shard. A number is `generation << 32 | slot << SHARD_BITS | shard`.
/// Generations start at 1, so no number is below 2^32.
pub(crate) struct GenerationSlab<T> {
    slots: Vec<SlabSlot<T>>,
    free: Vec<u32>,
}

struct SlabSlot<T> {
    generation: u32,
    value: Option<Arc<T>>,
}

/// The place that a number refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabIndex {
    pub(crate) shard: usize,
    pub(crate) slot: u32,
    generation: u32,
}

impl SlabIndex {
    pub(crate) fn from_number(number: u64) -> Self {
        let low = number as u32;
        SlabIndex {
            shard: low as usize % SHARDS,
            slot: low >> SHARD_BITS,
            generation: (number >> 32) as u32,
        }
    }
}

impl<T> GenerationSlab<T> {
    pub(crate) const fn new() -> Self {
        GenerationSlab { slots: Vec::new(), free: Vec::new() }
    }

    /// Stores the value that `make` creates for its number. Returns `None` if all numbers are
    /// taken.
    pub(crate) fn insert(
        &mut self,
        shard: usize,
        make: impl FnOnce(u64) -> Arc<T>,
    ) -> Option<(u32, Arc<T>)> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() == MAX_SLOTS => return None,
            None => {
                self.slots.push(SlabSlot { generation: 0, value: None });
                (self.slots.len() - 1) as u32
            }
        };
        let place = &mut self.slots[slot as usize];
        // Skips 0 on overflow, so that numbers stay at or above 2^32.
        place.generation = place.generation.wrapping_add(1).max(1);
        let low = u64::from(slot) << SHARD_BITS | shard as u64;
        let value = make(u64::from(place.generation) << 32 | low);
        place.value = Some(Arc::clone(&value));
        Some((slot, value))
    }

    /// The value of a number; `None` if the number is not in use.
    pub(crate) fn get(&self, place: SlabIndex) -> Option<&Arc<T>> {
        let slot = self.slots.get(place.slot as usize)?;
        if slot.generation == place.generation { slot.value.as_ref() } else { None }
    }

    /// The value in a slot that is in use.
    pub(crate) fn get_used(&self, slot: u32) -> Option<&Arc<T>> {
        self.slots.get(slot as usize)?.value.as_ref()
    }

    pub(crate) fn remove(&mut self, place: SlabIndex) -> Option<Arc<T>> {
        let slot = self.slots.get_mut(place.slot as usize)?;
        if slot.generation != place.generation {
            return None;
        }
        let value = slot.value.take()?;
        self.free.push(place.slot);
        Some(value)
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// All values.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Arc<T>> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }

    /// Memory of the slots in bytes, without the values.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<SlabSlot<T>>() + self.free.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_does_not_refer_to_the_next_value_in_its_slot() {
        let mut slab = GenerationSlab::new();
        let mut first = 0;
        slab.insert(5, |number| {
            first = number;
            Arc::new('a')
        });
        assert!(first >= 1 << 32);
        assert_eq!(SlabIndex::from_number(first).shard, 5);
        assert_eq!(slab.remove(SlabIndex::from_number(first)).as_deref(), Some(&'a'));
        let mut second = 0;
        slab.insert(5, |number| {
            second = number;
            Arc::new('b')
        });
        assert_eq!(SlabIndex::from_number(first).slot, SlabIndex::from_number(second).slot);
        assert!(slab.get(SlabIndex::from_number(first)).is_none());
        assert!(slab.remove(SlabIndex::from_number(first)).is_none());
        assert_eq!(slab.get(SlabIndex::from_number(second)).map(|b| **b), Some('b'));
        assert_eq!(slab.len(), 1);
    }
}
