//! Tests that every opcode decodes from the kernel's format, contiguous and split. All other input
//! is an error that names its request.

use super::samples::{RequestSample, samples};
use super::*;
use crate::abi::*;
use zerocopy::IntoBytes;

const EXT: DecodeOptions = DecodeOptions { setxattr_ext: true, payload_in_pipe: false };
const PIPE: DecodeOptions = DecodeOptions { setxattr_ext: true, payload_in_pipe: true };

fn make_sample(opcode: Opcode) -> RequestSample {
    samples().into_iter().find(|sample| sample.opcode == opcode).unwrap()
}

fn problem(bytes: &[u8], options: &DecodeOptions) -> DecodeProblem {
    DecodedRequest::parse(bytes, options).unwrap_err().problem
}

#[test]
fn every_opcode_decodes_contiguous_and_split() {
    let samples = samples();
    assert_eq!(samples.len(), Opcode::COUNT);
    for (sample, &opcode) in samples.iter().zip(Opcode::ALL) {
        let bytes = sample.bytes();
        let whole = DecodedRequest::parse(&bytes, &EXT).unwrap();
        assert_eq!(whole.opcode, opcode);
        assert_eq!((whole.unique, whole.nodeid, whole.pid), (0x1234, 7, 42));
        assert_eq!((whole.uid, whole.gid), (1000, 100));
        let variant = format!("{:?}", whole.body).to_lowercase();
        assert!(variant.starts_with(&opcode.name().to_lowercase().replace('_', "")), "{variant}");

        // A ring entry always has 128 bytes for the structure.
        let mut op = sample.op.clone();
        op.resize(FUSE_URING_OP_IN_OUT_SZ, 0);
        let payload = [&sample.rest[..], &sample.ext].concat();
        let split = DecodedRequest::parse_split(&bytes[..40], &op, &payload, &EXT).unwrap();
        assert_eq!(format!("{:?}", split.body), format!("{:?}", whole.body));
    }
}

#[test]
fn no_prefix_of_a_request_decodes() {
    for sample in samples() {
        let bytes = sample.bytes();
        for len in 0..bytes.len() {
            let mut cut = bytes[..len].to_vec();
            assert!(DecodedRequest::parse(&cut, &EXT).is_err(), "{:?} cut to {len}", sample.opcode);
            // It also fails if the header has the shorter length, except for INIT, which has a
            // shorter form.
            if len >= 40 {
                cut[..4].copy_from_slice(&(len as u32).to_ne_bytes());
                let decoded = DecodedRequest::parse(&cut, &EXT);
                let short_init = sample.opcode == Opcode::Init && len >= 56;
                assert!(decoded.is_err() || short_init, "{:?} cut to {len}", sample.opcode);
            }
        }
    }
}

#[test]
fn a_write_decodes_with_its_data_in_the_pipe() {
    let bytes = make_sample(Opcode::Write).bytes();
    let request = DecodedRequest::parse(&bytes[..80], &PIPE).unwrap();
    let RequestBody::Write { args, data } = request.body else { panic!("{request:?}") };
    assert_eq!((args.offset, data), (4096, RequestPayload::Pipe(5)));
    assert!(matches!(
        DecodedRequest::parse(&bytes, &PIPE).unwrap().body,
        RequestBody::Write { data: RequestPayload::Memory(b"hello"), .. }
    ));
    // Part of the data in memory is an error.
    assert_eq!(problem(&bytes[..82], &PIPE), DecodeProblem::TrailingBytes(2));
    assert_eq!(problem(&bytes[..80], &EXT), DecodeProblem::Length { header: 85, read: 80 });
    // Other requests must be completely in memory.
    let bytes = make_sample(Opcode::Rename).bytes();
    assert!(DecodedRequest::parse(&bytes[..52], &PIPE).is_err());
    let bytes = make_sample(Opcode::Getattr).bytes();
    assert!(DecodedRequest::parse(&bytes[..48], &PIPE).is_err());
}

#[test]
fn setxattr_has_two_layouts() {
    let long = make_sample(Opcode::Setxattr);
    let mut short = make_sample(Opcode::Setxattr);
    short.op.truncate(8);
    for (sample, options, flags) in [(long, EXT, 1), (short, DecodeOptions::default(), 0)] {
        let bytes = sample.bytes();
        let request = DecodedRequest::parse(&bytes, &options).unwrap();
        let RequestBody::Setxattr { args, name, value } = request.body else {
            panic!("{request:?}")
        };
        assert_eq!((name, value, args.flags), (&b"user.a"[..], &b"abc"[..], 1));
        assert_eq!(args.setxattr_flags, flags);
    }
}

