//! mount file systems into this process
//!
//! A mount belongs to the process that made it: other processes do not see it, and it ends with the
//! process. Any number of file systems of any type can be mounted at once. The target is an
//! absolute path, which need not exist, or a name with a colon ("mem:"); files below it are
//! "mem:/a/b". The source is "memory:", "passthrough:DIR", "uhs:IMAGE",
//! "gluster://HOST/VOLUME", "socket:PATH", "bound:SOCKET,device=/PATH" (a device of a manager) or
//! "fuse:COMMAND", with options after commas ("memory:,size=1G,ro").

use std::ffi::{OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

use defuse_bound::KINDS;
use defuse_compose::{IN_OWN_PROGRAMS, IN_PROCESS, OpenSource, SourceRegistry, SourceSettings};
use defuse_direct::{ClientMountArgs, Result};
use defuse_fs::Errno;
use defuse_fs::source::{CallingThreads, FrontendProperties};

use crate::explain::{self, record_failure};
use crate::memory::{CStringArg, OutBuffer};
use crate::state::{LibraryState, call, succeed};

/// The kinds of sources that this library links.
static SOURCES: SourceRegistry = SourceRegistry::new(&[IN_PROCESS, IN_OWN_PROGRAMS, KINDS]);

/// Mounts `source` on `target`. Returns 0, or -1 with `errno`: EINVAL for an invalid source or
/// target, EBUSY if the target is a mount already or another process
/// uses the source, EIO if the file system could not be created.
/// defuse_last_error() returns the details.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mount(target: CStringArg, source: CStringArg) -> c_int {
    succeed(|state| {
        let (target, source) = (target.get()?, source.get()?);
        mount(state, target, source)
    })
}

fn mount(state: &LibraryState, target: &[u8], source: &[u8]) -> Result<()> {
    // The threads belong to the application, so their credentials must be restored.
    let frontend = FrontendProperties {
        threads: CallingThreads::Application,
        ..FrontendProperties::default()
    };
    let opened = SOURCES.open(OsStr::from_bytes(source), SourceSettings::for_frontend(frontend));
    let OpenSource { source, settings, fs } = opened.map_err(|error| {
        let (target, source) = (String::from_utf8_lossy(target), String::from_utf8_lossy(source));
        explain::say(format!("mount {source} on {target}: {error}"));
        match error {
            defuse_compose::SourceOpenError::Usage(_) => Errno::EINVAL,
            defuse_compose::SourceOpenError::Failed(_) => Errno::EIO,
            defuse_compose::SourceOpenError::Busy(_) => Errno::EBUSY,
            defuse_compose::SourceOpenError::Interrupted(_) => Errno::EINTR,
        }
    })?;
    let source = source.text().to_string_lossy().into_owned();
    let args =
        ClientMountArgs { read_only: settings.read_only, source, ..ClientMountArgs::default() };
    let mounted = state.client.mount(target, fs, &args);
    record_failure("mount", target, mounted.map(drop).map_err(Into::into))
}

/// Unmounts the file system on `target`. Unless it is detached `lazily`, fails with EBUSY while it
/// has open files or working directories. Fails with EINVAL if nothing is mounted there. Another
/// error, such as EIO or ENOSPC, says that it is unmounted but not everything could be made
/// durable.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_unmount(target: CStringArg, lazily: c_int) -> c_int {
    succeed(|state| {
        let target = target.get()?;
        let gone = state.client.unmount(target, lazily != 0);
        record_failure("unmount", target, gone.map_err(Into::into))
    })
}

/// Returns the statistics of the mount on `target`, as JSON with a final NUL: for each operation
/// the number of calls, errors and bytes, and a histogram of its latency in nanoseconds. Returns
/// the length without the NUL. Fails with ERANGE if the buffer is too small, and with EINVAL if
/// nothing is mounted there.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_statistics(
    target: CStringArg,
    mut buf: OutBuffer<c_char>,
    size: usize,
) -> libc::ssize_t {
    call(|state| {
        // SAFETY: `size` is the length of `buf`.
        let room = unsafe { buf.as_mut_slice(size) }?;
        let target = target.get()?;
        let snapshot = record_failure(
            "statistics",
            target,
            state.client.statistics(target).map_err(Into::into),
        )?;
        let json = serde_json::to_vec(&snapshot).map_err(|_| Errno::EIO)?;
        fill_text(room, &json)
    })
}

/// Copies a text and a final NUL. Returns the length without the NUL. Fails with `ERANGE`.
pub(super) fn fill_text(room: &mut [u8], text: &[u8]) -> Result<isize> {
    let place = room.get_mut(..=text.len()).ok_or(Errno::ERANGE)?;
    place[..text.len()].copy_from_slice(text);
    place[text.len()] = 0;
    Ok(text.len() as isize)
}

/// Describes the last failure of this thread to mount, unmount, open or read statistics: a text
/// that names the object and the next step. It is never NULL, empty before the first failure, and
/// valid until the next one. `errno` has the error number.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_last_error() -> *const c_char {
    explain::last()
}

/// The version of the running library, such as "0.1.0".
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
