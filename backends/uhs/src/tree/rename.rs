//! renameat2(2).

use defuse_fs::posix::rename::{Lineage, check_flags, check_kinds, child_towards};
use defuse_fs::{Errno, FileKind, Ino, Name, NewNode, RenameFlags, Result, Timestamp};

use super::{LINK_MAX, Tree};

impl Tree {
    /// Moves a name. `whiteout` is the node that takes the place of the old name, where the flags ask for
    /// one.
    pub(crate) fn rename(
        &mut self,
        from: (u64, Name<'_>),
        to: (u64, Name<'_>),
        flags: RenameFlags,
        whiteout: &NewNode<'_>,
    ) -> Result<()> {
        check_flags(flags)?;
        let (from_name, to_name) = (from.1.as_bytes(), to.1.as_bytes());
        let (_, source) = *self.living_dir(from.0)?.by_name.get(from_name).ok_or(Errno::ENOENT)?;
        let target = self.living_dir(to.0)?.by_name.get(to_name).map(|(_, ino)| *ino);
        let exchange = flags.has(RenameFlags::EXCHANGE);
        if flags.has(RenameFlags::NOREPLACE) && target.is_some() {
            return Err(Errno::EEXIST);
        }
        if exchange && target.is_none() {
            return Err(Errno::ENOENT);
        }
        self.lineage(from.0, to.0)?.check(Ino(source), target.map(Ino), flags)?;
        if target == Some(source) {
            return Ok(());
        }
        let now = Timestamp::now();
        match target {
            Some(target) if exchange => {
                self.remove_link(source, from.0, from_name)?;
                self.remove_link(target, to.0, to_name)?;
                self.relink(source, to.0, to_name, now)?;
                self.relink(target, from.0, from_name, now)?;
            }
            target => {
                self.check_replace(source, target, from.0, to.0)?;
                if let Some(target) = target {
                    if self.node(target)?.dir.is_some() {
                        self.kill_dir(target)?;
                    }
                    self.drop_name(target, to.0, to_name, now)?;
                }
                self.remove_link(source, from.0, from_name)?;
                self.relink(source, to.0, to_name, now)?;
                if flags.has(RenameFlags::WHITEOUT) {
                    let node = NewNode { kind: FileKind::CharDevice, rdev: 0, ..*whiteout };
                    let made = self.make(from.0, from.1, &node, None, true)?;
                    self.forget(made.ino.0, 1);
                }
            }
        }
        self.names_changed(from.0, now)?;
        self.names_changed(to.0, now)
    }

    fn lineage(&self, from: u64, to: u64) -> Result<Lineage> {
        if from == to {
            return Ok(Lineage::default());
        }
        let parent = |ino: Ino| -> Result<Option<Ino>> {
            let links = &self.node(ino.0)?.inode.links;
            Ok(links.first().map(|link| Ino(link.parent)))
        };
        Ok(Lineage {
            to_is_below: child_towards(Ino(from), Ino(to), parent)?,
            from_is_below: child_towards(Ino(to), Ino(from), parent)?,
        })
    }

    /// Everything that can fail, before anything changes.
    fn check_replace(&self, source: u64, target: Option<u64>, from: u64, to: u64) -> Result<()> {
        let is_dir = self.node(source)?.dir.is_some();
        if let Some(target) = target {
            let replaced = self.node(target)?.dir.as_ref();
            check_kinds(is_dir, replaced.is_some())?;
            if replaced.is_some_and(|dir| !dir.by_name.is_empty()) {
                return Err(Errno::ENOTEMPTY);
            }
        } else if is_dir && from != to && self.dir(to)?.subdirs as usize >= LINK_MAX {
            return Err(Errno::EMLINK);
        }
        Ok(())
    }

    /// Gives an inode a name in the place of one that it had until now.
    fn relink(&mut self, ino: u64, parent: u64, name: &[u8], now: Timestamp) -> Result<()> {
        self.add_link(ino, parent, name)?;
        self.node_mut(ino)?.inode.ctime = now.into();
        Ok(())
    }
}
