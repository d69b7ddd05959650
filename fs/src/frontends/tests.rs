use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use super::*;
use crate::{Errno, Name, PollHandle, Result};

const VALID: Duration = Duration::from_secs(1000);
const INO: Ino = Ino(7);

type NotifyHook = Box<dyn Fn() + Send>;

/// A notifier that counts its calls.
#[derive(Default)]
struct CountingNotify {
    epochs: AtomicU64,
    inodes: Mutex<Vec<(Ino, bool)>>,
    /// Does not drop at once.
    is_slow: bool,
    /// The answer to everything.
    fails: Mutex<Option<Errno>>,
    /// Runs once, in the middle of the next notification.
    during: Mutex<Option<NotifyHook>>,
}

impl CountingNotify {
    fn new() -> Arc<CountingNotify> {
        Arc::default()
    }

    fn epochs(&self) -> u64 {
        self.epochs.swap(0, Ordering::SeqCst)
    }

    fn inodes(&self) -> Vec<(Ino, bool)> {
        std::mem::take(&mut *self.inodes.lock().unwrap())
    }

    fn set_hook(&self, hook: impl Fn() + Send + 'static) {
        *self.during.lock().unwrap() = Some(Box::new(hook));
    }

    fn answer(&self) -> Result<()> {
        let hook = self.during.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        self.fails.lock().unwrap().map_or(Ok(()), Err)
    }
}

impl Notify for CountingNotify {
    fn invalidate_inode(&self, ino: Ino, range: Option<(u64, u64)>) -> Result<()> {
        self.inodes.lock().unwrap().push((ino, range.is_some()));
        self.answer()
    }
    fn increment_epoch(&self) -> Result<()> {
        self.epochs.fetch_add(1, Ordering::SeqCst);
        self.answer()
    }
    fn drops_at_once(&self) -> bool {
        !self.is_slow
    }
    fn invalidate_entry(&self, _: Ino, _: Name<'_>, _: bool) -> Result<()> {
        panic!("it may wait for an operation");
    }
    fn notify_delete(&self, _: Ino, _: Ino, _: Name<'_>) -> Result<()> {
        panic!("it may wait for an operation");
    }
    crate::caches_no_data!();
    fn poll_wake(&self, _: PollHandle) -> Result<()> {
        Ok(())
    }
    fn prune(&self, _: &[Ino]) -> Result<()> {
        Ok(())
    }
}

/// A first frontend, which is notified of every change, and two further ones.
struct ThreeFrontends {
    all: Arc<Frontends>,
    first: (Origin, Arc<CountingNotify>),
    a: (Origin, Arc<CountingNotify>),
    b: (Origin, Arc<CountingNotify>),
}

fn add(all: &Frontends, ear: Arc<CountingNotify>) -> (Origin, Arc<CountingNotify>) {
    let origin = Origin::new();
    all.attach(origin, ear.clone(), Vec::new);
    (origin, ear)
}

fn three() -> ThreeFrontends {
    let all = Arc::new(Frontends::new(VALID));
    let [first, a, b] = [(); 3].map(|()| add(&all, CountingNotify::new()));
    first.1.epochs();
    ThreeFrontends { all, first, a, b }
}

const FOR_NAME: AnswerLifetime = AnswerLifetime { name: VALID, attributes: Duration::ZERO };

#[test]
fn a_single_frontend_may_cache_everything_and_is_told_nothing() {
    let all = Frontends::new(VALID);
    let (origin, ear) = add(&all, CountingNotify::new());
    let everything = AnswerLifetime { name: VALID, attributes: VALID };
    assert_eq!(all.name_lifetime(origin), everything);
    assert_eq!(all.name_lifetime(Origin::NONE), everything);
    assert_eq!(
        (all.attribute_lifetime(origin, INO), all.reply_attribute_lifetime()),
        (VALID, VALID)
    );
    assert_eq!((all.negative_lifetime(origin), all.lists_entries()), (VALID, true));
    assert_eq!((all.cache_mode(), all.caches_listings()), (CacheMode::Keep, true));
    all.notify_names(Origin::NONE, &[INO]);
    all.notify_attributes(Origin::NONE, &[INO]);
    all.record_forget(INO);
    assert_eq!((ear.epochs(), ear.inodes(), all.grants.len()), (0, vec![], 0));
}

