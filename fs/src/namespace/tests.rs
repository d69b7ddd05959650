//! The tree over three small file systems.

use std::sync::Arc;
use std::time::Duration;

use super::{Namespace, NamespaceError, NamespaceMember};
use crate::layer::Method;
use crate::layer::testing::{cx, name, node, read, tree, write};
use crate::{
    Attr, Caller, Caps, Context, CopyRange, DirBuf, DirItem, DirSink, Entry, Errno, FailureDomain,
    Fh, File, FileSystem, Ino, Name, NoNotify, NormalPath, OpenArgs, Origin, PathResolution,
    RenameFlags, Result, SetAttr, Shortcuts, delegate,
};

fn fs() -> Namespace {
    let member = |path: &str| NamespaceMember { path: path.to_owned(), fs: tree(), apart: false };
    let members = ["fast", "far/one", "far/two"].map(member).into();
    let fs = Namespace::new(members, Caller { uid: 3, gid: 4, pid: 0 }).unwrap();
    fs.attach(Origin::new(), Arc::new(NoNotify));
    fs
}

fn walk(fs: &Namespace, path: &str) -> Result<Ino> {
    let mut names = path.split('/').filter(|part| !part.is_empty());
    names.try_fold(Ino::ROOT, |dir, part| Ok(fs.lookup(&cx(), dir, name(part))?.ino))
}

struct MemberNames(Vec<(String, u64, Option<Ino>)>);

impl DirSink for MemberNames {
    fn wants_entries(&self) -> bool {
        true
    }
    fn fits(&self, _: usize) -> bool {
        self.0.len() < 3
    }
    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        let name = String::from_utf8_lossy(item.name).into_owned();
        self.0.push((name, item.next, entry.map(|entry| entry.ino)));
    }
}

#[test]
fn each_file_system_is_a_directory_at_its_path_and_its_files_are_found_there() {
    let fs = fs();
    for path in ["fast", "far/one", "far/two"] {
        let file = walk(&fs, &format!("{path}/dir/file")).unwrap();
        assert_eq!(write(&fs, file, path.as_bytes()).unwrap(), path.len());
    }
    for path in ["fast", "far/one", "far/two"] {
        let file = walk(&fs, &format!("{path}/dir/file")).unwrap();
        assert_eq!(read(&fs, file).unwrap(), path.as_bytes(), "{path}");
    }
    assert_eq!(walk(&fs, "far/three"), Err(Errno::ENOENT));
    assert_eq!(walk(&fs, "far/one/none"), Err(Errno::ENOENT));
    let root = fs.getattr(&cx(), Ino::ROOT, None).unwrap();
    assert_eq!((root.uid, root.gid, root.nlink, root.perm), (3, 4, 4, 0o755));
}

#[test]
fn dot_dot_leads_out_of_a_file_system_and_numbers_are_those_of_one_tree() {
    let fs = fs();
    let parent = |ino| fs.lookup_parent(&cx(), ino).unwrap().ino;
    let (far, one) = (walk(&fs, "far").unwrap(), walk(&fs, "far/one").unwrap());
    let dir = walk(&fs, "far/one/dir").unwrap();
    assert_eq!([parent(dir), parent(one), parent(far)], [one, far, Ino::ROOT]);
    let paths = ["", "far", "fast", "fast/dir", "far/one", "far/one/dir", "far/two/dir"];
    let mut numbers: Vec<_> =
        paths.map(|path| fs.getattr(&cx(), walk(&fs, path).unwrap(), None).unwrap().st_ino).into();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), paths.len());
    assert_eq!(fs.getattr(&cx(), Ino(77), None), Err(Errno::ESTALE));
    assert_eq!(fs.getattr(&cx(), Ino(9 << 56 | 1), None), Err(Errno::ESTALE));
}

