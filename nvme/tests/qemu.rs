//! The driver on the controller of QEMU, an independent implementation: the data that it reads and
//! writes is in the file underneath.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, BlockingQueue, DeviceQueue, Errno,
    MemoryRegion,
};
use defuse_nvme::qemu::{QemuController, QemuOptions};
use defuse_nvme::{NvmeDevice, NvmeOptions};

const BYTES: u64 = 32 << 20;

/// A namespace of QEMU on a new file; `None` without the program.
fn open(options: &QemuOptions) -> Option<(File, NvmeDevice)> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES).unwrap();
    let qemu = match QemuController::start(&file, options) {
        Ok(qemu) => qemu,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            println!("skipped: there is no {}", options.program);
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let options = NvmeOptions { timeout: Duration::from_secs(60), ..NvmeOptions::default() };
    Some((file, NvmeDevice::open(qemu, &options).unwrap()))
}

fn finish(queue: &mut dyn DeviceQueue) -> Vec<BlockCompletion> {
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(None);
        queue.reap(&mut done);
    }
    done
}

#[test]
fn operations_at_depth_reach_the_file_below_another_controller() {
    let Some((file, disk)) = open(&QemuOptions::default()) else { return };
    let facts = disk.properties();
    assert_eq!((facts.block_size, facts.bytes(), facts.volatile_cache), (4096, BYTES, true));
    assert!(disk.controller_facts().model.starts_with("QEMU"), "{:?}", disk.controller_facts());
    assert!(disk.smart().unwrap().temperature_k > 0);
    let region = MemoryRegion::new(2048).unwrap();
    let mut queue = disk.queue(32).unwrap();
    let frames = |count| region.take(count).unwrap();
    // The sizes reach from one page to the largest transfer, which needs a list.
    let largest = facts.max_transfer / 4096;
    let sizes = [1, 2, 3, 17, largest, 1, 5, 64];
    let mut expected = vec![0; BYTES as usize];
    let mut block = 0;
    for (tag, size) in (0..).zip(sizes.repeat(3)) {
        let mut run = frames(size);
        for (at, byte) in run.iter_mut().enumerate() {
            *byte = (at / 512 + tag as usize) as u8 | 1;
        }
        expected[block * 4096..][..run.len()].copy_from_slice(&run);
        let kind =
            BlockOpKind::Write { block: block as u64, memory: run.into(), fua: tag % 5 == 0 };
        queue.push(BlockOp { tag, kind }).unwrap();
        block += size as usize + 3;
    }
    assert!(finish(&mut *queue).iter().all(|done| done.result == Ok(())));
    let changes = [
        BlockOpKind::Zero { block: 0, blocks: 2 },
        BlockOpKind::Zero { block: 100, blocks: 4000 },
        BlockOpKind::Discard { block: 6000, blocks: 2000 },
        BlockOpKind::Flush,
    ];
    expected[..2 * 4096].fill(0);
    expected[100 * 4096..4100 * 4096].fill(0);
    for (tag, kind) in (0..).zip(changes) {
        queue.push(BlockOp { tag, kind }).unwrap();
        assert_eq!(finish(&mut *queue)[0].result, Ok(()), "change {tag}");
    }
    let mut content = vec![0; BYTES as usize];
    file.read_exact_at(&mut content, 0).unwrap();
    let wrong = content.chunks(4096).zip(expected.chunks(4096)).position(|(is, must)| is != must);
    assert_eq!(wrong, None, "the first block that differs");
    for (tag, block) in (0..).zip((0..block as u64).step_by(7)).take(32) {
        queue
            .push(BlockOp { tag, kind: BlockOpKind::Read { block, memory: frames(2).into() } })
            .unwrap();
    }
    for BlockCompletion { tag, result, memory } in finish(&mut *queue) {
        let run = memory.into_frames().unwrap();
        let must = &expected[tag as usize * 7 * 4096..][..run.len()];
        assert!(result == Ok(()) && run[..] == *must, "read {tag}");
    }
    let (first, second) = (&expected[..40 * 4096], &expected[4096..41 * 4096]);
    assert!(disk.compare(0, first).unwrap() && disk.compare(1, second).unwrap());
    assert!(!disk.compare(1, first).unwrap(), "other blocks");
    assert!(!disk.has_priorities(), "the controller of QEMU has none");
    assert_eq!(disk.count_resets(), 0);
}

#[test]
fn small_blocks_small_transfers_and_few_queues_of_another_controller() {
    let properties = vec!["mdts=1".to_owned(), "max_ioqpairs=3".to_owned()];
    let options = QemuOptions { block_size: 512, properties, ..QemuOptions::default() };
    let Some((file, disk)) = open(&options) else { return };
    let facts = disk.properties();
    assert_eq!((facts.block_size, facts.max_transfer, facts.max_queues), (512, 8192, 3));
    let mut line = BlockingQueue::new(&disk).unwrap();
    line.write(3, &[7; 40 * 512]).unwrap();
    line.flush().unwrap();
    let mut content = vec![0; 44 * 512];
    file.read_exact_at(&mut content, 0).unwrap();
    let right = content
        .iter()
        .enumerate()
        .all(|(at, byte)| *byte == if (3 * 512..43 * 512).contains(&at) { 7 } else { 0 });
    assert!(right);
    let queues = [disk.queue(4).unwrap(), disk.queue(4).unwrap()];
    assert_eq!(disk.queue(4).err(), Some(Errno::BUSY));
    drop(queues);
    // The controller counts blocks of this size, too.
    assert_eq!(line.read(BYTES / 512, &mut [0; 512]), Err(Errno::INVAL));
    assert_eq!(line.read(BYTES / 512 - 1, &mut [0; 512]), Ok(()));
}

#[test]
fn data_in_the_memory_of_the_machine_is_reached_where_it_is() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES).unwrap();
    let options = QemuOptions {
        drive: vec!["throttling.iops-total=100000".to_owned()],
        ..QemuOptions::default()
    };
    let qemu = match QemuController::start(&file, &options) {
        Ok(qemu) => qemu,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            println!("skipped: there is no {}", options.program);
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let memory = std::sync::Arc::clone(qemu.memory());
    let disk = NvmeDevice::open(qemu, &NvmeOptions::default()).unwrap();
    disk.register(&memory).unwrap();
    let mut queue = disk.queue(4).unwrap();
    let before = memory.free_frames();
    for (block, fill) in [(0, 7), (5, 9)] {
        let mut frames = memory.take(3).unwrap();
        frames.fill(fill);
        let kind = BlockOpKind::Write { block, memory: frames.into(), fua: false };
        queue.push(BlockOp { tag: block, kind }).unwrap();
    }
    assert_eq!(memory.free_frames(), before - 6, "there are no copies");
    assert!(finish(&mut *queue).iter().all(|done| done.result == Ok(())));
    let mut content = vec![0; 8 * 4096];
    file.read_exact_at(&mut content, 0).unwrap();
    let fills: Vec<u8> = content.chunks(4096).map(|block| block[100]).collect();
    assert_eq!(fills, [7, 7, 7, 0, 0, 9, 9, 9]);
}
