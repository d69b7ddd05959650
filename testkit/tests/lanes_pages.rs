//! Cached pages that a server shares by memory: what clients read of each other's changes, and who
//! gets them.

mod users;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use defuse_cache::PolicyKind;
use defuse_connection::PageSource;
use defuse_fs::{
    Caller, Context, Errno, Fallocate, Figure, File, FileKind, FileSystem, Ino, Name, NewNode,
    OpenArgs, OpenFlags, ReadArgs, ReadBuf, ReleaseArgs, SetAttr, SliceSink, SliceSource,
    WriteArgs, WriteBuf,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_ring::pages::{MOST_FRAMES, PageReader};
use defuse_shared::{LaneOffers, PagedFileSystem, PagedOptions, PartDivision};
use defuse_socket::{AdmissionPolicy, ServerOptions, SocketServer};

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
    let filled = out.filled_len();
    bytes.truncate(filled);
    bytes
}

fn resize(fs: &dyn FileSystem, file: File, size: u64) {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    fs.setattr(&cx(), file.ino, Some(file.fh), &set).unwrap();
}

fn make_paged(options: PagedOptions) -> Arc<PagedFileSystem> {
    PagedFileSystem::wrap(Arc::new(MemoryFileSystem::new(MemoryOptions::default())), options)
        .unwrap()
}

/// Users who may connect, beside root.
const USERS: [u32; 2] = [4321, 4322];

/// Runs `test` with a function that connects to a server.
fn serve(options: PagedOptions, test: impl FnOnce(&(dyn Fn() -> RemoteClient + Sync))) {
    let dir = tempfile::tempdir().unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open).unwrap();
    let path = dir.path().join("socket");
    let paged = make_paged(options);
    let pages = Some(Arc::clone(&paged) as _);
    let lanes = Some(Arc::new(LaneOffers::default()) as _);
    let admission = AdmissionPolicy::Users(USERS.to_vec());
    let options = ServerOptions { admission, lanes, pages, ..ServerOptions::default() };
    let server = SocketServer::bind(&path, paged, options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let run = || test(&|| connect(&path));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        server.shut_down();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn connect(path: &Path) -> RemoteClient {
    let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    RemoteClient::connect(path, options).unwrap()
}

/// Reads until the client has the pages of the file.
fn warm(client: &RemoteClient, file: File, len: usize) {
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
        assert_eq!(figure(&client.figures(), "page_reads"), after.page_reads);
        // Requests, bells and sleeps are all that needs the kernel.
        assert_eq!(
            (after.requests, after.bells, after.sleeps),
            (before.requests, before.bells, before.sleeps)
        );
    });
}

