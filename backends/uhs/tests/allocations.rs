//! The allocations of a small write that is synced.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use defuse_block::{BlockDevice, DeviceAccess, FileDevice};
use defuse_fs::{
    Caller, Context, Fh, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs, SliceSource,
    WriteArgs, WriteBuf,
};
use defuse_uhs::{Uhs, UhsOptions};

/// The system allocator with a counter of allocations and reallocations of each thread.
struct CountedAllocator;

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is the system allocator's, beside a counter of the thread.
unsafe impl GlobalAlloc for CountedAllocator {
    // SAFETY: the trait's own requirements.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.set(TAKEN.get() + 1);
        // SAFETY: the caller fulfils the requirements of the system allocator.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: see `alloc`.
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        TAKEN.set(TAKEN.get() + 1);
        // SAFETY: see `alloc`; the memory came from there.
        unsafe { System.realloc(ptr, layout, size) }
    }

    // SAFETY: see `alloc`.
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: see `alloc`; the memory came from there.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTED: CountedAllocator = CountedAllocator;

fn count_taken(run: impl FnOnce()) -> u64 {
    let before = TAKEN.get();
    run();
    TAKEN.get() - before
}

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

/// A file system in an image, which is gone with it.
struct TemporaryVolume {
    fs: Uhs,
    _image: tempfile::NamedTempFile,
}

impl TemporaryVolume {
    /// `None` if the kernel has no io_uring: then threads do the I/O.
    fn new() -> Option<TemporaryVolume> {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(64 << 20).unwrap();
        let device = FileDevice::open(image.path(), DeviceAccess::ReadWrite).unwrap();
        if !device.has_rings() {
            return None;
        }
        let device: Arc<dyn BlockDevice> = Arc::new(device);
        let mut random = fastrand::Rng::with_seed(1);
        Uhs::make(Arc::clone(&device), (0o755, 0, 0), &mut random).unwrap();
        let options = UhsOptions { commit: None, ..UhsOptions::default() };
        let (fs, problems) = Uhs::open(device, options, random).unwrap();
        assert!(problems.is_empty());
        Some(TemporaryVolume { fs, _image: image })
    }

    fn make(&self, name: &str) -> File {
        let name = Name::new(name.as_bytes()).unwrap();
        let node = NewNode::new(FileKind::Regular, 0o644, cx().caller);
        let ino = self.fs.mknod(&cx(), Ino::ROOT, name, &node).unwrap().ino;
        self.fs.open(&cx(), ino, OpenArgs::default()).unwrap();
        File { ino, fh: Fh(0) }
    }

    fn write(&self, file: File, page: u64, byte: u8) {
        let bytes = [byte; 4096];
        let mut source = SliceSource::new(&bytes);
        let args = WriteArgs { offset: page * 4096, ..WriteArgs::default() };
        let taken = self.fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source));
        assert_eq!(taken, Ok(4096));
    }

    fn sync(&self, file: File, datasync: bool) {
        self.fs.fsync(&cx(), file, datasync).unwrap();
    }
}

/// The allocations of most rounds. Tables that grow now and then count in few of them.
fn find_usual(mut rounds: Vec<u64>) -> u64 {
    rounds.sort_unstable();
    rounds[rounds.len() / 2]
}

/// A write of a page and fsync(2) took 28 allocations and 3 reallocations. The rest are the memory
/// of the page, the body and the ends of the slot, and the lists of a group.
#[test]
fn a_write_of_a_page_that_is_synced_takes_few_allocations() {
    assert_eq!(count_taken(|| drop(std::hint::black_box(vec![1u8]))), 1, "none are counted");
    let Some(volume) = TemporaryVolume::new() else {
        println!("not here: no io_uring");
        return;
    };
    let file = volume.make("file");
    for page in 0..64 {
        volume.write(file, page, 1);
    }
    volume.sync(file, false);
    let overwrite = |datasync| {
        let round = |page: u64| {
            count_taken(|| {
                volume.write(file, page * 7 % 64, page as u8);
                volume.sync(file, datasync);
            })
        };
        find_usual((0..40).map(round).collect())
    };
    let append = |datasync| {
        let round = |page: u64| {
            count_taken(|| {
                volume.write(file, 64 + page, page as u8);
                volume.sync(file, datasync);
            })
        };
        find_usual((0..40).map(round).collect())
    };
    let found = [overwrite(false), overwrite(true), append(false)];
    assert!(found.iter().all(|taken| *taken <= 8), "fsync, fdatasync, append: {found:?}");
}
