use super::*;
use crate::{Blocking, Op, OpKind, Segments};

fn frames(region: &Arc<Region>, count: u32) -> Segments {
    region.take(count).expect("a frame is free").into()
}

/// Runs `count` reads at `depth`, and returns the operations per second.
fn reads(parts: &Parts, depth: u32, count: u64) -> f64 {
    let model = Model::new(1 << 16, parts);
    let region = Region::new(1024).unwrap();
    let mut queue = model.queue(depth).unwrap();
    let mut random = fastrand::Rng::with_seed(2);
    let (mut pushed, mut done) = (0, Vec::new());
    while (done.len() as u64) < count {
        while pushed < count && queue.in_flight() < depth as usize {
            let kind = OpKind::Read { block: random.u64(..1 << 16), memory: frames(&region, 1) };
            queue.push(Op { tag: pushed, kind }).unwrap();
            pushed += 1;
        }
        queue.wait(None);
        queue.reap(&mut done);
        done.iter_mut().for_each(|one| one.memory = Segments::None);
    }
    count as f64 / model.now().as_secs_f64()
}

#[test]
fn one_read_takes_the_time_of_its_parts() {
    let parts = Parts::default();
    let one = parts.command + parts.read + parts.transfer;
    let rate = reads(&parts, 1, 100);
    assert!((rate * one.as_secs_f64() - 1.0).abs() < 0.01, "{rate}");
}

#[test]
fn many_reads_use_all_dies() {
    let parts = Parts { queue_commands: 128, ..Parts::default() };
    let most = parts.dies as f64 / parts.read.as_secs_f64();
    let rate = reads(&parts, 512, 20_000);
    assert!(rate > most * 0.7 && rate <= most, "{rate} of {most}");
}

#[test]
fn a_read_waits_for_the_program_that_its_die_works_on() {
    let parts = Parts { dies: 1, channels: 1, ..Parts::default() };
    let model = Model::new(1024, &parts);
    let mut line = Blocking::new(&model).unwrap();
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
    let parts = Parts { commands: 8, queue_commands: 4, buffer_blocks: 4, ..Parts::default() };
    let model = Model::new(1 << 12, &parts);
    let region = Region::new(256).unwrap();
    let (mut writes, mut reads) = (model.queue(64).unwrap(), model.queue(64).unwrap());
    for block in 0..64 {
        let kind = OpKind::Write { block, memory: frames(&region, 1), fua: false };
        writes.push(Op { tag: block, kind }).unwrap();
    }
    writes.kick();
    let kind = OpKind::Read { block: 1000, memory: frames(&region, 1) };
    reads.push(Op { tag: 0, kind }).unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        reads.wait(None);
        reads.reap(&mut done);
    }
    assert!(model.now() < parts.program, "the read did not wait for writes: {:?}", model.now());
}

#[test]
fn writes_are_as_fast_as_the_dies_program() {
    let parts = Parts::default();
    let model = Model::new(1 << 15, &parts);
    let mut line = Blocking::new(&model).unwrap();
    let bytes = vec![1; 1 << 20];
    for at in 0..100 {
        line.write(at * 256, &bytes).unwrap();
    }
    line.flush().unwrap();
    let rate = 100.0 * 64.0 / model.now().as_secs_f64();
    let most = parts.dies as f64 / parts.program.as_secs_f64();
    assert!(rate > most * 0.9 && rate < most * 1.01, "{rate} of {most} pages a second");
}
