//! The work of an operation is bounded by the pages that exist, whatever offsets and lengths the
//! caller chooses.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use defuse_fs::*;
use defuse_memory::MemoryFileSystem;

const PAGE: u64 = 4096;
const KEEP: u32 = Fallocate::KEEP_SIZE;

/// An interrupt that has arrived, and that counts how often an operation checks for it.
#[derive(Default)]
struct PendingInterrupt(AtomicU64);

impl InterruptCheck for PendingInterrupt {
    fn is_interrupted(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// A file with pages at its beginning, and at `distance` and `2 * distance`.
fn sparse(fs: &MemoryFileSystem, text: &str, distance: u64) -> Ino {
    let ino = file(fs, Ino::ROOT, text);
    for offset in [0, distance, 2 * distance] {
        write(fs, ino, offset, b"data").unwrap();
    }
    ino
}

fn size(fs: &MemoryFileSystem, ino: Ino) -> u64 {
    fs.getattr(&root(), ino, None).unwrap().size
}

fn pages(fs: &MemoryFileSystem, ino: Ino) -> u64 {
    fs.getattr(&root(), ino, None).unwrap().blocks * 512 / PAGE
}

// A user of a mount copied a hole of 2^60 bytes page by page, and no thread of the mount was left
// for others.
#[test]
fn a_copy_takes_a_hole_of_any_length_in_one_step() {
    for distance in [1 << 20, 1 << 40, 1 << 60] {
        for (same, skew) in [(false, 0), (false, 3), (true, 0)] {
            let fs = memory(None, None);
            let src = sparse(&fs, "src", distance);
            let dst = if same { src } else { file(&fs, Ino::ROOT, "dst") };
            let dst_offset = if same { 3 * distance } else { skew };
            let length = 2 * distance + 4;
            let come = PendingInterrupt::default();
            let cx = Context::with_interrupt(root().caller, 1, &come);
            let copy = CopyRange {
                src: handle(src),
                src_offset: 0,
                dst: handle(dst),
                dst_offset,
                length,
                flags: 0,
            };
            let room = i64::MAX as u64 - dst_offset;
            let expected = length.min(room);
            assert_eq!(fs.copy_file_range(&cx, &copy), Ok(expected), "{distance} {same} {skew}");
            for at in [0, distance, 2 * distance].into_iter().filter(|at| at + 4 <= room) {
                assert_eq!(read(&fs, dst, dst_offset + at, 4).unwrap(), b"data");
            }
            assert!(pages(&fs, dst) <= 8, "{} pages", pages(&fs, dst));
            assert_eq!(come.0.load(Ordering::Relaxed), 0, "it had few steps");
        }
    }
}

#[test]
fn a_copy_of_a_hole_empties_the_pages_that_were_there() {
    let fs = memory(None, None);
    let src = sparse(&fs, "src", 64 * PAGE);
    let dst = file(&fs, Ino::ROOT, "dst");
    write(&fs, dst, 0, &vec![7; 200 * PAGE as usize]).unwrap();
    for (src_offset, dst_offset, length) in
        [(4, 0, 64 * PAGE - 4), (100, 70 * PAGE + 9, 5 * PAGE), (PAGE, 90 * PAGE, 10 * PAGE)]
    {
        let (src, dst) = (handle(src), handle(dst));
        let copy = CopyRange { src, src_offset, dst, dst_offset, length, flags: 0 };
        assert_eq!(fs.copy_file_range(&root(), &copy), Ok(length));
        let bytes = read(&fs, dst.ino, dst_offset, length as usize).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!(read(&fs, dst.ino, dst_offset + length, 1).unwrap(), [7]);
    }
    assert_eq!(read(&fs, dst, 70 * PAGE + 8, 1).unwrap(), [7]);
    assert!(pages(&fs, dst) < 200 - 70);
}

// One call could occupy a thread for as long as a file had data.
#[test]
fn a_long_copy_of_data_is_short_and_goes_on_where_it_ended() {
    let fs = memory(None, None);
    let (src, dst) = (file(&fs, Ino::ROOT, "src"), file(&fs, Ino::ROOT, "dst"));
    let length = 80_u64 << 20;
    fs.fallocate(&root(), handle(src), Fallocate { mode: 0, offset: 0, length }).unwrap();
    write(&fs, src, length - 3, b"end").unwrap();
    let copy_from = |offset: u64| {
        let copy = CopyRange {
            src: handle(src),
            src_offset: offset,
            dst: handle(dst),
            dst_offset: offset,
            length: length - offset,
            flags: 0,
        };
        fs.copy_file_range(&root(), &copy).unwrap()
    };
    let first = copy_from(0);
    assert!((1 << 20..length).contains(&first), "{first}");
    assert_eq!(copy_from(first), length - first);
    assert_eq!(read(&fs, dst, length - 3, 3).unwrap(), b"end");
}

// A program with a timer got EINTR from each fallocate(2) of more than 4 MiB.
#[test]
fn an_interrupt_does_not_end_an_allocation() {
    let fs = memory(Some(256 << 20), None);
    let come = PendingInterrupt::default();
    let cx = Context::with_interrupt(root().caller, 1, &come);
    for (mode, offset) in [(0, 0), (KEEP, 64 << 20), (Fallocate::ZERO_RANGE, 0)] {
        let ino = file(&fs, Ino::ROOT, &format!("file {mode}"));
        let range = Fallocate { mode, offset, length: 48 << 20 };
        assert_eq!(fs.fallocate(&cx, handle(ino), range), Ok(()), "mode {mode}");
        assert_eq!(pages(&fs, ino), (48 << 20) / PAGE);
        assert_eq!(size(&fs, ino), if mode == KEEP { 0 } else { 48 << 20 });
    }
    // A failed call leaves nothing set aside.
    let ino = file(&fs, Ino::ROOT, "too large");
    let range = |mib: u64| Fallocate { mode: 0, offset: 0, length: mib << 20 };
    assert_eq!(fs.fallocate(&cx, handle(ino), range(200)), Err(Errno::ENOSPC));
    assert_eq!(pages(&fs, ino), 0);
    assert_eq!(fs.fallocate(&cx, handle(ino), range(100)), Ok(()));
}

/// Each operation over holes of 2^20 and of 2^60 bytes: it ends, and no page comes of a hole. (An
/// operation that goes over a hole page by page does not end.)
#[test]
fn operations_over_huge_holes_end_and_make_no_pages() {
    type BoundedOperation = fn(&MemoryFileSystem, Ino, u64) -> Result<()>;
    fn fallocate(
        fs: &MemoryFileSystem,
        ino: Ino,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> Result<()> {
        fs.fallocate(&root(), handle(ino), Fallocate { mode, offset, length })
    }
    fn truncate(fs: &MemoryFileSystem, ino: Ino, size: u64) -> Result<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        fs.setattr(&root(), ino, None, &set).map(drop)
    }
    let operations: [(&str, BoundedOperation); 10] = [
        ("punch", |fs, ino, far| fallocate(fs, ino, Fallocate::PUNCH_HOLE | KEEP, 1, far)),
        ("collapse", |fs, ino, far| fallocate(fs, ino, Fallocate::COLLAPSE_RANGE, PAGE, far)),
        ("insert", |fs, ino, far| fallocate(fs, ino, Fallocate::INSERT_RANGE, PAGE, far)),
        ("insert at the beginning", |fs, ino, far| {
            fallocate(fs, ino, Fallocate::INSERT_RANGE, 0, far)
        }),
        ("truncate down", |fs, ino, far| truncate(fs, ino, far / 2)),
        ("truncate up and down", |fs, ino, _| {
            truncate(fs, ino, i64::MAX as u64)?;
            truncate(fs, ino, 0)
        }),
        ("seek", |fs, ino, far| {
            assert_eq!(fs.lseek(&root(), handle(ino), PAGE, Whence::Data), Ok(far));
            assert_eq!(fs.lseek(&root(), handle(ino), far, Whence::Hole), Ok(far + PAGE));
            Ok(())
        }),
        ("read", |fs, ino, far| {
            assert_eq!(read(fs, ino, far / 2, 100)?, [0; 100]);
            assert_eq!(read(fs, ino, i64::MAX as u64 - 1, 100)?, []);
            Ok(())
        }),
        ("allocate", |fs, ino, far| {
            let all = fallocate(fs, ino, KEEP, PAGE, far / 2);
            assert!(all.is_ok() == (far == 1 << 20) && matches!(all, Ok(()) | Err(Errno::ENOSPC)));
            fallocate(fs, ino, Fallocate::PUNCH_HOLE | KEEP, PAGE, far / 2)
        }),
        ("zero", |fs, ino, far| {
            let all = fallocate(fs, ino, KEEP | Fallocate::ZERO_RANGE, 0, far + PAGE);
            assert!(all.is_ok() == (far == 1 << 20) && matches!(all, Ok(()) | Err(Errno::ENOSPC)));
            fallocate(fs, ino, Fallocate::PUNCH_HOLE | KEEP, PAGE, far / 2)
        }),
    ];
    for (text, operation) in operations {
        for far in [1 << 20, 1 << 60] {
            let fs = memory(Some(64 << 20), None);
            let ino = sparse(&fs, "file", far);
            assert_eq!(operation(&fs, ino, far), Ok(()), "{text} over {far}");
            assert!(pages(&fs, ino) <= 3 + (1 << 19) / PAGE, "{text}: {} pages", pages(&fs, ino));
        }
    }
}
