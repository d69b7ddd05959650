//! Other programs, and the end of this one.

use std::ffi::CString;
use std::os::fd::AsRawFd;

use defuse_direct::{Access, How, Stop};
use defuse_fs::{Errno, FileKind};

use super::path::Target;
use super::{Call, Fail, Served};
use crate::{handover, sys};

/// Interpreters of interpreters, as the kernel has it.
const MAX_SCRIPTS: usize = 5;
/// How much of a script the kernel looks at for `#!`.
const HEAD: usize = 256;

pub fn exec(call: &Call<'_>) -> Served {
    let at = call.number as i64 == libc::SYS_execveat;
    let (path, argv, envp) = if at { (1, 2, 3) } else { (0, 1, 2) };
    let flags = if at { call.int(4) } else { 0 };
    refuse_what_would_be_lost(call)?;
    let argv = owned(sys::strings(call.args[argv])?);
    let state = handover::Outgoing::new(call)?;
    let envp = state.environment(sys::strings(call.args[envp])?);
    crate::mappings::write_back_all(call);
    let program = Program { call, argv, envp };
    let found = call.target(at.then_some(0), path, flags & libc::AT_EMPTY_PATH != 0);
    let result = match found {
        Ok(target) => program.run(&target, MAX_SCRIPTS),
        Err(Fail::Pass) => program.by_kernel(*call.args),
        Err(fail) => Err(fail),
    };
    // Only a failure comes back.
    match result {
        Err(Fail::Outside(outside)) if outside.path.is_none() => program.by_kernel(*call.args),
        Err(Fail::Outside(outside)) => program.at(&outside.path.unwrap_or_default()),
        other => other,
    }
}

/// A file system whose state is this process's memory does not survive.
fn refuse_what_would_be_lost(call: &Call<'_>) -> Result<(), Fail> {
    match call.process.lost() {
        None => Ok(()),
        Some(mount) => {
            crate::start::say(&format!(
                "{}: its files are in the memory of this process, which another program does not \
                 get: use --fork server or --fork reopen",
                String::from_utf8_lossy(&mount.target)
            ));
            Err(Errno::EPERM.into())
        }
    }
}

fn owned(strings: Vec<&[u8]>) -> Vec<CString> {
    strings.into_iter().map(|text| CString::new(text).unwrap_or_default()).collect()
}

/// A program to be run.
struct Program<'a> {
    call: &'a Call<'a>,
    argv: Vec<CString>,
    envp: Vec<CString>,
}

fn pointers(strings: &[CString]) -> Vec<u64> {
    strings.iter().map(|text| text.as_ptr() as u64).chain([0]).collect()
}

