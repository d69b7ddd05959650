//! The macro that forwards the contract.

/// Implements, inside an `impl FileSystem for ..`, every method of the contract as a call of the
/// same method of an inner file system. Methods named after `except` are left to the layer; with
/// `lookup`, so is [`resolve`](crate::FileSystem::resolve), which would bypass it. A new
/// method of the trait needs two lines here and one in [`Method`](crate::layer::Method), and then
/// every layer has it.
///
/// * `delegate!(to inner)` calls `self.inner`.
/// * `delegate!(around inner)` passes each method that has a caller through the layer's own
///   `fn around<T>(&self, method: Method, cx: &Context<'_>, call: impl FnOnce(&F) -> Result<T>)
///   -> Result<T>`. The others (`caps`, `negative_valid_for`, `attached`, `detached`, `figures`, `notes`, `forget`,
///   `failure_domain`, `lifecycle`, `submit`,
///   `setlkw`) call `self.inner` directly, and bypass `around`.
/// * `delegate!(map inner)` passes every argument but the context through the layer's own `fn
///   map<T: MapInos>(&self, argument: T) -> T` (see [`MapInos`](crate::layer::MapInos)).
/// * `delegate!(deref)` calls `**self`, for pointers to file systems, and has no exceptions.
///
/// ```
/// use defuse_fs::*;
///
/// struct Named<F> { inner: F }
///
/// impl<F: FileSystem> FileSystem for Named<F> {
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
        // A layer has the defaults of these, which call its other methods.
        $crate::delegate! { @with [deref self] [] resolve_to_open ResolveToOpen(
            from: $crate::Ino, path: $crate::NormalPath<'_>, args: $crate::OpenArgs)
            -> ($crate::Resolved, ::std::option::Option<$crate::Opened>) }
        $crate::delegate! { @with [deref self] [] lookup_to_open LookupToOpen(
            parent: $crate::Ino, name: $crate::Name<'_>, args: $crate::OpenArgs)
            -> ($crate::Entry, ::std::option::Option<$crate::Opened>) }
        $crate::delegate! { @with [deref self] [] create_with CreateWith(
            parent: $crate::Ino, name: $crate::Name<'_>, node: &$crate::NewNode<'_>, data: &[u8])
            -> $crate::Entry }
    };
    ($how:ident $inner:ident $(, except $($skip:ident),+)?) => {
        $crate::delegate! { @all [$how $inner] [$($($skip)+)?] }
    };

    // ---- the contract, one line a method -------------------------------------------------
    (@all $how:tt $skip:tt) => {
        $crate::delegate! { @bare $how $skip caps() -> $crate::Caps }
        $crate::delegate! { @bare $how $skip
            negative_valid_for(origin: $crate::Origin) -> ::std::time::Duration }
        $crate::delegate! { @bare $how $skip attached(
            origin: $crate::Origin, notify: ::std::sync::Arc<dyn $crate::Notify>) -> () }
        $crate::delegate! { @bare $how $skip
            detached(origin: $crate::Origin) -> $crate::Result<()> }
        $crate::delegate! { @bare $how $skip figures() -> ::std::vec::Vec<$crate::Figure> }
        $crate::delegate! { @bare $how $skip notes() -> ::std::vec::Vec<::std::string::String> }
        $crate::delegate! { @bare $how $skip forget(ino: $crate::Ino, lookups: u64) -> () }
        $crate::delegate! { @bare $how $skip failure_domain(ino: $crate::Ino, name: Option<$crate::Name<'_>>)
            -> ::std::option::Option<$crate::FailureDomain> }
        $crate::delegate! { @bare $how $skip
            lifecycle() -> ::std::option::Option<&dyn $crate::Lifecycle> }
        $crate::delegate! { @bare $how $skip submit(io: $crate::Io) -> () }
        $crate::delegate! { @bare $how $skip setlkw(wait: $crate::LockWait) -> () }
        $crate::delegate! { @with $how $skip
            lookup Lookup(parent: $crate::Ino, name: $crate::Name<'_>) -> $crate::Entry }
        $crate::delegate! { @with $how $skip
            lookup_parent LookupParent(ino: $crate::Ino) -> $crate::Entry }
        $crate::delegate! { @with $how $skip resolve Resolve(
            from: $crate::Ino, path: $crate::NormalPath<'_>) -> $crate::Resolved }
        $crate::delegate! { @with $how $skip
            peek Peek(parent: $crate::Ino, name: $crate::Name<'_>) -> $crate::Attr }
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
            open Open(ino: $crate::Ino, args: $crate::OpenArgs) -> $crate::Opened }
        $crate::delegate! { @with $how $skip create Create(
            parent: $crate::Ino, name: $crate::Name<'_>, node: &$crate::NewNode<'_>,
            args: $crate::OpenArgs) -> ($crate::Entry, $crate::Opened) }
        $crate::delegate! { @with $how $skip tmpfile Tmpfile(
            parent: $crate::Ino, node: &$crate::NewNode<'_>, args: $crate::OpenArgs)
            -> ($crate::Entry, $crate::Opened) }
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
            opendir Opendir(ino: $crate::Ino, flags: $crate::OpenFlags) -> $crate::Opened }
        $crate::delegate! { @with $how $skip readdir Readdir(
            dir: $crate::File, from: u64, out: &mut $crate::DirBuf<'_>) -> () }
        $crate::delegate! { @with $how $skip releasedir Releasedir(dir: $crate::File) -> () }
        $crate::delegate! { @with $how $skip
            fsyncdir Fsyncdir(dir: $crate::File, datasync: bool) -> () }
        $crate::delegate! { @with $how $skip statfs Statfs(ino: $crate::Ino) -> $crate::StatFs }
        $crate::delegate! { @with $how $skip syncfs Syncfs() -> () }
    };

    // ---- what the layer writes itself: macros cannot compare two names, so each has its line
    (@bare $how:tt [caps $($s:ident)*] caps $($sig:tt)*) => {};
    (@bare $how:tt [negative_valid_for $($s:ident)*] negative_valid_for $($sig:tt)*) => {};
    (@bare $how:tt [attached $($s:ident)*] attached $($sig:tt)*) => {};
    (@bare $how:tt [detached $($s:ident)*] detached $($sig:tt)*) => {};
    (@bare $how:tt [figures $($s:ident)*] figures $($sig:tt)*) => {};
    (@bare $how:tt [notes $($s:ident)*] notes $($sig:tt)*) => {};
    (@bare $how:tt [forget $($s:ident)*] forget $($sig:tt)*) => {};
    (@bare $how:tt [failure_domain $($s:ident)*] failure_domain $($sig:tt)*) => {};
    (@bare $how:tt [lifecycle $($s:ident)*] lifecycle $($sig:tt)*) => {};
    (@bare $how:tt [submit $($s:ident)*] submit $($sig:tt)*) => {};
    (@bare $how:tt [setlkw $($s:ident)*] setlkw $($sig:tt)*) => {};
    (@with $how:tt [lookup $($s:ident)*] lookup $($sig:tt)*) => {};
    (@with $how:tt [lookup_parent $($s:ident)*] lookup_parent $($sig:tt)*) => {};
    (@with $how:tt [resolve $($s:ident)*] resolve $($sig:tt)*) => {};
    (@with $how:tt [peek $($s:ident)*] peek $($sig:tt)*) => {};
    // A layer with its own lookup has the defaults of resolve and peek, which would bypass that lookup.
    (@with $how:tt [lookup $($s:ident)*] resolve $($sig:tt)*) => {};
    (@with $how:tt [lookup $($s:ident)*] peek $($sig:tt)*) => {};
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
    (@with [around $inner:ident] [] $name:ident $method:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            self.around($crate::layer::Method::$method, cx, |inner| inner.$name(cx $(, $arg)*))
        }
    };
    (@with [map $inner:ident] [] $name:ident $method:ident($($arg:ident: $ty:ty),*)
        -> $out:ty) => {
        #[inline]
        fn $name(&self, cx: &$crate::Context<'_> $(, $arg: $ty)*) -> $crate::Result<$out> {
            self.$inner.$name(cx $(, self.map($arg))*)
        }
    };
}

#[cfg(test)]
mod tests {
    /// Without this test, a method missing in the macro would get the trait's default in every
    /// layer.
    #[test]
    fn every_method_of_the_contract_is_forwarded() {
        let source = include_str!("../file_system.rs");
        let contract = source.split("#[cfg(test)]").next().unwrap();
        let (table, _) = include_str!("delegate.rs").split_once("// ---- what the layer").unwrap();
        let methods = contract.lines().filter_map(|line| line.strip_prefix("    fn "));
        let names = methods.map(|line| line.split('(').next().unwrap());
        // Their defaults call other methods, which are those of the layer.
        const COMPOSED: [&str; 3] = ["resolve_to_open", "lookup_to_open", "create_with"];
        let names = names.filter(|name| !COMPOSED.contains(name));
        let mut count = 0;
        for name in names {
            let forwarded = [format!(" {name}("), format!(" {name} ")];
            assert!(forwarded.iter().any(|text| table.contains(text)), "{name}");
            count += 1;
        }
        assert_eq!(count, crate::layer::Method::ALL.len() + 11);
    }
}
