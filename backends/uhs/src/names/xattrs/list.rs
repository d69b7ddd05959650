//! The extended attributes of one inode.

use std::collections::BTreeMap;

use defuse_fs::posix::acl::Acl;
use defuse_fs::{Errno, Result, SetXattrFlags};

/// The largest value, `XATTR_SIZE_MAX` of linux/limits.h.
const VALUE_MAX: usize = crate::format::inode::VALUE_MAX;
/// Bytes of all names of an inode at most, each with its NUL: `XATTR_LIST_MAX`. More could not be
/// listed.
const NAMES_MAX: usize = 65536;
/// Bytes of all names and values of an inode at most, so that one file does not take all space.
const TOTAL_MAX: usize = 4 * VALUE_MAX;

/// Bytes of a record, and of a record that continues a value, beside name and value.
const HEADS: usize = 7;

pub(in crate::names) const ACCESS: &[u8] = b"system.posix_acl_access";
pub(in crate::names) const DEFAULT: &[u8] = b"system.posix_acl_default";
const CAPABILITY: &[u8] = b"security.capability";

/// Names and values, by name. ACLs are among them.
#[derive(Default)]
pub(in crate::names) struct XattrList {
    values: BTreeMap<Box<[u8]>, Box<[u8]>>,
}

impl XattrList {
    /// The attributes that were read from a device.
    pub(in crate::names) fn from_values(values: Vec<(Vec<u8>, Vec<u8>)>) -> Self {
        let values = values.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        XattrList { values }
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

    /// Sets an attribute, if `promise` has space for so many bytes of records of all attributes.
    /// `E2BIG`, `EEXIST`, `ENODATA`, and `ENOSPC` with nothing changed.
    pub(in crate::names) fn set(
        &mut self,
        name: &[u8],
        value: &[u8],
        flags: SetXattrFlags,
        promise: impl FnOnce(usize) -> Result<()>,
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
        promise(bytes + count * HEADS)?;
        self.values.insert(name.into(), value.into());
        Ok(())
    }

    /// Removes an attribute. True if it was there.
    pub(in crate::names) fn remove(&mut self, name: &[u8]) -> bool {
        self.values.remove(name).is_some()
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

    /// Bytes of the records, or more.
    pub(in crate::names) fn record_bytes(&self) -> usize {
        self.bytes() + self.values.len() * HEADS
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
