//! Classes of operations.

use crate::{BlockOpKind, QueuePriority, QueuePurpose};

/// Number of classes.
pub(super) const CLASSES: usize = 6;

/// A class of operations: small or large reads or writes for which a caller waits, and others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperationClass {
    /// A read of less than [`SeparationOptions::large`](super::SeparationOptions::large) bytes.
    SmallRead,
    /// A longer read.
    LargeRead,
    /// A write of less than [`SeparationOptions::large`](super::SeparationOptions::large) bytes.
    SmallWrite,
    /// A longer write, a discard, or zeroing.
    LargeWrite,
    /// A write for which no caller waits yet ([`QueuePurpose::Behind`]).
    Behind,
    /// An operation that makes space ([`QueuePurpose::Reclaim`]).
    Reclaim,
}

impl OperationClass {
    /// All classes.
    pub const ALL: [OperationClass; CLASSES] = [
        OperationClass::SmallRead,
        OperationClass::LargeRead,
        OperationClass::SmallWrite,
        OperationClass::LargeWrite,
        OperationClass::Behind,
        OperationClass::Reclaim,
    ];

    /// The name of the class for messages, in small letters.
    pub fn name(self) -> &'static str {
        match self {
            OperationClass::SmallRead => "small reads",
            OperationClass::LargeRead => "large reads",
            OperationClass::SmallWrite => "small writes",
            OperationClass::LargeWrite => "large writes",
            OperationClass::Behind => "write-behind",
            OperationClass::Reclaim => "reclaim",
        }
    }

    /// The class of an operation; `None` for a flush, which belongs to no class.
    pub(super) fn classify(
        kind: &BlockOpKind,
        purpose: QueuePurpose,
        large: usize,
    ) -> Option<OperationClass> {
        Some(match kind {
            BlockOpKind::Flush => return None,
            _ if purpose == QueuePurpose::Reclaim => OperationClass::Reclaim,
            BlockOpKind::Write { .. } if purpose == QueuePurpose::Behind => OperationClass::Behind,
            BlockOpKind::Read { memory, .. } if memory.bytes() < large => OperationClass::SmallRead,
            BlockOpKind::Read { .. } => OperationClass::LargeRead,
            BlockOpKind::Write { memory, .. } if memory.bytes() < large => {
                OperationClass::SmallWrite
            }
            BlockOpKind::Write { .. } | BlockOpKind::Discard { .. } | BlockOpKind::Zero { .. } => {
                OperationClass::LargeWrite
            }
        })
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// A set of classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassSet([bool; CLASSES]);

impl ClassSet {
    /// Every class.
    pub const ALL: ClassSet = ClassSet([true; CLASSES]);

    /// A set of these classes.
    pub fn from_classes(classes: &[OperationClass]) -> Self {
        let mut set = [false; CLASSES];
        classes.iter().for_each(|class| set[class.index()] = true);
        ClassSet(set)
    }

    /// The priority of a queue for these classes: high if all are small operations for which a
    /// caller waits, low if no caller waits for any.
    pub(super) fn priority(self) -> QueuePriority {
        let within = |classes: &[OperationClass]| {
            OperationClass::ALL.iter().all(|c| !self.has(*c) || classes.contains(c))
        };
        if within(&[OperationClass::SmallRead, OperationClass::SmallWrite]) {
            QueuePriority::High
        } else if within(&[OperationClass::Behind, OperationClass::Reclaim]) {
            QueuePriority::Low
        } else {
            QueuePriority::Medium
        }
    }

    /// True where `class` is in the set.
    pub fn has(self, class: OperationClass) -> bool {
        self.0[class.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_of_small_operations_comes_first_and_one_that_nobody_waits_for_last() {
        let of = |classes: &[OperationClass]| ClassSet::from_classes(classes).priority();
        assert_eq!(of(&[OperationClass::SmallRead]), QueuePriority::High);
        assert_eq!(
            of(&[OperationClass::SmallWrite, OperationClass::SmallRead]),
            QueuePriority::High
        );
        assert_eq!(
            of(&[OperationClass::SmallRead, OperationClass::LargeRead]),
            QueuePriority::Medium
        );
        assert_eq!(of(&[OperationClass::Behind, OperationClass::Reclaim]), QueuePriority::Low);
        assert_eq!(
            of(&[OperationClass::Behind, OperationClass::LargeWrite]),
            QueuePriority::Medium
        );
        assert_eq!(ClassSet::ALL.priority(), QueuePriority::Medium);
    }
}
