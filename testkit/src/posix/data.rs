//! Data: read(2), write(2), ftruncate(2), lseek(2), fallocate(2), copy_file_range(2), mmap(2).

use std::os::fd::OwnedFd;
use std::thread;

use anyhow::{Result, ensure};
use rustix::fs::{
    FallocateFlags, OFlags, SeekFrom, copy_file_range, fallocate, fcntl_setfl, fstat, fsync,
    ftruncate, seek,
};
use rustix::io::{Errno, pwrite, read, write};

use super::case_table;
use super::dir::{
    CaseDir, SkipReason, expect_error, read_all, read_at, skip_unsupported, write_all,
};
use super::sys::TestMapping;

case_table! { "data";
    written_data_is_read_back,
    writes_land_at_any_offset_and_length,
    reading_past_the_end_gives_nothing,
    a_gap_reads_as_zeros,
    truncate_cuts_and_lengthens_with_zeros,
    truncate_in_the_middle_of_a_page_clears_the_rest,
    truncate_refuses_a_directory_and_a_negative_length,
    a_write_beyond_the_largest_offset_is_refused,
    the_position_follows_reads_and_writes,
    append_always_writes_at_the_end,
    append_can_be_switched_on_and_off,
    concurrent_appends_lose_nothing,
    two_descriptors_see_each_others_writes,
    a_read_only_descriptor_cannot_write_and_vice_versa,
    reading_a_directory_is_refused,
    a_write_of_nothing_changes_nothing,
    a_large_file_survives_being_closed,
    random_writes_match_a_copy_in_memory,
    seek_finds_data_and_holes,
    fallocate_lengthens_or_keeps_the_size,
    fallocate_punches_holes,
    fallocate_zeroes_a_range,
    fallocate_collapses_and_inserts,
    fallocate_refuses_bad_ranges,
    copy_file_range_copies_bytes,
    copy_file_range_within_one_file_refuses_overlap,
    a_shared_mapping_and_the_file_are_one,
    a_private_mapping_leaves_the_file_alone,
    a_mapping_outlives_the_descriptor_and_the_name,
    the_last_page_of_a_mapping_is_zero_past_the_end,
    direct_io_and_cached_io_agree,
    fsync_of_files_and_directories_works,
    sendfile_reads_the_file,
}

/// Bytes that depend on the offset.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8 | 1).collect()
}

fn written_data_is_read_back(dir: &CaseDir) -> Result<()> {
    let bytes = pattern(10_000);
    dir.file("a", &bytes)?;
    ensure!(dir.read("a")? == bytes);
    Ok(())
}

fn writes_land_at_any_offset_and_length(dir: &CaseDir) -> Result<()> {
    for (offset, len) in [(0, 1), (1, 4095), (4095, 2), (4096, 4096), (5000, 10_000), (0, 131_073)]
    {
        let fd = dir.file("a", b"")?;
        let bytes = pattern(len);
        write_all(&fd, offset, &bytes)?;
        ensure!(read_at(&fd, offset, len + 1)? == bytes, "{len} bytes at {offset}");
        dir.unlink("a")?;
    }
    Ok(())
}

fn reading_past_the_end_gives_nothing(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"12345")?;
    ensure!(read_at(&fd, 5, 10)?.is_empty() && read_at(&fd, 1 << 40, 10)?.is_empty());
    ensure!(read_at(&fd, 3, 10)? == b"45");
    Ok(())
}

fn a_gap_reads_as_zeros(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"x")?;
    write_all(&fd, 1 << 32, b"y")?;
    ensure!(fstat(&fd)?.st_size == (1 << 32) + 1);
    ensure!(read_at(&fd, 1, 9000)? == vec![0; 9000]);
    ensure!(read_at(&fd, (1 << 32) - 2, 10)? == b"\0\0y");
    Ok(())
}

