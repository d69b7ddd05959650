//! Several frontends of one file system: every method of the contract notifies the others of its
//! changes, and not the frontend that calls.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use defuse_block::RamDevice;
use defuse_fs::layer::Method;
use defuse_fs::*;
use defuse_memory::MemoryFileSystem;
use defuse_uhs::Uhs;

/// A frontend that notes its notifications.
#[derive(Default)]
struct NotificationRecorder {
    epochs: Mutex<u64>,
    inodes: Mutex<Vec<Ino>>,
}

impl NotificationRecorder {
    /// Returns, and forgets, the number of epochs and the inodes.
    fn take(&self) -> (u64, Vec<Ino>) {
        let epochs = std::mem::take(&mut *self.epochs.lock().unwrap());
        (epochs, std::mem::take(&mut *self.inodes.lock().unwrap()))
    }
}

impl Notify for NotificationRecorder {
    fn invalidate_inode(&self, ino: Ino, _: Option<(u64, u64)>) -> Result<()> {
        self.inodes.lock().unwrap().push(ino);
        Ok(())
    }
    fn increment_epoch(&self) -> Result<()> {
        *self.epochs.lock().unwrap() += 1;
        Ok(())
    }
    fn drops_at_once(&self) -> bool {
        true
    }
    fn invalidate_entry(&self, _: Ino, _: Name<'_>, _: bool) -> Result<()> {
        panic!("it may wait for an operation");
    }
    fn notify_delete(&self, _: Ino, _: Ino, _: Name<'_>) -> Result<()> {
        panic!("it may wait for an operation");
    }
    defuse_fs::caches_no_data!();
    fn poll_wake(&self, _: PollHandle) -> Result<()> {
        Ok(())
    }
    fn prune(&self, _: &[Ino]) -> Result<()> {
        Ok(())
    }
}

fn memory() -> Arc<dyn FileSystem> {
    Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default()))
}

fn uhs() -> Arc<dyn FileSystem> {
    let options = defuse_uhs::UhsOptions { commit: None, ..defuse_uhs::UhsOptions::default() };
    let device = Arc::new(RamDevice::new(4096, 8192));
    let mut random = fastrand::Rng::with_seed(1);
    Uhs::make(device.clone(), (0o1777, 0, 0), &mut random).unwrap();
    let (fs, problems) = Uhs::open(device, options, random).unwrap();
    assert_eq!(problems, []);
    Arc::new(fs)
}

type FileSystemMaker = fn() -> Arc<dyn FileSystem>;

const EACH: [(&str, FileSystemMaker); 2] = [("memory", memory), ("uhs", uhs)];

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

fn xattr(text: &str) -> XattrName<'_> {
    XattrName::new(text.as_bytes()).unwrap()
}

fn cx(origin: Origin) -> Context<'static> {
    Context::new(Caller::default()).from_origin(origin)
}

fn node(kind: FileKind) -> NewNode<'static> {
    NewNode::new(kind, 0o755, Caller::default())
}

/// A small tree, and three frontends: the first one, a frontend that changes the tree, and a
/// frontend that has cached the tree.
struct FrontendTree {
    fs: Arc<dyn FileSystem>,
    first: (Origin, Arc<NotificationRecorder>),
    own: (Origin, Arc<NotificationRecorder>),
    other: (Origin, Arc<NotificationRecorder>),
    file: Ino,
    target: Ino,
    link: Ino,
    dir: Ino,
    inner: Ino,
    empty: Ino,
}

/// Places in the tree at which there is something, before or after an operation.
const PLACES: [(bool, &str); 11] = [
    (false, "file"),
    (false, "target"),
    (false, "link"),
    (false, "dir"),
    (false, "empty"),
    (false, "new"),
    (true, "inner"),
    (true, "new"),
    (true, "file"),
    (true, "dir"),
    (true, "link"),
];