#[test]
fn the_second_frontend_makes_the_first_drop_what_it_has() {
    let all = Frontends::new(VALID);
    let (first, ear) = add(&all, CountingNotify::new());
    let second = CountingNotify::new();
    all.attach(Origin::new(), second.clone(), || vec![Ino(1), INO]);
    assert_eq!((ear.epochs(), ear.inodes()), (1, vec![(Ino(1), true), (INO, true)]));
    assert_eq!((second.epochs(), second.inodes()), (0, vec![]));
    assert_eq!((all.cache_mode(), all.caches_listings()), (CacheMode::Direct, false));
    assert!(!all.lists_entries() && all.reply_attribute_lifetime().is_zero());
    all.attach(Origin::new(), CountingNotify::new(), || panic!("only at the second"));
    assert_eq!((ear.epochs(), all.name_lifetime(first)), (0, FOR_NAME));
}

/// An answer that was under way when the second one came is not marked.
#[test]
fn a_frontend_that_was_alone_is_told_of_every_change_by_others() {
    let ThreeFrontends { all, first, a, .. } = three();
    for _ in 0..2 {
        all.notify_names(a.0, &[INO]);
        assert_eq!((first.1.epochs(), first.1.inodes()), (1, vec![(INO, false)]));
    }
    all.notify_names(first.0, &[INO]);
    assert_eq!((first.1.epochs(), first.1.inodes()), (0, vec![]));
}

#[test]
fn names_are_dropped_once_and_only_where_some_were_given() {
    let ThreeFrontends { all, a, b, .. } = three();
    all.notify_names(a.0, &[]);
    assert_eq!(b.1.epochs(), 0, "it has none");
    assert_eq!(all.name_lifetime(b.0), FOR_NAME);
    all.name_lifetime(a.0);
    all.notify_names(a.0, &[]);
    assert_eq!((a.1.epochs(), b.1.epochs()), (0, 1), "not where the change comes from");
    all.notify_names(a.0, &[]);
    assert_eq!(b.1.epochs(), 0, "they are dropped");
    all.notify_names(Origin::NONE, &[]);
    assert_eq!(a.1.epochs(), 1, "a change from nowhere is told to all");
}

#[test]
fn a_change_of_attributes_drops_no_names() {
    let ThreeFrontends { all, a, b, .. } = three();
    all.name_lifetime(b.0);
    all.notify_attributes(a.0, &[INO]);
    assert_eq!(b.1.epochs(), 0);
}

#[test]
fn attributes_are_dropped_for_their_inode_and_where_they_were_given() {
    let ThreeFrontends { all, a, b, .. } = three();
    all.notify_attributes(a.0, &[INO]);
    assert_eq!(all.attribute_lifetime(b.0, INO), VALID);
    assert_eq!(all.attribute_lifetime(a.0, INO), VALID);
    all.notify_attributes(a.0, &[Ino(8)]);
    assert_eq!(b.1.inodes(), []);
    all.notify_attributes(a.0, &[INO, INO]);
    assert_eq!((a.1.inodes(), b.1.inodes()), (vec![], vec![(INO, false)]));
    all.notify_names(b.0, &[INO]);
    assert_eq!((a.1.inodes(), all.grants.len()), (vec![(INO, false)], 0), "no mark is left");
}

/// The second change found the mark of the first taken away, and was answered while the old names
/// were still shown.
#[test]
fn a_change_during_an_increment_increments_the_epoch_itself() {
    let ThreeFrontends { all, a, b, .. } = three();
    all.name_lifetime(b.0);
    let (frontends, origin, ear) = (Arc::clone(&all), a.0, Arc::clone(&b.1));
    b.1.set_hook(move || {
        frontends.notify_names(origin, &[]);
        assert_eq!(ear.epochs(), 2, "the first call has not returned, so this is the second");
    });
    all.notify_names(a.0, &[]);
    all.notify_names(a.0, &[]);
    assert_eq!(b.1.epochs(), 0, "all are dropped now");
}

