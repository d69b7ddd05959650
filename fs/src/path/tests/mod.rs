//! The adapter over a path file system that checks its arguments.

pub(crate) mod backend;
mod random;

use backend::PathTestBackend;

use super::*;
use crate::{
    Caller, DirBuf, DirItem, DirSink, Entry, File, FileKind, FileSystem, Ino, Name, OpenReply,
    SliceSink, SliceSource,
};

/// The adapter, with helpers for frequent calls.
struct AdapterMount(PathAdapter<PathTestBackend>);

fn cx() -> Context<'static> {
    Context::new(Caller::default())
}

fn name(bytes: &str) -> Name<'_> {
    Name::new(bytes.as_bytes()).unwrap()
}

fn regular() -> NewNode<'static> {
    NewNode::new(FileKind::Regular, 0o644, Caller::default())
}

const WRITE: OpenArgs = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };

impl AdapterMount {
    fn new(stable_ino: bool, handles_survive_unlink: bool) -> Self {
        AdapterMount(PathAdapter::new(PathTestBackend::new(stable_ino, handles_survive_unlink)))
    }

    fn create(&self, dir: Ino, at: &str, text: &[u8]) -> File {
        let (entry, opened) = self.0.create(&cx(), dir, name(at), &regular(), WRITE).unwrap();
        let file = File { ino: entry.ino, fh: opened.fh };
        self.write(file, text).unwrap();
        file
    }

    fn mkdir(&self, dir: Ino, at: &str) -> Ino {
        self.0.mkdir(&cx(), dir, name(at), &regular()).unwrap().ino
    }

    fn look_up(&self, dir: Ino, at: &str) -> Result<Ino> {
        self.0.lookup(&cx(), dir, name(at)).map(|entry| entry.ino)
    }

    fn rename(&self, from: (Ino, &str), to: (Ino, &str), flags: u32) -> Result<()> {
        let (from, to) = ((from.0, name(from.1)), (to.0, name(to.1)));
        self.0.rename(&cx(), from, to, RenameFlags(flags))
    }

    fn unlink(&self, dir: Ino, at: &str) -> Result<()> {
        self.0.unlink(&cx(), dir, name(at))
    }

    fn open(&self, ino: Ino) -> Result<File> {
        let opened: OpenReply = self.0.open(&cx(), ino, WRITE)?;
        Ok(File { ino, fh: opened.fh })
    }

    fn write(&self, file: File, text: &[u8]) -> Result<usize> {
        let mut source = SliceSource::new(text);
        self.0.write(&cx(), file, WriteArgs::default(), &mut WriteBuf::new(&mut source))
    }

    fn read(&self, file: File) -> Result<Vec<u8>> {
        let mut memory = vec![0; 4096];
        let mut sink = SliceSink::new(&mut memory);
        let mut out = ReadBuf::new(&mut sink, 4096);
        self.0.read(&cx(), file, ReadArgs::default(), &mut out)?;
        let filled = out.filled_len();
        memory.truncate(filled);
        Ok(memory)
    }

    fn release(&self, file: File) {
        self.0.release(&cx(), file, ReleaseArgs::default()).unwrap();
    }

    fn names(&self) -> Vec<String> {
        let state = self.0.inner().state();
        state.names.keys().map(|name| String::from_utf8(name.clone()).unwrap()).collect()
    }

    fn nodes(&self) -> usize {
        self.0.nodes()
    }
}

/// Runs a test with every combination of a backend's promises.
fn run_on_each(test: impl Fn(AdapterMount, bool, bool)) {
    for (stable, survive) in [(false, false), (false, true), (true, false), (true, true)] {
        test(AdapterMount::new(stable, survive), stable, survive);
    }
    for stable in [false, true] {
        let backend = PathTestBackend::with_paths(stable);
        test(AdapterMount(PathAdapter::new(backend)), stable, true);
    }
}

#[test]
fn an_open_file_comes_with_its_present_path_until_it_has_none() {
    let mount = AdapterMount(PathAdapter::new(PathTestBackend::with_paths(false)));
    let file = mount.create(Ino::ROOT, "file", b"text");
    let seen = || {
        let mut path = None;
        let call = |file: PathFile<'_>| {
            path = file.path.map(|path| path.as_bytes().to_vec());
            Ok(())
        };
        mount.0.with_file(&cx(), file, call).unwrap();
        path
    };
    assert_eq!(seen().unwrap(), b"/file");
    mount.rename((Ino::ROOT, "file"), (Ino::ROOT, "moved"), 0).unwrap();
    assert_eq!(seen().unwrap(), b"/moved");
    mount.unlink(Ino::ROOT, "moved").unwrap();
    assert_eq!(seen(), None);
    mount.release(file);
}