#[test]
fn init_has_a_short_form_and_may_grow() {
    let mut init = make_sample(Opcode::Init);
    for len in [16, 64, 80] {
        init.op.resize(len, 0xff);
        let bytes = init.bytes();
        let request = DecodedRequest::parse(&bytes, &EXT).unwrap();
        let RequestBody::Init(args) = request.body else { panic!("{request:?}") };
        assert_eq!((args.major, args.minor), (7, 45));
        assert_eq!(args.flags2, if len == 16 { 0 } else { u32::MAX });
    }
}

#[test]
fn a_creation_carries_contexts_and_groups() {
    let bytes = make_sample(Opcode::Symlink).bytes();
    let request = DecodedRequest::parse(&bytes, &EXT).unwrap();
    let RequestBody::Symlink { name, target, ext } = request.body else { panic!("{request:?}") };
    assert_eq!((name, target), (&b"name"[..], &b"../target"[..]));
    let contexts: Vec<_> = ext.security_contexts().map(|c| (c.name, c.value)).collect();
    assert_eq!(contexts, [(&b"security.selinux"[..], &b"a:b:c\0"[..]), (b"security.x", b"")]);
    assert_eq!(ext.groups().collect::<Vec<_>>(), [27]);
}

#[test]
fn malformed_extensions_are_errors() {
    let mut mkdir = make_sample(Opcode::Mkdir);
    let good = mkdir.ext.clone();
    let fails = |mkdir: &RequestSample, what: &str| match problem(&mkdir.bytes(), &EXT) {
        DecodeProblem::Extension(text) => assert_eq!(text, what),
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
    assert_eq!(problem(&bytes, &EXT), DecodeProblem::Truncated { need: 1600, have: 12 });
}

#[test]
fn batch_forget_counts_must_agree() {
    let mut sample = make_sample(Opcode::BatchForget);
    let bytes = sample.bytes();
    let request = DecodedRequest::parse(&bytes, &EXT).unwrap();
    let RequestBody::BatchForget(items) = request.body else { panic!("{request:?}") };
    assert_eq!(items.map(|one| (one.nodeid, one.nlookup)).collect::<Vec<_>>(), [(5, 1), (6, 2)]);
    sample.op = BatchForgetIn { count: u32::MAX, dummy: 0 }.as_bytes().to_vec();
    let declared = u64::from(u32::MAX) * 16;
    assert_eq!(problem(&sample.bytes(), &EXT), DecodeProblem::DataLength { declared, present: 32 });
}

#[test]
fn errors_have_the_request_and_the_reply() {
    let mut bytes = make_sample(Opcode::Lookup).bytes();
    bytes[4..8].copy_from_slice(&999u32.to_ne_bytes());
    let error = DecodedRequest::parse(&bytes, &EXT).unwrap_err();
    assert_eq!(error.to_string(), "request with opcode 999 (unique 4660): unknown opcode");
    assert_eq!(error.reply(), Some((0x1234, rustix::io::Errno::NOSYS)));

    let mut bytes = make_sample(Opcode::Lookup).bytes();
    *bytes.last_mut().unwrap() = b'x';
    let error = DecodedRequest::parse(&bytes, &EXT).unwrap_err();
    assert_eq!(error.to_string(), "request LOOKUP (unique 4660): a name does not end with NUL");
    assert_eq!(error.reply(), Some((0x1234, rustix::io::Errno::IO)));

    let mut forget = make_sample(Opcode::Forget);
    forget.op.truncate(4);
    assert_eq!(DecodedRequest::parse(&forget.bytes(), &EXT).unwrap_err().reply(), None);
    let error = DecodedRequest::parse(&[0; 39], &EXT).unwrap_err();
    assert_eq!(error.to_string(), "request: 40 bytes are needed, 39 are left");
    assert_eq!(error.reply(), None);
}

#[test]
fn a_resent_request_is_recognized() {
    let mut bytes = make_sample(Opcode::Statfs).bytes();
    bytes[8..16].copy_from_slice(&(FUSE_UNIQUE_RESEND | 6).to_ne_bytes());
    let request = DecodedRequest::parse(&bytes, &EXT).unwrap();
    assert!(request.is_resend());
    assert_eq!(request.unique, FUSE_UNIQUE_RESEND | 6);
}

/// Writes the seeds for fuzzing: one request of each opcode after the byte of option bits. Run as
/// described in fuzz/README.md.
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
