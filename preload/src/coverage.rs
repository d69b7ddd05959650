//! Tests that every call of the C library and of common programs that concerns files reaches this
//! library, with lists of the exceptions and the reasons.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use defuse_preload_plan::analysis::{self, ObjectFile};
use defuse_preload_plan::{calls, reach};

use crate::catch::symbols::{EXPORTS, OTHERS};

const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";

/// System calls that are not looked at, by number (`asm/unistd_64.h`), each group with the reason.
/// One that is in neither list fails a test: is it about files?
const NOT_LOOKED_AT: &[(&str, &[u16])] = &[
    (
        "memory, also of mapped files, which is in the memory of the process",
        &[12, 27, 28, 149, 150, 151, 152, 216, 325, 330, 331, 440, 448],
    ),
    ("signals", &[14, 15, 34, 62, 127, 128, 129, 130, 131, 200, 234, 282, 289, 297, 424]),
    (
        "memory, semaphores and queues of System V",
        &[29, 30, 31, 64, 65, 66, 67, 68, 69, 70, 71, 220],
    ),
    ("message queues, whose names are no paths", &[240, 241, 242, 243, 244, 245]),
    (
        "time",
        &[
            35, 36, 37, 38, 96, 159, 164, 201, 222, 223, 224, 225, 226, 227, 228, 229, 230, 283,
            286, 287, 305,
        ],
    ),
    (
        "sockets: receiving a descriptor of ours is receiving a descriptor",
        &[41, 43, 44, 45, 47, 48, 49, 50, 51, 52, 53, 54, 55, 288, 299],
    ),
    (
        "processes and threads",
        &[
            24, 39, 60, 61, 101, 109, 110, 111, 112, 121, 124, 135, 140, 141, 142, 143, 144, 145,
            146, 147, 148, 154, 158, 172, 173, 186, 202, 203, 204, 218, 247, 251, 252, 273, 274,
            309, 310, 311, 314, 315, 334, 434, 438,
        ],
    ),
    ("it returns twice on one stack: vfork(2) is exported, and becomes fork(2)", &[58]),
    ("reading credentials", &[102, 104, 107, 108, 115, 118, 120, 125]),
    (
        "the machine",
        &[63, 98, 99, 100, 103, 134, 153, 169, 170, 171, 174, 175, 176, 177, 178, 180, 318],
    ),
    (
        "descriptors that are none of files",
        &[22, 213, 232, 253, 255, 281, 284, 290, 291, 293, 294, 300, 319, 441],
    ),
    (
        "mounts, swap, quotas and accounting of the kernel, which cannot know our paths: ENOENT",
        &[136, 155, 163, 167, 168, 179, 428, 429, 430, 431, 432, 433, 442],
    ),
];

/// Exported functions of the C library with a `syscall` whose number the code does not show.
const NUMBER_IS_TOLD_LATER: &[(&str, &str)] = &[
    ("syscall", "its number is an argument: it is exported"),
    ("tcsetattr", "ioctl(2) of a terminal that has answered one already"),
];

/// How many more there are in functions that are not exported: set*id(2) in the other threads,
/// twice; futex(2), twice; writev(2) to a descriptor that was opened just before, twice;
/// rt_sigreturn(2).
const INSIDE: usize = 7;

/// Other objects with bytes that look like a `syscall`, and why that is none about files.
const LOOKS_LIKE_ONE: &[(&str, &str)] =
    &[("libcrypto.so", "a table of constants that lies between functions")];

/// Functions that the C library takes from the loader. All but the first group concern threads,
/// symbols and numbers. A new name fails a test, so that a developer checks if it opens files.
const FROM_THE_LOADER: &[(&str, &[&str])] = &[
    (
        "dlopen(3) goes through a pointer in here, and is exported",
        &["_rtld_global", "_rtld_global_ro"],
    ),
    (
        "no files",
        &[
            "__libc_enable_secure",
            "__libc_stack_end",
            "__nptl_change_stack_perm",
            "__rseq_flags",
            "__rseq_offset",
            "__rseq_size",
            "__tls_get_addr",
            "__tunable_get_val",
            "__tunable_is_initialized",
            "_dl_allocate_tls",
            "_dl_allocate_tls_init",
            "_dl_argv",
            "_dl_audit_preinit",
            "_dl_audit_symbind_alt",
            "_dl_deallocate_tls",
            "_dl_exception_create",
            "_dl_fatal_printf",
            "_dl_find_dso_for_object",
            "_dl_find_object",
            "_dl_rtld_di_serinfo",
        ],
    ),
];

