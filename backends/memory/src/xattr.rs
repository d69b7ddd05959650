//! Extended attributes of one inode, and the operations on them.

use std::collections::BTreeMap;

use defuse_fs::posix::acl::Acl;
use defuse_fs::{Context, Errno, FileKind, Ino, Result, SetXattrFlags, Xattr, XattrName};

use crate::MemoryFileSystem;
use crate::inode::{InodeMeta, MemoryInode, SGID};
use crate::space::SpaceCharge;

/// Maximum size of a value in bytes, `XATTR_SIZE_MAX`.
const VALUE_MAX: usize = 65536;
/// Maximum size of all names of one inode, each with its NUL, `XATTR_LIST_MAX`. More could not be
/// listed.
const NAMES_MAX: usize = 65536;
/// Maximum size of all names and values of one inode, so that one user cannot take all space with
/// one file.
const TOTAL_MAX: usize = 4 * VALUE_MAX;

const ACCESS: &[u8] = b"system.posix_acl_access";
const DEFAULT: &[u8] = b"system.posix_acl_default";

/// Names and values, sorted by name.
#[derive(Default)]
pub(crate) struct XattrMap(BTreeMap<Box<[u8]>, Box<[u8]>>);

impl XattrMap {
    fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.0.get(name).map(|value| &**value)
    }

    /// The bytes of all names and values.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|(name, value)| name.len() + value.len()).sum()
    }

    /// Sets an attribute. Fails with `E2BIG`, `EEXIST`, `ENODATA` or `ENOSPC`. `charge` is the
    /// charge of the inode, and is changed first.
    pub fn set(
        &mut self,
        charge: &mut SpaceCharge,
        name: &[u8],
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        if value.len() > VALUE_MAX {
            return Err(Errno::E2BIG);
        }
        match self.0.get(name) {
            Some(_) if flags.create => return Err(Errno::EEXIST),
            None if flags.replace => return Err(Errno::ENODATA),
            _ => {}
        }
        let others = || self.0.iter().filter(|(other, _)| ***other != *name);
        let names: usize = others().map(|(other, _)| other.len() + 1).sum();
        let values: usize = others().map(|(_, value)| value.len()).sum();
        let names = names + name.len() + 1;
        if names > NAMES_MAX || names + values + value.len() > TOTAL_MAX {
            return Err(Errno::ENOSPC);
        }
        let old = self.0.get(name).map_or(0, |value| name.len() + value.len());
        charge.set(charge.bytes() - old + name.len() + value.len())?;
        self.0.insert(name.into(), value.into());
        Ok(())
    }

    /// Removes an attribute. Returns true if it existed.
    pub fn remove(&mut self, name: &[u8]) -> bool {
        self.0.remove(name).is_some()
    }
}

/// The kind of an attribute, by its name.
enum AttributeKind {
    Plain,
    AccessAcl,
    DefaultAcl,
}

/// Classifies a name by its namespace, xattr(7). Fails with `EOPNOTSUPP` for a namespace that is
/// not supported and for an ACL on a symbolic link, and with `EINVAL` for a namespace without a
/// name.
fn target(inode: &MemoryInode, name: XattrName<'_>) -> Result<AttributeKind> {
    let name = name.as_bytes();
    if name == ACCESS || name == DEFAULT {
        return match inode.kind {
            FileKind::Symlink => Err(Errno::EOPNOTSUPP),
            _ if name == ACCESS => Ok(AttributeKind::AccessAcl),
            _ => Ok(AttributeKind::DefaultAcl),
        };
    }
    for namespace in [&b"user."[..], b"trusted.", b"security."] {
        match name.strip_prefix(namespace) {
            Some([]) => return Err(Errno::EINVAL),
            Some(_) => return Ok(AttributeKind::Plain),
            None => {}
        }
    }
    Err(Errno::EOPNOTSUPP)
}

/// `user.` attributes belong to regular files and directories only, xattr(7).
fn keeps_user_attributes(inode: &MemoryInode) -> bool {
    matches!(inode.kind, FileKind::Regular | FileKind::Directory)
}

