//! The layer beside the contract: each method checks its caller and accounts for its result.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use defuse_fs::layer::Method;
use defuse_fs::*;

use crate::{PeerConnection, PeerCredentials, ServiceQuotas, ServiceState};

/// A file system that gives out inodes and open files, and counts how many it has not got back.
#[derive(Default)]
struct CountingFileSystem {
    lookups: AtomicI64,
    opens: AtomicI64,
    next: AtomicI64,
    calls: Mutex<Vec<Method>>,
    submitted: AtomicI64,
    /// True if all inodes belong to root, and no other user may use them.
    is_secret: AtomicBool,
}

impl CountingFileSystem {
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) as u64 + 100
    }

    fn entry(&self) -> Result<Entry> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        let ino = Ino(self.number());
        Ok(Entry { ino, generation: 0, attr: attr(ino), valid_for: Duration::ZERO })
    }

    fn make_open_reply(&self) -> Result<OpenReply> {
        self.opens.fetch_add(1, Ordering::Relaxed);
        Ok(OpenReply::new(Fh(self.number())))
    }
}

/// Attributes of a file of the user 5, or of the root directory, to which every user may write.
fn attr(ino: Ino) -> Attr {
    let (kind, perm) = match ino {
        Ino::ROOT => (FileKind::Directory, 0o777),
        _ => (FileKind::Regular, 0o666),
    };
    let zero = Timestamp::default();
    Attr {
        st_ino: ino.0,
        kind,
        perm,
        nlink: 1,
        uid: 5,
        gid: 5,
        rdev: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: zero,
        mtime: zero,
        ctime: zero,
        btime: None,
        valid_for: Duration::ZERO,
    }
}

