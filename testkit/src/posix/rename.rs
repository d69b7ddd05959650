//! rename(2) and renameat2(2).

use anyhow::{Result, ensure};
use rustix::fs::{FileType, OFlags, RenameFlags};
use rustix::io::Errno;

use super::case_table;
use super::dir::{CaseDir, SkipReason, expect_error, read_at};

case_table! { "rename";
    a_file_moves_and_stays_what_it_is,
    an_existing_file_is_replaced,
    a_replaced_file_that_is_open_lives_on,
    a_directory_moves_with_all_below_it,
    an_empty_directory_can_be_replaced_by_a_directory_only,
    a_full_directory_cannot_be_replaced,
    a_directory_cannot_move_below_itself,
    an_ancestor_cannot_be_replaced,
    renaming_onto_itself_has_no_effect,
    renaming_onto_another_name_of_the_same_file_has_no_effect,
    a_missing_name_cannot_be_renamed,
    dot_and_dot_dot_cannot_move,
    the_link_counts_of_both_parents_follow,
    dot_dot_of_a_moved_directory_follows,
    noreplace_refuses_a_name_that_is_taken,
    exchange_swaps_files_of_any_type,
    flags_that_contradict_are_refused,
    root a_whiteout_is_left,
    a_symbolic_link_itself_moves,
    an_open_file_can_move,
    times_of_both_parents_move,
}

fn a_file_moves_and_stays_what_it_is(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"bytes")?;
    let ino = dir.stat("a")?.st_ino;
    dir.rename("a", "b")?;
    ensure!(!dir.exists("a") && dir.stat("b")?.st_ino == ino && dir.read("b")? == b"bytes");
    dir.mkdir("d")?;
    dir.rename("b", "d/c")?;
    ensure!(!dir.exists("b") && dir.stat("d/c")?.st_ino == ino && dir.nlink("d/c")? == 1);
    Ok(())
}

fn an_existing_file_is_replaced(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"new")?;
    dir.file("b", b"old")?;
    dir.rename("a", "b")?;
    ensure!(dir.read("b")? == b"new" && dir.names(".")?.len() == 1);
    Ok(())
}

fn a_replaced_file_that_is_open_lives_on(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"new")?;
    let old = dir.file("b", b"old")?;
    dir.rename("a", "b")?;
    ensure!(read_at(&old, 0, 9)? == b"old" && rustix::fs::fstat(&old)?.st_nlink == 0);
    Ok(())
}

fn a_directory_moves_with_all_below_it(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("d/e")?;
    dir.file("d/e/a", b"deep")?;
    dir.rename("d", "x")?;
    ensure!(dir.read("x/e/a")? == b"deep" && !dir.exists("d"));
    Ok(())
}

fn an_empty_directory_can_be_replaced_by_a_directory_only(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("e")?;
    dir.file("a", b"")?;
    expect_error(dir.rename("a", "e"), Errno::ISDIR)?;
    expect_error(dir.rename("d", "a"), Errno::NOTDIR)?;
    dir.rename("d", "e")?;
    ensure!(!dir.exists("d") && dir.nlink(".")? == 3);
    Ok(())
}

fn a_full_directory_cannot_be_replaced(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("e")?;
    dir.file("e/a", b"")?;
    expect_error(dir.rename("d", "e"), Errno::NOTEMPTY)
}

fn a_directory_cannot_move_below_itself(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("d/e")?;
    dir.mkdir("d/e/f")?;
    expect_error(dir.rename("d", "d/x"), Errno::INVAL)?;
    expect_error(dir.rename("d", "d/e/f/x"), Errno::INVAL)
}

fn an_ancestor_cannot_be_replaced(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("d/e")?;
    dir.mkdir("d/e/f")?;
    expect_error(dir.rename("d/e/f", "d"), Errno::NOTEMPTY)?;
    expect_error(dir.rename("d/e/f", "d/e"), Errno::NOTEMPTY)
}

fn renaming_onto_itself_has_no_effect(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"bytes")?;
    dir.mkdir("d")?;
    dir.rename("a", "a")?;
    dir.rename("d", "d")?;
    ensure!(dir.read("a")? == b"bytes" && dir.exists("d"));
    Ok(())
}

fn renaming_onto_another_name_of_the_same_file_has_no_effect(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"bytes")?;
    dir.mkdir("d")?;
    dir.link("a", "b")?;
    dir.link("a", "d/c")?;
    dir.rename("a", "b")?;
    dir.rename("a", "d/c")?;
    ensure!(dir.exists("a") && dir.exists("b") && dir.exists("d/c") && dir.nlink("a")? == 3);
    Ok(())
}

