//! Every device keeps the promises of the traits, by the same cases.

use std::fs::File as Plain;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use defuse_block::{
    Access, Blocking, Device, Done, Errno, FRAME, File, Frames, Kind, Memory, Op, OpenError,
    OpenFile, Queue, Ram, RawBuf, Region, Segments, Sim,
};

const BLOCKS: u64 = 2048;

/// Runs `case` on each device that this machine can have.
fn each(case: impl Fn(&str, &dyn Device)) {
    case("memory", &Ram::new(4096, BLOCKS));
    case("simulation", &Sim::new(BLOCKS, 1));
    let dir = tempfile::tempdir().unwrap();
    case("file", &File::open(&image(dir.path()), Access::ReadWrite).unwrap());
    match Loop::new(&image(dir.path())) {
        Ok(disk) => case("loop device", &File::open(&disk.path, Access::ReadWrite).unwrap()),
        Err(_) if !Path::new("/dev/loop-control").exists() => {
            println!("not here: loop devices");
        }
        Err(reason) => println!("skipped: no loop device: {reason}"),
    }
}

fn image(dir: &Path) -> PathBuf {
    let path = dir.join("image");
    Plain::create(&path).unwrap().set_len(BLOCKS * 4096).unwrap();
    path
}

/// A loop device, which goes with the value.
struct Loop {
    path: PathBuf,
}

impl Loop {
    fn new(image: &Path) -> Result<Loop, String> {
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size", "4096"]).arg(image);
        let output = losetup.output().map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(Loop { path: String::from_utf8_lossy(&output.stdout).trim().into() }),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

fn finish(queue: &mut dyn Queue) -> Vec<Done> {
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(None);
        queue.reap(&mut done);
    }
    done
}

fn frames(region: &Arc<Region>, count: u32, fill: u8) -> Frames {
    let mut frames = region.take(count).unwrap();
    frames.fill(fill);
    frames
}

fn read_back(device: &dyn Device, block: u64, blocks: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; blocks * 4096];
    Blocking::new(device).unwrap().read(block, &mut bytes).unwrap();
    bytes
}

#[test]
fn what_was_written_from_any_kind_of_memory_is_read() {
    each(|name, device| {
        let region = Region::new(1024).unwrap();
        device.register(&region).unwrap();
        let mut queue = device.queue(16).unwrap();
        let shared = Arc::new(frames(&region, 4, 2));
        // An odd address, which direct I/O cannot use.
        let mut odd = vec![3_u8; 2 * 4096 + 1];
        // SAFETY: `odd` lives until `finish` has reaped the write, and nobody touches it.
        let raw = unsafe { RawBuf::new(odd.as_mut_ptr().wrapping_add(1), 2 * 4096) };
        let writes: [(u64, Segments); 4] = [
            (0, frames(&region, 3, 1).into()),
            (3, Segments::One(Memory::Shared(Arc::clone(&shared), 4096..8192))),
            (4, raw.into()),
            (
                6,
                vec![
                    Memory::Frames(frames(&region, 1, 4)),
                    Memory::Shared(shared, 0..8192),
                    Memory::Frames(frames(&region, 1, 5)),
                ]
                .into(),
            ),
        ];
        for (tag, (block, memory)) in (0..).zip(writes) {
            let fua = tag % 2 == 0;
            queue.push(Op { tag, kind: Kind::Write { block, memory, fua } }).unwrap();
        }
        for done in finish(&mut *queue) {
            assert_eq!(done.result, Ok(()), "{name}: write {}", done.tag);
        }
        let expected: Vec<u8> =
            [1, 1, 1, 2, 3, 3, 4, 2, 2, 5, 0].iter().flat_map(|fill| [*fill; 4096]).collect();
        assert!(read_back(device, 0, 11) == expected, "{name}");

        let memory =
            vec![Memory::Frames(frames(&region, 2, 9)), Memory::Frames(frames(&region, 9, 9))];
        let kind = Kind::Read { block: 0, memory: memory.into() };
        queue.push(Op { tag: 7, kind }).unwrap();
        let Segments::Many(memory) = finish(&mut *queue).remove(0).memory else {
            panic!("{name}: another kind of memory came back");
        };
        let read: Vec<u8> = memory
            .iter()
            .flat_map(|piece| match piece {
                Memory::Frames(frames) => frames.to_vec(),
                other => panic!("{name}: {other:?}"),
            })
            .collect();
        assert!(read == expected, "{name}");
        drop(memory);
        assert_eq!(region.free_frames(), 1024, "{name}: all memory came back");
    });
}

