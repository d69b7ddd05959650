//! Devices, fifos, sockets, and unnamed files: mknod(2), `O_TMPFILE`, `O_PATH`.

use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::{io::Write as _, thread};

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{AtFlags, CWD, FileType, OFlags, fstat, linkat, makedev};
use rustix::io::Errno;

use super::case_table;
use super::dir::{CaseDir, SkipReason, expect_error, read_at, write_all};

case_table! { "special";
    mknod_creates_fifos_sockets_and_files,
    root mknod_creates_devices_with_their_numbers,
    root a_device_can_be_opened,
    a_fifo_passes_bytes,
    a_socket_can_be_bound_and_connected,
    mknod_refuses_a_name_that_is_taken,
    a_nameless_file_can_be_used_and_linked,
    an_exclusive_nameless_file_cannot_be_linked,
    o_path_leads_to_a_file_without_opening_it,
}

fn mknod_creates_fifos_sockets_and_files(dir: &CaseDir) -> Result<()> {
    for (name, kind) in
        [("p", FileType::Fifo), ("s", FileType::Socket), ("f", FileType::RegularFile)]
    {
        dir.mknod(name, kind, 0)?;
        let stat = dir.stat(name)?;
        ensure!(FileType::from_raw_mode(stat.st_mode) == kind && stat.st_nlink == 1, "{name}");
        ensure!(dir.perm(name)? == 0o644 && stat.st_size == 0, "{name}");
        dir.unlink(name)?;
    }
    Ok(())
}

fn mknod_creates_devices_with_their_numbers(dir: &CaseDir) -> Result<()> {
    for (name, kind, dev) in [
        ("c", FileType::CharacterDevice, makedev(1, 3)),
        ("b", FileType::BlockDevice, makedev(300, 70000)),
    ] {
        dir.mknod(name, kind, dev)?;
        let stat = dir.stat(name)?;
        ensure!(FileType::from_raw_mode(stat.st_mode) == kind && stat.st_rdev == dev, "{name}");
    }
    Ok(())
}

fn a_device_can_be_opened(dir: &CaseDir) -> Result<()> {
    dir.mknod("null", FileType::CharacterDevice, makedev(1, 3))?;
    match dir.open("null", OFlags::RDWR) {
        Err(Errno::ACCESS) => Err(SkipReason("mounted without devices".into()).into()),
        opened => {
            ensure!(rustix::io::write(opened?, b"gone")? == 4);
            Ok(())
        }
    }
}

fn a_fifo_passes_bytes(dir: &CaseDir) -> Result<()> {
    dir.mknod("p", FileType::Fifo, 0)?;
    thread::scope(|scope| {
        let writer = scope.spawn(|| -> Result<()> {
            let fd = dir.open("p", OFlags::WRONLY)?;
            ensure!(rustix::io::write(&fd, b"through")? == 7);
            Ok(())
        });
        let fd = dir.open("p", OFlags::RDONLY)?;
        let mut bytes = [0; 10];
        let count = rustix::io::read(&fd, &mut bytes)?;
        writer.join().expect("no panic")?;
        ensure!(&bytes[..count] == b"through");
        Ok(())
    })
}

fn a_socket_can_be_bound_and_connected(dir: &CaseDir) -> Result<()> {
    let path = dir.path("s");
    let listener = match UnixListener::bind(&path) {
        // The path of a socket is limited to 108 bytes.
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
            return Err(SkipReason("the path is too long for a socket".into()).into());
        }
        other => other.context("bind")?,
    };
    ensure!(FileType::from_raw_mode(dir.stat("s")?.st_mode) == FileType::Socket);
    let mut client = UnixStream::connect(&path).context("connect")?;
    client.write_all(b"hello")?;
    drop(client);
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut listener.accept()?.0, &mut bytes)?;
    ensure!(bytes == b"hello");
    Ok(())
}

fn mknod_refuses_a_name_that_is_taken(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"")?;
    expect_error(dir.mknod("a", FileType::Fifo, 0), Errno::EXIST)?;
    expect_error(dir.mknod("a/b", FileType::Fifo, 0), Errno::NOTDIR)
}

fn nameless(dir: &CaseDir, flags: OFlags) -> Result<std::os::fd::OwnedFd> {
    match dir.open_mode(".", OFlags::RDWR | OFlags::TMPFILE | flags, 0o600) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
            Err(SkipReason("no O_TMPFILE here".into()).into())
        }
        other => Ok(other?),
    }
}

fn a_nameless_file_can_be_used_and_linked(dir: &CaseDir) -> Result<()> {
    let fd = nameless(dir, OFlags::empty())?;
    write_all(&fd, 0, b"bytes")?;
    ensure!(fstat(&fd)?.st_nlink == 0 && dir.names(".")?.is_empty());
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    linkat(CWD, path.as_str(), dir.fd(), "a", AtFlags::SYMLINK_FOLLOW)?;
    ensure!(dir.read("a")? == b"bytes" && dir.nlink("a")? == 1 && dir.perm("a")? == 0o600);
    Ok(())
}

fn an_exclusive_nameless_file_cannot_be_linked(dir: &CaseDir) -> Result<()> {
    let fd = nameless(dir, OFlags::EXCL)?;
    write_all(&fd, 0, b"bytes")?;
    ensure!(read_at(&fd, 0, 9)? == b"bytes");
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    expect_error(linkat(CWD, path.as_str(), dir.fd(), "a", AtFlags::SYMLINK_FOLLOW), Errno::NOENT)
}

fn o_path_leads_to_a_file_without_opening_it(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"bytes")?;
    dir.symlink("a", "l")?;
    let fd = dir.open("a", OFlags::PATH)?;
    ensure!(fstat(&fd)?.st_size == 5);
    expect_error(rustix::io::read(&fd, &mut [0; 1]), Errno::BADF)?;
    let link = dir.open("l", OFlags::PATH | OFlags::NOFOLLOW)?;
    ensure!(FileType::from_raw_mode(fstat(&link)?.st_mode) == FileType::Symlink);
    Ok(())
}
