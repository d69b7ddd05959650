//! uhs on the NVMe driver: on a model of a controller, on QEMU's controller, and after power cuts.

use std::io;
use std::sync::Arc;

use defuse_block::{BlockDevice, RamDevice, SimDevice};
use defuse_fs::{
    Caller, Context, Fh, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs, ReadArgs,
    ReadBuf, Result, SliceSink, SliceSource, WriteArgs, WriteBuf,
};
use defuse_nvme::model::{ControllerFault, ModelProperties};
use defuse_nvme::qemu::{QemuController, QemuOptions};
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions};
use defuse_uhs::Uhs;

/// Blocks of 4 KiB.
const BLOCKS: u64 = 4096;

/// Files that are written, each with a sync after it.
const FILES: usize = 12;

const OPTIONS: defuse_uhs::UhsOptions = defuse_uhs::UhsOptions {
    read_only: false,
    commit: None,
    discard: false,
    separation: None,
    queues: None,
    worker: false,
    cache_pages: 256,
    dirty_pages: 64,
    index: 64 << 20,
    writeback: false,
    access_times: defuse_fs::posix::AccessTimeRule::Relative,
};

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

fn make(device: &Arc<dyn BlockDevice>) -> Uhs {
    let mut random = fastrand::Rng::with_seed(5);
    Uhs::make(Arc::clone(device), (0o755, 0, 0), &mut random).unwrap();
    open(device)
}

fn open(device: &Arc<dyn BlockDevice>) -> Uhs {
    let random = fastrand::Rng::with_seed(6);
    let (fs, problems) = Uhs::open(Arc::clone(device), OPTIONS, random).unwrap();
    assert_eq!(problems, []);
    fs
}

/// The name and the content of a file: from nothing to many pages.
fn file(number: usize) -> (String, Vec<u8>) {
    let content = (0..number * number * 1777).map(|at| (at / 100 + number) as u8).collect();
    (format!("file{number}"), content)
}

/// Writes a file, renames it, and makes that durable.
fn write(fs: &Uhs, number: usize) -> Result<()> {
    let (name, content) = file(number);
    let node = NewNode::new(FileKind::Regular, 0o644, cx().caller);
    let (entry, opened) =
        fs.create(&cx(), Ino::ROOT, Name::new(b"new")?, &node, OpenArgs::default())?;
    let handle = File { ino: entry.ino, fh: opened.fh };
    let mut source = SliceSource::new(&content);
    let taken = fs.write(&cx(), handle, WriteArgs::default(), &mut WriteBuf::new(&mut source))?;
    assert_eq!(taken, content.len());
    let to = (Ino::ROOT, Name::new(name.as_bytes())?);
    fs.rename(&cx(), (Ino::ROOT, Name::new(b"new")?), to, Default::default())?;
    fs.release(&cx(), handle, Default::default())?;
    fs.forget(entry.ino, 1);
    fs.syncfs(&cx())
}

/// True if a file is there with its content.
fn is_there(fs: &Uhs, number: usize) -> bool {
    let (name, content) = file(number);
    let Ok(entry) = fs.lookup(&cx(), Ino::ROOT, Name::new(name.as_bytes()).unwrap()) else {
        return false;
    };
    let mut bytes = vec![0; content.len() + 1];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, content.len() + 1);
    let handle = File { ino: entry.ino, fh: Fh(0) };
    fs.read(&cx(), handle, ReadArgs::default(), &mut out).unwrap();
    entry.attr.size == content.len() as u64 && bytes[..content.len()] == content
}

/// Makes a file system, writes to it, mounts it again, and checks it.
fn exercise(device: &Arc<dyn BlockDevice>) {
    let fs = make(device);
    (0..FILES).for_each(|number| write(&fs, number).unwrap());
    drop(fs);
    let fs = open(device);
    for number in 0..FILES {
        assert!(is_there(&fs, number), "file {number}");
    }
    fs.unlink(&cx(), Ino::ROOT, Name::new(b"file7").unwrap()).unwrap();
    drop(fs);
    let report = defuse_uhs::check(device).unwrap();
    assert_eq!((report.problems, report.inodes), (vec![], FILES as u64));
}

