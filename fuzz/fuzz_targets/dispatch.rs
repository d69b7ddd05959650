//! Every request gets exactly one reply that the kernel would accept, whatever the file system
//! returns, and nothing that a reply granted is lost. The first byte is the seed of the file
//! system's results, so that the corpus of `decode` can be used here, too.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((seed, bytes)) = input.split_first() else { return };
    defuse_session::fuzz_dispatch(u64::from(*seed).wrapping_mul(0x9e37_79b9_7f4a_7c15), bytes);
});
