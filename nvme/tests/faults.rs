//! A controller that fails, lies or is pulled out: each operation is answered once, and nothing
//! hangs.

use std::sync::Arc;
use std::time::Duration;

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, BlockingQueue, DeviceQueue, Errno,
    MemoryRegion, RamDevice,
};
use defuse_nvme::model::{ControllerFault, ModelProperties};
use defuse_nvme::spec::CommandStatus;
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions};

const WRITE: u8 = 1;

fn open(shape: ModelProperties) -> (RamDevice, ControllerModel, NvmeDevice) {
    let ram = RamDevice::new(4096, 1024);
    let model = ControllerModel::with(&ram, 7, shape).unwrap();
    let disk = NvmeDevice::open(model.clone(), &NvmeOptions::default()).unwrap();
    (ram, model, disk)
}

/// Strikes the commands of these numbers.
fn strike(model: &ControllerModel, fault: ControllerFault, numbers: &'static [u64]) {
    let first = model.commands();
    model.fail(move |victim| numbers.contains(&(victim.number - first)).then_some(fault));
}

fn push_writes(queue: &mut dyn DeviceQueue, region: &Arc<MemoryRegion>, writes: u64) {
    for tag in 0..writes {
        let mut frames = region.take(1).unwrap();
        frames.fill(tag as u8 + 1);
        let kind = BlockOpKind::Write { block: tag, memory: frames.into(), fua: false };
        queue.push(BlockOp { tag, kind }).unwrap();
    }
    queue.kick();
}

/// The results by tag, each exactly once.
fn finish(queue: &mut dyn DeviceQueue) -> Vec<Result<(), Errno>> {
    let mut done: Vec<BlockCompletion> = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(None);
        queue.reap(&mut done);
    }
    done.sort_by_key(|done| done.tag);
    assert!(done.iter().enumerate().all(|(at, done)| done.tag == at as u64), "each exactly once");
    done.into_iter().map(|done| done.result).collect()
}

/// Results by tag, how often the controller was enabled and shut down, and the first bytes of
/// blocks.
type SixteenWrites = (Vec<Result<(), Errno>>, (u64, u64), Vec<u8>);

/// The results of sixteen writes. The fourth and the tenth command meet `fault`.
fn write_sixteen(fault: ControllerFault) -> SixteenWrites {
    let (ram, model, disk) = open(ModelProperties::default());
    let region = MemoryRegion::new(64).unwrap();
    disk.register(&region).unwrap();
    let mut queue = disk.queue(16).unwrap();
    strike(&model, fault, &[3, 9]);
    push_writes(&mut *queue, &region, 16);
    let results = finish(&mut *queue);
    assert_eq!(region.free_frames(), 64, "all memory came back");
    let lives = model.count_starts_and_shutdowns();
    model.end_faults();
    push_writes(&mut *queue, &region, 1);
    let works = finish(&mut *queue)[0].is_ok();
    assert_eq!(works, fault != ControllerFault::Unplug, "the queue works afterwards");
    let mut bytes = vec![0; 16 * 4096];
    BlockingQueue::new(&ram).unwrap().read(0, &mut bytes).unwrap();
    (results, lives, bytes.chunks(4096).map(|block| block[7]).collect())
}

#[test]
fn a_command_without_an_answer_is_aborted_and_the_others_are_done() {
    let (results, lives, fills) = write_sixteen(ControllerFault::Ignore);
    for (tag, (result, fill)) in results.iter().zip(fills).enumerate().skip(1) {
        let late = tag == 3 || tag == 9;
        let expected = if late { (Err(Errno::TIMEDOUT), 0) } else { (Ok(()), tag as u8 + 1) };
        assert_eq!((*result, fill), expected, "operation {tag}");
    }
    assert_eq!(lives, (1, 0), "no reset was needed");
}

#[test]
fn a_command_that_cannot_be_aborted_resets_the_controller_and_the_others_are_sent_again() {
    for fault in [ControllerFault::Forget, ControllerFault::Break] {
        let (results, (enabled, _), fills) = write_sixteen(fault);
        let failed: Vec<usize> = (0..16).filter(|at| results[*at].is_err()).collect();
        let expected: &[usize] = if fault == ControllerFault::Forget { &[3, 9] } else { &[] };
        assert_eq!(failed, expected, "{fault:?}");
        assert!((2..=3).contains(&enabled), "{fault:?}: enabled {enabled} times");
        let right = (1..16).filter(|at| results[*at].is_ok()).all(|at| fills[at] == at as u8 + 1);
        assert!(right, "{fault:?}: {fills:?}");
    }
}