#[test]
fn numbers_that_identify_nothing_are_shown_if_the_backend_says_so() {
    let mut backend = PathTestBackend::new(false, false);
    backend.show_st_ino();
    let mount = AdapterMount(PathAdapter::new(backend));
    let file = mount.create(Ino::ROOT, "file", b"");
    let shown = |ino| mount.0.getattr(&cx(), ino, None).unwrap().st_ino;
    // This backend has another number each time.
    assert_ne!(shown(file.ino), shown(file.ino));
}

#[test]
fn a_file_is_found_after_its_directory_moved_with_everything_below() {
    run_on_each(|mount, _, _| {
        let (a, b) = (mount.mkdir(Ino::ROOT, "a"), mount.mkdir(Ino::ROOT, "b"));
        let deep = mount.mkdir(a, "deep");
        let file = mount.create(deep, "file", b"text");
        mount.rename((Ino::ROOT, "a"), (b, "moved"), 0).unwrap();
        assert_eq!(mount.read(file).unwrap(), b"text");
        assert_eq!(mount.look_up(deep, "file"), Ok(file.ino));
        assert_eq!(mount.look_up(Ino::ROOT, "a"), Err(Errno::ENOENT));
        assert_eq!(mount.look_up(b, "moved"), Ok(a));
        assert_eq!(mount.0.ino_of(b"/b/moved/deep/file"), Some(file.ino));
        assert_eq!(mount.0.lookup_parent(&cx(), a).unwrap().ino, b);
        assert_eq!(mount.0.lookup_parent(&cx(), Ino::ROOT).unwrap().ino, Ino::ROOT);
    });
}

#[test]
fn a_directory_cannot_move_below_itself_nor_replace_one_above_it() {
    run_on_each(|mount, _, _| {
        let a = mount.mkdir(Ino::ROOT, "a");
        let b = mount.mkdir(a, "b");
        let rename = |from, to, flags| mount.rename(from, to, flags);
        assert_eq!(rename((Ino::ROOT, "a"), (b, "x"), 0), Err(Errno::EINVAL));
        assert_eq!(rename((a, "b"), (Ino::ROOT, "a"), 0), Err(Errno::ENOTEMPTY));
        assert_eq!(rename((a, "b"), (Ino::ROOT, "a"), RenameFlags::EXCHANGE), Err(Errno::EINVAL));
        assert_eq!(rename((a, "b"), (a, "b"), 0), Ok(()));
        assert_eq!(rename((a, "c"), (a, "c"), 0), Err(Errno::ENOENT));
        assert_eq!(rename((a, "b"), (a, "b"), RenameFlags::NOREPLACE), Err(Errno::EEXIST));
    });
}

#[test]
fn exchanged_names_lead_to_the_other_file() {
    run_on_each(|mount, _, _| {
        let dir = mount.mkdir(Ino::ROOT, "dir");
        let below = mount.create(dir, "below", b"below");
        let file = mount.create(Ino::ROOT, "file", b"file");
        mount.rename((Ino::ROOT, "dir"), (Ino::ROOT, "file"), RenameFlags::EXCHANGE).unwrap();
        assert_eq!(mount.look_up(Ino::ROOT, "dir"), Ok(file.ino));
        assert_eq!(mount.look_up(Ino::ROOT, "file"), Ok(dir));
        assert_eq!(mount.read(below).unwrap(), b"below");
        assert_eq!(mount.read(file).unwrap(), b"file");
    });
}

#[test]
fn an_unlinked_file_stays_readable_until_it_is_released() {
    run_on_each(|mount, _, survive| {
        let file = mount.create(Ino::ROOT, "file", b"old");
        mount.unlink(Ino::ROOT, "file").unwrap();
        assert_eq!(mount.look_up(Ino::ROOT, "file"), Err(Errno::ENOENT));
        let second = mount.create(Ino::ROOT, "file", b"new");
        assert_ne!(file.ino, second.ino);
        assert_eq!(mount.read(file).unwrap(), b"old");
        assert_eq!(mount.read(second).unwrap(), b"new");
        // The attributes come from the handle, even if the caller names none. No link is left, not
        // even a hidden one.
        let attr = mount.0.getattr(&cx(), file.ino, None).unwrap();
        assert_eq!((attr.size, attr.nlink), (3, 0));
        let longer = SetAttr { size: Some(5), ..SetAttr::default() };
        assert_eq!(mount.0.setattr(&cx(), file.ino, None, &longer).unwrap().size, 5);
        assert_eq!(mount.names().len(), if survive { 2 } else { 3 });
        mount.release(file);
        assert_eq!(mount.names(), ["/", "/file"]);
        assert_eq!(mount.0.getattr(&cx(), file.ino, None).err(), Some(Errno::ESTALE));
        mount.0.forget(file.ino, 1);
        assert_eq!(mount.nodes(), 2);
    });
}

