use std::collections::HashMap;

use super::*;
use crate::{Access, File, Kind, Monotonic, Ram, Region, Segments, Sim};

const BLOCKS: u64 = 64;

fn modes() -> Vec<Separation> {
    let mut separations = Vec::new();
    for mode in [Mode::Off, Mode::Static, Mode::Learned] {
        separations.push(Separation::open(mode, 4, 8));
        let one = |class: &Class| Classes::of(&[*class]);
        let queues = Class::ALL.iter().map(one).collect();
        separations.push(Separation { queues, caps: true, ..Separation::open(mode, 4, 8) });
    }
    separations.iter_mut().for_each(|separation| separation.large = 3 * 4096);
    separations
}

/// Pushes random operations, and checks that each read finds the writes that were pushed before it and none
/// that was pushed after it.
fn play(device: &dyn Device, separation: &Separation, seed: u64) {
    let mut queue = Separated::new(device, separation, Arc::new(Monotonic::default())).unwrap();
    let region = Region::new(256).unwrap();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut model = vec![0_u8; BLOCKS as usize];
    let mut expected: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut done = Vec::new();
    for tag in 0..600 {
        let count = random.u64(1..5);
        let block = random.u64(..BLOCKS - count);
        let range = block as usize..(block + count) as usize;
        let mut memory = region.take(count as u32).unwrap();
        let kind = match random.u8(..12) {
            0 => Kind::Flush,
            1 => {
                model[range].fill(0);
                Kind::Zero { block, blocks: count }
            }
            2..7 => {
                let byte = random.u8(1..);
                model[range].fill(byte);
                memory.fill(byte);
                Kind::Write { block, memory: memory.into(), fua: false }
            }
            _ => {
                expected.insert(tag, model[range].to_vec());
                Kind::Read { block, memory: memory.into() }
            }
        };
        let mut op = Op { tag, kind };
        while let Err(again) = queue.push(op) {
            op = again;
            queue.wait(None);
            queue.reap(&mut done);
            done.drain(..).for_each(|one| check(&mut expected, one));
        }
        if random.u8(..4) == 0 {
            queue.kick();
        }
    }
    while queue.in_flight() > 0 {
        queue.wait(None);
        queue.reap(&mut done);
        done.drain(..).for_each(|one| check(&mut expected, one));
    }
    assert!(expected.is_empty());
}

fn check(expected: &mut HashMap<u64, Vec<u8>>, done: Done) {
    done.result.unwrap();
    if let Some(blocks) = expected.remove(&done.tag) {
        let frames = done.memory.into_frames().unwrap();
        for (byte, block) in blocks.iter().zip(frames.chunks(4096)) {
            assert!(block.iter().all(|found| found == byte), "operation {}", done.tag);
        }
    }
}

#[test]
fn operations_on_the_same_blocks_keep_their_order() {
    for (seed, separation) in (0..).zip(modes()) {
        play(&Ram::new(4096, BLOCKS), &separation, seed);
        for seed in 0..20 {
            play(&Sim::new(BLOCKS, seed), &separation, seed);
        }
        play(&crate::Model::new(BLOCKS, &Default::default()), &separation, seed);
    }
}

#[test]
fn the_queues_of_a_file_are_waited_for_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 4096).unwrap();
    let file = File::open(&path, Access::ReadWrite).unwrap();
    for (seed, separation) in (0..).zip(modes()) {
        let mut line = crate::Blocking::new(&file).unwrap();
        line.write(0, &vec![0; (BLOCKS * 4096) as usize]).unwrap();
        play(&file, &separation, seed);
    }
}

#[test]
fn a_waker_ends_the_wait_for_all_queues() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 4096).unwrap();
    let file = File::open(&path, Access::ReadWrite).unwrap();
    let devices: [&dyn Device; 2] = [&file, &Ram::new(4096, BLOCKS)];
    for device in devices {
        let separation = Separation::open(Mode::Static, 3, 4);
        let clock = Arc::new(Monotonic::default());
        let mut queue = Separated::new(device, &separation, clock).unwrap();
        let waker = queue.waker();
        let thread = std::thread::spawn(move || waker.wake());
        // Ends only if it is woken: nothing is in flight.
        queue.wait(None);
        thread.join().unwrap();
    }
}

#[test]
fn a_flush_makes_everything_durable_that_was_pushed_before_it() {
    for (seed, separation) in (0..).zip(modes()) {
        let sim = Sim::new(BLOCKS, seed);
        let clock = Arc::new(Monotonic::default());
        let mut queue = Separated::new(&sim, &separation, clock).unwrap();
        let region = Region::new(32).unwrap();
        for block in 0..16 {
            let mut memory = region.take(1).unwrap();
            memory.fill(9);
            let memory = Segments::from(memory);
            queue.push(Op { tag: block, kind: Kind::Write { block, memory, fua: false } }).unwrap();
        }
        queue.push(Op { tag: 99, kind: Kind::Flush }).unwrap();
        let mut done: Vec<Done> = Vec::new();
        while done.iter().all(|one| one.tag != 99) {
            queue.wait(None);
            queue.reap(&mut done);
        }
        assert_eq!(done.len(), 17, "the flush is the last");
        let mut cuts = sim.cuts();
        let cut = cuts.last();
        assert_eq!(cut.open(), 0);
        let survivor = cut.every().next().unwrap();
        let mut line = crate::Blocking::new(&survivor).unwrap();
        let mut bytes = vec![0; 16 * 4096];
        line.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 9));
    }
}

#[test]
fn classes_without_a_queue_are_refused() {
    let reads = Classes::of(&[Class::SmallRead, Class::LargeRead]);
    let separation = Separation { queues: vec![reads], ..Separation::open(Mode::Static, 1, 4) };
    let clock = Arc::new(Monotonic::default());
    let made = Separated::new(&Ram::new(4096, 8), &separation, clock);
    assert_eq!(made.err(), Some(Errno::INVAL));
}

/// The queues that operations of these classes go to.
fn queues(separation: &Separation, classes: &[Class]) -> Vec<usize> {
    let depths = vec![separation.depth as usize; separation.queues.len()];
    let mut schedule = Schedule::new(separation, &depths, 4096);
    let region = Region::new(64).unwrap();
    for (block, class) in (0..).zip(classes) {
        let count = if matches!(class, Class::SmallRead | Class::SmallWrite) { 1 } else { 8 };
        let (block, memory) = (block * 8, region.take(count).unwrap().into());
        let kind = match class {
            Class::SmallRead | Class::LargeRead => Kind::Read { block, memory },
            _ => Kind::Write { block, memory, fua: false },
        };
        schedule.push(Op { tag: block, kind }).unwrap();
    }
    let next = |schedule: &mut Schedule| schedule.next(Duration::ZERO).map(|(queue, _)| queue);
    std::iter::from_fn(|| next(&mut schedule)).collect()
}

#[test]
fn classes_go_to_the_queues_that_take_them() {
    use Class::{LargeRead, LargeWrite, SmallRead, SmallWrite};
    let classes = [SmallWrite, SmallRead, LargeWrite, LargeRead, SmallWrite, SmallRead];
    let open = Separation::open(Mode::Off, 4, 8);
    assert_eq!(queues(&open, &classes), [0, 1, 2, 3, 0, 1]);
    let of = |classes: &[Class]| Classes::of(classes);
    let by_way = vec![of(&[SmallRead, LargeRead]), of(&[SmallWrite, LargeWrite])];
    let separation = Separation { queues: by_way, ..Separation::open(Mode::Static, 2, 8) };
    assert_eq!(queues(&separation, &classes), [1, 0, 1, 0, 1, 0]);
}
