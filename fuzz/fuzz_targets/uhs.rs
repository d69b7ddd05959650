//! A small image of a uhs file system with any changes, with right checksums and without: it is
//! mounted, walked, checked and repaired, and after the repair nothing is wrong any more.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    // Few changes show more than many.
    defuse_uhs::fuzz_image(&script[..script.len().min(64)]);
});