fn truncate_cuts_and_lengthens_with_zeros(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 10_000])?;
    ftruncate(&fd, 4096)?;
    ensure!(read_all(&fd)? == [1; 4096]);
    ftruncate(&fd, 12_000)?;
    let bytes = read_all(&fd)?;
    ensure!(bytes.len() == 12_000 && bytes[4096..].iter().all(|&byte| byte == 0));
    ftruncate(&fd, 0)?;
    ensure!(read_all(&fd)?.is_empty());
    Ok(())
}

fn truncate_in_the_middle_of_a_page_clears_the_rest(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 8192])?;
    ftruncate(&fd, 5000)?;
    write_all(&fd, 7000, b"x")?;
    let bytes = read_all(&fd)?;
    ensure!(bytes[4999] == 1 && bytes[5000..7000].iter().all(|&byte| byte == 0));
    Ok(())
}

fn truncate_refuses_a_directory_and_a_negative_length(dir: &CaseDir) -> Result<()> {
    dir.mkdir("d")?;
    let directory = rustix::fs::open(dir.path("d"), OFlags::RDONLY, super::dir::mode(0))?;
    expect_error(ftruncate(&directory, 0), Errno::INVAL)?;
    let fd = dir.file("a", b"")?;
    expect_error(ftruncate(&fd, u64::MAX), Errno::INVAL)?;
    let reader = dir.open("a", OFlags::RDONLY)?;
    expect_error(ftruncate(&reader, 0), Errno::INVAL)
}

fn a_write_beyond_the_largest_offset_is_refused(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    // Either the kernel refuses the sum, or the file system the size.
    match pwrite(&fd, b"xx", i64::MAX as u64 - 1) {
        Err(Errno::FBIG | Errno::INVAL | Errno::OVERFLOW) => {}
        // One byte may still fit below the largest offset.
        Ok(1) => {}
        other => anyhow::bail!("got {other:?}"),
    }
    Ok(())
}

fn the_position_follows_reads_and_writes(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    write(&fd, b"hello world")?;
    ensure!(seek(&fd, SeekFrom::Current(0))? == 11);
    ensure!(seek(&fd, SeekFrom::End(-5))? == 6);
    let mut bytes = [0; 10];
    ensure!(read(&fd, &mut bytes)? == 5 && &bytes[..5] == b"world");
    ensure!(seek(&fd, SeekFrom::Start(100))? == 100 && fstat(&fd)?.st_size == 11);
    expect_error(seek(&fd, SeekFrom::End(-12)), Errno::INVAL)
}

fn append_always_writes_at_the_end(dir: &CaseDir) -> Result<()> {
    let other = dir.file("a", b"start")?;
    let fd = dir.open("a", OFlags::RDWR | OFlags::APPEND)?;
    write(&fd, b" one")?;
    write_all(&other, 9, b" two")?;
    seek(&fd, SeekFrom::Start(0))?;
    write(&fd, b" three")?;
    let bytes = dir.read("a")?;
    let text = String::from_utf8_lossy(&bytes);
    ensure!(text == "start one two three", "{text:?}");
    ensure!(seek(&fd, SeekFrom::Current(0))? == 19);
    Ok(())
}

fn append_can_be_switched_on_and_off(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"12345")?;
    fcntl_setfl(&fd, OFlags::APPEND)?;
    seek(&fd, SeekFrom::Start(0))?;
    write(&fd, b"6")?;
    fcntl_setfl(&fd, OFlags::empty())?;
    seek(&fd, SeekFrom::Start(0))?;
    write(&fd, b"0")?;
    ensure!(dir.read("a")? == b"023456");
    Ok(())
}

fn concurrent_appends_lose_nothing(dir: &CaseDir) -> Result<()> {
    const EACH: usize = 100;
    dir.file("a", b"")?;
    thread::scope(|scope| {
        let writers: Vec<_> = (0..4u8)
            .map(|number| {
                scope.spawn(move || -> Result<()> {
                    let fd = dir.open("a", OFlags::WRONLY | OFlags::APPEND)?;
                    for _ in 0..EACH {
                        ensure!(write(&fd, &[b'0' + number; 37])? == 37);
                    }
                    Ok(())
                })
            })
            .collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("no panic"))
    })?;
    let bytes = dir.read("a")?;
    ensure!(bytes.len() == 4 * EACH * 37, "{} bytes", bytes.len());
    for record in bytes.chunks(37) {
        ensure!(record.iter().all(|byte| *byte == record[0]), "two records are mixed");
    }
    Ok(())
}

