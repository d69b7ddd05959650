//! Rules of rename(2), and its order of locking two directories.

use crate::{Errno, Ino, RenameFlags, Result};

/// Fails with `EINVAL` for flags that are unknown or exclude each other, as renameat2(2) does.
pub fn check_flags(flags: RenameFlags) -> Result<()> {
    const KNOWN: u32 = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE | RenameFlags::WHITEOUT;
    let others = flags.0 & (RenameFlags::NOREPLACE | RenameFlags::WHITEOUT);
    let contradict = flags.has(RenameFlags::EXCHANGE) && others != 0;
    if flags.0 & !KNOWN != 0 || contradict { Err(Errno::EINVAL) } else { Ok(()) }
}

/// Refuses to replace a directory by another kind of file (`EISDIR`), and another kind of file by a
/// directory (`ENOTDIR`).
pub fn check_kinds(source_is_dir: bool, target_is_dir: bool) -> Result<()> {
    match (source_is_dir, target_is_dir) {
        (true, false) => Err(Errno::ENOTDIR),
        (false, true) => Err(Errno::EISDIR),
        _ => Ok(()),
    }
}

/// Returns the child of `upper` through which `lower` is reached; `None` if `lower` is not below
/// `upper`. `parent` returns the parent of a directory, or `None` for the root and for a removed
/// directory. The caller prevents renames of directories meanwhile, or accepts an outdated result.
///
/// # Errors
///
/// Fails with the errors of `parent`, and `ELOOP` after 2^20 steps. No path is that long, so that
/// only concurrent renames can cause it.
pub fn child_towards(
    upper: Ino,
    lower: Ino,
    mut parent: impl FnMut(Ino) -> Result<Option<Ino>>,
) -> Result<Option<Ino>> {
    let mut at = lower;
    if at == upper {
        return Ok(None);
    }
    for _ in 0..1 << 20 {
        match parent(at)? {
            Some(above) if above == upper => return Ok(Some(at)),
            Some(above) if above != at => at = above,
            _ => return Ok(None),
        }
    }
    Err(Errno::ELOOP)
}

/// The relation of the two directories of a rename, which differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectoryRelation {
    /// The child of the old directory through which the new one is reached.
    pub to_is_below: Option<Ino>,
    /// The child of the new directory through which the old one is reached.
    pub from_is_below: Option<Ino>,
}

impl DirectoryRelation {
    /// True if the old directory, `from`, is locked before the new one. The upper directory is
    /// locked first, as by all operations that descend; unrelated directories in the order of their
    /// numbers. The topology must not change between computing the lineage and taking both locks;
    /// lock_two_directories of `fs/namei.c` takes `s_vfs_rename_mutex` for that.
    #[must_use]
    pub fn locks_from_first(&self, from: Ino, to: Ino) -> bool {
        match (self.to_is_below, self.from_is_below) {
            (Some(_), _) => true,
            (_, Some(_)) => false,
            _ => from < to,
        }
    }

    /// Refuses to move a directory below itself (`EINVAL`), and to replace a directory by one below
    /// it (`ENOTEMPTY`; `EINVAL` for an exchange).
    pub fn check(&self, source: Ino, target: Option<Ino>, flags: RenameFlags) -> Result<()> {
        if self.to_is_below == Some(source) {
            return Err(Errno::EINVAL);
        }
        match target {
            Some(target) if self.from_is_below == Some(target) => {
                let exchange = flags.has(RenameFlags::EXCHANGE);
                Err(if exchange { Errno::EINVAL } else { Errno::ENOTEMPTY })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXCHANGE: RenameFlags = RenameFlags(RenameFlags::EXCHANGE);

    /// A tree: root 1 with 2 and 3, 4 below 2, and 5 below 4.
    fn parent(ino: Ino) -> Result<Option<Ino>> {
        Ok(match ino.0 {
            2 | 3 => Some(Ino(1)),
            4 => Some(Ino(2)),
            5 => Some(Ino(4)),
            1 => Some(Ino(1)),
            _ => None,
        })
    }

    fn lineage(from: u64, to: u64) -> DirectoryRelation {
        DirectoryRelation {
            to_is_below: child_towards(Ino(from), Ino(to), parent).unwrap(),
            from_is_below: child_towards(Ino(to), Ino(from), parent).unwrap(),
        }
    }

    #[test]
    fn the_ancestor_is_found_and_the_search_ends_at_the_root_a_removed_directory_or_a_cycle() {
        assert_eq!(
            lineage(1, 5),
            DirectoryRelation { to_is_below: Some(Ino(2)), from_is_below: None }
        );
        assert_eq!(
            lineage(5, 2),
            DirectoryRelation { to_is_below: None, from_is_below: Some(Ino(4)) }
        );
        assert_eq!(lineage(3, 5), DirectoryRelation::default());
        assert_eq!(lineage(9, 1), DirectoryRelation::default());
        assert_eq!(child_towards(Ino(2), Ino(2), parent), Ok(None));
        let circle = |ino: Ino| Ok(Some(Ino(ino.0 ^ 1)));
        assert_eq!(child_towards(Ino(9), Ino(4), circle), Err(Errno::ELOOP));
        assert_eq!(child_towards(Ino(9), Ino(4), |_| Err(Errno::EIO)), Err(Errno::EIO));
    }

    #[test]
    fn upper_directories_are_locked_first_and_unrelated_ones_by_number() {
        for (from, to, from_first) in [(1, 5, true), (5, 1, false), (3, 5, true), (5, 3, false)] {
            assert_eq!(lineage(from, to).locks_from_first(Ino(from), Ino(to)), from_first);
        }
        // The numbers do not matter if one directory is below the other.
        let upside_down = DirectoryRelation { to_is_below: Some(Ino(7)), from_is_below: None };
        assert!(upside_down.locks_from_first(Ino(9), Ino(3)));
    }

    #[test]
    fn no_directory_moves_below_itself_or_replaces_an_ancestor() {
        let plain = RenameFlags(0);
        assert_eq!(lineage(1, 5).check(Ino(2), None, plain), Err(Errno::EINVAL));
        assert_eq!(lineage(1, 5).check(Ino(3), None, plain), Ok(()));
        assert_eq!(lineage(5, 1).check(Ino(9), Some(Ino(2)), plain), Err(Errno::ENOTEMPTY));
        assert_eq!(lineage(5, 1).check(Ino(9), Some(Ino(2)), EXCHANGE), Err(Errno::EINVAL));
        assert_eq!(lineage(5, 1).check(Ino(9), Some(Ino(3)), plain), Ok(()));
    }

    #[test]
    fn flags_and_kinds_are_checked_as_renameat2_does() {
        for bad in [8, EXCHANGE.0 | RenameFlags::NOREPLACE, EXCHANGE.0 | RenameFlags::WHITEOUT] {
            assert_eq!(check_flags(RenameFlags(bad)), Err(Errno::EINVAL), "{bad}");
        }
        for good in [0, 1, 2, 4, 5] {
            assert_eq!(check_flags(RenameFlags(good)), Ok(()), "{good}");
        }
        assert_eq!(check_kinds(true, false), Err(Errno::ENOTDIR));
        assert_eq!(check_kinds(false, true), Err(Errno::EISDIR));
        assert_eq!((check_kinds(true, true), check_kinds(false, false)), (Ok(()), Ok(())));
    }
}
