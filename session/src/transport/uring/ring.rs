//! An io_uring for the commands of FUSE: io_uring(7), fs/fuse/dev_uring.c.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use defuse_fs::{Errno, Result};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use zerocopy::IntoBytes;

use super::UringEntry;
use defuse_wire::abi::{
    FUSE_IO_URING_CMD_COMMIT_AND_FETCH, FUSE_IO_URING_CMD_REGISTER, UringCmdReq,
};

/// The position of `len` in a submission queue entry (struct io_uring_sqe).
const SQE_LEN: usize = 24;

/// A completion: the submitted command and its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UringCompletion {
    /// The number given at submission.
    pub(crate) key: u64,
    /// 0 or more for success.
    pub(crate) result: i32,
}

/// The ring of one thread. Only the thread that made it may use it.
pub(crate) struct ThreadRing {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
}

impl ThreadRing {
    /// A ring for `entries` submissions at a time.
    ///
    /// # Errors
    ///
    /// EPERM where `kernel.io_uring_disabled` or a seccomp filter forbids rings, ENOSYS where the
    /// kernel has none, ENOMEM at a limit (io_uring_setup(2)).
    pub(crate) fn new(device: &OwnedFd, entries: u32) -> Result<Self> {
        let ring = IoUring::builder()
            .dontfork()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(entries)?;
        ring.submitter().register_files(&[device.as_raw_fd()])?;
        Ok(ThreadRing { ring })
    }

    /// Gives `entry` to its queue, under the number `key`.
    ///
    /// # Errors
    ///
    /// EAGAIN if the submission queue is full. A refusal by the kernel shows in the completion.
    pub(crate) fn register(&mut self, entry: &mut UringEntry, key: u64) -> Result<()> {
        let iovecs = entry.iovecs();
        self.push(FUSE_IO_URING_CMD_REGISTER, entry.qid(), 0, Some(&iovecs), key)?;
        // The kernel reads the descriptions while it takes the command.
        self.submit()
    }

    /// Notifies the kernel that this connection will not have rings after all, so that requests
    /// that wait for rings take the device.
    pub(crate) fn refuse(&mut self) {
        // A queue that no kernel has: FUSE_URING_CMD_REGISTER fails, which signals the refusal.
        let pushed = self.push(FUSE_IO_URING_CMD_REGISTER, u16::MAX, 0, None, 0);
        if let Err(errno) = pushed.and_then(|()| self.submit()) {
            log::error!("the kernel refuses to return to /dev/fuse: {errno}");
        }
    }

    /// Queues the reply in `entry` and the request for the next one, under the number `key`.
    pub(crate) fn commit(&mut self, entry: &UringEntry, key: u64) -> Result<()> {
        let command = FUSE_IO_URING_CMD_COMMIT_AND_FETCH;
        self.push(command, entry.qid(), entry.commit_id(), None, key)
    }

    /// Queues a wait for `fd` to become readable, once, under the number `key`.
    pub(crate) fn watch(&mut self, fd: &OwnedFd, key: u64) -> Result<()> {
        let readable = libc::POLLIN as u32;
        let poll = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), readable).build();
        self.push_entry(squeue::Entry128::from(poll).user_data(key))
    }

    fn push(
        &mut self,
        command: u32,
        qid: u16,
        commit_id: u64,
        iovecs: Option<&[libc::iovec; 2]>,
        key: u64,
    ) -> Result<()> {
        let request = UringCmdReq { commit_id, qid, ..UringCmdReq::default() };
        let mut cmd = [0; 80];
        cmd[..size_of::<UringCmdReq>()].copy_from_slice(request.as_bytes());
        let addr = iovecs.map(|iovecs| iovecs.as_ptr() as u64);
        let built = opcode::UringCmd80::new(types::Fixed(0), command).cmd(cmd).addr(addr).build();
        let mut built = built.user_data(key);
        let count = iovecs.map_or(0, |iovecs| iovecs.len() as u32);
        // SAFETY: an `Entry128` is a `struct io_uring_sqe` of 128 bytes as the kernel reads it, in
        // which `len` is the 32-bit number at `SQE_LEN`; `built` is ours and lives on.
        unsafe {
            std::ptr::from_mut(&mut built).byte_add(SQE_LEN).cast::<u32>().write(count);
        }
        self.push_entry(built)
    }

    fn push_entry(&mut self, entry: squeue::Entry128) -> Result<()> {
        // SAFETY: the entry points to the two iovecs of a REGISTER, which `register` keeps until
        // the kernel has read them; they describe the memory of an `UringEntry`, which its channel
        // keeps for as long as this ring lives.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| Errno::EAGAIN)
    }

    /// Submits the queued commands.
    pub(crate) fn submit(&mut self) -> Result<()> {
        self.enter(0)
    }

    /// Submits the queued commands and waits for a completion.
    ///
    /// # Errors
    ///
    /// EINTR if a signal arrives first.
    pub(crate) fn submit_and_wait(&mut self) -> Result<()> {
        self.enter(1)
    }

    fn enter(&mut self, want: usize) -> Result<()> {
        self.ring.submit_and_wait(want).map(drop).map_err(|error: io::Error| error.into())
    }

    /// The next completion.
    pub(crate) fn next_completion(&mut self) -> Option<UringCompletion> {
        let completion = self.ring.completion().next()?;
        Some(UringCompletion { key: completion.user_data(), result: completion.result() })
    }
}