#[test]
fn a_listing_goes_on_where_a_full_buffer_ended_and_gives_entries() {
    let fs = fs();
    let far = walk(&fs, "far").unwrap();
    let list = |from| {
        let mut names = MemberNames(Vec::new());
        let file = File { ino: far, fh: Fh(0) };
        fs.readdir(&cx(), file, from, &mut DirBuf::new(&mut names)).unwrap();
        names.0
    };
    let first = list(0);
    let names: Vec<_> = first.iter().map(|(name, ..)| &name[..]).collect();
    assert_eq!(names, [".", "..", "one"]);
    assert_eq!(first[2].2, Some(walk(&fs, "far/one").unwrap()));
    let rest = list(first[2].1);
    assert_eq!((rest.len(), &rest[0].0[..]), (1, "two"));
    assert!(list(rest[0].1).is_empty());
}

#[test]
fn names_do_not_cross_file_systems() {
    let fs = fs();
    let (one, two) = (walk(&fs, "far/one/dir").unwrap(), walk(&fs, "far/two/dir").unwrap());
    let file = walk(&fs, "far/one/dir/file").unwrap();
    let rename = |from, to| fs.rename(&cx(), from, to, RenameFlags(0));
    assert_eq!(rename((one, name("file")), (two, name("moved"))), Err(Errno::EXDEV));
    assert_eq!(fs.link(&cx(), file, two, name("linked")).err(), Some(Errno::EXDEV));
    assert_eq!(rename((one, name("file")), (Ino::ROOT, name("f"))), Err(Errno::EXDEV));
    rename((one, name("file")), (one, name("moved"))).unwrap();
    let (src, dst) = (File { ino: file, fh: Fh(0) }, File { ino: two, fh: Fh(0) });
    let copy = CopyRange { src, src_offset: 0, dst, dst_offset: 0, length: 1, flags: 0 };
    assert_eq!(fs.copy_file_range(&cx(), &copy), Err(Errno::EXDEV));
}

#[test]
fn the_directories_of_the_namespace_stay_as_they_are() {
    let fs = fs();
    let root = Ino::ROOT;
    assert_eq!(fs.mkdir(&cx(), root, name("far"), &node()).err(), Some(Errno::EEXIST));
    assert_eq!(fs.mknod(&cx(), root, name("new"), &node()).err(), Some(Errno::EROFS));
    assert_eq!(fs.rmdir(&cx(), root, name("fast")), Err(Errno::EBUSY));
    assert_eq!(fs.unlink(&cx(), root, name("none")), Err(Errno::ENOENT));
    assert_eq!(fs.setattr(&cx(), root, None, &SetAttr::default()).err(), Some(Errno::EROFS));
    let far = walk(&fs, "far").unwrap();
    let moved = fs.rename(&cx(), (far, name("one")), (far, name("x")), RenameFlags(0));
    assert_eq!(moved, Err(Errno::EBUSY));
    assert_eq!(fs.open(&cx(), far, OpenArgs::default()).err(), Some(Errno::EISDIR));
}

/// A file system without fsync.
struct NoSyncMember;

impl FileSystem for NoSyncMember {
    fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        let attr = Attr::for_new(Ino(1 << 60), &node());
        Ok(Entry { ino: Ino(1 << 60), generation: 0, attr, valid_for: Duration::ZERO })
    }
    fn getattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        Ok(Attr::for_new(ino, &node()))
    }
    fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
        Ok(())
    }
}

/// After ENOSYS a frontend calls fsync no more, and what others write would not be durable.
#[test]
fn a_file_system_that_lacks_an_operation_does_not_take_it_from_the_others() {
    let bare =
        NamespaceMember { path: "bare".to_owned(), fs: Arc::new(NoSyncMember), apart: false };
    let fs = Namespace::new(vec![bare], Caller::default()).unwrap();
    let bare = walk(&fs, "bare").unwrap();
    let file = File { ino: bare, fh: Fh(0) };
    assert_eq!(fs.fsync(&cx(), file, false), Ok(()));
    assert_eq!(fs.fsyncdir(&cx(), file, false), Ok(()));
    assert_eq!(fs.syncfs(&cx()), Ok(()));
    assert_eq!(fs.mkdir(&cx(), bare, name("a"), &node()).err(), Some(Errno::EOPNOTSUPP));
    assert_eq!(fs.lookup(&cx(), bare, name("far")).err(), Some(Errno::EOVERFLOW));
    let path = NormalPath::new(b"a/b").unwrap();
    assert_eq!(fs.resolve(&cx(), bare, path), Ok(PathResolution::Walk));
}