#[test]
fn a_name_given_during_an_increment_is_dropped_by_the_next_change() {
    let ThreeFrontends { all, a, b, .. } = three();
    all.name_lifetime(b.0);
    let (frontends, origin) = (Arc::clone(&all), b.0);
    b.1.set_hook(move || {
        frontends.name_lifetime(origin);
    });
    all.notify_names(a.0, &[]);
    assert_eq!(b.1.epochs(), 1);
    all.notify_names(a.0, &[]);
    assert_eq!(b.1.epochs(), 1);
}

#[test]
fn a_change_during_an_invalidation_invalidates_again() {
    let ThreeFrontends { all, a, b, .. } = three();
    all.attribute_lifetime(b.0, INO);
    let (frontends, origin, ear) = (Arc::clone(&all), a.0, Arc::clone(&b.1));
    b.1.set_hook(move || {
        frontends.notify_attributes(origin, &[INO]);
        assert_eq!(ear.inodes().len(), 2);
    });
    all.notify_attributes(a.0, &[INO]);
    assert_eq!((b.1.inodes(), all.grants.len()), (vec![], 0));
}

#[test]
fn attributes_given_during_an_invalidation_are_dropped_by_the_next_change() {
    let ThreeFrontends { all, a, b, .. } = three();
    all.attribute_lifetime(b.0, INO);
    let (frontends, origin) = (Arc::clone(&all), b.0);
    b.1.set_hook(move || {
        frontends.attribute_lifetime(origin, INO);
    });
    all.notify_attributes(a.0, &[INO]);
    all.notify_attributes(a.0, &[INO]);
    assert_eq!((b.1.inodes().len(), all.grants.len()), (2, 0));
}

/// The first of two invalidations that end took the mark of the attributes that the second had not
/// dropped yet.
#[test]
fn an_invalidation_that_ends_takes_no_mark_from_one_that_runs() {
    let grants = CacheGrants::new();
    grants.give(INO, 1);
    assert_eq!(grants.begin(INO, 1), 1);
    grants.give(INO, 1);
    assert_eq!(grants.begin(INO, 1), 1);
    grants.end(INO);
    assert_eq!(grants.begin(INO, 1), 1, "the second has not ended");
    grants.end(INO);
    grants.end(INO);
    assert_eq!((grants.begin(INO, 1), grants.len()), (0, 0));
}

#[test]
fn marks_go_with_the_inode_and_with_the_frontend() {
    let ThreeFrontends { all, a, b, .. } = three();
    all.attribute_lifetime(b.0, INO);
    all.record_forget(INO);
    // It may have attributes of an inode without lookups.
    assert_eq!((b.1.inodes(), all.grants.len()), (vec![(INO, false)], 0));
    all.attribute_lifetime(a.0, INO);
    all.attribute_lifetime(b.0, INO);
    all.detach(a.0);
    assert_eq!(all.grants.len(), 1);
    all.notify_attributes(Origin::NONE, &[INO]);
    assert_eq!((a.1.inodes(), b.1.inodes()), (vec![], vec![(INO, false)]));
    all.attribute_lifetime(b.0, INO);
    all.detach(b.0);
    assert_eq!(all.grants.len(), 0);
}

#[test]
fn a_frontend_that_does_not_drop_at_once_caches_nothing_beside_others() {
    let ThreeFrontends { all, a, .. } = three();
    let slow = add(&all, Arc::new(CountingNotify { is_slow: true, ..CountingNotify::default() }));
    for origin in [slow.0, Origin::NONE, Origin::new()] {
        assert_eq!(all.name_lifetime(origin), AnswerLifetime::default());
        assert_eq!(
            (all.attribute_lifetime(origin, INO), all.negative_lifetime(origin)),
            Default::default()
        );
    }
    all.notify_names(a.0, &[INO]);
    assert_eq!((slow.1.epochs(), slow.1.inodes()), (0, vec![]));
    assert_eq!(
        (all.name_lifetime(a.0), all.negative_lifetime(a.0)),
        (FOR_NAME, VALID),
        "others do"
    );
}

