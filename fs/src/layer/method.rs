//! The methods of the contract as values, for layers that treat many methods alike.

macro_rules! methods {
    ($($variant:ident $name:literal $changes:literal,)*) => {
        /// A method of [`FileSystem`](crate::FileSystem) that has a caller and can fail.
        /// [`delegate!`](crate::delegate) passes it to `around`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Method {
            $(#[doc = concat!("[`FileSystem::", $name, "`](crate::FileSystem::", $name, ").")]
            $variant,)*
        }

        impl Method {
            /// Every method, in the order of the trait.
            pub const ALL: &'static [Method] = &[$(Method::$variant,)*];

            /// The name of the method, such as `lookup`.
            pub const fn name(self) -> &'static str {
                match self { $(Method::$variant => $name,)* }
            }

            /// True if the method always changes the file system. Not true for `open`, `ioctl` and
            /// locks, for which it depends on the arguments.
            pub const fn changes(self) -> bool {
                match self { $(Method::$variant => $changes,)* }
            }
        }
    };
}

methods! {
    Lookup "lookup" false,
    LookupParent "lookup_parent" false,
    Resolve "resolve" false,
    Peek "peek" false,
    Mknod "mknod" true,
    Mkdir "mkdir" true,
    Symlink "symlink" true,
    Link "link" true,
    Unlink "unlink" true,
    Rmdir "rmdir" true,
    Rename "rename" true,
    Readlink "readlink" false,
    Getattr "getattr" false,
    Setattr "setattr" true,
    Access "access" false,
    Setxattr "setxattr" true,
    Getxattr "getxattr" false,
    Listxattr "listxattr" false,
    Removexattr "removexattr" true,
    Open "open" false,
    Create "create" true,
    Tmpfile "tmpfile" true,
    Read "read" false,
    Write "write" true,
    Flush "flush" false,
    Release "release" false,
    Fsync "fsync" false,
    Fallocate "fallocate" true,
    Lseek "lseek" false,
    CopyFileRange "copy_file_range" true,
    Ioctl "ioctl" false,
    Poll "poll" false,
    Bmap "bmap" false,
    Getlk "getlk" false,
    Setlk "setlk" false,
    Opendir "opendir" false,
    Readdir "readdir" false,
    Releasedir "releasedir" false,
    Fsyncdir "fsyncdir" false,
    Statfs "statfs" false,
    Syncfs "syncfs" false,
}

impl Method {
    /// True if the method always changes names in a directory.
    pub const fn changes_names(self) -> bool {
        use Method::{Create, Link, Mkdir, Mknod, Rename, Rmdir, Symlink, Unlink};
        matches!(self, Mknod | Mkdir | Symlink | Link | Unlink | Rmdir | Rename | Create)
    }

    /// Returns the method with this [`name`](Method::name).
    pub fn parse(name: &str) -> Option<Method> {
        Method::ALL.iter().copied().find(|method| method.name() == name)
    }
}
