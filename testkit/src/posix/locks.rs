//! Locks: fcntl(2) for a process and for an open file, flock(2).

use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::case_table;
use super::dir::{CaseDir, expect_error};
use super::sys::{FcntlLockType, ForkedChild, LockCommand, interrupt_after, lock, test_lock};

case_table! { "locks";
    a_record_lock_of_another_process_conflicts,
    record_locks_of_one_process_never_conflict,
    read_locks_share_and_write_locks_do_not,
    getlk_names_range_and_holder,
    ranges_split_when_their_middle_is_unlocked,
    closing_any_descriptor_drops_the_locks_of_the_process,
    the_end_of_a_process_drops_its_locks,
    a_wait_ends_when_the_lock_is_dropped,
    a_wait_is_ended_by_a_signal,
    a_cycle_of_waits_gives_edeadlk,
    locks_of_open_files_conflict_within_a_process,
    the_lock_of_an_open_file_is_dropped_with_its_last_descriptor,
    flock_conflicts_between_open_files,
    flock_is_shared_by_duplicates_and_dropped_with_the_last,
    flock_can_change_its_type,
    flock_waits_for_its_turn,
    flock_and_record_locks_ignore_each_other,
    a_lock_needs_a_descriptor_that_allows_it,
}

const RDWR: OFlags = OFlags::RDWR;

/// The errno of `run` in another process, 0 for success.
fn run_elsewhere(run: impl FnOnce() -> std::io::Result<()>) -> Result<i32> {
    let status = |result: std::io::Result<()>| match result {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().map_or(254, |errno| errno as u8),
    };
    Ok(ForkedChild::start(|| status(run()))?.wait()?.into())
}

const AGAIN: i32 = Errno::AGAIN.raw_os_error();

fn pause() {
    thread::sleep(Duration::from_millis(100));
}

fn write_lock(fd: &OwnedFd, start: i64, len: i64) -> std::io::Result<()> {
    lock(fd, LockCommand::Set, FcntlLockType::Write, start, len)
}

fn a_record_lock_of_another_process_conflicts(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write_lock(&fd, 0, 10)?;
    ensure!(run_elsewhere(|| write_lock(&fd, 5, 1))? == AGAIN);
    ensure!(run_elsewhere(|| write_lock(&fd, 10, 1))? == 0);
    lock(&fd, LockCommand::Set, FcntlLockType::Unlock, 0, 0)?;
    ensure!(run_elsewhere(|| write_lock(&fd, 5, 1))? == 0);
    Ok(())
}

fn record_locks_of_one_process_never_conflict(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write_lock(&fd, 0, 0)?;
    write_lock(&fd, 5, 5)?;
    write_lock(&dir.open("a", RDWR)?, 0, 0)?;
    lock(&fd, LockCommand::Set, FcntlLockType::Read, 0, 0)?;
    Ok(())
}

fn read_locks_share_and_write_locks_do_not(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    lock(&fd, LockCommand::Set, FcntlLockType::Read, 0, 0)?;
    ensure!(run_elsewhere(|| lock(&fd, LockCommand::Set, FcntlLockType::Read, 3, 3))? == 0);
    ensure!(run_elsewhere(|| write_lock(&fd, 1 << 40, 1))? == AGAIN);
    Ok(())
}

fn getlk_names_range_and_holder(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write_lock(&fd, 100, 50)?;
    let me = std::process::id() as i32;
    let seen = || match test_lock(&fd, FcntlLockType::Read, 0, 0)? {
        Some((100, 50, pid)) if pid == me => Ok(()),
        _ => Err(Errno::PROTO.into()),
    };
    ensure!(run_elsewhere(seen)? == 0);
    ensure!(test_lock(&fd, FcntlLockType::Write, 0, 0)?.is_none(), "one's own lock conflicts");
    Ok(())
}

