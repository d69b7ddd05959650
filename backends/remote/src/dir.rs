//! Directory listings.

use defuse_fs::{Context, DirBuf, DirItem, Entry, Errno, File, Ino, Name, PushOutcome, Result};

use super::RemoteShared;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode;
use defuse_wire::decode::{ListingEntries, ListingEntry, lookup_out};
use defuse_wire::encode::EncodedRequest;

/// The size of a listing request, in bytes.
const LISTING: usize = 32 * 1024;

impl RemoteShared {
    pub(super) fn readdir(
        &self,
        cx: &Context<'_>,
        dir: File,
        from: u64,
        out: &mut DirBuf<'_>,
    ) -> Result<()> {
        let plus = out.wants_entries() && self.caps.readdir_entries;
        if !out.wants_entries() && self.list_ahead(cx, dir, from, out)? {
            return Ok(());
        }
        let opcode = if plus && !self.lacks(Opcode::Readdirplus) {
            Opcode::Readdirplus
        } else {
            Opcode::Readdir
        };
        let size = LISTING.min(self.agreement.max_received());
        let args =
            abi::ReadIn { fh: dir.fh.0, offset: from, size: size as u32, ..Default::default() };
        let request = EncodedRequest::new(opcode, cx, dir.ino).with(&args);
        // Entries are passed on after the receive buffer is released, because that may cause
        // requests.
        let body = self.request(cx, request, |body| {
            if body.len() > size { Err(Errno::EIO) } else { Ok(body.to_vec()) }
        });
        self.paths.record_read(dir.ino);
        match body {
            Ok(body) => self.push_all(
                cx,
                dir.ino,
                ListingEntries::new(&body, opcode == Opcode::Readdirplus),
                out,
            ),
            Err(Errno::ENOSYS) if opcode == Opcode::Readdirplus => self.readdir(cx, dir, from, out),
            Err(errno) => Err(errno),
        }
    }

    /// Passes the entries on. Returns the lookups of entries that do not fit.
    pub(super) fn push_all<'a>(
        &self,
        cx: &Context<'_>,
        dir: Ino,
        listing: impl Iterator<Item = Result<ListingEntry<'a>>>,
        out: &mut DirBuf<'_>,
    ) -> Result<()> {
        let (mut pushed, mut full) = (0, false);
        for listed in listing {
            let listed = match listed {
                Ok(listed) => listed,
                // Earlier entries count. The next request returns the error again.
                Err(_) if pushed > 0 => break,
                Err(errno) => {
                    crate::reply_log::LOG
                        .warn(|| "READDIR: a listing with an invalid name: EIO".to_owned());
                    return Err(errno);
                }
            };
            full = full || !self.push(cx, dir, &listed, out);
            if full {
                // Only the lookups of the remaining entries matter.
                self.give_back_listed(&listed, false);
            } else {
                pushed += 1;
            }
        }
        Ok(())
    }

    /// Passes one entry on. Returns false if it does not fit.
    fn push(
        &self,
        cx: &Context<'_>,
        dir: Ino,
        listed: &ListingEntry<'_>,
        out: &mut DirBuf<'_>,
    ) -> bool {
        let kind = listed.entry.map_or(listed.kind, |entry| entry.attr.kind);
        let item = DirItem { ino: listed.ino, next: listed.next, kind, name: listed.name };
        let mut taken = false;
        let entry = || {
            taken = listed.entry.is_some();
            listed.entry.or_else(|| self.look_up_listed(cx, dir, listed.name))
        };
        let added = out.push_with(item, entry) == PushOutcome::Added;
        if added {
            self.give_back_listed(listed, taken);
        }
        added
    }

    fn give_back_listed(&self, listed: &ListingEntry<'_>, taken: bool) {
        if let Some(ino) = listed.looked_up
            && !taken
        {
            self.forget(ino, 1);
        }
    }

    /// Looks an entry up, for a server without READDIRPLUS.
    fn look_up_listed(&self, cx: &Context<'_>, dir: Ino, name: &[u8]) -> Option<Entry> {
        let name = Name::new(name).ok()?;
        let request = EncodedRequest::new(Opcode::Lookup, cx, dir).with_name(name);
        self.request(cx, request, |body| {
            lookup_out(body, false).inspect_err(|_| {
                if let Some(ino) = decode::find_granted(body, false).0 {
                    self.forgets.add(ino, 1);
                }
            })
        })
        .ok()
    }
}