/// A frontend that does not drop at once receives a request to drop its names; a kernel before 6.16
/// cannot do that.
#[test]
fn a_first_frontend_that_does_not_drop_at_once_is_asked_to_drop_its_names() {
    let all = Frontends::new(VALID);
    let (first, ear) =
        add(&all, Arc::new(CountingNotify { is_slow: true, ..CountingNotify::default() }));
    all.attach(Origin::new(), CountingNotify::new(), || panic!("nothing else"));
    assert_eq!(
        (ear.epochs(), ear.inodes(), all.name_lifetime(first)),
        (1, vec![], AnswerLifetime::default())
    );
}

#[test]
fn a_frontend_that_fails_to_drop_something_caches_nothing_from_then_on() {
    for (errno, goes_on) in [
        (Errno::ENOENT, true),
        (Errno::ENOTCONN, true),
        (Errno::ENOSYS, false),
        (Errno::EIO, false),
    ] {
        for names in [false, true] {
            let ThreeFrontends { all, a, b, .. } = three();
            all.name_lifetime(b.0);
            all.attribute_lifetime(b.0, INO);
            *b.1.fails.lock().unwrap() = Some(errno);
            match names {
                true => all.notify_names(a.0, &[]),
                false => all.notify_attributes(a.0, &[INO]),
            }
            assert_eq!(all.name_lifetime(b.0).name, if goes_on { VALID } else { Duration::ZERO });
            assert_eq!(all.name_lifetime(a.0), FOR_NAME);
        }
    }
}

#[test]
fn a_frontend_at_two_places_caches_nothing() {
    let all = Frontends::new(VALID);
    let (origin, ear) = add(&all, CountingNotify::new());
    all.attach(origin, ear.clone(), Vec::new);
    assert_eq!(all.name_lifetime(origin), AnswerLifetime::default());
    let other = add(&all, CountingNotify::new());
    assert_eq!(
        (all.name_lifetime(origin), all.name_lifetime(other.0)),
        (AnswerLifetime::default(), FOR_NAME)
    );
    all.detach(origin);
    all.detach(origin);
    assert!(!all.is_shared());
}

#[test]
fn the_last_frontend_that_is_left_caches_as_if_alone_but_keeps_no_old_pages() {
    let ThreeFrontends { all, first, a, b } = three();
    all.detach(b.0);
    assert!(all.is_shared());
    all.detach(Origin::NONE);
    all.detach(first.0);
    assert_eq!(all.name_lifetime(a.0), AnswerLifetime { name: VALID, attributes: VALID });
    assert_eq!((all.cache_mode(), all.caches_listings()), (CacheMode::Cached, false));
    // It is the first one for the next.
    all.attach(Origin::new(), CountingNotify::new(), || vec![INO]);
    assert_eq!((a.1.epochs(), a.1.inodes()), (1, vec![(INO, true)]));
    all.notify_names(Origin::NONE, &[INO]);
    assert_eq!((a.1.epochs(), a.1.inodes()), (1, vec![(INO, false)]));
}

#[test]
fn all_detached_is_as_in_the_beginning() {
    let ThreeFrontends { all, first, a, b } = three();
    [first.0, a.0, b.0].into_iter().for_each(|origin| all.detach(origin));
    let again = add(&all, CountingNotify::new());
    assert_eq!((all.cache_mode(), all.name_lifetime(again.0).attributes), (CacheMode::Keep, VALID));
}

