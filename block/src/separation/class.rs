//! Classes of operations.

use crate::{OpKind, Priority, Purpose};

/// Number of classes.
pub(super) const CLASSES: usize = 6;

/// A class of operations: reads or writes for which somebody waits, small or large, and others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// A read of less than [`Separation::large`](super::Separation::large) bytes.
    SmallRead,
    /// A longer read.
    LargeRead,
    /// A write of less than that.
    SmallWrite,
    /// A longer write, a discard, or zeroing.
    LargeWrite,
    /// A write that nobody waits for yet ([`Purpose::Behind`]).
    Behind,
    /// An operation that makes space ([`Purpose::Reclaim`]).
    Reclaim,
}

impl Class {
    /// All classes.
    pub const ALL: [Class; CLASSES] = [
        Class::SmallRead,
        Class::LargeRead,
        Class::SmallWrite,
        Class::LargeWrite,
        Class::Behind,
        Class::Reclaim,
    ];

    /// The words for people, in small letters.
    pub fn name(self) -> &'static str {
        match self {
            Class::SmallRead => "small reads",
            Class::LargeRead => "large reads",
            Class::SmallWrite => "small writes",
            Class::LargeWrite => "large writes",
            Class::Behind => "write-behind",
            Class::Reclaim => "reclaim",
        }
    }

    /// The class of an operation; `None` for a flush, which has none.
    pub(super) fn of(kind: &OpKind, purpose: Purpose, large: usize) -> Option<Class> {
        Some(match kind {
            OpKind::Flush => return None,
            _ if purpose == Purpose::Reclaim => Class::Reclaim,
            OpKind::Write { .. } if purpose == Purpose::Behind => Class::Behind,
            OpKind::Read { memory, .. } if memory.bytes() < large => Class::SmallRead,
            OpKind::Read { .. } => Class::LargeRead,
            OpKind::Write { memory, .. } if memory.bytes() < large => Class::SmallWrite,
            OpKind::Write { .. } | OpKind::Discard { .. } | OpKind::Zero { .. } => {
                Class::LargeWrite
            }
        })
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// A set of classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes([bool; CLASSES]);

impl Classes {
    /// Every class.
    pub const ALL: Classes = Classes([true; CLASSES]);

    /// These classes.
    pub fn of(classes: &[Class]) -> Self {
        let mut set = [false; CLASSES];
        classes.iter().for_each(|class| set[class.index()] = true);
        Classes(set)
    }

    /// The priority of a queue for these classes: high where all are small operations that somebody waits for, low where nobody
    /// waits for any.
    pub(super) fn priority(self) -> Priority {
        let within =
            |classes: &[Class]| Class::ALL.iter().all(|c| !self.has(*c) || classes.contains(c));
        if within(&[Class::SmallRead, Class::SmallWrite]) {
            Priority::High
        } else if within(&[Class::Behind, Class::Reclaim]) {
            Priority::Low
        } else {
            Priority::Medium
        }
    }

    /// True where `class` is in the set.
    pub fn has(self, class: Class) -> bool {
        self.0[class.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_of_small_operations_comes_first_and_one_that_nobody_waits_for_last() {
        let of = |classes: &[Class]| Classes::of(classes).priority();
        assert_eq!(of(&[Class::SmallRead]), Priority::High);
        assert_eq!(of(&[Class::SmallWrite, Class::SmallRead]), Priority::High);
        assert_eq!(of(&[Class::SmallRead, Class::LargeRead]), Priority::Medium);
        assert_eq!(of(&[Class::Behind, Class::Reclaim]), Priority::Low);
        assert_eq!(of(&[Class::Behind, Class::LargeWrite]), Priority::Medium);
        assert_eq!(Classes::ALL.priority(), Priority::Medium);
    }
}
