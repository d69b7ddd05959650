//! Cached pages that a server shares by memory: what clients read of each other's changes, and who gets them.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use defuse_connection::PageSource;
use defuse_fs::{
    Caller, Context, Errno, Fallocate, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs,
    OpenFlags, ReadArgs, ReadBuf, ReleaseArgs, SetAttr, SliceSink, SliceSource, WriteArgs,
    WriteBuf,
};
use defuse_memory::{Memory, Options};
use defuse_remote::{LaneUse, Remote, RemoteOptions};
use defuse_ring::pages::{MOST_FRAMES, PageReader};
use defuse_shared::{Paged, PagedOptions, Rings};
use defuse_socket::{Server, ServerOptions};

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

fn args(flags: u32) -> OpenArgs {
    OpenArgs { flags: OpenFlags(flags), kill_suidgid: false }
}

fn create(fs: &dyn FileSystem, text: &str) -> File {
    let node = NewNode::new(FileKind::Regular, 0o644, cx().caller);
    let args = args(OpenFlags::RDWR | OpenFlags::CREAT);
    let (entry, opened) = fs.create(&cx(), Ino::ROOT, name(text), &node, args).unwrap();
    File { ino: entry.ino, fh: opened.fh }
}

fn open(fs: &dyn FileSystem, text: &str, flags: u32) -> File {
    let ino = fs.lookup(&cx(), Ino::ROOT, name(text)).unwrap().ino;
    File { ino, fh: fs.open(&cx(), ino, args(flags)).unwrap().fh }
}

fn write(fs: &dyn FileSystem, file: File, offset: u64, bytes: &[u8]) {
    let args = WriteArgs { offset, flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    let written = fs.write(&cx(), file, args, &mut WriteBuf::new(&mut SliceSource::new(bytes)));
    assert_eq!(written, Ok(bytes.len()));
}

fn read(fs: &dyn FileSystem, file: File, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, len);
    fs.read(&cx(), file, ReadArgs { offset, ..ReadArgs::default() }, &mut out).unwrap();
    let filled = out.filled();
    bytes.truncate(filled);
    bytes
}

fn resize(fs: &dyn FileSystem, file: File, size: u64) {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    fs.setattr(&cx(), file.ino, Some(file.fh), &set).unwrap();
}

fn paged(options: PagedOptions) -> Arc<Paged> {
    Paged::over(Arc::new(Memory::new(Options::default())), options).unwrap()
}

