//! POSIX access control lists, acl(5), in the format of the extended attributes
//! `system.posix_acl_access` and `system.posix_acl_default`. Source: fs/posix_acl.c of Linux.

use super::PosixUser;
use crate::{Errno, Result};

/// First field of the value, `POSIX_ACL_XATTR_VERSION` of `linux/posix_acl_xattr.h`.
pub const VERSION: u32 = 2;
/// Tag: the owner. linux/posix_acl.h defines the tags.
pub const USER_OBJ: u16 = 0x01;
/// Tag: a named user.
pub const USER: u16 = 0x02;
/// Tag: the group of the file.
pub const GROUP_OBJ: u16 = 0x04;
/// Tag: a named group.
pub const GROUP: u16 = 0x08;
/// Tag: the mask, the maximum for all entries except owner and other.
pub const MASK: u16 = 0x10;
/// Tag: all other users.
pub const OTHER: u16 = 0x20;

/// The id of entries without a qualifier.
const NO_ID: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// True if the ACL grants `mask` (4 read, 2 write, 1 execute) to `user` on a file of `owner`, user
/// and group. `None` if the bytes are not an ACL.
pub fn permits<U: PosixUser + ?Sized>(
    list: &[u8],
    user: &U,
    owner: (u32, u32),
    mask: u32,
) -> Option<bool> {
    let (uid, gid) = owner;
    let entries = entries(list).ok()?;
    let limit = entries.clone().find(|entry| entry.tag == MASK).map_or(7, |entry| entry.perm);
    let grants = |perm: u16| u32::from(perm) & mask == mask;
    let mut in_a_group = false;
    for entry in entries {
        match entry.tag {
            USER_OBJ if uid == user.uid() => return Some(grants(entry.perm)),
            USER if entry.id == user.uid() => return Some(grants(entry.perm & limit)),
            GROUP_OBJ | GROUP => {
                let group = if entry.tag == GROUP_OBJ { gid } else { entry.id };
                if user.in_group(group) {
                    in_a_group = true;
                    // One group that grants everything is sufficient.
                    if grants(entry.perm) {
                        return Some(grants(entry.perm & limit));
                    }
                }
            }
            OTHER => return Some(!in_a_group && grants(entry.perm)),
            _ => {}
        }
    }
    None
}

/// A valid list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<AclEntry>);

impl Acl {
    /// Parses the value of the attribute. Returns `None` for an empty list, which means removal.
    /// Fails with `EINVAL` for an invalid list, and with `EOPNOTSUPP` for another version of the
    /// format.
    pub fn parse(value: &[u8]) -> Result<Option<Acl>> {
        let entries: Vec<_> = entries(value)?.collect();
        if entries.is_empty() {
            return Ok(None);
        }
        check(&entries)?;
        Ok(Some(Acl(entries)))
    }

    /// The value of the attribute.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            bytes.extend(entry.tag.to_le_bytes());
            bytes.extend(entry.perm.to_le_bytes());
            bytes.extend(entry.id.to_le_bytes());
        }
        bytes
    }

    /// The memory that the entries take, in bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// The permission bits (0 to 0o777) of a file with this ACL.
    pub fn perm(&self) -> u32 {
        let group = self.find(MASK).or(self.find(GROUP_OBJ));
        let bits = |entry: Option<&AclEntry>| entry.map_or(0, |entry| u32::from(entry.perm));
        bits(self.find(USER_OBJ)) << 6 | bits(group) << 3 | bits(self.find(OTHER))
    }

    /// True if the ACL is equivalent to the permission bits.
    #[must_use]
    pub fn is_minimal(&self) -> bool {
        self.0.iter().all(|entry| entry.tag & (USER_OBJ | GROUP_OBJ | OTHER) != 0)
    }

    /// Applies chmod(2): owner, mask (or group, without a mask) and other take the new bits.
    pub fn chmod(&mut self, perm: u32) {
        self.restrict(perm, |_, new| new);
    }

    /// Turns this default ACL into the access ACL of a new file created with `perm`. Each class
    /// keeps the bits that both grant. Returns the permission bits of the file.
    pub fn inherit(&mut self, perm: u32) -> u32 {
        self.restrict(perm, |old, requested| old & requested);
        perm & !0o777 | self.perm()
    }

    fn restrict(&mut self, perm: u32, combine: impl Fn(u16, u16) -> u16) {
        let group_class = if self.find(MASK).is_some() { MASK } else { GROUP_OBJ };
        for entry in &mut self.0 {
            let shift = match entry.tag {
                USER_OBJ => 6,
                OTHER => 0,
                tag if tag == group_class => 3,
                _ => continue,
            };
            entry.perm = combine(entry.perm, (perm >> shift & 7) as u16);
        }
    }

    fn find(&self, tag: u16) -> Option<&AclEntry> {
        self.0.iter().find(|entry| entry.tag == tag)
    }
}

/// Checks the order: owner, users, group, groups, mask, other. Named entries require a mask.
fn check(entries: &[AclEntry]) -> Result<()> {
    let mut previous = 0;
    let (mut needs_mask, mut seen) = (false, 0);
    for entry in entries {
        let repeats = matches!(entry.tag, USER | GROUP) && entry.tag == previous;
        let known = matches!(entry.tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER);
        if !known || (entry.tag <= previous && !repeats) || entry.perm > 7 {
            return Err(Errno::EINVAL);
        }
        if matches!(entry.tag, USER | GROUP) {
            needs_mask = true;
            if entry.id == NO_ID {
                return Err(Errno::EINVAL);
            }
        }
        seen |= entry.tag;
        previous = entry.tag;
    }
    let needed = USER_OBJ | GROUP_OBJ | OTHER | if needs_mask { MASK } else { 0 };
    if seen & needed == needed { Ok(()) } else { Err(Errno::EINVAL) }
}

