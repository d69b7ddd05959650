//! Every opcode decodes from what the kernel sends, in one piece and split;
//! everything else is an error that names its request.

use super::*;
use crate::abi::*;
use zerocopy::IntoBytes;

/// A request as the kernel lays it out: the structure, then the rest.
pub(crate) struct Sample {
    pub(crate) opcode: Opcode,
    pub(crate) op: Vec<u8>,
    pub(crate) rest: Vec<u8>,
    pub(crate) ext: Vec<u8>,
}

impl Sample {
    fn header(&self) -> InHeader {
        let len = 40 + self.op.len() + self.rest.len() + self.ext.len();
        InHeader {
            len: len as u32,
            opcode: self.opcode as u32,
            unique: 0x1234,
            nodeid: 7,
            uid: 1000,
            gid: 100,
            pid: 42,
            total_extlen: (self.ext.len() / 8) as u16,
            padding: 0,
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        [self.header().as_bytes(), &self.op, &self.rest, &self.ext].concat()
    }
}

fn sample(opcode: Opcode, op: &(impl IntoBytes + zerocopy::Immutable), rest: &[u8]) -> Sample {
    Sample { opcode, op: op.as_bytes().to_vec(), rest: rest.to_vec(), ext: Vec::new() }
}

fn bare(opcode: Opcode, rest: &[u8]) -> Sample {
    Sample { opcode, op: Vec::new(), rest: rest.to_vec(), ext: Vec::new() }
}

/// Two security contexts of odd lengths, then one group.
fn extensions() -> Vec<u8> {
    let context = |name: &[u8], value: &[u8]| {
        let header = Secctx { size: value.len() as u32, padding: 0 };
        let mut bytes = [header.as_bytes(), name, b"\0", value].concat();
        bytes.resize(rec_align(bytes.len()), 0);
        bytes
    };
    let contexts = [context(b"security.selinux", b"a:b:c\0"), context(b"security.x", b"")].concat();
    let header = SecctxHeader { size: 8 + contexts.len() as u32, nr_secctx: 2 };
    let groups = ExtHeader { size: 16, type_: FUSE_EXT_GROUPS };
    [header.as_bytes(), &contexts, groups.as_bytes(), 1u32.as_bytes(), 27u32.as_bytes()].concat()
}

/// One request of each opcode.
pub(crate) fn samples() -> Vec<Sample> {
    let write = WriteIn { fh: 3, offset: 4096, size: 5, ..Default::default() };
    let setxattr = SetxattrIn { size: 3, flags: 1, setxattr_flags: 1, padding: 0 };
    let ioctl = IoctlIn { in_size: 4, out_size: 8, cmd: 9, ..Default::default() };
    let retrieved = NotifyRetrieveIn { size: 2, ..Default::default() };
    let forgets = [ForgetOne { nodeid: 5, nlookup: 1 }, ForgetOne { nodeid: 6, nlookup: 2 }];
    let mapping = RemovemappingOne { moffset: 0, len: 4096 };
    let create = CreateIn { flags: 0o102, mode: 0o100644, umask: 0o22, open_flags: 0 };
    let mut samples = vec![
        bare(Opcode::Lookup, b"name\0"),
        sample(Opcode::Forget, &ForgetIn { nlookup: 3 }, b""),
        sample(Opcode::Getattr, &GetattrIn { getattr_flags: 1, dummy: 0, fh: 9 }, b""),
        sample(Opcode::Setattr, &SetattrIn { valid: FATTR_SIZE, ..Default::default() }, b""),
        bare(Opcode::Readlink, b""),
        bare(Opcode::Symlink, b"name\0../target\0"),
        sample(Opcode::Mknod, &MknodIn { mode: 0o10644, ..Default::default() }, b"fifo\0"),
        sample(Opcode::Mkdir, &MkdirIn { mode: 0o755, umask: 0o22 }, b"dir\0"),
        bare(Opcode::Unlink, b"name\0"),
        bare(Opcode::Rmdir, b"name\0"),
        sample(Opcode::Rename, &RenameIn { newdir: 8 }, b"old\0new\0"),
        sample(Opcode::Link, &LinkIn { oldnodeid: 8 }, b"new\0"),
        sample(Opcode::Open, &OpenIn::default(), b""),
        sample(Opcode::Read, &ReadIn { fh: 3, size: 4096, ..Default::default() }, b""),
        sample(Opcode::Write, &write, b"hello"),
        bare(Opcode::Statfs, b""),
        sample(Opcode::Release, &ReleaseIn { fh: 3, ..Default::default() }, b""),
        sample(Opcode::Fsync, &FsyncIn { fh: 3, fsync_flags: 1, padding: 0 }, b""),
        sample(Opcode::Setxattr, &setxattr, b"user.a\0abc"),
        sample(Opcode::Getxattr, &GetxattrIn { size: 10, padding: 0 }, b"user.a\0"),
        sample(Opcode::Listxattr, &GetxattrIn { size: 0, padding: 0 }, b""),
        bare(Opcode::Removexattr, b"user.a\0"),
        sample(Opcode::Flush, &FlushIn::default(), b""),
        sample(Opcode::Init, &InitIn { major: 7, minor: 45, ..Default::default() }, b""),
        sample(Opcode::Opendir, &OpenIn::default(), b""),
        sample(Opcode::Readdir, &ReadIn::default(), b""),
        sample(Opcode::Releasedir, &ReleaseIn::default(), b""),
        sample(Opcode::Fsyncdir, &FsyncIn::default(), b""),
        sample(Opcode::Getlk, &LkIn::default(), b""),
        sample(Opcode::Setlk, &LkIn::default(), b""),
        sample(Opcode::Setlkw, &LkIn::default(), b""),
        sample(Opcode::Access, &AccessIn { mask: 4, padding: 0 }, b""),
        sample(Opcode::Create, &create, b"file\0"),
        sample(Opcode::Interrupt, &InterruptIn { unique: 2 }, b""),
        sample(Opcode::Bmap, &BmapIn::default(), b""),
        bare(Opcode::Destroy, b""),
        sample(Opcode::Ioctl, &ioctl, b"\x01\x02\x03\x04"),
        sample(Opcode::Poll, &PollIn::default(), b""),
        sample(Opcode::NotifyReply, &retrieved, b"ab"),
        sample(Opcode::BatchForget, &BatchForgetIn { count: 2, dummy: 0 }, forgets.as_bytes()),
        sample(Opcode::Fallocate, &FallocateIn::default(), b""),
        sample(Opcode::Readdirplus, &ReadIn::default(), b""),
        sample(Opcode::Rename2, &Rename2In { newdir: 1, flags: 2, padding: 0 }, b"old\0new\0"),
        sample(Opcode::Lseek, &LseekIn::default(), b""),
        sample(Opcode::CopyFileRange, &CopyFileRangeIn::default(), b""),
        sample(Opcode::Setupmapping, &SetupmappingIn::default(), b""),
        sample(Opcode::Removemapping, &RemovemappingIn { count: 1 }, mapping.as_bytes()),
        sample(Opcode::Syncfs, &SyncfsIn::default(), b""),
        sample(Opcode::Tmpfile, &create, b"/\0"),
        sample(Opcode::Statx, &StatxIn { sx_mask: 0xfff, ..Default::default() }, b""),
        sample(Opcode::CopyFileRange64, &CopyFileRangeIn::default(), b""),
        sample(Opcode::CuseInit, &CuseInitIn { major: 7, ..Default::default() }, b""),
    ];
    for s in &mut samples {
        let creates =
            [Opcode::Symlink, Opcode::Mknod, Opcode::Mkdir, Opcode::Create, Opcode::Tmpfile];
        if creates.contains(&s.opcode) {
            s.ext = extensions();
        }
    }
    samples
}

const EXT: DecodeOptions = DecodeOptions { setxattr_ext: true, payload_in_pipe: false };
const PIPE: DecodeOptions = DecodeOptions { setxattr_ext: true, payload_in_pipe: true };

fn of(opcode: Opcode) -> Sample {
    samples().into_iter().find(|sample| sample.opcode == opcode).unwrap()
}

fn problem(bytes: &[u8], options: &DecodeOptions) -> Problem {
    Request::parse(bytes, options).unwrap_err().problem
}

#[test]
fn every_opcode_decodes_in_one_piece_and_split() {
    let samples = samples();
    assert_eq!(samples.len(), Opcode::COUNT);
    for (sample, &opcode) in samples.iter().zip(Opcode::ALL) {
        let bytes = sample.bytes();
        let whole = Request::parse(&bytes, &EXT).unwrap();
        assert_eq!(whole.opcode, opcode);
        assert_eq!((whole.unique, whole.nodeid, whole.pid), (0x1234, 7, 42));
        assert_eq!((whole.uid, whole.gid), (1000, 100));
        let variant = format!("{:?}", whole.body).to_lowercase();
        assert!(variant.starts_with(&opcode.name().to_lowercase().replace('_', "")), "{variant}");

        // A ring entry has 128 bytes for the structure however long it is.
        let mut op = sample.op.clone();
        op.resize(FUSE_URING_OP_IN_OUT_SZ, 0);
        let payload = [&sample.rest[..], &sample.ext].concat();
        let split = Request::parse_split(&bytes[..40], &op, &payload, &EXT).unwrap();
        assert_eq!(format!("{:?}", split.body), format!("{:?}", whole.body));
    }
}

#[test]
fn no_prefix_of_a_request_decodes() {
    for sample in samples() {
        let bytes = sample.bytes();
        for len in 0..bytes.len() {
            let mut cut = bytes[..len].to_vec();
            assert!(Request::parse(&cut, &EXT).is_err(), "{:?} cut to {len}", sample.opcode);
            // Nor does it where the header agrees with the cut, but for INIT,
            // which has a shorter form.
            if len >= 40 {
                cut[..4].copy_from_slice(&(len as u32).to_ne_bytes());
                let decoded = Request::parse(&cut, &EXT);
                let short_init = sample.opcode == Opcode::Init && len >= 56;
                assert!(decoded.is_err() || short_init, "{:?} cut to {len}", sample.opcode);
            }
        }
    }
}

#[test]
fn a_write_decodes_with_its_data_in_the_pipe() {
    let bytes = of(Opcode::Write).bytes();
    let request = Request::parse(&bytes[..80], &PIPE).unwrap();
    let Body::Write { args, data } = request.body else { panic!("{request:?}") };
    assert_eq!((args.offset, data), (4096, Payload::Pipe(5)));
    assert!(matches!(
        Request::parse(&bytes, &PIPE).unwrap().body,
        Body::Write { data: Payload::Memory(b"hello"), .. }
    ));
    // Part of the data in memory would be neither.
    assert_eq!(problem(&bytes[..82], &PIPE), Problem::TrailingBytes(2));
    assert_eq!(problem(&bytes[..80], &EXT), Problem::Length { header: 85, read: 80 });
    // Other requests must be in memory as a whole.
    let bytes = of(Opcode::Rename).bytes();
    assert!(Request::parse(&bytes[..52], &PIPE).is_err());
    let bytes = of(Opcode::Getattr).bytes();
    assert!(Request::parse(&bytes[..48], &PIPE).is_err());
}

#[test]
fn setxattr_has_two_layouts() {
    let long = of(Opcode::Setxattr);
    let mut short = of(Opcode::Setxattr);
    short.op.truncate(8);
    for (sample, options, flags) in [(long, EXT, 1), (short, DecodeOptions::default(), 0)] {
        let bytes = sample.bytes();
        let request = Request::parse(&bytes, &options).unwrap();
        let Body::Setxattr { args, name, value } = request.body else { panic!("{request:?}") };
        assert_eq!((name, value, args.flags), (&b"user.a"[..], &b"abc"[..], 1));
        assert_eq!(args.setxattr_flags, flags);
    }
}

#[test]
fn init_has_a_short_form_and_may_grow() {
    let mut init = of(Opcode::Init);
    for len in [16, 64, 80] {
        init.op.resize(len, 0xff);
        let bytes = init.bytes();
        let request = Request::parse(&bytes, &EXT).unwrap();
        let Body::Init(args) = request.body else { panic!("{request:?}") };
        assert_eq!((args.major, args.minor), (7, 45));
        assert_eq!(args.flags2, if len == 16 { 0 } else { u32::MAX });
    }
}

#[test]
fn a_creation_carries_contexts_and_groups() {
    let bytes = of(Opcode::Symlink).bytes();
    let request = Request::parse(&bytes, &EXT).unwrap();
    let Body::Symlink { name, target, ext } = request.body else { panic!("{request:?}") };
    assert_eq!((name, target), (&b"name"[..], &b"../target"[..]));
    let contexts: Vec<_> = ext.security_contexts().map(|c| (c.name, c.value)).collect();
    assert_eq!(contexts, [(&b"security.selinux"[..], &b"a:b:c\0"[..]), (b"security.x", b"")]);
    assert_eq!(ext.groups().collect::<Vec<_>>(), [27]);
}

#[test]
fn malformed_extensions_are_errors() {
    let mut mkdir = of(Opcode::Mkdir);
    let good = mkdir.ext.clone();
    let fails = |mkdir: &Sample, what: &str| match problem(&mkdir.bytes(), &EXT) {
        Problem::Extension(text) => assert_eq!(text, what),
        other => panic!("{other:?}"),
    };
    mkdir.ext[0] = 4;
    fails(&mkdir, "its size is not within the extensions");
    mkdir.ext = good.clone();
    mkdir.ext[4] = 3;
    fails(&mkdir, "a security context does not fit");
    mkdir.ext = good.clone();
    mkdir.ext[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
    fails(&mkdir, "a security context does not fit");
    mkdir.ext = good.repeat(2);
    fails(&mkdir, "the same type twice");
    mkdir.ext = good;
    let at = mkdir.ext.len() - 8;
    mkdir.ext[at..at + 4].copy_from_slice(&u32::MAX.to_ne_bytes());
    fails(&mkdir, "the groups do not fit");
    mkdir.ext[at - 4] = 33;
    fails(&mkdir, "unknown type");
    mkdir.ext.clear();
    let mut bytes = mkdir.bytes();
    bytes[36] = 200;
    assert_eq!(problem(&bytes, &EXT), Problem::Truncated { need: 1600, have: 12 });
}

#[test]
fn batch_forget_counts_must_agree() {
    let mut sample = of(Opcode::BatchForget);
    let bytes = sample.bytes();
    let request = Request::parse(&bytes, &EXT).unwrap();
    let Body::BatchForget(items) = request.body else { panic!("{request:?}") };
    assert_eq!(items.map(|one| (one.nodeid, one.nlookup)).collect::<Vec<_>>(), [(5, 1), (6, 2)]);
    sample.op = BatchForgetIn { count: u32::MAX, dummy: 0 }.as_bytes().to_vec();
    let declared = u64::from(u32::MAX) * 16;
    assert_eq!(problem(&sample.bytes(), &EXT), Problem::DataLength { declared, present: 32 });
}

#[test]
fn errors_name_the_request_and_what_to_answer() {
    let mut bytes = of(Opcode::Lookup).bytes();
    bytes[4..8].copy_from_slice(&999u32.to_ne_bytes());
    let error = Request::parse(&bytes, &EXT).unwrap_err();
    assert_eq!(error.to_string(), "request with opcode 999 (unique 4660): unknown opcode");
    assert_eq!(error.reply(), Some((0x1234, rustix::io::Errno::NOSYS)));

    let mut bytes = of(Opcode::Lookup).bytes();
    *bytes.last_mut().unwrap() = b'x';
    let error = Request::parse(&bytes, &EXT).unwrap_err();
    assert_eq!(error.to_string(), "request LOOKUP (unique 4660): a name does not end with NUL");
    assert_eq!(error.reply(), Some((0x1234, rustix::io::Errno::IO)));

    let mut forget = of(Opcode::Forget);
    forget.op.truncate(4);
    assert_eq!(Request::parse(&forget.bytes(), &EXT).unwrap_err().reply(), None);
    let error = Request::parse(&[0; 39], &EXT).unwrap_err();
    assert_eq!(error.to_string(), "request: 40 bytes are needed where 39 are left");
    assert_eq!(error.reply(), None);
}

#[test]
fn a_resent_request_is_recognized() {
    let mut bytes = of(Opcode::Statfs).bytes();
    bytes[8..16].copy_from_slice(&(FUSE_UNIQUE_RESEND | 6).to_ne_bytes());
    let request = Request::parse(&bytes, &EXT).unwrap();
    assert!(request.is_resend());
    assert_eq!(request.unique, FUSE_UNIQUE_RESEND | 6);
}

/// Writes the corpus that fuzzing starts from: one request of each opcode after
/// the byte of option bits. Run as fuzz/README.md says.
#[test]
#[ignore = "writes files where FUZZ_SEEDS says"]
fn write_fuzz_seeds() {
    let dir = std::path::PathBuf::from(std::env::var_os("FUZZ_SEEDS").expect("FUZZ_SEEDS is set"));
    std::fs::create_dir_all(&dir).unwrap();
    for sample in samples() {
        let name = sample.opcode.name().to_lowercase();
        std::fs::write(dir.join(name), [&[1][..], &sample.bytes()].concat()).unwrap();
    }
}