impl Program<'_> {
    /// The program's own call, with our environment.
    fn by_kernel(&self, mut args: [u64; 6]) -> Served {
        let envp = pointers(&self.envp);
        let at = usize::from(self.call.number as i64 == libc::SYS_execveat);
        args[2 + at] = envp.as_ptr() as u64;
        Ok(sys::pass(self.call.number, &args))
    }

    /// A program of the kernel's name space.
    fn at(&self, path: &[u8]) -> Served {
        let path = CString::new(path).map_err(|_| Errno::ENOENT)?;
        let (argv, envp) = (pointers(&self.argv), pointers(&self.envp));
        let args = [path.as_ptr() as u64, argv.as_ptr() as u64, envp.as_ptr() as u64, 0, 0, 0];
        Ok(sys::pass(libc::SYS_execve as u64, &args))
    }

    /// A program of a mount.
    fn run(&self, target: &Target<'_>, scripts: usize) -> Served {
        let (client, task) = (self.call.client(), self.call.task());
        let (file, name) = match target.whole() {
            Some(entry) => {
                client.access(task, target.at(), b"", Access::EXEC, (true, true))?;
                let how = How { flags: libc::O_RDONLY as u32, ..How::default() };
                let file = match entry.file().is_path() {
                    true => client.open(task, target.at(), b"", how)?,
                    false => std::sync::Arc::clone(entry.file()),
                };
                (file, entry.path.clone())
            }
            None => {
                let how = (true, true);
                client.access(task, target.at(), target.path, Access::EXEC, how)?;
                let how = How { flags: libc::O_RDONLY as u32, ..How::default() };
                let file = match client.open(task, target.at(), target.path, how) {
                    // It may be executed and not read.
                    Err(Stop::Errno(Errno::ENXIO)) => return Err(Errno::EACCES.into()),
                    other => other?,
                };
                let absolute = target.path.starts_with(b"/") || !target.magic && is_cwd(target);
                let name = match absolute {
                    true => target.path.to_vec(),
                    false => super::open::full_path(self.call.process, target),
                };
                (file, name)
            }
        };
        if file.kind() != FileKind::Regular {
            return Err(Errno::EACCES.into());
        }
        let mut head = [0; HEAD];
        let len = client.pread(task, &file, &mut head, 0)?;
        if let Some((interpreter, argument)) = script(&head[..len]) {
            return self.interpret(&name, interpreter, argument, scripts);
        }
        let copy;
        let fd = match file.backing() {
            Some(fd) => fd.as_raw_fd(),
            None => {
                copy = handover::copy_to_memory(self.call, &file)?;
                copy.as_raw_fd()
            }
        };
        let (argv, envp) = (pointers(&self.argv), pointers(&self.envp));
        let empty = c"".as_ptr() as u64;
        let flags = libc::AT_EMPTY_PATH as u64;
        let args = [fd as u64, empty, argv.as_ptr() as u64, envp.as_ptr() as u64, flags, 0];
        Ok(sys::pass(libc::SYS_execveat as u64, &args))
    }

    /// Runs the interpreter of a script, with the script's path as an argument.
    fn interpret(
        &self,
        name: &[u8],
        interpreter: &[u8],
        argument: Option<&[u8]>,
        scripts: usize,
    ) -> Served {
        if scripts == 0 {
            return Err(Errno::ELOOP.into());
        }
        let text = |bytes: &[u8]| CString::new(bytes).map_err(|_| Errno::from_raw(libc::ENOEXEC));
        let mut argv = vec![text(interpreter)?];
        argv.extend(argument.map(text).transpose()?);
        argv.push(text(name)?);
        argv.extend(self.argv.iter().skip(1).cloned());
        let program = Program { call: self.call, argv, envp: self.envp.clone() };
        let target = super::path::target(self.call.process, libc::AT_FDCWD, interpreter, false);
        match target.and_then(|target| program.run(&target, scripts - 1)) {
            Err(Fail::Pass) => program.at(interpreter),
            Err(Fail::Outside(outside)) => {
                program.at(&outside.path.unwrap_or_else(|| interpreter.to_vec()))
            }
            other => other,
        }
    }
}

fn is_cwd(target: &Target<'_>) -> bool {
    matches!(target.start, super::path::Start::Cwd)
}

/// The interpreter of a script and its one argument, execve(2).
fn script(head: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    let rest = head.strip_prefix(b"#!")?;
    let end = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
    let line = rest[..end].trim_ascii();
    let end = line.iter().position(|byte| b" \t\0".contains(byte)).unwrap_or(line.len());
    let (interpreter, argument) = line.split_at(end);
    let argument = argument.trim_ascii();
    (!interpreter.is_empty()).then_some((interpreter, (!argument.is_empty()).then_some(argument)))
}

/// The end of the process: what it has open is given back to the others.
pub fn exit(call: &Call<'_>) -> Served {
    handover::leave(call);
    Err(Fail::Pass)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_has_an_interpreter_and_at_most_one_argument() {
        let one = |head: &'static [u8]| script(head);
        assert_eq!(one(b"#!/bin/sh\nx"), Some((&b"/bin/sh"[..], None)));
        assert_eq!(
            one(b"#! /usr/bin/env  a b \n"),
            Some((&b"/usr/bin/env"[..], Some(&b"a b"[..])))
        );
        assert_eq!(one(b"#!\n"), None);
        assert_eq!(one(b"\x7fELF"), None);
    }
}
