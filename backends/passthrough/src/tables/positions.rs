//! The positions in directories that frontends receive.
//!
//! ext4 positions are hashes of names: 31 bits, and 32 bits more for a 64-bit process such as a
//! daemon. A 32-bit program fails on them with `EOVERFLOW`, and a kernel mount does not say for
//! which program it lists, nor may the position depend on that: the kernel caches listings for all
//! programs. So frontends receive the upper 31 bits, the same as a 32-bit program from ext4. The
//! lower bits only tell names of equal upper bits apart; ext4 begins with the first of these.
//! Positions within such a group are numbers from a table of the directory. All others need no
//! table, so that they outlive the open directory and the server.
//!
//! An overlay hands on the positions of its upper or lower directory, unless it merges several; a
//! probe finds out. The positions of other file systems fit (btrfs, xfs, tmpfs, f2fs), or are
//! passed on unchanged.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use defuse_fs::{Errno, Ino, Result};

use crate::handle::fs_type::{EXT, OVERLAY};

/// The end of a directory of ext4 for a 64-bit process.
const LOWER_END: u64 = i64::MAX as u64;
/// Its end for a 32-bit process, and the greatest position that it can represent.
const END: u64 = i32::MAX as u64;
/// Positions from here to [`END`] are numbers in the table.
const TABLE: u64 = 0x7fff_0000;
/// Number of positions in the tables of all directories.
const MOST: usize = 1 << 20;

/// The meaning of the positions of a lower directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Positions {
    /// Passed on unchanged.
    Plain,
    /// Positions of ext4.
    Hashed,
}

impl Positions {
    /// The kind of a directory on a file system of this type, where `next` is the position of the
    /// second entry. `is_group(position)` returns true if the second entry is also found from that
    /// position on.
    pub(crate) fn detect(
        f_type: u64,
        next: u64,
        is_group: impl FnOnce(u64) -> Result<bool>,
    ) -> Result<Self> {
        let hash = next >> 32;
        let is_hashed = match f_type {
            // Without an index, positions are places in the file.
            EXT => hash != 0,
            OVERLAY => hash != 0 && is_group(hash << 32)?,
            _ => false,
        };
        Ok(if is_hashed { Positions::Hashed } else { Positions::Plain })
    }
}

/// The positions that frontends receive as numbers of a table, for the directories that have some.
#[derive(Default)]
pub(crate) struct PositionTables {
    tables: Mutex<Tables>,
    /// A directory was given a table.
    is_used: AtomicBool,
}

#[derive(Default)]
struct Tables {
    of: HashMap<Ino, Table>,
    len: usize,
}

#[derive(Default)]
struct Table {
    lower: Vec<u64>,
    numbers: HashMap<u64, u64>,
}

impl PositionTables {
    /// The lower position of `upper`, which [`tell`](Self::tell) returned for this directory. Fails
    /// with `ESTALE` for a number that is not in the directory's table.
    pub(crate) fn lower(&self, positions: Positions, dir: Ino, upper: u64) -> Result<u64> {
        match (positions, upper) {
            (Positions::Plain, _) => Ok(upper),
            (Positions::Hashed, END) => Ok(LOWER_END),
            (Positions::Hashed, END..) => Ok(upper),
            (Positions::Hashed, TABLE..) => {
                let tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
                let table = tables.of.get(&dir).ok_or(Errno::ESTALE)?;
                table.lower.get((upper - TABLE) as usize).copied().ok_or(Errno::ESTALE)
            }
            (Positions::Hashed, _) => Ok(upper << 32),
        }
    }

    /// The position to return to a frontend for `lower`, which comes after the entry at the lower
    /// position `before`.
    pub(crate) fn tell(&self, positions: Positions, dir: Ino, before: u64, lower: u64) -> u64 {
        let hash = lower >> 32;
        match positions {
            Positions::Plain => lower,
            Positions::Hashed if lower == LOWER_END => END,
            Positions::Hashed if hash != before >> 32 && hash < TABLE => hash,
            // Without a number, 64-bit programs can go on.
            Positions::Hashed => self.number(dir, lower).unwrap_or(lower),
        }
    }