/// The pages behind the end took the frames of the file's pages, so that it was never read from
/// them.
#[test]
fn a_file_is_read_from_its_pages_by_reads_that_are_longer_than_it_is() {
    serve(PagedOptions::default(), |connect| {
        let client = connect();
        let file = create(&client, "file");
        let bytes: Vec<u8> = (0..50_000_u32).map(|at| (at / 5) as u8).collect();
        write(&client, file, 0, &bytes);
        let long = || assert!(read(&client, file, 0, 1 << 20) == bytes);
        (0..12).for_each(|_| long());
        let reads = || client.lane_counts().unwrap().page_reads;
        let before = reads();
        (0..10).for_each(|_| long());
        assert_eq!(reads(), before + 10);
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

/// Each page holds one number. A reader sees no number that is older than one that was acknowledged
/// before it began, or than one that it has seen, and no page of two numbers.
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

/// Reads see bytes that another client stores through a mapping at once, as before there were
/// pages. The figures of a part, or of everything.
fn figure(figures: &[Figure], name: &str) -> u64 {
    figures.iter().find(|figure| figure.name == name).unwrap_or_else(|| panic!("{name}")).value
}

#[test]
fn figures_tell_of_the_pages_of_each_part_and_of_nothing_after_the_last_close() {
    let parts = PartDivision {
        count: 2,
        of: Arc::new(|ino| Some(ino.0 as usize % 2)),
        without: Vec::new(),
    };
    let memory = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
    let fs = PagedFileSystem::wrap_parts(memory, PagedOptions::default(), parts).unwrap();
    let (one, other) = (create(&*fs, "one"), create(&*fs, "other"));
    let (part, beside) = (one.ino.0 as usize % 2, other.ino.0 as usize % 2);
    assert_ne!(part, beside, "the numbers of the files are consecutive");
    for file in [one, other] {
        write(&*fs, file, 0, &[7; 3 * 4096]);
    }
    fs.pages(one.ino, 0).unwrap();
    (0..2).for_each(|_| assert_eq!(read(&*fs, one, 0, 3 * 4096).len(), 3 * 4096));
    write(&*fs, one, 0, &[8; 10]);
    read(&*fs, one, 0, 10);
    let figures = fs.figures_of(part);
    for (name, value) in [
        ("pages_files", 1),
        ("pages_used", 64 << 10),
        ("pages_requests", 3),
        ("pages_filled", 4 * 4096),
        ("pages_changes", 1),
        ("pages_groups_evicted", 0),
    ] {
        assert_eq!(figure(&figures, name), value, "{name}");
    }
    assert!(fs.figures_of(beside).iter().all(|figure| figure.value == 0));
    // Parts are shown by themselves, so that no sum has them twice.
    assert!(fs.figures().iter().any(|figure| figure.name == "pages_limit"));
    assert!(fs.figures().iter().all(|figure| figure.name != "pages_used"));
    fs.release(&cx(), one, ReleaseArgs::default()).unwrap();
    let after = fs.figures_of(part);
    assert_eq!((figure(&after, "pages_files"), figure(&after, "pages_used")), (0, 0));
    assert_eq!(figure(&after, "pages_filled"), 4 * 4096);
}

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
    let fs = make_paged(PagedOptions::default());
    let file = create(&*fs, "file");
    write(&*fs, file, 0, b"of the first opening");
    let second = open(&*fs, "file", 0);
    let kept = PageReader::from_fd(fs.pages(file.ino, 0).unwrap()).unwrap();
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

/// The bytes of the smallest memory for pages.
const LEAST: u64 = PagedOptions::LEAST;

/// Heads of files cannot leave memory, so that their number is bounded. These have 8 KiB each.
#[test]
fn a_user_takes_no_more_memory_for_heads_than_its_share() {
    let fs = make_paged(PagedOptions { bytes: LEAST, ..PagedOptions::default() });
    let files: Vec<File> = (0..24).map(|at| create(&*fs, &format!("file {at}"))).collect();
    let takes = |at: usize, uid| fs.pages(files[at].ino, uid).map(drop);
    (0..8).for_each(|at| assert_eq!(takes(at, 1), Ok(())));
    assert_eq!(takes(8, 1), Err(Errno::ENOMEM), "the share of the user");
    assert_eq!((takes(0, 1), takes(1, 2)), (Ok(()), Ok(())), "what is there costs nothing");
    (8..16).for_each(|at| assert_eq!(takes(at, 2), Ok(())));
    assert_eq!(takes(16, 3), Err(Errno::ENOMEM), "the share of all");
    fs.release(&cx(), files[0], ReleaseArgs::default()).unwrap();
    assert_eq!(takes(16, 3), Ok(()));
    resize(&*fs, files[16], 1 << 40);
    assert!(defuse_ring::pages::bytes_of(MOST_FRAMES) < 17 << 20);
}

/// The kernel gives a frame memory when a client touches it, whether the server has filled it or
/// not.
#[test]
fn clients_that_touch_empty_frames_take_a_bounded_multiple_of_the_memory() {
    let fs = make_paged(PagedOptions { bytes: LEAST, ..PagedOptions::default() });
    let files: Vec<File> = (0..64).map(|at| create(&*fs, &format!("file {at}"))).collect();
    files.iter().for_each(|file| resize(&*fs, *file, 300 << 10));
    let touch = |uid| {
        let pages = files.iter().filter_map(|file| fs.pages(file.ino, uid).ok());
        pages
            .map(|fd| PageReader::from_fd(fd).unwrap())
            .inspect(PageReader::touch)
            .collect::<Vec<_>>()
    };
    let of_one = touch(1);
    let taken = fs.bytes_in_use();
    // They are more than the memory that the server fills, and no more than a user may have.
    assert!((LEAST + 1..=2 * LEAST).contains(&taken), "{taken}");
    let of_all: Vec<PageReader> = (2..6).flat_map(touch).collect();
    assert!(of_one.len() < of_all.len() && fs.bytes_in_use() <= 4 * LEAST, "{}", fs.bytes_in_use());
    // Others read and write as ever.
    let own = create(&*fs, "own");
    write(&*fs, own, 0, b"data");
    assert_eq!(read(&*fs, own, 0, 4), b"data");
    // With the last close the server gives everything back. A client that touches it then takes
    // memory of its own.
    files.iter().for_each(|file| fs.release(&cx(), *file, ReleaseArgs::default()).unwrap());
    assert_eq!(fs.bytes_in_use(), 0);
}

/// Pages of files that are several times as long as the memory, each with its number in all words.
const FILES: usize = 12;
const FILE_PAGES: u64 = 32;

fn number(file: usize, page: u64) -> u64 {
    ((file as u64) << 32 | page) << 16
}

fn make_filled(fs: &dyn FileSystem) -> Vec<File> {
    let make = |file: usize| {
        let made = create(fs, &format!("file {file}"));
        for page in 0..FILE_PAGES {
            write(fs, made, page * 4096, &number(file, page).to_ne_bytes().repeat(512));
        }
        made
    };
    (0..FILES).map(make).collect()
}

#[test]
fn pages_of_many_files_stay_within_their_memory_and_what_is_read_is_right() {
    for (policy, kind) in PolicyKind::ALL {
        let fs = make_paged(PagedOptions { bytes: LEAST, policy: kind });
        let files = make_filled(&*fs);
        // Two users, each with its share of the heads.
        let reader = |(at, file): (usize, &File)| {
            PageReader::from_fd(fs.pages(file.ino, at as u32 % 2).unwrap()).unwrap()
        };
        let readers: Vec<PageReader> = files.iter().enumerate().map(reader).collect();
        let mut random = fastrand::Rng::with_seed(5);
        let (mut out, mut by_loads) = ([0; 4096], 0);
        for round in 0..4000 {
            // Some files are used more than others.
            let file = random.usize(..FILES).min(random.usize(..FILES));
            let page = random.u64(..FILE_PAGES);
            let expected = number(file, page).to_ne_bytes().repeat(512);
            if readers[file].read(page * 4096, &mut out) == Some(4096) {
                by_loads += 1;
                assert!(out[..] == expected, "{policy}: round {round}");
            } else {
                // A group of pages at once.
                let bytes = read(&*fs, files[file], page / 16 * 65536, 65536);
                let at = page as usize % 16 * 4096;
                assert!(bytes[at..at + 4096] == expected, "{policy}");
                assert!(fs.bytes_in_use() <= LEAST, "{policy}: {}", fs.bytes_in_use());
            }
        }
        assert!(by_loads > 1000, "{policy}: pages are of use: {by_loads}");
        assert!(fs.bytes_in_use() > LEAST / 2, "{policy}: memory is used");
        // Changes and closing leave the rest in order.
        resize(&*fs, files[0], 0);
        assert_eq!(read(&*fs, files[0], 0, 4096), []);
        assert_eq!(readers[0].read(0, &mut out), Some(0));
        files.iter().for_each(|file| fs.release(&cx(), *file, ReleaseArgs::default()).unwrap());
        assert_eq!(fs.bytes_in_use(), 0, "{policy}");
        assert!(readers.iter().all(|reader| reader.read(0, &mut out).is_none()));
    }
}

/// A reader sees no number that is older than an acknowledged one, although pages come and go all
/// the time.
#[test]
fn two_clients_read_what_was_written_while_pages_leave_their_memory() {
    serve(PagedOptions { bytes: LEAST, ..PagedOptions::default() }, |connect| {
        let maker = connect();
        make_filled(&maker);
        let acknowledged: Vec<AtomicU64> =
            (0..FILES as u64 * FILE_PAGES).map(|_| AtomicU64::new(0)).collect();
        let over = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let (acknowledged, over) = (&acknowledged, &over);
            scope.spawn(move || {
                let open = |file| open(&maker, &format!("file {file}"), OpenFlags::RDWR);
                let files: Vec<File> = (0..FILES).map(open).collect();
                let mut random = fastrand::Rng::with_seed(8);
                for round in 1..=3000_u64 {
                    let (file, page) = (random.usize(..FILES), random.u64(..FILE_PAGES));
                    let new = number(file, page) + round;
                    write(&maker, files[file], page * 4096, &new.to_ne_bytes().repeat(512));
                    let at = file * FILE_PAGES as usize + page as usize;
                    acknowledged[at].store(round, Ordering::SeqCst);
                }
                over.store(1, Ordering::SeqCst);
            });
            for seed in 0..2 {
                let client = connect();
                scope.spawn(move || {
                    let open = |file| open(&client, &format!("file {file}"), 0);
                    let files: Vec<File> = (0..FILES).map(open).collect();
                    let mut random = fastrand::Rng::with_seed(seed);
                    let mut rounds = 0;
                    while over.load(Ordering::SeqCst) == 0 || rounds < 2000 {
                        let (file, page) = (random.usize(..FILES), random.u64(..FILE_PAGES));
                        let at = file * FILE_PAGES as usize + page as usize;
                        let least = number(file, page) + acknowledged[at].load(Ordering::SeqCst);
                        let bytes = read(&client, files[file], page * 4096, 4096);
                        let first = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
                        assert!(bytes == first.to_ne_bytes().repeat(512), "mixed");
                        assert!(first >= least && first < least + 3001, "{first} after {least}");
                        rounds += 1;
                    }
                    assert!(client.lane_counts().unwrap().page_reads > 0);
                });
            }
        });
    });
}

/// One user reads ever other pages, by many processes, to have the memory for itself.
#[test]
fn a_user_that_reads_everything_displaces_no_pages_that_others_share() {
    for kind in [PolicyKind::Lru, PolicyKind::default()] {
        let fs = make_paged(PagedOptions { bytes: 3 * LEAST, policy: kind });
        let as_user = |uid, pid, file: File, page: u64| {
            let mut bytes = [0; 4096];
            let mut sink = SliceSink::new(&mut bytes);
            let args = ReadArgs { offset: page * 4096, ..ReadArgs::default() };
            let by = Context::new(Caller { uid, gid: 0, pid });
            fs.read(&by, file, args, &mut ReadBuf::new(&mut sink, 4096)).unwrap();
        };
        let files = make_filled(&*fs);
        files.iter().for_each(|file| drop(fs.pages(file.ino, 3).unwrap()));
        // 2.6 MiB are 42 groups of 16 pages. Users 1 and 2 share five files, 10 groups.
        for page in 0..FILE_PAGES {
            (0..5).for_each(|file| as_user(1 + (page / 16) as u32, 1, files[file], page));
        }
        let big = create(&*fs, "big");
        write(&*fs, big, 0, &vec![1; 2 << 20]);
        fs.pages(big.ino, 3).unwrap();
        for round in 0..4 {
            for page in 0..512 {
                as_user(3, round * 512 + page as u32, big, page);
            }
            (5..FILES).for_each(|file| {
                (0..FILE_PAGES).for_each(|page| as_user(3, round, files[file], page));
            });
        }
        assert!(figure(&fs.figures(), "pages_groups_evicted") > 0, "{kind:?}: memory was short");
        let filled = || figure(&fs.figures(), "pages_filled");
        let before = filled();
        for page in 0..FILE_PAGES {
            (0..5).for_each(|file| as_user(1 + (page / 16) as u32, 1, files[file], page));
        }
        assert_eq!(filled(), before, "{kind:?}: pages of users 1 and 2 have left");
        assert!(fs.bytes_in_use() <= 3 * LEAST);
    }
}

/// Hidden pages are in memory: a reader that requests them needs no file system below, and no
/// device. A change, also one of attributes, lets it read again, so that the time of the last
/// access becomes new.
#[test]
fn pages_that_were_hidden_are_answered_from_memory_until_the_file_has_changed() {
    let reads = Arc::new(ReadCounter {
        inner: MemoryFileSystem::new(MemoryOptions::default()),
        reads: 0.into(),
    });
    let options = PagedOptions { bytes: LEAST, ..PagedOptions::default() };
    let fs = PagedFileSystem::wrap(Arc::clone(&reads) as _, options).unwrap();
    let files = make_filled(&*fs);
    let readers: Vec<PageReader> = (0..)
        .zip(&files)
        .map(|(at, file)| PageReader::from_fd(fs.pages(file.ino, at % 2).unwrap()).unwrap())
        .collect();
    let count = || reads.reads.load(Ordering::SeqCst);
    let (mut answered, mut again) = (0, 0);
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..3000 {
        let file = random.usize(..FILES).min(random.usize(..FILES));
        let page = random.u64(..FILE_PAGES);
        let (offset, mut out) = (page * 4096 + 100, [0; 200]);
        if readers[file].read(offset, &mut out).is_some() {
            continue;
        }
        let missed = || figure(&fs.figures(), "pages_groups_missed");
        let before = (missed(), figure(&fs.figures(), "pages_filled"), count());
        let changes = round % 3 == 0;
        if changes {
            let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
            fs.setattr(&cx(), files[file].ino, None, &set).unwrap();
        }
        let bytes = read(&*fs, files[file], offset, 200);
        assert_eq!(bytes, &number(file, page).to_ne_bytes().repeat(512)[100..300]);
        let was_there = figure(&fs.figures(), "pages_filled") == before.1;
        if missed() > before.0 && was_there {
            if changes {
                assert_eq!(count(), before.2 + 1, "the file system reads after a change");
                again += 1;
            } else {
                answered += u32::from(count() == before.2);
            }
        }
    }
    assert!(answered > 50 && again > 50, "{answered} and {again}");
}

/// A file system that counts its reads.
struct ReadCounter {
    inner: MemoryFileSystem,
    reads: AtomicU64,
}

impl FileSystem for ReadCounter {
    defuse_fs::delegate!(to inner, except read);

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> defuse_fs::Result<()> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.inner.read(cx, file, args, out)
    }
}

