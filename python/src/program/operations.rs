//! The operations of a file system in Python, each a call of a method.

use defuse_fs::path::{PathCaps, PathDirEntry, PathFile, PathFileSystem, PathOperand, PathRef};
use defuse_fs::{
    Attr, Caps, Context, Errno, FileKind, LockOwner, NewNode, OpenArgs, OpenReply, ReadArgs,
    ReadBuf, ReleaseArgs, RenameFlags, Result, SetTime, SetXattrFlags, StatFs, WriteArgs, WriteBuf,
    Xattr, XattrName,
};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyBytes};

use super::values::{entry, seconds_of, space};
use super::{ObjectFileSystem, text};
use crate::buffers::{HeldBuffer, fill_bytes};
use crate::paths::{decode_name, encode_name};

/// The path and the open file of an operand.
fn parts(target: PathOperand<'_>) -> Result<(PathRef<'_>, Option<defuse_fs::Fh>)> {
    Ok((target.path()?, target.fh()))
}

impl PathFileSystem for ObjectFileSystem {
    fn path_caps(&self) -> PathCaps {
        PathCaps {
            caps: Caps { xattrs: self.xattrs, birth_times: false, ..Caps::default() },
            entry_valid_for: self.valid_for,
            ..PathCaps::default()
        }
    }

    fn getattr(&self, _: &Context<'_>, target: PathOperand<'_>) -> Result<Attr> {
        let (path, fh) = parts(target)?;
        self.attributes(path.as_bytes(), fh)
    }

    fn readlink(&self, _: &Context<'_>, path: PathRef<'_>) -> Result<Vec<u8>> {
        self.with("readlink", |py, method| encode_name(&method.call1((text(py, path)?,))?))
    }

    fn mknod(&self, _: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        let perm = node.perm & !node.umask;
        if node.kind == FileKind::Regular && self.creates {
            return self.with("create", |py, method| {
                let object = method.call1((text(py, path)?, perm))?;
                if let Some(release) = self.program.bind(py).getattr_opt("release")? {
                    release.call1((text(py, path)?, object))?;
                }
                Ok(())
            });
        }
        let mode = node.kind.mode_bits() | perm;
        self.with("mknod", |py, method| method.call1((text(py, path)?, mode, node.rdev)).map(drop))
    }

    fn mkdir(&self, _: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        let perm = node.perm & !node.umask;
        self.with("mkdir", |py, method| method.call1((text(py, path)?, perm)).map(drop))
    }

    fn symlink(
        &self,
        _: &Context<'_>,
        path: PathRef<'_>,
        target: &[u8],
        _: &NewNode<'_>,
    ) -> Result<()> {
        self.with("symlink", |py, method| {
            method.call1((text(py, path)?, decode_name(py, target)?)).map(drop)
        })
    }

    fn link(&self, _: &Context<'_>, old: PathRef<'_>, new: PathRef<'_>) -> Result<()> {
        self.with("link", |py, method| method.call1((text(py, new)?, text(py, old)?)).map(drop))
    }

    fn unlink(&self, _: &Context<'_>, path: PathRef<'_>) -> Result<()> {
        self.with("unlink", |py, method| method.call1((text(py, path)?,)).map(drop))
    }

    fn rmdir(&self, _: &Context<'_>, path: PathRef<'_>) -> Result<()> {
        self.with("rmdir", |py, method| method.call1((text(py, path)?,)).map(drop))
    }

    fn rename(
        &self,
        _: &Context<'_>,
        from: PathRef<'_>,
        to: PathRef<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        if flags != RenameFlags::default() {
            return Err(Errno::EINVAL);
        }
        self.with("rename", |py, method| method.call1((text(py, from)?, text(py, to)?)).map(drop))
    }

    fn chmod(&self, _: &Context<'_>, target: PathOperand<'_>, perm: u32) -> Result<()> {
        let (path, _) = parts(target)?;
        self.with("chmod", |py, method| method.call1((text(py, path)?, perm)).map(drop))
    }

    fn chown(
        &self,
        _: &Context<'_>,
        target: PathOperand<'_>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<()> {
        let (path, _) = parts(target)?;
        let id = |id: Option<u32>| id.map_or(-1, i64::from);
        self.with("chown", |py, method| method.call1((text(py, path)?, id(uid), id(gid))).map(drop))
    }

    fn truncate(&self, _: &Context<'_>, target: PathOperand<'_>, size: u64) -> Result<()> {
        let (path, fh) = parts(target)?;
        self.with("truncate", |py, method| {
            method.call1((text(py, path)?, size, self.opened.object(py, fh))).map(drop)
        })
    }

    fn utimens(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        atime: Option<SetTime>,
        mtime: Option<SetTime>,
    ) -> Result<()> {
        let kept = self.getattr(cx, target)?;
        let (path, _) = parts(target)?;
        let times = (seconds_of(atime, kept.atime), seconds_of(mtime, kept.mtime));
        self.with("utimens", |py, method| method.call1((text(py, path)?, times)).map(drop))
    }

    fn setxattr(
        &self,
        _: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        let (path, _) = parts(target)?;
        let create = if flags.create { libc::XATTR_CREATE } else { 0 };
        let replace = if flags.replace { libc::XATTR_REPLACE } else { 0 };
        self.with("setxattr", |py, method| {
            let name = decode_name(py, name.as_bytes())?;
            let value = PyBytes::new(py, value);
            method.call1((text(py, path)?, name, value, create | replace)).map(drop)
        })
    }