/// Parses the entries of a value. Fails with `EINVAL` for a wrong length, and with `EOPNOTSUPP` for
/// another version.
fn entries(value: &[u8]) -> Result<impl Iterator<Item = AclEntry> + Clone> {
    let (header, rest) = value.split_first_chunk::<4>().ok_or(Errno::EINVAL)?;
    if u32::from_le_bytes(*header) != VERSION {
        return Err(Errno::EOPNOTSUPP);
    }
    let (chunks, tail) = rest.as_chunks::<8>();
    if tail.is_empty() { Ok(chunks.iter().map(entry)) } else { Err(Errno::EINVAL) }
}

fn entry(bytes: &[u8; 8]) -> AclEntry {
    let [t0, t1, p0, p1, id @ ..] = *bytes;
    let tag = u16::from_le_bytes([t0, t1]);
    // Ignore the id unless the tag is a named user or group, as the kernel does.
    let id = if tag == USER || tag == GROUP { u32::from_le_bytes(id) } else { NO_ID };
    AclEntry { tag, perm: u16::from_le_bytes([p0, p1]), id }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let entry = |&(tag, perm, id): &(u16, u16, u32)| AclEntry { tag, perm, id };
        Acl(entries.iter().map(entry).collect()).to_bytes()
    }

    fn make_named() -> Vec<u8> {
        value(&[
            (USER_OBJ, 7, NO_ID),
            (USER, 5, 1000),
            (GROUP_OBJ, 4, NO_ID),
            (MASK, 6, NO_ID),
            (OTHER, 1, NO_ID),
        ])
    }

    #[test]
    fn the_format_survives_a_round_trip() {
        let acl = Acl::parse(&make_named()).unwrap().unwrap();
        assert_eq!(acl.to_bytes(), make_named());
        assert_eq!((acl.perm(), acl.is_minimal()), (0o761, false));
        assert_eq!(Acl::parse(&VERSION.to_le_bytes()), Ok(None));
    }

    #[test]
    fn invalid_acls_are_refused() {
        assert_eq!(Acl::parse(b""), Err(Errno::EINVAL));
        assert_eq!(Acl::parse(&1u32.to_le_bytes()), Err(Errno::EOPNOTSUPP));
        assert_eq!(Acl::parse(&make_named()[..20]), Err(Errno::EINVAL));
        let minimal = [(USER_OBJ, 7, NO_ID), (GROUP_OBJ, 4, NO_ID), (OTHER, 1, NO_ID)];
        assert!(Acl::parse(&value(&minimal)).unwrap().unwrap().is_minimal());
        assert_eq!(Acl::parse(&value(&minimal[..2])), Err(Errno::EINVAL));
        let mut wrong = minimal;
        wrong.swap(0, 1);
        assert_eq!(Acl::parse(&value(&wrong)), Err(Errno::EINVAL));
        wrong = minimal;
        wrong[0].1 = 8;
        assert_eq!(Acl::parse(&value(&wrong)), Err(Errno::EINVAL));
        let no_mask = [minimal[0], (USER, 7, 5), minimal[1], minimal[2]];
        assert_eq!(Acl::parse(&value(&no_mask)), Err(Errno::EINVAL));
    }

    #[test]
    fn chmod_changes_the_mask_and_a_child_inherits_the_intersection() {
        let mut acl = Acl::parse(&make_named()).unwrap().unwrap();
        acl.chmod(0o640);
        assert_eq!(acl.perm(), 0o640);
        assert_eq!(acl.find(GROUP_OBJ).unwrap().perm, 4);
        let mut acl = Acl::parse(&make_named()).unwrap().unwrap();
        assert_eq!(acl.inherit(0o4666), 0o4660);
        assert_eq!(acl.find(USER).unwrap().perm, 5);
    }

    struct GroupMember(u32, &'static [u32]);

    impl PosixUser for GroupMember {
        fn uid(&self) -> u32 {
            self.0
        }
        fn in_group(&self, gid: u32) -> bool {
            self.1.contains(&gid)
        }
    }

    #[test]
    fn access_checks_follow_acl_5() {
        let acl = value(&[
            (USER_OBJ, 6, NO_ID),
            (USER, 7, 1001),
            (GROUP_OBJ, 4, NO_ID),
            (GROUP, 6, 50),
            (MASK, 5, NO_ID),
            (OTHER, 1, NO_ID),
        ]);
        let ask = |uid, groups: &'static [u32], mask| {
            permits(&acl, &GroupMember(uid, groups), (1000, 100), mask).unwrap()
        };
        assert!(ask(1000, &[1], 6) && !ask(1000, &[1], 1));
        // The mask limits a named user, and no further entry is checked.
        assert!(ask(1001, &[100], 5) && !ask(1001, &[100], 2));
        // The group grants read, and the named group write, which the mask removes.
        assert!(ask(1002, &[100], 4) && !ask(1002, &[100], 1));
        assert!(ask(1002, &[1, 50], 4) && !ask(1002, &[1, 50], 2));
        // In a group that grants nothing, the bits of others do not apply.
        assert!(!ask(1002, &[100], 1) && ask(1003, &[1], 1));
        assert_eq!(permits(b"xx", &GroupMember(1, &[]), (0, 0), 1), None);
    }
}
