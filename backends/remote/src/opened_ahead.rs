//! Small files that the server opens before this client requests each of them.
//!
//! A program that opens one file of a directory after the other gets the next ones with one
//! request: opened, with their bytes and the versions of their attributes. As long as a file's
//! version stays, an earlier open is equivalent to an open now. When half of them are in use, the
//! client requests more and does not wait for the reply, so that the server opens files while the
//! program reads others.
//!
//! Such files are also closed together: with the next request of this kind, when there are many,
//! before any request that could see that one was read, and when this client has removed a name or
//! ends.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use defuse_fs::{
    AccessMode, Caller, Context, Errno, Fh, File, FileKind, Ino, OpenArgs, OpenReply,
    PathResolution, Result, Versions,
};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode::{self, OpenBytes};
use defuse_wire::encode::EncodedRequest;
use defuse_wire::vendor::{
    AHEAD_MAX, AheadClose, AheadEnd, AheadFile, OPEN_AHEAD, OPEN_BYTES_MAX, OpenAhead,
};
use zerocopy::{FromBytes, IntoBytes};

use super::files::{OpenIdentity, ioctl_out};
use super::fs::device_of;
use super::lanes::LaneRequest;
use super::prefetch_rate::{PrefetchRate, SingleRequests};
use super::whole_files::NO_BYTES;
use super::{RemoteShared, lock};
use crate::reply_log::log_decode_error;

/// The files of one request. The server needs about 30 us for them: if it took longer, a waiting
/// client would sleep.
const BATCH: u32 = 8;
/// After so many of the files were opened, the client requests more.
const USED: u32 = BATCH / 2;
/// The maximum number of files that are ready. With more, all are closed.
const MOST_READY: usize = 4 * AHEAD_MAX;
/// The maximum number of directories that are remembered. With more, all are forgotten.
const MOST_DIRS: usize = 4096;

/// Files that were opened ahead.
#[derive(Default)]
pub(super) struct OpenPrefetch {
    files: Mutex<PrefetchedFiles>,
    /// The number of files in `files`, and of requests for more.
    known: AtomicUsize,
    /// True if the server has to be notified that a file was read.
    owes: AtomicBool,
    is_unsupported: AtomicBool,
}

#[derive(Default)]
struct PrefetchedFiles {
    /// Files for later opens.
    ready: HashMap<Ino, PrefetchedFile>,
    /// Files that are in use.
    granted: HashSet<Fh>,
    /// Files that the server is to close.
    closing: Vec<AheadClose>,
    /// A request for further files, whose answer was not taken.
    pending: Option<PendingPrefetch>,
    dirs: HashMap<Ino, PrefetchDirectory>,
    rate: PrefetchRate,
    /// Counts files that served an open.
    hits: u64,
    /// The caller of the latest request.
    caller: Caller,
}

#[derive(Default)]
struct PrefetchDirectory {
    single_requests: SingleRequests,
    /// The position of the next request; 0 for the begin.
    next: u64,
    /// Files that were opened since the last request.
    used: u32,
}

/// The files that a request is for.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PrefetchKind {
    dir: Ino,
    by: OpenIdentity,
}

struct PendingPrefetch {
    begun: LaneRequest,
    kind: PrefetchKind,
    /// True if it notifies the server that files were read.
    owes: bool,
}

/// An open file, equivalent to a new one while the version of its attributes stays.
struct PrefetchedFile {
    kind: PrefetchKind,
    version: u64,
    opened: OpenReply,
    bytes: Box<[u8]>,
    read_is_due: bool,
}

struct PrefetchRequest {
    request: EncodedRequest,
    /// The data, with the files in `closing`.
    input: Vec<u8>,
    closing: Vec<AheadClose>,
}

impl PrefetchedFile {
    fn make_close(&self, ino: Ino) -> AheadClose {
        AheadClose { ino: ino.0, fh: self.opened.fh.0, flags: self.kind.by.flags.0, has_read: 0 }
    }
}

impl PrefetchedFiles {
    fn dir(&mut self, dir: Ino) -> (&mut PrefetchDirectory, &PrefetchRate) {
        if self.dirs.len() >= MOST_DIRS && !self.dirs.contains_key(&dir) {
            self.dirs.clear();
        }
        (self.dirs.entry(dir).or_default(), &self.rate)
    }

