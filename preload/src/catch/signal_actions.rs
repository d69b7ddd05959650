//! The actions that the program has set for signals, sigaction(2). The kernel has our handler
//! instead.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// The kernel's structure: handler, flags, restorer, mask.
pub type KernelAction = [u64; 4];

/// The action that the program has set for a signal.
pub struct ProgramAction {
    /// Its handler; 0 for the default, 1 to ignore the signal.
    pub handler: AtomicU64,
    pub flags: AtomicU64,
    restorer: AtomicU64,
    mask: AtomicU64,
}

impl ProgramAction {
    const fn new() -> ProgramAction {
        ProgramAction {
            handler: AtomicU64::new(0),
            flags: AtomicU64::new(0),
            restorer: AtomicU64::new(0),
            mask: AtomicU64::new(0),
        }
    }

    /// All four words.
    pub fn get(&self) -> KernelAction {
        let rest = [&self.flags, &self.restorer, &self.mask].map(|it| it.load(Ordering::Relaxed));
        [self.handler.load(Ordering::Acquire), rest[0], rest[1], rest[2]]
    }

    /// Sets all four words, the handler last.
    pub fn set(&self, action: &KernelAction) {
        self.flags.store(action[1], Ordering::Relaxed);
        self.restorer.store(action[2], Ordering::Relaxed);
        self.mask.store(action[3], Ordering::Relaxed);
        self.handler.store(action[0], Ordering::Release);
    }
}

/// All actions, by number of the signal.
pub static WANTED: [ProgramAction; 65] = [const { ProgramAction::new() }; 65];

/// The action that the program has set for a signal.
pub fn program_action(number: c_int) -> KernelAction {
    WANTED[number as usize % WANTED.len()].get()
}