#[test]
fn completions_of_no_command_reset_the_controller_and_every_operation_is_answered_once() {
    for fault in
        [ControllerFault::AnswerTwice, ControllerFault::Invent, ControllerFault::NameOtherQueue]
    {
        let (results, (enabled, _), fills) = write_sixteen(fault);
        assert!(enabled >= 2, "{fault:?}: it was not noticed");
        assert!(results.iter().all(Result::is_ok), "{fault:?}: {results:?}");
        assert!((1..16).all(|at| fills[at] == at as u8 + 1), "{fault:?}: {fills:?}");
    }
}

#[test]
fn a_controller_that_is_pulled_out_answers_everything_with_errors() {
    let (results, ..) = write_sixteen(ControllerFault::Unplug);
    assert!(results[9..].iter().all(|result| *result == Err(Errno::IO)), "{results:?}");
}

#[test]
fn a_controller_that_needs_too_many_resets_is_given_up_on_all_queues() {
    let (_ram, model, disk) = open(ModelProperties::default());
    let region = MemoryRegion::new(64).unwrap();
    let mut queues: Vec<Box<dyn DeviceQueue>> = (0..2).map(|_| disk.queue(8).unwrap()).collect();
    model.fail(|_| Some(ControllerFault::Forget));
    queues.iter_mut().for_each(|queue| push_writes(&mut **queue, &region, 8));
    for queue in &mut queues {
        assert!(finish(&mut **queue).iter().all(Result::is_err));
    }
    model.end_faults();
    push_writes(&mut *queues[0], &region, 1);
    // The next commands are answered, or the controller is not used any more: nothing hangs, and
    // nothing is lost.
    finish(&mut *queues[0]);
    drop(queues);
    assert_eq!(region.free_frames(), 64);
    assert!(disk.count_resets() >= 2);
}

#[test]
fn errors_of_commands_become_errors_of_operations_and_passing_ones_are_retried() {
    let (_ram, model, disk) = open(ModelProperties::default());
    let mut line = BlockingQueue::new(&disk).unwrap();
    let table = [
        (CommandStatus::READ_ERROR, Errno::IO),
        (CommandStatus::INVALID_FIELD, Errno::INVAL),
        (CommandStatus(0x81), Errno::NOSPC),
        (CommandStatus(0x20), Errno::ROFS),
        (CommandStatus(CommandStatus::NOT_READY.0 | CommandStatus::DO_NOT_RETRY), Errno::IO),
    ];
    for (status, errno) in table {
        model.fail(move |_| Some(ControllerFault::Refuse(status)));
        assert_eq!(line.write(1, &[1; 4096]), Err(errno), "{status}");
    }
    strike(&model, ControllerFault::Refuse(CommandStatus::NOT_READY), &[0, 1]);
    assert_eq!(line.write(1, &[1; 4096]), Ok(()));
    model.fail(|_| Some(ControllerFault::Refuse(CommandStatus::NOT_READY)));
    assert_eq!(line.write(1, &[1; 4096]), Err(Errno::IO), "not without an end");
    assert_eq!(model.count_starts_and_shutdowns(), (1, 0), "none of these is a reason for a reset");
}

#[test]
fn lost_misdirected_and_torn_writes_are_lost_misdirected_and_torn() {
    let (_ram, model, disk) = open(ModelProperties::default());
    let mut line = BlockingQueue::new(&disk).unwrap();
    let once = |fault| {
        let first = model.commands();
        model.fail(move |victim| {
            (victim.opcode == WRITE && victim.number == first).then_some(fault)
        });
    };
    once(ControllerFault::Lose);
    line.write(0, &[1; 2 * 4096]).unwrap();
    once(ControllerFault::Misdirect(9));
    line.write(0, &[2; 4096]).unwrap();
    once(ControllerFault::Tear);
    assert_eq!(line.write(4, &[3; 4 * 4096]), Err(Errno::IO));
    let mut bytes = vec![0; 10 * 4096];
    line.read(0, &mut bytes).unwrap();
    let fills: Vec<u8> = bytes.chunks(4096).map(|block| block[0]).collect();
    assert_eq!(fills, [0, 0, 0, 0, 3, 3, 0, 0, 0, 2]);
}

#[test]
fn a_controller_is_told_of_the_end_after_its_last_queue() {
    let (_ram, model, disk) = open(ModelProperties::default());
    let mut queue = disk.queue(4).unwrap();
    drop(disk);
    assert_eq!(model.count_starts_and_shutdowns(), (1, 0), "a queue still needs it");
    queue.push(BlockOp { tag: 0, kind: BlockOpKind::Flush }).unwrap();
    assert_eq!(finish(&mut *queue), [Ok(())]);
    drop(queue);
    assert_eq!(model.count_starts_and_shutdowns(), (1, 1));
}