#[test]
fn uhs_works_on_controllers_of_all_shapes() {
    // Its largest transfer is smaller than what a file system likes to read at a time.
    let bare = ModelProperties {
        maps: false,
        interrupts: false,
        writes_zeroes: false,
        mdts: 1,
        ..ModelProperties::default()
    };
    for shape in [
        ModelProperties::default(),
        ModelProperties { mdts: 9, sgl: true, ..ModelProperties::default() },
        bare,
    ] {
        let model = ControllerModel::with(&RamDevice::new(4096, BLOCKS), 1, shape).unwrap();
        exercise(
            &(Arc::new(NvmeDevice::open(model, &NvmeOptions::default()).unwrap())
                as Arc<dyn BlockDevice>),
        );
    }
}

/// Each of these resets the controller, in the middle of whatever the file system does.
#[test]
fn uhs_does_not_notice_resets_of_its_controller() {
    for fault in
        [ControllerFault::Break, ControllerFault::NameOtherQueue, ControllerFault::AnswerTwice]
    {
        let model = ControllerModel::new(&RamDevice::new(4096, BLOCKS), 2).unwrap();
        let disk = Arc::new(NvmeDevice::open(model.clone(), &NvmeOptions::default()).unwrap());
        model.fail(move |victim| [20, 55, 90].contains(&victim.number).then_some(fault));
        exercise(&(Arc::clone(&disk) as Arc<dyn BlockDevice>));
        assert_eq!(disk.count_resets(), 3, "{fault:?}");
    }
}

#[test]
fn uhs_works_on_the_controller_of_qemu() {
    let image = tempfile::tempfile().unwrap();
    image.set_len(BLOCKS * 4096).unwrap();
    let options = QemuOptions::default();
    let open = || match QemuController::start(&image, &options) {
        Ok(qemu) => Some(Arc::new(NvmeDevice::open(qemu, &NvmeOptions::default()).unwrap())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => panic!("{error}"),
    };
    let Some(disk) = open() else {
        println!("skipped: there is no {}", options.program);
        return;
    };
    exercise(&(disk as Arc<dyn BlockDevice>));
    // Another machine, with the same image.
    let device: Arc<dyn BlockDevice> = open().unwrap();
    assert_eq!(defuse_uhs::check(&device).unwrap().problems, []);
    assert!(is_there(&self::open(&device), FILES - 1));
}

/// The power fails, and the volatile cache of the controller is lost in part.
#[test]
fn what_uhs_has_synced_survives_a_power_cut_of_the_controller() {
    let sim = SimDevice::new(BLOCKS, 9);
    let model = ControllerModel::new(&sim, 3).unwrap();
    let device: Arc<dyn BlockDevice> =
        Arc::new(NvmeDevice::open(model, &NvmeOptions::default()).unwrap());
    let fs = make(&device);
    let begin = sim.events();
    let mut synced = Vec::new();
    for number in 0..FILES {
        write(&fs, number).unwrap();
        synced.push(sim.events());
    }
    drop(fs);
    let mut random = fastrand::Rng::with_seed(4);
    let mut cuts = sim.power_cuts();
    let mut states = 0;
    while let Some(cut) = cuts.next() {
        if cut.event_index() < begin || cut.event_index() % 2 > 0 {
            continue;
        }
        let state = cut.sample(&mut random);
        let model = ControllerModel::new(&state, 1).unwrap();
        let device: Arc<dyn BlockDevice> =
            Arc::new(NvmeDevice::open(model, &NvmeOptions::default()).unwrap());
        let fs = open(&device);
        let durable = synced.iter().filter(|events| **events <= cut.event_index()).count();
        for number in 0..durable {
            assert!(is_there(&fs, number), "file {number} after event {}", cut.event_index());
        }
        drop(fs);
        assert_eq!(defuse_uhs::check(&device).unwrap().problems, [], "event {}", cut.event_index());
        states += 1;
    }
    assert!(states > 30, "only {states} moments");
}