    fn getxattr(
        &self,
        _: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        let (path, _) = parts(target)?;
        let value = self.with("getxattr", |py, method| {
            let value = method.call1((text(py, path)?, decode_name(py, name.as_bytes())?))?;
            Ok(HeldBuffer::readable(&value)?.bytes().to_vec())
        })?;
        Xattr::answer(value, room)
    }

    fn listxattr(&self, _: &Context<'_>, target: PathOperand<'_>, room: usize) -> Result<Xattr> {
        let (path, _) = parts(target)?;
        let names = self.with("listxattr", |py, method| {
            let mut names = Vec::new();
            for name in method.call1((text(py, path)?,))?.try_iter()? {
                names.extend_from_slice(&encode_name(&name?)?);
                names.push(0);
            }
            Ok(names)
        })?;
        Xattr::answer(names, room)
    }

    fn removexattr(
        &self,
        _: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
    ) -> Result<()> {
        let (path, _) = parts(target)?;
        self.with("removexattr", |py, method| {
            method.call1((text(py, path)?, decode_name(py, name.as_bytes())?)).map(drop)
        })
    }

    fn open(&self, _: &Context<'_>, path: PathRef<'_>, args: OpenArgs) -> Result<OpenReply> {
        if !self.opens {
            return Ok(OpenReply::default());
        }
        self.with("open", |py, method| {
            let object = method.call1((text(py, path)?, args.flags.0))?;
            Ok(OpenReply::new(self.opened.insert(&object)))
        })
    }

    fn create(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenReply> {
        if !self.creates {
            self.mknod(cx, path, node)?;
            return self.open(cx, path, args);
        }
        self.with("create", |py, method| {
            let object = method.call1((text(py, path)?, node.perm & !node.umask))?;
            Ok(OpenReply::new(self.opened.insert(&object)))
        })
    }

    fn read(
        &self,
        _: &Context<'_>,
        file: PathFile<'_>,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let path = file.path()?;
        let outcome = self.with("read", |py, method| {
            let object = self.opened.object(py, Some(file.fh));
            let data = method.call1((text(py, path)?, out.remaining(), args.offset, object))?;
            Ok(out.put(HeldBuffer::readable(&data)?.bytes()).map(drop))
        });
        outcome?
    }

    fn write(
        &self,
        _: &Context<'_>,
        file: PathFile<'_>,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let path = file.path()?;
        let len = data.remaining();
        self.with("write", |py, method| {
            let mut taken = Ok(0);
            let bytes = fill_bytes(py, len, |room| {
                taken = data.take(room);
                Ok(*taken.as_ref().unwrap_or(&0))
            })?;
            let Ok(count) = taken else { return Ok(Err(Errno::EIO)) };
            let object = self.opened.object(py, Some(file.fh));
            let written = method.call1((text(py, path)?, bytes, args.offset, object))?;
            let written = if written.is_none() { count } else { written.extract()? };
            // Programs repeat a write of which nothing was taken.
            Ok(if written == 0 && count > 0 { Err(Errno::EIO) } else { Ok(written.min(count)) })
        })?
    }

    fn flush(&self, _: &Context<'_>, file: PathFile<'_>, _: LockOwner) -> Result<()> {
        let path = file.path()?;
        self.with("flush", |py, method| {
            let object = self.opened.object(py, Some(file.fh));
            method.call1((text(py, path)?, object)).map(drop)
        })
    }

    fn release(&self, _: &Context<'_>, file: PathFile<'_>, _: ReleaseArgs) -> Result<()> {
        let path = file.path()?;
        let outcome = self.with("release", |py, method| {
            let object = self.opened.object(py, Some(file.fh));
            method.call1((text(py, path)?, object)).map(drop)
        });
        drop(self.opened.remove(file.fh));
        match outcome {
            Err(Errno::ENOSYS) => Ok(()),
            outcome => outcome,
        }
    }

    fn fsync(&self, _: &Context<'_>, file: PathFile<'_>, datasync: bool) -> Result<()> {
        let path = file.path()?;
        self.with("fsync", |py, method| {
            let object = self.opened.object(py, Some(file.fh));
            method.call1((text(py, path)?, datasync, object)).map(drop)
        })
    }

    fn readdir(&self, _: &Context<'_>, dir: PathFile<'_>) -> Result<Vec<PathDirEntry>> {
        let path = dir.path()?;
        let kind_of = |name: &[u8]| {
            let separator: &[u8] = if path == PathRef::ROOT { b"" } else { b"/" };
            let full = [path.as_bytes(), separator, name].concat();
            Ok(self.attributes(&full, None)?.kind)
        };
        self.with("readdir", |py, method| {
            let mut all = Vec::new();
            for item in method.call1((text(py, path)?, py.None()))?.try_iter()? {
                all.extend(entry(&item?, kind_of)?);
            }
            Ok(all)
        })
    }

    fn statfs(&self, _: &Context<'_>, target: PathOperand<'_>) -> Result<StatFs> {
        let (path, _) = parts(target)?;
        let found = self.with("statfs", |py, method| {
            let found: Bound<'_, PyAny> = method.call1((text(py, path)?,))?;
            space(&found)
        });
        match found {
            Err(Errno::ENOSYS) => {
                Ok(StatFs { bsize: 4096, frsize: 4096, name_max: 255, ..StatFs::default() })
            }
            found => found,
        }
    }
}