#[rustfmt::skip]
impl FileSystem for CountingFileSystem {
    fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> { self.entry() }
    fn lookup_parent(&self, _: &Context<'_>, _: Ino) -> Result<Entry> { self.entry() }
    fn mknod(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>) -> Result<Entry> {
        self.entry()
    }
    fn mkdir(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>) -> Result<Entry> {
        self.entry()
    }
    fn symlink(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &[u8],
        _: &NewNode<'_>) -> Result<Entry> {
        self.entry()
    }
    fn link(&self, _: &Context<'_>, _: Ino, _: Ino, _: Name<'_>) -> Result<Entry> { self.entry() }
    fn getattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        let attr = attr(ino);
        let secret = Attr { uid: 0, gid: 0, perm: 0o700, ..attr };
        Ok(if self.is_secret.load(Ordering::Relaxed) { secret } else { attr })
    }
    fn open(&self, _: &Context<'_>, _: Ino, _: OpenArgs) -> Result<OpenReply> {
        self.make_open_reply()
    }
    fn opendir(&self, _: &Context<'_>, _: Ino, _: OpenFlags) -> Result<OpenReply> {
        self.make_open_reply()
    }
    fn create(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>,
        _: OpenArgs) -> Result<(Entry, OpenReply)> {
        Ok((self.entry()?, self.make_open_reply()?))
    }
    fn tmpfile(&self, _: &Context<'_>, _: Ino, _: &NewNode<'_>, _: OpenArgs) -> Result<(Entry,
        OpenReply)> {
        Ok((self.entry()?, self.make_open_reply()?))
    }
    fn readdir(&self, _: &Context<'_>, _: File, _: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let item = DirItem { ino: 9, next: 1, kind: FileKind::Regular, name: b"name" };
        out.push_with(item, || self.entry().ok());
        Ok(())
    }
    fn shortcuts(&self) -> Option<&dyn Shortcuts> { Some(self) }
    fn figures(&self) -> Vec<Figure> { vec![Figure::count("secrets", 1)] }
    fn notes(&self) -> Vec<String> { vec!["a secret".to_owned()] }
    fn forget(&self, _: Ino, lookups: u64) {
        self.lookups.fetch_sub(lookups as i64, Ordering::Relaxed);
    }
    fn release(&self, _: &Context<'_>, _: File, _: ReleaseArgs) -> Result<()> {
        self.opens.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
    fn releasedir(&self, _: &Context<'_>, _: File) -> Result<()> {
        self.opens.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Shortcuts for CountingFileSystem {}

/// Notes each method that reaches the file system.
struct MethodRecorder {
    inner: Arc<CountingFileSystem>,
}

impl MethodRecorder {
    fn intercept<T>(
        &self,
        method: Method,
        _: &Context<'_>,
        call: impl FnOnce(&Arc<CountingFileSystem>) -> Result<T>,
    ) -> Result<T> {
        self.inner.calls.lock().unwrap().push(method);
        call(&self.inner)
    }
}

impl FileSystem for MethodRecorder {
    delegate!(intercept inner, except submit, setlkw);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        self.inner.shortcuts()
    }

    fn submit(&self, io: Io) {
        self.inner.submitted.fetch_add(1, Ordering::Relaxed);
        io.finish(Ok(0));
    }

    fn setlkw(&self, wait: LockWait) {
        self.inner.submitted.fetch_add(1, Ordering::Relaxed);
        wait.finish(Ok(()));
    }
}

struct NameSink;

impl DirSink for NameSink {
    fn wants_entries(&self) -> bool {
        true
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, _: DirItem<'_>, _: Option<&Entry>) {}
}

/// Calls `method` on an inode and an open file. A new method of the contract has to be added here.
fn call(fs: &dyn FileSystem, method: Method, cx: &Context<'_>, file: File) -> Result<()> {
    let (ino, name) = (file.ino, Name::new(b"name").unwrap());
    let xattr = XattrName::new(b"user.x").unwrap();
    let node = &NewNode::new(FileKind::Regular, 0o644, cx.caller);
    let flags = OpenFlags(OpenFlags::RDWR);
    let open = OpenArgs { flags, ..OpenArgs::default() };
    let lock = Lock { typ: LockType::Write, start: 0, end: 9, pid: 1 };
    let request = &LockRequest { kind: LockKind::Flock, owner: LockOwner(7), lock, wait: false };
    match method {
        Method::Lookup => fs.lookup(cx, ino, name).map(drop),
        Method::LookupParent => fs.lookup_parent(cx, ino).map(drop),
        Method::Shortcut(_) => unreachable!("a client has none"),
        Method::Mknod => fs.mknod(cx, ino, name, node).map(drop),
        Method::Mkdir => fs.mkdir(cx, ino, name, node).map(drop),
        Method::Symlink => fs.symlink(cx, ino, name, b"target", node).map(drop),
        Method::Link => fs.link(cx, ino, ino, name).map(drop),
        Method::Unlink => fs.unlink(cx, ino, name),
        Method::Rmdir => fs.rmdir(cx, ino, name),
        Method::Rename => fs.rename(cx, (ino, name), (ino, name), RenameFlags(0)),
        Method::Readlink => fs.readlink(cx, ino).map(drop),
        Method::Getattr => fs.getattr(cx, ino, Some(file.fh)).map(drop),
        Method::Setattr => {
            let set = SetAttr { perm: Some(0o644), ..SetAttr::default() };
            fs.setattr(cx, ino, Some(file.fh), &set).map(drop)
        }
        Method::Access => fs.access(cx, ino, AccessMask(4)),
        Method::Setxattr => fs.setxattr(cx, ino, xattr, b"x", SetXattrFlags::default()),
        Method::Getxattr => fs.getxattr(cx, ino, xattr, 10).map(drop),
        Method::Listxattr => fs.listxattr(cx, ino, 10).map(drop),
        Method::Removexattr => fs.removexattr(cx, ino, xattr),
        Method::Open => fs.open(cx, ino, open).map(drop),
        Method::Create => fs.create(cx, ino, name, node, open).map(drop),
        Method::Tmpfile => fs.tmpfile(cx, ino, node, open).map(drop),
        Method::Read => {
            let mut bytes = [0; 8];
            let mut sink = SliceSink::new(&mut bytes);
            fs.read(cx, file, ReadArgs::default(), &mut ReadBuf::new(&mut sink, 8))
        }
        Method::Write => {
            let mut source = SliceSource::new(b"text");
            fs.write(cx, file, WriteArgs::default(), &mut WriteBuf::new(&mut source)).map(drop)
        }
        Method::Flush => fs.flush(cx, file, LockOwner(7)),
        Method::Release => fs.release(cx, file, ReleaseArgs::default()),
        Method::Fsync => fs.fsync(cx, file, false),
        Method::Fallocate => fs.fallocate(cx, file, Fallocate { mode: 0, offset: 0, length: 1 }),
        Method::Lseek => fs.lseek(cx, file, 0, Whence::Data).map(drop),
        Method::CopyFileRange => {
            let (src, dst, length) = (file, file, 1);
            let copy = CopyRange { src, src_offset: 0, dst, dst_offset: 4096, length, flags: 0 };
            fs.copy_file_range(cx, &copy).map(drop)
        }
        Method::Ioctl => {
            let (dir, compat32) = (false, false);
            let args = IoctlArgs { cmd: 1, arg: 0, input: b"", output_len: 0, dir, compat32 };
            fs.ioctl(cx, file, &args).map(drop)
        }
        Method::Poll => fs.poll(cx, file, 1, None).map(drop),
        Method::Bmap => fs.bmap(cx, ino, 512, 0).map(drop),
        Method::Getlk => fs.getlk(cx, file, request).map(drop),
        Method::Setlk => fs.setlk(cx, file, request),
        Method::Opendir => fs.opendir(cx, ino, OpenFlags(0)).map(drop),
        Method::Readdir => fs.readdir(cx, file, 0, &mut DirBuf::new(&mut NameSink)),
        Method::Releasedir => fs.releasedir(cx, file),
        Method::Fsyncdir => fs.fsyncdir(cx, file, false),
        Method::Statfs => fs.statfs(cx, ino).map(drop),
        Method::Syncfs => fs.syncfs(cx),
    }
}

/// All methods but shortcuts.
fn operations() -> impl Iterator<Item = Method> {
    Method::ALL.iter().copied().filter(|method| !matches!(method, Method::Shortcut(_)))
}

/// Methods that name no inode of the client's choice, or the file system as a whole.
fn is_for_all(method: Method) -> bool {
    matches!(method, Method::Statfs | Method::Syncfs)
}

/// True for methods that give an open file back. They are called after its process has ended, for
/// no caller.
fn is_release(method: Method) -> bool {
    matches!(method, Method::Release | Method::Releasedir)
}

fn connection(fs: &Arc<CountingFileSystem>, uid: u32) -> PeerConnection<Arc<MethodRecorder>> {
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let fs = Arc::new(MethodRecorder { inner: Arc::clone(fs) });
    PeerConnection::new(fs, service, PeerCredentials { pid: 1, uid, groups: vec![uid] })
}

fn context(uid: u32) -> Context<'static> {
    Context::new(Caller { uid, gid: uid, pid: 1 })
}

fn reach_all(fs: &CountingFileSystem) -> BTreeSet<&'static str> {
    std::mem::take(&mut *fs.calls.lock().unwrap()).into_iter().map(Method::name).collect()
}

/// The figures and notes reveal actions of other users.
#[test]
fn no_client_sees_the_figures_and_notes_of_the_file_system() {
    let fs = Arc::new(CountingFileSystem::default());
    assert_eq!((fs.figures().len(), fs.notes().len()), (1, 1));
    for uid in [0, 5] {
        let connection = connection(&fs, uid);
        assert_eq!((connection.figures(), connection.notes()), (Vec::new(), Vec::new()));
    }
}

const OTHERS: File = File { ino: Ino(77), fh: Fh(1) };

#[test]
fn no_method_reaches_an_inode_that_the_client_was_not_given() {
    let fs = Arc::new(CountingFileSystem::default());
    for uid in [0, 5] {
        let connection = connection(&fs, uid);
        for method in operations().filter(|&method| !is_for_all(method)) {
            let expected = if is_release(method) { Errno::EBADF } else { Errno::ESTALE };
            let result = call(&connection, method, &context(uid), OTHERS);
            assert_eq!((result, reach_all(&fs)), (Err(expected), BTreeSet::new()), "{method:?}");
        }
    }
}

#[test]
fn no_method_acts_for_another_user_than_that_of_the_client() {
    let fs = Arc::new(CountingFileSystem::default());
    let connection = connection(&fs, 5);
    let root = File { ino: Ino::ROOT, fh: Fh(1) };
    let others = |&method: &Method| !is_for_all(method) && !is_release(method);
    for method in operations().filter(others) {
        let result = call(&connection, method, &context(6), root);
        assert_eq!((result, reach_all(&fs)), (Err(Errno::EPERM), BTreeSet::new()), "{method:?}");
    }
}

/// All methods but those that take an inode alone.
#[test]
fn no_method_uses_an_open_file_that_the_client_was_not_given() {
    let fs = Arc::new(CountingFileSystem::default());
    let connection = connection(&fs, 0);
    let root = File { ino: Ino::ROOT, fh: Fh(u64::MAX) };
    let takes_inode = |method| {
        use Method::*;
        matches!(
            method,
            Lookup
                | LookupParent
                | Mknod
                | Mkdir
                | Symlink
                | Link
                | Unlink
                | Rmdir
                | Rename
                | Readlink
                | Access
                | Setxattr
                | Getxattr
                | Listxattr
                | Removexattr
                | Open
                | Create
                | Tmpfile
                | Bmap
                | Opendir
        )
    };
    for method in operations().filter(|&method| !is_for_all(method)) {
        let result = call(&connection, method, &context(0), root);
        let expected: &[&str] = if takes_inode(method) { &[method.name()] } else { &[] };
        assert_eq!(reach_all(&fs), expected.iter().copied().collect(), "{method:?}");
        assert_eq!(result == Err(Errno::EBADF), !takes_inode(method), "{method:?}: {result:?}");
    }
    connection.close();
}

/// The permission that a method needs was checked when the file was opened, or it needs none.
fn needs_no_permission(method: Method) -> bool {
    use Method::*;
    match method {
        Readlink | Getattr | Listxattr | Statfs | Syncfs | Poll | Getlk => true,
        Flush | Release | Fsync | Lseek | Setlk | Readdir | Releasedir | Fsyncdir => true,
        Lookup | LookupParent | Mknod | Mkdir | Symlink | Link | Unlink | Rmdir | Rename => false,
        Setattr | Access | Setxattr | Getxattr | Removexattr | Open | Create | Tmpfile => false,
        Read | Write | Fallocate | CopyFileRange | Ioctl | Bmap | Opendir => false,
        Shortcut(_) => false,
    }
}

#[test]
fn no_method_does_what_the_user_of_the_client_may_not() {
    // Calls of the file system that a check itself makes.
    let looks = BTreeSet::from(["getattr", "getxattr", "lookup"]);
    for method in operations().filter(|&method| !needs_no_permission(method)) {
        let fs = Arc::new(CountingFileSystem::default());
        let connection = connection(&fs, 5);
        let cx = context(5);
        // Methods that use an open file need the other mode, so that this one does not help.
        let mode = if method == Method::Read { OpenFlags::WRONLY } else { 0 };
        let args = OpenArgs { flags: OpenFlags(mode), ..OpenArgs::default() };
        let entry = connection.lookup(&cx, Ino::ROOT, Name::new(b"name").unwrap()).unwrap();
        let file = File { ino: entry.ino, fh: connection.open(&cx, entry.ino, args).unwrap().fh };
        fs.is_secret.store(true, Ordering::Relaxed);
        reach_all(&fs);
        let result = call(&connection, method, &cx, file);
        let refused = [Errno::EACCES, Errno::EPERM, Errno::EBADF, Errno::ENOTTY];
        assert!(result.is_err_and(|errno| refused.contains(&errno)), "{method:?}: {result:?}");
        let reached = reach_all(&fs);
        assert!(reached.is_subset(&looks), "{method:?}: {reached:?}");
        assert!(
            !looks.contains(method.name())
                || !reached.contains(method.name())
                || method == Method::Getattr
        );
        connection.close();
    }
}

/// Each method is called on objects that the client has, and everything that it gives is released
/// at the end.
#[test]
fn what_any_method_gives_is_accounted_for_and_taken_back() {
    for method in operations() {
        for uid in [0, 5] {
            let fs = Arc::new(CountingFileSystem::default());
            let connection = connection(&fs, uid);
            let (cx, name) = (context(uid), Name::new(b"name").unwrap());
            let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
            let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), ..OpenArgs::default() };
            let (entry, opened) = connection.create(&cx, Ino::ROOT, name, &node, args).unwrap();
            let file = File { ino: entry.ino, fh: opened.fh };
            let before = (fs.lookups.load(Ordering::Relaxed), fs.opens.load(Ordering::Relaxed));
            // An open directory, for methods that need one.
            let root = File {
                ino: Ino::ROOT,
                fh: connection.opendir(&cx, Ino::ROOT, OpenFlags(0)).unwrap().fh,
            };
            let _ = (call(&connection, method, &cx, file), call(&connection, method, &cx, root));
            assert_eq!(before, (1, 1));
            connection.audit();
            connection.close();
            let left = (fs.lookups.load(Ordering::Relaxed), fs.opens.load(Ordering::Relaxed));
            assert_eq!(left, (0, 0), "{method:?} of user {uid}: lookups, open files");
        }
    }
}

