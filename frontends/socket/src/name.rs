//! The name of a listening socket in the file system.
//!
//! Another user may own the directory, and can exchange it at any moment for a link to another one.
//! So the path is followed once, to its directory, and all later operations act on the name in that
//! open directory. bind(2) creates the socket with its final mode: no chmod(2) follows, which would
//! follow a link.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, fchmod, fstat, open, openat, statat, unlinkat,
};
use rustix::io::{Errno, Result};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::{fchdir, umask};
use rustix::thread::UnshareFlags;

/// The name of a bound socket, which can be removed.
#[derive(Debug)]
pub struct SocketName {
    directory: OwnedFd,
    name: OsString,
    inode: SocketInode,
}

/// Clients that may wait to be accepted, listen(2). Another listen(2) changes it.
pub const BACKLOG: i32 = 128;

/// Device and inode number of a file.
pub type SocketInode = (u64, u64);

impl SocketName {
    /// Binds `socket`, which has no name yet, to `path`, and listens. The new file has the
    /// permissions `mode` from its beginning, regardless of the umask.
    ///
    /// # Errors
    ///
    /// The errors of bind(2) and listen(2), also for a path that has no last name.
    pub fn bind(socket: impl AsFd, path: &Path, mode: Mode) -> Result<SocketName> {
        let (directory, name) = parts(path)?;
        SocketName::bind_in(socket, open_directory(directory)?, name, mode)
    }

    /// Like [`bind`](Self::bind), in the directory that is open as `directory`.
    ///
    /// # Errors
    ///
    /// The errors of bind(2) and listen(2).
    pub fn bind_in(
        socket: impl AsFd,
        directory: OwnedFd,
        name: &OsStr,
        mode: Mode,
    ) -> Result<SocketName> {
        // The kernel takes the mode of the new file from the socket, fchmod(2), and subtracts the
        // umask.
        fchmod(&socket, mode)?;
        let socket = socket.as_fd();
        // At once: a client that sees the name and connects must not be refused.
        with_umask_zero(&directory, |prefix| {
            bind(socket, &SocketAddrUnix::new(prefix.join(name))?)?;
            listen(socket, BACKLOG)
        })?;
        let inode = inode(&statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?);
        Ok(SocketName { directory, name: name.to_owned(), inode })
    }

    /// Opens the socket's file itself (`O_PATH`), for programs that inherit the descriptor and
    /// connect by it.
    ///
    /// # Errors
    ///
    /// The errors of openat(2), and `ENOENT` if the file is another one.
    pub fn open(&self) -> Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let file = openat(&self.directory, &self.name, flags, Mode::empty())?;
        if inode(&fstat(&file)?) == self.inode { Ok(file) } else { Err(Errno::NOENT) }
    }

    /// The inode of the socket's file.
    pub fn inode(&self) -> SocketInode {
        self.inode
    }

    /// Removes the name, unless it has another file now.
    pub fn remove(&self) {
        remove_in(&self.directory, &self.name, Some(self.inode));
    }
}

/// Opens the directory of a name.
///
/// # Errors
///
/// The errors of open(2).
pub fn open_directory(directory: &Path) -> Result<OwnedFd> {
    open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Directory and last name of a path.
///
/// # Errors
///
/// `EINVAL` if there is no last name.
pub fn parts(path: &Path) -> Result<(&Path, &OsStr)> {
    let name = path.file_name().ok_or(Errno::INVAL)?;
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    Ok((directory.unwrap_or(Path::new(".")), name))
}

/// Removes `name` from a directory if it is a socket, and `expected` if that is known. It may be
/// gone.
pub fn remove_in(directory: &OwnedFd, name: &OsStr, expected: Option<SocketInode>) {
    let Ok(stat) = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
    let is_it = expected.is_none_or(|expected| expected == inode(&stat));
    if is_it && FileType::from_raw_mode(stat.st_mode) == FileType::Socket {
        let _ = unlinkat(directory, name, AtFlags::empty());
    }
}

/// Removes a socket of type `kind` without a listener from `path`.
///
/// # Errors
///
/// `EADDRINUSE` if the socket has a listener, `EEXIST` if the file is no socket, and the errors of
/// the system calls.
pub(crate) fn clear_stale(directory: &OwnedFd, name: &OsStr, kind: SocketType) -> Result<()> {
    let Ok(stat) = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(()) };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(Errno::EXIST);
    }
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    match with_umask_zero(directory, |prefix| {
        connect(&socket, &SocketAddrUnix::new(prefix.join(name))?)
    }) {
        Err(Errno::CONNREFUSED) => {
            remove_in(directory, name, Some(inode(&stat)));
            Ok(())
        }
        _ => Err(Errno::ADDRINUSE),
    }
}

fn inode(stat: &Stat) -> SocketInode {
    (stat.st_dev, stat.st_ino)
}

/// Runs `act` with the umask 0. A name in `directory` is reached by its relative path below the
/// argument of `act`. The kernel has no bindat(2).
fn with_umask_zero<T: Send>(
    directory: &OwnedFd,
    act: impl Fn(&Path) -> Result<T> + Send + Sync,
) -> Result<T> {
    // A thread with its own umask and working directory.
    let alone = || {
        #[expect(
            deprecated,
            reason = "only FILES is unsafe, and the other function needs unsafe code"
        )]
        rustix::thread::unshare(UnshareFlags::FS).ok()?;
        umask(Mode::empty());
        Some(fchdir(directory).and_then(|()| act(Path::new(""))))
    };
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("defuse-name".to_owned());
        thread.spawn_scoped(scope, alone).map(|thread| thread.join())
    });
    match done.map_err(|error| from_io(&error))? {
        Ok(Some(result)) => result,
        Ok(None) => with_process_umask(directory, act),
        Err(_) => Err(Errno::IO),
    }
}

