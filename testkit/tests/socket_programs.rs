//! FUSE programs from Debian, without a mount: the files that they show and accept are compared
//! byte for byte with the directory behind them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, Context, DirBuf, DirItem, DirSink, Entry, File, FileKind, FileSystem, Ino, LockOwner,
    Name, NewNode, OpenArgs, OpenFlags, ReadArgs, ReadBuf, ReleaseArgs, SliceSink, SliceSource,
    WriteArgs, WriteBuf,
};
use defuse_remote::{FuseProgram, RemoteClient, RemoteOptions};
use tempfile::TempDir;

fn context() -> Context<'static> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Context::new(Caller { uid, gid, pid: 1 })
}

fn is_installed(program: &str) -> bool {
    let dirs = std::env::var("PATH").unwrap_or_default();
    let found =
        dirs.split(':').chain(["/usr/sbin"]).any(|dir| Path::new(dir).join(program).exists());
    if !found {
        println!("skipped: {program} is not installed");
    }
    found
}

fn start(words: &[&str]) -> RemoteClient {
    let words: Vec<OsString> = words.iter().map(OsString::from).collect();
    let program = FuseProgram::start(&words).unwrap();
    RemoteClient::start_program(
        program,
        RemoteOptions { timeout: Some(Duration::from_secs(60)), ..RemoteOptions::default() },
    )
    .unwrap()
}

/// Directories, files of many sizes, links, and names that are not ASCII.
fn sample(dir: &Path) {
    fs::create_dir_all(dir.join("a/b/c")).unwrap();
    fs::write(dir.join("empty"), b"").unwrap();
    fs::write(dir.join("a/one"), b"1").unwrap();
    fs::write(dir.join("a/b/näme with spaces"), vec![7; 4097]).unwrap();
    let large: Vec<u8> = (0..700_001_u32).map(|at| (at ^ (at >> 9)) as u8).collect();
    fs::write(dir.join("a/b/c/large"), large).unwrap();
    std::os::unix::fs::symlink("../one", dir.join("a/b/link")).unwrap();
    for number in 0..300 {
        fs::write(dir.join("a/b/c").join(format!("file number {number}")), [number as u8]).unwrap();
    }
    fs::set_permissions(dir.join("a/one"), fs::Permissions::from_mode(0o640)).unwrap();
}

/// The contents of a tree: kind and permissions, and data or target.
type TreeContents = BTreeMap<String, (FileKind, u32, Vec<u8>)>;

fn native(dir: &Path, prefix: &str, tree: &mut TreeContents) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{prefix}/{}", entry.file_name().to_str().unwrap());
        let meta = entry.metadata().unwrap();
        let mode = std::os::unix::fs::MetadataExt::mode(&meta);
        let kind = FileKind::from_mode(mode).unwrap();
        let content = match kind {
            FileKind::Regular => fs::read(entry.path()).unwrap(),
            FileKind::Symlink => {
                fs::read_link(entry.path()).unwrap().into_os_string().into_string().unwrap().into()
            }
            _ => Vec::new(),
        };
        tree.insert(name.clone(), (kind, mode & 0o7777, content));
        if kind == FileKind::Directory {
            native(&entry.path(), &name, tree);
        }
    }
}

#[derive(Default)]
struct NameListing(Vec<(Vec<u8>, u64)>);

impl DirSink for NameListing {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.0.push((item.name.to_vec(), item.next));
    }
}

fn list(client: &RemoteClient, dir: Ino) -> Vec<Vec<u8>> {
    let cx = context();
    let opened = client.opendir(&cx, dir, OpenFlags(OpenFlags::DIRECTORY)).unwrap();
    let file = File { ino: dir, fh: opened.fh };
    let (mut names, mut from) = (Vec::new(), 0);
    loop {
        let mut listing = NameListing::default();
        client.readdir(&cx, file, from, &mut DirBuf::new(&mut listing)).unwrap();
        let Some((_, next)) = listing.0.last() else { break };
        from = *next;
        names.extend(listing.0.into_iter().map(|(name, _)| name));
    }
    client.releasedir(&cx, file).unwrap();
    names.retain(|name| name != b"." && name != b"..");
    names
}

