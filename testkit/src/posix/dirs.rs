//! Listings: getdents(2), seekdir(3), rewinddir(3).

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use rustix::fs::{FileType, OFlags, SeekFrom, seek};

use super::case_table;
use super::dir::{CaseDir, list};

case_table! { "dirs";
    an_empty_directory_lists_dot_and_dot_dot,
    types_and_numbers_agree_with_stat,
    many_entries_are_each_listed_once,
    a_listing_continues_from_every_position,
    rewinding_shows_new_names,
    lasting_names_are_listed_once_while_others_come_and_go,
    removing_while_listing_empties_the_directory,
    a_removed_name_is_not_listed,
}

const LIST: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

fn an_empty_directory_lists_dot_and_dot_dot(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    let listed = list(&dir.open("d", LIST)?)?;
    let mut names: Vec<_> = listed.iter().map(|item| item.name.as_str()).collect();
    names.sort_unstable();
    ensure!(names == [".", ".."] && listed.iter().all(|item| item.kind == FileType::Directory));
    Ok(())
}

fn types_and_numbers_agree_with_stat(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.mkdir("d")?;
    dir.symlink("a", "l")?;
    dir.mknod("p", FileType::Fifo, 0)?;
    dir.mknod("s", FileType::Socket, 0)?;
    for item in list(&dir.open(".", LIST)?)? {
        if item.name == ".." {
            continue;
        }
        let stat = dir.stat(&item.name)?;
        ensure!(item.ino == stat.st_ino, "{}", item.name);
        let kind = FileType::from_raw_mode(stat.st_mode);
        ensure!(item.kind == kind || item.kind == FileType::Unknown, "{}", item.name);
    }
    Ok(())
}

fn many_entries_are_each_listed_once(dir: &CaseDir) -> Result<()> {
    for i in 0..2000 {
        dir.mknod(&format!("a-rather-long-name-for-a-file-{i}"), FileType::RegularFile, 0)?;
    }
    ensure!(dir.names(".")?.len() == 2000);
    Ok(())
}

fn a_listing_continues_from_every_position(dir: &CaseDir) -> Result<()> {
    for i in 0..300 {
        dir.mknod(&format!("f{i}"), FileType::RegularFile, 0)?;
    }
    let fd = dir.open(".", LIST)?;
    let all = list(&fd)?;
    for (number, item) in all.iter().enumerate().step_by(17) {
        seek(&fd, SeekFrom::Start(item.next))?;
        let rest = list(&fd)?;
        let names = |items: &[super::dir::GetdentsEntry]| -> Vec<String> {
            items.iter().map(|item| item.name.clone()).collect()
        };
        ensure!(names(&rest) == names(&all[number + 1..]), "after {}", item.name);
    }
    Ok(())
}

fn rewinding_shows_new_names(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let fd = dir.open(".", LIST)?;
    ensure!(list(&fd)?.len() == 3 && list(&fd)?.is_empty());
    dir.file("b", b"")?;
    dir.unlink("a")?;
    seek(&fd, SeekFrom::Start(0))?;
    let listed = list(&fd)?;
    ensure!(listed.len() == 3 && listed.iter().any(|item| item.name == "b"));
    Ok(())
}

fn lasting_names_are_listed_once_while_others_come_and_go(dir: &CaseDir) -> Result<()> {
    for i in 0..400 {
        dir.mknod(&format!("stay{i}"), FileType::RegularFile, 0)?;
        dir.mknod(&format!("go{i}"), FileType::RegularFile, 0)?;
    }
    let fd = dir.open(".", LIST)?;
    let mut seen = BTreeMap::new();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 1024];
    let mut listing = rustix::fs::RawDir::new(&fd, &mut buffer);
    let mut count = 0;
    while let Some(entry) = listing.next() {
        let name = entry?.file_name().to_string_lossy().into_owned();
        *seen.entry(name).or_insert(0) += 1;
        if count < 400 {
            dir.unlink(&format!("go{}", 399 - count))?;
            dir.mknod(&format!("new{count}"), FileType::RegularFile, 0)?;
            count += 1;
        }
    }
    for i in 0..400 {
        let times = seen.get(&format!("stay{i}"));
        ensure!(times == Some(&1), "stay{i} was listed {times:?} times");
    }
    Ok(())
}

fn removing_while_listing_empties_the_directory(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    for i in 0..500 {
        dir.mknod(&format!("d/f{i}"), FileType::RegularFile, 0)?;
    }
    let fd = dir.open("d", LIST)?;
    let mut buffer = [std::mem::MaybeUninit::uninit(); 512];
    let mut listing = rustix::fs::RawDir::new(&fd, &mut buffer);
    while let Some(entry) = listing.next() {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with('f') {
            dir.unlink(&format!("d/{name}"))?;
        }
    }
    Ok(dir.rmdir("d")?)
}

fn a_removed_name_is_not_listed(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    dir.file("b", b"")?;
    dir.unlink("a")?;
    ensure!(dir.names(".")?.into_iter().collect::<Vec<_>>() == ["b"]);
    dir.rename("b", "c")?;
    ensure!(dir.names(".")?.into_iter().collect::<Vec<_>>() == ["c"]);
    Ok(())
}
