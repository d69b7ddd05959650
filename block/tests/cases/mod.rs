//! The promises of the traits as test cases for any device of 2048 blocks of 4 KiB, in this crate
//! and in the crates of drivers.

use std::sync::Arc;
use std::time::Duration;

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, BlockingQueue, DeviceQueue, Errno, FRAME,
    FrameRun, MemoryRegion, MemorySegments, OperationMemory, OwnedBuf, RawBuf,
};

/// Blocks of a device under test.
pub const BLOCKS: u64 = 2048;

/// Makes a test of each case: `$each` calls a function with the name of every device and the
/// device.
#[macro_export]
macro_rules! device_cases {
    ($each:ident: $($case:ident)*) => { $(
        #[test]
        fn $case() {
            $each(cases::$case);
        }
    )* };
    ($each:ident) => {
        $crate::device_cases! { $each:
            what_was_written_from_any_kind_of_memory_is_read
            a_full_queue_gives_the_operation_back
            what_makes_no_sense_is_refused_and_the_memory_comes_back
            zeroed_blocks_read_as_zeros_and_their_neighbours_stay
            another_thread_ends_a_wait
            a_queue_that_is_dropped_waits_for_its_operations
            a_large_transfer_uses_frames_across_a_region
            operations_survive_the_thread_that_began_them
        }
    };
}

pub fn what_was_written_from_any_kind_of_memory_is_read(name: &str, device: &dyn BlockDevice) {
    let region = MemoryRegion::new(1024).unwrap();
    device.register(&region).unwrap();
    let mut queue = device.queue(16).unwrap();
    let shared = Arc::new(frames(&region, 4, 2));
    // An odd address, which direct I/O cannot use.
    let mut odd = vec![3_u8; 2 * 4096 + 1];
    // SAFETY: `odd` lives until `finish` has reaped the write, and nothing accesses it until then.
    let raw = unsafe { RawBuf::new(odd.as_mut_ptr().wrapping_add(1), 2 * 4096) };
    let given = OwnedBuf::new(vec![6; 4096 + 7], 7..4096 + 7);
    let lent = Arc::new(vec![7_u8; 3 * 4096]);
    let writes: [(u64, MemorySegments); 6] = [
        (10, given.into()),
        (11, MemorySegments::One(OperationMemory::Bytes(Arc::clone(&lent), 4096..3 * 4096))),
        (0, frames(&region, 3, 1).into()),
        (3, MemorySegments::One(OperationMemory::Shared(Arc::clone(&shared), 4096..8192))),
        (4, raw.into()),
        (
            6,
            vec![
                OperationMemory::Frames(frames(&region, 1, 4)),
                OperationMemory::Shared(shared, 0..8192),
                OperationMemory::Frames(frames(&region, 1, 5)),
            ]
            .into(),
        ),
    ];
    for (tag, (block, memory)) in (0..).zip(writes) {
        let fua = tag % 2 == 0;
        queue.push(BlockOp { tag, kind: BlockOpKind::Write { block, memory, fua } }).unwrap();
    }
    for done in finish(&mut *queue) {
        assert_eq!(done.result, Ok(()), "{name}: write {}", done.tag);
    }
    let expected: Vec<u8> =
        [1, 1, 1, 2, 3, 3, 4, 2, 2, 5, 6, 7, 7, 0].iter().flat_map(|fill| [*fill; 4096]).collect();
    assert!(read_back(device, 0, 14) == expected, "{name}");
    assert_eq!(Arc::strong_count(&lent), 1, "{name}: lent memory is let go");

    let given = OwnedBuf::new(vec![8; 3 * 4096], 100..2 * 4096 + 100);
    queue
        .push(BlockOp { tag: 9, kind: BlockOpKind::Read { block: 9, memory: given.into() } })
        .unwrap();
    let read = finish(&mut *queue).remove(0).memory.into_vec().unwrap();
    assert!(read[..100] == [8; 100] && read[2 * 4096 + 100..] == [8; 3996], "{name}");
    assert!(read[100..][..2 * 4096] == expected[9 * 4096..11 * 4096], "{name}");

    let memory = vec![
        OperationMemory::Frames(frames(&region, 2, 9)),
        OperationMemory::Frames(frames(&region, 12, 9)),
    ];
    let kind = BlockOpKind::Read { block: 0, memory: memory.into() };
    queue.push(BlockOp { tag: 7, kind }).unwrap();
    let MemorySegments::Many(memory) = finish(&mut *queue).remove(0).memory else {
        panic!("{name}: another kind of memory came back");
    };
    let read: Vec<u8> = memory
        .iter()
        .flat_map(|piece| match piece {
            OperationMemory::Frames(frames) => frames.to_vec(),
            other => panic!("{name}: {other:?}"),
        })
        .collect();
    assert!(read == expected, "{name}");
    drop(memory);
    assert_eq!(region.free_frames(), 1024, "{name}: all memory came back");
}

