//! Policies by name.

use crate::{Arc, Lfu, Lru, PlainE, Policy, QueueE, S3Fifo};

/// A policy, by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// [`Lru`].
    Lru,
    /// [`Lfu`].
    Lfu,
    /// [`Arc`].
    Arc,
    /// [`S3Fifo`].
    S3Fifo,
    /// [`PlainE`].
    PlainE,
    /// [`QueueE`], the default.
    #[default]
    E,
}

impl Kind {
    /// All policies, with their names.
    pub const ALL: [(&'static str, Kind); 6] = [
        ("lru", Kind::Lru),
        ("lfu", Kind::Lfu),
        ("arc", Kind::Arc),
        ("s3-fifo", Kind::S3Fifo),
        ("plain-e", Kind::PlainE),
        ("e", Kind::E),
    ];

    /// The policy of this name.
    ///
    /// # Errors
    ///
    /// A sentence with the names that exist.
    pub fn named(name: &str) -> Result<Kind, String> {
        let found = Kind::ALL.iter().find(|(known, _)| *known == name);
        let names = Kind::ALL.map(|(name, _)| name).join(", ");
        found
            .map(|(_, kind)| *kind)
            .ok_or(format!("there is no policy {name:?}: write one of {names}"))
    }

    /// The name.
    pub fn name(self) -> &'static str {
        Kind::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    /// An empty cache of so many bytes. `seed` is for [`QueueE::new`].
    pub fn make(self, capacity: u64, seed: u64) -> Box<dyn Policy> {
        match self {
            Kind::Lru => Box::new(Lru::new(capacity)),
            Kind::Lfu => Box::new(Lfu::new(capacity)),
            Kind::Arc => Box::new(Arc::new(capacity)),
            Kind::S3Fifo => Box::new(S3Fifo::new(capacity)),
            Kind::PlainE => Box::new(PlainE::new(capacity)),
            Kind::E => Box::new(QueueE::new(capacity, seed)),
        }
    }
}
