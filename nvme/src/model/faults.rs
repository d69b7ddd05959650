//! Misbehaviour on demand.

use crate::spec::CommandStatus;

/// A command that a [fault](super::ControllerModel::fail) may strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidateCommand {
    /// Commands of I/O queues that were fetched before it.
    pub number: u64,
    /// The queue.
    pub queue: u16,
    /// The opcode.
    pub opcode: u8,
    /// The first block, for commands that have one.
    pub block: u64,
}

/// A misbehaviour of the controller at one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerFault {
    /// The command is refused with this status.
    Refuse(CommandStatus),
    /// A write succeeds, and changes nothing.
    Lose,
    /// A write succeeds, and changes another place.
    Misdirect(u64),
    /// A write fails in the middle: its first half is there.
    Tear,
    /// There is no answer before the command is aborted.
    Ignore,
    /// There is no answer, and the command cannot be aborted.
    Forget,
    /// The command is answered twice.
    AnswerTwice,
    /// The command is answered, and so is a command that was never sent.
    Invent,
    /// The answer names another submission queue.
    NameOtherQueue,
    /// The controller reports a fatal status and stops.
    Break,
    /// The controller is pulled out of its slot.
    Unplug,
}

type FaultHook = Box<dyn FnMut(&CandidateCommand) -> Option<ControllerFault> + Send>;

#[derive(Default)]
pub(super) struct FaultInjector {
    pub(super) hook: Option<FaultHook>,
    /// Bytes that falsify, the next one last.
    script: Vec<u8>,
}

impl FaultInjector {
    pub(super) fn decide(&mut self, victim: &CandidateCommand) -> Option<ControllerFault> {
        self.hook.as_mut()?(victim)
    }

    pub(super) fn falsify(&mut self, bytes: &[u8]) {
        self.script = bytes.iter().rev().copied().collect();
    }

    /// The value of a register, or another one.
    pub(super) fn register(&mut self, value: u64) -> u64 {
        let Some(byte) = self.script.pop() else { return value };
        match byte {
            0..240 => value,
            240..250 => value ^ 1 << (self.script.pop().unwrap_or(0) % 64),
            250..255 => u64::from(self.script.pop().unwrap_or(0)) * 0x0101_0101_0101_0101,
            255 => u64::MAX,
        }
    }

    /// A completion as written to memory, in words of 32 bits, and the number of times that it is
    /// written.
    pub(super) fn completion(&mut self, mut words: [u32; 4]) -> ([u32; 4], usize) {
        let Some(byte) = self.script.pop() else { return (words, 1) };
        let mut next = || self.script.pop().unwrap_or(0);
        match byte {
            0..160 => return (words, 1),
            160..190 => {
                let (at, bit) = (next() % 4, next() % 32);
                words[usize::from(at)] ^= 1 << bit;
            }
            190..210 => words[3] = words[3] & 0xffff_0000 | u32::from(next()),
            210..230 => words[3] ^= u32::from(next()) << 17,
            230..240 => words = words.map(|_| u32::from(next()) * 0x0101_0101),
            240..250 => return (words, 0),
            250..=255 => return (words, 2 + usize::from(next() % 64)),
        }
        (words, 1)
    }
}
