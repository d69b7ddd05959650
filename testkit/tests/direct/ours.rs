//! The calls, made through the in-process client.

use std::fmt::Write as _;
use std::sync::Arc;

use defuse_direct::{
    CallError, ClientMountArgs, ClientOptions, ClientTask, DirectClient, FileDescription, FileStat,
    NeededAccess, NewOwner, NewTimes, OpenHow, ResolveFlags, Result, TaskCredentials, WalkStart,
    WorkDir,
};
use defuse_fs::{FileKind, FileSystem, RenameFlags, SetTime, SetXattrFlags, Timestamp, Xattr};

use super::ops::{DirectOp, ITEMS, ItemKind, PATHS, TARGETS, XATTRS, acl};

/// Runs `ops` as `who` on the file systems of `mounts`, the first of which is at `t:`. Returns the
/// results as text, and the final tree.
pub fn run(
    mounts: &[TestedMount],
    who: &TaskCredentials,
    ops: &[DirectOp],
) -> (Vec<String>, String) {
    let client = DirectClient::new(ClientOptions::default());
    for mounted in mounts {
        let (target, fs) = (mounted.target.as_bytes(), Arc::clone(&mounted.fs));
        client.mount(target, fs, &ClientMountArgs::default()).unwrap();
        if mounted.is_empty {
            prepare(&client, mounted.target);
        }
    }
    let task = ClientTask::new(who.clone(), WorkDir::Outside(b"/".to_vec()));
    task.set_umask(0o022);
    let how = OpenHow { flags: 0o200000, ..OpenHow::default() };
    let top = ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()));
    let root = client.open(&top, WalkStart::Cwd, b"t:/r", how).unwrap();
    let mut ours = ClientSide { client: &client, task: &task, root: &root, files: Vec::new() };
    let answers = ops.iter().map(|op| ours.step(op)).collect();
    drop(ours);
    drop(root);
    let tree = tree(&client, &top);
    for mounted in mounts.iter().rev() {
        client.unmount(mounted.target.as_bytes(), false).expect("everything is closed");
    }
    (answers, tree)
}

/// A file system under test.
pub struct TestedMount {
    pub target: &'static str,
    pub fs: Arc<dyn FileSystem>,
    /// It gets the same initial tree as the other side.
    pub is_empty: bool,
}

fn prepare(client: &DirectClient, target: &str) {
    let top = ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()));
    top.set_umask(0);
    for item in ITEMS {
        let path = format!("{target}/r/{}", item.path);
        let path = path.trim_end_matches('/').as_bytes();
        match item.what {
            ItemKind::Dir => client.mkdir(&top, WalkStart::Cwd, path, 0o777).unwrap(),
            ItemKind::Link(to) => {
                client.symlink(&top, to.as_bytes(), WalkStart::Cwd, path).unwrap()
            }
            ItemKind::File => {
                let how = OpenHow { flags: 0o101, mode: 0o666, ..OpenHow::default() };
                let file = client.open(&top, WalkStart::Cwd, path, how).unwrap();
                client.write(&top, &file, item.content().as_bytes()).unwrap();
            }
        }
        if !matches!(item.what, ItemKind::Link(_)) {
            let owner = NewOwner { uid: Some(item.uid), gid: Some(item.gid) };
            client.chown(&top, WalkStart::Cwd, path, owner, true).unwrap();
            client.chmod(&top, WalkStart::Cwd, path, item.mode, true).unwrap();
        }
    }
}

/// Every path with attributes and contents, in the format of the other side.
fn tree(client: &DirectClient, top: &ClientTask) -> String {
    let mut out = String::new();
    let mut dirs = vec![String::new()];
    while let Some(dir) = dirs.pop() {
        let full = |name: &str| format!("t:/{dir}{name}");
        let how = OpenHow { flags: 0o200000, ..OpenHow::default() };
        let open = client.open(top, WalkStart::Cwd, full("").as_bytes(), how).unwrap();
        let entries = client.read_dir(top, &open).unwrap();
        let mut names: Vec<_> =
            entries.into_iter().map(|e| String::from_utf8(e.name).unwrap()).collect();
        names.sort();
        for name in names.iter().filter(|name| !matches!(name.as_str(), "." | "..")) {
            let found = client.stat(top, WalkStart::Cwd, full(name).as_bytes(), false).unwrap();
            let kind = found.attr.kind;
            write!(out, "{dir}{name} {}", stat(found)).unwrap();
            match kind {
                FileKind::Directory => dirs.push(format!("{dir}{name}/")),
                FileKind::Regular => {
                    let file =
                        client.open(top, WalkStart::Cwd, full(name).as_bytes(), OpenHow::default());
                    let mut bytes = vec![0; found.attr.size as usize];
                    let len = client.pread(top, &file.unwrap(), &mut bytes, 0).unwrap();
                    let sum = bytes[..len]
                        .iter()
                        .fold(7u64, |sum, &b| sum.wrapping_mul(31) + u64::from(b));
                    write!(out, " {sum:x}").unwrap();
                }
                _ => {}
            }
            out.push('\n');
        }
    }
    out
}

