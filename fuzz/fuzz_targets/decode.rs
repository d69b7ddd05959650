//! Feeds arbitrary bytes to the decoder: it decodes or refuses them without a panic, and borrows
//! nothing from outside the input. The first byte chooses the negotiated options and the layout of
//! the rest.

#![no_main]

use defuse_wire::request::{Body, DecodeOptions, Extensions, Payload, Request};
use libfuzzer_sys::fuzz_target;
use std::ops::Range;

fuzz_target!(|input: &[u8]| {
    let Some((bits, bytes)) = input.split_first() else { return };
    let options = DecodeOptions { setxattr_ext: bits & 1 != 0, payload_in_pipe: bits & 2 != 0 };
    let decoded = if bits & 4 == 0 {
        Request::parse(bytes, &options)
    } else {
        // The layout of an io_uring entry: 40 bytes, then bits 3..8 as the length of the structure
        // in units of 4, then the payload.
        let (header, rest) = bytes.split_at(bytes.len().min(40));
        let (op, payload) = rest.split_at(rest.len().min(usize::from(bits >> 3) * 4));
        Request::parse_split(header, op, payload, &options)
    };
    match decoded {
        Ok(request) => check(&request, bytes),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(error.unique.is_some(), bytes.len() >= 40);
            let _ = error.reply();
        }
    }
});

/// Checks that everything a request borrows is in the input, and that all iterators end.
fn check(request: &Request<'_>, input: &[u8]) {
    let input = input.as_ptr_range();
    let inside = |bytes: &[u8]| assert!(within(&input, bytes));
    let name = |name: &[u8]| {
        inside(name);
        assert!(!name.contains(&0));
    };
    match request.body {
        Body::Lookup { name: n } | Body::Unlink { name: n } | Body::Rmdir { name: n } => name(n),
        Body::Removexattr { name: n } => name(n),
        Body::Link { name: n, .. } | Body::Getxattr { name: n, .. } => name(n),
        Body::Symlink { name: n, target, ext } => {
            name(n);
            name(target);
            extensions(&ext, &input);
        }
        Body::Mknod { name: n, ext, .. }
        | Body::Mkdir { name: n, ext, .. }
        | Body::Create { name: n, ext, .. }
        | Body::Tmpfile { name: n, ext, .. } => {
            name(n);
            extensions(&ext, &input);
        }
        Body::Rename { name: n, newname, .. } | Body::Rename2 { name: n, newname, .. } => {
            name(n);
            name(newname);
        }
        Body::Setxattr { args, name: n, value } => {
            name(n);
            inside(value);
            assert_eq!(value.len(), args.size as usize);
        }
        Body::Ioctl { args, data } => {
            inside(data);
            assert_eq!(data.len(), args.in_size as usize);
        }
        Body::Write { args, data } => payload(data, args.size, &input),
        Body::NotifyReply { args, data } => payload(data, args.size, &input),
        Body::BatchForget(items) => {
            inside(items.as_bytes());
            assert_eq!(items.count(), items.len());
        }
        Body::Removemapping(items) => {
            inside(items.as_bytes());
            assert_eq!(items.count(), items.len());
        }
        _ => {}
    }
}

fn payload(data: Payload<'_>, size: u32, input: &Range<*const u8>) {
    assert_eq!(data.len(), size as usize);
    if let Payload::Memory(bytes) = data {
        assert!(within(input, bytes));
    }
}

fn extensions(ext: &Extensions<'_>, input: &Range<*const u8>) {
    for context in ext.security_contexts() {
        assert!(within(input, context.name) && within(input, context.value));
    }
    assert!(ext.security_contexts().count() <= 31);
    assert!(within(input, ext.groups().as_bytes()));
}

/// True if `bytes` is in the input. An empty slice may point anywhere.
fn within(input: &Range<*const u8>, bytes: &[u8]) -> bool {
    let range = bytes.as_ptr_range();
    bytes.is_empty() || (input.start <= range.start && range.end <= input.end)
}
