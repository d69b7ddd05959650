//! `struct fuse_session` of a program of the interface of inodes.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::abi::{LowOperations, SessionFunctions};
use super::port::LowPort;
use super::requests;
use crate::abi::ConnInfoThree;
use crate::handle::{HandleKind, MountedDevice, kind_of, largest_write, lock};
use crate::logging::error;
use crate::options::{ApiVersion, ConnOptions, MountChoice, OptionOutcome, take_from};

/// Interrupts that are remembered until their requests come.
const EARLY_MOST: usize = 256;

/// The time for which an interrupt is remembered: a thread gives a request to the program right
/// after it has received it.
const EARLY_FOR: Duration = Duration::from_secs(1);

/// The side of the program.
pub(crate) enum LowService {
    /// Its operations.
    Operations(Box<LowOperations>),
    /// Its functions for whole messages, of libfuse 2.
    Functions(SessionFunctions),
}

/// A session: the operations of a program, the mount that they serve, and what was agreed with the
/// kernel.
#[repr(C)]
pub struct LowSession {
    kind: HandleKind,
    pub(crate) version: ApiVersion,
    pub(crate) service: LowService,
    data: *mut c_void,
    choice: Mutex<MountChoice>,
    /// Users but root and the mounting one have no access, by `allow_root`.
    is_private: AtomicBool,
    /// Changes are refused, where no kernel does it.
    is_read_only: AtomicBool,
    pub(crate) conn_options: ConnOptions,
    mounted: Mutex<Option<Arc<MountedDevice>>>,
    port: Mutex<Option<Arc<LowPort>>>,
    state: AtomicU8,
    /// The offer to the program, and its choice, once INIT has come.
    pub(crate) conn: Mutex<ConnInfoThree>,
    /// The capabilities in `conn`.
    want: AtomicU32,
    /// Bytes of the largest message.
    room: AtomicUsize,
    has_exited: AtomicBool,
    /// A signal, or a negated error number.
    error: AtomicI32,
    /// Counts the reasons to leave a loop of several threads.
    pub(crate) wakeup: OwnedFd,
    /// The cookies of the program for pages that it has requested.
    pub(crate) retrievals: Mutex<HashMap<u64, RetrievalCookie>>,
    /// Interrupts whose requests the program does not have yet.
    early: EarlyInterrupts,
}

/// The cookie of `fuse_lowlevel_notify_retrieve`.
#[derive(Clone, Copy)]
pub(crate) struct RetrievalCookie(pub(crate) *mut c_void);

// SAFETY: the pointer is the program's, and is only passed back to it.
unsafe impl Send for RetrievalCookie {}
// SAFETY: the pointers in the operations and the data are the program's, which libfuse calls from
// any thread. All that changes is atomic or behind a lock.
unsafe impl Send for LowSession {}
// SAFETY: as above.
unsafe impl Sync for LowSession {}

const NEW: u8 = 0;
const SERVING: u8 = 1;
const DESTROYED: u8 = 2;

impl LowSession {
    /// A session of libfuse 3, with the options in `words`. Returns an error for the user.
    pub fn three(
        operations: LowOperations,
        words: &[CString],
        data: *mut c_void,
    ) -> Result<Arc<Self>, String> {
        if words.is_empty() {
            return Err("fuse: empty argv passed to fuse_session_new().".to_owned());
        }
        let mut choice = MountChoice::new(ApiVersion::Three);
        refuse_others(words, |option| choice.take(option))?;
        let service = LowService::Operations(Box::new(operations));
        Self::new(ApiVersion::Three, service, data, choice, ConnOptions::default())
    }

    /// A session of libfuse 2.
    pub fn two(
        operations: LowOperations,
        words: &[CString],
        data: *mut c_void,
    ) -> Result<Arc<Self>, String> {
        let (mut conn, mut choice) = (ConnOptions::default(), MountChoice::new(ApiVersion::Two));
        refuse_others(words, |option| match option {
            "allow_root" => choice.take(option),
            _ => conn.take(option),
        })?;
        let service = LowService::Operations(Box::new(operations));
        Self::new(ApiVersion::Two, service, data, choice, conn)
    }

