//! A controller: its life, its admin commands, and the numbers of its queues.

mod admin;
mod commands;
mod core;

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) use self::admin::CommandTicket;
pub use self::commands::AdminFailure;
pub use self::core::ControllerEvent;
use self::core::{ControllerCore, ControllerPhase};
use crate::ControllerTransport;
use crate::options::{NvmeError, NvmeOptions};
use crate::spec::{
    AdminOpcode as Opcode, CompletionEntry, ControllerCapabilities, SubmissionEntry, register,
};

/// The time between two polls of a controller without interrupts.
const NAP: Duration = Duration::from_micros(100);

/// The longest time that a controller may take to shut down.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// The state of a controller for its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ControllerState {
    Running,
    Resetting,
    Dead,
}

/// An enabled controller. It is shut down when it is dropped, after its queues.
pub struct NvmeController {
    pub(crate) transport: Arc<dyn ControllerTransport>,
    pub(crate) capabilities: ControllerCapabilities,
    core: Mutex<ControllerCore>,
    /// Copies of the core's state, for queues that do not lock the core.
    generation: AtomicU64,
    life: AtomicU8,
}

impl NvmeController {
    /// Resets and enables the controller.
    ///
    /// # Errors
    ///
    /// See [`NvmeError`].
    pub(crate) fn open(
        transport: Arc<dyn ControllerTransport>,
        options: &NvmeOptions,
    ) -> Result<Self, NvmeError> {
        let capabilities = ControllerCapabilities(transport.read64(register::CAP));
        let name = transport.name();
        let unfit = |why: &str| NvmeError::Unfit { name: name.clone(), why: why.to_owned() };
        if capabilities.0 == u64::MAX {
            return Err(unfit("does not answer: it is gone or without power"));
        }
        if !capabilities.has_nvm_commands() || !capabilities.has_small_pages() {
            return Err(unfit("has no NVM commands or no pages of 4 KiB"));
        }
        if capabilities.max_entries() < 2 {
            return Err(unfit("has queues of one entry"));
        }
        let room = |queue| {
            u64::from(capabilities.completion_doorbell(queue)) + 4 <= transport.registers_len()
        };
        let vectors = match transport.vectors() {
            0 => u16::MAX,
            // The first vector belongs to the admin queue.
            vectors => vectors - 1,
        };
        let queues = (1..=options.max_queues.min(vectors)).take_while(|queue| room(*queue)).count();
        if queues == 0 {
            return Err(unfit("has no doorbell for an I/O queue, or no interrupt"));
        }
        let failed =
            |errno| NvmeError::System { name: name.clone(), action: "reach memory", errno };
        let core = ControllerCore::new(&transport, capabilities, options.timeout, queues as u16);
        let controller = NvmeController {
            core: Mutex::new(core.map_err(failed)?),
            transport,
            capabilities,
            generation: AtomicU64::new(0),
            life: AtomicU8::new(ControllerState::Resetting as u8),
        };
        controller.lock().begin_reset("it is opened");
        while controller.state() == ControllerState::Resetting {
            controller.step();
            controller.pause();
        }
        match controller.state() {
            ControllerState::Running => Ok(controller),
            _ => Err(unfit("cannot be enabled: the log says why")),
        }
    }

    pub(crate) fn state(&self) -> ControllerState {
        match self.life.load(Ordering::Acquire) {
            0 => ControllerState::Running,
            1 => ControllerState::Resetting,
            _ => ControllerState::Dead,
        }
    }

    /// Counts how often the controller began to work. When it changes, all queues are gone.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Advances the state of the controller, without waiting.
    pub(crate) fn step(&self) {
        let mut core = self.lock();
        core.advance();
        self.publish(&core);
    }

    /// Publishes the core's state to the queues. A change becomes visible only after the controller
    /// was stopped or cut off.
    fn publish(&self, core: &ControllerCore) {
        let life = match core.phase {
            ControllerPhase::Running => ControllerState::Running,
            ControllerPhase::Dead => ControllerState::Dead,
            _ => ControllerState::Resetting,
        };
        self.life.store(life as u8, Ordering::Release);
        self.generation.store(core.generation, Ordering::Release);
    }

    /// Resets the controller, if it still is in `generation`.
    pub(crate) fn reset(&self, generation: u64, why: &str) {
        let mut core = self.lock();
        if core.generation == generation && core.phase == ControllerPhase::Running {
            core.begin_reset(why);
            self.publish(&core);
        }
    }

