//! Feeds arbitrary bytes to the decoder: it decodes or refuses them without a panic, and borrows
//! nothing from outside the input. The first byte chooses the negotiated options and the layout of
//! the rest.

#![no_main]

use defuse_wire::request::{
    DecodeOptions, DecodedRequest, RequestBody, RequestExtensions, RequestPayload,
};
use libfuzzer_sys::fuzz_target;
use std::ops::Range;

fuzz_target!(|input: &[u8]| {
    let Some((bits, bytes)) = input.split_first() else { return };
    let options = DecodeOptions { setxattr_ext: bits & 1 != 0, payload_in_pipe: bits & 2 != 0 };
    let decoded = if bits & 4 == 0 {
        DecodedRequest::parse(bytes, &options)
    } else {
        // The layout of an io_uring entry: 40 bytes, then bits 3..8 as the length of the structure
        // in units of 4, then the payload.
        let (header, rest) = bytes.split_at(bytes.len().min(40));
        let (op, payload) = rest.split_at(rest.len().min(usize::from(bits >> 3) * 4));
        DecodedRequest::parse_split(header, op, payload, &options)
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
fn check(request: &DecodedRequest<'_>, input: &[u8]) {
    let input = input.as_ptr_range();
    let inside = |bytes: &[u8]| assert!(is_within(&input, bytes));
    let name = |name: &[u8]| {
        inside(name);
        assert!(!name.contains(&0));
    };
    match request.body {
        RequestBody::Lookup { name: n }
        | RequestBody::Unlink { name: n }
        | RequestBody::Rmdir { name: n } => name(n),
        RequestBody::Removexattr { name: n } => name(n),
        RequestBody::Link { name: n, .. } | RequestBody::Getxattr { name: n, .. } => name(n),
        RequestBody::Symlink { name: n, target, ext } => {
            name(n);
            name(target);
            extensions(&ext, &input);
        }
        RequestBody::Mknod { name: n, ext, .. }
        | RequestBody::Mkdir { name: n, ext, .. }
        | RequestBody::Create { name: n, ext, .. }
        | RequestBody::Tmpfile { name: n, ext, .. } => {
            name(n);
            extensions(&ext, &input);
        }
        RequestBody::Rename { name: n, newname, .. }
        | RequestBody::Rename2 { name: n, newname, .. } => {
            name(n);
            name(newname);
        }
        RequestBody::Setxattr { args, name: n, value } => {
            name(n);
            inside(value);
            assert_eq!(value.len(), args.size as usize);
        }
        RequestBody::Ioctl { args, data } => {
            inside(data);
            assert_eq!(data.len(), args.in_size as usize);
        }
        RequestBody::Write { args, data } => payload(data, args.size, &input),
        RequestBody::NotifyReply { args, data } => payload(data, args.size, &input),
        RequestBody::BatchForget(items) => {
            inside(items.as_bytes());
            assert_eq!(items.count(), items.len());
        }
        RequestBody::Removemapping(items) => {
            inside(items.as_bytes());
            assert_eq!(items.count(), items.len());
        }
        _ => {}
    }
}

fn payload(data: RequestPayload<'_>, size: u32, input: &Range<*const u8>) {
    assert_eq!(data.len(), size as usize);
    if let RequestPayload::Memory(bytes) = data {
        assert!(is_within(input, bytes));
    }
}

fn extensions(ext: &RequestExtensions<'_>, input: &Range<*const u8>) {
    for context in ext.security_contexts() {
        assert!(is_within(input, context.name) && is_within(input, context.value));
    }
    assert!(ext.security_contexts().count() <= 31);
    assert!(is_within(input, ext.groups().as_bytes()));
}

/// True if `bytes` is in the input. An empty slice may point anywhere.
fn is_within(input: &Range<*const u8>, bytes: &[u8]) -> bool {
    let range = bytes.as_ptr_range();
    bytes.is_empty() || (input.start <= range.start && range.end <= input.end)
}
