//! Creation, lookup and removal of names: open(2), mkdir(2), unlink(2), rmdir(2).

use anyhow::{Result, ensure};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use super::case_table;
use super::dir::{CaseDir, expect_error, read_at, write_all};

case_table! { "names";
    a_new_file_is_empty_and_can_be_opened_again,
    exclusive_creation_refuses_an_existing_file,
    creation_opens_an_existing_file_and_keeps_its_data,
    truncation_at_open_empties_the_file,
    a_missing_name_gives_enoent,
    a_file_in_the_middle_of_a_path_gives_enotdir,
    a_slash_after_a_file_gives_enotdir,
    a_name_of_255_bytes_works_and_of_256_does_not,
    a_path_of_4096_bytes_gives_enametoolong,
    any_bytes_but_slash_and_nul_make_a_name,
    names_differ_by_case,
    unlink_removes_a_file_and_refuses_a_directory,
    rmdir_removes_an_empty_directory_only,
    rmdir_of_dot_and_dot_dot_is_refused,
    mkdir_refuses_a_name_that_is_taken,
    mkdir_accepts_a_slash_at_the_end,
    an_unlinked_file_can_be_used_while_it_is_open,
    a_name_can_be_used_again_while_the_old_file_is_open,
    a_removed_directory_that_is_open_is_empty_and_takes_no_names,
    open_with_directory_refuses_a_file,
    open_for_writing_refuses_a_directory,
    a_tree_of_depth_can_be_made_and_walked,
    dot_dot_leads_back,
    many_files_come_and_go,
}

const NEW: OFlags = OFlags::RDWR.union(OFlags::CREATE);

fn a_new_file_is_empty_and_can_be_opened_again(dir: &CaseDir) -> Result<()> {
    drop(dir.open("a", NEW)?);
    ensure!(dir.stat("a")?.st_size == 0 && dir.nlink("a")? == 1);
    ensure!(FileType::from_raw_mode(dir.stat("a")?.st_mode) == FileType::RegularFile);
    dir.open("a", OFlags::RDONLY)?;
    Ok(())
}

fn exclusive_creation_refuses_an_existing_file(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.mkdir("d")?;
    dir.symlink("nowhere", "l")?;
    for name in ["a", "d", "l"] {
        expect_error(dir.open(name, NEW | OFlags::EXCL), Errno::EXIST)?;
    }
    Ok(())
}

fn creation_opens_an_existing_file_and_keeps_its_data(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"bytes")?;
    let ino = dir.stat("a")?.st_ino;
    drop(dir.open("a", NEW)?);
    ensure!(dir.read("a")? == b"bytes" && dir.stat("a")?.st_ino == ino);
    Ok(())
}

fn truncation_at_open_empties_the_file(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"bytes")?;
    drop(dir.open("a", OFlags::WRONLY | OFlags::TRUNC)?);
    ensure!(dir.stat("a")?.st_size == 0);
    Ok(())
}

fn a_missing_name_gives_enoent(dir: &CaseDir) -> Result<()> {
    expect_error(dir.open("a", OFlags::RDONLY), Errno::NOENT)?;
    expect_error(dir.stat("a"), Errno::NOENT)?;
    expect_error(dir.unlink("a"), Errno::NOENT)?;
    expect_error(dir.rmdir("a"), Errno::NOENT)?;
    expect_error(dir.open("d/a", NEW), Errno::NOENT)?;
    expect_error(dir.open("", OFlags::RDONLY), Errno::NOENT)
}

fn a_file_in_the_middle_of_a_path_gives_enotdir(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    expect_error(dir.stat("a/b"), Errno::NOTDIR)?;
    expect_error(dir.open("a/b", NEW), Errno::NOTDIR)?;
    expect_error(dir.mkdir("a/b"), Errno::NOTDIR)?;
    expect_error(dir.rmdir("a"), Errno::NOTDIR)
}

fn a_slash_after_a_file_gives_enotdir(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    expect_error(dir.stat("a/"), Errno::NOTDIR)?;
    expect_error(dir.unlink("a/"), Errno::NOTDIR)
}

fn a_name_of_255_bytes_works_and_of_256_does_not(dir: &CaseDir) -> Result<()> {
    let (fits, long) = ("n".repeat(255), "n".repeat(256));
    dir.file(&fits, b"x")?;
    ensure!(dir.read(&fits)? == b"x" && dir.names(".")?.contains(&fits));
    expect_error(dir.open(&long, NEW), Errno::NAMETOOLONG)?;
    expect_error(dir.mkdir(&long), Errno::NAMETOOLONG)?;
    expect_error(dir.stat(&long), Errno::NAMETOOLONG)?;
    expect_error(dir.rename(&fits, &long), Errno::NAMETOOLONG)?;
    expect_error(dir.symlink("x", &long), Errno::NAMETOOLONG)
}

fn a_path_of_4096_bytes_gives_enametoolong(dir: &CaseDir) -> Result<()> {
    expect_error(dir.stat(&"./".repeat(2048)), Errno::NAMETOOLONG)?;
    dir.stat(&"./".repeat(2047))?;
    Ok(())
}