impl FrontendTree {
    fn new(fs: Arc<dyn FileSystem>) -> FrontendTree {
        let attach = || {
            let (origin, ear) = (Origin::new(), Arc::new(NotificationRecorder::default()));
            fs.attach(origin, ear.clone());
            (origin, ear)
        };
        let (first, own, other) = (attach(), attach(), attach());
        let cx = &cx(Origin::NONE);
        let make = |dir, text, kind| fs.mknod(cx, dir, name(text), &node(kind)).unwrap().ino;
        let mkdir =
            |text| fs.mkdir(cx, Ino::ROOT, name(text), &node(FileKind::Directory)).unwrap().ino;
        let (file, target) = (
            make(Ino::ROOT, "file", FileKind::Regular),
            make(Ino::ROOT, "target", FileKind::Regular),
        );
        let (dir, empty) = (mkdir("dir"), mkdir("empty"));
        let inner = make(dir, "inner", FileKind::Regular);
        let symlink = node(FileKind::Symlink);
        let link = fs.symlink(cx, Ino::ROOT, name("link"), b"file", &symlink).unwrap().ino;
        let tree = FrontendTree { fs, first, own, other, file, target, link, dir, inner, empty };
        write(&tree, tree.file, 0, &[1; 9000]).unwrap();
        for ino in [tree.file, tree.dir] {
            tree.fs.setxattr(cx, ino, xattr("user.old"), b"1", Default::default()).unwrap();
        }
        tree
    }

    fn inodes(&self) -> [Ino; 7] {
        [Ino::ROOT, self.file, self.target, self.link, self.dir, self.inner, self.empty]
    }

    /// Everything that the frontend `origin` may cache: the inode of each name, and the attributes
    /// of each inode.
    fn look(&self, origin: Origin) -> (Vec<Option<Ino>>, Vec<Option<Attr>>) {
        let (fs, cx) = (&self.fs, cx(origin));
        let names = PLACES.map(|(inner, text)| {
            let dir = if inner { self.dir } else { Ino::ROOT };
            fs.lookup(&cx, dir, name(text)).ok().map(|entry| entry.ino)
        });
        let attrs = self.inodes().map(|ino| {
            let attr = fs.getattr(&cx, ino, None).ok()?;
            Some(Attr { valid_for: Default::default(), ..attr })
        });
        (names.to_vec(), attrs.to_vec())
    }

    fn open(&self, ino: Ino) -> File {
        let opened = self.fs.open(&cx(Origin::NONE), ino, OpenArgs::default()).unwrap();
        File { ino, fh: opened.fh }
    }
}

fn write(tree: &FrontendTree, ino: Ino, offset: u64, bytes: &[u8]) -> Result<usize> {
    let args = WriteArgs { offset, ..WriteArgs::default() };
    let mut source = SliceSource::new(bytes);
    tree.fs.write(&cx(tree.own.0), tree.open(ino), args, &mut WriteBuf::new(&mut source))
}

struct NoEntrySink;

impl DirSink for NoEntrySink {
    fn wants_entries(&self) -> bool {
        true
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, _: DirItem<'_>, entry: Option<&Entry>) {
        assert!(entry.is_none(), "the kernel could not tell when it was true");
    }
}

