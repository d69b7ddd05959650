//! A layer that injects faults, for tests of the layers above.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::layer::Method;
use crate::{
    Caller, Caps, Completion, Context, Entry, Errno, File, FileSystem, Ino, Io, IoOp, LockWait,
    Name, NewNode, OpenArgs, OpenReply, Origin, ReadArgs, ReadBuf, ReadSink, Result, Shortcuts,
    WriteArgs, WriteBuf, WriteSource, delegate,
};

/// The interval at which a delayed operation checks for an interrupt.
const INTERRUPT_CHECK: Duration = Duration::from_millis(5);

/// A fault, and the calls that it affects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultRule {
    /// The method, or `None` for all. A submitted operation counts as the method that it
    /// represents, `setlkw` as `setlk`, and `detached` as `syncfs`.
    pub method: Option<Method>,
    /// The affected calls, counted from the time when the rule was set.
    pub when: FaultTrigger,
    /// The fault.
    pub action: FaultAction,
}

/// A choice among the calls that a rule applies to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FaultTrigger {
    /// All calls.
    Always,
    /// One call; the first is 1.
    Nth(u64),
    /// Every n-th call, beginning with the n-th; 0 means none.
    Every(u64),
    /// Each call with this probability, 0 to 1. The choice for the n-th call depends only on the
    /// seed and on n.
    Chance(f64),
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// The operation is not performed, and fails.
    Fail(Errno),
    /// The operation is performed after this time, or fails with `EINTR` if the caller gives up
    /// before. Later rules still apply.
    Delay(Duration),
    /// The operation is performed, but its result is lost: the caller gets `EIO`. Lookups and open
    /// files from it remain allocated, as after a lost message. Later rules still apply.
    Lose,
    /// The operation is not performed; the thread panics.
    Panic,
    /// A read or write transfers at most this many bytes. Other methods are not affected. Later
    /// rules still apply.
    Short(usize),
}

/// The inner file system, with the faults that rules describe. Each call checks the rules in order.
/// With the same seed and rules, the n-th call that a rule applies to always has the same outcome.
#[derive(Debug)]
pub struct FaultLayer<F> {
    inner: Arc<F>,
    seed: u64,
    rules: RwLock<Arc<[ArmedRule]>>,
}

/// A rule with its counters.
#[derive(Debug)]
struct ArmedRule {
    rule: FaultRule,
    seen: AtomicU64,
    fired: AtomicU64,
}

/// The decision of the rules on a call.
#[derive(Clone, Copy, Debug, Default)]
struct FaultVerdict {
    delay: Duration,
    lose: bool,
    short: Option<usize>,
    /// Decided with the rest, but carried out after the delay.
    end: Option<FaultEnd>,
}

#[derive(Clone, Copy, Debug)]
enum FaultEnd {
    Fail(Errno),
    Panic(Method),
}

