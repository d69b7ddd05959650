//! Extended attributes and ACLs: xattr(7), acl(5).

use anyhow::{Result, ensure};
use rustix::fs::{
    XattrFlags, getxattr, getxattr_query, lgetxattr, listxattr, listxattr_query, lsetxattr,
    removexattr, setxattr,
};
use rustix::io::Errno;

use super::case_table;
use super::dir::{CaseDir, as_user, expect_error, mode, skip_unsupported};

case_table! { "xattrs";
    a_value_is_kept_listed_and_removed,
    create_and_replace_are_respected,
    a_small_buffer_gives_erange_and_none_the_size,
    a_value_may_be_empty_or_hold_any_bytes,
    directories_have_attributes_too,
    names_without_a_namespace_are_refused,
    symbolic_links_have_no_user_attributes,
    attributes_follow_a_rename_and_not_a_copy,
    setting_moves_the_change_time,
    many_attributes_are_all_listed,
    root an_access_list_changes_the_mode,
    root chmod_changes_the_mask,
    root a_default_list_is_inherited_in_place_of_the_umask,
    root a_bad_list_is_refused,
    root a_list_grants_and_denies,
}

const NONE: XattrFlags = XattrFlags::empty();

fn set(dir: &CaseDir, name: &str, key: &str, value: &[u8]) -> Result<()> {
    skip_unsupported(setxattr(dir.path(name), key, value, NONE), "extended attributes")
}

fn get(dir: &CaseDir, name: &str, key: &str) -> rustix::io::Result<Vec<u8>> {
    let mut value = vec![0; 70_000];
    let len = getxattr(dir.path(name), key, &mut value[..])?;
    value.truncate(len);
    Ok(value)
}

fn names(dir: &CaseDir, name: &str) -> Result<Vec<String>> {
    let mut list = vec![0; 70_000];
    let len = listxattr(dir.path(name), &mut list[..])?;
    let mut names: Vec<_> = list[..len]
        .split(|&byte| byte == 0)
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .filter(|name| name.starts_with("user."))
        .collect();
    names.sort();
    Ok(names)
}

fn a_value_is_kept_listed_and_removed(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    set(dir, "a", "user.one", b"1")?;
    set(dir, "a", "user.two", b"22")?;
    set(dir, "a", "user.one", b"111")?;
    ensure!(get(dir, "a", "user.one")? == b"111" && names(dir, "a")? == ["user.one", "user.two"]);
    removexattr(dir.path("a"), "user.one")?;
    expect_error(get(dir, "a", "user.one"), Errno::NODATA)?;
    expect_error(removexattr(dir.path("a"), "user.one"), Errno::NODATA)?;
    ensure!(names(dir, "a")? == ["user.two"]);
    Ok(())
}

fn create_and_replace_are_respected(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let path = dir.path("a");
    let replaced = setxattr(&path, "user.x", b"1", XattrFlags::REPLACE);
    if replaced == Err(Errno::OPNOTSUPP) {
        return skip_unsupported(replaced, "extended attributes");
    }
    expect_error(replaced, Errno::NODATA)?;
    setxattr(&path, "user.x", b"1", XattrFlags::CREATE)?;
    expect_error(setxattr(&path, "user.x", b"2", XattrFlags::CREATE), Errno::EXIST)?;
    setxattr(&path, "user.x", b"3", XattrFlags::REPLACE)?;
    ensure!(get(dir, "a", "user.x")? == b"3");
    Ok(())
}

fn a_small_buffer_gives_erange_and_none_the_size(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    set(dir, "a", "user.x", b"12345")?;
    expect_error(getxattr(dir.path("a"), "user.x", &mut [0; 4][..]), Errno::RANGE)?;
    ensure!(getxattr_query(dir.path("a"), "user.x")? == 5);
    expect_error(listxattr(dir.path("a"), &mut [0; 3][..]), Errno::RANGE)?;
    ensure!(listxattr_query(dir.path("a"))? >= 7);
    Ok(())
}

fn a_value_may_be_empty_or_hold_any_bytes(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    set(dir, "a", "user.empty", b"")?;
    set(dir, "a", "user.bytes", b"\0\xff\n")?;
    ensure!(get(dir, "a", "user.empty")?.is_empty());
    ensure!(get(dir, "a", "user.bytes")? == b"\0\xff\n");
    Ok(())
}

fn directories_have_attributes_too(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    set(dir, "d", "user.x", b"1")?;
    ensure!(get(dir, "d", "user.x")? == b"1");
    Ok(())
}

fn names_without_a_namespace_are_refused(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    set(dir, "a", "user.x", b"")?;
    expect_error(setxattr(dir.path("a"), "x", b"", NONE), Errno::OPNOTSUPP)?;
    expect_error(setxattr(dir.path("a"), "", b"", NONE), Errno::RANGE)?;
    let long = format!("user.{}", "x".repeat(251));
    expect_error(setxattr(dir.path("a"), long.as_str(), b"", NONE), Errno::RANGE)
}

fn symbolic_links_have_no_user_attributes(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    set(dir, "a", "user.x", b"")?;
    dir.symlink("a", "l")?;
    expect_error(lsetxattr(dir.path("l"), "user.x", b"", NONE), Errno::PERM)?;
    expect_error(lgetxattr(dir.path("l"), "user.x", &mut [0; 4][..]), Errno::NODATA)
}

