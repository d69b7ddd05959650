//! The handover of one program to the next at execve(2), and the end of a process.
//!
//! The state of the program is text (see [`exec_state`](crate::process::exec_state) and [`state_pipe`]).

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};

use defuse_direct::Description;
use defuse_fs::Errno;
use defuse_preload_plan::{ExecState, Inherited, VARIABLE};

use crate::machine::descriptors::memory;
use crate::machine::state_pipe;
use crate::process::exec_state::HandedOver;
use crate::process::holders;
use crate::serve::call::{Call, Fail};
use crate::serve::mappings;

/// A copy of a file in memory that can be executed or loaded.
pub fn copy_to_memory(call: &Call<'_>, file: &Description) -> Result<OwnedFd, Fail> {
    let fd = memory(c"defuse")?;
    let mut out = File::from(fd);
    let mut piece = vec![0; 256 << 10];
    let mut at = 0;
    loop {
        let len = call.client().pread(call.task(), file, &mut piece, at)?;
        if len == 0 {
            break;
        }
        out.write_all(&piece[..len]).map_err(Errno::from)?;
        at += len as u64;
    }
    Ok(out.into())
}

/// The handover of an execve(2) that is under way. Dropped if the call failed.
pub struct Outgoing {
    /// The descriptors that the text names.
    _handed_over: HandedOver,
    _state: OwnedFd,
    inherited: Inherited,
    preload: Vec<u8>,
}

impl Outgoing {
    /// Writes the execution state for the next program.
    pub fn new(call: &Call<'_>) -> Result<Self, Fail> {
        let process = call.process;
        let (handed_over, text) = HandedOver::of(process);
        let state = state_pipe::write(&text, process.floor)?;
        let (text, floor) = (state.as_raw_fd(), process.floor);
        let next = ExecState { text, floor, program: None };
        let inherited = Inherited { state: Some(next), ..process.inherited.clone() };
        let preload = process.plan.library.clone();
        Ok(Outgoing { _handed_over: handed_over, _state: state, inherited, preload })
    }

    /// The variable that leads the next program to us, and has it load the static program in `fd`
    /// if there is one.
    pub fn variable(&self, program: Option<i32>) -> CString {
        let state = self.inherited.state.map(|state| ExecState { program, ..state });
        let inherited = Inherited { state, ..self.inherited.clone() };
        CString::new(format!("{VARIABLE}={inherited}")).unwrap_or_default()
    }

    /// The environment with what leads to us, but for [`variable`](Self::variable).
    pub fn environment(&self, strings: Vec<&[u8]>) -> Vec<CString> {
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

/// The end of this process: its mappings are written back, and its open files given back.
pub fn leave(call: &Call<'_>) {
    mappings::write_back_all(call);
    let view = call.process.view();
    for (fd, _) in view.table.all() {
        if let Some(entry) = view.table.remove(fd)
            && !entry.backed
        {
            let _ = entry.file().close(call.task());
        }
    }
    holders::leave(&call.process.shared);
}
