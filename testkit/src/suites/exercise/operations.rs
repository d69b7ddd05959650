//! The operations on a file, and their frequencies.

use fastrand::Rng;

/// Maximum size of the file, in bytes.
pub(super) const MAX: usize = 256 * 1024;

/// The unit in which ext4 collapses and inserts, in bytes.
pub(super) const BLOCK: usize = 4096;

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum OperationKind {
    Read,
    Write,
    MappedRead,
    MappedWrite,
    Map,
    Truncate,
    Allocate,
    AllocateKeepingSize,
    Punch,
    Zero,
    ZeroKeepingSize,
    Collapse,
    Insert,
    CopyRange,
    Clone,
    Sync,
    Forget,
    Reopen,
}

use OperationKind::*;

impl OperationKind {
    /// All kinds, with their relative frequencies.
    const WEIGHTS: [(OperationKind, usize); 18] = [
        (Read, 10),
        (Write, 12),
        (MappedRead, 8),
        (MappedWrite, 12),
        (Map, 3),
        (Truncate, 8),
        (Allocate, 3),
        (AllocateKeepingSize, 3),
        (Punch, 5),
        (Zero, 4),
        (ZeroKeepingSize, 4),
        (Collapse, 8),
        (Insert, 8),
        (CopyRange, 6),
        (Clone, 1),
        (Sync, 2),
        (Forget, 2),
        (Reopen, 2),
    ];

    pub(super) const ALL: [OperationKind; 18] = {
        let mut all = [Read; 18];
        let mut at = 0;
        while at < 18 {
            all[at] = OperationKind::WEIGHTS[at].0;
            at += 1;
        }
        all
    };

    /// The name of the kind.
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    fn random(rng: &mut Rng) -> OperationKind {
        let sum: usize = OperationKind::WEIGHTS.iter().map(|(_, weight)| weight).sum();
        let mut left = rng.usize(..sum);
        for (kind, weight) in OperationKind::WEIGHTS {
            if left < weight {
                return kind;
            }
            left -= weight;
        }
        Read
    }
}

/// One operation: a range, and a second offset for kinds that need one.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExerciseOperation {
    pub(super) kind: OperationKind,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) to: usize,
}

impl ExerciseOperation {
    /// A random operation on a file of `size` bytes, which does not grow it beyond [`MAX`].
    pub(super) fn random(rng: &mut Rng, size: usize) -> ExerciseOperation {
        let kind = OperationKind::random(rng);
        // Mostly small, because errors are likely at page boundaries.
        let most = if rng.bool() { 3 * BLOCK } else { MAX / 4 };
        let (mut offset, mut len) = (rng.usize(..MAX - 1), rng.usize(1..most));
        if rng.bool() && size > 0 {
            offset %= size;
        }
        let mut to = rng.usize(..=MAX);
        if matches!(kind, Collapse | Insert) {
            offset -= offset % BLOCK;
            len = (len / BLOCK + 1) * BLOCK;
        }
        if kind == Collapse && size > BLOCK {
            offset %= size - size % BLOCK;
        }
        if kind == Insert {
            let room = (MAX - size) / BLOCK * BLOCK;
            len = len.min(room).max(BLOCK);
            if room == 0 {
                return ExerciseOperation { kind: Truncate, offset: 0, len: 0, to: to / 2 };
            }
        } else {
            len = len.min(MAX - offset);
        }
        if rng.u8(..4) == 0 {
            // Whole pages.
            to -= to % BLOCK;
        }
        if kind == Collapse {
            len = len.max(BLOCK) / BLOCK * BLOCK;
        }
        ExerciseOperation { kind, offset, len, to }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_occurs_and_none_makes_the_file_too_large() {
        let mut rng = Rng::with_seed(1);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..20_000 {
            let size = rng.usize(..=MAX);
            let one = ExerciseOperation::random(&mut rng, size);
            seen.insert(one.kind);
            assert!(one.len > 0 || one.kind == Truncate, "{one:?}");
            let inserted = if one.kind == Insert { size + one.len } else { 0 };
            assert!(inserted <= MAX && one.to <= MAX, "{one:?} of {size}");
            let aligned = !matches!(one.kind, Collapse | Insert)
                || (one.offset | one.len).is_multiple_of(BLOCK);
            assert!(aligned, "{one:?}");
        }
        assert_eq!(seen.len(), OperationKind::ALL.len());
    }
}