/// An operation of the first frontend.
type FrontendChange = Box<dyn Fn(&FrontendTree, &Context<'_>)>;

fn change(run: impl Fn(&FrontendTree, &Context<'_>) + 'static) -> FrontendChange {
    Box::new(run)
}

fn rename(from: (bool, &'static str), to: (bool, &'static str), flags: u32) -> FrontendChange {
    change(move |tree, cx| {
        let place = |(inner, text)| (if inner { tree.dir } else { Ino::ROOT }, name(text));
        tree.fs.rename(cx, place(from), place(to), RenameFlags(flags)).unwrap();
    })
}

fn set(set: impl Fn(&FrontendTree) -> (Ino, SetAttr) + 'static) -> FrontendChange {
    change(move |tree, cx| {
        let (ino, set) = set(tree);
        tree.fs.setattr(cx, ino, None, &set).unwrap();
    })
}

/// Operations of a method, and whether they must change something. Exhaustive, so that a new method
/// is looked at.
fn operations(method: Method) -> (bool, Vec<FrontendChange>) {
    let regular = || node(FileKind::Regular);
    let changes = match method {
        Method::Mknod => vec![change(move |tree, cx| {
            tree.fs.mknod(cx, Ino::ROOT, name("new"), &regular()).unwrap();
        })],
        Method::Mkdir => vec![change(|tree, cx| {
            tree.fs.mkdir(cx, tree.dir, name("new"), &node(FileKind::Directory)).unwrap();
        })],
        Method::Symlink => vec![change(|tree, cx| {
            let node = node(FileKind::Symlink);
            tree.fs.symlink(cx, tree.dir, name("new"), b"text", &node).unwrap();
        })],
        Method::Link => vec![change(|tree, cx| {
            tree.fs.link(cx, tree.file, tree.dir, name("new")).unwrap();
        })],
        Method::Unlink => vec![change(|tree, cx| {
            tree.fs.unlink(cx, tree.dir, name("inner")).unwrap();
        })],
        Method::Rmdir => vec![change(|tree, cx| {
            tree.fs.rmdir(cx, Ino::ROOT, name("empty")).unwrap();
        })],
        Method::Rename => vec![
            rename((false, "file"), (false, "new"), 0),
            rename((false, "file"), (true, "new"), 0),
            rename((false, "file"), (false, "target"), 0),
            rename((true, "inner"), (false, "target"), 0),
            rename((false, "dir"), (false, "empty"), 0),
            rename((false, "empty"), (true, "dir"), 0),
            rename((true, "inner"), (false, "empty"), RenameFlags::EXCHANGE),
            rename((false, "file"), (false, "target"), RenameFlags::EXCHANGE),
            rename((false, "file"), (true, "file"), RenameFlags::WHITEOUT),
        ],
        Method::Setattr => vec![
            set(|tree| (tree.file, SetAttr { perm: Some(0o600), ..SetAttr::default() })),
            set(|tree| (tree.dir, SetAttr { uid: Some(7), ..SetAttr::default() })),
            set(|tree| (tree.file, SetAttr { size: Some(5), ..SetAttr::default() })),
            set(|tree| (tree.link, SetAttr { atime: Some(SetTime::Now), ..SetAttr::default() })),
        ],
        Method::Setxattr => vec![
            change(|tree, cx| {
                tree.fs.setxattr(cx, tree.file, xattr("user.n"), b"1", Default::default()).unwrap();
            }),
            change(|tree, cx| {
                let (ino, flags) = (tree.dir, SetXattrFlags::default());
                tree.fs.setxattr(cx, ino, xattr("user.old"), b"2", flags).unwrap();
            }),
        ],
        Method::Removexattr => vec![change(|tree, cx| {
            tree.fs.removexattr(cx, tree.dir, xattr("user.old")).unwrap();
        })],
        Method::Open => vec![change(|tree, cx| {
            let flags = OpenFlags(OpenFlags::TRUNC | 1);
            tree.fs.open(cx, tree.file, OpenArgs { flags, kill_suidgid: true }).unwrap();
        })],
        Method::Create => vec![change(move |tree, cx| {
            let args = OpenArgs { flags: OpenFlags(0o302), kill_suidgid: false };
            tree.fs.create(cx, tree.dir, name("new"), &regular(), args).unwrap();
        })],
        Method::Write => vec![
            change(|tree, _| assert_eq!(write(tree, tree.file, 3, b"x"), Ok(1))),
            change(|tree, _| assert_eq!(write(tree, tree.target, 1 << 20, b"x"), Ok(1))),
        ],
        Method::Fallocate => vec![change(|tree, cx| {
            let range = Fallocate { mode: 0, offset: 0, length: 20_000 };
            tree.fs.fallocate(cx, tree.open(tree.target), range).unwrap();
        })],
        Method::CopyFileRange => vec![change(|tree, cx| {
            let (src, dst) = (tree.open(tree.file), tree.open(tree.target));
            let copy = CopyRange { src, src_offset: 0, dst, dst_offset: 5, length: 4000, flags: 0 };
            assert_eq!(tree.fs.copy_file_range(cx, &copy), Ok(4000));
        })],
        Method::Read => vec![change(|tree, cx| {
            let mut memory = [0; 100];
            let mut sink = SliceSink::new(&mut memory);
            let mut out = ReadBuf::new(&mut sink, 100);
            let args = ReadArgs::default();
            tree.fs.read(cx, tree.open(tree.file), args, &mut out).unwrap();
        })],
        Method::Readdir => vec![change(|tree, cx| {
            let opened = tree.fs.opendir(cx, tree.dir, OpenFlags::default()).unwrap();
            assert!(!opened.cache_dir);
            let dir = File { ino: tree.dir, fh: opened.fh };
            tree.fs.readdir(cx, dir, 0, &mut DirBuf::new(&mut NoEntrySink)).unwrap();
        })],
        // These change nothing, or not always.
        Method::Readlink => {
            let read = change(|tree, cx| drop(tree.fs.readlink(cx, tree.link).unwrap()));
            return (false, vec![read]);
        }
        Method::Lookup => {
            let look = change(|tree, cx| {
                tree.fs.lookup(cx, Ino::ROOT, name("file")).unwrap();
            });
            return (false, vec![look]);
        }
        Method::Getattr => {
            let get = change(|tree, cx| {
                tree.fs.getattr(cx, tree.file, None).unwrap();
            });
            return (false, vec![get]);
        }
        Method::Tmpfile => {
            let make = change(move |tree, cx| {
                let args = OpenArgs::default();
                tree.fs.tmpfile(cx, tree.dir, &regular(), args).unwrap();
            });
            return (false, vec![make]);
        }
        Method::Opendir => {
            let open = change(|tree, cx| {
                tree.fs.opendir(cx, tree.dir, OpenFlags::default()).unwrap();
            });
            return (false, vec![open]);
        }
        // Neither names nor attributes.
        Method::LookupParent
        | Method::Shortcut(_)
        | Method::Access
        | Method::Getxattr
        | Method::Listxattr
        | Method::Flush
        | Method::Release
        | Method::Fsync
        | Method::Lseek
        | Method::Ioctl
        | Method::Poll
        | Method::Bmap
        | Method::Getlk
        | Method::Setlk
        | Method::Releasedir
        | Method::Fsyncdir
        | Method::Statfs
        | Method::Syncfs => return (false, Vec::new()),
    };
    (true, changes)
}

#[test]
fn every_method_tells_the_other_frontends_what_it_changes_and_not_its_own() {
    for (what, make) in EACH {
        for method in Method::ALL {
            let (changes, operations) = operations(*method);
            for (number, operation) in operations.iter().enumerate() {
                let case = format!("{what}: {}, {number}", method.name());
                let tree = FrontendTree::new(make());
                let before = tree.look(tree.other.0);
                assert_eq!(tree.look(tree.own.0), before, "{case}");
                for (_, ear) in [&tree.first, &tree.own, &tree.other] {
                    ear.take();
                }
                operation(&tree, &cx(tree.own.0));
                assert_eq!(tree.own.1.take(), (0, vec![]), "{case}: its own frontend");
                let notified = [tree.first.1.take(), tree.other.1.take()];
                let after = tree.look(Origin::NONE);
                assert!(!changes || before != after, "{case}: no change");
                for (epochs, inodes) in notified {
                    assert!(before.0 == after.0 || epochs == 1, "{case}: names, {epochs}");
                    let attrs = before.1.iter().zip(&after.1).zip(tree.inodes());
                    for ((before, after), ino) in attrs {
                        let is_notified = inodes.contains(&ino);
                        assert!(before == after || is_notified, "{case}: {ino:?}, {inodes:?}");
                    }
                }
                // Names and attributes without a notification are still marked, and the rest is
                // marked again.
                tree.look(tree.other.0);
                operation_of_nobody(&tree);
                assert_eq!(tree.other.1.take().0, 1, "{case}: marked again");
            }
        }
    }
}

/// Changes a name for no frontend.
fn operation_of_nobody(tree: &FrontendTree) {
    let made = tree.fs.mknod(&cx(Origin::NONE), Ino::ROOT, name("last"), &node(FileKind::Fifo));
    made.unwrap();
}

#[test]
fn an_operation_that_fails_before_it_changes_anything_drops_no_names() {
    for (what, make) in EACH {
        let tree = FrontendTree::new(make());
        tree.look(tree.other.0);
        tree.other.1.take();
        let cx = cx(tree.own.0);
        let fs = &tree.fs;
        let regular = node(FileKind::Regular);
        assert_eq!(fs.mknod(&cx, Ino::ROOT, name("file"), &regular).err(), Some(Errno::EEXIST));
        assert_eq!(fs.unlink(&cx, Ino::ROOT, name("none")), Err(Errno::ENOENT));
        assert_eq!(fs.rmdir(&cx, Ino::ROOT, name("dir")), Err(Errno::ENOTEMPTY));
        assert_eq!(tree.other.1.take(), (0, vec![]), "{what}");
    }
}

/// The answers that a kernel may keep although an invalidation has overtaken them.
#[test]
fn only_getattr_answers_with_attributes_that_stay_valid_beside_other_frontends() {
    for (what, make) in EACH {
        let tree = FrontendTree::new(make());
        let (fs, cx) = (&tree.fs, cx(tree.other.0));
        let entries = [
            fs.lookup(&cx, Ino::ROOT, name("file")).unwrap(),
            fs.mknod(&cx, Ino::ROOT, name("a"), &node(FileKind::Regular)).unwrap(),
            fs.mkdir(&cx, Ino::ROOT, name("b"), &node(FileKind::Directory)).unwrap(),
            fs.symlink(&cx, Ino::ROOT, name("c"), b"x", &node(FileKind::Symlink)).unwrap(),
            fs.link(&cx, tree.file, Ino::ROOT, name("d")).unwrap(),
            fs.create(&cx, Ino::ROOT, name("e"), &node(FileKind::Regular), OpenArgs::default())
                .unwrap()
                .0,
        ];
        for entry in entries {
            assert!(!entry.valid_for.is_zero() && entry.attr.valid_for.is_zero(), "{what}");
        }
        let set = SetAttr { perm: Some(0o700), ..SetAttr::default() };
        assert!(fs.setattr(&cx, tree.file, None, &set).unwrap().valid_for.is_zero(), "{what}");
        assert!(!fs.getattr(&cx, tree.file, None).unwrap().valid_for.is_zero(), "{what}");
        let opened = fs.open(&cx, tree.file, OpenArgs::default()).unwrap();
        assert_eq!(opened.cache, CacheMode::Direct, "{what}");
    }
}

#[test]
fn an_acl_that_was_read_is_told_like_attributes() {
    for (what, make) in EACH {
        let tree = FrontendTree::new(make());
        let acl = xattr("system.posix_acl_access");
        assert!(tree.fs.getxattr(&cx(tree.other.0), tree.file, acl, 100).is_err());
        tree.other.1.take();
        let set = xattr("user.x");
        tree.fs.setxattr(&cx(tree.own.0), tree.file, set, b"1", Default::default()).unwrap();
        assert_eq!(tree.other.1.take(), (0, vec![tree.file]), "{what}");
    }
}

/// A name that is missing is cached like one that is there.
#[test]
fn a_frontend_that_was_given_a_name_or_its_absence_is_told_of_the_next_change() {
    for (what, make) in EACH {
        let tree = FrontendTree::new(make());
        for text in ["file", "new"] {
            let found = tree.fs.lookup(&cx(tree.other.0), Ino::ROOT, name(text));
            assert_eq!(found.is_ok(), text == "file");
            tree.other.1.take();
            operation_of_nobody_at(&tree, text);
            assert_eq!(tree.other.1.take().0, 1, "{what}: {text}");
        }
    }
}

fn operation_of_nobody_at(tree: &FrontendTree, text: &str) {
    let cx = cx(Origin::NONE);
    match text {
        "new" => drop(tree.fs.mknod(&cx, Ino::ROOT, name(text), &node(FileKind::Fifo)).unwrap()),
        _ => tree.fs.unlink(&cx, Ino::ROOT, name(text)).unwrap(),
    }
}

/// A frontend that caches as the kernel does: an answer is valid if nothing was dropped since its
/// request.
struct CachingFrontend {
    origin: Origin,
    fs: Arc<dyn FileSystem>,
    epoch: AtomicU64,
    version: AtomicU64,
    /// True if the name is there, and the epoch from before it was looked up.
    name: Mutex<Option<(bool, u64)>>,
    /// The permissions of the file, and the version from before they were requested.
    perm: Mutex<Option<(u32, u64)>>,
}

const WATCHED: &str = "watched";

impl CachingFrontend {
    fn new(fs: &Arc<dyn FileSystem>) -> Arc<CachingFrontend> {
        let mirror = Arc::new(CachingFrontend {
            origin: Origin::new(),
            fs: Arc::clone(fs),
            epoch: AtomicU64::new(0),
            version: AtomicU64::new(0),
            name: Mutex::default(),
            perm: Mutex::default(),
        });
        fs.attach(mirror.origin, Arc::new(CachingNotify(Arc::clone(&mirror))));
        mirror
    }

    fn has_name(&self) -> bool {
        let epoch = self.epoch.load(SeqCst);
        if let Some((found, of)) = *self.name.lock().unwrap()
            && of == epoch
        {
            return found;
        }
        let found = self.fs.lookup(&cx(self.origin), Ino::ROOT, name(WATCHED));
        let found = found.map(|entry| self.fs.forget(entry.ino, 1)).is_ok();
        *self.name.lock().unwrap() = Some((found, epoch));
        found
    }

    fn perm(&self, file: Ino) -> u32 {
        let version = self.version.load(SeqCst);
        if let Some((perm, of)) = *self.perm.lock().unwrap()
            && of == version
        {
            return perm;
        }
        let perm = self.fs.getattr(&cx(self.origin), file, None).unwrap().perm;
        *self.perm.lock().unwrap() = Some((perm, version));
        perm
    }
}

struct CachingNotify(Arc<CachingFrontend>);

impl Notify for CachingNotify {
    fn invalidate_inode(&self, _: Ino, _: Option<(u64, u64)>) -> Result<()> {
        self.0.version.fetch_add(1, SeqCst);
        Ok(())
    }
    fn increment_epoch(&self) -> Result<()> {
        self.0.epoch.fetch_add(1, SeqCst);
        Ok(())
    }
    fn drops_at_once(&self) -> bool {
        true
    }
    fn invalidate_entry(&self, _: Ino, _: Name<'_>, _: bool) -> Result<()> {
        Ok(())
    }
    fn notify_delete(&self, _: Ino, _: Ino, _: Name<'_>) -> Result<()> {
        Ok(())
    }
    defuse_fs::caches_no_data!();
    fn poll_wake(&self, _: PollHandle) -> Result<()> {
        Ok(())
    }
    fn prune(&self, _: &[Ino]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_frontend_whose_answers_are_under_way_during_a_change_never_shows_old_names_or_attributes() {
    for (what, make) in EACH {
        let fs = make();
        fs.attach(Origin::new(), Arc::new(NoNotify));
        let own = cx(Origin::new());
        fs.attach(own.origin, Arc::new(NoNotify));
        let mirrors = [(); 2].map(|()| CachingFrontend::new(&fs));
        let file = fs.mknod(&own, Ino::ROOT, name("file"), &node(FileKind::Regular)).unwrap().ino;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for mirror in mirrors.iter().flat_map(|mirror| [mirror; 2]) {
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(SeqCst) {
                        mirror.has_name();
                        mirror.perm(file);
                    }
                });
            }
            let end = Instant::now() + Duration::from_secs(2);
            let mut number = 0;
            while Instant::now() < end {
                number += 1;
                let (is_there, perm) = (number % 2 == 1, number % 512);
                match is_there {
                    true => {
                        let node = node(FileKind::Regular);
                        let made = fs.mknod(&own, Ino::ROOT, name(WATCHED), &node).unwrap();
                        fs.forget(made.ino, 1);
                    }
                    false => fs.unlink(&own, Ino::ROOT, name(WATCHED)).unwrap(),
                }
                let names = mirrors.iter().all(|mirror| mirror.has_name() == is_there);
                let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
                fs.setattr(&own, file, None, &set).unwrap();
                let perms = mirrors.iter().all(|mirror| mirror.perm(file) == perm);
                if !(names && perms) {
                    stop.store(true, SeqCst);
                    panic!("{what}: {number}: names {names}, attributes {perms}");
                }
            }
            stop.store(true, SeqCst);
        });
    }
}