pub fn a_full_queue_gives_the_operation_back(name: &str, device: &dyn BlockDevice) {
    let region = MemoryRegion::new(8).unwrap();
    let mut queue = device.queue(2).unwrap();
    let depth = queue.depth() as u64;
    let read = |tag| BlockOp {
        tag,
        kind: BlockOpKind::Read { block: tag, memory: region.take(1).unwrap().into() },
    };
    for tag in 0..depth {
        queue.push(read(tag)).unwrap();
    }
    assert_eq!(queue.push(read(depth)).unwrap_err().tag, depth, "{name}");
    let mut tags: Vec<u64> = finish(&mut *queue).iter().map(|done| done.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..depth).collect::<Vec<_>>(), "{name}: each exactly once");
    queue.push(read(0)).unwrap();
    finish(&mut *queue);
}

pub fn what_makes_no_sense_is_refused_and_the_memory_comes_back(
    name: &str,
    device: &dyn BlockDevice,
) {
    let region = MemoryRegion::new(8).unwrap();
    let mut queue = device.queue(8).unwrap();
    let one = || MemorySegments::from(region.take(1).unwrap());
    let bad = [
        BlockOpKind::Read { block: BLOCKS, memory: one() },
        BlockOpKind::Write { block: u64::MAX, memory: one(), fua: false },
        BlockOpKind::Read { block: 0, memory: MemorySegments::None },
        BlockOpKind::Write {
            block: 0,
            memory: MemorySegments::One(OperationMemory::Shared(
                Arc::new(region.take(1).unwrap()),
                0..100,
            )),
            fua: false,
        },
        BlockOpKind::Read {
            block: 0,
            memory: MemorySegments::One(OperationMemory::Shared(
                Arc::new(region.take(1).unwrap()),
                0..4096,
            )),
        },
        BlockOpKind::Read {
            block: 0,
            memory: MemorySegments::One(OperationMemory::Bytes(Arc::new(vec![0; 4096]), 0..4096)),
        },
        BlockOpKind::Zero { block: BLOCKS - 1, blocks: 2 },
        BlockOpKind::Discard { block: 0, blocks: 0 },
    ];
    for (tag, kind) in (0..).zip(bad) {
        queue.push(BlockOp { tag, kind }).unwrap();
    }
    for done in finish(&mut *queue) {
        assert_eq!(done.result, Err(Errno::INVAL), "{name}: operation {}", done.tag);
    }
    assert_eq!(region.free_frames(), 8, "{name}");
}

pub fn zeroed_blocks_read_as_zeros_and_their_neighbours_stay(name: &str, device: &dyn BlockDevice) {
    let mut line = BlockingQueue::new(device).unwrap();
    line.write(0, &[7; 8 * 4096]).unwrap();
    line.run(BlockOpKind::Zero { block: 2, blocks: 3 }).unwrap();
    line.flush().unwrap();
    let fills: Vec<u8> = read_back(device, 0, 8).chunks(4096).map(|block| block[9]).collect();
    assert_eq!(fills, [7, 7, 0, 0, 0, 7, 7, 7], "{name}");
}

