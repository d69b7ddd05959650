//! Repairs inconsistencies between inodes. This module does no I/O.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use defuse_fs::FileKind;

use super::claims::BlockClaims;
use super::report::RepairAction;
use crate::format::inode::{DiskInode, DiskTime, InodeData, InodeLink};
use crate::format::{BLOCK, LAST_NEW};
use crate::names::{LINK_MAX, ROOT, fits, is_within_a_file};
use crate::space::BlockRun;

/// The directory for inodes without a name.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// An inode as it was read.
#[derive(Clone, Debug)]
pub(super) struct RepairInode {
    pub(super) inode: DiskInode,
    /// Grows with every slot that is written: of two owners of a block the newer one keeps it.
    pub(super) stamp: u64,
    /// Blocks with records.
    pub(super) records: Vec<BlockRun>,
    /// The whole inode was read.
    pub(super) whole: bool,
}

/// The inodes of a file system.
pub(super) struct InodeRepairer {
    pub(super) inodes: BTreeMap<u64, RepairInode>,
    pub(super) claims: BlockClaims,
    /// Inodes that must be written.
    pub(super) changed: BTreeSet<u64>,
    pub(super) repairs: Vec<RepairAction>,
    next_ino: u64,
    /// The next position in listings.
    next_position: u64,
    now: DiskTime,
}

impl InodeRepairer {
    /// `claims` has the blocks that no inode may have. No inode has the number `next_ino` or a
    /// higher one.
    pub(super) fn new(
        inodes: BTreeMap<u64, RepairInode>,
        claims: BlockClaims,
        next_ino: u64,
        now: DiskTime,
    ) -> Self {
        let links = inodes.values().flat_map(|broken| &broken.inode.links);
        // Positions too large to have successors are replaced by new ones.
        let links = links.filter(|link| link.stamp < LAST_NEW);
        // 1 and 2 are the positions of `.` and `..`.
        let next_position = links.map(|link| link.stamp + 1).max().unwrap_or(0).max(3);
        let (changed, repairs) = (BTreeSet::new(), Vec::new());
        InodeRepairer { inodes, claims, changed, repairs, next_ino, next_position, now }
    }

    /// Repairs everything.
    pub(super) fn repair(&mut self) {
        self.repair_damaged();
        self.repair_kinds();
        self.repair_blocks();
        self.repair_root();
        self.repair_names();
        self.repair_loops();
        self.find_lost();
    }

    fn repair_damaged(&mut self) {
        let damaged = self.inodes.iter().filter(|(_, broken)| !broken.whole);
        let damaged: Vec<u64> = damaged.map(|(ino, _)| *ino).collect();
        for ino in damaged {
            self.note(ino, RepairAction::Salvaged { ino });
        }
    }

    fn note(&mut self, ino: u64, repair: RepairAction) {
        self.changed.insert(ino);
        self.repairs.push(repair);
    }

    /// Adds an inode that has no name yet.
    fn add(&mut self, ino: u64, mut inode: DiskInode) {
        inode.ctime = self.now;
        self.changed.insert(ino);
        let broken = RepairInode { inode, stamp: u64::MAX, records: Vec::new(), whole: true };
        self.inodes.insert(ino, broken);
    }

    fn new_ino(&mut self) -> u64 {
        self.next_ino += 1;
        self.next_ino - 1
    }

    fn new_position(&mut self) -> u64 {
        self.next_position += 1;
        self.next_position - 1
    }

    fn directory(&self, perm: u32) -> DiskInode {
        let (mode, now) = (FileKind::Directory.mode_bits() | perm, self.now);
        DiskInode { mode, atime: now, mtime: now, ctime: now, btime: now, ..DiskInode::default() }
    }