/// The functions of the C library, of libaio and of POSIX that concern files.
const FILE_FUNCTIONS: &str = "
    _Exit _Fork __close __dup2 __fcntl __fork __fread_chk __fread_unlocked_chk __fstat64
    __fxstat __fxstat64 __fxstatat __fxstatat64 __getcwd_chk __getwd_chk __libc_fcntl64
    __libc_fork __libc_pread __libc_pwrite __libc_system __lseek __lxstat __lxstat64 __mktemp
    __mmap __munmap __open __open64 __open64_2 __open_2 __openat64_2 __openat_2 __poll
    __poll_chk __ppoll_chk __pread64 __pread64_chk __pread_chk __pwrite64 __read __read_chk
    __readlink_chk __readlinkat_chk __realpath_chk __select __statfs __ttyname_r_chk __vfork
    __write __xmknod __xmknodat __xstat __xstat64 _exit access aio_cancel aio_cancel64 aio_error
    aio_error64 aio_fsync aio_fsync64 aio_read aio_read64 aio_return aio_return64 aio_suspend
    aio_suspend64 aio_write aio_write64 canonicalize_file_name chdir chmod chown chroot clone
    close close_range closedir closefrom copy_file_range creat creat64 daemon dirfd dlmopen
    dlopen dup dup2 dup3 eaccess epoll_ctl euidaccess execl execle execlp execv execve execveat
    execvp execvpe faccessat fallocate fallocate64 fanotify_mark fchdir fchmod fchmodat fchown
    fchownat fclose fcntl fcntl64 fdatasync fdopen fdopendir fexecve fflush fgetpos fgetpos64
    fgetxattr fileno fileno_unlocked flistxattr flock fopen fopen64 fork fpathconf fread
    fread_unlocked fremovexattr freopen freopen64 fseek fseeko fseeko64 fsetpos fsetpos64
    fsetxattr fstat fstat64 fstatat fstatat64 fstatfs fstatfs64 fstatvfs fstatvfs64 fsync ftell
    ftello ftello64 ftruncate ftruncate64 fts64_children fts64_close fts64_open fts64_read
    fts64_set fts_children fts_close fts_open fts_read fts_set ftw ftw64 futimens futimes
    futimesat fwrite fwrite_unlocked get_current_dir_name getcwd getdents64 getdirentries
    getdirentries64 getwd getxattr glob glob64 globfree globfree64 inotify_add_watch io_cancel
    io_destroy io_getevents io_queue_init io_setup io_submit ioctl isatty lchmod lchown
    lgetxattr link linkat lio_listio lio_listio64 listxattr llistxattr llseek lockf lockf64
    lremovexattr lseek lseek64 lsetxattr lstat lstat64 lutimes madvise mincore mkdir mkdirat
    mkdtemp mkfifo mkfifoat mknod mknodat mkostemp mkostemp64 mkostemps mkostemps64 mkstemp
    mkstemp64 mkstemps mkstemps64 mktemp mmap mmap64 mount mprotect mremap msync munmap
    name_to_handle_at nftw nftw64 open open64 open_by_handle_at openat openat64 opendir pathconf
    pclose poll popen posix_fadvise posix_fadvise64 posix_fallocate posix_fallocate64
    posix_spawn posix_spawn_file_actions_addchdir_np posix_spawn_file_actions_addfchdir_np
    posix_spawn_file_actions_addopen posix_spawnp ppoll pread pread64 preadv preadv2 preadv64
    preadv64v2 pselect pwrite pwrite64 pwritev pwritev2 pwritev64 pwritev64v2 quick_exit read
    readahead readdir readdir64 readdir64_r readdir_r readlink readlinkat readv realpath
    recvmmsg recvmsg remove removexattr rename renameat renameat2 rewind rewinddir rmdir scandir
    scandir64 scandirat scandirat64 seekdir select sendfile sendfile64 sendmmsg sendmsg
    setmntent setxattr splice stat stat64 statfs statfs64 statvfs statvfs64 statx symlink
    symlinkat sync sync_file_range syncfs syscall system tee telldir tempnam tmpfile tmpfile64
    tmpnam tmpnam_r truncate truncate64 ttyname ttyname_r umask umount umount2 unlink unlinkat
    utime utimensat utimes vfork vmsplice wordexp write writev
