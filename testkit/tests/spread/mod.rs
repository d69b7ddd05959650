//! Several clients of a server that are one file system to its user.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use defuse_fs::{
    Attr, Caps, Context, CopyRange, DirBuf, DirItem, DirSink, Entry, Errno, Fallocate, Fh, File,
    FileSystem, Ino, LockOwner, Name, NewNode, NoNotify, NormalPath, OpenArgs, OpenFlags,
    OpenReply, Origin, PathResolution, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, Result,
    SetAttr, SetXattrFlags, Shortcuts, Whence, WriteArgs, WriteBuf, Xattr, XattrName,
};
use defuse_remote::RemoteClient;

use crate::served::{TestServer, context, read};

/// Paths that the other clients look at: names of the model.
const PATHS: [&[u8]; 8] =
    [b"a", b"b", b"c", b"\xff\xfe", b"a/b", b"b/a", b"c/a longer name", b"a/a/b"];

/// A client, chosen by chance, makes each operation. Every client knows every inode, and has every
/// file open. A file that is made without a name belongs to the first client only, until it has a
/// name.
pub struct SpreadClients {
    clients: Vec<Arc<RemoteClient>>,
    random: Mutex<fastrand::Rng>,
    open: Arc<Mutex<HashMap<Fh, SpreadFile>>>,
    next: AtomicU64,
    /// Inodes that were made without a name, and if they still have none.
    nameless: Mutex<HashMap<Ino, bool>>,
    ends: Arc<AtomicBool>,
    looking: Vec<JoinHandle<u64>>,
    /// The clients keep names and attributes.
    keep: bool,
    /// The names that each inode has or had.
    places: Mutex<HashMap<Ino, NamePlaces>>,
    _served: TestServer,
}

/// Names, each with its directory.
type NamePlaces = BTreeSet<(Ino, Vec<u8>)>;

/// An open file in each client that opened it.
#[derive(Clone)]
struct SpreadFile {
    ino: Ino,
    of: Vec<Fh>,
}

impl SpreadFile {
    fn file(&self, client: usize) -> File {
        File { ino: self.ino, fh: self.of[client] }
    }
}

/// Entries that are discarded.
struct IgnoredEntries;

impl DirSink for IgnoredEntries {
    fn wants_entries(&self) -> bool {
        true
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, _: DirItem<'_>, _: Option<&Entry>) {}
}

impl SpreadClients {
    /// `count` clients, which keep names and attributes if `keep`.
    pub fn connect_to(served: TestServer, count: usize, keep: bool) -> SpreadClients {
        let clients: Vec<Arc<RemoteClient>> =
            (0..count).map(|_| Arc::new(served.client())).collect();
        clients.iter().for_each(|client| client.attach(Origin::new(), Arc::new(NoNotify)));
        let (open, ends) = (Arc::<Mutex<HashMap<Fh, SpreadFile>>>::default(), Arc::default());
        let looking = clients.iter().enumerate().map(|(number, client)| {
            let (client, open) = (Arc::clone(client), Arc::clone(&open));
            let ends = Arc::clone(&ends);
            std::thread::spawn(move || look(number, &client, &open, &ends))
        });
        let looking = looking.collect();
        let random = Mutex::new(fastrand::Rng::with_seed(count as u64));
        SpreadClients {
            clients,
            random,
            open,
            next: AtomicU64::new(1),
            nameless: Mutex::default(),
            ends,
            looking,
            keep,
            places: Mutex::default(),
            _served: served,
        }
    }

    fn choose_any(&self) -> usize {
        lock(&self.random).usize(..self.clients.len())
    }

    fn choose_one(&self) -> &RemoteClient {
        &self.clients[self.choose_any()]
    }

    /// The number of a client that knows an inode.
    fn choose_any_for(&self, ino: Ino) -> usize {
        if lock(&self.nameless).get(&ino) == Some(&true) { 0 } else { self.choose_any() }
    }