struct ClientSide<'a> {
    client: &'a DirectClient,
    task: &'a ClientTask,
    root: &'a FileDescription,
    files: Vec<Arc<FileDescription>>,
}

fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(CallError::Errno(errno)) => format!("error {}", errno.raw()),
        Err(other) => format!("{other:?}"),
    }
}

pub fn stat(stat: FileStat) -> String {
    let attr = stat.attr;
    let size = if attr.kind == defuse_fs::FileKind::Directory { 0 } else { attr.size };
    format!("{:o} {} {} {} {} {}", attr.mode(), attr.nlink, attr.uid, attr.gid, size, attr.rdev)
}

fn xattr(value: Xattr) -> String {
    match value {
        Xattr::Size(size) => format!("{size}"),
        Xattr::Value(value) => format!("{value:?}"),
    }
}

impl<'a> ClientSide<'a> {
    fn walk_start(&self) -> WalkStart<'a> {
        WalkStart::Dir(self.root)
    }

    fn step(&mut self, op: &DirectOp) -> String {
        let p = |path: usize| PATHS[path].as_bytes();
        let (client, task, at) = (self.client, self.task, self.walk_start());
        let file = |file: usize| self.files.get(file % self.files.len().max(1)).cloned();
        macro_rules! file {
            ($number:expr) => {
                match file($number) {
                    Some(file) => file,
                    None => return String::new(),
                }
            };
        }
        match *op {
            DirectOp::Open { path, flags, mode } => {
                let how = OpenHow { flags, mode, resolve: ResolveFlags::default() };
                match client.open(task, at, p(path), how) {
                    Ok(file) => {
                        self.files.push(file);
                        "open".to_owned()
                    }
                    Err(stop) => text::<()>(Err(stop)),
                }
            }
            DirectOp::OpenIn { dir, path, flags, mode } => {
                let how = OpenHow { flags, mode, resolve: ResolveFlags::default() };
                let dir = file!(dir);
                match client.open(task, WalkStart::Dir(&dir), p(path), how) {
                    Ok(file) => {
                        self.files.push(file);
                        "open".to_owned()
                    }
                    Err(stop) => text::<()>(Err(stop)),
                }
            }
            DirectOp::Dup { file } => {
                let copy = file!(file);
                self.files.push(copy);
                "open".to_owned()
            }
            DirectOp::Append { file, on } => {
                text(client.set_flags(task, &*file!(file), if on { 0o2000 } else { 0 }))
            }
            DirectOp::RenameIn { dirs, from, to } => {
                let (old, new) = (file!(dirs.0), file!(dirs.1));
                let (old, new) = ((WalkStart::Dir(&old), p(from)), (WalkStart::Dir(&new), p(to)));
                text(client.rename(task, old, new, RenameFlags::default()))
            }
            DirectOp::UnlinkIn { dir, path } => {
                let dir = file!(dir);
                text(client.unlink(task, WalkStart::Dir(&dir), p(path)))
            }
            DirectOp::Close { file } => {
                if self.files.is_empty() {
                    return String::new();
                }
                let file = self.files.remove(file % self.files.len());
                if self.files.iter().any(|other| Arc::ptr_eq(other, &file)) {
                    // Another descriptor refers to it, so only this one is removed.
                    return "()".to_owned();
                }
                text(file.close(task).map_err(CallError::from))
            }
            DirectOp::Read { file, len } => {
                let mut room = vec![0; len];
                let result = client.read(task, &*file!(file), &mut room);
                text(result.map(|count| room[..count].to_vec()))
            }
            DirectOp::Write { file, len, byte } => {
                text(client.write(task, &*file!(file), &vec![byte; len]))
            }
            DirectOp::Pread { file, len, offset } => {
                let mut room = vec![0; len];
                let result = client.pread(task, &*file!(file), &mut room, offset);
                text(result.map(|count| room[..count].to_vec()))
            }
            DirectOp::Pwrite { file, len, offset, byte } => {
                text(client.pwrite(task, &*file!(file), &vec![byte; len], offset))
            }
            DirectOp::Seek { file, offset, whence } => {
                let file = file!(file);
                // Only the file system can interpret positions in a directory.
                if file.kind() == defuse_fs::FileKind::Directory {
                    return String::new();
                }
                text(client.lseek(task, &file, offset, whence))
            }
            DirectOp::Ftruncate { file, length } => {
                text(client.ftruncate(task, &*file!(file), length))
            }
            DirectOp::Fallocate { file, mode, offset, length } => {
                text(client.fallocate(task, &*file!(file), mode, (offset, length)))
            }
            DirectOp::Copy { from, to, len } => {
                text(client.copy_file_range(task, (&*file!(from), None), (&*file!(to), None), len))
            }
            DirectOp::List { file } => {
                let file = file!(file);
                let listed = client.seek_dir(&file, 0).and_then(|()| client.read_dir(task, &file));
                text(listed.map(|entries| {
                    let mut names: Vec<_> = entries.into_iter().map(|entry| entry.name).collect();
                    names.sort();
                    names
                }))
            }
            DirectOp::Fstat { file } => text(client.fstat(task, &*file!(file)).map(stat)),
            DirectOp::Fchmod { file, mode } => text(client.fchmod(task, &*file!(file), mode)),
            _ => self.step_path(op),
        }
    }

    fn step_path(&self, op: &DirectOp) -> String {
        let p = |path: usize| PATHS[path].as_bytes();
        let x = |name: usize| XATTRS[name].as_bytes();
        let (client, task, at) = (self.client, self.task, self.walk_start());
        match *op {
            DirectOp::Stat { path, follow } => {
                text(client.stat(task, at, p(path), follow).map(stat))
            }
            DirectOp::Access { path, mask } => {
                text(client.access(task, at, p(path), NeededAccess::from_bits(mask), (true, false)))
            }
            DirectOp::Chmod { path, mode } => text(client.chmod(task, at, p(path), mode, true)),
            DirectOp::Chown { path, uid, gid, follow } => {
                let id = |id: u32| (id != u32::MAX).then_some(id);
                let owner = NewOwner { uid: id(uid), gid: id(gid) };
                text(client.chown(task, at, p(path), owner, follow))
            }
            DirectOp::Utimens { path, now, follow } => {
                let time = SetTime::At(Timestamp { secs: 1, nanos: 2 });
                let set = NewTimes { atime: Some(time), mtime: None };
                let times = if now { NewTimes::NOW } else { set };
                text(client.utimens(task, at, p(path), times, follow))
            }
            DirectOp::Truncate { path, length } => text(client.truncate(task, at, p(path), length)),
            DirectOp::Mkdir { path, mode } => text(client.mkdir(task, at, p(path), mode)),
            DirectOp::Mknod { path, mode } => text(client.mknod(task, at, p(path), mode, 0xf005)),
            DirectOp::Rmdir { path } => text(client.rmdir(task, at, p(path))),
            DirectOp::Unlink { path } => text(client.unlink(task, at, p(path))),
            DirectOp::Symlink { target, path } => {
                text(client.symlink(task, TARGETS[target].as_bytes(), at, p(path)))
            }
            DirectOp::Readlink { path } => text(client.readlink(task, at, p(path))),
            DirectOp::Link { from, to, follow } => {
                text(client.link(task, (at, p(from)), (at, p(to)), follow))
            }
            DirectOp::Rename { from, to, flags } => {
                text(client.rename(task, (at, p(from)), (at, p(to)), RenameFlags(flags)))
            }
            DirectOp::SetXattr { path, name, len, flags } => {
                let flags = SetXattrFlags {
                    create: flags & 1 != 0,
                    replace: flags & 2 != 0,
                    clear_sgid: false,
                };
                text(client.setxattr(task, (at, p(path), true), x(name), &vec![b'v'; len], flags))
            }
            DirectOp::GetXattr { path, name, room } => {
                let got = client.getxattr(task, (at, p(path), true), x(name), room);
                got.map_or_else(|stop| text::<()>(Err(stop)), xattr)
            }
            DirectOp::ListXattr { path } => {
                let listed = client.listxattr(task, at, p(path), true, 4096);
                listed.map_or_else(|stop| text::<()>(Err(stop)), xattr)
            }
            DirectOp::RemoveXattr { path, name } => {
                text(client.removexattr(task, (at, p(path), true), x(name)))
            }
            DirectOp::SetAcl { path, perm } => {
                let name = b"system.posix_acl_access";
                let place = (at, p(path), true);
                text(client.setxattr(task, place, name, &acl(perm), SetXattrFlags::default()))
            }
            _ => unreachable!("a call on an open file"),
        }
    }
}