pub fn another_thread_ends_a_wait(name: &str, device: &dyn BlockDevice) {
    let mut queue = device.queue(4).unwrap();
    let waker = queue.waker();
    let thread = std::thread::spawn(move || waker.wake());
    queue.wait(None);
    thread.join().unwrap();
    let mut done = Vec::new();
    queue.reap(&mut done);
    // One wake ends one wait.
    queue.wait(Some(Duration::from_millis(1)));
    assert!(done.is_empty() && queue.in_flight() == 0, "{name}");
}

pub fn a_queue_that_is_dropped_waits_for_its_operations(name: &str, device: &dyn BlockDevice) {
    let region = MemoryRegion::new(64).unwrap();
    let mut queue = device.queue(64).unwrap();
    for tag in 0..64 {
        let memory = frames(&region, 1, tag as u8).into();
        queue
            .push(BlockOp { tag, kind: BlockOpKind::Write { block: tag, memory, fua: false } })
            .unwrap();
    }
    queue.kick();
    drop(queue);
    assert_eq!(region.free_frames(), 64, "{name}");
    let fills: Vec<u8> = read_back(device, 0, 64).chunks(4096).map(|block| block[0]).collect();
    assert_eq!(fills, (0..64).collect::<Vec<u8>>(), "{name}");
}

pub fn a_large_transfer_uses_frames_across_a_region(name: &str, device: &dyn BlockDevice) {
    let region = MemoryRegion::new(1024).unwrap();
    device.register(&region).unwrap();
    let mut queue = device.queue(4).unwrap();
    let mut run = region.take(512).unwrap();
    for (at, frame) in run.chunks_mut(FRAME).enumerate() {
        frame.fill(at as u8);
    }
    let kind = BlockOpKind::Write { block: 100, memory: run.into(), fua: true };
    queue.push(BlockOp { tag: 1, kind }).unwrap();
    assert_eq!(finish(&mut *queue)[0].result, Ok(()), "{name}");
    let read = read_back(device, 100, 512);
    assert!(read.chunks(FRAME).enumerate().all(|(at, frame)| frame[5] == at as u8), "{name}");
}

/// The kernel may cancel operations that wait for one of its workers when the submitting thread
/// ends.
pub fn operations_survive_the_thread_that_began_them(name: &str, device: &dyn BlockDevice) {
    let region = MemoryRegion::new(64).unwrap();
    for round in 0..5 {
        let mut queue = device.queue(32).unwrap();
        let depth = queue.depth() as u64;
        std::thread::scope(|scope| {
            let begin = scope.spawn(|| {
                for tag in 0..depth {
                    let kind = match tag % 3 {
                        0 => BlockOpKind::Zero { block: tag, blocks: 1 },
                        1 => BlockOpKind::Flush,
                        _ => {
                            let memory = frames(&region, 1, 5).into();
                            BlockOpKind::Write { block: tag, memory, fua: false }
                        }
                    };
                    queue.push(BlockOp { tag, kind }).unwrap();
                }
                queue.kick();
            });
            begin.join().unwrap();
        });
        for BlockCompletion { tag, result, .. } in finish(&mut *queue) {
            assert_eq!(result, Ok(()), "{name}, round {round}: operation {tag}");
        }
    }
}

fn finish(queue: &mut dyn DeviceQueue) -> Vec<BlockCompletion> {
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(None);
        queue.reap(&mut done);
    }
    done
}

fn frames(region: &Arc<MemoryRegion>, count: u32, fill: u8) -> FrameRun {
    let mut frames = region.take(count).unwrap();
    frames.fill(fill);
    frames
}

fn read_back(device: &dyn BlockDevice, block: u64, blocks: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; blocks * 4096];
    BlockingQueue::new(device).unwrap().read(block, &mut bytes).unwrap();
    bytes
}
