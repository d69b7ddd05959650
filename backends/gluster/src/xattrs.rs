//! Extended attributes.

use std::ffi::CStr;
use std::time::Instant;

use defuse_fs::{Context, Errno, Ino, Result, SetXattrFlags, Xattr, XattrName};

use crate::absent::AbsentAttributes;
use crate::answers::ChangeSubject;
use crate::gluster::Gluster;
use crate::names::DEFAULT_ACL;
use crate::volume::{Gfid, c_xattr, set, zeroed_stat};

/// The largest value, and the longest list of names, as for the kernel.
const LARGEST: usize = 1 << 16;

/// The label of a file for SELinux.
const LABEL: &[u8] = b"security.selinux";

/// Attempts to read a value with a changing size.
const ATTEMPTS: usize = 8;

/// The access lists.
const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// Attributes that GlusterFS computes when they are read: the bricks that have a file, and its
/// identity.
const COMPUTED: [&[u8]; 3] = [b"trusted.glusterfs.pathinfo", b"glusterfs.pathinfo", IDENTITY];

/// The identity of an inode as a text, which this client knows.
const IDENTITY: &[u8] = b"glusterfs.gfid.string";

/// A GFID in the form of a UUID.
fn identity(gfid: Gfid) -> String {
    let hex: String = gfid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// True for an attribute that belongs to the users. The others control GlusterFS itself, and are
/// not served.
fn is_served(name: &[u8]) -> bool {
    const FOR_USERS: [&[u8]; 2] = [b"user.", b"security."];
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

impl Gluster {
    /// Fails with `EOPNOTSUPP` for an attribute that cannot be changed.
    fn check_served(&self, name: XattrName<'_>) -> Result<()> {
        let name = name.as_bytes();
        match is_served(name) && (self.settings.posix_acl || !ACLS.contains(&name)) {
            true => Ok(()),
            false => Err(Errno::EOPNOTSUPP),
        }
    }

    pub(crate) fn value(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        if !COMPUTED.contains(&name.as_bytes()) {
            self.check_served(name)?;
        }
        // ls(1) reads this attribute of each file. GlusterFS's own client answers in this way, too.
        if name.as_bytes() == LABEL && !self.settings.labels {
            return Err(Errno::ENODATA);
        }
        // The kernel reads this attribute before the first write to a file.
        let is_capability = name.as_bytes() == b"security.capability";
        if is_capability && self.nodes.is_new(ino, self.watch.short_lifetime(), Instant::now()) {
            return Err(Errno::ENODATA);
        }
        if name.as_bytes() == IDENTITY {
            return Xattr::answer(identity(self.nodes.gfid(ino)?).into_bytes(), room);
        }
        let acting = self.act(cx);
        let gfid = self.nodes.gfid(ino)?;
        let lacks = || self.absent.lacks(gfid, name.as_bytes(), self.watch.short_lifetime());
        if self.is_known_to_lack(gfid, name) || lacks() {
            return Err(Errno::ENODATA);
        }
        let queried = (Instant::now(), self.absent.changes());
        let value = self.read_whole(ino, Some(&c_xattr(name)?));
        if matches!(value, Err(Errno::ENODATA)) {
            self.absent.add(gfid, name.as_bytes(), queried, self.watch.short_lifetime());
            self.keep_lack(gfid, name, &acting.query);
        }
        Xattr::answer(value?, room)
    }

    pub(crate) fn names(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        let _acting = self.act(cx);
        let all = self.read_whole(ino, None)?;
        let names = all.split_inclusive(|&byte| byte == 0);
        let mut list: Vec<&[u8]> =
            names.filter(|name| is_served(name.strip_suffix(b"\0").unwrap_or(name))).collect();
        // Several translators may add the same name.
        list.sort_unstable();
        list.dedup();
        Xattr::answer(list.concat(), room)
    }

    /// A value, or the list of names.
    fn read_whole(&self, ino: Ino, name: Option<&CStr>) -> Result<Vec<u8>> {
        let mut value = Vec::new();
        for _ in 0..ATTEMPTS {
            let room = &mut value;
            let got = self.reach(
                ino,
                |object| self.volume.get_xattr(object, name, room),
                |_| Err(Errno::ESTALE),
            );
            let got = match got {
                Err(Errno::ESTALE) => match self.nodes.find_open_file(ino) {
                    Some(fh) => self.file(fh)?.handle()?.get_xattr(name, &mut value),
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
        self.check_served(name)?;
        if name.as_bytes() == LABEL && !self.settings.labels {
            return Err(Errno::EOPNOTSUPP);
        }
        let acting = self.act(cx);
        let gfid = self.nodes.gfid(ino)?;
        self.nodes.has_attributes(ino);
        let _change = (self.watch.begin_change(&[gfid]), self.client_change(ino));
        let _own =
            self.begin_own_change(&[ChangeSubject::Attributes(gfid), ChangeSubject::Rights(gfid)]);
        let name = c_xattr(name)?;
        let how = match flags {
            SetXattrFlags { create: true, .. } => libc::XATTR_CREATE,
            SetXattrFlags { replace: true, .. } => libc::XATTR_REPLACE,
            _ => 0,
        };
        let _own_attribute = self.change_of_attributes();
        self.reach(
            ino,
            |object| self.volume.set_xattr(object, &name, value, how),
            |file| file.handle()?.set_xattr(&name, value, how),
        )?;
        self.record_list_change(gfid, &name);
        if flags.clear_sgid {
            let perm = self.fetch_attributes(ino, &acting.query)?.perm;
            let mut stat = zeroed_stat();
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
        self.check_served(name)?;
        let _acting = self.act(cx);
        let gfid = self.nodes.gfid(ino)?;
        let _change = (self.watch.begin_change(&[gfid]), self.client_change(ino));
        let _own =
            self.begin_own_change(&[ChangeSubject::Attributes(gfid), ChangeSubject::Rights(gfid)]);
        let name = c_xattr(name)?;
        let _own_attribute = self.change_of_attributes();
        self.reach(
            ino,
            |object| self.volume.remove_xattr(object, &name),
            |file| file.handle()?.remove_xattr(&name),
        )?;
        self.record_list_change(gfid, &name);
        Ok(())
    }

    /// Records that this client changes extended attributes, until the result is dropped.
    fn change_of_attributes(&self) -> ExtendedChange<'_> {
        self.absent.record_change();
        ExtendedChange(&self.absent)
    }

    fn record_list_change(&self, gfid: Gfid, name: &CStr) {
        if name == DEFAULT_ACL {
            self.defaults.record_change(gfid);
        }
    }
}

/// A change of extended attributes.
struct ExtendedChange<'a>(&'a AbsentAttributes);

impl Drop for ExtendedChange<'_> {
    fn drop(&mut self) {
        self.0.record_change();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_has_the_form_of_a_uuid() {
        let gfid = std::array::from_fn(|at| at as u8 * 17);
        assert_eq!(identity(gfid), "00112233-4455-6677-8899-aabbccddeeff");
    }

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
            assert!(!COMPUTED.contains(&name.as_bytes()), "{name}");
        }
        for name in COMPUTED {
            assert!(!is_served(name), "{} cannot be changed", name.escape_ascii());
        }
        for name in ["user.a", "security.capability", "trusted.b", "system.posix_acl_access"] {
            assert!(is_served(name.as_bytes()), "{name}");
        }
    }
}
