//! The admin commands of the modelled controller.

use super::controller_state::{
    CommandResult, ControllerModelState, ModelCompletionQueue, ModelSubmissionQueue,
};
use crate::spec::{CommandStatus, PAGE, SubmissionEntry};

impl ControllerModelState {
    /// Performs an admin command. `None` if it is answered later.
    pub(super) fn admin(&mut self, command: &SubmissionEntry) -> Option<CommandResult> {
        Some(match command.opcode() {
            0x00 => self.delete(command, true),
            0x01 => self.create_submissions(command),
            0x02 => self.log_page(command),
            0x04 => self.delete(command, false),
            0x05 => self.create_completions(command),
            0x06 => self.identify(command),
            0x08 => self.abort(command),
            0x09 => self.set_features(command),
            0x0c => {
                self.event_requests.push(command.number());
                return None;
            }
            _ => Err(CommandStatus::INVALID_OPCODE),
        })
    }

    /// Completes a request for an event.
    pub(super) fn raise(&mut self, event: u32) {
        if let Some(number) = self.event_requests.pop() {
            self.post(0, 0, number, Ok(event));
        }
    }

    fn create_completions(&mut self, command: &SubmissionEntry) -> CommandResult {
        let (number, entries) = self.new_queue(command)?;
        let has_interrupt = command.get(11) & 2 != 0;
        let vector = has_interrupt.then_some((command.get(11) >> 16) as u16);
        let base = command.0[3];
        let queue = ModelCompletionQueue { base, entries, tail: 0, phase: true, vector };
        match self.completions.insert(number, queue) {
            None => Ok(0),
            Some(_) => Err(CommandStatus::INVALID_QUEUE),
        }
    }

    fn create_submissions(&mut self, command: &SubmissionEntry) -> CommandResult {
        let (number, entries) = self.new_queue(command)?;
        let completions = (command.get(11) >> 16) as u16;
        if !self.completions.contains_key(&completions) || completions == 0 {
            return Err(CommandStatus::INVALID_QUEUE);
        }
        let priority = (command.get(11) >> 1 & 3) as u8;
        let queue = ModelSubmissionQueue::new(command.0[3], entries, completions, priority);
        match self.submissions.insert(number, queue) {
            None => Ok(0),
            Some(_) => Err(CommandStatus::INVALID_QUEUE),
        }
    }

    fn new_queue(&self, command: &SubmissionEntry) -> Result<(u16, u16), CommandStatus> {
        let (number, last) = (command.get(10) as u16, (command.get(10) >> 16) as u16);
        let is_known = (1..=self.shape.queues).contains(&number);
        if !is_known || last >= self.shape.entries || last == 0 {
            return Err(CommandStatus::INVALID_QUEUE);
        }
        Ok((number, last + 1))
    }

    fn delete(&mut self, command: &SubmissionEntry, submissions: bool) -> CommandResult {
        let number = command.get(10) as u16;
        let is_used = self.submissions.values().any(|queue| queue.completions == number);
        let found = match submissions {
            _ if number == 0 => false,
            true => self.submissions.remove(&number).is_some(),
            false => !is_used && self.completions.remove(&number).is_some(),
        };
        if found { Ok(0) } else { Err(CommandStatus::INVALID_QUEUE) }
    }

    fn abort(&mut self, command: &SubmissionEntry) -> CommandResult {
        let (queue, number) = (command.get(10) as u16, (command.get(10) >> 16) as u16);
        let found = self.ignored.iter().position(|ignored| *ignored == (queue, number, true));
        let Some(at) = found else { return Ok(1) };
        self.ignored.swap_remove(at);
        self.post(queue, queue, number, Err(CommandStatus::ABORTED));
        Ok(0)
    }

    fn set_features(&mut self, command: &SubmissionEntry) -> CommandResult {
        match command.get(10) & 0xff {
            0x07 => {
                let (wanted, most) = (command.get(11), u32::from(self.shape.queues) - 1);
                Ok((wanted & 0xffff).min(most) | (wanted >> 16).min(most) << 16)
            }
            0x01 => {
                self.arbiter.set(command.get(11));
                Ok(0)
            }
            0x0b => Ok(0),
            _ => Err(CommandStatus::INVALID_FIELD),
        }
    }

    fn identify(&mut self, command: &SubmissionEntry) -> CommandResult {
        let mut page = vec![0; PAGE];
        match (command.get(10) & 0xff, command.namespace()) {
            (0, 1) => self.describe_namespace(&mut page),
            (1, _) => self.describe_controller(&mut page),
            // Limits: all as for transfers, or none.
            (6, 1) => {}
            (0 | 6, _) => return Err(CommandStatus(0x0b)),
            _ => return Err(CommandStatus::INVALID_FIELD),
        }
        self.memory.write_data(command, &page).map(|()| 0).ok_or(CommandStatus::TRANSFER)
    }

    fn describe_controller(&self, page: &mut [u8]) {
        let shape = &self.shape;
        page[4..24].copy_from_slice(b"0001                ");
        page[24..64].fill(b' ');
        page[24..37].copy_from_slice(b"defuse: model");
        page[64..72].copy_from_slice(b"1       ");
        page[77] = shape.mdts;
        (page[258], page[259], page[262]) = (3, 3, 7);
        (page[512], page[513], page[516]) = (0x66, 0x44, 1);
        let (discard, zeroes) = (u8::from(self.facts.discard), u8::from(shape.writes_zeroes));
        page[520] = u8::from(shape.compares) | discard << 2 | zeroes << 3;
        page[525] = u8::from(self.facts.volatile_cache);
        page[536] = u8::from(shape.sgl);
    }

    fn describe_namespace(&self, page: &mut [u8]) {
        for at in [0, 8, 16] {
            page[at..at + 8].copy_from_slice(&self.facts.blocks.to_le_bytes());
        }
        page[24] = 1 << 1;
        page[36..38].copy_from_slice(&self.shape.atomic.0.to_le_bytes());
        page[42..44].copy_from_slice(&self.shape.atomic.1.to_le_bytes());
        page[130] = self.facts.block_size.trailing_zeros() as u8;
    }

    fn log_page(&mut self, command: &SubmissionEntry) -> CommandResult {
        let words = command.get(10) >> 16 | command.get(11) << 16;
        let bytes = ((words as usize).saturating_add(1) * 4).min(PAGE);
        let mut page = vec![0; bytes];
        match command.get(10) & 0xff {
            0x01 | 0x03 => {}
            0x02 => {
                // 300 K, all spare capacity, and the commands.
                page[1..3].copy_from_slice(&300_u16.to_le_bytes());
                (page[3], page[4]) = (100, 10);
                page[64..72].copy_from_slice(&self.fetched.to_le_bytes());
                page[112..120].copy_from_slice(&self.enabled.to_le_bytes());
            }
            _ => return Err(CommandStatus::INVALID_LOG),
        }
        self.memory.write_data(command, &page).map(|()| 0).ok_or(CommandStatus::TRANSFER)
    }
}