fn any_bytes_but_slash_and_nul_make_a_name(dir: &CaseDir) -> Result<()> {
    for name in [" ", "...", ".a", "a\nb", "\u{1}", "\u{fc}\u{10348}", "-", "*?", "\\", "a:b"] {
        dir.file(name, name.as_bytes())?;
    }
    ensure!(dir.names(".")?.len() == 10 && dir.read("a\nb")? == b"a\nb");
    Ok(())
}

fn names_differ_by_case(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"lower")?;
    dir.file("A", b"upper")?;
    ensure!(dir.read("a")? == b"lower" && dir.read("A")? == b"upper");
    Ok(())
}

fn unlink_removes_a_file_and_refuses_a_directory(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.unlink("a")?;
    ensure!(!dir.exists("a"));
    dir.mkdir("d")?;
    expect_error(dir.unlink("d"), Errno::ISDIR)?;
    dir.rmdir("d")?;
    Ok(())
}

fn rmdir_removes_an_empty_directory_only(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.file("d/a", b"")?;
    expect_error(dir.rmdir("d"), Errno::NOTEMPTY)?;
    dir.unlink("d/a")?;
    dir.rmdir("d")?;
    ensure!(!dir.exists("d"));
    Ok(())
}

fn rmdir_of_dot_and_dot_dot_is_refused(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    expect_error(dir.rmdir("d/."), Errno::INVAL)?;
    expect_error(dir.rmdir("d/.."), Errno::NOTEMPTY)
}

fn mkdir_refuses_a_name_that_is_taken(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.mkdir("d")?;
    dir.symlink("nowhere", "l")?;
    for name in ["a", "d", "l", "."] {
        expect_error(dir.mkdir(name), Errno::EXIST)?;
    }
    Ok(())
}

fn mkdir_accepts_a_slash_at_the_end(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d/")?;
    dir.rmdir("d/")?;
    Ok(())
}

fn an_unlinked_file_can_be_used_while_it_is_open(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"before")?;
    dir.unlink("a")?;
    write_all(&fd, 6, b" after")?;
    ensure!(read_at(&fd, 0, 100)? == b"before after");
    let stat = rustix::fs::fstat(&fd)?;
    ensure!(stat.st_nlink == 0 && stat.st_size == 12);
    rustix::fs::ftruncate(&fd, 3)?;
    rustix::fs::fchmod(&fd, super::dir::mode(0o600))?;
    ensure!(read_at(&fd, 0, 100)? == b"bef" && dir.names(".")?.is_empty());
    Ok(())
}

fn a_name_can_be_used_again_while_the_old_file_is_open(dir: &CaseDir) -> Result<()> {
    let old = dir.file("a", b"old")?;
    dir.unlink("a")?;
    dir.file("a", b"new")?;
    ensure!(read_at(&old, 0, 9)? == b"old" && dir.read("a")? == b"new");
    Ok(())
}

fn a_removed_directory_that_is_open_is_empty_and_takes_no_names(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    let fd = dir.open("d", OFlags::RDONLY | OFlags::DIRECTORY)?;
    dir.rmdir("d")?;
    let made = rustix::fs::openat(&fd, "a", NEW, super::dir::mode(0o600));
    expect_error(made, Errno::NOENT)?;
    // The kernel itself returns ENOENT if it knows that the directory was removed.
    match super::dir::list(&fd) {
        Err(error) if error.downcast_ref() == Some(&Errno::NOENT) => Ok(()),
        listed => {
            ensure!(listed?.iter().all(|item| item.name == "." || item.name == ".."));
            Ok(())
        }
    }
}

fn open_with_directory_refuses_a_file(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    expect_error(dir.open("a", OFlags::RDONLY | OFlags::DIRECTORY), Errno::NOTDIR)
}

fn open_for_writing_refuses_a_directory(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    expect_error(dir.open("d", OFlags::WRONLY), Errno::ISDIR)?;
    expect_error(dir.open("d", OFlags::RDWR), Errno::ISDIR)?;
    expect_error(dir.open("d", OFlags::RDONLY | OFlags::CREATE), Errno::ISDIR)
}

fn a_tree_of_depth_can_be_made_and_walked(dir: &CaseDir) -> Result<()> {
    let mut path = String::from("d");
    for _ in 0..100 {
        dir.mkdir(&path)?;
        path.push_str("/d");
    }
    dir.file(&path, b"deep")?;
    ensure!(dir.read(&path)? == b"deep");
    Ok(())
}

fn dot_dot_leads_back(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    dir.mkdir("d/e")?;
    ensure!(dir.stat("d/e/..")?.st_ino == dir.stat("d")?.st_ino);
    ensure!(dir.stat("d/e/../..")?.st_ino == dir.stat(".")?.st_ino);
    ensure!(dir.stat("d/./e/.")?.st_ino == dir.stat("d/e")?.st_ino);
    Ok(())
}

fn many_files_come_and_go(dir: &CaseDir) -> Result<()> {
    for round in 0..3 {
        for i in 0..300 {
            drop(dir.open(&format!("f{round}-{i}"), NEW | OFlags::EXCL)?);
        }
        ensure!(dir.names(".")?.len() == 300);
        for i in 0..300 {
            dir.unlink(&format!("f{round}-{i}"))?;
        }
    }
    ensure!(dir.names(".")?.is_empty());
    Ok(())
}