    /// Lets the ready files be closed for which `keeps` returns false.
    fn keep(&mut self, keeps: impl Fn(Ino, &PrefetchedFile) -> bool) {
        let closing = &mut self.closing;
        self.ready.retain(|&ino, ready| {
            let stays = keeps(ino, ready);
            if !stays {
                closing.push(ready.make_close(ino));
            }
            stays
        });
    }
}

impl OpenPrefetch {
    /// Runs `run` on the files, and notes how many there are afterwards.
    fn with<T>(&self, run: impl FnOnce(&mut PrefetchedFiles) -> T) -> T {
        let mut files = lock(&self.files);
        let result = run(&mut files);
        let PrefetchedFiles { ready, granted, closing, pending, .. } = &*files;
        let known = ready.len() + granted.len() + closing.len() + usize::from(pending.is_some());
        self.known.store(known, Ordering::Relaxed);
        let are_requested = pending.as_ref().is_some_and(|pending| pending.owes);
        self.owes.store(are_requested || are_any_read(closing), Ordering::Release);
        result
    }

    fn knows_any(&self) -> bool {
        self.known.load(Ordering::Relaxed) > 0
    }

    /// True if the server has to be notified that a file was read.
    pub(super) fn must_report_read(&self) -> bool {
        self.owes.load(Ordering::Acquire)
    }

    /// Records that the file is closed. Returns `None` if it was not opened ahead; true if so many
    /// are closed that the server has to close them now.
    pub(super) fn record_close(&self, file: File, (flags, has_read): (u32, bool)) -> Option<bool> {
        if !self.knows_any() {
            return None;
        }
        self.with(|files| {
            files.granted.remove(&file.fh).then(|| {
                let has_read = has_read.into();
                files.closing.push(AheadClose { ino: file.ino.0, fh: file.fh.0, flags, has_read });
                files.closing.len() >= AHEAD_MAX
            })
        })
    }

    /// The file is closed by a request of its own.
    pub(super) fn record_release(&self, fh: Fh) {
        if self.knows_any() {
            self.with(|files| files.granted.remove(&fh));
        }
    }

    /// A file of `dir` was opened by the request that resolved its path.
    pub(super) fn record_open_by_path(&self, dir: Ino) {
        if !self.is_unsupported.load(Ordering::Relaxed) {
            self.with(|files| files.dir(dir).0.single_requests.note());
        }
    }
}

fn are_any_read(closing: &[AheadClose]) -> bool {
    closing.iter().any(|one| one.has_read != 0)
}

impl RemoteShared {
    /// Returns the file that a name of `dir` leads to, if it is open already. Requests several
    /// files of the directory when it is time.
    pub(super) fn open_from_ahead(
        &self,
        cx: &Context<'_>,
        versions: &dyn Versions,
        (dir, found): (Ino, &PathResolution),
        args: OpenArgs,
    ) -> Option<OpenReply> {
        let PathResolution::Inode { ino, attr, .. } = found else { return None };
        let flags = args.flags;
        let is_small = attr.kind == FileKind::Regular && attr.size <= OPEN_BYTES_MAX as u64;
        let only_reads = flags.access() == AccessMode::Read && flags.0 & NO_BYTES == 0;
        if !is_small || !only_reads || self.opened_ahead.is_unsupported.load(Ordering::Relaxed) {
            return None;
        }
        let kind = PrefetchKind { dir, by: OpenIdentity::from_context(cx, flags) };
        if let Some(opened) = self.take_ready(versions, *ino, kind) {
            self.request_files_in_background(cx, kind);
            return Some(opened);
        }
        if self.take_pending(cx, |pending| pending.kind == kind)
            && let Some(opened) = self.take_ready(versions, *ino, kind)
        {
            return Some(opened);
        }
        let from = self.count_miss(dir)?;
        match self.request_files(cx, from, kind) {
            Ok(()) => self.take_ready(versions, *ino, kind),
            Err(Errno::ENOSYS | Errno::ENOTTY) => {
                self.opened_ahead.is_unsupported.store(true, Ordering::Relaxed);
                None
            }
            // The open itself will fail with the error.
            Err(_) => None,
        }
    }

