//! E whose weights follow history.

use super::queue::{EvictionQueues, PolicyWeights};
use crate::policy::{ExtentKey, ExtentUse, ReplacementPolicy};

/// The extents of each miniature, about.
pub const SAMPLE: u64 = 512;
/// Uses of sampled keys until the weights are chosen again.
const USES: u64 = 2 * SAMPLE;
/// Hits count for less with each choice.
const FADING: f64 = 0.85;
/// The miniature of the weights in use must have fewer hits than another one by this part.
const MARGIN: f64 = 1.005;

const fn weights(alpha: f64, beta: f64, again: f64, half_life: f64) -> PolicyWeights {
    let gamma = if beta == 0.0 { 1.0 } else { 0.01 };
    PolicyWeights { alpha, beta, again, gamma, half_life }
}

/// Weights to choose from; the first ones are in use until something is known.
pub const CHOICES: [PolicyWeights; 10] = [
    weights(0.5, 1.0, 1.0, 64.0),
    // The order of LRU.
    weights(1.0, 0.0, 0.0, 64.0),
    // The weights of the paper: different processes alone, and the time.
    weights(1.0, 1.0, 0.0, 64.0),
    weights(1.0, 1.0, 1.0, 64.0),
    weights(0.5, 1.0, 0.2, 64.0),
    // The order of LFU, with memories of different lengths.
    weights(0.0, 1.0, 1.0, 512.0),
    weights(0.0, 1.0, 1.0, 64.0),
    weights(0.0, 1.0, 1.0, 16.0),
    weights(0.0, 1.0, 1.0, 8.0),
    // Loops: the extent that was used last is needed last.
    weights(-1.0, 1.0, 1.0, 64.0),
];

/// Evicts extents of large E, with the weights that history recommends.
#[derive(Debug)]
pub struct QueueE {
    queues: EvictionQueues,
    /// Decides which keys are in the sample.
    seed: u64,
    miniatures: Option<MiniatureCaches>,
}

/// Small caches without data, one for each choice.
#[derive(Debug)]
struct MiniatureCaches {
    caches: Vec<EvictionQueues>,
    hits: Vec<f64>,
    uses: u64,
    /// Keys whose hash is below are in the sample.
    below: u64,
    /// Extents in the cache when they were made.
    made_for: usize,
}

impl QueueE {
    /// Creates an empty cache of so many bytes. `seed` decides which keys are in the sample:
    /// processes should not know the seed.
    pub fn new(capacity: u64, seed: u64) -> QueueE {
        let queues = EvictionQueues::new(capacity, CHOICES[0]);
        QueueE { queues, seed, miniatures: None }
    }

    /// The weights in use.
    pub fn weights(&self) -> PolicyWeights {
        self.queues.weights
    }

    fn learn(&mut self, extent: ExtentUse) {
        let Some(miniatures) = &mut self.miniatures else { return };
        let ExtentKey { file, index } = extent.key;
        if mix(mix(self.seed ^ file) ^ index) > miniatures.below {
            return;
        }
        miniatures.access(extent);
        if miniatures.uses >= USES {
            self.queues.weights = miniatures.choose(self.queues.weights);
        }
    }

    /// Makes miniatures when memory is full for the first time, or holds many more or fewer extents
    /// than then.
    fn resize(&mut self) {
        let (len, known) = (self.queues.len(), self.miniatures.as_ref().map(|m| m.made_for));
        if known.is_none_or(|known| len > known * 2 || len * 2 < known) {
            self.miniatures = Some(MiniatureCaches::new(len, self.queues.capacity()));
        }
    }
}

impl MiniatureCaches {
    fn new(len: usize, capacity: u64) -> MiniatureCaches {
        let part = (SAMPLE as f64 / len.max(1) as f64).min(1.0);
        let small = ((capacity as f64 * part) as u64).max(1);
        let caches = CHOICES.map(|weights| EvictionQueues::new(small, weights)).into();
        let below = (u64::MAX as f64 * part) as u64;
        MiniatureCaches { caches, hits: vec![0.0; CHOICES.len()], uses: 0, below, made_for: len }
    }

    fn access(&mut self, extent: ExtentUse) {
        self.uses += 1;
        let mut evicted = Vec::new();
        for (cache, hits) in self.caches.iter_mut().zip(&mut self.hits) {
            *hits += f64::from(cache.access(extent, &mut evicted));
            evicted.clear();
        }
    }

    fn choose(&mut self, current: PolicyWeights) -> PolicyWeights {
        self.uses = 0;
        let all = || CHOICES.iter().zip(&self.hits);
        let now = all().find(|(weights, _)| **weights == current).map_or(0.0, |(_, hits)| *hits);
        let best = all().max_by(|one, other| one.1.total_cmp(other.1));
        let chosen = best.filter(|(_, hits)| **hits > now * MARGIN).map_or(current, |b| *b.0);
        self.hits.iter_mut().for_each(|hits| *hits *= FADING);
        chosen
    }
}

/// A number in which every bit depends on all of `x`: the finalizer of SplitMix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl ReplacementPolicy for QueueE {
    fn access(&mut self, extent: ExtentUse, evicted: &mut Vec<ExtentKey>) -> bool {
        self.learn(extent);
        let before = evicted.len();
        let hit = self.queues.access(extent, evicted);
        if evicted.len() > before {
            self.resize();
        }
        hit
    }

    fn evict(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<ExtentKey> {
        let gone = self.queues.evict(may_leave);
        if gone.is_some() {
            self.resize();
        }
        gone
    }

    fn remove(&mut self, key: ExtentKey) -> bool {
        if let Some(miniatures) = &mut self.miniatures {
            miniatures.caches.iter_mut().for_each(|cache| _ = cache.remove(key));
        }
        self.queues.remove(key)
    }

    fn contains(&self, key: ExtentKey) -> bool {
        self.queues.contains(key)
    }

    fn bytes(&self) -> u64 {
        self.queues.bytes()
    }

    fn capacity(&self) -> u64 {
        self.queues.capacity()
    }

    fn tracked_extents(&self) -> usize {
        let miniatures = self.miniatures.iter().flat_map(|all| &all.caches);
        self.queues.tracked_extents()
            + miniatures.map(ReplacementPolicy::tracked_extents).sum::<usize>()
    }
}