fn attributes_follow_a_rename_and_not_a_copy(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    set(dir, "a", "user.x", b"1")?;
    dir.rename("a", "b")?;
    ensure!(get(dir, "b", "user.x")? == b"1");
    dir.file("a", b"")?;
    expect_error(get(dir, "a", "user.x"), Errno::NODATA)
}

fn setting_moves_the_change_time(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let before = dir.stat("a")?;
    super::attributes::tick();
    set(dir, "a", "user.x", b"1")?;
    let after = dir.stat("a")?;
    ensure!(
        (after.st_ctime, after.st_ctime_nsec) > (before.st_ctime, before.st_ctime_nsec)
            && after.st_mtime_nsec == before.st_mtime_nsec
    );
    Ok(())
}

fn many_attributes_are_all_listed(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    for i in 0..30 {
        set(dir, "a", &format!("user.attribute{i}"), &[i; 20])?;
    }
    ensure!(names(dir, "a")?.len() == 30 && get(dir, "a", "user.attribute7")? == [7; 20]);
    Ok(())
}

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";
const NOBODY: u32 = u32::MAX;

/// An ACL of entries: tag (1 owner, 2 user, 4 owning group, 8 group, 16 mask, 32 other),
/// permissions, id.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for &(tag, perm, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(perm.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

fn set_acl(dir: &CaseDir, name: &str, key: &str, list: &[u8]) -> Result<()> {
    skip_unsupported(setxattr(dir.path(name), key, list, NONE), "access control lists")
}

fn an_access_list_changes_the_mode(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let list =
        acl(&[(1, 7, NOBODY), (2, 6, 5000), (4, 5, NOBODY), (16, 4, NOBODY), (32, 1, NOBODY)]);
    set_acl(dir, "a", ACCESS, &list)?;
    ensure!(dir.perm("a")? == 0o741 && get(dir, "a", ACCESS)? == list);
    let minimal = acl(&[(1, 6, NOBODY), (4, 4, NOBODY), (32, 0, NOBODY)]);
    set_acl(dir, "a", ACCESS, &minimal)?;
    ensure!(dir.perm("a")? == 0o640);
    expect_error(get(dir, "a", ACCESS), Errno::NODATA)
}

fn chmod_changes_the_mask(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let list = |owner, mask, other| {
        acl(&[
            (1, owner, NOBODY),
            (2, 7, 5000),
            (4, 5, NOBODY),
            (16, mask, NOBODY),
            (32, other, NOBODY),
        ])
    };
    set_acl(dir, "a", ACCESS, &list(7, 7, 7))?;
    dir.chmod("a", 0o641)?;
    ensure!(get(dir, "a", ACCESS)? == list(6, 4, 1) && dir.perm("a")? == 0o641);
    Ok(())
}

fn a_default_list_is_inherited_in_place_of_the_umask(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    let default =
        acl(&[(1, 7, NOBODY), (2, 7, 5000), (4, 5, NOBODY), (16, 7, NOBODY), (32, 0, NOBODY)]);
    set_acl(dir, "d", DEFAULT, &default)?;
    let umask = rustix::process::umask(mode(0o077));
    let made = dir
        .open_mode("d/a", rustix::fs::OFlags::CREATE | rustix::fs::OFlags::RDWR, 0o666)
        .and_then(|_| dir.mkdir("d/s"));
    rustix::process::umask(umask);
    made?;
    ensure!(dir.perm("d/a")? == 0o660, "{:o}", dir.perm("d/a")?);
    let access =
        acl(&[(1, 6, NOBODY), (2, 7, 5000), (4, 5, NOBODY), (16, 6, NOBODY), (32, 0, NOBODY)]);
    ensure!(get(dir, "d/a", ACCESS)? == access && get(dir, "d/s", DEFAULT)? == default);
    expect_error(get(dir, "d/a", DEFAULT), Errno::NODATA)
}

fn a_bad_list_is_refused(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    let good = acl(&[(1, 6, NOBODY), (4, 4, NOBODY), (32, 0, NOBODY)]);
    set_acl(dir, "a", ACCESS, &good)?;
    let no_mask = acl(&[(1, 7, NOBODY), (2, 6, 5000), (4, 5, NOBODY), (32, 1, NOBODY)]);
    for bad in [&good[..7], &good[..12], &no_mask, b"x"] {
        expect_error(setxattr(dir.path("a"), ACCESS, bad, NONE), Errno::INVAL)?;
    }
    expect_error(setxattr(dir.path("a"), DEFAULT, &good, NONE), Errno::ACCESS)
}

fn a_list_grants_and_denies(dir: &CaseDir) -> Result<()> {
    use rustix::fs::OFlags;
    dir.file("a", b"")?;
    dir.chmod("a", 0o644)?;
    let list = acl(&[
        (1, 6, NOBODY),
        (2, 6, 5000),
        (2, 0, 5001),
        (4, 4, NOBODY),
        (16, 6, NOBODY),
        (32, 4, NOBODY),
    ]);
    set_acl(dir, "a", ACCESS, &list)?;
    as_user(5000, 5000, &[], || dir.expect_open("a", OFlags::RDWR))?;
    as_user(5001, 5001, &[], || expect_error(dir.open("a", OFlags::RDONLY), Errno::ACCESS))?;
    as_user(5002, 5002, &[], || {
        dir.open("a", OFlags::RDONLY)?;
        expect_error(dir.open("a", OFlags::RDWR), Errno::ACCESS)
    })
}