";

/// Functions that make no system call that is looked at, and the reason why that is right.
const WITHOUT_CALLS: &[(&str, &[&str])] = &[
    (
        "an answer that is in memory already",
        &["aio_return", "aio_return64", "fts64_set", "fts_set"],
    ),
    ("the number is in memory, and is right", &["dirfd", "fileno", "fileno_unlocked"]),
    ("it frees memory", &["globfree", "globfree64"]),
    ("it is about memory", &["madvise", "mincore"]),
    (
        "it notes what the child is to do",
        &["posix_spawn_file_actions_addchdir_np", "posix_spawn_file_actions_addfchdir_np"],
    ),
    (
        "of libaio: the kernel does it with the descriptor of a backed file, and refuses others",
        &["io_cancel", "io_destroy", "io_getevents", "io_queue_init", "io_setup", "io_submit"],
    ),
];

/// Programs whose every library is looked at, where they are installed.
const PROGRAMS: &[&str] = &[
    "awk",
    "bash",
    "bzip2",
    "cat",
    "chmod",
    "cmp",
    "cp",
    "curl",
    "cut",
    "dash",
    "date",
    "dd",
    "df",
    "diff",
    "du",
    "env",
    "file",
    "find",
    "fio",
    "gcc",
    "gdb",
    "git",
    "grep",
    "gzip",
    "install",
    "ld",
    "ln",
    "ls",
    "make",
    "mkdir",
    "mktemp",
    "mv",
    "openssl",
    "patch",
    "perl",
    "python3",
    "/usr/bin/python3",
    "rm",
    "rsync",
    "sed",
    "shred",
    "sort",
    "split",
    "sqlite3",
    "ssh",
    "stat",
    "strace",
    "tail",
    "tar",
    "tee",
    "touch",
    "truncate",
    "vim",
    "xargs",
    "xz",
    "zip",
    "zstd",
];

fn is_unexamined(number: u16) -> bool {
    NOT_LOOKED_AT.iter().any(|(_, numbers)| numbers.contains(&number))
}

fn libc() -> Option<ObjectFile> {
    let libc = ObjectFile::read(Path::new(LIBC)).ok();
    if libc.is_none() {
        println!("not here: the C library is elsewhere");
    }
    libc
}

#[test]
fn a_call_is_looked_at_or_there_is_a_reason_and_never_both() {
    let mut seen = BTreeSet::new();
    for (reason, numbers) in NOT_LOOKED_AT {
        for number in *numbers {
            // bind(2) is looked at only so that a warning names a descriptor of ours in it.
            let both = calls::name(*number).is_some() && *number != 49;
            assert!(!both && seen.insert(*number), "{number}: {reason}");
        }
    }
}

#[test]
fn every_system_call_of_the_c_library_is_looked_at_or_there_is_a_reason() {
    let Some(libc) = libc() else { return };
    assert_eq!(libc.unreachable, [], "calls that cannot be replaced");
    let numbers: BTreeSet<u16> = libc.raw_calls.iter().flatten().copied().collect();
    let new = |number: &u16| calls::name(*number).is_none() && !is_unexamined(*number);
    let new: Vec<u16> = numbers.into_iter().filter(new).collect();
    assert!(new.is_empty(), "is {new:?} about files? See NOT_LOOKED_AT");
}

#[test]
fn what_the_c_library_has_from_the_loader_opens_no_files() {
    let Some(libc) = libc() else { return };
    let known: BTreeSet<&str> =
        FROM_THE_LOADER.iter().flat_map(|(_, names)| *names).copied().collect();
    let new: Vec<_> = libc.imports.iter().filter(|name| !known.contains(name.as_str())).collect();
    assert!(new.is_empty(), "does {new:?} open files? See FROM_THE_LOADER");
}

