//! Other programs, and the end of this one.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use defuse_direct::{CallError, NeededAccess, OpenHow};
use defuse_fs::{Errno, FileKind};
use defuse_preload_plan::layout::OnceMessage;
use defuse_preload_plan::{EXECUTABLE, NAME};

use crate::machine::descriptors::{executable_memory, keep_above, take_owned};
use crate::machine::message::write_line;
use crate::machine::{inside, pending, sys};
use crate::process::compose::RelayFileSystem;
use crate::process::{holders, spawned};
use crate::serve::call::{CallFailure, CallResult, ProgramCall};
use crate::serve::elf::{MAX_SCRIPTS, script};
use crate::serve::exec_environment::ExecEnvironment;
use crate::serve::exec_warnings::{self, ProgramPath};
use crate::serve::path::{PathOrigin, PathTarget};
use crate::serve::{elf, mappings, open, path};

pub fn exec(call: &ProgramCall<'_>) -> CallResult {
    let at = call.number as i64 == libc::SYS_execveat;
    let (path, argv, envp) = if at { (1, 2, 3) } else { (0, 1, 2) };
    let flags = if at { call.int(4) } else { 0 };
    refuse_what_would_be_lost(call)?;
    let argv = copy_strings(sys::strings(call.args[argv])?);
    let environment = ExecEnvironment::new(call)?;
    let envp = environment.variables(sys::strings(call.args[envp])?);
    mappings::write_back_before_exec(call)?;
    let program = ExecCall { call, argv, envp, environment: &environment };
    let found = call.target(at.then_some(0), path, flags & libc::AT_EMPTY_PATH != 0);
    let result = match found {
        Ok(target) => program.run(&target, MAX_SCRIPTS),
        Err(CallFailure::Pass) => program.execute_by_kernel(*call.args, flags),
        Err(fail) => Err(fail),
    };
    // Only a failure comes back.
    match result {
        Err(CallFailure::Outside(outside)) if outside.path.is_none() => {
            program.execute_by_kernel(*call.args, flags)
        }
        Err(CallFailure::Outside(outside)) => {
            program.execute_path(&outside.path.unwrap_or_default())
        }
        other => other,
    }
}

/// Refuses an execve(2) that would lose a file system in this process's memory.
fn refuse_what_would_be_lost(call: &ProgramCall<'_>) -> Result<(), CallFailure> {
    match call.process.find_unshared() {
        None => Ok(()),
        Some(mount) => {
            write_line(&format!(
                "{}: its files are in the memory of this process, which another program does not \
                 get: use --fork server or --fork reopen",
                String::from_utf8_lossy(&mount.target)
            ));
            Err(Errno::EPERM.into())
        }
    }
}

fn copy_strings(strings: Vec<&[u8]>) -> Vec<CString> {
    strings.into_iter().map(|text| CString::new(text).unwrap_or_default()).collect()
}

/// An execve(2) under way.
struct ExecCall<'a> {
    call: &'a ProgramCall<'a>,
    argv: Vec<CString>,
    /// Without the variable that leads to us.
    envp: Vec<CString>,
    environment: &'a ExecEnvironment,
}

fn pointers(strings: &[CString]) -> Vec<u64> {
    strings.iter().map(|text| text.as_ptr() as u64).chain([0]).collect()
}

/// The environment, with the variable that leads to us.
fn pointers_with(strings: &[CString], variable: &CString) -> Vec<u64> {
    let all = strings.iter().chain([variable]);
    all.map(|text| text.as_ptr() as u64).chain([0]).collect()
}

/// The system call itself.
fn execute(number: i64, args: &[u64; 6]) -> i64 {
    let undo = pending::unblock_for_exec();
    let value = sys::pass(number as u64, args);
    undo();
    value
}

