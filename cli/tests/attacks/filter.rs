//! The system call filter of a daemon, tested from within: with the calls of a compromised daemon,
//! and with the calls of its normal work.

// The production code itself. The program offers no way to request calls that it never makes.
#[allow(clippy::duplicate_mod)]
#[path = "../../src/sandbox/filter.rs"]
mod installed;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use installed::{FilterNeeds, install, install_for_keeper};

/// Set if the test runs in a process of its own, because a filter cannot be removed.
const CHILD: &str = "DEFUSE_TEST_FILTERED";

/// Makes a system call with these arguments and zeros. Returns its error (0: none).
fn errno_of(number: i64, args: [u64; 3]) -> i32 {
    // SAFETY: pointers among the arguments are null, or point to constants that end with a zero;
    // calls that succeed here change this process only, which ends soon.
    let value = unsafe { libc::syscall(number, args[0], args[1], args[2], 0, 0, 0) };
    if value >= 0 {
        return 0;
    }
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Runs the test of this name again in a process of its own. Returns true in that process.
fn rerun_alone(name: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let out = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
    false
}

/// Root may make each call, or it fails with an error other than EPERM.
const REFUSED: &[(&str, i64, [u64; 3])] = &[
    ("execve", libc::SYS_execve, [0; 3]),
    ("execveat", libc::SYS_execveat, [0; 3]),
    ("ptrace", libc::SYS_ptrace, [u64::MAX, 0, 0]),
    ("process_vm_readv", libc::SYS_process_vm_readv, [0; 3]),
    ("process_vm_writev", libc::SYS_process_vm_writev, [0; 3]),
    ("pidfd_getfd", libc::SYS_pidfd_getfd, [u64::MAX, 0, 0]),
    ("init_module", libc::SYS_init_module, [0; 3]),
    ("finit_module", libc::SYS_finit_module, [u64::MAX, 0, 0]),
    ("delete_module", libc::SYS_delete_module, [0; 3]),
    ("kexec_load", libc::SYS_kexec_load, [0, u64::MAX, 0]),
    ("bpf", libc::SYS_bpf, [u64::MAX, 0, 0]),
    ("perf_event_open", libc::SYS_perf_event_open, [0; 3]),
    ("userfaultfd", libc::SYS_userfaultfd, [u64::MAX, 0, 0]),
    ("keyctl", libc::SYS_keyctl, [u64::MAX, 0, 0]),
    ("add_key", libc::SYS_add_key, [0; 3]),
    ("mount", libc::SYS_mount, [0; 3]),
    ("fsopen", libc::SYS_fsopen, [0; 3]),
    ("move_mount", libc::SYS_move_mount, [u64::MAX, 0, u64::MAX]),
    ("open_tree", libc::SYS_open_tree, [u64::MAX, 0, 0]),
    ("mount_setattr", libc::SYS_mount_setattr, [u64::MAX, 0, 0]),
    ("pivot_root", libc::SYS_pivot_root, [0; 3]),
    ("chroot", libc::SYS_chroot, [0; 3]),
    ("setns", libc::SYS_setns, [u64::MAX, 0, 0]),
    ("unshare", libc::SYS_unshare, [libc::CLONE_NEWNS as u64, 0, 0]),
    ("unshare of users", libc::SYS_unshare, [libc::CLONE_NEWUSER as u64, 0, 0]),
    ("unshare of more", libc::SYS_unshare, [(libc::CLONE_FS | libc::CLONE_FILES) as u64, 0, 0]),
    ("fork", libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0]),
    ("clone", libc::SYS_clone, [(libc::CLONE_THREAD | libc::CLONE_NEWNET) as u64, 0, 0]),
    ("reboot", libc::SYS_reboot, [0; 3]),
    ("swapon", libc::SYS_swapon, [0; 3]),
    ("clock_settime", libc::SYS_clock_settime, [u64::MAX, 0, 0]),
    ("sethostname", libc::SYS_sethostname, [0, u64::MAX, 0]),
    ("quotactl", libc::SYS_quotactl, [u64::MAX, 0, 0]),
    ("personality", libc::SYS_personality, [u32::MAX as u64, 0, 0]),
    ("socket of packets", libc::SYS_socket, [libc::AF_PACKET as u64, libc::SOCK_RAW as u64, 0]),
    ("socket of netlink", libc::SYS_socket, [libc::AF_NETLINK as u64, libc::SOCK_RAW as u64, 0]),
    ("socket of vsock", libc::SYS_socket, [libc::AF_VSOCK as u64, libc::SOCK_STREAM as u64, 0]),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, [u64::MAX, 0, 0]),
    ("io_uring_setup", libc::SYS_io_uring_setup, [0; 3]),
    ("io_uring_enter", libc::SYS_io_uring_enter, [u64::MAX, 0, 0]),
    ("io_uring_register", libc::SYS_io_uring_register, [u64::MAX, 0, 0]),
    ("process_madvise", libc::SYS_process_madvise, [u64::MAX, 0, 0]),
    ("kcmp", libc::SYS_kcmp, [u64::MAX, u64::MAX, 0]),
    ("migrate_pages", libc::SYS_migrate_pages, [u64::MAX, 0, 0]),
    ("move_pages", libc::SYS_move_pages, [u64::MAX, 0, 0]),
    ("kexec_file_load", libc::SYS_kexec_file_load, [u64::MAX, u64::MAX, 0]),
    ("fanotify_init", libc::SYS_fanotify_init, [u64::MAX, 0, 0]),
    ("request_key", libc::SYS_request_key, [0; 3]),
    ("lookup_dcookie", libc::SYS_lookup_dcookie, [0; 3]),
    ("nfsservctl", libc::SYS_nfsservctl, [0; 3]),
    ("syslog", libc::SYS_syslog, [u64::MAX, 0, 0]),
    ("open_tree_attr", 467, [u64::MAX, 0, 0]),
    ("fsconfig", libc::SYS_fsconfig, [u64::MAX, 0, 0]),
    ("fsmount", libc::SYS_fsmount, [u64::MAX, 0, 0]),
    ("fspick", libc::SYS_fspick, [u64::MAX, 0, 0]),
    ("swapoff", libc::SYS_swapoff, [0; 3]),
    ("settimeofday", libc::SYS_settimeofday, [u64::MAX, 0, 0]),
    ("clock_adjtime", libc::SYS_clock_adjtime, [u64::MAX, 0, 0]),
    ("adjtimex", libc::SYS_adjtimex, [0; 3]),
    ("acct", libc::SYS_acct, [u64::MAX, 0, 0]),
    ("quotactl_fd", libc::SYS_quotactl_fd, [u64::MAX, 0, 0]),
    ("setdomainname", libc::SYS_setdomainname, [0, u64::MAX, 0]),
    ("vhangup", libc::SYS_vhangup, [0; 3]),
    #[cfg(target_arch = "x86_64")]
    ("old fork", libc::SYS_fork, [0; 3]),
    #[cfg(target_arch = "x86_64")]
    ("vfork", libc::SYS_vfork, [0; 3]),
    #[cfg(target_arch = "x86_64")]
    ("iopl", libc::SYS_iopl, [u64::MAX, 0, 0]),
    #[cfg(target_arch = "x86_64")]
    ("ioperm", libc::SYS_ioperm, [u64::MAX, u64::MAX, 1]),
    #[cfg(target_arch = "x86_64")]
    ("modify_ldt", libc::SYS_modify_ldt, [u64::MAX, 0, 0]),
    #[cfg(target_arch = "x86_64")]
    ("uselib", libc::SYS_uselib, [0; 3]),
    #[cfg(target_arch = "x86_64")]
    ("_sysctl", libc::SYS__sysctl, [0; 3]),
    ("umount2", libc::SYS_umount2, [0; 3]),
];

