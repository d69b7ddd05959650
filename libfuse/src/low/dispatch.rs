//! Requests, decoded and passed to the functions of a program.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use defuse_fs::PollHandle;
use defuse_fuse::abi::{self as wire, Opcode};
use defuse_wire::request::{DecodeOptions, DecodedRequest, RequestBody, RequestPayload, peek};
use libc::{off_t, stat};
use zerocopy::IntoBytes;

use super::abi::{CallerIds, ForgetItem, LowOperations, RequestPtr};
use super::init::{NO_OPEN, NO_OPENDIR, offer, reply};
use super::notify::LowNotifier;
use super::port::LowPort;
use super::reply::{answer, fuse_reply_err, fuse_reply_none, fuse_reply_open, refuse};
use super::requests::{self, LowRequest};
use super::session::{LowService, LowSession};
use crate::abi::{DataPart, DataParts, info_bits};
use crate::buffers::poll_pointer;
use crate::calls::{OpenInfo, RawInfo, older, take_older};
use crate::handle::lock;
use crate::logging::error;
use crate::options::ApiVersion;

/// Handles one message that came through `port`.
pub(crate) fn process(session: &Arc<LowSession>, message: &[u8], port: &Arc<LowPort>) {
    let operations = match &session.service {
        LowService::Operations(operations) => operations,
        LowService::Functions(functions) => return session.process_by(functions, message),
    };
    let header = match peek(message) {
        Ok(header) => header,
        Err(problem) => return error(&format!("fuse: {problem}")),
    };
    let refused = |errno| refuse(port, header.unique, errno);
    let request = match DecodedRequest::parse(message, &DecodeOptions::default()) {
        Ok(request) => request,
        Err(problem) => {
            let is_known = Opcode::from_u32(header.opcode).is_some();
            if is_known {
                error(&format!("fuse: {problem}"));
            }
            return refused(if is_known { libc::EIO } else { libc::ENOSYS });
        }
    };
    if let RequestBody::Init(args) = &request.body {
        return init(session, operations, &request, args, port);
    }
    if !session.is_serving() {
        return refused(libc::EIO);
    }
    if session.refuses(request.uid) && !is_of_open_file(request.opcode) {
        return refused(libc::EACCES);
    }
    if session.is_read_only() && is_change(&request) {
        return refused(libc::EROFS);
    }
    match &request.body {
        RequestBody::Interrupt(args) => session.interrupt(args.unique),
        RequestBody::Destroy => {
            session.destroy_program();
            refuse(port, request.unique, 0);
        }
        RequestBody::BatchForget(all) => {
            let items = all.map(|item| ForgetItem { ino: item.nodeid, nlookup: item.nlookup });
            forget(session, operations, port, items.collect());
        }
        RequestBody::Forget(args) => {
            let item = ForgetItem { ino: request.nodeid, nlookup: args.nlookup };
            forget(session, operations, port, vec![item]);
        }
        _ => begin(session, operations, message, &request, port),
    }
}

/// True for requests of files whose opening was permitted.
fn is_of_open_file(opcode: Opcode) -> bool {
    use Opcode::*;
    matches!(
        opcode,
        Read | Write
            | Fsync
            | Flush
            | Release
            | Readdir
            | Readdirplus
            | Fsyncdir
            | Releasedir
            | Forget
            | BatchForget
            | Interrupt
            | NotifyReply
            | Destroy
    )
}

/// True for requests that the kernel does not make on a read-only mount.
fn is_change(request: &DecodedRequest<'_>) -> bool {
    use Opcode::*;
    if let RequestBody::Open(args) = &request.body {
        let flags = args.flags as c_int;
        return flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
    }
    matches!(
        request.opcode,
        Setattr
            | Symlink
            | Mknod
            | Mkdir
            | Unlink
            | Rmdir
            | Rename
            | Rename2
            | Link
            | Write
            | Setxattr
            | Removexattr
            | Create
            | Tmpfile
            | Fallocate
            | CopyFileRange
            | CopyFileRange64
    )
}

