//! Attributes: chmod(2), chown(2), utimensat(2), stat(2), statx(2), statvfs(3).

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::fs::{
    AtFlags, FileType, Stat, StatxFlags, Timespec, UTIME_NOW, UTIME_OMIT, fchmod, fstat, fstatvfs,
    ftruncate, statx,
};
use rustix::io::Errno;

use super::case_table;
use super::dir::{CaseDir, SkipReason, expect_error, mode, read_at, write_all};

case_table! { "attributes";
    chmod_sets_all_twelve_bits,
    chmod_through_a_descriptor,
    chmod_follows_a_symbolic_link,
    root chown_sets_owner_and_group_or_one_of_them,
    root chown_of_a_symbolic_link_leaves_its_target,
    utimens_sets_times_before_and_after_1970,
    utimens_keeps_nanoseconds,
    utimens_now_and_omit,
    utimens_refuses_bad_nanoseconds,
    writing_moves_modification_and_change_time,
    reading_leaves_modification_and_change_time,
    chmod_moves_the_change_time_only,
    names_move_the_times_of_their_directory,
    truncate_moves_the_times,
    a_new_file_has_the_time_of_now,
    statx_reports_the_birth_time,
    blocks_report_the_space_in_use,
    link_counts_of_directories_count_subdirectories,
    stat_is_the_same_by_name_and_by_descriptor,
    statfs_reports_space_and_the_longest_name,
    space_is_given_back,
    inode_numbers_differ,
}

/// Waits for one tick of the coarsest clock that file systems use for timestamps.
pub(super) fn tick() {
    thread::sleep(Duration::from_millis(15));
}

type TimePair = (i64, i64);

fn mtime(stat: &Stat) -> TimePair {
    (stat.st_mtime, stat.st_mtime_nsec as i64)
}

fn ctime(stat: &Stat) -> TimePair {
    (stat.st_ctime, stat.st_ctime_nsec as i64)
}

fn atime(stat: &Stat) -> TimePair {
    (stat.st_atime, stat.st_atime_nsec as i64)
}

fn make_time(secs: i64, nanos: i64) -> Timespec {
    Timespec { tv_sec: secs, tv_nsec: nanos as _ }
}

fn chmod_sets_all_twelve_bits(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.mkdir("d")?;
    for bits in [0, 0o777, 0o1777, 0o4711, 0o2755, 0o7777, 0o644] {
        for name in ["a", "d"] {
            dir.chmod(name, bits)?;
            ensure!(dir.perm(name)? == bits, "{name}: {:o}, not {bits:o}", dir.perm(name)?);
        }
    }
    Ok(dir.chmod("d", 0o755)?)
}

fn chmod_through_a_descriptor(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    fchmod(&fd, mode(0o600))?;
    ensure!(dir.perm("a")? == 0o600 && fstat(&fd)?.st_mode == 0o100600);
    Ok(())
}

fn chmod_follows_a_symbolic_link(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.symlink("a", "l")?;
    dir.chmod("l", 0o611)?;
    ensure!(dir.perm("a")? == 0o611 && dir.perm("l")? == 0o777);
    expect_error(dir.chmod("b", 0o600), Errno::NOENT)
}

fn chown_sets_owner_and_group_or_one_of_them(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let owner = || -> Result<(u32, u32)> {
        let stat = dir.stat("a")?;
        Ok((stat.st_uid, stat.st_gid))
    };
    dir.chown("a", Some(1000), Some(2000))?;
    ensure!(owner()? == (1000, 2000));
    dir.chown("a", Some(70000), None)?;
    ensure!(owner()? == (70000, 2000));
    dir.chown("a", None, Some(0))?;
    ensure!(owner()? == (70000, 0));
    Ok(dir.chown("a", None, None)?)
}

fn chown_of_a_symbolic_link_leaves_its_target(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.symlink("a", "l")?;
    dir.chown("l", Some(1000), Some(1000))?;
    ensure!(dir.stat("l")?.st_uid == 1000 && dir.stat("a")?.st_uid == 0);
    Ok(())
}