fn a_missing_name_cannot_be_renamed(dir: &CaseDir) -> Result<()> {
    dir.file("b", b"")?;
    expect_error(dir.rename("a", "b"), Errno::NOENT)?;
    expect_error(dir.rename("b", "d/b"), Errno::NOENT)?;
    ensure!(dir.exists("b"));
    Ok(())
}

fn dot_and_dot_dot_cannot_move(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    expect_error(dir.rename("d/.", "e"), Errno::BUSY)?;
    expect_error(dir.rename("d/..", "e"), Errno::BUSY)?;
    expect_error(dir.rename("d", "d/.."), Errno::BUSY)
}

fn the_link_counts_of_both_parents_follow(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("e")?;
    dir.mkdir("d/s")?;
    ensure!(dir.nlink("d")? == 3 && dir.nlink("e")? == 2);
    dir.rename("d/s", "e/s")?;
    ensure!(dir.nlink("d")? == 2 && dir.nlink("e")? == 3);
    Ok(())
}

fn dot_dot_of_a_moved_directory_follows(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("e")?;
    dir.mkdir("d/s")?;
    let fd = dir.open("d/s", OFlags::RDONLY | OFlags::DIRECTORY)?;
    dir.rename("d/s", "e/s")?;
    ensure!(dir.stat("e/s/..")?.st_ino == dir.stat("e")?.st_ino);
    let parent = rustix::fs::statat(&fd, "..", rustix::fs::AtFlags::empty())?;
    ensure!(parent.st_ino == dir.stat("e")?.st_ino);
    Ok(())
}

/// A file system refuses unknown flags with `EINVAL`; the case is skipped then.
fn with_flags(dir: &CaseDir, old: &str, new: &str, flags: RenameFlags) -> Result<()> {
    match dir.rename_with(old, new, flags) {
        Err(Errno::INVAL | Errno::NOSYS) => Err(SkipReason(format!("no {flags:?} here")).into()),
        other => Ok(other?),
    }
}

fn noreplace_refuses_a_name_that_is_taken(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"a")?;
    dir.file("b", b"b")?;
    with_flags(dir, "a", "c", RenameFlags::NOREPLACE)?;
    expect_error(dir.rename_with("c", "b", RenameFlags::NOREPLACE), Errno::EXIST)?;
    expect_error(dir.rename_with("c", "c", RenameFlags::NOREPLACE), Errno::EXIST)?;
    ensure!(dir.read("b")? == b"b" && dir.read("c")? == b"a");
    Ok(())
}

fn exchange_swaps_files_of_any_type(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"a")?;
    dir.mkdir("d")?;
    dir.mkdir("d/s")?;
    with_flags(dir, "a", "d/s", RenameFlags::EXCHANGE)?;
    ensure!(dir.read("d/s")? == b"a" && dir.names("a")?.is_empty());
    ensure!(dir.nlink("d")? == 2 && dir.nlink(".")? == 4);
    expect_error(dir.rename_with("a", "x", RenameFlags::EXCHANGE), Errno::NOENT)?;
    expect_error(dir.rename_with("d", "d/s", RenameFlags::EXCHANGE), Errno::INVAL)
}

fn flags_that_contradict_are_refused(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.file("b", b"")?;
    let both = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
    expect_error(dir.rename_with("a", "b", both), Errno::INVAL)
}

fn a_whiteout_is_left(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    with_flags(dir, "a", "b", RenameFlags::WHITEOUT)?;
    let stat = dir.stat("a")?;
    ensure!(FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice);
    ensure!(stat.st_rdev == 0 && dir.exists("b"));
    Ok(())
}

fn a_symbolic_link_itself_moves(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"target")?;
    dir.symlink("a", "l")?;
    dir.rename("l", "m")?;
    ensure!(dir.read("m")? == b"target" && !dir.exists("l") && dir.exists("a"));
    dir.file("b", b"")?;
    dir.rename("b", "m")?;
    ensure!(dir.read("a")? == b"target" && dir.read("m")?.is_empty());
    Ok(())
}

fn an_open_file_can_move(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"one")?;
    dir.mkdir("d")?;
    dir.rename("a", "d/b")?;
    super::dir::write_all(&fd, 3, b" two")?;
    ensure!(dir.read("d/b")? == b"one two");
    Ok(())
}

fn times_of_both_parents_move(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("e")?;
    dir.file("d/a", b"")?;
    let times = |name: &str| -> Result<(i64, i64)> {
        let stat = dir.stat(name)?;
        Ok((stat.st_mtime, stat.st_mtime_nsec as i64))
    };
    let before = (times("d")?, times("e")?);
    super::attributes::tick();
    dir.rename("d/a", "e/a")?;
    ensure!(times("d")? > before.0 && times("e")? > before.1);
    Ok(())
}
