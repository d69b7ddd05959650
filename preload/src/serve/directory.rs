//! Listings of directories.

use defuse_fs::{DirItem, DirSink, Entry as FsEntry, Errno};

use crate::machine::sys;
use crate::process::table::DescriptorEntry;
use crate::serve::call::{CallResult, ProgramCall};

/// `struct linux_dirent64`: inode, offset, length, type, name. The older `linux_dirent` has the
/// type in its last byte instead.
struct DirentRecords<'a> {
    room: &'a mut [u8],
    used: usize,
    old: bool,
}

/// A record with its name's NUL; the older form has as many bytes.
fn record_len(name_len: usize) -> usize {
    (20 + name_len).next_multiple_of(8)
}

impl DirSink for DirentRecords<'_> {
    fn wants_entries(&self) -> bool {
        false
    }

    fn fits(&self, name_len: usize) -> bool {
        self.used + record_len(name_len) <= self.room.len()
    }

    fn add(&mut self, item: DirItem<'_>, _: Option<&FsEntry>) {
        let len = record_len(item.name.len());
        let record = &mut self.room[self.used..self.used + len];
        record.fill(0);
        record[..8].copy_from_slice(&item.ino.to_ne_bytes());
        record[8..16].copy_from_slice(&item.next.to_ne_bytes());
        record[16..18].copy_from_slice(&(len as u16).to_ne_bytes());
        let name = if self.old { 18 } else { 19 };
        record[name..name + item.name.len()].copy_from_slice(item.name);
        record[if self.old { len - 1 } else { 18 }] = item.kind.d_type();
        self.used += len;
    }
}

fn list(call: &ProgramCall<'_>, entry: &DescriptorEntry, old: bool) -> CallResult {
    let room = sys::program_memory(call.args[1], call.args[2] as u32 as usize)?;
    let small = room.len() < 24;
    let mut records = DirentRecords { room, used: 0, old };
    call.client().getdents(call.task(), entry.file(), &mut records)?;
    if small && records.used == 0 {
        return Err(Errno::EINVAL.into());
    }
    Ok(records.used as i64)
}

pub fn getdents64(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    list(call, entry, false)
}

pub fn getdents(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    list(call, entry, true)
}