fn utimens_sets_times_before_and_after_1970(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.symlink("a", "l")?;
    let original = mtime(&dir.stat("a")?);
    for (atime_secs, mtime_secs) in [(0, 1), (-1, -1000), (1 << 31, (1 << 31) + 5), (1, 0)] {
        dir.utimens("l", make_time(atime_secs, 0), make_time(mtime_secs, 0))?;
        let stat = dir.stat("l")?;
        ensure!(atime(&stat) == (atime_secs, 0) && mtime(&stat) == (mtime_secs, 0), "{stat:?}");
    }
    ensure!(mtime(&dir.stat("a")?) == original, "the target of a link has changed");
    Ok(())
}

fn utimens_keeps_nanoseconds(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.utimens("a", make_time(5, 123_456_789), make_time(-5, 999_999_999))?;
    let stat = dir.stat("a")?;
    ensure!(atime(&stat) == (5, 123_456_789) && mtime(&stat) == (-5, 999_999_999));
    Ok(())
}

fn utimens_now_and_omit(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.utimens("a", make_time(1, 0), make_time(2, 0))?;
    let before = dir.stat("a")?;
    tick();
    dir.utimens("a", make_time(0, UTIME_OMIT), make_time(0, UTIME_NOW))?;
    let after = dir.stat("a")?;
    ensure!(atime(&after) == (1, 0) && after.st_mtime > 1_000_000_000);
    ensure!(ctime(&after) > ctime(&before));
    dir.utimens("a", make_time(7, 0), make_time(0, UTIME_OMIT))?;
    ensure!(atime(&dir.stat("a")?) == (7, 0) && mtime(&dir.stat("a")?) == mtime(&after));
    Ok(())
}

fn utimens_refuses_bad_nanoseconds(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    expect_error(dir.utimens("a", make_time(0, 1_000_000_000), make_time(0, 0)), Errno::INVAL)?;
    expect_error(dir.utimens("a", make_time(0, 0), make_time(0, -1)), Errno::INVAL)
}

fn writing_moves_modification_and_change_time(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"x")?;
    let before = fstat(&fd)?;
    tick();
    write_all(&fd, 0, b"y")?;
    let after = fstat(&fd)?;
    ensure!(mtime(&after) > mtime(&before) && ctime(&after) > ctime(&before));
    Ok(())
}

fn reading_leaves_modification_and_change_time(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"x")?;
    let before = fstat(&fd)?;
    tick();
    read_at(&fd, 0, 1)?;
    let after = fstat(&fd)?;
    ensure!(mtime(&after) == mtime(&before) && ctime(&after) == ctime(&before));
    ensure!(atime(&after) >= atime(&before));
    Ok(())
}

fn chmod_moves_the_change_time_only(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let before = dir.stat("a")?;
    tick();
    dir.chmod("a", 0o600)?;
    let after = dir.stat("a")?;
    ensure!(ctime(&after) > ctime(&before) && mtime(&after) == mtime(&before));
    Ok(())
}

fn names_move_the_times_of_their_directory(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    let steps: [(&str, &dyn Fn() -> Result<()>); 5] = [
        ("create", &|| dir.file("d/a", b"").map(drop)),
        ("mkdir", &|| Ok(dir.mkdir("d/s")?)),
        ("link", &|| Ok(dir.link("d/a", "d/b")?)),
        ("unlink", &|| Ok(dir.unlink("d/a")?)),
        ("rmdir", &|| Ok(dir.rmdir("d/s")?)),
    ];
    for (what, step) in steps {
        let before = dir.stat("d")?;
        tick();
        step()?;
        let after = dir.stat("d")?;
        ensure!(mtime(&after) > mtime(&before) && ctime(&after) > ctime(&before), "{what}");
    }
    Ok(())
}

fn truncate_moves_the_times(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"12345")?;
    for size in [2, 10] {
        let before = fstat(&fd)?;
        tick();
        ftruncate(&fd, size)?;
        let after = fstat(&fd)?;
        ensure!(mtime(&after) > mtime(&before) && ctime(&after) > ctime(&before), "to {size}");
    }
    Ok(())
}

fn a_new_file_has_the_time_of_now(dir: &CaseDir) -> Result<()> {
    let now = || defuse_fs::Timestamp::now().secs;
    let before = now();
    dir.file("a", b"")?;
    let stat = dir.stat("a")?;
    for time in [stat.st_atime, stat.st_mtime, stat.st_ctime] {
        ensure!((before - 1..=now()).contains(&time), "{time} is not now");
    }
    Ok(())
}

