//! The extended attributes of one inode, and the space that they will take.

use std::collections::BTreeMap;
use std::sync::Arc;

use defuse_fs::posix::acl::Acl;
use defuse_fs::{Errno, Result, SetXattrFlags};

use crate::content::Pool;
use crate::format::BLOCK;
use crate::format::inode::INLINE;

/// The largest value, `XATTR_SIZE_MAX` of linux/limits.h.
const VALUE_MAX: usize = crate::format::inode::VALUE_MAX;
/// Bytes of all names of an inode at most, each with its NUL: `XATTR_LIST_MAX`. More could not be listed.
const NAMES_MAX: usize = 65536;
/// Bytes of all names and values of an inode at most, so that one file does not take all space.
const TOTAL_MAX: usize = 4 * VALUE_MAX;

/// Bytes of a record, and of one that goes on with a value, beside name and value.
const HEADS: usize = 7;

/// Bytes for which every slot has room, beside inline data and a name.
const ROOM: usize = 500;

/// The rest of the records that go to blocks with the attributes.
const REST: usize = INLINE + 300;

pub(in crate::names) const ACCESS: &[u8] = b"system.posix_acl_access";
pub(in crate::names) const DEFAULT: &[u8] = b"system.posix_acl_default";
const CAPABILITY: &[u8] = b"security.capability";

/// Names and values, by name. ACLs are among them.
#[derive(Default)]
pub(in crate::names) struct Xattrs {
    values: BTreeMap<Box<[u8]>, Box<[u8]>>,
    aside: Aside,
}

/// Blocks that are set aside while this exists: for the copy of the records that was not written yet, and
/// for the next one, because every change of the inode makes one while the old one is in use.
#[derive(Default)]
struct Aside {
    pool: Option<Arc<Pool>>,
    blocks: u64,
}

impl Drop for Aside {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.unpromise(self.blocks);
        }
    }
}

impl Aside {
    /// Sets so many blocks aside. `sure` takes them from those that are kept. `ENOSPC`.
    fn set(&mut self, pool: &Arc<Pool>, blocks: u64, sure: bool) -> Result<()> {
        if blocks > self.blocks && !pool.promise(blocks - self.blocks, sure) {
            return Err(Errno::ENOSPC);
        }
        pool.unpromise(self.blocks.saturating_sub(blocks));
        self.pool.get_or_insert_with(|| Arc::clone(pool));
        self.blocks = blocks;
        Ok(())
    }
}

impl Xattrs {
    /// The attributes that were read from a device.
    pub(in crate::names) fn loaded(pool: &Arc<Pool>, values: Vec<(Vec<u8>, Vec<u8>)>) -> Self {
        let values = values.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let mut xattrs = Xattrs { values, aside: Aside::default() };
        let _ = xattrs.aside.set(pool, xattrs.blocks(), true);
        xattrs
    }

    pub(in crate::names) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    pub(in crate::names) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.values.iter().map(|(name, value)| (&**name, &**value))
    }

    pub(in crate::names) fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.values.get(name).map(|value| &**value)
    }

    /// Sets an attribute. `E2BIG`, `EEXIST`, `ENODATA`, and `ENOSPC` with nothing changed.
    pub(in crate::names) fn set(
        &mut self,
        pool: &Arc<Pool>,
        name: &[u8],
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        if value.len() > VALUE_MAX {
            return Err(Errno::E2BIG);
        }
        let old = self.get(name);
        check_flags(old.is_some(), flags)?;
        let old = old.map_or((0, 0), |old| (name.len() + 1, name.len() + old.len()));
        let names: usize = self.values.keys().map(|name| name.len() + 1).sum();
        let names = names - old.0 + name.len() + 1;
        let bytes = self.bytes() - old.1 + name.len() + value.len();
        if names > NAMES_MAX || bytes > TOTAL_MAX {
            return Err(Errno::ENOSPC);
        }
        let count = self.values.len() + usize::from(old == (0, 0));
        self.aside.set(pool, 2 * blocks(count, bytes), false)?;
        self.values.insert(name.into(), value.into());
        Ok(())
    }

    /// Removes an attribute. True if it was there.
    pub(in crate::names) fn remove(&mut self, name: &[u8]) -> bool {
        let was_there = self.values.remove(name).is_some();
        if let Some(pool) = self.aside.pool.clone() {
            // Fewer blocks are always there.
            let _ = self.aside.set(&pool, 2 * self.blocks(), true);
        }
        was_there
    }

    /// The closing group writes the attributes: it takes the blocks for one of two copies.
    pub(in crate::names) fn written(&mut self) {
        if let Some(pool) = self.aside.pool.clone() {
            let _ = self.aside.set(&pool, self.blocks(), true);
        }
    }

    /// Removes the capabilities of a program, as a change of its data or owner does.
    pub(in crate::names) fn drop_capability(&mut self) {
        self.remove(CAPABILITY);
    }

    /// Changes the access ACL by chmod(2).
    pub(in crate::names) fn chmod(&mut self, perm: u32) {
        if let Some(value) = self.values.get_mut(ACCESS)
            && let Ok(Some(mut acl)) = Acl::parse(value)
        {
            acl.chmod(perm);
            *value = acl.to_bytes().into();
        }
    }

    /// The ACL in an attribute.
    pub(in crate::names) fn acl(&self, name: &[u8]) -> Option<Acl> {
        Acl::parse(self.get(name)?).ok().flatten()
    }

    fn blocks(&self) -> u64 {
        blocks(self.values.len(), self.bytes())
    }

    fn bytes(&self) -> usize {
        self.values.iter().map(|(name, value)| name.len() + value.len()).sum()
    }
}

/// `EEXIST`, `ENODATA`.
pub(in crate::names) fn check_flags(exists: bool, flags: SetXattrFlags) -> Result<()> {
    match exists {
        true if flags.create => Err(Errno::EEXIST),
        false if flags.replace => Err(Errno::ENODATA),
        _ => Ok(()),
    }
}

/// Blocks of a copy of the records with `count` attributes of so many bytes; 0 where the slot has room.
fn blocks(count: usize, bytes: usize) -> u64 {
    match bytes + count * HEADS {
        0..=ROOM => 0,
        // One for the pointers.
        bytes => (bytes + REST).div_ceil(BLOCK) as u64 + 1,
    }
}
