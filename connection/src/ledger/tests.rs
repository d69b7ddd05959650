//! The account of lookups, open files and locks.

use defuse_fs::AbsentFileSystem;

use super::*;

const FILE: File = File { ino: Ino(5), fh: Fh(0) };

fn account() -> Arc<UserAccount> {
    crate::quotas::UserAccounts::new(crate::ServiceQuotas::default()).account_of(0)
}

fn open(ledger: &ConnectionLedger, file: File) -> File {
    File { ino: file.ino, fh: ledger.record_open(file, false, OpenFlags(OpenFlags::RDWR)) }
}

fn close(ledger: &ConnectionLedger, file: File) -> Option<bool> {
    ledger.record_close(file).map(|closed| closed.release)
}

fn is_open(ledger: &ConnectionLedger, file: File) -> bool {
    ledger.handle(file).is_ok()
}

fn make_request(kind: LockKind, owner: LockOwner) -> LockRequest {
    let lock = Lock { typ: LockType::Write, start: 0, end: 9, pid: 1 };
    LockRequest { kind, owner, lock, wait: false }
}

#[test]
fn nobody_gives_back_what_they_do_not_hold() {
    let ledger = ConnectionLedger::default();
    ledger.count_lookup(Ino(5));
    ledger.count_lookup(Ino(5));
    assert!(ledger.holds(Ino(5)) && ledger.holds(Ino::ROOT) && !ledger.holds(Ino(6)));
    assert_eq!((ledger.remove_lookups(Ino(6), 9), ledger.remove_lookups(Ino(5), 9)), (0, 2));
    assert!(!ledger.holds(Ino(5)));
}

#[test]
fn two_opens_with_one_handle_are_two_open_files() {
    let ledger = ConnectionLedger::default();
    let (one, other) = (open(&ledger, FILE), open(&ledger, FILE));
    assert!(one != other && ledger.handle(one) == Ok(FILE.fh));
    assert_eq!((close(&ledger, one), close(&ledger, one)), (Some(true), None));
    assert!(is_open(&ledger, other) && close(&ledger, other) == Some(true));
}

#[test]
fn what_a_copy_has_too_goes_back_with_the_last_who_has_it() {
    let parent = ConnectionLedger::default();
    parent.count_lookup(Ino(5));
    let shared = open(&parent, FILE);
    let child = parent.copy().unwrap();
    // Later objects belong to one of them alone.
    parent.count_lookup(Ino(5));
    let own = open(&parent, FILE);
    child.count_lookup(Ino(6));
    assert!(!parent.holds(Ino(6)) && !is_open(&child, own));
    assert_eq!((child.remove_lookups(Ino(6), 1), child.remove_lookups(Ino(5), 1)), (1, 0));
    assert!(child.holds(Ino(5)), "it has the file open");
    assert_eq!((close(&child, shared), close(&child, shared)), (Some(false), None));
    assert!(!child.holds(Ino(5)) && parent.holds(Ino(5)));
    assert_eq!((close(&parent, shared), close(&parent, own)), (Some(true), Some(true)));
    assert_eq!(parent.remove_lookups(Ino(5), 9), 2);
}

/// An inode that a path led to has no lookup.
#[test]
fn an_inode_that_the_client_was_told_of_may_be_named_and_is_no_lookup() {
    let ledger = ConnectionLedger::default();
    assert!(!ledger.holds(Ino(5)));
    ledger.record_report(Ino(5));
    assert!(ledger.holds(Ino(5)) && ledger.remove_lookups(Ino(5), 1) == 0);
    let file = open(&ledger, FILE);
    let copy = ledger.copy().unwrap();
    assert!(copy.holds(Ino(5)), "by its open file");
    assert_eq!((close(&copy, file), close(&ledger, file)), (Some(false), Some(true)));
    assert!(ledger.holds(Ino(5)) && !copy.holds(Ino(5)));
}

#[test]
fn locks_of_an_open_file_stay_while_anybody_has_it_and_those_of_a_process_go_with_it() {
    let parent = ConnectionLedger::default();
    let file = open(&parent, FILE);
    let (open_file, process) = (LockOwner(7), LockOwner::for_process(1));
    parent.record_lock_request(file, &make_request(LockKind::Flock, open_file));
    parent.record_lock_request(file, &make_request(LockKind::Posix, process));
    let child = parent.copy().unwrap();
    // Taken by the child, it is a lock of the open file that its parent has, too.
    child.record_lock_request(file, &make_request(LockKind::Posix, open_file));
    assert!(parent.release_flushed(file, process));
    assert!(!child.release_flushed(file, open_file));
    let kept = CloseOutcome { handle: FILE.fh, release: false, locks: Vec::new() };
    assert_eq!(child.record_close(file), Some(kept));
    assert!(parent.release_flushed(file, open_file));
    let locks = vec![(LockKind::Flock, open_file)];
    assert_eq!(
        parent.record_close(file),
        Some(CloseOutcome { handle: FILE.fh, release: true, locks })
    );
}