/// Otherwise a client would resolve paths without the checks of the layer.
#[test]
fn no_client_has_the_shortcuts_of_the_file_system() {
    let fs = Arc::new(CountingFileSystem::default());
    assert!(MethodRecorder { inner: Arc::clone(&fs) }.shortcuts().is_some());
    for uid in [0, 5] {
        assert!(connection(&fs, uid).shortcuts().is_none());
    }
}

/// A layer that leaves a method to `delegate!`, or to the default of the trait, would not check it.
#[test]
fn each_method_of_the_contract_is_written_and_checked() {
    let contract =
        include_str!("../../fs/src/file_system.rs").split("#[cfg(test)]").next().unwrap();
    let layer = include_str!("fs.rs");
    assert!(!layer.contains("delegate!"));
    // Why they are not checked is said where they are.
    let unchecked = [
        "caps",
        "negative_lifetime",
        "attach",
        "detach",
        "figures",
        "notes",
        "failure_domain",
        "lifecycle",
        "shortcuts",
        "statfs",
        "syncfs",
        "forget",
        "release",
        "releasedir",
    ];
    let names = contract.lines().filter_map(|line| line.strip_prefix("    fn "));
    let names = names.map(|name| name.split('(').next().unwrap());
    let mut count = 0;
    for name in names {
        let (_, rest) = layer.split_once(&format!("\n    fn {name}(")).expect(name);
        let body = rest.split("\n    }\n").next().unwrap();
        let checks = ["self.check(", "self.check_submitted(", "self.check_wait("];
        let checked = checks.iter().any(|text| body.contains(text));
        assert_eq!(checked, !unchecked.contains(&name), "{name}");
        let given = ["Entry", "OpenReply"]
            .iter()
            .any(|given| body.split('{').next().unwrap().contains(given));
        let accounted = [
            "self.record_grant(",
            "self.record_lookup(",
            "self.record_new_name(",
            "self.record_open(",
            "self.record_created(",
        ];
        assert_eq!(given, accounted.iter().any(|text| body.contains(text)), "{name}");
        count += 1;
    }
    assert!(count > 40, "{count}");
}

