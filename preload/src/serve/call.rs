//! A system call of the program, and what can become of it.

use std::ffi::CString;
use std::sync::Arc;

use defuse_direct::{Client, Stop, Task};
use defuse_fs::{Errno, FileKind};

use crate::machine::descriptors::HeldDescriptor;
use crate::machine::sys;
use crate::process::state::Process;
use crate::process::table::{Entry, Table};

/// The reason why a call was not served.
pub enum Fail {
    /// It failed.
    Errno(Errno),
    /// The kernel has to execute the call with other paths.
    Outside(defuse_direct::Outside),
    /// The kernel has to execute another call, which may block.
    Kernel(Box<ByKernel>),
    /// The kernel has to execute the call on the lower open file of an entry. It may block.
    Lower(Arc<Entry>, Option<libc::flock>),
    /// The kernel has to execute the call as it is.
    Pass,
}

/// A call for the kernel.
pub struct ByKernel {
    /// The number of the call.
    pub number: i64,
    /// Its arguments, but for the second.
    pub args: [u64; 6],
    /// The second argument.
    pub path: CString,
    /// A descriptor that stays open until the call has returned.
    pub held: Option<HeldDescriptor>,
    /// The entry of the descriptor that the call returns.
    pub entry: Option<Arc<Entry>>,
}

impl From<ByKernel> for Fail {
    fn from(call: ByKernel) -> Self {
        Fail::Kernel(Box::new(call))
    }
}

impl From<Errno> for Fail {
    fn from(errno: Errno) -> Self {
        Fail::Errno(errno)
    }
}

impl From<Stop> for Fail {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Errno(errno) => Fail::Errno(errno),
            Stop::Outside(outside) => Fail::Outside(outside),
        }
    }
}

/// The result of a call, or the reason why it was not served.
pub type Served = Result<i64, Fail>;

/// A call of the program.
pub struct Call<'a> {
    /// This process.
    pub process: &'static Process,
    /// The number of the call.
    pub number: u64,
    /// Its arguments.
    pub args: &'a [u64; 6],
}

impl Call<'_> {
    /// The client.
    pub fn client(&self) -> &'static Client {
        &self.process.client
    }

    /// The task of this thread.
    pub fn task(&self) -> &'static Task {
        self.process.task()
    }

    /// The descriptors.
    pub fn table(&self) -> &'static Table {
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
    pub fn entry(&self, at: usize) -> Option<Arc<Entry>> {
        self.table().get(self.int(at)).and_then(|found| (*found).clone())
    }

    /// Has the kernel execute the call as it is.
    pub fn kernel(&self) -> i64 {
        sys::pass(self.number, self.args)
    }
}

/// How often a call is tried again if its names lead to another file meanwhile.
pub const TRIES: usize = 8;

/// True if the entry is a regular file that is open.
pub fn is_regular(entry: &Entry) -> bool {
    entry.file().kind() == FileKind::Regular && !entry.file().is_path()
}
