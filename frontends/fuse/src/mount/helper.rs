//! Mounting through `fusermount3`, which is set-user-id root.
//!
//! The helper receives one end of a socket, mounts, and sends the open `/dev/fuse` over it
//! (`util/fusermount.c` of libfuse).

use super::check::CheckedTarget;
use super::{MountError, MountMethod, MountOptions, PreparedMount};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};
use std::fs;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The helper: `fusermount3`, or the older `fusermount`.
pub(super) fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<PathBuf> = std::env::split_paths(&path)
        .chain(["/usr/bin", "/bin", "/usr/local/bin"].map(PathBuf::from))
        .collect();
    let names = ["fusermount3", "fusermount"];
    let mut candidates = names.iter().flat_map(|name| dirs.iter().map(move |dir| dir.join(name)));
    candidates.find(|candidate| candidate.is_file())
}

pub(super) fn mount(
    helper: &Path,
    target: &CheckedTarget,
    options: &MountOptions,
) -> Result<PreparedMount, MountError> {
    let root = rustix::process::getuid().is_root();
    let conf = fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    if options.allow_other && !root && !permits_allow_other(&conf) {
        return Err(MountError::AllowOtherRefused);
    }
    let failed = |message: String| MountError::Helper {
        mountpoint: target.path.clone(),
        helper: helper.to_path_buf(),
        message,
    };
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|errno| failed(errno.to_string()))?;
    // Passed as standard input, so that no descriptor of this process is ever inheritable.
    let mut command = Command::new(helper);
    command
        .arg("-o")
        .arg(options.to_string())
        .arg("--")
        .arg(&target.path)
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut process = command.spawn().map_err(|error| failed(error.to_string()))?;
    // It has the other end alone, and shows its failure by closing it.
    drop(command);
    let device = if options.auto_unmount { receive(&ours) } else { None };
    let (device, watch) = match device {
        Some(device) => {
            process.stderr = None;
            (device, Some(HelperWatch { process, _socket: ours }))
        }
        None => {
            let output = process.wait_with_output().map_err(|error| failed(error.to_string()))?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                return Err(failed(if said.is_empty() { output.status.to_string() } else { said }));
            }
            let device = receive(&ours);
            (device.ok_or_else(|| failed("it sent no device".to_owned()))?, None)
        }
    };
    let how = MountMethod::Helper(helper.to_path_buf());
    let syncfs = super::decide_without_root(options);
    Ok(PreparedMount { device, mountpoint: target.path.clone(), how, syncfs, watch })
}

/// The helper of a mount with `auto_unmount`. It unmounts the mount point when this process has
/// ended.
#[derive(Debug)]
pub struct HelperWatch {
    process: Child,
    /// The helper's socket, which closes when this process ends.
    _socket: OwnedFd,
}

impl Drop for HelperWatch {
    fn drop(&mut self) {
        // After an orderly unmount, the next mount at this place must stay.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Receives the descriptor that the helper sent (`unix(7)`, SCM_RIGHTS).
fn receive(socket: impl AsFd) -> Option<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut iov = [IoSliceMut::new(&mut byte)];
    rustix::io::retry_on_intr(|| recvmsg(&socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC))
        .ok()?;
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    })
}

/// True if `/etc/fuse.conf` has the line `user_allow_other`.
fn permits_allow_other(conf: &str) -> bool {
    conf.lines().any(|line| line.split('#').next().unwrap_or("").trim() == "user_allow_other")
}

/// Escapes commas and backslashes in a value.
pub(super) fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::IoSlice;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn fuse_conf_must_name_the_option_on_a_line() {
        assert!(permits_allow_other("# text\nuser_allow_other # yes\n"));
        assert!(permits_allow_other("  user_allow_other"));
        assert!(!permits_allow_other("#user_allow_other\nmount_max = 9\n"));
        assert!(!permits_allow_other("user_allow_other = 1"));
    }

    #[test]
    fn a_sent_descriptor_arrives() {
        let pair = || {
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
        };
        let (ours, theirs) = pair();
        let null = fs::File::open("/dev/null").unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [null.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&theirs, &[IoSlice::new(&[0])], &mut control, SendFlags::empty()).unwrap();
        assert!(receive(&ours).is_some());
        drop(theirs);
        assert!(receive(&ours).is_none(), "the helper closed without sending");
    }

    #[test]
    fn the_message_of_the_helper_is_passed_on() {
        let dir = tempfile::tempdir().unwrap();
        let helper = dir.path().join("fusermount3");
        fs::write(&helper, "#!/bin/sh\necho \"said: $*\" >&2\nexit 1\n").unwrap();
        fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
        let fd = fs::File::open(dir.path()).unwrap().into();
        let target = CheckedTarget { fd, path: "/mnt/x".into(), rootmode: 0o040000 };
        let error = mount(&helper, &target, &MountOptions::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("cannot mount /mnt/x with "), "{text}");
        assert!(text.contains("said: -o rw") && text.ends_with("-- /mnt/x"), "{text}");
    }
}