/// Runs a part of a test as another user.
fn as_user<T: Send>(uid: u32, part: impl FnOnce(&Context<'static>) -> T + Send) -> T {
    users::as_user(uid, || part(&Context::new(Caller { uid, gid: uid, pid: 1 })))
}

/// An open file stays open for reading, as natively. Its pages are no way around that for any other
/// client.
#[test]
fn who_has_the_pages_of_a_file_reads_it_after_chmod_and_a_new_open_is_refused() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    serve(PagedOptions::default(), |connect| {
        let owner = connect();
        let file = create(&owner, "file");
        write(&owner, file, 0, &[1; 9000]);
        let read = |client: &RemoteClient, cx: &Context<'_>, file: File| {
            let mut bytes = vec![0; 9000];
            let mut sink = SliceSink::new(&mut bytes);
            let mut out = ReadBuf::new(&mut sink, 9000);
            client.read(cx, file, ReadArgs::default(), &mut out).map(|()| bytes[8999])
        };
        let open = |client: &RemoteClient, cx: &Context<'_>| {
            let ino = client.lookup(cx, Ino::ROOT, name("file")).unwrap().ino;
            client.open(cx, ino, args(0)).map(|opened| File { ino, fh: opened.fh })
        };
        let (reader, seen) = as_user(USERS[0], |cx| {
            let reader = connect();
            let seen = open(&reader, cx).unwrap();
            (0..12).for_each(|_| assert_eq!(read(&reader, cx, seen), Ok(1)));
            (reader, seen)
        });
        let by_pages = || reader.lane_counts().unwrap().page_reads;
        assert!(by_pages() > 0);
        let set = SetAttr { perm: Some(0), ..SetAttr::default() };
        owner.setattr(&cx(), file.ino, None, &set).unwrap();
        as_user(USERS[0], |cx| {
            let before = by_pages();
            assert_eq!((read(&reader, cx, seen), by_pages()), (Ok(1), before + 1));
            assert_eq!(open(&reader, cx).err(), Some(Errno::EACCES));
        });
        as_user(USERS[1], |cx| {
            let stranger = connect();
            assert_eq!(open(&stranger, cx).err(), Some(Errno::EACCES));
            let tries = (0..20).map(|_| read(&stranger, cx, seen));
            assert!(tries.into_iter().all(|got| got.is_err()), "by the open file of another user");
            assert_eq!(stranger.lane_counts().unwrap().page_reads, 0);
        });
        // The pages still belong to the file.
        write(&owner, file, 0, &[2; 9000]);
        as_user(USERS[0], |cx| {
            (0..3).for_each(|_| assert_eq!(read(&reader, cx, seen), Ok(2)));
            let before = by_pages();
            assert_eq!((read(&reader, cx, seen), by_pages()), (Ok(2), before + 1));
        });
    });
}