impl ExecCall<'_> {
    /// The program's own call, with our environment.
    fn execute_by_kernel(&self, mut args: [u64; 6], flags: i32) -> CallResult {
        if let Some(served) = self.execute_kernel_program(&args, flags) {
            return served;
        }
        let variable = self.environment.variable(None);
        let envp = pointers_with(&self.envp, &variable);
        let at = usize::from(self.call.number as i64 == libc::SYS_execveat);
        args[2 + at] = envp.as_ptr() as u64;
        Ok(execute(self.call.number as i64, &args))
    }

    /// A program of the kernel's name space.
    fn execute_path(&self, path: &[u8]) -> CallResult {
        if let Some(served) = self.execute_kernel_program_at(ProgramPath::new(path), path) {
            return served;
        }
        let path = CString::new(path).map_err(|_| Errno::ENOENT)?;
        let variable = self.environment.variable(None);
        let (argv, envp) = (pointers(&self.argv), pointers_with(&self.envp, &variable));
        let args = [path.as_ptr() as u64, argv.as_ptr() as u64, envp.as_ptr() as u64, 0, 0, 0];
        Ok(execute(libc::SYS_execve, &args))
    }

    /// [`execute_kernel_program_at`](Self::execute_kernel_program_at) for the program's own call.
    fn execute_kernel_program(&self, args: &[u64; 6], flags: i32) -> Option<CallResult> {
        if self.call.number as i64 != libc::SYS_execveat {
            let path = sys::string(args[0]).ok()?;
            return self.execute_kernel_program_at(ProgramPath::new(path), path);
        }
        let (fd, path) = (args[0] as i32, sys::string(args[1]).ok()?);
        let name = match path {
            _ if path.starts_with(b"/") || fd == libc::AT_FDCWD => path.to_vec(),
            b"" => format!("/dev/fd/{fd}").into_bytes(),
            _ => [format!("/dev/fd/{fd}/").as_bytes(), path].concat(),
        };
        self.execute_kernel_program_at(ProgramPath { dir: fd, path, flags }, &name)
    }

    /// Executes a static program or a script of the kernel's name space, which this library starts
    /// itself where calls are dispatched (`--dispatch`). `None` if the kernel is to execute the
    /// program.
    fn execute_kernel_program_at(&self, at: ProgramPath<'_>, name: &[u8]) -> Option<CallResult> {
        exec_warnings::check_program(self.call, at, name);
        if !self.call.process.plan.dispatch {
            return None;
        }
        // A program that cannot be opened is refused by the kernel, or is not readable.
        let file = exec_warnings::open_program(at).filter(keeps_user)?;
        let mut head = [0; elf::HEAD];
        let len = file.read_at(&mut head, 0).ok()?;
        if let Some((interpreter, argument)) = script(&head[..len]) {
            return Some(self.interpret(name, interpreter, argument, MAX_SCRIPTS));
        }
        let more = |bytes: &mut [u8], at| file.read_at(bytes, at).unwrap_or(0);
        if !elf::is_carried(&head[..len], more) {
            return None;
        }
        let path = path::path_of_descriptor(file.as_raw_fd()).unwrap_or_else(|| name.to_vec());
        Some(self.carry(file.as_raw_fd(), name, &path))
    }

    /// Memory to be executed. A message is printed if the system permits none.
    fn executable(&self, memory: Result<OwnedFd, Errno>) -> Result<OwnedFd, Errno> {
        if matches!(memory, Err(Errno::EACCES))
            && self.call.process.shared.is_news(OnceMessage::NoMemory)
        {
            write_line(
                "programs of mounts are executed from memory, which this system does not permit: \
                 `sysctl vm.memfd_noexec=1` does, and so does a mount by `defuse mount`",
            );
        }
        memory
    }

    /// Executes the static program in `fd`, which has this path and was called by `name`.
    fn carry(&self, fd: i32, name: &[u8], path: &[u8]) -> CallResult {
        let carrier = self.executable(elf::make_carrier())?;
        let floor = self.call.process.floor;
        let kept = take_owned(keep_above(fd, floor, false)?);
        self.execute_by_descriptor(carrier.as_raw_fd(), (name, path), Some(kept.as_raw_fd()))
    }

    /// Executes what `fd` has open, which is to load the static program `carried`. The kernel does
    /// not know that the program was called by `name`, and has this path.
    fn execute_by_descriptor(
        &self,
        fd: i32,
        (name, path): (&[u8], &[u8]),
        carried: Option<i32>,
    ) -> CallResult {
        let text = |name: &str, value: &[u8]| {
            CString::new([name.as_bytes(), b"=", value].concat()).unwrap_or_default()
        };
        let mut envp = self.envp.clone();
        envp.extend([text(NAME, name), text(EXECUTABLE, path)]);
        let variable = self.environment.variable(carried);
        let (argv, envp) = (pointers(&self.argv), pointers_with(&envp, &variable));
        let empty = c"".as_ptr() as u64;
        let flags = libc::AT_EMPTY_PATH as u64;
        let args = [fd as u64, empty, argv.as_ptr() as u64, envp.as_ptr() as u64, flags, 0];
        Ok(execute(libc::SYS_execveat, &args))
    }

    /// A program of a mount.
    fn run(&self, target: &PathTarget<'_>, scripts: usize) -> CallResult {
        let (client, task) = (self.call.client(), self.call.task());
        let (file, name) = match target.entry_if_whole() {
            Some(entry) => {
                client.access(
                    task,
                    target.as_walk_start(),
                    b"",
                    NeededAccess::EXEC,
                    (true, true),
                )?;
                let how = OpenHow { flags: libc::O_CLOEXEC as u32, ..OpenHow::default() };
                let file = match entry.file().is_path() {
                    true => client.open(task, target.as_walk_start(), b"", how)?,
                    false => std::sync::Arc::clone(entry.file()),
                };
                (file, entry.opened_by.path(client, task))
            }
            None => {
                let how = (true, true);
                client.access(
                    task,
                    target.as_walk_start(),
                    target.path,
                    NeededAccess::EXEC,
                    how,
                )?;
                let how = OpenHow { flags: libc::O_CLOEXEC as u32, ..OpenHow::default() };
                let file = match client.open(task, target.as_walk_start(), target.path, how) {
                    // It may be executed and not read.
                    Err(CallError::Errno(Errno::ENXIO)) => return Err(Errno::EACCES.into()),
                    other => other?,
                };
                let absolute = target.path.starts_with(b"/") || !target.magic && is_cwd(target);
                let name = match absolute {
                    true => target.path.to_vec(),
                    false => open::full_path(self.call, target),
                };
                (file, name)
            }
        };
        if file.kind() != FileKind::Regular {
            return Err(Errno::EACCES.into());
        }
        let mut head = [0; elf::HEAD];
        let len = client.pread(task, &file, &mut head, 0)?;
        if let Some((interpreter, argument)) = script(&head[..len]) {
            return self.interpret(&name, interpreter, argument, scripts);
        }
        let copy;
        let fd = match file.backing() {
            Some(fd) => fd.as_raw_fd(),
            None => {
                let memory = self.executable(executable_memory(c"defuse"))?;
                copy = open::copy_to(memory, self.call, &file)?;
                copy.as_raw_fd()
            }
        };
        let more = |bytes: &mut [u8], at| client.pread(task, &file, bytes, at).unwrap_or(0);
        let is_carried = elf::is_carried(&head[..len], more);
        exec_warnings::check_mounted_program(self.call, &file, fd, &name);
        let full = match target.entry_if_whole() {
            Some(entry) => entry.opened_by.path(client, task),
            None => open::full_path(self.call, target),
        };
        let full = client.real_path(task, &full).unwrap_or_else(|_| plain(&full));
        if is_carried && self.call.process.plan.dispatch {
            return self.carry(fd, &name, &full);
        }
        self.execute_by_descriptor(fd, (&name, &full), None)
    }

    /// Runs the interpreter of a script, with the script's path as an argument.
    fn interpret(
        &self,
        name: &[u8],
        interpreter: &[u8],
        argument: Option<&[u8]>,
        scripts: usize,
    ) -> CallResult {
        if scripts == 0 {
            return Err(Errno::ELOOP.into());
        }
        let text = |bytes: &[u8]| CString::new(bytes).map_err(|_| Errno::from_raw(libc::ENOEXEC));
        let mut argv = vec![text(interpreter)?];
        argv.extend(argument.map(text).transpose()?);
        argv.push(text(name)?);
        argv.extend(self.argv.iter().skip(1).cloned());
        let program = ExecCall { argv, envp: self.envp.clone(), ..*self };
        let target = path::target(self.call.process, libc::AT_FDCWD, interpreter, false);
        match target.and_then(|target| program.run(&target, scripts - 1)) {
            Err(CallFailure::Pass) => program.execute_path(interpreter),
            Err(CallFailure::Outside(outside)) => {
                program.execute_path(&outside.path.unwrap_or_else(|| interpreter.to_vec()))
            }
            other => other,
        }
    }
}

