//! The functions of libgfapi, loaded when the first volume is opened.
//!
//! Each function is loaded in the version whose types are declared here: libgfapi keeps older
//! versions of a name with other arguments. A program of this project thus starts without the
//! library.

use std::ffi::{CStr, c_char, c_int, c_long, c_uchar, c_ulong, c_void};
use std::sync::OnceLock;

use libc::{dirent64, flock, gid_t, mode_t, off_t, size_t, ssize_t, stat, statvfs, uid_t};

/// `struct glfs`: a connection to a volume.
#[repr(C)]
pub struct Glfs(c_void);

/// `struct glfs_fd`: an open file or directory.
#[repr(C)]
pub struct GlfsFd(c_void);

/// `struct glfs_object`: a reference to an inode.
#[repr(C)]
pub struct GlfsObject(c_void);

/// `struct glfs_xreaddirp_stat`: the data of an entry in a listing.
#[repr(C)]
pub struct GlfsXstat(c_void);

/// `struct glfs_stat`. This crate never reads it.
#[repr(C)]
pub struct GlfsStat(c_void);

/// `struct glfs_upcall`: a message of a server.
#[repr(C)]
pub struct GlfsUpcall(c_void);

/// `struct glfs_upcall_inode`: the content of a message about an inode.
#[repr(C)]
pub struct GlfsUpcallInode(c_void);

/// `glfs_io_cbk`: the end of an asynchronous operation.
// SAFETY: a type; the function gets the pointer that the operation was started with.
pub type IoCallback =
    unsafe extern "C" fn(*mut GlfsFd, ssize_t, *mut GlfsStat, *mut GlfsStat, *mut c_void);

/// The file of the library.
const FILE: &CStr = c"libgfapi.so.0";

/// The reason why the library cannot be used, with the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingLibrary(pub String);

macro_rules! functions {
    ($($name:ident $version:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that <glusterfs/api/glfs.h> and glfs-handles.h declare.
        pub struct GfapiLibrary {
            // SAFETY: types; each call states why its arguments are valid.
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl GfapiLibrary {
            fn load(file: &CStr) -> Result<GfapiLibrary, MissingLibrary> {
                // SAFETY: the name ends with NUL, and loading the library runs only its
                // initializers, as in any program that links it.
                let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err(MissingLibrary(format!(
                        "{} cannot be loaded ({}): install the Debian package libgfapi0 \
                         (glusterfs-libs or libgfapi elsewhere)",
                        file.to_string_lossy(), failure(),
                    )));
                }
                Ok(GfapiLibrary {$(
                    $name: {
                        let name = concat!(stringify!($name), "\0");
                        let version = concat!("GFAPI_", $version, "\0");
                        // SAFETY: the handle comes from dlopen, and both texts end with NUL.
                        let found = unsafe {
                            libc::dlvsym(library, name.as_ptr().cast(), version.as_ptr().cast())
                        };
                        if found.is_null() {
                            return Err(MissingLibrary(format!(
                                "{} has no {} of version {}: install a newer libgfapi (GlusterFS 6.6 or later)",
                                file.to_string_lossy(), stringify!($name), $version,
                            )));
                        }
                        // SAFETY: this version of the function has this type, see the headers.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                // SAFETY: a type.
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(found)
                        }
                    },
                )*})
            }
        }
    };
}