#[test]
fn every_function_about_files_is_exported_or_comes_to_a_call_that_is_replaced() {
    let Some(libc) = libc() else { return };
    let reach = reach::reach(Path::new(LIBC)).unwrap();
    let exported: BTreeSet<&str> =
        EXPORTS.iter().map(|(name, _)| *name).chain(OTHERS.iter().copied()).collect();
    let replaced: BTreeSet<u16> = libc.sites.iter().filter_map(|site| site.number).collect();
    let without: BTreeMap<&str, &str> = WITHOUT_CALLS
        .iter()
        .flat_map(|(why, names)| names.iter().map(|name| (*name, *why)))
        .collect();
    let mut lost = Vec::new();
    for name in FILE_FUNCTIONS.split_whitespace() {
        let calls = reach.get(name);
        let comes = calls.is_some_and(|c| c.iter().flatten().any(|n| replaced.contains(n)));
        let is_served = exported.contains(name) || comes;
        if !is_served && !without.contains_key(name) {
            lost.push(name);
        }
        let why = without.get(name);
        assert!(!is_served || why.is_none(), "{name} is served, although: {why:?}");
    }
    assert!(lost.is_empty(), "{lost:?} goes past us");
    // Not the whole library by chance.
    assert!(FILE_FUNCTIONS.split_whitespace().count() > 300);
}

#[test]
fn calls_with_a_number_that_is_told_later_are_known() {
    let Some(libc) = libc() else { return };
    let exports = reach::ExportedFunctions::read_file(Path::new(LIBC)).unwrap();
    let named: Vec<_> = libc.unknown.iter().filter_map(|address| exports.name(*address)).collect();
    let is_known = |name: &str| NUMBER_IS_TOLD_LATER.iter().any(|(known, _)| *known == name);
    let new: Vec<_> = named.iter().filter(|name| !is_known(name)).collect();
    assert!(new.is_empty(), "are {new:?} about files? See NUMBER_IS_TOLD_LATER");
    let inside = libc.unknown.len() - named.len();
    assert!(inside <= INSIDE, "{inside} of {:x?} are not exported: see INSIDE", libc.unknown);
}

/// A program and the libraries that it is started with, without the loader: that works before us.
fn objects(program: &Path) -> Vec<PathBuf> {
    let (mut all, mut next) = (Vec::new(), vec![program.to_owned()]);
    while let Some(path) = next.pop() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if all.contains(&path) || name.starts_with("ld-") {
            continue;
        }
        if let Ok(binary) = ObjectFile::read_for_run(&path, None) {
            let find = |name: &String| analysis::find_library(name, &binary.run_path);
            next.extend(binary.needed.iter().filter_map(find));
        }
        all.push(path);
    }
    all
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let files = std::env::split_paths(&path).map(|folder| folder.join(program));
    files.filter_map(|file| std::fs::canonicalize(file).ok()).find(|file| file.is_file())
}

#[test]
fn common_programs_and_their_libraries_have_no_call_that_goes_past_us() {
    let mut seen = BTreeSet::new();
    let (mut programs, mut lost) = (0, Vec::new());
    for program in PROGRAMS {
        let Some(path) = find(program) else { continue };
        programs += 1;
        for object in objects(&path) {
            if !seen.insert(object.clone()) || object.ends_with("libc.so.6") {
                continue;
            }
            let Ok(binary) = ObjectFile::read_sites(&object) else { continue };
            for (address, number) in &binary.unreachable {
                lost.push(format!("{}: {number} at {address:#x}", object.display()));
            }
            let numbers: BTreeSet<u16> = binary.raw_calls.iter().flatten().copied().collect();
            let new = |number: &u16| calls::name(*number).is_none() && !is_unexamined(*number);
            for number in numbers.into_iter().filter(new) {
                lost.push(format!("{}: is {number} about files?", object.display()));
            }
            let name = object.file_name().unwrap_or_default().to_string_lossy();
            let only_looks = LOOKS_LIKE_ONE.iter().any(|(start, _)| name.starts_with(start));
            for address in binary.unknown.iter().filter(|_| !only_looks) {
                lost.push(format!("{}: some call at {address:#x}", object.display()));
            }
        }
    }
    println!("{programs} programs, {} objects", seen.len());
    assert!(lost.is_empty(), "{lost:#?}");
}
