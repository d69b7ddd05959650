//! The POSIX cases on file systems that a server shares by memory, through a kernel mount.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use defuse_testkit::mounted::{self, Mount, program};
use defuse_testkit::posix;
use defuse_testkit::suites::{Suite, exclusions};
use rustix::process::{Pid, Signal, kill_process};

/// `defuse serve --shared`, ended when dropped.
struct Server(Child);

impl Server {
    fn new(source: &Path, socket: &Path) -> Server {
        let mut serve = Command::new(program().unwrap());
        serve.args(["serve", "--foreground", "--shared"]).arg(source).arg(socket);
        let child = serve.stderr(Stdio::null()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            assert!(Instant::now() < until, "no server");
            std::thread::sleep(Duration::from_millis(10));
        }
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

/// One test, because the suite must be alone in its process.
#[test]
fn memory_and_passthrough_keep_the_promises_of_posix_through_shared_memory() {
    if let Some(reason) = mounted::why_not() {
        println!("skipped: {reason}");
        return;
    }
    let place = mounted::scratch().unwrap();
    let lower = place.path().join("lower");
    std::fs::create_dir(&lower).unwrap();
    let sources = [
        ("memory:".to_owned(), "memory-locks"),
        // Locks are those of the lower file system, as in this configuration.
        (format!("passthrough:{}", lower.display()), "passthrough-locks"),
    ];
    for (number, (source, config)) in sources.iter().enumerate() {
        let socket = place.path().join(format!("socket-{number}"));
        let _server = Server::new(source.as_ref(), &socket);
        let mut shared = OsString::from("shared:");
        shared.push(&socket);
        let own = place.path().join(format!("mount-{number}"));
        std::fs::create_dir(&own).unwrap();
        let mount = Mount::new(&shared, &own, &[]).unwrap();
        let reason = |case: &str| exclusions::reason(Suite::Posix, config, case);
        let report = posix::run_except(mount.path(), "", &reason);
        assert!(report.failed().is_empty(), "a mount of {source}: {:?}", report.failed());
        let (passed, _, _) = report.counts();
        assert!(passed >= 150, "only {passed} cases on {source}");
        mount.end().unwrap();
    }
}