    fn choose_one_for(&self, ino: Ino) -> &RemoteClient {
        &self.clients[self.choose_any_for(ino)]
    }

    /// A client with the open file, and its handle.
    fn with(&self, fh: Fh) -> (&RemoteClient, File) {
        let handles = lock(&self.open)[&fh].clone();
        let client = lock(&self.random).usize(..handles.of.len());
        (&self.clients[client], handles.file(client))
    }

    fn iter_others(&self, of: usize) -> impl Iterator<Item = &RemoteClient> {
        let others = self.clients.iter().enumerate().filter(move |(number, _)| *number != of);
        others.map(|(_, client)| &**client)
    }

    /// The other clients find the file that `of` made or found, and a walk that uses their caches
    /// finds the same file.
    fn check_known_to_all(
        &self,
        cx: &Context<'_>,
        of: usize,
        at: (Ino, Name<'_>),
        entry: Result<Entry>,
    ) -> Result<Entry> {
        let is = |entry: &Entry| (entry.ino, select_compared(&entry.attr));
        for client in self.iter_others(of) {
            let found = client.lookup(cx, at.0, at.1);
            let same = found.as_ref().map(is) == entry.as_ref().map(is);
            assert!(same, "{found:?} of another client, {entry:?}");
        }
        self.check_resolved_by_all(cx, at, &entry);
        if let Ok(entry) = &entry {
            let place = (at.0, at.1.as_bytes().to_vec());
            lock(&self.places).entry(entry.ino).or_default().insert(place);
        }
        entry
    }

    fn check_resolved_by_all(&self, cx: &Context<'_>, at: (Ino, Name<'_>), entry: &Result<Entry>) {
        for client in &self.clients {
            match (client.resolve(cx, at.0, at.1.into()), entry) {
                (Ok(PathResolution::Inode { ino, attr, .. }), Ok(entry)) => {
                    assert_eq!(
                        (ino, select_compared(&attr)),
                        (entry.ino, select_compared(&entry.attr)),
                        "{at:?}"
                    );
                }
                (Ok(PathResolution::Missing { .. }) | Err(Errno::ENOENT), Err(Errno::ENOENT)) => {}
                (Err(Errno::ENOSYS), _) if !self.keep => {}
                (found, _) => panic!("{at:?}: {found:?}, {entry:?}"),
            }
        }
    }

    /// A walk by any client that comes to an inode by a name that it has or had finds the server's
    /// answer.
    fn check_same_for_all(&self, cx: &Context<'_>, ino: Ino) {
        let places = lock(&self.places).get(&ino).cloned().unwrap_or_default();
        for (dir, text) in places {
            let at = (dir, Name::new(&text).unwrap());
            let found = self.clients[0].lookup(cx, at.0, at.1);
            if matches!(found, Ok(_) | Err(Errno::ENOENT)) {
                self.check_resolved_by_all(cx, at, &found);
            }
            found.into_iter().for_each(|entry| self.clients[0].forget(entry.ino, 1));
        }
    }

