//! Names that clients with the rights of a user have received lead no other client of that user
//! behind a directory that was closed since. A client reaches what it could reach by a walk now,
//! what it was given by its own lookups, and what it has open.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use defuse_connection::{
    InheritedInode, NameSource, PeerConnection, PeerCredentials, ServiceQuotas, ServiceState,
    VersionSource, WantedFiles,
};
use defuse_fs::{
    AccessMode, Attr, Caller, Context, Errno, Fh, File, FileKind, FileSystem, Ino, Name, NewNode,
    NormalPath, OpenArgs, OpenFlags, RenameFlags, Result, SetAttr, SetXattrFlags, XattrName,
    delegate,
};
use defuse_memory::MemoryFileSystem;
use defuse_ring::names::NameReader;
use defuse_shared::VersionedFileSystem;

const USER: u32 = 7;
/// A group of the user.
const GROUP: u32 = 100;

type DynConnection = PeerConnection<Arc<dyn FileSystem>>;

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

fn make_context(uid: u32) -> Context<'static> {
    Context::new(Caller { uid, gid: uid, pid: 1 })
}

/// The tree `above/dir/file`, which a client of the user knows from the server, and the directory
/// `closed`.
struct ClosedTree {
    fs: Arc<VersionedFileSystem>,
    service: Arc<ServiceState>,
    above: Ino,
    dir: Ino,
    file: Ino,
    closed: Ino,
}

impl ClosedTree {
    fn new(perm: u32) -> ClosedTree {
        let memory = MemoryFileSystem::new(defuse_memory::MemoryOptions::default());
        let fs = VersionedFileSystem::wrap(Arc::new(memory)).unwrap();
        let root = make_context(0);
        let make = |parent, text, perm| {
            let node = NewNode::new(FileKind::Directory, perm, root.caller);
            fs.mkdir(&root, parent, name(text), &node).unwrap().ino
        };
        let above = make(Ino::ROOT, "above", perm);
        let (dir, closed) = (make(above, "dir", perm), make(Ino::ROOT, "closed", 0o700));
        let node = NewNode::new(FileKind::Regular, 0o644, root.caller);
        let file = fs.mknod(&root, dir, name("file"), &node).unwrap().ino;
        let service = ServiceState::new(ServiceQuotas::default(), || ());
        ClosedTree { fs, service, above, dir, file, closed }
    }

    /// A new client of the user.
    fn client(&self) -> DynConnection {
        let who = PeerCredentials { pid: 1, uid: USER, groups: vec![USER, GROUP] };
        let shared: Arc<dyn FileSystem> = Arc::clone(&self.fs) as _;
        let connection = PeerConnection::new(shared, Arc::clone(&self.service), who);
        connection.share(self.names(&connection));
        connection
    }

    fn names(&self, client: &DynConnection) -> Arc<dyn NameSource> {
        self.fs.names(client.credentials()).unwrap()
    }

    fn walk(&self, client: &DynConnection) -> Result<Option<Ino>> {
        let mut last = None;
        let path = NormalPath::new(b"above/dir/file").unwrap();
        client.walk_steps(&make_context(USER), Ino::ROOT, path, |step| last = Some(step.ino))?;
        Ok(last)
    }

    fn open(&self, client: &DynConnection, ino: Ino) -> Result<Fh> {
        client.open(&make_context(USER), ino, OpenArgs::default()).map(|opened| opened.fh)
    }

    fn set(&self, ino: Ino, set: SetAttr) {
        self.fs.setattr(&make_context(0), ino, None, &set).unwrap();
    }

    fn chmod(&self, ino: Ino, perm: u32) {
        self.set(ino, SetAttr { perm: Some(perm), ..SetAttr::default() });
    }