/// Runs `test` with a function that connects to a server.
fn serve(options: PagedOptions, test: impl FnOnce(&dyn Fn() -> Remote)) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let paged = paged(options);
    let pages = Some(Arc::clone(&paged) as _);
    let lines = Some(Arc::new(Rings::default()) as _);
    let options = ServerOptions { lines, pages, ..ServerOptions::default() };
    let server = Server::bind(&path, paged, options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let run = || test(&|| connect(&path));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        server.shut_down();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn connect(path: &Path) -> Remote {
    let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    Remote::connect(path, options).unwrap()
}

/// Reads until the client has the pages of the file.
fn warm(client: &Remote, file: File, len: usize) {
    for _ in 0..12 {
        read(client, file, 0, len);
    }
}

#[test]
fn a_warm_read_makes_no_request_and_wakes_nobody() {
    serve(PagedOptions::default(), |connect| {
        let client = connect();
        let file = create(&client, "file");
        let bytes: Vec<u8> = (0..40_000_u32).map(|at| (at / 5) as u8).collect();
        write(&client, file, 0, &bytes);
        warm(&client, file, bytes.len());
        let before = client.lane_counts().unwrap();
        for round in 0..500_u64 {
            let at = (round * 73) as usize % 39_000;
            assert_eq!(read(&client, file, at as u64, 4096), bytes[at..(at + 4096).min(40_000)]);
        }
        let after = client.lane_counts().unwrap();
        assert_eq!(after.page_reads - before.page_reads, 500);
        // Requests, bells and sleeps are all that needs the kernel.
        assert_eq!(
            (after.requests, after.bells, after.sleeps),
            (before.requests, before.bells, before.sleeps)
        );
    });
}

#[test]
fn each_change_of_another_client_is_read_as_soon_as_it_is_answered() {
    serve(PagedOptions::default(), |connect| {
        let (one, other) = (connect(), connect());
        let file = create(&one, "file");
        write(&one, file, 0, &[1; 20_000]);
        let seen = open(&other, "file", 0);
        let changes: [(&str, &dyn Fn()); 6] = [
            ("overwritten", &|| write(&one, file, 5000, &[2; 3000])),
            ("longer", &|| write(&one, file, 19_000, &[3; 9000])),
            ("shorter", &|| resize(&one, file, 4500)),
            ("longer by a hole", &|| resize(&one, file, 30_000)),
            ("with a hole punched", &|| {
                let punch = Fallocate { mode: 3, offset: 100, length: 4000 };
                one.fallocate(&cx(), file, punch).unwrap();
            }),
            ("emptied at an open", &|| {
                open(&one, "file", OpenFlags::RDWR | OpenFlags::TRUNC);
            }),
        ];
        for (what, change) in changes {
            warm(&other, seen, 40_000);
            let before = other.lane_counts().unwrap().page_reads;
            read(&other, seen, 0, 100);
            assert_eq!(other.lane_counts().unwrap().page_reads, before + 1, "before {what}");
            change();
            let plain = connect();
            let expected = read(&plain, open(&plain, "file", 0), 0, 40_000);
            assert!(read(&other, seen, 0, 40_000) == expected, "{what}");
        }
    });
}

/// Each page holds one number. A reader sees no number that is older than one that was acknowledged before it
/// began, or than one that it has seen, and no page of two numbers.
#[test]
fn readers_never_see_old_or_mixed_pages_while_writers_write_and_truncate() {
    const PAGES: usize = 4;
    serve(PagedOptions::default(), |connect| {
        let maker = connect();
        let file = create(&maker, "file");
        let page = |number: u64| number.to_ne_bytes().repeat(512);
        (0..PAGES as u64).for_each(|at| write(&maker, file, at * 4096, &page(0)));
        let acknowledged: [AtomicU64; PAGES] = Default::default();
        let over = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let (acknowledged, over) = (&acknowledged, &over);
            for writer in 0..2 {
                let client = connect();
                scope.spawn(move || {
                    let file = open(&client, "file", OpenFlags::RDWR);
                    for number in 1..=1500_u64 {
                        for at in (0..PAGES).filter(|at| at % 2 == writer) {
                            write(&client, file, at as u64 * 4096, &page(number));
                            acknowledged[at].store(number, Ordering::SeqCst);
                        }
                        if number % 8 == 0 {
                            // Beyond the pages: the length changes all the time.
                            resize(&client, file, 4096 * PAGES as u64 + number);
                        }
                        std::thread::yield_now();
                    }
                    over.fetch_add(1, Ordering::SeqCst);
                });
            }
            for _ in 0..2 {
                let client = connect();
                scope.spawn(move || {
                    let file = open(&client, "file", 0);
                    let mut last = [0; PAGES];
                    let mut random = fastrand::Rng::with_seed(3);
                    while over.load(Ordering::SeqCst) < 2 {
                        let at = random.usize(..PAGES);
                        let least = acknowledged[at].load(Ordering::SeqCst).max(last[at]);
                        let bytes = read(&client, file, at as u64 * 4096, 4096);
                        let numbers =
                            bytes.chunks(8).map(|n| u64::from_ne_bytes(n.try_into().unwrap()));
                        let numbers: Vec<u64> = numbers.collect();
                        assert!(numbers.iter().all(|&n| n == numbers[0]) && numbers.len() == 512);
                        assert!(numbers[0] >= least, "page {at}: {} after {least}", numbers[0]);
                        last[at] = numbers[0];
                    }
                    let counts = client.lane_counts().unwrap();
                    assert!(counts.page_reads > 0, "{counts:?}");
                });
            }
        });
    });
}

/// Reads see bytes that another client stores through a mapping at once, as before there were pages.
#[test]
fn a_mapped_file_has_no_pages() {
    serve(PagedOptions::default(), |connect| {
        let (one, other) = (connect(), connect());
        let file = create(&one, "file");
        write(&one, file, 0, &[1; 8192]);
        let seen = open(&other, "file", 0);
        warm(&other, seen, 8192);
        let memory = std::fs::File::from(one.map(&cx(), file, 0..8192, true).unwrap());
        memory.write_all_at(&[2; 100], 5000).unwrap();
        assert_eq!(read(&other, seen, 5000, 101), [vec![2; 100], vec![1]].concat());
        one.unmap(&cx(), file.ino).unwrap();
    });
}

