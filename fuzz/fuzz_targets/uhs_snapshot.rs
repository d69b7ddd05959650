//! The snapshot of a small uhs image with any changes and right checksums: it is mounted and used.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    // Few changes show more than many.
    defuse_uhs::fuzz_snapshot(&script[..script.len().min(24)]);
});