    /// The file `ino`, if it is ready and has not changed.
    fn take_ready(
        &self,
        versions: &dyn Versions,
        ino: Ino,
        kind: PrefetchKind,
    ) -> Option<OpenReply> {
        if !self.opened_ahead.knows_any() || self.connection.has_ended() {
            return None;
        }
        let ready = self.opened_ahead.with(|files| {
            let ready = files.ready.remove(&ino)?;
            // The file may have been opened by another one of its names.
            if ready.kind.by != kind.by || versions.attributes(ino) != Some(ready.version) {
                files.closing.push(ready.make_close(ino));
                return None;
            }
            files.granted.insert(ready.opened.fh);
            files.hits += 1;
            files.dir(kind.dir).0.used += 1;
            Some(ready)
        })?;
        let PrefetchedFile { version, opened, bytes, read_is_due, .. } = ready;
        if self.whole.has_room() {
            let bytes = OpenBytes { bytes: &bytes, read_is_due };
            self.keep_whole((version, kind.by.flags), File { ino, fh: opened.fh }, bytes);
        }
        Some(opened)
    }

    /// Counts a file of `dir` that was not ready. Returns the position from which to request
    /// several, if it is time.
    fn count_miss(&self, dir: Ino) -> Option<u64> {
        if !self.whole.is_worthwhile() {
            return None;
        }
        self.opened_ahead.with(|files| {
            let (dir, rate) = files.dir(dir);
            dir.single_requests.is_enough(rate).then_some(dir.next)
        })
    }

    /// Requests files of a directory, and waits for the reply.
    fn request_files(&self, cx: &Context<'_>, from: u64, kind: PrefetchKind) -> Result<()> {
        let what = OpenAhead { from, flags: kind.by.flags.0, most: BATCH };
        let answer = self.send_request(cx, self.make_request(cx, kind.dir, what))?;
        self.keep_ready(kind, &answer)
    }

    /// Requests further files of a directory when it is time, and does not wait for the reply.
    fn request_files_in_background(&self, cx: &Context<'_>, kind: PrefetchKind) {
        let next = self.opened_ahead.with(|files| {
            let is_free = files.pending.is_none();
            let dir = files.dirs.get_mut(&kind.dir)?;
            let is_due = is_free && dir.next != 0 && dir.used >= USED;
            if is_due {
                dir.used = 0;
            }
            is_due.then_some(dir.next)
        });
        let Some(from) = next else { return };
        let what = OpenAhead { from, flags: kind.by.flags.0, most: BATCH };
        let PrefetchRequest { mut request, input, closing } = self.make_request(cx, kind.dir, what);
        let begun = self.connection.begin(request.finish(input.len()), &input);
        let other = self.opened_ahead.with(|files| match begun {
            Ok(Some(begun)) => {
                files.pending.replace(PendingPrefetch { begun, kind, owes: are_any_read(&closing) })
            }
            // No lane is free.
            _ => {
                files.closing.extend(closing);
                None
            }
        });
        // Another thread has made a request meanwhile.
        if let Some(other) = other {
            self.finish_asking(cx, other);
        }
    }

    /// Takes the reply to a request for further files, if `is_due` holds for it. Returns true if
    /// there was one.
    fn take_pending(
        &self,
        cx: &Context<'_>,
        is_due: impl FnOnce(&mut PendingPrefetch) -> bool,
    ) -> bool {
        if !self.opened_ahead.knows_any() {
            return false;
        }
        let pending = self.opened_ahead.with(|files| files.pending.take_if(is_due));
        pending.map(|pending| self.finish_asking(cx, pending)).is_some()
    }

    fn finish_asking(
        &self,
        cx: &Context<'_>,
        PendingPrefetch { begun, kind, .. }: PendingPrefetch,
    ) {
        let answer = self.connection.take_begun(begun, cx, output_of);
        if let Err(errno) = answer.and_then(|output| self.keep_ready(kind, &output)) {
            log::debug!("no further files are open: {errno}");
        }
    }

    /// Keeps the files in an answer.
    fn keep_ready(&self, kind: PrefetchKind, output: &[u8]) -> Result<()> {
        let (next, all) =
            log_decode_error(Opcode::Ioctl, output.len(), decode_opened_files(output, kind))?;
        self.opened_ahead.with(|files| {
            if files.ready.len() + all.len() > MOST_READY {
                files.keep(|_, _| false);
            }
            if !all.is_empty() {
                files.rate.count(all.len() as u64, files.hits);
            }
            let (dir, rate) = files.dir(kind.dir);
            let is_end = dir.next != 0 && next == 0;
            dir.next = next;
            if rate.was_worthwhile() && (is_end || !all.is_empty()) {
                dir.single_requests.expect_prefetch();
            }
            for (ino, one) in all {
                // A file with two names is opened twice.
                let former = files.ready.insert(ino, one);
                files.closing.extend(former.map(|former| former.make_close(ino)));
            }
        });
        Ok(())
    }

