//! Reads and writes of the in-process client do not allocate from the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use defuse_direct::{
    ClientMountArgs, ClientOptions, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart,
    WorkDir,
};
use defuse_fs::FileSystem;
use defuse_memory::MemoryFileSystem;
use defuse_passthrough::Passthrough;

/// The system allocator with a counter of allocations per thread.
struct ThreadAllocations;

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is the system allocator's, beside a counter of the thread.
unsafe impl GlobalAlloc for ThreadAllocations {
    // SAFETY: the trait's own requirements.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.set(TAKEN.get() + 1);
        // SAFETY: the caller fulfils the requirements of the system allocator.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: see `alloc`.
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: see `alloc`; the memory came from there.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: ThreadAllocations = ThreadAllocations;

fn count_taken(run: impl FnOnce()) -> u64 {
    let before = TAKEN.get();
    run();
    TAKEN.get() - before
}

#[test]
fn reads_and_writes_allocate_nothing() {
    // Check that allocations are counted at all.
    assert_eq!(count_taken(|| drop(std::hint::black_box(vec![1u8]))), 1);
    let dir = tempfile::tempdir().unwrap();
    let options = defuse_passthrough::PassthroughOptions {
        credentials: defuse_passthrough::CredentialsPolicy::Restore,
        ..Default::default()
    };
    let backends: [(&str, Arc<dyn FileSystem>); 2] = [
        ("memory", Arc::new(MemoryFileSystem::new(Default::default()))),
        ("passthrough", Arc::new(Passthrough::new(dir.path(), options).unwrap())),
    ];
    let task = ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()));
    for (name, fs) in backends {
        let client = DirectClient::new(ClientOptions::default());
        client.mount(b"/data", fs, &ClientMountArgs::default()).unwrap();
        let how = OpenHow { flags: 0o102, mode: 0o644, ..OpenHow::default() };
        let file = client.open(&task, WalkStart::Cwd, b"/data/file", how).unwrap();
        let mut bytes = vec![7u8; 64 << 10];
        // The first round allocates the pages of the file, and the cells of the thread's
        // statistics.
        assert_eq!(client.pwrite(&task, &file, &bytes, 0), Ok(bytes.len()));
        let mut round = || {
            assert_eq!(client.lseek(&task, &file, 0, 0), Ok(0));
            assert_eq!(client.write(&task, &file, &bytes[..4096]), Ok(4096));
            assert_eq!(client.pwrite(&task, &file, &bytes, 0), Ok(bytes.len()));
            assert_eq!(client.read(&task, &file, &mut bytes[..4096]), Ok(4096));
            let all = bytes.len();
            assert_eq!(client.pread(&task, &file, &mut bytes, 0), Ok(all));
        };
        round();
        // Enough rounds that sampled calls were timed.
        assert_eq!(count_taken(|| (0..100).for_each(|_| round())), 0, "{name}");
    }
}
