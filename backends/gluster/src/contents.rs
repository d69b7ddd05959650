//! Small files that are opened for reading: their contents come with the open, by one request, and
//! nothing is opened on the servers until something else is needed.
//!
//! The contents are those of the moment of the open, so that a file that another client has closed
//! before is read as that client left it. They are used as long as the open file is young, the
//! kernel has got no other attributes, and this client has not changed the file. A file that stays
//! open is opened on the servers a moment later: from then on, it can be used as long as it is
//! open, also after another client has removed it.

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use defuse_fs::{Attr, Result};

use crate::file::GfapiHandle;
use crate::volume::{Gfid, VolumeConnection};

/// The largest file whose contents come with its open.
pub const LARGEST: usize = 64 << 10;

/// Bytes of contents of all open files.
const TOTAL: usize = 64 << 20;

/// Number of small files.
static SMALL: AtomicUsize = AtomicUsize::new(0);

/// Bytes of contents that are kept now.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// The time after which a file that is still open is opened on the servers. Another client may
/// change and remove it until then: it stays as it was at the open.
const OPENED_AFTER: Duration = Duration::from_millis(50);

/// Files that are opened on demand, of one volume, and the thread that opens them after a while.
pub struct UnopenedFiles {
    files: Mutex<UnopenedState>,
}

#[derive(Default)]
struct UnopenedState {
    files: Vec<(Instant, Weak<OpenOnDemand>)>,
    is_running: bool,
}

impl UnopenedFiles {
    /// No files.
    pub fn new() -> Arc<UnopenedFiles> {
        Arc::new(UnopenedFiles { files: Mutex::default() })
    }

    /// Adds a file.
    pub fn add(self: &Arc<Self>, file: &Arc<OpenOnDemand>) {
        let mut state = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        state.files.push((Instant::now(), Arc::downgrade(file)));
        if !state.is_running {
            let all = Arc::clone(self);
            let thread = std::thread::Builder::new().name("gluster-open".to_owned());
            state.is_running = thread.spawn(move || all.run()).is_ok();
        }
        if !state.is_running {
            state.files.clear();
            drop(state);
            // Without a thread, the file is opened now. If that fails, its contents remain.
            let _ = file.get();
        }
    }

    /// Opens files until there are none.
    fn run(&self) {
        loop {
            std::thread::sleep(OPENED_AFTER / 2);
            let mut state = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            state.files.retain(|(_, file)| file.strong_count() > 0);
            if state.files.is_empty() {
                state.is_running = false;
                return;
            }
            let due: Vec<_> =
                state.files.extract_if(.., |(at, _)| at.elapsed() >= OPENED_AFTER).collect();
            drop(state);
            for file in due.iter().filter_map(|(_, file)| file.upgrade()) {
                // A file that is gone keeps its contents.
                let _ = file.get();
            }
        }
    }
}

/// True if there may be files that are open and not opened on the servers.
pub fn has_unopened() -> bool {
    SMALL.load(Ordering::Acquire) > 0
}

/// The handle of an open file, which may be opened later.
pub struct OpenOnDemand {
    opened: Mutex<Option<Arc<GfapiHandle>>>,
    small: Option<SmallFile>,
}

/// A small file that is opened on demand.
pub struct SmallFile {
    volume: Arc<VolumeConnection>,
    gfid: Gfid,
    flags: c_int,
    contents: FileContents,
    /// The moment before the contents were read, in the order of this client's changes.
    pub since: u64,
    read: Instant,
    /// The attributes at the open.
    pub attr: Attr,
}

/// The contents of a file, as a part of the total.
pub struct FileContents(Vec<u8>);

