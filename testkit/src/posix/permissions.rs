//! Permissions, and bits that operations clear: access(2), inode(7), path_resolution(7).

use anyhow::{Result, ensure};
use rustix::fs::{Access, AtFlags, OFlags, accessat, ftruncate};
use rustix::io::Errno;

use super::case_table;
use super::dir::{CaseDir, SkipReason, as_user, expect_error, mode, write_all};

case_table! { "permissions";
    the_umask_takes_bits_away,
    root a_new_file_belongs_to_its_creator,
    root owner_group_and_others_have_their_own_bits,
    root supplementary_groups_count,
    root a_directory_needs_search_to_be_crossed_and_read_to_be_listed,
    root creating_and_removing_names_needs_write_permission,
    root only_the_owner_changes_the_mode,
    root only_root_may_change_the_owner,
    root an_owner_may_change_the_group_to_one_of_their_groups,
    root set_times_needs_owner_or_write,
    root a_sticky_directory_protects_names_of_others,
    root set_group_id_is_inherited,
    root writing_by_another_clears_set_user_id,
    root a_set_user_id_file_of_root_keeps_the_bit_when_root_writes,
    root a_member_who_writes_keeps_set_group_id_without_execution,
    root truncating_by_another_clears_set_user_id,
    root chown_clears_set_user_id,
    root chmod_by_one_outside_the_group_clears_set_group_id,
    root access_checks_the_real_user,
    root root_may_do_everything_except_execute_files_without_execute_bits,
    root an_open_file_outlives_its_permissions,
    root trusted_attributes_are_for_root_only,
}

const USER: u32 = 5000;
const OTHER: u32 = 5001;
const NEW: OFlags = OFlags::RDWR.union(OFlags::CREATE).union(OFlags::EXCL);

fn the_umask_takes_bits_away(dir: &CaseDir) -> Result<()> {
    let umask = rustix::process::umask(mode(0o027));
    let file = dir.open_mode("a", NEW, 0o666).map(drop);
    let made = rustix::fs::mkdirat(dir.fd(), "d", mode(0o777));
    rustix::process::umask(umask);
    file?;
    made?;
    ensure!(dir.perm("a")? == 0o640 && dir.perm("d")? == 0o750);
    Ok(())
}

fn a_new_file_belongs_to_its_creator(dir: &CaseDir) -> Result<()> {
    as_user(USER, 6000, &[], || {
        dir.open("a", NEW)?;
        dir.mkdir("d")?;
        Ok(dir.symlink("a", "l")?)
    })?;
    for name in ["a", "d", "l"] {
        let stat = dir.stat(name)?;
        ensure!((stat.st_uid, stat.st_gid) == (USER, 6000), "{name}");
    }
    Ok(())
}

fn owner_group_and_others_have_their_own_bits(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(USER), Some(6000))?;
    // The first matching class decides, even if a later one grants more.
    dir.chmod("a", 0o046)?;
    as_user(USER, 6000, &[], || expect_error(dir.open("a", OFlags::RDONLY), Errno::ACCESS))?;
    as_user(OTHER, 6000, &[], || {
        dir.open("a", OFlags::RDONLY)?;
        expect_error(dir.open("a", OFlags::RDWR), Errno::ACCESS)
    })?;
    as_user(OTHER, 6001, &[], || dir.expect_open("a", OFlags::RDWR))
}

fn supplementary_groups_count(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(0), Some(6000))?;
    dir.chmod("a", 0o640)?;
    as_user(USER, USER, &[7000, 6000], || dir.expect_open("a", OFlags::RDONLY))?;
    as_user(USER, USER, &[7000], || expect_error(dir.open("a", OFlags::RDONLY), Errno::ACCESS))
}

fn a_directory_needs_search_to_be_crossed_and_read_to_be_listed(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.file("d/a", b"x")?;
    dir.chmod("d", 0o744)?;
    as_user(USER, USER, &[], || {
        dir.names("d")?;
        expect_error(dir.stat("d/a"), Errno::ACCESS)?;
        expect_error(dir.open("d/a", OFlags::RDONLY), Errno::ACCESS)
    })?;
    dir.chmod("d", 0o711)?;
    as_user(USER, USER, &[], || {
        dir.stat("d/a")?;
        expect_error(dir.open("d", OFlags::RDONLY), Errno::ACCESS)
    })
}

fn creating_and_removing_names_needs_write_permission(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.file("d/a", b"")?;
    dir.mkdir("d/s")?;
    dir.file("mine", b"")?;
    as_user(USER, USER, &[], || {
        expect_error(dir.open("d/b", NEW), Errno::ACCESS)?;
        expect_error(dir.mkdir("d/e"), Errno::ACCESS)?;
        expect_error(dir.unlink("d/a"), Errno::ACCESS)?;
        expect_error(dir.rmdir("d/s"), Errno::ACCESS)?;
        expect_error(dir.rename("d/a", "b"), Errno::ACCESS)?;
        expect_error(dir.symlink("x", "d/l"), Errno::ACCESS)
    })
}

