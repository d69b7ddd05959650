//! The methods of the contract as values, for layers that treat many methods alike.

macro_rules! methods {
    ($($variant:ident $name:literal $changes:literal,)*;
     $($short:ident $called:literal $alters:literal,)*) => {
        /// A method of [`FileSystem`](crate::FileSystem) that has a caller and can fail, or a
        /// shortcut. [`delegate!`](crate::delegate) passes it to `around`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Method {
            $(#[doc = concat!("[`FileSystem::", $name, "`](crate::FileSystem::", $name, ").")]
            $variant,)*
            /// A method of [`Shortcuts`](crate::Shortcuts).
            Shortcut(Shortcut),
        }

        /// A method of [`Shortcuts`](crate::Shortcuts).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Shortcut {
            $(#[doc = concat!("[`Shortcuts::", $called, "`](crate::Shortcuts::", $called, ").")]
            $short,)*
        }

        impl Method {
            /// Every method, in the order of the traits.
            pub const ALL: &'static [Method] =
                &[$(Method::$variant,)* $(Method::Shortcut(Shortcut::$short),)*];

            /// The name of the method, such as `lookup`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Method::$variant => $name,)*
                    $(Method::Shortcut(Shortcut::$short) => $called,)*
                }
            }

            /// True if the method always changes the file system. Not true for `open`, `ioctl` and
            /// locks, for which it depends on the arguments.
            pub const fn changes(self) -> bool {
                match self {
                    $(Method::$variant => $changes,)*
                    $(Method::Shortcut(Shortcut::$short) => $alters,)*
                }
            }
        }

        impl Shortcut {
            /// Every shortcut, in the order of the trait.
            pub const ALL: &'static [Shortcut] = &[$(Shortcut::$short,)*];
        }
    };
}

methods! {
    Lookup "lookup" false,
    LookupParent "lookup_parent" false,
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
    ;
    Resolve "resolve" false,
    ResolveToOpen "resolve_to_open" false,
    LookupToOpen "lookup_to_open" false,
    OpenOrCreate "open_or_create" true,
    CreateWith "create_with" true,
    Peek "peek" false,
}

impl Method {
    /// True if the method always changes names in a directory.
    pub const fn changes_names(self) -> bool {
        use Method::{Create, Link, Mkdir, Mknod, Rename, Rmdir, Symlink, Unlink};
        match self {
            Mknod | Mkdir | Symlink | Link | Unlink | Rmdir | Rename | Create => true,
            Method::Shortcut(_) => self.changes(),
            _ => false,
        }
    }

    /// Returns the method with this [`name`](Method::name).
    pub fn parse(name: &str) -> Option<Method> {
        Method::ALL.iter().copied().find(|method| method.name() == name)
    }
}
