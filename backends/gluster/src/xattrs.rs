//! Extended attributes.

use std::ffi::CStr;
use std::time::Instant;

use defuse_fs::{Context, Errno, Ino, Result, SetXattrFlags, Xattr, XattrName};

use crate::answers::ChangeSubject;
use crate::gluster::Gluster;
use crate::names::DEFAULT_ACL;
use crate::volume::{Gfid, c_xattr, no_stat, set};

/// The largest value, and the longest list of names, as for the kernel.
const LARGEST: usize = 1 << 16;

/// The label of a file for SELinux.
const LABEL: &[u8] = b"security.selinux";

/// Attempts to read a value with a changing size.
const ATTEMPTS: usize = 8;

/// True for an attribute that belongs to the users. The others control GlusterFS itself, and are not served.
fn is_served(name: &[u8]) -> bool {
    const FOR_USERS: [&[u8]; 2] = [b"user.", b"security."];
    const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
    const OF_GLUSTER: [&[u8]; 7] = [
        b"trusted.glusterfs.",
        b"trusted.afr.",
        b"trusted.ec.",
        b"trusted.gfid",
        b"trusted.pgfid.",
        b"trusted.bit-rot.",
        b"trusted.tier.",
    ];
    let starts = |with: &[&[u8]]| with.iter().any(|start| name.starts_with(start));
    starts(&FOR_USERS)
        || ACLS.contains(&name)
        || name.starts_with(b"trusted.") && !starts(&OF_GLUSTER)
}

fn served(name: XattrName<'_>) -> Result<()> {
    if is_served(name.as_bytes()) { Ok(()) } else { Err(Errno::EOPNOTSUPP) }
}

impl Gluster {
    pub(crate) fn value(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        served(name)?;
        // ls(1) reads this attribute of each file. GlusterFS's own client answers in this way, too.
        if name.as_bytes() == LABEL && !self.settings.labels {
            return Err(Errno::ENODATA);
        }
        // The kernel reads this attribute before the first write to a file.
        let is_capability = name.as_bytes() == b"security.capability";
        if is_capability && self.nodes.is_new(ino, self.watch.short(), Instant::now()) {
            return Err(Errno::ENODATA);
        }
        let acting = self.act(cx);
        let gfid = self.nodes.gfid(ino)?;
        if self.is_known_to_lack(gfid, name) {
            return Err(Errno::ENODATA);
        }
        let value = self.whole(ino, Some(&c_xattr(name)?));
        if matches!(value, Err(Errno::ENODATA)) {
            self.keep_lack(gfid, name, &acting.asked);
        }
        Xattr::answer(value?, room)
    }

    pub(crate) fn names(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        let _acting = self.act(cx);
        let all = self.whole(ino, None)?;
        let names = all.split_inclusive(|&byte| byte == 0);
        let mut list: Vec<&[u8]> =
            names.filter(|name| is_served(name.strip_suffix(b"\0").unwrap_or(name))).collect();
        // Several translators may add the same name.
        list.sort_unstable();
        list.dedup();
        Xattr::answer(list.concat(), room)
    }

    /// A value, or the list of names.
    fn whole(&self, ino: Ino, name: Option<&CStr>) -> Result<Vec<u8>> {
        let mut value = Vec::new();
        for _ in 0..ATTEMPTS {
            let room = &mut value;
            let got = self.reach(
                ino,
                |object| self.volume.get_xattr(object, name, room),
                |_| Err(Errno::ESTALE),
            );
            let got = match got {
                Err(Errno::ESTALE) => match self.nodes.any_open(ino) {
                    Some(fh) => self.file(fh)?.handle.get_xattr(name, &mut value),
                    None => Err(Errno::ESTALE),
                },
                got => got,
            };
            match got {
                Ok(len) if len <= value.len() => {
                    value.truncate(len);
                    return Ok(value);
                }
                Ok(len) if len > LARGEST => return Err(Errno::E2BIG),
                Ok(len) => value.resize(len, 0),
                Err(Errno::ERANGE) => value.clear(),
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::EIO)
    }

    pub(crate) fn set_value(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        (value, flags): (&[u8], SetXattrFlags),
    ) -> Result<()> {
        served(name)?;
        if name.as_bytes() == LABEL && !self.settings.labels {
            return Err(Errno::EOPNOTSUPP);
        }
        let acting = self.act(cx);
        let gfid = self.nodes.gfid(ino)?;
        self.nodes.has_attributes(ino);
        let _change = self.watch.changing(&[gfid]);
        let _own = self.own_change(&[ChangeSubject::Attributes(gfid), ChangeSubject::Rights(gfid)]);
        let name = c_xattr(name)?;
        let how = match flags {
            SetXattrFlags { create: true, .. } => libc::XATTR_CREATE,
            SetXattrFlags { replace: true, .. } => libc::XATTR_REPLACE,
            _ => 0,
        };
        self.reach(
            ino,
            |object| self.volume.set_xattr(object, &name, value, how),
            |file| file.handle.set_xattr(&name, value, how),
        )?;
        self.lists_changed(gfid, &name);
        if flags.clear_sgid {
            let perm = self.attributes(ino, &acting.asked)?.perm;
            let mut stat = no_stat();
            stat.st_mode = perm & !0o2000;
            let object = self.object(ino)?;
            self.volume.set_attributes(&object, stat, set::MODE)?;
        }
        Ok(())
    }

    pub(crate) fn remove_value(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
    ) -> Result<()> {
        served(name)?;
        let _acting = self.act(cx);
        let gfid = self.nodes.gfid(ino)?;
        let _change = self.watch.changing(&[gfid]);
        let _own = self.own_change(&[ChangeSubject::Attributes(gfid), ChangeSubject::Rights(gfid)]);
        let name = c_xattr(name)?;
        self.reach(
            ino,
            |object| self.volume.remove_xattr(object, &name),
            |file| file.handle.remove_xattr(&name),
        )?;
        self.lists_changed(gfid, &name);
        Ok(())
    }

    fn lists_changed(&self, gfid: Gfid, name: &CStr) {
        if name == DEFAULT_ACL {
            self.defaults.changed(gfid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These attributes start repairs, move files between servers, or change the identity of files.
    #[test]
    fn attributes_that_control_glusterfs_are_not_served() {
        for name in [
            "glusterfs.file.heal",
            "trusted.glusterfs.dht",
            "trusted.gfid",
            "trusted.afr.repl-client-0",
            "system.nfs4_acl",
            "distribute.migrate-data",
        ] {
            assert!(!is_served(name.as_bytes()), "{name}");
        }
        for name in ["user.a", "security.capability", "trusted.b", "system.posix_acl_access"] {
            assert!(is_served(name.as_bytes()), "{name}");
        }
    }
}
