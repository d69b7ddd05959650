//! The requests that programs have not answered.
//!
//! A program knows a request by a `fuse_req_t`, a pointer that it never follows. Here it is a
//! number that is given once. So a second reply, or one after the end of the session, finds
//! nothing.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::hash::BuildHasherDefault;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use defuse_fs::{Caller, NumberHasher, SupplementaryGroups};
use defuse_fuse::ProcessGroups;
use libc::gid_t;

use super::abi::{CallerIds, RequestPtr};
use super::port::LowPort;
use super::session::LowSession;
use crate::handle::lock;

/// A request that a program has.
pub(crate) struct LowRequest {
    pub(crate) session: Arc<LowSession>,
    /// Where it came from, and its reply goes.
    pub(crate) port: Arc<LowPort>,
    /// The kernel's number.
    pub(crate) unique: u64,
    /// True if the kernel waits for a reply.
    pub(crate) has_reply: bool,
    /// True if the answer to a copy has 64 bits.
    pub(crate) is_long_copy: bool,
    /// True if it comes from a 32-bit process.
    pub(crate) is_compat: bool,
    pub(crate) ids: CallerIds,
    is_interrupted: AtomicBool,
    on_interrupt: Mutex<Option<InterruptCall>>,
}

/// `fuse_interrupt_func_t`.
// SAFETY: a type; each call says why it is right.
pub type InterruptFunction = unsafe extern "C" fn(RequestPtr, *mut c_void);

/// The function that a program wants to be called when its request is interrupted.
#[derive(Clone, Copy)]
struct InterruptCall {
    function: InterruptFunction,
    data: *mut c_void,
}

// SAFETY: the pointer is the program's, which lets any thread call the function with it.
unsafe impl Send for InterruptCall {}

impl LowRequest {
    /// A request that came through `port`.
    pub(crate) fn new(
        session: &Arc<LowSession>,
        port: &Arc<LowPort>,
        unique: u64,
        ids: CallerIds,
    ) -> LowRequest {
        LowRequest {
            session: Arc::clone(session),
            port: Arc::clone(port),
            unique,
            has_reply: true,
            is_long_copy: false,
            is_compat: false,
            ids,
            is_interrupted: AtomicBool::new(false),
            on_interrupt: Mutex::new(None),
        }
    }

    /// Marks the request, and calls what the program has set for this.
    pub(crate) fn interrupt(&self, pointer: RequestPtr) {
        let call = lock(&self.on_interrupt);
        self.is_interrupted.store(true, Ordering::SeqCst);
        if let Some(InterruptCall { function, data }) = *call {
            // SAFETY: the program has set this function for this request. The lock is held, so that
            // it is not unset meanwhile.
            unsafe { function(pointer, data) };
        }
    }
}

type RequestShard = HashMap<u64, Arc<LowRequest>, BuildHasherDefault<NumberHasher>>;

const SHARDS: usize = 16;

static PENDING: [Mutex<RequestShard>; SHARDS] =
    [const { Mutex::new(HashMap::with_hasher(BuildHasherDefault::new())) }; SHARDS];
static NEXT: AtomicU64 = AtomicU64::new(1);

fn shard(number: u64) -> &'static Mutex<RequestShard> {
    &PENDING[number as usize % SHARDS]
}

fn number_of(pointer: RequestPtr) -> u64 {
    pointer.addr() as u64 >> 4
}

fn pointer_of(number: u64) -> RequestPtr {
    std::ptr::without_provenance_mut((number << 4) as usize)
}

/// Gives a request to the program.
pub(crate) fn give(request: LowRequest) -> RequestPtr {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(shard(number)).insert(number, Arc::new(request));
    pointer_of(number)
}

/// The request, unless it was answered.
pub(crate) fn look(pointer: RequestPtr) -> Option<Arc<LowRequest>> {
    let number = number_of(pointer);
    lock(shard(number)).get(&number).map(Arc::clone)
}

/// Takes the request back for its reply.
pub(crate) fn take(pointer: RequestPtr) -> Option<Arc<LowRequest>> {
    let number = number_of(pointer);
    lock(shard(number)).remove(&number)
}

/// The request of a session with this number of the kernel.
pub(crate) fn find(session: &LowSession, unique: u64) -> Option<(RequestPtr, Arc<LowRequest>)> {
    PENDING.iter().find_map(|shard| {
        let requests = lock(shard);
        let mut all = requests.iter();
        let is_meant = |request: &LowRequest| {
            request.unique == unique && std::ptr::eq(Arc::as_ptr(&request.session), session)
        };
        all.find(|(_, request)| is_meant(request))
            .map(|(number, request)| (pointer_of(*number), Arc::clone(request)))
    })
}

/// Forgets what a program has not answered when its session ends.
pub(crate) fn forget_all(session: &LowSession) {
    for shard in &PENDING {
        let mut ended = Vec::new();
        lock(shard).retain(|_, request| {
            let stays = !std::ptr::eq(Arc::as_ptr(&request.session), session);
            if !stays {
                ended.push(Arc::clone(request));
            }
            stays
        });
        // Their last references are dropped without the lock.
        drop(ended);
    }
}

/// The caller of a request; null if the request was answered.
pub extern "C" fn fuse_req_ctx(req: RequestPtr) -> *const CallerIds {
    // The program may use the pointer until it answers: until then the registry has the request.
    look(req).map_or(null(), |request| &raw const request.ids)
}

/// The data that the program has passed with its operations; null if the request was answered.
pub extern "C" fn fuse_req_userdata(req: RequestPtr) -> *mut c_void {
    look(req).map_or(null_mut(), |request| request.session.userdata())
}

/// Writes at most `size` supplementary groups of the caller to `list`, and returns their number.
/// Fails with a negated error number.
///
/// # Safety
///
/// `list` has room for `size` groups.
pub unsafe extern "C" fn fuse_req_getgroups(
    req: RequestPtr,
    size: c_int,
    list: *mut gid_t,
) -> c_int {
    let Some(request) = look(req) else { return -libc::EINVAL };
    let CallerIds { uid, gid, pid, .. } = request.ids;
    let caller = Caller { uid, gid, pid: pid as u32 };
    let groups = match ProcessGroups.groups_of(caller) {
        Ok(groups) => groups,
        Err(errno) => return -errno.raw(),
    };
    let room = usize::try_from(size).unwrap_or(0);
    if !list.is_null() {
        for (place, &group) in groups.iter().take(room).enumerate() {
            // SAFETY: the caller has room for `size` groups.
            unsafe { list.add(place).write(group) };
        }
    }
    groups.len() as c_int
}

/// Sets the function that is called when the request is interrupted, also if it was already.
///
/// # Safety
///
/// The function can be called from any thread with `data` until the request is answered, or another
/// one is set.
pub unsafe extern "C" fn fuse_req_interrupt_func(
    req: RequestPtr,
    function: Option<InterruptFunction>,
    data: *mut c_void,
) {
    let Some(request) = look(req) else { return };
    // The lock is held over the call: `interrupt` calls a function that was set before, and this
    // one calls it afterwards.
    let mut call = lock(&request.on_interrupt);
    *call = function.map(|function| InterruptCall { function, data });
    if let Some(function) = function
        && request.is_interrupted.load(Ordering::SeqCst)
    {
        // SAFETY: the caller's promise.
        unsafe { function(req, data) };
    }
}

/// Returns 1 if the caller of the request no longer waits.
pub extern "C" fn fuse_req_interrupted(req: RequestPtr) -> c_int {
    look(req).map_or(0, |request| c_int::from(request.is_interrupted.load(Ordering::SeqCst)))
}
