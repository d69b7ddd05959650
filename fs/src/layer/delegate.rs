//! The macro that forwards the contract.

/// Implements, inside an `impl FileSystem for ..`, every method of the contract as a call of the
/// same method of an inner file system. Methods named after `except` are left to the layer. A new
/// method of the trait needs two lines here and one in [`Method`](crate::layer::Method), and then
/// every layer implements it.
///
/// * `delegate!(to inner)` calls `self.inner`.
/// * `delegate!(intercept inner)` passes each method that has a caller through the layer's own `fn
///   intercept<T>(&self, method: Method, cx: &Context<'_>, call: impl FnOnce(&F) -> Result<T>) ->
///   Result<T>`. The others (`caps`, `negative_lifetime`, `attach`, `detach`, `figures`, `notes`,
///   `forget`, `failure_domain`, `lifecycle`, `submit`, `setlkw`) call `self.inner` directly, and
///   bypass `intercept`.
/// * `delegate!(map inner)` passes every argument but the context through the layer's own `fn
///   map<T: MapInos>(&self, argument: T) -> T` (see [`MapInos`](crate::layer::MapInos)).
/// * `delegate!(deref)` calls `**self`, for pointers to file systems, and has no exceptions.
///
/// [`shortcuts`](crate::FileSystem::shortcuts) is forwarded, too, unless the shortcuts of the inner
/// file system would bypass the layer: one of `intercept` or `map`, or with a `lookup`, `open`,
/// `create`, `write`, `flush` or `release` of its own. Such a layer has the trait's default, and
/// hides them. It offers those that it knows by a `shortcuts` of its own that returns `Some(self)`,
/// and, inside an `impl Shortcuts for ..`, by `delegate!(to inner, only resolve, peek)`, or the
/// same with `intercept` or `map`. Only the named shortcuts are forwarded.
///
/// ```
/// use defuse_fs::*;
///
/// struct WithoutLinks<F> { inner: F }
///
/// impl<F: FileSystem> FileSystem for WithoutLinks<F> {
///     delegate!(to inner, except link);
///
///     fn link(&self, _: &Context<'_>, _: Ino, _: Ino, _: Name<'_>) -> Result<Entry> {
///         Err(Errno::EPERM)
///     }
/// }
/// ```
#[macro_export]
macro_rules! delegate {
    (deref) => {
        $crate::delegate! { @all [deref self] [] }
    };
    ($how:ident $inner:ident, only $($shortcut:ident),+) => {
        $($crate::delegate! { @only [$how $inner] $shortcut })+
    };
    ($how:ident $inner:ident $(, except $($skip:ident),+)?) => {
        $crate::delegate! { @all [$how $inner] [$($($skip)+)?] }
    };

    // ---- the contract, one line a method -------------------------------------------------
    (@all $how:tt $skip:tt) => {
        $crate::delegate! { @bare $how $skip caps() -> $crate::Caps }
        $crate::delegate! { @bare $how $skip
            negative_lifetime(origin: $crate::Origin) -> ::std::time::Duration }
        $crate::delegate! { @bare $how $skip attach(
            origin: $crate::Origin, notify: ::std::sync::Arc<dyn $crate::Notify>) -> () }
        $crate::delegate! { @bare $how $skip
            detach(origin: $crate::Origin) -> $crate::Result<()> }
        $crate::delegate! { @bare $how $skip figures() -> ::std::vec::Vec<$crate::Figure> }
        $crate::delegate! { @bare $how $skip notes() -> ::std::vec::Vec<::std::string::String> }
        $crate::delegate! { @bare $how $skip forget(ino: $crate::Ino, lookups: u64) -> () }
        $crate::delegate! { @bare $how $skip failure_domain(ino: $crate::Ino,
            name: Option<$crate::Name<'_>>)
            -> ::std::option::Option<$crate::FailureDomain> }
        $crate::delegate! { @bare $how $skip
            lifecycle() -> ::std::option::Option<&dyn $crate::Lifecycle> }
        $crate::delegate! { @bare $how $skip
            shortcuts() -> ::std::option::Option<&dyn $crate::Shortcuts> }
        $crate::delegate! { @bare $how $skip submit(io: $crate::Io) -> () }
        $crate::delegate! { @bare $how $skip setlkw(wait: $crate::LockWait) -> () }
        $crate::delegate! { @with $how $skip
            lookup Lookup(parent: $crate::Ino, name: $crate::Name<'_>) -> $crate::Entry }
        $crate::delegate! { @with $how $skip
            lookup_parent LookupParent(ino: $crate::Ino) -> $crate::Entry }
        $crate::delegate! { @with $how $skip mknod Mknod(
            parent: $crate::Ino, name: $crate::Name<'_>, node: &$crate::NewNode<'_>)
            -> $crate::Entry }
        $crate::delegate! { @with $how $skip mkdir Mkdir(
            parent: $crate::Ino, name: $crate::Name<'_>, node: &$crate::NewNode<'_>)
            -> $crate::Entry }
        $crate::delegate! { @with $how $skip symlink Symlink(
            parent: $crate::Ino, name: $crate::Name<'_>, target: &[u8],
            node: &$crate::NewNode<'_>) -> $crate::Entry }
        $crate::delegate! { @with $how $skip link Link(
            ino: $crate::Ino, parent: $crate::Ino, name: $crate::Name<'_>) -> $crate::Entry }
        $crate::delegate! { @with $how $skip
            unlink Unlink(parent: $crate::Ino, name: $crate::Name<'_>) -> () }
        $crate::delegate! { @with $how $skip
            rmdir Rmdir(parent: $crate::Ino, name: $crate::Name<'_>) -> () }
        $crate::delegate! { @with $how $skip rename Rename(
            from: ($crate::Ino, $crate::Name<'_>), to: ($crate::Ino, $crate::Name<'_>),
            flags: $crate::RenameFlags) -> () }
        $crate::delegate! { @with $how $skip
            readlink Readlink(ino: $crate::Ino) -> ::std::vec::Vec<u8> }
        $crate::delegate! { @with $how $skip getattr Getattr(
            ino: $crate::Ino, fh: ::std::option::Option<$crate::Fh>) -> $crate::Attr }
        $crate::delegate! { @with $how $skip setattr Setattr(
            ino: $crate::Ino, fh: ::std::option::Option<$crate::Fh>, set: &$crate::SetAttr)
            -> $crate::Attr }
        $crate::delegate! { @with $how $skip
            access Access(ino: $crate::Ino, mask: $crate::AccessMask) -> () }
        $crate::delegate! { @with $how $skip setxattr Setxattr(
            ino: $crate::Ino, name: $crate::XattrName<'_>, value: &[u8],
            flags: $crate::SetXattrFlags) -> () }
        $crate::delegate! { @with $how $skip getxattr Getxattr(
            ino: $crate::Ino, name: $crate::XattrName<'_>, room: usize) -> $crate::Xattr }
        $crate::delegate! { @with $how $skip
            listxattr Listxattr(ino: $crate::Ino, room: usize) -> $crate::Xattr }
        $crate::delegate! { @with $how $skip
            removexattr Removexattr(ino: $crate::Ino, name: $crate::XattrName<'_>) -> () }
        $crate::delegate! { @with $how $skip
            open Open(ino: $crate::Ino, args: $crate::OpenArgs) -> $crate::OpenReply }
        $crate::delegate! { @with $how $skip create Create(
            parent: $crate::Ino, name: $crate::Name<'_>, node: &$crate::NewNode<'_>,
            args: $crate::OpenArgs) -> ($crate::Entry, $crate::OpenReply) }
        $crate::delegate! { @with $how $skip tmpfile Tmpfile(
            parent: $crate::Ino, node: &$crate::NewNode<'_>, args: $crate::OpenArgs)
            -> ($crate::Entry, $crate::OpenReply) }
        $crate::delegate! { @with $how $skip read Read(
            file: $crate::File, args: $crate::ReadArgs, out: &mut $crate::ReadBuf<'_>) -> () }
        $crate::delegate! { @with $how $skip write Write(
            file: $crate::File, args: $crate::WriteArgs, data: &mut $crate::WriteBuf<'_>)
            -> usize }
        $crate::delegate! { @with $how $skip
            flush Flush(file: $crate::File, owner: $crate::LockOwner) -> () }
        $crate::delegate! { @with $how $skip
            release Release(file: $crate::File, args: $crate::ReleaseArgs) -> () }
        $crate::delegate! { @with $how $skip
            fsync Fsync(file: $crate::File, datasync: bool) -> () }
        $crate::delegate! { @with $how $skip
            fallocate Fallocate(file: $crate::File, range: $crate::Fallocate) -> () }
        $crate::delegate! { @with $how $skip lseek Lseek(
            file: $crate::File, offset: u64, whence: $crate::Whence) -> u64 }
        $crate::delegate! { @with $how $skip
            copy_file_range CopyFileRange(copy: &$crate::CopyRange) -> u64 }
        $crate::delegate! { @with $how $skip ioctl Ioctl(
            file: $crate::File, args: &$crate::IoctlArgs<'_>) -> $crate::IoctlReply }
        $crate::delegate! { @with $how $skip poll Poll(
            file: $crate::File, events: u32,
            wake: ::std::option::Option<$crate::PollHandle>) -> u32 }
        $crate::delegate! { @with $how $skip
            bmap Bmap(ino: $crate::Ino, block_size: u32, index: u64) -> u64 }
        $crate::delegate! { @with $how $skip getlk Getlk(
            file: $crate::File, request: &$crate::LockRequest)
            -> ::std::option::Option<$crate::Lock> }
        $crate::delegate! { @with $how $skip
            setlk Setlk(file: $crate::File, request: &$crate::LockRequest) -> () }
        $crate::delegate! { @with $how $skip
            opendir Opendir(ino: $crate::Ino, flags: $crate::OpenFlags) -> $crate::OpenReply }
        $crate::delegate! { @with $how $skip readdir Readdir(
            dir: $crate::File, from: u64, out: &mut $crate::DirBuf<'_>) -> () }
        $crate::delegate! { @with $how $skip releasedir Releasedir(dir: $crate::File) -> () }
        $crate::delegate! { @with $how $skip
            fsyncdir Fsyncdir(dir: $crate::File, datasync: bool) -> () }
        $crate::delegate! { @with $how $skip statfs Statfs(ino: $crate::Ino) -> $crate::StatFs }
        $crate::delegate! { @with $how $skip syncfs Syncfs() -> () }
    };

    // ---- the shortcuts, one line each ---------------------------------------------------
    (@only $how:tt resolve) => {
        $crate::delegate! { @short $how resolve Resolve(
            from: $crate::Ino, path: $crate::NormalPath<'_>) -> $crate::PathResolution }
    };
    (@only $how:tt resolve_to_open) => {
        $crate::delegate! { @short $how resolve_to_open ResolveToOpen(
            from: $crate::Ino, path: $crate::NormalPath<'_>, args: $crate::OpenArgs)
            -> ($crate::PathResolution, ::std::option::Option<$crate::OpenReply>) }
    };
    (@only $how:tt lookup_to_open) => {
        $crate::delegate! { @short $how lookup_to_open LookupToOpen(
            parent: $crate::Ino, name: $crate::Name<'_>, args: $crate::OpenArgs)
            -> ($crate::Entry, ::std::option::Option<$crate::OpenReply>) }
    };
    (@only $how:tt create_with) => {
        $crate::delegate! { @short $how create_with CreateWith(
            parent: $crate::Ino, name: $crate::Name<'_>, node: &$crate::NewNode<'_>, data: &[u8])
            -> $crate::Entry }
    };
    (@only $how:tt open_or_create) => {
        $crate::delegate! { @short $how open_or_create OpenOrCreate(
            parent: $crate::Ino, name: $crate::Name<'_>, node: &$crate::NewNode<'_>,
            args: $crate::OpenArgs)
            -> $crate::OpenOutcome }
    };
    (@only $how:tt peek) => {
        $crate::delegate! { @short $how
            peek Peek(parent: $crate::Ino, name: $crate::Name<'_>) -> $crate::Attr }
    };

    // ---- what the layer writes itself: macros cannot compare two names, so each has its line
    (@bare $how:tt [caps $($s:ident)*] caps $($sig:tt)*) => {};
    (@bare $how:tt [negative_lifetime $($s:ident)*] negative_lifetime $($sig:tt)*) => {};
    (@bare $how:tt [attach $($s:ident)*] attach $($sig:tt)*) => {};
    (@bare $how:tt [detach $($s:ident)*] detach $($sig:tt)*) => {};
    (@bare $how:tt [figures $($s:ident)*] figures $($sig:tt)*) => {};
    (@bare $how:tt [notes $($s:ident)*] notes $($sig:tt)*) => {};
    (@bare $how:tt [forget $($s:ident)*] forget $($sig:tt)*) => {};
    (@bare $how:tt [failure_domain $($s:ident)*] failure_domain $($sig:tt)*) => {};
    (@bare $how:tt [lifecycle $($s:ident)*] lifecycle $($sig:tt)*) => {};
    (@bare $how:tt [shortcuts $($s:ident)*] shortcuts $($sig:tt)*) => {};
    // A shortcut can stand for these methods, and would bypass the layer's methods.
    (@bare $how:tt [lookup $($s:ident)*] shortcuts $($sig:tt)*) => {};
    (@bare $how:tt [open $($s:ident)*] shortcuts $($sig:tt)*) => {};
    (@bare $how:tt [create $($s:ident)*] shortcuts $($sig:tt)*) => {};
    (@bare $how:tt [write $($s:ident)*] shortcuts $($sig:tt)*) => {};
    (@bare $how:tt [flush $($s:ident)*] shortcuts $($sig:tt)*) => {};
    (@bare $how:tt [release $($s:ident)*] shortcuts $($sig:tt)*) => {};
    (@bare [intercept $inner:ident] $skip:tt shortcuts $($sig:tt)*) => {};
    (@bare [map $inner:ident] $skip:tt shortcuts $($sig:tt)*) => {};
    (@bare $how:tt [submit $($s:ident)*] submit $($sig:tt)*) => {};
    (@bare $how:tt [setlkw $($s:ident)*] setlkw $($sig:tt)*) => {};
    (@with $how:tt [lookup $($s:ident)*] lookup $($sig:tt)*) => {};
    (@with $how:tt [lookup_parent $($s:ident)*] lookup_parent $($sig:tt)*) => {};
    (@with $how:tt [mknod $($s:ident)*] mknod $($sig:tt)*) => {};
    (@with $how:tt [mkdir $($s:ident)*] mkdir $($sig:tt)*) => {};
    (@with $how:tt [symlink $($s:ident)*] symlink $($sig:tt)*) => {};
    (@with $how:tt [link $($s:ident)*] link $($sig:tt)*) => {};
    (@with $how:tt [unlink $($s:ident)*] unlink $($sig:tt)*) => {};
    (@with $how:tt [rmdir $($s:ident)*] rmdir $($sig:tt)*) => {};
    (@with $how:tt [rename $($s:ident)*] rename $($sig:tt)*) => {};
    (@with $how:tt [readlink $($s:ident)*] readlink $($sig:tt)*) => {};
    (@with $how:tt [getattr $($s:ident)*] getattr $($sig:tt)*) => {};
    (@with $how:tt [setattr $($s:ident)*] setattr $($sig:tt)*) => {};
    (@with $how:tt [access $($s:ident)*] access $($sig:tt)*) => {};
    (@with $how:tt [setxattr $($s:ident)*] setxattr $($sig:tt)*) => {};
    (@with $how:tt [getxattr $($s:ident)*] getxattr $($sig:tt)*) => {};
    (@with $how:tt [listxattr $($s:ident)*] listxattr $($sig:tt)*) => {};
    (@with $how:tt [removexattr $($s:ident)*] removexattr $($sig:tt)*) => {};
    (@with $how:tt [open $($s:ident)*] open $($sig:tt)*) => {};
    (@with $how:tt [create $($s:ident)*] create $($sig:tt)*) => {};
    (@with $how:tt [tmpfile $($s:ident)*] tmpfile $($sig:tt)*) => {};
    (@with $how:tt [read $($s:ident)*] read $($sig:tt)*) => {};
    (@with $how:tt [write $($s:ident)*] write $($sig:tt)*) => {};
    (@with $how:tt [flush $($s:ident)*] flush $($sig:tt)*) => {};
    (@with $how:tt [release $($s:ident)*] release $($sig:tt)*) => {};
    (@with $how:tt [fsync $($s:ident)*] fsync $($sig:tt)*) => {};
    (@with $how:tt [fallocate $($s:ident)*] fallocate $($sig:tt)*) => {};
    (@with $how:tt [lseek $($s:ident)*] lseek $($sig:tt)*) => {};
    (@with $how:tt [copy_file_range $($s:ident)*] copy_file_range $($sig:tt)*) => {};
    (@with $how:tt [ioctl $($s:ident)*] ioctl $($sig:tt)*) => {};
    (@with $how:tt [poll $($s:ident)*] poll $($sig:tt)*) => {};
    (@with $how:tt [bmap $($s:ident)*] bmap $($sig:tt)*) => {};
    (@with $how:tt [getlk $($s:ident)*] getlk $($sig:tt)*) => {};
    (@with $how:tt [setlk $($s:ident)*] setlk $($sig:tt)*) => {};
    (@with $how:tt [opendir $($s:ident)*] opendir $($sig:tt)*) => {};
    (@with $how:tt [readdir $($s:ident)*] readdir $($sig:tt)*) => {};
    (@with $how:tt [releasedir $($s:ident)*] releasedir $($sig:tt)*) => {};
    (@with $how:tt [fsyncdir $($s:ident)*] fsyncdir $($sig:tt)*) => {};
    (@with $how:tt [statfs $($s:ident)*] statfs $($sig:tt)*) => {};
    (@with $how:tt [syncfs $($s:ident)*] syncfs $($sig:tt)*) => {};
    (@$kind:ident $how:tt [$other:ident $($s:ident)*] $($sig:tt)*) => {
        $crate::delegate! { @$kind $how [$($s)*] $($sig)* }
    };

    // ---- what is forwarded ---------------------------------------------------------------
    (@bare [deref $inner:ident] [] $name:ident($($arg:ident: $ty:ty),*) -> $out:ty) => {
        #[inline]
        fn $name(&self $(, $arg: $ty)*) -> $out {
            (**self).$name($($arg),*)
        }
    };
    (@bare [map $inner:ident] [] $name:ident($($arg:ident: $ty:ty),*) -> $out:ty) => {
        #[inline]
        fn $name(&self $(, $arg: $ty)*) -> $out {
            self.$inner.$name($(self.map($arg)),*)
        }
    };
    (@bare [$how:ident $inner:ident] [] $name:ident($($arg:ident: $ty:ty),*) -> $out:ty) => {
        #[inline]
        fn $name(&self $(, $arg: $ty)*) -> $out {
            self.$inner.$name($($arg),*)
        }
    };
    (@with [deref $inner:ident] [] $name:ident $method:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            (**self).$name(cx $(, $arg)*)
        }
    };
    (@with [to $inner:ident] [] $name:ident $method:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            self.$inner.$name(cx $(, $arg)*)
        }
    };
    (@with [intercept $inner:ident] [] $name:ident $method:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            self.intercept($crate::layer::Method::$method, cx, |inner| inner.$name(cx $(, $arg)*))
        }
    };
    (@with [map $inner:ident] [] $name:ident $method:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            self.$inner.$name(cx $(, self.map($arg))*)
        }
    };
    (@short [to $inner:ident] $name:ident $shortcut:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            $crate::shortcuts_of(&self.$inner).$name(cx $(, $arg)*)
        }
    };
    (@short [intercept $inner:ident] $name:ident $shortcut:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            let method = $crate::layer::Method::Shortcut($crate::layer::Shortcut::$shortcut);
            self.intercept(method, cx, |inner| $crate::shortcuts_of(inner).$name(cx $(, $arg)*))
        }
    };
    (@short [map $inner:ident] $name:ident $shortcut:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            $crate::shortcuts_of(&self.$inner).$name(cx $(, self.map($arg))*)
        }
    };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::layer::testing::{self, cx, name, node};
    use crate::layer::{Method, Shortcut};
    use crate::*;

    fn methods(source: &'static str) -> impl Iterator<Item = &'static str> {
        let contract = source.split("#[cfg(test)]").next().unwrap();
        let methods = contract.lines().filter_map(|line| line.strip_prefix("    fn "));
        methods.map(|line| line.split('(').next().unwrap())
    }

    /// Without this test, a method missing in the macro would get the trait's default in every
    /// layer.
    #[test]
    fn every_method_of_the_contract_is_forwarded() {
        let (table, _) = include_str!("delegate.rs").split_once("// ---- the shortcuts").unwrap();
        let mut count = 0;
        for name in methods(include_str!("../file_system.rs")) {
            let forwarded = [format!(" {name}("), format!(" {name} ")];
            assert!(forwarded.iter().any(|text| table.contains(text)), "{name}");
            count += 1;
        }
        assert_eq!(count, Method::ALL.len() - Shortcut::ALL.len() + 12);
    }

    #[test]
    fn every_shortcut_has_a_name_and_can_be_forwarded() {
        let table = include_str!("delegate.rs");
        let shortcuts: Vec<_> = methods(include_str!("../shortcuts.rs")).collect();
        for name in &shortcuts {
            assert!(table.contains(&format!("(@only $how:tt {name}) =>")), "{name}");
        }
        let named: Vec<_> =
            Shortcut::ALL.iter().map(|shortcut| Method::Shortcut(*shortcut).name()).collect();
        assert_eq!(named, shortcuts);
    }

    /// Counts the calls of all shortcuts.
    #[derive(Default)]
    struct Quick(AtomicU32);

    impl Quick {
        fn count<T>(&self) -> Result<T> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Err(Errno::EIO)
        }

        fn take_count(&self) -> u32 {
            self.0.swap(0, Ordering::Relaxed)
        }
    }

    impl FileSystem for Quick {
        fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
            Err(Errno::EPERM)
        }
        fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
            Err(Errno::EPERM)
        }
        fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
            Err(Errno::EPERM)
        }
        fn shortcuts(&self) -> Option<&dyn Shortcuts> {
            Some(self)
        }
    }

    #[rustfmt::skip]
    impl Shortcuts for Quick {
        fn resolve(&self, _: &Context<'_>, _: Ino, _: NormalPath<'_>) -> Result<PathResolution> {
            self.count()
        }
        fn resolve_to_open(&self, _: &Context<'_>, _: Ino, _: NormalPath<'_>,
            _: OpenArgs) -> Result<(PathResolution, Option<OpenReply>)> {
            self.count()
        }
        fn lookup_to_open(&self, _: &Context<'_>, _: Ino, _: Name<'_>,
            _: OpenArgs) -> Result<(Entry, Option<OpenReply>)> {
            self.count()
        }
        fn create_with(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>,
            _: &[u8]) -> Result<Entry> {
            self.count()
        }
        fn open_or_create(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>,
            _: OpenArgs) -> Result<OpenOutcome> {
            self.count()
        }
        fn peek(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Attr> { self.count() }
    }

    /// Takes every shortcut, and returns their errors.
    fn take(fs: &dyn FileSystem) -> [Errno; 6] {
        let (cx, of, args) = (cx(), shortcuts_of(fs), OpenArgs::default());
        let (at, name) = (Ino::ROOT, name("a"));
        [
            of.resolve(&cx, at, name.into()).unwrap_err(),
            of.resolve_to_open(&cx, at, name.into(), args).unwrap_err(),
            of.lookup_to_open(&cx, at, name, args).unwrap_err(),
            of.create_with(&cx, at, name, &node(), b"x").unwrap_err(),
            of.open_or_create(&cx, at, name, &node(), args).unwrap_err(),
            of.peek(&cx, at, name).unwrap_err(),
        ]
    }

    /// A layer: `delegate!(to ..)` with these exceptions, and methods that it has instead.
    macro_rules! layer {
        ($name:ident($($except:tt)*) { $($method:item)* }) => {
            struct $name<F>(Inner<F>);
            impl<F: FileSystem> std::ops::Deref for $name<F> {
                type Target = Inner<F>;
                fn deref(&self) -> &Inner<F> {
                    &self.0
                }
            }
            impl<F: FileSystem> FileSystem for $name<F> {
                delegate!(to inner $($except)*);
                $($method)*
            }
        };
    }

    struct Inner<F> {
        inner: F,
    }

    layer!(All() {});
    layer!(Reads(, except caps) { fn caps(&self) -> Caps { Caps::default() } });
    layer!(Looks(, except forget, lookup) {
        fn forget(&self, _: Ino, _: u64) {}
        fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
            Err(Errno::ENOENT)
        }
    });
    layer!(Opens(, except open) {
        fn open(&self, _: &Context<'_>, _: Ino, _: OpenArgs) -> Result<OpenReply> {
            Err(Errno::ENOENT)
        }
    });
    layer!(Ends(, except release) {
        fn release(&self, _: &Context<'_>, _: File, _: ReleaseArgs) -> Result<()> { Ok(()) }
    });

    #[test]
    fn shortcuts_do_not_bypass_a_layer() {
        assert_eq!(take(&*testing::tree()), [Errno::ENOSYS; 6], "a file system without shortcuts");
        let fs = std::sync::Arc::new(Quick::default());
        let through: [&dyn FileSystem; 4] = [
            &fs,
            &All(Inner { inner: &*fs }),
            &Box::new(&fs),
            &Reads(Inner { inner: All(Inner { inner: &fs }) }),
        ];
        for layer in through {
            assert_eq!((take(layer), fs.take_count()), ([Errno::EIO; 6], 6));
        }
        let inner = || Inner { inner: &*fs };
        let hidden: [&dyn FileSystem; 3] = [&Looks(inner()), &Opens(inner()), &Ends(inner())];
        for layer in hidden {
            assert!(layer.shortcuts().is_none());
            assert_eq!((take(layer), fs.take_count()), ([Errno::ENOSYS; 6], 0));
        }
    }

    /// Each of the layers here passes on the shortcuts that it names, and no others.
    #[test]
    fn layers_pass_the_shortcuts_on_that_they_know() {
        use crate::layer::{
            FaultLayer, LockingLayer, ReadOnlyLayer, SubdirLayer, SynchronousLayer,
        };
        let fs = std::sync::Arc::new(Quick::default());
        let layers: [Box<dyn FileSystem>; 5] = [
            Box::new(FaultLayer::new(fs.clone(), 1)),
            Box::new(LockingLayer::new(fs.clone())),
            Box::new(ReadOnlyLayer::new(fs.clone())),
            Box::new(SubdirLayer::new(fs.clone(), Caller::default(), []).unwrap()),
            Box::new(SynchronousLayer::new(fs.clone(), false)),
        ];
        for layer in layers {
            let [resolve, _, _, create_with, _, peek] = take(&*layer);
            assert_eq!([resolve, peek, create_with], [Errno::EIO, Errno::EIO, Errno::ENOSYS]);
            // The default of one resolves.
            assert_eq!(fs.take_count(), 3);
        }
    }
}
