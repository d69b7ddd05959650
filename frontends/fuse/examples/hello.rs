//! A complete file system: one file, `hello`, in memory, for reading and writing.
//!
//! `cargo run -p defuse-fuse --example hello -- DIRECTORY` mounts it on an empty directory and
//! serves it until it is unmounted (`umount DIRECTORY`).

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_fs::{
    Attr, Context, DirBuf, DirItem, Entry, Errno, Fh, File, FileKind, FileSystem, Ino, Name,
    PushOutcome, ReadArgs, ReadBuf, Result, SetAttr, Timestamp, WriteArgs, WriteBuf,
};
use defuse_fuse::mount::{MountOptions, mount};
use defuse_fuse::{Session, SessionOptions};

const HELLO: Ino = Ino(2);
/// The maximum size of the file, in bytes.
const MOST: usize = 1 << 20;

/// The content of the file, and its modification time.
struct Hello {
    file: Mutex<(Vec<u8>, Timestamp)>,
}

impl FileSystem for Hello {
    fn lookup(&self, cx: &Context<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        if name.as_bytes() != b"hello" {
            return Err(Errno::ENOENT);
        }
        let attr = self.getattr(cx, HELLO, None)?;
        Ok(Entry { ino: HELLO, generation: 0, attr, valid_for: Duration::from_secs(1) })
    }

    fn getattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        let (content, changed) = &*self.file.lock().unwrap();
        let (kind, perm, nlink, size) = match ino {
            Ino::ROOT => (FileKind::Directory, 0o755, 2, 0),
            HELLO => (FileKind::Regular, 0o644, 1, content.len() as u64),
            _ => return Err(Errno::ESTALE),
        };
        Ok(Attr {
            st_ino: ino.0,
            kind,
            perm,
            nlink,
            uid: 0,
            gid: 0,
            rdev: 0,
            size,
            blocks: size.div_ceil(512),
            blksize: 4096,
            atime: *changed,
            mtime: *changed,
            ctime: *changed,
            btime: None,
            valid_for: Duration::from_secs(1),
        })
    }

    /// Sets the file size only: chmod(2) and chown(2) are refused.
    fn setattr(&self, cx: &Context<'_>, ino: Ino, _: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        if ino != HELLO || set.perm.or(set.uid).or(set.gid).is_some() {
            return Err(Errno::EPERM);
        }
        if let Some(size) = set.size {
            let size = usize::try_from(size).ok().filter(|&size| size <= MOST);
            let file = &mut *self.file.lock().unwrap();
            file.0.resize(size.ok_or(Errno::EFBIG)?, 0);
            file.1 = Timestamp::now();
        }
        self.getattr(cx, ino, None)
    }

    fn read(&self, _: &Context<'_>, _: File, args: ReadArgs, out: &mut ReadBuf<'_>) -> Result<()> {
        let (content, _) = &*self.file.lock().unwrap();
        let start = content.len().min(args.offset as usize);
        out.put(&content[start..]).map(drop)
    }

    fn write(
        &self,
        _: &Context<'_>,
        _: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let (start, len) = (args.offset as usize, data.remaining());
        let end = start.checked_add(len).filter(|&end| end <= MOST).ok_or(Errno::EFBIG)?;
        let (content, changed) = &mut *self.file.lock().unwrap();
        if content.len() < end {
            content.resize(end, 0);
        }
        *changed = Timestamp::now();
        data.take(&mut content[start..end])
    }

    fn readdir(&self, _: &Context<'_>, _: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let all: [(&[u8], Ino, FileKind); 3] = [
            (b".", Ino::ROOT, FileKind::Directory),
            (b"..", Ino::ROOT, FileKind::Directory),
            (b"hello", HELLO, FileKind::Regular),
        ];
        for (place, (name, ino, kind)) in all.into_iter().enumerate().skip(from as usize) {
            let item = DirItem { ino: ino.0, next: place as u64 + 1, kind, name };
            if out.push(item) == PushOutcome::Full {
                break;
            }
        }
        Ok(())
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args().nth(1).ok_or("usage: hello DIRECTORY")?;
    let content = (b"Hello, world!\n".to_vec(), Timestamp::now());
    let hello = Hello { file: Mutex::new(content) };
    let mounted = mount(Path::new(&directory), &MountOptions::default())?;
    let session = Session::start(mounted.device, Arc::new(hello), &SessionOptions::default())?;
    session.wait().durable.expect("nothing is held back");
    Ok(())
}
