//! The codec with the running kernel: its requests decode, and it accepts the replies. The file
//! system has one file, and answers just enough to receive further requests.

use defuse_fuse::mount::{self, MountOptions, PreparedMount};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::reply::{self, CreateOut, DirEncoder};
use defuse_wire::request::{DecodeOptions, DecodedRequest, RequestBody, RequestPayload};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, XattrFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use zerocopy::IntoBytes;

const FILE: u64 = 2;
const SUB: u64 = 3;
const OPTIONS: DecodeOptions = DecodeOptions { setxattr_ext: true, payload_in_pipe: false };

#[test]
fn requests_of_the_running_kernel_decode() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: needs root and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let options = MountOptions { default_permissions: true, ..Default::default() };
    let mounted = mount::mount(dir.path(), &options).unwrap();
    // The server owns the device: if it panics, the client gets ENOTCONN.
    let server = std::thread::spawn(move || serve(mounted));
    let client = std::panic::catch_unwind(|| client(dir.path()));
    mount::unmount(dir.path(), true).unwrap();
    let seen = server.join().unwrap();
    client.unwrap();
    use Opcode::*;
    for opcode in [
        Init,
        Lookup,
        Getattr,
        Setattr,
        Symlink,
        Mknod,
        Mkdir,
        Rmdir,
        Unlink,
        Rename2,
        Link,
        Open,
        Read,
        Write,
        Statfs,
        Release,
        Fsync,
        Setxattr,
        Getxattr,
        Listxattr,
        Removexattr,
        Flush,
        Opendir,
        Readdirplus,
        Releasedir,
        Fsyncdir,
        Getlk,
        Setlk,
        Create,
        Fallocate,
        Lseek,
        Tmpfile,
    ] {
        assert!(seen.contains(&opcode), "{} was never sent: {seen:?}", opcode.name());
    }
}

/// Makes the kernel send each kind of request. Most of them fail by design.
fn client(root: &Path) {
    use rustix::fs;
    let names: Vec<_> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["file"]);
    assert_eq!(fs::statvfs(root).unwrap().f_namemax, 255);
    let path = root.join("file");
    let mut file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
    file.rewind().unwrap();
    file.write_all(&vec![b'x'; 100_000]).unwrap();
    file.sync_all().unwrap();
    file.set_len(3).unwrap();
    let _ = file.write_at(b"y", 3);
    let _ = fs::fallocate(&file, FallocateFlags::empty(), 0, 10);
    let _ = fs::seek(&file, fs::SeekFrom::Data(0));
    let _ = fs::fcntl_lock(&file, fs::FlockOperation::NonBlockingLockShared);
    let _ = fs::flock(&file, fs::FlockOperation::NonBlockingLockExclusive);
    let _ = fs::copy_file_range(&file, Some(&mut 0), &file, Some(&mut 4096), 1);
    let query = rustix::process::Flock::from(rustix::process::FlockType::WriteLock);
    let _ = rustix::process::fcntl_getlk(&file, &query);
    assert_eq!(fs::setxattr(&path, "user.a", b"value", XattrFlags::CREATE), Err(Errno::ACCESS));
    let _ = fs::getxattr(&path, "user.a", &mut [0; 10]);
    let _ = fs::listxattr(&path, &mut [0u8; 10]);
    let _ = fs::removexattr(&path, "user.a");
    assert_eq!(std::fs::create_dir(root.join("dir")).unwrap_err().raw_os_error(), Some(13));
    let _ = symlink("target", root.join("link"));
    let _ = std::fs::hard_link(&path, root.join("hard"));
    let _ = std::fs::rename(&path, root.join("other"));
    let _ = fs::renameat_with(CWD, &path, CWD, root.join("x"), fs::RenameFlags::NOREPLACE);
    let _ = std::fs::remove_file(&path);
    let _ = std::fs::remove_dir(root.join("sub"));
    let _ = fs::mknodat(CWD, root.join("fifo"), fs::FileType::Fifo, Mode::RUSR, 0);
    std::fs::File::create(root.join("new")).unwrap();
    let _ = fs::open(root, OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR);
    let _ = fs::fsync(fs::open(root, OFlags::RDONLY, Mode::empty()).unwrap());
    let _ = fs::syncfs(&file);
}

fn serve(mounted: PreparedMount) -> BTreeSet<Opcode> {
    let mut seen = BTreeSet::new();
    let mut buf = vec![0; (1 << 20) + 4096];
    loop {
        let len = match rustix::io::read(&mounted.device, &mut buf) {
            Ok(len) => len,
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => continue,
            Err(Errno::NODEV) => return seen,
            Err(errno) => panic!("reading the device: {errno}"),
        };
        let request = DecodedRequest::parse(&buf[..len], &OPTIONS).unwrap();
        seen.insert(request.opcode);
        if !request.opcode.has_reply() {
            continue;
        }
        let unique = request.unique;
        let bytes = match answer(&request) {
            Ok(body) => [reply::header(unique, body.len()).as_bytes(), &body].concat(),
            Err(errno) => reply::error(unique, errno).as_bytes().to_vec(),
        };
        match rustix::io::write(&mounted.device, &bytes) {
            // The caller was interrupted, or the session has ended.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(errno) => panic!("{} is refused: {errno}", request.opcode.name()),
        }
    }
}