#[test]
fn a_file_that_is_replaced_while_open_stays_readable() {
    run_on_each(|mount, _, survive| {
        let (old, new) =
            (mount.create(Ino::ROOT, "old", b"old"), mount.create(Ino::ROOT, "new", b"new"));
        mount.rename((Ino::ROOT, "new"), (Ino::ROOT, "old"), 0).unwrap();
        assert_eq!(mount.read(old).unwrap(), b"old");
        assert_eq!(mount.read(new).unwrap(), b"new");
        assert_eq!(mount.look_up(Ino::ROOT, "old"), Ok(new.ino));
        assert_eq!(mount.names().len(), if survive { 2 } else { 3 });
        mount.release(old);
        assert_eq!(mount.names(), ["/", "/old"]);
    });
}

#[test]
fn a_rename_that_fails_leaves_the_open_file_at_its_name() {
    run_on_each(|mount, _, _| {
        let dir = mount.mkdir(Ino::ROOT, "dir");
        let file = mount.create(Ino::ROOT, "file", b"text");
        let onto = (Ino::ROOT, "file");
        assert_eq!(mount.rename((Ino::ROOT, "dir"), onto, 0), Err(Errno::ENOTDIR));
        assert_eq!(mount.rename((dir, "none"), onto, 0), Err(Errno::ENOENT));
        assert_eq!(mount.names(), ["/", "/dir", "/file"]);
        assert_eq!(mount.look_up(Ino::ROOT, "file"), Ok(file.ino));
    });
}

#[test]
fn hard_links_are_one_inode_if_numbers_are_stable() {
    run_on_each(|mount, stable, _| {
        let file = mount.create(Ino::ROOT, "one", b"text");
        let entry = mount.0.link(&cx(), file.ino, Ino::ROOT, name("two")).unwrap();
        assert_eq!((entry.ino == file.ino, entry.attr.nlink), (stable, 2));
        assert_eq!(
            mount.0.link(&cx(), file.ino, Ino::ROOT, name("two")).err(),
            Some(Errno::EEXIST)
        );
        mount.unlink(Ino::ROOT, "one").unwrap();
        assert_eq!(mount.read(file).unwrap(), b"text");
        let other = mount.open(entry.ino).unwrap();
        assert_eq!(mount.read(other).unwrap(), b"text");
        mount.release(file);
        mount.release(other);
        assert_eq!(mount.names(), ["/", "/two"]);
    });
}

#[test]
fn a_link_that_was_never_looked_up_keeps_the_inode_alive() {
    let mount = AdapterMount::new(true, true);
    let file = mount.create(Ino::ROOT, "one", b"text");
    mount.0.inner().link(&cx(), path("/one"), path("/two")).unwrap();
    mount.unlink(Ino::ROOT, "one").unwrap();
    assert_eq!(mount.look_up(Ino::ROOT, "two"), Ok(file.ino));
}

#[test]
fn a_reused_number_is_another_inode() {
    let mount = AdapterMount::new(true, true);
    let first = mount.create(Ino::ROOT, "first", b"");
    mount.release(first);
    mount.unlink(Ino::ROOT, "first").unwrap();
    let st_ino = |ino| mount.0.getattr(&cx(), ino, None).map(|attr| attr.st_ino);
    let second = mount.create(Ino::ROOT, "second", b"");
    assert_eq!(st_ino(second.ino), Ok(2), "the backend uses numbers again");
    assert_ne!(first.ino, second.ino);
    assert_eq!(st_ino(first.ino), Err(Errno::ESTALE));
}

fn path(text: &str) -> PathRef<'_> {
    PathRef::from_checked(text.as_bytes())
}

