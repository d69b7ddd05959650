//! Any answers of a server to any call of the client: no panic, and no more taken than was asked for.
//! The first byte chooses the call.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((choice, answers)) = input.split_first() else { return };
    defuse_fuse::client::fuzz_answer(*choice, answers);
});