impl<F: FileSystem + 'static> FaultLayer<F> {
    /// Wraps `inner`, without faults at first. `seed` determines random choices.
    pub fn new(inner: F, seed: u64) -> Self {
        FaultLayer { inner: Arc::new(inner), seed, rules: RwLock::new(Arc::new([])) }
    }

    /// The inner file system.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    /// Replaces all rules, and resets their counters. Running calls are not affected.
    pub fn set_rules(&self, rules: &[FaultRule]) {
        let arm = |&rule: &FaultRule| ArmedRule {
            rule,
            seen: AtomicU64::new(0),
            fired: AtomicU64::new(0),
        };
        let armed = rules.iter().map(arm).collect();
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = armed;
    }

    /// The number of calls that each rule has affected.
    pub fn call_counts(&self) -> Vec<u64> {
        self.armed_rules().iter().map(|armed| armed.fired.load(Relaxed)).collect()
    }

    fn armed_rules(&self) -> Arc<[ArmedRule]> {
        Arc::clone(&self.rules.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn intercept<T>(
        &self,
        method: Method,
        cx: &Context<'_>,
        call: impl FnOnce(&F) -> Result<T>,
    ) -> Result<T> {
        self.intercept_transfer(method, cx, |inner, _| call(inner))
    }

    /// Runs `call` under the rules. `call` receives the maximum number of bytes to transfer.
    fn intercept_transfer<T>(
        &self,
        method: Method,
        cx: &Context<'_>,
        call: impl FnOnce(&F, Option<usize>) -> Result<T>,
    ) -> Result<T> {
        let verdict = self.judge(method);
        verdict.wait(cx)?;
        verdict.end()?;
        let result = call(&self.inner, verdict.short);
        if verdict.lose { Err(Errno::EIO) } else { result }
    }

    fn judge(&self, method: Method) -> FaultVerdict {
        let mut verdict = FaultVerdict::default();
        for (place, armed) in self.armed_rules().iter().enumerate() {
            let applies = armed.rule.method.is_none_or(|only| only == method);
            if !applies {
                continue;
            }
            let call = armed.seen.fetch_add(1, Relaxed) + 1;
            if !armed.rule.when.includes(call, self.seed.wrapping_add(place as u64)) {
                continue;
            }
            armed.fired.fetch_add(1, Relaxed);
            match armed.rule.action {
                FaultAction::Delay(time) => verdict.delay = verdict.delay.saturating_add(time),
                FaultAction::Lose => verdict.lose = true,
                FaultAction::Short(max) => verdict.short = Some(max),
                FaultAction::Fail(errno) => verdict.end = Some(FaultEnd::Fail(errno)),
                FaultAction::Panic => verdict.end = Some(FaultEnd::Panic(method)),
            }
            if verdict.end.is_some() {
                break;
            }
        }
        verdict
    }
}

impl FaultTrigger {
    fn includes(self, call: u64, seed: u64) -> bool {
        match self {
            FaultTrigger::Always => true,
            FaultTrigger::Nth(nth) => call == nth,
            FaultTrigger::Every(step) => step > 0 && call.is_multiple_of(step),
            FaultTrigger::Chance(chance) => {
                // A float between 0 and 1 has 53 significant bits.
                let share = (mix(mix(seed) ^ call) >> 11) as f64 / (1u64 << 53) as f64;
                share < chance
            }
        }
    }
}

impl FaultVerdict {
    fn wait(&self, cx: &Context<'_>) -> Result<()> {
        let start = Instant::now();
        while let Some(left) = self.delay.checked_sub(start.elapsed()).filter(|it| !it.is_zero()) {
            if cx.is_interrupted() {
                return Err(Errno::EINTR);
            }
            std::thread::sleep(left.min(INTERRUPT_CHECK));
        }
        Ok(())
    }

    fn end(&self) -> Result<()> {
        match self.end {
            None => Ok(()),
            Some(FaultEnd::Fail(errno)) => Err(errno),
            Some(FaultEnd::Panic(method)) => panic!("injected into {}", method.name()),
        }
    }
}

/// The finalizer of SplitMix64: each bit of the result depends on all of `value`.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e3779b97f4a7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d049bb133111eb);
    value ^ (value >> 31)
}

/// Removes the descriptors with which a frontend could bypass the layer.
fn hide_descriptors(opened: OpenReply) -> OpenReply {
    OpenReply { backing: None, lower: None, ..opened }
}

impl<F: FileSystem + 'static> FileSystem for FaultLayer<F> {
    delegate!(intercept inner, except caps, detach, submit, setlkw, open, create, tmpfile, read,
        write);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn caps(&self) -> Caps {
        Caps { backing_files: false, ..self.inner.caps() }
    }

    /// Counts as [`Method::Syncfs`]. If a rule fails it, the inner file system is detached
    /// nevertheless.
    fn detach(&self, origin: Origin) -> Result<()> {
        let cx = Context::new(Caller::default()).from_origin(origin);
        let judged = self.intercept_transfer(Method::Syncfs, &cx, |_, _| Ok(()));
        let detached = self.inner.detach(origin);
        judged.and(detached)
    }

    fn submit(&self, io: Io) {
        let method = match io.op() {
            IoOp::Read { .. } => Method::Read,
            IoOp::Write { .. } => Method::Write,
            IoOp::Fsync { .. } => Method::Fsync,
            IoOp::Fsyncdir { .. } => Method::Fsyncdir,
            IoOp::Syncfs => Method::Syncfs,
        };
        let verdict = self.judge(method);
        if verdict.delay.is_zero() {
            return submit(&*self.inner, verdict, io);
        }
        // A submitting thread must not be delayed.
        let inner = Arc::clone(&self.inner);
        std::thread::spawn(move || match io.with_context(|cx| verdict.wait(cx)) {
            Ok(()) => submit(&*inner, verdict, io),
            Err(errno) => io.finish(Err(errno)),
        });
    }

    fn setlkw(&self, wait: LockWait) {
        let verdict = self.judge(Method::Setlk);
        if verdict.delay.is_zero() {
            return setlkw(&*self.inner, verdict, wait);
        }
        let inner = Arc::clone(&self.inner);
        std::thread::spawn(move || match wait.with_context(|cx| verdict.wait(cx)) {
            Ok(()) => setlkw(&*inner, verdict, wait),
            Err(errno) => wait.finish(Err(errno)),
        });
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        self.intercept(Method::Open, cx, |inner| inner.open(cx, ino, args)).map(hide_descriptors)
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let call = |inner: &F| inner.create(cx, parent, name, node, args);
        let (entry, opened) = self.intercept(Method::Create, cx, call)?;
        Ok((entry, hide_descriptors(opened)))
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let call = |inner: &F| inner.tmpfile(cx, parent, node, args);
        let (entry, opened) = self.intercept(Method::Tmpfile, cx, call)?;
        Ok((entry, hide_descriptors(opened)))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        self.intercept_transfer(Method::Read, cx, |inner, max| {
            out.with_limit(max.unwrap_or(usize::MAX), |out| inner.read(cx, file, args, out))
        })
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.intercept_transfer(Method::Write, cx, |inner, max| match max {
            None => inner.write(cx, file, args, data),
            Some(max) => data.with_limit(max, |data| inner.write(cx, file, args, data)),
        })
    }
}

