//! Hard and symbolic links: link(2), symlink(2), readlink(2), path_resolution(7).

use anyhow::{Result, ensure};
use rustix::fs::{AtFlags, FileType, OFlags, linkat, readlinkat};
use rustix::io::Errno;

use super::case_table;
use super::dir::{CaseDir, expect_error, write_all};

case_table! { "links";
    names_of_one_file_share_everything,
    removing_one_name_keeps_the_file,
    a_directory_gets_no_second_name,
    link_refuses_a_name_that_is_taken,
    link_to_a_symbolic_link_links_the_link_itself,
    link_can_follow_a_symbolic_link,
    link_moves_the_change_time,
    a_thousand_links_are_counted,
    a_symbolic_link_leads_to_its_target,
    a_dangling_link_can_be_read_and_its_target_created,
    readlink_refuses_files_that_are_no_link,
    readlink_truncates_to_the_buffer,
    a_target_of_4095_bytes_is_kept,
    loops_give_eloop,
    nofollow_refuses_a_link_at_the_end,
    a_link_in_the_middle_is_followed,
    a_relative_target_starts_where_the_link_is,
    the_size_of_a_link_is_the_length_of_its_target,
    unlink_removes_the_link_and_not_its_target,
}

fn names_of_one_file_share_everything(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"one")?;
    dir.mkdir("d")?;
    dir.link("a", "d/b")?;
    let (a, b) = (dir.stat("a")?, dir.stat("d/b")?);
    ensure!(a.st_ino == b.st_ino && a.st_nlink == 2 && b.st_nlink == 2);
    write_all(&fd, 0, b"two")?;
    dir.chmod("d/b", 0o600)?;
    ensure!(dir.read("d/b")? == b"two" && dir.perm("a")? == 0o600);
    Ok(())
}

fn removing_one_name_keeps_the_file(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"bytes")?;
    dir.link("a", "b")?;
    dir.unlink("a")?;
    ensure!(dir.read("b")? == b"bytes" && dir.nlink("b")? == 1);
    Ok(())
}

fn a_directory_gets_no_second_name(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    expect_error(dir.link("d", "e"), Errno::PERM)
}

fn link_refuses_a_name_that_is_taken(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.file("b", b"")?;
    expect_error(dir.link("a", "b"), Errno::EXIST)?;
    expect_error(dir.link("a", "a"), Errno::EXIST)?;
    expect_error(dir.link("c", "d"), Errno::NOENT)
}

fn link_to_a_symbolic_link_links_the_link_itself(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.symlink("a", "l")?;
    dir.link("l", "m")?;
    ensure!(FileType::from_raw_mode(dir.stat("m")?.st_mode) == FileType::Symlink);
    ensure!(dir.nlink("l")? == 2 && dir.nlink("a")? == 1);
    Ok(())
}

fn link_can_follow_a_symbolic_link(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.symlink("a", "l")?;
    linkat(dir.fd(), "l", dir.fd(), "m", AtFlags::SYMLINK_FOLLOW)?;
    ensure!(dir.stat("m")?.st_ino == dir.stat("a")?.st_ino);
    Ok(())
}

fn link_moves_the_change_time(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let before = dir.stat("a")?;
    super::attributes::tick();
    dir.link("a", "b")?;
    let after = dir.stat("a")?;
    let ctime = |stat: &rustix::fs::Stat| (stat.st_ctime, stat.st_ctime_nsec);
    ensure!(ctime(&after) > ctime(&before) && after.st_mtime_nsec == before.st_mtime_nsec);
    super::attributes::tick();
    dir.unlink("b")?;
    ensure!(ctime(&dir.stat("a")?) > ctime(&after));
    Ok(())
}

fn a_thousand_links_are_counted(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    for i in 0..1000 {
        dir.link("a", &format!("l{i}"))?;
    }
    ensure!(dir.nlink("a")? == 1001);
    for i in 0..1000 {
        dir.unlink(&format!("l{i}"))?;
    }
    ensure!(dir.nlink("a")? == 1);
    Ok(())
}

fn a_symbolic_link_leads_to_its_target(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"bytes")?;
    dir.symlink("a", "l")?;
    ensure!(dir.read("l")? == b"bytes");
    ensure!(readlinkat(dir.fd(), "l", Vec::new())?.as_bytes() == b"a");
    ensure!(dir.stat("l")?.st_mode == 0o120777);
    Ok(())
}

fn a_dangling_link_can_be_read_and_its_target_created(dir: &CaseDir) -> Result<()> {
    dir.symlink("a", "l")?;
    expect_error(dir.open("l", OFlags::RDONLY), Errno::NOENT)?;
    drop(dir.open("l", OFlags::RDWR | OFlags::CREATE)?);
    ensure!(dir.exists("a"));
    Ok(())
}

fn readlink_refuses_files_that_are_no_link(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    expect_error(readlinkat(dir.fd(), "a", Vec::new()), Errno::INVAL)?;
    expect_error(readlinkat(dir.fd(), ".", Vec::new()), Errno::INVAL)?;
    expect_error(readlinkat(dir.fd(), "b", Vec::new()), Errno::NOENT)
}

fn readlink_truncates_to_the_buffer(dir: &CaseDir) -> Result<()> {
    dir.symlink("target", "l")?;
    let mut room = [0u8; 3];
    let count = rustix::fs::readlinkat_raw(dir.fd(), "l", &mut room[..])?;
    ensure!(count == 3 && &room == b"tar");
    Ok(())
}

fn a_target_of_4095_bytes_is_kept(dir: &CaseDir) -> Result<()> {
    let target = "t".repeat(4095);
    dir.symlink(&target, "l")?;
    ensure!(readlinkat(dir.fd(), "l", Vec::new())?.as_bytes() == target.as_bytes());
    expect_error(dir.symlink(&"t".repeat(4096), "m"), Errno::NAMETOOLONG)?;
    expect_error(dir.symlink("", "m"), Errno::NOENT)
}

fn loops_give_eloop(dir: &CaseDir) -> Result<()> {
    dir.symlink("b", "a")?;
    dir.symlink("a", "b")?;
    dir.symlink("self", "self")?;
    expect_error(dir.open("a", OFlags::RDONLY), Errno::LOOP)?;
    expect_error(dir.open("self/x", OFlags::RDONLY), Errno::LOOP)
}

fn nofollow_refuses_a_link_at_the_end(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.symlink("a", "l")?;
    expect_error(dir.open("l", OFlags::RDONLY | OFlags::NOFOLLOW), Errno::LOOP)
}

fn a_link_in_the_middle_is_followed(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.file("d/a", b"bytes")?;
    dir.symlink("d", "l")?;
    ensure!(dir.read("l/a")? == b"bytes");
    dir.file("l/b", b"")?;
    ensure!(dir.exists("d/b"));
    expect_error(dir.rmdir("l"), Errno::NOTDIR)
}

fn a_relative_target_starts_where_the_link_is(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.file("a", b"outside")?;
    dir.symlink("../a", "d/l")?;
    ensure!(dir.read("d/l")? == b"outside");
    Ok(())
}

fn the_size_of_a_link_is_the_length_of_its_target(dir: &CaseDir) -> Result<()> {
    for len in [1, 59, 60, 100, 1000] {
        let name = format!("l{len}");
        dir.symlink(&"t".repeat(len), &name)?;
        ensure!(dir.stat(&name)?.st_size == len as i64);
    }
    Ok(())
}

fn unlink_removes_the_link_and_not_its_target(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.symlink("a", "l")?;
    dir.unlink("l")?;
    ensure!(dir.exists("a") && !dir.exists("l"));
    Ok(())
}