fn statx_reports_the_birth_time(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let flags = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let born = statx(dir.fd(), "a", AtFlags::SYMLINK_NOFOLLOW, flags)?;
    if born.stx_mask & StatxFlags::BTIME.bits() == 0 {
        return Err(SkipReason("no time of birth here".into()).into());
    }
    tick();
    dir.chmod("a", 0o600)?;
    dir.utimens("a", make_time(1, 0), make_time(1, 0))?;
    let later = statx(dir.fd(), "a", AtFlags::SYMLINK_NOFOLLOW, flags)?;
    let birth = |stat: &rustix::fs::Statx| (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec);
    ensure!(birth(&born) == birth(&later) && born.stx_btime.tv_sec > 1_000_000_000);
    Ok(())
}

fn blocks_report_the_space_in_use(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 100_000])?;
    rustix::fs::fsync(&fd)?;
    let full = dir.stat("a")?;
    ensure!(full.st_blocks >= 100_000 / 512, "{} blocks", full.st_blocks);
    ensure!(full.st_blksize >= 512);
    ftruncate(&fd, 0)?;
    ensure!(dir.stat("a")?.st_blocks < full.st_blocks);
    Ok(())
}

fn link_counts_of_directories_count_subdirectories(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    ensure!(dir.nlink("d")? == 2);
    dir.mkdir("d/a")?;
    dir.mkdir("d/b")?;
    dir.file("d/f", b"")?;
    ensure!(dir.nlink("d")? == 4);
    dir.rmdir("d/a")?;
    ensure!(dir.nlink("d")? == 3);
    Ok(())
}

fn stat_is_the_same_by_name_and_by_descriptor(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"bytes")?;
    let (by_name, by_fd) = (dir.stat("a")?, fstat(&fd)?);
    ensure!(by_name.st_ino == by_fd.st_ino && by_name.st_dev == by_fd.st_dev);
    ensure!(by_name.st_size == 5 && by_fd.st_size == 5 && by_name.st_mode == by_fd.st_mode);
    ensure!(FileType::from_raw_mode(dir.stat(".")?.st_mode) == FileType::Directory);
    ensure!(dir.stat(".")?.st_dev == by_fd.st_dev && by_fd.st_rdev == 0);
    Ok(())
}

fn statfs_reports_space_and_the_longest_name(dir: &CaseDir) -> Result<()> {
    let stat = fstatvfs(dir.fd())?;
    ensure!(stat.f_namemax == 255, "names of {} bytes", stat.f_namemax);
    ensure!(stat.f_bsize > 0 && stat.f_frsize > 0 && stat.f_blocks >= stat.f_bfree);
    ensure!(stat.f_bfree >= stat.f_bavail && stat.f_files >= stat.f_ffree);
    Ok(())
}

fn space_is_given_back(dir: &CaseDir) -> Result<()> {
    let before = fstatvfs(dir.fd())?;
    let fd = dir.file("a", &vec![1; 4 << 20])?;
    rustix::fs::fsync(&fd)?;
    let full = fstatvfs(dir.fd())?;
    let unit = before.f_frsize;
    // Others may use the same file system meanwhile, so half of the size is accepted.
    if (before.f_bfree.saturating_sub(full.f_bfree)) * unit < 2 << 20 {
        return Err(SkipReason("free space does not show what is written".into()).into());
    }
    dir.unlink("a")?;
    drop(fd);
    rustix::fs::syncfs(dir.fd())?;
    // A frontend may release the file shortly after close.
    for _ in 0..200 {
        if fstatvfs(dir.fd())?.f_bfree > full.f_bfree + (2 << 20) / unit {
            return Ok(());
        }
        tick();
    }
    anyhow::bail!("the space of a removed file is still in use");
}

fn inode_numbers_differ(dir: &CaseDir) -> Result<()> {
    let mut seen = std::collections::BTreeSet::new();
    for i in 0..50 {
        dir.file(&format!("f{i}"), b"")?;
        ensure!(seen.insert(dir.stat(&format!("f{i}"))?.st_ino), "a number twice");
    }
    Ok(())
}