impl<F: FileSystem + 'static> Shortcuts for FaultLayer<F> {
    delegate!(intercept inner, only resolve, peek);
}

/// Submits the operation as far as the verdict permits. A short operation runs synchronously,
/// because only then there is a buffer to limit.
fn submit(inner: &dyn FileSystem, verdict: FaultVerdict, io: Io) {
    if let Err(errno) = verdict.end() {
        return io.finish(Err(errno));
    }
    let mut io = if verdict.lose {
        io.map_completion(|completion| Box::new(LostCompletion(completion)) as Box<dyn Completion>)
    } else {
        io
    };
    match (io.op(), verdict.short) {
        (IoOp::Read { file, args, .. }, Some(max)) => {
            let result = io.with_read_buf(|cx, out| {
                out.with_limit(max, |out| inner.read(cx, file, args, out))
            });
            io.finish_filled(result);
        }
        (IoOp::Write { file, args, .. }, Some(max)) => {
            let result = io.with_write_buf(|cx, data| {
                data.with_limit(max, |data| inner.write(cx, file, args, data))
            });
            io.finish(result);
        }
        _ => inner.submit(io),
    }
}

/// Waits for a lock, as far as the verdict permits.
fn setlkw(inner: &dyn FileSystem, verdict: FaultVerdict, wait: LockWait) {
    if let Err(errno) = verdict.end() {
        return wait.finish(Err(errno));
    }
    inner.setlkw(match verdict.lose {
        true => wait.map_answer(|answer| Box::new(move |_| answer(Err(Errno::EIO)))),
        false => wait,
    });
}

/// A completion that answers `EIO` in any case.
struct LostCompletion(Box<dyn Completion>);

