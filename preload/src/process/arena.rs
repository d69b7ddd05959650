//! The cells of open files in the shared memory, as the in-process client takes them.

use std::cell::Cell;

use defuse_direct::{CellArena, OpenCells};

use crate::machine::descriptors::close;
use crate::machine::{inside, pid, sys};
use crate::process::holders;
use crate::process::run_memory::RunMemory;

thread_local! {
    static TAKEN_OVER: Cell<Option<u32>> = const { Cell::new(None) };
}

impl RunMemory {
    /// The next cells that this thread takes are these, which belong to an open file already.
    pub fn take_over(&self, index: u32) {
        TAKEN_OVER.set(Some(index));
    }

    /// From here on cells are new again.
    pub fn end_take_over(&self) {
        TAKEN_OVER.set(None);
    }
}

impl CellArena for RunMemory {
    fn process(&self) -> u32 {
        pid::cached_pid() as u32
    }

    /// A process that has ended and was not waited for counts as gone.
    fn is_alive(&self, process: u32) -> bool {
        match sys::plain(libc::SYS_pidfd_open, u64::from(process), 0, 0) {
            Ok(fd) => {
                let mut state = libc::pollfd { fd: fd as i32, events: libc::POLLIN, revents: 0 };
                let args = [&raw mut state as u64, 1, 0, 0, 0, 0];
                // SAFETY: the kernel writes to the structure.
                let ended = sys::check(unsafe { sys::syscall(libc::SYS_poll as u64, &args) });
                close(fd as i32);
                ended != Ok(1)
            }
            Err(errno) => errno.raw() != libc::ESRCH,
        }
    }

    /// Every process of a run is registered for it, from its start on.
    fn barrier(&self) {
        inside::barrier_for_all();
    }

    fn is_taken_over(&self, cells: &'static OpenCells) -> bool {
        TAKEN_OVER.get() == Some(self.index(cells))
    }

    fn take(&self) -> Option<&'static OpenCells> {
        if let Some(index) = TAKEN_OVER.get() {
            return self.cells_at(index);
        }
        let index = holders::take(self)?;
        self.cells_at(index)
    }

    fn give_back(&self, cells: &'static OpenCells) {
        holders::give_back(self, self.index(cells));
    }
}