#[test]
fn a_full_queue_gives_the_operation_back() {
    each(|name, device| {
        let region = Region::new(8).unwrap();
        let mut queue = device.queue(2).unwrap();
        let depth = queue.depth() as u64;
        let read = |tag| Op {
            tag,
            kind: Kind::Read { block: tag, memory: region.take(1).unwrap().into() },
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
    });
}

#[test]
fn what_makes_no_sense_is_refused_and_the_memory_comes_back() {
    each(|name, device| {
        let region = Region::new(8).unwrap();
        let mut queue = device.queue(8).unwrap();
        let one = || Segments::from(region.take(1).unwrap());
        let bad = [
            Kind::Read { block: BLOCKS, memory: one() },
            Kind::Write { block: u64::MAX, memory: one(), fua: false },
            Kind::Read { block: 0, memory: Segments::None },
            Kind::Write {
                block: 0,
                memory: Segments::One(Memory::Shared(Arc::new(region.take(1).unwrap()), 0..100)),
                fua: false,
            },
            Kind::Read {
                block: 0,
                memory: Segments::One(Memory::Shared(Arc::new(region.take(1).unwrap()), 0..4096)),
            },
            Kind::Zero { block: BLOCKS - 1, blocks: 2 },
            Kind::Discard { block: 0, blocks: 0 },
        ];
        for (tag, kind) in (0..).zip(bad) {
            queue.push(Op { tag, kind }).unwrap();
        }
        for done in finish(&mut *queue) {
            assert_eq!(done.result, Err(Errno::INVAL), "{name}: operation {}", done.tag);
        }
        assert_eq!(region.free_frames(), 8, "{name}");
    });
}

#[test]
fn zeroed_blocks_read_as_zeros_and_their_neighbours_stay() {
    each(|name, device| {
        let mut line = Blocking::new(device).unwrap();
        line.write(0, &[7; 8 * 4096]).unwrap();
        line.run(Kind::Zero { block: 2, blocks: 3 }).unwrap();
        line.flush().unwrap();
        let fills: Vec<u8> = read_back(device, 0, 8).chunks(4096).map(|block| block[9]).collect();
        assert_eq!(fills, [7, 7, 0, 0, 0, 7, 7, 7], "{name}");
    });
}

#[test]
fn discarded_space_goes_back_to_the_file_system_below() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    let file = File::open(&path, Access::ReadWrite).unwrap();
    let mut line = Blocking::new(&file).unwrap();
    line.write(0, &vec![7; 4 << 20]).unwrap();
    line.flush().unwrap();
    let used = path.metadata().unwrap().blocks();
    line.run(Kind::Discard { block: 0, blocks: 512 }).unwrap();
    let left = path.metadata().unwrap().blocks();
    assert!(left < used, "{left} of {used} sectors");
    assert_eq!(path.metadata().unwrap().len(), BLOCKS * 4096, "the length stays");
}

#[test]
fn another_thread_ends_a_wait() {
    each(|name, device| {
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
    });
}