impl MemoryFileSystem {
    pub(crate) fn setxattr(
        &self,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        let inode = self.table.get(ino.0)?;
        let target = target(&inode, name)?;
        if name.as_bytes().starts_with(b"user.") && !keeps_user_attributes(&inode) {
            return Err(Errno::EPERM);
        }
        let meta = &mut *inode.change_meta();
        match target {
            AttributeKind::Plain => {
                meta.xattrs.set(&mut meta.charge, name.as_bytes(), value, flags)?;
            }
            AttributeKind::AccessAcl => set_access(meta, Acl::parse(value)?, flags)?,
            AttributeKind::DefaultAcl => {
                let acl = Acl::parse(value)?;
                if !inode.is_dir() && acl.is_some() {
                    return Err(Errno::EACCES);
                }
                check_flags(meta.default_acl.is_some(), flags)?;
                charge_list(&mut meta.charge, &meta.default_acl, &acl)?;
                meta.default_acl = acl;
            }
        }
        meta.ctime = self.clock.exact();
        Ok(())
    }

    pub(crate) fn getxattr(&self, ino: Ino, name: XattrName<'_>, room: usize) -> Result<Xattr> {
        let inode = self.table.get(ino.0)?;
        let target = target(&inode, name)?;
        let meta = inode.meta();
        let value = match target {
            AttributeKind::Plain => meta.xattrs.get(name.as_bytes()).map(<[u8]>::to_vec),
            AttributeKind::AccessAcl => meta.access_acl.as_ref().map(Acl::to_bytes),
            AttributeKind::DefaultAcl => meta.default_acl.as_ref().map(Acl::to_bytes),
        };
        Xattr::answer(value.ok_or(Errno::ENODATA)?, room)
    }

    /// `trusted.` names are listed to root only, xattr(7).
    pub(crate) fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        let inode = self.table.get(ino.0)?;
        let meta = inode.meta();
        let mut names = Vec::new();
        let mut add = |name: &[u8]| {
            names.extend_from_slice(name);
            names.push(0);
        };
        if meta.access_acl.is_some() {
            add(ACCESS);
        }
        if meta.default_acl.is_some() {
            add(DEFAULT);
        }
        for name in meta.xattrs.0.keys() {
            if cx.caller.uid == 0 || !name.starts_with(b"trusted.") {
                add(name);
            }
        }
        Xattr::answer(names, room)
    }

    /// Removing an ACL that does not exist succeeds, as on every file system of Linux (the kernel
    /// sets it to an empty ACL).
    pub(crate) fn removexattr(&self, ino: Ino, name: XattrName<'_>) -> Result<()> {
        let inode = self.table.get(ino.0)?;
        let target = target(&inode, name)?;
        let meta = &mut *inode.change_meta();
        match target {
            AttributeKind::Plain if !meta.xattrs.remove(name.as_bytes()) => {
                return Err(Errno::ENODATA);
            }
            AttributeKind::Plain => {}
            AttributeKind::AccessAcl => meta.access_acl = None,
            AttributeKind::DefaultAcl => meta.default_acl = None,
        }
        meta.uncharge();
        meta.ctime = self.clock.exact();
        Ok(())
    }
}

/// Sets the access ACL, which changes the permission bits. An ACL equivalent to the bits is not
/// stored.
fn set_access(meta: &mut InodeMeta, acl: Option<Acl>, flags: SetXattrFlags) -> Result<()> {
    check_flags(meta.access_acl.is_some(), flags)?;
    let kept = acl.clone().filter(|acl| !acl.is_minimal());
    charge_list(&mut meta.charge, &meta.access_acl, &kept)?;
    if let Some(acl) = &acl {
        meta.perm = meta.perm & !0o777 | acl.perm();
        if flags.clear_sgid {
            meta.perm &= !SGID;
        }
    }
    meta.access_acl = kept;
    Ok(())
}

/// Charges for `new` instead of `old`. Fails with `ENOSPC`.
fn charge_list(charge: &mut SpaceCharge, old: &Option<Acl>, new: &Option<Acl>) -> Result<()> {
    let bytes = |list: &Option<Acl>| list.as_ref().map_or(0, Acl::bytes);
    charge.set(charge.bytes() - bytes(old) + bytes(new))
}

fn check_flags(exists: bool, flags: SetXattrFlags) -> Result<()> {
    if flags.create && exists {
        Err(Errno::EEXIST)
    } else if flags.replace && !exists {
        Err(Errno::ENODATA)
    } else {
        Ok(())
    }
}
