//! What the library keeps for its process: mounts, descriptors, who asks.

use std::sync::{Arc, OnceLock};

use defuse_direct::{Client, Descriptors, Options, Result, Stop, Task};
use defuse_fs::Errno;

/// One for the process.
pub(crate) struct State {
    pub client: Client,
    pub descriptors: Descriptors,
    pub task: Task,
}

static STATE: OnceLock<Option<State>> = OnceLock::new();

/// The state, made at the first call; `EIO` where the process cannot tell who it is.
fn state() -> Result<&'static State> {
    let make = || {
        let task = Task::of_this_process().ok()?;
        let client = Client::new(Options::default());
        Some(State { client, descriptors: Descriptors::new(1 << 20), task })
    };
    STATE.get_or_init(make).as_ref().ok_or(Stop::Errno(Errno::EIO))
}

/// Runs a call; what fails or panics sets `errno` and gives -1.
pub(crate) fn call(run: impl FnOnce(&'static State) -> Result<i64>) -> i64 {
    let run = std::panic::AssertUnwindSafe(|| run(state()?));
    let result = std::panic::catch_unwind(run).unwrap_or(Err(Stop::Errno(Errno::EIO)));
    result.unwrap_or_else(|stop| {
        crate::memory::set_errno(stop.errno().raw());
        -1
    })
}

impl State {
    /// The open file of a descriptor.
    pub fn file(&self, fd: i32) -> Result<defuse_direct::Opened> {
        Ok(self.descriptors.get(fd)?)
    }

    /// A new descriptor.
    pub fn give(&self, file: Arc<defuse_direct::Description>, cloexec: bool) -> Result<i64> {
        let flags = defuse_direct::FdFlags { cloexec };
        Ok(self.descriptors.insert(file, 0, flags)?.into())
    }
}