fn two_descriptors_see_each_others_writes(dir: &CaseDir) -> Result<()> {
    let one = dir.file("a", b"12345")?;
    let two = dir.open("a", OFlags::RDWR)?;
    write_all(&one, 0, b"x")?;
    ensure!(read_at(&two, 0, 9)? == b"x2345");
    ftruncate(&two, 2)?;
    ensure!(read_at(&one, 0, 9)? == b"x2" && fstat(&one)?.st_size == 2);
    Ok(())
}

fn a_read_only_descriptor_cannot_write_and_vice_versa(dir: &CaseDir) -> Result<()> {
    dir.file("a", b"x")?;
    expect_error(write(dir.open("a", OFlags::RDONLY)?, b"y"), Errno::BADF)?;
    expect_error(read(dir.open("a", OFlags::WRONLY)?, &mut [0; 1]), Errno::BADF)
}

fn reading_a_directory_is_refused(dir: &CaseDir) -> Result<()> {
    expect_error(read(dir.open(".", OFlags::RDONLY)?, &mut [0; 1]), Errno::ISDIR)
}

fn a_write_of_nothing_changes_nothing(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"x")?;
    let before = fstat(&fd)?;
    super::attributes::tick();
    ensure!(pwrite(&fd, b"", 100)? == 0);
    let after = fstat(&fd)?;
    ensure!(after.st_size == 1 && after.st_mtime_nsec == before.st_mtime_nsec);
    Ok(())
}

fn a_large_file_survives_being_closed(dir: &CaseDir) -> Result<()> {
    let bytes = pattern(5 << 20);
    drop(dir.file("a", &bytes)?);
    ensure!(dir.read("a")? == bytes);
    Ok(())
}

fn random_writes_match_a_copy_in_memory(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    let mut copy: Vec<u8> = Vec::new();
    let mut state = 1u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (state >> 33) % below
    };
    for round in 0..300 {
        let (offset, len) = (next(60_000) as usize, next(9000) as usize);
        if round % 10 == 9 {
            ftruncate(&fd, offset as u64)?;
            copy.resize(offset, 0);
            continue;
        }
        let bytes = vec![round as u8; len];
        write_all(&fd, offset as u64, &bytes)?;
        if len > 0 {
            copy.resize(copy.len().max(offset + len), 0);
            copy[offset..offset + len].copy_from_slice(&bytes);
        }
    }
    ensure!(read_all(&fd)? == copy);
    Ok(())
}

fn seek_finds_data_and_holes(dir: &CaseDir) -> Result<()> {
    const AT: u64 = 1 << 20;
    let fd = dir.file("a", b"")?;
    write_all(&fd, AT, &[1; 65536])?;
    fsync(&fd)?;
    let size = AT + 65536;
    let data = match seek(&fd, SeekFrom::Data(0)) {
        Err(Errno::INVAL) => return Err(SkipReason("no SEEK_DATA here".into()).into()),
        other => other?,
    };
    ensure!(data <= AT && seek(&fd, SeekFrom::Data(AT + 5))? == AT + 5);
    ensure!(seek(&fd, SeekFrom::Hole(AT))? == size);
    let hole = seek(&fd, SeekFrom::Hole(0))?;
    ensure!(hole == 0 || data == 0, "data at {data}, a hole at {hole}");
    expect_error(seek(&fd, SeekFrom::Data(size)), Errno::NXIO)?;
    expect_error(seek(&fd, SeekFrom::Hole(size)), Errno::NXIO)
}

fn allocate(fd: &OwnedFd, flags: FallocateFlags, offset: u64, len: u64) -> Result<()> {
    skip_unsupported(fallocate(fd, flags, offset, len), "such fallocate")
}