#[test]
fn sixty_four_frontends_cache_and_a_place_that_becomes_free_is_used_again() {
    let all = Frontends::new(VALID);
    let many: Vec<_> = (0..64).map(|_| add(&all, CountingNotify::new())).collect();
    let further = add(&all, CountingNotify::new());
    assert!(many.iter().all(|(origin, _)| all.name_lifetime(*origin) == FOR_NAME));
    assert_eq!(all.name_lifetime(further.0), AnswerLifetime::default());
    assert!(many.iter().all(|(origin, _)| all.attribute_lifetime(*origin, INO) == VALID));
    all.detach(many[40].0);
    let next = add(&all, CountingNotify::new());
    assert_eq!(all.name_lifetime(next.0), FOR_NAME);
    all.notify_attributes(Origin::NONE, &[INO]);
    assert_eq!(next.1.inodes(), [], "it has not inherited a mark");
    assert!(many[1..40].iter().all(|(_, ear)| ear.inodes() == [(INO, false)]));
}

/// A reader keeps what it has read until a notification, and then reads again; a writer changes a
/// number, notifies the reader, and then looks at what the reader shows.
#[test]
fn no_thread_sees_an_old_value_after_a_change_has_returned() {
    /// The cache of the reader: the value, valid while the epoch is that from before the request.
    #[derive(Default)]
    struct ReaderCache {
        epoch: AtomicU64,
        value: Mutex<Option<(u64, u64)>>,
    }
    impl ReaderCache {
        fn look(&self, all: &Frontends, origin: Origin, truth: &AtomicU64, names: bool) -> u64 {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if let Some((value, of)) = *self.value.lock().unwrap()
                && of == epoch
            {
                return value;
            }
            let valid = match names {
                true => all.name_lifetime(origin).name,
                false => all.attribute_lifetime(origin, INO),
            };
            assert_eq!(valid, VALID);
            let value = truth.load(Ordering::SeqCst);
            *self.value.lock().unwrap() = Some((value, epoch));
            value
        }
    }
    struct ReaderNotify(Arc<ReaderCache>, Arc<CountingNotify>);
    impl Notify for ReaderNotify {
        fn invalidate_inode(&self, ino: Ino, _: Option<(u64, u64)>) -> Result<()> {
            self.0.epoch.fetch_add(u64::from(ino == INO), Ordering::SeqCst);
            Ok(())
        }
        fn increment_epoch(&self) -> Result<()> {
            self.0.epoch.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
        fn drops_at_once(&self) -> bool {
            true
        }
        fn invalidate_entry(&self, p: Ino, name: Name<'_>, only: bool) -> Result<()> {
            self.1.invalidate_entry(p, name, only)
        }
        fn notify_delete(&self, p: Ino, child: Ino, name: Name<'_>) -> Result<()> {
            self.1.notify_delete(p, child, name)
        }
        crate::caches_no_data!();
        fn poll_wake(&self, _: PollHandle) -> Result<()> {
            Ok(())
        }
        fn prune(&self, _: &[Ino]) -> Result<()> {
            Ok(())
        }
    }
    for names in [false, true] {
        let ThreeFrontends { all, a, b, .. } = three();
        let (cache, reader) = (Arc::new(ReaderCache::default()), Origin::new());
        all.attach(
            reader,
            Arc::new(ReaderNotify(Arc::clone(&cache), CountingNotify::new())),
            Vec::new,
        );
        let (truth, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    cache.look(&all, reader, &truth, names);
                }
            });
            let writers = [a.0, b.0].map(|origin| {
                let (all, cache, truth) = (&all, &cache, &truth);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let mine = truth.fetch_add(1, Ordering::SeqCst) + 1;
                        match names {
                            true => all.notify_names(origin, &[]),
                            false => all.notify_attributes(origin, &[INO]),
                        }
                        // The thread of this test reads as another thread of the reader's program
                        // would.
                        let seen = cache.look(all, reader, truth, names);
                        assert!(seen >= mine, "{seen} after {mine}");
                    }
                })
            });
            for writer in writers {
                let ended = writer.join();
                stop.store(true, Ordering::SeqCst);
                ended.unwrap();
            }
        });
    }
}