/// Calls `init` of the program, and replies to INIT.
fn init(
    session: &LowSession,
    operations: &LowOperations,
    request: &DecodedRequest<'_>,
    args: &wire::InitIn,
    port: &LowPort,
) {
    if args.major > wire::FUSE_KERNEL_VERSION {
        // The kernel repeats INIT with our version.
        let out = wire::InitOut { major: wire::FUSE_KERNEL_VERSION, ..Default::default() };
        let _ = answer(port, request.unique, &[out.as_bytes()]);
        return;
    }
    if args.major < wire::FUSE_KERNEL_VERSION {
        error(&format!("fuse: unsupported protocol version: {}.{}", args.major, args.minor));
        return refuse(port, request.unique, libc::EPROTO);
    }
    if !session.begin() {
        return refuse(port, request.unique, libc::EIO);
    }
    let offered = offer(session.version, operations, args, session.max_read());
    let mut conn = offered;
    session.conn_options.apply(&mut conn);
    if let Some(init) = operations.init {
        // SAFETY: the function is the program's for this purpose, and the structures live longer
        // than the call.
        unsafe {
            match session.version {
                ApiVersion::Three => init(session.userdata(), (&raw mut conn).cast()),
                ApiVersion::Two => {
                    let mut older = older(&conn);
                    init(session.userdata(), (&raw mut older).cast());
                    take_older(&mut conn, &older);
                }
            }
        }
    }
    match reply(&conn, &offered, args) {
        Ok(out) => {
            *lock(&session.conn) = conn;
            session.agree(&conn, out.max_write);
            let _ = answer(port, request.unique, &[out.as_bytes()]);
        }
        Err(message) => {
            error(&message);
            refuse(port, request.unique, libc::EPROTO);
            session.end(-libc::EPROTO);
        }
    }
}

/// Passes lookups to forget to the program.
fn forget(
    session: &Arc<LowSession>,
    operations: &LowOperations,
    port: &Arc<LowPort>,
    mut items: Vec<ForgetItem>,
) {
    let given = || {
        let mut request = LowRequest::new(session, port, 0, CallerIds::default());
        request.has_reply = false;
        requests::give(request)
    };
    // SAFETY: the functions are the program's for this purpose, and the list lives longer than the
    // call.
    unsafe {
        match (operations.forget_multi, operations.forget) {
            (Some(forget), one) if items.len() > 1 || one.is_none() => {
                forget(given(), items.len(), items.as_mut_ptr());
            }
            (_, Some(forget)) => {
                for item in items {
                    forget(given(), item.ino, item.nlookup);
                }
            }
            _ => {}
        }
    }
}

/// Gives the program a request.
fn begin(
    session: &Arc<LowSession>,
    operations: &LowOperations,
    message: &[u8],
    request: &DecodedRequest<'_>,
    port: &Arc<LowPort>,
) {
    let umask = match &request.body {
        RequestBody::Mknod { args, .. } => args.umask,
        RequestBody::Mkdir { args, .. } => args.umask,
        RequestBody::Create { args, .. } | RequestBody::Tmpfile { args, .. } => args.umask,
        _ => 0,
    };
    let (uid, gid, pid) = (request.uid, request.gid, request.pid as i32);
    let ids = CallerIds { uid, gid, pid, umask };
    let mut given = LowRequest::new(session, port, request.unique, ids);
    given.has_reply = request.opcode.has_reply();
    given.is_long_copy = request.opcode == Opcode::CopyFileRange64;
    if let RequestBody::Ioctl { args, .. } = &request.body {
        given.is_compat = args.flags & wire::FUSE_IOCTL_COMPAT != 0;
    }
    let req = requests::give(given);
    if session.was_interrupted(request.unique)
        && let Some(given) = requests::look(req)
    {
        given.interrupt(req);
    }
    let call = LowCall { session, operations, message, req, ino: request.nodeid };
    call.run(&request.body);
}

