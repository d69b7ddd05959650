//! The one place where this frontend meets backends: how a file system of the plan is made.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use defuse_compose::{APPLICATION_THREADS, SHARED_LOCKS, Settings, open_text};
use defuse_direct::MountArgs;
use defuse_fs::{FileSystem, delegate};
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
pub struct Relay {
    inner: Current,
}

impl FileSystem for Relay {
    delegate!(to inner);
}

/// The connection of this process. Those of parents stay, because a copy that ends would end the
/// original.
struct Current {
    client: RwLock<&'static Client>,
    /// The process whose connection that is.
    pid: AtomicI32,
}

thread_local! {
    /// Connections of a child that shares this memory (vfork(2), posix_spawn(3)), with its number, and
    /// the connection that each stands for. They are never dropped here: their descriptors are the
    /// child's, and the same numbers mean something else to its parent.
    static OF_CHILD: RefCell<Vec<(i32, *const Client, &'static Client)>> =
        const { RefCell::new(Vec::new()) };
}

impl Current {
    fn get(&self) -> &'static Client {
        let client = *self.client.read().unwrap_or_else(PoisonError::into_inner);
        let pid = crate::process::pid();
        if pid == self.pid.load(Ordering::Relaxed) { client } else { of_child(client, pid) }
    }
}

#[cold]
fn of_child(client: &'static Client, pid: i32) -> &'static Client {
    OF_CHILD.with_borrow_mut(|all| {
        all.retain(|(child, ..)| *child == pid);
        let found = all.iter().find(|(_, of, _)| std::ptr::eq(*of, client));
        if let Some((.., own)) = found {
            return *own;
        }
        match client.sibling() {
            Ok(own) => {
                let own: &'static Client = Box::leak(Box::new(own));
                all.push((pid, std::ptr::from_ref(client), own));
                own
            }
            // It answers with an error of its own.
            Err(_) => client,
        }
    })
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
        Ok(Arc::new(Relay {
            inner: Current {
                client: RwLock::new(client),
                pid: AtomicI32::new(crate::process::pid()),
            },
        }))
    }

    /// In a child: a connection of its own, through which the inodes and open files of the parent are
    /// valid as they are.
    pub fn follow_fork(&self) -> Result<(), String> {
        let mut current = self.inner.client.write().unwrap_or_else(PoisonError::into_inner);
        let own = current.sibling().map_err(|error| error.to_string())?;
        *current = Box::leak(Box::new(own));
        self.inner.pid.store(crate::process::pid(), Ordering::Relaxed);
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
