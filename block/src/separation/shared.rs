//! The queues of a separated device, and the completions that wait for their users.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::class::OperationClass;
use super::schedule::OperationSchedule;
use super::{QueueState, SeparationOptions, USERS};
use crate::{BlockCompletion, BlockDevice, DeviceClock, DeviceQueue, Errno, QueuePriority, Result};

/// The longest sleep of a user that waits for all queues: a driver searches for commands that its
/// device has lost.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The longest sleep in a queue without a descriptor. The other users wait meanwhile.
const SLICE: Duration = Duration::from_millis(1);

/// Everything that the users share.
pub(super) struct SeparationShared {
    state: Mutex<SeparationState>,
    clock: Arc<dyn DeviceClock>,
    /// An eventfd that ends the sleep of the user that waits for all queues.
    alarm: OwnedFd,
}

pub(super) struct SeparationState {
    pub(super) schedule: OperationSchedule,
    lanes: Vec<Box<dyn DeviceQueue>>,
    /// The priority of each lane.
    priorities: Vec<QueuePriority>,
    depth: u32,
    /// The descriptors of all lanes; `None` if a lane has no descriptor.
    ready: Option<Arc<Vec<OwnedFd>>>,
    /// The lanes are opened anew when nothing is in flight.
    stale: Option<Arc<dyn BlockDevice>>,
    /// By their number.
    users: Vec<Option<UserMailbox>>,
    /// The user that sleeps on the lanes.
    leader: Option<usize>,
    /// The lane without a descriptor that is the next to wait for.
    turn: usize,
    reaped: Vec<BlockCompletion>,
}

/// The state of a user that other users change.
#[derive(Default)]
pub(super) struct UserMailbox {
    pub(super) done: Vec<BlockCompletion>,
    pub(super) woken: bool,
    pub(super) waits: bool,
    changed: Arc<Condvar>,
}

fn open_lanes(
    device: &dyn BlockDevice,
    priorities: &[QueuePriority],
    depth: u32,
) -> Result<Vec<Box<dyn DeviceQueue>>> {
    priorities.iter().map(|priority| device.queue_with(*priority, depth)).collect()
}

fn descriptors(lanes: &[Box<dyn DeviceQueue>]) -> Result<Option<Arc<Vec<OwnedFd>>>> {
    let ready: Option<Vec<BorrowedFd<'_>>> =
        lanes.iter().map(|lane| lane.completion_fd()).collect();
    let Some(ready) = ready else { return Ok(None) };
    let own = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, 0);
    Ok(Some(Arc::new(ready.into_iter().map(own).collect::<Result<_>>()?)))
}