/// A request that the program has, with what its function gets.
struct LowCall<'a> {
    session: &'a Arc<LowSession>,
    operations: &'a LowOperations,
    message: &'a [u8],
    req: RequestPtr,
    ino: u64,
}

/// Calls a function of the program, or refuses the request with `ENOSYS`.
macro_rules! call {
    ($call:expr, $op:ident $(, $arg:expr)*) => {
        match $call.operations.$op {
            // SAFETY: the program has given this function for this operation (`LowSession`), and
            // each pointer is null where libfuse passes null, or leads to a value that lives until
            // the function returns.
            Some(function) => unsafe { function($call.req $(, $arg)*) },
            None => refuse_request(stringify!($op), $call.req, libc::ENOSYS),
        }
    };
}

/// Refuses a request.
fn refuse_request(operation: &str, req: RequestPtr, errno: c_int) {
    log::debug!("{operation}: {errno}");
    fuse_reply_err(req, errno);
}

impl LowCall<'_> {
    /// The structure for an open file.
    fn info(&self, info: OpenInfo) -> RawInfo {
        RawInfo::new(self.session.version, &info)
    }

    /// The name as the kernel has sent it, with its NUL.
    fn text(&self, name: &[u8]) -> *const c_char {
        let start = name.as_ptr().addr() - self.message.as_ptr().addr();
        let text = &self.message[start..];
        // The decoder has found the NUL.
        assert_eq!(text.get(name.len()), Some(&0));
        text.as_ptr().cast()
    }

    fn run(&self, body: &RequestBody<'_>) {
        match body {
            RequestBody::Lookup { .. }
            | RequestBody::Symlink { .. }
            | RequestBody::Mknod { .. }
            | RequestBody::Mkdir { .. }
            | RequestBody::Unlink { .. }
            | RequestBody::Rmdir { .. }
            | RequestBody::Rename { .. }
            | RequestBody::Rename2 { .. }
            | RequestBody::Link { .. } => self.run_name(body),
            RequestBody::Create { .. }
            | RequestBody::Tmpfile { .. }
            | RequestBody::Open(_)
            | RequestBody::Opendir(_)
            | RequestBody::Flush(_)
            | RequestBody::Release(_)
            | RequestBody::Releasedir(_)
            | RequestBody::Fsync(_)
            | RequestBody::Fsyncdir(_) => self.run_open(body),
            RequestBody::Read(_)
            | RequestBody::Write { .. }
            | RequestBody::Readdir(_)
            | RequestBody::Readdirplus(_)
            | RequestBody::Fallocate(_)
            | RequestBody::Lseek(_)
            | RequestBody::CopyFileRange(_)
            | RequestBody::CopyFileRange64(_) => self.run_data(body),
            RequestBody::Getlk(args) => self.getlk(args),
            RequestBody::Setlk(args) => self.setlk(args, false),
            RequestBody::Setlkw(args) => self.setlk(args, true),
            RequestBody::Ioctl { args, data } => self.ioctl(args, data),
            RequestBody::Poll(args) => self.poll(args),
            RequestBody::NotifyReply { args, data } => self.deliver_retrieved(args, data),
            _ => self.run_attributes(body),
        }
    }

    fn run_name(&self, body: &RequestBody<'_>) {
        match *body {
            RequestBody::Lookup { name } => call!(self, lookup, self.ino, self.text(name)),
            RequestBody::Symlink { name, target, .. } => {
                call!(self, symlink, self.text(target), self.ino, self.text(name));
            }
            RequestBody::Mknod { args, name, .. } => {
                call!(self, mknod, self.ino, self.text(name), args.mode, u64::from(args.rdev));
            }
            RequestBody::Mkdir { args, name, .. } => {
                call!(self, mkdir, self.ino, self.text(name), args.mode);
            }
            RequestBody::Unlink { name } => call!(self, unlink, self.ino, self.text(name)),
            RequestBody::Rmdir { name } => call!(self, rmdir, self.ino, self.text(name)),
            RequestBody::Rename { args, name, newname } => {
                self.rename(args.newdir, name, newname, 0);
            }
            // Programs of libfuse 2 would not see the flags.
            RequestBody::Rename2 { .. } if self.session.version == ApiVersion::Two => {
                refuse_request("rename", self.req, libc::ENOSYS);
            }
            RequestBody::Rename2 { args, name, newname } => {
                self.rename(args.newdir, name, newname, args.flags);
            }
            RequestBody::Link { args, name } => {
                call!(self, link, args.oldnodeid, self.ino, self.text(name));
            }
            _ => refuse_request("name", self.req, libc::ENOSYS),
        }
    }

    fn rename(&self, newdir: u64, name: &[u8], newname: &[u8], flags: u32) {
        call!(self, rename, self.ino, self.text(name), newdir, self.text(newname), flags);
    }

    fn run_open(&self, body: &RequestBody<'_>) {
        let open = |flags: u32| self.info(OpenInfo { flags: flags as i32, ..OpenInfo::default() });
        match *body {
            RequestBody::Create { args, name, .. } => {
                let mut info = open(args.flags);
                call!(self, create, self.ino, self.text(name), args.mode, info.pointer());
            }
            RequestBody::Tmpfile { args, .. } => {
                let mut info = open(args.flags);
                call!(self, tmpfile, self.ino, args.mode, info.pointer());
            }
            RequestBody::Open(args) if self.operations.open.is_none() => {
                self.open_without(NO_OPEN, open(args.flags));
            }
            RequestBody::Opendir(args) if self.operations.opendir.is_none() => {
                self.open_without(NO_OPENDIR, open(args.flags));
            }
            RequestBody::Open(args) => {
                call!(self, open, self.ino, open(args.flags).pointer());
            }
            RequestBody::Opendir(args) => {
                call!(self, opendir, self.ino, open(args.flags).pointer());
            }
            RequestBody::Flush(args) => {
                let (fh, lock_owner) = (args.fh, args.lock_owner);
                let bits = info_bits::FLUSH;
                let mut info = self.info(OpenInfo { fh, lock_owner, bits, ..OpenInfo::default() });
                call!(self, flush, self.ino, info.pointer());
            }
            RequestBody::Release(_) if self.operations.release.is_none() => {
                fuse_reply_err(self.req, 0);
            }
            RequestBody::Releasedir(_) if self.operations.releasedir.is_none() => {
                fuse_reply_err(self.req, 0);
            }
            RequestBody::Release(args) => {
                call!(self, release, self.ino, self.closing(&args).pointer());
            }
            RequestBody::Releasedir(args) => {
                call!(self, releasedir, self.ino, self.closing(&args).pointer());
            }
            RequestBody::Fsync(args) => {
                let (mut info, data_only) = self.syncing(&args);
                call!(self, fsync, self.ino, data_only, info.pointer());
            }
            RequestBody::Fsyncdir(args) => {
                let (mut info, data_only) = self.syncing(&args);
                call!(self, fsyncdir, self.ino, data_only, info.pointer());
            }
            _ => refuse_request("open", self.req, libc::ENOSYS),
        }
    }

    /// Opens without a function of the program, once for each file or never again.
    fn open_without(&self, capability: u32, mut info: RawInfo) {
        if self.session.wants(capability) {
            return refuse_request("open", self.req, libc::ENOSYS);
        }
        // SAFETY: the structure is of the session's version.
        unsafe { fuse_reply_open(self.req, info.pointer()) };
    }

    fn closing(&self, args: &wire::ReleaseIn) -> RawInfo {
        let mut bits = 0;
        if args.release_flags & wire::FUSE_RELEASE_FLUSH != 0 {
            bits |= info_bits::FLUSH;
        }
        if args.release_flags & wire::FUSE_RELEASE_FLOCK_UNLOCK != 0 {
            bits |= info_bits::FLOCK_RELEASE;
        }
        let (flags, lock_owner) = (args.flags as i32, args.lock_owner);
        self.info(OpenInfo { flags, bits, fh: args.fh, lock_owner, events: 0 })
    }

    fn syncing(&self, args: &wire::FsyncIn) -> (RawInfo, c_int) {
        let info = self.info(OpenInfo { fh: args.fh, ..OpenInfo::default() });
        (info, c_int::from(args.fsync_flags & wire::FUSE_FSYNC_FDATASYNC != 0))
    }

    fn run_data(&self, body: &RequestBody<'_>) {
        let file = |fh| self.info(OpenInfo { fh, ..OpenInfo::default() });
        match *body {
            RequestBody::Read(args) => {
                let has_owner = args.read_flags & wire::FUSE_READ_LOCKOWNER != 0;
                let lock_owner = if has_owner { args.lock_owner } else { 0 };
                let (fh, flags) = (args.fh, args.flags as i32);
                let mut info = self.info(OpenInfo { fh, flags, lock_owner, ..OpenInfo::default() });
                let (size, offset) = (args.size as usize, args.offset as off_t);
                call!(self, read, self.ino, size, offset, info.pointer());
            }
            RequestBody::Write { args, data } => self.write(&args, data),
            RequestBody::Readdir(args) => {
                let (size, offset) = (args.size as usize, args.offset as off_t);
                call!(self, readdir, self.ino, size, offset, file(args.fh).pointer());
            }
            RequestBody::Readdirplus(args) => {
                let (size, offset) = (args.size as usize, args.offset as off_t);
                call!(self, readdirplus, self.ino, size, offset, file(args.fh).pointer());
            }
            RequestBody::Fallocate(args) => {
                let (mode, from, len) =
                    (args.mode as i32, args.offset as off_t, args.length as off_t);
                call!(self, fallocate, self.ino, mode, from, len, file(args.fh).pointer());
            }
            RequestBody::Lseek(args) => {
                let (offset, whence) = (args.offset as off_t, args.whence as c_int);
                call!(self, lseek, self.ino, offset, whence, file(args.fh).pointer());
            }
            RequestBody::CopyFileRange(args) | RequestBody::CopyFileRange64(args) => {
                let (mut from, mut to) = (file(args.fh_in), file(args.fh_out));
                let (off_in, off_out) = (args.off_in as off_t, args.off_out as off_t);
                let (from, to) = (from.pointer(), to.pointer());
                let (out, len, flags) = (args.nodeid_out, args.len as usize, args.flags as c_int);
                call!(self, copy_file_range, self.ino, off_in, from, out, off_out, to, len, flags);
            }
            _ => refuse_request("data", self.req, libc::ENOSYS),
        }
    }

    fn write(&self, args: &wire::WriteIn, data: RequestPayload<'_>) {
        let RequestPayload::Memory(data) = data else {
            return refuse_request("write", self.req, libc::EIO);
        };
        let has_owner = args.write_flags & wire::FUSE_WRITE_LOCKOWNER != 0;
        let is_cached = args.write_flags & wire::FUSE_WRITE_CACHE != 0;
        let mut info = self.info(OpenInfo {
            flags: args.flags as i32,
            bits: if is_cached { info_bits::WRITEPAGE } else { 0 },
            fh: args.fh,
            lock_owner: if has_owner { args.lock_owner } else { 0 },
            events: 0,
        });
        let (ino, offset, info) = (self.ino, args.offset as off_t, info.pointer());
        match self.operations.write_buf {
            Some(_) => call!(self, write_buf, ino, &mut memory(data), offset, info),
            None => call!(self, write, ino, data.as_ptr().cast(), data.len(), offset, info),
        }
    }

    fn run_attributes(&self, body: &RequestBody<'_>) {
        let ino = self.ino;
        match *body {
            RequestBody::Getattr(args) => {
                let has_file = args.getattr_flags & wire::FUSE_GETATTR_FH != 0;
                let mut info = self.info(OpenInfo { fh: args.fh, ..OpenInfo::default() });
                call!(self, getattr, ino, if has_file { info.pointer() } else { null_mut() });
            }
            RequestBody::Setattr(args) => self.setattr(&args),
            RequestBody::Readlink => call!(self, readlink, ino),
            RequestBody::Statfs => match self.operations.statfs {
                Some(_) => call!(self, statfs, ino),
                None => super::reply::reply_statfs_default(self.req),
            },
            RequestBody::Access(args) => call!(self, access, ino, args.mask as c_int),
            RequestBody::Setxattr { args, name, value } => {
                let (value, len) = (value.as_ptr().cast(), value.len());
                call!(self, setxattr, ino, self.text(name), value, len, args.flags as c_int);
            }
            RequestBody::Getxattr { args, name } => {
                call!(self, getxattr, ino, self.text(name), args.size as usize);
            }
            RequestBody::Listxattr(args) => call!(self, listxattr, ino, args.size as usize),
            RequestBody::Removexattr { name } => call!(self, removexattr, ino, self.text(name)),
            RequestBody::Bmap(args) => {
                call!(self, bmap, ino, args.blocksize as usize, args.block);
            }
            _ => refuse_request("request", self.req, libc::ENOSYS),
        }
    }

    fn setattr(&self, args: &wire::SetattrIn) {
        /// The fields that programs know: all up to the times of now, and the time of change in
        /// libfuse 3.
        const FIELDS: u32 = wire::FATTR_MODE
            | wire::FATTR_UID
            | wire::FATTR_GID
            | wire::FATTR_SIZE
            | wire::FATTR_ATIME
            | wire::FATTR_MTIME
            | wire::FATTR_ATIME_NOW
            | wire::FATTR_MTIME_NOW;
        // SAFETY: all bytes of the structure may be zero.
        let mut attr: stat = unsafe { MaybeUninit::zeroed().assume_init() };
        attr.st_ino = self.ino;
        (attr.st_mode, attr.st_uid, attr.st_gid) = (args.mode, args.uid, args.gid);
        attr.st_size = args.size as off_t;
        (attr.st_atime, attr.st_atime_nsec) = (args.atime as i64, i64::from(args.atimensec));
        (attr.st_mtime, attr.st_mtime_nsec) = (args.mtime as i64, i64::from(args.mtimensec));
        (attr.st_ctime, attr.st_ctime_nsec) = (args.ctime as i64, i64::from(args.ctimensec));
        let is_three = self.session.version == ApiVersion::Three;
        let fields = if is_three { FIELDS | wire::FATTR_CTIME } else { FIELDS };
        let mut info = self.info(OpenInfo { fh: args.fh, ..OpenInfo::default() });
        let has_file = args.valid & wire::FATTR_FH != 0;
        let info = if has_file { info.pointer() } else { null_mut() };
        call!(self, setattr, self.ino, &mut attr, (args.valid & fields) as c_int, info);
    }

    fn lock_info(&self, args: &wire::LkIn) -> RawInfo {
        let (fh, lock_owner) = (args.fh, args.owner);
        self.info(OpenInfo { fh, lock_owner, ..OpenInfo::default() })
    }

    fn getlk(&self, args: &wire::LkIn) {
        let mut lock = flock_of(&args.lk);
        call!(self, getlk, self.ino, self.lock_info(args).pointer(), &mut lock);
    }

    fn setlk(&self, args: &wire::LkIn, waits: bool) {
        let mut info = self.lock_info(args);
        if args.lk_flags & wire::FUSE_LK_FLOCK == 0 {
            let mut lock = flock_of(&args.lk);
            return call!(self, setlk, self.ino, info.pointer(), &mut lock, c_int::from(waits));
        }
        let operation = match args.lk.type_ as c_int {
            libc::F_RDLCK => libc::LOCK_SH,
            libc::F_WRLCK => libc::LOCK_EX,
            _ => libc::LOCK_UN,
        };
        let operation = if waits { operation } else { operation | libc::LOCK_NB };
        call!(self, flock, self.ino, info.pointer(), operation);
    }

    fn ioctl(&self, args: &wire::IoctlIn, data: &[u8]) {
        /// `FUSE_CAP_IOCTL_DIR`.
        const OF_DIRECTORIES: u32 = crate::abi::caps::IOCTL_DIR;
        if args.flags & wire::FUSE_IOCTL_DIR != 0 && !self.session.wants(OF_DIRECTORIES) {
            return refuse_request("ioctl", self.req, libc::ENOTTY);
        }
        let mut info = self.info(OpenInfo { fh: args.fh, ..OpenInfo::default() });
        let input: *const c_void = if data.is_empty() { null() } else { data.as_ptr().cast() };
        let argument = std::ptr::without_provenance_mut(args.arg as usize);
        let (info, room) = (info.pointer(), args.out_size as usize);
        let (cmd, flags) = (args.cmd, args.flags);
        call!(self, ioctl, self.ino, cmd, argument, info, flags, input, data.len(), room);
    }

    fn poll(&self, args: &wire::PollIn) {
        if self.operations.poll.is_none() {
            return refuse_request("poll", self.req, libc::ENOSYS);
        }
        let (fh, events) = (args.fh, args.events);
        let mut info = self.info(OpenInfo { fh, events, ..OpenInfo::default() });
        let is_waiting = args.flags & wire::FUSE_POLL_SCHEDULE_NOTIFY != 0;
        let wake = is_waiting.then(|| (PollHandle(args.kh), LowNotifier::new_shared(self.session)));
        call!(self, poll, self.ino, info.pointer(), poll_pointer(wake));
    }

    /// Passes pages that the program has requested.
    fn deliver_retrieved(&self, args: &wire::NotifyRetrieveIn, data: &RequestPayload<'_>) {
        let request = requests::look(self.req);
        let cookie =
            request.and_then(|request| lock(&self.session.retrievals).remove(&request.unique));
        let (Some(cookie), Some(_), RequestPayload::Memory(data)) =
            (cookie, self.operations.retrieve_reply, data)
        else {
            return fuse_reply_none(self.req);
        };
        let (ino, offset) = (self.ino, args.offset as off_t);
        call!(self, retrieve_reply, cookie.0, ino, offset, &mut memory(data));
    }
}