    /// A session of libfuse 2 whose messages the program decodes.
    pub fn with_functions(
        functions: SessionFunctions,
        data: *mut c_void,
    ) -> Result<Arc<Self>, String> {
        let choice = MountChoice::new(ApiVersion::Two);
        let service = LowService::Functions(functions);
        Self::new(ApiVersion::Two, service, data, choice, ConnOptions::default())
    }

    fn new(
        version: ApiVersion,
        service: LowService,
        data: *mut c_void,
        choice: MountChoice,
        conn_options: ConnOptions,
    ) -> Result<Arc<Self>, String> {
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| format!("fuse: eventfd: {errno}"))?;
        let largest = largest_write(version);
        Ok(Arc::new(LowSession {
            kind: HandleKind::Inodes,
            version,
            service,
            data,
            is_private: AtomicBool::new(choice.allow_root),
            choice: Mutex::new(choice),
            is_read_only: AtomicBool::new(false),
            conn_options,
            mounted: Mutex::new(None),
            port: Mutex::new(None),
            state: AtomicU8::new(NEW),
            conn: Mutex::new(ConnInfoThree::default()),
            want: AtomicU32::new(0),
            room: AtomicUsize::new(largest as usize + super::init::HEADER_ROOM),
            has_exited: AtomicBool::new(false),
            error: AtomicI32::new(0),
            wakeup,
            retrievals: Mutex::new(HashMap::new()),
            early: EarlyInterrupts::default(),
        }))
    }

    /// The data that the program has passed with its operations.
    pub fn userdata(&self) -> *mut c_void {
        self.data
    }

    /// Mounts with the options of the session. Returns an error for the user.
    pub fn mount(&self, mountpoint: &CStr) -> Result<(), String> {
        let choice = lock(&self.choice).clone();
        self.adopt(Arc::new(MountedDevice::new(mountpoint, choice)?));
        Ok(())
    }

    /// Serves this mount.
    pub fn adopt(&self, mounted: Arc<MountedDevice>) {
        self.is_private.fetch_or(mounted.is_private(), Ordering::SeqCst);
        self.is_read_only.store(mounted.refuses_changes(), Ordering::SeqCst);
        *lock(&self.port) = mounted.port();
        *lock(&self.mounted) = Some(mounted);
    }

    /// Serves this port.
    pub fn serve_port(&self, port: Arc<LowPort>) {
        *lock(&self.port) = Some(port);
    }

    /// Gives its mount up.
    pub fn abandon(&self) {
        *lock(&self.mounted) = None;
        *lock(&self.port) = None;
    }

    /// The mount.
    pub fn mounted_device(&self) -> Option<Arc<MountedDevice>> {
        lock(&self.mounted).clone()
    }

    /// Bytes of the largest message.
    pub fn largest_message(&self) -> usize {
        self.room.load(Ordering::SeqCst)
    }

    /// The port, until the session is unmounted.
    pub fn port(&self) -> Option<Arc<LowPort>> {
        lock(&self.port).clone()
    }

    /// The pointer to the mount, which programs of libfuse 2 have as a channel.
    pub(crate) fn channel(&self) -> *mut c_void {
        self.mounted_device().map_or(null_mut(), |mounted| mounted.as_channel())
    }

    /// Unmounts, and closes the device.
    pub fn unmount(&self) {
        let (mounted, port) = (lock(&self.mounted).take(), lock(&self.port).take());
        if let Some(mounted) = mounted {
            mounted.unmount();
        }
        if let Some(port) = port {
            port.close();
        }
    }

    /// True for a user without access: the option `allow_root` is the kernel's `allow_other` with
    /// this check.
    pub(crate) fn refuses(&self, uid: u32) -> bool {
        uid != 0
            && self.is_private.load(Ordering::Relaxed)
            && uid != rustix::process::getuid().as_raw()
    }

    /// True if changes are refused.
    pub(crate) fn is_read_only(&self) -> bool {
        self.is_read_only.load(Ordering::Relaxed)
    }

    /// Bytes of one read, by the option.
    pub(crate) fn max_read(&self) -> u32 {
        lock(&self.choice).mount.max_read
    }

    /// Lets the loop end.
    pub fn exit(&self) {
        self.end_by(0);
    }

    /// Lets the loop end because of a signal. Makes system calls only, unless the program has a
    /// function for this.
    pub(crate) fn end_by(&self, signal: c_int) {
        if let LowService::Functions(SessionFunctions { exit: Some(exit), .. }) = self.service {
            // SAFETY: the function is the program's for this purpose, with its data.
            unsafe { exit(self.data, 1) };
        }
        self.end(signal);
    }

    /// Lets the loop end for this reason.
    pub(crate) fn end(&self, reason: c_int) {
        if reason != 0 {
            self.error.store(reason, Ordering::SeqCst);
        }
        self.has_exited.store(true, Ordering::SeqCst);
        // A counter that is full has woken the loop before.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    /// Notes that the kernel has ended the mount, and lets the loop end.
    pub(crate) fn end_mount(&self) {
        if let Some(mounted) = self.mounted_device() {
            mounted.note_end();
        }
        self.exit();
    }

    /// True after [`exit`](Self::exit).
    pub fn has_exited(&self) -> bool {
        if let LowService::Functions(SessionFunctions { exited: Some(exited), .. }) = self.service {
            // SAFETY: the function is the program's for this purpose, with its data.
            return unsafe { exited(self.data) != 0 };
        }
        self.has_exited.load(Ordering::SeqCst)
    }

    /// The reason that [`end`](Self::end) got.
    pub(crate) fn reason(&self) -> c_int {
        self.error.load(Ordering::SeqCst)
    }

    /// Lets the session be used for another loop.
    pub fn reset(&self) {
        if let LowService::Functions(SessionFunctions { exit: Some(exit), .. }) = self.service {
            // SAFETY: as in `exit`.
            unsafe { exit(self.data, 0) };
        }
        self.has_exited.store(false, Ordering::SeqCst);
        self.error.store(0, Ordering::SeqCst);
    }

    /// Notes that INIT has come. False if it has come before.
    pub(crate) fn begin(&self) -> bool {
        self.state.compare_exchange(NEW, SERVING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Notes what was agreed by INIT.
    pub(crate) fn agree(&self, conn: &ConnInfoThree, max_write: u32) {
        self.want.store(conn.want, Ordering::SeqCst);
        self.room.store(max_write as usize + super::init::HEADER_ROOM, Ordering::SeqCst);
    }

    /// True if the program wants this capability.
    pub(crate) fn wants(&self, capability: u32) -> bool {
        self.want.load(Ordering::Relaxed) & capability != 0
    }

    /// True between INIT and DESTROY.
    pub(crate) fn is_serving(&self) -> bool {
        self.state.load(Ordering::SeqCst) == SERVING
    }

    /// Calls `destroy` of the program, once after INIT.
    pub(crate) fn destroy_program(&self) {
        let began =
            self.state.compare_exchange(SERVING, DESTROYED, Ordering::SeqCst, Ordering::SeqCst);
        if let LowService::Operations(operations) = &self.service
            && let (Ok(_), Some(destroy)) = (began, operations.destroy)
        {
            // SAFETY: the function is the program's for this purpose, with its data.
            unsafe { destroy(self.data) };
        }
    }

    /// Interrupts a request, now or when it comes.
    pub(crate) fn interrupt(&self, unique: u64) {
        // Noted before the search: the thread that gives the request to the program first gives it,
        // and then looks here.
        self.early.note(unique, Instant::now());
        if let Some((pointer, request)) = requests::find(self, unique)
            && self.was_interrupted(unique)
        {
            request.interrupt(pointer);
        }
    }

    /// Takes the note about a request that was interrupted.
    pub(crate) fn was_interrupted(&self, unique: u64) -> bool {
        self.early.take(unique)
    }

    /// Passes a whole message to the functions of the program.
    pub(crate) fn process_by(&self, functions: &SessionFunctions, message: &[u8]) {
        if let Some(process) = functions.process {
            let (data, bytes) = (self.data, message.as_ptr().cast::<c_char>());
            // SAFETY: the function is the program's for this purpose, and the message lives until
            // it returns.
            unsafe { process(data, bytes, message.len(), self.channel()) };
        }
    }
}

/// Interrupts that came before the program had their requests, the oldest first. An interrupt of a
/// request that was answered meanwhile is among them, too, and goes after [`EARLY_FOR`]: no request
/// looks for it.
#[derive(Default)]
struct EarlyInterrupts {
    notes: Mutex<VecDeque<(u64, Instant)>>,
    /// The number of notes: without any, a request takes no lock.
    count: AtomicUsize,
}

impl EarlyInterrupts {
    fn note(&self, unique: u64, now: Instant) {
        let mut notes = lock(&self.notes);
        if notes.len() == EARLY_MOST {
            notes.pop_front();
        }
        notes.push_back((unique, now));
        self.count.store(notes.len(), Ordering::SeqCst);
    }

    /// Takes the note about a request. True if there is one.
    fn take(&self, unique: u64) -> bool {
        self.count.load(Ordering::SeqCst) > 0 && self.take_at(unique, Instant::now())
    }

    fn take_at(&self, unique: u64, now: Instant) -> bool {
        let mut notes = lock(&self.notes);
        let place = notes.iter().position(|&(noted, _)| noted == unique);
        let found = place.and_then(|place| notes.remove(place));
        let is_old = |(_, since): &(u64, Instant)| now.duration_since(*since) > EARLY_FOR;
        while notes.front().is_some_and(is_old) {
            notes.pop_front();
        }
        self.count.store(notes.len(), Ordering::SeqCst);
        found.is_some()
    }
}

/// Fails with text about options that `take` does not take, or other arguments.
fn refuse_others(
    words: &[CString],
    mut take: impl FnMut(&str) -> Result<OptionOutcome, String>,
) -> Result<(), String> {
    let mut foreign = Vec::new();
    let rest = take_from(words, |option| {
        if option != "debug" && take(option)? == OptionOutcome::Foreign {
            foreign.push(option.to_owned());
        }
        Ok(OptionOutcome::Taken)
    })?;
    let others = rest.iter().skip(1).map(|word| word.to_string_lossy().into_owned());
    foreign.extend(others.filter(|word| word != "-d" && word != "--debug"));
    match foreign.is_empty() {
        true => Ok(()),
        false => Err(format!("fuse: unknown option(s): `{}'", foreign.join(" "))),
    }
}

/// The session that a program passes, or `None` for a null pointer and for a handle of the
/// interface of paths.
///
/// # Safety
///
/// `session` is null, a handle, or a pointer from [`into_pointer`] that was not given to
/// [`destroy`].
pub unsafe fn of(session: *mut c_void) -> Option<ManuallyDrop<Arc<LowSession>>> {
    // SAFETY: the caller's promise; the count of the program's reference is left as it is.
    unsafe {
        let is_meant = kind_of(session) == Some(HandleKind::Inodes);
        is_meant.then(|| ManuallyDrop::new(Arc::from_raw(session.cast::<LowSession>())))
    }
}

/// The pointer for the program; null after an error, which is printed.
pub fn into_pointer(session: Result<Arc<LowSession>, String>) -> *mut c_void {
    match session {
        Ok(session) => Arc::into_raw(session).cast_mut().cast(),
        Err(message) => {
            error(&message);
            null_mut()
        }
    }
}

/// Ends a session: calls `destroy` of the program, closes the device, and forgets what was not
/// answered. False for other pointers.
///
/// # Safety
///
/// The condition of [`of`]; the program does not use the session any more.
pub unsafe fn destroy(pointer: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { of(pointer) }) else { return false };
    let session = ManuallyDrop::into_inner(session);
    match &session.service {
        LowService::Operations(_) => session.destroy_program(),
        LowService::Functions(functions) => {
            if let Some(destroy) = functions.destroy {
                // SAFETY: the function is the program's for this purpose, with its data.
                unsafe { destroy(session.data) };
            }
        }
    }
    if let Some(port) = session.port() {
        port.close();
    }
    session.abandon();
    requests::forget_all(&session);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_that_no_request_takes_are_forgotten() {
        let (early, begun) = (EarlyInterrupts::default(), Instant::now());
        let count = || early.count.load(Ordering::SeqCst);
        early.note(2, begun);
        early.note(4, begun);
        assert!(early.take_at(4, begun) && !early.take_at(4, begun));
        assert_eq!(count(), 1);
        early.note(6, begun + EARLY_FOR);
        assert!(!early.take_at(8, begun + 2 * EARLY_FOR));
        assert_eq!(count(), 1);
        assert!(early.take_at(6, begun + 2 * EARLY_FOR));
        assert_eq!(count(), 0);
        (0..1000).for_each(|unique| early.note(unique, begun));
        assert_eq!(count(), EARLY_MOST);
    }
}