#[test]
fn events_and_logs_reach_the_user() {
    let (_ram, model, disk) = open(ModelProperties::default());
    BlockingQueue::new(&disk).unwrap().flush().unwrap();
    let smart = disk.smart().unwrap();
    assert_eq!((smart.temperature_k, smart.reads, smart.power_cycles), (300, 1, 1));
    assert_eq!(disk.errors().unwrap(), []);
    assert_eq!(disk.controller_facts().model, "defuse: model");
    // These are more events than open requests: each request is sent again.
    for _ in 0..9 {
        // Time for the requests to arrive.
        disk.smart().unwrap();
        model.raise(0x02_01_01);
        let events = disk.events();
        assert_eq!((events[0].kind, events[0].info, events[0].log), (1, 1, 2));
    }
    assert_eq!(disk.count_resets(), 0);
}

#[test]
fn a_namespace_of_small_blocks_and_large_ranges_work() {
    let ram = RamDevice::new(512, 400_000);
    let shape =
        ModelProperties { atomic: (15, 7), writes_zeroes: false, ..ModelProperties::default() };
    let disk =
        NvmeDevice::open(ControllerModel::with(&ram, 3, shape).unwrap(), &NvmeOptions::default())
            .unwrap();
    let facts = disk.properties();
    assert_eq!((facts.block_size, facts.atomic_write, facts.max_transfer), (512, 4096, 128 << 10));
    let mut line = BlockingQueue::new(&disk).unwrap();
    line.write(99_999, &[5; 1024]).unwrap();
    line.write(301, &[6; 512]).unwrap();
    // More than a command holds.
    line.run(BlockOpKind::Zero { block: 302, blocks: 99_698 }).unwrap();
    line.run(BlockOpKind::Discard { block: 200_000, blocks: 200_000 }).unwrap();
    let mut bytes = [1; 1536];
    line.read(99_999, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[511], bytes[512], bytes[1535]), (0, 0, 5, 0));
    line.read(301, &mut bytes[..1024]).unwrap();
    assert_eq!((bytes[0], bytes[512]), (6, 0), "the neighbour stays");
}

#[test]
fn queues_have_an_end_and_their_numbers_come_back() {
    let (_ram, _model, disk) = open(ModelProperties { queues: 2, ..ModelProperties::default() });
    assert_eq!(disk.properties().max_queues, 2);
    let queues = [disk.queue(4).unwrap(), disk.queue(4).unwrap()];
    assert_eq!(disk.queue(4).err(), Some(Errno::BUSY));
    drop(queues);
    for _ in 0..5 {
        BlockingQueue::new(&disk).unwrap().flush().unwrap();
    }
}

#[test]
fn a_controller_that_does_not_answer_is_refused() {
    let model = ControllerModel::new(&RamDevice::new(4096, 16), 1).unwrap();
    model.unplug();
    let error = NvmeDevice::open(model, &NvmeOptions::default()).unwrap_err();
    assert!(error.to_string().contains("does not answer"), "{error}");
    let model = ControllerModel::new(&RamDevice::new(4096, 16), 1).unwrap();
    let options = NvmeOptions { namespace: 2, ..NvmeOptions::default() };
    let error = NvmeDevice::open(model, &options).unwrap_err();
    assert!(error.to_string().contains("cannot identify the namespace"), "{error}");
}

/// The fuzzer finds more; these run every time.
#[test]
fn a_lying_controller_gets_errors_and_no_memory() {
    let mut random = fastrand::Rng::with_seed(11);
    for _ in 0..200 {
        let mut script = vec![0; random.usize(1..600)];
        random.fill(&mut script);
        // Mostly truths, so that the lies come late.
        let truths = [0, 100, 200, 250][random.usize(..4)];
        for byte in &mut script[1..] {
            *byte = if random.u8(..) < truths { 0 } else { *byte };
        }
        defuse_nvme::fuzz_controller(&script);
    }
}

#[test]
fn a_time_out_takes_the_time_that_was_asked_for() {
    use defuse_nvme::ControllerTransport;
    let ram = RamDevice::new(4096, 16);
    let model = ControllerModel::new(&ram, 1).unwrap();
    let options = NvmeOptions { timeout: Duration::from_secs(8), ..NvmeOptions::default() };
    let disk = NvmeDevice::open(model.clone(), &options).unwrap();
    let mut line = BlockingQueue::new(&disk).unwrap();
    strike(&model, ControllerFault::Ignore, &[0]);
    let begin = model.now();
    assert_eq!(line.write(0, &[1; 4096]), Err(Errno::TIMEDOUT));
    let took = model.now() - begin;
    let seconds = took.as_secs_f64();
    assert!((8.0..8.1).contains(&seconds), "{seconds} s");
}