impl FileContents {
    /// The contents of a file of about `size` bytes; `None` if the file is larger than [`LARGEST`],
    /// or if too much is kept already.
    ///
    /// # Errors
    ///
    /// The errors of a read.
    pub fn read(volume: &VolumeConnection, gfid: Gfid, size: u64) -> Result<Option<FileContents>> {
        // One byte more shows that the file has grown beyond.
        let room = (size as usize).saturating_add(1).next_power_of_two().clamp(4096, LARGEST);
        if size as usize >= room || KEPT.fetch_add(room, Ordering::AcqRel) > TOTAL - room {
            if (size as usize) < room {
                KEPT.fetch_sub(room, Ordering::AcqRel);
            }
            return Ok(None);
        }
        let mut contents = FileContents(vec![0; room]);
        let len = volume.read_small(&volume.object(gfid)?, &mut contents.0)?;
        if len == room {
            return Ok(None);
        }
        KEPT.fetch_sub(room - len, Ordering::AcqRel);
        contents.0.truncate(len);
        contents.0.shrink_to_fit();
        Ok(Some(contents))
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// The part that a read gets.
    fn part(&self, offset: u64, len: usize) -> &[u8] {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        let end = start.saturating_add(len).min(self.0.len());
        &self.0[start..end]
    }
}

impl Drop for FileContents {
    fn drop(&mut self) {
        KEPT.fetch_sub(self.0.len(), Ordering::AcqRel);
    }
}

impl SmallFile {
    /// A file with contents that were read after `since`.
    pub fn new(
        volume: &Arc<VolumeConnection>,
        (gfid, flags): (Gfid, c_int),
        contents: FileContents,
        (since, attr): (u64, Attr),
    ) -> SmallFile {
        SMALL.fetch_add(1, Ordering::AcqRel);
        let (volume, read) = (Arc::clone(volume), Instant::now());
        SmallFile { volume, gfid, flags, contents, since, read, attr }
    }

    /// True if the contents have the size that the kernel knows.
    pub fn has_size(&self) -> bool {
        self.contents.len() == self.attr.size
    }

    /// The identity of the file.
    pub fn gfid(&self) -> Gfid {
        self.gfid
    }

    /// The part of the contents that a read gets.
    pub fn part(&self, offset: u64, len: usize) -> &[u8] {
        self.contents.part(offset, len)
    }

    /// True if the contents are at most as old as attributes may be.
    pub fn is_young(&self, valid: Duration) -> bool {
        self.read.elapsed() < valid
    }
}

impl Drop for SmallFile {
    fn drop(&mut self) {
        SMALL.fetch_sub(1, Ordering::AcqRel);
    }
}

impl OpenOnDemand {
    /// A handle that is open.
    pub fn from_handle(handle: GfapiHandle) -> Arc<OpenOnDemand> {
        let opened = Mutex::new(Some(Arc::new(handle)));
        Arc::new(OpenOnDemand { opened, small: None })
    }

    /// A handle that is opened on demand.
    pub fn from_small_file(small: SmallFile) -> Arc<OpenOnDemand> {
        Arc::new(OpenOnDemand { opened: Mutex::default(), small: Some(small) })
    }

    /// The handle, which is opened as root now if it is not open: the file was opened by root.
    ///
    /// # Errors
    ///
    /// The errors of the open: `ESTALE` for a file that another client has removed meanwhile.
    pub fn get(&self) -> Result<Arc<GfapiHandle>> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = match (&*opened, &self.small) {
            (Some(handle), _) => return Ok(Arc::clone(handle)),
            (None, None) => return Err(defuse_fs::Errno::EBADF),
            (None, Some(SmallFile { volume, gfid, flags, .. })) => {
                let open = || volume.open(&volume.object(*gfid)?, *flags);
                Arc::new(volume.as_root(open)?)
            }
        };
        Ok(Arc::clone(opened.insert(handle)))
    }

    /// The file with its contents, as long as nothing has opened it.
    pub fn unopened_file(&self) -> Option<&SmallFile> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        self.small.as_ref().filter(|_| opened.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_gets_the_part_of_the_contents_that_is_there() {
        KEPT.fetch_add(5, Ordering::AcqRel);
        let contents = FileContents(b"hello".to_vec());
        assert_eq!((contents.part(0, 4096), contents.part(3, 1)), (&b"hello"[..], &b"l"[..]));
        assert_eq!((contents.part(5, 9), contents.part(u64::MAX, 9)), (&b""[..], &b""[..]));
    }
}
