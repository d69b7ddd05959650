//! Other users: threads that change their identity, and programs run as another user.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// A user without any rights.
pub const NOBODY: u32 = 65534;

/// Runs `run` as the user and group `id` with the supplementary groups `groups`, on a thread of its
/// own. The calls of rustix change the identity of a single thread.
pub fn as_user<T: Send>(id: u32, groups: &[u32], run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let groups: Vec<Gid> = groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
            let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
            set_thread_groups(&groups).unwrap();
            set_thread_res_gid(gid, gid, gid).unwrap();
            set_thread_res_uid(uid, uid, uid).unwrap();
            run()
        });
        thread.join().unwrap()
    })
}

/// Runs `program` as [`NOBODY`], and returns its output.
pub fn print_for_nobody(program: impl AsRef<OsStr>, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(arguments).uid(NOBODY).gid(NOBODY).current_dir("/");
    // Another test that forks meanwhile may have inherited a descriptor that is open for writing.
    let busy = std::io::ErrorKind::ExecutableFileBusy;
    let mut tries = 0..1000;
    let output = loop {
        match command.output() {
            Err(error) if error.kind() == busy && tries.next().is_some() => {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            output => break output.unwrap(),
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