    /// Makes types and sizes match the data.
    fn repair_kinds(&mut self) {
        let wrong = |(ino, broken): (&u64, &RepairInode)| {
            let kind = FileKind::from_mode(broken.inode.mode);
            let is_sound = kind.is_some_and(|kind| fits(kind, &broken.inode))
                && (*ino != ROOT || kind == Some(FileKind::Directory));
            (!is_sound).then_some(*ino)
        };
        let wrong: Vec<u64> = self.inodes.iter().filter_map(wrong).collect();
        for ino in wrong {
            let Some(broken) = self.inodes.get_mut(&ino) else { continue };
            let inode = &mut broken.inode;
            let is_dir = FileKind::from_mode(inode.mode) == Some(FileKind::Directory);
            if ino != ROOT && !is_dir {
                fit(inode);
                self.note(ino, RepairAction::Kind { ino });
                continue;
            }
            // Files may lie below it: the inode stays a directory, and another inode gets its data.
            let mut file = inode.clone();
            inode.data = InodeData::Nothing;
            inode.size = 0;
            if !is_dir {
                inode.mode = FileKind::Directory.mode_bits() | 0o755;
            }
            self.note(ino, RepairAction::Kind { ino });
            if file.data != InodeData::Nothing {
                let stamp = stamp_of_inode(&self.inodes, ino);
                file.mode = FileKind::Regular.mode_bits() | 0o600;
                file.links.clear();
                fit(&mut file);
                let new = self.new_ino();
                self.add(new, file);
                if let Some(broken) = self.inodes.get_mut(&new) {
                    broken.stamp = stamp;
                }
                self.repairs.push(RepairAction::Data { ino, file: new });
            }
        }
    }

    /// Gives every block one owner.
    fn repair_blocks(&mut self) {
        let mut order: Vec<(u64, u64)> =
            self.inodes.iter().map(|(ino, broken)| (broken.stamp, *ino)).collect();
        order.sort_unstable_by(|a, b| b.cmp(a));
        for (_, ino) in order {
            let Some(broken) = self.inodes.get_mut(&ino) else { continue };
            for run in &broken.records {
                if self.claims.claim(run.block, run.count.into()).is_empty() {
                    // The records were read, and get other blocks.
                    self.changed.insert(ino);
                }
            }
            let InodeData::Extents(extents) = &mut broken.inode.data else { continue };
            let (left, pages) = self.claims.claim_extents(extents);
            if pages > 0 {
                *extents = left;
                self.note(ino, RepairAction::Blocks { ino, pages });
            }
        }
    }

    fn repair_root(&mut self) {
        if !self.inodes.contains_key(&ROOT) {
            self.add(ROOT, self.directory(0o755));
            self.repairs.push(RepairAction::Root);
        }
        let root = self.inodes.get_mut(&ROOT).map(|root| &mut root.inode.links);
        for link in root.map(std::mem::take).unwrap_or_default() {
            self.give_up(ROOT, link);
        }
    }

    fn give_up(&mut self, ino: u64, link: InodeLink) {
        let InodeLink { parent, name, .. } = link;
        self.note(ino, RepairAction::Name { ino, parent, name });
    }

    fn is_dir(&self, ino: u64) -> bool {
        let kind = self.inodes.get(&ino).and_then(|found| FileKind::from_mode(found.inode.mode));
        kind == Some(FileKind::Directory)
    }

    /// Keeps the names that lie in directories and that no other inode has there.
    fn repair_names(&mut self) {
        let mut links = Vec::new();
        for (ino, broken) in &mut self.inodes {
            let taken = std::mem::take(&mut broken.inode.links);
            links.extend(taken.into_iter().map(|link| (!broken.whole, link, *ino)));
        }
        // Links of undamaged inodes come first, and then older ones.
        links.sort_by_key(|(damaged, link, ino)| (*damaged, link.stamp, *ino));
        let (mut names, mut positions) = (HashSet::new(), HashSet::new());
        for (_, mut link, ino) in links {
            let most = if self.is_dir(ino) { 1 } else { LINK_MAX };
            let has_all = self.inodes.get(&ino).is_some_and(|it| it.inode.links.len() >= most);
            let good = !has_all
                && self.is_dir(link.parent)
                && names.insert((link.parent, link.name.clone()));
            if !good {
                self.give_up(ino, link);
                continue;
            }
            if !(3..LAST_NEW).contains(&link.stamp) || !positions.insert((link.parent, link.stamp))
            {
                link.stamp = self.new_position();
                self.note(ino, RepairAction::Position { ino });
            }
            if let Some(broken) = self.inodes.get_mut(&ino) {
                broken.inode.links.push(link);
            }
        }
    }