/// True for a program without set-id bits, and for any program if the process is root: its
/// execution here changes no user.
fn keeps_user(file: &File) -> bool {
    let is_root = || sys::plain(libc::SYS_geteuid, 0, 0, 0) == Ok(0);
    let set_id = libc::S_ISUID | libc::S_ISGID;
    file.metadata().is_ok_and(|meta| meta.is_file() && (meta.mode() & set_id == 0 || is_root()))
}

/// An absolute path without empty components and `.`: C libraries take no other for the path of
/// their program.
fn plain(path: &[u8]) -> Vec<u8> {
    let parts = path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
    parts.flat_map(|part| [b"/", part].concat()).collect()
}

fn is_cwd(target: &PathTarget<'_>) -> bool {
    matches!(target.start, PathOrigin::Cwd)
}

/// A program that filters its system calls: the kernel does not see the calls that are served here,
/// and a filter cannot show what it would do with them.
pub fn filter(call: &ProgramCall<'_>) -> CallResult {
    let sets = match call.number as i64 {
        libc::SYS_seccomp => call.args[0] <= u64::from(libc::SECCOMP_SET_MODE_FILTER),
        _ => call.args[0] == libc::PR_SET_SECCOMP as u64,
    };
    if sets && call.process.shared.is_news(OnceMessage::Filter) {
        write_line(
            "a program filters its system calls (seccomp): its filter does not see calls that concern \
             files of mounts, and it may deny what the library needs for them",
        );
    }
    Err(CallFailure::Pass)
}

/// exit_group(2): releases the open files of the process.
pub fn exit(call: &ProgramCall<'_>) -> CallResult {
    spawned::send_to_parent();
    end_process(call);
    Err(CallFailure::Pass)
}

/// The end of this process: its mappings are written back, and its open files given back. Files
/// that other threads may use until the very end are released as for a killed process.
fn end_process(call: &ProgramCall<'_>) {
    mappings::end_all(call);
    if inside::has_others() {
        return call.process.relays().for_each(RelayFileSystem::report_reads);
    }
    let view = call.process.view();
    for (fd, _) in view.table.list_entries() {
        if let Some(entry) = view.table.remove(fd)
            && !entry.backed
            // The server gives back what came with a connection that was not used.
            && !call.process.relay_of(&entry).is_some_and(|relay| relay.is_unused())
        {
            let _ = entry.file().close(call.task());
        }
    }
    call.process.relays().for_each(RelayFileSystem::report_reads);
    holders::free_slot(&call.process.shared);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_program_is_absolute_and_plain() {
        assert_eq!(plain(b"/mnt/./a//b/../c"), b"/mnt/a/b/../c");
        assert_eq!(plain(b"mem:/a"), b"/mem:/a");
    }
}