fn ranges_split_when_their_middle_is_unlocked(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write_lock(&fd, 0, 100)?;
    lock(&fd, LockCommand::Set, FcntlLockType::Unlock, 40, 20)?;
    lock(&fd, LockCommand::Set, FcntlLockType::Read, 80, 10)?;
    for (start, wanted) in [(39, AGAIN), (40, 0), (59, 0), (60, AGAIN), (85, AGAIN), (100, 0)] {
        ensure!(run_elsewhere(|| write_lock(&fd, start, 1))? == wanted, "at {start}");
    }
    ensure!(run_elsewhere(|| lock(&fd, LockCommand::Set, FcntlLockType::Read, 85, 1))? == 0);
    Ok(())
}

fn closing_any_descriptor_drops_the_locks_of_the_process(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write_lock(&fd, 0, 0)?;
    drop(dir.open("a", OFlags::RDONLY)?);
    ensure!(run_elsewhere(|| write_lock(&fd, 0, 1))? == 0);
    Ok(())
}

fn the_end_of_a_process_drops_its_locks(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    ensure!(run_elsewhere(|| write_lock(&fd, 0, 0))? == 0);
    // The last close of a process may complete shortly after its exit.
    for _ in 0..50 {
        if write_lock(&fd, 0, 0).is_ok() {
            return Ok(());
        }
        pause();
    }
    anyhow::bail!("the lock of a process that has ended is still there");
}

fn a_wait_ends_when_the_lock_is_dropped(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write_lock(&fd, 0, 10)?;
    let child = ForkedChild::start(|| {
        let result = lock(&fd, LockCommand::SetWait, FcntlLockType::Write, 5, 10);
        u8::from(result.is_err())
    })?;
    pause();
    lock(&fd, LockCommand::Set, FcntlLockType::Unlock, 0, 0)?;
    ensure!(child.wait()? == 0);
    Ok(())
}

fn a_wait_is_ended_by_a_signal(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write_lock(&fd, 0, 0)?;
    let wait = || {
        interrupt_after(100);
        lock(&fd, LockCommand::SetWait, FcntlLockType::Write, 0, 0)
    };
    ensure!(run_elsewhere(wait)? == Errno::INTR.raw_os_error());
    // No part of the wait remains.
    lock(&fd, LockCommand::Set, FcntlLockType::Unlock, 0, 0)?;
    ensure!(run_elsewhere(|| write_lock(&fd, 0, 0))? == 0);
    Ok(())
}

fn a_cycle_of_waits_gives_edeadlk(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write_lock(&fd, 0, 1)?;
    let child = ForkedChild::start(|| {
        let both = write_lock(&fd, 1, 1)
            .and_then(|()| lock(&fd, LockCommand::SetWait, FcntlLockType::Write, 0, 1));
        u8::from(both.is_err())
    })?;
    pause();
    pause();
    let circle = lock(&fd, LockCommand::SetWait, FcntlLockType::Write, 1, 1);
    lock(&fd, LockCommand::Set, FcntlLockType::Unlock, 0, 0)?;
    ensure!(child.wait()? == 0, "the other one did not get its lock");
    expect_error(circle, Errno::DEADLK)
}

/// A lock of an open file (`F_OFD_SETLK`).
fn ofd_lock(fd: &OwnedFd, kind: FcntlLockType, start: i64) -> std::io::Result<()> {
    lock(fd, LockCommand::OfdSet, kind, start, 10)
}

fn locks_of_open_files_conflict_within_a_process(dir: &CaseDir) -> Result<()> {
    let (one, two) = (dir.file("a", b"")?, dir.open("a", RDWR)?);
    ofd_lock(&one, FcntlLockType::Write, 0)?;
    expect_error(ofd_lock(&two, FcntlLockType::Read, 5), Errno::AGAIN)?;
    ofd_lock(&two, FcntlLockType::Write, 10)?;
    drop(dir.open("a", OFlags::RDONLY)?);
    expect_error(ofd_lock(&two, FcntlLockType::Read, 5), Errno::AGAIN)?;
    ofd_lock(&one, FcntlLockType::Unlock, 0)?;
    Ok(ofd_lock(&two, FcntlLockType::Read, 5)?)
}

