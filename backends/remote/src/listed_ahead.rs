//! Small directories whose listing comes with the answer to OPENDIR, so that reading them takes no request.
//!
//! The entries hold as long as the version of the directory's attributes stays, which each read checks: a change of names moves it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use defuse_fs::{Context, DirBuf, Errno, Fh, File, Ino, OpenFlags, Opened, Result};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::chain::{Chain, Link};
use defuse_wire::decode::{self, Listing};
use defuse_wire::encode::Request;

use super::Shared;
use super::interest::Interest;

/// No open asks while so many directories have entries: 5 MiB.
const MOST: usize = 256;
/// The size of the first part of a listing, in bytes.
const FIRST: u32 = 16 * 1024;
/// The size of the second part, which shows that the first one was all, in bytes.
const SECOND: u32 = 4 * 1024;

/// The inode and the handle of OPENDIR.
const OF_OPEN: Link = Link { uses: Link::INODE | Link::FILE, of: 0 };
/// The same, and the position after the first part.
const OF_FIRST_PART: Link = Link { uses: Link::INODE | Link::FILE | Link::POSITION, of: 1 };

/// The open directories with entries.
#[derive(Default)]
pub(super) struct ListedAhead {
    dirs: RwLock<HashMap<Fh, Arc<Ahead>>>,
    interest: Interest,
}

struct Ahead {
    ino: Ino,
    version: u64,
    /// The entries as READDIR has them.
    entries: Box<[u8]>,
    is_all: bool,
    was_read: AtomicBool,
}

impl ListedAhead {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<Fh, Arc<Ahead>>> {
        self.dirs.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<Fh, Arc<Ahead>>> {
        self.dirs.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if an open asks for entries.
    fn wants(&self) -> bool {
        self.read().len() < MOST && self.interest.asks()
    }

    /// The directory is closed.
    pub(super) fn closed(&self, fh: Fh) {
        let Some(ahead) = self.write().remove(&fh) else { return };
        self.interest.note(ahead.was_read.load(Ordering::Relaxed));
    }
}

impl Shared {
    pub(super) fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<Opened> {
        let may_list = self.takes_chains() && !self.lacks(Opcode::Opendir);
        if may_list
            && let Some(versions) = self.paths.versions.get()
            && let Some(version) = versions.attributes(ino)
            && self.listed_ahead.wants()
        {
            match self.opendir_and_list(cx, (ino, version), flags) {
                // The request alone is remembered as one that the server does not have.
                Err(Errno::ENOSYS) => {}
                other => return other,
            }
        }
        let args = abi::OpenIn { flags: flags.0, open_flags: 0 };
        self.opened(cx, Request::new(Opcode::Opendir, cx, ino).with(&args), decode::open_out)
    }

    /// Opens a directory and reads its beginning, by one message.
    fn opendir_and_list(
        &self,
        cx: &Context<'_>,
        (ino, version): (Ino, u64),
        flags: OpenFlags,
    ) -> Result<Opened> {
        let open = abi::OpenIn { flags: flags.0, open_flags: 0 };
        let mut links = Chain::default();
        let mut opening = Request::new(Opcode::Opendir, cx, ino).with(&open);
        links.add(Link::default(), &[opening.finish(0)]);
        for (link, size) in [(OF_OPEN, FIRST), (OF_FIRST_PART, SECOND)] {
            let read = abi::ReadIn { size, ..Default::default() };
            let mut reading = Request::new(Opcode::Readdir, cx, Ino(0)).with(&read);
            links.add(link, &[reading.finish(0)]);
        }
        let (opened, listed) = self.ask_chain(cx, (cx.caller, ino), (&links, 3), |answers| {
            let (error, body) = answers[0];
            if error != 0 {
                return Err(Errno::from_raw(-error));
            }
            let opened = decode::open_out(body)?;
            // A listing that has failed, or is longer than was asked for, fails again when it is tried alone.
            let part = |at: usize, most: u32| {
                let (error, body) = answers.get(at)?;
                (*error == 0 && body.len() <= most as usize).then_some(*body)
            };
            let Some(first) = part(1, FIRST) else { return Ok((opened, None)) };
            let second = part(2, SECOND);
            let is_all = first.is_empty() || second.is_some_and(<[u8]>::is_empty);
            let entries = [first, second.unwrap_or_default()].concat();
            Ok((opened, Some((entries.into_boxed_slice(), is_all))))
        })?;
        if let Some((entries, is_all)) = listed {
            self.paths.was_read(ino);
            let was_read = AtomicBool::new(false);
            let ahead = Ahead { ino, version, entries, is_all, was_read };
            self.listed_ahead.write().insert(opened.fh, Arc::new(ahead));
        }
        Ok(opened)
    }

    /// Lists from the entries that came with the open of the directory. Returns false if they do not hold, or have nothing more.
    pub(super) fn list_ahead(
        &self,
        cx: &Context<'_>,
        dir: File,
        from: u64,
        out: &mut DirBuf<'_>,
    ) -> Result<bool> {
        let Some(ahead) = self.listed_ahead.read().get(&dir.fh).cloned() else { return Ok(false) };
        let versions = self.paths.versions.get();
        let holds = versions.is_some_and(|versions| {
            ahead.ino == dir.ino && versions.attributes(dir.ino) == Some(ahead.version)
        });
        if !holds || self.connection.is_dead() {
            return Ok(false);
        }
        let mut listing = Listing::new(&ahead.entries, false);
        if from != 0 && !listing.any(|listed| listed.is_ok_and(|listed| listed.next == from)) {
            return Ok(false);
        }
        ahead.was_read.store(true, Ordering::Relaxed);
        let mut listing = listing.peekable();
        // A listing that is not all goes on by requests.
        if listing.peek().is_none() && !ahead.is_all {
            return Ok(false);
        }
        self.push_all(cx, dir.ino, listing, out).map(|()| true)
    }
}
