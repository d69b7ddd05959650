//! Extensions: security contexts and supplementary groups of a creation.
//!
//! Source: `get_security_context` and `get_create_supp_group` in
//! `fs/fuse/dir.c`. Each extension is a multiple of 8 bytes, and so is each
//! security context within one.

use super::PackedRecords;
use super::reader::split_nul;
use crate::abi::{self, ExtHeader, FUSE_EXT_GROUPS, FUSE_MAX_NR_SECCTX, Secctx, rec_align};
use crate::vendor::EXT_CALLER_GROUPS;
use zerocopy::FromBytes;

/// Extensions of CREATE, MKDIR, MKNOD, SYMLINK and TMPFILE, if [`abi::FUSE_SECURITY_CTX`] or
/// [`abi::FUSE_CREATE_SUPP_GROUP`] were negotiated. Validated completely when the request is
/// decoded.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestExtensions<'a> {
    contexts: SecurityContexts<'a>,
    groups: PackedRecords<'a, u32>,
    pub(super) caller_groups: Option<PackedRecords<'a, u32>>,
}

/// An initial extended attribute of the new inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecurityContext<'a> {
    /// Name of the attribute, such as `security.selinux`.
    pub name: &'a [u8],
    /// Its value.
    pub value: &'a [u8],
}

impl<'a> RequestExtensions<'a> {
    /// Initial extended attributes of the new inode.
    pub fn security_contexts(&self) -> SecurityContexts<'a> {
        self.contexts
    }

    /// Supplementary groups of the caller. The kernel sends the group that equals the group of the
    /// parent directory, for set-group-id directories.
    pub fn groups(&self) -> PackedRecords<'a, u32> {
        self.groups
    }

    pub(super) fn parse(mut bytes: &'a [u8]) -> Result<RequestExtensions<'a>, &'static str> {
        let (mut contexts, mut groups, mut caller_groups) = (None, None, None);
        while !bytes.is_empty() {
            let (header, _) =
                ExtHeader::read_from_prefix(bytes).map_err(|_| "too short for a header")?;
            let size = header.size as usize;
            if size < size_of::<ExtHeader>() || size > bytes.len() {
                return Err("its size is not within the extensions");
            }
            let content = &bytes[size_of::<ExtHeader>()..size];
            let twice = match header.type_ {
                0..=FUSE_MAX_NR_SECCTX => {
                    contexts.replace(parse_contexts(content, header.type_)?).is_some()
                }
                FUSE_EXT_GROUPS => groups.replace(parse_groups(content)?).is_some(),
                EXT_CALLER_GROUPS => caller_groups.replace(parse_groups(content)?).is_some(),
                _ => return Err("unknown type"),
            };
            if twice {
                return Err("the same type twice");
            }
            bytes = bytes.get(rec_align(size)..).unwrap_or_default();
        }
        let (contexts, groups) = (contexts.unwrap_or_default(), groups.unwrap_or_default());
        Ok(RequestExtensions { contexts, groups, caller_groups })
    }
}

fn parse_contexts(content: &[u8], count: u32) -> Result<SecurityContexts<'_>, &'static str> {
    let all = SecurityContexts { bytes: content, left: count };
    let mut walk = all;
    while walk.left > 0 {
        walk.step().ok_or("a security context does not fit")?;
    }
    Ok(all)
}

fn parse_groups(content: &[u8]) -> Result<PackedRecords<'_, u32>, &'static str> {
    let (header, rest) =
        abi::SuppGroups::read_from_prefix(content).map_err(|_| "too short for groups")?;
    let len = (header.nr_groups as usize).checked_mul(size_of::<u32>());
    let groups = len.and_then(|len| rest.get(..len)).ok_or("the groups do not fit")?;
    Ok(PackedRecords::new(groups))
}

/// The security contexts of a creation.
#[derive(Clone, Copy, Debug, Default)]
pub struct SecurityContexts<'a> {
    bytes: &'a [u8],
    left: u32,
}

impl<'a> SecurityContexts<'a> {
    fn step(&mut self) -> Option<SecurityContext<'a>> {
        let (header, rest) = Secctx::read_from_prefix(self.bytes).ok()?;
        let (name, rest) = split_nul(rest)?;
        let value = rest.get(..header.size as usize)?;
        let used = size_of::<Secctx>() + name.len() + 1 + value.len();
        self.bytes = self.bytes.get(rec_align(used)..).unwrap_or_default();
        self.left -= 1;
        Some(SecurityContext { name, value })
    }
}

impl<'a> Iterator for SecurityContexts<'a> {
    type Item = SecurityContext<'a>;

    fn next(&mut self) -> Option<SecurityContext<'a>> {
        match self.left {
            0 => None,
            _ => self.step(),
        }
    }
}