fn only_the_owner_changes_the_mode(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(USER), Some(USER))?;
    as_user(USER, USER, &[], || Ok(dir.chmod("a", 0o600)?))?;
    as_user(OTHER, USER, &[], || expect_error(dir.chmod("a", 0o666), Errno::PERM))?;
    ensure!(dir.perm("a")? == 0o600);
    Ok(())
}

fn only_root_may_change_the_owner(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(USER), Some(USER))?;
    as_user(USER, USER, &[], || {
        expect_error(dir.chown("a", Some(OTHER), None), Errno::PERM)?;
        expect_error(dir.chown("a", None, Some(OTHER)), Errno::PERM)
    })
}

fn an_owner_may_change_the_group_to_one_of_their_groups(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(USER), Some(USER))?;
    as_user(USER, USER, &[6000], || Ok(dir.chown("a", None, Some(6000))?))?;
    ensure!(dir.stat("a")?.st_gid == 6000);
    Ok(())
}

fn set_times_needs_owner_or_write(dir: &CaseDir) -> Result<()> {
    use rustix::fs::{Timespec, UTIME_NOW};
    dir.file("a", b"")?;
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW as _ };
    let then = Timespec { tv_sec: 5, tv_nsec: 0 };
    dir.chmod("a", 0o666)?;
    as_user(USER, USER, &[], || {
        dir.utimens("a", now, now)?;
        expect_error(dir.utimens("a", then, then), Errno::PERM)
    })?;
    dir.chmod("a", 0o644)?;
    as_user(USER, USER, &[], || expect_error(dir.utimens("a", now, now), Errno::ACCESS))
}

fn a_sticky_directory_protects_names_of_others(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.chmod("d", 0o1777)?;
    as_user(USER, USER, &[], || {
        dir.open("d/a", NEW)?;
        Ok(dir.mkdir("d/s")?)
    })?;
    as_user(OTHER, OTHER, &[], || {
        expect_error(dir.unlink("d/a"), Errno::PERM)?;
        expect_error(dir.rmdir("d/s"), Errno::PERM)?;
        expect_error(dir.rename("d/a", "d/b"), Errno::PERM)?;
        dir.open("d/c", NEW)?;
        expect_error(dir.rename("d/c", "d/a"), Errno::PERM)?;
        Ok(dir.unlink("d/c")?)
    })?;
    as_user(USER, USER, &[], || Ok(dir.unlink("d/a")?))
}

fn set_group_id_is_inherited(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.chown("d", None, Some(6000))?;
    dir.chmod("d", 0o2777)?;
    as_user(USER, USER, &[], || {
        dir.open("d/a", NEW)?;
        dir.open_mode("d/x", NEW, 0o2775)?;
        Ok(dir.mkdir("d/s")?)
    })?;
    ensure!(dir.stat("d/a")?.st_gid == 6000 && dir.perm("d/a")? == 0o644);
    ensure!(dir.stat("d/s")?.st_gid == 6000 && dir.perm("d/s")? == 0o2755);
    ensure!(dir.perm("d/x")? == 0o775, "one outside the group made a set-group-id file");
    Ok(())
}

/// A set-user-id file with write permission for all users.
fn set_user_id_file(dir: &CaseDir, bits: u32) -> Result<()> {
    dir.file("a", b"bytes")?;
    dir.chown("a", Some(USER), Some(USER))?;
    Ok(dir.chmod("a", bits)?)
}

fn writing_by_another_clears_set_user_id(dir: &CaseDir) -> Result<()> {
    set_user_id_file(dir, 0o6777)?;
    as_user(OTHER, OTHER, &[], || write_all(&dir.open("a", OFlags::RDWR)?, 0, b"x"))?;
    ensure!(dir.perm("a")? == 0o777, "{:o}", dir.perm("a")?);
    dir.chmod("a", 0o6777)?;
    write_all(&dir.open("a", OFlags::RDWR)?, 0, b"x")?;
    ensure!(dir.perm("a")? == 0o6777, "root's write cleared it");
    Ok(())
}

/// A passthrough let the kernel write such a file directly, without the privilege that keeps the
/// bit.
fn a_set_user_id_file_of_root_keeps_the_bit_when_root_writes(dir: &CaseDir) -> Result<()> {
    let umask = rustix::process::umask(mode(0));
    let file = dir.open_mode("a", NEW, 0o6755);
    rustix::process::umask(umask);
    write_all(&file?, 0, b"x")?;
    ensure!(dir.perm("a")? == 0o6755, "{:o}", dir.perm("a")?);
    // The kernel wrote directly as long as an open file of before had a backing file.
    dir.file("b", b"bytes")?;
    let before = dir.open("b", OFlags::RDWR)?;
    write_all(&before, 0, b"y")?;
    dir.chmod("b", 0o6755)?;
    write_all(&dir.open("b", OFlags::RDWR)?, 0, b"x")?;
    ensure!(dir.perm("b")? == 0o6755, "{:o} beside another open file", dir.perm("b")?);
    drop(before);
    Ok(())
}