    /// An access list by which the user, or no other user, may search a directory.
    fn list(&self, ino: Ino, with_user: bool) {
        let entry = |tag: u16, perm: u16, id: u32| {
            [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        const NOBODY: u32 = u32::MAX;
        let mut list = [2_u32.to_le_bytes().to_vec(), entry(1, 7, NOBODY)].concat();
        if with_user {
            list.extend(entry(2, 5, USER));
        }
        for (tag, perm) in [(4, 0), (16, 5), (32, 0)] {
            list.extend(entry(tag, perm, NOBODY));
        }
        let acl = XattrName::new(b"system.posix_acl_access").unwrap();
        self.fs.setxattr(&make_context(0), ino, acl, &list, SetXattrFlags::default()).unwrap();
    }
}

/// A change after which the user does not find the file.
type ClosingChange = fn(&ClosedTree);

const CLOSES: [(&str, ClosingChange); 7] = [
    ("the mode of its directory", |tree| tree.chmod(tree.dir, 0o700)),
    ("the mode of a directory above", |tree| tree.chmod(tree.above, 0o700)),
    ("the group of its directory", |tree| {
        tree.set(tree.dir, SetAttr { gid: Some(0), ..SetAttr::default() });
    }),
    ("the access list of its directory", |tree| tree.list(tree.dir, false)),
    ("the access list of a directory above", |tree| tree.list(tree.above, false)),
    ("its name", |tree| {
        let (from, to) = ((tree.dir, name("file")), (tree.closed, name("file")));
        tree.fs.rename(&make_context(0), from, to, RenameFlags::default()).unwrap();
    }),
    ("the name of its directory", |tree| {
        let (from, to) = ((tree.above, name("dir")), (tree.closed, name("dir")));
        tree.fs.rename(&make_context(0), from, to, RenameFlags::default()).unwrap();
    }),
];

/// A tree that the user may search by the group of its directories or by their lists.
fn open_to_user(closes: &str) -> ClosedTree {
    let tree = ClosedTree::new(0o750);
    for ino in [tree.above, tree.dir] {
        match closes.contains("list") {
            true => tree.list(ino, true),
            false => tree.set(ino, SetAttr { gid: Some(GROUP), ..SetAttr::default() }),
        }
    }
    tree
}

/// A new process of a user opened a file by its number in a directory that root had closed, because
/// another process of that user had received the number before.
#[test]
fn a_new_client_reaches_no_file_of_a_directory_that_was_closed_since() {
    for (text, close) in CLOSES {
        let tree = open_to_user(text);
        let shown = tree.client();
        assert_eq!(tree.walk(&shown), Ok(Some(tree.file)), "{text}");
        // A client that has received nothing itself.
        let before = tree.client();
        assert!(tree.open(&before, tree.file).is_ok(), "{text}");
        let (holds, unused) = (tree.client(), tree.client());
        let fh = tree.open(&holds, tree.file).unwrap();
        close(&tree);
        for client in [&tree.client(), &unused] {
            let cx = make_context(USER);
            assert_eq!(tree.open(client, tree.file), Err(Errno::ESTALE), "{text}");
            assert_eq!(client.getattr(&cx, tree.file, None), Err(Errno::ESTALE), "{text}");
            assert_eq!(client.getattr(&cx, tree.file, Some(fh)), Err(Errno::ESTALE), "{text}");
            assert_ne!(tree.walk(client), Ok(Some(tree.file)), "{text}");
        }
        // An open file stays open.
        assert!(holds.getattr(&make_context(USER), tree.file, Some(fh)).is_ok(), "{text}");
    }
}

/// The next program of a process takes over what the one before could name. It could name files
/// that others had received.
#[test]
fn the_next_program_takes_over_no_file_of_a_directory_that_was_closed_since() {
    for (text, close) in CLOSES {
        let tree = open_to_user(text);
        let shown = tree.client();
        tree.walk(&shown).unwrap();
        let process = tree.client();
        let take_over = |process: &DynConnection| {
            let successor = process.prepare_exec(process.credentials().clone());
            let mode = AccessMode::Read;
            let handover = InheritedInode { ino: tree.file, fh: None, mode, process_locks: false };
            successor.take_over(&handover)
        };
        assert_eq!(take_over(&process), Ok(()), "{text}");
        close(&tree);
        assert_eq!(take_over(&process), Err(Errno::ESTALE), "{text}");
        // Nor does the copy of a child.
        assert_eq!(tree.open(&process.copy().unwrap(), tree.file), Err(Errno::ESTALE), "{text}");
    }
}

/// Files that are opened ahead, whole files and pages belong to an open file of the client, which
/// it cannot get.
#[test]
fn nothing_of_a_file_in_a_directory_that_was_closed_comes_with_another_answer() {
    for (text, close) in CLOSES {
        let tree = open_to_user(text);
        let shown = tree.client();
        tree.walk(&shown).unwrap();
        let fh = tree.open(&shown, tree.file).unwrap();
        close(&tree);
        let (client, cx) = (tree.client(), make_context(USER));
        let file = File { ino: tree.file, fh };
        assert!(client.may_read(&cx, file).is_err(), "{text}");
        assert!(client.read_whole(&cx, file, 100).is_none(), "{text}");
        let flags = OpenFlags(0);
        let wanted = WantedFiles { from: 0, flags, most: 8, most_bytes: 100 };
        for dir in [tree.dir, tree.closed] {
            let mut count = 0;
            let opened = client.open_ahead(
                &cx,
                dir,
                wanted,
                |_| Some(2),
                |_| {
                    count += 1;
                    true
                },
            );
            let is_empty = text == "its name" && dir == tree.dir && opened.is_ok();
            assert!(count == 0 && (opened.is_err() || is_empty), "{text}: {opened:?}");
        }
    }
}

/// A directory that is opened again is found again.
#[test]
fn a_directory_that_is_opened_again_leads_to_its_files() {
    let tree = ClosedTree::new(0o755);
    let shown = tree.client();
    tree.walk(&shown).unwrap();
    tree.chmod(tree.above, 0o700);
    tree.chmod(tree.above, 0o755);
    // The memory does not record which clients received names since.
    assert_eq!(tree.open(&tree.client(), tree.file), Err(Errno::ESTALE));
    assert_eq!(tree.walk(&shown), Ok(Some(tree.file)));
    assert!(tree.open(&tree.client(), tree.file).is_ok());
}

/// A file system in which root closes a directory right after a client has looked at its mode.
struct ClosingFileSystem {
    inner: MemoryFileSystem,
    this: OnceLock<Weak<VersionedFileSystem>>,
    is_armed: AtomicBool,
    dir: OnceLock<Ino>,
}

impl FileSystem for ClosingFileSystem {
    delegate!(to inner, except getattr);

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        let attr = self.inner.getattr(cx, ino, fh);
        if self.dir.get() == Some(&ino) && self.is_armed.swap(false, Ordering::SeqCst) {
            let fs = self.this.get().and_then(Weak::upgrade).unwrap();
            let set = SetAttr { perm: Some(0o700), ..SetAttr::default() };
            fs.setattr(&make_context(0), ino, None, &set).unwrap();
        }
        attr
    }
}

/// The name would be published with the rights to the directory as they are after the check.
#[test]
fn a_name_is_told_with_the_rights_that_were_checked() {
    for lists in [false, true] {
        let inner = MemoryFileSystem::new(defuse_memory::MemoryOptions::default());
        let closes = Arc::new(ClosingFileSystem {
            inner,
            this: OnceLock::new(),
            is_armed: AtomicBool::new(false),
            dir: OnceLock::new(),
        });
        let fs = VersionedFileSystem::wrap(Arc::clone(&closes) as Arc<dyn FileSystem>).unwrap();
        closes.this.set(Arc::downgrade(&fs)).unwrap();
        let root = make_context(0);
        let node = NewNode::new(FileKind::Directory, 0o755, root.caller);
        let dir = fs.mkdir(&root, Ino::ROOT, name("dir"), &node).unwrap().ino;
        closes.dir.set(dir).unwrap();
        let node = NewNode::new(FileKind::Regular, 0o644, root.caller);
        let file = fs.mknod(&root, dir, name("file"), &node).unwrap().ino;
        let service = ServiceState::new(ServiceQuotas::default(), || ());
        let client = || -> DynConnection {
            let who = PeerCredentials { pid: 1, uid: USER, groups: vec![USER] };
            let shared: Arc<dyn FileSystem> = Arc::clone(&fs) as _;
            let client = PeerConnection::new(shared, Arc::clone(&service), who);
            client.share(fs.names(client.credentials()).unwrap());
            client
        };
        let (first, path) = (client(), NormalPath::new(b"dir").unwrap());
        first.walk_steps(&make_context(USER), Ino::ROOT, path, |_| ()).unwrap();
        closes.is_armed.store(true, Ordering::SeqCst);
        match lists {
            true => {
                first.names(&make_context(USER), dir, 10, |_, _| true).unwrap();
                first.share_names();
            }
            false => {
                let path = NormalPath::new(b"dir/file").unwrap();
                first.walk_steps(&make_context(USER), Ino::ROOT, path, |_| ()).unwrap();
            }
        }
        assert!(!closes.is_armed.load(Ordering::SeqCst), "the directory was closed meanwhile");
        let next = client();
        assert_eq!(next.getattr(&make_context(USER), file, None), Err(Errno::ESTALE));
        let reader = NameReader::from_fd(next.shared_names().unwrap()).unwrap();
        let shown = reader.find(dir.0, b"file");
        let rights = fs.names(next.credentials()).unwrap().rights(dir);
        assert!(shown.is_none_or(|found| Some(found.stamps.rights) != rights));
    }
}