/// RELEASE was answered without a waiting caller: a program that closed the file and then requested
/// the lock did not get it.
#[test]
fn locks_of_an_open_file_end_when_the_last_client_says_that_it_closes_it() {
    let parent = ConnectionLedger::default();
    let file = open(&parent, FILE);
    let child = parent.copy().unwrap();
    child.record_lock_request(file, &make_request(LockKind::Flock, LockOwner(7)));
    assert!(
        !child.release_flushed(file, LockOwner(7)) && parent.release_flushed(file, LockOwner(7))
    );
    assert!(parent.remove_flock(file, LockOwner(7)));
    let nothing = |release| Some(CloseOutcome { handle: FILE.fh, release, locks: Vec::new() });
    assert_eq!(
        (parent.record_close(file), child.record_close(file)),
        (nothing(false), nothing(true))
    );
}

/// The owner of a lock was passed on as the client named it, so that a client that guessed the
/// owner of another client's lock could drop the lock.
#[test]
fn owners_of_locks_of_two_clients_are_never_the_same() {
    let (one, other) = (ConnectionLedger::default(), ConnectionLedger::default());
    let (open_file, process) = (LockOwner(7), LockOwner::for_process(1));
    assert_ne!(one.owner(open_file), other.owner(open_file));
    assert_eq!(one.owner(open_file), one.copy().unwrap().owner(open_file));
    assert!(one.owner(process).is_process() && !one.owner(open_file).is_process());
}

#[test]
fn an_heir_has_what_it_takes_over_and_nothing_after_it_is_settled() {
    let before = Arc::new(ConnectionLedger::default());
    for ino in [5, 6] {
        before.count_lookup(Ino(ino));
    }
    let file = open(&before, FILE);
    let (open_file, process) = (LockOwner(7), LockOwner::for_process(1));
    before.record_lock_request(file, &make_request(LockKind::Flock, open_file));
    before.record_lock_request(file, &make_request(LockKind::Posix, process));
    let successor = before.prepare_exec(account());
    let mode = AccessMode::Read;
    let inherited = InheritedInode { ino: file.ino, fh: Some(file.fh), mode, process_locks: true };
    assert!(!successor.holds(file.ino) && !is_open(&successor, file));
    assert_eq!(successor.take_over(&inherited), Ok(()));
    assert_eq!(
        successor.take_over(&InheritedInode { ino: Ino(9), ..inherited }),
        Err(Errno::ESTALE)
    );
    assert_eq!(
        successor.take_over(&InheritedInode { ino: Ino(6), ..inherited }),
        Err(Errno::EBADF)
    );
    successor.settle();
    assert_eq!(
        successor.take_over(&InheritedInode { ino: Ino(6), fh: None, ..inherited }),
        Err(Errno::EPERM)
    );
    assert!(successor.holds(file.ino) && is_open(&successor, file) && !successor.holds(Ino(6)));
    // The program before ends: the objects of the next one stay, with their locks.
    assert_eq!(close(&before, file), Some(false));
    assert!(!before.release_flushed(file, process));
    assert_eq!((before.remove_lookups(file.ino, 1), before.remove_lookups(Ino(6), 1)), (0, 1));
    assert!(successor.release_flushed(file, process));
    let locks = vec![(LockKind::Flock, open_file)];
    assert_eq!(
        successor.record_close(file),
        Some(CloseOutcome { handle: FILE.fh, release: true, locks })
    );
    assert_eq!(successor.remove_lookups(file.ino, 1), 1);
}

/// TAKE_OVER believed the access mode in the request: a program of another user wrote to a file
/// that it had inherited open for reading.
#[test]
fn an_heir_may_use_an_open_file_for_no_more_than_the_program_before() {
    let before = Arc::new(ConnectionLedger::default());
    before.count_lookup(FILE.ino);
    let fh = before.record_open(FILE, false, OpenFlags(0));
    let successor = before.prepare_exec(account());
    let mode = AccessMode::ReadWrite;
    let inherited = InheritedInode { ino: FILE.ino, fh: Some(fh), mode, process_locks: false };
    assert_eq!(successor.take_over(&inherited), Ok(()));
    let modes = successor.modes(File { ino: FILE.ino, fh });
    assert_eq!(modes, Some(AccessModes { reads: true, writes: false }));
}

/// A program that executes itself over and over, and hands over one of the files that it has.
#[test]
fn many_programs_one_after_the_other_leave_nothing_behind() {
    let mut now = Arc::new(ConnectionLedger::default());
    now.count_lookup(FILE.ino);
    let fh = now.record_open(FILE, false, OpenFlags(0));
    let inherited = InheritedInode {
        ino: FILE.ino,
        fh: Some(fh),
        mode: AccessMode::Read,
        process_locks: false,
    };
    for round in 0..1000 {
        let other = File { ino: Ino(16 + round), fh: Fh(1) };
        now.count_lookup(other.ino);
        now.record_open(other, false, OpenFlags(0));
        let successor = now.prepare_exec(account());
        successor.take_over(&inherited).unwrap();
        successor.settle();
        now.take_back(&AbsentFileSystem(Errno::ENOENT));
        now = Arc::new(successor);
    }
    let count = |of: fn(&FamilyHoldings) -> usize| -> usize {
        now.family.shards.iter().map(|shard| of(&lock(shard))).sum()
    };
    assert_eq!((count(|f| f.lookups.len()), count(|f| f.open.len())), (1, 1));
    let lookups = lock(&now.family.shards[shard_index(FILE.ino)]).lookups[&FILE.ino];
    assert_eq!((lookups.granted, lookups.held), (1, 1));
}