// A compromised daemon could execute programs, create network sockets, and mount. The calls are
// also tried before the filter is installed: otherwise the test would pass if something else
// refused them.
#[test]
fn a_compromised_daemon_cannot_execute_trace_mount_or_reach_the_network() {
    let name = "filter::a_compromised_daemon_cannot_execute_trace_mount_or_reach_the_network";
    if !rerun_alone(name) {
        return;
    }
    let dangerous = [
        "unshare",
        "unshare of users",
        "unshare of more",
        "fork",
        "clone",
        "old fork",
        "vfork",
        "vhangup",
    ];
    let (dangerous, harmless): (Vec<_>, Vec<_>) =
        REFUSED.iter().partition(|(name, ..)| dangerous.contains(name));
    let allowed = |all: &[&(&'static str, i64, [u64; 3])]| -> Vec<_> {
        let passes = |call: &&&(_, i64, [u64; 3])| errno_of(call.1, call.2) != libc::EPERM;
        all.iter().filter(passes).map(|call| call.0).collect()
    };
    let is_root = rustix::process::geteuid().is_root();
    let before = allowed(&harmless);
    assert!(!is_root || before.len() > 20, "the filter is not what refuses: only {before:?} work");
    let tried: Vec<_> = REFUSED.iter().map(|call| call.1).collect();
    let never = installed::NEVER.iter().chain(installed::OF_THE_MACHINE);
    let untried: Vec<_> = never.filter(|number| !tried.contains(number)).collect();
    assert!(
        untried.is_empty(),
        "calls that the filter refuses, and this test does not try: {untried:?}"
    );
    install(FilterNeeds::default()).unwrap();
    assert_eq!(allowed(&harmless), [""; 0]);
    // Without a filter these calls would change or fork this process.
    assert_eq!(allowed(&dangerous), [""; 0]);
    let denied = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM));
    };
    denied(Command::new("true").status().map(drop));
    denied(TcpListener::bind("127.0.0.1:0").map(drop));
    denied(UdpSocket::bind("[::1]:0").map(drop));
    // clone3(2) fails with ENOSYS, and the C library falls back to clone(2).
    assert_eq!(errno_of(libc::SYS_clone3, [0; 3]), libc::ENOSYS);
    // getpid(2) and execve(2), by the numbers of x32.
    #[cfg(target_arch = "x86_64")]
    for number in [39, 520] {
        assert_eq!(errno_of(0x4000_0000 | number, [0; 3]), libc::EPERM);
    }
}

