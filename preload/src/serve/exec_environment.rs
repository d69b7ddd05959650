//! The environment by which the next program finds the execution state, its text, in a descriptor
//! ([`exec_state`](crate::process::exec_state), [`state_pipe`]).

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use defuse_preload_plan::{ExecState, InheritedDescriptors, VARIABLE};

use crate::machine::state_pipe;
use crate::process::exec_state::OutgoingState;
use crate::serve::call::{CallFailure, ProgramCall};

/// The environment of an execve(2) that is under way. Dropped if the call failed.
pub struct ExecEnvironment {
    /// Keeps the descriptors that the text names.
    _state: OutgoingState,
    _text: OwnedFd,
    inherited: InheritedDescriptors,
    preload: Vec<u8>,
}

impl ExecEnvironment {
    /// Writes the execution state for the next program.
    pub fn new(call: &ProgramCall<'_>) -> Result<Self, CallFailure> {
        let process = call.process;
        let state = OutgoingState::collect(process);
        let text = state_pipe::write(&state.text, process.floor)?;
        let next = ExecState { text: text.as_raw_fd(), floor: process.floor, program: None };
        let inherited = InheritedDescriptors { state: Some(next), ..process.inherited.clone() };
        let preload = process.plan.library.clone();
        Ok(ExecEnvironment { _state: state, _text: text, inherited, preload })
    }

    /// The variable by which the next program loads this library, which then loads the static
    /// program in `fd` if there is one.
    pub fn variable(&self, program: Option<i32>) -> CString {
        let state = self.inherited.state.map(|state| ExecState { program, ..state });
        let inherited = InheritedDescriptors { state, ..self.inherited.clone() };
        CString::new(format!("{VARIABLE}={inherited}")).unwrap_or_default()
    }

    /// The variables with what leads to us, but for [`variable`](Self::variable).
    pub fn variables(&self, strings: Vec<&[u8]>) -> Vec<CString> {
        let own = format!("{VARIABLE}=");
        let mut preload = b"LD_PRELOAD=".to_vec();
        preload.extend_from_slice(&self.preload);
        let mut all = Vec::with_capacity(strings.len() + 2);
        for text in strings {
            if let Some(others) = text.strip_prefix(b"LD_PRELOAD=") {
                for other in others.split(|byte| b": ".contains(byte)) {
                    if !other.is_empty() && *other != *self.preload {
                        preload.push(b':');
                        preload.extend_from_slice(other);
                    }
                }
            } else if !text.starts_with(own.as_bytes()) {
                all.push(CString::new(text).unwrap_or_default());
            }
        }
        all.push(CString::new(preload).unwrap_or_default());
        all
    }
}
