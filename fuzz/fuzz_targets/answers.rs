//! Feeds arbitrary server replies to every call of the client: no panic, and never more data than
//! requested. The first byte chooses the call.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((choice, answers)) = input.split_first() else { return };
    defuse_remote::fuzz_answer(*choice, answers);
});
