//! How the library begins: before `main`, in every program of a run.

use std::ffi::CString;
use std::os::fd::OwnedFd;

use defuse_preload_plan::{DIRECTORY, Inherited, VARIABLE};

use crate::catch::{dispatch, patch, statics, symbols};
use crate::machine::{inside::Inside, sys};
use crate::process::{
    exec_state,
    shared::Shared,
    state::{self, Process},
};
use crate::serve;

/// Tells people something.
pub fn say(text: &str) {
    let text = format!("defuse: {text}\n");
    let args = [2, text.as_ptr() as u64, text.len() as u64, 0, 0, 0];
    sys::pass(libc::SYS_write as u64, &args);
}

/// Ends a program that cannot be what it was started as.
fn fail(text: &str) -> ! {
    say(text);
    let _ = sys::plain(libc::SYS_exit_group, 125, 0, 0);
    std::process::abort()
}

/// Begins, where a run says so in the environment.
pub fn begin() {
    let Some(value) = symbols::take_variable(VARIABLE) else { return };
    let Ok(inherited) = value.to_string_lossy().parse::<Inherited>() else {
        fail(&format!("{VARIABLE} is not understood: start programs by `defuse run`"));
    };
    let state = inherited.state;
    let mut incoming = state.and_then(|state| exec_state::read(state.letter));
    let floor = state.and_then(|state| u64::try_from(state.floor).ok());
    let carried = state.and_then(|state| state.program).map(crate::serve::handover::owned);
    let Some((shared, plan, images)) = Shared::map(inherited.memory, inherited.plan) else {
        fail("program and library are of different versions: build both together");
    };
    symbols::clean_preload(&plan.library);
    symbols::find_next();
    crate::machine::thread_exit::begin();
    crate::machine::inside::register();
    let Some(inside) = Inside::enter() else { return };
    let limits = state::raise_limit(incoming.as_ref().map(|incoming| incoming.limit), floor);
    let floor = limits.0 as i32;
    let inherited = above_all(&inherited, floor);
    let before = incoming.as_ref().map(|incoming| incoming.holder);
    if !crate::process::holders::begin(&shared, inherited.memory, floor, before) {
        fail("the run has as many processes as it can have");
    }
    let connections = incoming.as_mut().map(|incoming| std::mem::take(&mut incoming.connections));
    let connections = connections.unwrap_or_default();
    if let Some(leash) = inherited.leash {
        crate::process::leash::bind(leash, floor);
    }
    let plan_fd = inherited.plan;
    let process = Process::new(shared, plan, inherited, limits, connections);
    let process = process.unwrap_or_else(|why| fail(&why));
    if process.plan.report {
        crate::catch::entry::count_all();
    }
    let images = patch::Images { fd: plan_fd, from: images };
    let patched = patch::all(&process.plan.objects, images);
    let process = state::install(process);
    symbols::set_patched(patched.wanted > 0 && patched.done == patched.wanted);
    if !symbols::is_patched() && process.plan.report {
        say(
            "this C library is not the one that was analysed: only calls of its functions are seen",
        );
    }
    if let Some(incoming) = incoming {
        incoming.apply(process);
    }
    if let Some(directory) = symbols::take_variable(DIRECTORY) {
        let args = [directory.as_ptr() as u64, 0, 0, 0, 0, 0];
        let call = serve::Call { process, number: libc::SYS_chdir as u64, args: &args };
        if let Err(why) = serve::go_to(&call, directory.as_bytes()) {
            fail(&format!("{}: {why}", directory.to_string_lossy()));
        }
    }
    crate::process::fork::mark();
    if !patched.forks {
        crate::process::fork::follow_handlers();
    }
    if process.plan.dispatch {
        dispatch_calls();
    }
    let carried = carried.map(|fd| carry(fd).unwrap_or_else(|why| fail(&why)));
    drop(inside);
    if let Some(program) = carried {
        program.run();
    }
}

/// Has the system calls seen that no library makes.
fn dispatch_calls() {
    if !symbols::is_patched() {
        fail(
            "this C library is not the one that was analysed, so that calls cannot be dispatched: \
             run without --dispatch",
        );
    }
    if !dispatch::begin() {
        fail(
            "the kernel cannot dispatch system calls to their program (Linux 5.11 can): run without \
             --dispatch",
        );
    }
}

/// Loads a static program, for which this process was made.
fn carry(fd: OwnedFd) -> Result<statics::Program, String> {
    let program = statics::load(fd)?;
    symbols::leave_to_program();
    crate::catch::tls_block::begin();
    Ok(program)
}

/// What is inherited, among our own numbers.
fn above_all(inherited: &Inherited, floor: i32) -> Inherited {
    Inherited {
        memory: above(inherited.memory, floor),
        plan: above(inherited.plan, floor),
        sockets: inherited.sockets.iter().map(|socket| above(*socket, floor)).collect(),
        leash: inherited.leash.map(|leash| above(leash, floor)),
        state: None,
    }
}

/// A descriptor among our own numbers.
fn above(fd: i32, floor: i32) -> i32 {
    if fd >= floor {
        return fd;
    }
    match state::keep_above(fd, floor, false) {
        Ok(kept) => {
            state::close(fd);
            kept
        }
        Err(_) => fd,
    }
}

/// Whether fork(2) has to fail, because a file system is in the memory of this process; people are
/// told.
pub fn refuses_fork() -> bool {
    let Some(process) = state::get() else { return false };
    match process.lost() {
        None => false,
        Some(mount) => {
            say(&format!(
                "{}: its files are in the memory of this process, which a child would have a copy \
                 of: use --fork server or --fork reopen",
                String::from_utf8_lossy(&mount.target)
            ));
            true
        }
    }
}

/// The path that dlopen(3) is to load instead of `path`, where that lies in a mount: the kernel's
/// own path of the bytes, or a copy in memory.
pub fn library(path: &[u8]) -> Option<CString> {
    let process = state::get()?;
    let _inside = Inside::enter()?;
    let args = [0; 6];
    let call = crate::serve::Call { process, number: 0, args: &args };
    crate::serve::kernel_path(&call, path)
}
