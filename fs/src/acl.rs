//! The decision of a POSIX access control list, acl(5), from the bytes of
//! `system.posix_acl_access`.

/// What the value of the attribute begins with, `POSIX_ACL_XATTR_VERSION` of `linux/posix_acl_xattr.h`.
pub const VERSION: u32 = 2;
/// The tag of the owner's entry, as all of them in `linux/posix_acl.h`.
pub const USER_OBJ: u16 = 0x01;
/// Of an entry for a user.
pub const USER: u16 = 0x02;
/// Of that of the file's group.
pub const GROUP_OBJ: u16 = 0x04;
/// Of an entry for a group.
pub const GROUP: u16 = 0x08;
/// Of the mask: no more than it is granted to those above but the owner.
pub const MASK: u16 = 0x10;
/// Of the entry for everybody else.
pub const OTHER: u16 = 0x20;

struct AclEntry {
    tag: u16,
    perm: u32,
    id: u32,
}

/// Whether the list grants `mask` (4 read, 2 write, 1 execute) to the user `who`, who is in those
/// groups for which `in_group` says so, for a file of `owner`, user and group; `None` for bytes that
/// are no list.
pub fn permits(
    list: &[u8],
    (who, in_group): (u32, &dyn Fn(u32) -> bool),
    owner: (u32, u32),
    mask: u32,
) -> Option<bool> {
    let (uid, gid) = owner;
    let entries = entries(list)?;
    let limit = entries().find(|entry| entry.tag == MASK).map_or(7, |entry| entry.perm);
    let grants = |perm: u32| perm & mask == mask;
    let mut in_a_group = false;
    for entry in entries() {
        match entry.tag {
            USER_OBJ if uid == who => return Some(grants(entry.perm)),
            USER if entry.id == who => return Some(grants(entry.perm & limit)),
            GROUP_OBJ | GROUP => {
                let group = if entry.tag == GROUP_OBJ { gid } else { entry.id };
                if in_group(group) {
                    in_a_group = true;
                    // Any group that grants everything is enough.
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

/// A way to go through the entries, as often as one likes; `None` for another format.
fn entries<'a>(list: &'a [u8]) -> Option<impl Fn() -> Entries<'a>> {
    let (header, rest) = list.split_first_chunk::<4>()?;
    let (chunks, tail) = rest.as_chunks::<8>();
    let known = u32::from_le_bytes(*header) == VERSION && tail.is_empty();
    known.then_some(move || Entries(chunks.iter()))
}

struct Entries<'a>(std::slice::Iter<'a, [u8; 8]>);

impl Iterator for Entries<'_> {
    type Item = AclEntry;

    fn next(&mut self) -> Option<AclEntry> {
        let [t0, t1, p0, p1, id @ ..] = *self.0.next()?;
        let perm = u32::from(u16::from_le_bytes([p0, p1])) & 7;
        Some(AclEntry { tag: u16::from_le_bytes([t0, t1]), perm, id: u32::from_le_bytes(id) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for (tag, perm, id) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(perm.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn an_access_list_decides_as_acl_5_says() {
        let acl = list(&[
            (USER_OBJ, 6, u32::MAX),
            (USER, 7, 1001),
            (GROUP_OBJ, 4, u32::MAX),
            (GROUP, 6, 50),
            (MASK, 5, u32::MAX),
            (OTHER, 1, u32::MAX),
        ]);
        let ask = |uid, gid, groups: &[u32], mask| {
            let in_group = |group| group == gid || groups.contains(&group);
            permits(&acl, (uid, &in_group), (1000, 100), mask).unwrap()
        };
        assert!(ask(1000, 1, &[], 6) && !ask(1000, 1, &[], 1));
        // A named user is limited by the mask, and looks no further.
        assert!(ask(1001, 100, &[], 5) && !ask(1001, 100, &[], 2));
        // The group grants reading, the named group writing, which the mask takes away.
        assert!(ask(1002, 100, &[], 4) && !ask(1002, 100, &[], 1));
        assert!(ask(1002, 1, &[50], 4) && !ask(1002, 1, &[50], 2));
        // In a group that grants nothing, the rights of others do not count.
        assert!(!ask(1002, 100, &[], 1) && ask(1003, 1, &[], 1));
        assert_eq!(permits(b"xx", (1, &|_| false), (0, 0), 1), None);
    }
}
