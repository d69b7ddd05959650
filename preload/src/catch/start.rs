//! How the library begins: before `main`, in every program of a run.

use std::os::fd::OwnedFd;

use defuse_preload_plan::{DIRECTORY, InheritedDescriptors, VARIABLE};

use crate::catch::{
    delivery, entry, environment, next, own_calls, patch, signals, statics, symbols, tls_block,
    user_dispatch,
};
use crate::machine::descriptors::{close, keep_above, take_owned};
use crate::machine::inside::{self, InsideGuard};
use crate::machine::message::write_line;
use crate::machine::{mode, pid, sys, thread_exit};
use crate::process::run_memory::RunMemory;
use crate::process::state::{self, RunProcess};
use crate::process::{credentials, exec_state, fork, holders, run_lifetime, zone};
use crate::serve::call::ProgramCall;
use crate::serve::{cwd, handlers};

/// Ends a program that cannot be what it was started as.
fn fail(text: &str) -> ! {
    write_line(text);
    let _ = sys::plain(libc::SYS_exit_group, 125, 0, 0);
    std::process::abort()
}

/// Begins, if a variable of the environment requests it.
pub fn begin() {
    let Some(value) = environment::take(VARIABLE) else { return };
    let inherited = value.to_string_lossy().parse::<InheritedDescriptors>();
    let inherited = inherited.unwrap_or_else(|why| fail(&why.to_string()));
    let state = inherited.state;
    let mut incoming = state.and_then(|state| exec_state::read(state.text));
    let floor = state.and_then(|state| u64::try_from(state.floor).ok());
    let carried = state.and_then(|state| state.program).map(take_owned);
    let mapped = RunMemory::map(inherited.memory, inherited.plan);
    let (shared, plan, images) = mapped.unwrap_or_else(|why| fail(&why.to_string()));
    environment::clean_preload(&plan.library);
    symbols::find_next();
    thread_exit::begin(credentials::end_of_thread);
    inside::register();
    let Some(inside) = InsideGuard::enter() else { return };
    let limits = zone::raise_limit(incoming.as_ref().map(|incoming| incoming.limit), floor);
    let floor = limits.0 as i32;
    pid::note();
    let inherited = move_above_all(&inherited, floor);
    let before = incoming.as_ref().map(|incoming| incoming.holder);
    if !holders::begin(&shared, inherited.memory, floor, before) {
        fail("the run has as many processes as it can have");
    }
    let connections = incoming.as_mut().map(|incoming| std::mem::take(&mut incoming.connections));
    let connections = connections.unwrap_or_default();
    if let Some(leash) = inherited.leash {
        run_lifetime::bind(leash, floor);
    }
    let plan_fd = inherited.plan;
    let process = RunProcess::new(shared, plan, inherited, limits, connections);
    let process = process.unwrap_or_else(|why| fail(&why));
    if process.plan.report {
        entry::count_all();
    }
    let images = patch::RunImages { fd: plan_fd, from: images, entry: entry::address() };
    let patched = patch::patch_all(&process.plan.objects, images);
    let process = state::install(process);
    register();
    next::set_patched(patched.wanted > 0 && patched.done == patched.wanted);
    if next::is_patched() && !process.plan.dispatch {
        own_calls::replace(process);
    }
    if !next::is_patched() && process.plan.report {
        write_line("this C library was not analysed: only calls of its functions are seen");
    }
    if let Some(incoming) = incoming {
        incoming.apply(process);
    }
    if let Some(directory) = environment::take(DIRECTORY) {
        let args = [directory.as_ptr() as u64, 0, 0, 0, 0, 0];
        let call = ProgramCall { process, number: libc::SYS_chdir as u64, args: &args };
        if let Err(why) = cwd::change_at_start(&call, directory.as_bytes()) {
            fail(&format!("{}: {why}", directory.to_string_lossy()));
        }
    }
    fork::mark();
    if !patched.forks {
        fork::follow_handlers();
    }
    if process.plan.dispatch {
        dispatch_calls();
    }
    if carried.is_none() {
        statics::name_program();
    }
    let carried = carried.map(|fd| carry(fd).unwrap_or_else(|why| fail(&why)));
    drop(inside);
    if let Some(program) = carried {
        program.run();
    }
}

/// Registers what the lower layers call here.
fn register() {
    let _ = handlers::SIGACTION.set(signals::action);
    let _ = fork::IN_CHILD.set(begin_in_child);
}

/// In a child, which has its parent's stacks.
fn begin_in_child() {
    if mode::is_dispatched() {
        user_dispatch::rearm();
        tls_block::reset();
        if fork::clears_actions() {
            signals::clear_actions();
        }
    }
}

/// Has the system calls seen that no library makes.
fn dispatch_calls() {
    if !next::is_patched() {
        fail(
            "this C library was not analysed, so that calls cannot be dispatched: \
             run without --dispatch",
        );
    }
    let own_code = patch::find_own_code(entry::address());
    if !own_code.is_some_and(|own_code| user_dispatch::begin(own_code, delivery::begin)) {
        fail(
            "the kernel cannot dispatch system calls to their program (Linux 5.11 can): run without \
             --dispatch",
        );
    }
}

/// Loads a static program, for which this process was made.
fn carry(fd: OwnedFd) -> Result<statics::LoadedProgram, String> {
    let program = statics::load(fd)?;
    statics::hand_to_program();
    tls_block::begin();
    Ok(program)
}

/// The inherited descriptors, moved among our own numbers.
fn move_above_all(inherited: &InheritedDescriptors, floor: i32) -> InheritedDescriptors {
    InheritedDescriptors {
        memory: move_above(inherited.memory, floor),
        plan: move_above(inherited.plan, floor),
        sockets: inherited.sockets.iter().map(|socket| move_above(*socket, floor)).collect(),
        leash: inherited.leash.map(|leash| move_above(leash, floor)),
        state: None,
    }
}

/// A descriptor among our own numbers.
fn move_above(fd: i32, floor: i32) -> i32 {
    if fd >= floor {
        return fd;
    }
    match keep_above(fd, floor, false) {
        Ok(kept) => {
            close(fd);
            kept
        }
        Err(_) => fd,
    }
}

extern "C" fn begin_at_load(count: usize, arguments: *mut u64, variables: *mut u64) {
    // SAFETY: the loader passes these to functions of initialization.
    unsafe { statics::note_arguments(count, arguments, variables) };
    inside::keep_errno(begin);
}

/// Runs [`begin_at_load`] when the library is loaded.
#[used]
// SAFETY: the loader passes these arguments.
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn(usize, *mut u64, *mut u64) = begin_at_load;