/// Fails through FUSE if locks are forwarded and another process has the file open, because Linux
/// does not notify the server that such a lock ends.
fn the_lock_of_an_open_file_is_dropped_with_its_last_descriptor(dir: &CaseDir) -> Result<()> {
    let (one, two) = (dir.file("a", b"")?, dir.open("a", RDWR)?);
    let again = rustix::io::dup(&one)?;
    ofd_lock(&one, FcntlLockType::Write, 0)?;
    drop(one);
    expect_error(ofd_lock(&two, FcntlLockType::Read, 5), Errno::AGAIN)?;
    drop(again);
    for _ in 0..20 {
        if ofd_lock(&two, FcntlLockType::Read, 5).is_ok() {
            return Ok(());
        }
        pause();
    }
    anyhow::bail!("the lock of a closed file is still there");
}

fn flock_conflicts_between_open_files(dir: &CaseDir) -> Result<()> {
    let (one, two) = (dir.file("a", b"")?, dir.open("a", RDWR)?);
    flock(&one, FlockOperation::LockShared)?;
    flock(&two, FlockOperation::NonBlockingLockShared)?;
    flock(&two, FlockOperation::Unlock)?;
    expect_error(flock(&two, FlockOperation::NonBlockingLockExclusive), Errno::AGAIN)?;
    flock(&one, FlockOperation::Unlock)?;
    Ok(flock(&two, FlockOperation::NonBlockingLockExclusive)?)
}

fn flock_is_shared_by_duplicates_and_dropped_with_the_last(dir: &CaseDir) -> Result<()> {
    let (one, two) = (dir.file("a", b"")?, dir.open("a", RDWR)?);
    let again = rustix::io::dup(&one)?;
    flock(&one, FlockOperation::LockExclusive)?;
    flock(&again, FlockOperation::NonBlockingLockExclusive)?;
    drop(one);
    expect_error(flock(&two, FlockOperation::NonBlockingLockExclusive), Errno::AGAIN)?;
    drop(again);
    for _ in 0..50 {
        if flock(&two, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Ok(());
        }
        pause();
    }
    anyhow::bail!("the lock of a closed file is still there");
}

fn flock_can_change_its_type(dir: &CaseDir) -> Result<()> {
    let (one, two) = (dir.file("a", b"")?, dir.open("a", RDWR)?);
    flock(&one, FlockOperation::LockShared)?;
    flock(&one, FlockOperation::NonBlockingLockExclusive)?;
    expect_error(flock(&two, FlockOperation::NonBlockingLockShared), Errno::AGAIN)?;
    flock(&one, FlockOperation::LockShared)?;
    Ok(flock(&two, FlockOperation::NonBlockingLockShared)?)
}

fn flock_waits_for_its_turn(dir: &CaseDir) -> Result<()> {
    let (one, two) = (dir.file("a", b"")?, dir.open("a", RDWR)?);
    flock(&one, FlockOperation::LockExclusive)?;
    thread::scope(|scope| {
        let waiter = scope.spawn(|| flock(&two, FlockOperation::LockExclusive));
        pause();
        let early = waiter.is_finished();
        flock(&one, FlockOperation::Unlock)?;
        waiter.join().expect("no panic")?;
        ensure!(!early, "it did not wait");
        Ok(())
    })
}

fn flock_and_record_locks_ignore_each_other(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    flock(&fd, FlockOperation::LockExclusive)?;
    ensure!(run_elsewhere(|| write_lock(&fd, 0, 0))? == 0);
    Ok(())
}

fn a_lock_needs_a_descriptor_that_allows_it(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    expect_error(write_lock(&dir.open("a", OFlags::RDONLY)?, 0, 0), Errno::BADF)?;
    let writer = dir.open("a", OFlags::WRONLY)?;
    expect_error(lock(&writer, LockCommand::Set, FcntlLockType::Read, 0, 0), Errno::BADF)
}
