//! Policies by name.

use crate::{ArcPolicy, LfuPolicy, LruPolicy, PlainE, QueueE, ReplacementPolicy, S3FifoPolicy};

/// A policy, by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// [`LruPolicy`].
    Lru,
    /// [`LfuPolicy`].
    Lfu,
    /// [`ArcPolicy`].
    Arc,
    /// [`S3FifoPolicy`].
    S3Fifo,
    /// [`PlainE`].
    PlainE,
    /// [`QueueE`], the default.
    #[default]
    E,
}

impl PolicyKind {
    /// All policies, with their names.
    pub const ALL: [(&'static str, PolicyKind); 6] = [
        ("lru", PolicyKind::Lru),
        ("lfu", PolicyKind::Lfu),
        ("arc", PolicyKind::Arc),
        ("s3-fifo", PolicyKind::S3Fifo),
        ("plain-e", PolicyKind::PlainE),
        ("e", PolicyKind::E),
    ];

    /// The policy of this name.
    ///
    /// # Errors
    ///
    /// A sentence with the names that exist.
    pub fn from_name(name: &str) -> Result<PolicyKind, String> {
        let found = PolicyKind::ALL.iter().find(|(known, _)| *known == name);
        let names = PolicyKind::ALL.map(|(name, _)| name).join(", ");
        found
            .map(|(_, kind)| *kind)
            .ok_or(format!("there is no policy {name:?}: write one of {names}"))
    }

    /// The name.
    pub fn name(self) -> &'static str {
        PolicyKind::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    /// An empty cache of so many bytes. `seed` is for [`QueueE::new`].
    pub fn make(self, capacity: u64, seed: u64) -> Box<dyn ReplacementPolicy> {
        match self {
            PolicyKind::Lru => Box::new(LruPolicy::new(capacity)),
            PolicyKind::Lfu => Box::new(LfuPolicy::new(capacity)),
            PolicyKind::Arc => Box::new(ArcPolicy::new(capacity)),
            PolicyKind::S3Fifo => Box::new(S3FifoPolicy::new(capacity)),
            PolicyKind::PlainE => Box::new(PlainE::new(capacity)),
            PolicyKind::E => Box::new(QueueE::new(capacity, seed)),
        }
    }
}
