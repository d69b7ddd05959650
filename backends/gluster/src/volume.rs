//! A connection to a volume, and its inodes, as safe types over the functions of libgfapi.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_int};
use std::mem::MaybeUninit;
use std::ptr::{self, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_fs::{Errno, Name, Result, XattrName};

use crate::ffi::{GfapiLibrary, Glfs, GlfsObject};
use crate::file::GfapiHandle;
use crate::graph_file::GraphFile;
use crate::held::{self, HeldInodes};
use crate::messages::{LastMessages, LogPipe};

/// The identity of an inode, unique on all servers and for ever.
pub type Gfid = [u8; 16];

/// A connection to a volume.
pub struct VolumeConnection {
    library: &'static GfapiLibrary,
    fs: *mut Glfs,
    /// The user and group of this process.
    own: (u32, u32),
    started: AtomicBool,
    ends: bool,
    /// The last messages of libgfapi, if this process sees them.
    messages: LastMessages,
    /// References to inodes, so that libgfapi need not look them up again.
    held: HeldInodes<HeldObject>,
    /// The volfile is kept, because a start that exceeds its time limit may still open it.
    _graph: Option<Arc<GraphFile>>,
}

// SAFETY: libgfapi locks its state by itself; any thread may call it.
unsafe impl Send for VolumeConnection {}
// SAFETY: libgfapi locks its state by itself; any thread may call it.
unsafe impl Sync for VolumeConnection {}

thread_local! {
    /// The user, the group and the groups as which this thread acts.
    static ACTING: RefCell<(u32, u32, Vec<u32>)> = const { RefCell::new((0, 0, Vec::new())) };
}

/// The servers and settings of a connection.
#[derive(Debug)]
pub struct ConnectParameters {
    /// The name of the volume.
    pub volume: CString,
    /// `tcp` or `unix`.
    pub transport: CString,
    /// The file with the translators of the client, in place of management servers.
    pub graph: Option<Arc<GraphFile>>,
    /// Hosts with their ports, or the path of a socket with 0.
    pub servers: Vec<(CString, u16)>,
    /// 0 (none) to 9 (trace).
    pub log_level: u8,
    /// Options of translators: name of the translator, key, value.
    pub translators: Vec<(CString, CString, CString)>,
    /// The process continues after the connection has ended, so that its memory and threads must be
    /// freed.
    pub ends: bool,
}

impl VolumeConnection {
    /// A connection that is not established yet.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, and the errors of the settings.
    pub fn new(
        library: &'static GfapiLibrary,
        connect: &ConnectParameters,
    ) -> Result<VolumeConnection> {
        // SAFETY: all texts end with NUL and are copied.
        unsafe {
            let fs = (library.glfs_new)(connect.volume.as_ptr());
            if fs.is_null() {
                return Err(Errno::ENOMEM);
            }
            let own = (libc::geteuid(), libc::getegid());
            let (started, ends) = (AtomicBool::new(false), connect.ends);
            let graph = connect.graph.clone();
            let pipe = if ends { None } else { LogPipe::start().ok() };
            let messages = pipe.as_ref().map(|pipe| pipe.last.clone()).unwrap_or_default();
            let held = HeldInodes::new(held::limit());
            let volume =
                VolumeConnection { library, fs, own, started, ends, messages, held, _graph: graph };
            if let Some(file) = &connect.graph {
                check((library.glfs_set_volfile)(fs, file.path().as_ptr()))?;
            }
            for (server, port) in &connect.servers {
                let (transport, port) = (connect.transport.as_ptr(), c_int::from(*port));
                check((library.glfs_set_volfile_server)(fs, transport, server.as_ptr(), port))?;
            }
            let level = c_int::from(connect.log_level);
            volume.log_to(pipe.as_ref(), level)?;
            for (translator, key, value) in &connect.translators {
                let (key, value) = (key.as_ptr(), value.as_ptr());
                check((library.glfs_set_xlator_option)(fs, translator.as_ptr(), key, value))?;
            }
            Ok(volume)
        }
    }

    /// Sets the place of messages: the pipe, or a duplicate of the standard error, or nothing: a
    /// process without a place for messages can use a volume.
    fn log_to(&self, pipe: Option<&LogPipe>, level: c_int) -> Result<()> {
        let set = |path: &CStr, level| {
            // SAFETY: the path ends with NUL and is copied.
            check(unsafe { (self.library.glfs_set_logging)(self.fs, path.as_ptr(), level) })
        };
        let to_pipe = pipe.map(|pipe| set(&pipe.path(), level));
        if to_pipe.is_some_and(|done| done.is_ok()) {
            return Ok(());
        }
        // This is the name for a duplicate of the standard error, which libgfapi does not open.
        set(c"-", level).or_else(|_| set(c"/dev/null", 0)).map(drop)
    }

    /// The last messages of libgfapi as a part of an error.
    pub fn last_messages(&self) -> String {
        self.messages.quote_last()
    }

    /// Establishes the connection. Takes as long as the servers take.
    ///
    /// # Errors
    ///
    /// `ENOTCONN` if no server answers; `ENOENT` and others if the volume is not there.
    pub fn start(&self) -> Result<()> {
        // SAFETY: the volume is new.
        unsafe { check((self.library.glfs_init)(self.fs)) }?;
        self.started.store(true, Ordering::Release);
        Ok(())
    }

    /// A text of libgfapi about its own state, a file below `/.meta`. No server is contacted.
    pub(crate) fn internal(self: &Arc<Self>, path: &CStr) -> Result<Vec<u8>> {
        // SAFETY: the path ends with NUL.
        let fd = unsafe { (self.library.glfs_open)(self.fs, path.as_ptr(), libc::O_RDONLY) };
        let file = GfapiHandle::from_raw(self, fd, false)?;
        let mut text = vec![0; 1 << 18];
        let len = file.read(&mut text, 0)?;
        text.truncate(len);
        Ok(text)
    }

    /// The pointer of libgfapi, valid as long as this connection.
    pub(crate) fn raw(&self) -> *mut Glfs {
        self.fs
    }

    /// The functions.
    pub(crate) fn library(&self) -> &'static GfapiLibrary {
        self.library
    }

    /// Runs `run` as root, and then makes this thread act as before.
    pub(crate) fn as_root<T>(&self, run: impl FnOnce() -> T) -> T {
        let (uid, gid, groups) = ACTING.with_borrow(Clone::clone);
        self.act_as(0, 0, &[]);
        let done = run();
        self.act_as(uid, gid, &groups);
        done
    }

    /// Makes this thread act as a user from now on.
    pub fn act_as(&self, uid: u32, gid: u32, groups: &[u32]) {
        ACTING.with_borrow_mut(|acting| {
            (acting.0, acting.1) = (uid, gid);
            acting.2.clear();
            acting.2.extend_from_slice(groups);
        });
        // SAFETY: the groups are copied. The state belongs to this thread. A failure, which only
        // occurs without memory, leaves the former user: the next call then fails for the same
        // reason.
        unsafe {
            (self.library.glfs_setfsuid)(uid);
            (self.library.glfs_setfsgid)(gid);
            (self.library.glfs_setfsgroups)(groups.len(), groups.as_ptr());
        }
    }

    /// Makes this thread act as the user of the process again.
    pub fn act_as_process(&self) {
        self.act_as(self.own.0, self.own.1, &[]);
    }

    /// The inode `gfid`. No server is contacted if the connection knows the inode.
    pub fn object(&self, mut gfid: Gfid) -> Result<InodeObject<'_>> {
        if let Some(held) = self.held.get(gfid) {
            return Ok(InodeObject { volume: self, raw: held.raw, held: Some(held) });
        }
        // SAFETY: the handle is as long as stated.
        let raw = unsafe {
            (self.library.glfs_h_create_from_handle)(self.fs, gfid.as_mut_ptr(), 16, null_mut())
        };
        self.hold(self.wrap_object(raw)?, gfid)
    }

    /// Keeps the reference `object` to the inode `gfid` for later operations.
    fn hold<'a>(&'a self, object: InodeObject<'a>, gfid: Gfid) -> Result<InodeObject<'a>> {
        let owned = std::mem::ManuallyDrop::new(object);
        let held = self.held.keep(gfid, HeldObject { library: self.library, raw: owned.raw });
        Ok(InodeObject { volume: self, raw: held.raw, held: Some(held) })
    }

    /// Ends the reference to an inode that nobody knows any more, or that an operation found to be
    /// gone.
    pub(crate) fn release_inode(&self, gfid: Gfid) {
        self.held.remove(gfid);
    }

    /// True if there is a reference to the inode `gfid`, so that libgfapi knows its names.
    pub(crate) fn has(&self, gfid: Gfid) -> bool {
        self.held.get(gfid).is_some()
    }

    /// A lasting reference to the inode `gfid`. No server is contacted if the connection knows the
    /// inode.
    pub(crate) fn keep(self: &Arc<Self>, gfid: Gfid) -> Result<RetainedObject> {
        let object = self.object(gfid)?;
        // SAFETY: the object is valid until the end of this function.
        unsafe { RetainedObject::copy(self, object.raw) }.ok_or(Errno::ENOMEM)
    }

    /// Looks up a name in a directory, or `/` without one. Does not follow symbolic links.
    pub fn look_up(
        &self,
        dir: Option<&InodeObject<'_>>,
        name: &CStr,
    ) -> Result<(InodeObject<'_>, libc::stat)> {
        let dir = dir.map_or(null_mut(), |dir| dir.raw);
        self.with_stat(|stat| {
            // SAFETY: the name ends with NUL, and the directory is of this volume.
            unsafe { (self.library.glfs_h_lookupat)(self.fs, dir, name.as_ptr(), stat, 0) }
        })
    }

    /// Creates a directory.
    pub fn mkdir(
        &self,
        dir: &InodeObject<'_>,
        name: &CStr,
        mode: u32,
    ) -> Result<(InodeObject<'_>, libc::stat)> {
        self.with_stat(|stat| {
            // SAFETY: the name ends with NUL, and the directory is of this volume.
            unsafe { (self.library.glfs_h_mkdir)(self.fs, dir.raw, name.as_ptr(), mode, stat) }
        })
    }

    /// Creates a file, device, fifo or socket. `mode` contains the kind.
    pub fn mknod(
        &self,
        dir: &InodeObject<'_>,
        name: &CStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(InodeObject<'_>, libc::stat)> {
        self.with_stat(|stat| {
            // SAFETY: the name ends with NUL, and the directory is of this volume.
            unsafe {
                (self.library.glfs_h_mknod)(self.fs, dir.raw, name.as_ptr(), mode, rdev, stat)
            }
        })
    }

    /// Creates a symbolic link.
    pub fn symlink(
        &self,
        dir: &InodeObject<'_>,
        name: &CStr,
        target: &CStr,
    ) -> Result<(InodeObject<'_>, libc::stat)> {
        self.with_stat(|stat| {
            let (name, target) = (name.as_ptr(), target.as_ptr());
            // SAFETY: both texts end with NUL, and the directory is of this volume.
            unsafe { (self.library.glfs_h_symlink)(self.fs, dir.raw, name, target, stat) }
        })
    }

    /// Creates and opens a file that does not exist.
    pub fn create(
        self: &Arc<Self>,
        dir: &InodeObject<'_>,
        name: &CStr,
        flags: c_int,
        mode: u32,
    ) -> Result<(InodeObject<'_>, libc::stat, GfapiHandle)> {
        let mut fd = null_mut();
        let flags = flags | libc::O_CREAT | libc::O_EXCL;
        let (object, stat) = self.with_stat(|stat| {
            let name = name.as_ptr();
            // SAFETY: the name ends with NUL, and the directory is of this volume; `fd` is set on
            // success.
            unsafe {
                (self.library.glfs_h_creat_open)(
                    self.fs,
                    dir.raw,
                    name,
                    flags,
                    mode,
                    stat,
                    &raw mut fd,
                )
            }
        })?;
        Ok((object, stat, GfapiHandle::from_raw(self, fd, false)?))
    }

    /// Removes a name, also the name of an empty directory.
    pub fn unlink(&self, dir: &InodeObject<'_>, name: &CStr) -> Result<()> {
        // SAFETY: the name ends with NUL, and the directory is of this volume.
        unsafe { check((self.library.glfs_h_unlink)(self.fs, dir.raw, name.as_ptr())) }.map(drop)
    }

    /// Makes another name of an inode.
    pub fn link(&self, object: &InodeObject<'_>, dir: &InodeObject<'_>, name: &CStr) -> Result<()> {
        // SAFETY: the name ends with NUL, and both objects are of this volume.
        let made =
            unsafe { (self.library.glfs_h_link)(self.fs, object.raw, dir.raw, name.as_ptr()) };
        check(made).map(drop)
    }

    /// Renames, and replaces the target.
    pub fn rename(
        &self,
        from: (&InodeObject<'_>, &CStr),
        to: (&InodeObject<'_>, &CStr),
    ) -> Result<()> {
        let (old, new) = (from.1.as_ptr(), to.1.as_ptr());
        // SAFETY: both names end with NUL, and both directories are of this volume.
        unsafe { check((self.library.glfs_h_rename)(self.fs, from.0.raw, old, to.0.raw, new)) }
            .map(drop)
    }

    /// The text of a symbolic link.
    pub fn readlink(&self, object: &InodeObject<'_>) -> Result<Vec<u8>> {
        let mut text = vec![0_u8; 4096];
        let (room, size) = (text.as_mut_ptr().cast(), text.len());
        // SAFETY: at most `size` bytes are written.
        let len =
            unsafe { check((self.library.glfs_h_readlink)(self.fs, object.raw, room, size)) }?;
        text.truncate(len as usize);
        Ok(text)
    }

    /// The attributes of an inode.
    pub fn stat(&self, object: &InodeObject<'_>) -> Result<libc::stat> {
        let mut stat = MaybeUninit::zeroed();
        // SAFETY: `stat` is set on success, and all-zero bytes are a valid value.
        unsafe {
            check((self.library.glfs_h_stat)(self.fs, object.raw, stat.as_mut_ptr()))?;
            Ok(stat.assume_init())
        }
    }

    /// Sets the attributes of `stat` that `valid` names ([`set`]).
    pub fn set_attributes(
        &self,
        object: &InodeObject<'_>,
        mut stat: libc::stat,
        valid: c_int,
    ) -> Result<()> {
        // SAFETY: `stat` is read only.
        let done =
            unsafe { (self.library.glfs_h_setattrs)(self.fs, object.raw, &raw mut stat, valid) };
        check(done).map(drop)
    }

    /// Reads from the beginning of a file that is not open. Returns the number of bytes. The
    /// servers do not check the rights of the user.
    pub(crate) fn read_small(&self, object: &InodeObject<'_>, room: &mut [u8]) -> Result<usize> {
        let (start, len) = (room.as_mut_ptr().cast(), room.len());
        let read = self.library.glfs_h_anonymous_read;
        // SAFETY: at most `len` bytes are written.
        check_len(unsafe { read(self.fs, object.raw, start, len, 0) })
    }

    /// Sets the size of a file.
    pub fn truncate(&self, object: &InodeObject<'_>, size: u64) -> Result<()> {
        let size = i64::try_from(size).map_err(|_| Errno::EFBIG)?;
        // SAFETY: the object is of this volume.
        unsafe { check((self.library.glfs_h_truncate)(self.fs, object.raw, size)) }.map(drop)
    }

    /// Space and inodes.
    pub fn statvfs(&self, object: &InodeObject<'_>) -> Result<libc::statvfs> {
        let mut answer = MaybeUninit::zeroed();
        // SAFETY: `answer` is set on success, and all-zero bytes are a valid value.
        unsafe {
            check((self.library.glfs_h_statfs)(self.fs, object.raw, answer.as_mut_ptr()))?;
            Ok(answer.assume_init())
        }
    }

    /// An extended attribute, or the list of names without `name`. Returns the length; with a
    /// `room` of 0 bytes, nothing is written.
    pub fn get_xattr(
        &self,
        object: &InodeObject<'_>,
        name: Option<&CStr>,
        room: &mut [u8],
    ) -> Result<usize> {
        let name = name.map_or(ptr::null(), CStr::as_ptr);
        let (value, size) = (room.as_mut_ptr().cast(), room.len());
        // SAFETY: at most `size` bytes are written.
        let len = unsafe {
            check((self.library.glfs_h_getxattrs)(self.fs, object.raw, name, value, size))
        }?;
        Ok(len as usize)
    }

    /// The description that the bricks of a file or directory send of themselves.
    pub fn path_info(&self, object: &InodeObject<'_>) -> Result<String> {
        let (mut text, name) = (vec![0; 1 << 14], c"glusterfs.pathinfo");
        let len = match self.get_xattr(object, Some(name), &mut text) {
            Err(Errno::ERANGE) => {
                text.resize(1 << 20, 0);
                self.get_xattr(object, Some(name), &mut text)
            }
            reported => reported,
        }?;
        text.truncate(len);
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Sets an extended attribute, with the flags of setxattr(2).
    pub fn set_xattr(
        &self,
        object: &InodeObject<'_>,
        name: &CStr,
        value: &[u8],
        flags: c_int,
    ) -> Result<()> {
        let (name, size, value) = (name.as_ptr(), value.len(), value.as_ptr().cast());
        // SAFETY: the value is as long as stated.
        let done = unsafe {
            (self.library.glfs_h_setxattrs)(self.fs, object.raw, name, value, size, flags)
        };
        check(done).map(drop)
    }

    /// Removes an extended attribute.
    pub fn remove_xattr(&self, object: &InodeObject<'_>, name: &CStr) -> Result<()> {
        // SAFETY: the name ends with NUL, and the object is of this volume.
        let done =
            unsafe { (self.library.glfs_h_removexattrs)(self.fs, object.raw, name.as_ptr()) };
        check(done).map(drop)
    }

    /// Opens a file.
    pub fn open(self: &Arc<Self>, object: &InodeObject<'_>, flags: c_int) -> Result<GfapiHandle> {
        // SAFETY: the object is of this volume.
        let fd = unsafe { (self.library.glfs_h_open)(self.fs, object.raw, flags) };
        GfapiHandle::from_raw(self, fd, false)
    }

    /// Opens a directory.
    pub fn open_dir(self: &Arc<Self>, object: &InodeObject<'_>) -> Result<GfapiHandle> {
        // SAFETY: the object is of this volume.
        let fd = unsafe { (self.library.glfs_h_opendir)(self.fs, object.raw) };
        GfapiHandle::from_raw(self, fd, true)
    }

    fn with_stat(
        &self,
        make: impl FnOnce(*mut libc::stat) -> *mut GlfsObject,
    ) -> Result<(InodeObject<'_>, libc::stat)> {
        let mut stat = MaybeUninit::zeroed();
        let object = self.wrap_object(make(stat.as_mut_ptr()))?;
        let gfid = object.gfid()?;
        let object = self.hold(object, gfid)?;
        // SAFETY: `stat` is set on success, and all-zero bytes are a valid value.
        Ok((object, unsafe { stat.assume_init() }))
    }

    fn wrap_object(&self, raw: *mut GlfsObject) -> Result<InodeObject<'_>> {
        if raw.is_null() { Err(last()) } else { Ok(InodeObject { volume: self, raw, held: None }) }
    }
}

impl Drop for VolumeConnection {
    /// Ends the connection on a thread of its own, because that takes up to ten seconds. A daemon
    /// that ends leaves this to the kernel.
    fn drop(&mut self) {
        // No object may be closed while the connection ends.
        self.held.clear();
        if !self.ends || !*self.started.get_mut() {
            return;
        }
        let (end, fs) = (self.library.glfs_fini, self.fs as usize);
        let run = move || {
            // SAFETY: open files have references to the volume, so that no part of the connection
            // is in use.
            unsafe { end(fs as *mut Glfs) };
        };
        if let Err(error) = std::thread::Builder::new().name("gluster-end".to_owned()).spawn(run) {
            log::warn!("a connection to GlusterFS stays: no thread: {error}");
        }
    }
}

/// A reference to an inode of the volume, for an operation.
pub struct InodeObject<'a> {
    volume: &'a VolumeConnection,
    raw: *mut GlfsObject,
    /// The owner of the object; `None` if it is this value.
    held: Option<Arc<HeldObject>>,
}

/// A reference to an inode that the connection keeps for later operations.
struct HeldObject {
    library: &'static GfapiLibrary,
    raw: *mut GlfsObject,
}

// SAFETY: libgfapi locks its state by itself; any thread may use the object.
unsafe impl Send for HeldObject {}
// SAFETY: libgfapi locks its state by itself; any thread may use the object.
unsafe impl Sync for HeldObject {}

impl Drop for HeldObject {
    fn drop(&mut self) {
        // SAFETY: this is the only reference to the object.
        unsafe { (self.library.glfs_h_close)(self.raw) };
    }
}

impl InodeObject<'_> {
    /// The identity of the inode.
    pub fn gfid(&self) -> Result<Gfid> {
        extract(self.volume.library, self.raw)
    }
}