#[test]
fn a_queue_that_is_dropped_waits_for_its_operations() {
    each(|name, device| {
        let region = Region::new(64).unwrap();
        let mut queue = device.queue(64).unwrap();
        for tag in 0..64 {
            let memory = frames(&region, 1, tag as u8).into();
            queue.push(Op { tag, kind: Kind::Write { block: tag, memory, fua: false } }).unwrap();
        }
        queue.kick();
        drop(queue);
        assert_eq!(region.free_frames(), 64, "{name}");
        let fills: Vec<u8> = read_back(device, 0, 64).chunks(4096).map(|block| block[0]).collect();
        assert_eq!(fills, (0..64).collect::<Vec<u8>>(), "{name}");
    });
}

#[test]
fn a_device_has_one_user_and_its_name_is_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    let first = File::open(&path, Access::ReadWrite).unwrap();
    for access in [Access::ReadWrite, Access::Read] {
        let error = File::open(&path, access).unwrap_err();
        assert!(matches!(error, OpenError::Busy { .. }), "{error:?}");
        let text = error.to_string();
        let pid = format!("process {}", std::process::id());
        assert!(text.contains(&pid) && text.contains("image"), "{text}");
    }
    drop(first);
    let readers = [Access::Read; 2].map(|access| File::open(&path, access).unwrap());
    let mut line = Blocking::new(&readers[0]).unwrap();
    assert_eq!(line.write(0, &[1; 4096]), Err(Errno::BADF));
    assert_eq!(line.read(0, &mut [0; 4096]), Ok(()));
}

/// A second look at the path would find whatever somebody has put there meanwhile.
#[test]
fn an_open_file_stays_the_same_when_another_one_takes_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (image(dir.path()), dir.path().join("away"));
    let open = OpenFile::open(&path, Access::ReadWrite).unwrap();
    assert!(open.is_in_place() && open.is_regular());
    std::fs::rename(&path, &away).unwrap();
    std::fs::write(&path, "mine").unwrap();
    assert!(!open.is_in_place());
    open.resize(8192).unwrap();
    open.allocate(BLOCKS * 4096).unwrap();
    let device = open.device().unwrap();
    assert_eq!((device.facts().blocks, open.bytes()), (BLOCKS, Ok(BLOCKS * 4096)));
    Blocking::new(&device).unwrap().write(1, &[5; 4096]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    assert_eq!(std::fs::read(&away).unwrap()[4096], 5);
    // A device keeps the lock.
    drop(open);
    assert!(matches!(OpenFile::open(&away, Access::Read), Err(OpenError::Busy { .. })));
    drop(device);
    assert!(OpenFile::open(&away, Access::Read).is_ok());
    let exists = OpenFile::create(&away).unwrap_err();
    assert!(matches!(exists, OpenError::System { errno: Errno::EXIST, .. }), "{exists:?}");
}

#[test]
fn what_is_no_device_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &Path| File::open(path, Access::ReadWrite).unwrap_err();
    assert!(matches!(open(&dir.path().join("none")), OpenError::System { .. }));
    assert!(matches!(open(Path::new("/dev/null")), OpenError::WrongKind { .. }));
    let small = dir.path().join("small");
    std::fs::write(&small, [0; 100]).unwrap();
    assert!(matches!(open(&small), OpenError::TooSmall { bytes: 100, .. }));
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(matches!(open(&fifo), OpenError::WrongKind { .. } | OpenError::System { .. }));
}

#[test]
fn a_large_transfer_uses_frames_across_a_region() {
    each(|name, device| {
        let region = Region::new(1024).unwrap();
        device.register(&region).unwrap();
        let mut queue = device.queue(4).unwrap();
        let mut run = region.take(512).unwrap();
        for (at, frame) in run.chunks_mut(FRAME).enumerate() {
            frame.fill(at as u8);
        }
        let kind = Kind::Write { block: 100, memory: run.into(), fua: true };
        queue.push(Op { tag: 1, kind }).unwrap();
        assert_eq!(finish(&mut *queue)[0].result, Ok(()), "{name}");
        let read = read_back(device, 100, 512);
        assert!(read.chunks(FRAME).enumerate().all(|(at, frame)| frame[5] == at as u8), "{name}");
    });
}
