use super::*;
use crate::{BlockOp, BlockOpKind, BlockingQueue, MemorySegments};

fn frames(region: &Arc<MemoryRegion>, count: u32) -> MemorySegments {
    region.take(count).expect("a frame is free").into()
}

/// Runs `count` reads at `depth`, and returns the operations per second.
fn measure_reads(parts: &SsdParameters, depth: u32, count: u64) -> f64 {
    let model = SsdModel::new(1 << 16, parts);
    let region = MemoryRegion::new(1024).unwrap();
    let mut queue = model.queue(depth).unwrap();
    let mut random = fastrand::Rng::with_seed(2);
    let (mut pushed, mut done) = (0, Vec::new());
    while (done.len() as u64) < count {
        while pushed < count && queue.in_flight() < depth as usize {
            let kind =
                BlockOpKind::Read { block: random.u64(..1 << 16), memory: frames(&region, 1) };
            queue.push(BlockOp { tag: pushed, kind }).unwrap();
            pushed += 1;
        }
        queue.wait(None);
        queue.reap(&mut done);
        done.iter_mut().for_each(|one| one.memory = MemorySegments::None);
    }
    count as f64 / model.now().as_secs_f64()
}

#[test]
fn one_read_takes_the_time_of_its_parts() {
    let parts = SsdParameters::default();
    let one = parts.command + parts.read + parts.transfer;
    let rate = measure_reads(&parts, 1, 100);
    assert!((rate * one.as_secs_f64() - 1.0).abs() < 0.01, "{rate}");
}

#[test]
fn many_reads_use_all_dies() {
    let parts = SsdParameters { queue_commands: 128, ..SsdParameters::default() };
    let most = parts.dies as f64 / parts.read.as_secs_f64();
    let rate = measure_reads(&parts, 512, 20_000);
    assert!(rate > most * 0.7 && rate <= most, "{rate} of {most}");
}

#[test]
fn a_read_waits_for_the_program_that_its_die_works_on() {
    let parts = SsdParameters { dies: 1, channels: 1, ..SsdParameters::default() };
    let model = SsdModel::new(1024, &parts);
    let mut line = BlockingQueue::new(&model).unwrap();
    line.write(0, &[7; 4 * 4096]).unwrap();
    let written = model.now();
    assert!(written < parts.program, "a write is complete in the buffer");
    let mut block = [0; 4096];
    line.read(3, &mut block).unwrap();
    assert_eq!(block, [7; 4096]);
    assert!(model.now() - written >= parts.program);
    line.flush().unwrap();
}

#[test]
fn a_queue_leaves_commands_to_the_others() {
    let parts = SsdParameters {
        commands: 8,
        queue_commands: 4,
        buffer_blocks: 4,
        ..SsdParameters::default()
    };
    let model = SsdModel::new(1 << 12, &parts);
    let region = MemoryRegion::new(256).unwrap();
    let (mut writes, mut reads) = (model.queue(64).unwrap(), model.queue(64).unwrap());
    for block in 0..64 {
        let kind = BlockOpKind::Write { block, memory: frames(&region, 1), fua: false };
        writes.push(BlockOp { tag: block, kind }).unwrap();
    }
    writes.kick();
    let kind = BlockOpKind::Read { block: 1000, memory: frames(&region, 1) };
    reads.push(BlockOp { tag: 0, kind }).unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        reads.wait(None);
        reads.reap(&mut done);
    }
    assert!(model.now() < parts.program, "the read did not wait for writes: {:?}", model.now());
}

#[test]
fn writes_are_as_fast_as_the_dies_program() {
    let parts = SsdParameters::default();
    let model = SsdModel::new(1 << 15, &parts);
    let mut line = BlockingQueue::new(&model).unwrap();
    let bytes = vec![1; 1 << 20];
    for at in 0..100 {
        line.write(at * 256, &bytes).unwrap();
    }
    line.flush().unwrap();
    let rate = 100.0 * 64.0 / model.now().as_secs_f64();
    let most = parts.dies as f64 / parts.program.as_secs_f64();
    assert!(rate > most * 0.9 && rate < most * 1.01, "{rate} of {most} pages a second");
}

