//! Faster ways to results that the contract gives anyway.

use crate::{
    Attr, Context, Entry, Errno, FileSystem, Ino, Name, NewNode, NormalPath, OpenArgs, OpenOutcome,
    OpenReply, PathResolution, Result,
};

/// Shortcuts: calls that take the place of several calls of [`FileSystem`], or of one that does
/// more than is needed. [`FileSystem::shortcuts`] leads to them.
///
/// * A shortcut is never necessary. It has the effects and the errors of the calls that its
///   documentation names, and nothing else; a file system without it is still right, and slower.
/// * `ENOSYS`, the default, means that the file system does not have this shortcut. The frontend
///   then makes the calls, and need not try again. An answer of `ENOSYS` comes before anything has
///   changed.
/// * A shortcut must not go past a method that a layer changes. So a layer that does not name this
///   trait hides it, by the default of [`FileSystem::shortcuts`]. A layer passes shortcuts on by
///   naming those that it knows in [`delegate!`](crate::delegate!)`(.., only ..)`. A layer that
///   forwards by `delegate!(to ..)` also passes on those that it does not know, as long as it
///   leaves all methods to the macro for which a shortcut can stand.
///
/// A new shortcut is a method here, a line in [`delegate!`](crate::delegate!) and one in
/// [`Shortcut`](crate::layer::Shortcut); then come the file system that implements it and the
/// frontend that calls it.
#[allow(unused_variables)]
pub trait Shortcuts: Send + Sync {
    /// Resolves a whole path from the directory `from`, without following symbolic links and
    /// without adding a lookup: instead of [`lookup`](FileSystem::lookup) and
    /// [`forget`](FileSystem::forget) of each name. Fails with `ESTALE` if `from` is unknown.
    ///
    /// The in-process client calls it, and makes the permission checks of a walk by means of the
    /// answer; see [`PathResolution`]. The answer is one that a walk during the call could give:
    /// each name is looked up at some moment after the name before it.
    ///
    /// A file system that implements it accepts its numbers in every other method without a lookup,
    /// as long as the inode has a name or is open. Afterwards it returns `ESTALE`, and it never
    /// uses a number again.
    fn resolve(&self, cx: &Context<'_>, from: Ino, path: NormalPath<'_>) -> Result<PathResolution> {
        Err(Errno::ENOSYS)
    }

    /// Resolves a path like [`resolve`](Shortcuts::resolve), and opens the regular file at its end,
    /// if that takes no further call. The frontend opens it by [`open`](FileSystem::open)
    /// otherwise, and releases what it may not open after all. `args` have none of the flags that
    /// change something.
    ///
    /// Fails like `resolve`, and not for an open that fails. The default resolves alone.
    fn resolve_to_open(
        &self,
        cx: &Context<'_>,
        from: Ino,
        path: NormalPath<'_>,
        args: OpenArgs,
    ) -> Result<(PathResolution, Option<OpenReply>)> {
        Ok((self.resolve(cx, from, path)?, None))
    }

    /// Looks up a name like [`lookup`](FileSystem::lookup), and opens the regular file of this
    /// name, if that takes less than to open it afterwards. The rules of
    /// [`resolve_to_open`](Shortcuts::resolve_to_open) about `args`, errors and the file hold here,
    /// too, but for `EINTR`: an open that a signal has ended would wait again.
    fn lookup_to_open(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, Option<OpenReply>)> {
        Err(Errno::ENOSYS)
    }

    /// Opens the regular file `name`, and creates it if it is not there: instead of
    /// [`resolve`](Shortcuts::resolve) or [`lookup`](FileSystem::lookup) of the name, and
    /// [`create`](FileSystem::create). `args` have the flags of open(2), `O_CREAT` and no `O_EXCL`.
    /// The caller may create files in the directory.
    ///
    /// A file that is there is opened only where the kernel decides for this caller
    /// ([`native`](crate::native)); otherwise the answer says where the name leads. Fails like the
    /// calls that it stands for, and with the errors of `create` only if the name is not there.
    fn open_or_create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenOutcome> {
        Err(Errno::ENOSYS)
    }

    /// Creates a regular file with the contents `data`, and closes it. Adds a lookup. Fails like
    /// [`create`](FileSystem::create), [`write`](FileSystem::write) and
    /// [`flush`](FileSystem::flush); after an error of the last two the file is there, with what
    /// was written. [`create_in_calls`](crate::create_in_calls) makes these calls.
    fn create_with(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        data: &[u8],
    ) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// The attributes of `name` in the directory `parent`, without a lookup, for a stat(2) that
    /// needs no inode: instead of [`lookup`](FileSystem::lookup) and
    /// [`forget`](FileSystem::forget). Fails like `lookup`, and with `ESTALE` for a name that has
    /// to be looked up.
    ///
    /// The in-process client calls it for the last name of a path, if the answers of lookups may
    /// not be cached: a file system implements it if an inode costs more than its attributes.
    fn peek(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Attr> {
        Err(Errno::ENOSYS)
    }
}

/// No shortcut at all.
struct NoShortcuts;

impl Shortcuts for NoShortcuts {}

/// The shortcuts of a file system. If it has none, each of them fails with `ENOSYS`.
#[inline]
pub fn shortcuts_of<F: FileSystem + ?Sized>(fs: &F) -> &dyn Shortcuts {
    fs.shortcuts().unwrap_or(&NoShortcuts)
}
