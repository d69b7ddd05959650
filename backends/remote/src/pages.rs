//! Reads from cached pages of files, which a server shares by memory: no request, and no system
//! call.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard};

use defuse_fs::{Context, Fh, File, ReadArgs, ReadBuf, Result};
use defuse_ring::layout::ClientCounter;
use defuse_ring::pages::PageReader;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::encode::EncodedRequest;
use defuse_wire::vendor::PAGES;

use super::RemoteShared;

/// The number of reads of an open file before its pages are requested: most files are read once.
const WORTH: u32 = 8;
/// The maximum number of open files with pages. Each maps up to 16 MiB.
const MOST: usize = 4096;

/// The open files that were read.
#[derive(Default)]
pub(super) struct FilePages {
    files: RwLock<HashMap<Fh, FileReads>>,
}

#[derive(Default)]
struct FileReads {
    reads: AtomicU32,
    /// Set when the pages were requested; `None` if the server has none for this file.
    pages: OnceLock<Option<PageReader>>,
}

impl FilePages {
    pub(super) fn remove(&self, fh: Fh) {
        if self.files().contains_key(&fh) {
            self.files.write().unwrap_or_else(PoisonError::into_inner).remove(&fh);
        }
    }

    fn files(&self) -> RwLockReadGuard<'_, HashMap<Fh, FileReads>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, fh: Fh) {
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        if files.len() < MOST {
            files.entry(fh).or_default();
        }
    }
}

impl RemoteShared {
    /// Reads from pages. Returns false if they do not have everything; nothing is read then.
    pub(super) fn read_pages(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> bool {
        let Some(lanes) = self.connection.lanes().filter(|_| self.connection.is_usable()) else {
            return false;
        };
        let files = self.pages.files();
        let Some(known) = files.get(&file.fh) else {
            drop(files);
            self.pages.add(file.fh);
            return false;
        };
        let Some(pages) = known.pages.get() else {
            if known.reads.fetch_add(1, Ordering::Relaxed) == WORTH {
                drop(files);
                self.request_pages(cx, file);
            }
            return false;
        };
        let (Some(pages), Some(room)) = (pages, out.lend()) else { return false };
        let Some(len) = pages.read(args.offset, room) else { return false };
        lanes.count(ClientCounter::PageReads);
        out.advance(len).is_ok()
    }

    fn request_pages(&self, cx: &Context<'_>, file: File) {
        let pages = self.mapping(cx, file, 0..0, PAGES).and_then(|fd| {
            PageReader::from_fd(fd)
                .map_err(|error| defuse_fs::Errno::from_raw(error.raw_os_error()))
        });
        if let Err(errno) = &pages {
            log::debug!("no pages of a file: {errno}");
        }
        if let Some(known) = self.pages.files().get(&file.fh) {
            let _ = known.pages.set(pages.ok());
        }
    }

    /// Requests the memory of an open file.
    pub(super) fn mapping(
        &self,
        cx: &Context<'_>,
        file: File,
        range: Range<u64>,
        flags: u64,
    ) -> Result<OwnedFd> {
        let args = abi::SetupmappingIn {
            fh: file.fh.0,
            foffset: range.start,
            len: range.end.saturating_sub(range.start),
            flags,
            moffset: range.start,
        };
        let mut request = EncodedRequest::new(Opcode::Setupmapping, cx, file.ino).with(&args);
        self.connection.request_descriptor(cx, request.finish(0))
    }
}