struct AnswerSender(mpsc::Sender<Result<usize>>);

impl Completion for AnswerSender {
    fn sink(&mut self) -> &mut dyn ReadSink {
        unreachable!("nothing is read")
    }
    fn source(&mut self) -> &mut dyn WriteSource {
        unreachable!("nothing is written")
    }
    fn finish(self: Box<Self>, result: Result<usize>) {
        self.0.send(result).unwrap();
    }
}

fn submit(fs: &dyn FileSystem, uid: u32, op: IoOp) -> Result<usize> {
    let (send, answer) = mpsc::channel();
    let caller = context(uid).caller;
    fs.submit(Io::new(op, caller, 1, Arc::default(), Box::new(AnswerSender(send))));
    answer.recv().unwrap()
}

fn wait(fs: &dyn FileSystem, uid: u32, file: File, request: LockRequest) -> Result<()> {
    let (send, answer) = mpsc::channel();
    let tell = Box::new(move |taken| send.send(taken).unwrap());
    let caller = context(uid).caller;
    fs.setlkw(LockWait::new((file, request), caller, 1, Arc::default(), tell));
    answer.recv().unwrap()
}

#[test]
fn submitted_operations_are_checked_like_others() {
    let fs = Arc::new(CountingFileSystem::default());
    let connection = connection(&fs, 5);
    let (args, lock) = (
        OpenArgs { flags: OpenFlags(0), ..OpenArgs::default() },
        LockRequest {
            kind: LockKind::Posix,
            owner: LockOwner(7),
            lock: Lock { typ: LockType::Write, start: 0, end: 9, pid: 1 },
            wait: true,
        },
    );
    let cx = context(5);
    let entry = connection.lookup(&cx, Ino::ROOT, Name::new(b"name").unwrap()).unwrap();
    let file = File { ino: entry.ino, fh: connection.open(&cx, entry.ino, args).unwrap().fh };
    let ops = |file| {
        [
            IoOp::Read { file, args: ReadArgs::default(), len: 4 },
            IoOp::Fsync { file, datasync: false },
            IoOp::Fsyncdir { dir: file, datasync: false },
            IoOp::Write { file, args: WriteArgs::default(), len: 4 },
        ]
    };
    for op in ops(OTHERS) {
        assert_eq!(submit(&connection, 5, op), Err(Errno::ESTALE), "{op:?}");
    }
    assert_eq!(wait(&connection, 5, OTHERS, lock), Err(Errno::ESTALE));
    for op in ops(file) {
        assert_eq!(submit(&connection, 6, op), Err(Errno::EPERM), "{op:?}");
    }
    assert_eq!(wait(&connection, 6, file, lock), Err(Errno::EPERM));
    assert_eq!(fs.submitted.load(Ordering::Relaxed), 0);
    // It is open for reading alone.
    let answers = ops(file).map(|op| submit(&connection, 5, op));
    assert_eq!(answers, [Ok(0), Ok(0), Ok(0), Err(Errno::EBADF)]);
    assert_eq!(wait(&connection, 5, file, lock), Err(Errno::EBADF));
    assert_eq!(fs.submitted.load(Ordering::Relaxed), 3);
    let reads = LockRequest { lock: Lock { typ: LockType::Read, ..lock.lock }, ..lock };
    assert_eq!(wait(&connection, 5, file, reads), Ok(()));
    connection.close();
}