fn answer(request: &DecodedRequest<'_>) -> Result<Vec<u8>, Errno> {
    let bytes = |out: &dyn AsRef<[u8]>| Ok(out.as_ref().to_vec());
    let open = abi::OpenOut { fh: 1, ..Default::default() };
    match request.body {
        RequestBody::Init(init) => bytes(&init_out(&init).as_bytes()),
        RequestBody::Lookup { name: b"file" } if request.nodeid == 1 => {
            bytes(&entry(FILE).as_bytes())
        }
        RequestBody::Lookup { name: b"sub" } => bytes(&entry(SUB).as_bytes()),
        RequestBody::Lookup { .. } => Err(Errno::NOENT),
        RequestBody::Getattr(_) | RequestBody::Setattr(_) => {
            let attr = attr(request.nodeid);
            bytes(&abi::AttrOut { attr, ..Default::default() }.as_bytes())
        }
        RequestBody::Open(_) | RequestBody::Opendir(_) => bytes(&open.as_bytes()),
        RequestBody::Create { name, ext, .. } => {
            assert_eq!(name, b"new");
            assert_eq!(ext.groups().len(), 0);
            bytes(&CreateOut { entry: entry(FILE), open }.as_bytes())
        }
        RequestBody::Read(args) => bytes(&&b"hello"[args.offset.min(5) as usize..]),
        RequestBody::Write { args, data: RequestPayload::Memory(data) } => {
            assert!(data.iter().all(|&byte| byte == b'x') || data == b"y");
            bytes(&abi::WriteOut { size: args.size, padding: 0 }.as_bytes())
        }
        RequestBody::Readdir(args) | RequestBody::Readdirplus(args) => {
            let mut buf = vec![0; args.size as usize];
            let mut dir = DirEncoder::new(&mut buf);
            if args.offset == 0 {
                match request.opcode {
                    Opcode::Readdirplus => dir.push_plus(b"file", 1, &entry(FILE)).unwrap(),
                    _ => dir.push(b"file", FILE, 1, 8).unwrap(),
                }
            }
            let len = dir.len();
            Ok(buf[..len].to_vec())
        }
        RequestBody::Statfs => {
            let st = abi::Kstatfs { namelen: 255, bsize: 4096, ..Default::default() };
            bytes(&abi::StatfsOut { st }.as_bytes())
        }
        RequestBody::Setxattr { name, value, .. } => {
            assert_eq!((name, value), (&b"user.a"[..], &b"value"[..]));
            Err(Errno::ACCESS)
        }
        RequestBody::Release(_)
        | RequestBody::Releasedir(_)
        | RequestBody::Flush(_)
        | RequestBody::Fsync(_) => Ok(Vec::new()),
        _ => Err(Errno::ACCESS),
    }
}

fn init_out(init: &abi::InitIn) -> abi::InitOut {
    let flags = abi::FUSE_BIG_WRITES
        | abi::FUSE_DO_READDIRPLUS
        | abi::FUSE_POSIX_LOCKS
        | abi::FUSE_FLOCK_LOCKS
        | abi::FUSE_SETXATTR_EXT
        | abi::FUSE_MAX_PAGES
        | abi::FUSE_HANDLE_KILLPRIV_V2
        | abi::FUSE_INIT_EXT
        | abi::FUSE_SECURITY_CTX
        | abi::FUSE_CREATE_SUPP_GROUP;
    let offered = u64::from(init.flags) | u64::from(init.flags2) << 32;
    let flags = flags & offered;
    assert_ne!(flags & abi::FUSE_SETXATTR_EXT, 0, "older than Linux 5.12: {init:?}");
    abi::InitOut {
        major: abi::FUSE_KERNEL_VERSION,
        minor: init.minor.min(abi::FUSE_KERNEL_MINOR_VERSION),
        max_readahead: init.max_readahead,
        flags: flags as u32,
        flags2: (flags >> 32) as u32,
        max_write: 65536,
        max_pages: 16,
        time_gran: 1,
        ..Default::default()
    }
}

fn attr(nodeid: u64) -> abi::Attr {
    let (mode, nlink, size) = if nodeid == FILE { (0o100644, 1, 5) } else { (0o040755, 2, 0) };
    abi::Attr { ino: nodeid, mode, nlink, size, blksize: 4096, ..Default::default() }
}

fn entry(nodeid: u64) -> abi::EntryOut {
    abi::EntryOut { nodeid, attr: attr(nodeid), ..Default::default() }
}
