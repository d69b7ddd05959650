//! Small files whose bytes arrive with the reply to OPEN, so that reading them takes no request.
//!
//! The bytes hold as long as the version of the file's attributes stays, which each read checks.
//! The server does not notice such a read. If the read changes the access time, the client notifies
//! the server before the next request that could see it, or with the release.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use defuse_fs::{AccessMode, Context, Fh, File, Ino, OpenFlags, ReadArgs, ReadBuf, SliceSink};
use defuse_ring::InodeVersionSet;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode::OpenBytes;
use defuse_wire::encode::EncodedRequest;

use super::RemoteShared;
use super::prefetch_interest::PrefetchInterest;

/// Opens request no bytes while so many files have bytes: 8 MiB.
const MOST: usize = 256;

/// No open with one of these flags has bytes.
pub(super) const NO_BYTES: u32 = OpenFlags::DIRECT | OpenFlags::TRUNC | OpenFlags::DIRECTORY;

/// The open files with bytes.
#[derive(Default)]
pub(super) struct WholeFiles {
    files: RwLock<HashMap<Fh, Arc<WholeFile>>>,
    /// In files that are open for reading alone, and in the others.
    prefetch_interest: [PrefetchInterest; 2],
    /// Number of files with a read of which the server has to be notified.
    owed: AtomicUsize,
    /// Files that were closed after that, with their versions: the server may not have seen to the
    /// release yet.
    posted: InodeVersionSet,
}

struct WholeFile {
    ino: Ino,
    version: u64,
    bytes: Box<[u8]>,
    writes: bool,
    /// Reading changes the access time.
    read_is_due: bool,
    was_read: AtomicBool,
    /// True if the server has to be notified of the read.
    is_owed: AtomicBool,
}

impl WholeFiles {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<Fh, Arc<WholeFile>>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<Fh, Arc<WholeFile>>> {
        self.files.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if an open with these flags requests bytes.
    pub(super) fn wants(&self, flags: OpenFlags) -> bool {
        let is_read = flags.access() != AccessMode::Write && flags.0 & NO_BYTES == 0;
        let prefetch_interest = &self.prefetch_interest[usize::from(writes(flags))];
        is_read && self.has_room() && prefetch_interest.should_request()
    }

    /// True if files that are open for reading are read from their bytes, so that it pays to have
    /// more of them.
    pub(super) fn is_worthwhile(&self) -> bool {
        self.prefetch_interest[0].is_worthwhile() && self.has_room()
    }

    /// True if one more file may have bytes.
    pub(super) fn has_room(&self) -> bool {
        self.read().len() < MOST
    }

    /// The version of the attributes for which the bytes of an open file hold.
    pub(super) fn version(&self, fh: Fh) -> Option<u64> {
        self.read().get(&fh).map(|whole| whole.version)
    }

    /// Marks the read of this file as reported. True if a report was due.
    fn report_read(&self, whole: &WholeFile) -> bool {
        let was_owed = whole.is_owed.swap(false, Ordering::AcqRel);
        if was_owed {
            self.owed.fetch_sub(1, Ordering::AcqRel);
        }
        was_owed
    }

    /// Removes a closed file. True if the server has to be notified of a read.
    pub(super) fn remove_closed(&self, fh: Fh) -> bool {
        if !self.read().contains_key(&fh) {
            return false;
        }
        let Some(whole) = self.write().remove(&fh) else { return false };
        let was_read = whole.was_read.load(Ordering::Relaxed);
        self.prefetch_interest[usize::from(whole.writes)].note(was_read);
        if whole.is_unreported() {
            self.posted.add(whole.ino.0, whole.version);
        }
        self.report_read(&whole)
    }

    /// True if the server may not know yet that a file was read, whose attributes still have this
    /// version.
    pub(super) fn must_report_read(&self, ino: Ino, version: u64) -> bool {
        self.posted.has(ino.0, version)
            || self.owed.load(Ordering::Acquire) > 0
                && self.read().values().any(|whole| whole.ino == ino && whole.is_unreported())
    }

