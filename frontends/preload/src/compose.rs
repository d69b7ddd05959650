//! The one place where this frontend meets backends: how a file system of the plan is made.

use std::cell::Cell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use defuse_compose::{APPLICATION_THREADS, SHARED_LOCKS, Settings, open_text};
use defuse_direct::MountArgs;
use defuse_fs::{Context, Errno, File, FileSystem, Ino, ReleaseArgs, delegate};
use defuse_fuse::client::{Client, ClientOptions};
use defuse_preload_plan::{ForkPolicy, MountPlan};

/// A file system of a plan.
pub struct Composed {
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    /// How it is mounted.
    pub args: MountArgs,
    /// What a fork does to it: never [`ForkPolicy::Auto`].
    pub fork: ForkPolicy,
    /// The way to the process that has the file system, where there is one.
    pub relay: Option<Arc<Relay>>,
}

/// A file system in another process, which every process of the run reaches by a connection of its
/// own.
///
/// After a fork parent and child have the same inodes and open files, which the server knows once. So
/// an open file is given back by the last process that has it, and inodes by neither: the server
/// takes them back when the last connection of the family ends.
pub struct Relay {
    inner: Current,
    forked: AtomicBool,
}

impl FileSystem for Relay {
    delegate!(to inner, except forget, release, releasedir);

    fn forget(&self, ino: Ino, lookups: u64) {
        if !self.forked.load(Ordering::Relaxed) {
            self.inner.forget(ino, lookups);
        }
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<(), Errno> {
        if OTHERS_HAVE_IT.get() { Ok(()) } else { self.inner.release(cx, file, args) }
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<(), Errno> {
        if OTHERS_HAVE_IT.get() { Ok(()) } else { self.inner.releasedir(cx, dir) }
    }
}

thread_local! {
    static OTHERS_HAVE_IT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `drop`, which closes an open file in this process; `others` says that another process has it
/// too, so that the server keeps it.
pub fn closing<T>(others: bool, drop: impl FnOnce() -> T) -> T {
    let before = OTHERS_HAVE_IT.replace(others);
    let value = drop();
    OTHERS_HAVE_IT.set(before);
    value
}

/// The connection of this process. Those of parents stay, because a copy that ends would end the
/// original.
struct Current(RwLock<&'static Client>);

impl Current {
    fn get(&self) -> &'static Client {
        *self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::ops::Deref for Current {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.get()
    }
}

impl Relay {
    fn connect(path: &OsStr, floor: u32) -> Result<Arc<Self>, String> {
        let floor = u16::try_from(floor).unwrap_or(u16::MAX);
        let options = ClientOptions { descriptors_from: floor, ..ClientOptions::default() };
        let client = Client::connect(Path::new(path), options);
        let client = Box::leak(Box::new(client.map_err(|error| error.to_string())?));
        Ok(Arc::new(Relay { forked: AtomicBool::new(false), inner: Current(RwLock::new(client)) }))
    }

    /// Before a fork: from now on somebody else has the same inodes.
    pub fn before_fork(&self) {
        self.forked.store(true, Ordering::Relaxed);
    }

    /// In a child: a connection of its own, through which the inodes and open files of the parent are
    /// valid as they are.
    pub fn follow_fork(&self) -> Result<(), String> {
        let mut current = self.inner.0.write().unwrap_or_else(PoisonError::into_inner);
        let own = current.sibling().map_err(|error| error.to_string())?;
        *current = Box::leak(Box::new(own));
        Ok(())
    }
}

/// Makes the file system of `plan`; descriptors that it keeps get numbers from `floor` on. The error
/// is for people.
pub fn open(plan: &MountPlan, floor: u32) -> Result<Composed, String> {
    if !plan.server.is_empty() {
        let relay = Relay::connect(OsStr::from_bytes(&plan.server), floor)?;
        let source = String::from_utf8_lossy(&plan.source).into_owned();
        let args = MountArgs { source, ..MountArgs::default() };
        let fs = Arc::clone(&relay) as Arc<dyn FileSystem>;
        return Ok(Composed { fs, args, fork: ForkPolicy::Server, relay: Some(relay) });
    }
    let mut settings = Settings::default();
    // Other processes of the run change the same directory, and nobody tells this one.
    settings.passthrough.attr_valid_for = Duration::ZERO;
    settings.passthrough.entry_valid_for = Duration::ZERO;
    settings.passthrough.locks = SHARED_LOCKS;
    settings.passthrough.credentials = APPLICATION_THREADS;
    settings.passthrough.fd_cache = 256;
    settings.passthrough.descriptors_from = floor;
    let text = OsStr::from_bytes(&plan.source);
    let (source, settings, fs) = open_text(text, settings).map_err(|error| error.to_string())?;
    // What a passthrough knows is in the directory; anything else keeps its files in this process.
    let outside = source.backend.name == "passthrough";
    let own = if outside { ForkPolicy::Share } else { ForkPolicy::Deny };
    let args = MountArgs {
        read_only: settings.read_only,
        source: text.display().to_string(),
        ..MountArgs::default()
    };
    let fork = if plan.fork == ForkPolicy::Auto { own } else { plan.fork };
    Ok(Composed { fs, args, fork, relay: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_a_file_system_lacks_are_refused_by_name() {
        let plan = MountPlan { source: b"memory:,sise=1G".to_vec(), ..MountPlan::default() };
        let error = open(&plan, 0).err().unwrap();
        assert!(error.contains("sise"), "{error}");
    }

    #[test]
    fn what_is_kept_in_the_process_is_not_shared() {
        let plan = MountPlan { source: b"memory:".to_vec(), ..MountPlan::default() };
        assert_eq!(open(&plan, 0).unwrap().fork, ForkPolicy::Deny);
    }
}