impl SeparationShared {
    pub(super) fn new(device: &dyn BlockDevice, separation: &SeparationOptions) -> Result<Self> {
        let priorities: Vec<QueuePriority> =
            separation.queues.iter().map(|classes| classes.priority()).collect();
        let lanes = open_lanes(device, &priorities, separation.depth)?;
        let depths: Vec<usize> = lanes.iter().map(|lane| lane.depth()).collect();
        let state = SeparationState {
            schedule: OperationSchedule::new(separation, &depths, device.properties().block_size),
            ready: descriptors(&lanes)?,
            lanes,
            priorities,
            depth: separation.depth,
            stale: None,
            users: Vec::new(),
            leader: None,
            turn: 0,
            reaped: Vec::new(),
        };
        let alarm = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(SeparationShared { state: Mutex::new(state), clock: device.clock(), alarm })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, SeparationState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn queues(&self) -> Vec<QueueState> {
        let state = self.lock();
        let of = |queue| {
            let (in_flight, depth) = state.schedule.load(queue);
            let costs = OperationClass::ALL.map(|class| state.schedule.mean(queue, class));
            QueueState { in_flight, depth, costs }
        };
        (0..state.lanes.len()).map(of).collect()
    }

    /// Makes the lanes be opened anew.
    pub(super) fn renew(&self, device: &Arc<dyn BlockDevice>) {
        let mut state = self.lock();
        state.stale = Some(Arc::clone(device));
        state.renew_idle();
    }

    /// The number of a new user. `EBUSY` where there are too many.
    pub(super) fn join(&self) -> Result<usize> {
        let mut state = self.lock();
        let free = state.users.iter().position(Option::is_none);
        let user = free.unwrap_or(state.users.len());
        if user >= USERS as usize {
            return Err(Errno::BUSY);
        }
        match free {
            Some(_) => state.users[user] = Some(UserMailbox::default()),
            None => state.users.push(Some(UserMailbox::default())),
        }
        Ok(user)
    }

    /// Begins operations and takes in completions, until neither changes anything.
    pub(super) fn advance(&self, state: &mut SeparationState, me: usize) {
        let mut wakes_leader = false;
        loop {
            state.kick(self.clock.now());
            let mut reaped = std::mem::take(&mut state.reaped);
            state.lanes.iter_mut().for_each(|lane| lane.reap(&mut reaped));
            if reaped.is_empty() {
                state.reaped = reaped;
                break;
            }
            let now = self.clock.now();
            for one in reaped.drain(..) {
                let (user, done) = state.schedule.record_completion(one, now);
                wakes_leader |= user != me && state.leader == Some(user);
                let Some(mail) = state.users[user].as_mut() else { continue };
                mail.done.push(done);
                if user != me && mail.waits {
                    mail.changed.notify_one();
                }
            }
            state.reaped = reaped;
        }
        state.renew_idle();
        if wakes_leader {
            self.ring_alarm();
        }
    }

    fn ring_alarm(&self) {
        // The counter is full only after very many unread writes, and then it is readable.
        let _ = rustix::io::write(&self.alarm, &1_u64.to_ne_bytes());
    }

    /// Ends the present or the next wait of a user.
    pub(super) fn wake(&self, user: usize) {
        let mut state = self.lock();
        let leads = state.leader == Some(user);
        let Some(mail) = state.users.get_mut(user).and_then(Option::as_mut) else { return };
        mail.woken = true;
        mail.changed.notify_one();
        if leads {
            self.ring_alarm();
        }
    }

    /// Waits until `me` has a completion or was woken, or `timeout` is over. May return early.
    pub(super) fn wait(&self, me: usize, in_flight: bool, timeout: Option<Duration>) {
        let mut state = self.lock();
        self.advance(&mut state, me);
        if !(in_flight && state.leader.is_none() || state.mailbox(me).ends_wait()) {
            state = self.follow(state, me, in_flight, timeout);
        }
        if in_flight && state.leader.is_none() && !state.mailbox(me).ends_wait() {
            state = self.lead(state, me, timeout);
        }
        state.mailbox(me).woken = false;
        // Another waiting user must wait on the lanes now.
        if state.leader.is_none() {
            state.call_another(me);
        }
    }

    /// Sleeps until another user has passed on a completion, or has stopped waiting on the lanes.
    fn follow<'a>(
        &'a self,
        mut state: MutexGuard<'a, SeparationState>,
        me: usize,
        in_flight: bool,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, SeparationState> {
        let mail = state.mailbox(me);
        mail.waits = in_flight;
        let changed = Arc::clone(&mail.changed);
        state = match timeout {
            Some(timeout) => {
                let slept = changed.wait_timeout(state, timeout);
                slept.unwrap_or_else(PoisonError::into_inner).0
            }
            None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        };
        state.mailbox(me).waits = false;
        state
    }

    /// Sleeps on the lanes until `me` has a completion or was woken.
    fn lead<'a>(
        &'a self,
        mut state: MutexGuard<'a, SeparationState>,
        me: usize,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, SeparationState> {
        let sleep = timeout.map_or(LOOK_AGAIN, |timeout| timeout.min(LOOK_AGAIN));
        state.leader = Some(me);
        loop {
            match state.ready.clone() {
                Some(ready) => {
                    drop(state);
                    self.sleep(&ready, sleep);
                    state = self.lock();
                }
                None => state.wait_in_turn(sleep.min(SLICE)),
            }
            self.advance(&mut state, me);
            if state.mailbox(me).ends_wait() || timeout.is_some() {
                break;
            }
        }
        state.leader = None;
        state
    }

    fn sleep(&self, ready: &[OwnedFd], sleep: Duration) {
        let all = ready.iter().map(AsFd::as_fd).chain([self.alarm.as_fd()]);
        let mut fds: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let sleep = Timespec::try_from(sleep).ok();
        // A signal is one of the reasons to return early.
        let _ = poll(&mut fds, sleep.as_ref());
        if fds.last().is_some_and(|alarm| !alarm.revents().is_empty()) {
            let _ = rustix::io::read(&self.alarm, &mut [0; 8]);
        }
    }
}

impl SeparationState {
    /// The mailbox of a user that has joined.
    pub(super) fn mailbox(&mut self, user: usize) -> &mut UserMailbox {
        self.users[user].as_mut().expect("a user has joined until it leaves")
    }

    /// Frees the number of a user.
    pub(super) fn remove_user(&mut self, user: usize) {
        self.users[user] = None;
    }

    /// Hands operations to the lanes, as far as there is room.
    fn kick(&mut self, now: Duration) {
        while let Some((lane, op)) = self.schedule.next(now) {
            let taken = self.lanes[lane].push(op);
            assert!(taken.is_ok(), "a queue takes as many operations as it says");
        }
        self.lanes.iter_mut().filter(|lane| lane.in_flight() > 0).for_each(|lane| lane.kick());
    }

    /// Waits for a lane with operations in flight, each time for another one.
    fn wait_in_turn(&mut self, sleep: Duration) {
        let count = self.lanes.len();
        let mut all = (self.turn..self.turn + count).map(|lane| lane % count);
        if let Some(busy) = all.find(|lane| self.lanes[*lane].in_flight() > 0) {
            self.turn = busy + 1;
            self.lanes[busy].wait(Some(sleep));
        }
    }

    /// Wakes a waiting user, since no user waits on the lanes.
    fn call_another(&self, me: usize) {
        let others = self.users.iter().enumerate().filter(|(user, _)| *user != me);
        let mut waiting = others.filter_map(|(_, mail)| mail.as_ref().filter(|mail| mail.waits));
        if let Some(mail) = waiting.next() {
            mail.changed.notify_one();
        }
    }

    #[cfg(test)]
    pub(super) fn is_stale(&self) -> bool {
        self.stale.is_some()
    }

    fn renew_idle(&mut self) {
        if self.schedule.outstanding() > 0 {
            return;
        }
        let Some(device) = self.stale.take() else { return };
        // The old lanes are as good, only slower.
        let Ok(lanes) = open_lanes(&*device, &self.priorities, self.depth) else { return };
        let same = lanes.iter().zip(&self.lanes).all(|(new, old)| new.depth() == old.depth());
        if let Ok(ready) = descriptors(&lanes)
            && same
        {
            (self.lanes, self.ready) = (lanes, ready);
        }
    }
}

impl UserMailbox {
    fn ends_wait(&self) -> bool {
        self.woken || !self.done.is_empty()
    }
}