fn fallocate_lengthens_or_keeps_the_size(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"12345")?;
    allocate(&fd, FallocateFlags::KEEP_SIZE, 0, 100_000)?;
    let stat = fstat(&fd)?;
    ensure!(stat.st_size == 5 && stat.st_blocks >= 100_000 / 512);
    allocate(&fd, FallocateFlags::empty(), 0, 100_000)?;
    ensure!(fstat(&fd)?.st_size == 100_000 && read_at(&fd, 0, 7)? == b"12345\0\0");
    Ok(())
}

fn fallocate_punches_holes(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 65536])?;
    fsync(&fd)?;
    let before = fstat(&fd)?.st_blocks;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    allocate(&fd, flags, 5000, 50_000)?;
    let bytes = read_all(&fd)?;
    ensure!(bytes.len() == 65536 && bytes[4999] == 1 && bytes[55_000] == 1);
    ensure!(bytes[5000..55_000].iter().all(|&byte| byte == 0));
    ensure!(fstat(&fd)?.st_blocks < before, "no space was given back");
    Ok(())
}

fn fallocate_zeroes_a_range(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 10_000])?;
    allocate(&fd, FallocateFlags::ZERO_RANGE, 100, 5000)?;
    let bytes = read_all(&fd)?;
    ensure!(bytes[99] == 1 && bytes[5100] == 1 && bytes[100..5100].iter().all(|&b| b == 0));
    allocate(&fd, FallocateFlags::ZERO_RANGE, 9000, 5000)?;
    ensure!(fstat(&fd)?.st_size == 14_000);
    Ok(())
}

fn fallocate_collapses_and_inserts(dir: &CaseDir) -> Result<()> {
    let mut bytes = pattern(16384);
    let fd = dir.file("a", &bytes)?;
    fsync(&fd)?;
    allocate(&fd, FallocateFlags::COLLAPSE_RANGE, 4096, 4096)?;
    bytes.drain(4096..8192);
    ensure!(read_all(&fd)? == bytes);
    allocate(&fd, FallocateFlags::INSERT_RANGE, 8192, 4096)?;
    bytes.splice(8192..8192, [0; 4096]);
    ensure!(read_all(&fd)? == bytes);
    expect_error(fallocate(&fd, FallocateFlags::COLLAPSE_RANGE, 1, 4096), Errno::INVAL)?;
    expect_error(fallocate(&fd, FallocateFlags::COLLAPSE_RANGE, 8192, 8192), Errno::INVAL)
}

fn fallocate_refuses_bad_ranges(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"")?;
    allocate(&fd, FallocateFlags::empty(), 0, 1)?;
    expect_error(fallocate(&fd, FallocateFlags::empty(), 0, 0), Errno::INVAL)?;
    let reader = dir.open("a", OFlags::RDONLY)?;
    expect_error(fallocate(&reader, FallocateFlags::empty(), 0, 1), Errno::BADF)?;
    let punch = FallocateFlags::PUNCH_HOLE;
    expect_error(fallocate(&fd, punch, 0, 1), Errno::OPNOTSUPP)
}

fn copy_file_range_copies_bytes(dir: &CaseDir) -> Result<()> {
    let bytes = pattern(100_000);
    let (src, dst) = (dir.file("a", &bytes)?, dir.file("b", &[9; 10])?);
    let (mut from, mut to) = (1000, 5);
    let mut done = 0;
    while done < 99_000 {
        let count = copy_file_range(&src, Some(&mut from), &dst, Some(&mut to), 99_000 - done)?;
        ensure!(count > 0, "stopped after {done}");
        done += count;
    }
    ensure!(from == 100_000 && to == 99_005);
    ensure!(copy_file_range(&src, Some(&mut from), &dst, Some(&mut to), 10)? == 0);
    let copied = read_all(&dst)?;
    ensure!(copied[..5] == [9; 5] && copied[5..] == bytes[1000..]);
    Ok(())
}

fn copy_file_range_within_one_file_refuses_overlap(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"0123456789")?;
    let (mut from, mut to) = (0, 10);
    ensure!(copy_file_range(&fd, Some(&mut from), &fd, Some(&mut to), 10)? == 10);
    ensure!(read_all(&fd)? == b"01234567890123456789");
    let (mut from, mut to) = (0, 5);
    expect_error(copy_file_range(&fd, Some(&mut from), &fd, Some(&mut to), 10), Errno::INVAL)
}