impl Drop for InodeObject<'_> {
    fn drop(&mut self) {
        if self.held.is_some() {
            return;
        }
        // SAFETY: this is the only reference to the object.
        unsafe { (self.volume.library.glfs_h_close)(self.raw) };
    }
}

/// A reference to an inode that lasts longer than an operation: libgfapi delivers messages about an
/// inode only while there is one.
pub struct RetainedObject {
    volume: Arc<VolumeConnection>,
    raw: *mut GlfsObject,
}

// SAFETY: libgfapi locks its state by itself; any thread may use the object.
unsafe impl Send for RetainedObject {}
// SAFETY: libgfapi locks its state by itself; any thread may use the object.
unsafe impl Sync for RetainedObject {}

impl RetainedObject {
    /// A copy of `object`, which is valid during the call.
    // SAFETY: the caller guarantees that `object` is valid.
    pub(crate) unsafe fn copy(
        volume: &Arc<VolumeConnection>,
        object: *mut GlfsObject,
    ) -> Option<RetainedObject> {
        // SAFETY: the caller guarantees that `object` is valid.
        let raw = unsafe { (volume.library.glfs_object_copy)(object) };
        (!raw.is_null()).then(|| RetainedObject { volume: Arc::clone(volume), raw })
    }
}

impl Drop for RetainedObject {
    fn drop(&mut self) {
        // SAFETY: this is the only reference to the object.
        unsafe { (self.volume.library.glfs_h_close)(self.raw) };
    }
}