impl Completion for LostCompletion {
    fn sink(&mut self) -> &mut dyn ReadSink {
        self.0.sink()
    }
    fn source(&mut self) -> &mut dyn WriteSource {
        self.0.source()
    }
    fn finish(self: Box<Self>, _: Result<usize>) {
        self.0.finish(Err(Errno::EIO));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InterruptToken;
    use crate::layer::testing::{self, cx, name};

    fn rule(method: Option<Method>, when: FaultTrigger, action: FaultAction) -> FaultRule {
        FaultRule { method, when, action }
    }

    fn layer() -> (FaultLayer<Arc<dyn FileSystem>>, Ino) {
        let layer = FaultLayer::new(testing::tree() as Arc<dyn FileSystem>, 7);
        let dir = layer.lookup(&cx(), Ino::ROOT, name("dir")).unwrap().ino;
        let file = layer.lookup(&cx(), dir, name("file")).unwrap().ino;
        (layer, file)
    }

    #[test]
    fn a_rule_affects_the_calls_it_names_and_can_be_replaced() {
        let (layer, file) = layer();
        layer.set_rules(&[
            rule(Some(Method::Getattr), FaultTrigger::Nth(2), FaultAction::Fail(Errno::ENOSPC)),
            rule(Some(Method::Getattr), FaultTrigger::Every(3), FaultAction::Fail(Errno::EIO)),
        ]);
        let getattr = || layer.getattr(&cx(), file, None).err();
        let seen: Vec<_> = (0..7).map(|_| getattr()).collect();
        // The second rule does not count the call that the first rule ended.
        let (full, broken) = (Some(Errno::ENOSPC), Some(Errno::EIO));
        assert_eq!(seen, [None, full, None, broken, None, None, broken]);
        assert_eq!(layer.call_counts(), [1, 2]);
        assert_eq!(testing::read(&layer, file), Ok(b"text".to_vec()));
        layer.set_rules(&[]);
        assert_eq!(getattr(), None);
    }

    #[test]
    fn chance_depends_on_the_seed_alone() {
        let when = FaultTrigger::Chance(0.25);
        let calls = |seed| (1..=4000).filter(move |&call| when.includes(call, seed));
        assert_eq!(calls(1).collect::<Vec<_>>(), calls(1).collect::<Vec<_>>());
        assert_ne!(calls(1).collect::<Vec<_>>(), calls(2).collect::<Vec<_>>());
        for seed in 0..20 {
            assert!(calls(seed).count().abs_diff(1000) < 150);
        }
        assert!(
            !FaultTrigger::Chance(0.0).includes(1, 1) && FaultTrigger::Chance(1.0).includes(1, 1)
        );
    }

    #[test]
    fn reads_and_writes_can_be_short() {
        let (layer, file) = layer();
        layer.set_rules(&[rule(None, FaultTrigger::Always, FaultAction::Short(3))]);
        assert_eq!(testing::read(&layer, file), Ok(b"tex".to_vec()));
        assert_eq!(testing::write(&layer, file, b"TEXT"), Ok(3));
        assert_eq!(testing::submit_write(&layer, file), Ok(3));
        layer.set_rules(&[]);
        assert_eq!(testing::read(&layer, file), Ok(b"text".to_vec()));
    }

    #[test]
    fn a_lost_operation_was_performed() {
        let (layer, file) = layer();
        layer.set_rules(&[rule(Some(Method::Write), FaultTrigger::Always, FaultAction::Lose)]);
        assert_eq!(testing::write(&layer, file, b"done"), Err(Errno::EIO));
        assert_eq!(testing::read(&layer, file), Ok(b"done".to_vec()));
        assert_eq!(testing::submit_write(&layer, file), Err(Errno::EIO));
        assert_eq!(testing::read(&layer, file), Ok(b"text".to_vec()));
    }

    #[test]
    fn a_delay_ends_when_the_caller_gives_up() {
        let (layer, file) = layer();
        layer.set_rules(&[
            rule(
                Some(Method::Write),
                FaultTrigger::Nth(1),
                FaultAction::Delay(Duration::from_millis(20)),
            ),
            rule(Some(Method::Getattr), FaultTrigger::Always, FaultAction::Delay(Duration::MAX)),
        ]);
        let start = Instant::now();
        assert_eq!(testing::submit_write(&layer, file), Ok(4));
        assert!(start.elapsed() >= Duration::from_millis(20));
        let token = InterruptToken::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                token.trip();
            });
            let cx = Context::with_interrupt(Caller::default(), 1, &token);
            assert_eq!(layer.getattr(&cx, file, None).err(), Some(Errno::EINTR));
        });
    }

    #[test]
    fn rules_apply_to_waits_for_locks() {
        let (layer, file) = layer();
        let wait = || testing::wait_for_lock(&layer, file);
        assert_eq!(wait(), Err(Errno::ENOSYS), "the tree keeps no locks");
        let setlk = Some(Method::Setlk);
        layer.set_rules(&[
            rule(setlk, FaultTrigger::Nth(1), FaultAction::Fail(Errno::ENOLCK)),
            rule(setlk, FaultTrigger::Nth(1), FaultAction::Delay(Duration::from_millis(5))),
            rule(setlk, FaultTrigger::Always, FaultAction::Lose),
        ]);
        assert_eq!([wait(), wait()], [Err(Errno::ENOLCK), Err(Errno::EIO)]);
    }

    #[test]
    fn a_failing_syncfs_also_fails_detaching() {
        let (layer, _) = layer();
        assert_eq!(layer.detach(Origin::NONE), Ok(()));
        layer.set_rules(&[rule(
            Some(Method::Syncfs),
            FaultTrigger::Always,
            FaultAction::Fail(Errno::ENOSPC),
        )]);
        assert_eq!(layer.detach(Origin::NONE), Err(Errno::ENOSPC));
    }

    #[test]
    fn a_panic_answers_the_submitted_operation() {
        let (layer, file) = layer();
        layer.set_rules(&[rule(Some(Method::Write), FaultTrigger::Always, FaultAction::Panic)]);
        let layer = std::panic::AssertUnwindSafe(&layer);
        let caught = std::panic::catch_unwind(|| testing::submit_write(*layer, file));
        assert!(caught.is_err());
        layer.set_rules(&[rule(None, FaultTrigger::Always, FaultAction::Fail(Errno::EROFS))]);
        assert_eq!(testing::submit_write(*layer, file), Err(Errno::EROFS));
    }
}