#[test]
fn pages_end_with_the_last_close_and_the_next_file_has_others() {
    let fs = paged(PagedOptions::default());
    let file = create(&*fs, "file");
    write(&*fs, file, 0, b"of the first opening");
    let second = open(&*fs, "file", 0);
    let kept = PageReader::of(fs.pages(file.ino, 0).unwrap()).unwrap();
    let mut out = [0; 20];
    assert_eq!(kept.read(0, &mut out), None, "nothing is read before the first read");
    read(&*fs, file, 0, 20);
    assert_eq!((kept.read(0, &mut out), &out), (Some(20), b"of the first opening"));
    fs.release(&cx(), file, ReleaseArgs::default()).unwrap();
    assert_eq!(kept.read(0, &mut out), Some(20));
    fs.release(&cx(), second, ReleaseArgs::default()).unwrap();
    assert_eq!(kept.read(0, &mut out), None);
    assert_eq!(fs.pages(file.ino, 0).err(), Some(Errno::ESTALE));
    let again = open(&*fs, "file", OpenFlags::RDWR);
    write(&*fs, again, 0, b"of the next");
    fs.pages(again.ino, 0).unwrap();
    read(&*fs, again, 0, 20);
    assert_eq!(kept.read(0, &mut out), None);
}

/// A file takes as much as its length, up to 16 MiB, and a user has a share.
#[test]
fn a_user_takes_no_more_memory_for_pages_than_its_share() {
    let fs = paged(PagedOptions { bytes: 300_000, bytes_of_user: 200_000 });
    let files = ["a", "b", "c", "d", "e"].map(|text| create(&*fs, text));
    let takes = |at: usize, uid| fs.pages(files[at].ino, uid).map(drop);
    assert_eq!((takes(0, 1), takes(1, 1)), (Ok(()), Ok(())));
    assert_eq!(takes(2, 1), Err(Errno::ENOMEM), "the share of the user");
    assert_eq!((takes(0, 1), takes(1, 2)), (Ok(()), Ok(())), "what is there costs nothing");
    assert_eq!((takes(2, 2), takes(3, 2)), (Ok(()), Ok(())));
    assert_eq!(takes(4, 3), Err(Errno::ENOMEM), "the share of all");
    fs.release(&cx(), files[0], ReleaseArgs::default()).unwrap();
    assert_eq!(takes(4, 3), Ok(()));
    resize(&*fs, files[4], 1 << 40);
    assert!(defuse_ring::pages::bytes_of(MOST_FRAMES) < 17 << 20);
}

/// A client that has the file open for writing only, or not at all, gets no pages of it.
#[test]
fn pages_need_a_file_that_is_open_for_reading() {
    use defuse_connection::{Connection, Credentials, Quotas, Service};
    let fs: Arc<dyn FileSystem> = paged(PagedOptions::default());
    let service = Service::new(Quotas::default(), || ());
    let user = |uid| Credentials { pid: 1, uid, groups: vec![uid] };
    let root = Connection::new(Arc::clone(&fs), Arc::clone(&service), user(0));
    let file = create(&root, "secret");
    let set = SetAttr { perm: Some(0o622), ..SetAttr::default() };
    root.setattr(&cx(), file.ino, None, &set).unwrap();
    let stranger = Connection::new(fs, service, user(7));
    let own = Context::new(Caller { uid: 7, gid: 7, pid: 1 });
    assert_eq!(stranger.may_read(&own, file), Err(Errno::ESTALE));
    let ino = stranger.lookup(&own, Ino::ROOT, name("secret")).unwrap().ino;
    assert_eq!(stranger.may_read(&own, file), Err(Errno::EBADF));
    let fh = stranger.open(&own, ino, args(OpenFlags::WRONLY)).unwrap().fh;
    assert_eq!(stranger.may_read(&own, File { ino, fh }), Err(Errno::EACCES));
    assert_eq!(stranger.may_read(&cx(), File { ino, fh }), Err(Errno::EPERM));
    assert_eq!(root.may_read(&cx(), file), Ok(()));
}