fn read(client: &RemoteClient, ino: Ino, size: u64) -> Vec<u8> {
    let cx = context();
    let opened = client.open(&cx, ino, OpenArgs::default()).unwrap();
    let file = File { ino, fh: opened.fh };
    let mut bytes = vec![0; size as usize + 10];
    let len = bytes.len();
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, len);
    client.read(&cx, file, ReadArgs::default(), &mut out).unwrap();
    let filled = out.filled_len();
    bytes.truncate(filled);
    let _ = client.flush(&cx, file, LockOwner(1));
    client.release(&cx, file, ReleaseArgs::default()).unwrap();
    bytes
}

fn walk_tree(client: &RemoteClient, dir: Ino, prefix: &str, tree: &mut TreeContents) {
    let cx = context();
    for name in list(client, dir) {
        let entry = client.lookup(&cx, dir, Name::new(&name).unwrap()).unwrap();
        let attr = entry.attr;
        let content = match attr.kind {
            FileKind::Regular => read(client, entry.ino, attr.size),
            FileKind::Symlink => client.readlink(&cx, entry.ino).unwrap(),
            _ => Vec::new(),
        };
        let name = format!("{prefix}/{}", String::from_utf8(name).unwrap());
        assert!(
            tree.insert(name.clone(), (attr.kind, attr.perm, content)).is_none(),
            "{name} twice"
        );
        if attr.kind == FileKind::Directory {
            walk_tree(client, entry.ino, &name, tree);
        }
        client.forget(entry.ino, 1);
    }
}

fn assert_same(client: &RemoteClient, dir: &Path) {
    let (mut there, mut here) = (TreeContents::new(), TreeContents::new());
    native(dir, "", &mut there);
    walk_tree(client, Ino::ROOT, "", &mut here);
    assert!(there.keys().eq(here.keys()), "{:?}\n{:?}", there.keys(), here.keys());
    for (name, value) in &there {
        assert!(here[name] == *value, "{name}: {:?} {:o}", here[name].0, here[name].1);
    }
}

/// Creates a directory and a file, writes, and checks both in the source.
fn change(client: &RemoteClient, dir: &Path) {
    let cx = context();
    let node = |kind, perm| NewNode::new(kind, perm, cx.caller);
    let made = client.mkdir(
        &cx,
        Ino::ROOT,
        Name::new(b"made").unwrap(),
        &node(FileKind::Directory, 0o755),
    );
    let made = made.unwrap();
    let name = Name::new(b"written").unwrap();
    let flags = OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL);
    let args = OpenArgs { flags, kill_suidgid: false };
    let (entry, opened) =
        client.create(&cx, made.ino, name, &node(FileKind::Regular, 0o644), args).unwrap();
    let file = File { ino: entry.ino, fh: opened.fh };
    let bytes: Vec<u8> = (0..333_333_u32).map(|at| (at % 251) as u8).collect();
    let mut source = SliceSource::new(&bytes);
    let args = WriteArgs { flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    let count = client.write(&cx, file, args, &mut WriteBuf::new(&mut source)).unwrap();
    assert_eq!(count, bytes.len());
    let _ = client.flush(&cx, file, LockOwner(1));
    client.release(&cx, file, ReleaseArgs::from_flags(flags)).unwrap();
    let to = Name::new(b"renamed").unwrap();
    client.rename(&cx, (made.ino, name), (Ino::ROOT, to), Default::default()).unwrap();
    client.forget(entry.ino, 1);
    client.rmdir(&cx, Ino::ROOT, Name::new(b"made").unwrap()).unwrap();
    client.forget(made.ino, 1);
    if dir.exists() {
        assert!(fs::read(dir.join("renamed")).unwrap() == bytes);
        assert!(!dir.join("made").exists());
    }
}