/// The identity of the inode of an object. The object may have another owner.
pub(crate) fn extract(library: &GfapiLibrary, object: *mut GlfsObject) -> Result<Gfid> {
    let mut gfid = [0; 16];
    // SAFETY: the room is as long as stated.
    let len = unsafe { (library.glfs_h_extract_handle)(object, gfid.as_mut_ptr(), 16) };
    if len == 16 { Ok(gfid) } else { Err(Errno::EIO) }
}

/// Bits of [`VolumeConnection::set_attributes`], `GFAPI_SET_ATTR_*`.
pub mod set {
    use std::ffi::c_int;

    /// Permission bits.
    pub const MODE: c_int = 0x1;
    /// Owner.
    pub const UID: c_int = 0x2;
    /// Group.
    pub const GID: c_int = 0x4;
    /// Time of last access.
    pub const ATIME: c_int = 0x10;
    /// Time of last change of the data.
    pub const MTIME: c_int = 0x20;
}

/// Attributes that are all 0.
pub fn zeroed_stat() -> libc::stat {
    // SAFETY: all-zero bytes are a valid value.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// A name with a final NUL.
pub fn c_name(name: Name<'_>) -> Result<CString> {
    CString::new(name.as_bytes()).map_err(|_| Errno::EINVAL)
}

/// The name of an extended attribute with a final NUL.
pub fn c_xattr(name: XattrName<'_>) -> Result<CString> {
    CString::new(name.as_bytes()).map_err(|_| Errno::EINVAL)
}

/// The error of the last call on this thread.
pub(crate) fn last() -> Errno {
    let number = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Errno::from_raw(number)
}

/// The result of a call that returns -1 for an error.
pub(crate) fn check(result: c_int) -> Result<c_int> {
    if result < 0 { Err(last()) } else { Ok(result) }
}

/// The result of a call that returns a number of bytes.
pub(crate) fn check_len(result: isize) -> Result<usize> {
    usize::try_from(result).map_err(|_| last())
}