functions! {
    glfs_new "3.4.0" (*const c_char) -> *mut Glfs;
    glfs_set_volfile "3.4.0" (*mut Glfs, *const c_char) -> c_int;
    glfs_set_volfile_server "3.4.0" (*mut Glfs, *const c_char, *const c_char, c_int) -> c_int;
    glfs_set_logging "3.4.0" (*mut Glfs, *const c_char, c_int) -> c_int;
    glfs_set_xlator_option "3.4.0" (*mut Glfs, *const c_char, *const c_char, *const c_char) -> c_int;
    glfs_init "3.4.0" (*mut Glfs) -> c_int;
    glfs_fini "3.4.0" (*mut Glfs) -> c_int;
    glfs_setfsuid "3.4.2" (uid_t) -> c_int;
    glfs_setfsgid "3.4.2" (gid_t) -> c_int;
    glfs_setfsgroups "3.4.2" (size_t, *const gid_t) -> c_int;
    glfs_free "3.7.16" (*mut c_void);

    glfs_h_lookupat "3.7.4" (*mut Glfs, *mut GlfsObject, *const c_char, *mut stat, c_int) -> *mut GlfsObject;
    glfs_h_create_from_handle "3.4.2" (*mut Glfs, *mut c_uchar, c_int, *mut stat) -> *mut GlfsObject;
    glfs_h_extract_handle "3.4.2" (*mut GlfsObject, *mut c_uchar, c_int) -> ssize_t;
    glfs_h_close "3.4.2" (*mut GlfsObject) -> c_int;
    glfs_h_mkdir "3.4.2" (*mut Glfs, *mut GlfsObject, *const c_char, mode_t, *mut stat) -> *mut GlfsObject;
    glfs_h_mknod "3.4.2" (*mut Glfs, *mut GlfsObject, *const c_char, mode_t, c_ulong, *mut stat)
        -> *mut GlfsObject;
    glfs_h_symlink "3.4.2" (*mut Glfs, *mut GlfsObject, *const c_char, *const c_char, *mut stat)
        -> *mut GlfsObject;
    glfs_h_creat_open "6.6" (*mut Glfs, *mut GlfsObject, *const c_char, c_int, mode_t, *mut stat,
        *mut *mut GlfsFd) -> *mut GlfsObject;
    glfs_h_unlink "3.4.2" (*mut Glfs, *mut GlfsObject, *const c_char) -> c_int;
    glfs_h_link "3.4.2" (*mut Glfs, *mut GlfsObject, *mut GlfsObject, *const c_char) -> c_int;
    glfs_h_rename "3.4.2" (*mut Glfs, *mut GlfsObject, *const c_char, *mut GlfsObject, *const c_char) -> c_int;
    glfs_h_readlink "3.4.2" (*mut Glfs, *mut GlfsObject, *mut c_char, size_t) -> c_int;
    glfs_h_stat "3.4.2" (*mut Glfs, *mut GlfsObject, *mut stat) -> c_int;
    glfs_h_setattrs "3.4.2" (*mut Glfs, *mut GlfsObject, *mut stat, c_int) -> c_int;
    glfs_h_anonymous_read "3.7.0" (*mut Glfs, *mut GlfsObject, *const c_void, size_t, off_t) -> ssize_t;
    glfs_h_truncate "3.4.2" (*mut Glfs, *mut GlfsObject, off_t) -> c_int;
    glfs_h_statfs "3.7.0" (*mut Glfs, *mut GlfsObject, *mut statvfs) -> c_int;
    glfs_h_getxattrs "3.5.1" (*mut Glfs, *mut GlfsObject, *const c_char, *mut c_void, size_t) -> c_int;
    glfs_h_setxattrs "3.5.0" (*mut Glfs, *mut GlfsObject, *const c_char, *const c_void, size_t, c_int) -> c_int;
    glfs_h_removexattrs "3.5.1" (*mut Glfs, *mut GlfsObject, *const c_char) -> c_int;
    glfs_h_open "3.4.2" (*mut Glfs, *mut GlfsObject, c_int) -> *mut GlfsFd;
    glfs_h_opendir "3.4.2" (*mut Glfs, *mut GlfsObject) -> *mut GlfsFd;

    glfs_h_poll_upcall "3.7.16" (*mut Glfs, *mut *mut GlfsUpcall) -> c_int;
    glfs_upcall_get_reason "3.7.16" (*mut GlfsUpcall) -> c_int;
    glfs_upcall_get_event "3.7.16" (*mut GlfsUpcall) -> *mut GlfsUpcallInode;
    glfs_upcall_inode_get_flags "3.7.16" (*mut GlfsUpcallInode) -> u64;
    glfs_upcall_inode_get_object "3.7.16" (*mut GlfsUpcallInode) -> *mut GlfsObject;
    glfs_upcall_inode_get_pobject "3.7.16" (*mut GlfsUpcallInode) -> *mut GlfsObject;
    glfs_upcall_inode_get_oldpobject "3.7.16" (*mut GlfsUpcallInode) -> *mut GlfsObject;

    glfs_open "3.4.0" (*mut Glfs, *const c_char, c_int) -> *mut GlfsFd;
    glfs_close "3.4.0" (*mut GlfsFd) -> c_int;
    glfs_closedir "3.4.0" (*mut GlfsFd) -> c_int;
    glfs_dup "3.4.0" (*mut GlfsFd) -> *mut GlfsFd;
    glfs_pread "6.0" (*mut GlfsFd, *mut c_void, size_t, off_t, c_int, *mut GlfsStat) -> ssize_t;
    glfs_pwrite "6.0" (*mut GlfsFd, *const c_void, size_t, off_t, c_int, *mut GlfsStat, *mut GlfsStat) -> ssize_t;
    glfs_pread_async "6.0" (*mut GlfsFd, *mut c_void, size_t, off_t, c_int, IoCallback, *mut c_void) -> c_int;
    glfs_pwrite_async "6.0" (*mut GlfsFd, *const c_void, c_int, off_t, c_int, IoCallback, *mut c_void) -> c_int;
    glfs_fsync_async "6.0" (*mut GlfsFd, IoCallback, *mut c_void) -> c_int;
    glfs_fdatasync_async "6.0" (*mut GlfsFd, IoCallback, *mut c_void) -> c_int;
    glfs_fsync "6.0" (*mut GlfsFd, *mut GlfsStat, *mut GlfsStat) -> c_int;
    glfs_fdatasync "6.0" (*mut GlfsFd, *mut GlfsStat, *mut GlfsStat) -> c_int;
    glfs_fstat "3.4.0" (*mut GlfsFd, *mut stat) -> c_int;
    glfs_ftruncate "6.0" (*mut GlfsFd, off_t, *mut GlfsStat, *mut GlfsStat) -> c_int;
    glfs_fchmod "3.4.0" (*mut GlfsFd, mode_t) -> c_int;
    glfs_fchown "3.4.0" (*mut GlfsFd, uid_t, gid_t) -> c_int;
    glfs_futimens "3.4.0" (*mut GlfsFd, *const libc::timespec) -> c_int;
    glfs_fgetxattr "3.4.0" (*mut GlfsFd, *const c_char, *mut c_void, size_t) -> ssize_t;
    glfs_flistxattr "3.4.0" (*mut GlfsFd, *mut c_void, size_t) -> ssize_t;
    glfs_fsetxattr "3.4.0" (*mut GlfsFd, *const c_char, *const c_void, size_t, c_int) -> c_int;
    glfs_fremovexattr "3.4.0" (*mut GlfsFd, *const c_char) -> c_int;
    glfs_lseek "3.4.0" (*mut GlfsFd, off_t, c_int) -> off_t;
    glfs_fallocate "3.5.0" (*mut GlfsFd, c_int, off_t, size_t) -> c_int;
    glfs_discard "3.5.0" (*mut GlfsFd, off_t, size_t) -> c_int;
    glfs_zerofill "3.5.0" (*mut GlfsFd, off_t, off_t) -> c_int;
    glfs_posix_lock "3.4.0" (*mut GlfsFd, c_int, *mut flock) -> c_int;
    glfs_fd_set_lkowner "3.10.7" (*mut GlfsFd, *mut c_void, c_int) -> c_int;
    glfs_seekdir "3.4.0" (*mut GlfsFd, c_long);
    glfs_xreaddirplus_r "3.11.0" (*mut GlfsFd, u32, *mut *mut GlfsXstat, *mut dirent64, *mut *mut dirent64) -> c_int;
    glfs_xreaddirplus_get_stat "3.11.0" (*mut GlfsXstat) -> *mut stat;
    glfs_object_copy "3.11.0" (*mut GlfsObject) -> *mut GlfsObject;
    glfs_xreaddirplus_get_object "3.11.0" (*mut GlfsXstat) -> *mut GlfsObject;
}

/// The library, loaded at the first call.
///
/// # Errors
///
/// [`MissingLibrary`] if it is not installed, or too old.
pub fn library() -> Result<&'static GfapiLibrary, MissingLibrary> {
    static LIBRARY: OnceLock<Result<GfapiLibrary, MissingLibrary>> = OnceLock::new();
    LIBRARY.get_or_init(|| GfapiLibrary::load(FILE)).as_ref().map_err(Clone::clone)
}

/// The last failure of dlopen(3).
fn failure() -> String {
    // SAFETY: the text is valid until the next call of this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return String::new();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_the_debian_package() {
        let Err(MissingLibrary(text)) = GfapiLibrary::load(c"libgfapi-that-is-not-there.so.0")
        else {
            panic!("it was loaded");
        };
        assert!(text.contains("Debian package libgfapi0"), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_too_old() {
        let Err(MissingLibrary(text)) = GfapiLibrary::load(c"libc.so.6") else {
            panic!("it has them")
        };
        assert!(
            text.contains("has no glfs_new of version 3.4.0: install a newer libgfapi"),
            "{text}"
        );
    }
}
