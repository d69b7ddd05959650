//! Writes beside descriptors with `O_DIRECT` and `O_APPEND`, and the durability that a write
//! requests.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::*;
use defuse_fs::*;
use defuse_passthrough::PassthroughOptions;

const DIRECT: u32 = OpenFlags::DIRECT;
const APPEND: u32 = OpenFlags::APPEND;
const DSYNC: u32 = OpenFlags::DSYNC;
const SYNC: u32 = OpenFlags::SYNC;

/// Pages of a cache were written through the descriptor of a program that had opened the file with
/// O_DIRECT: the last one was refused, and its bytes were lost.
#[test]
fn pages_of_a_cache_are_written_whatever_flags_a_program_has_opened_the_file_with() {
    run_everywhere(
        &PassthroughOptions { writeback: true, ..PassthroughOptions::default() },
        |served| {
            let made = served.create("a");
            for flags in [0, DIRECT, APPEND, DIRECT | APPEND] {
                let Ok(file) = served.open(made.0.ino, OpenFlags::RDWR | flags) else {
                    eprintln!("not here: no O_DIRECT");
                    continue;
                };
                for changed in [0, DIRECT, APPEND] {
                    let requested = OpenFlags(OpenFlags::RDWR | changed);
                    let own = WriteArgs { flags: requested, ..WriteArgs::default() };
                    let pages = WriteArgs { from_cache: true, offset: 3, ..own };
                    // The program sets or clears the flags by fcntl(2), and writes.
                    let _ = served.write(file, own, b"");
                    let written = served.write(file, pages, &[7; 1000]);
                    assert_eq!(written, Ok(1000), "{flags:o} {changed:o}");
                    assert_eq!(fs::read(served.path("a")).unwrap().len(), 1003);
                }
                served.release(file);
            }
        },
    );
}

/// The image of a file system on a loop device, mounted.
struct LowerDevice(tempfile::TempDir);

impl LowerDevice {
    fn new() -> Option<Self> {
        let device = LowerDevice(tempfile::tempdir().unwrap());
        let (image, at) = (device.0.path().join("image"), device.source());
        fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        fs::create_dir(&at).unwrap();
        let made = Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&image).status();
        if !made.is_ok_and(|status| status.success()) || !mount(&image, &at) {
            eprintln!("skipped: no ext4 on a loop device");
            return None;
        }
        Some(device)
    }

    fn source(&self) -> std::path::PathBuf {
        self.0.path().join("source")
    }

    /// The content of the file `name` after a power cut at this moment.
    fn read_after_power_cut(&self, name: &str) -> Option<Vec<u8>> {
        let (copy, at) = (self.0.path().join("copy"), self.0.path().join("after"));
        fs::copy(self.0.path().join("image"), &copy).unwrap();
        fs::create_dir_all(&at).unwrap();
        assert!(mount(&copy, &at));
        let content = fs::read(at.join(name)).ok();
        rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
        content
    }
}

impl Drop for LowerDevice {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.source(), rustix::mount::UnmountFlags::DETACH);
    }
}

fn mount(image: &Path, at: &Path) -> bool {
    let status = Command::new("mount").args(["-o", "loop"]).args([image, at]).status();
    status.is_ok_and(|status| status.success())
}

/// The flags of a request were ignored: RWF_DSYNC of a direct write, and O_DSYNC of all writes on a
/// mount with sync and direct_io.
#[test]
fn a_write_is_as_durable_as_its_request_asks() {
    if !is_root() {
        return;
    }
    let Some(device) = LowerDevice::new() else { return };
    let fs = defuse_passthrough::Passthrough::new(&device.source(), PassthroughOptions::default())
        .unwrap();
    let block = vec![5_u8; 8192];
    let start = block.as_ptr().align_offset(4096);
    let block = &block[start..start + 4096];
    for (number, (opened, requested, is_durable)) in [
        (0, 0, false),
        (DIRECT, DIRECT, false),
        (0, DSYNC, true),
        (0, SYNC, true),
        (DIRECT, DIRECT | DSYNC, true),
        (DIRECT, DIRECT | SYNC, true),
        (DSYNC, DSYNC, true),
        (DSYNC, SYNC, true),
        (SYNC, SYNC, true),
        (0, DIRECT | DSYNC, true),
        (DIRECT, DSYNC, true),
    ]
    .into_iter()
    .enumerate()
    {
        let text = number.to_string();
        let args = flags(OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL | opened);
        let made = fs.create(
            &own_context(),
            Ino::ROOT,
            name(&text),
            &regular(&own_context(), 0o644),
            args,
        );
        let (entry, opened_file) = made.unwrap();
        let file = File { ino: entry.ino, fh: opened_file.fh };
        let args =
            WriteArgs { flags: OpenFlags(OpenFlags::RDWR | requested), ..WriteArgs::default() };
        let mut data = SliceSource::new(block);
        assert_eq!(fs.write(&own_context(), file, args, &mut WriteBuf::new(&mut data)), Ok(4096));
        let found = device.read_after_power_cut(&text);
        let is_there = found.as_deref() == Some(block);
        // Without a request for it, durability is a matter of time.
        assert!(is_there || !is_durable, "opened {opened:o}, asked {requested:o}: {found:?}");
        if is_there && !is_durable {
            eprintln!("durable without a request: {opened:o}");
        }
    }
}

/// With a write-back cache the file was opened for reading and writing and without O_APPEND, which
/// such a file does not permit.
#[test]
fn a_file_that_only_grows_is_appended_to_with_a_write_back_cache() {
    if !is_root() {
        return;
    }
    let served = ServedDirectory::new(
        &bases()[0],
        PassthroughOptions { writeback: true, ..PassthroughOptions::default() },
    );
    fs::write(served.path("log"), b"a").unwrap();
    let attribute = |change: &str| {
        let status = Command::new("chattr").arg(change).arg(served.path("log")).status();
        status.is_ok_and(|status| status.success())
    };
    if !attribute("+a") {
        return eprintln!("not here: no chattr +a");
    }
    let ino = served.lookup("log").unwrap().ino;
    let other = served.open(ino, OpenFlags::WRONLY);
    let opened = served.fs.open(&own_context(), ino, flags(OpenFlags::WRONLY | APPEND));
    let appended = opened.as_ref().map_err(|errno| *errno).and_then(|opened| {
        let file = File { ino, fh: opened.fh };
        let requested = OpenFlags(OpenFlags::WRONLY | APPEND);
        // The offset that a kernel believes to be the end.
        served.write(file, WriteArgs { flags: requested, ..WriteArgs::default() }, b"b")
    });
    let content = fs::read(served.path("log")).unwrap();
    assert!(attribute("-a"));
    assert_eq!(other.err(), Some(Errno::EPERM));
    assert_eq!((appended, &content[..]), (Ok(1), b"ab" as &[u8]));
    assert_eq!(opened.unwrap().cache, CacheMode::Direct);
}