    /// Returns the files with reads of which the server has to be notified.
    fn take_unreported(&self) -> Vec<File> {
        let files = self.read();
        let owed = files.iter().filter(|(_, whole)| self.report_read(whole));
        owed.map(|(fh, whole)| File { ino: whole.ino, fh: *fh }).collect()
    }
}

impl WholeFile {
    fn is_unreported(&self) -> bool {
        self.is_owed.load(Ordering::Acquire)
    }
}

impl RemoteShared {
    /// Returns the version with which an open requests bytes. `None` if it requests none.
    pub(super) fn version_for_open(&self, ino: Ino, flags: OpenFlags) -> Option<u64> {
        let versions = self.paths.versions.get()?;
        self.whole.wants(flags).then(|| versions.attributes(ino)).flatten()
    }

    /// Keeps the bytes of an open file. They belong to the version before the request, or are
    /// newer; reads do not use newer ones.
    pub(super) fn keep_whole(
        &self,
        (version, flags): (u64, OpenFlags),
        file: File,
        bytes: OpenBytes<'_>,
    ) {
        let whole = WholeFile {
            ino: file.ino,
            version,
            bytes: bytes.bytes.into(),
            writes: writes(flags),
            read_is_due: bytes.read_is_due,
            was_read: AtomicBool::new(false),
            is_owed: AtomicBool::new(false),
        };
        let former = self.whole.write().insert(file.fh, Arc::new(whole));
        // If a server assigns one handle twice, nothing stays unreported.
        if let Some(former) = former {
            self.whole.report_read(&former);
        }
    }

    /// Reads from the bytes of a file that came with its open. Returns false if there are none, or
    /// others now.
    pub(super) fn read_whole(&self, file: File, args: ReadArgs, out: &mut ReadBuf<'_>) -> bool {
        let Some(whole) = self.whole.read().get(&file.fh).cloned() else { return false };
        let versions = self.paths.versions.get();
        let holds = versions.is_some_and(|versions| {
            whole.ino == file.ino && versions.attributes(file.ino) == Some(whole.version)
        });
        if !holds || !self.connection.is_usable() {
            return false;
        }
        let from = usize::try_from(args.offset).unwrap_or(usize::MAX).min(whole.bytes.len());
        let rest = &whole.bytes[from..];
        let len = rest.len().min(out.remaining());
        if len > 0 && out.put(&rest[..len]).is_err() {
            return false;
        }
        let is_first = !whole.was_read.swap(true, Ordering::AcqRel);
        if is_first && whole.read_is_due && !args.flags.has(OpenFlags::NOATIME) {
            whole.is_owed.store(true, Ordering::Release);
            self.whole.owed.fetch_add(1, Ordering::AcqRel);
            self.paths.record_read(file.ino);
        }
        true
    }

    /// Notifies the server of reads before a request that could see access times.
    pub(super) fn report_reads(&self, cx: &Context<'_>, opcode: Opcode) {
        if matches!(opcode, Opcode::Open | Opcode::Read | Opcode::Release) {
            return;
        }
        if self.opened_ahead.must_report_read() {
            self.send_closing();
        }
        if self.whole.owed.load(Ordering::Acquire) == 0 {
            return;
        }
        for file in self.whole.take_unreported() {
            let read = abi::ReadIn { fh: file.fh.0, size: 1, ..Default::default() };
            let request = EncodedRequest::new(Opcode::Read, cx, file.ino).with(&read);
            let mut byte = [0];
            let mut sink = SliceSink::new(&mut byte);
            let mut out = ReadBuf::new(&mut sink, 1);
            // The read has happened already: an error would concern the access time alone.
            let _ = self.request(cx, request, |body| out.put(body));
        }
    }
}

/// True for a file that its user may also write to, and then hardly reads from the bytes of its
/// open.
fn writes(flags: OpenFlags) -> bool {
    flags.access() != AccessMode::Read
}