/// Data of a request as a `struct fuse_bufvec`. The program may read it until its function returns.
fn memory(data: &[u8]) -> DataParts {
    let mem = data.as_ptr().cast_mut().cast();
    let part = DataPart { size: data.len(), flags: 0, mem, fd: -1, pos: 0 };
    DataParts { count: 1, idx: 0, off: 0, buf: [part] }
}

/// The end of a lock that reaches to the end of the file.
const LAST: u64 = i64::MAX as u64;

fn flock_of(lock: &wire::FileLock) -> libc::flock {
    let reaches_end = lock.end >= LAST;
    let len = lock.end.saturating_sub(lock.start).saturating_add(1);
    libc::flock {
        l_type: lock.type_ as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: lock.start as off_t,
        l_len: if reaches_end { 0 } else { len as off_t },
        l_pid: lock.pid as i32,
    }
}

/// A lock of the program in the form of the kernel.
pub(crate) fn file_lock(lock: &libc::flock) -> wire::FileLock {
    let start = lock.l_start as u64;
    let end = if lock.l_len == 0 { LAST } else { start.wrapping_add(lock.l_len as u64 - 1) };
    let type_ = u32::from(lock.l_type as u16);
    let is_none = c_int::from(lock.l_type) == libc::F_UNLCK;
    let (start, end) = if is_none { (0, 0) } else { (start, end) };
    wire::FileLock { start, end, type_, pid: lock.l_pid as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_the_same_in_both_forms() {
        for (start, end, len) in [(0, LAST, 0), (10, 10, 1), (10, 19, 10), (LAST, LAST, 0)] {
            let kernel = wire::FileLock { start, end, type_: 1, pid: 7 };
            let program = flock_of(&kernel);
            assert_eq!((program.l_start as u64, program.l_len), (start, len));
            assert_eq!(file_lock(&program), kernel);
        }
    }
}