/// A listing that stops at the entry `at`, where the file system holds a lock for reading.
struct PausedListing<'a> {
    at: Ino,
    reached: &'a AtomicBool,
    goes_on: &'a AtomicBool,
}

impl DirSink for PausedListing<'_> {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        if item.ino == self.at.0 {
            self.reached.store(true, SeqCst);
            while !self.goes_on.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Waits for something. False if it does not become true in time.
fn wait_until_true(mut is_true: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        if is_true() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// While `change` waits for a listing of `tree.dir` and `look` waits for `change`, repeats `other`,
/// until the frontend that looks receives a notification.
fn is_told_while_it_looks(
    tree: &FrontendTree,
    change: impl FnOnce() + Send,
    look: impl FnOnce(&Context<'_>) + Send,
    other: impl Fn(),
) -> bool {
    let (reached, goes_on) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let looked = &AtomicBool::new(false);
    tree.other.1.take();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let cx = cx(Origin::NONE);
            let fh = tree.fs.opendir(&cx, tree.dir, OpenFlags::default()).unwrap().fh;
            let mut sink = PausedListing { at: tree.inner, reached, goes_on };
            let dir = File { ino: tree.dir, fh };
            tree.fs.readdir(&cx, dir, 0, &mut DirBuf::new(&mut sink)).unwrap();
        });
        assert!(wait_until_true(|| reached.load(SeqCst)));
        scope.spawn(change);
        // A reader that comes now waits for this writer.
        std::thread::sleep(Duration::from_millis(200));
        scope.spawn(move || {
            look(&cx(tree.other.0));
            looked.store(true, SeqCst);
        });
        let is_notified = wait_until_true(|| {
            other();
            tree.other.1.take() != (0, vec![])
        });
        let waits = !looked.load(SeqCst);
        goes_on.store(true, SeqCst);
        assert!(waits, "it has not waited, so this proves nothing");
        is_notified
    })
}

