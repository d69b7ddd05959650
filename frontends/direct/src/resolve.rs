//! Paths that the file system resolves in one call, without nodes and lookups.
//!
//! A walk makes a node for each inode that it reaches, and caches its name. A file system with
//! [`resolve`](defuse_fs::Shortcuts::resolve) needs neither: it answers for the whole path, and the
//! client checks the permissions that a walk would have checked. All cases that such an answer does
//! not decide are left to a walk: symbolic links, `.` and `..`, mounts on directories of the mount,
//! and directories that not every user may search.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use defuse_fs::{
    Context, Errno, FileKind, FileSystem, Ino, Name, NewNode, NormalPath, OpenArgs, OpenFlags,
    OpenOutcome, OpenReply, PathResolution, Result, shortcuts_of,
};
use defuse_probe::Op;

use crate::call_target::{CallTarget, UncheckedOpen};
use crate::client::DirectClient;
use crate::credentials::{TaskCredentials, cap};
use crate::mount::ClientMount;
use crate::mounted_inode::MountedInode;
use crate::node::CachedInode;
use crate::remaining_path::PATH_MAX;
use crate::stop::{self, CallError};
use crate::task::ClientTask;
use crate::walk::WalkStart;
use crate::work_dir::WorkDir;

impl DirectClient {
    /// Calls `run` with the inode at the end of `path`, if one call of the file system can resolve
    /// it. Returns `None` if the caller must walk. Fails with `ENOENT`, and with the errors of the
    /// file system.
    ///
    /// `run` must not have changed anything if it fails with `ESTALE`. The name was removed
    /// meanwhile then, and a walk decides.
    pub(crate) fn resolve<T>(
        &self,
        task: &ClientTask,
        who: &TaskCredentials,
        path: (WalkStart<'_>, &[u8]),
        follow: bool,
        run: impl FnOnce(CallTarget<'_>) -> stop::Result<Option<T>>,
    ) -> stop::Result<Option<T>> {
        self.resolve_to_open(task, who, path, (follow, None), run)
    }

    /// Like [`resolve`](DirectClient::resolve). With `open` the file may be open already when `run`
    /// is called, which takes it ([`CallTarget::take_opened`]) if the caller may open it.
    pub(crate) fn resolve_to_open<T>(
        &self,
        task: &ClientTask,
        who: &TaskCredentials,
        (at, path): (WalkStart<'_>, &[u8]),
        (follow, open): (bool, Option<OpenArgs>),
        run: impl FnOnce(CallTarget<'_>) -> stop::Result<Option<T>>,
    ) -> stop::Result<Option<T>> {
        let done = self.start(task, (at, path), |mount, from, (path, is_dir)| {
            let (cx, moment) = (who.context(mount.origin), mount.current_moment());
            let answer = match open {
                Some(args) => mount.resolve_to_open(&cx, from, path, args)?,
                None => mount.resolve(&cx, from, path)?.map(|answer| (answer, None)),
            };
            let Some((answer, opened)) = answer else { return Ok(None) };
            let opened = match (&answer, opened) {
                (PathResolution::Inode { ino, .. }, Some(opened)) => {
                    let flags = open.map_or(OpenFlags(0), |args| args.flags);
                    Some(UncheckedOpen::new(mount, who, (*ino, flags), opened))
                }
                _ => None,
            };
            let searches = |open_to_all| open_to_all || may_search_all(who);
            match answer {
                PathResolution::Inode { ino, attr, open_to_all } if searches(open_to_all) => {
                    let is_link = attr.kind == FileKind::Symlink && follow;
                    if is_link || is_dir && attr.kind != FileKind::Directory {
                        return Ok(None);
                    }
                    run(CallTarget::from_resolved(mount, ino, attr, moment).with_open(opened))
                }
                PathResolution::Missing { open_to_all } if searches(open_to_all) => {
                    Err(Errno::ENOENT.into())
                }
                _ => Ok(None),
            }
        });
        match done {
            Some(Err(CallError::Errno(Errno::ESTALE))) | None => Ok(None),
            Some(result) => result,
        }
    }

    /// Calls `run` with the mount, the directory and the path in it with which a walk would begin,
    /// and true if the path must lead to a directory. Returns `None` if the path begins or may lead
    /// outside of this mount.
    fn start<T>(
        &self,
        task: &ClientTask,
        (at, path): (WalkStart<'_>, &[u8]),
        run: impl FnOnce(&Arc<ClientMount>, Ino, (NormalPath<'_>, bool)) -> T,
    ) -> Option<T> {
        let is_absolute = *path.first()? == b'/';
        if path.len() > PATH_MAX {
            return None;
        }
        let table = self.mounts.load();
        let found = if is_absolute { table.prefix(path) } else { table.find_named(path) };
        if let Some((mount, len)) = found {
            let rest = path[len..].strip_prefix(b"/")?;
            return with_normal_form(rest, |rest| {
                mount.may_resolve().then(|| run(mount, Ino::ROOT, rest))
            });
        }
        if is_absolute {
            return None;
        }
        let run = |here: &MountedInode| {
            with_normal_form(path, |path| {
                here.mount.may_resolve().then(|| run(&here.mount, here.node.ino(), path))
            })
        };
        match at {
            WalkStart::Cwd => task.with_cwd(|cwd| match cwd {
                WorkDir::Inside(held) => run(&held.here),
                WorkDir::Outside(_) => None,
            }),
            WalkStart::Dir(dir) => run(dir.inode()),
            WalkStart::Itself(_) | WalkStart::Path(_) => None,
        }
    }
}

/// Calls `run` with the path in normal form, and true if it ends with a slash, so that it must lead
/// to a directory. `None` for paths with `..`, and for paths whose last component is no name. A
/// component before a slash must be a directory in any case, so that a `.` or another slash after
/// it adds nothing.
fn with_normal_form<T>(
    path: &[u8],
    run: impl FnOnce((NormalPath<'_>, bool)) -> Option<T>,
) -> Option<T> {
    let is_dir = path.ends_with(b"/");
    let mut path = path;
    while let [shorter @ .., b'/'] = path {
        path = shorter;
    }
    if let Some(path) = NormalPath::new(path) {
        return run((path, is_dir));
    }
    let mut parts: Vec<&[u8]> = path.split(|&byte| byte == b'/').collect();
    let last = parts.pop()?;
    parts.retain(|part| !matches!(*part, b"" | b"."));
    parts.push(last);
    run((NormalPath::new(&parts.join(&b'/'))?, is_dir))
}

/// True if `who` may search directories regardless of their permissions.
fn may_search_all(who: &TaskCredentials) -> bool {
    who.has(cap::DAC_OVERRIDE) || who.has(cap::DAC_READ_SEARCH)
}

impl ClientMount {
    /// True if the file system may resolve paths. No other mount covers a directory of this one, so
    /// that a path does not leave it.
    pub(crate) fn may_resolve(&self) -> bool {
        !self.lacks_resolve.load(Relaxed) && self.covered.load(Relaxed) == 0
    }

    fn resolve(
        &self,
        cx: &defuse_fs::Context<'_>,
        from: Ino,
        path: NormalPath<'_>,
    ) -> Result<Option<PathResolution>> {
        self.check_answer(self.call(Op::RESOLVE, |fs| shortcuts_of(fs).resolve(cx, from, path)))
    }

    fn resolve_to_open(
        &self,
        cx: &Context<'_>,
        from: Ino,
        path: NormalPath<'_>,
        args: OpenArgs,
    ) -> Result<Option<(PathResolution, Option<OpenReply>)>> {
        let call = |fs: &dyn FileSystem| shortcuts_of(fs).resolve_to_open(cx, from, path, args);
        self.check_answer(self.call(Op::RESOLVE, call))
    }

    /// True if the file system may create a file where it finds no name, without a lookup before.
    pub(crate) fn may_open_or_create(&self) -> bool {
        let may = self.keeps_answers() && self.may_resolve() || self.decides_on_names();
        may && !self.lacks_open_or_create.load(Relaxed)
    }

    /// Creates a file, or resolves its name. `None` if only other calls find out.
    pub(crate) fn create_or_resolve(
        &self,
        cx: &Context<'_>,
        (dir, name): (&CachedInode, Name<'_>),
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<Option<OpenOutcome>> {
        let call =
            |fs: &dyn FileSystem| shortcuts_of(fs).open_or_create(cx, dir.ino(), name, node, args);
        match self.call(Op::CREATE, call) {
            Err(Errno::ENOSYS) => {
                self.lacks_open_or_create.store(true, Relaxed);
                Ok(None)
            }
            Err(Errno::ESTALE) => Ok(None),
            result => result.map(Some),
        }
    }

    /// An answer for a path; `None` if there is none, and the caller must walk.
    fn check_answer<T>(&self, answer: Result<T>) -> Result<Option<T>> {
        match answer {
            Err(Errno::ENOSYS) => {
                self.lacks_resolve.store(true, Relaxed);
                Ok(None)
            }
            // The directory is gone. A walk finds out how.
            Err(Errno::ESTALE) => Ok(None),
            result => result.map(Some),
        }
    }

    /// Looks up `name` in `dir` for a call that needs no node if the file system resolves paths.
    /// The caller has search permission. Fails with `ENOENT`.
    pub(crate) fn subject<'a>(
        self: &'a Arc<Self>,
        dir: &CachedInode,
        name: Name<'_>,
        who: &TaskCredentials,
    ) -> Result<CallTarget<'a>> {
        if self.may_resolve() {
            let moment = self.current_moment();
            match self.resolve(&who.context(self.origin), dir.ino(), name.into())? {
                Some(PathResolution::Inode { ino, attr, .. }) => {
                    return Ok(CallTarget::from_resolved(self, ino, attr, moment));
                }
                Some(PathResolution::Missing { .. }) => return Err(Errno::ENOENT),
                Some(PathResolution::Walk) | None => {}
            }
        }
        Ok(CallTarget::with_node(self, self.lookup(dir, name, who)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_a_normal_form_if_it_names_something_below_its_begin() {
        let normal = |path: &str| {
            with_normal_form(path.as_bytes(), |(path, is_dir)| {
                Some((String::from_utf8(path.as_bytes().to_vec()).unwrap(), is_dir))
            })
        };
        let of = |path: &str, is_dir| Some((path.to_owned(), is_dir));
        for path in ["a/b", "./a/b", ".//./a/b", "a//b", "a/./b", "/a/b", "a/././//b"] {
            assert_eq!(normal(path), of("a/b", false), "{path}");
            assert_eq!(normal(&format!("{path}/")), of("a/b", true), "{path}/");
        }
        for path in ["", ".", "./", "/", "a/.", "a/./", "..", "./..", "a/../b", "./a/..", "a/.//"] {
            assert_eq!(normal(path), None, "{path}");
        }
        assert_eq!((normal("./..."), normal("a//")), (of("...", false), of("a", true)));
    }
}