#[test]
fn a_flush_takes_the_time_of_the_programs_and_no_time_after_them() {
    let parts = SsdParameters { dies: 1, channels: 1, ..SsdParameters::default() };
    let model = SsdModel::new(1024, &parts);
    let mut line = BlockingQueue::new(&model).unwrap();
    line.write(0, &[1; 6 * 4096]).unwrap();
    let written = model.now();
    assert!(written < parts.program);
    line.flush().unwrap();
    // A full page, and one of two blocks.
    let took = model.now() - written;
    assert!(took > 2 * parts.program - written && took < 3 * parts.program, "{took:?}");
    let flushed = model.now();
    line.flush().unwrap();
    assert_eq!(model.now() - flushed, parts.command, "nothing is left in the buffer");
}

/// The commands that are complete, with their moments.
fn collect_ends(timing: &mut CommandTiming) -> Vec<(usize, Duration)> {
    let mut ends = Vec::new();
    while let Some(now) = timing.next() {
        ends.extend(timing.advance().map(|done| (done, now)));
    }
    ends
}

#[test]
fn a_flush_does_not_wait_for_writes_that_begin_after_it() {
    let parts = SsdParameters { dies: 1, channels: 1, ..SsdParameters::default() };
    let mut timing = CommandTiming::new(&parts);
    let write = SsdWork::Write { blocks: 4, fua: false };
    timing.begin(0, write, Duration::ZERO);
    let flush = timing.begin(0, SsdWork::Flush, Duration::ZERO);
    for _ in 0..10 {
        timing.begin(1, write, Duration::ZERO);
    }
    let ends = collect_ends(&mut timing);
    let end = ends.iter().find(|(done, _)| *done == flush).unwrap().1;
    assert!(end > parts.program && end < 2 * parts.program, "{end:?}");
}

#[test]
fn a_write_with_fua_waits_for_its_own_pages_alone() {
    let parts = SsdParameters { dies: 2, channels: 2, ..SsdParameters::default() };
    let mut timing = CommandTiming::new(&parts);
    let reads = 20;
    for _ in 0..reads {
        timing.begin(0, SsdWork::Read { block: 0, blocks: 1 }, Duration::ZERO);
    }
    // The first page waits for the reads of its die, the next one has another die.
    timing.begin(1, SsdWork::Write { blocks: 4, fua: false }, Duration::ZERO);
    let fua = timing.begin(1, SsdWork::Write { blocks: 1, fua: true }, Duration::ZERO);
    let flush = timing.begin(1, SsdWork::Flush, Duration::ZERO);
    let ends = collect_ends(&mut timing);
    let of = |command| ends.iter().find(|(done, _)| *done == command).unwrap().1;
    assert!(of(fua) > parts.program && of(fua) < parts.program + parts.read, "{ends:?}");
    assert!(of(flush) > reads * parts.read + parts.program, "{ends:?}");
}

#[test]
fn forgotten_commands_are_never_complete_and_the_dies_go_on() {
    let parts =
        SsdParameters { dies: 1, channels: 1, buffer_blocks: 4, ..SsdParameters::default() };
    let mut timing = CommandTiming::new(&parts);
    for _ in 0..parts.queue_commands / 2 {
        timing.begin(0, SsdWork::Read { block: 0, blocks: 9 }, Duration::ZERO);
        timing.begin(0, SsdWork::Write { blocks: 8, fua: false }, Duration::ZERO);
    }
    timing.begin(1, SsdWork::Flush, Duration::ZERO);
    assert!(!timing.takes(0));
    timing.forget();
    assert!(timing.takes(0));
    let next = timing.begin(0, SsdWork::Read { block: 0, blocks: 1 }, Duration::ZERO);
    let ends = collect_ends(&mut timing);
    assert_eq!(ends.len(), 1, "{ends:?}");
    let (done, end) = ends[0];
    let before = 3 * (parts.queue_commands as u32 / 2) * parts.read;
    assert!(done == next && end > before, "it waited for the reads of its die: {ends:?}");
}