/// A client that has the file open for writing only, or not at all, gets none of its pages.
#[test]
fn pages_need_a_file_that_is_open_for_reading() {
    use defuse_connection::{PeerConnection, PeerCredentials, ServiceQuotas, ServiceState};
    let fs: Arc<dyn FileSystem> = make_paged(PagedOptions::default());
    let service = ServiceState::new(ServiceQuotas::default(), || ());
    let user = |uid| PeerCredentials { pid: 1, uid, groups: vec![uid] };
    let root = PeerConnection::new(Arc::clone(&fs), Arc::clone(&service), user(0));
    let file = create(&root, "secret");
    let set = SetAttr { perm: Some(0o622), ..SetAttr::default() };
    root.setattr(&cx(), file.ino, None, &set).unwrap();
    let stranger = PeerConnection::new(fs, service, user(7));
    let own = Context::new(Caller { uid: 7, gid: 7, pid: 1 });
    assert_eq!(stranger.may_read(&own, file), Err(Errno::ESTALE));
    let ino = stranger.lookup(&own, Ino::ROOT, name("secret")).unwrap().ino;
    assert_eq!(stranger.may_read(&own, file), Err(Errno::EBADF));
    let fh = stranger.open(&own, ino, args(OpenFlags::WRONLY)).unwrap().fh;
    assert_eq!(stranger.may_read(&own, File { ino, fh }), Err(Errno::EACCES));
    assert_eq!(stranger.may_read(&cx(), File { ino, fh }), Err(Errno::EPERM));
    assert_eq!(root.may_read(&cx(), file), Ok(()));
}