#[test]
fn paths_that_hide_each_other_are_refused() {
    let check = |paths: &[&str]| Namespace::check(paths.iter().copied());
    assert_eq!(check(&["a", "b/c", "b/d"]), Ok(()));
    assert_eq!(check(&["a", "a"]), Err(NamespaceError::Below(1, 0)));
    assert_eq!(check(&["a", "a/b"]), Err(NamespaceError::Below(1, 0)));
    assert_eq!(check(&["x", "a/b/c", "a"]), Err(NamespaceError::Below(1, 2)));
    for path in ["", "/", "a/", "a//b", "../a"] {
        assert_eq!(check(&["x", path]), Err(NamespaceError::Path(1)), "{path}");
    }
    let many: Vec<_> = (0..=Namespace::MOST).map(|n| n.to_string()).collect();
    assert_eq!(Namespace::check(many.iter().map(|path| &**path)), Err(NamespaceError::TooMany));
    assert_eq!(Namespace::check(many[1..].iter().map(|path| &**path)), Ok(()));
}

/// A file system with its own word on exclusiveness, which may not answer.
struct SilentMember {
    inner: Arc<dyn FileSystem>,
    exclusive: bool,
    silent: bool,
}

impl SilentMember {
    fn member(path: &str, (exclusive, silent, apart): (bool, bool, bool)) -> NamespaceMember {
        let fs = Arc::new(SilentMember { inner: tree(), exclusive, silent });
        NamespaceMember { path: path.to_owned(), fs, apart }
    }

    fn intercept<T>(
        &self,
        _: Method,
        _: &Context<'_>,
        call: impl FnOnce(&Arc<dyn FileSystem>) -> Result<T>,
    ) -> Result<T> {
        if self.silent { Err(Errno::EIO) } else { call(&self.inner) }
    }
}

impl FileSystem for SilentMember {
    delegate!(intercept inner, except caps, failure_domain);

    fn caps(&self) -> Caps {
        Caps { exclusive: self.exclusive, ..self.inner.caps() }
    }

    fn failure_domain(&self, _: Ino, _: Option<Name<'_>>) -> Option<FailureDomain> {
        (!self.exclusive).then_some(FailureDomain(7))
    }
}

/// One device that an application may bind took pages and versions from all others.
#[test]
fn a_file_system_apart_leaves_the_others_exclusive_and_answers_no_whole_paths() {
    let of = |apart| {
        let here = SilentMember::member("here", (true, false, false));
        let away = SilentMember::member("away", (false, false, apart));
        Namespace::new(vec![here, away], Caller::default()).unwrap()
    };
    assert!(!of(false).caps().exclusive);
    let fs = of(true);
    assert!(fs.caps().exclusive);
    let away = walk(&fs, "away").unwrap();
    let path = NormalPath::new(b"dir/file").unwrap();
    assert_eq!(fs.resolve(&cx(), away, path), Ok(PathResolution::Walk));
    assert!(fs.is_apart(away) && !fs.is_apart(walk(&fs, "here").unwrap()));
    assert!(!fs.is_apart(Ino::ROOT));
    // Requests for it hold only a part of the threads. Other members have threads of their own.
    assert_eq!(fs.failure_domain(away, None), Some(FailureDomain(2 << 24 | 7)));
    assert_eq!(fs.failure_domain(walk(&fs, "here").unwrap(), None), None);
    assert_eq!(fs.failure_domain(Ino::ROOT, None), None);
}

#[test]
fn a_file_system_apart_that_does_not_answer_is_left_out_of_the_sum() {
    let here = || SilentMember::member("here", (true, false, false));
    let of = |members| Namespace::new(members, Caller::default()).unwrap();
    let sum = of(vec![here()]).statfs(&cx(), Ino::ROOT).unwrap();
    let both = of(vec![here(), SilentMember::member("a", (false, true, true))]);
    assert_eq!(both.statfs(&cx(), Ino::ROOT), Ok(sum));
    assert_eq!(both.lookup(&cx(), Ino::ROOT, name("a")).err(), Some(Errno::EIO));
    assert!(walk(&both, "here/dir/file").is_ok());
}