/// The ledger forgot the record locks of a process by a flush of an open file that the client did
/// not have, and that never reached the file system: no call dropped the locks when the client
/// ended.
#[test]
fn a_flush_of_an_unknown_open_file_forgets_no_lock() {
    struct DroppedLocks {
        inner: Arc<CountingFileSystem>,
        dropped: AtomicI64,
    }
    impl FileSystem for DroppedLocks {
        delegate!(to inner, except setlk);
        fn setlk(&self, _: &Context<'_>, _: File, request: &LockRequest) -> Result<()> {
            if request.lock.typ == LockType::Unlock {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }
    }
    let fs = Arc::new(DroppedLocks { inner: Arc::default(), dropped: AtomicI64::new(0) });
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let who = PeerCredentials { pid: 1, uid: 5, groups: vec![5] };
    let connection = PeerConnection::new(Arc::clone(&fs), service, who);
    let (cx, owner) = (context(5), LockOwner::for_process(1));
    let entry = connection.lookup(&cx, Ino::ROOT, Name::new(b"name").unwrap()).unwrap();
    let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), ..OpenArgs::default() };
    let file = File { ino: entry.ino, fh: connection.open(&cx, entry.ino, args).unwrap().fh };
    let lock = Lock { typ: LockType::Write, start: 0, end: 9, pid: 1 };
    let request = LockRequest { kind: LockKind::Posix, owner, lock, wait: false };
    assert_eq!(connection.setlk(&cx, file, &request), Ok(()));
    let unknown = File { fh: Fh(99), ..file };
    assert_eq!(connection.flush(&cx, unknown, owner), Err(Errno::EBADF));
    connection.close();
    assert_eq!(fs.dropped.load(Ordering::Relaxed), 1);
}