    fn number(&self, dir: Ino, lower: u64) -> Option<u64> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = tables.len >= MOST;
        let table = tables.of.entry(dir).or_default();
        if let Some(number) = table.numbers.get(&lower) {
            return Some(*number);
        }
        let number = TABLE + table.lower.len() as u64;
        if is_full || number == END {
            return None;
        }
        table.lower.push(lower);
        table.numbers.insert(lower, number);
        tables.len += 1;
        self.is_used.store(true, Ordering::Relaxed);
        Some(number)
    }

    /// Drops the table of a directory that no frontend knows any more.
    pub(crate) fn forget(&self, dir: Ino) {
        if self.is_used.load(Ordering::Relaxed) {
            let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
            let gone = tables.of.remove(&dir).map_or(0, |table| table.lower.len());
            tables.len -= gone;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Ino = Ino(9);

    #[test]
    fn positions_of_ext4_fit_into_31_bits_and_lead_back() {
        let tables = PositionTables::default();
        let end = 0x7fff_fffe_u64;
        // A group of equal hashes, one in the range of the table, and the end.
        let lower = [
            1 << 32,
            2 << 32 | 7,
            0x1234_5678 << 32 | 0xffff_ffff,
            0x2345_6789 << 32 | 3,
            0x2345_6789 << 32 | 9,
            0x2345_6789 << 32 | 0x8000_0000,
            TABLE << 32 | 1,
            end << 32 | 1,
            LOWER_END,
        ];
        let mut before = 0_u64;
        let upper: Vec<u64> = lower
            .iter()
            .map(|at| tables.tell(Positions::Hashed, DIR, std::mem::replace(&mut before, *at), *at))
            .collect();
        assert!(upper.iter().all(|at| *at <= END), "{upper:x?}");
        let mut distinct = upper.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), upper.len(), "{upper:x?}");
        for (lower, upper) in lower.iter().zip(&upper) {
            let found = tables.lower(Positions::Hashed, DIR, *upper).unwrap();
            // Nothing comes between the beginning of a group and its first entry.
            let is_first = found >> 32 == lower >> 32 && found & 0xffff_ffff == 0;
            assert!(found == *lower || is_first && *upper < TABLE, "{lower:x} {upper:x} {found:x}");
        }
        // Equal positions have equal numbers again, and another directory has none of these
        // numbers.
        assert_eq!(tables.tell(Positions::Hashed, DIR, lower[3], lower[4]), upper[4]);
        assert_eq!(tables.lower(Positions::Hashed, Ino(10), upper[4]), Err(Errno::ESTALE));
        tables.forget(DIR);
        assert_eq!(tables.lower(Positions::Hashed, DIR, upper[4]), Err(Errno::ESTALE));
    }

    #[test]
    fn tables_of_positions_are_bounded() {
        let tables = PositionTables::default();
        let group = |minor: u64| 5 << 32 | minor;
        let upper = |dir: u64, minor| {
            tables.tell(Positions::Hashed, Ino(dir), group(minor), group(minor + 1))
        };
        for dir in 0..20 {
            for minor in 0..0x1_0000 {
                let at = upper(dir, minor);
                let found = tables.lower(Positions::Hashed, Ino(dir), at);
                assert_eq!(found, Ok(group(minor + 1)), "{dir} {minor}");
            }
        }
        assert_eq!(tables.tables.lock().unwrap().len, MOST);
        (0..20).for_each(|dir| tables.forget(Ino(dir)));
        assert_eq!(tables.tables.lock().unwrap().len, 0);
        assert!(upper(1, 1) <= END);
    }

    #[test]
    fn positions_of_other_file_systems_are_told_as_they_are() {
        const HASHED: u64 = 0x1234_5678_0000_0001;
        let kind = |f_type, next, is_group| Positions::detect(f_type, next, |_| Ok(is_group));
        assert_eq!(kind(EXT, 12, true), Ok(Positions::Plain));
        assert_eq!(kind(EXT, HASHED, false), Ok(Positions::Hashed));
        assert_eq!(kind(OVERLAY, HASHED, true), Ok(Positions::Hashed));
        assert_eq!(kind(OVERLAY, HASHED, false), Ok(Positions::Plain));
        assert_eq!(kind(OVERLAY, 2, true), Ok(Positions::Plain));
        assert_eq!(kind(0x0102_1994, HASHED, true), Ok(Positions::Plain));
        let tables = PositionTables::default();
        for at in [0, 1, END, TABLE, 1 << 32, LOWER_END] {
            assert_eq!(tables.tell(Positions::Plain, DIR, 0, at), at);
            assert_eq!(tables.lower(Positions::Plain, DIR, at), Ok(at));
        }
    }
}