/// A mark after the reading would come too late for a change that happens between them.
#[test]
fn names_are_marked_before_they_are_read() {
    let tree = FrontendTree::new(memory());
    let change = || {
        let made = tree.fs.mknod(&cx(Origin::NONE), tree.dir, name("x"), &node(FileKind::Fifo));
        made.unwrap();
    };
    let look = |cx: &Context<'_>| assert!(tree.fs.lookup(cx, tree.dir, name("inner")).is_ok());
    let other = || {
        let cx = cx(tree.own.0);
        tree.fs.mknod(&cx, Ino::ROOT, name("y"), &node(FileKind::Fifo)).unwrap();
        tree.fs.unlink(&cx, Ino::ROOT, name("y")).unwrap();
    };
    assert!(is_told_while_it_looks(&tree, change, look, other));
}

#[test]
fn attributes_are_marked_before_they_are_read() {
    let tree = FrontendTree::new(uhs());
    let change = || {
        let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
        tree.fs.setattr(&cx(Origin::NONE), tree.inner, None, &set).unwrap();
    };
    let look = |cx: &Context<'_>| assert!(tree.fs.getattr(cx, tree.inner, None).is_ok());
    let (src, dst) = (File { ino: tree.file, fh: Fh(0) }, File { ino: tree.inner, fh: Fh(0) });
    let other = || {
        // It fails before it looks at the file, and notifies nevertheless.
        let (src_offset, dst_offset, length, flags) = (u64::MAX, 0, 1, 0);
        let copy = CopyRange { src, src_offset, dst, dst_offset, length, flags };
        assert_eq!(tree.fs.copy_file_range(&cx(tree.own.0), &copy), Err(Errno::EOVERFLOW));
    };
    assert!(is_told_while_it_looks(&tree, change, look, other));
}