/// Without group execution the bit has no meaning for programs (`setattr_should_drop_sgid()` of
/// Linux).
fn a_member_who_writes_keeps_set_group_id_without_execution(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(USER), Some(USER))?;
    dir.chmod("a", 0o2666)?;
    as_user(USER, USER, &[], || write_all(&dir.open("a", OFlags::RDWR)?, 0, b"x"))?;
    ensure!(dir.perm("a")? == 0o2666, "{:o}", dir.perm("a")?);
    as_user(USER, USER, &[], || Ok(ftruncate(dir.open("a", OFlags::RDWR)?, 0)?))?;
    ensure!(dir.perm("a")? == 0o2666, "{:o} after ftruncate", dir.perm("a")?);
    Ok(())
}

fn truncating_by_another_clears_set_user_id(dir: &CaseDir) -> Result<()> {
    set_user_id_file(dir, 0o6777)?;
    as_user(OTHER, OTHER, &[], || Ok(ftruncate(dir.open("a", OFlags::RDWR)?, 1)?))?;
    ensure!(dir.perm("a")? == 0o777, "{:o} after ftruncate", dir.perm("a")?);
    dir.chmod("a", 0o6777)?;
    as_user(OTHER, OTHER, &[], || dir.expect_open("a", OFlags::RDWR | OFlags::TRUNC))?;
    ensure!(dir.perm("a")? == 0o777, "{:o} after O_TRUNC", dir.perm("a")?);
    Ok(())
}

fn chown_clears_set_user_id(dir: &CaseDir) -> Result<()> {
    set_user_id_file(dir, 0o6775)?;
    dir.chown("a", Some(OTHER), None)?;
    ensure!(dir.perm("a")? == 0o775, "{:o}", dir.perm("a")?);
    // Without group execution the bit does not mean set-group-id.
    dir.chmod("a", 0o6745)?;
    dir.chown("a", Some(USER), None)?;
    ensure!(dir.perm("a")? == 0o2745, "{:o}", dir.perm("a")?);
    dir.mkdir("d")?;
    dir.chmod("d", 0o6755)?;
    dir.chown("d", Some(USER), None)?;
    ensure!(dir.perm("d")? == 0o6755, "{:o} of a directory", dir.perm("d")?);
    Ok(())
}

fn chmod_by_one_outside_the_group_clears_set_group_id(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(USER), Some(6000))?;
    as_user(USER, USER, &[], || Ok(dir.chmod("a", 0o2755)?))?;
    ensure!(dir.perm("a")? == 0o755);
    as_user(USER, USER, &[6000], || Ok(dir.chmod("a", 0o2755)?))?;
    ensure!(dir.perm("a")? == 0o2755);
    Ok(())
}

fn access_checks_the_real_user(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chmod("a", 0o754)?;
    let may = |access| accessat(dir.fd(), "a", access, AtFlags::empty());
    as_user(USER, USER, &[], || {
        may(Access::EXISTS)?;
        may(Access::READ_OK)?;
        expect_error(may(Access::WRITE_OK), Errno::ACCESS)?;
        expect_error(may(Access::EXEC_OK), Errno::ACCESS)
    })
}

fn root_may_do_everything_except_execute_files_without_execute_bits(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(USER), Some(USER))?;
    dir.chmod("a", 0)?;
    dir.open("a", OFlags::RDWR)?;
    let may = |access| accessat(dir.fd(), "a", access, AtFlags::empty());
    may(Access::READ_OK | Access::WRITE_OK)?;
    expect_error(may(Access::EXEC_OK), Errno::ACCESS)?;
    dir.chmod("a", 0o001)?;
    Ok(may(Access::EXEC_OK)?)
}

fn an_open_file_outlives_its_permissions(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.chown("a", Some(USER), Some(USER))?;
    as_user(USER, USER, &[], || {
        let fd = dir.open("a", OFlags::RDWR)?;
        dir.chmod("a", 0)?;
        write_all(&fd, 0, b"still")?;
        ensure!(super::dir::read_at(&fd, 0, 9)? == b"still");
        expect_error(dir.open("a", OFlags::RDONLY), Errno::ACCESS)
    })
}

fn trusted_attributes_are_for_root_only(dir: &CaseDir) -> Result<()> {
    use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};
    let fd = dir.file("a", b"")?;
    dir.chmod("a", 0o666)?;
    match fsetxattr(&fd, "trusted.x", b"1", XattrFlags::empty()) {
        Err(Errno::OPNOTSUPP) => return Err(SkipReason("no trusted attributes here".into()).into()),
        other => other?,
    }
    as_user(USER, USER, &[], || {
        let set = fsetxattr(&fd, "trusted.x", b"2", XattrFlags::empty());
        expect_error(set, Errno::PERM)?;
        expect_error(fgetxattr(&fd, "trusted.x", &mut [0; 8][..]), Errno::NODATA)
    })
}