/// Like [`with_umask_zero`], if the system refuses unshare(2), as in many containers: the umask
/// changes for all threads, for this moment.
fn with_process_umask<T>(directory: &OwnedFd, act: impl Fn(&Path) -> Result<T>) -> Result<T> {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = umask(Mode::empty());
    let result = act(&PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())));
    umask(before);
    result
}

fn from_io(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use defuse_fs::{Attr, Context, DirBuf, Entry, Fh, File, FileSystem, Ino};
    use rustix::fs::{CWD, RenameFlags, renameat_with};

    use super::*;
    use crate::{AdmissionPolicy, ServerOptions, SocketServer};

    fn socket() -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    type BindMethod = fn(&OwnedFd, &Path, Mode) -> Result<()>;

    /// The two ways to bind.
    const WAYS: [BindMethod; 2] = [
        |socket, path, mode| SocketName::bind(socket, path, mode).map(drop),
        |socket, path, mode| {
            let (directory, name) = parts(path)?;
            let directory = open_directory(directory)?;
            fchmod(socket, mode)?;
            with_process_umask(&directory, |at| bind(socket, &SocketAddrUnix::new(at.join(name))?))
        },
    ];

    #[test]
    fn a_socket_has_its_mode_from_its_beginning_whatever_the_umask_is() {
        let place = tempfile::tempdir().unwrap();
        for (way, bind) in WAYS.iter().enumerate() {
            for mask in [0o000, 0o022, 0o077, 0o777] {
                for wanted in [0o600, 0o666] {
                    let path = place.path().join(format!("{way}-{mask:o}-{wanted:o}"));
                    let made = std::thread::scope(|scope| {
                        let bind = || {
                            #[expect(deprecated, reason = "as above")]
                            rustix::thread::unshare(UnshareFlags::FS).unwrap();
                            umask(Mode::from_raw_mode(mask));
                            bind(&socket(), &path, Mode::from_raw_mode(wanted)).unwrap();
                            umask(Mode::empty()).as_raw_mode()
                        };
                        scope.spawn(bind).join().unwrap()
                    });
                    assert_eq!((mode(&path), made), (wanted, mask), "{path:?}");
                }
            }
        }
    }

    #[test]
    fn a_directory_that_becomes_a_link_leads_the_removal_nowhere_else() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::create_dir(at("own")).unwrap();
        fs::create_dir(at("other")).unwrap();
        let name = SocketName::bind(socket(), &at("own/s"), Mode::RUSR).unwrap();
        let _other = SocketName::bind(socket(), &at("other/s"), Mode::RUSR).unwrap();
        fs::rename(at("own"), at("moved")).unwrap();
        symlink(at("other"), at("own")).unwrap();
        name.remove();
        assert!(at("other/s").exists() && !at("moved/s").exists());
        // Another file at the name stays.
        let name = SocketName::bind(socket(), &at("moved/s"), Mode::RUSR).unwrap();
        fs::rename(at("other/s"), at("moved/s")).unwrap();
        name.remove();
        assert!(at("moved/s").exists());
        assert_eq!(name.open().err(), Some(Errno::NOENT));
    }

    /// The mode was set by path after bind(2), which followed the link: a file of root became
    /// writable for all users.
    #[test]
    fn a_directory_that_is_exchanged_for_a_link_over_and_over_changes_no_other_file() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::create_dir(at("dir")).unwrap();
        fs::create_dir(at("secret")).unwrap();
        fs::write(at("secret/s"), "secret").unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(at("secret/s"), private).unwrap();
        symlink(at("secret"), at("link")).unwrap();
        let ends = AtomicBool::new(false);
        let bound = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let swap = RenameFlags::EXCHANGE;
                    renameat_with(CWD, at("dir"), CWD, at("link"), swap).unwrap();
                }
            });
            let serve = |_: &usize| {
                let admission = AdmissionPolicy::Users(vec![1]);
                let options = ServerOptions { admission, ..ServerOptions::default() };
                SocketServer::bind(&at("dir/s"), Arc::new(UnusedFileSystem), options).is_ok()
            };
            let bound = (0..ROUNDS).filter(serve).count();
            ends.store(true, Ordering::Relaxed);
            bound
        });
        assert!(bound > 0, "the socket was never bound");
        assert_eq!(mode(&at("secret/s")), 0o600);
        assert_eq!(fs::read_to_string(at("secret/s")).unwrap(), "secret");
    }

    const ROUNDS: usize = 2000;

    /// A file system that is never called.
    struct UnusedFileSystem;

    impl FileSystem for UnusedFileSystem {
        fn lookup(
            &self,
            _: &Context<'_>,
            _: Ino,
            _: defuse_fs::Name<'_>,
        ) -> defuse_fs::Result<Entry> {
            Err(defuse_fs::Errno::ENOSYS)
        }

        fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> defuse_fs::Result<Attr> {
            Err(defuse_fs::Errno::ENOSYS)
        }

        fn readdir(
            &self,
            _: &Context<'_>,
            _: File,
            _: u64,
            _: &mut DirBuf<'_>,
        ) -> defuse_fs::Result<()> {
            Err(defuse_fs::Errno::ENOSYS)
        }
    }
}