#[test]
fn external_changes_are_detected() {
    run_on_each(|mount, stable, _| {
        let file = mount.create(Ino::ROOT, "file", b"text");
        mount.release(file);
        let backend = mount.0.inner();
        backend.mknod(&cx(), path("/other"), &regular()).unwrap();
        backend.rename(&cx(), path("/other"), path("/file"), RenameFlags(0)).unwrap();
        let seen = mount.0.getattr(&cx(), file.ino, None).map(|attr| attr.size);
        assert_eq!(seen, if stable { Err(Errno::ESTALE) } else { Ok(0) });
        assert_eq!(mount.look_up(Ino::ROOT, "file").unwrap() == file.ino, !stable);
        backend.unlink(&cx(), path("/file")).unwrap();
        assert_eq!(mount.look_up(Ino::ROOT, "file"), Err(Errno::ENOENT));
        backend.mkdir(&cx(), path("/file"), &regular()).unwrap();
        assert_ne!(mount.look_up(Ino::ROOT, "file"), Ok(file.ino));
    });
}

#[test]
fn lookups_are_counted_exactly() {
    run_on_each(|mount, _, _| {
        let dir = mount.mkdir(Ino::ROOT, "dir");
        let file = mount.create(dir, "file", b"");
        mount.release(file);
        assert_eq!(mount.look_up(dir, "file"), Ok(file.ino));
        // The directory is an ancestor of the file, and remains known without lookups of its own.
        mount.0.forget(dir, 1);
        assert_eq!(mount.nodes(), 3);
        mount.0.forget(file.ino, 1);
        assert_eq!(mount.nodes(), 3);
        mount.0.forget(file.ino, 1);
        assert_eq!(mount.nodes(), 1);
        mount.0.forget(file.ino, 7);
        assert_eq!(mount.look_up(dir, "file"), Err(Errno::ESTALE));
        let again = mount.look_up(Ino::ROOT, "dir").unwrap();
        assert!(again.0 > file.ino.0, "numbers are not used again");
    });
}

#[test]
fn a_name_in_a_removed_directory_does_not_exist() {
    run_on_each(|mount, _, _| {
        let dir = mount.mkdir(Ino::ROOT, "dir");
        mount.0.rmdir(&cx(), Ino::ROOT, name("dir")).unwrap();
        assert_eq!(mount.look_up(dir, "x"), Err(Errno::ENOENT));
        let made = mount.0.mkdir(&cx(), dir, name("x"), &regular());
        assert_eq!(made.err(), Some(Errno::ENOENT));
        assert_eq!(mount.0.getattr(&cx(), dir, None).err(), Some(Errno::ESTALE));
        assert_eq!(mount.look_up(Ino(77), "x"), Err(Errno::ESTALE));
    });
}

/// Accepts a few entries per call.
struct FewEntries {
    plus: bool,
    room: usize,
    seen: Vec<(String, u64, Option<Ino>)>,
}

impl DirSink for FewEntries {
    fn wants_entries(&self) -> bool {
        self.plus
    }
    fn fits(&self, _: usize) -> bool {
        self.room > 0
    }
    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        self.room -= 1;
        let name = String::from_utf8(item.name.to_vec()).unwrap();
        self.seen.push((name, item.next, entry.map(|entry| entry.ino)));
    }
}

#[test]
fn a_listing_continues_where_it_stopped_and_counts_lookups_of_fitting_entries() {
    let mount = AdapterMount::new(true, false);
    let dir = mount.mkdir(Ino::ROOT, "dir");
    for at in ["a", "b", "c"] {
        let file = mount.create(dir, at, b"");
        mount.release(file);
        mount.0.forget(file.ino, 1);
    }
    let opened = mount.0.opendir(&cx(), dir, OpenFlags(0)).unwrap();
    let open = File { ino: dir, fh: opened.fh };
    let mut few = FewEntries { plus: true, room: 3, seen: Vec::new() };
    mount.0.readdir(&cx(), open, 0, &mut DirBuf::new(&mut few)).unwrap();
    assert_eq!(mount.nodes(), 3);
    // New entries may be listed or not, but no entry is listed twice or omitted.
    mount.create(dir, "aa", b"");
    few.room = 9;
    mount.0.readdir(&cx(), open, few.seen[2].1, &mut DirBuf::new(&mut few)).unwrap();
    let names: Vec<_> = few.seen.iter().map(|seen| &*seen.0).collect();
    assert_eq!(names, [".", "..", "a", "b", "c"]);
    assert!(few.seen[..2].iter().all(|seen| seen.2.is_none()));
    assert!(few.seen[2..].iter().all(|seen| seen.2.is_some()));
    mount.0.releasedir(&cx(), open).unwrap();
    let closed = mount.0.readdir(&cx(), open, 0, &mut DirBuf::new(&mut few));
    assert_eq!(closed.err(), Some(Errno::EBADF));
}