#[test]
fn squashfuse_shows_the_packed_files() {
    if !is_installed("squashfuse") || !is_installed("mksquashfs") {
        return;
    }
    let dir = TempDir::with_prefix("defuse-squash-").unwrap();
    let (source, image) = (dir.path().join("source"), dir.path().join("image"));
    sample(&source);
    let made = Command::new("mksquashfs").args([&source, &image]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    for program in ["squashfuse", "squashfuse_ll"] {
        let client = start(&[program, image.to_str().unwrap()]);
        assert_same(&client, &source);
    }
}

/// The examples of libfuse's Debian package.
const EXAMPLES: &str = "/usr/share/doc/libfuse3-dev/examples";

/// The compiled example `name` of libfuse.
fn example(name: &str, dir: &Path) -> Option<String> {
    let source = ["c", "cc"].map(|end| format!("{EXAMPLES}/{name}.{end}"));
    let Some(source) = source.iter().find(|source| Path::new(source).exists()) else {
        println!("skipped: {name}: libfuse3-dev has no such example here");
        return None;
    };
    let compiler = if source.ends_with(".cc") { "g++" } else { "gcc" };
    if !is_installed(compiler) {
        return None;
    }
    let program = dir.join(name).to_str().unwrap().to_owned();
    let args =
        ["-w", "-O1", "-D_FILE_OFFSET_BITS=64", "-I/usr/include/fuse3", "-o", &program, source];
    let libraries = ["-lfuse3", "-pthread"];
    let made = Command::new(compiler).args(args).args(libraries).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(program)
}

#[test]
fn the_hello_example_of_libfuse_says_hello() {
    let dir = TempDir::with_prefix("defuse-hello-").unwrap();
    for name in ["hello", "hello_ll"] {
        let Some(program) = example(name, dir.path()) else { return };
        let client = start(&[&program]);
        assert_eq!(list(&client, Ino::ROOT), [b"hello"]);
        let entry = client.lookup(&context(), Ino::ROOT, Name::new(b"hello").unwrap()).unwrap();
        assert_eq!(read(&client, entry.ino, entry.attr.size), b"Hello World!\n");
        assert_eq!(
            client.lookup(&context(), Ino::ROOT, Name::new(b"other").unwrap()),
            Err(defuse_fs::Errno::ENOENT)
        );
    }
}

/// The way in which an example is tested.
enum ExampleTrial {
    /// It starts with these words, has such a file in its root (a prefix of its name), and the file
    /// has these contents, if any.
    Shows(&'static [&'static str], &'static str, Option<&'static str>),
    /// It shows the directory tree of the machine.
    Mirrors,
    /// It is initially empty; the test creates, writes and reads a file.
    Keeps,
    /// Another test covers it.
    Elsewhere,
    /// It cannot work, or is no file system.
    Cannot(&'static str),
}

/// Every example of libfuse's package, including the examples of later versions.
const TRIALS: &[(&str, ExampleTrial)] = {
    use ExampleTrial::*;
    &[
        ("cuse", Cannot("a character device, which the kernel makes through /dev/cuse")),
        ("cuse_client", Cannot("no file system: it talks to `cuse`")),
        ("hello", Elsewhere),
        ("hello_ll", Elsewhere),
        ("hello_ll_uds", Cannot("it serves on a socket of its own, and takes no mount point")),
        ("invalidate_path", Shows(&[], "current_time", Some("The current time is "))),
        ("ioctl", Shows(&[], "fioc", Some(""))),
        ("ioctl_client", Cannot("no file system: it talks to `ioctl`")),
        ("ioctl_ll", Shows(&[], "fioc", Some(""))),
        ("ioctl_ll_client", Cannot("no file system: it talks to `ioctl_ll`")),
        ("memfs_ll", Keeps),
        ("notify_inval_entry", Shows(&[], "Time_is_", None)),
        ("notify_inval_inode", Shows(&[], "current_time", Some("The current time is "))),
        ("notify_prune", Cannot("it waits for the kernel to forget what it has cached")),
        // It reads back what it has stored in the kernel's page cache, and there is none.
        (
            "notify_store_retrieve",
            Shows(&["--no-notify"], "current_time", Some("The current time ")),
        ),
        ("null", Cannot("it wants a regular file for a mount point")),
        ("passthrough", Mirrors),
        ("passthrough_fh", Mirrors),
        ("passthrough_hp", Cannot("it mounts by itself, and hands out backing files")),
        ("passthrough_ll", Elsewhere),
        ("poll", Shows(&[], "0", Some("0"))),
        ("poll_client", Cannot("no file system: it talks to `poll`")),
        ("printcap", Cannot("no file system: it mounts by itself to see what the kernel can")),
        ("single_file", Cannot("a part of other examples")),
    ]
};

#[test]
fn every_example_of_libfuse_works_or_has_a_reason() {
    let Ok(all) = fs::read_dir(EXAMPLES) else {
        println!("skipped: libfuse3-dev is not installed");
        return;
    };
    let names = all.filter_map(|entry| {
        let path = entry.unwrap().path();
        let is_code = path.extension().is_some_and(|end| end == "c" || end == "cc");
        is_code.then(|| path.file_stem().unwrap().to_str().unwrap().to_owned())
    });
    let dir = TempDir::with_prefix("defuse-examples-").unwrap();
    for name in names {
        let Some((_, trial)) = TRIALS.iter().find(|(known, _)| *known == name) else {
            panic!("{name} is an example that this test does not know: say how it is tried");
        };
        let words: &[&str] = match trial {
            ExampleTrial::Cannot(why) => {
                println!("{name}: {why}");
                continue;
            }
            ExampleTrial::Elsewhere => continue,
            ExampleTrial::Shows(words, ..) => words,
            ExampleTrial::Mirrors | ExampleTrial::Keeps => &[],
        };
        let Some(program) = example(&name, dir.path()) else { return };
        let client = start(&[&[program.as_str()], words].concat());
        match trial {
            ExampleTrial::Shows(_, file, content) => expect_shown(&client, &name, file, *content),
            ExampleTrial::Mirrors => mirrors(&client, dir.path()),
            _ => change(&client, Path::new("/nonexistent")),
        }
    }
}

fn expect_shown(client: &RemoteClient, example: &str, start: &str, content: Option<&str>) {
    let names = list(client, Ino::ROOT);
    let name = names.iter().find(|name| name.starts_with(start.as_bytes()));
    let name = name.unwrap_or_else(|| panic!("{example}: {names:?}"));
    let entry = client.lookup(&context(), Ino::ROOT, Name::new(name).unwrap()).unwrap();
    assert_eq!(entry.attr.kind, FileKind::Regular, "{example}");
    if let Some(content) = content {
        let mut tries = 0;
        // A thread of `poll` fills its files, and may begin after the first read.
        let seen = loop {
            let seen = read(client, entry.ino, entry.attr.size.max(1));
            let seen = String::from_utf8_lossy(&seen).into_owned();
            tries += 1;
            if seen.starts_with(content) || tries == 40 {
                break seen;
            }
            std::thread::sleep(Duration::from_millis(300));
        };
        assert!(seen.starts_with(content), "{example}: {seen:?}");
    }
    client.forget(entry.ino, 1);
}

/// A directory of the test is present below the root, with all its contents.
fn mirrors(client: &RemoteClient, dir: &Path) {
    let source = dir.join("mirrored");
    if !source.exists() {
        sample(&source);
    }
    let mut at = Ino::ROOT;
    for part in source.canonicalize().unwrap().iter().skip(1) {
        let name = Name::new(part.as_encoded_bytes()).unwrap();
        at = client.lookup(&context(), at, name).unwrap().ino;
    }
    let (mut there, mut here) = (TreeContents::new(), TreeContents::new());
    native(&source, "", &mut there);
    walk_tree(client, at, "", &mut here);
    assert!(there == here, "{:?}\n{:?}", there.keys(), here.keys());
}

#[test]
fn the_passthrough_example_of_libfuse_reads_and_changes_its_source() {
    let dir = TempDir::with_prefix("defuse-ll-").unwrap();
    let Some(program) = example("passthrough_ll", dir.path()) else { return };
    let source = dir.path().join("source");
    sample(&source);
    let option = format!("source={},cache=never", source.display());
    let client = start(&[&program, "-o", &option]);
    assert_same(&client, &source);
    change(&client, &source);
    assert_same(&client, &source);
}

#[test]
fn gocryptfs_keeps_written_data() {
    if !is_installed("gocryptfs") {
        return;
    }
    let dir = TempDir::with_prefix("defuse-gocrypt-").unwrap();
    let (cipher, password) = (dir.path().join("cipher"), dir.path().join("password"));
    fs::create_dir(&cipher).unwrap();
    fs::write(&password, "throw-away\n").unwrap();
    let (cipher, password) = (cipher.to_str().unwrap(), password.to_str().unwrap());
    let init = ["-q", "-scryptn", "10", "-init", "-passfile", password, cipher];
    let made = Command::new("gocryptfs").args(init).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let words = ["gocryptfs", "-q", "-fg", "-passfile", password, cipher, "{}"];
    let nowhere = dir.path().join("nowhere");
    change(&start(&words), &nowhere);
    // Another process decrypts what the first one has written.
    let client = start(&words);
    let entry = client.lookup(&context(), Ino::ROOT, Name::new(b"renamed").unwrap()).unwrap();
    let bytes = read(&client, entry.ino, entry.attr.size);
    assert!(bytes == (0..333_333_u32).map(|at| (at % 251) as u8).collect::<Vec<_>>());
}

/// An sshd for one user with its own keys, on a free port.
struct SshServer {
    child: Child,
    port: u16,
    dir: TempDir,
}

impl SshServer {
    fn start() -> SshServer {
        let dir = TempDir::with_prefix("defuse-sshd-").unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for key in ["host", "user"] {
            let args = ["-q", "-t", "ed25519", "-N", "", "-f", &at(key)];
            assert!(Command::new("ssh-keygen").args(args).status().unwrap().success());
        }
        fs::copy(at("user.pub"), at("authorized")).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
             StrictModes no\nUsePAM no\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n",
            at("host"),
            at("authorized")
        );
        fs::write(at("config"), config).unwrap();
        // It refuses to start without the directory of its package's service.
        let _ = fs::create_dir_all("/run/sshd");
        let mut sshd = Command::new("/usr/sbin/sshd");
        sshd.args(["-D", "-e", "-f", &at("config")]).stderr(Stdio::null());
        let child = sshd.spawn().unwrap();
        let begun = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30), "sshd does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        SshServer { child, port, dir }
    }
}

impl Drop for SshServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn sshfs_reads_and_changes_its_source() {
    if !is_installed("sshfs") || !is_installed("sshd") || !is_installed("ssh-keygen") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: sshd is started by root only here");
        return;
    }
    let sshd = SshServer::start();
    let dir = TempDir::with_prefix("defuse-sshfs-").unwrap();
    sample(dir.path());
    // Debian's sshfs 3.7.3 refuses to read symbolic links (EPERM), on a mount as well.
    fs::remove_file(dir.path().join("a/b/link")).unwrap();
    let user = Command::new("id").arg("-un").output().unwrap().stdout;
    let user = String::from_utf8(user).unwrap();
    let source = format!("{}@127.0.0.1:{}", user.trim(), dir.path().display());
    let (port, key) = (sshd.port.to_string(), sshd.dir.path().join("user"));
    let key = format!("IdentityFile={}", key.display());
    let client = start(&[
        "sshfs",
        &source,
        "-p",
        &port,
        "-o",
        &key,
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "-o",
        "BatchMode=yes",
        "-o",
        "LogLevel=ERROR",
    ]);
    assert_same(&client, dir.path());
    change(&client, dir.path());
    assert_same(&client, dir.path());
}