fn map(fd: &OwnedFd, len: usize, shared: bool) -> Result<TestMapping> {
    match TestMapping::new(fd, len, shared) {
        Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {
            Err(SkipReason("no such mapping here".into()).into())
        }
        other => Ok(other?),
    }
}

fn a_shared_mapping_and_the_file_are_one(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 10_000])?;
    let map = map(&fd, 10_000, true)?;
    ensure!(map.read(9990, 10) == [1; 10]);
    write_all(&fd, 4090, &[2; 10])?;
    ensure!(map.read(4090, 10) == [2; 10], "a write does not show in the mapping");
    map.write(5000, b"mapped");
    ensure!(read_at(&fd, 5000, 6)? == b"mapped", "the mapping does not show in a read");
    map.sync()?;
    drop(map);
    ensure!(dir.read("a")?[5000..5006] == *b"mapped");
    Ok(())
}

fn a_private_mapping_leaves_the_file_alone(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 4096])?;
    let map = map(&fd, 4096, false)?;
    map.write(0, b"private");
    ensure!(map.read(0, 7) == b"private" && read_at(&fd, 0, 7)? == [1; 7]);
    Ok(())
}

fn a_mapping_outlives_the_descriptor_and_the_name(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 8192])?;
    let map = map(&fd, 8192, true)?;
    drop(fd);
    dir.unlink("a")?;
    map.write(8000, &[2; 100]);
    ensure!(map.read(7999, 3) == [1, 2, 2]);
    Ok(())
}

fn the_last_page_of_a_mapping_is_zero_past_the_end(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", &[1; 8192])?;
    ftruncate(&fd, 5000)?;
    let map = map(&fd, 8192, true)?;
    ensure!(map.read(4999, 1) == [1] && map.read(5000, 3192).iter().all(|&byte| byte == 0));
    Ok(())
}

fn direct_io_and_cached_io_agree(dir: &CaseDir) -> Result<()> {
    const BLOCK: usize = 4096;
    let cached = dir.file("a", &[1; 4 * BLOCK])?;
    let direct = match dir.open("a", OFlags::RDWR | OFlags::DIRECT) {
        Err(Errno::INVAL) => return Err(SkipReason("no O_DIRECT here".into()).into()),
        other => other?,
    };
    // Memory, offset and length must be multiples of the block size.
    let mut memory = vec![0; 3 * BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    let buffer = &mut memory[start..start + BLOCK];
    ensure!(rustix::io::pread(&direct, &mut *buffer, BLOCK as u64)? == BLOCK);
    ensure!(buffer.iter().all(|&byte| byte == 1));
    buffer.fill(2);
    ensure!(pwrite(&direct, buffer, 2 * BLOCK as u64)? == BLOCK);
    ensure!(read_at(&cached, 2 * BLOCK as u64, BLOCK)? == [2; BLOCK]);
    write_all(&cached, 0, &[3; 10])?;
    ensure!(
        rustix::io::pread(&direct, &mut *buffer, 0)? == BLOCK
            && buffer[..11] == [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1]
    );
    Ok(())
}

fn fsync_of_files_and_directories_works(dir: &CaseDir) -> Result<()> {
    let fd = dir.file("a", b"x")?;
    fsync(&fd)?;
    rustix::fs::fdatasync(&fd)?;
    fsync(dir.open(".", OFlags::RDONLY)?)?;
    Ok(rustix::fs::syncfs(&fd)?)
}

fn sendfile_reads_the_file(dir: &CaseDir) -> Result<()> {
    let bytes = pattern(50_000);
    let (src, dst) = (dir.file("a", &bytes)?, dir.file("b", b"")?);
    let mut offset = 10;
    while rustix::fs::sendfile(&dst, &src, Some(&mut offset), 100_000)? > 0 {}
    ensure!(read_all(&dst)? == bytes[10..]);
    Ok(())
}
