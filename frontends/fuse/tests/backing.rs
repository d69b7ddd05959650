//! Backing files with the running kernel: the credentials with which it writes to them.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::{
    Attr, BackingFile, Caps, Context, DirBuf, Entry, Errno, Fh, File, FileKind, FileSystem, Ino,
    Name, OpenArgs, OpenReply, Result, Timestamp,
};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};

/// A directory with one file, backed by another file.
struct BackedDirectory {
    lower: fs::File,
    without_fsetid: bool,
}

impl BackedDirectory {
    fn attr(&self, ino: Ino) -> Attr {
        let dir = ino == Ino::ROOT;
        Attr {
            st_ino: ino.0,
            kind: if dir { FileKind::Directory } else { FileKind::Regular },
            perm: 0o777,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: 0,
            blocks: 0,
            blksize: 4096,
            atime: Timestamp::default(),
            mtime: Timestamp::default(),
            ctime: Timestamp::default(),
            btime: None,
            valid_for: Duration::ZERO,
        }
    }
}

impl FileSystem for BackedDirectory {
    fn caps(&self) -> Caps {
        Caps { backing_files: true, open_truncates: true, ..Caps::default() }
    }
    fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        let (ino, valid_for) = (Ino(2), Duration::ZERO);
        Ok(Entry { ino, generation: 1, attr: self.attr(ino), valid_for })
    }
    fn getattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        Ok(self.attr(ino))
    }
    fn open(&self, _: &Context<'_>, _: Ino, _: OpenArgs) -> Result<OpenReply> {
        let fd = Arc::new(self.lower.try_clone().unwrap().into());
        let backing = Some(BackingFile { fd, without_fsetid: self.without_fsetid, native: None });
        Ok(OpenReply { backing, ..OpenReply::new(Fh(1)) })
    }
    fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
        Err(Errno::ENOTDIR)
    }
}

/// The kernel used the credentials that the thread had when it registered the file.
#[test]
fn the_kernel_writes_to_a_backing_file_without_fsetid_if_the_file_system_requests_it() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("skipped: needs root and /dev/fuse");
        return;
    }
    for without_fsetid in [true, false] {
        let (dir, below) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = below.path().join("lower");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        let lower = fs::File::options().read(true).write(true).open(&path).unwrap();
        let served = Arc::new(BackedDirectory { lower, without_fsetid });
        let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
        let session = Session::start(mounted.device, served, &SessionOptions::default()).unwrap();
        let passes = session.negotiated_init().uses(defuse_fuse::abi::FUSE_PASSTHROUGH);
        let written = passes.then(|| {
            let mut file = fs::File::options().write(true).open(dir.path().join("file"))?;
            file.write_all(b"new")
        });
        mount::abort(dir.path()).unwrap();
        assert!(session.wait().clean);
        let Some(written) = written else {
            println!("not here: needs a kernel with backing files (Linux 6.9)");
            return;
        };
        written.unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode, if without_fsetid { 0o755 } else { 0o4755 }, "{without_fsetid}");
    }
}