    /// The request `OPEN_AHEAD`, with some of the files to close.
    fn make_request(&self, cx: &Context<'_>, dir: Ino, what: OpenAhead) -> PrefetchRequest {
        let mut closing = Vec::new();
        self.opened_ahead.with(|files| {
            files.caller = cx.caller;
            // A device that does not answer holds up only its own files.
            let is_next = |one: &AheadClose| device_of(Ino(one.ino)) == device_of(dir);
            while closing.len() < AHEAD_MAX
                && let Some(at) = files.closing.iter().position(is_next)
            {
                closing.push(files.closing.swap_remove(at));
            }
        });
        let input = [what.as_bytes(), closing.as_bytes()].concat();
        let ioctl = abi::IoctlIn {
            cmd: OPEN_AHEAD,
            in_size: input.len() as u32,
            out_size: self.agreement.max_received() as u32,
            ..abi::IoctlIn::default()
        };
        let request = EncodedRequest::new(Opcode::Ioctl, cx, dir).with(&ioctl);
        PrefetchRequest { request, input, closing }
    }

    /// Sends `OPEN_AHEAD`. The usual step before a request, which closes files, is left out.
    fn send_request(&self, cx: &Context<'_>, mut prefetch: PrefetchRequest) -> Result<Vec<u8>> {
        let PrefetchRequest { request, input, closing } = &mut prefetch;
        let answer = self.connection.request(cx, request.finish(input.len()), input, output_of);
        if matches!(answer, Err(Errno::EINTR | Errno::EAGAIN | Errno::ENOMEM)) {
            // Perhaps the server has not got it. Closing a file twice has no effect.
            self.opened_ahead.with(|files| files.closing.append(closing));
        }
        answer
    }

    /// Lets the server close some files that were read before the connection ends, and waits for a
    /// limited time.
    pub(super) fn send_last_closing(&self, patience: Duration) {
        let (caller, dir) = self.opened_ahead.with(|files| {
            let owed = files.closing.iter().find(|one| one.has_read != 0);
            (files.caller, owed.map(|one| Ino(one.ino)))
        });
        let Some(dir) = dir else { return };
        let cx = Context::new(caller);
        let PrefetchRequest { request, input, .. } =
            self.make_request(&cx, dir, OpenAhead::default());
        let mut request = request.with_bytes(&input);
        let _ = self.connection.request_with_timeout(patience, &cx, request.finish(0), |_| Ok(()));
    }

    /// Lets the server close the files that are closed here.
    pub(super) fn send_closing(&self) {
        let ahead = &self.opened_ahead;
        while ahead.knows_any() {
            let (caller, first) =
                ahead.with(|files| (files.caller, files.closing.first().map(|one| Ino(one.ino))));
            let cx = Context::new(caller);
            if self.take_pending(&cx, |pending| pending.owes) {
                continue;
            }
            let Some(first) = first else { return };
            let request = self.make_request(&cx, first, OpenAhead::default());
            if let Err(errno) = self.send_request(&cx, request) {
                // Otherwise the end of the connection closes them.
                return log::debug!("some files are not closed yet: {errno}");
            }
        }
    }

    /// A name was removed: its file or directory must not stay open here.
    pub(super) fn close_removed(&self, dir: Ino) {
        let versions = self.paths.versions.get();
        if let Some(versions) = versions {
            self.close_next(|(ino, version)| versions.attributes(ino) != Some(version));
        }
        if !self.opened_ahead.knows_any() {
            return;
        }
        if let Some(versions) = versions {
            let cx = Context::new(self.opened_ahead.with(|files| files.caller));
            self.take_pending(&cx, |pending| device_of(pending.kind.dir) == device_of(dir));
            self.opened_ahead.with(|files| {
                files.keep(|ino, ready| versions.attributes(ino) == Some(ready.version));
            });
        }
        self.send_closing();
    }

