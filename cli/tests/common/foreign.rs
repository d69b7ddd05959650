//! Foreign file systems on the mount point of a place.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{TestPlace, eventually};

/// True if the program is installed. Otherwise prints `skipped`.
pub fn has(program: &str) -> bool {
    let there = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().unwrap();
    if !there.status.success() {
        println!("skipped: {program} is not there (apt-get install)");
    }
    there.status.success()
}

/// A foreign mount, until it is dropped.
pub struct ForeignServer {
    mountpoint: String,
    server: Option<Child>,
}

impl ForeignServer {
    /// Mounts `src` on `mnt` by bindfs.
    pub fn bindfs(place: &TestPlace) -> Option<ForeignServer> {
        if !has("bindfs") {
            return None;
        }
        let status = place.command_of(Path::new("bindfs"), &["src", "mnt"]).status().unwrap();
        assert!(status.success());
        Some(ForeignServer::start_mounted(place, None))
    }

    /// Mounts `src` on `mnt` by sshfs, from a server on a loopback port with generated keys.
    pub fn sshfs(place: &TestPlace) -> Option<ForeignServer> {
        // sshd must be called by its full path.
        let server = "/usr/sbin/sshd";
        if !has("sshfs") || !has("ssh-keygen") || !has(server) {
            return None;
        }
        for key in ["host", "user"] {
            let arguments = ["-q", "-t", "ed25519", "-N", "", "-f", key];
            let status = place.command_of(Path::new("ssh-keygen"), &arguments).status().unwrap();
            assert!(status.success());
        }
        let port = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let (host, user) = (place.path("host"), place.path("user.pub"));
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
             StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n\
             Subsystem sftp internal-sftp\n",
            host.display(),
            user.display()
        );
        fs::write(place.path("sshd_config"), config).unwrap();
        // The directory for privilege separation, which the service would create.
        fs::create_dir_all("/run/sshd").unwrap();
        let mut sshd = place.command_of(Path::new(server), &["-D", "-e", "-f"]);
        let sshd = sshd.arg(place.path("sshd_config")).stderr(Stdio::null()).spawn().unwrap();
        let foreign = ForeignServer::start_named(place, Some(sshd));
        eventually("sshd listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        let options = format!(
            "port={port},IdentityFile={},StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null",
            place.path("user").display()
        );
        let from = format!("root@127.0.0.1:{}", place.path("src").display());
        let mut sshfs = place.command_of(Path::new("sshfs"), &[&from, "mnt", "-o", &options]);
        assert!(sshfs.stderr(Stdio::null()).status().unwrap().success());
        eventually("sshfs is mounted", || place.is_mounted());
        Some(foreign)
    }

    fn start_mounted(place: &TestPlace, server: Option<Child>) -> ForeignServer {
        eventually("mounted", || place.is_mounted());
        ForeignServer::start_named(place, server)
    }

    fn start_named(place: &TestPlace, server: Option<Child>) -> ForeignServer {
        ForeignServer { mountpoint: place.path("mnt").to_str().unwrap().to_owned(), server }
    }
}

impl Drop for ForeignServer {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        let _ = umount.args(["--lazy", &self.mountpoint]).stderr(Stdio::null()).status();
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}