// The process that stays in the namespace of the user has more rights than the daemon.
#[test]
fn the_keeper_makes_no_system_calls_but_those_of_its_orders() {
    let name = "filter::the_keeper_makes_no_system_calls_but_those_of_its_orders";
    if !rerun_alone(name) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    install_for_keeper().unwrap();
    let allowed = ["umount2"];
    for (name, number, args) in REFUSED {
        let refused = errno_of(*number, *args) == libc::EPERM;
        assert!(refused || allowed.contains(name), "{name}");
    }
    for number in [libc::SYS_socket, libc::SYS_connect, libc::SYS_ioctl, libc::SYS_kill] {
        assert_eq!(errno_of(number, [0; 3]), libc::EPERM, "{number}");
    }
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    fs::rename(&file, dir.path().join("other")).unwrap();
    assert!(!file.exists());
}

// GlusterFS connects again when a server was away.
#[test]
fn a_daemon_with_a_source_on_other_machines_reaches_them_and_nothing_else() {
    if !rerun_alone(
        "filter::a_daemon_with_a_source_on_other_machines_reaches_them_and_nothing_else",
    ) {
        return;
    }
    install(FilterNeeds { network: true, ..FilterNeeds::default() }).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    for family in [libc::AF_PACKET, libc::AF_NETLINK, libc::AF_VSOCK] {
        let errno = errno_of(libc::SYS_socket, [family as u64, libc::SOCK_RAW as u64, 0]);
        assert_eq!(errno, libc::EPERM, "{family}");
    }
}

// Every thread has the filter, including those that existed before.
#[test]
fn a_filtered_daemon_still_works() {
    if !rerun_alone("filter::a_filtered_daemon_still_works") {
        return;
    }
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let before = std::thread::spawn(move || {
        wait.recv().unwrap();
        errno_of(libc::SYS_ptrace, [u64::MAX, 0, 0])
    });
    install(FilterNeeds { handles: true, rings: true, network: false, unmounts: true }).unwrap();
    go.send(()).unwrap();
    assert_eq!(before.join().unwrap(), libc::EPERM);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "content").unwrap();
    let mut read = String::new();
    File::open(&file).unwrap().read_to_string(&mut read).unwrap();
    assert_eq!(read, "content");
    let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
    let mut client = UnixStream::connect(dir.path().join("socket")).unwrap();
    client.write_all(b"x").unwrap();
    listener.accept().unwrap();
    // A thread takes a umask of its own, like the threads of a passthrough.
    let unshare = || errno_of(libc::SYS_unshare, [libc::CLONE_FS as u64, 0, 0]);
    assert_eq!(std::thread::spawn(unshare).join().unwrap(), 0);
    assert_eq!(errno_of(libc::SYS_umount2, [0; 3]), libc::EFAULT);
    for number in [libc::SYS_open_by_handle_at, libc::SYS_io_uring_setup] {
        let errno = errno_of(number, [0; 3]);
        let root = rustix::process::geteuid().is_root();
        assert!(!root || errno != libc::EPERM, "{number}: {errno}");
    }
}
