//! Native files: open files that the kernel opened as a call of the program itself would have.
//!
//! A frontend in the process of a program can call with the program's own threads
//! ([`CallingThreads::Callers`]), whose credentials and umask the kernel then sees. A file system
//! over files of the kernel opens them there as the program would, and an open file can serve the
//! program without the file system. A file system and a frontend that both know native files keep
//! these rules:
//!
//! 1. **Making.** A file system makes a [`NativeFile`] with the [`NativeOpener`] of its frontend,
//!    which exists for `CallingThreads::Callers` alone. A kernel mount or a server calls for
//!    others, and never sees one.
//! 2. **Permission.** The kernel has decided that the caller may open the file. A frontend that
//!    gets one together with a lookup
//!    ([`Shortcuts::lookup_to_open`](crate::Shortcuts::lookup_to_open),
//!    [`Shortcuts::open_or_create`](crate::Shortcuts::open_or_create)) does not check the
//!    permission to open it again. It requests none for writing on a mount that it has made
//!    read-only.
//! 3. **Descriptor.** A native file may have a descriptor for the program, with the lowest number
//!    that was free and the flags that the program passed. The frontend gives it to the program
//!    ([`NativeFile::take_descriptor`]) instead of a duplicate of
//!    [`BackingFile::fd`](crate::BackingFile::fd), or closes it.
//! 4. **Attributes.** If it has the file's attributes ([`NativeFile::has_attributes`]), no process
//!    keeps a copy of them, and the kernel decides about changes by the credentials of the thread:
//!    fchmod(2), fchown(2), futimens(3), ftruncate(2), fallocate(2) and fsync(2) on the descriptor
//!    need not call the file system.
//! 5. **End.** A frontend that gives back all lookups of the inode next, unless another thread
//!    looks it up in between, says so with the release ([`NativeFile::last_release`]). The file
//!    system need then not keep what would lead to the inode without this open file.
//! 6. **Layers.** A native file is a part of [`OpenReply::backing`](crate::OpenReply::backing). A
//!    layer that must see reads, writes or changes drops that, and with it the native file: the
//!    frontend then checks and calls as for every other file.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::source::CallingThreads;

/// The right to make native files: the threads of the frontend are the threads of its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativeOpener(());

impl CallingThreads {
    /// The right to make native files, for threads of the callers.
    pub fn native_opener(self) -> Option<NativeOpener> {
        (self == CallingThreads::Callers).then_some(NativeOpener(()))
    }
}

impl NativeOpener {
    /// A file that was opened with the credentials of the caller, and the descriptor for the
    /// program, if there is one. The descriptor has the lowest number that was free, and the flags
    /// `O_APPEND`, `O_CLOEXEC`, `O_DIRECT`, `O_NOATIME` and `O_NONBLOCK` of the program's open(2).
    pub fn file(self, descriptor: Option<Arc<OwnedFd>>) -> NativeFile {
        NativeFile { descriptor, has_attributes: false }
    }
}

/// The part of a backing file that makes it native.
#[derive(Clone, Debug)]
pub struct NativeFile {
    descriptor: Option<Arc<OwnedFd>>,
    has_attributes: bool,
}

impl NativeFile {
    /// Returns this file, marked as having the file's attributes.
    pub fn with_attributes(self) -> Self {
        NativeFile { has_attributes: true, ..self }
    }

    /// True if the kernel may change the attributes and the size through the backing file.
    pub fn has_attributes(&self) -> bool {
        self.has_attributes
    }

    /// Takes the descriptor for the program. `None` if there is none, or if a copy of this value
    /// also refers to it.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take().and_then(Arc::into_inner)
    }

    /// The promise that the release of this file is followed by the last lookups of its inode.
    pub fn last_release(&self) -> LastRelease {
        LastRelease(())
    }
}

/// The promise of a frontend that releases a native file: it gives back all lookups of the inode
/// next, unless another thread looks the inode up in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastRelease(());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackingFile, OpenReply};

    #[test]
    fn only_threads_of_callers_have_native_files() {
        assert_eq!(CallingThreads::Serving.native_opener(), None);
        assert_eq!(CallingThreads::Application.native_opener(), None);
        assert!(CallingThreads::Callers.native_opener().is_some());
    }

    fn null() -> Arc<OwnedFd> {
        Arc::new(std::fs::File::open("/dev/null").unwrap().into())
    }

    #[test]
    fn the_descriptor_of_a_program_is_taken_once() {
        let opener = CallingThreads::Callers.native_opener().unwrap();
        let mut file = opener.file(Some(null()));
        assert!(!file.has_attributes());
        assert!(file.take_descriptor().is_some() && file.take_descriptor().is_none());
        let mut file = opener.file(Some(null())).with_attributes();
        let mut copy = file.clone();
        assert!(file.has_attributes() && copy.has_attributes());
        assert!(file.take_descriptor().is_none(), "two owners would close it twice");
        assert!(copy.take_descriptor().is_some());
    }

    #[test]
    fn a_layer_that_drops_the_backing_file_drops_the_native_one() {
        let native = CallingThreads::Callers.native_opener().map(|opener| opener.file(None));
        let backing = Some(BackingFile { fd: null(), without_fsetid: true, native });
        let opened = OpenReply { backing, ..OpenReply::default() };
        assert!(opened.native().is_some());
        assert!(OpenReply { backing: None, ..opened }.native().is_none());
    }
}
