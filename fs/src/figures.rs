//! Figures of a file system about itself.

/// A number that a file system reports about itself
/// ([`FileSystem::figures`](crate::FileSystem::figures)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Small letters, digits and `_`, beginning with a letter. It does not contain the unit.
    pub name: &'static str,
    /// The value, in `unit`.
    pub value: u64,
    /// The unit.
    pub unit: MeasureUnit,
    /// The number only grows from the start of the file system on. Otherwise it is a state that
    /// goes up and down.
    pub total: bool,
}

/// The unit of a [`Figure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeasureUnit {
    /// How many.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Nanoseconds,
}

impl Figure {
    /// How many there are at this moment.
    pub const fn count(name: &'static str, value: u64) -> Self {
        Figure { name, value, unit: MeasureUnit::Count, total: false }
    }

    /// Bytes at this moment.
    pub const fn bytes(name: &'static str, value: u64) -> Self {
        Figure { name, value, unit: MeasureUnit::Bytes, total: false }
    }

    /// A duration at this moment.
    pub const fn nanoseconds(name: &'static str, value: u64) -> Self {
        Figure { name, value, unit: MeasureUnit::Nanoseconds, total: false }
    }

    /// Returns this figure, marked as counted since the start.
    #[must_use]
    pub const fn since_start(self) -> Self {
        Figure { total: true, ..self }
    }
}