    /// Removes a name by one client.
    fn remove(
        &self,
        cx: &Context<'_>,
        at: (Ino, Name<'_>),
        remove: impl FnOnce(&RemoteClient) -> Result<()>,
    ) -> Result<()> {
        let found = self.clients[0].lookup(cx, at.0, at.1);
        let removed = remove(self.choose_one());
        if removed.is_ok() {
            self.check_resolved_by_all(cx, at, &Err(Errno::ENOENT));
        }
        if let Ok(entry) = found {
            self.check_same_for_all(cx, entry.ino);
            self.clients[0].forget(entry.ino, 1);
        }
        removed
    }

    /// Changes a file by a client that has the file open.
    fn change<T>(
        &self,
        cx: &Context<'_>,
        file: File,
        change: impl FnOnce(&RemoteClient, File) -> Result<T>,
    ) -> Result<T> {
        let (client, own) = self.with(file.fh);
        let changed = change(client, own);
        self.check_same_for_all(cx, file.ino);
        changed
    }

    fn record_made(
        &self,
        cx: &Context<'_>,
        at: (Ino, Name<'_>),
        make: impl FnOnce(&RemoteClient) -> Result<Entry>,
    ) -> Result<Entry> {
        let of = self.choose_any();
        let made = make(&self.clients[of])?;
        self.check_known_to_all(cx, of, at, Ok(made))
    }

    fn record_open(&self, ino: Ino, of: Vec<Fh>, opened: OpenReply) -> OpenReply {
        let fh = Fh(self.next.fetch_add(1, Ordering::Relaxed));
        lock(&self.open).insert(fh, SpreadFile { ino, of });
        OpenReply { fh, ..opened }
    }

    /// Opens by all clients, with `first` by the client `of`.
    fn open_by_all(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        (of, first): (usize, OpenReply),
    ) -> Result<OpenReply> {
        let again = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };
        let handles = self.clients.iter().enumerate().map(|(number, client)| match number == of {
            true => Ok(first.fh),
            false => client.open(cx, ino, again).map(|opened| opened.fh),
        });
        let handles: Result<Vec<Fh>> = handles.collect();
        Ok(self.record_open(ino, handles?, first))
    }
}

/// The attributes that nothing but a change of the model changes.
fn select_compared(attr: &Attr) -> (u64, u32, u32, u32, u32) {
    (attr.size, attr.perm, attr.uid, attr.gid, attr.nlink)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at names, attributes, listings and data by one client until the end, while anything
/// changes. Returns how many looks found something.
fn look(
    number: usize,
    client: &RemoteClient,
    open: &Mutex<HashMap<Fh, SpreadFile>>,
    ends: &AtomicBool,
) -> u64 {
    let (cx, mut random, mut found) = (context(), fastrand::Rng::with_seed(number as u64), 0);
    while !ends.load(Ordering::Relaxed) {
        let path = NormalPath::new(PATHS[random.usize(..PATHS.len())]).unwrap();
        if let Ok(PathResolution::Inode { ino, .. }) = client.resolve(&cx, Ino::ROOT, path) {
            found += u64::from(client.getattr(&cx, ino, None).is_ok());
            if let Ok(opened) = client.open(&cx, ino, OpenArgs::default()) {
                let file = File { ino, fh: opened.fh };
                let _ = read(client, file, random.u64(..20_000), 5000);
                let _ = client.release(&cx, file, ReleaseArgs::default());
            } else if let Ok(opened) = client.opendir(&cx, ino, OpenFlags::default()) {
                let dir = File { ino, fh: opened.fh };
                let _ = client.readdir(&cx, dir, 0, &mut DirBuf::new(&mut IgnoredEntries));
                let _ = client.releasedir(&cx, dir);
            }
        }
        // A handle may be closed meanwhile; then it is refused.
        let held = lock(open).values().nth(random.usize(..3)).cloned();
        if let Some(held) = held.filter(|held| number < held.of.len()) {
            found += u64::from(read(client, held.file(number), random.u64(..20_000), 5000).is_ok());
        }
    }
    found
}

impl Drop for SpreadClients {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.looking.drain(..) {
            thread.join().unwrap();
        }
    }
}

impl FileSystem for SpreadClients {
    fn caps(&self) -> Caps {
        self.clients[0].caps()
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let of = self.choose_any();
        let found = self.clients[of].lookup(cx, parent, name);
        self.check_known_to_all(cx, of, (parent, name), found)
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        let mut found = None;
        for client in &self.clients {
            let entry = client.lookup_parent(cx, ino);
            let is = |entry: &Result<Entry>| {
                entry.as_ref().map(|entry| entry.ino).map_err(|errno| *errno)
            };
            let first = found.get_or_insert(entry);
            assert_eq!(is(first), is(&entry), "the parents differ");
        }
        found.unwrap_or(Err(Errno::ENOENT))
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        // The first lookup of a file that was made without a name is one of the first client alone.
        let alone = u64::from(lock(&self.nameless).remove(&ino).is_some());
        self.clients[0].forget(ino, lookups);
        self.iter_others(0).for_each(|client| client.forget(ino, lookups - alone));
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.record_made(cx, (parent, name), |client| client.mknod(cx, parent, name, node))
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.record_made(cx, (parent, name), |client| client.mkdir(cx, parent, name, node))
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.record_made(cx, (parent, name), |client| {
            client.symlink(cx, parent, name, target, node)
        })
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let of = self.choose_any_for(ino);
        let linked = self.clients[of].link(cx, ino, parent, name)?;
        lock(&self.nameless).entry(ino).and_modify(|nameless| *nameless = false);
        self.check_known_to_all(cx, of, (parent, name), Ok(linked))
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, (parent, name), |client| client.unlink(cx, parent, name))
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, (parent, name), |client| client.rmdir(cx, parent, name))
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        self.choose_one().rename(cx, from, to, flags)
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.choose_one_for(ino).readlink(cx, ino)
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        assert!(fh.is_none(), "the driver looks at inodes");
        self.choose_one_for(ino).getattr(cx, ino, None)
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        assert!(fh.is_none(), "the driver changes inodes");
        self.choose_one_for(ino).setattr(cx, ino, None, set)
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        self.choose_one_for(ino).setxattr(cx, ino, name, value, flags)
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        self.choose_one_for(ino).getxattr(cx, ino, name, room)
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        self.choose_one_for(ino).removexattr(cx, ino, name)
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let of = self.choose_any_for(ino);
        let first = self.clients[of].open(cx, ino, args)?;
        if lock(&self.nameless).get(&ino) == Some(&true) {
            return Ok(self.record_open(ino, vec![first.fh], first));
        }
        self.open_by_all(cx, ino, (of, first))
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let of = self.choose_any();
        let (entry, first) = self.clients[of].create(cx, parent, name, node, args)?;
        let entry = self.check_known_to_all(cx, of, (parent, name), Ok(entry))?;
        Ok((entry, self.open_by_all(cx, entry.ino, (of, first))?))
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let (entry, opened) = self.clients[0].tmpfile(cx, parent, node, args)?;
        lock(&self.nameless).insert(entry.ino, true);
        let opened = self.record_open(entry.ino, vec![opened.fh], opened);
        Ok((entry, opened))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let (client, file) = self.with(file.fh);
        client.read(cx, file, args, out)
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.change(cx, file, |client, file| client.write(cx, file, args, data))
    }

    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        let (client, file) = self.with(file.fh);
        client.flush(cx, file, owner)
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        let handles = lock(&self.open).remove(&file.fh).unwrap();
        for (number, client) in self.clients.iter().enumerate().take(handles.of.len()) {
            client.release(cx, handles.file(number), args)?;
        }
        Ok(())
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        self.change(cx, file, |client, file| client.fallocate(cx, file, range))
    }

    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        let (client, file) = self.with(file.fh);
        client.lseek(cx, file, offset, whence)
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        let [src, dst] = [copy.src, copy.dst].map(|file| lock(&self.open)[&file.fh].clone());
        let client = lock(&self.random).usize(..src.of.len().min(dst.of.len()));
        let copy = CopyRange { src: src.file(client), dst: dst.file(client), ..*copy };
        let copied = self.clients[client].copy_file_range(cx, &copy);
        self.check_same_for_all(cx, copy.dst.ino);
        copied
    }

    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        let handles = self.clients.iter().map(|client| Ok(client.opendir(cx, ino, flags)?.fh));
        let handles: Result<Vec<Fh>> = handles.collect();
        Ok(self.record_open(ino, handles?, OpenReply::default()))
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let (client, dir) = self.with(dir.fh);
        client.readdir(cx, dir, from, out)
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        let handles = lock(&self.open).remove(&dir.fh).unwrap();
        let mut all = self.clients.iter().enumerate();
        all.try_for_each(|(number, client)| client.releasedir(cx, handles.file(number)))
    }
}
