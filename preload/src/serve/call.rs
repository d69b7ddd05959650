//! A system call of the program, and its possible results.

use std::ffi::CString;
use std::sync::Arc;

use defuse_direct::{CallError, ClientTask, DirectClient};
use defuse_fs::{Errno, FileKind};

use crate::machine::descriptors::HeldDescriptor;
use crate::machine::{inside, pending, sys, wait};
use crate::process::state::RunProcess;
use crate::process::table::{DescriptorEntry, EntryTable};

/// The reason why a call was not served.
pub enum CallFailure {
    /// It failed.
    Errno(Errno),
    /// The kernel has to execute the call with other paths.
    Outside(defuse_direct::OutsidePaths),
    /// The kernel has to execute another call, which may block.
    Kernel(Box<KernelCall>),
    /// The kernel has to execute the call on the lower open file of an entry. It may block.
    Lower(Arc<DescriptorEntry>, Option<libc::flock>),
    /// The kernel has to execute the call as it is.
    Pass,
    /// A signal has ended what it waited for.
    Interrupted(AfterSignal),
}

/// The end of a call that a signal has interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterSignal {
    /// It is made again after the handler (`SA_RESTART`).
    Again,
    /// It fails with `EINTR`.
    Fails,
}

impl AfterSignal {
    /// The wish of the signal that waits on this thread.
    pub fn from_waiting_signal() -> AfterSignal {
        if pending::restarts() { AfterSignal::Again } else { AfterSignal::Fails }
    }

    /// The result for the program, or [`pending::AGAIN`].
    pub fn value(self) -> i64 {
        match self {
            AfterSignal::Again => pending::AGAIN,
            AfterSignal::Fails => sys::failure(Errno::EINTR),
        }
    }
}

/// A call of the kernel that may wait. A signal ends the call, and restarts it if the handler wants
/// that.
pub fn call_waiting(number: u64, args: &[u64; 6]) -> i64 {
    match wait::pass(number, args) {
        pending::AGAIN => AfterSignal::from_waiting_signal().value(),
        value => value,
    }
}

/// Makes a call as [`waiting`] does, where our own code has to go on afterwards. A fork does not
/// wait for it.
pub fn call_waiting_inside(number: u64, args: &[u64; 6]) -> Result<i64, CallFailure> {
    match inside::wait_without_forks(|| call_waiting(number, args)) {
        pending::AGAIN => Err(CallFailure::Interrupted(AfterSignal::Again)),
        value => Ok(sys::check(value)?),
    }
}

/// A call for the kernel.
pub struct KernelCall {
    /// The number of the call.
    pub number: i64,
    /// Its arguments, but for the second.
    pub args: [u64; 6],
    /// The second argument.
    pub path: CString,
    /// A descriptor that stays open until the call has returned.
    pub held: Option<HeldDescriptor>,
    /// The entry of the descriptor that the call returns.
    pub entry: Option<Arc<DescriptorEntry>>,
}

impl From<KernelCall> for CallFailure {
    fn from(call: KernelCall) -> Self {
        CallFailure::Kernel(Box::new(call))
    }
}

impl From<Errno> for CallFailure {
    fn from(errno: Errno) -> Self {
        CallFailure::Errno(errno)
    }
}

impl From<CallError> for CallFailure {
    fn from(stop: CallError) -> Self {
        match stop {
            CallError::Errno(errno) => CallFailure::Errno(errno),
            CallError::Outside(outside) => CallFailure::Outside(outside),
        }
    }
}

/// The result of a call, or the reason why it was not served.
pub type CallResult = Result<i64, CallFailure>;

/// A call of the program.
pub struct ProgramCall<'a> {
    /// This process.
    pub process: &'static RunProcess,
    /// The number of the call.
    pub number: u64,
    /// Its arguments.
    pub args: &'a [u64; 6],
}

impl ProgramCall<'_> {
    /// The client.
    pub fn client(&self) -> &'static DirectClient {
        &self.process.client
    }

    /// The task of this thread.
    pub fn task(&self) -> &'static ClientTask {
        self.process.task()
    }

    /// The descriptors.
    pub fn table(&self) -> &'static EntryTable {
        &self.process.view().table
    }

    /// The argument `at` as a C `int`.
    pub fn int(&self, at: usize) -> i32 {
        self.args[at] as i32
    }

    /// The argument `at` as a length; no call moves more than `MAX_RW_COUNT`.
    pub fn len(&self, at: usize) -> usize {
        (self.args[at] as usize).min(0x7fff_f000)
    }

    /// The open file at the descriptor in argument `at`.
    pub fn entry(&self, at: usize) -> Option<Arc<DescriptorEntry>> {
        self.table().get(self.int(at)).and_then(|found| (*found).clone())
    }

    /// Has the kernel execute the call as it is.
    pub fn kernel(&self) -> i64 {
        sys::pass(self.number, self.args)
    }
}

/// How often a call is tried again if its names lead to another file meanwhile.
pub const TRIES: usize = 8;

/// True if the entry is a directory that is open.
pub fn is_directory(entry: &DescriptorEntry) -> bool {
    entry.file().kind() == FileKind::Directory && !entry.file().is_path()
}

/// True if the entry is a regular file that is open.
pub fn is_regular(entry: &DescriptorEntry) -> bool {
    entry.file().kind() == FileKind::Regular && !entry.file().is_path()
}