    /// Closes all files that were not opened by a caller, and reports to the server which were
    /// read.
    pub(super) fn close_ahead(&self) {
        self.close_next(|_| true);
        if self.opened_ahead.knows_any() {
            let cx = Context::new(self.opened_ahead.with(|files| files.caller));
            self.take_pending(&cx, |_| true);
            self.opened_ahead.with(|files| files.keep(|_, _| false));
            self.send_closing();
        }
    }
}

/// The output of `OPEN_AHEAD` in a reply.
fn output_of(body: &[u8]) -> Result<Vec<u8>> {
    let reply = log_decode_error(Opcode::Ioctl, body.len(), ioctl_out(body, body.len()))?;
    Ok(reply.output)
}

/// The position for the next request, and the open files in an answer.
fn decode_opened_files(
    output: &[u8],
    kind: PrefetchKind,
) -> Result<(u64, Vec<(Ino, PrefetchedFile)>)> {
    let (end, mut rest) = AheadEnd::read_from_prefix(output).map_err(|_| Errno::EIO)?;
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (file, after) = AheadFile::read_from_prefix(rest).map_err(|_| Errno::EIO)?;
        let len = file.len as usize;
        let padded = len.checked_next_multiple_of(8).ok_or(Errno::EIO)?;
        let (opened, bytes) = decode::open_out_with_bytes(after.get(..len).ok_or(Errno::EIO)?)?;
        rest = after.get(padded..).ok_or(Errno::EIO)?;
        if file.ino <= Ino::ROOT.0 || all.len() == AHEAD_MAX {
            return Err(Errno::EIO);
        }
        let OpenBytes { bytes, read_is_due } = bytes.ok_or(Errno::EIO)?;
        let (version, bytes) = (file.version, bytes.into());
        all.push((Ino(file.ino), PrefetchedFile { kind, version, opened, bytes, read_is_due }));
    }
    Ok((end.next, all))
}

#[cfg(test)]
mod tests {
    use defuse_fs::OpenFlags;
    use defuse_wire::vendor::OPEN_HAS_BYTES;

    use super::*;

    fn answer(files: &[(u64, &[u8])]) -> Vec<u8> {
        let mut output = AheadEnd { next: 7 }.as_bytes().to_vec();
        for (ino, bytes) in files {
            let open = abi::OpenOut { fh: 5, open_flags: OPEN_HAS_BYTES, ..Default::default() };
            let len = (size_of_val(&open) + bytes.len()) as u32;
            let file = AheadFile { ino: *ino, version: 9, len, reserved: 0 };
            output.extend([file.as_bytes(), open.as_bytes(), bytes].concat());
            output.resize(output.len().next_multiple_of(8), 0);
        }
        output
    }

    fn decode_files(output: &[u8]) -> Result<(u64, Vec<(Ino, PrefetchedFile)>)> {
        let by = OpenIdentity::from_context(&Context::new(Caller::default()), OpenFlags(0));
        let kind = PrefetchKind { dir: Ino(2), by };
        decode_opened_files(output, kind)
    }

    #[test]
    fn an_answer_has_files_with_their_bytes() {
        let output = answer(&[(3, b"three"), (4, b""), (5, &[5; 32768])]);
        let (next, all) = decode_files(&output).unwrap();
        let bytes: Vec<_> = all.iter().map(|(ino, ready)| (ino.0, ready.bytes.len())).collect();
        assert_eq!((next, bytes), (7, vec![(3, 5), (4, 0), (5, 32768)]));
        assert_eq!((all[0].1.version, all[0].1.opened.fh), (9, Fh(5)));
        let many: Vec<(u64, &[u8])> =
            (2..=AHEAD_MAX as u64 + 2).map(|ino| (ino, &[][..])).collect();
        let wrong = [answer(&[(1, b"root")]), answer(&[(0, b"none")]), answer(&many)];
        assert!(wrong.iter().all(|output| decode_files(output).is_err()));
        assert!(decode_files(&answer(&[(3, &[3; 32769])])).is_err(), "longer than a small file");
    }

    /// A server may send wrong data.
    #[test]
    fn any_bytes_are_an_answer_or_an_error() {
        let good = answer(&[(3, b"three"), (4, b"four")]);
        for len in 0..good.len() {
            let _ = decode_files(&good[..len]);
        }
        for at in 0..good.len() {
            for value in [0, 1, 7, 128, 255] {
                let mut changed = good.clone();
                changed[at] = value;
                let _ = decode_files(&changed);
            }
        }
    }
}
