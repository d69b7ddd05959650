//! The pending work of the modelled controller, by its time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use defuse_block::model::{CommandTiming, SsdParameters, SsdWork};

use super::faults::ControllerFault;
use crate::spec::SubmissionEntry;

/// A command that was fetched.
pub(super) struct FetchedCommand {
    pub(super) queue: u16,
    pub(super) command: SubmissionEntry,
    pub(super) fault: Option<ControllerFault>,
}

pub(super) enum ModelEvent {
    /// The controller becomes ready, or stops being ready.
    Ready(bool),
    Command(FetchedCommand),
}

#[derive(Default)]
pub(super) struct ModelEventQueue {
    moments: BinaryHeap<Reverse<(Duration, u64)>>,
    works: BTreeMap<u64, ModelEvent>,
    serial: u64,
    /// The SSD behind the controller, where there is one.
    timing: Option<CommandTiming>,
    /// Commands that the SSD works on, by its numbers.
    jobs: BTreeMap<usize, FetchedCommand>,
}

impl ModelEventQueue {
    pub(super) fn new(parts: Option<&SsdParameters>) -> Self {
        ModelEventQueue { timing: parts.map(CommandTiming::new), ..ModelEventQueue::default() }
    }

    /// Forgets everything. Dies continue the work that they have begun.
    pub(super) fn clear(&mut self) {
        self.moments.clear();
        self.works.clear();
        self.jobs.clear();
        if let Some(timing) = &mut self.timing {
            timing.forget();
        }
    }

    /// Schedules `work` for a time.
    pub(super) fn add(&mut self, at: Duration, work: ModelEvent) {
        self.serial += 1;
        self.moments.push(Reverse((at, self.serial)));
        self.works.insert(self.serial, work);
    }

    /// Schedules a command on the SSD, with its load there. Returns the command if there is no SSD.
    pub(super) fn begin(
        &mut self,
        job: FetchedCommand,
        load: SsdWork,
        now: Duration,
    ) -> Result<(), FetchedCommand> {
        let Some(timing) = &mut self.timing else { return Err(job) };
        let number = timing.begin(usize::from(job.queue), load, now);
        self.jobs.insert(number, job);
        Ok(())
    }

    /// True where the SSD, if there is one, takes one more command of this queue.
    pub(super) fn takes(&self, queue: u16) -> bool {
        self.timing.as_ref().is_none_or(|timing| timing.takes(usize::from(queue)))
    }

    /// The time of the next event.
    pub(super) fn next(&self) -> Option<Duration> {
        let own = self.moments.peek().map(|Reverse((at, _))| *at);
        let of_ssd = self.timing.as_ref().and_then(CommandTiming::next);
        own.into_iter().chain(of_ssd).min()
    }

    /// Advances to the next event. Returns the work that is due then; `None` for a step within the
    /// SSD.
    pub(super) fn take(&mut self) -> Option<ModelEvent> {
        let next = self.next()?;
        if let Some(Reverse((at, serial))) = self.moments.peek().copied()
            && at == next
        {
            self.moments.pop();
            return self.works.remove(&serial);
        }
        let done = self.timing.as_mut()?.advance()?;
        self.jobs.remove(&done).map(ModelEvent::Command)
    }
}