    /// Removes directories that are below themselves from their parents.
    fn repair_loops(&mut self) {
        let mut good = HashSet::from([ROOT]);
        let dirs: Vec<u64> = self.inodes.keys().copied().filter(|ino| self.is_dir(*ino)).collect();
        for start in dirs {
            let (mut path, mut at) = (HashSet::new(), start);
            while !good.contains(&at) {
                if !path.insert(at) {
                    let links = self.inodes.get_mut(&at).map(|found| &mut found.inode.links);
                    for link in links.map(std::mem::take).unwrap_or_default() {
                        self.give_up(at, link);
                    }
                    break;
                }
                let links = self.inodes.get(&at).map(|found| &found.inode.links);
                match links.and_then(|links| links.first()) {
                    Some(link) => at = link.parent,
                    None => break,
                }
            }
            good.extend(path);
        }
    }

    /// Gives names in lost+found to inodes that have none.
    fn find_lost(&mut self) {
        let lost = |(ino, broken): (&u64, &RepairInode)| {
            (*ino != ROOT && broken.inode.links.is_empty()).then_some(*ino)
        };
        let lost: Vec<u64> = self.inodes.iter().filter_map(lost).collect();
        if lost.is_empty() {
            return;
        }
        let place = self.find_or_make_lost_and_found();
        let mut taken = self.names_in(place);
        for ino in lost {
            let name = free_name(format!("#{ino}").as_bytes(), &taken);
            taken.insert(name.clone());
            self.link(ino, place, name.clone());
            self.note(ino, RepairAction::Found { ino, name });
        }
    }

    fn link(&mut self, ino: u64, parent: u64, name: Vec<u8>) {
        let stamp = self.new_position();
        if let Some(broken) = self.inodes.get_mut(&ino) {
            broken.inode.links.push(InodeLink { parent, stamp, name });
        }
    }

    /// The names in a directory.
    fn names_in(&self, dir: u64) -> HashSet<Vec<u8>> {
        let links = self.inodes.values().flat_map(|broken| &broken.inode.links);
        links.filter(|link| link.parent == dir).map(|link| link.name.clone()).collect()
    }

    fn find_or_make_lost_and_found(&mut self) -> u64 {
        let is_it = |link: &InodeLink| link.parent == ROOT && link.name == LOST_AND_FOUND;
        let mut named = self.inodes.iter().filter(|(_, p)| p.inode.links.iter().any(is_it));
        match named.next().map(|(ino, _)| *ino).filter(|ino| self.is_dir(*ino)) {
            Some(ino) => ino,
            None => {
                let name = free_name(LOST_AND_FOUND, &self.names_in(ROOT));
                let ino = self.new_ino();
                self.add(ino, self.directory(0o700));
                self.link(ino, ROOT, name);
                ino
            }
        }
    }
}

fn stamp_of_inode(inodes: &BTreeMap<u64, RepairInode>, ino: u64) -> u64 {
    inodes.get(&ino).map_or(0, |broken| broken.stamp)
}

/// Makes the type and the size of an inode that is no directory match its data.
fn fit(inode: &mut DiskInode) {
    let regular = FileKind::Regular.mode_bits() | inode.mode & 0o7777;
    match &mut inode.data {
        InodeData::Inline(bytes) => (inode.mode, inode.size) = (regular, bytes.len() as u64),
        InodeData::Extents(extents) => {
            inode.mode = regular;
            extents.retain(is_within_a_file);
            if inode.size > i64::MAX as u64 {
                let end = extents.last().map_or(0, |last| last.page + u64::from(last.count));
                inode.size = end.saturating_mul(BLOCK as u64).min(i64::MAX as u64);
            }
        }
        InodeData::Target(target) => {
            inode.mode = FileKind::Symlink.mode_bits() | 0o777;
            inode.size = target.len() as u64;
        }
        InodeData::Nothing => {
            (inode.mode, inode.size) = (regular, 0);
            inode.data = InodeData::Inline(Vec::new());
        }
    }
}

/// Returns `wanted`, with a number appended if it is taken.
fn free_name(wanted: &[u8], taken: &HashSet<Vec<u8>>) -> Vec<u8> {
    let numbered = (1_u64..).map(|number| [wanted, format!(".{number}").as_bytes()].concat());
    let mut names = std::iter::once(wanted.to_vec()).chain(numbered);
    // It tries at most one name more than are taken.
    names.find(|name| !taken.contains(name)).unwrap_or_default()
}