/// The server looked for clients that had ended after the file system refused the lock. If a
/// client's connection was closed between the two, the lock was free, and yet the reply was EAGAIN.
#[test]
fn a_lock_is_granted_whose_holder_ends_during_the_request() {
    struct OneHeldLock {
        inner: Arc<CountingFileSystem>,
        held: AtomicI64,
    }
    impl FileSystem for OneHeldLock {
        delegate!(to inner, except setlk);
        fn setlk(&self, _: &Context<'_>, _: File, _: &LockRequest) -> Result<()> {
            match self.held.swap(0, Ordering::Relaxed) {
                0 => Ok(()),
                _ => Err(Errno::EAGAIN),
            }
        }
    }
    let fs = Arc::new(OneHeldLock { inner: Arc::default(), held: AtomicI64::new(1) });
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let who = PeerCredentials { pid: 1, uid: 5, groups: vec![5] };
    let connection = PeerConnection::new(fs, service, who);
    let (cx, owner) = (context(5), LockOwner::for_process(1));
    let entry = connection.lookup(&cx, Ino::ROOT, Name::new(b"name").unwrap()).unwrap();
    let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), ..OpenArgs::default() };
    let file = File { ino: entry.ino, fh: connection.open(&cx, entry.ino, args).unwrap().fh };
    let lock = Lock { typ: LockType::Write, start: 0, end: 9, pid: 1 };
    let request = LockRequest { kind: LockKind::Posix, owner, lock, wait: false };
    assert_eq!(connection.setlk(&cx, file, &request), Ok(()));
}
