//! Clients that are threads of this process with the credentials of another user.

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// Calls `run` on a thread with the credentials of the user, which then connects as that user.
pub fn as_user<T: Send>(uid: u32, run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let become_user = || {
            let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
            set_thread_groups(&[]).unwrap();
            set_thread_res_gid(group, group, group).unwrap();
            set_thread_res_uid(user, user, user).unwrap();
            run()
        };
        scope.spawn(become_user).join().unwrap()
    })
}