    /// Checks if the controller is present and works, and resets or ends it otherwise.
    pub(crate) fn examine(&self, generation: u64) {
        match self.transport.read32(register::CSTS) {
            register::GONE => {
                let mut core = self.lock();
                core.die("it is gone");
                self.publish(&core);
            }
            status if status & register::FATAL != 0 => {
                self.reset(generation, "it reports a fatal status");
            }
            status if status & register::READY == 0 => {
                self.reset(generation, "it has stopped by itself");
            }
            _ => self.step(),
        }
    }

    /// Sends an Abort for a command. The answer is not needed.
    pub(crate) fn abort(&self, queue: u16, command: u16) {
        let which = u32::from(queue) | u32::from(command) << 16;
        let mut core = self.lock();
        let deadline = self.transport.now() + core.limit;
        if core.phase == ControllerPhase::Running {
            core.admin.send_off(
                SubmissionEntry::admin(Opcode::Abort, 0).dword(10, which),
                None,
                deadline,
            );
        }
    }

    /// Sends an admin command. `None` where the queue is full, or the controller does not work.
    pub(crate) fn send(&self, command: SubmissionEntry) -> Option<CommandTicket> {
        let mut core = self.lock();
        let deadline = self.transport.now() + core.limit;
        let running = core.phase == ControllerPhase::Running;
        if running { core.admin.send(command, None, deadline) } else { None }
    }

    /// Takes the answer to a command, if there is one.
    pub(crate) fn take(
        &self,
        ticket: CommandTicket,
    ) -> Option<defuse_block::Result<CompletionEntry>> {
        let mut core = self.lock();
        core.advance();
        self.publish(&core);
        core.admin.take(ticket)
    }

    /// Begins to send requests for asynchronous events, `at_a_time` of them.
    pub(crate) fn watch_events(&self, at_a_time: u32) {
        let mut core = self.lock();
        core.event_requests = at_a_time;
        if core.phase == ControllerPhase::Running {
            core.request_events();
        }
    }

    /// Takes the events that have arrived.
    pub(crate) fn events(&self) -> Vec<ControllerEvent> {
        self.step();
        self.lock().events.drain(..).collect()
    }

    /// The number of resets in the last minutes.
    pub(crate) fn count_resets(&self) -> usize {
        self.lock().resets.len()
    }

    /// Pairs of I/O queues that the controller grants.
    pub(crate) fn granted_queue_pairs(&self) -> u16 {
        self.lock().granted
    }

    /// Takes the number of a queue.
    pub(crate) fn take_number(&self) -> Option<u16> {
        self.lock().free.pop()
    }

    /// Returns the number of a queue.
    pub(crate) fn give_number(&self, number: u16) {
        self.lock().free.push(number);
    }

    /// Waits a moment for an answer.
    pub(crate) fn pause(&self) {
        let pause = if self.transport.vectors() > 0 { 10 * NAP } else { NAP };
        self.transport.sleep(0, Some(pause));
    }

    fn lock(&self) -> MutexGuard<'_, ControllerCore> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the status has `value` under `mask`. False if that does not happen in time.
    fn wait_for_status(&self, mask: u32, value: u32, limit: Duration) -> bool {
        let until = self.transport.now() + limit;
        loop {
            let status = self.transport.read32(register::CSTS);
            if status == register::GONE || self.transport.now() > until {
                return false;
            }
            if status & mask == value {
                return true;
            }
            self.pause();
        }
    }
}

impl Drop for NvmeController {
    /// Shuts the controller down, so that it writes its caches, and stops it: it must not use
    /// memory any more.
    fn drop(&mut self) {
        if self.state() == ControllerState::Running {
            let settings = self.capabilities.settings();
            let ending = settings | register::ENABLE | register::SHUTDOWN_NORMAL;
            self.transport.write32(register::CC, ending);
            let done = (register::SHUTDOWN_STATE, register::SHUTDOWN_DONE);
            if !self.wait_for_status(done.0, done.1, SHUTDOWN) {
                log::warn!("{}: it does not end its shutdown", self.transport.name());
            }
            self.transport.write32(register::CC, settings);
            self.wait_for_status(register::READY, 0, self.capabilities.timeout());
        }
        self.transport.cut();
    }
}

impl fmt::Debug for NvmeController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Controller({}, {:?})", self.transport.name(), self.state())
    }
}
